"""Heads with a window train and draft as a loop over single tokens, which sees a text's first and latest tokens."""

# V vocabulary

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from eagle import Budget, Sampling
from eagle.core.drafter import Committed
from eagle.core.examples import collate
from eagle.drafters.parts import sequence_state
from eagle.drafters.parts.sequence_state import SequenceState
from eagle.drafters.parts.window import Window
from eagle.drafters.recurrent import head_state
from eagle.drafters.recurrent.eagle1 import Eagle1
from eagle.drafters.recurrent.head_state import HeadState
from tests import naive_unroll
from tests.drafters.recurrent.test_static_loop import BUDGETS as STATIC_BUDGETS
from tests.drafters.recurrent.test_static_loop import replay
from tests.drafters.recurrent.test_unroll_steps import drafting_is_training
from tests.drafters.test_many_texts import BUDGETS, SAMPLINGS, play
from tests.unrolled_heads import (
    ONE,
    SHAPE,
    SPANS,
    TAPS,
    causal_states,
    difference,
    frozen_head,
    moved,
    new_head,
    texts_of,
)

FP64 = torch.float64
V = SHAPE.vocab_size
BUDGET = Budget(5, 4, 2)
# the first has no sinks, the second more sinks than recent tokens
WINDOWS = {"eagle3.1": Window(0, 4), "hass": Window(3, 2)}


def windowed(window: Window) -> Callable[[int, int], list[tuple[int, int]]]:
    """Return a replacement of `naive_unroll.seen` that gives the keys, as (slot, step), within a window."""

    def seen(anchor: int, step: int) -> list[tuple[int, int]]:
        # a query at step s stands at position anchor + s
        oldest = anchor + step - window.recent + 1
        slots = [s for s in range(anchor + 1) if s < window.sinks or s >= oldest]
        drafted = [s for s in range(1, step + 1) if anchor + s >= oldest]
        return [(slot, 0) for slot in slots] + [(anchor, level) for level in drafted]

    return seen


