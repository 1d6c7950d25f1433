"""Acceptance by context and by place in the answer, against plain counting."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eagle import Budget, Target, generate, load_drafter
from eval.report import markdown, page
from eval.result_files.answer_rows import row_of
from eval.result_files.buckets import (
    CONTEXT,
    ENOUGH,
    WRITTEN,
    Buckets,
    count_context,
    count_written,
)
from eval.result_files.results import ACCEPTANCE_LENGTH, Answer, Group, Results
from eval.result_files.statistics import estimate

PROMPTS = (90, 500, 1000, 4000)


def made(drafter: str, conversation: int, most: int) -> Answer:
    """An answer of 200 tokens whose cycles commit up to `most`."""
    drawn, prompt, cycles, written = (
        random.Random(f"{drafter} {conversation}"),
        PROMPTS[conversation % 4],
        [],
        1,
    )
    while written < 200:
        committed = min(drawn.randint(1, most), 200 - written)
        context = prompt + written - 1
        cycles.append(
            {
                "nodes": 2,
                "depth": 2,
                "accepted": committed - 1,
                "committed": committed,
                "context": context,
            }
        )
        written += committed
    about = {"temperature": 0.0, "identical": True, "loops": False, "tokens": 200, "seconds": 1.0}
    return {
        **about,
        "drafter": drafter,
        "conversation": str(conversation),
        "cycles": cycles,
        "prompt_tokens": prompt,
    }


@pytest.fixture(scope="module")
def answers() -> list[Answer]:
    """Those of plain decoding and of two drafters to sixteen prompts of four lengths."""
    names = {"none": 1, "x": 3, "y": 5}
    return [
        made(name, conversation, most) for conversation in range(16) for name, most in names.items()
    ]


def group_of(answers: list[Answer], drafter: str = "x") -> Group:
    """The answers of a drafter."""
    return next(
        group for group in Results(Path(), [], answers).groups() if group.drafter == drafter
    )


def counted(
    answers: list[Answer], drafter: str, start: int, end: int, before_answer: bool
) -> float:
    """Tokens per cycle of a drafter's cycles behind `start` to `end` tokens, token by token."""
    committed = cycles = 0
    for answer in answers:
        text = (
            answer["prompt_tokens"] + 1
        )  # with the token that the prompt's forward chose, which is not read yet
        for cycle in answer["cycles"] if answer["drafter"] == drafter else []:
            stands = text - answer["prompt_tokens"] if before_answer else text - 1
            if start <= stands < end:
                committed, cycles = committed + cycle["committed"], cycles + 1
            for _ in range(cycle["committed"]):
                text += 1
    return committed / cycles


@pytest.mark.parametrize("buckets", [CONTEXT, WRITTEN], ids=lambda value: value.title)
def test_cycles_are_counted_by_what_stood_before(buckets: Buckets, answers: list[Answer]) -> None:
    """Every range has the tokens per cycle of a plain loop; planted: a place one too far, and answers as wholes."""
    names = {
        "below 512": (0, 512),
        "512 to 1k": (512, 1024),
        "1k to 2k": (1024, 2048),
        "2k to 4k": (2048, 4096),
    }
    names |= {"4k to 8k": (4096, 8192)}
    if buckets is WRITTEN:
        names = {"below 32": (0, 32), "32 to 128": (32, 128), "128 to 512": (128, 512)}

    def lengths(buckets: Buckets) -> dict[str, float]:
        return {
            buckets.name(bucket): value.value
            for bucket, value in buckets.acceptance_lengths(group_of(answers)).items()
        }

    expected = {
        name: counted(answers, "x", *ends, buckets is WRITTEN)
        for name, ends in names.items()
        if name != "2k to 4k"
        or buckets is WRITTEN  # few cycles: those of prompts of 4,000 tokens below 4,096
    }
    found = lengths(buckets)
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert found.keys() - expected.keys() <= {"2k to 4k"}
    faults = [lambda answer: [tokens + 1 for tokens in buckets.count(answer)]]
    faults += [lambda answer: [buckets.count(answer)[0]] * len(answer["cycles"])]
    for fault in faults:
        assert lengths(replace(buckets, count=fault)) != pytest.approx(found)


def test_intervals_are_over_the_conversations_of_a_bucket(answers: list[Answer]) -> None:
    """Those whose cycles lie elsewhere are no part of it; all cycles in one bucket are the whole group's estimate."""
    group = group_of(answers)
    short = {
        answer["conversation"]: [
            (cycle["committed"], 1) for cycle in answer["cycles"] if cycle["context"] < 512
        ]
        for answer in group.answers
        if answer["prompt_tokens"] < 512
    }
    assert len(short) == 8
    assert CONTEXT.acceptance_lengths(group)[0] == pytest.approx(estimate(short))
    (whole,) = replace(CONTEXT, first=10_000).acceptance_lengths(group).values()
    assert whole == pytest.approx(group.estimate(ACCEPTANCE_LENGTH))


def test_few_cycles_tell_nothing(answers: list[Answer], tmp_path: Path) -> None:
    """A range with too few cycles has no figure; one range alone, or none, makes no table."""
    first = answers[:3]  # of a prompt of 90 tokens
    few = [{**answer, "cycles": answer["cycles"][: ENOUGH - 1]} for answer in first]
    assert not CONTEXT.acceptance_lengths(group_of(few, "none"))
    assert CONTEXT.acceptance_lengths(group_of(first, "none")).keys() == {0}
    uncounted = [{**answer, "cycles": 30, "committed": 199} for answer in answers]
    for rows, tables in ((few, 0), (uncounted, 0), (answers, 2)):
        (tmp_path / "r.jsonl").write_text(
            "\n".join(map(json.dumps, [{"run": {"commit": "c"}}, *rows]))
        )
        assert markdown(tmp_path / "r.jsonl").count("| τ by tokens of ") == tables
        assert page([tmp_path / "r.jsonl"]).count("<strong>τ by tokens of ") == tables
    table = markdown(tmp_path / "r.jsonl").split("| τ by tokens of context |")[1].splitlines()
    assert table[0].startswith(" below 512 | 512 to 1k | 1k to 2k | ")
    assert [line.split(" | ")[1] for line in table[2:4]] == ["`x`", "`y`"]


def test_a_decoded_answer_is_placed_where_it_was(tiny_target: Target) -> None:
    """What a row tells of real cycles: the tokens of the text less the one that is not read, and of the answer."""
    prompt: list[int] = tiny_target.chat("What does copy do?")
    trace = generate(
        tiny_target,
        load_drafter("ngram", tiny_target),
        prompt,
        max_new_tokens=24,
        stop=[],
        budget=Budget(3, 3, 1),
    )
    row: dict[str, Any] = row_of(trace, 1.0, 1.0)
    written, context = 1, len(prompt)
    for cycle, *places in zip(row["cycles"], count_written(row), count_context(row), strict=True):
        assert places == [written, context]
        written, context = written + cycle["committed"], context + cycle["committed"]
    assert written == 24
