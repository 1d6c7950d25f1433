"""What this decoder drafts and accepts when it counts as a serving engine counts."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eagle.core.drafter import Budget, Committed, Drafter
from eagle.core.verify import Choose, Sampling, verify
from eagle.formats.checkpoint import load_drafter
from eagle.target.target import Target

Row = dict[str, Any]  # of one answer: tokens, drafts, and how many had their first, second, ... token accepted


@dataclass(frozen=True, slots=True)
class Job:
    """What both sides are asked: so many new tokens after each prompt, by drafts of one shape."""

    target: Path
    prompts: list[list[int]]
    budget: Budget
    new_tokens: int = 16
    dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class Rule:
    """When an engine drafts. All of them count a whole draft, also what a limit or a stop then cuts off."""

    from_prompt: bool = False  # the first draft follows the prompt's last token, not the answer's first
    stops: Collection[int] = ()  # tokens behind which it says no more


def here(job: Job, head: Path | str, target: Target, rule: Rule) -> list[Row]:
    """A row for every prompt."""
    drafter = load_drafter(head, target)
    if job.budget.top_k > 1:
        job = replace(job, budget=replace(job.budget, sharpness=1.0))  # engines grow trees by EAGLE-2's rule
    return [_answer(job, prompt, target, drafter, rule) for prompt in job.prompts]


def _answer(job: Job, prompt: list[int], target: Target, drafter: Drafter, rule: Rule) -> Row:
    choose, budget = Choose(Sampling()), job.budget
    drafter.begin(choose.offer(target.vocab_size, target.device))
    known = prompt[:-1] if rule.from_prompt else prompt
    news = target.begin(known, choose, drafter.taps, room=job.new_tokens + budget.depth + budget.nodes + 2)
    if rule.from_prompt:
        news = replace(news, root=prompt[-1])
    said: list[int] = [] if rule.from_prompt else [news.root]
    accepted, own = [], []
    while len(said) < job.new_tokens and not set(said) & set(rule.stops):
        tree = drafter.propose(news, budget)
        reading = target.read(tree)
        path, root = verify(reading, choose)
        target.keep(tree, path)
        news = Committed(tree.tokens[path], reading.features_at(path), root)
        new = [*news.tokens.tolist()[1:], root]
        said += new
        accepted.append(len(path) - 1)
        own.append(next((token for token in new if token in rule.stops), root))
    places = [sum(count > place for count in accepted) for place in range(budget.depth)]
    return {"tokens": said[: job.new_tokens], "own": own, "drafts": len(accepted), "accepted": places}


def same_counts(theirs: Row, ours: Row) -> bool:
    """Whether drafts and acceptances at every place are equal."""
    return (theirs["drafts"], theirs["accepted"]) == (ours["drafts"], ours["accepted"])


def same_text(theirs: Row, ours: Row) -> bool:
    """Whether an engine said what this decoder said, as far as it tells: its tokens, or the last of every step."""
    return all(theirs[key] == ours[key] for key in ("tokens", "own") if key in theirs)


def pooled(rows: list[Row]) -> Row:
    """Sums over the prompts, and the acceptance length."""
    drafts = sum(row["drafts"] for row in rows)
    accepted = [sum(place) for place in zip(*(row["accepted"] for row in rows), strict=True)]
    return {"drafts": drafts, "accepted": accepted, "tau": 1 + sum(accepted) / drafts}
