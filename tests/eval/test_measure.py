"""Measured rows: what they say is what happened, all drafters take turns, and a killed run goes on where it was."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from eagle import Target, Trace, generate
from eagle.core.budget import Budget
from eagle.core.tree import chain_paths
from eagle.device import ThreadsOfLongWork
from eagle.drafters.lookup.ngram import NgramDrafter
from eagle.drafters.recurrent.eagle1 import Eagle1
from eagle.formats.checkpoint import save_head, write_budget
from eagle.recipe import Recipe
from eagle.target.state import TargetState
from eval import measure as module
from eval.load_run import load_drafters
from eval.measure import measure
from eval.prompts import cases, encode_prompt, questions

QUESTIONS = [
    {"question_id": 1, "category": "twice", "turns": ["What does copy do?", "How do I call it?"]},
    {"question_id": 2, "category": "once", "turns": ["What does chain do?"]},
    {"question_id": 3, "category": "once", "turns": ["What does accumulate do?"]},
]
DRAFTERS = {"ngram": {"head": "ngram"}, "tree": {}, "chain": {"budget": {"paths": chain_paths(3)}}}


@pytest.fixture(scope="module")
def target(eight_token_dir: Path) -> Target:
    """A random target of eight tokens in fp64, where no rounding decides between two of them."""
    return Target.load(eight_token_dir, dtype=torch.float64)


@pytest.fixture
def small(recipe: Recipe, eight_token_dir: Path, target: Target, tmp_path: Path) -> Recipe:
    """Three questions, one of them of two turns, for three drafters, two of which are one untrained head."""
    torch.manual_seed(0)
    save_head(tmp_path / "run/head", Eagle1.for_target(Eagle1.Settings(), target.config), "", {})
    (tmp_path / "asked.jsonl").write_text(
        "".join(json.dumps(question) + "\n" for question in QUESTIONS)
    )
    asked = {
        "prompts": {"few": str(tmp_path / "asked.jsonl")},
        "max_new_tokens": 6,
        "temperatures": [0, 1],
    }
    values = {**recipe.model_dump(), "eval": {**asked, "drafters": DRAFTERS}}
    values["target"] = {**values["target"], "path": str(eight_token_dir), "dtype": "float64"}
    values["train"] = {**values["train"], "out": str(tmp_path / "run")}
    return Recipe.parse(values, "small")


def with_eval(recipe: Recipe, **changes: Any) -> Recipe:
    """The recipe with some of `eval` changed."""
    values = recipe.model_dump(exclude_unset=True)
    return Recipe.parse({**values, "eval": {**values["eval"], **changes}}, "small")


def lines_of(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Headers and rows of a results file."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line["run"] for line in lines if "drafter" not in line], [
        line for line in lines if "drafter" in line
    ]


def keys(rows: list[dict[str, Any]]) -> Counter[Any]:
    """How often each answer is there."""
    return Counter(
        (
            row["drafter"],
            row["set"],
            row["conversation"],
            row["turn"],
            row["temperature"],
            row["seed"],
        )
        for row in rows
    )


def comparable(rows: list[dict[str, Any]]) -> dict[Any, Any]:
    """Rows by key, without what depends on the machine's speed."""
    slow = ("run", "seconds", "cpu_seconds", "cycles")
    return {
        key: (
            {name: value for name, value in row.items() if name not in slow},
            [c["committed"] for c in row["cycles"]],
        )
        for row in rows
        for key in keys([row])
    }


@pytest.mark.slow
def test_rows_say_what_the_decoder_did(small: Recipe, target: Target) -> None:
    """Each row beside a generation of its own: same cycles, text and figures; contexts add up; `none` commits ones."""
    headers, rows = lines_of(measure(small, "small.yaml"))
    assert len(headers) == 1 and set(headers[0]["drafters"]) == {"none", *DRAFTERS}
    drafters, by_key = (
        load_drafters(small, target),
        {key: row for row in rows for key in keys([row])},
    )
    assert len(by_key) == len(rows) == 4 * 4 * 2  # drafters, turns, temperatures
    for case in cases(small, questions(small), (0, 1)):
        turns: list[str] = []
        for turn, text in enumerate(case.question.turns):
            turns.append(text)
            prompt, plain = encode_prompt(small, target, turns), ""
            for name, measured in drafters.items():
                row = by_key[name, "few", case.question.id, turn, case.temperature, case.seed]
                sampling = case.sampling(turn)
                trace = generate(
                    target,
                    measured.drafter,
                    prompt,
                    sampling=sampling,
                    budget=measured.budget,
                    max_new_tokens=6,
                )
                plain = plain or trace.text
                check(row, trace, plain, headers[0]["id"])
            turns.append(plain)


