"""Earlier keys that are read in blocks: as a loop over queries says, and to the bit as steps by one token read them.

Tests of bits ask nothing where the kernel does not keep them: then nothing is read in blocks.
"""

# B sequences, N new tokens, S keys, H heads, K key/value heads, D head width

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eagle import Target
from eagle.target.bits import blocks
from eagle.target.bits.blocks import BLOCK, LAG, keeps_bits, reading_blocks
from eagle.target.bits.invariant import invariant_attention
from eagle.target.bits.variance import find_variance
from tests.families import build

WIDTH = 32
LENGTH = 2 * BLOCK + LAG + 40  # keys before a query that reads two blocks
TREE = torch.tensor([-1, 0, 0, 1, 2, 4, 4, 6])  # parents


def draw(
    count: int, length: int, heads: int = 6, kv_heads: int = 2, sequences: int = 1
) -> tuple[Tensor, ...]:
    """Queries [B, H, N, D], keys and values [B, K, S, D] in bf16."""
    torch.manual_seed(count * 1000 + length)
    query = torch.randn(sequences, heads, count, WIDTH).bfloat16()
    key, value = torch.randn(2, sequences, kv_heads, length, WIDTH).bfloat16()
    return query, key, value


def additive(seen: Tensor) -> Tensor:
    """An additive mask in bf16 that hides all but what is seen."""
    return torch.zeros(seen.shape).bfloat16().masked_fill_(~seen, torch.finfo(torch.bfloat16).min)


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, starts: list[int], **options: Any
) -> Tensor:
    """[B, N, H, D] of a chain after `starts` cached keys."""
    count = query.shape[2]
    positions = torch.tensor(starts)[:, None] + torch.arange(count)
    with reading_blocks(starts, positions, count, is_chain=True):
        assert blocks.BLOCKS.get() is not None
        return invariant_attention(nn.Identity(), query, key, value, mask, **options)[0]


def expect(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor, sinks: Tensor | None = None
) -> Tensor:
    """[B, N, H, D] in fp64, with every key and value head repeated; `seen` is [B, N, S]."""
    groups = query.shape[1] // key.shape[1]
    key, value = (held.double().repeat_interleave(groups, dim=1) for held in (key, value))
    scores = query.double() @ key.transpose(2, 3) * WIDTH**-0.5
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    if sinks is not None:
        column = sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    return (scores.softmax(-1)[..., : key.shape[2]] @ value).transpose(1, 2)


def is_close(got: Tensor, expected: Tensor) -> bool:
    """Whether both agree to what bf16 holds of a mean of values."""
    return bool((got.double() - expected).abs().max() < 2**-7 * expected.abs().max())


@pytest.mark.parametrize(
    "option", ["chain", "as rows", "sign", "bool", "window", "hole", "sinks", "ragged"]
)
def test_attention_is_softmax_of_scores(option: str) -> None:
    """As products of whole matrices in fp64 say, with whatever masks layers pass."""
    count, starts = 6, [LENGTH, BLOCK + LAG - 2] if option == "ragged" else [LENGTH]
    if option == "sign":
        starts, count = [0], LENGTH
    query, key, value = draw(count, max(starts) + count, sequences=len(starts))
    columns = torch.arange(key.shape[2])
    queries = torch.tensor(starts)[:, None] + torch.arange(count)
    seen = columns <= queries[..., None]
    if option == "window":  # of which some queries, not all, see the first key
        seen &= columns > queries[..., None] - LENGTH - 3
        assert seen[0, :, 0].any()
        assert not seen[0, :, 0].all()
    if option == "hole":  # as an indexer of a sparse layer makes, in the mask of some queries
        seen[:, ::2, BLOCK // 2] = False
    mask = additive(seen)[:, None]
    if option == "as rows":
        mask = mask.repeat(1, 1, 3, 1)
    elif option == "bool":
        mask = seen[:, None]
    elif option == "sign":
        mask = torch.zeros(1, 1, 1, 1).bfloat16()
    sinks = torch.randn(6).bfloat16() if option == "sinks" else None
    got = attend(query, key, value, mask, starts, **({} if sinks is None else {"s_aux": sinks}))
    assert is_close(got, expect(query, key, value, seen, sinks))


def test_a_tree_reads_the_bits_of_steps() -> None:
    """Nodes lie beside their siblings, some after a border of blocks that their root is before."""
    if not keeps_bits(torch.bfloat16, WIDTH):
        pytest.skip("this machine's kernel sums a row by the number of rows")
    start = 2 * BLOCK + LAG - 2  # the third level reads another block
    query, key, value = draw(len(TREE), start + len(TREE))
    ancestors = torch.eye(len(TREE), dtype=torch.bool)
    for node, parent in enumerate(TREE.tolist()):
        if parent >= 0:
            ancestors[node] |= ancestors[parent]
    depths = ancestors.sum(-1) - 1
    seen = torch.cat([torch.ones(len(TREE), start, dtype=torch.bool), ancestors], -1)
    with reading_blocks([start], start + depths[None], len(TREE), is_chain=False):
        held = blocks.BLOCKS.get()
        assert held is not None
        assert held.ends.unique().tolist() == [BLOCK, 2 * BLOCK]
        tree = invariant_attention(nn.Identity(), query, key, value, additive(seen)[None, None])[0]
    for node in range(len(TREE)):
        path = [*range(start), *(start + ancestors[node].nonzero()[:, 0]).tolist()]
        sign = torch.zeros(1, 1, 1, 1).bfloat16()
        step = attend(
            query[:, :, node : node + 1], key[:, :, path], value[:, :, path], sign, [len(path) - 1]
        )
        assert torch.equal(step[0, 0], tree[0, node]), node


def test_a_kernel_that_counts_rows_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: one that rounds otherwise for many rows than for a few."""

    def by_rows(
        *args: Any, read: Any = blocks.read_blocks, **options: Any
    ) -> tuple[Tensor, Tensor]:
        outputs, logs = read(*args, **options)
        return (outputs * (1 + 2**-7) if args[0].shape[1] > 40 else outputs), logs

    monkeypatch.setattr(blocks, "read_blocks", by_rows)
    keeps_bits.cache_clear()
    assert not keeps_bits(torch.bfloat16, WIDTH)
    keeps_bits.cache_clear()


@pytest.mark.quick("llama-bf16")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "qwen3_moe", "falcon", "gemma2"])
def test_models_keep_their_bits_beyond_blocks(name: str, dtype: torch.dtype) -> None:
    """Steps, chunks, trees and ragged batches after 600 tokens; the small models' heads are as wide as blocks take."""
    model = build(name, dtype)
    model.config.max_position_embeddings = 1024
    target = Target(model)
    if target.variance() is None:
        assert find_variance(target, LENGTH) is None


@pytest.mark.slow
def test_a_tree_without_a_lag_is_another_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: blocks that end at the root, so that a tree and steps cut their keys at other places."""
    model = build("llama", torch.bfloat16)
    model.config.max_position_embeddings = 1024
    target = Target(model)
    length = 2 * BLOCK - 2  # a step after three tokens of the path would read another block
    if target.variance() is None and keeps_bits(torch.bfloat16, target.config.head_dim):
        assert find_variance(target, length) is None
        monkeypatch.setattr(blocks, "LAG", 0)
        assert find_variance(target, length) is not None
