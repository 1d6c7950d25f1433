"""Paths and levels in one sequence: which way a forward takes, and that no answer depends on it."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from eagle import Target
from eagle.target import reader
from eagle.target.trees import mixers
from eagle.target.trees.mixers import Mixers, State
from eagle.target.trees.reading import Reading
from eagle.target.trees.tree_plan import Paths, Plan
from tests.every_type import build
from tests.families import random_tokens
from tests.target.trees.test_means import (
    answer_in_turn,
    assert_own,
    assert_search,
    continue_prompts,
    own,
)
from tests.target.trees.test_means_faults import answers_are_right


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[bool, bool]]:
    """Let every forward take a way at random; count (by levels, going on from another forward)."""
    dice = random.Random(0)
    counts: Counter[tuple[bool, bool]] = Counter()

    def chooses_levels(self: Mixers, plan: Plan, *, grows: bool = False) -> bool:
        # some models are read by one way alone
        if self.most_bytes is None:
            return self.by_levels
        # forwards that go on from levels are rare, and have to occur
        by_levels = dice.random() < (0.8 if grows else 0.5)
        counts[by_levels, grows] += 1
        return by_levels

    monkeypatch.setattr(Mixers, "chooses_levels", chooses_levels)
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "lfm3"])
def test_answers_do_not_depend_on_the_way(
    model_type: str, ways: Counter[tuple[bool, bool]]
) -> None:
    """Ragged batches whose trees and growing drafts are read by either way in turn, at T = 0 and above."""
    bench = own(model_type)
    dice = random.Random(1)

    assert "paths or levels by cost" in bench.target.describe()

    for number, kind in enumerate(["trees", "hybrid", "eagle3"]):
        requests = bench.draw(4, seed=number + 20, least=8, most=12)
        assert_own(bench, kind, requests, batch_size=3, dice=dice)

    assert ways[True, False] > 5
    assert ways[False, False] > 5


@pytest.mark.quick("qwen3_5_text")
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "mamba2"])
def test_beams_and_prefixes_do_not_depend_on_the_way(
    model_type: str, ways: Counter[tuple[bool, bool]]
) -> None:
    """A search goes on from its forest by either way; a prompt, from states that either way left."""
    bench = own(model_type)

    for kind in ("none", "random", "none"):
        assert_search(bench, kind, random_tokens(7, seed=2), beams=3, count=7)

    is_right, reused = answer_in_turn(bench, "random", continue_prompts(bench, seed=5))

    assert is_right
    assert reused
    assert ways.keys() >= {(True, True), (True, False), (False, False)}


def stale_levels(patch: pytest.MonkeyPatch) -> None:
    """Let a path of a tree that was read by levels leave the states that its last node began with."""
    find = Reading._states_after

    def find_stale(self: Reading, mixer: torch.nn.Module, rows: Paths) -> list[State]:
        if not self.levels or rows.longest == 1:
            return find(self, mixer, rows)
        # the state before the last node instead of after it
        return [self.node_states[mixer][row, path[-2]] for row, path in rows.paths]

    patch.setattr(Reading, "_states_after", find_stale)


@pytest.mark.slow
def test_stale_levels_are_seen(
    ways: Counter[tuple[bool, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted fault, in trees that are read by paths and by levels in turn."""
    bench = own("qwen3_5_text")
    requests = bench.draw(6, seed=2, least=10, most=14)

    assert answers_are_right(bench, "trees", requests)

    stale_levels(monkeypatch)

    assert not answers_are_right(bench, "trees", requests)
    assert len(ways) == 2


def test_the_cheaper_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths for chains and where states take too much, levels for bushes; elsewhere the weights' traffic decides."""
    found = own("qwen3_5_text").target.reader.mixers
    # as in Qwen3-Next, with room for the states of three bushes
    monkeypatch.setattr(found, "state_bytes", found.weight_bytes // 32)
    monkeypatch.setattr(found, "most_bytes", 100 * found.state_bytes)
    chain = [-1, 0, 1, 2, 3]
    bush = [-1, *[0] * 9, *range(1, 10), *range(10, 19)]
    flat = [-1, -1, -1]

    def chooses_levels(*trees: list[int]) -> bool:
        width = max(map(len, trees))
        return found.chooses_levels(Plan([*trees], width, width))

    assert [chooses_levels(tree) for tree in (chain, bush, flat)] == [False, True, True]
    # one forward reads both, by one way
    assert chooses_levels(bush, chain)
    assert not chooses_levels(*[bush] * 4)

    # as for mixers whose states are small
    monkeypatch.setattr(mixers, "STEP_STATES", {})

    assert [chooses_levels(tree) for tree in (chain, bush, flat)] == [False, False, True]


def test_levels_are_offered_only_where_they_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small verification tree refuses levels that leave other states."""
    stale_levels(monkeypatch)
    assert Target(build("qwen3_5_text")).describe() == "mask + mixers over paths"


def test_levels_read_on_after_a_long_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Token by token, once that is cheaper than to read the whole prompt again."""
    bench = own("jamba")
    requests = continue_prompts(bench, seed=3)
    is_right, few = answer_in_turn(bench, "none", requests)

    assert is_right

    # a token by itself now costs nothing
    monkeypatch.setattr(reader, "STEP_TOKENS", 0)
    is_right, many = answer_in_turn(bench, "none", requests)

    assert is_right
    assert few < many


def test_steps_that_are_the_truth_read_prompts_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a model reads a whole prompt by another kernel than its next token."""
    monkeypatch.setattr(reader, "STEP_TOKENS", 0)
    bench = own("nemotron_h")
    assert answer_in_turn(bench, "none", continue_prompts(bench, seed=3)) == (True, 0)
