"""Acceptance by task and turn of an answer, and by tokens of context and of the answer before a cycle."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from eval.result_files.results import (
    Answer,
    Group,
    Key,
    count_cycles,
    cycles,
    prompt_key,
    task_of,
)
from eval.result_files.statistics import Estimate, Row, estimate

ENOUGH = 50  # cycles; fewer tell nothing about a bucket


@dataclass(frozen=True)
class Buckets:
    """Ranges of tokens, each `factor` times as wide as those before it, and the tokens before each cycle."""

    title: str
    first: int  # tokens, where the second bucket begins
    factor: int
    count: Callable[[Answer], Sequence[int]]  # of each cycle of an answer

    def find(self, tokens: int) -> int:
        """Return the index of the bucket for a number of tokens."""
        # 40 buckets reach further than any context
        return bisect_right([self.start(bucket) for bucket in range(1, 40)], tokens)

    def start(self, bucket: int) -> int:
        """Return the fewest tokens of a bucket."""
        if not bucket:
            return 0
        return self.first * self.factor ** (bucket - 1)

    def name(self, bucket: int) -> str:
        """Return the bucket's range as text."""
        end = _short(self.start(bucket + 1))
        if not bucket:
            return f"below {end}"
        return f"{_short(self.start(bucket))} to {end}"

    def acceptance_lengths(self, group: Group) -> dict[int, Estimate]:
        """Return τ with its interval by bucket, where there are enough cycles."""
        num_cycles: Counter[int] = Counter()
        rows: dict[int, dict[Key, list[Row]]] = {}
        for answer in group.answers:
            # the interval resamples whole conversations
            conversation = prompt_key(answer)[:2]
            for tokens, cycle in zip(self.count(answer), cycles(answer), strict=True):
                bucket = self.find(tokens)
                num_cycles[bucket] += 1
                by_conversation = rows.setdefault(bucket, {})
                by_conversation.setdefault(conversation, []).append((cycle["committed"], 1))
        enough = [bucket for bucket in sorted(rows) if num_cycles[bucket] >= ENOUGH]
        return {bucket: estimate(rows[bucket]) for bucket in enough}


@dataclass(frozen=True)
class Split:
    """Kinds of answers, of which each has a τ of its own; the short methods are those of `Buckets`."""

    title: str
    find: Callable[[Answer], Any]
    name: Callable[[Any], str]

    def acceptance_lengths(self, group: Group) -> dict[Any, Estimate]:
        """Return τ with its interval by kind, where there are cycles."""
        num_cycles: Counter[Any] = Counter()
        rows: dict[Any, dict[Key, list[Row]]] = {}
        for answer in group.answers:
            kind = self.find(answer)
            counts = count_cycles(answer)
            num_cycles[kind] += int(counts[1])
            by_conversation = rows.setdefault(kind, {})
            by_conversation.setdefault(prompt_key(answer)[:2], []).append(counts)
        return {kind: estimate(rows[kind]) for kind in sorted(rows) if num_cycles[kind]}


def name_turns(octave: int) -> str:
    """Return the turns, from 1, of which each has as many bits when it is counted from 0."""
    last = 2**octave
    # each of the first two turns is a kind of its own
    if octave < 2:
        return str(last)
    return f"{last // 2 + 1} to {last}"


def count_context(answer: Answer) -> list[int]:
    """Return the tokens in the target's context before each cycle."""
    return [cycle["context"] for cycle in cycles(answer)]


def count_written(answer: Answer) -> list[int]:
    """Return the tokens of the answer before each cycle; the first token is the prefill's."""
    committed = [cycle["committed"] for cycle in cycles(answer)]
    return list(accumulate(committed, initial=1))[:-1]


CONTEXT = Buckets("tokens of context", 512, 2, count_context)
WRITTEN = Buckets("tokens of the answer", 32, 4, count_written)
TASK = Split("task", task_of, str)
# 1, 2, 3 to 4, 5 to 8 ...: sessions of agents have many
TURN = Split("turn", lambda answer: answer.get("turn", 0).bit_length(), name_turns)
# the page shows tasks in a section of their own
EVERY = (TURN, CONTEXT, WRITTEN)


def several_buckets(lengths: Sequence[dict[Any, Estimate]]) -> list[Any]:
    """Return the buckets that occur in any group, in order; none if there is only one."""
    buckets = sorted(set[Any]().union(*lengths))
    return buckets if len(buckets) > 1 else []


def _short(tokens: int) -> str:
    return str(tokens) if tokens < 1024 else f"{tokens // 1024}k"
