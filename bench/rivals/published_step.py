"""The published EAGLE-1 step, as `bench.rivals.serve` describes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import nn
from transformers import LlamaConfig

from bench.rivals.eagle_step import random_examples, random_target_head
from bench.rivals.serve import Step, Work, serve
from tests.published_eagle1 import PublishedHead, padded, published_loss, published_optimizer, published_step


def side(work: Work) -> tuple[Step, Iterable[nn.Parameter]]:
    """The plain rendering, with all weights in fp32."""
    config = LlamaConfig.from_pretrained(work.target)
    frozen = random_target_head(work, config, torch.float32)
    embedding = frozen.embedding.get_parameter("weight")
    head = PublishedHead(config).to(work.device)
    optimizer = published_optimizer(head)
    batches = [padded(batch, work.device) for batch in random_examples(work, 1, config.hidden_size)]

    def step(i: int) -> None:
        loss = partial(published_loss, head, batches[i], embedding, frozen.weight, noise_seed=i)
        published_step(loss, optimizer, bf16=work.dtype == "bf16")

    return step, head.parameters()


if __name__ == "__main__":
    serve(side)
