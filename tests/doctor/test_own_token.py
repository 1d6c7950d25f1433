"""What a head's attention gives to the row that asks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle.core.examples import collate
from eagle.doctor.own_token import own_row_shares, own_token_shares
from eagle.drafters.parts.decoder_block import Attention
from tests.unrolled_heads import SPANS, TAPS, frozen_head, new_head, texts_of


def turned(row: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """One head's row at its place."""
    low, high = row.chunk(2)
    return row * cosine + torch.cat([-high, low]) * sine


def test_a_share_is_that_of_a_loop_over_queries() -> None:
    """Two query heads over one key head, row by row."""
    torch.manual_seed(0)
    shape = LlamaConfig(hidden_size=16, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    attention, read = Attention(shape), torch.randn(1, 5, 16)
    cosine, sine = LlamaRotaryEmbedding(shape)(read, torch.arange(5)[None])
    found = own_row_shares(attention, read, (cosine, sine))
    for head in range(2):
        for place in range(5):
            query = (attention.q_proj.weight @ read[0, place])[8 * head : 8 * head + 8]
            query = turned(query, cosine[0, place], sine[0, place])
            keys = [
                turned(attention.k_proj.weight @ read[0, seen], cosine[0, seen], sine[0, seen])
                for seen in range(place + 1)
            ]
            scores = torch.stack([query @ key / 8**0.5 for key in keys])
            expected = scores.exp()[-1] / scores.exp().sum()
            torch.testing.assert_close(found[head, place], expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["eagle3", "eagle3 draft vocabulary"])
def test_a_share_of_every_supervised_slot(name: str, tmp_path: Path) -> None:
    """Of texts of several lengths, read as the head drafts; text by text as for that text alone."""
    head, frozen = new_head(tmp_path, name).eval(), frozen_head(torch.float32)
    texts = texts_of(SPANS, torch.float32)
    shares = own_token_shares(head, frozen, collate(texts, TAPS))
    alone = [own_token_shares(head, frozen, collate([text], TAPS)) for text in texts if text.loss_mask[2:].any()]
    assert shares is not None and shares.shape == (4, collate(texts, TAPS).slots)
    assert torch.equal(shares, torch.cat(alone, dim=-1)) and 0 < float(shares.min()) <= float(shares.max()) <= 1


def test_a_head_that_fuses_token_and_state_has_none(tmp_path: Path) -> None:
    """The network of EAGLE-1 knows the token it stands on without attention."""
    head, batch = new_head(tmp_path, "hass").eval(), collate(texts_of(SPANS, torch.float32), TAPS)
    assert own_token_shares(head, frozen_head(torch.float32), batch) is None
