"""Steps of heads that guess several tokens have the loss and the gradients of the released ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from eagle.core.drafter import TargetHead
from eagle.core.examples import Example, collate
from eagle.drafters import DRAFTERS, settings_of
from tests import released_levels
from tests.published_eagle1 import padded
from tests.released_levels import PLAIN

# heads of three levels, each as its release trains it
HEADS: dict[str, dict[str, Any]] = {
    "medusa": {"levels": 3, "layers": 1, "loss": "tokens"},
    "hydra": {"levels": 3, "layers": 4, "prefix": True, "dropout": 0.2, "loss": "cross_entropy"},
    "mlp_speculator": {"levels": 3, "loss": "tokens"},
    "blockwise": {"levels": 3, "drawn": True, "loss": "tokens"},
    "falcon": {"k": 2, "dropout": 0.1},
}
SHAPE = LlamaConfig(
    vocab_size=37,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=8,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
)
SUPERVISED = 9  # tokens, all behind the second: then both count the same slots


def draw_example() -> Example:
    """Return a sequence whose answer begins after the second token."""
    mask = torch.arange(2 + SUPERVISED) >= 2
    return Example(torch.randint(37, (len(mask),)), mask, torch.randn(len(mask), 1, 16))


def make_both(method: str, target_head: TargetHead) -> tuple[Any, Any]:
    """Return our head and the released one, with the same weights, away from where they begin."""
    settings = dict(HEADS[method])
    if "dropout" in settings:
        settings["dropout"] = 0.0
    ours = DRAFTERS[method].for_target(
        settings_of({"kind": method, **settings}, "test"), SHAPE, target_head
    )

    for weight in ours.parameters():
        weight.data += 0.1 * torch.randn_like(weight)

    released = PLAIN[method](SHAPE, settings)
    released.load_state_dict(ours.state_dict())
    return ours, released


def weigh_by_level(loss: Any) -> Any:
    """Divide what a level's positions sum to by all supervised positions, as ours does, not by those of the level."""

    def weighed(logits: Tensor, labels: Tensor, mask: Tensor, ahead: int) -> Tensor:
        return loss(logits, labels, mask, ahead) * mask[:, ahead:].sum() / mask.sum()

    return weighed


def compare(method: str, patch: pytest.MonkeyPatch) -> None:
    """Check that losses and gradients of both steps agree within rounding."""
    for name in ("token_loss", "probs_loss"):
        patch.setattr(released_levels, name, weigh_by_level(getattr(released_levels, name)))

    torch.manual_seed(0)
    embedding = nn.Embedding(37, 16).requires_grad_(False)
    output = nn.Linear(16, 37, bias=False).requires_grad_(False)
    target_head = TargetHead(embedding, output)
    ours, released = make_both(method, target_head)
    example = draw_example()
    # both draw the same level, where one is drawn
    torch.manual_seed(1)
    expected = released.loss(padded([example]), embedding.weight, output.weight)
    torch.manual_seed(1)
    loss = ours(collate([example], (-1,)), target_head)["total"]
    if method == "blockwise":
        # the expectation is the sum over levels, as in its siblings
        expected = expected * HEADS[method]["levels"]
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()

    for name, weight in released.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name).grad, weight.grad)


# Falcon's blocks begin where a sequence's seed says
METHODS = [name for name in HEADS if name != "falcon"]


@pytest.mark.parametrize("method", METHODS)
def test_both_steps_are_the_same(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One loss, and the same gradient of every tensor, on a sequence whose positions both count alike."""
    compare(method, monkeypatch)


def test_a_level_that_learns_another_token_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: labels shifted by one more."""
    token_loss = released_levels.token_loss

    def shift(logits: Tensor, labels: Tensor, mask: Tensor, ahead: int) -> Tensor:
        return token_loss(logits, labels, mask, ahead + 1)

    monkeypatch.setattr(released_levels, "token_loss", shift)

    with pytest.raises(AssertionError):
        compare("medusa", monkeypatch)


@pytest.mark.parametrize("method", HEADS)
def test_both_train_the_same_tensors(method: str) -> None:
    """By name and size."""
    settings = settings_of({"kind": method, **HEADS[method]}, "test")
    ours = DRAFTERS[method].for_target(settings, SHAPE)
    released = PLAIN[method](SHAPE, HEADS[method])
    sizes = {name: weight.shape for name, weight in ours.named_parameters()}
    assert sizes == {name: weight.shape for name, weight in released.named_parameters()}
