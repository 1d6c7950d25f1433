"""Attention through windows: equal to one dense softmax over the first rows of a text and the latest."""

# N rows of all texts, S of them wanted, w width

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from eagle.drafters.parts import spans as module
from eagle.drafters.parts.spans import Spans, attend, attend_flex
from eagle.drafters.parts.window import Window
from tests.drafters.parts.test_spans import HEADS, KEYS, LENGTHS, WIDTH, Inputs, inputs, results

CPU = torch.device("cpu")
WINDOWS = [Window(0, 1), Window(3, 5), Window(0, 70), Window(1, 64), Window(9, 20), Window(40, 30)]


def windowed_spans(window: Window | None, stride: int = 1) -> Spans:
    """Runs longer than a piece, of one row, at a text's begin and end."""
    masks = [torch.zeros(length, dtype=torch.bool) for length in LENGTHS]
    for text, start, stop in ((0, 3, 140), (0, 147, 148), (1, 0, 7), (2, 39, 41)):
        masks[text][start:stop] = True
    return Spans.of(masks, CPU, stride, [1, 0, 2] if stride > 1 else None, window)


def dense(query: Tensor, key: Tensor, value: Tensor, spans: Spans, own: Any) -> Tensor:
    """Row by row: its text's first rows, its latest and its own, those of which come first, in one softmax."""
    begins, rows = [0, LENGTHS[0], LENGTHS[0] + LENGTHS[1]], []
    assert spans.window is not None
    own = own[max(len(own) - spans.window.recent, 0) :]
    for place, row in enumerate(spans.rows.tolist()):
        begin = max(begin for begin in begins if begin <= row)
        latest = spans.window.recent - len(own)
        seen = [
            at
            for at in range(begin, row + 1)
            if at < begin + spans.window.sinks or row - at < latest
        ]
        keys = torch.cat([key[:, seen], *(mine[:, place : place + 1] for mine, _ in own)], dim=1)
        values = torch.cat([value[:, seen], *(its[:, place : place + 1] for _, its in own)], dim=1)
        keys, values = (part.repeat_interleave(HEADS // KEYS, 0) for part in (keys, values))
        probs = ((query[:, place, None] * keys).sum(-1) / WIDTH**0.5).softmax(-1)
        rows.append((probs[..., None] * values).sum(1))
    return torch.stack(rows, dim=1)


def apart(ours: list[Tensor], true: list[Tensor]) -> float:
    """The largest difference of output and gradients."""
    return max(
        float((one - other).detach().abs().max()) for one, other in zip(ours, true, strict=True)
    )


@pytest.mark.parametrize("steps", [0, 1, 6])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_output_and_gradients_are_those_of_one_softmax(window: Window, steps: int) -> None:
    """In fp64 to rounding; also where a row's own are more than its window holds."""
    spans = windowed_spans(window)
    query, key, value, own = inputs(spans, steps)
    seen = query, key, value, own[max(steps - window.recent, 0) :]  # the others have no gradient

    def windowed(query: Tensor, key: Tensor, value: Tensor, spans: Spans, _: Any) -> Tensor:
        return attend(query, key, value, spans, own)

    assert apart(results(windowed, seen, spans), results(dense, seen, spans)) < 1e-12


@pytest.mark.parametrize("stride", [2, 3])
def test_every_other_row_sees_its_window(stride: int) -> None:
    """Rows that do not lie side by side, from other first rows in each text."""
    spans = windowed_spans(Window(3, 17), stride)
    given = inputs(spans, 2)
    assert apart(results(attend, given, spans), results(dense, given, spans)) < 1e-12


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("window", "stride", "steps"),
    [
        (Window(3, 5), 1, 3),
        *(
            pytest.param(*given, marks=pytest.mark.slow)
            for given in [(Window(3, 5), 1, 0), (Window(0, 20), 2, 1), (Window(9, 200), 1, 3)]
        ),
    ],
)
def test_the_fused_kernel_sees_the_same(window: Window, stride: int, steps: int) -> None:
    """What accelerators run, for each number of own rows; here without its gradient, which it has not on a CPU."""
    spans = windowed_spans(window, stride)
    *given, own = inputs(spans, steps, torch.float32)
    query, key, value = (part.detach() for part in given)
    with torch.no_grad():
        torch.testing.assert_close(
            attend_flex(query, key, value, spans, own), attend(query, key, value, spans, own)
        )


@pytest.mark.parametrize("steps", [0, 3])
def test_a_window_longer_than_all_texts_is_none(steps: int) -> None:
    """To the bit: output and gradients are those without a window."""
    windowed, whole = windowed_spans(Window(2, 153)), windowed_spans(None)
    given = inputs(whole, steps)
    assert apart(results(attend, given, windowed), results(attend, given, whole)) == 0


def test_bf16_is_near() -> None:
    """Output and gradients within what bf16 resolves."""
    spans = windowed_spans(Window(4, 30))
    given = inputs(spans, 3, torch.bfloat16)
    query, key, value = (part.detach().double().requires_grad_() for part in given[:3])
    own = [
        (mine.detach().double().requires_grad_(), its.detach().double().requires_grad_())
        for mine, its in given[3]
    ]
    wide: Inputs = (query, key, value, own)
    for ours, true in zip(results(attend, given, spans), results(dense, wide, spans), strict=True):
        assert (ours.double() - true).norm() < 2e-2 * true.norm()


def count_columns(length: int, window: Window) -> tuple[int, int]:
    """Columns that all pieces of one long text read, and blocks that a fused kernel reads."""
    spans = Spans.of([torch.ones(length, dtype=torch.bool)], CPU, window=window)
    pieces = module.split_pieces(spans, 2, torch.empty(0))
    return sum(part.stop - part.start for _, seen, _ in pieces for part in seen), int(
        spans.block_mask(2).kv_num_blocks.sum()
    )


def test_what_is_read_grows_as_the_text_does() -> None:
    """Four times the rows read four times the columns, not sixteen times."""
    short, long = count_columns(1024, Window(4, 100)), count_columns(4096, Window(4, 100))
    assert long[0] < 4.5 * short[0] and long[1] < 4.5 * short[1]
    assert long[0] < 4096 * (64 + 100 + 4) / 64 + 1


FAULTS: dict[str, Window] = {
    "one row too few": Window(3, 16),
    "one row too many": Window(3, 18),
    "a sink too few": Window(2, 17),
    "no sinks": Window(0, 17),
}


@pytest.mark.parametrize("fault", [*FAULTS, "own rows beside the window"])
def test_a_wrong_window_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted faults: windows that are wrong by one row, and own rows that take no place in them."""
    spans = windowed_spans(Window(3, 17))
    given = inputs(spans, 2)
    true = results(dense, given, spans)
    if fault in FAULTS:
        spans = windowed_spans(FAULTS[fault])
    else:
        hides = Window.hides
        monkeypatch.setattr(Window, "hides", lambda *seen: hides(*seen[:-1], 0))
    assert apart(results(attend, given, spans), true) > 1e-3


@pytest.mark.parametrize("wrong", [{"sinks": -1}, {"recent": 0}, {"sink": 3}])
def test_a_window_that_cannot_be_is_refused(wrong: dict[str, int]) -> None:
    """Before anything is trained."""
    with pytest.raises((ValidationError, TypeError)):
        Window(**wrong)
