"""The comparison of methods: how long an arm trains, what is counted by level, what the tables say of it."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from bench.methods import seconds_of, steps_of, written
from bench.methods_arms import ARMS, METHODS, TWICE
from bench.methods_replay import along
from bench.methods_report import ABLATION_SHAPES, difference, length, pairs_table, rates
from eagle import DraftTree, Target
from eagle.core.decode import generate
from eagle.core.drafter import Budget, Committed, Drafter, Noise
from eagle.core.tree import chain_paths
from eagle.core.verify import Sampling
from eval.replay import Answer, answer

CLOCK = {"eagle1": 1.0, "hass": 3.0, "eagle3": 4.0}


@pytest.fixture
def args(tmp_path: Path) -> Namespace:
    """A run over 1,000 tokens; every store has ten conversations of 25."""
    for store in {arm.store for arm in ARMS.values()}:
        (tmp_path / store).mkdir()
        (tmp_path / store / "index.json").write_text(json.dumps({"examples": {"tokens": 250, "count": 10}}))
    return Namespace(work=str(tmp_path), tokens=1000)


def test_arms_read_equally_many_tokens_with_their_starts(args: Namespace) -> None:
    """Ten steps of four conversations of 25 tokens are 1,000; what a start has read counts."""
    steps = {name: steps_of(args, arm, lambda: CLOCK) for name, arm in ARMS.items() if arm.as_long_as is None}
    read = {name: count + steps.get(ARMS[name].start or "", 0) for name, count in steps.items()}
    assert {read[name] for name in ("EAGLE-1", "HASS", "EAGLE-3")} == {10}
    assert {read[name] for name in (TWICE, "HASS, twice the tokens")} == {20}
    assert (steps["HASS"], steps["HASS, twice the tokens"]) == (5, 10)


def test_arms_of_equal_time_are_within_a_step_of_it(args: Namespace) -> None:
    """By a known clock, in which EAGLE-3 takes 40 seconds and EAGLE-1 ten, each with its starts."""
    timed = {name: arm for name, arm in METHODS.items() if arm.as_long_as}
    assert {name: steps_of(args, arm, lambda: CLOCK) for name, arm in timed.items()} == {
        "EAGLE-1, equal time": 40,
        "HASS, equal time": 10,
        "EAGLE-3, in EAGLE-1's time": 2,
        "HASS, no top-10 term, in EAGLE-1's time": 2,
    }
    for name, arm in timed.items():
        seconds = 40 if arm.as_long_as == "EAGLE-3" else 10
        assert abs(seconds_of(args, name, lambda: CLOCK) - seconds) <= CLOCK[arm.method]


def test_no_arm_starts_from_one_that_comes_later() -> None:
    """A head must be there before another goes on from it."""
    for place, arm in enumerate(ARMS.values()):
        assert arm.start is None or list(ARMS).index(arm.start) < place


class Knowing(Drafter):
    """Drafts the answers that it was told, but for every fifth token."""

    taps: tuple[int, ...] = ()

    def __init__(self, answers: list[Answer]) -> None:
        self.answers = answers

    def begin(self, noise: Noise | None = None) -> None:
        """Forget the text."""
        self.text: list[int] = []

    def propose(self, news: Committed, budget: Budget) -> DraftTree:
        """What follows."""
        self.text += news.tokens.tolist()
        text = [*self.text, news.root]
        tokens = next(one.tokens for one in self.answers if one.tokens[: len(text)] == text)
        following = enumerate(tokens[len(text) : len(text) + budget.depth], len(text))
        return DraftTree.chain([news.root, *(token if place % 5 else 0 for place, token in following)])


@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_what_is_kept_is_what_decoding_keeps(tiny_target: Target, heat: float) -> None:
    """Tokens, cycles and the levels asked for and kept, against a loop over the cycles of `generate`."""
    budget, samplings = Budget.fixed(chain_paths(3)), [Sampling(heat, request=number) for number in (0, 1)]
    prompts = [tiny_target.chat(text) for text in ("What does copy do?", "And a list?")]
    answers = [
        answer(tiny_target, (), prompt, limit=24, sampling=sampling)
        for prompt, sampling in zip(prompts, samplings, strict=True)
    ]
    rows, asked, kept = [], [0, 0, 0], [0, 0, 0]
    for prompt, sampling in zip(prompts, samplings, strict=True):
        options: dict[str, Any] = {"sampling": sampling, "max_new_tokens": 24, "budget": budget}
        cycles = generate(tiny_target, Knowing(answers), prompt, **options).cycles
        rows.append([sum(cycle.committed for cycle in cycles), len(cycles)])
        for cycle in cycles:
            reached = [level for level in range(cycle.depth) if level <= len(cycle.kept)]
            asked = [count + (level in reached) for level, count in enumerate(asked)]
            kept = [count + (level + 1 <= len(cycle.kept)) for level, count in enumerate(kept)]
    assert along(tiny_target, Knowing(answers), answers, budget) == {"rows": rows, "asked": asked, "kept": kept}
    assert kept[0] > kept[2] > 0


def run(arm: str, seed: int, rows: list[list[int]]) -> dict[str, Any]:
    """A run whose every shape kept the same."""
    shapes = {*ABLATION_SHAPES, "chain of 4, T = 0"}
    told = {shape: {"rows": rows, "asked": [8, 4], "kept": [4, 1]} for shape in shapes}
    return {"arm": arm, "seed": seed, "steps": 1, "cpu_seconds": 1.0, "curve": [], "decoded": told}


def test_differences_pool_cycles_and_pair_prompts() -> None:
    """Tokens over cycles of all prompts and seeds; a prompt without cycles is no pair."""
    runs = [run("EAGLE-1", 0, [[4, 2], [9, 3], [0, 0]]), run("EAGLE-1", 1, [[2, 2], [3, 3], [0, 0]])]
    runs += [run("EAGLE-3", 0, [[6, 2], [9, 3], [0, 0]]), run("EAGLE-3", 1, [[4, 2], [6, 3], [0, 0]])]
    results = {"runs": runs, "machine": {}}
    shape = "chain of 4, T = 0"
    assert length(results, "EAGLE-1", shape).value == pytest.approx(18 / 10)
    found = difference(results, "EAGLE-1", "EAGLE-3", shape)
    assert (found.pairs, found.estimate.value) == (4, pytest.approx((25 - 18) / 10))
    assert rates(results, "EAGLE-3", "0") == [0.5, 0.25]
    assert "| EAGLE-3 over EAGLE-1 | " in pairs_table(results)


def test_two_processes_write_into_one_file(tmp_path: Path) -> None:
    """Runs that another has written in the meantime stay; the order is that of the arms."""
    path = tmp_path / "methods.json"
    written(path, {"runs": [run("EAGLE-3", 0, [])]})
    written(path, {"runs": [run("EAGLE-1", 1, []), run("EAGLE-1", 0, [])]})
    told = [(one["arm"], one["seed"]) for one in json.loads(path.read_text())["runs"]]
    assert told == [("EAGLE-1", 0), ("EAGLE-1", 1), ("EAGLE-3", 0)]
    assert not list(tmp_path.glob("*.part"))
