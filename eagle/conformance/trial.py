"""A drafter to try: made anew, told what a target has read; and the error that names its fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from eagle.core.budget import Budget
from eagle.core.trace import Trace
from eagle.core.verify import Choose, Sampling
from eagle.drafters import DRAFTERS, settings_of
from eagle.target.target import Target

Make = Callable[[], Any]
"""Makes a drafter that is ready to draft, the same each time."""


class Fault(AssertionError):
    """What a method does and must not: what was found, what is expected, what to do."""


TIE_BREAKING = 1e-3  # of a matrix's spread: enough to order equal parts, too little to change what they draft


def make_head(name: str, target: Target, seed: int = 0, **settings_given: Any) -> Any:
    """An untrained head of a method with these settings, the same every time."""
    torch.manual_seed(seed)
    settings = settings_of({"kind": name, **settings_given}, name)
    method = DRAFTERS[settings.kind]
    weights = {"weights": target.tensor} if method.reads.weights else {}
    head = method.for_target(settings, target.config, target.head, **weights)
    # levels that start as equal copies of the LM head draft equal probabilities, whose order is rounding's
    earlier: list[torch.Tensor] = []
    for parameter in head.parameters():
        if parameter.requires_grad and parameter.dim() > 1:
            if any(torch.equal(parameter, other) for other in earlier):
                parameter.data.add_(TIE_BREAKING * parameter.std() * torch.randn_like(parameter))
            earlier.append(parameter)
    return head.to(target.device)


def begin_text(drafter: Any, target: Target, prompt: list[int], choose: Choose, noise: Any = None) -> Any:
    """A text of the drafter's, and what the target has read of it."""
    if drafter.reads.view:
        drafter.bind_target(target.view())
    state = target.open(drafter.taps)
    update = state.begin(prompt, choose)
    if not drafter.reads.texts:
        return drafter.begin(noise), update
    drafts = drafter.open_with(state.lend())
    drafts.admit(0, noise)
    return SimpleNamespace(
        propose=lambda update, budget: drafts.propose({0: update}, {0: budget})[0],
        read=lambda new: state.extend({0: new}),
    ), update


def trees_of(trace: Trace) -> list[tuple[list[int], list[int]]]:
    """Tokens and parents of what was drafted in each cycle, kept or not."""
    return [(cycle.tree.tokens.tolist(), cycle.tree.parents.tolist()) for cycle in trace.cycles]


def describe_sampling(sampling: Sampling) -> str:
    """The rule by which the target chooses, in words."""
    if not sampling.temperature:
        return "greedily"
    cut = f", top_p {sampling.top_p:g}" * (sampling.top_p < 1) + f", top_k {sampling.top_k}" * bool(sampling.top_k)
    return f"at temperature {sampling.temperature:g}{cut}"


def describe_budget(budget: Budget) -> str:
    """What may be drafted, in words."""
    how = {"noise": "", "likeliest": ", likeliest children", "sampled": ", drawn children"}[budget.draw]
    fixed = "a fixed tree of " * (budget.paths is not None)
    return f"{fixed}{budget.nodes} nodes, {budget.depth} levels, top {budget.top_k}{how}"


def first_difference(got: Sequence[Any], expected: Sequence[Any]) -> str:
    """The place where two sequences part, and what each has there."""
    for place, (one, other) in enumerate(zip(got, expected, strict=False)):
        if one != other:
            return f"at {place} got {one}, expected {other}"
    return f"got {len(got)} of them, expected {len(expected)}"
