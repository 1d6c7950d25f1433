"""An adapter drafts and learns what the untouched model's early states give by its formula."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from eagle import Budget, Target, generate, load_drafter
from eagle.core.examples import Batch
from eagle.core.tree import chain_paths
from eagle.doctor.examine import open_head
from eagle.drafters import settings_of
from eagle.drafters.self_speculation.early_exit import EarlyExit
from eagle.drafters.self_speculation.early_exit_adapter import EarlyExitAdapter
from eagle.formats.checkpoint import save_head
from tests.families import NUM_LAYERS, build, own_answer, random_tokens

PROMPTS = [random_tokens(count, seed) for seed, count in enumerate((6, 11, 3))]
LAYERS = 2
OPTIONS: dict[str, Any] = {"budget": Budget(6, 4, 2), "max_new_tokens": 10, "stop": []}


def new_head(target: Target, kind: str) -> Any:
    """An untrained adapter in fp64, from the target's own norm."""
    settings = settings_of(
        {"kind": "early_exit_adapter", "layers": LAYERS, "adapter": kind}, "test"
    )
    head = EarlyExitAdapter.for_target(settings, target.config, target.head, weights=target.tensor)
    return head.double().bind(target.head)


def trained(head: Any) -> Any:
    """The adapter with weights that change what it says."""
    torch.manual_seed(0)
    for weight in head.parameters():
        weight.data += 0.5 * torch.randn_like(weight)
    return head


@pytest.mark.quick("linear-llama")
@pytest.mark.parametrize(
    ("kind", "family"),
    [("norm", "gemma2"), ("linear", "llama"), ("mlp", "llama"), ("mlp", "qwen3")],
)
def test_an_untrained_adapter_is_early_exit(kind: str, family: str) -> None:
    """Draft by draft; a trained one drafts something else, and the output is the target's all the same."""
    model = build(family, torch.float64)
    target = Target(copy.deepcopy(model))
    expected = [trace.cycles for trace in generate(target, EarlyExit(LAYERS), PROMPTS, **OPTIONS)]
    head = new_head(target, kind)
    assert [trace.cycles for trace in generate(target, head, PROMPTS, **OPTIONS)] == expected
    changed = generate(target, trained(head), PROMPTS, **OPTIONS)
    assert [trace.cycles for trace in changed] != expected
    assert [trace.tokens for trace in changed] == [
        own_answer(model, prompt, 10) for prompt in PROMPTS
    ]


@torch.no_grad()
def naive_logits(model: Any, head: Any, text: list[int]) -> Tensor:
    """[T, V], what the adapter says after each token of a text, by the untouched model's early states."""
    state = model(input_ids=torch.tensor([text]), output_hidden_states=True).hidden_states[LAYERS][
        0
    ]
    weights = list(head.change.parameters())
    rows = []
    for row in state:
        size = (row @ row / len(row)) ** 0.5
        inner = weights[0] @ (row / size)
        row = row + size * (weights[1] @ (inner / (1 + (-inner).exp())))
        rows.append(
            row / (row @ row / len(row) + head.norm.variance_epsilon) ** 0.5 * head.norm.weight
        )
    logits: Tensor = model.lm_head(torch.stack(rows))
    return logits


@pytest.fixture(scope="module")
def model() -> Any:
    """The untouched model."""
    return build("llama", torch.float64)


@pytest.fixture(scope="module")
def head(model: Any) -> Any:
    """An adapter with weights of its own."""
    return trained(new_head(Target(copy.deepcopy(model)), "mlp"))


def test_drafts_are_the_adapters_of_early_states(model: Any, head: Any) -> None:
    """Every token of every chain."""
    options = {**OPTIONS, "budget": Budget.fixed(chain_paths(4))}
    for trace in generate(Target(copy.deepcopy(model)), head, PROMPTS, **options):
        for cycle in trace.cycles:
            text = [*(trace.prompt + trace.tokens)[: cycle.context], int(cycle.tree.tokens[0])]
            for token in cycle.tree.tokens[1:].tolist():
                assert token == int(naive_logits(model, head, text)[-1].argmax())
                text.append(token)


