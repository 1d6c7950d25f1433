"""A model's own answers by naive loops: whole texts without a cache, its own cached steps, and beams of either."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, TemperatureLogitsWarper

from eagle import Sampling
from eagle.core.verify import Choose
from tests.families import VOCAB_SIZE, own_logits

CACHES = ("past_key_values", "cache_params", "state", "cache")

Logits = Callable[[list[int]], Tensor]
"""Returns [V], a model's logits after a text, which only grows from call to call."""


def whole_texts(model: PreTrainedModel) -> Logits:
    """Return logits by a forward over the whole text for each token."""
    return lambda text: own_logits(model, text)[-1]


def cached_steps(model: PreTrainedModel) -> Logits:
    """Return logits by the model's own cache: the prompt in one forward, then one for each token, as in `generate`."""
    read = 0
    options = {}

    @torch.no_grad()
    def logits(text: list[int]) -> Tensor:
        nonlocal read, options
        output = model(
            input_ids=torch.tensor([text[read:]]),
            use_cache=True,
            **options,
        )
        # each family calls its cache otherwise
        name = next(kind for kind in CACHES if getattr(output, kind, None) is not None)
        options = {name: getattr(output, name)}
        read = len(text)
        return output.logits[0, -1]

    return logits


def answer_naively(
    logits: Logits,
    prompt: Sequence[int],
    count: int,
    sampling: Sampling,
) -> list[int]:
    """Return so many tokens after a prompt at T = 0, or sampled with the noise of their positions.

    Args:
        logits: of the text so far.
        prompt: token ids.
        count: the tokens of the answer.
        sampling: temperature, seed and request.
    """
    text = list(prompt)
    warp = LogitsProcessorList()
    if sampling.temperature:
        warp.append(TemperatureLogitsWarper(sampling.temperature))
    noise = Choose(sampling).noise
    for _ in range(count):
        scores = warp(torch.tensor([text]), logits(text)[None])[0]
        if noise is not None:
            # Gumbel noise: the largest sum is a sample
            scores = scores + noise([len(text)], VOCAB_SIZE, torch.device("cpu"))[0]
        text.append(int(scores.argmax()))
    return text[len(prompt) :]


def search_naively(
    make: Callable[[], Logits],
    prompt: Sequence[int],
    beams: int,
    count: int,
) -> tuple[list[list[int]], list[float]]:
    """Return the best continuations of one length and their mean log-probs; each step reads all of a beam again.

    Args:
        make: returns the logits of a new text.
        prompt: token ids.
        beams: how many are kept.
        count: the tokens of each continuation.
    """

    def read(answer: list[int]) -> Tensor:
        logits = make()
        for end in range(len(answer) + 1):
            last = logits([*prompt, *answer[:end]])
        return last.log_softmax(-1)

    # every token after every beam, so that nothing is left out of the ranking
    running: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(count):
        grown = []
        for score, answer in running:
            for token, log_prob in enumerate(read(answer).tolist()):
                grown.append((score + log_prob, [*answer, token]))
        running = sorted(grown, key=lambda pair: -pair[0])[:beams]
    return [answer for _, answer in running], [score / count for score, _ in running]
