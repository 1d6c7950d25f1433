"""Masks by layer type, and models with chunked or sparse attention, beside the untouched models' plain forwards."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from eagle import Target
from eagle.target.attention import Masks, attention_limits
from eagle.target.cache import TreeCache
from eagle.target.slots import CacheBuffer
from eagle.target.trees.attention_rows import AttentionRows
from eagle.target.trees.read_modes import ROWS
from tests.every_type import SPECIAL, build
from tests.families import RandomTrees, own_answer, random_tokens
from tests.target.decoded import decode, is_close
from tests.tree_rounds import make_reader, worst_difference

INDEXED = ["deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4"]
EXACT = 1e-5
# models whose attention counts positions by the length of their cache
COUNTING: dict[str, dict[str, Any]] = {
    # the scale of attention grows with every other token here
    "llama4_text": {
        "floor_scale": 2,
        "attn_scale": 0.5,
        "no_rope_layers": [1, 0, 1, 0],
        "first_k_dense_replace": 4,
    },
    "inkling_text": {},
}


def build_small(model_type: str, **values: Any) -> Any:
    """Return a tiny random model; sparse ones have 32 index heads, because with 4 many columns tie at ReLU's zero."""
    with pytest.MonkeyPatch.context() as patch:
        special = SPECIAL.get(model_type, {}) | values | {"index_n_heads": 32}
        patch.setitem(SPECIAL, model_type, special)
        return build(model_type)


@pytest.fixture(scope="module")
def indexed() -> Any:
    """Return a model whose attention picks the best 8 columns by keys of their own."""
    return build_small("deepseek_v32", first_k_dense_replace=4)


@pytest.fixture(scope="module")
def local() -> Any:
    """Return a model whose local attention takes a fixed band of the cache's columns."""
    return build_small("gpt_neo", attention_types=[[["global", "local"], 2]])


def can_see(kind: str, query: int, key: int) -> bool:
    """Tell whether a layer of this type lets a position see an earlier one: windows of 3, chunks of 4."""
    if "sliding" in kind or "compressed" in kind:
        return query - key < 3
    if "chunked" in kind:
        return query // 4 == key // 4
    return True


def test_each_layer_type_gets_its_mask(indexed: Any) -> None:
    """Sliding, chunked and full masks hold for siblings at one position; layers with a state get none."""
    attending = ["chunked_attention", "full_attention", "indexed_attention", "sliding_attention"]
    kinds = ["conv", *attending, "linear_attention"]
    config = SimpleNamespace(
        layer_types=kinds,
        sliding_window=3,
        attention_chunk_size=4,
    )
    # a root, its two children, and a child of the first of them
    starts = [9, 6]
    depths = [0, 1, 1, 2]
    seen = [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [1, 0, 1, 0],
        [1, 1, 0, 1],
    ]
    ancestors = torch.tensor(seen).bool()
    positions = torch.tensor(starts)[:, None] + torch.tensor(depths)
    masks = Masks(indexed, config, grouped=False)(starts, positions, ancestors.expand(2, -1, -1))

    assert next(iter(masks.values())) is not None

    for kind in ("linear_attention", "conv", "mamba"):
        assert masks[kind] is None

    assert masks["full_attention"] is masks["indexed_attention"]

    for kind in [*attending, "hybrid_sliding", "compressed_sparse_attention"]:
        for row, start in enumerate(starts):
            # the shorter sequence has columns between its text and the end, which nothing may see
            for node, depth in enumerate(depths):
                expected = [can_see(kind, start + depth, key) for key in range(start)]
                for other in range(4):
                    is_near = can_see(kind, start + depth, start + depths[other])
                    expected.append(bool(ancestors[node, other]) and is_near)
                expected += [False] * (max(starts) - start)
                assert (masks[kind][row, 0, node] == 0).tolist() == expected, (kind, row, node)


def test_the_check_crosses_what_bounds_attention() -> None:
    """Windows, chunks, the number of indexed columns, and blocks of several tokens."""
    limits = {
        "deepseek_v32": 2048,
        "minimax_m3_vl_text": 16 * 128,
        "llama4_text": 8192,
    }
    for model_type, limit in limits.items():
        assert limit in attention_limits(AutoConfig.for_model(model_type))


@pytest.mark.parametrize(
    ("lengths", "pieces"),
    [((21,), 1), pytest.param((21,), 3, marks=pytest.mark.slow), ((21, 15, 30), 1)],
)
def test_indexed_attention_reads_trees(indexed: Any, lengths: Sequence[int], pieces: int) -> None:
    """Whole prompts or pieces of one, alone and in a batch of other lengths."""
    assert worst_difference(indexed, make_reader(indexed), lengths, pieces) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [*INDEXED, "minimax_m3_vl_text", "gemma3n_text"])
