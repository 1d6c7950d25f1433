"""Acceptance by position: by tokens of context, and by tokens of the answer before a cycle."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from eval.result_files.results import Answer, Group, Key, cycles, prompt_key
from eval.result_files.statistics import Estimate, Row, estimate

ENOUGH = 50  # cycles; fewer tell nothing about a bucket


@dataclass(frozen=True)
class Buckets:
    """Ranges of tokens, each a `factor` times as wide as those before it, and how many tokens stood before a cycle."""

    title: str
    first: int  # tokens, where the second bucket begins
    factor: int
    count: Callable[[Answer], Sequence[int]]  # of each cycle of an answer

    def find(self, tokens: int) -> int:
        """The index of the bucket for a number of tokens."""
        return bisect_right([self.start(bucket) for bucket in range(1, 40)], tokens)

    def start(self, bucket: int) -> int:
        """The fewest tokens of a bucket."""
        return self.first * self.factor ** (bucket - 1) if bucket else 0

    def name(self, bucket: int) -> str:
        """The bucket's range as text."""
        end = _short(self.start(bucket + 1))
        return f"{_short(self.start(bucket))} to {end}" if bucket else f"below {end}"

    def acceptance_lengths(self, group: Group) -> dict[int, Estimate]:
        """τ with its interval by bucket, where there are enough cycles."""
        rows: dict[int, dict[Key, list[Row]]] = {}
        for answer in group.answers:
            for tokens, cycle in zip(self.count(answer), cycles(answer), strict=True):
                conversations = rows.setdefault(self.find(tokens), {})
                conversations.setdefault(prompt_key(answer)[:2], []).append((cycle["committed"], 1))
        return {bucket: estimate(part) for bucket, part in sorted(rows.items()) if _count(part.values()) >= ENOUGH}


def count_context(answer: Answer) -> list[int]:
    """Tokens of the text that the target had read before each cycle."""
    return [cycle["context"] for cycle in cycles(answer)]


def count_written(answer: Answer) -> list[int]:
    """Tokens of the answer that stood before each cycle; the first is the prompt's."""
    return list(accumulate((cycle["committed"] for cycle in cycles(answer)), initial=1))[:-1]


CONTEXT = Buckets("tokens of context", 512, 2, count_context)
WRITTEN = Buckets("tokens of the answer", 32, 4, count_written)
EVERY = (CONTEXT, WRITTEN)


def several_buckets(lengths: Sequence[dict[int, Estimate]]) -> list[int]:
    """The buckets that occur in any group, in order; none if there is only one."""
    buckets = sorted({bucket for part in lengths for bucket in part})
    return buckets if len(buckets) > 1 else []


def _count(parts: Iterable[Sequence[Row]]) -> int:
    return sum(map(len, parts))


def _short(tokens: int) -> str:
    return str(tokens) if tokens < 1024 else f"{tokens // 1024}k"
