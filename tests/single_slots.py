"""Heads of several levels position by position: their loss."""

# H hidden, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from eagle.core.drafter import TargetHead
from eagle.core.examples import Example, collate
from eagle.drafters import DRAFTERS, settings_of
from eagle.drafters.levels.medusa import FALLING
from tests.naive_divisors import Term, divide_terms
from tests.unrolled_heads import (
    SHAPE,
    SPANS,
    TAPS,
    Weights,
    apart,
    computed,
    frozen_head,
    gradients_of,
    moved,
    texts_of,
)

LEVELS = 3
FP64 = torch.float64
Levels = Callable[[Weights, Any, Tensor, Sequence[int]], Iterator[Tensor]]
"""Weights by name, settings, a state [H] and the tokens after it -> logits [V] of one level after the other."""


def new_head(
    shape: LlamaConfig = SHAPE,
    target_head: TargetHead | None = None,
    **settings: Any,
) -> Any:
    """Return a head in fp64 with all its weights away from where they start."""
    torch.manual_seed(2)
    # checked as a recipe's settings are
    checked = settings_of({"levels": LEVELS, **settings}, "test")
    target_head = target_head or frozen_head(torch.float32)
    head = DRAFTERS[checked.kind].for_target(checked, shape, target_head)
    return moved(head).double().train()


def loop_over_slots(
    levels: Levels,
    weights: Weights,
    settings: Any,
    texts: list[Example],
    target_head: TargetHead,
) -> Tensor:
    """Return the loss by definition: of each position, all levels up to the first gap in what is supervised.

    Args:
        levels: the method's levels, one logits after the other.
        weights: the head's weights by name.
        settings: the head's.
        texts: the batch.
        target_head: the target's embedding and LM head.
    """
    terms: list[Term] = []
    for index, text in enumerate(texts):
        assert text.features is not None
        states = text.features[:, TAPS.index(-1)]
        tokens = text.tokens.tolist()
        for first in range(2, len(tokens)):
            # a head knows the state before the root and all tokens up to the one that a level guesses
            logits = levels(
                weights,
                settings,
                states[first - 2],
                tokens[first - 1 :],
            )
            last = min(first + settings.levels, len(tokens))
            for level, position in enumerate(range(first, last)):
                if not text.loss_mask[position]:
                    break
                log_probs = next(logits).log_softmax(-1)
                if settings.loss == "tokens":
                    loss = -log_probs[tokens[position]]
                else:
                    probs = target_head.logits(states[position - 1]).softmax(-1)
                    loss = -(probs * log_probs).sum()
                # Medusa alone weighs its levels
                is_falling = getattr(settings, "weights", None) == "falling"
                weight = FALLING ** (level + 1) if is_falling else 1
                terms.append((index, level, weight, loss))
    supervised = [int(text.loss_mask[2:].sum()) for text in texts]
    return divide_terms(settings.divisor, terms, supervised)


def distance_from_loop(levels: Levels, head: Any) -> float:
    """Return how far loss and gradients of training are from the loop's, in fp64."""
    texts = texts_of(SPANS, FP64)
    target_head = frozen_head(FP64)

    def loop(weights: Weights) -> Tensor:
        every = {**weights, "frozen": target_head.weight}
        return loop_over_slots(
            levels,
            every,
            head.settings,
            texts,
            target_head=target_head,
        )

    return apart(head, computed(head, collate(texts, TAPS), target_head), gradients_of(head, loop))
