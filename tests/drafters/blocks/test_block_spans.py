"""Attention of blocks after rows of sequences equals one dense softmax for each token."""

# S anchor rows, B tokens of a block, h query heads, k key heads, w head width

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from eagle.drafters.blocks import block_spans
from eagle.drafters.blocks.block_spans import attend_block, attend_block_flex
from eagle.drafters.parts.spans import Drafted, Spans
from eagle.drafters.parts.window import Window

LENGTHS = (150, 7, 41)
# rows at the start and end of a sequence, adjacent and far apart; a sequence without any
ANCHORS = [[0, 3, 4, 77, 149], [], [40]]
QUERY_HEADS = 4
KEY_HEADS = 2
SIZE = 3
WIDTH = 16


@pytest.fixture
def spans() -> Spans:
    """The anchor rows of three sequences."""
    rows = [torch.tensor(anchors, dtype=torch.long) for anchors in ANCHORS]
    return Spans.at(rows, LENGTHS, torch.device("cpu"))


def make_inputs(grad: bool = True) -> list[Tensor]:
    """Return random queries, keys and values of sequences, keys and values of blocks."""
    torch.manual_seed(0)
    count = sum(map(len, ANCHORS))
    whole = (KEY_HEADS, sum(LENGTHS), WIDTH)
    blocks = (KEY_HEADS, count, SIZE, WIDTH)
    shapes = [
        (QUERY_HEADS, count, SIZE, WIDTH),
        whole,
        whole,
        blocks,
        blocks,
    ]
    return [torch.randn(shape, dtype=torch.float64).requires_grad_(grad) for shape in shapes]


def attend_densely(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    own_key: Tensor,
    own_value: Tensor,
    causal: bool,
    recent: int = 1000,
    moves: bool = True,
) -> Tensor:
    """Return [h, S, B, w], token by token: one softmax over the sequence so far and the block.

    With a window a token sees the `recent` latest positions, its own among them; or, if the window does not move with
    the tokens, that many before the block.
    """
    blocks: list[Tensor] = []
    begin = 0
    for length, anchors in zip(LENGTHS, ANCHORS, strict=True):
        for anchor in anchors:
            block = len(blocks)
            outputs = []
            for token in range(SIZE):
                # the block's first token has the position after the anchor's
                first = anchor + 1 + token - (recent - 1) if moves else anchor + 1 - recent
                text = slice(begin + max(first, 0), begin + anchor + 1)
                visible = slice(0, token + 1 if causal else SIZE)
                keys = torch.cat([key[:, text], own_key[:, block, visible]], dim=1)
                values = torch.cat([value[:, text], own_value[:, block, visible]], dim=1)
                # [k, m, w] -> [h, m, w]: neighbouring query heads share a key
                keys = keys.repeat_interleave(QUERY_HEADS // KEY_HEADS, 0)
                values = values.repeat_interleave(QUERY_HEADS // KEY_HEADS, 0)
                scores = (query[:, block, token, None] * keys).sum(-1) / WIDTH**0.5
                outputs.append((scores.softmax(-1)[..., None] * values).sum(1))
            blocks.append(torch.stack(outputs, dim=1))
        begin += length
    return torch.stack(blocks, dim=1)


def output_and_gradients(attention: Callable[[list[Tensor]], Tensor]) -> list[Tensor]:
    """Return the output, and the gradients at all inputs of a random sum of it."""
    inputs = make_inputs()
    output = attention(inputs)
    torch.manual_seed(1)
    loss = (output * torch.randn_like(output)).sum()
    return [output, *torch.autograd.grad(loss, inputs)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("piece", [3, 256])
def test_a_block_sees_its_sequence_and_itself(
    spans: Spans,
    causal: bool,
    piece: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Output and gradients, with a row or a whole sequence in a piece."""
    monkeypatch.setattr(block_spans, "PIECE", {torch.float64: piece})

    def attend(inputs: list[Tensor]) -> Tensor:
        return attend_block(
            *inputs[:3],
            spans,
            (inputs[3], inputs[4]),
            causal=causal,
        )

    got = output_and_gradients(attend)
    expected = output_and_gradients(lambda inputs: attend_densely(*inputs, causal=causal))
    for tensor, expected_tensor in zip(got, expected, strict=True):
        torch.testing.assert_close(tensor, expected_tensor)


MOVING = tuple(range(1, 1 + SIZE))
WINDOWS: list[tuple[int, bool, Drafted]] = [
    (SIZE, True, MOVING),
    (60, True, MOVING),
    (1, False, (0,) * SIZE),
    (60, False, (0,) * SIZE),
]


@pytest.mark.parametrize(("recent", "moves", "drafted"), WINDOWS)
@pytest.mark.parametrize("piece", [3, 256])
def test_a_window_hides_the_beginning(
    spans: Spans,
    recent: int,
    moves: bool,
    drafted: Drafted,
    piece: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Output and gradients; and the fused kernel's output."""
    monkeypatch.setattr(block_spans, "PIECE", {torch.float64: piece})
    spans = replace(spans, window=Window(recent=recent), block_masks={})

    def attend(inputs: list[Tensor]) -> Tensor:
        own = (inputs[3], inputs[4])
        return attend_block(*inputs[:3], spans, own, causal=True, drafted=drafted)

    def densely(inputs: list[Tensor]) -> Tensor:
        return attend_densely(*inputs, causal=True, recent=recent, moves=moves)

    got = output_and_gradients(attend)
    for tensor, expected_tensor in zip(got, output_and_gradients(densely), strict=True):
        torch.testing.assert_close(tensor, expected_tensor)
    # the path of accelerators, without gradients
    inputs = [tensor.float() for tensor in make_inputs(grad=False)]
    own = (inputs[3], inputs[4])
    fused = attend_block_flex(
        *inputs[:3], spans, own, causal=True, drafted=drafted, kernel=flex_attention
    )
    torch.testing.assert_close(fused, densely(inputs), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_the_fused_kernel_computes_the_same(spans: Spans, causal: bool) -> None:
    """The path of accelerators, forward only, as the kernel has no gradient on a CPU."""
    inputs = [tensor.float() for tensor in make_inputs(grad=False)]
    own = (inputs[3], inputs[4])
    fused = attend_block_flex(
        *inputs[:3],
        spans,
        own,
        causal=causal,
        kernel=flex_attention,
    )
    expected = attend_densely(*inputs, causal=causal)
    torch.testing.assert_close(fused, expected, atol=1e-5, rtol=1e-5)


def test_the_block_of_another_row_is_seen(spans: Spans) -> None:
    """The comparison fails if each row reads its neighbour's block."""
    inputs = make_inputs(grad=False)
    own = (inputs[3].roll(1, 1), inputs[4].roll(1, 1))
    got = attend_block(*inputs[:3], spans, own, causal=False)
    expected = attend_densely(*inputs, causal=False)
    assert (got - expected).abs().max() > 1e-3
