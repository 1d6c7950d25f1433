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
from tests.target.bits.test_invariant import attend_naively

WIDTH = 32
LENGTH = 2 * BLOCK + LAG + 40  # keys before a query that reads two blocks
PARENTS = [-1, 0, 0, 1, 2, 4, 4, 6]
NO_MASK = torch.zeros(
    1,
    1,
    1,
    1,
).bfloat16()  # the sign by which a layer says "causal"


def draw_qkv(count: int, length: int, sequences: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries [B, 6, N, D], keys and values [B, 2, S, D] in bf16."""
    torch.manual_seed(count * 1000 + length)
    query = torch.randn(sequences, 6, count, WIDTH).bfloat16()
    key, value = torch.randn(2, sequences, 2, length, WIDTH).bfloat16()
    return query, key, value


def make_additive(visible: Tensor) -> Tensor:
    """Return an additive mask in bf16 that hides all but what is visible."""
    mask = torch.zeros(visible.shape).bfloat16()
    return mask.masked_fill_(~visible, torch.finfo(torch.bfloat16).min)


def attend_chain(
    qkv: tuple[Tensor, Tensor, Tensor],
    mask: Tensor,
    starts: list[int],
    **options: Any,
) -> Tensor:
    """Return [B, N, H, D] of a chain after `starts` cached keys, read in blocks."""
    count = qkv[0].shape[2]
    positions = torch.tensor(starts)[:, None] + torch.arange(count)
    with reading_blocks(starts, positions, count, is_chain=True):
        assert blocks.BLOCKS.get() is not None
        return invariant_attention(nn.Identity(), *qkv, mask, **options)[0]


OPTIONS = ["chain", "as rows", "sign", "bool", "window", "hole", "sinks", "ragged"]


@pytest.mark.parametrize("option", OPTIONS)
def test_attention_in_blocks_is_softmax_of_scores(option: str) -> None:
    """It is what a loop over queries computes, with whatever masks layers pass."""
    count = 6
    starts = [LENGTH]
    if option == "ragged":
        starts = [LENGTH, BLOCK + LAG - 2]
    if option == "sign":
        starts = [0]
        count = LENGTH
    qkv = draw_qkv(count, max(starts) + count, sequences=len(starts))
    columns = torch.arange(qkv[1].shape[2])
    positions = torch.tensor(starts)[:, None] + torch.arange(count)
    visible = columns <= positions[..., None]
    if option == "window":  # some queries, not all, see the first key
        visible &= columns > positions[..., None] - LENGTH - 3
        assert visible[0, :, 0].unique().tolist() == [False, True]
    if option == "hole":  # as an indexer of a sparse layer makes, for some queries
        visible[:, ::2, BLOCK // 2] = False

    mask = make_additive(visible)[:, None]
    if option == "as rows":
        mask = mask.repeat(1, 1, 3, 1)
    elif option == "bool":
        mask = visible[:, None]
    elif option == "sign":
        mask = NO_MASK
    sinks = torch.randn(6).bfloat16() if option == "sinks" else None
    options: dict[str, Any] = {} if sinks is None else {"s_aux": sinks}

    got = attend_chain(qkv, mask, starts, **options)
    # the oracle of the attention without blocks: a loop over queries in fp64
    whole_mask = make_additive(visible)[:, None].expand(-1, 6, -1, -1)
    expected = attend_naively(*qkv, whole_mask, options)

    # bf16 holds this much of a mean of values
    assert (got.double() - expected).abs().max() < 2**-7 * expected.abs().max()


def test_a_tree_reads_the_bits_of_steps() -> None:
    """Nodes lie beside their siblings, some after a border of blocks that their root is before."""
    if not keeps_bits(torch.bfloat16, WIDTH):
        pytest.skip("this machine's kernel sums a row by the number of rows")
    start = 2 * BLOCK + LAG - 2  # the third level reads another block
    count = len(PARENTS)
    query, key, value = draw_qkv(count, start + count)
    ancestors = torch.eye(count, dtype=torch.bool)

    for node in range(1, count):
        ancestors[node] |= ancestors[PARENTS[node]]

    depths = ancestors.sum(-1) - 1
    visible = torch.cat([torch.ones(count, start, dtype=torch.bool), ancestors], -1)

    with reading_blocks([start], start + depths[None], count, is_chain=False):
        plan = blocks.BLOCKS.get()
        assert plan is not None
        assert plan.ends.unique().tolist() == [BLOCK, 2 * BLOCK]
        mask = make_additive(visible)[None, None]
        tree = invariant_attention(nn.Identity(), query, key, value, attention_mask=mask)[0]

    # the oracle: each node alone, as the last token of its path
    for node in range(count):
        path = visible[node].nonzero()[:, 0]
        qkv = (query[:, :, [node]], key[:, :, path], value[:, :, path])
        step = attend_chain(qkv, NO_MASK, [len(path) - 1])
        assert torch.equal(step[0, 0], tree[0, node]), node


def test_a_kernel_that_counts_rows_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: a kernel that rounds otherwise for many rows than for a few."""
    read = blocks.read_blocks

    def read_by_rows(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        outputs, logs = read(*args, **options)
        factor = 1 + 2**-7 if args[0].shape[1] > 40 else 1
        return outputs * factor, logs

    monkeypatch.setattr(blocks, "read_blocks", read_by_rows)
    keeps_bits.cache_clear()
    assert not keeps_bits(torch.bfloat16, WIDTH)

    keeps_bits.cache_clear()


def build_longer(name: str) -> Target:
    """Return a family's target in bf16 that reads up to 1,024 tokens; its heads are as wide as blocks take."""
    model = build(name, torch.bfloat16)
    model.config.max_position_embeddings = 1024
    return Target(model)


@pytest.mark.quick("llama")
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "falcon", "gemma2"])
def test_models_keep_their_bits_beyond_blocks(name: str) -> None:
    """Steps, chunks, trees and ragged batches agree after 600 tokens."""
    target = build_longer(name)
    if target.variance() is None:
        assert find_variance(target, LENGTH) is None


@pytest.mark.slow
def test_blocks_that_end_at_the_root_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: without a lag, a tree and steps cut their keys at different positions."""
    target = build_longer("llama")
    length = 2 * BLOCK - 2  # a step after three tokens of the path would read another block
    if target.variance() is None and keeps_bits(torch.bfloat16, target.config.head_dim):
        assert find_variance(target, length) is None
        monkeypatch.setattr(blocks, "LAG", 0)
        assert find_variance(target, length) is not None
