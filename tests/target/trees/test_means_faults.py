"""Each fault of states that is planted on purpose is seen by comparing answers with the untouched model's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle.core.verify import Choose, Sampling
from eagle.target.state import TargetState
from eagle.target.trees import sequence_states
from eagle.target.trees.reading import Reading, States
from eagle.target.trees.sequence_states import RowStates, SequenceStates
from eagle.target.trees.tree_plan import Plan
from tests.batches import Request
from tests.families import random_tokens
from tests.own_answers import whole_texts
from tests.target.trees.test_means import DRAFTERS, Own, answer_in_turn, continue_prompts, own

pytestmark = pytest.mark.slow
# states that are read by paths, and by levels
TYPES = ["qwen3_5_text", "jamba"]
Fault = Callable[[pytest.MonkeyPatch], None]


def sibling_state(patch: pytest.MonkeyPatch) -> None:
    """Let a node go on from the state of its parent's sibling."""
    find = sequence_states.find_parents

    def find_wrong(seen: Tensor | None, *rest: Any) -> list[list[int]]:
        # each list holds the parent of every node
        found = find(seen, *rest)

        for parents in found:
            right = list(parents)
            for node, parent in enumerate(right):
                # siblings that come before the parent
                elder = [other for other in range(parent) if right[other] == right[parent]]
                if parent > 0 and elder:
                    parents[node] = elder[0]

        return found

    patch.setattr(sequence_states, "find_parents", find_wrong)


def replay_one_short(patch: pytest.MonkeyPatch) -> None:
    """Leave the last token of a kept path out of its state."""
    keep = Reading.keep

    def keep_short(self: Reading, paths: Mapping[int, Sequence[int]]) -> dict[int, States]:
        # a path of one node stays whole: there is no state before it
        return keep(self, {row: path[:-1] or path for row, path in paths.items()})

    patch.setattr(Reading, "keep", keep_short)


def padding_enters(patch: pytest.MonkeyPatch) -> None:
    """Read prompts of a batch as long as the longest, with their padding."""
    read = Reading._read_sequences

    def read_padded(self: Reading, *args: Any) -> Any:
        plan = self.plan
        # every row as long as the longest
        chains = [list(range(-1, plan.new - 1)) for _ in plan.parents]
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(self, "plan", Plan(chains, plan.shape[1], plan.new))
            return read(self, *args)

    patch.setattr(Reading, "_read_sequences", read_padded)


def snapshot_late(patch: pytest.MonkeyPatch) -> None:
    """Let what is held after a prompt have read one more token."""
    keep = SequenceStates.keep

    def keep_late(
        self: SequenceStates,
        paths: Mapping[int, Sequence[int]],
        lengths: Mapping[int, int],
    ) -> None:
        late = {}

        for slot, path in paths.items():
            held = self.entries[slot]
            if path and held.reading is not None and lengths[slot] in held.snapshots:
                late[slot] = held.reading.keep({held.seq: path[:1]})[held.seq]

        keep(self, paths, lengths)

        for slot, states in late.items():
            # under the old length, so that nothing else notices
            self.entries[slot].by_length[lengths[slot]] = states

    patch.setattr(SequenceStates, "keep", keep_late)


def not_forked(patch: pytest.MonkeyPatch) -> None:
    """Let a copied sequence keep the states after its prompt."""

    def copy_old(self: SequenceStates, slot: int, other: int) -> None:
        held = self.entries[slot]
        first = held.by_length[min(held.by_length)]
        self.entries[other] = RowStates(dict.fromkeys(held.by_length, first), set(held.snapshots))

    patch.setattr(SequenceStates, "copy", copy_old)


def not_swapped(patch: pytest.MonkeyPatch) -> None:
    """Let a sequence take the slot of one that ended without its states."""
    patch.setattr(SequenceStates, "swap", lambda *_: None)


def answers_are_right(bench: Own, kind: str, requests: list[Request]) -> bool:
    """Tell whether a batch is answered right; drafters that know the answers raise at a wrong one."""
    bench.target.forget()

    try:
        traces = bench.run(DRAFTERS[kind](bench.target, requests), requests, batch_size=4)
    except AssertionError as error:
        # the drafter's own complaint, and no other failure
        assert "has parted from its answer" in str(error)
        return False
    finally:
        bench.target.forget()

    return [trace.tokens for trace in traces] == [request.answer for request in requests]


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("fault", [sibling_state, replay_one_short, padding_enters])
def test_a_fault_of_reading_is_seen(
    fault: Fault,
    model_type: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """States of trees and of ragged prompts."""
    bench = own(model_type)
    requests = bench.draw(6, seed=2, least=10, most=14)
    assert answers_are_right(bench, "trees", requests)
    fault(monkeypatch)
    assert not answers_are_right(bench, "trees", requests)


def test_a_late_snapshot_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that go on where an earlier one ended."""
    bench = own("qwen3_5_text")
    requests = continue_prompts(bench, seed=3)
    is_right, reused = answer_in_turn(bench, "none", requests)

    assert is_right
    assert reused

    snapshot_late(monkeypatch)

    assert not answer_in_turn(bench, "none", requests)[0]


@pytest.mark.parametrize("model_type", TYPES)
def test_states_that_stay_when_sequences_leave_are_seen(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of one length, so that no state is missed by its length; the first sequence ends first."""
    bench = own(model_type)
    requests = []

    for number, limit in enumerate([2, 9, 9]):
        requests.append(bench.ask(random_tokens(9, seed=number), 0.0, limit, number))

    assert answers_are_right(bench, "none", requests)

    not_swapped(monkeypatch)

    assert not answers_are_right(bench, "none", requests)


def fork_is_right(bench: Own) -> bool:
    """Tell whether a sequence, and its copy that goes on otherwise, give the untouched model's logits."""
    prompt = random_tokens(9, seed=1)
    state = TargetState(bench.target)
    state.begin(prompt, Choose(Sampling()), room=20)
    state.extend({0: [11, 12]})
    # as a beam does that splits
    state.fork(0, 1)
    tails = {0: [5, 6], 1: [7, 8, 9]}
    logits = state.extend(tails)
    read = whole_texts(bench.model)
    expected = [read([*prompt, 11, 12, *tail]) for tail in tails.values()]
    return torch.stack([*logits.values()]).allclose(torch.stack(expected), atol=1e-3)


@pytest.mark.parametrize("model_type", TYPES)
def test_a_copied_sequence_has_states_of_its_own(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both go on from the state after their tokens."""
    assert fork_is_right(own(model_type))
    not_forked(monkeypatch)
    assert not fork_is_right(own(model_type))
