"""Replay drafters along recorded answers: the cycles of decoding, without the target's forwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle.core.arguments import media_of
from eagle.core.budget import Budget, Policy
from eagle.core.drafter import Committed, Drafter
from eagle.core.trace import Cycle
from eagle.core.tree import DraftTree
from eagle.core.verify import Choose, Sampling, walk
from eagle.decoding.cycle_times import clock_of
from eagle.decoding.decode import generate
from eagle.drafters.none import NoDrafter
from eagle.target.talk import first_tokens, with_answer
from eagle.target.target import Target

# the token after the last: no draft equals it
NOWHERE = -1


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt and the target's own answer to it, with the features that a drafter reads of both."""

    task: str
    tokens: list[int]  # which hold the images of the prompt
    prompt: int  # tokens that are not the answer
    features: Tensor | None  # [T, L, D]
    sampling: Sampling
    limit: int  # tokens that the answer might have had

    @property
    def length(self) -> int:
        """Return the number of tokens of the answer."""
        return len(self.tokens) - self.prompt

    @property
    def asked(self) -> list[int]:
        """Return the prompt, with its images."""
        return first_tokens(self.tokens, self.prompt)


def answer(
    target: Target,
    taps: tuple[int, ...],
    prompt: list[int],
    *,
    limit: int,
    sampling: Sampling,
    task: str = "",
) -> Answer:
    """Return the target's own answer to a prompt."""
    written = generate(target, NoDrafter(), prompt, sampling=sampling, max_new_tokens=limit).tokens
    tokens = with_answer(prompt, written)
    return Answer(
        task=task,
        tokens=tokens,
        prompt=len(prompt),
        features=features_of(target, tokens, taps),
        sampling=sampling,
        limit=limit,
    )


def features_of(target: Target, tokens: list[int], taps: tuple[int, ...]) -> Tensor | None:
    """Return the target's hidden states [T, L, D] at the tokens of a sequence, or None without taps."""
    if not taps:
        return None
    return target.features(torch.tensor([tokens]), taps, media=media_of(tokens) or None)[0]


def replay(
    target: Target,
    drafter: Drafter,
    target_answer: Answer,
    budget: Budget | Policy,
    seconds: list[float] | None = None,
) -> list[tuple[DraftTree, list[int]]]:
    """Return the trees that decoding this answer would verify, each with the path that would be accepted.

    A draft depends on the committed tokens alone, so these are the cycles of decoding.

    Args:
        target: The model that has answered.
        drafter: Any drafter.
        target_answer: The answer, with the features that the drafter reads.
        budget: What may be drafted, or a policy that decides; a drafter is not asked where nothing may be.
        seconds: The seconds of each draft are appended to it.

    Raises:
        ValueError: Drafts are sampled above temperature 0: the target's random numbers decide how much is kept.
    """
    if drafter.reads.trees or drafter.reads.kv_cache:
        # known from forwards of the target alone
        return _decode(target, drafter, target_answer, budget, seconds=seconds)
    if getattr(budget, "draw", None) == "sampled" and target_answer.sampling.temperature > 0:
        raise ValueError(
            f"draw is 'sampled': only decoding shows how much of such drafts is kept; got {budget}"
        )

    learn = getattr(budget, "learn", None)
    if drafter.reads.view:
        drafter.bind_target(target.view())
    # drafts may be ranked by the target's own noise, which the drafter is offered as in decoding
    state = drafter.begin(Choose(target_answer.sampling).offer(target.vocab_size, target.device))
    now = clock_of(target.device)

    tokens = target_answer.tokens
    read = 0  # tokens that the drafter has read
    root = target_answer.prompt
    cycles = []
    while root + 1 < len(tokens):
        step_budget = budget.within(target_answer.limit - (root - target_answer.prompt) - 2)
        tree = DraftTree.chain([tokens[root]])
        start = now()
        if not step_budget.is_empty:
            features = None if target_answer.features is None else target_answer.features[read:root]
            tree = state.propose(
                Committed(torch.tensor(tokens[read:root]), features, tokens[root]), step_budget
            )
            read = root
        if seconds is not None:
            seconds.append(now() - start)

        path = walk(tree, _choices(tree, tokens, root))
        cycles.append((tree, path))
        if learn is not None:
            committed = min(len(path), len(tokens) - root - 1)
            learn(Cycle(tree, tuple(path[1:]), committed, root))
        root += len(path)
    return cycles


def _choices(tree: DraftTree, tokens: list[int], root: int) -> list[int]:
    """Return the target's choice after each node: the answer's token there, whatever the node is."""
    choices = []
    for depth in tree.depths():
        position = root + 1 + depth
        choices.append(tokens[position] if position < len(tokens) else NOWHERE)
    return choices


def _decode(
    target: Target,
    drafter: Drafter,
    target_answer: Answer,
    budget: Budget | Policy,
    *,
    seconds: list[float] | None,
) -> list[tuple[DraftTree, list[int]]]:
    """Return the cycles of `replay` by decoding the answer, the target's forwards included."""
    cycles = generate(
        target,
        drafter,
        target_answer.asked,
        timing=True,
        sampling=target_answer.sampling,
        max_new_tokens=target_answer.limit,
        budget=budget,
    ).cycles
    if seconds is not None:
        seconds += [(cycle.seconds or {})["draft"] for cycle in cycles]
    return [(cycle.tree, [0, *cycle.kept]) for cycle in cycles]


def record_cycles(
    target_answer: Answer,
    cycles: Sequence[tuple[DraftTree, list[int]]],
    seconds: Sequence[float] = (),
) -> list[dict[str, Any]]:
    """Return the replayed cycles as `eval.measure` writes them, with the seconds of their drafts if they are known."""
    rows = []
    context = target_answer.prompt
    for i, (tree, path) in enumerate(cycles):
        row: dict[str, Any] = {
            "nodes": len(tree) - 1,
            "depth": max(tree.depths()),
            "accepted": len(path) - 1,
            # the answer's end cuts the last path off
            "committed": min(len(path), len(target_answer.tokens) - context - 1),
            "context": context,
        }
        if seconds:
            row["seconds"] = {"draft": seconds[i]}
        rows.append(row)
        context += len(path)
    return rows


def plain(target_answer: Answer) -> list[dict[str, Any]]:
    """Return the cycles of decoding without a draft."""
    return [
        {"nodes": 0, "depth": 0, "accepted": 0, "committed": 1, "context": context}
        for context in range(target_answer.prompt, len(target_answer.tokens) - 1)
    ]


def rates_by_rank(cycles: Iterable[tuple[DraftTree, list[int]]]) -> list[list[float]]:
    """Return how often, after an accepted node of each depth, the target chooses the child of each rank.

    Args:
        cycles: As `replay` returns them.

    Returns:
        For each depth a rate for each rank.
    """
    drafted: list[Counter[int]] = []
    accepted: list[Counter[int]] = []
    for tree, path in cycles:
        children = tree.children()
        for depth, node in enumerate(path):
            ranks = children[node]
            if not ranks:
                break
            if depth == len(drafted):
                drafted.append(Counter())
                accepted.append(Counter())
            drafted[depth].update(range(len(ranks)))
            # after the last node the target chose none of the children
            if depth + 1 < len(path):
                accepted[depth][ranks.index(path[depth + 1])] += 1
    rates = []
    for tried, chosen in zip(drafted, accepted, strict=True):
        rates.append([chosen[rank] / tried[rank] for rank in sorted(tried)])
    return rates
