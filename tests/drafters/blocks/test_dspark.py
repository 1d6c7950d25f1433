"""DSpark and Domino: the loss of every switch against one anchor after the other, and what faults in it change."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any, get_args

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from eagle.core.drafter import TargetHead
from eagle.core.examples import Batch
from eagle.drafters import settings_of
from eagle.drafters.blocks import dspark
from eagle.drafters.blocks.anchors import Anchors
from eagle.drafters.blocks.dspark import DSpark
from eagle.drafters.parts.divisors import Divisor
from tests.naive_dspark import naive_loss

VOCAB, WIDTH, TAPS = 23, 16, (1, 2, 3)
MARKOV = ("none", "vanilla", "gated", "rnn", "domino")


def frozen_head() -> TargetHead:
    """An embedding and an LM head in fp64."""
    torch.manual_seed(5)
    embedding, output = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
    return TargetHead(
        embedding.double().requires_grad_(False), output.double().requires_grad_(False)
    )


def new_head(**settings: Any) -> DSpark:
    """A small head in fp64, whose weights are all far from zero."""
    sizes = {
        "hidden_size": WIDTH,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = LlamaConfig(vocab_size=VOCAB, num_hidden_layers=5, head_dim=8, **sizes)
    small = {"blocks": 2, "slots": 4, "rank": 6, "gru_size": 5, "taps": TAPS}
    torch.manual_seed(6)
    head = DSpark.for_target(
        settings_of({"kind": "dspark", **small, **settings}, "test"), config
    ).double()
    for parameter in head.parameters():
        nn.init.normal_(parameter, std=0.4)
    return head


def two_texts() -> Batch:
    """Texts of two lengths, with tokens between that are not supervised."""
    drawn = torch.Generator().manual_seed(7)
    lengths, taps = (11, 7), (*TAPS, -1)
    mask = torch.tensor([0, 0, 0, 1, 1, 1, 0, 1, 1, 1, 1, 0, 0, 1, 1, 0, 1, 1]).bool()
    tokens = torch.randint(VOCAB - 1, (18,), generator=drawn)
    features = torch.randn(18, len(taps), WIDTH, generator=drawn, dtype=torch.float64)
    return Batch(tokens, mask, features, lengths, taps, (0, 1), progress=0.3)


def apart(head: DSpark) -> float:
    """How far loss and gradients are from the naive ones."""
    frozen, batch, found = frozen_head(), two_texts(), []
    for loss in (head(batch, frozen)["total"], naive_loss(head, batch, frozen)):
        head.zero_grad()
        loss.backward()
        gradients = [
            torch.zeros(()) if p.grad is None else p.grad.clone() for p in head.parameters()
        ]
        found.append([loss.detach(), *gradients])
    return max((one - other).abs().max().item() for one, other in zip(*found, strict=True))


@pytest.mark.quick("none", "domino")
@pytest.mark.parametrize("markov", MARKOV)
def test_the_loss_is_that_of_one_anchor_after_the_other(markov: str) -> None:
    """And its gradients at every weight, whatever is switched on."""
    for confidence, shifted, causal in product((False, True), repeat=3):
        head = new_head(
            markov=markov, confidence=confidence, sample_from_anchor=shifted, causal=causal
        )
        assert apart(head) < 1e-8


@pytest.mark.parametrize("divisor", get_args(Divisor))
def test_the_loss_is_divided_as_asked(divisor: str) -> None:
    """By what single anchors and levels add up to."""
    assert apart(new_head(divisor=divisor)) < 1e-8


def shifted(name: str, by: int) -> Any:
    """A method of `Anchors` that reads as if the anchors stood further on."""
    honest = getattr(Anchors, name)

    def read(self: Anchors, batch: Batch, *level: int) -> Any:
        moved = Anchors(self.spans, self.places + by, self.reached)
        return honest(moved, batch, *level)

    return read


honest_draw = Anchors.drawn
honest_read = dspark.MarkovBias.read_token
FAULTS: dict[str, tuple[Any, str, Any]] = {
    "answers are read": (Anchors, "tokens_at", shifted("tokens_at", 1)),
    "probs of the next place": (Anchors, "states_before", shifted("states_before", 1)),
    "no level counts less": (DSpark, "level_weights", [1.0] * 4),
    "all that is supervised counts": (
        Anchors,
        "drawn",
        lambda *given: replace(
            honest_draw(*given), reached=torch.ones_like(honest_draw(*given).reached)
        ),
    ),
    "memory forgets": (
        dspark.RecurrentBias,
        "read_token",
        lambda self, level, state, tokens, memory, frozen: honest_read(
            self, level, state, tokens, torch.zeros_like(memory), frozen
        ),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_loss_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each makes another loss, or other gradients."""
    head = new_head(markov="rnn")
    assert apart(head) < 1e-6
    monkeypatch.setattr(*FAULTS[fault])
    assert apart(head) > 1e-4
