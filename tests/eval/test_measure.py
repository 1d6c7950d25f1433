"""Measured rows say what the decoder did, drafters take turns, and an interrupted run goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle import Target, Trace, generate
from eagle.core.budget import Budget
from eagle.core.tree import chain_paths
from eagle.device import ThreadsOfLongWork
from eagle.drafters.lookup.ngram import NgramDrafter
from eagle.formats.checkpoint import write_budget
from eagle.recipe import Recipe
from eval import measure as module
from eval.load_run import load_drafters
from eval.measure import measure
from eval.prompts import cases, encode_prompt, questions
from tests.eval.jsonl_files import read_lines, write_lines
from tests.eval.test_lossless import last_node_kept
from tests.eval.test_measure_batches import (
    Row,
    key_of,
    lines_of,
    make_recipe,
    measure_with,
    select,
    with_eval,
)

QUESTIONS = [
    {"question_id": 1, "category": "twice", "turns": ["What does copy do?", "How do I call it?"]},
    {"question_id": 2, "category": "once", "turns": ["What does chain do?"]},
    {"question_id": 3, "category": "once", "turns": ["What does accumulate do?"]},
]
DRAFTERS = {"ngram": {"head": "ngram"}, "tree": {}, "chain": {"budget": {"paths": chain_paths(3)}}}
SHAPE = ("nodes", "depth", "accepted", "committed", "context")

# columns that depend on the machine's speed
TIMED = ("run", "seconds", "cpu_seconds", "cycles")


@pytest.fixture(scope="module")
def target(eight_token_dir: Path) -> Target:
    """A random target of eight tokens in fp64, where no rounding decides between two of them."""
    return Target.load(eight_token_dir, dtype=torch.float64)


@pytest.fixture
def small(recipe: Recipe, eight_token_dir: Path, tmp_path: Path) -> Recipe:
    """Three questions, one of them of two turns, for three drafters, two of which share an untrained head."""
    section = {
        "prompts": {"few": str(write_lines(tmp_path / "asked.jsonl", QUESTIONS))},
        "max_new_tokens": 6,
        "temperatures": [0, 1],
        "drafters": DRAFTERS,
    }
    return make_recipe(recipe, eight_token_dir, tmp_path, **section)


@pytest.fixture
def restored_threads() -> Any:
    """Set two threads, and restore their number after the test."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def choose_threads(patch: pytest.MonkeyPatch, threads: int) -> None:
    """Let the choice of threads, which is timed, come out as this number."""

    def choose(_: object) -> int:
        torch.set_num_threads(threads)
        return threads

    patch.setattr("eval.load_run.choose_threads", choose)


def headers_of(path: Path) -> list[Row]:
    """Return the headers of a results file, one for each start."""
    return [line["run"] for line in read_lines(path) if line.keys() == {"run"}]


def comparable(rows: list[Row]) -> dict[Any, Row]:
    """Return rows by key, without what depends on the machine's speed; each key occurs once."""
    found = {}
    for row in rows:
        kept = {name: value for name, value in row.items() if name not in TIMED}
        kept["committed"] = [cycle["committed"] for cycle in row["cycles"]]
        found[key_of(row)] = kept
    assert len(found) == len(rows)
    return found


@pytest.mark.slow
def test_rows_say_what_the_decoder_did(small: Recipe, target: Target) -> None:
    """Each row has the cycles, text and figures of a generation made here."""
    path = measure(small, "small.yaml")
    [header] = headers_of(path)

    assert header["drafters"].keys() == {"none", *DRAFTERS}

    rows = {key_of(row): row for row in lines_of(path)[0]}
    drafters = load_drafters(small, target)
    # four drafters, four turns, two temperatures
    assert len(rows) == 4 * 4 * 2
    for case in cases(small, questions(small), (0, 1)):
        answers: list[str] = []
        for turn in range(len(case.question.turns)):
            prompt = encode_prompt(small, target, case.question, answers)
            texts = []
            for name, measured in drafters.items():
                trace = generate(
                    target,
                    measured.drafter,
                    prompt,
                    sampling=case.sampling(turn),
                    budget=measured.budget,
                    max_new_tokens=6,
                )
                texts.append(trace.text)
                row = rows[name, "few", case.question.id, turn, case.temperature, case.seed]

                assert row["run"] == header["id"]
                check_row(row, trace)

            assert len(set(texts)) == 1
            # the next turn follows the answer of plain decoding
            answers.append(texts[0])


