"""Acceptance by context and by position in the answer, against plain counting."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from eval.report import markdown, page
from eval.result_files.buckets import (
    CONTEXT,
    ENOUGH,
    WRITTEN,
    Buckets,
)
from eval.result_files.results import ACCEPTANCE_LENGTH, Answer, Group, Results
from eval.result_files.statistics import estimate
from tests.eval.jsonl_files import write_lines

# below the first edge of CONTEXT, just before it, after it, and far from it
PROMPTS = (90, 500, 1000, 4000)
RANGES = {
    "context": [(0, 512), (512, 1024), (1024, 2048), (4096, 8192)],
    "written": [(0, 32), (32, 128), (128, 512)],
}


def make_answer(drafter: str, conversation: int, most: int) -> Answer:
    """Return an answer of 200 tokens whose cycles commit up to `most`."""
    generator = random.Random(f"{drafter} {conversation}")
    prompt = PROMPTS[conversation % 4]
    cycles = []
    # prefill has chosen the first token, which is not read yet
    written = 1
    while written < 200:
        committed = min(generator.randint(1, most), 200 - written)
        cycle = {
            "nodes": 2,
            "depth": 2,
            "accepted": committed - 1,
            "committed": committed,
        }
        cycles.append({**cycle, "context": prompt + written - 1})
        written += committed

    return {
        "drafter": drafter,
        "conversation": str(conversation),
        "temperature": 0.0,
        "identical": True,
        "loops": False,
        "tokens": 200,
        "seconds": 1.0,
        "prompt_tokens": prompt,
        "cycles": cycles,
    }


@pytest.fixture(scope="module")
def answers() -> list[Answer]:
    """Answers of plain decoding and of two drafters to sixteen prompts of four lengths."""
    made = []
    for conversation in range(16):
        for drafter, most in (("none", 1), ("x", 3), ("y", 5)):
            made.append(make_answer(drafter, conversation, most))
    return made


def group_of(answers: list[Answer], drafter: str = "x") -> Group:
    """Return the answers of one drafter."""
    groups = {group.drafter: group for group in Results(Path(), [], answers).groups()}
    return groups[drafter]


def count_plainly(group: Group, start: int, end: int, before: str) -> float:
    """Return tokens per cycle of the cycles before which so many tokens had been read, or written."""
    committed = 0
    cycles = 0
    for answer in group.answers:
        written = 1
        for cycle in answer["cycles"]:
            tokens = written if before == "written" else answer["prompt_tokens"] + written - 1
            if start <= tokens < end:
                committed += cycle["committed"]
                cycles += 1

            written += cycle["committed"]

    return committed / cycles


def lengths_of(buckets: Buckets, group: Group) -> dict[str, float]:
    """Return the acceptance length of each bucket, by its name."""
    lengths = buckets.acceptance_lengths(group)
    return {buckets.name(bucket): length.value for bucket, length in lengths.items()}


@pytest.mark.parametrize(("before", "buckets"), [("context", CONTEXT), ("written", WRITTEN)])
def test_cycles_are_counted_by_what_stood_before(
    before: str,
    buckets: Buckets,
    answers: list[Answer],
) -> None:
    """Every range has the tokens per cycle of a plain loop; two planted faults do not."""
    group = group_of(answers)
    lengths = lengths_of(buckets, group)
    # prompts of 4,000 tokens have few cycles below 4,096
    lengths.pop("2k to 4k", None)
    expected = [count_plainly(group, *ends, before) for ends in RANGES[before]]

    assert list(lengths.values()) == pytest.approx(expected)

    first = "below 512" if before == "context" else "below 32"
    assert next(iter(lengths)) == first

    # two faults: a position one too far, and whole answers that count where they begin
    def one_further(answer: Answer) -> list[int]:
        return [tokens + 1 for tokens in buckets.count(answer)]

    def whole_answers(answer: Answer) -> list[int]:
        return [buckets.count(answer)[0]] * len(answer["cycles"])

    faults: list[Callable[[Answer], list[int]]] = [one_further, whole_answers]
    for fault in faults:
        faulty = lengths_of(replace(buckets, count=fault), group)
        faulty.pop("2k to 4k", None)
        assert faulty != pytest.approx(lengths)


def test_intervals_are_over_the_conversations_of_a_bucket(answers: list[Answer]) -> None:
    """Conversations without a cycle in the bucket do not count; one bucket for all is the group's estimate."""
    group = group_of(answers)
    short = {}
    for answer in group.answers:
        rows = [(cycle["committed"], 1) for cycle in answer["cycles"] if cycle["context"] < 512]
        if rows:
            short[answer["conversation"]] = rows

    assert len(short) == 8
    assert CONTEXT.acceptance_lengths(group)[0] == pytest.approx(estimate(short))

    [whole] = replace(CONTEXT, first=10_000).acceptance_lengths(group).values()
    assert whole == pytest.approx(group.estimate(ACCEPTANCE_LENGTH))


def test_few_cycles_have_no_figure(answers: list[Answer], tmp_path: Path) -> None:
    """A range with too few cycles is left out; fewer than two ranges make no table."""
    # of a prompt of 90 tokens
    first = answers[:3]
    few = [{**answer, "cycles": answer["cycles"][: ENOUGH - 1]} for answer in first]
    uncounted = [{**answer, "cycles": 30, "committed": 199} for answer in answers]

    assert not CONTEXT.acceptance_lengths(group_of(few, "none"))
    assert CONTEXT.acceptance_lengths(group_of(first, "none")).keys() == {0}
    for rows, tables in ((few, 0), (uncounted, 0), (answers, 2)):
        path = write_lines(tmp_path / "r.jsonl", [{"run": {"commit": "c"}}, *rows])
        assert markdown(path).count("| τ by tokens of ") == tables
        assert page([path]).count("<strong>τ by tokens of ") == tables

    heading, _, *lines = markdown(path).split("| τ by tokens of context |")[1].splitlines()
    assert heading.startswith(" below 512 | 512 to 1k | 1k to 2k | ")
    assert [line.split(" | ")[1] for line in lines[:2]] == ["`x`", "`y`"]
