"""The loop: a drafter guesses, the target chooses, the path where they agree is kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import exp
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from eagle.drafter import Budget, Committed, Drafter, Draw, Policy
from eagle.target import Target
from eagle.tree import DraftTree
from eagle.verify import Choose, Sampling, verify


@dataclass(frozen=True, slots=True)
class Cycle:
    """One target forward: what was proposed, what came of it, and the seconds of draft, target, verify and other."""

    tree: DraftTree = field(compare=False, repr=False)  # proposed; the laws it was drawn from are not kept
    kept: tuple[int, ...]  # nodes of the tree that the target confirmed
    committed: int  # new tokens of the output, after cutting at a stop
    context: int  # tokens that the target had read before
    seconds: dict[str, float] | None = None

    @property
    def nodes(self) -> int:
        """Proposed tokens, root not counted."""
        return len(self.tree) - 1

    @property
    def depth(self) -> int:
        """Levels of the proposed tree."""
        return max(self.tree.depths())

    @property
    def accepted(self) -> int:
        """Drafted tokens that the target confirmed."""
        return len(self.kept)

    @property
    def path(self) -> list[int]:
        """The rank of each accepted token among its siblings."""
        children = self.tree.children()
        return [children[parent].index(node) for parent, node in pairwise((0, *self.kept))]

    @property
    def confidence(self) -> list[tuple[float, bool]]:
        """Of each drafted token whose parent was accepted: how likely the drafter thought it, and whether it was."""
        if self.tree.likelihoods is None:
            return []
        likely, children = self.tree.likelihoods.tolist(), self.tree.children()
        asked = [(parent, child) for parent in (0, *self.kept) for child in children[parent]]
        return [(min(exp(likely[child] - likely[parent]), 1.0), child in self.kept) for parent, child in asked]


@dataclass(slots=True)
class Trace:
    """One generation, cycle by cycle."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    cycles: list[Cycle] = field(default_factory=list)
    finish: str = "running"  # "stop" or "length" at the end
    tokenizer: Any = field(default=None, repr=False)
    stop_string: str | None = None

    @property
    def acceptance_length(self) -> float:
        """Tokens committed per target forward, its own included, prefill excluded, tokens cut off not counted."""
        return sum(cycle.committed for cycle in self.cycles) / len(self.cycles) if self.cycles else 0.0

    @property
    def text(self) -> str:
        """The answer as text, up to where a stop string began."""
        if self.tokenizer is None:
            raise ValueError("this target has no tokenizer, so the trace has no text: read trace.tokens")
        text = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
        return text.partition(self.stop_string)[0] if self.stop_string else text

    @property
    def drafted(self) -> list[bool]:
        """For every token, whether it was drafted; the others are the target's own."""
        marks = [False] * min(len(self.tokens), 1)  # the prompt's own next token
        for cycle in self.cycles:
            kept = min(cycle.accepted, cycle.committed)
            marks += [True] * kept + [False] * (cycle.committed - kept)
        return marks

    def pieces(self) -> list[tuple[str, bool]]:
        """The text in pieces, each with whether the token that completes it was drafted."""
        spell, marks = Spelling(self.tokenizer), self.drafted
        said = [(spell(token), mark) for token, mark in zip(self.tokens, marks, strict=True)]
        return [(text, mark) for text, mark in [*said, (spell.rest(), marks[-1])] if text]


class Spelling:
    """Tokens as text, one by one; a character whose bytes are not all there yet waits for them."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        # spelt before, and up to which: what stands in front decides whether a token begins with a space
        self.begin = self.end = 0

    def __call__(self, token: int) -> str:
        """What can be said once this token is there."""
        self.tokens.append(token)
        new = self.rest()
        if not new or new.endswith("\ufffd"):
            return ""
        self.begin, self.end = self.end, len(self.tokens)
        return new

    def rest(self) -> str:
        """What waits."""
        said, text = (self._text(end) for end in (self.end, len(self.tokens)))
        return text[len(said) :]

    def _text(self, end: int) -> str:
        return self.tokenizer.decode(self.tokens[self.begin : end], skip_special_tokens=True)


def generate(target: Target, drafter: Drafter, prompt: Sequence[int] | Tensor, **options: Any) -> Trace:
    """The target's own answer to a prompt, drafted by `drafter`; the options are those of `stream`."""
    trace = Trace([])
    for _ in stream(target, drafter, prompt, trace=trace, **options):
        pass
    return trace


