"""Several servers that share one queue of conversations: whichever is free takes the next one."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from threading import Condition, Lock
from time import monotonic
from typing import Any

from data_prep.servers.answers import Answer, Dialogue, Outcome, Prompt
from data_prep.servers.endpoint import Endpoint
from data_prep.servers.transport import Failure, Kind
from data_prep.servers.usage import Usage
from data_prep.servers.workers import merge


@dataclass(slots=True)
class Job:
    """A conversation, the prompt that it waits for an answer to, and how that went so far."""

    name: str
    dialogue: Dialogue
    prompt: Prompt | None = None
    outcome: dict[str, Any] | str | None = None
    attempts: int = 0  # of this prompt
    # When each server that failed may be asked again.
    ready: dict[str, float] = field(default_factory=dict)
    is_trial: bool = False  # of the server that has it

    def advance(self, answer: Answer | None) -> None:
        """Go on to the next prompt, or to the outcome if there is none."""
        try:
            # None starts the dialogue.
            self.prompt = self.dialogue.send(answer)  # type: ignore[arg-type]
        except StopIteration as end:
            self.prompt = None
            self.outcome = end.value
        self.attempts = 0
        self.ready.clear()


class Queue:
    """Conversations that wait for a server, those that were tried before first."""

    def __init__(
        self,
        dialogues: Iterator[tuple[str, Dialogue]],
        endpoints: Sequence[Endpoint],
        attempts: int,
    ) -> None:
        self.dialogues = dialogues
        self.endpoints = endpoints
        self.attempts = attempts
        self.waiting: deque[Job] = deque()
        self.asked = 0  # jobs that a server has
        self.changed = Condition()
        self.closed = False
        self.exhausted = False

    def take(self, endpoint: Endpoint) -> Job | None:
        """Return the next conversation for this server, once it may be asked and there is one; None at the end."""
        with self.changed:
            while not self.closed:
                now = monotonic()
                # If no server is left, the remaining conversations fail at once.
                given_up = all(peer.health.is_given_up for peer in self.endpoints)
                delay = 0.0 if given_up else endpoint.health.ready_in(now)
                if delay <= 0:
                    job, delay = self._next_for(endpoint, -inf if given_up else now)
                    if job is not None:
                        self.asked += 1
                        if given_up:
                            health = max(
                                (peer.health for peer in self.endpoints), key=lambda it: it.failures
                            )
                            job.outcome = f"not tried, after {health.failures} failures in a row: {health.latest}"
                        else:
                            job.is_trial = endpoint.health.begin()
                        return job
                    if self.exhausted and not self.waiting and not self.asked:
                        break
                self.changed.wait(None if delay == inf else delay)
            return None

    def _next_for(self, endpoint: Endpoint, now: float) -> tuple[Job | None, float]:
        """Return the first job that this server may have, or in how many seconds there is one; -inf takes any."""
        delays = []
        for i, job in enumerate(self.waiting):
            delay = job.ready.get(endpoint.url, now) - now if now > -inf else 0.0
            if delay <= 0:
                del self.waiting[i]
                return job, 0.0
            delays.append(delay)
        if not self.exhausted:
            started = next(self.dialogues, None)
            if started is not None:
                return Job(*started), 0.0
        self.exhausted = True
        return None, min(delays, default=inf)

    def answered(self, endpoint: Endpoint, job: Job, answer: Answer) -> None:
        """Note an answer; the conversation stays with its server, which remembers the beginning."""
        with self.changed:
            endpoint.usage.add(answer.prompt_tokens, answer.tokens)
            job.is_trial = False
            if endpoint.health.answered():
                print(f"{endpoint.url} answers again", file=sys.stderr)
            self.changed.notify_all()

    def failed(
        self, endpoint: Endpoint, job: Job, failure: Failure, began: float, asked: bool
    ) -> str | None:
        """Note a failure: the conversation waits to be asked for again (None), or has failed (why)."""
        with self.changed:
            now = monotonic()
            news = endpoint.health.failed(failure, began, now)
            if news:
                print(news, file=sys.stderr)
            # A server that is away has not seen the request.
            if asked and failure.kind is not Kind.AWAY:
                job.attempts += 1
            wait = endpoint.backoff.seconds(
                job.prompt.request if job.prompt else 0, max(job.attempts, 1)
            )
            job.ready[endpoint.url] = inf if failure.kind is Kind.REFUSED else now + wait
            is_refused = all(job.ready.get(peer.url) == inf for peer in self.endpoints)
            is_over = is_refused or job.attempts >= self.attempts
            if not is_over:
                self.waiting.append(job)
            self._leave(endpoint, job)
            if not is_over:
                return None
            if job.attempts > 1:
                return f"{failure} (asked {job.attempts} times)"
            return str(failure)

    def finished(self, endpoint: Endpoint, job: Job) -> None:
        """Note that a conversation has come to its end."""
        with self.changed:
            self._leave(endpoint, job)

    def _leave(self, endpoint: Endpoint, job: Job) -> None:
        """Take a job from its server."""
        self.asked -= 1
        endpoint.health.on_trial &= not job.is_trial
        job.is_trial = False
        self.changed.notify_all()

    def close(self) -> None:
        """Let no server wait any longer."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()


