"""Record how every method learns: twenty steps on a tiny target in fp64, and what validation tells afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.golden import access
from tests.golden.digests import digest

STEPS = 20
LEARNING_RATE = 1e-3
# of what validation tells, which is computed in fp32
DIGITS = 6


def training_items(folder: Path) -> dict[str, Any]:
    """Return for each method its first weights, its losses by step, its last terms, and its validation."""
    target = access.make_target()
    items: dict[str, Any] = {}
    for name in access.HEADS:
        items |= training_of(name, target)
    return items


def training_of(name: str, target: Any) -> dict[str, Any]:
    """Return the items of one method; it learns from weights that are the same on every machine."""
    first = describe_weights(access.new_head(name, target))
    learned = learn(name, access.exact_head(name, target), target)
    return {
        f"{name}, first weights": first,
        **{f"{name}, {part}": value for part, value in learned.items()},
    }


def describe_weights(head: Any) -> str:
    """Return a hash of each weight's shape and mean size, rounded so that no machine's last bit counts."""
    described = {}
    for name, weight in head.state_dict().items():
        size = float(weight.double().abs().mean())
        described[name] = f"{tuple(weight.shape)} {size:.4g}"
    return digest(described)


def learn(name: str, head: Any, target: Any) -> dict[str, Any]:
    """Take some steps in fp64, the batches in turn; returns what is recorded of them."""
    batches = access.make_batches(name, target)
    # in fp64, so that processors that sum in another order agree in eleven digits
    head = head.double().train()
    weights = [weight for weight in head.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(
        weights,
        lr=LEARNING_RATE,
        betas=(0.9, 0.95),
        eps=1e-6,
    )
    losses = []
    for step in range(STEPS):
        # as the training loop does: what no text's seed decides is the same in every run
        torch.manual_seed(step)
        terms = access.loss_terms(
            head,
            batches[step % len(batches)],
            target,
            step / STEPS,
        )
        optimizer.zero_grad()
        terms["total"].backward()
        optimizer.step()
        losses.append(terms["total"].item())
    figures = access.validation_figures(head, batches[0], target)
    return {
        "losses": losses,
        "last terms": {term: value.item() for term, value in terms.items()},
        "validation": {figure: float(f"{value:.{DIGITS}g}") for figure, value in figures.items()},
    }
