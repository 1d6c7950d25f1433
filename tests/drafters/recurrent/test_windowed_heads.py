"""Heads with a window train and draft as a loop over single tokens, whose keys are a text's first and its latest."""

# K steps, V vocabulary, L blocks

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from eagle import Budget, Sampling
from eagle.core.drafter import Committed
from eagle.core.examples import collate
from eagle.core.tree import DraftTree
from eagle.drafters.parts import text_state
from eagle.drafters.parts.text_state import TextState
from eagle.drafters.parts.window import Window
from eagle.drafters.recurrent import head_state
from eagle.drafters.recurrent.eagle1 import Eagle1
from eagle.drafters.recurrent.head_state import HeadState
from eagle.target.slots import SlotCache
from tests import naive_unroll
from tests.drafters.recurrent.test_static_loop import BUDGETS as STATIC_BUDGETS
from tests.drafters.recurrent.test_static_loop import replay
from tests.drafters.recurrent.test_unroll_steps import drafting_is_training
from tests.drafters.test_many_texts import BUDGETS, SAMPLINGS, play
from tests.unrolled_heads import (
    LONG,
    ONE,
    SHAPE,
    SPANS,
    TAPS,
    causal_states,
    computed,
    difference,
    everywhere,
    frozen_head,
    moved,
    new_head,
    texts_of,
)

WINDOWS = [Window(0, 4), Window(2, 3), Window(3, 2)]
SLOW = pytest.mark.slow
V = SHAPE.vocab_size


def windowed(sinks: int, recent: int) -> Callable[[int, int], list[tuple[int, int]]]:
    """The keys that a query sees, in place of `naive_unroll.seen`."""

    def seen(anchor: int, step: int) -> list[tuple[int, int]]:
        first = anchor + step - recent + 1  # the oldest place that still counts as recent
        true = [(slot, 0) for slot in range(anchor + 1) if slot < sinks or slot >= first]
        return true + [
            (anchor, drafted) for drafted in range(1, step + 1) if anchor + drafted >= first
        ]

    return seen


def windowed_head(
    folder: Path, name: str, window: Window | None, dtype: torch.dtype = torch.float32, **more: Any
) -> Any:
    """A head with a window; `two blocks` is EAGLE-1's with a second one."""
    if name == "two blocks":
        torch.manual_seed(2)
        shape = LlamaConfig(**{**SHAPE.to_dict(), "num_hidden_layers": 2})
        return moved(Eagle1(Eagle1.Settings(window=window, noise=0.0), shape)).to(dtype)
    return new_head(folder, name, dtype, window=window, **more)


# -- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.quick("hass-Window(sinks=3, recent=2)")
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("name", ["eagle3.1", "hass"])
def test_loss_and_all_gradients_equal_the_loop(
    tmp_path: Path, name: str, window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At three steps, of which a window holds fewer or more; over several texts, and one of many pieces."""
    monkeypatch.setattr(naive_unroll, "seen", windowed(window.sinks, window.recent))
    assert difference(windowed_head(tmp_path, name, window, steps=3), SPANS, torch.float32) < 1e-5
    if window is WINDOWS[1]:
        assert (
            difference(windowed_head(tmp_path, name, window, steps=2), LONG, torch.float32) < 1e-5
        )


@pytest.mark.parametrize("steps", [1, 4])
def test_in_fp64_it_is_the_loop_to_rounding(
    tmp_path: Path, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EAGLE-1's network at one step and at more."""
    monkeypatch.setattr(naive_unroll, "seen", windowed(2, 5))
    assert (
        difference(
            windowed_head(tmp_path, "hass", Window(2, 5), torch.float64, steps=steps),
            SPANS,
            torch.float64,
        )
        < 1e-6
    )


def test_further_blocks_see_windows_too() -> None:
    """Two blocks over a text, each with the window: training's states are those of a masked forward."""
    window, frozen = Window(2, 5), frozen_head(torch.float64)
    head = windowed_head(Path(), "two blocks", window, torch.float64)
    (text,) = texts_of({90: [(2, 90)]}, torch.float64)
    with torch.no_grad():
        trained = head.unroll(collate([text], TAPS), frozen, 1).states[0]
        assert text.features is not None
        hidden = text.features[None, :-2, -1]
        masked = causal_states(head, text.tokens[None, 1:-1], hidden, 0, frozen)[0]
        head.settings = Eagle1.Settings()
        whole = causal_states(head, text.tokens[None, 1:-1], hidden, 0, frozen)[0]
    torch.testing.assert_close(trained, masked, rtol=0, atol=1e-12)
    assert (trained - whole).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["eagle3.1", "hass"])
