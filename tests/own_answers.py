"""A model's own answers by naive loops: whole texts without a cache, or its own cached steps, and beams of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, TemperatureLogitsWarper

from eagle import Sampling
from eagle.core.verify import Choose
from tests.families import VOCAB_SIZE, own_logits

CACHES = ("past_key_values", "cache_params", "state", "cache")

Logits = Callable[[list[int]], Tensor]
"""[V], a model's logits after a text, which only grows from call to call."""


def whole_texts(model: PreTrainedModel) -> Logits:
    """A forward over the whole text for each token."""
    return lambda text: own_logits(model, text)[-1]


def cached_steps(model: PreTrainedModel) -> Logits:
    """The prompt in one forward, then a forward for each token behind the model's own cache, as in `generate`."""
    read, name, cache = 0, "", None

    @torch.no_grad()
    def logits(text: list[int]) -> Tensor:
        nonlocal read, name, cache
        given = {name: cache} if read else {}
        output = model(input_ids=torch.tensor([text[read:]]), use_cache=True, **given)
        name = next(kind for kind in CACHES if getattr(output, kind, None) is not None)
        cache, read = getattr(output, name), len(text)
        return output.logits[0, -1]

    return logits


def answer_naively(
    logits: Logits, prompt: Sequence[int], count: int, sampling: Sampling
) -> list[int]:
    """So many tokens after a prompt at T = 0, or sampled with the noise of their positions."""
    warp, noise, text = LogitsProcessorList(), Choose(sampling).noise, list(prompt)
    if sampling.temperature:
        warp.append(TemperatureLogitsWarper(sampling.temperature))
    place = noise and partial(noise, vocab_size=VOCAB_SIZE, device=torch.device("cpu"))
    for _ in range(count):
        scores = warp(torch.tensor([text]), logits(text)[None])[0]
        text.append(int((scores if place is None else scores + place([len(text)])[0]).argmax()))
    return text[len(prompt) :]


def search_naively(
    make: Callable[[], Logits], prompt: Sequence[int], beams: int, count: int
) -> tuple[list[list[int]], list[float]]:
    """The best continuations of one length with their log-probs over it, each read from its prompt on in every step."""

    def after(answer: list[int]) -> Tensor:
        logits = make()
        for end in range(len(answer) + 1):
            last = logits([*prompt, *answer[:end]])
        return last.log_softmax(-1)

    running: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(count):
        grown = [
            (score + float(log_prob), [*answer, token])
            for score, answer in running
            for token, log_prob in enumerate(after(answer))
        ]
        running = sorted(grown, key=lambda pair: -pair[0])[:beams]
    return [answer for _, answer in running], [score / count for score, _ in running]
