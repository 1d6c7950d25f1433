"""The answers of an untouched model: whole sequences through stock transformers, no cache, nothing of this project."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
def own_logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """Return [T, V], the logits after each of T tokens, by transformers' own forward without a cache."""
    ids = torch.tensor([tokens], device=model.device)
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return logits


def own_answer(
    model: PreTrainedModel,
    prompt: Sequence[int],
    count: int,
    warp: Any = None,
    noise: Callable[[int], Tensor] | None = None,
) -> list[int]:
    """Return the model's own answer: a forward over all tokens for each new one, with no cache.

    Args:
        model: An untouched model.
        prompt: Token ids.
        count: The number of tokens of the answer.
        warp: A processor of logits.
        noise: Returns the Gumbel noise [V] to add to the logits for the token at a position, so that the largest sum is
            a sample.
    """
    tokens = list(prompt)
    # T forwards over up to T tokens: slow, and free of whatever a cache may get wrong
    for _ in range(count):
        scores = own_logits(model, tokens)[-1:]
        if warp is not None:
            scores = warp(torch.tensor([tokens], device=scores.device), scores)
        if noise is not None:
            scores = scores + noise(len(tokens))
        tokens.append(int(scores.argmax()))
    return tokens[len(prompt) :]


def warpers(sampling: Sampling) -> LogitsProcessorList:
    """Return transformers' own logits processors for a sampling above temperature 0."""
    processors: list[Any] = [TemperatureLogitsWarper(sampling.temperature)]
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    return LogitsProcessorList(processors)


def reference(target: Target, prompt: Sequence[int], sampling: Sampling, count: int) -> list[int]:
    """Return the untouched model's continuation of `count` tokens, as decoding with drafts must give it.

    At temperature 0 it is greedy. Above, transformers' processors warp the logits, and the noise that this project adds
    for the position, request and seed chooses the token.
    """
    # Gumbel noise: the token with the largest sum of score and noise is a sample, the same in every run
    noise = Choose(sampling).noise
    if noise is None:
        return own_answer(target.model, prompt, count)

    def noise_at(position: int) -> Tensor:
        return noise([position], vocab_size=target.vocab_size, device=target.device)[0]

    return own_answer(target.model, prompt, count, warpers(sampling), noise=noise_at)


def make_model(vocab_size: int = 96, width: int = 128) -> PreTrainedModel:
    """Return a llama of random weights, always the same.

    Its next token depends on all that it has read, and it has no stop token, so that an answer never ends early.
    """
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
            # 1.7 times the usual standard deviation, so that attention and logits are far from flat
            if weight.ndim > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) * width**-0.5 * 1.7)
    return model


def make_letters(device: torch.device | str = "cpu") -> Target:
    """Return a target with a vocabulary of four tokens, whose probabilities are neither flat nor certain."""
    model: Any = make_model(vocab_size=4, width=16)  # transformers leaves `to` without types
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        model.lm_head.weight.copy_(torch.randn(4, 16, generator=generator) * 0.4)
    return Target(model.to(device))


def chi_square_p(observed: Sequence[float], expected: Sequence[float]) -> float:
    """Return the p-value of Pearson's chi-square test: the probability of counts this far from the expected ones."""
    statistic = 0.0
    for count, mean in zip(observed, expected, strict=True):
        statistic += (count - mean) ** 2 / mean
    # Q(degrees of freedom / 2, statistic / 2), the regularised upper incomplete gamma function
    shape = torch.tensor((len(observed) - 1) / 2, dtype=torch.double)
    return float(torch.special.gammaincc(shape, torch.tensor(statistic / 2, dtype=torch.double)))
