"""The stock `model.generate` and the one with a drafter, on tiny random models, with the same noise."""

# B rows, T tokens, V vocabulary

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

import eagle.transformers
from eagle.core.drafter import Committed, Drafter
from eagle.core.noise import Noise
from eagle.core.tree import DraftTree
from tests.families import build, plant_branches, random_tokens
from tests.vision_families import ask
from tests.vision_families import build as build_seeing

PAD = 0
SEED = 11
FAMILIES = ("llama", "qwen3", "gemma3", "gpt2", "mixtral", "deepseek_v3", "opt", "gpt_neox")


@cache
def model_of(family: str) -> PreTrainedModel:
    """Return the family's random model, for all tests: `generate` leaves it as it was."""
    return build(family)


class Knows(Drafter):
    """Knows the answers to several prompts: drafts the next tokens of the one that a text follows, and wrong ones."""

    def __init__(self, texts: list[list[int]]) -> None:
        self.texts = texts

    def begin(self, noise: Any = None) -> Any:
        """Return a text of which nothing was read."""
        return _KnownText(self.texts)


class _KnownText:
    def __init__(self, texts: list[list[int]]) -> None:
        self.texts = texts
        self.read: list[int] = []

    def propose(self, update: Committed, budget: Any) -> DraftTree:
        """Return up to three next tokens of the text, with a wrong branch before and after each."""
        self.read += update.tokens.tolist()
        begun = [*self.read, update.root]
        # a text that no answer begins with gets no drafts
        text = next((text for text in self.texts if text[: len(begun)] == begun), begun)
        right = text[len(begun) :][: min(3, budget.depth)]
        return DraftTree.from_paths(update.root, plant_branches(right))


class AddNoise(LogitsProcessor):
    """The noise of each row's text at each position, with which the largest score is a sample."""

    def __init__(self, paddings: list[int], seed: int = SEED) -> None:
        self.paddings = paddings
        self.noises = [Noise(seed, row) for row in range(len(paddings))]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores [B, V] of all rows with their noise."""
        length = input_ids.shape[1]
        rows = []
        for noise, padding in zip(self.noises, self.paddings, strict=True):
            rows.append(noise([length - padding], scores.shape[1], scores.device)[0])
        return scores + torch.stack(rows)


def left_padded(lengths: tuple[int, ...], seed: int = 5) -> dict[str, Tensor]:
    """Return random prompts of these lengths, padded on the left as a tokenizer does it."""
    # rows of other lengths begin at other positions
    prompts = [torch.tensor(random_tokens(length, seed + length)) for length in lengths]
    masks = [torch.ones_like(prompt) for prompt in prompts]
    left = {"batch_first": True, "padding_side": "left"}
    return {
        "input_ids": pad_sequence(prompts, padding_value=PAD, **left),
        "attention_mask": pad_sequence(masks, **left),
    }


def paddings_of(inputs: dict[str, Tensor]) -> list[int]:
    """Return how many tokens of padding each row has."""
    mask = inputs.get("attention_mask")
    return [0] * len(inputs["input_ids"]) if mask is None else (mask == 0).sum(1).tolist()


def stock_generate(model: Any, inputs: dict[str, Any], warpers: Any = None, **options: Any) -> Any:
    """Return what the model gives by itself; with `warpers`, sampled by this project's noise instead of torch's.

    Args:
        model: an untouched model.
        inputs: what a tokenizer returns.
        warpers: processors of sampling.
        options: further options of `generate`.
    """
    processors = list(options.pop("logits_processor", []))
    if warpers is not None:
        # rows of their own, so that each has a noise of its own
        rows = options.pop("num_return_sequences", 1)
        inputs = {name: value.repeat_interleave(rows, 0) for name, value in inputs.items()}
        processors += [*warpers, AddNoise(paddings_of(inputs))]
    # noise comes last, after all warpers
    options = {**asked(), **options}
    return model.generate(
        **inputs,
        **options,
        logits_processor=LogitsProcessorList(processors),
    )


def asked() -> dict[str, Any]:
    """Return the options of every call."""
    return {
        "max_new_tokens": 16,
        "do_sample": False,
        "pad_token_id": PAD,
        "eos_token_id": None,
    }


def texts_of(tokens: Tensor, inputs: dict[str, Any]) -> list[list[int]]:
    """Return texts without their padding, of rows that may be several answers to one prompt."""
    paddings = torch.tensor(paddings_of(inputs))
    paddings = paddings.repeat_interleave(len(tokens) // len(paddings))
    return [row[padding:].tolist() for row, padding in zip(tokens, paddings, strict=True)]


def generate_knowing(
    model: Any,
    stock: Any,
    inputs: dict[str, Any],
    **options: Any,
) -> tuple[Any, Any]:
    """Return what `model.generate` gives with a drafter that knows the stock answer, and the callable.

    Args:
        model: the same model.
        stock: what the stock call returned.
        inputs: what a tokenizer returns.
        options: further options, of `generate` or of the drafter.
    """
    tokens = stock if isinstance(stock, Tensor) else stock.sequences
    # options of the drafter's own, which transformers does not know
    chosen = {"seed": SEED}
    for name in ("seed", "stateless", "budget"):
        if name in options:
            chosen[name] = options.pop(name)
    with_drafter = eagle.transformers.generate_with(Knows(texts_of(tokens, inputs)), **chosen)
    options = {**asked(), **options}
    return model.generate(**inputs, **options, custom_generate=with_drafter), with_drafter


def seeing_call(family: str, images: int) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return a random model with images as input, and a prompt with images for it."""
    model = build_seeing(family)
    return model, ask(family, model, images, seed=1)
