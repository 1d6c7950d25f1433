"""MTP heads: their loss and gradients equal a loop over single slots, and levels of drafting are steps of training."""

# T tokens of a text, H width, V vocabulary

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from eagle.core.drafter import TargetHead
from eagle.core.examples import Batch, Example, collate
from eagle.drafters.parts.decoder_block import head_shape
from eagle.drafters.parts.objectives import choose_teacher
from eagle.drafters.recurrent import mtp
from eagle.drafters.recurrent.mtp import Mtp, MtpSettings
from tests.drafters.recurrent.test_unroll_steps import drafting_is_training
from tests.naive_unroll import Network, anchors_of, law_loss, rms, unrolled
from tests.unrolled_heads import (
    SHAPE,
    SPANS,
    TAPS,
    Weights,
    apart,
    computed,
    frozen_head,
    gradients_of,
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
    "qkv_bias": {
        "qkv_bias": True,
        "hidden_first": True,
        "loss": "tokens",
    },
}


def new_head(
    variant: str,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Any:
    """Return a head of a variant with random weights, ready to train."""
    settings = {**VARIANTS[variant], **changes}
    # both are properties of the target's blocks
    block = {key: settings.pop(key) for key in ("qk_norm", "qkv_bias") if key in settings}
    torch.manual_seed(2)
    head = Mtp(MtpSettings(**settings), head_shape(SHAPE, **block))
    return moved(head).to(dtype).train()


# -- the loop ---------------------------------------------------------------------------------------------------------


def network_of(
    weights: Weights,
    settings: Any,
    shape: Any,
) -> Network:
    """Return the published layer: a projection of normed token and state, a decoder block, a norm."""
    eps = shape.rms_norm_eps

    def enter(embedding: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        halves = [
            rms(embedding, weights["enorm.weight"], eps),
            rms(state, weights["hnorm.weight"], eps),
        ]
        if settings.hidden_first:
            halves.reverse()
        joined = weights["eh_proj.weight"] @ torch.cat(halves)
        return rms(joined, weights["layers.0.input_layernorm.weight"], eps), joined

    return Network(
        weights,
        shape,
        enter=enter,
        handed=lambda output: rms(output, weights["norm.weight"], eps),
        steps=settings.steps,
    )


def compute_loss(
    weights: Weights,
    head: Any,
    texts: list[Example],
    target_head: TargetHead,
) -> Tensor:
    """Return the loss slot by slot, for as many steps as all labels on the way are supervised."""
    settings = head.settings
    network = network_of(weights, settings, head.shape)
    # weights of steps fall, and add up to 1
    shares = [settings.decay**step for step in range(settings.steps)]
    total = torch.zeros((), dtype=torch.float64)
    slots = 0
    for text in texts:
        states = text.features[:, TAPS.index(-1)]  # type: ignore[index]
        # a head without a vocabulary of its own can say every token
        sayable = torch.ones_like(text.loss_mask)
        anchors = anchors_of(text.loss_mask, sayable, settings.steps)
        slots += len(anchors)
        if not anchors:
            continue
        embedded = target_head.embed(text.tokens)
        outputs = unrolled(network, embedded, list(states[:-2]), anchors)
        for (anchor, step), output in outputs.items():
            logits = target_head.logits(network.handed(output))
            if settings.loss == "tokens":
                loss = -logits.log_softmax(-1)[text.tokens[anchor + 2 + step]]
            else:
                target_logits = target_head.logits(states[anchor + 1 + step])
                loss = law_loss(settings.loss, target_logits, logits)
            total = total + shares[step] / sum(shares) * loss
    return total / slots


def distance_from_loop(variant: str) -> float:
    """Return the relative difference of training's loss and gradients from the loop's."""
    texts = texts_of(SPANS, torch.float64)
    target_head = frozen_head(torch.float64)
    head = new_head(variant, torch.float64)
    # the loop computes one slot at a time, the head all of them at once
    expected = gradients_of(head, lambda weights: compute_loss(weights, head, texts, target_head))
    return apart(
        head,
        computed(head, collate(texts, TAPS), target_head),
        expected,
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_gradients_are_those_of_single_slots(variant: str) -> None:
    """In fp64; norms may compute in fp32."""
    assert distance_from_loop(variant) < 1e-6


def teach_next(
    loss: Any,
    batch: Batch,
    positions: Tensor,
    target_head: TargetHead,
) -> Any:
    """Return the teacher of the next position."""
    last = len(batch.tokens) - 3
    return choose_teacher(
        loss,
        batch,
        (positions + 1).clamp(max=last),
        target_head,
    )


@pytest.mark.parametrize(
    ("home", "name", "fault"),
    [
        (Mtp, "next_input", lambda head, state: state),
        (mtp, "choose_teacher", teach_next),
    ],
    ids=["no norm between levels", "teacher"],
)
def test_a_fault_is_seen(
    monkeypatch: pytest.MonkeyPatch,
    home: Any,
    name: str,
    fault: Any,
) -> None:
    """A head that departs from the formulas in one place is told from the loop."""
    monkeypatch.setattr(home, name, fault)
    assert distance_from_loop("plain") > 1e-3


# -- `loss_vocab` -----------------------------------------------------------------------------------------------------

SUPERVISED = [torch.tensor([3, 3, 3, 9]), torch.tensor([7, 9, 9, 1, 1, 12])]
FREQUENT = torch.tensor([1, 3, 7, 9])


def test_a_loss_of_the_frequent_tokens_is_that_of_a_smaller_matrix() -> None:
    """The LM head has only the rows of these tokens, for student and teacher; the loss of all rows is another."""
    texts = texts_of(SPANS, torch.float64)
    target_head = frozen_head(torch.float64)
    narrow_head = target_head.narrow(FREQUENT)
    torch.manual_seed(2)
    head = Mtp.for_target(MtpSettings(loss_vocab=4), SHAPE, supervised=SUPERVISED)
    head = moved(head).to(torch.float64).train()
    assert head.loss_tokens is not None
    # ties go to the lower token: 7 and 12 are counted once each
    assert head.loss_tokens.equal(FREQUENT)

    def narrow_loss(weights: Weights) -> Tensor:
        return compute_loss(weights, head, texts, narrow_head)

    found = computed(head, collate(texts, TAPS), target_head)
    assert apart(head, found, gradients_of(head, narrow_loss)) < 1e-6
    whole = gradients_of(head, lambda weights: compute_loss(weights, head, texts, target_head))
    assert apart(head, found, whole) > 1e-3


def test_a_part_of_the_vocabulary_needs_a_loss_of_probs() -> None:
    with pytest.raises(ValueError, match="loss_vocab is 4 and loss is tokens"):
        MtpSettings(loss_vocab=4, loss="tokens")


# -- drafting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["plain", "qk_norm", "qkv_bias"])
def test_each_step_of_training_is_a_level_of_drafting(
    monkeypatch: pytest.MonkeyPatch,
    variant: str,
) -> None:
    """The text comes in pieces, and something is drafted after each of them."""
    drafting_is_training(new_head(variant, steps=3), monkeypatch)
