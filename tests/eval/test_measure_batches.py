"""Batches are measured: each row is that of the sequence alone, seconds add up, and a killed run loses nothing."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from trained import finished, launched
from transformers import AutoConfig

from eagle import Target
from eagle.core.budget import Budget
from eagle.core.tree import chain_paths
from eagle.decoding.forward_costs import Costs
from eagle.decoding.goodput import Goodput
from eagle.drafters.recurrent.eagle1 import Eagle1
from eagle.formats.checkpoint import save_head
from eagle.recipe import Recipe
from eagle.target.state import TargetState
from eval.costs import asked_budgets, model_seconds
from eval.measure import measure
from eval.report import markdown, page
from eval.result_files.results import read_results
from eval.result_files.write_results import part_of, read_stored
from tests.eval.jsonl_files import read_lines, write_lines

TEXTS = (
    "What does copy do?",
    "What does chain do?",
    "How do I sort a list of names by their length?",
    "Why?",
)
DRAFTERS = {"ngram": {"head": "ngram"}, "chain": {"budget": {"paths": chain_paths(2)}}}
NAMES = ("none", *DRAFTERS)

# what identifies an answer, but for its batch
KEY = ("drafter", "set", "conversation", "turn", "temperature", "seed")
# columns and figures of cycles that do not depend on the batch
SAME = ("tokens", "text", "finish", "digest", "prompt_tokens", "identical", "loops", "task")
CYCLE = ("nodes", "depth", "accepted", "committed", "context", "path")

Row = dict[str, Any]


def ask(folder: Path, count: int) -> str:
    """Write a file of questions, every fourth of them with a second turn, and return its path."""
    questions = []
    for i in range(count):
        turns = [f"{TEXTS[i % 4]} {i}"]
        if i % 4 == 0:
            turns.append("And how?")
        questions.append({"question_id": i, "turns": turns})
    return str(write_lines(folder / "asked.jsonl", questions))


def make_recipe(recipe: Recipe, target_dir: Path, folder: Path, **section: Any) -> Recipe:
    """Return a recipe with this section `eval`, over a target in fp64 and an untrained head."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(target_dir)
    save_head(
        folder / "run/head",
        Eagle1.for_target(Eagle1.Settings(), config),
        "",
        {},
    )
    values = {**recipe.model_dump(), "eval": section}
    values["target"] |= {"path": str(target_dir), "dtype": "float64"}
    values["train"] |= {"out": str(folder / "run")}
    return Recipe.parse(values, "small")


@pytest.fixture
def small(recipe: Recipe, eight_token_dir: Path, tmp_path: Path) -> Recipe:
    """Seven questions, two of them of two turns, for an untrained head and n-grams."""
    section = {
        "prompts": {"few": ask(tmp_path, 7)},
        "max_new_tokens": 8,
        "temperatures": [0, 1],
        "drafters": DRAFTERS,
    }
    return make_recipe(recipe, eight_token_dir, tmp_path, **section)


def with_eval(recipe: Recipe, **changes: Any) -> Recipe:
    """Return the recipe with some keys of `eval` changed."""
    values = recipe.model_dump(exclude_unset=True)
    values["eval"] |= changes
    return Recipe.parse(values, "small")


def measure_with(recipe: Recipe, **changes: Any) -> Path:
    """Measure with some keys of `eval` changed, and return the results file."""
    return measure(with_eval(recipe, **changes), "small.yaml")


def key_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what identifies an answer, but for the batch that it was decoded in."""
    return tuple(row[name] for name in KEY)


def select(row: Mapping[str, Any], names: Sequence[str]) -> list[Any]:
    """Return these columns of a row."""
    return [row[name] for name in names]


def lines_of(path: Path) -> tuple[list[Row], list[Row]]:
    """Return the rows of answers, and the sums over steps of batches."""
    lines = read_lines(path)
    rows = [line for line in lines if "drafter" in line]
    return rows, [line["batch"] for line in lines if "batch" in line]


def digests(rows: Sequence[Row]) -> dict[Any, str]:
    """Return the digest of each answer's tokens."""
    return {(*key_of(row), row.get("batch_size")): row["digest"] for row in rows}


