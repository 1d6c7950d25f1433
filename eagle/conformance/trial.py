"""A drafter to try: made, begun on what a target has read; and the error that names its fault."""

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


# noise, as a share of a matrix's standard deviation: enough to order equal modules, too little to change their drafts
TIE_BREAKING = 1e-3


def make_head(name: str, target: Target, seed: int = 0, **changed_settings: Any) -> Any:
    """Return an untrained head of a method for a target, with these settings changed; a seed gives the same head."""
    torch.manual_seed(seed)
    settings = settings_of({"kind": name, **changed_settings}, name)
    method = DRAFTERS[settings.kind]
    # only methods that read the target's weights take this argument
    weights = {"weights": target.tensor} if method.reads.weights else {}
    head = method.for_target(settings, target.config, target.head, **weights)
    # levels that start as equal copies of the LM head give equal probabilities, and rounding would order their drafts
    matrices = [
        parameter
        for parameter in head.parameters()
        if parameter.requires_grad and parameter.dim() > 1
    ]
    for index, matrix in enumerate(matrices):
        if any(torch.equal(matrix, earlier) for earlier in matrices[:index]):
            matrix.data.add_(TIE_BREAKING * matrix.std() * torch.randn_like(matrix))
    return head.to(target.device)


def begin_sequence(
    drafter: Any, target: Target, prompt: list[int], choose: Choose, noise: Any = None
) -> Any:
    """Let the target read a prompt, and return the drafter's state of that sequence, and the update to draft from.

    Args:
        drafter: A drafter that is ready to draft.
        target: The model that it drafts for.
        prompt: Token ids.
        choose: How the target chooses the token after the prompt.
        noise: What the drafter gets of the target's sampling noise; None drafts greedily.

    Returns:
        An object with `propose(update, budget)`, and the update of the prompt. Of drafters on the target's own KV cache
        the object has also `read(tokens)`, by which the target reads on.
    """
    if drafter.reads.view:
        drafter.bind_target(target.view())
    state = target.open(drafter.taps)
    update = state.begin(prompt, choose)
    if not drafter.reads.kv_cache:
        return drafter.begin(noise), update
    # a drafter on the target's own KV cache drafts for a batch, here of one row
    drafts = drafter.open_with(state.lend())
    drafts.admit(0, noise)
    return SimpleNamespace(
        propose=lambda update, budget: drafts.propose({0: update}, {0: budget})[0],
        read=lambda new: state.extend({0: new}),
    ), update


def trees_of(trace: Trace) -> list[tuple[list[int], list[int]]]:
    """Return for each cycle the tokens of its draft tree and the parent of each node, whether accepted or not."""
    return [(cycle.tree.tokens.tolist(), cycle.tree.parents.tolist()) for cycle in trace.cycles]


def describe_sampling(sampling: Sampling) -> str:
    """Return in words how the target chooses tokens, for the line of a check."""
    if not sampling.temperature:
        return "greedily"
    words = f"at temperature {sampling.temperature:g}"
    if sampling.top_p < 1:
        words += f", top_p {sampling.top_p:g}"
    if sampling.top_k:
        words += f", top_k {sampling.top_k}"
    return words


def describe_budget(budget: Budget) -> str:
    """Return in words what may be drafted, for the line of a check."""
    how = {"noise": "", "likeliest": ", likeliest children", "sampled": ", drawn children"}[
        budget.draw
    ]
    fixed = "" if budget.paths is None else "a fixed tree of "
    return f"{fixed}{budget.nodes} nodes, {budget.depth} levels, top {budget.top_k}{how}"


def first_difference(got: Sequence[Any], expected: Sequence[Any]) -> str:
    """Return the index at which two sequences differ, and what each has there."""
    for index, (item, expected_item) in enumerate(zip(got, expected, strict=False)):
        if item != expected_item:
            return f"at {index} got {item}, expected {expected_item}"
    return f"got {len(got)} of them, expected {len(expected)}"
