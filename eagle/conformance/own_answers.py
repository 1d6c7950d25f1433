"""What an untouched model says by itself: whole texts through stock transformers, no cache, nothing of this project."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import erfc, exp, gamma, sqrt
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from eagle.core.verify import Choose, Sampling
from eagle.target.target import Target


@torch.no_grad()
def own_logits(model: PreTrainedModel, text: list[int]) -> Tensor:
    """[T, V], what the model says by itself after each token of the text."""
    ids = torch.tensor([text], device=model.device)
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return logits


def own_answer(
    model: PreTrainedModel,
    prompt: Sequence[int],
    count: int,
    warp: Any = None,
    noise: Callable[[int], Tensor] | None = None,
) -> list[int]:
    """The model's own answer: a forward over the whole text for each token, with nothing of ours and no cache."""
    warp, text = warp or LogitsProcessorList(), list(prompt)
    for _ in range(count):
        logits = own_logits(model, text)[-1:]
        scores = warp(torch.tensor([text], device=logits.device), logits)[0]
        text.append(int((scores if noise is None else scores + noise(len(text))).argmax()))
    return text[len(prompt) :]


def warpers(sampling: Sampling) -> LogitsProcessorList:
    """Transformers' own processors of a sampling above temperature 0."""
    listed: list[Any] = [TemperatureLogitsWarper(sampling.temperature)]
    listed += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    listed += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    return LogitsProcessorList(listed)


def reference(target: Target, prompt: Sequence[int], sampling: Sampling, count: int) -> list[int]:
    """The untouched model's own uncached continuation, warped by transformers, with the noise of the place at T > 0."""
    noise = Choose(sampling).noise
    if noise is None:
        return own_answer(target.model, prompt, count)
    place = partial(noise, vocab_size=target.vocab_size, device=target.device)
    return own_answer(target.model, prompt, count, warpers(sampling), lambda position: place([position])[0])


def make_model(vocab_size: int = 96, width: int = 128) -> PreTrainedModel:
    """A llama of random weights, the same each time, whose tokens depend on all that it has read; it never ends."""
    generator = torch.Generator().manual_seed(0)
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],  # as a saved model's config has
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) * width**-0.5 * 1.7)
    return model


def make_letters(device: torch.device | str = "cpu") -> Target:
    """Return a target of four tokens, whose laws are neither flat nor certain."""
    model: Any = make_model(vocab_size=4, width=16)  # transformers leaves `to` without types
    with torch.no_grad():
        model.lm_head.weight.copy_(torch.randn(4, 16, generator=torch.Generator().manual_seed(1)) * 0.4)
    return Target(model.to(device))


def chi_square_p(seen: Sequence[float], due: Sequence[float]) -> float:
    """The probability of counts as far from those that are due, or farther: the chi-square law's tail, summed."""
    half = sum((one - other) ** 2 / other for one, other in zip(seen, due, strict=True)) / 2
    freedom = len(seen) - 1
    odd = freedom % 2
    terms = (half**power / gamma(power + 1) for power in (step + odd / 2 for step in range((freedom - odd) // 2)))
    return exp(-half) * sum(terms) + (erfc(sqrt(half)) if odd else 0.0)