@pytest.mark.slow
def test_rows_of_batches_are_those_of_sequences_alone(small: Recipe) -> None:
    """Answers in batches of 3 and 5 have the tokens and cycles of the answer alone; seconds add up to the steps'."""
    rows, batches = lines_of(measure_with(small, batch_size=[1, 3, 5]))
    alone = {key_of(row): row for row in rows if "batch_size" not in row}

    # nine turns, three drafters, two temperatures
    assert len(alone) == 9 * 3 * 2
    assert all("latency" not in row for row in alone.values())
    for size in (3, 5):
        group = [row for row in rows if row.get("batch_size") == size]
        assert {key_of(row) for row in group} == alone.keys()

        for row in group:
            expected = alone[key_of(row)]
            assert row["identical"] is True
            assert select(row, SAME) == select(expected, SAME)

            for cycle, expected_cycle in zip(row["cycles"], expected["cycles"], strict=True):
                assert select(cycle, CYCLE) == select(expected_cycle, CYCLE)
            assert row["seconds"] <= row["latency"] + 1e-6

        check_sums(group, [batch for batch in batches if batch["batch_size"] == size], size)


def check_sums(rows: list[Row], batches: list[Row], size: int) -> None:
    """Check that seconds and tokens of a session's rows are those of its steps, and how many rows share a cycle."""
    for session in {row["session"] for row in rows}:
        answers = [row for row in rows if row["session"] == session]
        steps = [batch for batch in batches if batch["session"] == session]
        assert {step["drafter"] for step in steps} == {row["drafter"] for row in answers}

        for name in ("seconds", "cpu_seconds", "tokens"):
            of_steps = sum(step[name] for step in steps)
            assert sum(row[name] for row in answers) == pytest.approx(of_steps, abs=1e-4)

        assert steps[-1]["step"] == sum(step["steps"] for step in steps)

        for step in steps:
            assert 0 < step["texts"] <= size * step["steps"]

        # cycles with one number are the same forward
        forwards = defaultdict(list)
        for row in answers:
            for cycle in row["cycles"]:
                forwards[cycle["number"]].append(cycle)

        whole = 0.0
        for cycles in forwards.values():
            assert {cycle["rows"] for cycle in cycles} == {len(cycles)}
            whole += sum(cycles[-1]["seconds"].values())

        assert whole <= sum(row["seconds"] for row in answers) + 1e-4
        assert max(map(len, forwards.values())) == min(size, len(answers))


def most_at_a_time(rows: list[Row]) -> int:
    """Return the largest number of sequences that shared a cycle."""
    return max(max(cycle["rows"] for cycle in row["cycles"]) for row in rows)


def test_a_small_cache_delays_admission(small: Recipe) -> None:
    """Fewer sequences share a batch than asked for, with the same answers; a prompt without room is an error."""
    section = {"batch_size": 4, "temperatures": [0]}
    wide, _ = lines_of(measure_with(small, **section))
    path = measure_with(small, **section, max_tokens_in_cache=120)
    narrow, _ = lines_of(path)

    # the wide run's file was moved aside
    assert len(list(path.parent.glob("results-*"))) == 1
    assert digests(narrow) == digests(wide)
    assert most_at_a_time(narrow) < most_at_a_time(wide) == 4

    with pytest.raises(ValueError, match="raise max_tokens_in_cache"):
        measure_with(small, **section, max_tokens_in_cache=20)


@pytest.mark.slow
def test_other_sizes_are_added_to_a_file(small: Recipe) -> None:
    """A run of batches goes on in the file of single sequences, and asked for again adds nothing."""
    path = measure_with(small, temperatures=[0])
    single = path.read_bytes()
    measure_with(small, temperatures=[0], batch_size=[1, 4])
    both = path.read_bytes()

    assert both.startswith(single)

    measure_with(small, temperatures=[0], batch_size=4)
    assert path.read_bytes() == both
    sizes = [(group.batch_size, len(group.answers)) for group in read_results(path).groups()]
    assert Counter(sizes) == {(1, 9): 3, (4, 9): 3}


def test_drafters_take_turns_set_by_set(small: Recipe, tmp_path: Path) -> None:
    """Plain decoding goes first in each set, then the others, each time another one first."""
    more = write_lines(tmp_path / "more.jsonl", [{"turns": ["What does accumulate do?"]}])
    prompts = {"few": small.eval.prompts["few"], "more": str(more)}
    rows, _ = lines_of(measure_with(small, prompts=prompts, batch_size=8))
    orders: dict[Any, list[str]] = defaultdict(list)
    for row in rows:
        order = orders[row["temperature"], row["set"]]
        if row["drafter"] not in order:
            order.append(row["drafter"])

    turns = [["none", "ngram", "chain"], ["none", "chain", "ngram"]]

    assert list(orders.values()) == turns * 2


