"""Drafts and acceptances of this decoder, counted as a serving engine counts them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eagle.core.budget import Budget
from eagle.core.drafter import Committed, Drafter
from eagle.core.verify import Choose, Sampling, verify
from eagle.formats.checkpoint import load_drafter
from eagle.target.target import Target

Row = dict[str, Any]  # of one answer: tokens, drafts, and how many had their first, second, ... token accepted


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
    """When an engine drafts. All of them count a whole draft, also what a limit or a stop then cuts off."""

    from_prompt: bool = False  # the first draft follows the prompt's last token, not the answer's first
    stops: Collection[int] = ()  # tokens that end an answer


def decode_as_engine(job: Job, head: Path | str, target: Target, rule: Rule) -> list[Row]:
    """Decode every prompt with this decoder, and count as the engine does."""
    drafter = load_drafter(head, target)
    if job.budget.top_k > 1:
        job = replace(job, budget=replace(job.budget, sharpness=1.0))  # engines grow trees by EAGLE-2's rule
    return [_decode(job, prompt, target, drafter, rule) for prompt in job.prompts]


def _decode(job: Job, prompt: list[int], target: Target, drafter: Drafter, rule: Rule) -> Row:
    choose, budget = Choose(Sampling()), job.budget
    text, state = drafter.begin(choose.offer(target.vocab_size, target.device)), target.open(drafter.taps)
    prefix = prompt[:-1] if rule.from_prompt else prompt
    update = state.begin(prefix, choose, room=job.new_tokens + budget.depth + budget.nodes + 2)
    if rule.from_prompt:
        update = replace(update, root=prompt[-1])
    tokens: list[int] = [] if rule.from_prompt else [update.root]
    accepted, last_tokens = [], []
    while len(tokens) < job.new_tokens and not set(tokens) & set(rule.stops):
        tree = text.propose(update, budget)
        output = state.read({0: tree})[0]
        path, root = verify(output, choose)
        state.keep({0: path})
        update = Committed(tree.tokens[path], output.features_at(path), root)
        new = [*update.tokens.tolist()[1:], root]
        tokens += new
        accepted.append(len(path) - 1)
        last_tokens.append(next((token for token in new if token in rule.stops), root))
    return {
        "tokens": tokens[: job.new_tokens],
        "own": last_tokens,
        "drafts": len(accepted),
        "accepted": [sum(count > place for count in accepted) for place in range(budget.depth)],
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
