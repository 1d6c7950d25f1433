"""How close two tokens are where two answers to a prompt part: what rounding can decide is a near-tie."""

# V vocabulary

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from eagle.core.verify import Choose, Sampling
from eagle.target.talk import with_answer
from eagle.target.target import Target

MAX_TIE = 64.0  # units in the last place: 2% of a logit in bf16, more than rounding through many layers makes


def first_difference(answer: Sequence[int], other: Sequence[int]) -> int:
    """Return the index of the first token at which two answers part."""
    shorter = min(len(answer), len(other))
    return next((i for i in range(shorter) if answer[i] != other[i]), shorter)


@torch.inference_mode()
def measure_tie(
    target: Target,
    prompt: list[int],
    answer: Sequence[int],
    other: Sequence[int],
    sampling: Sampling | None = None,
) -> float | None:
    """Return how far apart the target's scores of two tokens are where two answers part.

    The unit is that of the last place of the larger logit, in the target's dtype. With a temperature a token's score is
    its logit and the noise of its position. None if one answer is the beginning of the other, or if a filter of the
    sampling lets one of the tokens through and not the other.
    """
    at = first_difference(answer, other)
    if at == min(len(answer), len(other)):
        return None
    state = target.open()
    # the answers agree up to there, so one prompt serves both
    state.admit(0, with_answer(prompt, list(answer[:at])))
    logits = state.finish_prompts()[0].output.logits[-1].float()
    scores = add_noise(logits, Choose(sampling or Sampling()), len(prompt) + at)
    return in_last_places(scores, logits, (answer[at], other[at]), target.model.dtype)


def add_noise(logits: Tensor, choose: Choose, position: int) -> Tensor:
    """Return scores [V] of the token at a position, of which the highest is chosen: logits, and noise if sampled."""
    noise = choose.offer(len(logits), logits.device)
    if noise is None:
        return logits
    return logits + noise([position])[0]


def in_last_places(
    scores: Tensor,
    logits: Tensor,
    tokens: tuple[int, int],
    dtype: torch.dtype,
) -> float | None:
    """Return the gap between two tokens' scores in units of the last place of the larger logit; None if unbounded."""
    gap = float((scores[tokens[0]] - scores[tokens[1]]).abs())
    largest = float(logits[list(tokens)].abs().max())
    if not math.isfinite(gap):
        return None
    return gap / last_place(largest, dtype)


def last_place(number: float, dtype: torch.dtype) -> float:
    """Return the unit of a number's last place: the distance to the next number of its dtype."""
    exponent = math.floor(math.log2(max(abs(number), torch.finfo(dtype).tiny)))
    return torch.finfo(dtype).eps * 2.0**exponent
