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


def both_losses(method: str) -> tuple[Tensor, Tensor, Any, Any]:
    """Of the plain head and ours on one text, from the same weights, and both heads."""
    torch.manual_seed(0)
    embedding, output = nn.Embedding(37, 16), nn.Linear(16, 37, bias=False)
    frozen = TargetHead(embedding.requires_grad_(False), output.requires_grad_(False))
    settings = HEADS[method] | ({"dropout": 0.0} if "dropout" in HEADS[method] else {})
    ours = DRAFTERS[method].for_target(
        settings_of({"kind": method, **settings}, "test"), SHAPE, frozen
    )
    for weight in ours.parameters():
        weight.data += 0.1 * torch.randn_like(weight)
    plain = PLAIN[method](SHAPE, settings)
    plain.load_state_dict(ours.state_dict())
    mask = torch.arange(2 + SUPERVISED) >= 2
    text = Example(torch.randint(37, (len(mask),)), mask, torch.randn(len(mask), 1, 16))
    torch.manual_seed(1)  # of the level that is drawn
    one = plain.loss(padded([text]), embedding.weight, output.weight)
    torch.manual_seed(1)
    return one, ours(collate([text], (-1,)), frozen)["total"], plain, ours


def sums_by_level(loss: Any) -> Any:
    """Divide what a level's slots sum to by all supervised slots, as ours does, not by those that the level has."""

    def summed(logits: Tensor, named: Tensor, mask: Tensor, ahead: int) -> Tensor:
        return loss(logits, named, mask, ahead) * mask[:, ahead:].sum() / mask.sum()

    return summed


def compare(method: str, patch: pytest.MonkeyPatch) -> None:
    """Losses and gradients of both steps within rounding."""
    for name in ("token_loss", "probs_loss"):
        patch.setattr(released_levels, name, sums_by_level(getattr(released_levels, name)))
    one, other, plain, ours = both_losses(method)
    if method == "blockwise":
        one = (
            one * HEADS[method]["levels"]
        )  # the expectation is the sum over levels, as in its siblings
    torch.testing.assert_close(one, other)
    one.backward()
    other.backward()
    found = dict(ours.named_parameters())
    for name, weight in plain.named_parameters():
        torch.testing.assert_close(
            found[name].grad, weight.grad, msg=lambda text, name=name: f"{name}: {text}"
        )


METHODS = [
    name for name in HEADS if name != "falcon"
]  # whose blocks begin where a text's seed says


@pytest.mark.parametrize("method", METHODS)
def test_both_steps_are_the_same(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One loss, and the same gradient of every tensor, on a text whose slots both count alike."""
    compare(method, monkeypatch)


@pytest.mark.parametrize("method", METHODS)
def test_a_level_that_names_another_token_is_seen(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Labels shifted by one more."""
    for name in ("token_loss", "probs_loss"):
        honest = getattr(released_levels, name)
        monkeypatch.setattr(
            released_levels, name, lambda *args, honest=honest: honest(*args[:-1], args[-1] + 1)
        )
    with pytest.raises(AssertionError):
        compare(method, monkeypatch)


def test_both_train_the_same_tensors() -> None:
    """By name and size, whatever the method."""
    for method, settings in HEADS.items():
        ours = DRAFTERS[method].for_target(settings_of({"kind": method, **settings}, "test"), SHAPE)
        sizes = {name: weight.shape for name, weight in ours.named_parameters()}
        assert sizes == {
            name: weight.shape for name, weight in PLAIN[method](SHAPE, settings).named_parameters()
        }