def check(row: dict[str, Any], trace: Trace, plain: str, run: str) -> None:
    """One row against its trace, its sums against naive ones."""
    assert (row["tokens"], row["text"], row["finish"]) == (
        len(trace.tokens),
        trace.text,
        trace.finish,
    )
    assert row["run"] == run and row["prompt_tokens"] == len(trace.prompt)
    assert row["identical"] is True and row["text"] == plain
    figures = [
        (c["nodes"], c["depth"], c["accepted"], c["committed"], c["context"]) for c in row["cycles"]
    ]
    assert figures == [(c.nodes, c.depth, c.accepted, c.committed, c.context) for c in trace.cycles]
    assert row["tokens"] == 1 + sum(cycle["committed"] for cycle in row["cycles"])
    context = row["prompt_tokens"]
    for cycle in row["cycles"]:
        assert cycle["context"] == context
        assert set(cycle["seconds"]) == {"draft", "target", "verify", "other"}
        assert cycle["depth"] == cycle["nodes"] or row["drafter"] == "tree"
        context += cycle["accepted"] + 1
    assert 0 < sum(sum(cycle["seconds"].values()) for cycle in row["cycles"]) < row["seconds"]
    if row["drafter"] == "none":
        assert {cycle["committed"] for cycle in row["cycles"]} == {1}
    if "pieces" in row:
        assert "".join(text for text, _ in row["pieces"]) == row["text"]
    assert ("pieces" in row) == (
        row["conversation"] in ("1", "2")
    )  # the first two asked; tasks come in turn


