"""Masks by layer type, and models with chunked or sparse attention, beside the untouched models' plain forwards."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from eagle import Target, generate
from eagle.target.attention import Masks, attention_limits
from eagle.target.cache import TreeCache
from eagle.target.slots import Rows
from tests.every_type import SPECIAL, build
from tests.families import RandomTrees, own_answer, random_tokens
from tests.tree_rounds import make_reader, worst_difference

INDEXED = ["deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4"]
EXACT = 1e-5


def build_small(model_type: str, **values: Any) -> Any:
    """A tiny random model; sparse ones have 32 index heads, because with 4 many columns tie at ReLU's zero."""
    with pytest.MonkeyPatch.context() as patch:
        special = SPECIAL.get(model_type, {}) | values | {"index_n_heads": 32}
        patch.setitem(SPECIAL, model_type, special)
        return build(model_type)


@pytest.fixture(scope="module")
def indexed() -> Any:
    """A model whose attention picks the best 8 columns by keys of their own."""
    return build_small("deepseek_v32", first_k_dense_replace=4)


def sees(kind: str, query: int, column: int, window: int, chunk: int) -> bool:
    """Whether a layer of this type lets a position see an earlier one."""
    if "sliding" in kind or "compressed" in kind:
        return query - column < window
    return query // chunk == column // chunk if "chunked" in kind else True


def test_each_layer_type_gets_its_mask(indexed: Any) -> None:
    """Sliding, chunked and full masks hold for siblings at one position; layers with a state get None, not first."""
    attending = ["chunked_attention", "full_attention", "indexed_attention", "sliding_attention"]
    kinds = ["conv", *attending, "linear_attention"]
    config = SimpleNamespace(layer_types=kinds, sliding_window=3, attention_chunk_size=4)
    starts, parents, depths = [9, 6], [-1, 0, 0, 1], [0, 1, 1, 2]
    seen = torch.eye(4, dtype=torch.bool)
    seen[1:, 0] = seen[3, 1] = True
    positions = torch.tensor(starts)[:, None] + torch.tensor(depths)
    masks = Masks(indexed, config, grouped=False)(starts, positions, seen.expand(2, -1, -1))
    assert next(iter(masks.values())) is not None
    assert masks["linear_attention"] is None and masks["conv"] is None and masks["mamba"] is None
    assert masks["full_attention"] is masks["indexed_attention"]
    for kind in [*attending, "hybrid_sliding", "compressed_sparse_attention"]:
        for row, start in enumerate(starts):
            for node in range(len(parents)):
                for column in range(max(starts) + 4):
                    if column < start:
                        expected, place = True, column
                    else:
                        own = column - start
                        expected = own < 4 and bool(seen[node, own])
                        place = start + depths[own] if own < 4 else column
                    expected = expected and sees(kind, start + depths[node], place, 3, 4)
                    assert bool(masks[kind][row, 0, node, column] == 0) == expected, (
                        kind,
                        row,
                        node,
                        column,
                    )


def test_the_check_crosses_what_bounds_attention() -> None:
    """Windows, chunks, the number of indexed columns, and blocks of several tokens."""
    assert attention_limits(AutoConfig.for_model("deepseek_v32")) >= {2048}
    assert attention_limits(AutoConfig.for_model("minimax_m3_vl_text")) >= {16 * 128}
    assert attention_limits(AutoConfig.for_model("llama4_text")) >= {8192}


@pytest.mark.parametrize(
    ("lengths", "pieces"),
    [((21,), 1), pytest.param((21,), 3, marks=pytest.mark.slow), ((21, 15, 30), 1)],
)
def test_indexed_attention_reads_trees(indexed: Any, lengths: Sequence[int], pieces: int) -> None:
    """Whole prompts or pieces of one, alone and beside texts of other lengths."""
    assert worst_difference(indexed, make_reader(indexed), lengths, pieces) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [*INDEXED, "minimax_m3_vl_text", "gemma3n_text"])
@pytest.mark.parametrize("lengths", [(21,), (21, 15, 30)])
def test_every_indexed_type_reads_trees(model_type: str, lengths: Sequence[int]) -> None:
    """Their check passes, and three rounds of trees equal plain forwards."""
    model = build_small(model_type)
    reader = make_reader(model)
    reader.check(rows=2)
    assert reader.reads_rows
    assert worst_difference(model, reader, lengths) < EXACT


def test_an_index_key_left_in_its_place_is_seen(
    indexed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept nodes' index keys move along with their keys and values, or later states are others."""
    copy_columns = TreeCache._move

    def skip_index(self: TreeCache, *moves: Any) -> None:
        buffers = self.buffers
        self.buffers = [
            rows for layer in self.layers for rows in (layer.key_rows, layer.value_rows)
        ]
        copy_columns(self, *moves)
        self.buffers = buffers

    monkeypatch.setattr(TreeCache, "_move", skip_index)
    assert worst_difference(indexed, make_reader(indexed)) > 100 * EXACT


@pytest.mark.slow
def test_positions_of_rejected_drafts_do_not_stay() -> None:
    """Qwen4-Exp has those of the whole text in its cache, before transformers 5.21 in no layer of it."""
    model, prompt = build("qwen4_exp_text"), random_tokens(9, seed=1)
    answer = own_answer(model, prompt, 24)
    trees = RandomTrees(answer)
    assert (
        generate(Target(copy.deepcopy(model)), trees, prompt, max_new_tokens=24, stop=[]).tokens
        == answer
    )


def test_a_copied_text_brings_its_index_keys(indexed: Any) -> None:
    """A copy in another slot or another cache answers like the text itself, and its bytes are counted."""
    reader, tokens = make_reader(indexed), torch.arange(3, 24)
    cache = reader.new_cache()
    cache.reserve(2, 40)
    cache.set_write_offset([0])
    with torch.inference_mode():
        reader(tokens[None], torch.arange(21)[None], None, cache)
        cache.lengths = [21, 0]
        cache.copy(0, 1)
        other = reader.new_cache()
        columns = torch.stack([torch.zeros(21, dtype=torch.long), torch.arange(21)])
        other.copy_columns(cache, columns, columns)
        other.length = 21
        cache.set_write_offset([0, 1])
        first, second = reader(torch.full((2, 1), 7), torch.full((2, 1), 21), None, cache)
        third = reader(torch.full((1, 1), 7), torch.full((1, 1), 21), None, other)[0]
    assert (first - second).norm() < EXACT * first.norm() and (
        first - third
    ).norm() < EXACT * first.norm()
    index_keys = [layer.indexer_rows for layer in cache.layers]
    assert all(isinstance(rows, Rows) and rows in cache.buffers for rows in index_keys)
    plain = sum(
        rows.buffer.shape[1] * rows.buffer.shape[3] * 4
        for rows in cache.buffers[: 2 * len(index_keys)]
    )
    assert cache.column_bytes == plain + sum(rows.buffer.shape[3] * 4 for rows in index_keys)
