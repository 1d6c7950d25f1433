"""Training steps of this project and the published EAGLE-1 step, on the same work."""

# B conversations of a batch, T tokens, L taps, D width of the target

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from bench.machine import DTYPES
from eagle.core.drafter import TargetHead, TrainableDrafter
from eagle.core.examples import Example, collate
from eagle.data.features import taps_of
from eagle.device import PINNED
from eagle.drafters import DRAFTERS, settings_of
from tests.published_eagle1 import (
    PublishedHead,
    padded,
    published_loss,
    published_optimizer,
    published_step,
)

Text = tuple[int, list[list[int]]]  # the number of tokens, and spans of supervised ones
Step = Callable[[int], object]  # an update on batch i


def llama(
    vocab: int, width: int, mlp: int, heads: int, layers: int = 8, key_heads: int = 0
) -> dict[str, Any]:
    """Return the sizes of a Llama as its config names them.

    Args:
        vocab: Tokens of the vocabulary.
        width: Of the hidden states.
        mlp: Neurons of each MLP.
        heads: Of attention.
        layers: The decoder layers.
        key_heads: Heads of keys and values; 0 for as many as `heads`.
    """
    return {
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": key_heads or heads,
        "head_dim": width // heads,
    }


@dataclass(frozen=True)
class Work:
    """What all sides train on: conversations of random tokens and features, and a head of the same sizes."""

    config: dict[str, Any]  # of the target, a Llama
    batches: list[list[Text]]
    head: dict[str, Any]  # the `drafter` section of a recipe
    dtype: str  # of autocast and frozen weights; trained weights are fp32
    features: str = "fp32"  # their dtype
    device: str = "cpu"

    def make_text(self, text: Text) -> tuple[Tensor, Tensor]:
        """Return random tokens [T], which every draft vocabulary holds, and their loss mask [T]."""
        length, spans = text
        mask = torch.zeros(length, dtype=torch.bool)
        for start, stop in spans:
            mask[start:stop] = True
        return torch.randint(100, (length,)), mask

    def make_examples(self, num_taps: int) -> list[list[Example]]:
        """Return the batches, with random features [T, L, D]."""
        batches = []
        for texts in self.batches:
            examples = []
            for text in texts:
                tokens, mask = self.make_text(text)
                size = (len(tokens), num_taps, self.config["hidden_size"])
                examples.append(
                    Example(tokens, mask, torch.randn(size, dtype=DTYPES[self.features]))
                )
            batches.append(examples)
        return batches

    def make_target_head(self, dtype: torch.dtype) -> TargetHead:
        """Return a random embedding and LM head, frozen."""
        vocab_size = self.config["vocab_size"]
        width = self.config["hidden_size"]
        with torch.device(self.device):
            embedding = nn.Embedding(vocab_size, width, dtype=dtype)
            output = nn.Linear(width, vocab_size, bias=False, dtype=dtype)
        return TargetHead(embedding.requires_grad_(False), output.requires_grad_(False))


def update_step(loss: Callable[[int], Tensor], module: nn.Module, work: Work) -> Step:
    """Return a step of fused AdamW with gradients clipped by norm, under autocast in bf16.

    Args:
        loss: Gives the loss of batch i.
        module: Its parameters that require gradients are trained.
        work: Names the device and the dtype of autocast.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)

    def step(i: int) -> None:
        with torch.autocast(work.device, torch.bfloat16, enabled=work.dtype == "bf16"):
            total = loss(i)
        total.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def our_side(work: Work) -> tuple[Step, TrainableDrafter]:
    """Return the step of a head of this project, and the head."""
    config = LlamaConfig(**work.config)
    settings = settings_of(work.head, "bench")
    taps = taps_of(settings, config)
    target_head = work.make_target_head(DTYPES[work.dtype])
    vocabulary = torch.arange(work.head.get("draft_vocab", config.vocab_size))
    head = DRAFTERS[settings.kind].for_target(settings, config, target_head, [vocabulary])
    head.to(work.device).train()
    batches = [collate(examples, taps) for examples in work.make_examples(len(taps))]
    device = torch.device(work.device)
    # as a store gives them to the training loop, which uploads each
    if device.type in PINNED:
        batches = [batch.pin_memory() for batch in batches]

    def loss(i: int) -> Tensor:
        return head(batches[i].to(device), target_head)["total"]

    return update_step(loss, head, work), head


def published_side(work: Work) -> tuple[Step, nn.Module]:
    """Return the published EAGLE-1 step, and its head; all weights are fp32."""
    target_head = work.make_target_head(torch.float32)
    embedding = target_head.embedding.get_parameter("weight")
    head = PublishedHead(LlamaConfig(**work.config)).to(work.device)
    optimizer = published_optimizer(head)
    batches = [padded(examples, work.device) for examples in work.make_examples(1)]

    def step(i: int) -> None:
        loss = partial(
            published_loss, head, batches[i], embedding, target_head.weight, noise_seed=i
        )
        published_step(loss, optimizer, bf16=work.dtype == "bf16")

    return step, head
