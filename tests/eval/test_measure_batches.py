"""Batches are measured: every row is the one of a text alone, seconds add up, and a killed run loses nothing."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
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

TEXTS = (
    "What does copy do?",
    "What does chain do?",
    "How do I sort a list of names by their length?",
    "Why?",
)
SAME = ("tokens", "text", "finish", "digest", "prompt_tokens", "identical", "loops", "task")
ROOT = Path(__file__).parents[2]


def ask(folder: Path, count: int) -> str:
    """A file of questions, every fourth of them with a second turn."""
    turns = [[f"{TEXTS[n % 4]} {n}", *["And how?"] * (n % 4 == 0)] for n in range(count)]
    lines = [json.dumps({"question_id": n, "turns": asked}) + "\n" for n, asked in enumerate(turns)]
    (folder / "asked.jsonl").write_text("".join(lines))
    return str(folder / "asked.jsonl")


@pytest.fixture
def small(recipe: Recipe, eight_token_dir: Path, tmp_path: Path) -> Recipe:
    """Seven questions, two of them of two turns, for an untrained head and n-grams."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(eight_token_dir)
    save_head(tmp_path / "run/head", Eagle1.for_target(Eagle1.Settings(), config), "", {})
    drafters = {"ngram": {"head": "ngram"}, "chain": {"budget": {"paths": chain_paths(2)}}}
    asked = {
        "prompts": {"few": ask(tmp_path, 7)},
        "max_new_tokens": 8,
        "temperatures": [0, 1],
        "drafters": drafters,
    }
    values = {**recipe.model_dump(), "eval": asked}
    values["target"] = {**values["target"], "path": str(eight_token_dir), "dtype": "float64"}
    values["train"] = {**values["train"], "out": str(tmp_path / "run")}
    return Recipe.parse(values, "small")


def with_eval(recipe: Recipe, **changes: Any) -> Recipe:
    """The recipe with some of `eval` changed."""
    values = recipe.model_dump(exclude_unset=True)
    return Recipe.parse({**values, "eval": {**values["eval"], **changes}}, "small")


def key_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What an answer is known by, but for the batch that it was written in."""
    return tuple(
        row[name] for name in ("drafter", "set", "conversation", "turn", "temperature", "seed")
    )


def lines_of(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows, and what steps of batches took."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if "drafter" in line], [
        line["batch"] for line in lines if "batch" in line
    ]


@pytest.mark.slow
def test_rows_of_batches_are_those_of_texts_alone(small: Recipe) -> None:
    """Each answer at 3 and 5 at a time has the tokens and cycles of the answer alone; seconds add up to the steps'."""
    rows, batches = lines_of(measure(with_eval(small, batch_size=[1, 3, 5]), "small.yaml"))
    alone = {key_of(row): row for row in rows if "batch_size" not in row}
    assert len(alone) == 9 * 3 * 2  # turns, drafters, temperatures
    for size in (3, 5):
        group = {key_of(row): row for row in rows if row.get("batch_size") == size}
        assert group.keys() == alone.keys()
        for key, row in group.items():
            assert {name: row[name] for name in SAME} == {name: alone[key][name] for name in SAME}
            assert row["identical"] is True
            for ours, other in zip(row["cycles"], alone[key]["cycles"], strict=True):
                shape = ("nodes", "depth", "accepted", "committed", "context", "path")
                assert [ours[name] for name in shape] == [other[name] for name in shape]
                assert 1 <= ours["rows"] <= size
            assert row["seconds"] <= row["latency"] + 1e-6
        check_sums(
            list(group.values()), [batch for batch in batches if batch["batch_size"] == size], size
        )
    assert all("latency" not in row for row in alone.values())


def check_sums(rows: list[dict[str, Any]], batches: list[dict[str, Any]], size: int) -> None:
    """Of every session: seconds and tokens of its rows are those of its steps, and cycles had the texts they tell."""
    for session in {row["session"] for row in rows}:
        own = [row for row in rows if row["session"] == session]
        steps = [batch for batch in batches if batch["session"] == session]
        assert {batch["drafter"] for batch in steps} == {row["drafter"] for row in own}
        for name in ("seconds", "cpu_seconds"):
            assert sum(row[name] for row in own) == pytest.approx(
                sum(batch[name] for batch in steps), abs=1e-4
            )
        assert sum(row["tokens"] for row in own) == sum(batch["tokens"] for batch in steps)
        assert steps[-1]["step"] == sum(batch["steps"] for batch in steps)
        assert all(0 < batch["texts"] <= size * batch["steps"] for batch in steps)
        texts = Counter(cycle["number"] for row in own for cycle in row["cycles"])
        assert {(cycle["number"], cycle["rows"]) for row in own for cycle in row["cycles"]} == set(
            texts.items()
        )
        whole = {
            cycle["number"]: sum(cycle["seconds"].values())
            for row in own
            for cycle in row["cycles"]
        }
        assert sum(whole.values()) <= sum(row["seconds"] for row in own) + 1e-4
        assert max(texts.values()) == min(size, len(own))


