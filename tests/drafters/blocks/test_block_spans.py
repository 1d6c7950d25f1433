"""Attention of blocks behind rows of texts: equal to one dense softmax for each token, plain and fused."""

# S rows, B tokens of a block, h heads of queries, k of keys, w width

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from eagle.drafters.blocks import block_spans as module
from eagle.drafters.blocks.block_spans import attend_block, attend_block_flex
from eagle.drafters.parts.spans import Spans

LENGTHS, HEADS, KEYS, SIZE, WIDTH = (150, 7, 41), 4, 2, 3, 16
PLACES = [[0, 3, 4, 77, 149], [], [40]]
Inputs = list[Tensor]


@pytest.fixture
def spans() -> Spans:
    """Rows at a text's begin and end, beside each other and far apart; a text without any."""
    return Spans.at(
        [torch.tensor(rows, dtype=torch.long) for rows in PLACES], LENGTHS, torch.device("cpu")
    )


def inputs(grad: bool = True) -> Inputs:
    """Random query, key, value, and keys and values of the blocks."""
    torch.manual_seed(0)
    count, whole = sum(map(len, PLACES)), sum(LENGTHS)
    shapes = [
        (HEADS, count, SIZE, WIDTH),
        *[(KEYS, whole, WIDTH)] * 2,
        *[(KEYS, count, SIZE, WIDTH)] * 2,
    ]
    return [torch.randn(shape, dtype=torch.float64).requires_grad_(grad) for shape in shapes]


def dense(
    query: Tensor, key: Tensor, value: Tensor, own_key: Tensor, own_value: Tensor, causal: bool
) -> Tensor:
    """Token by token: the text up to its row and its block, one softmax."""
    rows, number = [], 0
    for text, places in enumerate(PLACES):
        begin = sum(LENGTHS[:text])
        for place in places:
            tokens = []
            for token in range(SIZE):
                mine = slice(0, token + 1 if causal else SIZE)
                keys = torch.cat(
                    [key[:, begin : begin + place + 1], own_key[:, number, mine]], dim=1
                )
                values = torch.cat(
                    [value[:, begin : begin + place + 1], own_value[:, number, mine]], dim=1
                )
                keys, values = (part.repeat_interleave(HEADS // KEYS, 0) for part in (keys, values))
                probs = ((query[:, number, token, None] * keys).sum(-1) / WIDTH**0.5).softmax(-1)
                tokens.append((probs[..., None] * values).sum(1))
            rows.append(torch.stack(tokens, dim=1))
            number += 1
    return torch.stack(rows, dim=1)


def results(attention: Callable[..., Tensor], given: Inputs) -> list[Tensor]:
    """The output and the gradients of everything."""
    output = attention(*given)
    torch.manual_seed(1)
    return [output, *torch.autograd.grad((output * torch.randn_like(output)).sum(), given)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("piece", [3, 256])
def test_a_block_sees_its_text_and_itself(
    spans: Spans, causal: bool, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output and gradients, with a row or all of a text in a piece."""
    monkeypatch.setattr(module, "PIECE", {torch.float64: piece})
    ours = results(
        lambda *given: attend_block(*given[:3], spans, given[3:], causal=causal), inputs()
    )
    for one, true in zip(
        ours, results(lambda *given: dense(*given, causal), inputs()), strict=True
    ):
        torch.testing.assert_close(one, true)


@pytest.mark.parametrize("causal", [False, True])
def test_the_fused_kernel_computes_the_same(spans: Spans, causal: bool) -> None:
    """The path of accelerators, forward, as the kernel has no gradient on a CPU."""
    given = [part.float() for part in inputs(grad=False)]
    fused = attend_block_flex(
        *given[:3], spans, tuple(given[3:]), causal=causal, kernel=flex_attention
    )
    torch.testing.assert_close(fused, dense(*given, causal), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("fault", ["future", "text", "block"])
def test_a_wrong_view_is_seen(spans: Spans, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted faults: a later place of the text is seen, or the text before a row's own, or another row's block."""
    split = module.split_pieces

    def pieces(*given: Any) -> Any:
        for rows, (seen,), hidden in split(*given):
            hidden = torch.zeros_like(hidden) if fault == "future" else hidden
            yield rows, [slice(0, seen.stop) if fault == "text" else seen], hidden

    monkeypatch.setattr(module, "split_pieces", pieces)
    moved = 1 if fault == "block" else 0
    given = inputs(grad=False)
    ours = attend_block(
        *given[:3], spans, tuple(part.roll(moved, 1) for part in given[3:]), causal=False
    )
    assert (ours - dense(*given, False)).abs().max() > 1e-3
