"""Measure answers decoded in batches: each request's latency, and the throughput of the steps that they share."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from time import perf_counter, process_time
from typing import Any

from eagle.core.trace import Trace
from eagle.core.verify import Sampling
from eagle.decoding.loop import Decoding
from eval.load_run import MeasuredDrafter
from eval.measurement import Measurement
from eval.prompts import Case
from eval.result_files.write_results import Row, batch_row_of

# tokens of each request of a batch that is not counted
WARM_UP = 4


@dataclass
class Request:
    """An answer that is being written, or waits for its turn."""

    case: Case
    turn: int
    trace: Trace = field(default_factory=lambda: Trace([]))
    share: float = 0.0  # of the steps' seconds, each split evenly over the requests in it
    cpu_share: float = 0.0
    latency: float = 0.0  # seconds of all steps since it was admitted


class Batches:
    """One drafter's answers to the questions of a set at one temperature with one seed."""

    def __init__(self, measurement: Measurement, name: str, batch_size: int) -> None:
        self.measurement, self.name, self.batch_size = measurement, name, batch_size
        # of this decoding: its cycles count from 0
        self.session = secrets.token_hex(4)
        self.decoding = open_decoding(measurement, measurement.drafters[name], batch_size)
        self.running: dict[int, Request] = {}
        self.asked = 0
        self.step = 0
        # sums over the steps since lines were written last
        self.since: dict[str, Any] = {}

    def answer(self, cases: list[Case]) -> Iterator[Row]:
        """Yield the missing rows as answers end; each is in the file when it is yielded."""
        for case in cases:
            self._add(case)
        try:
            while not self.decoding.is_done:
                ended = self._step()
                rows = [self._row(request) for request in ended]
                if rows:
                    self.measurement.results.add_batch(self._take_steps(ended[0].case), rows)
                yield from rows
                for request in ended:
                    self._add(request.case)
        finally:
            # an interruption leaves no rows in the cache
            self.decoding.close()

    def _add(self, case: Case) -> None:
        """Queue the next missing turn of a question, if there is one and it fits the model."""
        measurement = self.measurement
        turns = range(len(case.question.turns))
        missing = []
        for turn in turns:
            if self.name not in measurement.answers(case, turn, self.batch_size):
                missing.append(turn)
        if not missing:
            return

        # one turn at a time: the next one's prompt holds its answer
        turn = missing[0]
        prompt = measurement.prompt(case, turn, self.batch_size)
        if prompt is None:
            measurement.missing[case.question.set] += 1
            return
        request = Request(case, turn)
        self.decoding.add(
            self.asked,
            prompt,
            case.sampling(turn),
            measurement.recipe.eval.max_new_tokens,
            trace=request.trace,
        )
        self.running[self.asked] = request
        self.asked += 1

    def _step(self) -> list[Request]:
        """Run one step, and return the requests that have ended."""
        wall = perf_counter()
        cpu = process_time()
        new = self.decoding.step()
        wall = perf_counter() - wall
        cpu = process_time() - cpu

        # a request that ended in this step has left the decoding's rows, but was in it
        active = {name for name, _ in new} | self.decoding.rows.keys()
        for name in active:
            request = self.running[name]
            request.share += wall / len(active)
            request.cpu_share += cpu / len(active)
            request.latency += wall

        self.step += 1
        num_tokens = sum(len(tokens) for _, tokens in new)
        sums = {
            "steps": 1,
            "texts": len(active),  # the requests in the step
            "tokens": num_tokens,
            "seconds": wall,
            "cpu_seconds": cpu,
        }
        self.since = {name: self.since.get(name, 0) + value for name, value in sums.items()}

        ended = [name for name, _ in new if self.running[name].trace.finish != "running"]
        return [self.running.pop(name) for name in ended]

    def _take_steps(self, case: Case) -> dict[str, Any]:
        """Return seconds and tokens of the steps since the last call, unfinished requests included."""
        sums = self.since
        self.since = {}
        for name in ("seconds", "cpu_seconds"):
            sums[name] = round(sums[name], 6)
        return {
            "session": self.session,
            "step": self.step,
            "drafter": self.name,
            "set": case.question.set,
            "temperature": case.temperature,
            "seed": case.seed,
            "batch_size": self.batch_size,
            **sums,
        }

    def _row(self, request: Request) -> Row:
        """Return the row of an answer that has ended."""
        measurement = self.measurement
        case = request.case
        request.trace.checked()
        row = {
            **measurement.describe(self.name, case, request.turn),
            "batch_size": self.batch_size,
            **batch_row_of(
                request.trace,
                request.share,
                request.cpu_share,
                request.latency,
                session=self.session,
            ),
        }
        # the pieces are those of every batch size, so one keeps them
        if self.batch_size == measurement.batch_sizes[0] and measurement.is_in_pieces(case):
            row["pieces"] = request.trace.pieces()

        # plain decoding goes first, and its own answer is compared with itself
        if self.name == "none":
            plain = row
            measurement.plain_tokens[case.key(request.turn), self.batch_size] = request.trace.tokens
        else:
            plain = measurement.answers(case, request.turn, self.batch_size)["none"]
        measurement.compare(row, plain, case, request.turn, trace=request.trace)
        return row


def open_decoding(measurement: Measurement, measured: MeasuredDrafter, batch_size: int) -> Decoding:
    """Open an empty decoding of a drafter that records the seconds of its cycles."""
    # no prompt may be in the cache already
    measurement.target.forget()
    return Decoding(
        measurement.target,
        measured.drafter,
        budget=measured.plan,
        batch_size=batch_size,
        max_tokens_in_cache=measurement.recipe.eval.max_tokens_in_cache,
        timing=True,
    )


def measure_batches(measurement: Measurement, batch_size: int) -> Iterator[Row]:
    """Yield the missing rows of one batch size, set by set.

    Args:
        measurement: The questions, and the answers so far; rows are added to its results.
        batch_size: The most requests at once.
    """
    every = sorted(measurement.cases(), key=_set_of)
    left = [case for case in every if not measurement.is_done(case, batch_size)]
    if not left:
        return
    for measured in measurement.drafters.values():
        _warm_up(measurement, measured, batch_size)

    others = [name for name in measurement.drafters if name != "none"]
    for i, (_, group) in enumerate(groupby(left, key=_set_of)):
        asked = list(group)
        first = i % max(len(others), 1)
        # plain decoding goes first: all drafters read its answers before a second turn. The others take turns
        for name in ("none", *others[first:], *others[:first]):
            yield from Batches(measurement, name, batch_size).answer(asked)


def _set_of(case: Case) -> tuple[float, int, str]:
    """Return what the questions of one decoding have in common."""
    return case.temperature, case.seed, case.question.set


def _warm_up(measurement: Measurement, measured: MeasuredDrafter, batch_size: int) -> None:
    """Decode a full batch of a few tokens, so that no step pays for what happens once."""
    section = measurement.recipe.eval
    prompt = measurement.first_prompt()
    sampling = Sampling(max(section.temperatures))
    limit = min(WARM_UP, section.max_new_tokens)
    decoding = open_decoding(measurement, measured, batch_size)
    traces = [Trace([]) for _ in range(batch_size)]
    for i, trace in enumerate(traces):
        decoding.add(i, prompt, sampling, limit, trace=trace)
    while not decoding.is_done:
        decoding.step()
    decoding.close()
    for trace in traces:
        trace.checked()
