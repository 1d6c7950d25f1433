"""What a head's attention gives to the row that asks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle.core.tree import chain_paths
from eagle.data.examples import collate
from eagle.doctor.own_token import first_level, own_shares
from eagle.drafters.parts.blocks import Attention
from eagle.drafters.parts.validation import figures
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
    found = own_shares(attention, read, (cosine, sine))
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
def test_agreement_is_that_of_validation(name: str, tmp_path: Path) -> None:
    """At every slot that counts, of texts of several lengths, and a share for each."""
    head, frozen = new_head(tmp_path, name).eval(), frozen_head(torch.float32)
    batch = collate(texts_of(SPANS, torch.float32), TAPS)
    shares, agreed = first_level(head, frozen, batch)
    sums = head.validate(batch, frozen, {"chain": chain_paths(1)})
    assert shares.shape == (4, len(agreed)) and len(agreed) == int(sums["slots"])
    assert float(agreed.float().mean()) == pytest.approx(figures(sums)["agreement"])
