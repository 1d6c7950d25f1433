"""Drafts and acceptances of this decoder, counted as a serving engine counts them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle.core.budget import Budget
from eagle.core.drafter import Committed, Drafter
from eagle.core.trace import Trace
from eagle.core.verify import Sampling
from eagle.decoding.loop import Decoding
from eagle.formats.checkpoint import load_drafter
from eagle.target.target import Target

Row = dict[
    str, Any
]  # of one answer: tokens, drafts, and how many had their first, second, ... token accepted


@dataclass(frozen=True, slots=True)
class Job:
    """The prompts and the shape of drafts that both the engine and this decoder are given."""

    target: Path
    prompts: list[list[int]]
    budget: Budget
    new_tokens: int = 16
    dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class Rule:
    """When an engine drafts, and from what. All count a whole draft, including what a limit or a stop then cuts off."""

    # the first draft follows the prompt's last token, not the answer's first
    from_prompt: bool = False
    stops: Collection[int] = ()  # tokens that end an answer
    reads: Collection[
        str
    ] = ()  # of READINGS, what an MTP layer reads there that it does not read here

    def count(self, new: list[int], accepted: int, depth: int) -> int:
        """How many accepted tokens count: none behind a stop, nor the stop itself unless it ends the draft."""
        ends = (
            place
            for place, token in enumerate(new[:accepted])
            if token in self.stops and place + 1 < depth
        )
        return next(ends, accepted)


def decode_as_engine(job: Job, head: Path | str, target: Target, rule: Rule) -> list[Row]:
    """Decode every prompt with this decoder, and count as the engine does."""
    drafter = load_drafter(head, target)
    fit_block(drafter, job.budget.depth)
    for name in rule.reads:
        READINGS[name](drafter, target)
    if job.budget.top_k > 1:
        job = replace(
            job, budget=replace(job.budget, sharpness=1.0)
        )  # engines grow trees by EAGLE-2's rule
    return [_decode(job, prompt, target, drafter, rule) for prompt in job.prompts]


def fit_block(drafter: Any, depth: int) -> None:
    """Cut the slots of a block head to those that a draft needs, as engines do.

    Slots of a block may attend to one another, so their number changes the guesses.
    """
    settings: Any = getattr(drafter, "settings", None)
    if hasattr(settings, "slots"):
        slots = depth + (not settings.sample_from_anchor)
        drafter.settings = settings.model_copy(update={"slots": min(slots, settings.slots)})


def blank_first_token(drafter: Any, target: Target) -> None:
    """Let an MTP layer read zeros for the embedding at position 0."""
    read = drafter.first_block

    def first_block(
        embedded: Tensor, hidden: Tensor, rotary: tuple[Tensor, Tensor], *more: Any
    ) -> Tensor:
        is_first = (rotary[1] == 0).all(-1, keepdim=True)  # nothing is turned at position 0
        states: Tensor = read(embedded.masked_fill(is_first, 0), hidden, rotary, *more)
        return states

    drafter.first_block = first_block


def read_before_norm(drafter: Any, target: Target) -> None:
    """Let an MTP layer read the target's state before its final norm, up to a scale that `hnorm` takes out."""
    fuse, weight = drafter.fuse_taps, target.model.base_model.norm.weight.detach()
    drafter.fuse_taps = lambda features: fuse(features) / weight


def feed_raw_states(drafter: Any, target: Target) -> None:
    """Let an MTP layer go on from its own state as it was before its norm."""
    drafter.next_input = lambda state: state


def lead_with_first_token(drafter: Any, target: Target) -> None:
    """Let an MTP layer read a text's first token too, beside zeros for the state before it."""
    open_texts = drafter.open

    def lead(update: Committed) -> Committed:
        tokens, features = update.tokens, update.features
        assert features is not None
        blank = torch.zeros_like(features[:1])
        return replace(
            update, tokens=torch.cat([tokens[:1], tokens]), features=torch.cat([blank, features])
        )

    def open_state() -> Any:
        state = open_texts()
        propose = state.propose

        def propose_with_lead(
            updates: Mapping[int, Committed], budgets: Mapping[int, Budget]
        ) -> Any:
            begun = set(state.rows)
            return propose(
                {row: up if row in begun else lead(up) for row, up in updates.items()}, budgets
            )

        state.propose = propose_with_lead
        return state

    drafter.open = open_state


READINGS: dict[str, Callable[[Any, Target], None]] = {
    "blank_first": blank_first_token,
    "before_norm": read_before_norm,
    "raw_states": feed_raw_states,
    "first_token": lead_with_first_token,
}


def _decode(job: Job, prompt: list[int], target: Target, drafter: Drafter, rule: Rule) -> Row:
    """Decode one prompt until the engine would draft no more: the last draft counts whole."""
    known = int(rule.from_prompt)  # of the prompt's tokens, that the first draft follows
    limit, trace = job.new_tokens + known, Trace([])
    decoding = Decoding(target, drafter, budget=job.budget)
    first = prompt[-1] if known else None
    decoding.add(
        0,
        prompt[: len(prompt) - known],
        Sampling(),
        limit + job.budget.depth + 1,
        trace,
        stop=[],
        first=first,
    )
    while len(trace.tokens) < limit and not set(trace.tokens[known:]) & set(rule.stops):
        decoding.step()
        trace.checked()
    decoding.close()
    ends = accumulate((cycle.committed for cycle in trace.cycles), initial=1)
    steps = [trace.tokens[start:end] for start, end in pairwise(ends)]
    counts = [
        rule.count(new, cycle.accepted, job.budget.depth)
        for new, cycle in zip(steps, trace.cycles, strict=True)
    ]
    return {
        "tokens": trace.tokens[known:limit],
        "own": [next((token for token in new if token in rule.stops), new[-1]) for new in steps],
        "drafts": len(steps),
        "accepted": [sum(count > place for count in counts) for place in range(job.budget.depth)],
    }


def same_counts(theirs: Row, ours: Row) -> bool:
    """Whether drafts and acceptances at every place are equal."""
    return (theirs["drafts"], theirs["accepted"]) == (ours["drafts"], ours["accepted"])


def same_text(theirs: Row, ours: Row) -> bool:
    """Whether the tokens are equal, as far as the engine reports them: all, or the last of every step."""
    return all(theirs[key] == ours[key] for key in ("tokens", "own") if key in theirs)


def sum_rows(rows: list[Row]) -> Row:
    """Sums over the prompts, and the acceptance length."""
    drafts = sum(row["drafts"] for row in rows)
    accepted = [sum(place) for place in zip(*(row["accepted"] for row in rows), strict=True)]
    return {"drafts": drafts, "accepted": accepted, "tau": 1 + sum(accepted) / drafts}