class OneLevel:
    """A policy that drafts one level at most."""

    draw = None

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.nodes = budget.nodes

    def within(self, levels: int) -> Budget:
        """Return the next budget."""
        return self.budget.within(min(levels, 1))


@pytest.mark.slow
def test_a_policy_is_measured_beside_its_drafter(
    small: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NAME+policy has costs measured at all batch sizes, the same answers, and drafts of its own."""
    asked: list[tuple[int, Any]] = []

    def measure_costs(
        target: Target,
        drafter: Any,
        prompts: list[list[int]],
        budget: Any,
        **more: Any,
    ) -> OneLevel:
        asked.append((len(prompts), more["batch_sizes"]))
        return OneLevel(budget)

    monkeypatch.setattr(Goodput, "measure", measure_costs)
    path = measure_with(
        small,
        batch_size=[1, 4],
        temperatures=[0],
        goodput_policy=True,
    )
    rows, _ = lines_of(path)

    # a batch of four ends with two sequences, so that size is measured too
    assert asked == [(7, [1, 2, 4])] * 2
    assert {row["identical"] for row in rows} == {True}

    depths: dict[str, int] = defaultdict(int)
    for row in rows:
        deepest = max(cycle["depth"] for cycle in row["cycles"])
        depths[row["drafter"]] = max(depths[row["drafter"]], deepest)

    assert depths.pop("ngram") > 1
    assert depths == {"none": 0, "chain": 2, "ngram+policy": 1, "chain+policy": 1}

    settings = read_results(path).settings("chain+policy")
    assert settings["policy"] == "goodput"
    assert settings["budget"]["depth"] == 2
    assert "chain+policy" in markdown(path)
    assert "chain+policy" in page([path])


@pytest.mark.slow
def test_modelled_seconds_are_those_of_the_forwards(small: Recipe) -> None:
    """Each cycle costs its padded forward once, however many sequences share it."""
    path = measure_with(small, batch_size=[1, 4], temperatures=[0], costs=True)
    results = read_results(path)
    costs = Costs.parse(results.header["costs"]["chain"])

    assert costs.forwards == ((), (), (1,))
    assert costs.unread == ((1,), (1, 2), (1, 2, 3))
    assert [batch.batch_size for batch in costs.batches] == [4]

    groups = {(group.drafter, group.batch_size): group for group in results.groups()}
    assert all(group.is_modelled for group in groups.values())

    # one sequence of n tokens costs n, eleven cost 10 n: s sequences cost (1 + 0.9 (s - 1)) n
    of_eleven = Costs((0,), (1, 2), ((10.0, 20.0),), batch_size=11)
    flat = Costs((0,), (1, 2), ((1.0, 2.0),), batches=(of_eleven,))
    answers = groups["chain", 4].answers
    forwards = defaultdict(list)
    for answer in answers:
        for cycle in answer["cycles"]:
            forwards[answer["session"], cycle["number"]].append(cycle["nodes"])

    expected = 0.0
    for nodes in forwards.values():
        expected += (1 + 0.9 * (len(nodes) - 1)) * (1 + max(nodes))
    plain = [asked_budgets(answer["cycles"], None) for answer in answers]

    assert sum(model_seconds(flat, answers, plain)) == pytest.approx(expected)
    drafting = [asked_budgets(answer["cycles"], Budget(2, 2, 1)) for answer in answers]
    assert sum(model_seconds(flat, answers, drafting)) > expected


@pytest.mark.slow
def test_a_fault_of_batches_is_not_identical(
    small: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted fault: what a row accepted is kept in its neighbour's cache, which a single sequence cannot show."""
    keep = TargetState.keep

    def rotated(state: TargetState, paths: Mapping[int, Sequence[int]]) -> None:
        rows = list(paths)
        neighbours = rows[1:] + rows[:1]
        wrong = {row: paths[other] for row, other in zip(rows, neighbours, strict=True)}
        keep(state, wrong)

    monkeypatch.setattr(TargetState, "keep", rotated)
    # a path of another tree may also be out of range
    with pytest.raises((AssertionError, ValueError, IndexError, RuntimeError)):
        rows, _ = lines_of(measure_with(small, batch_size=[1, 4], max_new_tokens=24))
        assert {row["identical"] for row in rows if row.get("batch_size") == 1} <= {True}
        assert {row["identical"] for row in rows} == {True}


def test_files_of_processes_become_one(small: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    """Each line is kept once, also where merging was killed halfway; a torn last line and a stray file are named."""
    path = measure_with(small, batch_size=4, temperatures=[0])
    header, *lines = path.read_bytes().splitlines(keepends=True)
    parts = [part_of(path, rank) for rank in (0, 1)]
    for rank, part in enumerate(parts):
        part.write_bytes(b"".join(lines[rank::2]))

    with parts[1].open("ab") as file:
        file.write(b'{"run":"torn')

    # merging had already copied some lines
    path.write_bytes(b"".join([header, *lines[:7:2]]))
    stored = read_stored(path)

    assert sorted(path.read_bytes().splitlines(keepends=True)) == sorted([header, *lines])
    assert len(stored.answers) + len(stored.batches) == len(lines)
    assert not any(part.exists() for part in parts)

    path.unlink()
    parts[0].write_bytes(lines[0])
    assert not read_stored(path).answers
    assert not parts[0].exists()

    said = capsys.readouterr().out
    for words in ("the last line is torn", "belongs to no results file"):
        assert words in said


def run_and_kill(work: Callable[[], object], is_time: Callable[[], bool]) -> None:
    """Do the work in a forked process, and kill it when `is_time` says so."""
    pid = os.fork()
    if pid == 0:
        # threads do not survive a fork
        torch.set_num_threads(1)
        work()
        os._exit(0)

    while not is_time():
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "it ended before it was killed"
        time.sleep(0.001)

    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def count_lines(path: Path) -> int:
    """Return the number of whole lines of a file, which may not exist yet."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.slow
def test_kills_lose_and_double_nothing(small: Recipe, tmp_path: Path) -> None:
    """Killed five times at random moments, a run of batches has each row once, each as if never killed."""
    prompts = {"few": ask(tmp_path, 40)}
    recipe = with_eval(
        small,
        prompts=prompts,
        count=40,
        batch_size=16,
        max_new_tokens=24,
    )
    path = tmp_path / "run/results.jsonl"
    chance = random.Random(0)
    for _ in range(5):
        last_line = count_lines(path) + chance.randint(1, 30)
        # a kill also falls between the writing of two lines
        pause = chance.uniform(0, 0.3)

        def is_time(last_line: int = last_line, pause: float = pause) -> bool:
            if count_lines(path) < last_line:
                return False
            time.sleep(pause)
            return True

        run_and_kill(lambda: measure(recipe, "small.yaml"), is_time)

    killed, batches = lines_of(measure(recipe, "small.yaml"))
    path.rename(tmp_path / "killed.jsonl")
    whole, _ = lines_of(measure(recipe, "small.yaml"))

    assert Counter(map(key_of, killed)) == Counter(map(key_of, whole))

    figures = [{key_of(row): select(row, SAME) for row in rows} for rows in (killed, whole)]
    assert figures[0] == figures[1]
    for name in NAMES:
        steps = [batch for batch in batches if batch["drafter"] == name]
        assert len({(step["session"], step["step"]) for step in steps}) == len(steps)
        # steps of answers that were interrupted and decoded again count too
        tokens = sum(row["tokens"] for row in killed if row["drafter"] == name)
        assert sum(step["tokens"] for step in steps) >= tokens


@pytest.mark.slow
@pytest.mark.long
def test_two_processes_share_the_prompts(small: Recipe, tmp_path: Path) -> None:
    """Two processes leave one file, with each row once, equal to those of one process."""
    section = {"count": 24, "batch_size": [1, 4], "temperatures": [0]}
    recipe = with_eval(small, prompts={"few": ask(tmp_path, 24)}, **section)
    written = tmp_path / "small.yaml"
    written.write_text(recipe.dump())
    done = finished(launched("ddp", "-m", "eval.measure", str(written)), seconds=300)

    assert done.returncode == 0, done.stdout

    path = tmp_path / "run/results.jsonl"
    assert not any(part_of(path, rank).exists() for rank in (0, 1))

    rows, batches = lines_of(path)
    # three drafters at two batch sizes, 24 first turns and 6 second ones
    assert len(rows) == len(digests(rows)) == 3 * 2 * (24 + 6)
    # each process has a session of its own
    assert len({batch["session"] for batch in batches}) >= 2 * 3
    assert "2 processes" in read_results(path).header["machine"]

    path.rename(tmp_path / "two.jsonl")
    alone, _ = lines_of(measure(recipe, "small.yaml"))
    assert digests(rows) == digests(alone)
