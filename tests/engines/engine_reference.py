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
from eagle.drafters.blocks.convolved_block import GroupedConv
from eagle.formats.checkpoint import load_drafter
from eagle.target.target import Target

# of one answer: tokens, drafts, and how many had their first, second, ... token accepted
Row = dict[str, Any]


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
    # tokens that end an answer
    stops: Collection[int] = ()
    # of READINGS, what an MTP layer reads there that it does not read here
    reads: Collection[str] = ()

    def count(self, new: list[int], accepted: int, depth: int) -> int:
        """Return how many accepted tokens count: none after a stop, nor the stop itself unless it ends the draft."""
        for i, token in enumerate(new[:accepted]):
            if token in self.stops and i + 1 < depth:
                return i

        return accepted


def decode_as_engine(job: Job, head: Path | str, target: Target, rule: Rule) -> list[Row]:
    """Decode every prompt with this decoder, and count as the engine does."""
    drafter = load_drafter(head, target)
    fit_block(drafter, job.budget.depth)
    for name in rule.reads:
        READINGS[name](drafter, target)
    if job.budget.top_k > 1:
        # engines grow trees by EAGLE-2's rule
        job = replace(job, budget=replace(job.budget, sharpness=1.0))

    return [_decode(job, prompt, target, drafter, rule) for prompt in job.prompts]


def fit_block(drafter: Any, depth: int) -> None:
    """Cut the slots of a block head to those that a draft needs, as engines do.

    Slots of a block may attend to one another, so their number changes the guesses.
    """
    settings: Any = getattr(drafter, "settings", None)
    if hasattr(settings, "slots"):
        slots = depth + (not settings.sample_from_anchor)
        slots = min(slots, settings.slots)
        drafter.settings = settings.model_copy(update={"slots": slots})
        for module in drafter.modules():
            if isinstance(module, GroupedConv):
                module.slots = slots


def blank_first_token(drafter: Any, target: Target) -> None:
    """Let an MTP layer read zeros for the embedding at position 0."""
    read = drafter.first_block

    def first_block(
        embedded: Tensor,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        *more: Any,
    ) -> Tensor:
        # position 0 has no rotation: all its sines are zero
        is_first = (rotary[1] == 0).all(-1, keepdim=True)
        states: Tensor = read(
            embedded.masked_fill(is_first, 0),
            hidden,
            rotary,
            *more,
        )
        return states

    drafter.first_block = first_block


def read_before_norm(drafter: Any, target: Target) -> None:
    """Let an MTP layer read the target's state before its final norm, up to a scale that `hnorm` takes out."""
    fuse = drafter.fuse_taps
    weight = target.model.base_model.norm.weight.detach()
    drafter.fuse_taps = lambda features: fuse(features) / weight


def feed_raw_states(drafter: Any, target: Target) -> None:
    """Let an MTP layer go on from its own state as it was before its norm."""
    drafter.next_input = lambda state: state


def lead_with_first_token(drafter: Any, target: Target) -> None:
    """Let an MTP layer read a text's first token too, beside zeros for the state before it."""
    open_texts = drafter.open

    def lead(update: Committed) -> Committed:
        assert update.features is not None

        tokens = torch.cat([update.tokens[:1], update.tokens])
        blank = torch.zeros_like(update.features[:1])
        return replace(update, tokens=tokens, features=torch.cat([blank, update.features]))

    def open_state() -> Any:
        state = open_texts()
        propose = state.propose

        def propose_with_lead(
            updates: Mapping[int, Committed], budgets: Mapping[int, Budget]
        ) -> Any:
            # a sequence's first update begins with its first token
            new = updates.keys() - set(state.rows)
            return propose({**updates, **{row: lead(updates[row]) for row in new}}, budgets)

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
    # of the prompt's tokens, how many the first draft follows
    known = int(rule.from_prompt)
    limit = job.new_tokens + known
    depth = job.budget.depth
    trace = Trace([])
    decoding = Decoding(target, drafter, budget=job.budget)
    decoding.add(
        0,
        prompt[: len(prompt) - known],
        Sampling(),
        limit + depth + 1,
        trace,
        stop=[],
        first=prompt[-1] if known else None,
    )
    while len(trace.tokens) < limit and not set(trace.tokens[known:]) & set(rule.stops):
        decoding.step()
        trace.checked()

    decoding.close()
    ends = accumulate((cycle.committed for cycle in trace.cycles), initial=1)
    last_tokens = []
    counts = []
    for (start, end), cycle in zip(pairwise(ends), trace.cycles, strict=True):
        new = trace.tokens[start:end]
        last_tokens.append(next((token for token in new if token in rule.stops), new[-1]))
        counts.append(rule.count(new, cycle.accepted, depth))

    return {
        "tokens": trace.tokens[known:limit],
        "own": last_tokens,
        "drafts": len(counts),
        "accepted": [sum(count > i for count in counts) for i in range(depth)],
    }


def same_counts(theirs: Row, ours: Row) -> bool:
    """Return whether drafts and acceptances at every place are equal."""
    return (theirs["drafts"], theirs["accepted"]) == (ours["drafts"], ours["accepted"])


def same_text(theirs: Row, ours: Row) -> bool:
    """Return whether the tokens are equal, as far as the engine reports them: all, or the last of every step."""
    return all(theirs[key] == ours[key] for key in ("tokens", "own") if key in theirs)


def sum_rows(rows: list[Row]) -> Row:
    """Return sums over the prompts, and the acceptance length."""
    drafts = sum(row["drafts"] for row in rows)
    accepted = [sum(place) for place in zip(*(row["accepted"] for row in rows), strict=True)]
    return {
        "drafts": drafts,
        "accepted": accepted,
        "tau": 1 + sum(accepted) / drafts,
    }