def test_a_small_cache_delays_admission(small: Recipe) -> None:
    """Fewer texts at a time than asked for, in a file of its own; the same answers; none is refused without a word."""
    wide, _ = lines_of(measure(with_eval(small, batch_size=4, temperatures=[0]), "small.yaml"))
    narrow = with_eval(small, batch_size=4, temperatures=[0], max_tokens_in_cache=120)
    path = measure(narrow, "small.yaml")
    rows, _ = lines_of(path)
    assert len(list(path.parent.glob("results-*"))) == 1
    assert {key_of(row): row["digest"] for row in rows} == {
        key_of(row): row["digest"] for row in wide
    }
    most = [max(cycle["rows"] for row in each for cycle in row["cycles"]) for each in (wide, rows)]
    assert most[0] == 4 > most[1]
    with pytest.raises(ValueError, match="raise max_tokens_in_cache"):
        measure(with_eval(narrow, max_tokens_in_cache=20), "small.yaml")


@pytest.mark.slow
def test_other_sizes_are_added_to_a_file(small: Recipe) -> None:
    """A run of batches goes on in the file of the run of single texts, and asked for again adds nothing."""
    path = measure(with_eval(small, temperatures=[0]), "small.yaml")
    first = path.read_bytes()
    measure(with_eval(small, temperatures=[0], batch_size=[1, 4]), "small.yaml")
    both = path.read_bytes()
    assert both.startswith(first) and len(lines_of(path)[0]) == 2 * 9 * 3
    measure(with_eval(small, temperatures=[0], batch_size=4), "small.yaml")
    assert path.read_bytes() == both
    groups = read_results(path).groups()
    assert {(group.batch_size, len(group.answers)) for group in groups} == {(1, 9), (4, 9)}


def test_drafters_take_turns_set_by_set(small: Recipe, tmp_path: Path) -> None:
    """Plain decoding goes first in each set, then the others, another one first each time."""
    prompts = {"few": small.eval.prompts["few"], "more": str(tmp_path / "more.jsonl")}
    (tmp_path / "more.jsonl").write_text(json.dumps({"turns": ["What does accumulate do?"]}))
    rows, _ = lines_of(measure(with_eval(small, prompts=prompts, batch_size=8), "small.yaml"))
    order = list(dict.fromkeys((row["temperature"], row["set"], row["drafter"]) for row in rows))
    names = [
        [name for heat, part, name in order if (heat, part) == place]
        for place in dict.fromkeys(o[:2] for o in order)
    ]
    assert names == [["none", "ngram", "chain"], ["none", "chain", "ngram"]] * 2


class OneLevel:
    """A policy that drafts one level at most."""

    draw = None

    def __init__(self, budget: Budget) -> None:
        self.budget, self.nodes = budget, budget.nodes

    def within(self, levels: int) -> Budget:
        """The next budget."""
        return self.budget.within(min(levels, 1))


