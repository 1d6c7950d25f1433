"""Heads for a tiny target, trained for a few steps, and figures of heads for the doctor's verdict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from eagle import Target
from eagle.core.examples import Batch
from eagle.doctor.agreement import Agreement
from eagle.doctor.target_answers import answer_prompts
from eagle.drafters import DRAFTERS, settings_of
from tests.families import random_tokens
from tests.trained import fixture_seed


def make_head(
    section: dict[str, Any],
    target: Target,
    texts: Batch | None = None,
) -> Any:
    """Return a new head; a draft vocabulary holds the most frequent tokens of the texts."""
    torch.manual_seed(fixture_seed())
    settings = settings_of(section, "test")
    # only some kinds of heads take texts
    supervised = [] if texts is None else [[texts.tokens]]
    return DRAFTERS[settings.kind].for_target(
        settings,
        target.config,
        target.head,
        *supervised,
    )


def answer_random(
    count: int,
    target: Target,
    max_new_tokens: int,
    temperatures: tuple[float, ...],
) -> Batch:
    """Return a target's answers to so many random prompts of six tokens."""
    prompts = [random_tokens(6, seed) for seed in range(count)]
    return answer_prompts(target, prompts, max_new_tokens, temperatures)


def fit(
    head: Any,
    compute_loss: Callable[[], Tensor],
    steps: int,
    lr: float,
) -> Any:
    """Train a head by a loss of its own."""
    head.train()
    # a frozen LM head is no part of it
    weights = [weight for weight in head.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        compute_loss().backward()
        optimizer.step()
    return head.eval()


def train_head(
    section: dict[str, Any],
    target: Target,
    texts: Batch,
    steps: int,
    lr: float = 3e-3,
) -> Any:
    """Return a head after so many steps on these texts."""
    head = make_head(section, target, texts)
    return fit(
        head,
        lambda: head(texts, target.head)["total"],
        steps,
        lr,
    )


def make_agreement(first_rate: float, second_rate: float, overlap: float = 0.4) -> Agreement:
    """Return figures of two levels that are right so often, in 20 sequences; their hits are paired."""
    chance = torch.rand(
        2,
        600,
        generator=torch.Generator().manual_seed(1),
    )
    hits = chance < torch.tensor([[first_rate], [second_rate]])
    noise = torch.rand(
        2,
        600,
        generator=torch.Generator().manual_seed(0),
        dtype=torch.double,
    )
    inside = torch.ones_like(hits)
    # without any noise the standard error would be zero
    probs = overlap + 0.01 * noise
    return Agreement(
        overlap=probs,
        hits=hits,
        in_seq=inside,
        is_greedy=inside[0],
        seq_ids=torch.arange(600) // 30,
        sampled_accepted=probs,
    )