def batch_of(model: Any, texts: list[list[int]]) -> Batch:
    """Texts end to end with the untouched model's states, the first four tokens of each unsupervised."""
    features = []
    for text in texts:
        with torch.no_grad():
            states = model(input_ids=torch.tensor([text]), output_hidden_states=True).hidden_states
        features.append(torch.stack([states[LAYERS][0], states[-1][0]], dim=1))
    tokens = torch.tensor([token for text in texts for token in text])
    masks = [torch.arange(len(text)) >= 4 for text in texts]
    lengths = tuple(map(len, texts))
    return Batch(
        tokens,
        torch.cat(masks),
        torch.cat(features),
        lengths,
        (LAYERS, -1),
        tuple(range(len(texts))),
    )


def check_loss(model: Any, head: Any, texts: list[list[int]], batch: Batch) -> None:
    """The loss is the mean cross-entropy to the target's probs for every supervised token."""
    losses = []
    for text in texts:
        with torch.no_grad():
            taught = model(input_ids=torch.tensor([text])).logits[0].softmax(-1)
        said = naive_logits(model, head, text).log_softmax(-1)
        losses += [-(taught[place - 1] * said[place - 1]).sum() for place in range(4, len(text))]
    loss = head(batch, head.frozen[0])
    torch.testing.assert_close(
        loss["total"], torch.stack(losses).mean(), rtol=1e-6, atol=0, check_dtype=False
    )


def test_the_loss_is_that_of_drafts(model: Any, head: Any) -> None:
    """By a loop over texts and places; states of the tokens next to these would give another."""
    texts = [random_tokens(count, count) for count in (9, 14)]
    batch = batch_of(model, texts)
    check_loss(model, head, texts, batch)
    for shift in (-1, 1):
        moved = batch.features.clone()
        moved[:, 0] = moved[:, 0].roll(shift, 0)
        with pytest.raises(AssertionError, match="not close"):
            check_loss(
                model,
                head,
                texts,
                Batch(batch.tokens, batch.loss_mask, moved, batch.lengths, batch.taps, ()),
            )


def test_every_level_is_trained_as_it_drafts(model: Any, head: Any) -> None:
    """Level d of slot i reads the early state of token i + 1 + d."""
    text = random_tokens(12, 3)
    levels = head.draft_levels(batch_of(model, [text]), head.frozen[0], 3)
    said = naive_logits(model, head, text)
    for level, (states, logits) in enumerate(levels):
        slots = range(2, len(text) - 2 - level)
        found = F.log_softmax(logits(states), -1)[: len(slots)]
        expected = torch.stack([said[slot + 1 + level].log_softmax(-1) for slot in slots])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_the_doctor_refuses_it_in_words(head: Any, tmp_path: Path) -> None:
    """It examines heads that read features when they draft."""
    save_head(tmp_path, head, "", {})
    with pytest.raises(
        ValueError,
        match="is a early_exit_adapter, expected a head that reads the target's features",
    ):
        open_head(tmp_path, "any target")


def test_what_does_not_fit_is_refused(model: Any, head: Any, tmp_path: Path) -> None:
    """As many layers as the target has, which need no adapter, and the adapter of another target."""
    target = Target(copy.deepcopy(model))
    for layers, refused in (
        (NUM_LAYERS, "expected fewer"),
        (NUM_LAYERS + 1, f"expected 1 to {NUM_LAYERS}"),
    ):
        settings = settings_of({"kind": "early_exit_adapter", "layers": layers}, "test")
        with pytest.raises(ValueError, match=refused):
            EarlyExitAdapter.for_target(settings, target.config)
    other = copy.deepcopy(head)
    other.shape.hidden_size //= 2
    save_head(tmp_path / "narrow", EarlyExitAdapter(other.settings, other.shape), "", {})
    with pytest.raises(ValueError, match="was made for a target of width"):
        load_drafter(tmp_path / "narrow", target)
