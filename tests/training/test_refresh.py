"""A head that follows a target whose weights change: each step by hand, the target's new words, exact continuation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eagle import Sampling, Target, generate
from eagle.conformance.trial import make_head
from eagle.core.examples import Batch
from eagle.data.on_policy import trained_target
from eagle.drafters.none import NoDrafter
from eagle.training import refresh as module
from eagle.training.drafts_loss import losses_of_drafts
from eagle.training.refresh import Refresh
from tests.target.decoded import decode
from tests.trained import fixture_seed

PROMPTS = [[5, 17, 8], [40, 2, 9, 33, 61], [7, 7]]


@pytest.fixture
def model() -> Any:
    """Return a random model whose text depends on all that it has read."""
    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        initializer_range=0.25,
    )
    return LlamaForCausalLM(config).eval()


def begin(target: Target, kind: str = "eagle1") -> Refresh:
    """Return the training of a head that nobody has trained."""
    return Refresh(make_head(kind, target, fixture_seed()), lr=1e-3)


def change_weights(model: Any, seed: int) -> None:
    """Change weights in place, as a step of an optimizer does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.05)


@pytest.mark.parametrize("kind", ["eagle1", "medusa"])
def test_a_step_is_what_it_says(kind: str, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights after it are those of AdamW by hand, on the head's own loss and on that of its drafts."""
    batches: list[Batch] = []
    call = module.DraftsLoss.__call__

    def record(self: Any, head: Any, inputs: Any, losses: Any) -> Any:
        # what the step learned from, to compute its loss by hand
        batches.append(inputs[0])
        return call(self, head, inputs, losses)

    monkeypatch.setattr(module.DraftsLoss, "__call__", record)
    target = Target(model)
    refresh = begin(target, kind)
    before: Any = copy.deepcopy(refresh.head)
    metrics = refresh.step(target, PROMPTS, max_new_tokens=12)
    (batch,) = batches
    torch.manual_seed(0)
    total = before(batch, target.head)["total"]
    terms = losses_of_drafts(before, batch, target.head, refresh.policy)
    total = total + terms["accepted"] + terms["rejected"]
    total.backward()
    assert metrics["total"] == pytest.approx(total.item())
    assert 1 <= metrics["acceptance_length"] <= 6
    assert batch.drafts is not None
    assert metrics["drafts/rejected"] > 0

    # the recipe's default
    norm = torch.nn.utils.clip_grad_norm_(before.parameters(), 0.5)
    assert norm > 0

    learned = [weight for weight in refresh.head.parameters() if weight.requires_grad]

    for weight, old in zip(learned, before.parameters(), strict=True):
        # the first step of AdamW moves each weight by the sign of its gradient
        expected = old.detach() - 1e-3 * old.grad / (old.grad.abs() + 1e-8)
        is_clear = old.grad.abs() > 1e-5  # less is lost in rounding
        assert torch.allclose(weight[is_clear], expected[is_clear], atol=2e-5)


def write(refresh: Refresh, target: Target) -> list[list[int]]:
    """Return the sequences that a step with the seed 9 would learn from."""
    drafts = refresh._write_answers(target, PROMPTS, 10, 9)
    return [example.tokens.tolist() for example in drafts.written.values()]


def test_the_target_speaks_with_its_new_weights(model: Any) -> None:
    """After every change, which its own gradients survive; words of the old weights would be seen."""
    target = trained_target(model)
    refresh = begin(target)

    for seed in range(3):
        refresh.step(target, PROMPTS, max_new_tokens=10)
        change_weights(model, seed)

    written = write(refresh, target)
    fresh = Target(copy.deepcopy(model))

    for number, prompt in enumerate(PROMPTS):
        # the noise of a step with this seed
        sampling = Sampling(temperature=1.0, seed=9, request=number)
        # an answer that ends is learned to its end, so that stop tokens count here
        answer = generate(
            fresh,
            NoDrafter(),
            prompt,
            sampling=sampling,
            max_new_tokens=10,
        )
        assert written[number] == prompt + answer.tokens

    assert all(weight.requires_grad for weight in model.parameters())

    change_weights(model, 7)

    assert write(refresh, target) != written


@pytest.mark.slow
def test_a_continuation_comes_to_the_same_bits(model: Any) -> None:
    """From the states of head and optimizer and the number of steps."""
    target = Target(model)
    whole = begin(target)

    for _ in range(2):
        whole.step(target, PROMPTS, max_new_tokens=8)

    head_state = copy.deepcopy(whole.head.state_dict())
    optimizer_state = copy.deepcopy(whole.optimizer.state_dict())
    again = begin(target)
    # what a checkpoint holds
    again.head.load_state_dict(head_state)
    again.optimizer.load_state_dict(optimizer_state)
    again.steps = whole.steps

    for refresh in (whole, again):
        for _ in range(2):
            refresh.step(target, PROMPTS, max_new_tokens=8)

    state = again.head.state_dict()

    for name, tensor in whole.head.state_dict().items():
        assert torch.equal(tensor, state[name])

    drafted = decode(target, whole.drafter(target), PROMPTS[0], 20)

    assert drafted == decode(target, NoDrafter(), PROMPTS[0], 20)
