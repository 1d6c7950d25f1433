"""MTP heads: their loss and gradients by a loop over single slots, and levels of drafting that are training's."""

# T tokens of a text, H width, V vocabulary

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from eagle.core.drafter import TargetHead
from eagle.core.examples import Batch, Example, collate
from eagle.drafters.parts.decoder_block import head_shape
from eagle.drafters.parts.objectives import choose_teacher
from eagle.drafters.recurrent import mtp
from eagle.drafters.recurrent.mtp import Mtp, MtpSettings
from tests.drafters.recurrent.test_unroll_steps import drafting_is_training, leak
from tests.naive_unroll import Network, anchors_of, law_loss, rms, unrolled
from tests.unrolled_heads import (
    SHAPE,
    SPANS,
    TAPS,
    Weights,
    apart,
    computed,
    frozen_head,
    moved,
    texts_of,
)

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tokens": {"loss": "tokens", "steps": 4},
    "hidden first": {"hidden_first": True, "decay": 1.0},
    "one step": {"steps": 1},
    "acceptance": {"loss": "acceptance"},
    "qk_norm": {"qk_norm": True, "loss": "tokens"},
    "qkv_bias": {"qkv_bias": True, "hidden_first": True, "loss": "tokens"},
}


def new_head(variant: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A head of a variant with all its weights away from where they start, ready to train."""
    values = {**VARIANTS[variant], **changes}
    kinds = {kind: values.pop(kind) for kind in ("qk_norm", "qkv_bias") if kind in values}
    torch.manual_seed(2)
    return moved(Mtp(MtpSettings(**values), head_shape(SHAPE, **kinds))).to(dtype).train()


# -- the loop ---------------------------------------------------------------------------------------------------------


def network_of(weights: Weights, settings: Any, shape: Any) -> Network:
    """The published layer: a projection of the normed token beside the normed state, a decoder block, a norm."""
    eps = shape.rms_norm_eps

    def enter(embedding: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        parts = [
            rms(embedding, weights["enorm.weight"], eps),
            rms(state, weights["hnorm.weight"], eps),
        ]
        joined = weights["eh_proj.weight"] @ torch.cat(
            parts[::-1] if settings.hidden_first else parts
        )
        return rms(joined, weights["layers.0.input_layernorm.weight"], eps), joined

    return Network(
        weights,
        shape,
        enter,
        lambda output: rms(output, weights["norm.weight"], eps),
        settings.steps,
    )


def loop_over_slots(
    head: Any, weights: Weights, texts: list[Example], frozen: TargetHead
) -> Tensor:
    """The loss slot by slot, as long as all that a draft would have said is supervised."""
    settings, network = head.settings, network_of(weights, head.settings, head.shape)
    shares = [settings.decay**step for step in range(settings.steps)]
    total, slots = torch.zeros((), dtype=torch.float64), 0
    for text in texts:
        states = text.features[:, TAPS.index(-1)]  # type: ignore[index]
        anchors = anchors_of(text.loss_mask, torch.ones_like(text.loss_mask), settings.steps)
        slots += len(anchors)
        outputs = (
            unrolled(network, frozen.embed(text.tokens), list(states[:-2]), anchors)
            if anchors
            else {}
        )
        for (anchor, step), output in outputs.items():
            logits = frozen.logits(network.handed(output))
            if settings.loss == "tokens":
                loss = -logits.log_softmax(-1)[text.tokens[anchor + 2 + step]]
            else:
                loss = law_loss(settings.loss, frozen.logits(states[anchor + 1 + step]), logits)
            total = total + shares[step] / sum(shares) * loss
    return total / slots


def difference(variant: str, **changes: Any) -> float:
    """Of training's loss and gradients from the loop's; the loop knows nothing of the changes."""
    texts, frozen = texts_of(SPANS, torch.float64), frozen_head(torch.float64)
    head = new_head(variant, torch.float64)
    weights = {
        name: tensor.detach().clone().requires_grad_() for name, tensor in head.state_dict().items()
    }
    loss = loop_over_slots(head, weights, texts, frozen)
    gradients = torch.autograd.grad(loss, list(weights.values()))
    head.settings = head.settings.model_copy(update=changes)
    true = {"total": loss.detach(), **dict(zip(weights, gradients, strict=True))}
    return apart(head, computed(head, collate(texts, TAPS), frozen), true)


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_gradients_are_those_of_single_slots(variant: str) -> None:
    """In fp64, with every switch; norms may compute in fp32."""
    assert difference(variant) < 1e-6


@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        ("plain", {"hidden_first": True}),
        ("plain", {"decay": 0.61}),
        ("plain", {"loss": "tokens"}),
        ("tokens", {"steps": 3}),
    ],
    ids=["the other order", "other weights", "another loss", "a step less"],
)
def test_another_setting_is_seen(variant: str, changes: dict[str, Any]) -> None:
    assert not difference(variant, **changes) < 1e-3


def no_enorm(head: Mtp, embedded: Tensor) -> Tensor:
    """Tokens that are scaled, but not normed."""
    return F.linear(embedded * head.enorm.weight, head._halves()[0])


def raw_inputs(head: Mtp, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
    """States that are scaled, but not normed."""
    return head.layers[0].inputs(tokens + F.linear(hidden * head.hnorm.weight, head._halves()[1]))


def one_place_further(loss: Any, batch: Batch, places: Tensor, frozen: TargetHead) -> Any:
    """What stands behind the token that a slot names."""
    return choose_teacher(loss, batch, (places + 1).clamp(max=len(batch.tokens) - 3), frozen)


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "the next level reads the state before its norm": (
        Mtp,
        "next_input",
        lambda head, state: state,
    ),
    "no norm of tokens": (Mtp, "project_tokens", no_enorm),
    "no norm of states": (Mtp, "block_inputs", raw_inputs),
    "the teacher is a place further": (mtp, "choose_teacher", one_place_further),
    "weights do not add up to 1": (mtp, "sum", lambda values: 1.0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """A head that departs from the formulas in one place is not taken for theirs."""
    home, name, planted = FAULTS[fault]
    monkeypatch.setattr(home, name, planted, raising=False)
    assert not difference("plain") < 1e-3


# -- drafting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["plain", "hidden first", "qk_norm", "qkv_bias"])
def test_each_step_of_training_is_a_level_of_drafting(
    monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    """However the text came in pieces; a draft by another order of token and state is not."""
    head = new_head(variant, steps=3)
    drafting_is_training(head, monkeypatch)
    first_block = Mtp.first_block

    def turned(head: Mtp, *given: Any) -> Tensor:
        settings = head.settings
        head.settings = settings.model_copy(update={"hidden_first": not settings.hidden_first})
        try:
            return first_block(head, *given)
        finally:
            head.settings = settings

    monkeypatch.setattr(Mtp, "first_block", turned)
    with pytest.raises(AssertionError, match="not close"):
        drafting_is_training(head, monkeypatch)


@pytest.mark.parametrize("variant", ["plain", "qk_norm"])
def test_no_step_sees_what_it_names(monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    """Nor the states of the target behind its anchor, nor another text."""
    leak(new_head(variant, steps=4), monkeypatch)