def test_every_indexed_type_reads_trees(model_type: str) -> None:
    """Their check passes, and three rounds of trees equal plain forwards."""
    model = build_small(model_type)
    reader = make_reader(model)
    reader.check(rows=2)
    assert reader.reads_rows
    assert worst_difference(model, reader, (21, 15, 30)) < EXACT


def test_an_index_key_left_behind_is_seen(indexed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: the index keys of kept nodes do not move with their keys and values."""
    move = TreeCache._move

    def skip_index(self: TreeCache, *moves: Any) -> None:
        buffers = self.buffers
        index_keys = [layer.indexer_buffer for layer in self.layers]
        self.buffers = [rows for rows in buffers if rows not in index_keys]
        move(self, *moves)
        self.buffers = buffers

    monkeypatch.setattr(TreeCache, "_move", skip_index)

    assert worst_difference(indexed, make_reader(indexed)) > 100 * EXACT


@pytest.mark.slow
def test_positions_of_rejected_drafts_do_not_stay() -> None:
    """Qwen4-Exp has those of the whole sequence in its cache, before transformers 5.21 in no layer of it."""
    model = build("qwen4_exp_text")
    prompt = random_tokens(9, seed=1)
    answer = own_answer(model, prompt, 24)
    target = Target(copy.deepcopy(model))
    assert decode(target, RandomTrees(answer), prompt, 24) == answer


def test_a_copied_sequence_brings_its_index_keys(indexed: Any) -> None:
    """A copy in another slot or another cache answers like the sequence itself, and its bytes are counted."""
    reader = make_reader(indexed)
    prompt = torch.arange(3, 24)
    count = len(prompt)
    cache = reader.new_cache()
    cache.reserve(2, 40)
    cache.set_write_offset([0])

    with torch.inference_mode():
        reader(prompt[None], torch.arange(count)[None], None, cache)
        cache.lengths = [count, 0]
        cache.copy(0, 1)
        other = reader.new_cache()
        columns = torch.stack([torch.zeros(count, dtype=torch.long), torch.arange(count)])
        other.copy_columns(cache, columns, columns)
        other.length = count
        cache.set_write_offset([0, 1])
        token = torch.full((2, 1), 7)
        position = torch.full((2, 1), count)
        first, second = reader(token, position, None, cache)
        third = reader(token[:1], position[:1], None, other)[0]

    assert is_close(second, first)
    assert is_close(third, first)

    # the bytes of a column: keys and values of each head, and one index key a layer, in fp32
    index_keys = [layer.indexer_buffer for layer in cache.layers]

    assert all(isinstance(rows, CacheBuffer) and rows in cache.buffers for rows in index_keys)

    numbers = 0

    for rows in cache.buffers:
        heads = 1 if rows in index_keys else rows.tensor.shape[1]
        numbers += heads * rows.tensor.shape[3]

    assert cache.column_bytes == 4 * numbers


# -- attention that orders, pools or compresses its columns by itself, over paths with copies of its cache -------------


@pytest.mark.parametrize(
    ("lengths", "pieces"),
    [((21,), 1), pytest.param((21,), 3, marks=pytest.mark.slow), ((21, 15, 30), 1)],
)
def test_attention_by_the_order_of_columns_reads_trees(
    local: Any,
    lengths: Sequence[int],
    pieces: int,
) -> None:
    """Its check takes it off the mask; several rounds of trees equal plain forwards, beyond its window of 8."""
    reader = make_reader(local)
    reader.check(rows=2)
    assert ROWS in reader.mode.extras
    assert reader.reads_rows
    assert worst_difference(local, reader, lengths, pieces) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize(("length", "pieces"), [(21, 1), (140, 3)])
def test_compressed_columns_read_trees(length: int, pieces: int) -> None:
    """Every 4 and every 128 tokens become a column, of which the best 8 are attended to, besides a window of 8."""
    model = build_small("deepseek_v4")
    reader = make_reader(model)
    reader.check(rows=2)
    assert ROWS in reader.mode.extras
    assert worst_difference(model, reader, (length,), pieces) < EXACT


def test_a_siblings_cache_is_seen(local: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: a path goes on from a cache with another's columns in it."""
    reader = make_reader(local)
    reader.check(rows=2)
    run = AttentionRows.run

    def run_rolled(self: AttentionRows, *args: Any, **named: Any) -> Any:
        output, state = run(self, *args, **named)
        if ("layer", 0) in state:
            state["layer", 0].keys = state["layer", 0].keys.roll(1, dims=2)
        return output, state

    monkeypatch.setattr(AttentionRows, "run", run_rolled)

    assert worst_difference(local, reader) > 100 * EXACT
