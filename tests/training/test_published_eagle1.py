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
from tests.published_eagle1 import PublishedHead, padded, published_loss

# heads of 16 in groups of two
SHAPE = LlamaConfig(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=176,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
# the supervised spans of sequences by their length; 300 tokens are read in more than one piece
SPANS = {
    300: [(5, 31), (40, 290)],
    23: [(2, 9), (9, 10), (17, 23)],
    60: [(30, 50)],
    9: [(0, 1), (8, 9)],
}


@pytest.fixture(params=[torch.float64, torch.float32], ids=["fp64", "fp32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Return both precisions: in fp64 only what is wrong differs."""
    return request.param


@pytest.fixture
def examples(dtype: torch.dtype) -> list[Example]:
    """Return sequences of different lengths, most with several answers, with random features."""
    generator = torch.Generator().manual_seed(3)
    examples = []

    for length, spans in SPANS.items():
        mask = torch.zeros(length, dtype=torch.bool)
        for start, stop in spans:
            # several answers in one conversation
            mask[start:stop] = True
        features = torch.randn(
            length,
            1,
            SHAPE.hidden_size,
            generator=generator,
            dtype=dtype,
        )
        tokens = torch.randint(SHAPE.vocab_size, (length,), generator=generator)
        examples.append(Example(tokens, mask, features))

    return examples


@pytest.fixture
def target_head(dtype: torch.dtype) -> TargetHead:
    """Return a random embedding and LM head, such that probs are neither flat nor certain."""
    torch.manual_seed(1)
    embedding = nn.Embedding(97, 64, dtype=dtype)
    output = nn.Linear(64, 97, bias=False, dtype=dtype)
    return TargetHead(embedding.requires_grad_(False), output.requires_grad_(False))


@pytest.fixture
def head(dtype: torch.dtype) -> Eagle1:
    """Return a new head of this project, without noise."""
    torch.manual_seed(2)
    return Eagle1.for_target(Eagle1.Settings(noise=0.0), SHAPE).to(dtype)


def collect(terms: dict[str, Tensor], head: nn.Module) -> dict[str, Tensor]:
    """Return loss terms, and the gradient of each weight by its name."""
    named = dict(head.named_parameters())
    gradients = torch.autograd.grad(terms["total"], list(named.values()))
    found = {f"loss {name}": value.detach() for name, value in terms.items()}
    return found | dict(zip(named, gradients, strict=True))


def read_plainly(
    head: Eagle1,
    examples: list[Example],
    target_head: TargetHead,
    gate: str = "predicted",
) -> dict[str, Tensor]:
    """Return loss terms and gradients of the published step, with the same weights by the same names."""
    plain = PublishedHead(head.shape).to(head.fc.weight.dtype)
    plain.load_state_dict(head.state_dict())
    batch = padded(examples)
    # padded, while ours is packed
    terms = published_loss(
        plain, batch, target_head.embedding.weight, target_head.weight, gate=gate
    )
    return collect(terms, plain)


def largest_difference(
    head: Eagle1,
    batch: Batch,
    target_head: TargetHead,
    expected: dict[str, Tensor],
) -> float:
    """Return the largest difference of loss terms and gradients, relative to the largest number of each."""
    found = collect(head(batch, target_head), head)
    assert expected.keys() <= found.keys()

    differences = []

    for name, value in expected.items():
        differences.append(float((found[name] - value).abs().max() / value.abs().max()))

    return max(differences)


def test_loss_and_all_gradients_equal_the_published_ones(
    head: Eagle1,
    examples: list[Example],
    target_head: TargetHead,
    dtype: torch.dtype,
) -> None:
    """Packed sequences, supervised positions alone and logits in chunks change nothing."""
    # rotary tables are fp32, and the published loss divides by positions + 1e-5
    tolerance = 1e-5 if dtype == torch.float32 else 1e-6
    expected = read_plainly(head, examples, target_head)
    assert largest_difference(head, collate(examples, (-1,)), target_head, expected) < tolerance


def test_a_gate_off_by_one_is_seen(
    head: Eagle1,
    examples: list[Example],
    target_head: TargetHead,
) -> None:
    """A position more and one less in each answer, or the gate of the token that is read, is no rounding."""
    batch = collate(examples, (-1,))
    moved = []

    for mask in batch.loss_mask.split(batch.lengths):
        # one later, within each sequence
        moved.append(mask.roll(1) & (torch.arange(len(mask)) > 1))

    wrong = replace(batch, loss_mask=torch.cat(moved))
    expected = read_plainly(head, examples, target_head)

    assert largest_difference(head, wrong, target_head, expected) > 1e-3

    expected = read_plainly(head, examples, target_head, gate="read")

    assert largest_difference(head, batch, target_head, expected) > 1e-3


def test_a_leaking_mask_is_seen(
    head: Eagle1,
    examples: list[Example],
    target_head: TargetHead,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Planted fault: a piece sees the sequences before its own."""
    honest = Spans.of

    def leak(*args: Any, **more: Any) -> Spans:
        spans = honest(*args, **more)
        return replace(spans, runs=[(0, rows) for _, rows in spans.runs])

    monkeypatch.setattr(Spans, "of", leak)
    expected = read_plainly(head, examples, target_head)

    assert largest_difference(head, collate(examples, (-1,)), target_head, expected) > 1e-3
