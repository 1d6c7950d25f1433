"""The stock `model.generate` beside the one with a drafter, on tiny random models, with the same noise."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

import eagle.transformers
from eagle.core.drafter import Committed, Drafter
from eagle.core.noise import Noise
from eagle.core.tree import DraftTree
from tests.families import VOCAB_SIZE, build, random_tokens
from tests.vision_families import ask
from tests.vision_families import build as build_seeing

PAD, SEED = 0, 11
FAMILIES = ("llama", "qwen3", "gemma3", "gpt2", "mixtral", "deepseek_v3", "opt", "gpt_neox")


@cache
def model_of(family: str) -> PreTrainedModel:
    """The family's random model, for all tests: `generate` leaves it as it was."""
    return build(family)


class Knows(Drafter):
    """Knows the answers to several prompts: drafts the next tokens of the one that a text follows, and wrong ones."""

    def __init__(self, texts: list[list[int]]) -> None:
        self.texts = texts

    def begin(self, noise: Any = None) -> Any:
        """A text that nothing was read of."""
        return _KnownText(self.texts)


class _KnownText:
    def __init__(self, texts: list[list[int]]) -> None:
        self.texts, self.read = texts, list[int]()

    def propose(self, update: Committed, budget: Any) -> DraftTree:
        """Up to three next tokens of the text, with a wrong branch before and after each."""
        self.read += update.tokens.tolist()
        begun = [*self.read, update.root]
        text = next((text for text in self.texts if text[: len(begun)] == begun), begun)
        right = text[len(begun) :][: min(3, budget.depth)]
        wrong = [[(token + shift) % VOCAB_SIZE for token in right] for shift in (1, 2)]
        before, after = (
            [right[:k] + branch[k : k + 2] for k in range(len(right))] for branch in wrong
        )
        return DraftTree.from_paths(update.root, [*before, right, *after])


class AddNoise(LogitsProcessor):
    """The noise of each row's text at each place, by which the likeliest token is a sampled one."""

    def __init__(self, paddings: list[int], seed: int = SEED) -> None:
        self.paddings = paddings
        self.noises = [Noise(seed, row) for row in range(len(paddings))]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores of all rows."""
        length = input_ids.shape[1]
        rows = [
            noise([length - padding], scores.shape[1], scores.device)[0]
            for noise, padding in zip(self.noises, self.paddings, strict=True)
        ]
        return scores + torch.stack(rows)


def left_padded(lengths: tuple[int, ...], seed: int = 5) -> dict[str, Tensor]:
    """Random prompts of these lengths, padded on the left as a tokenizer does it."""
    longest = max(lengths)
    rows = [[PAD] * (longest - length) + random_tokens(length, seed + length) for length in lengths]
    masks = [[0] * (longest - length) + [1] * length for length in lengths]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(masks)}


def paddings_of(inputs: dict[str, Tensor]) -> list[int]:
    """How many tokens of padding each row has."""
    mask = inputs.get("attention_mask")
    return [0] * len(inputs["input_ids"]) if mask is None else (mask == 0).sum(1).tolist()


def stock_generate(model: Any, inputs: dict[str, Any], warpers: Any = None, **options: Any) -> Any:
    """What the model gives by itself; with `warpers`, sampled by the noise of this project instead of torch's."""
    processors = list(options.pop("logits_processor", []))
    if warpers is not None:
        rows = options.get("num_return_sequences", 1)
        options.pop("num_return_sequences", None)
        inputs = {name: value.repeat_interleave(rows, 0) for name, value in inputs.items()}
        processors += [*warpers, AddNoise(paddings_of(inputs))]
    return model.generate(
        **inputs, **{**asked(), **options}, logits_processor=LogitsProcessorList(processors)
    )


def asked() -> dict[str, Any]:
    """The options of every call."""
    return {"max_new_tokens": 16, "do_sample": False, "pad_token_id": PAD, "eos_token_id": None}


def texts_of(tokens: Tensor, inputs: dict[str, Any]) -> list[list[int]]:
    """Texts without their padding, of rows that may be several answers to one prompt."""
    each = len(tokens) // len(inputs["input_ids"])
    paddings = [padding for padding in paddings_of(inputs) for _ in range(each)]
    return [row[padding:] for row, padding in zip(tokens.tolist(), paddings, strict=True)]


def generate_knowing(
    model: Any, stock: Any, inputs: dict[str, Any], **options: Any
) -> tuple[Any, Any]:
    """What `model.generate` gives with a drafter that knows the stock answer, and the callable."""
    tokens = stock if isinstance(stock, Tensor) else stock.sequences
    chosen = {
        name: options.pop(name) for name in ("seed", "stateless", "budget") if name in options
    }
    with_drafter = eagle.transformers.generate_with(
        Knows(texts_of(tokens, inputs)), **{"seed": SEED, **chosen}
    )
    return model.generate(
        **inputs, **{**asked(), **options}, custom_generate=with_drafter
    ), with_drafter


def seeing_call(family: str, images: int) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A random model that sees, and a prompt with images for it."""
    model = build_seeing(family)
    return model, ask(family, model, images, seed=1)
