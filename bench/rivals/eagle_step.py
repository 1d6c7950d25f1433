"""This project's steps, as `bench.rivals.serve` describes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from transformers import LlamaConfig

from bench.rivals.serve import Step, Work, serve, update_step
from eagle.core.drafter import TargetHead, TrainableDrafter
from eagle.core.examples import Example, collate
from eagle.data.features import taps_of
from eagle.drafters import DRAFTERS, settings_of
from eagle.drafters.recurrent.eagle1 import Eagle1
from eagle.drafters.recurrent.eagle3 import Eagle3


def random_target_head(work: Work, config: LlamaConfig, dtype: torch.dtype) -> TargetHead:
    """A random embedding and LM head, frozen."""
    with torch.device(work.device):
        embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    return TargetHead(embedding.requires_grad_(False).to(dtype), output.requires_grad_(False).to(dtype))


def random_examples(work: Work, taps: int, width: int) -> list[list[Example]]:
    """The batches, with random features."""
    dtype = work.frozen_dtype if taps > 1 else torch.float32
    batches: list[list[Example]] = []
    for texts in work.batches:
        batches.append([])
        for text in texts:
            tokens, mask = work.tokens_and_mask(text)
            batches[-1].append(Example(tokens, mask, torch.randn(len(tokens), taps, width, dtype=dtype)))
    return batches


def side(work: Work) -> tuple[Step, Iterable[nn.Parameter]]:
    """The head's own loss; EAGLE-3's LM head is trained or not."""
    config = LlamaConfig.from_pretrained(work.target)
    frozen = random_target_head(work, config, work.frozen_dtype)
    head: TrainableDrafter
    if work.head:
        chosen = settings_of(work.head, "bench")
        taps = taps_of(chosen, config)
        head = DRAFTERS[work.head["kind"]].for_target(chosen, config, frozen)
    elif work.steps:
        settings = Eagle3.Settings(steps=work.steps, draft_vocab=work.draft_vocab, train_lm_head=work.train_lm_head)
        taps = taps_of(settings, config)
        head = Eagle3.for_target(settings, config, frozen, [torch.arange(work.draft_vocab)])
    else:
        taps = (-1,)
        head = Eagle1.for_target(Eagle1.Settings(), config)
    head.to(work.device)
    device = torch.device(work.device)
    batches = [collate(batch, taps).to(device) for batch in random_examples(work, len(taps), config.hidden_size)]
    return update_step(lambda i: head(batches[i], frozen)["total"], head.parameters(), work), head.parameters()


if __name__ == "__main__":
    serve(side)