@pytest.mark.slow
def test_a_policy_is_measured_beside_its_drafter(
    small: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NAME+policy, with costs from the prompts at all sizes; the answers are the same, the drafts are its own."""
    asked: list[tuple[int, Any]] = []

    def measure_costs(
        target: Target, drafter: Any, prompts: list[list[int]], budget: Any, **more: Any
    ) -> OneLevel:
        asked.append((len(prompts), more["batch_sizes"]))
        return OneLevel(budget)

    monkeypatch.setattr(Goodput, "measure", measure_costs)
    path = measure(
        with_eval(small, batch_size=[1, 4], temperatures=[0], goodput_policy=True), "small.yaml"
    )
    rows, _ = lines_of(path)
    names = ("none", "ngram", "chain", "ngram+policy", "chain+policy")
    assert asked == [(7, [1, 2, 4])] * 2  # and the smaller batch that one of four ends with
    assert Counter(row["drafter"] for row in rows) == dict.fromkeys(names, 18)
    assert {row["identical"] for row in rows} == {True}
    deepest = {
        name: max(c["depth"] for row in rows if row["drafter"] == name for c in row["cycles"])
        for name in names
    }
    assert 1 < deepest.pop("ngram") <= 4
    assert deepest == {"none": 0, "chain": 2, "ngram+policy": 1, "chain+policy": 1}
    settings = read_results(path).settings("chain+policy")
    assert settings["policy"] == "goodput" and settings["budget"]["depth"] == 2
    assert "chain+policy" in markdown(path) and "chain+policy" in page([path])


@pytest.mark.slow
def test_modelled_seconds_are_those_of_the_forwards(small: Recipe) -> None:
    """Each cycle costs its padded forward once, by texts, tokens and context, however many texts share it."""
    path = measure(with_eval(small, batch_size=[1, 4], temperatures=[0], costs=True), "small.yaml")
    results = read_results(path)
    costs = Costs.parse(results.header["costs"]["chain"])
    assert (
        costs.forwards == ((), (), (1,))
        and Costs.parse(results.header["costs"]["none"]).forwards is None
    )
    assert costs.unread == ((1,), (1, 2), (1, 2, 3))
    assert [batch.texts for batch in costs.batches] == [4] and costs.batches[0].sizes[-1] == 9
    flat = Costs(
        (0,), (1, 2), ((1.0, 2.0),), batches=(Costs((0,), (1, 2), ((10.0, 20.0),), texts=11),)
    )
    group = next(
        group for group in results.groups() if group.drafter == "chain" and group.batch_size == 4
    )
    shared: dict[Any, list[dict[str, Any]]] = {}
    for answer in group.answers:
        for cycle in answer["cycles"]:
            shared.setdefault((answer["session"], cycle["number"]), []).append(cycle)
    # one text of n tokens costs n, eleven 10 n, so t texts (1 + 0.9 (t - 1)) n
    expected = sum(
        (1 + 0.9 * (len(cycles) - 1)) * (1 + max(cycle["nodes"] for cycle in cycles))
        for cycles in shared.values()
    )
    plain = [asked_budgets(answer["cycles"], None) for answer in group.answers]
    assert sum(model_seconds(flat, group.answers, plain)) == pytest.approx(expected)
    drafting = [asked_budgets(answer["cycles"], Budget(2, 2, 1)) for answer in group.answers]
    assert sum(model_seconds(flat, group.answers, drafting)) > expected
    assert all(group.is_modelled for group in results.groups())


@pytest.mark.slow
def test_a_fault_of_batches_is_not_identical(
    small: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault that one text alone cannot show: what a row accepted is kept in its neighbour's slot."""
    keep = TargetState.keep

    def rotated(state: TargetState, paths: Mapping[int, Sequence[int]]) -> None:
        rows = list(paths)
        keep(state, dict(zip(rows, [paths[row] for row in rows[1:] + rows[:1]], strict=True)))

    monkeypatch.setattr(TargetState, "keep", rotated)
    with pytest.raises((AssertionError, ValueError, IndexError, RuntimeError)):
        rows, _ = lines_of(
            measure(with_eval(small, batch_size=[1, 4], max_new_tokens=24), "small.yaml")
        )
        assert {row["identical"] for row in rows if row.get("batch_size") == 1} <= {True}
        assert {row["identical"] for row in rows} == {True}


def test_files_of_processes_become_one(small: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    """Each line once, also where merging was killed between writing and removing, and the last line of one is torn."""
    path = measure(with_eval(small, batch_size=4, temperatures=[0]), "small.yaml")
    header, *lines = path.read_bytes().splitlines(keepends=True)
    parts = [part_of(path, rank) for rank in (0, 1)]
    for part, rank in zip(parts, (0, 1), strict=True):
        part.write_bytes(b"".join(lines[rank::2]))
    path.write_bytes(b"".join([header, *lines[:7:2]]))  # some are there already
    with parts[1].open("ab") as file:
        file.write(b'{"run":"torn')
    stored = read_stored(path)
    assert sorted(path.read_bytes().splitlines()) == sorted(
        line.strip() for line in (header, *lines)
    )
    assert (
        not any(part.exists() for part in parts)
        and "the last line is torn" in capsys.readouterr().out
    )
    assert len(stored.answers) + len(stored.batches) == len(lines)
    path.unlink()
    parts[0].write_bytes(lines[0])
    assert not read_stored(path).answers and not parts[0].exists()
    assert "belongs to no results file" in capsys.readouterr().out


def run_and_kill(work: Callable[[], object], when: Callable[[], bool]) -> bool:
    """Do the work in a forked process, and kill it when `when` says so; whether it was still running."""
    if not (pid := os.fork()):
        torch.set_num_threads(1)  # threads do not survive a fork
        work()
        os._exit(0)
    while not when():
        if os.waitpid(pid, os.WNOHANG) != (0, 0):
            return False
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return True


@pytest.mark.slow
def test_ten_kills_lose_and_double_nothing(small: Recipe, tmp_path: Path) -> None:
    """Sixteen at a time, killed ten times at random moments: each row once, each as if never killed, sums right."""
    asked = with_eval(
        small, prompts={"few": ask(tmp_path, 60)}, count=60, batch_size=16, max_new_tokens=24
    )
    path, chance, kills = tmp_path / "run/results.jsonl", random.Random(0), 0
    for _ in range(10):
        start = path.read_bytes().count(b"\n") if path.exists() else 0
        lines, pause, seen = chance.randint(0, 30), chance.uniform(0, 0.3), [0.0]

        def is_time(
            start: int = start, lines: int = lines, pause: float = pause, seen: list[float] = seen
        ) -> bool:
            if not path.exists() or path.read_bytes().count(b"\n") <= start + lines:
                return False
            seen[0] = seen[0] or time.monotonic()
            return time.monotonic() - seen[0] > pause

        kills += run_and_kill(lambda: measure(asked, "small.yaml"), is_time)
    assert kills == 10
    killed, batches = lines_of(measure(asked, "small.yaml"))
    path.rename(tmp_path / "killed.jsonl")
    whole, _ = lines_of(measure(asked, "small.yaml"))
    assert Counter(map(key_of, killed)) == Counter(map(key_of, whole)) and set(
        Counter(map(key_of, killed)).values()
    ) == {1}
    figures = [
        {key_of(row): [row[name] for name in SAME] for row in rows} for rows in (killed, whole)
    ]
    assert figures[0] == figures[1]
    for name in (
        "none",
        "ngram",
        "chain",
    ):  # steps of texts that were interrupted and written again count too
        steps = [batch for batch in batches if batch["drafter"] == name]
        rows = [row for row in killed if row["drafter"] == name]
        assert len({(batch["session"], batch["step"]) for batch in steps}) == len(steps)
        assert sum(batch["tokens"] for batch in steps) >= sum(row["tokens"] for row in rows)
        rates = [
            sum(r["tokens"] for r in lines) / sum(r["cpu_seconds"] for r in lines)
            for lines in (steps, rows)
        ]
        assert rates[0] == pytest.approx(rates[1], rel=0.2)


@pytest.mark.slow
@pytest.mark.long
def test_two_processes_share_the_prompts(small: Recipe, tmp_path: Path) -> None:
    """Killed and started again: all rows once, those of one process; nothing of the processes' own files is left."""
    asked = with_eval(
        small, prompts={"few": ask(tmp_path, 24)}, count=24, batch_size=[1, 4], temperatures=[0]
    )
    (tmp_path / "small.yaml").write_text(asked.dump())
    path = tmp_path / "run/results.jsonl"
    command = launched("ddp", "-m", "eval.measure", str(tmp_path / "small.yaml"))
    parts = [part_of(path, rank) for rank in (0, 1)]
    started = start(command, tmp_path / "log")
    try:
        wait_for(
            lambda: all(part.exists() and part.read_bytes().count(b"\n") > 5 for part in parts), 900
        )
    finally:
        os.killpg(started, signal.SIGKILL)
        os.waitpid(started, 0)
    held = sum(part.read_bytes().count(b"\n") for part in parts)
    assert len(read_stored(path).answers) > 10 and not any(part.exists() for part in parts)
    done = finished(
        launched("ddp", "-m", "eval.measure", str(tmp_path / "small.yaml")), seconds=300
    )
    assert done.returncode == 0, done.stdout
    rows, batches = lines_of(path)
    assert held and not any(part.exists() for part in parts)
    count = Counter((*key_of(row), row.get("batch_size", 1)) for row in rows)
    assert set(count.values()) == {1} and len(rows) == 2 * 3 * (24 + 6)
    assert len({batch["session"] for batch in batches}) >= 2 * 3  # each process has its own
    assert "2 processes" in read_results(path).header["machine"]
    path.rename(tmp_path / "two.jsonl")
    alone, _ = lines_of(measure(asked, "small.yaml"))
    figures = [
        {(*key_of(row), row.get("batch_size")): row["digest"] for row in lines}
        for lines in (rows, alone)
    ]
    assert figures[0] == figures[1]


def start(command: list[str], log: Path) -> int:
    """A command in a process group of its own."""
    if not (pid := os.fork()):
        os.setsid()
        os.chdir(ROOT)
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 1)
        os.dup2(1, 2)
        os.execvpe(command[0], command, {**os.environ, "OMP_NUM_THREADS": "1"})
    return pid


def wait_for(state: Callable[[], bool], seconds: float) -> None:
    """Wait until something is so."""
    end = time.monotonic() + seconds
    while not state():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.005)
