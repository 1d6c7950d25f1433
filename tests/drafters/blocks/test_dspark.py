"""DSpark and Domino: the loss of every switch is that of one anchor after the other."""

# K levels, V vocabulary

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from eagle.core.drafter import TargetHead
from eagle.core.examples import Batch
from eagle.drafters import settings_of
from eagle.drafters.blocks.dspark import DSpark
from eagle.drafters.parts.divisors import Divisor
from tests.naive_dspark import naive_loss

VOCAB = 23
HIDDEN = 16
TAPS = (1, 2, 3)
MARKOV = ("none", "vanilla", "gated", "rnn", "domino")
# each switch is on and off, and no two are always on together
SWITCHES = [
    {
        "confidence": False,
        "sample_from_anchor": False,
        "causal": False,
    },
    {
        "confidence": True,
        "sample_from_anchor": True,
        "causal": False,
    },
    {
        "confidence": True,
        "sample_from_anchor": False,
        "causal": True,
    },
    {
        "confidence": False,
        "sample_from_anchor": True,
        "causal": True,
    },
]


def frozen_head() -> TargetHead:
    """Return a random embedding and LM head in fp64."""
    torch.manual_seed(5)
    embedding = nn.Embedding(VOCAB, HIDDEN).double()
    output = nn.Linear(HIDDEN, VOCAB, bias=False).double()
    return TargetHead(embedding.requires_grad_(False), output.requires_grad_(False))


def make_head(
    vocab_size: int,
    std: float,
    **settings: Any,
) -> DSpark:
    """Return a small head, all of whose weights are far from zero."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=24,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    checked = settings_of(
        {
            "kind": "dspark",
            "gru_size": 5,
            **settings,
        },
        "test",
    )
    # every second token is frequent
    head = DSpark.for_target(checked, config, supervised=[torch.arange(1, vocab_size, 2)])
    for weight in head.parameters():
        nn.init.normal_(weight, std=std)
    return head


def new_head(**settings: Any) -> DSpark:
    """Return a head of two blocks in fp64, ready to train."""
    torch.manual_seed(6)
    small = {
        "blocks": 2,
        "slots": 4,
        "rank": 6,
        "taps": TAPS,
    }
    return make_head(VOCAB, 0.4, **small, **settings).double()


def two_texts() -> Batch:
    """Return sequences of two lengths, with gaps in what is supervised."""
    generator = torch.Generator().manual_seed(7)
    taps = (*TAPS, -1)
    first = [0, 0, 0, 1, 1, 1, 0, 1, 1, 1, 1]
    second = [0, 0, 1, 1, 0, 1, 1]
    # the last token of the vocabulary is the mask
    tokens = torch.randint(VOCAB - 1, (18,), generator=generator)
    features = torch.randn(
        18,
        len(taps),
        HIDDEN,
        generator=generator,
        dtype=torch.float64,
    )
    return Batch(
        tokens,
        torch.tensor(first + second).bool(),
        features,
        lengths=(11, 7),
        taps=taps,
        seeds=(0, 1),
        progress=0.3,
    )


# head, batch, the target's head -> the loss, by a loop over single slots
NaiveLoss = Callable[[Any, Batch, TargetHead], Tensor]


def largest_difference(head: Any, naive: NaiveLoss = naive_loss, complete: bool = False) -> float:
    """Return how far loss and gradients are from the naive ones; `complete` says that all weights have gradients."""
    target_head = frozen_head()
    batch = two_texts()
    found = []
    # two graphs over the same weights
    for loss in (head(batch, target_head)["total"], naive(head, batch, target_head)):
        head.zero_grad()
        loss.backward()
        tensors = [loss.detach()]
        for weight in head.parameters():
            # a switch that is off leaves weights without a gradient
            assert weight.grad is not None or not complete
            tensors.append(torch.zeros(()) if weight.grad is None else weight.grad.clone())
        found.append(tensors)
    differences = [(got - expected).abs().max() for got, expected in zip(*found, strict=True)]
    return float(torch.stack(differences).max())


@pytest.mark.quick("none", "domino")
@pytest.mark.parametrize("markov", MARKOV)
def test_the_loss_is_that_of_one_anchor_after_the_other(markov: str) -> None:
    """Loss and gradients, for every kind of bias with every switch."""
    for switches in SWITCHES:
        head = new_head(markov=markov, **switches)
        assert largest_difference(head) < 1e-8


@pytest.mark.parametrize("markov", MARKOV)
def test_a_draft_vocabulary_cuts_the_target(markov: str) -> None:
    """The Markov head reads all tokens and writes these; others have no likelihood."""
    for switches in SWITCHES:
        assert largest_difference(new_head(markov=markov, draft_vocab=9, **switches)) < 1e-8


@pytest.mark.parametrize("divisor", get_args(Divisor))
def test_the_loss_is_divided_as_the_recipe_says(divisor: str) -> None:
    """By what the weights of single anchors and levels add up to."""
    assert largest_difference(new_head(divisor=divisor)) < 1e-8


def test_levels_of_equal_weight_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison fails if later levels count as much as the first."""
    monkeypatch.setattr(DSpark, "level_weights", [1.0] * 4)
    assert largest_difference(new_head(markov="rnn")) > 1e-4
