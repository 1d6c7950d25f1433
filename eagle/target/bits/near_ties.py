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

# units of the last place; a gap up to it is a near-tie: 2% of a logit in bf16, more than rounding through many layers
# makes
MAX_TIE = 64.0


def first_difference(answer: Sequence[int], other: Sequence[int]) -> int:
    """Return the index of the first token at which two answers differ; the shorter's length if it begins the other."""
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
    """Return how far apart the target's scores of two tokens are at which two answers to a prompt first differ.

    A small gap shows that rounding may have decided between them, and not a fault. With a temperature, a token's score
    is its logit plus the noise of its position.

    Args:
        target: the target.
        prompt: its token ids.
        answer: the token ids of an answer.
        other: those of another one.
        sampling: by which both were chosen; None: greedily.

    Returns:
        The gap in units of the last place of the larger logit, in the target's dtype. None if one answer is the
        beginning of the other, or if the sampling's filters let only one of the tokens through.
    """
    at = first_difference(answer, other)
    # one answer begins the other, and so has no token to compare
    if at == min(len(answer), len(other)):
        return None
    state = target.open()
    # the prompt and the answers' common beginning, after which both tokens are scored
    state.admit(0, with_answer(prompt, list(answer[:at])))
    logits = state.finish_prompts()[0].output.logits[-1].float()  # [V], after the last token
    scores = add_noise(logits, Choose(sampling or Sampling()), position=len(prompt) + at)
    return in_last_places(scores, logits, (answer[at], other[at]), target.model.dtype)


def add_noise(logits: Tensor, choose: Choose, position: int) -> Tensor:
    """Return the scores [V] by which the token at a position is chosen: logits, plus noise if it is sampled.

    The token with the highest score is chosen: with Gumbel noise that is a sample. The noise is fixed by seed and
    position, so that an answer does not depend on the draft.

    Args:
        logits: [V], over the vocabulary.
        choose: the rule, which gives the noise.
        position: of the token in its sequence.
    """
    # None: the rule is greedy
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
    """Return the gap between two tokens' scores in units of the last place of the larger logit; None if infinite.

    Args:
        scores: [V], by which tokens are chosen; -inf where a filter of the sampling hides one.
        logits: [V], which decide the unit.
        tokens: the ids of the two tokens.
        dtype: of the logits that the target computes.
    """
    gap = float((scores[tokens[0]] - scores[tokens[1]]).abs())
    largest = float(logits[list(tokens)].abs().max())
    if not math.isfinite(gap):
        return None
    return gap / last_place(largest, dtype)


def last_place(number: float, dtype: torch.dtype) -> float:
    """Return the unit in the last place of a number: its distance to the next larger number of the dtype.

    Rounding may change a number by half of it.
    """
    # not below the smallest normal number, as log2 of 0 is not finite
    exponent = math.floor(math.log2(max(abs(number), torch.finfo(dtype).tiny)))
    return torch.finfo(dtype).eps * 2.0**exponent
