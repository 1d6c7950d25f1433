"""This project's EAGLE-3 step, as `bench.rivals.serve` describes."""

from __future__ import annotations

import torch
from torch import nn
from transformers import LlamaConfig

from bench.rivals.serve import Made, Work, serve
from eagle.core.drafter import TargetHead
from eagle.data.examples import Example, collate
from eagle.data.features import taps_of
from eagle.drafters.eagle3 import Eagle3


def side(work: Work) -> Made:
    """The head's own loss, with an LM head that is trained or not."""
    config = LlamaConfig.from_pretrained(work.target)
    embedding = nn.Embedding(config.vocab_size, config.hidden_size)
    output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    embedding, output = (part.requires_grad_(False).to(work.numbers) for part in (embedding, output))
    frozen = TargetHead(embedding, output)
    settings = Eagle3.Settings(steps=work.steps, draft_vocab=work.draft_vocab, train_lm_head=work.head_trained)
    head = Eagle3.for_target(settings, config, frozen, supervised=[torch.arange(work.draft_vocab)])
    tokens, mask = work.text()
    taps = taps_of(settings, config)
    features = torch.randn(work.length, len(taps), config.hidden_size, dtype=work.numbers)
    batch = collate([Example(tokens, mask, features)], taps)
    return lambda: head(batch, frozen)["total"], head.parameters()


if __name__ == "__main__":
    serve(side)
