"""Answer prompts with the target itself, many at a time."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

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

TRUNCATED, FILTERED = "length", "content_filter"  # why an answer ended, if not by itself
DRAFTED = 64  # tokens that are drafted in a cycle of all conversations, where the drafter is tuned to nothing else


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


# asks for answers in turn, and returns the line of a part
Dialogue = Generator[Prompt, Answer, dict[str, Any]]
Outcome = tuple[str, "dict[str, Any] | str"]  # a conversation's id, and its line or the reason for which it failed


class Local:
    """The target itself, `batch_size` conversations side by side: where one ends, the next takes its place."""

    def __init__(self, target: Target, tokenizer: Any, section: RegenerateSection) -> None:
        self.target, self.tokenizer, self.positions = target, tokenizer, target.max_positions
        self.sampling = Sampling(temperature=section.temperature, top_p=section.top_p, seed=section.seed)
        self.at_once, self.max_tokens_in_cache = section.batch_size, section.max_tokens_in_cache
        self.usage = Usage()
        try:
            target.reader.check()
        except ValueError as error:
            raise ValueError(f"{error} For its answers serve it, and name regenerate.endpoint.") from None
        self.drafter = load_drafter(section.drafter, target)
        nodes = min(max(DRAFTED // self.at_once, 1), 10)
        # drafts that are drawn by lot would make the noise, and so the answers, depend on who drafts
        self.threads = ThreadsOfLongWork(self._read_few) if target.device.type == "cpu" else None
        self.budget = replace(self.drafter.budget or Budget(nodes, nodes), draw="noise")

    def run(self, dialogues: Iterator[tuple[str, Dialogue]]) -> Iterator[Outcome]:
        """The outcome of every conversation, as they end."""
        decoding = Decoding(
            self.target,
            self.drafter,
            budget=self.budget,
            batch_size=self.at_once,
            max_tokens_in_cache=self.max_tokens_in_cache,
        )
        numbers, asked = count(), dict[int, tuple[str, Dialogue, Prompt, Trace]]()
        self.usage = Usage()

        def ask(name: str, dialogue: Dialogue, answer: Any = None) -> Iterator[Outcome]:
            """Go on to the conversation's next question; its outcome if there is none."""
            try:
                prompt = dialogue.send(answer)
            except StopIteration as end:
                yield name, end.value
                return
            number, trace = next(numbers), Trace([])
            sampling = replace(self.sampling, request=prompt.request)
            try:
                decoding.add(number, prompt.ids, sampling, min(prompt.room, self.target.room(prompt.ids)), trace)
            except ValueError as error:  # the cache may not hold it
                yield name, str(error)
            else:
                asked[number] = name, dialogue, prompt, trace

        try:
            while True:
                while len(asked) < self.at_once and (following := next(dialogues, None)):
                    yield from ask(*following)
                if not asked:
                    return
                if self.threads is not None:
                    self.threads.settle()
                for number, _ in decoding.step():
                    if asked[number][3].finish != "running":
                        name, dialogue, prompt, trace = asked.pop(number)
                        if trace.error is not None:  # of this conversation alone
                            yield name, f"{type(trace.error).__name__}: {trace.error}"
                            continue
                        self.usage.add(len(prompt.ids), len(trace.tokens))
                        yield from ask(name, dialogue, self._answer(trace))
        finally:
            decoding.close()

    @torch.inference_mode()
    def _read_few(self) -> None:
        """One forward of as many texts as are decoded at a time, by which threads are timed."""
        self.target.model(input_ids=torch.ones(self.at_once, 2, dtype=torch.long), use_cache=False)

    def note(self) -> str:
        """The costs so far, beside a progress bar."""
        return self.usage.note()

    def summary(self) -> str:
        """What the answers cost."""
        return self.usage.summary()

    def _answer(self, trace: Trace) -> Answer:
        """The message of a text that has ended, without its stop token."""
        spoken = trace.tokens[: len(trace.tokens) - (trace.finish == "stop")]
        text = self.tokenizer.decode(spoken, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return Answer({"role": "assistant", "content": text}, trace.finish, len(trace.tokens))
