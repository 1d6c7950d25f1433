"""Our loss and its gradients are those of a plain rendering of the published step, and faults in ours are seen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from eagle.core.drafter import TargetHead
from eagle.core.examples import Batch, Example, collate
from eagle.drafters.parts.spans import Spans
from eagle.drafters.recurrent.eagle1 import Eagle1
from tests.published_eagle1 import (
    PublishedHead,
    padded,
    published_loss,
    published_optimizer,
    published_step,
)

# heads of 16 in groups of two; 300 tokens make a text of more than one piece
SHAPE = LlamaConfig(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=176,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
SPANS = {
    300: [(5, 31), (40, 290)],
    23: [(2, 9), (9, 10), (17, 23)],
    60: [(30, 50)],
    9: [(0, 1), (8, 9)],
}


@pytest.fixture(params=[torch.float64, torch.float32], ids=["fp64", "fp32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Both precisions: in fp64 only what is wrong differs."""
    return request.param


@pytest.fixture
def examples(dtype: torch.dtype) -> list[Example]:
    """Texts of different lengths, most with several answers, with random features."""
    generator, made = torch.Generator().manual_seed(3), []
    for length, spans in SPANS.items():
        mask = torch.zeros(length, dtype=torch.bool)
        for start, stop in spans:
            mask[start:stop] = True
        features = torch.randn(length, 1, SHAPE.hidden_size, generator=generator, dtype=dtype)
        made.append(
            Example(torch.randint(SHAPE.vocab_size, (length,), generator=generator), mask, features)
        )
    return made


@pytest.fixture
def frozen(dtype: torch.dtype) -> TargetHead:
    """A random embedding and LM head, such that laws are neither flat nor certain."""
    torch.manual_seed(1)
    parts = nn.Embedding(97, 64, dtype=dtype), nn.Linear(64, 97, bias=False, dtype=dtype)
    return TargetHead(*(part.requires_grad_(False) for part in parts))


@pytest.fixture
def ours(dtype: torch.dtype) -> Eagle1:
    """A new head of this project, without noise."""
    torch.manual_seed(2)
    return Eagle1.for_target(Eagle1.Settings(noise=0.0), SHAPE).to(dtype)


def plain(ours: Eagle1) -> PublishedHead:
    """The rendering with the same weights, by the same names."""
    head = PublishedHead(ours.shape).to(ours.fc.weight.dtype)
    head.load_state_dict(ours.state_dict())
    return head


def rendering(
    head: PublishedHead, examples: list[Example], frozen: TargetHead, gate: str
) -> dict[str, Tensor]:
    """The rendering's loss terms, its gradients left in the head."""
    head.zero_grad()
    terms = published_loss(head, padded(examples), frozen.embedding.weight, frozen.weight, gate)
    terms["total"].backward()
    return terms


def largest_difference(
    ours: Eagle1, head: PublishedHead, batch: Batch, frozen: TargetHead, truth: dict
) -> float:
    """Of loss terms and of each weight's gradient, relative to the largest number of each."""
    ours.zero_grad()
    terms = ours(batch, frozen)
    terms["total"].backward()
    names = {name: weight.grad for name, weight in ours.named_parameters()}
    assert names.keys() == dict(head.named_parameters()).keys()
    pairs = [(names[name], weight.grad) for name, weight in head.named_parameters()]
    pairs += [(terms[name].detach(), value.detach()) for name, value in truth.items()]
    return max(float((own - true).abs().max() / true.abs().max()) for own, true in pairs)


def test_loss_and_all_gradients_equal_the_rendering(
    ours: Eagle1, examples: list[Example], frozen: TargetHead, dtype: torch.dtype
) -> None:
    """Packed texts, supervised slots alone and logits in chunks change nothing."""
    head = plain(ours)
    truth = rendering(head, examples, frozen, "predicted")
    allowed = (
        1e-5 if dtype == torch.float32 else 1e-6
    )  # rotary tables are fp32; the rendering divides by slots + 1e-5
    assert largest_difference(ours, head, collate(examples, (-1,)), frozen, truth) < allowed


def test_a_gate_off_by_one_is_seen(
    ours: Eagle1, examples: list[Example], frozen: TargetHead
) -> None:
    """A slot more and a slot less in each answer, or the gate of the token that is read, is no rounding."""
    head = plain(ours)
    truth, batch = rendering(head, examples, frozen, "predicted"), collate(examples, (-1,))
    moved = torch.cat(
        [
            mask.roll(1) & (torch.arange(len(mask)) > 1)
            for mask in batch.loss_mask.split(batch.lengths)
        ]
    )
    assert largest_difference(ours, head, replace(batch, loss_mask=moved), frozen, truth) > 1e-3
    truth = rendering(head, examples, frozen, "read")
    assert largest_difference(ours, head, batch, frozen, truth) > 1e-3


@pytest.mark.parametrize("by", ["begin", "stop"])
def test_a_leaking_mask_is_seen(
    ours: Eagle1,
    examples: list[Example],
    frozen: TargetHead,
    monkeypatch: pytest.MonkeyPatch,
    by: str,
) -> None:
    """A piece that sees the text before its own, or one slot ahead, is no rounding."""
    head, honest = plain(ours), Spans.of
    truth, batch = rendering(head, examples, frozen, "predicted"), collate(examples, (-1,))

    def leaking(masks: list[Tensor], device: torch.device, **more: Any) -> Spans:
        spans = honest(masks, device, **more)
        end = sum(len(mask) for mask in masks)
        if by == "begin":
            return replace(spans, runs=[(0, start, stop) for _, start, stop in spans.runs])
        return replace(
            spans,
            runs=[(b, start + (stop < end), stop + (stop < end)) for b, start, stop in spans.runs],
        )

    monkeypatch.setattr(Spans, "of", leaking)
    assert largest_difference(ours, head, batch, frozen, truth) > 1e-3


@pytest.mark.quick("fp32-norm")
@pytest.mark.parametrize("clip", ["value", "norm"])
def test_the_rendering_learns(
    ours: Eagle1, examples: list[Example], frozen: TargetHead, dtype: torch.dtype, clip: str
) -> None:
    """With noise, as published or in bf16, the loss of a batch falls."""
    head, batch = plain(ours), padded(examples)
    optimizer = published_optimizer(head)
    optimizer.param_groups[0]["lr"] = 1e-2
    losses = [
        published_step(
            lambda seed=step: published_loss(
                head, batch, frozen.embedding.weight, frozen.weight, noise_seed=seed
            ),
            optimizer,
            bf16=dtype == torch.float32,
            clip=clip,
        )
        for step in range(20)
    ]
    assert losses[-1] < 0.9 * losses[0]
