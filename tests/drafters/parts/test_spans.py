"""Attention at some rows of packed texts, and of what they drafted: equal to one dense softmax over all keys."""

# N rows of all texts, S of them wanted, h heads of queries, k of keys, w width

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle.drafters.parts import spans as module
from eagle.drafters.parts.spans import Spans, attend, attend_flex

LENGTHS, HEADS, KEYS, WIDTH = (150, 7, 41), 4, 2, 16
Inputs = tuple[Tensor, Tensor, Tensor, list[tuple[Tensor, Tensor]]]


@pytest.fixture
def spans() -> Spans:
    """Runs longer than a piece, of one row, at a text's begin and end."""
    masks = [torch.zeros(length, dtype=torch.bool) for length in LENGTHS]
    for text, start, stop in ((0, 3, 140), (0, 142, 143), (1, 0, 7), (2, 40, 41)):
        masks[text][start:stop] = True
    return Spans.of(masks, torch.device("cpu"))


def inputs(spans: Spans, steps: int, dtype: torch.dtype = torch.float64) -> Inputs:
    """Random queries, keys and values, and those of so many steps before."""
    generator = torch.Generator().manual_seed(0)

    def random(heads: int, count: int) -> Tensor:
        return torch.randn(heads, count, WIDTH, generator=generator, dtype=dtype).requires_grad_()

    count, whole = len(spans.rows), sum(LENGTHS)
    own = [(random(KEYS, count), random(KEYS, count)) for _ in range(steps)]
    return random(HEADS, count), random(KEYS, whole), random(KEYS, whole), own


def scatter(spans: Spans) -> Spans:
    """The same rows as places of their own."""
    places = [
        spans.rows[(begin <= spans.rows) & (spans.rows < begin + length)] - begin
        for begin, length in zip((0, 150, 157), LENGTHS, strict=True)
    ]
    return Spans.at(places, LENGTHS, torch.device("cpu"))