@pytest.mark.slow
def test_drafters_take_turns_and_another_begins_each_time(
    small: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the cases each drafter goes first, second and so on equally often, up to one."""
    order, real = list[str](), module.time_answer

    def record(target: Target, measured: Any, *more: Any) -> Any:
        order.append(
            measured.head if measured.head in ("none", "ngram") else str(measured.budget.paths)
        )
        return real(target, measured, *more)

    monkeypatch.setattr(module, "time_answer", record)
    measure(with_eval(small, temperatures=[1], seeds=[0, 1, 2, 3], max_new_tokens=2), "small.yaml")
    names = order[:4]  # the warm-up
    assert len(set(names)) == 4
    rounds = [order[start : start + 4] for start in range(4, len(order), 4)]
    assert len(rounds) == 4 * 4  # seeds, turns
    firsts = [names.index(turns[0]) for turns in rounds]
    assert all(
        turns == names[first:] + names[:first] for turns, first in zip(rounds, firsts, strict=True)
    )
    assert set(Counter(firsts).values()) <= {3, 4, 5}


def lines(path: Path) -> int:
    """How many whole lines a file has."""
    return path.read_bytes().count(b"\n")


def run_and_kill(work: Callable[[], object], when: Callable[[], bool]) -> None:
    """Do the work in a forked process, and kill it when `when` says so."""
    if not (pid := os.fork()):
        torch.set_num_threads(1)  # threads do not survive a fork
        work()
        os._exit(0)
    while not when():
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "it ended before it was killed"
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.mark.slow
def test_a_killed_run_goes_on_where_it_was(
    small: Recipe, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Killed, and torn in its last line: what was whole stays, the rest is measured once, as if never killed."""
    path = tmp_path / "run/results.jsonl"
    whole = lines_of(measure(small, "small.yaml"))[1]
    path.rename(tmp_path / "whole.jsonl")
    run_and_kill(lambda: measure(small, "small.yaml"), lambda: path.exists() and lines(path) > 9)
    kept = b"".join(path.read_bytes().splitlines(keepends=True)[:-2])
    path.write_bytes(kept + b'{"run":"12345678","drafter":"ngram","set":')
    headers, rows = lines_of(measure(small, "small.yaml"))
    assert "the last line is torn; its 42 bytes are cut off" in capfd.readouterr().out
    assert path.read_bytes().startswith(kept)
    assert set(keys(rows).values()) == {1} and keys(rows) == keys(whole)
    assert comparable(rows) == comparable(whole)
    assert len({header["id"] for header in headers}) == 1 and len(headers) == 2
    before = path.read_bytes()
    measure(small, "small.yaml")
    assert path.read_bytes() == before
    assert "all answers are in" in capfd.readouterr().out


@pytest.mark.slow
def test_a_run_grows_but_other_settings_begin_anew(
    small: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """More seeds and questions are added; another budget, or `--again`, moves the old rows aside and says so."""
    path = measure(with_eval(small, count=2, temperatures=[1]), "small.yaml")
    first = path.read_bytes()
    measure(with_eval(small, temperatures=[1], seeds=[0, 1], max_new_tokens=6), "small.yaml")
    headers, rows = lines_of(path)
    assert path.read_bytes().startswith(first) and headers[0]["id"] == headers[1]["id"]
    assert set(keys(rows).values()) == {1} and len(rows) == 4 * 4 * 2  # drafters, turns, seeds
    assert not list((tmp_path / "run").glob("results-*"))
    wider = {**DRAFTERS, "tree": {"budget": {"nodes": 5, "depth": 2, "top_k": 3}}}
    measure(with_eval(small, count=1, temperatures=[0], drafters=wider), "small.yaml")
    assert "was made by something else (drafters)" in capsys.readouterr().out
    aside = path.with_name(f"results-{headers[0]['id']}.jsonl")
    assert lines_of(aside) == (headers, rows) and len(lines_of(path)[1]) == 4 * 2
    measure(with_eval(small, count=1, temperatures=[0], drafters=wider), "small.yaml", again=True)
    assert len(lines_of(path)[1]) == 4 * 2 and len(list((tmp_path / "run").glob("results-*"))) == 2


@pytest.mark.slow
def test_a_resumed_run_keeps_its_threads(small: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Timing chooses them once; rows that follow are measured on as many, whatever would be chosen now."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        monkeypatch.setattr("eval.load_run.choose_threads", lambda _: torch.set_num_threads(1) or 1)
        path = measure(with_eval(small, count=1, temperatures=[0]), "small.yaml")
        monkeypatch.setattr("eval.load_run.choose_threads", lambda _: torch.set_num_threads(2) or 2)
        measure(with_eval(small, count=2, temperatures=[0]), "small.yaml")
        headers, _ = lines_of(path)
        assert len(headers) == 2 and {
            header["machine"].rpartition(", ")[2] for header in headers
        } == {"1 threads"}
        measure(with_eval(small, count=1, temperatures=[0]), "small.yaml", again=True)
        assert lines_of(path)[0][0]["machine"].endswith("2 threads")
    finally:
        torch.set_num_threads(before)


def test_a_measurement_tells_that_other_threads_would_be_faster_now(
    small: Recipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once, however many rows follow; they stay on the number that the file names."""
    before, processes, clock_time = torch.get_num_threads(), count(), {"now": 0.0}

    def clock() -> float:
        """One on which a forward takes two minutes, and one on two threads a minute."""
        clock_time["now"] += 120 / torch.get_num_threads()
        return clock_time["now"]

    def jobs(forward: Callable[[], Any], most: int) -> ThreadsOfLongWork:
        """Threads beside jobs that come and go all the time."""
        return ThreadsOfLongWork(forward, clock, lambda: next(processes), most)

    try:
        torch.set_num_threads(2)
        monkeypatch.setattr("eval.load_run.choose_threads", lambda _: torch.set_num_threads(1) or 1)
        monkeypatch.setattr("eval.load_run.ThreadsOfLongWork", jobs)
        path = measure(with_eval(small, temperatures=[0]), "small.yaml")
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("threads: ")]
    assert len(told) == 1 and told[0].startswith(
        "threads: 2 would be faster now than 1, which these results are"
    )
    assert lines_of(path)[0][0]["machine"].endswith("1 threads")


def test_the_second_turn_follows_the_answer_of_none(
    small: Recipe, target: Target, tmp_path: Path
) -> None:
    """All drafters read the same second prompt, also where a resumed run has `none`'s answer from its file alone."""
    path = measure(with_eval(small, count=1), "small.yaml")
    for temperature in (0, 1):
        rows = [row for row in lines_of(path)[1] if row["temperature"] == temperature]
        answer = next(row["text"] for row in rows if row["drafter"] == "none" and row["turn"] == 0)
        texts = (
            ("user", QUESTIONS[0]["turns"][0]),
            ("assistant", answer),
            ("user", QUESTIONS[0]["turns"][1]),
        )
        prompt = target.chat([{"role": role, "content": text} for role, text in texts])
        assert {row["prompt_tokens"] for row in rows if row["turn"] == 1} == {len(prompt)}
    lines = path.read_text().splitlines(keepends=True)
    whole = comparable(lines_of(path)[1])
    path.write_text("".join(line for line in lines if '"drafter":"chain"' not in line))
    measure(with_eval(small, count=1), "small.yaml")
    assert comparable(lines_of(path)[1]) == whole


def test_prompts_without_room_are_counted(
    small: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Said by set, never dropped in silence; where none fits that is an error."""
    long = {"question_id": 9, "category": "once", "turns": ["copy " * 3000]}
    (tmp_path / "asked.jsonl").write_text(
        "".join(json.dumps(question) + "\n" for question in (QUESTIONS[1], long))
    )
    _, rows = lines_of(measure(with_eval(small, temperatures=[0]), "small.yaml"))
    assert {row["conversation"] for row in rows} == {"2"}
    assert "few: 4 answers are missing" in capsys.readouterr().out
    (tmp_path / "asked.jsonl").write_text(json.dumps(long))
    with pytest.raises(
        ValueError, match=r"none of 1 prompts and 11 new tokens fit in the model's 2048 positions"
    ):
        measure(with_eval(small, max_new_tokens=11), "small.yaml")


def test_budgets_come_from_the_drafter_the_head_or_the_recipe(
    small: Recipe, target: Target, tmp_path: Path
) -> None:
    """What is said for a drafter counts first, what is said for all next, then the head's own."""
    assert load_drafters(small, target)["tree"].budget == Budget(8, 4, 4)
    write_budget(tmp_path / "run/head", Budget(5, 3, 2))
    drafters = load_drafters(small, target)
    assert drafters["tree"].budget == Budget(5, 3, 2) and drafters["ngram"].budget == Budget(
        8, 4, 4
    )
    assert drafters["chain"].budget == Budget.fixed(chain_paths(3))
    assert load_drafters(with_eval(small, nodes=7), target)["tree"].budget == Budget(7, 4, 4)
    trace = generate(target, drafters["tree"].drafter, target.chat("What?"), max_new_tokens=6)
    assert {cycle.nodes for cycle in trace.cycles[:1]} == {5}  # without being told
    with pytest.raises(ValueError, match="names `none`, which is measured always"):
        load_drafters(with_eval(small, drafters={"none": {"head": "none"}}), target)


def test_options_go_to_the_drafter_and_into_the_header(small: Recipe, target: Target) -> None:
    """One method with several options is several drafters; what they were made from is told, and else nothing."""
    sections = {"a": {}, "b": {"options": {"longest": 2}}, "c": {"options": {"longest": 2}}}
    recipe = with_eval(
        small, drafters={name: {"head": "ngram", **section} for name, section in sections.items()}
    )
    drafters = load_drafters(recipe, target)
    a, b, c = (drafters[name].drafter for name in sections)
    assert isinstance(a, NgramDrafter) and isinstance(b, NgramDrafter)
    assert a.sizes != b.sizes == NgramDrafter(longest=2).sizes and b is c
    described = [drafters[name].describe() for name in sections]
    assert "options" not in described[0] and described[1]["options"] == {"longest": 2}
    with pytest.raises(ValueError, match="ngram has no option longst; did you mean longest"):
        load_drafters(
            with_eval(recipe, drafters={"a": {"head": "ngram", "options": {"longst": 2}}}), target
        )


def test_sampled_drafts_do_not_claim_to_be_identical(small: Recipe) -> None:
    """Where a draft carries its law, only the law of the output is the target's; greedily all is equal."""
    drawn = {"drawn": {"budget": {"paths": chain_paths(2), "draw": "sampled"}}}
    _, rows = lines_of(measure(with_eval(small, drafters=drawn), "small.yaml"))
    assert {
        row["identical"] for row in rows if row["drafter"] == "drawn" and row["temperature"] == 1
    } == {None}
    assert {
        row["identical"] for row in rows if row["drafter"] == "none" or row["temperature"] == 0
    } == {True}


@pytest.mark.slow
def test_a_wrong_answer_is_not_identical(
    small: Recipe, mixing_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault, of which plain decoding has nothing: the last drafted node stays in the cache."""
    config = AutoConfig.from_pretrained(mixing_target_dir)
    save_head(tmp_path / "run/head", Eagle1.for_target(Eagle1.Settings(), config), "", {})
    mixing = small.model_copy(
        update={"target": small.target.model_copy(update={"path": str(mixing_target_dir)})}
    )

    def keep(state: TargetState, paths: Mapping[int, Sequence[int]]) -> None:
        tokens = {row: state.trees[row].tokens[list(path)].tolist() for row, path in paths.items()}
        state.keep_columns(
            {row: [*path[:-1], len(state.trees[row]) - 1] for row, path in paths.items()}, tokens
        )

    monkeypatch.setattr(TargetState, "keep", keep)
    _, rows = lines_of(
        measure(with_eval(mixing, max_new_tokens=24, temperatures=[0]), "small.yaml")
    )
    identical = {
        name: {row["identical"] for row in rows if row["drafter"] == name}
        for name in ("none", "tree")
    }
    assert identical["none"] == {True} and False in identical["tree"]