def test_a_window_longer_than_every_text_trains_as_none(tmp_path: Path, name: str) -> None:
    """The same loss and the same gradients, to the bit."""
    batch, frozen = collate(texts_of(SPANS, torch.float32), TAPS), frozen_head(torch.float32)
    ours, whole = (
        computed(windowed_head(tmp_path, name, window, steps=3), batch, frozen)
        for window in (Window(1, 19), None)
    )
    assert all(torch.equal(ours[part], value) for part, value in whole.items())


FAULTS = {
    "a row too few": (2, 3),
    "a row too many": (2, 5),
    "a sink too few": (1, 4),
    "a sink too many": (3, 4),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ["eagle3", "hass"])
def test_a_wrong_window_is_seen(
    tmp_path: Path, name: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop with another window is not taken for ours."""
    monkeypatch.setattr(naive_unroll, "seen", windowed(*FAULTS[fault]))
    assert (
        difference(windowed_head(tmp_path, name, Window(2, 4), steps=3), ONE, torch.float32) > 1e-3
    )


# -- drafting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["eagle3.1", "hass"])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_each_step_of_training_is_a_level_of_drafting(
    tmp_path: Path, name: str, window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the text came in pieces, and whatever was dropped of it."""
    drafting_is_training(windowed_head(tmp_path, name, window), monkeypatch)


def draft_text(
    head: Any, pieces: list[int], budget: Budget
) -> list[tuple[Tensor, Tensor, DraftTree]]:
    """Tokens so far, features of these, and the tree behind them, of a random text that comes in such pieces."""
    generator, state = torch.Generator().manual_seed(5), head.open()
    tokens = torch.randint(V, (sum(pieces) + len(pieces),), generator=generator)
    features = torch.randn(
        len(tokens), len(head.taps), SHAPE.hidden_size, generator=generator, dtype=torch.float64
    )
    state.admit(0)
    drafts, end = [], 0
    for count in pieces:
        start, end = end, end + count
        update = Committed(tokens[start:end], features[start:end], int(tokens[end]))
        drafts.append(
            (tokens[: end + 1], features[:end], state.propose({0: update}, {0: budget})[0])
        )
    return drafts


def compare_with_loop(head: Any, pieces: list[int], budget: Budget) -> float:
    """The largest difference of a node's likelihood from that by the loop, over all paths of all trees."""
    worst, frozen, weights = 0.0, frozen_head(torch.float64), dict(head.state_dict())
    for tokens, features, tree in draft_text(head.bind(frozen), pieces, budget):
        assert tree.likelihoods is not None
        for leaf in range(1, len(tree)):
            path = [leaf]
            while int(tree.parents[path[0]]) > 0:
                path.insert(0, int(tree.parents[path[0]]))
            drafted, anchor = tree.tokens[path], len(features) - 1
            text = torch.cat([tokens, drafted]), features
            logits = naive_unroll.LOGITS[head.settings.kind](
                weights, head.settings, head.shape, text, frozen, {anchor: len(path)}
            )
            total = sum(
                logits[anchor, step].log_softmax(-1)[token] for step, token in enumerate(drafted)
            )
            worst = max(worst, float((total - tree.likelihoods[leaf]).abs()))
    return worst


PIECES = [1, 3, 2, 20, 1, 1, 4, 1, 1, 30, 2]
TREE = Budget(5, 4, 2, sharpness=1)  # likelihoods are those of the head
CHAIN = Budget(5, 5, 1, sharpness=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "window"),
    [
        ("hass", WINDOWS[1]),
        ("eagle3", WINDOWS[0]),
        pytest.param("eagle3 normed residual", WINDOWS[2], marks=SLOW),
    ],
)
def test_all_paths_are_those_of_a_masked_forward(
    tmp_path: Path, name: str, window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees deeper than the window, behind texts of which most is dropped, in parts of a few tokens: true positions."""
    monkeypatch.setattr(naive_unroll, "seen", windowed(window.sinks, window.recent))
    monkeypatch.setattr(text_state, "PART", 8)
    head = windowed_head(tmp_path, name, window, torch.float64)
    assert (
        compare_with_loop(head, PIECES, TREE) < 1e-5
        and compare_with_loop(head, PIECES[3:], CHAIN) < 1e-5
    )


def keep_positions(self: TextState, slots: Any) -> None:
    """Columns are dropped, and the text seems shorter."""
    drop(self, slots)
    self.dropped = dict.fromkeys(self.dropped, 0)


def drop_sinks(self: SlotCache, gaps: Any) -> None:
    """Columns are dropped from the first on."""
    forget(self, {slot: (0, stop - start) for slot, (start, stop) in gaps.items()})


drop, forget, hides = TextState._drop_unseen, SlotCache.drop, Window.hides


@pytest.mark.slow
@pytest.mark.parametrize(
    ("home", "part", "fault"),
    [
        (TextState, "_drop_unseen", keep_positions),
        (SlotCache, "drop", drop_sinks),
        (head_state, "_hide_levels", lambda seen, begin: seen),
        (Window, "hides", lambda window, place, row, *rest: hides(window, place, row - 99, *rest)),
        (text_state, "causal_mask", lambda *given: text_state_mask(*given[:3])),
    ],
    ids=[
        "positions are columns",
        "sinks are dropped",
        "old levels are seen",
        "all is seen",
        "read without a window",
    ],
)
def test_a_wrong_draft_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Any, part: str, fault: Any
) -> None:
    """Planted faults in what drafting keeps and hides."""
    monkeypatch.setattr(naive_unroll, "seen", windowed(2, 2))
    head = windowed_head(tmp_path, "hass", Window(2, 2), torch.float64)
    assert compare_with_loop(head, PIECES[:8], CHAIN) < 1e-5
    monkeypatch.setattr(home, part, fault)
    assert compare_with_loop(head, PIECES[:8], CHAIN) > 1e-3


text_state_mask = text_state.causal_mask


@pytest.mark.parametrize("name", ["eagle3.1", "hass"])
def test_a_window_longer_than_every_text_drafts_as_none(tmp_path: Path, name: str) -> None:
    """The same trees with the same likelihoods, to the bit."""
    frozen = frozen_head(torch.float64)
    heads = [
        windowed_head(tmp_path, name, window, torch.float64).bind(frozen)
        for window in (Window(3, 90), None)
    ]
    for (*_, ours), (*_, whole) in zip(
        *(draft_text(head, PIECES, TREE) for head in heads), strict=True
    ):
        assert torch.equal(ours.tokens, whole.tokens) and torch.equal(ours.parents, whole.parents)
        assert ours.likelihoods is not None and whole.likelihoods is not None
        assert torch.equal(ours.likelihoods, whole.likelihoods)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "sampling"),
    [
        ("eagle3", "mixed", "T=1"),
        pytest.param("hass", "drawn", "T=1", marks=SLOW),
        pytest.param("two blocks", "dynamic", "T=0", marks=SLOW),
    ],
)
def test_every_row_drafts_as_if_it_were_alone(
    tmp_path: Path, name: str, kind: str, sampling: str
) -> None:
    """Rows of other lengths, of which other columns are dropped, that come and go."""
    head = windowed_head(tmp_path, name, Window(2, 4), torch.float64).bind(
        frozen_head(torch.float64)
    )
    assert play(head, BUDGETS[kind], SAMPLINGS[sampling], seed=0) > 20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget", "texts"),
    [
        ("chain", 1),
        pytest.param("dynamic", 3, marks=SLOW),
        pytest.param("published", 2, marks=SLOW),
    ],
)
def test_one_capture_drafts_all_later_cycles(tmp_path: Path, budget: str, texts: int) -> None:
    """Loops of static shapes hold windows too, and outgrow no room."""
    head = windowed_head(tmp_path, "eagle3.1", Window(2, 4), torch.float64).bind(
        frozen_head(torch.float64)
    )
    assert replay(head, STATIC_BUDGETS[budget], Sampling(), texts, cycles=8).captured == 1


def test_what_is_kept_does_not_grow_with_the_text(tmp_path: Path) -> None:
    """Nor what a level of a draft is timed by; a text's length is that of all of it."""
    window, frozen = Window(4, 32), frozen_head(torch.float64)
    head = windowed_head(tmp_path, "eagle3", window, torch.float64).bind(frozen)
    state: HeadState = head.open()
    state.admit(0)
    for count in (3000, 5, 1):
        features = torch.randn(count, len(head.taps), SHAPE.hidden_size, dtype=torch.float64)
        state.propose({0: Committed(torch.arange(count) % V, features, 1)}, {0: TREE})
    assert state.text_length(0) == 3006 and state.cache.lengths[0] <= window.most
    assert state.cache.sizes[1] <= (window.most + text_state.PART) * 3 // 2
    shapes: list[int] = []
    read = head.read
    head.read = lambda *given: (
        shapes.append(given[3].shape[-1] if given[3] is not None else 0) or read(*given)
    )
    head.probe(8192, 3, 3)()
    assert shapes[-1] == window.most + 3


def test_a_text_that_parts_behind_dropped_columns_is_drafted_for_as_two(tmp_path: Path) -> None:
    """Both rows, of which the second came by a fork, draft as texts that were told all of it."""
    head = windowed_head(tmp_path, "eagle3", Window(2, 8), torch.float64).bind(
        frozen_head(torch.float64)
    )
    generator = torch.Generator().manual_seed(6)
    features = torch.randn(
        46, len(head.taps), SHAPE.hidden_size, generator=generator, dtype=torch.float64
    )
    shared, *ends = (
        torch.randint(V, (40,), generator=generator),
        torch.arange(6),
        torch.arange(7, 13),
    )
    texts = {row: torch.cat([shared, end]) for row, end in enumerate(ends)}

    def tell(state: Any, start: int, end: int, rows: list[int]) -> list[list[int]]:
        told = {row: Committed(texts[row][start:end], features[start:end], 7) for row in rows}
        return [
            tree.tokens.tolist() for tree in state.propose(told, dict.fromkeys(rows, TREE)).values()
        ]

    forked, alone = head.open(), head.open()
    for state, row in ((forked, 0), (alone, 0), (alone, 1)):
        state.admit(row)
    tell(forked, 0, 40, [0])
    tell(alone, 0, 40, [0, 1])
    assert alone.dropped[0]
    forked.fork(0, 1)
    assert tell(forked, 40, 46, [0, 1]) == tell(alone, 40, 46, [0, 1])


def test_a_batch_of_texts_trains_whatever_is_supervised(tmp_path: Path) -> None:
    """Texts of one token, and of none that counts, beside one longer than the window."""
    head, frozen = windowed_head(tmp_path, "eagle3", Window(1, 3)), frozen_head(torch.float32)
    parts = computed(
        head, collate([*everywhere([1, 3, 40]), *texts_of({5: []}, torch.float32)], TAPS), frozen
    )
    assert all(value.isfinite().all() for value in parts.values())