def dense(
    query: Tensor, key: Tensor, value: Tensor, spans: Spans, own: list[tuple[Tensor, Tensor]]
) -> Tensor:
    """Row by row: the keys of its text up to itself and its own, one softmax."""
    begins = torch.tensor([0, LENGTHS[0], LENGTHS[0] + LENGTHS[1]])
    rows = []
    for place, row in enumerate(spans.rows.tolist()):
        begin = int(begins[begins <= row].max())
        keys = torch.cat(
            [key[:, begin : row + 1], *(mine[:, place : place + 1] for mine, _ in own)], dim=1
        )
        values = torch.cat(
            [value[:, begin : row + 1], *(its[:, place : place + 1] for _, its in own)], dim=1
        )
        keys, values = (part.repeat_interleave(HEADS // KEYS, 0) for part in (keys, values))
        law = ((query[:, place, None] * keys).sum(-1) / WIDTH**0.5).softmax(-1)
        rows.append((law[..., None] * values).sum(1))
    return torch.stack(rows, dim=1)


def results(attention: Callable[..., Tensor], given: Inputs, spans: Spans) -> list[Tensor]:
    """The output and the gradients of everything."""
    query, key, value, own = given
    output = attention(query, key, value, spans, own)
    leaves = [query, key, value, *(part for pair in own for part in pair)]
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    return [output, *torch.autograd.grad((output * weights).sum(), leaves)]


@pytest.mark.parametrize("steps", [0, 1, 6])
def test_output_and_gradients_are_those_of_one_softmax(spans: Spans, steps: int) -> None:
    """In fp64 to rounding, with heads that share keys."""
    given = inputs(spans, steps)
    for ours, true in zip(results(attend, given, spans), results(dense, given, spans), strict=True):
        torch.testing.assert_close(ours, true, rtol=0, atol=1e-12)


@pytest.mark.parametrize("stride", [2, 3])
def test_every_other_row_sees_its_text(stride: int) -> None:
    """Runs of rows that do not lie side by side, from other first rows in each text; by the fused kernel too."""
    masks = [torch.zeros(length, dtype=torch.bool) for length in LENGTHS]
    for text, start, stop in ((0, 3, 140), (0, 147, 148), (1, 0, 7), (2, 39, 41)):
        masks[text][start:stop] = True
    firsts, begins = [1, 0, 2], [0, LENGTHS[0], LENGTHS[0] + LENGTHS[1]]
    spans = Spans.of(masks, torch.device("cpu"), stride, firsts)
    marked = [
        begin + row
        for begin, first, mask in zip(begins, firsts, masks, strict=True)
        for row in range(first, len(mask), stride)
        if mask[row]
    ]
    assert spans.rows.tolist() == marked
    given = inputs(spans, 2)
    for ours, true in zip(results(attend, given, spans), results(dense, given, spans), strict=True):
        torch.testing.assert_close(ours, true, rtol=0, atol=1e-12)
    query, key, value = (part.detach() for part in given[:3])
    torch.testing.assert_close(
        attend_flex(query, key, value, spans), dense(query, key, value, spans, [])
    )


def test_bf16_is_near(spans: Spans) -> None:
    """Output and gradients within what bf16 resolves."""
    given = inputs(spans, 3, torch.bfloat16)
    wide = tuple(part.detach().double().requires_grad_() for part in given[:3])
    own = [tuple(part.detach().double().requires_grad_() for part in pair) for pair in given[3]]
    for ours, true in zip(
        results(attend, given, spans), results(dense, (*wide, own), spans), strict=True
    ):
        assert (ours.double() - true).norm() < 2e-2 * true.norm()


@pytest.fixture
def filled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pieces in fp64 see a multiple of 16 columns, as those in bf16 do of 64."""
    monkeypatch.setattr(module, "COLUMNS", {torch.float64: 16})
    module._future.cache_clear()
    yield
    module._future.cache_clear()


@pytest.mark.parametrize("scattered", [False, True])
def test_columns_that_fill_up_a_piece_count_for_nothing(
    filled: None, spans: Spans, scattered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They belong to the rows behind it and to other texts; where they count, it is seen."""
    spans, given = scatter(spans) if scattered else spans, inputs(spans, 3)
    widths = [
        seen[0].stop - seen[0].start for _, seen, _ in module.split_pieces(spans, 3, given[0])
    ]
    assert all(width % 16 == 0 for width in widths[:-1]), widths  # the last one ends with all rows
    true = results(dense, given, spans)
    for ours, wanted in zip(results(attend, given, spans), true, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-12)
    hide = module._hide_later

    def count_them(places: Sequence[int], end: int, like: Tensor) -> Tensor:
        hidden = hide(places, end, like).clone()
        hidden[:, places[-1] + 1 - places[0] :] = 0
        return hidden

    monkeypatch.setattr(module, "_hide_later", count_them)
    (wrong, *_), (right, *_) = results(attend, given, spans), true
    assert (wrong - right).abs().max() > 1e-3


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("steps", [0, 3])
def test_the_fused_kernel_says_the_same(spans: Spans, steps: int) -> None:
    """What accelerators run, here without its gradient, which it has not on a CPU."""
    query, key, value, own = inputs(spans, steps, torch.float32)
    query, key, value = (part.detach() for part in (query, key, value))
    with torch.no_grad():
        torch.testing.assert_close(
            attend_flex(query, key, value, spans, own), attend(query, key, value, spans, own)
        )


def test_autograd_merges_as_the_cpus_own_gradient_does(spans: Spans) -> None:
    """Behind a fused kernel gradients come through its log-sum-exp: found here from dense scores."""

    def merged(query: Tensor, key: Tensor, value: Tensor, spans: Spans, own: Any) -> Tensor:
        keys, values = (part.repeat_interleave(HEADS // KEYS, 0) for part in (key, value))
        texts = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
        places = torch.arange(sum(LENGTHS))
        seen = (texts == texts[spans.rows, None]) & (places <= spans.rows[:, None])
        scores = (query @ keys.transpose(1, 2) / WIDTH**0.5).masked_fill(~seen, -torch.inf)
        shares = module._shares(query, scores.logsumexp(-1), own)
        return module._merge_parts(scores.softmax(-1) @ values, shares, own, KEYS)

    given = inputs(spans, 3)
    for ours, true in zip(
        results(attend, given, spans), results(merged, given, spans), strict=True
    ):
        torch.testing.assert_close(ours, true, rtol=0, atol=1e-12)


@pytest.mark.parametrize("fault", ["share", "future", "own"])
def test_a_wrong_merge_is_seen(spans: Spans, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted faults: shares that do not add up, a future that is seen, another row's own keys."""
    law, given = module.attention_probs, inputs(spans, 3)

    def moved(query: Tensor, key: Tensor, value: Tensor, spans: Spans, own: Any) -> Tensor:
        return attend(query, key, value, spans, [(mine.roll(1, 1), its) for mine, its in own])

    if fault == "share":
        monkeypatch.setattr(
            module,
            "attention_probs",
            lambda query, key, own, stride: law(query, key, own + 0.1, stride),
        )
    elif fault == "future":
        monkeypatch.setattr(
            module, "_future", lambda count, *rest: torch.zeros(count, count, dtype=rest[1])
        )
    ours = results(moved if fault == "own" else attend, given, spans)
    apart = [
        float((one - true).abs().max().detach())
        for one, true in zip(ours, results(dense, given, spans), strict=True)
    ]
    assert max(apart) > 1e-3


def test_scattered_rows_are_those_of_runs(spans: Spans) -> None:
    """The same rows as places of their own: the same output and gradients, whatever the pieces."""
    scattered, given = scatter(spans), inputs(spans, 2)
    assert (
        scattered.rows.tolist() == spans.rows.tolist()
        and scattered.begins.tolist() == spans.begins.tolist()
    )
    for ours, true in zip(
        results(attend, given, scattered), results(attend, given, spans), strict=True
    ):
        torch.testing.assert_close(ours, true)
