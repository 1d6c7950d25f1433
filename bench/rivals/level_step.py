"""The released steps of heads that guess several tokens at once, in plain PyTorch, as `bench.rivals.serve` describes.

Conversations padded to the longest, all levels' logits at every slot side by side, the loss of each level on labels
shifted by its own distance, those that are not supervised ignored; tensors named as in our heads.
"""

# B texts, T tokens of the longest, K levels, H width, V vocabulary

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig

from bench.published_eagle1 import Padded, padded
from bench.rivals.eagle_step import random_examples, random_target_head
from bench.rivals.serve import Step, Work, serve, update_step


class Plain(nn.Module):
    """A head that makes the logits of all levels at every slot."""

    def __init__(self, levels: int) -> None:
        super().__init__()
        self.levels = levels

    def logits(self, tokens: Tensor, states: Tensor, embedding: Tensor, weight: Tensor) -> Tensor:
        """[K, B, T, V], from tokens [B, T], the target's states [B, T, H] and its matrices [V, H]."""
        raise NotImplementedError

    def loss(self, batch: Padded, embedding: Tensor, weight: Tensor) -> Tensor:
        """Of all levels the mean cross-entropy from the text's tokens, summed: slot i of level d names i + 2 + d."""
        tokens, states, mask, _ = batch
        labels, total = tokens.masked_fill(~mask, -100), torch.zeros((), device=tokens.device)
        for level, logits in enumerate(self.logits(tokens, states, embedding, weight)):
            guessed, named = logits[:, : -(2 + level)], labels[:, 2 + level :]
            total = total + F.cross_entropy(guessed.flatten(0, 1).float(), named.flatten())
        return total


class PlainMedusa(Plain):
    """Residual blocks and an LM head for each level."""

    def __init__(self, shape: Any, settings: dict[str, Any]) -> None:
        super().__init__(settings["levels"])
        width, levels = shape.hidden_size, range(self.levels)
        self.blocks = nn.ModuleList(
            [nn.ModuleList([nn.Linear(width, width) for _ in range(settings["layers"])]) for _ in levels]
        )
        self.heads = nn.ModuleList([nn.Linear(width, shape.vocab_size, bias=False) for _ in levels])

    def logits(self, tokens: Tensor, states: Tensor, embedding: Tensor, weight: Tensor) -> Tensor:
        """Of every level from the state alone."""
        every = []
        for blocks, head in zip(self.blocks, self.heads, strict=True):
            hidden = states
            for block in blocks:  # type: ignore[attr-defined]
                hidden = hidden + F.silu(block(hidden))
            every.append(head(hidden))
        return torch.stack(every)


PLAIN: dict[str, type[Any]] = {"medusa": PlainMedusa}


def side(work: Work) -> tuple[Step, Iterable[nn.Parameter]]:
    """The plain rendering, with all weights in fp32."""
    config = LlamaConfig.from_pretrained(work.target)
    frozen = random_target_head(work, config, torch.float32)
    embedding = frozen.embedding.get_parameter("weight")
    head = PLAIN[work.head["kind"]](config, work.head).to(work.device)
    batches = [padded(batch, work.device) for batch in random_examples(work, 1, config.hidden_size)]
    parameters = [*head.parameters()]
    return update_step(lambda i: head.loss(batches[i], embedding, frozen.weight), parameters, work), parameters


if __name__ == "__main__":
    serve(side)
