"""Each fault of states that is planted on purpose is seen by comparing answers with the untouched model's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle.core.verify import Choose, Sampling
from eagle.target.cache import TreeCache
from eagle.target.state import TargetState
from eagle.target.trees import text_states
from eagle.target.trees.reading import Reading, States
from eagle.target.trees.text_states import Slot, TextStates
from eagle.target.trees.tree_plan import Plan
from tests.batches import Request
from tests.families import random_tokens
from tests.own_answers import answer_naively, whole_texts
from tests.target.test_means import DRAFTERS, Own, answer_in_turn, continue_prompts, own

pytestmark = pytest.mark.slow
BY_PATHS, BY_LEVELS = ["qwen3_5_text", "mamba2"], ["jamba"]
Fault = Callable[[pytest.MonkeyPatch], None]


def sibling_state(patch: pytest.MonkeyPatch) -> None:
    """A node goes on from the state of its parent's sibling."""
    find = text_states.find_parents

    def wrong(seen: Tensor | None, *rest: Any) -> list[list[int]]:
        found = find(seen, *rest)
        for parents in found:
            right = list(parents)
            for node, parent in enumerate(right):
                siblings = [
                    other for other in range(parent) if parent > 0 and right[other] == right[parent]
                ]
                parents[node] = siblings[0] if siblings else parent
        return found

    patch.setattr(text_states, "find_parents", wrong)


def replay_one_short(patch: pytest.MonkeyPatch) -> None:
    """The state behind a kept path lacks its last token."""
    keep = Reading.keep

    def wrong(self: Reading, paths: Mapping[int, Sequence[int]]) -> dict[int, States]:
        return keep(self, {text: path[:-1] or path for text, path in paths.items()})

    patch.setattr(Reading, "keep", wrong)


def padding_enters(patch: pytest.MonkeyPatch) -> None:
    """Prompts of a batch are read as long as the longest, with their padding."""
    read = Reading._read_texts

    def wrong(self: Reading, *args: Any) -> Any:
        plan = self.plan
        self.plan = Plan(
            [list(range(-1, plan.new - 1)) for _ in plan.parents], plan.shape[1], plan.new
        )
        try:
            return read(self, *args)
        finally:
            self.plan = plan

    patch.setattr(Reading, "_read_texts", wrong)


def snapshot_late(patch: pytest.MonkeyPatch) -> None:
    """What is held behind a prompt has read one more token."""
    keep = TextStates.keep

    def wrong(
        self: TextStates, paths: Mapping[int, Sequence[int]], lengths: Mapping[int, int]
    ) -> None:
        late = {}
        for slot, path in paths.items():
            held = self.slots[slot]
            if path and held.reading is not None and lengths[slot] in held.snapshots:
                late[slot] = held.reading.keep({held.seq: path[:1]})[held.seq]
        keep(self, paths, lengths)
        for slot, states in late.items():
            self.slots[slot].by_length[lengths[slot]] = states

    patch.setattr(TextStates, "keep", wrong)


def not_forked(patch: pytest.MonkeyPatch) -> None:
    """A copied row keeps the states behind its prompt."""

    def wrong(self: TextStates, slot: int, other: int) -> None:
        held = self.slots[slot]
        self.slots[other] = Slot(
            dict.fromkeys(held.by_length, held.by_length[min(held.by_length)]), set(held.snapshots)
        )

    patch.setattr(TextStates, "copy", wrong)


def not_swapped(patch: pytest.MonkeyPatch) -> None:
    """A row takes the place of one that ended without its states."""
    patch.setattr(TextStates, "swap", lambda *_: None)


def answers_are_right(bench: Own, kind: str, requests: list[Request], batch_size: int = 4) -> bool:
    """Whether a batch answers as the untouched model does; drafters that know the answers tell a wrong one too."""
    bench.target.forget()
    try:
        traces = bench.run(DRAFTERS[kind](bench.target, requests), requests, batch_size)
    except AssertionError as error:
        assert "has parted from its answer" in str(error)
        return False
    finally:
        bench.target.forget()
    return [trace.tokens for trace in traces] == [request.answer for request in requests]


@pytest.mark.parametrize("model_type", [*BY_PATHS, *BY_LEVELS])
@pytest.mark.parametrize("fault", [sibling_state, replay_one_short, padding_enters])
def test_a_fault_of_reading_is_seen(
    fault: Fault, model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States of trees and of ragged prompts."""
    bench = own(model_type)
    requests = bench.draw(6, seed=2, least=10, most=14)
    assert answers_are_right(bench, "trees", requests)
    fault(monkeypatch)
    assert not answers_are_right(bench, "trees", requests)


@pytest.mark.parametrize("model_type", BY_PATHS)
def test_a_late_snapshot_is_seen(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that go on where an earlier one ended."""
    bench = own(model_type)
    requests = continue_prompts(bench, seed=3)
    right, reused = answer_in_turn(bench, "none", requests)
    assert right and reused
    snapshot_late(monkeypatch)
    assert not answer_in_turn(bench, "none", requests)[0]


@pytest.mark.parametrize("model_type", [*BY_PATHS, *BY_LEVELS])
def test_states_that_stay_when_rows_leave_are_seen(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of one length, so that no state is missed by its length; the first row ends first."""
    bench, requests = own(model_type), []
    for number, limit in enumerate([2, 9, 9]):
        request = Request(random_tokens(9, seed=number), {"temperature": 0.0}, limit, number)
        request.answer = answer_naively(bench.logits(), request.prompt, limit, request.sampling)
        requests.append(request)
    assert answers_are_right(bench, "none", requests)
    not_swapped(monkeypatch)
    assert not answers_are_right(bench, "none", requests)


def fork_is_right(bench: Own) -> bool:
    """Whether a row, and its copy that goes on otherwise, give the untouched model's logits."""
    state, prompt, parts = (
        TargetState(bench.target),
        random_tokens(9, seed=1),
        {0: [5, 6], 1: [7, 8, 9]},
    )
    state.begin(prompt, Choose(Sampling()), room=20)
    state.extend({0: [11, 12]})
    state.fork(0, 1)
    logits = state.extend(parts)
    expected = [whole_texts(bench.model)([*prompt, 11, 12, *part]) for part in parts.values()]
    return torch.stack([*logits.values()]).allclose(torch.stack(expected), atol=1e-3)


@pytest.mark.parametrize("model_type", [*BY_PATHS, *BY_LEVELS])
def test_a_copied_row_has_states_of_its_own(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both rows go on from the state behind their text."""
    assert fork_is_right(own(model_type))
    not_forked(monkeypatch)
    assert not fork_is_right(own(model_type))


def test_a_slot_that_no_text_was_written_to_can_be_swapped() -> None:
    """Buffers grow to it, as a row may leave before the last one's prompt is read."""
    cache = TreeCache(1)
    cache.reserve(1, 4)
    values = torch.arange(8.0).view(1, 1, 4, 2)
    cache.layers[0].update(values, values)  # type: ignore[attr-defined]
    cache.length = 4
    cache.reserve(3, 4)
    cache.swap(0, 2)
    assert cache.lengths == [0, 0, 4]
    assert torch.equal(cache.layers[0].key_rows.buffer[2:, :, :4], values)  # type: ignore[attr-defined]
