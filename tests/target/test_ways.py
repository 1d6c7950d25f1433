"""Paths and levels in one text: which way a forward takes, and that no answer depends on it."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch

from eagle import Target, beam_search
from eagle.target import reader
from eagle.target.trees import mixers
from eagle.target.trees.mixers import Mixers, State
from eagle.target.trees.reading import Reading
from eagle.target.trees.tree_plan import Paths, Plan
from tests.every_type import build
from tests.families import random_tokens
from tests.own_answers import search_naively
from tests.target.test_means import (
    DRAFTERS,
    PATHS,
    answer_in_turn,
    assert_own,
    continue_prompts,
    own,
)
from tests.target.test_means_faults import (
    Fault,
    answers_are_right,
    replay_one_short,
    sibling_state,
    snapshot_late,
)

EVERY = [
    pytest.param(name, marks=() if name == "qwen3_5_text" else pytest.mark.slow) for name in PATHS
]


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[bool, bool]]:
    """Every forward takes a way at random; how many took which, alone or going on from another."""
    dice, counts = random.Random(0), Counter[tuple[bool, bool]]()

    def takes_levels(self: Mixers, plan: Plan, *, grows: bool = False) -> bool:
        if self.most_bytes is None:
            return self.by_levels
        levels = dice.random() < (0.8 if grows else 0.5)
        counts[levels, grows] += 1
        return levels

    monkeypatch.setattr(Mixers, "takes_levels", takes_levels)
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("model_type", EVERY)
def test_answers_do_not_depend_on_the_way(
    model_type: str, ways: Counter[tuple[bool, bool]]
) -> None:
    """Ragged batches whose trees and growing drafts are read by either way in turn, at T = 0 and above."""
    bench, dice = own(model_type), random.Random(1)
    assert "paths or levels by cost" in bench.target.describe()
    for number, kind in enumerate(["trees", "hybrid", "eagle3"]):
        assert_own(bench, kind, bench.draw(4, seed=number + 20, least=8, most=12), 3, dice)
    assert min(ways[levels, False] for levels in (False, True)) > 5, ways


@pytest.mark.parametrize("model_type", EVERY)
def test_beams_and_prefixes_do_not_depend_on_the_way(
    model_type: str, ways: Counter[tuple[bool, bool]]
) -> None:
    """A search goes on from its forest by either way; a prompt, from states that either way left."""
    bench, prompt = own(model_type), random_tokens(7, seed=2)
    expected, scores = search_naively(bench.logits, prompt, 3, 7)
    options: dict[str, Any] = {
        "max_new_tokens": 7,
        "stop": [],
        "num_return_sequences": 3,
        "beams": 3,
    }
    for kind in ("none", "random", "none"):
        found = beam_search(bench.target, DRAFTERS[kind](bench.target, []), prompt, **options)
        assert found.near_ties or found.tokens == expected
        assert torch.tensor(found.scores).allclose(torch.tensor(scores), atol=1e-4)
    right, reused = answer_in_turn(bench, "random", continue_prompts(bench, seed=5))
    assert right and reused and ways[True, True] and ways[True, False] and ways[False, False]


def stale_levels(patch: pytest.MonkeyPatch) -> None:
    """A path of a tree that was read by levels leaves the states that its last node began with."""
    behind = Reading._states_after

    def wrong(self: Reading, mixer: Any, rows: Paths) -> list[State]:
        if not self.levels or rows.longest == 1:
            return behind(self, mixer, rows)
        return [self.node_states[mixer][text, path[-2]] for text, path in rows.paths]

    patch.setattr(Reading, "_states_after", wrong)


def other_inputs(patch: pytest.MonkeyPatch) -> None:
    """Paths that go on from levels get the inputs of the first node for those of all earlier ones."""
    extend = Reading.extend

    def wrong(self: Reading, plan: Plan, *, levels: bool) -> Reading:
        other = extend(self, plan, levels=levels)
        if self.levels and not levels:
            first = self.plan.paths(
                [(text, [0] * self.plan.shape[1]) for text in range(self.plan.shape[0])]
            )
            other.inputs = {mixer: first.gather(inputs) for mixer, inputs in other.inputs.items()}
        return other

    patch.setattr(Reading, "extend", wrong)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [sibling_state, replay_one_short, stale_levels])
def test_a_fault_of_either_way_is_seen(
    fault: Fault, ways: Counter[tuple[bool, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """States of trees that are read by paths and by levels in turn."""
    bench = own("qwen3_5_text")
    requests = bench.draw(6, seed=2, least=10, most=14)
    assert answers_are_right(bench, "trees", requests)
    fault(monkeypatch)
    assert not answers_are_right(bench, "trees", requests) and len(ways) == 2


def test_wrong_inputs_of_paths_behind_levels_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search's forest that is begun by levels and goes on by paths."""
    monkeypatch.setattr(Mixers, "takes_levels", lambda self, plan, *, grows=False: not grows)
    bench, prompt = own("qwen3_5_text"), random_tokens(7, seed=2)
    scores = torch.tensor(search_naively(bench.logits, prompt, 3, 6)[1][:1])

    def is_right() -> bool:
        found = beam_search(
            bench.target,
            DRAFTERS["none"](bench.target, []),
            prompt,
            beams=3,
            max_new_tokens=6,
            stop=[],
        )
        return torch.tensor(found.scores).allclose(scores, atol=1e-4)

    assert is_right()
    other_inputs(monkeypatch)
    assert not is_right()


