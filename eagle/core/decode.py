"""The decoding loop: draft a tree, read it with the target, verify, commit the accepted path."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import exp
from time import perf_counter
from typing import Any

import torch

from eagle.core.arguments import check_call, positive_int, refuse_options, token_ids
from eagle.core.budget import Budget, Draw, Policy
from eagle.core.drafter import Committed, Drafter
from eagle.core.ownership import turn_of
from eagle.core.spelling import Spelling
from eagle.core.stops import Stops
from eagle.core.tree import DraftTree
from eagle.core.verify import Choose, Sampling, verify
from eagle.target.target import Target


@dataclass(frozen=True, slots=True)
class Cycle:
    """One target forward: the proposed tree, the accepted nodes, and the seconds of draft, target, verify and other."""

    tree: DraftTree = field(compare=False, repr=False)  # without its `laws`
    kept: tuple[int, ...]  # accepted nodes of the tree
    committed: int  # new tokens of the output, after cutting at a stop
    context: int  # tokens in the target's cache before
    seconds: dict[str, float] | None = None

    @property
    def nodes(self) -> int:
        """Number of proposed tokens."""
        return len(self.tree) - 1

    @property
    def depth(self) -> int:
        """Levels of the proposed tree."""
        return max(self.tree.depths())

    @property
    def accepted(self) -> int:
        """Number of accepted tokens."""
        return len(self.kept)

    @property
    def path(self) -> list[int]:
        """The rank of each accepted token among its siblings."""
        children = self.tree.children()
        return [children[parent].index(node) for parent, node in pairwise((0, *self.kept))]

    @property
    def confidence(self) -> list[tuple[float, bool]]:
        """(drafter's probability, whether it was accepted) of each drafted token whose parent was accepted."""
        if self.tree.likelihoods is None:
            return []
        scores, children = self.tree.likelihoods.tolist(), self.tree.children()
        edges = [(parent, child) for parent in (0, *self.kept) for child in children[parent]]
        return [(min(exp(scores[child] - scores[parent]), 1.0), child in self.kept) for parent, child in edges]


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
        """Tokens committed per target forward, bonus tokens included, prefill and tokens cut off excluded."""
        return sum(cycle.committed for cycle in self.cycles) / len(self.cycles) if self.cycles else 0.0

    @property
    def text(self) -> str:
        """The answer as text, up to a stop string."""
        if self.tokenizer is None:
            raise ValueError("this target has no tokenizer, so the trace has no text: read trace.tokens")
        text = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
        return text.partition(self.stop_string)[0] if self.stop_string else text

    @property
    def drafted(self) -> list[bool]:
        """Whether each token was drafted; the others were chosen by the target itself."""
        marks = [False] * min(len(self.tokens), 1)  # the token after the prompt
        for cycle in self.cycles:
            kept = min(cycle.accepted, cycle.committed)
            marks += [True] * kept + [False] * (cycle.committed - kept)
        return marks

    def pieces(self) -> list[tuple[str, bool]]:
        """The text in pieces, each with whether the token that completes it was drafted."""
        spell, marks, remaining = Spelling(self.tokenizer), self.drafted, len(self.text)
        decoded = [(spell(token), mark) for token, mark in zip(self.tokens, marks, strict=True)]
        decoded += [(spell.rest(), mark) for mark in marks[-1:]]
        pieces = []
        for text, mark in decoded:
            if text := text[:remaining]:  # without the stop string
                pieces.append((text, mark))
            remaining -= len(text)
        return pieces


def generate(target: Target, drafter: Drafter, prompt: Any, **options: Any) -> Trace:
    """The target's answer to a prompt, accelerated by `drafter`; the options are those of `stream`."""
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

    The prompt is token ids in a list, tensor or array, or a tokenizer's output. `stop` is a token id, a string, or
    several; None means the target's stop tokens, an empty list none.
    """
    refuse_options(unknown, OPTIONS)
    sampling = Sampling() if sampling is None else sampling
    check_call(target, drafter, sampling, budget)
    budget = budget or drafter.budget or Budget()
    max_new_tokens = positive_int("max_new_tokens", max_new_tokens)
    trace = Trace([]) if trace is None else trace
    trace.prompt, trace.tokenizer = token_ids(prompt), target.tokenizer
    _check_length(target, len(trace.prompt), max_new_tokens)
    if stop is None:
        stop = [token for token in target.stop_tokens if 0 <= token < target.vocab_size]
    stops = Stops(stop, target.tokenizer, target.vocab_size)
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
    """Yield the token after the prompt, then the tokens that each cycle commits."""
    draw, learn = getattr(budget, "draw", None), getattr(budget, "learn", None)
    choose = Choose(sampling, target.draws, drawn=draw == "sampled")

    turn, stream_id = turn_of(drafter), object()  # a later stream on this drafter or target takes over
    with turn.take(stream_id):
        if drafter.reads.view:
            drafter.bind_target(target.view())
        drafter.begin(choose.offer(target.vocab_size, target.device))
    pending = [target.begin(trace.prompt, choose, drafter.taps, limit + budget.nodes + 1, stream_id)]
    yield _commit(trace, [pending[0].root], stops, limit)
    while trace.finish == "running":
        clock.start()
        # drafts beyond the last token wanted would only be cut off
        cycle_budget = budget.within(target.levels(limit - len(trace.tokens) - 1))
        draw = _check_draw(draw, cycle_budget.draw)
        tree = DraftTree.chain([pending[-1].root])
        if not cycle_budget.is_empty:
            with turn.hold(stream_id):
                tree = drafter.propose(Committed.join(pending), cycle_budget)
            pending = []
        clock.lap("draft")
        output = target.read(tree, stream_id)
        clock.lap("target")
        path, root = verify(output, choose)
        clock.lap("verify")
        target.keep(tree, path, stream_id)
        last = (tree, output.likeliest(drafter.reads.choices)) if drafter.reads.choices else ()
        pending.append(Committed(tree.tokens[path], output.features_at(path), root, *last))
        new = _commit(trace, [*pending[-1].tokens.tolist()[1:], root], stops, limit)
        clock.lap("other")
        shape, context = replace(tree, laws=None), output.positions[0] - 1
        trace.cycles.append(Cycle(shape, tuple(path[1:]), len(new), context, clock.seconds))
        if learn is not None:
            learn(trace.cycles[-1])
        yield new


def _check_draw(draw: Draw | None, asked: Draw) -> Draw:
    """The draw of this cycle's budget, which must not change: the rule of verification must not depend on drafts."""
    if draw is None and asked == "sampled":
        raise ValueError(
            "this policy asks for drafts that are 'sampled' without saying so beforehand: give it an attribute "
            "draw = 'sampled', and the same in all its budgets"
        )
    if draw not in (None, asked):
        raise ValueError(
            f"the policy asks for draw {asked!r}, expected {draw!r} in the whole request: a change that depends on "
            "what was drawn would bias the output; keep one draw per policy"
        )
    return asked


def _commit(trace: Trace, new: list[int], stops: Stops, limit: int) -> list[int]:
    """Append the new tokens that belong to the answer, and set `trace.finish` if it has ended."""
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
    """Seconds of each part of a cycle, if `on`."""

    def __init__(self, device: torch.device, on: bool) -> None:
        self.device, self.on, self.last = device, on, 0.0
        self.seconds: dict[str, float] | None = None

    def start(self) -> None:
        """Begin a cycle."""
        if self.on:
            self.seconds, self.last = {}, self._now()

    def lap(self, part: str) -> None:
        """Record the time since the last call as spent on this part."""
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