def stream(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int] | Tensor,
    *,
    sampling: Sampling | None = None,
    max_new_tokens: int = 128,
    stop: Sequence[int | str] | None = None,
    budget: Budget | Policy | None = None,
    timing: bool = False,
    trace: Trace | None = None,
) -> Iterator[list[int]]:
    """Yield new tokens as they are committed. `stop` holds token ids and strings; None means the target's own."""
    trace = trace or Trace([])
    budget = budget or getattr(drafter, "budget", None) or Budget()  # its own, where it was tuned
    draw = getattr(budget, "draw", None)
    choose = Choose(sampling or Sampling(), target.draws, drawn=draw == "sampled")
    trace.prompt = prompt = _token_ids(prompt)
    trace.tokenizer = target.tokenizer
    _check_length(target, len(prompt), max_new_tokens)
    until = _Until(target, stop, max_new_tokens)
    clock = _Clock(target.device, timing)
    learn = getattr(budget, "learn", None)

    drafter.begin(choose.offer(target.vocab_size, target.device))
    news = [target.begin(prompt, choose, drafter.taps, room=max_new_tokens + budget.nodes + 1)]  # not told yet
    yield until.commit(trace, [news[0].root])
    while trace.finish == "running":
        clock.start()
        # what lies deeper than the last token wanted could only be cut off again
        here = budget.within(max_new_tokens - len(trace.tokens) - 1)
        draw = _same_draw(draw, here.draw)
        tree = DraftTree.chain([news[-1].root])
        if not here.is_empty:
            tree, news = drafter.propose(Committed.joined(news), here), []
        clock.lap("draft")
        reading = target.read(tree)
        clock.lap("target")
        path, root = verify(reading, choose)
        clock.lap("verify")
        target.keep(tree, path)
        news.append(Committed(tree.tokens[path], reading.features_at(path), root))
        new = until.commit(trace, [*news[-1].tokens.tolist()[1:], root])
        clock.lap("other")
        shape, context = replace(tree, laws=None), reading.positions[0] - 1
        trace.cycles.append(Cycle(shape, tuple(path[1:]), len(new), context, clock.seconds))
        if learn is not None:
            learn(trace.cycles[-1])
        yield new


def _same_draw(draw: Draw | None, asked: Draw) -> Draw:
    """How this budget draws, and refused where it changes: what was seen must not choose the rule of verification."""
    if draw is None and asked == "sampled":
        raise ValueError(
            "this policy asks for drafts that are 'sampled' without saying so beforehand: give it an attribute "
            "draw = 'sampled', and the same in all its budgets"
        )
    if draw not in (None, asked):
        raise ValueError(
            f"the policy asks for draw {asked!r}, expected {draw!r} in the whole request: a change that depends on "
            "what was drawn would bend the output's law; keep one draw per policy"
        )
    return asked


class _Until:
    """Where an answer ends: a stop token, a stop string, or enough tokens."""

    def __init__(self, target: Target, stop: Sequence[int | str] | None, max_new_tokens: int) -> None:
        stop = target.stop_tokens if stop is None else stop
        self.tokens = {item for item in stop if isinstance(item, int)}
        self.strings = [item for item in stop if isinstance(item, str)]
        # tokens that a stop string can span; some print nothing and take places too
        self.reach = max((len(string.encode()) for string in self.strings), default=0) + 16
        self.tokenizer, self.limit = target.tokenizer, max_new_tokens
        if self.strings and self.tokenizer is None:
            raise ValueError(f"stop strings {self.strings} need a tokenizer: load the target with one, or pass ids")

    def commit(self, trace: Trace, new: list[int]) -> list[int]:
        """Append what belongs to the answer, and say in `trace.finish` whether it has ended."""
        new = new[: self.limit - len(trace.tokens)]
        ends = [place for place, token in enumerate(new, start=1) if token in self.tokens]
        if (end := self._string_end(trace, new)) is not None:
            ends.append(end)
        if ends:
            new, trace.finish = new[: min(ends)], "stop"
        trace.tokens += new
        if not ends and len(trace.tokens) == self.limit:
            trace.finish = "length"
        return new

    def _string_end(self, trace: Trace, new: list[int]) -> int | None:
        """How many of the new tokens it takes to complete a stop string, or None."""
        for end in range(1, len(new) + 1) if self.strings else ():
            text = self.tokenizer.decode((trace.tokens + new[:end])[-self.reach :], skip_special_tokens=False)
            found = [string for string in self.strings if string in text]
            if found:
                trace.stop_string = min(found, key=text.find)  # the one that begins first
                return end
        return None


class _Clock:
    """Seconds per part of a cycle; switched off it does nothing."""

    def __init__(self, device: torch.device, on: bool) -> None:
        self.device, self.on, self.last = device, on, 0.0
        self.seconds: dict[str, float] | None = None

    def start(self) -> None:
        """A new cycle begins."""
        if self.on:
            self.seconds, self.last = {}, self._now()

    def lap(self, part: str) -> None:
        """What passed since the last call was spent on this part."""
        if self.seconds is not None:
            now = self._now()
            self.seconds[part], self.last = now - self.last, now

    def _now(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return perf_counter()


def _token_ids(prompt: Sequence[int] | Tensor) -> list[int]:
    """The prompt as a list, from a list or a tensor [T] or [1, T]."""
    if isinstance(prompt, str):
        raise ValueError("the prompt is text, expected token ids: use target.chat(text) or target.tokenizer.encode")
    if isinstance(prompt, Tensor):
        if prompt.dim() > 2 or (prompt.dim() == 2 and len(prompt) != 1):
            raise ValueError(
                f"one prompt at a time: got a tensor of shape {tuple(prompt.shape)}, expected [T] or [1, T]"
            )
        prompt = prompt.flatten().tolist()
    return list(prompt)


def _check_length(target: Target, prompt: int, new: int) -> None:
    if new < 1:
        raise ValueError(f"max_new_tokens is {new}, expected 1 or more")
    if target.max_positions is not None and prompt + new > target.max_positions:
        raise ValueError(
            f"{prompt} prompt tokens and {new} new ones exceed the model's {target.max_positions} positions: "
            f"lower max_new_tokens to {max(target.max_positions - prompt, 0)} or shorten the prompt"
        )
