"""Attention at some rows of packed texts, and of what they drafted, equals one dense softmax over the keys in sight."""

# N rows of all texts, S of them wanted, h heads of queries, k of keys, w width

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from eagle.drafters.parts import spans as module
from eagle.drafters.parts.spans import Spans, attend, attend_flex
from eagle.drafters.parts.window import Window

CPU = torch.device("cpu")
LENGTHS = (150, 7, 41)
BEGINS = (0, 150, 157)
HEADS = 4
KEYS = 2
WIDTH = 16
SMALL = Window(3, 17)
# queries [h, S, w], keys and values [k, N, w], and the keys and values [k, S, w] of each drafted step
Inputs = tuple[Tensor, Tensor, Tensor, list[tuple[Tensor, Tensor]]]


def make_spans(window: Window | None = None, stride: int = 1) -> Spans:
    """Return runs of rows longer than a piece, of one row, and at a text's begin and end."""
    masks = [torch.zeros(length, dtype=torch.bool) for length in LENGTHS]
    for text, start, stop in ((0, 3, 140), (0, 147, 148), (1, 0, 7), (2, 39, 41)):
        masks[text][start:stop] = True
    firsts = [1, 0, 2] if stride > 1 else None
    return Spans.of(
        masks,
        CPU,
        stride=stride,
        firsts=firsts,
        window=window,
    )


def scatter(spans: Spans) -> Spans:
    """Return the same rows as single positions instead of runs."""
    positions = []
    for begin, length in zip(BEGINS, LENGTHS, strict=True):
        is_here = (begin <= spans.rows) & (spans.rows < begin + length)
        positions.append(spans.rows[is_here] - begin)
    return Spans.at(positions, LENGTHS, CPU)