def test_the_cheaper_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths for chains and where states take too much, levels for bushes; elsewhere the weights' traffic decides."""
    found = own("qwen3_5_text").target.reader.mixers
    monkeypatch.setattr(found, "state_bytes", found.weight_bytes // 32)  # as in Qwen3-Next
    monkeypatch.setattr(found, "most_bytes", 100 * found.state_bytes)  # those of three such bushes
    chain, bush, flat = (
        [-1, 0, 1, 2, 3],
        [-1, *[0] * 9, *range(1, 10), *range(10, 19)],
        [-1, -1, -1],
    )

    def takes_levels(*trees: list[int]) -> bool:
        width = max(map(len, trees))
        return found.takes_levels(Plan([*trees], width, width))

    assert [takes_levels(tree) for tree in (chain, bush, flat)] == [False, True, True]
    assert takes_levels(bush, chain) and not takes_levels(*[bush] * 4)
    monkeypatch.setattr(mixers, "STEP_STATES", {})
    assert [takes_levels(tree) for tree in (chain, bush, flat)] == [False, False, True]


def test_levels_are_offered_only_where_they_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small tree refuses levels that leave other states."""
    stale_levels(monkeypatch)
    assert Target(build("qwen3_5_text")).describe() == "mask + mixers over paths"


@pytest.mark.parametrize(
    "model_type", ["jamba", pytest.param("recurrent_gemma", marks=pytest.mark.slow)]
)
def test_levels_read_on_behind_a_long_prefix(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token by token, once that is cheaper than to read the whole prompt again; states of a longer text are seen."""
    bench = own(model_type)
    requests = continue_prompts(bench, seed=3)
    right, few = answer_in_turn(bench, "none", requests)
    monkeypatch.setattr(reader, "STEP_TOKENS", 0)
    right_too, most = answer_in_turn(bench, "none", requests)
    assert right and right_too and few < most
    snapshot_late(monkeypatch)
    assert not answer_in_turn(bench, "none", requests)[0]


def test_steps_that_are_the_truth_read_prompts_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a model reads a whole prompt by another kernel than its next token."""
    monkeypatch.setattr(reader, "STEP_TOKENS", 0)
    bench = own("nemotron_h")
    assert answer_in_turn(bench, "none", continue_prompts(bench, seed=3)) == (True, 0)