def check_row(row: Row, trace: Trace) -> None:
    """Compare one row with its trace, and its sums with plain ones."""
    assert row["identical"] is True
    assert row["prompt_tokens"] == len(trace.prompt)

    expected = [len(trace.tokens), trace.text, trace.finish]
    assert select(row, ("tokens", "text", "finish")) == expected

    context = len(trace.prompt)
    seconds = 0.0
    for cycle, decoded in zip(row["cycles"], trace.cycles, strict=True):
        assert select(cycle, SHAPE) == [getattr(decoded, name) for name in SHAPE]
        assert cycle["context"] == context
        assert set(cycle["seconds"]) == {"draft", "target", "verify", "other"}

        context += cycle["accepted"] + 1
        seconds += sum(cycle["seconds"].values())

    assert 0 < seconds < row["seconds"]

    # prefill gives the first token
    committed = [cycle["committed"] for cycle in row["cycles"]]
    assert row["tokens"] == 1 + sum(committed)

    if row["drafter"] == "none":
        assert set(committed) == {1}
    # the first question of each task keeps its pieces
    assert ("pieces" in row) == (row["conversation"] in ("1", "2"))
    if "pieces" in row:
        assert "".join(text for text, _ in row["pieces"]) == row["text"]


@pytest.mark.slow
def test_drafters_take_turns_and_another_begins_each_time(
    small: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order rotates, and each drafter goes first equally often, up to one."""
    order: list[str] = []
    time_answer = module.time_answer

    def record(target: Target, measured: Any, *more: Any) -> Any:
        order.append(f"{measured.head} {measured.budget}")
        return time_answer(target, measured, *more)

    monkeypatch.setattr(module, "time_answer", record)
    measure_with(small, temperatures=[1], seeds=[0, 1, 2, 3], max_new_tokens=2)
    # all four are warmed up first
    names = order[:4]
    firsts = []
    for start in range(4, len(order), 4):
        first = names.index(order[start])
        assert order[start : start + 4] == names[first:] + names[:first]
        firsts.append(first)

    # four turns of four seeds
    assert len(firsts) == 4 * 4
    assert set(Counter(firsts).values()) <= {3, 4, 5}


def test_an_interrupted_run_goes_on_where_it_was(
    small: Recipe, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whole lines of a file whose last line is torn stay, and the rest is measured once."""
    path = measure_with(small, temperatures=[0])
    whole = comparable(lines_of(path)[0])
    kept = b"".join(path.read_bytes().splitlines(keepends=True)[:-6])
    # as a killed run leaves it
    path.write_bytes(kept + b'{"run":"12345678","drafter":"ngram","set":')
    measure_with(small, temperatures=[0])

    assert "the last line is torn; its 42 bytes are cut off" in capfd.readouterr().out
    assert path.read_bytes().startswith(kept)
    assert comparable(lines_of(path)[0]) == whole

    first, second = headers_of(path)
    assert first["id"] == second["id"]

    before = path.read_bytes()
    measure_with(small, temperatures=[0])
    assert path.read_bytes() == before
    assert "all answers are in" in capfd.readouterr().out


@pytest.mark.slow
def test_a_run_grows_but_other_settings_begin_again(
    small: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seeds and questions are added; another budget, or `--again`, moves the old rows aside."""
    path = measure_with(small, count=2, temperatures=[1])
    first = path.read_bytes()
    measure_with(small, temperatures=[1], seeds=[0, 1])
    rows, _ = lines_of(path)

    assert path.read_bytes().startswith(first)
    # four drafters, four turns, two seeds
    assert len(comparable(rows)) == 4 * 4 * 2
    assert not list(path.parent.glob("results-*"))

    name = headers_of(path)[0]["id"]
    wider = {**DRAFTERS, "tree": {"budget": {"nodes": 5, "depth": 2, "top_k": 3}}}
    changed = with_eval(small, count=1, temperatures=[0], drafters=wider)
    measure(changed, "small.yaml")

    assert "was measured with other settings (drafters)" in capsys.readouterr().out
    assert lines_of(path.with_name(f"results-{name}.jsonl"))[0] == rows

    measure(changed, "small.yaml", again=True)
    assert len(lines_of(path)[0]) == 4 * 2
    assert len(list(path.parent.glob("results-*"))) == 2


def machines_of(path: Path) -> list[str]:
    """Return the threads that each header names."""
    return [header["machine"].rpartition(", ")[2] for header in headers_of(path)]


def test_a_resumed_run_keeps_its_threads(
    small: Recipe, monkeypatch: pytest.MonkeyPatch, restored_threads: None
) -> None:
    """Their number is chosen once; later rows are measured with it, whatever would be chosen now."""
    short = with_eval(small, temperatures=[0], max_new_tokens=2)
    choose_threads(monkeypatch, 1)
    path = measure_with(short, count=1)
    choose_threads(monkeypatch, 2)
    measure_with(short, count=2)

    assert machines_of(path) == ["1 threads"] * 2
    measure(with_eval(short, count=1), "small.yaml", again=True)
    assert machines_of(path) == ["2 threads"]


def test_a_measurement_tells_that_other_threads_would_be_faster_now(
    small: Recipe,
    monkeypatch: pytest.MonkeyPatch,
    restored_threads: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It says so once, and its rows stay with the number in the header."""
    processes = count()
    now = 0.0

    def clock() -> float:
        # a forward takes two minutes on one thread, and one minute on two
        nonlocal now
        now += 120 / torch.get_num_threads()
        return now

    def threads_beside_jobs(forward: Callable[[], Any], most: int) -> ThreadsOfLongWork:
        # the number of processes changes whenever it is read
        return ThreadsOfLongWork(forward, clock, lambda: next(processes), most)

    choose_threads(monkeypatch, 1)
    monkeypatch.setattr("eval.load_run.ThreadsOfLongWork", threads_beside_jobs)
    path = measure_with(small, temperatures=[0])

    assert torch.get_num_threads() == 1

    said = capsys.readouterr().err
    assert said.count("threads: ") == 1
    assert "threads: 2 would be faster now than 1, which these results are" in said
    assert machines_of(path) == ["1 threads"]


def test_the_second_turn_follows_the_answer_of_plain_decoding(
    small: Recipe, target: Target
) -> None:
    """All drafters read one second prompt, also where a resumed run has the first answer from its file."""
    path = measure_with(small, count=1)
    rows, _ = lines_of(path)
    first, second = QUESTIONS[0]["turns"]
    for temperature in (0, 1):
        turns = [row for row in rows if row["temperature"] == temperature]
        [answer] = [row["text"] for row in turns if row["drafter"] == "none" and row["turn"] == 0]
        messages = [
            {"role": "user", "content": first},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": second},
        ]
        lengths = {row["prompt_tokens"] for row in turns if row["turn"] == 1}

        assert lengths == {len(target.chat(messages))}

    # as if the run had been stopped before this drafter
    without_chain = [line for line in read_lines(path) if line.get("drafter") != "chain"]
    write_lines(path, without_chain)
    measure_with(small, count=1)

    assert comparable(lines_of(path)[0]) == comparable(rows)


def test_prompts_without_room_are_counted(
    small: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output names their number by set; if no prompt fits, that is an error."""
    long = {"question_id": 9, "category": "once", "turns": ["copy " * 3000]}
    write_lines(tmp_path / "asked.jsonl", [QUESTIONS[1], long])
    rows, _ = lines_of(measure_with(small, temperatures=[0]))

    assert {row["conversation"] for row in rows} == {"2"}
    assert "few: 4 answers are missing" in capsys.readouterr().out

    write_lines(tmp_path / "asked.jsonl", [long])
    with pytest.raises(ValueError, match=r"none of 1 prompts and 11 new tokens fit"):
        measure_with(small, max_new_tokens=11)


def test_budgets_come_from_the_drafter_the_head_or_the_recipe(
    small: Recipe, target: Target, tmp_path: Path
) -> None:
    """A drafter's own section counts first, then keys that `eval` sets for all, then the head's budget."""
    default = Budget(8, 4, 4)
    assert load_drafters(small, target)["tree"].budget == default

    write_budget(tmp_path / "run/head", Budget(5, 3, 2))
    drafters = load_drafters(small, target)
    budgets = {name: drafters[name].budget for name in DRAFTERS}
    expected = [default, Budget(5, 3, 2), Budget.fixed(chain_paths(3))]

    assert list(budgets.values()) == expected
    assert load_drafters(with_eval(small, nodes=7), target)["tree"].budget == Budget(7, 4, 4)

    # decoding takes the head's budget where it is given none
    trace = generate(target, drafters["tree"].drafter, target.chat("What?"), max_new_tokens=6)
    assert trace.cycles[0].nodes == 5

    with pytest.raises(ValueError, match="names `none`, which is measured always"):
        load_drafters(with_eval(small, drafters={"none": {"head": "none"}}), target)


def test_options_go_to_the_drafter_and_into_the_header(small: Recipe, target: Target) -> None:
    """One method with several options is several drafters; equal options share one."""
    options = {"a": {}, "b": {"longest": 2}, "c": {"longest": 2}}
    sections = {name: {"head": "ngram", "options": given} for name, given in options.items()}
    loaded = load_drafters(with_eval(small, drafters=sections), target)
    a, b, c = (loaded[name].drafter for name in options)

    assert isinstance(a, NgramDrafter)
    assert isinstance(b, NgramDrafter)
    assert a.sizes != b.sizes == NgramDrafter(longest=2).sizes
    assert b is c
    assert "options" not in loaded["a"].describe()
    assert loaded["b"].describe()["options"] == {"longest": 2}


def test_sampled_drafts_do_not_claim_to_be_identical(small: Recipe) -> None:
    """Where drafts are sampled from the head's probabilities, only the distribution of the output is the target's."""
    drafters = {"drawn": {"budget": {"paths": chain_paths(2), "draw": "sampled"}}}
    rows, _ = lines_of(measure_with(small, drafters=drafters))
    for row in rows:
        is_sampled = row["drafter"] == "drawn" and row["temperature"] == 1
        assert row["identical"] is (None if is_sampled else True)


@pytest.mark.slow
def test_a_wrong_answer_is_not_identical(
    recipe: Recipe,
    small: Recipe,
    mixing_target_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Planted fault, which plain decoding does not have: the last drafted node stays in the cache."""
    section = small.model_dump(exclude_unset=True)["eval"]
    section |= {"max_new_tokens": 24, "temperatures": [0]}
    # in this target all tokens depend on all that was read
    mixing = make_recipe(recipe, mixing_target_dir, tmp_path, **section)
    last_node_kept(monkeypatch)
    rows, _ = lines_of(measure(mixing, "small.yaml"))

    assert {row["identical"] for row in rows if row["drafter"] == "none"} == {True}
    assert False in [row["identical"] for row in rows if row["drafter"] == "tree"]