def make_inputs(
    spans: Spans,
    steps: int,
    dtype: torch.dtype = torch.float64,
) -> Inputs:
    """Return random queries, keys and values, and those of so many drafted steps."""
    generator = torch.Generator().manual_seed(0)

    def random(heads: int, count: int) -> Tensor:
        rows = torch.randn(
            heads,
            count,
            WIDTH,
            generator=generator,
            dtype=dtype,
        )
        return rows.requires_grad_()

    count = len(spans.rows)
    own = [(random(KEYS, count), random(KEYS, count)) for _ in range(steps)]
    return random(HEADS, count), random(KEYS, sum(LENGTHS)), random(KEYS, sum(LENGTHS)), own


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Spans,
    own: list[tuple[Tensor, Tensor]],
) -> Tensor:
    """Attend row by row: to the text up to the row, or to its window, and to the row's own; one softmax for all."""
    window = spans.window
    if window is not None:
        # a row's own are the latest of what it sees
        own = own[max(len(own) - window.recent, 0) :]
    outputs = []
    for index, row in enumerate(spans.rows.tolist()):
        begin = max(begin for begin in BEGINS if begin <= row)
        columns = [*range(begin, row + 1)]
        if window is not None:
            oldest = row - (window.recent - len(own)) + 1
            columns = [c for c in columns if c < begin + window.sinks or c >= oldest]
        keys = [
            key[:, columns],
            *(own_key[:, index, None] for own_key, _ in own),
        ]
        values = [
            value[:, columns],
            *(own_value[:, index, None] for _, own_value in own),
        ]
        # heads of queries share keys
        shared_keys = torch.cat(keys, dim=1).repeat_interleave(HEADS // KEYS, 0)
        shared_values = torch.cat(values, dim=1).repeat_interleave(HEADS // KEYS, 0)
        scores = (query[:, index, None] * shared_keys).sum(-1) / WIDTH**0.5
        outputs.append((scores.softmax(-1)[..., None] * shared_values).sum(1))
    return torch.stack(outputs, dim=1)


def results(
    attention: Callable[..., Tensor],
    inputs: Inputs,
    spans: Spans,
) -> list[Tensor]:
    """Return the output and the gradients of everything that it depends on."""
    *main, own = inputs
    output = attention(*main, spans, own)
    leaves = [*main]
    for pair in own:
        leaves += pair
    # unlike weights, so that errors do not cancel out
    weights = torch.linspace(
        -1,
        1,
        output.numel(),
        dtype=output.dtype,
    ).view_as(output)
    gradients = torch.autograd.grad(
        (output * weights).sum(),
        leaves,
        allow_unused=True,
    )
    # keys that have left the window get no gradient from a loop
    pairs = zip(leaves, gradients, strict=True)
    filled = [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in pairs]
    return [output.detach(), *filled]


def max_difference(
    attention: Callable[..., Tensor],
    inputs: Inputs,
    spans: Spans,
    expected: Callable[..., Tensor] = dense,
) -> float:
    """Return the largest difference of output and gradients from the dense softmax's."""
    pairs = zip(
        results(attention, inputs, spans),
        results(expected, inputs, spans),
        strict=True,
    )
    return max(float((ours - other).abs().max()) for ours, other in pairs)


@pytest.mark.parametrize("steps", [0, 1, 6])
@pytest.mark.parametrize(
    "window",
    # windows shorter than the drafted steps, as long as a piece of 64 rows, and longer than a text
    [
        None,
        Window(0, 1),
        Window(3, 5),
        Window(0, 70),
        Window(1, 64),
        Window(40, 30),
    ],
    ids=str,
)
def test_output_and_gradients_are_those_of_one_softmax(window: Window | None, steps: int) -> None:
    """In fp64 to rounding, with heads that share keys."""
    spans = make_spans(window)
    assert max_difference(attend, make_inputs(spans, steps), spans) < 1e-12


@pytest.mark.parametrize("window", [None, SMALL], ids=str)
@pytest.mark.parametrize("stride", [2, 3])
def test_every_other_row_sees_its_text(stride: int, window: Window | None) -> None:
    """Runs of rows that are not neighbours start at another row in each text."""
    spans = make_spans(window, stride)
    marked = make_spans().rows.tolist()
    expected = []
    for begin, length, first in zip(BEGINS, LENGTHS, [1, 0, 2], strict=True):
        expected += [row for row in range(begin + first, begin + length, stride) if row in marked]
    assert spans.rows.tolist() == expected
    assert max_difference(attend, make_inputs(spans, 2), spans) < 1e-12


@pytest.mark.parametrize(
    "window",
    [None, Window(4, 30)],
    ids=str,
)
def test_bf16_is_near(window: Window | None) -> None:
    """Output and gradients are within what bf16 resolves."""
    spans = make_spans(window)
    inputs = make_inputs(spans, 3, torch.bfloat16)
    wide = make_inputs(spans, 3)
    # the same numbers in fp64
    leaves = [
        *inputs[:3],
        *(half for pair in inputs[3] for half in pair),
    ]
    wide_leaves = [
        *wide[:3],
        *(half for pair in wide[3] for half in pair),
    ]
    for leaf, wide_leaf in zip(leaves, wide_leaves, strict=True):
        wide_leaf.data.copy_(leaf.data)
    for ours, expected in zip(
        results(attend, inputs, spans),
        results(dense, wide, spans),
        strict=True,
    ):
        assert (ours.double() - expected).norm() < 2e-2 * expected.norm()


@pytest.fixture
def wide_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let pieces in fp64 span a multiple of 16 columns, as those in bf16 span one of 64."""
    monkeypatch.setattr(module, "COLUMNS", {torch.float64: 16})
    module._future.cache_clear()
    yield
    module._future.cache_clear()


@pytest.mark.parametrize("scattered", [False, True])
def test_columns_that_fill_up_a_piece_count_for_nothing(
    wide_pieces: None,
    scattered: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They belong to later rows and to other texts; if they are not hidden, the output is another."""
    spans = scatter(make_spans()) if scattered else make_spans()
    inputs = make_inputs(spans, 3)
    widths = [
        seen[0].stop - seen[0].start for _, seen, _ in module.split_pieces(spans, 3, inputs[0])
    ]
    # the last piece ends with all rows
    assert all(width % 16 == 0 for width in widths[:-1])
    assert max_difference(attend, inputs, spans) < 1e-12
    hide = module._hide_later

    def show_later(
        positions: Sequence[int],
        end: int,
        like: Tensor,
    ) -> Tensor:
        hidden = hide(positions, end, like).clone()
        hidden[:, positions[-1] + 1 - positions[0] :] = 0
        return hidden

    monkeypatch.setattr(module, "_hide_later", show_later)
    assert max_difference(attend, inputs, spans) > 1e-3


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.quick("None-*", "*-1-3")
@pytest.mark.parametrize(
    ("window", "stride", "steps"),
    [
        (None, 1, 3),
        (None, 2, 0),
        (Window(3, 5), 1, 3),
        (Window(0, 20), 2, 1),
    ],
    ids=str,
)
def test_the_fused_kernel_says_the_same(
    window: Window | None,
    stride: int,
    steps: int,
) -> None:
    """This is what GPUs run; it has no gradient on a CPU."""
    spans = make_spans(window, stride)
    *main, own = make_inputs(spans, steps, torch.float32)
    main = [tensor.detach() for tensor in main]
    with torch.no_grad():
        expected = attend(*main, spans, own)
        torch.testing.assert_close(attend_flex(*main, spans, own), expected)


def test_autograd_merges_as_the_cpus_own_gradient_does() -> None:
    """After a fused kernel, gradients pass through its log-sum-exp, which is found here from dense scores."""

    def merge(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        spans: Spans,
        own: Any,
    ) -> Tensor:
        keys = key.repeat_interleave(HEADS // KEYS, 0)
        values = value.repeat_interleave(HEADS // KEYS, 0)
        # [S, N], the rows of the same text up to a row's own
        texts = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
        same_text = texts == texts[spans.rows, None]
        seen = same_text & (torch.arange(sum(LENGTHS)) <= spans.rows[:, None])
        scores = (query @ keys.transpose(1, 2) / WIDTH**0.5).masked_fill(~seen, -torch.inf)
        # how much of the softmax falls to the text, and to each drafted key
        shares = module._attention_shares(query, scores.logsumexp(-1), own)
        return module._merge_outputs(
            scores.softmax(-1) @ values,
            shares,
            own,
            KEYS,
        )

    spans = make_spans()
    assert (
        max_difference(
            attend,
            make_inputs(spans, 3),
            spans,
            expected=merge,
        )
        < 1e-12
    )


def attend_to_neighbours(*inputs: Any) -> Tensor:
    """Attend to the drafted keys of the row before."""
    *rest, own = inputs
    rolled = [(own_key.roll(1, 1), own_value) for own_key, own_value in own]
    return attend(*rest, step_pairs=rolled)


def attend_further(*inputs: Any) -> Tensor:
    """Attend through a window that is longer by one row."""
    *main, _, own = inputs
    return attend(*main, make_spans(Window(3, 18)), step_pairs=own)


@pytest.mark.parametrize("fault", [attend_to_neighbours, attend_further])
def test_wrong_keys_are_seen(fault: Any) -> None:
    """The dense softmax tells both from ours."""
    spans = make_spans(SMALL)
    assert max_difference(fault, make_inputs(spans, 3), spans) > 1e-3


def count_columns(length: int) -> tuple[int, int]:
    """Return the columns that all pieces of one text read, and the blocks that a fused kernel reads."""
    spans = Spans.of(
        [torch.ones(length, dtype=torch.bool)],
        CPU,
        window=Window(4, 100),
    )
    columns = 0
    for _, seen, _ in module.split_pieces(spans, 2, torch.empty(0)):
        columns += sum(part.stop - part.start for part in seen)
    mask = spans.block_mask(2)
    assert mask.kv_indices.shape[-2:] == (length // 128, length // 128)
    return columns, int(mask.kv_num_blocks.sum())


def test_what_is_read_through_a_window_grows_as_the_text_does() -> None:
    """Four times the rows read four times the columns, not sixteen times."""
    columns, blocks = count_columns(1024)
    more_columns, more_blocks = count_columns(4096)
    assert more_columns < 4.5 * columns
    assert more_blocks < 4.5 * blocks
    # a piece of 64 rows reads itself and its window
    assert more_columns < 4096 * (64 + 100 + 4) / 64 + 1


@pytest.mark.parametrize("wrong", [{"sinks": -1}, {"recent": 0}, {"sink": 3}])
def test_a_window_that_cannot_be_is_refused(wrong: dict[str, int]) -> None:
    """A recipe is refused before anything is trained."""
    with pytest.raises((ValidationError, TypeError)):
        Window(**wrong)