# -- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.quick("hass")
@pytest.mark.parametrize("name", WINDOWS)
def test_loss_and_all_gradients_equal_the_loop(
    tmp_path: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A window holds more or fewer tokens than the three steps draft; the texts lie in one batch."""
    monkeypatch.setattr(
        naive_unroll,
        "seen",
        windowed(WINDOWS[name]),
    )
    head = new_head(tmp_path, name, FP64, window=WINDOWS[name], steps=3)
    assert difference(head, SPANS, FP64) < 1e-6


def test_a_wrong_window_is_seen(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A loop whose window is longer by one token is not taken for training."""
    monkeypatch.setattr(
        naive_unroll,
        "seen",
        windowed(Window(2, 5)),
    )
    head = new_head(tmp_path, "hass", window=Window(2, 4), steps=3)
    assert difference(head, ONE, torch.float32) > 1e-3


def new_deep_head(window: Window | None) -> Any:
    """Return an EAGLE-1 head of two blocks in fp64."""
    torch.manual_seed(2)
    shape = LlamaConfig(**{**SHAPE.to_dict(), "num_hidden_layers": 2})
    return moved(Eagle1(Eagle1.Settings(window=window, noise=0.0), shape)).double()


@torch.no_grad()
def test_further_blocks_see_windows_too() -> None:
    """Training's states of two blocks are those of a dense pass under a mask."""
    target_head = frozen_head(FP64)
    head = new_deep_head(Window(2, 5))
    text = texts_of({90: [(2, 90)]}, FP64)[0]
    # slots run up to the last but two tokens
    trained = head.unroll(collate([text], TAPS), target_head, 1).states[0]
    tokens = text.tokens[None, 1:-1]
    hidden = text.features[None, :-2, -1]  # type: ignore[index]
    masked = causal_states(head, tokens, hidden, 0, target_head=target_head)[0]
    torch.testing.assert_close(trained, masked, rtol=0, atol=1e-12)
    # without a window the same weights compute something else
    head.settings = Eagle1.Settings()
    whole = causal_states(head, tokens, hidden, 0, target_head=target_head)[0]
    assert (trained - whole).abs().max() > 1e-3


# -- drafting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WINDOWS)
def test_each_step_of_training_is_a_level_of_drafting(
    tmp_path: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The text comes in pieces, and most of it is dropped."""
    drafting_is_training(new_head(tmp_path, name, window=WINDOWS[name]), monkeypatch)


drop_unseen = SequenceState._drop_unseen


def keep_positions(self: SequenceState, slots: Any) -> None:
    """Drop columns, and let the text seem shorter by them."""
    drop_unseen(self, slots)
    self.dropped = dict.fromkeys(self.dropped, 0)


@pytest.mark.parametrize(
    ("home", "name", "fault"),
    [
        (SequenceState, "_drop_unseen", keep_positions),
        (head_state, "_hide_levels", lambda tree_mask, begin: tree_mask),
    ],
    ids=["positions", "old levels"],
)
def test_a_wrong_draft_is_seen(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    home: Any,
    name: str,
    fault: Any,
) -> None:
    """Positions that are cache columns, and drafted levels that never leave the window, are told from training."""
    monkeypatch.setattr(home, name, fault)
    # five levels outlast the window by far
    head = new_head(tmp_path, "hass", window=Window(2, 2), steps=5)
    with pytest.raises(AssertionError, match="not close"):
        drafting_is_training(head, monkeypatch)


@pytest.mark.slow
def test_every_row_drafts_as_if_it_were_alone() -> None:
    """Rows of a batch come and go, and each drops columns of its own, in both blocks of a head."""
    head = new_deep_head(Window(2, 4)).bind(frozen_head(FP64))
    assert play(head, BUDGETS["mixed"], SAMPLINGS["T=1"], seed=0) > 20


@pytest.mark.slow
def test_one_capture_drafts_all_later_cycles(tmp_path: Path) -> None:
    """A loop of static shapes holds windows, and outgrows no buffer."""
    head = new_head(
        tmp_path,
        "eagle3.1",
        FP64,
        window=Window(2, 4),
    ).bind(frozen_head(FP64))
    # eight cycles outlast the window
    traces = replay(
        head,
        STATIC_BUDGETS["dynamic"],
        Sampling(),
        texts=3,
        cycles=8,
    )
    assert traces.captured == 1


def test_the_state_does_not_grow_with_the_text(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """3,006 tokens leave columns for one window, and a level is timed behind as many."""
    window = Window(4, 32)
    head = new_head(
        tmp_path,
        "eagle3",
        FP64,
        window=window,
    ).bind(frozen_head(FP64))
    state: HeadState = head.open()
    state.admit(0)
    for count in (3000, 5, 1):
        features = torch.randn(
            count,
            len(head.taps),
            SHAPE.hidden_size,
            dtype=FP64,
        )
        update = Committed(torch.arange(count) % V, features, 1)
        state.propose({0: update}, {0: BUDGET})
    assert state.sequence_length(0) == 3006
    assert state.cache.lengths[0] <= window.most
    assert state.cache.sizes[1] <= (window.most + sequence_state.WINDOW_CHUNK_TOKENS) * 3 // 2
    # what the mask of the last read spans is what the probe is timed by
    widths = []
    read = head.read

    def record(*args: Any) -> Any:
        if args[3] is not None:
            widths.append(args[3].shape[-1])
        return read(*args)

    monkeypatch.setattr(head, "read", record)
    head.probe(8192, 3, 3)()
    assert widths[-1] == window.most + 3


def test_a_fork_behind_dropped_columns_drafts_as_two_texts(tmp_path: Path) -> None:
    """Conformance forks texts of which nothing is dropped; here both rows draft as rows that were never one."""
    head = new_head(
        tmp_path,
        "eagle3",
        FP64,
        window=Window(2, 8),
    ).bind(frozen_head(FP64))
    # two texts that part after 40 tokens
    generator = torch.Generator().manual_seed(6)
    shape = (46, len(head.taps), SHAPE.hidden_size)
    features = torch.randn(*shape, generator=generator, dtype=FP64)
    shared = torch.randint(V, (40,), generator=generator)
    texts = [
        torch.cat([shared, torch.arange(6)]),
        torch.cat([shared, torch.arange(7, 13)]),
    ]

    def propose(
        state: Any,
        start: int,
        end: int,
        rows: list[int],
    ) -> list[list[int]]:
        updates = {}
        for row in rows:
            updates[row] = Committed(texts[row][start:end], features[start:end], 7)
        trees = state.propose(updates, dict.fromkeys(rows, BUDGET))
        return [tree.tokens.tolist() for tree in trees.values()]

    # one row reads what both share, then becomes two
    forked = head.open()
    forked.admit(0)
    propose(forked, 0, 40, [0])
    forked.fork(0, 1)

    # two rows read it from the start
    separate = head.open()
    for row in (0, 1):
        separate.admit(row)
    propose(separate, 0, 40, [0, 1])
    assert separate.dropped[0]
    assert propose(forked, 40, 46, [0, 1]) == propose(separate, 40, 46, [0, 1])