class Pool:
    """Servers of the recipe's target, each with `in_flight` requests at a time."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self.endpoints = endpoints
        self.section = endpoints[0].section
        self.at_once = self.section.in_flight * len(endpoints)
        # The smallest of all: else the maximum length of an answer would depend on who gives it.
        self.positions = min(
            (endpoint.positions for endpoint in endpoints if endpoint.positions), default=None
        )
        # Tokenizers are not thread-safe.
        self.tokenizing = Lock()

    def run(self, dialogues: Iterator[tuple[str, Dialogue]]) -> Iterator[Outcome]:
        """Yield the outcome of every conversation, as they end."""
        queue = Queue(dialogues, self.endpoints, self.section.attempts)
        for endpoint in self.endpoints:
            endpoint.usage = Usage()
        workers = [
            self._work(queue, endpoint)
            for _ in range(self.section.in_flight)
            for endpoint in self.endpoints
        ]
        try:
            yield from merge(workers)
        finally:
            queue.close()

    def _work(self, queue: Queue, endpoint: Endpoint) -> Iterator[Outcome]:
        """Yield the outcomes of conversations that one server answers, one after the other."""
        job = queue.take(endpoint)
        while job is not None:
            outcome = self._converse(queue, endpoint, job)
            if outcome is not None:
                yield job.name, outcome
            job = queue.take(endpoint)

    def _converse(self, queue: Queue, endpoint: Endpoint, job: Job) -> dict[str, Any] | str | None:
        """Ask for all answers of a conversation in turn; return its outcome, or None if it is to be tried again."""
        if job.outcome is not None:
            # There is no server left to ask.
            queue.finished(endpoint, job)
            return job.outcome
        began = monotonic()
        asked = False
        try:
            if endpoint.health.was_away:
                endpoint.check_again()
            if job.prompt is None:
                self._advance(job, None)
            while job.prompt is not None:
                began = monotonic()
                asked = True
                answer = endpoint.answer(job.prompt)
                queue.answered(endpoint, job, answer)
                self._advance(job, answer)
        except Failure as failure:
            return queue.failed(endpoint, job, failure, began, asked=asked)
        queue.finished(endpoint, job)
        return job.outcome

    def _advance(self, job: Job, answer: Answer | None) -> None:
        with self.tokenizing:
            job.advance(answer)

    def note(self) -> str:
        """Return the costs so far, beside a progress bar."""
        return self._usage().note()

    def _usage(self) -> Usage:
        return Usage.total([endpoint.usage for endpoint in self.endpoints])

    def summary(self) -> str:
        """Return what the answers cost, and of several servers what each gave; what each failed to."""
        lines = [self._usage().summary()]
        for endpoint in self.endpoints:
            reasons = ", ".join(
                f"{count} {kind}" for kind, count in endpoint.health.reasons.items()
            )
            if len(self.endpoints) > 1 or reasons:
                failures = f"; requests without an answer: {reasons}" if reasons else ""
                lines.append(f"  {endpoint.url}: {endpoint.usage.summary()}{failures}")
        return "\n".join(lines)
