"""Answer prompts with the target itself, many at a time."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NamedTuple

import torch

from data_prep.servers.usage import Usage
from eagle.core.budget import Budget
from eagle.core.trace import Trace
from eagle.core.verify import Sampling
from eagle.decoding.loop import Decoding
from eagle.device import ThreadsOfLongWork
from eagle.formats.checkpoint import load_drafter
from eagle.recipe import RegenerateSection
from eagle.target.target import Target

# Why an answer ended, if not by itself.
TRUNCATED = "length"
FILTERED = "content_filter"
# Draft tokens of all conversations in a cycle, for a drafter that is not tuned.
DRAFTED = 64


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation that ends where the target speaks next."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    ids: list[int]  # the tokens of the messages
    room: int  # tokens that the answer may have
    request: int  # the key of its randomness


@dataclass(frozen=True, slots=True)
class Answer:
    """An assistant's message, why it ended, and its tokens."""

    message: dict[str, Any]
    finish: str
    tokens: int
    prompt_tokens: int = 0


# Yields prompts, is sent their answers, and returns the line of a part.
Dialogue = Generator[Prompt, Answer, dict[str, Any]]
# A conversation's id, and its line or the reason why it failed.
Outcome = tuple[str, "dict[str, Any] | str"]


class Local:
    """Answers with the target itself, `batch_size` conversations at a time; when one ends, the next begins."""

    def __init__(self, target: Target, tokenizer: Any, section: RegenerateSection) -> None:
        self.target = target
        self.tokenizer = tokenizer
        self.positions = target.max_positions
        self.sampling = Sampling(
            temperature=section.temperature, top_p=section.top_p, seed=section.seed
        )
        self.at_once = section.batch_size
        self.max_tokens_in_cache = section.max_tokens_in_cache
        self.usage = Usage()
        self.numbers = count()
        try:
            target.reader.check()
        except ValueError as error:
            raise ValueError(
                f"{error} For its answers serve it, and name regenerate.endpoint."
            ) from None
        self.drafter = load_drafter(section.drafter, target)
        self.threads = ThreadsOfLongWork(self._read_few) if target.device.type == "cpu" else None
        nodes = min(max(DRAFTED // self.at_once, 1), 10)
        budget = self.drafter.budget or Budget(nodes, nodes)
        # Drafts that are sampled freely would make the noise, and so the answers, depend on the drafter.
        self.budget = replace(budget, draw="noise")

    def run(self, dialogues: Iterator[tuple[str, Dialogue]]) -> Iterator[Outcome]:
        """Yield the outcome of every conversation when it ends."""
        decoding = Decoding(
            self.target,
            self.drafter,
            budget=self.budget,
            batch_size=self.at_once,
            max_tokens_in_cache=self.max_tokens_in_cache,
        )
        self.usage = Usage()
        running: dict[int, _Running] = {}
        try:
            while True:
                while len(running) < self.at_once:
                    started = next(dialogues, None)
                    if started is None:
                        break
                    yield from self._ask(decoding, running, *started)
                if not running:
                    return
                if self.threads is not None:
                    self.threads.settle()
                for number, _ in decoding.step():
                    if running[number].trace.finish == "running":
                        continue
                    ended = running.pop(number)
                    trace = ended.trace
                    if trace.error is not None:
                        # Other conversations go on.
                        yield ended.name, f"{type(trace.error).__name__}: {trace.error}"
                        continue
                    self.usage.add(len(ended.prompt.ids), len(trace.tokens))
                    answer = self._answer(trace)
                    yield from self._ask(
                        decoding, running, ended.name, ended.dialogue, answer=answer
                    )
        finally:
            decoding.close()

    def _ask(
        self,
        decoding: Decoding,
        running: dict[int, _Running],
        name: str,
        dialogue: Dialogue,
        answer: Any = None,
    ) -> Iterator[Outcome]:
        """Start the next answer of a conversation, or yield its outcome if there is none."""
        try:
            prompt = dialogue.send(answer)
        except StopIteration as end:
            yield name, end.value
            return
        number = next(self.numbers)
        trace = Trace([])
        sampling = replace(self.sampling, request=prompt.request)
        try:
            max_new_tokens = min(prompt.room, self.target.room(prompt.ids))
            decoding.add(number, prompt.ids, sampling, max_new_tokens, trace)
        except ValueError as error:
            # For example a prompt that is larger than the cache.
            yield name, str(error)
        else:
            running[number] = _Running(name, dialogue, prompt, trace)

    @torch.inference_mode()
    def _read_few(self) -> None:
        """Run one forward pass of a whole batch, by which numbers of threads are timed."""
        self.target.model(input_ids=torch.ones(self.at_once, 2, dtype=torch.long), use_cache=False)

    def note(self) -> str:
        """Return the costs so far, for a progress bar."""
        return self.usage.note()

    def summary(self) -> str:
        """Return the costs of all answers."""
        return self.usage.summary()

    def _answer(self, trace: Trace) -> Answer:
        """Return the message of a finished answer, without its stop token."""
        tokens = trace.tokens
        if trace.finish == "stop":
            tokens = tokens[:-1]
        text = self.tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return Answer({"role": "assistant", "content": text}, trace.finish, len(trace.tokens))


class _Running(NamedTuple):
    """A conversation whose answer is being decoded."""

    name: str
    dialogue: Dialogue
    prompt: Prompt
    trace: Trace
