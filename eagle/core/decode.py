"""The loop: a drafter guesses, the target chooses, the path where they agree is kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import exp
from time import perf_counter
from typing import Any

import torch

from eagle.core.arguments import check_call, positive_int, refuse_options, token_ids
from eagle.core.drafter import Budget, Committed, Drafter, Draw, Policy
from eagle.core.ownership import turn_of
from eagle.core.spelling import Spelling
from eagle.core.stops import Stops
from eagle.core.tree import DraftTree
from eagle.core.verify import Choose, Sampling, verify
from eagle.target.target import Target


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
        spell, marks, left = Spelling(self.tokenizer), self.drafted, len(self.text)
        spelt = [(spell(token), mark) for token, mark in zip(self.tokens, marks, strict=True)]
        pieces = []
        for text, mark in [*spelt, *((spell.rest(), mark) for mark in marks[-1:])]:
            if text[:left]:  # a stop string is no part of the text
                pieces.append((text[:left], mark))
            left -= len(text[:left])
        return pieces


def generate(target: Target, drafter: Drafter, prompt: Any, **options: Any) -> Trace:
    """The target's own answer to a prompt, drafted by `drafter`; the options are those of `stream`."""
    trace = Trace([])
    for _ in stream(target, drafter, prompt, **{"trace": trace, **options}):
        pass
    return options.get("trace") or trace


def stream(
    target: Target,
    drafter: Drafter,
    prompt: Any,
    *,
    sampling: Sampling | None = None,
    max_new_tokens: int = 128,
    stop: Any = None,
    budget: Budget | Policy | None = None,
    timing: bool = False,
    trace: Trace | None = None,
    **unknown: Any,
) -> Iterator[list[int]]:
    """Yield new tokens as they are committed.

    The prompt is token ids in a list, tensor or array, or what a tokenizer returns. `stop` is a token id, a string, or
    several; None means the target's own, an empty list none.
    """
    refuse_options(unknown, OPTIONS)
    sampling = Sampling() if sampling is None else sampling
    check_call(target, drafter, sampling, budget)
    budget = budget or drafter.budget or Budget()
    max_new_tokens = positive_int("max_new_tokens", max_new_tokens)
    trace = Trace([]) if trace is None else trace
    trace.prompt, trace.tokenizer = token_ids(prompt), target.tokenizer
    _check_length(target, len(trace.prompt), max_new_tokens)
    own = [token for token in target.stop_tokens if 0 <= token < target.vocab_size]
    stops = Stops(own if stop is None else stop, target.tokenizer, target.vocab_size)
    return _cycles(target, drafter, trace, sampling, budget, stops, max_new_tokens, _Clock(target.device, timing))


OPTIONS = ("sampling", "max_new_tokens", "stop", "budget", "timing", "trace")


def _cycles(
    target: Target,
    drafter: Drafter,
    trace: Trace,
    sampling: Sampling,
    budget: Budget | Policy,
    stops: Stops,
    limit: int,
    clock: _Clock,
) -> Iterator[list[int]]:
    """The prompt's next token, and what each cycle commits after it."""
    draw, learn = getattr(budget, "draw", None), getattr(budget, "learn", None)
    choose = Choose(sampling, target.draws, drawn=draw == "sampled")

    turn, this = turn_of(drafter), object()  # whoever begins later on this drafter or target takes it away
    with turn.beginning(this):
        if drafter.reads.view:
            drafter.bind_target(target.view())
        drafter.begin(choose.offer(target.vocab_size, target.device))
    pending = [target.begin(trace.prompt, choose, drafter.taps, limit + budget.nodes + 1, this)]
    yield _commit(trace, [pending[0].root], stops, limit)
    while trace.finish == "running":
        clock.start()
        # what lies deeper than the last token wanted could only be cut off again
        here = budget.within(target.levels(limit - len(trace.tokens) - 1))
        draw = _same_draw(draw, here.draw)
        tree = DraftTree.chain([pending[-1].root])
        if not here.is_empty:
            with turn.of(this):
                tree, pending = drafter.propose(Committed.joined(pending), here), []
        clock.lap("draft")
        output = target.read(tree, this)
        clock.lap("target")
        path, root = verify(output, choose)
        clock.lap("verify")
        target.keep(tree, path, this)
        last = (tree, output.likeliest(drafter.reads.choices)) if drafter.reads.choices else ()
        pending.append(Committed(tree.tokens[path], output.features_at(path), root, *last))
        new = _commit(trace, [*pending[-1].tokens.tolist()[1:], root], stops, limit)
        clock.lap("other")
        shape, context = replace(tree, laws=None), output.positions[0] - 1
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


def _commit(trace: Trace, new: list[int], stops: Stops, limit: int) -> list[int]:
    """Append what belongs to the answer, and say in `trace.finish` whether it has ended."""
    new = new[: limit - len(trace.tokens)]
    end, trace.stop_string = stops.first_end(trace.tokens, new)
    new = new[:end]
    trace.tokens += new
    if end is not None:
        trace.finish = "stop"
    elif len(trace.tokens) == limit:
        trace.finish = "length"
    return new


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


def _check_length(target: Target, prompt: int, new: int) -> None:
    if target.max_positions is not None and prompt + new > target.max_positions:
        raise ValueError(
            f"{prompt} prompt tokens and {new} new ones exceed the model's {target.max_positions} positions: "
            f"lower max_new_tokens to {max(target.max_positions - prompt, 0)} or shorten the prompt"
        )
