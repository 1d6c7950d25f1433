"""Answers that are written side by side: the texts' latencies, and the throughput of the steps that they share."""

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
from eval.result_files.answer_rows import Row, batch_row_of

WARM_UP = 4  # tokens of each text of a batch that is not counted


@dataclass
class Text:
    """An answer that is being written, or waits for its turn."""

    case: Case
    turn: int
    trace: Trace = field(default_factory=lambda: Trace([]))
    share: float = 0.0  # of the steps' seconds, each split evenly over the texts in it
    cpu_share: float = 0.0
    latency: float = 0.0  # seconds of all steps since it was admitted


class Batches:
    """One drafter's answers to the questions of a set at one temperature with one seed."""

    def __init__(self, measurement: Measurement, name: str, batch_size: int) -> None:
        self.measurement, self.name, self.batch_size = measurement, name, batch_size
        self.session = secrets.token_hex(4)  # of this decoding: its cycles count from 0
        self.decoding = open_decoding(measurement, measurement.drafters[name], batch_size)
        self.texts: dict[int, Text] = {}
        self.asked = self.step = 0
        self.since: dict[str, Any] = {}  # sums over the steps since lines were written last

    def answer(self, cases: list[Case]) -> Iterator[Row]:
        """Write what is missing, answer by answer as they end; each is in the file when it is yielded."""
        for case in cases:
            self._add(case)
        try:
            while not self.decoding.is_done:
                ended = self._step()
                rows = [self._row(text) for text in ended]
                if rows:
                    self.measurement.results.add_batch(self._take_steps(ended[0].case), rows)
                yield from rows
                for text in ended:
                    self._add(text.case)
        finally:
            self.decoding.close()

    def _add(self, case: Case) -> None:
        """Queue the next missing turn of a question, if there is one and the model has room for it."""
        measurement, turns = self.measurement, range(len(case.question.turns))
        missing = (turn for turn in turns if self.name not in measurement.answers(case, turn, self.batch_size))
        if (turn := next(missing, None)) is None:
            return
        prompt = measurement.prompt(case, turn, self.batch_size)
        if prompt is None:
            measurement.missing[case.question.set] += 1
            return
        text, limit = Text(case, turn), measurement.recipe.eval.max_new_tokens
        self.decoding.add(self.asked, prompt, case.sampling(turn), limit, text.trace)
        self.texts[self.asked] = text
        self.asked += 1

    def _step(self) -> list[Text]:
        """One step; its seconds go to the texts in it. Those that have ended are returned."""
        wall, cpu = perf_counter(), process_time()
        new = self.decoding.step()
        wall, cpu = perf_counter() - wall, process_time() - cpu
        numbers = {number for number, _ in new} | self.decoding.rows.keys()
        for number in numbers:
            text = self.texts[number]
            text.share += wall / len(numbers)
            text.cpu_share += cpu / len(numbers)
            text.latency += wall
        self.step += 1
        tokens = sum(len(tokens) for _, tokens in new)
        sums = {"steps": 1, "texts": len(numbers), "tokens": tokens, "seconds": wall, "cpu_seconds": cpu}
        self.since = {name: self.since.get(name, 0) + value for name, value in sums.items()}
        return [self.texts.pop(number) for number, _ in new if self.texts[number].trace.finish != "running"]

    def _take_steps(self, case: Case) -> dict[str, Any]:
        """Seconds and tokens of the steps since the last line, including texts that have not ended."""
        sums, self.since = self.since, {}
        where = {"set": case.question.set, "temperature": case.temperature, "seed": case.seed}
        about = {"drafter": self.name, **where, "batch_size": self.batch_size}
        seconds = {name: round(sums.pop(name), 6) for name in ("seconds", "cpu_seconds")}
        return {"session": self.session, "step": self.step, **about, **sums, **seconds}

    def _row(self, text: Text) -> Row:
        """The row of an answer that has ended."""
        measurement, case = self.measurement, text.case
        text.trace.checked()
        about = {**measurement.describe(self.name, case, text.turn), "batch_size": self.batch_size}
        row = batch_row_of(text.trace, text.share, text.cpu_share, text.latency, self.session)
        plain = row if self.name == "none" else measurement.answers(case, text.turn, self.batch_size)["none"]
        pieces = self.batch_size == measurement.batch_sizes[0] and measurement.is_in_pieces(case)
        more = {"pieces": text.trace.pieces()} if pieces else {}
        if self.name == "none":
            measurement.plain_tokens[case.key(text.turn), self.batch_size] = text.trace.tokens
        row = {**about, **row, **more}
        measurement.compare(row, plain, case, text.turn, text.trace)
        return row


def open_decoding(measurement: Measurement, measured: MeasuredDrafter, batch_size: int) -> Decoding:
    """An empty decoding of a drafter that keeps the seconds of its cycles; nothing was read before."""
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
    """The missing rows of batches of one size: set by set plain decoding first, then the drafters in turns.

    Plain decoding goes first because all drafters read its answers before a second turn.
    """
    every = sorted(measurement.cases(), key=lambda case: (case.temperature, case.seed, case.question.set))
    left = [case for case in every if not measurement.is_done(case, batch_size)]
    if not left:
        return
    for measured in measurement.drafters.values():
        _warm_up(measurement, measured, batch_size)
    others = [name for name in measurement.drafters if name != "none"]
    groups = groupby(left, key=lambda case: (case.temperature, case.seed, case.question.set))
    for number, (_, group) in enumerate(groups):
        asked, first = list(group), number % max(len(others), 1)
        for name in ("none", *others[first:], *others[:first]):
            yield from Batches(measurement, name, batch_size).answer(asked)


def _warm_up(measurement: Measurement, measured: MeasuredDrafter, batch_size: int) -> None:
    """A full batch of a few tokens, so that no step pays for what happens once."""
    section, prompt = measurement.recipe.eval, measurement.first_prompt()
    sampling, limit = Sampling(max(section.temperatures)), min(WARM_UP, section.max_new_tokens)
    decoding = open_decoding(measurement, measured, batch_size)
    traces = [Trace([]) for _ in range(batch_size)]
    for number, trace in enumerate(traces):
        decoding.add(number, prompt, sampling, limit, trace)
    while not decoding.is_done:
        decoding.step()
    decoding.close()
    for trace in traces:
        trace.checked()
