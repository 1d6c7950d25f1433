"""Blocks with normed heads are Qwen3's and blocks with biases Qwen2's: whole, cached, in training."""

# T tokens, H hidden

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen3Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from eagle.drafters.parts.decoder_block import Cache, NormedBlock, Rotary, head_shape
from eagle.drafters.parts.sequence_blocks import key_value, position_tables, read_rows
from eagle.drafters.parts.spans import Spans
from eagle.target.slots import RowCache

LENGTH = 9
HIDDEN = 24
# Qwen2 has no head_dim of its own: it is HIDDEN / 4
KINDS: dict[str, tuple[Any, Any, int]] = {
    "qk_norm": (Qwen3Config, Qwen3DecoderLayer, 8),
    "qkv_bias": (Qwen2Config, Qwen2DecoderLayer, 6),
}


def make_both(kind: str) -> tuple[Any, NormedBlock, Rotary]:
    """Return a layer of transformers with random weights, and our block with the same weights."""
    torch.manual_seed(0)
    make_config, make_layer, head_dim = KINDS[kind]
    config = make_config(
        vocab_size=32,
        hidden_size=HIDDEN,
        intermediate_size=40,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        attn_implementation="eager",
    )
    layer = make_layer(config, 0).double()
    # norms and biases too: as they start, leaving them out would change nothing
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    shape = head_shape(config, **{kind: True})
    block = NormedBlock(shape).double()
    block.load_state_dict(layer.state_dict())
    return layer, block, Rotary(shape)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", ["whole", "cached", "training"])
def test_blocks_are_those_of_transformers(kind: str, path: str) -> None:
    """A sequence read at once, in two pieces with a cache, and as training reads it."""
    layer, block, rotary = make_both(kind)
    x = torch.randn(1, LENGTH, HIDDEN, dtype=torch.float64)
    tables = rotary(x, torch.arange(LENGTH)[None])
    mask = torch.full((1, 1, LENGTH, LENGTH), -torch.inf, dtype=torch.float64).triu(1)
    expected = layer(x, attention_mask=mask, position_embeddings=tables)
    with torch.no_grad():
        if path == "whole":
            got = block(x, tables, None, None)
        elif path == "cached":
            owner = RowCache()
            cache = Cache(owner, block)
            first_tables = tuple(table[:, :5] for table in tables)
            later_tables = tuple(table[:, 5:] for table in tables)
            owner.set_write_offset([0], [0])
            first = block(x[:, :5], first_tables, None, cache)
            owner.set_write_offset([0], [5])
            later = block(x[:, 5:], later_tables, mask[:, :, 5:], cache)
            got = torch.cat([first, later], dim=1)
        else:
            spans = Spans.of([torch.ones(LENGTH, dtype=torch.bool)], x.device)
            flat_tables = position_tables(rotary, x[0], LENGTH)(torch.arange(LENGTH))
            inputs = block.inputs(x[0])
            key, value = key_value(block, inputs, flat_tables)
            pair = (key.contiguous(), value.contiguous())
            got = read_rows(block, inputs, flat_tables, pair, spans=spans)[None]
    # norms compute in fp32 whatever they are given
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
