"""A head that follows a target whose weights change: each step by hand, the target's new words, exact continuation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from eagle import Sampling, Target, generate
from eagle.core.examples import Batch
from eagle.data.on_policy import trained_target
from eagle.data.own_drafts import OwnDrafts
from eagle.drafters import DRAFTERS, settings_of
from eagle.drafters.none import NoDrafter
from eagle.training import refresh as module
from eagle.training.drafts_loss import losses_of_drafts
from eagle.training.refresh import Refresh
from tests.trained import fixture_seed

PROMPTS = [[5, 17, 8], [40, 2, 9, 33, 61], [7, 7]]


@pytest.fixture
def model() -> Any:
    """A random model whose text depends on all that it has read."""
    torch.manual_seed(4)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=99, initializer_range=0.25, **sizes)).eval()


def new_head(target: Target, kind: str = "eagle1") -> Any:
    """A head that nobody has trained."""
    torch.manual_seed(fixture_seed())
    return DRAFTERS[kind].for_target(
        settings_of({"kind": kind}, "test"), target.config, target.head
    )


def change(model: Any, seed: int) -> None:
    """A step of training, in place, as an optimizer makes it."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.05)


def watched(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """The batches that steps learn from."""
    seen = list[Batch]()
    real = module.DraftsLoss.__call__

    def look(
        self: Any, head: Any, inputs: tuple[Batch, Any], losses: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        seen.append(inputs[0])
        return real(self, head, inputs, losses)

    monkeypatch.setattr(module.DraftsLoss, "__call__", look)
    return seen


@pytest.mark.parametrize("kind", ["eagle1", "medusa"])
def test_a_step_is_what_it_says(kind: str, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights behind it are those of AdamW by hand, on the head's own loss and on that of its drafts."""
    target, seen = Target(model), watched(monkeypatch)
    refresh = Refresh(new_head(target, kind), lr=1e-3)
    before = copy.deepcopy(refresh.head)
    said = refresh.step(target, PROMPTS, max_new_tokens=12)
    torch.manual_seed(0)
    total = before(seen[0], target.head)["total"]
    terms = losses_of_drafts(before, seen[0], target.head, refresh.policy)
    total = total + terms["accepted"] + terms["rejected"]
    total.backward()
    assert said["total"] == pytest.approx(total.item()) and 1 <= said["acceptance_length"] <= 6
    assert seen[0].drafts is not None and said["drafts/rejected"] > 0
    gradients = [weight.grad for weight in before.parameters() if weight.grad is not None]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    learned = [weight for weight in refresh.head.parameters() if weight.requires_grad]
    for weight, old in zip(learned, before.parameters(), strict=True):
        slope = old.grad * min(0.5 / norm, 1)
        expected = old.detach() - 1e-3 * slope / (slope.abs() + 1e-8)  # the first step of AdamW
        told = slope.abs() > 1e-5  # less is lost in rounding
        assert torch.allclose(weight[told], expected[told], atol=2e-5)


def test_the_target_speaks_with_its_new_weights(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every change, which its own gradients survive; a planted fault, words of the old weights, would be seen."""
    target, seen = trained_target(model), watched(monkeypatch)
    refresh = Refresh(new_head(target), lr=1e-3)
    for seed in range(3):
        refresh.step(target, PROMPTS, max_new_tokens=10)
        change(model, seed)
    written = refresh_write(refresh, target)
    fresh = Target(copy.deepcopy(model))
    for number, (prompt, example) in enumerate(zip(PROMPTS, written.written.values(), strict=True)):
        sampling = Sampling(temperature=1.0, seed=9, request=number)
        alone = generate(fresh, NoDrafter(), prompt, sampling=sampling, max_new_tokens=10)
        assert example.tokens.tolist() == prompt + alone.tokens
    assert all(weight.requires_grad for weight in model.parameters()) and len(seen) == 3
    old = [example.tokens.tolist() for example in written.written.values()]
    change(model, 7)
    assert old != [
        example.tokens.tolist() for example in refresh_write(refresh, target).written.values()
    ]


def refresh_write(refresh: Refresh, target: Target) -> OwnDrafts:
    """What a step with the seed 9 would learn from."""
    return refresh._write(target, PROMPTS, 10, 9)


@pytest.mark.slow
def test_a_continuation_comes_to_the_same_bits(model: Any) -> None:
    """From the states of head and optimizer and the number of steps."""
    target = Target(model)
    whole = Refresh(new_head(target), lr=1e-3)
    for number in range(4):
        if number == 2:
            kept = copy.deepcopy(
                (whole.head.state_dict(), whole.optimizer.state_dict(), whole.steps)
            )
        whole.step(target, PROMPTS, max_new_tokens=8)
    again = Refresh(new_head(target), lr=1e-3)
    again.head.load_state_dict(kept[0])
    again.optimizer.load_state_dict(kept[1])
    again.steps = kept[2]
    for _ in range(2):
        again.step(target, PROMPTS, max_new_tokens=8)
    state = again.head.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in whole.head.state_dict().items())
    drafted = generate(target, whole.drafter(target), PROMPTS[0], max_new_tokens=20).tokens
    assert drafted == generate(target, NoDrafter(), PROMPTS[0], max_new_tokens=20).tokens
