"""Blocks with normed heads are Qwen3's, blocks with biases Qwen2's: plain, cached and in training."""

# T tokens, H width

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen3Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from eagle.drafters.parts.decoder_block import Cache, NormedBlock, Rotary, head_shape
from eagle.drafters.parts.spans import Spans
from eagle.drafters.parts.text_blocks import key_value, position_tables, read_rows
from eagle.target.slots import SlotCache

SIZES = {
    "vocab_size": 32,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "head_dim": 8,
}
KINDS = {
    "qk_norm": (Qwen3Config, Qwen3DecoderLayer),
    "qkv_bias": (Qwen2Config, Qwen2DecoderLayer),
}


def make_both(kind: str, seed: int = 0) -> tuple[Any, NormedBlock, Rotary]:
    """A layer of transformers' with random weights, and a block that holds the same ones."""
    torch.manual_seed(seed)
    make_config, make_layer = KINDS[kind]
    sizes = {**SIZES, "head_dim": 8 if kind == "qk_norm" else 6}
    config = make_config(
        **sizes, num_key_value_heads=2, num_hidden_layers=1, attn_implementation="eager"
    )
    layer = make_layer(config, 0).double()
    for part in layer.parameters():
        torch.nn.init.normal_(part, std=0.3)
    shape = head_shape(config, **{kind: True})
    block = NormedBlock(shape).double()
    block.load_state_dict(layer.state_dict())
    return layer, block, Rotary(shape)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", ["plain", "cached", "training"])
def test_blocks_are_those_of_transformers(kind: str, path: str) -> None:
    layer, block, rotary = make_both(kind)
    x, count = torch.randn(1, 9, 24, dtype=torch.float64), 9
    tables = rotary(x, torch.arange(count)[None])
    mask = torch.full((1, 1, count, count), -torch.inf, dtype=torch.float64).triu(1)
    want = layer(x, attention_mask=mask, position_embeddings=tables)
    with torch.no_grad():
        if path == "plain":
            got = block(x, tables, None, None)
        elif path == "cached":
            owner = SlotCache()
            cache = Cache(owner, block)
            owner.set_write_offset([0], [0])
            first = block(x[:, :5], tuple(part[:, :5] for part in tables), None, cache)
            owner.set_write_offset([0], [5])
            rest = block(x[:, 5:], tuple(part[:, 5:] for part in tables), mask[:, :, 5:], cache)
            got = torch.cat([first, rest], dim=1)
        else:
            spans = Spans.of([torch.ones(count, dtype=torch.bool)], x.device)
            tables_at = position_tables(rotary, x[0], count)(torch.arange(count))
            inputs = block.inputs(x[0])
            key, value = key_value(block, inputs, tables_at)
            got = read_rows(
                block, inputs, tables_at, (key.contiguous(), value.contiguous()), spans
            )[None]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)  # their norms compute in fp32


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_without_its_further_parts_is_another(kind: str) -> None:
    layer, block, rotary = make_both(kind)
    x = torch.randn(1, 5, 24, dtype=torch.float64)
    plain = NormedBlock(head_shape(layer.self_attn.config)).double()
    plain.load_state_dict(
        {name: part for name, part in block.state_dict().items() if name in plain.state_dict()}
    )
    tables = rotary(x, torch.arange(5)[None])
    assert not torch.allclose(plain(x, tables, None, None), block(x, tables, None, None), atol=1e-3)
