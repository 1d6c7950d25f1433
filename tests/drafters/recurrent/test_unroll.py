"""Loss and gradients of EAGLE-3 and HASS in training equal a loop over single tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle.core.examples import collate
from tests import naive_unroll
from tests.unrolled_heads import (
    LONG,
    ONE,
    SPANS,
    TAPS,
    VARIANTS,
    Weights,
    apart,
    computed,
    difference,
    frozen_head,
    new_head,
    rendered,
    texts_of,
)


@pytest.mark.quick("*-1", "eagle3.1-*", "hass-*")
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("name", VARIANTS)
def test_loss_and_all_gradients_equal_the_loop(
    tmp_path: Path,
    name: str,
    steps: int,
) -> None:
    """Every switch of both methods, in fp64; norms may compute in fp32."""
    head = new_head(tmp_path, name, torch.float64, steps=steps)
    assert difference(head, SPANS, torch.float64) < 1e-6


@pytest.mark.slow
def test_a_long_text_in_pieces_is_no_other(tmp_path: Path) -> None:
    """Attention reads an answer of 145 tokens in pieces, and not the text beside it."""
    assert (
        difference(
            new_head(tmp_path, "eagle3.1", steps=2),
            LONG,
            torch.float32,
        )
        < 1e-5
    )


@pytest.mark.parametrize("name", ["eagle3 draft vocabulary", "hass"])
def test_a_target_with_a_softcap_and_scales(tmp_path: Path, name: str) -> None:
    """What bends or scales the target's embeddings and logits changes both distributions."""
    head = new_head(tmp_path, name, torch.float64, steps=3)
    texts = texts_of(SPANS, torch.float64)
    # Gemma caps logits, Cohere and Granite scale them or the embeddings
    target_head = replace(
        frozen_head(torch.float64),
        softcap=2.0,
        logit_scale=1.5,
        embed_scale=3.0,
    )
    expected = rendered(head, texts, target_head)
    assert (
        apart(
            head,
            computed(head, collate(texts, TAPS), target_head),
            expected,
        )
        < 1e-6
    )


# -- bf16 -------------------------------------------------------------------------------------------------------------


def min_cosine(gradients: Weights, expected: Weights) -> float:
    """Return the smallest cosine between a gradient and the expected one, over loss and weights."""
    assert gradients.keys() == expected.keys()
    cosines = []
    for name, value in expected.items():
        own = gradients[name].float().flatten()
        cosines.append(float(torch.cosine_similarity(own, value.flatten(), dim=0)))
    return min(cosines)


@pytest.mark.parametrize("name", ["eagle3.1", "hass"])
def test_gradients_under_autocast_point_the_same_way(tmp_path: Path, name: str) -> None:
    """Training on a GPU computes in bf16 and holds weights in fp32."""
    head = new_head(tmp_path, name)
    texts = texts_of(SPANS, torch.float32)
    target_head = frozen_head(torch.float32)
    expected = rendered(head, texts, target_head)
    with torch.autocast("cpu", torch.bfloat16):
        gradients = computed(head, collate(texts, TAPS), target_head)
    assert min_cosine(gradients, expected) > 0.999


@pytest.mark.parametrize("name", ["eagle3.1", "hass"])
def test_a_head_whose_weights_are_bf16_learns(tmp_path: Path, name: str) -> None:
    """Trainers that shard weights hold them in bf16; gradients are those of fp32 up to rounding."""
    batch = collate(texts_of(SPANS, torch.float32), TAPS)
    target_head = frozen_head(torch.bfloat16)
    expected = computed(new_head(tmp_path, name, steps=2), batch, target_head)
    head = new_head(tmp_path, name, torch.bfloat16, steps=2)
    assert min_cosine(computed(head, batch, target_head), expected) > 0.99


# -- planted faults: a loop that differs from the formulas in one place is told from training -------------------------


def keep_position(anchor: int, step: int) -> int:
    """Return the anchor's position for every step."""
    return anchor


def forget_drafted(anchor: int, step: int) -> list[tuple[int, int]]:
    """Return keys of which the drafted ones but the latest are missing."""
    # in EAGLE-3's training each step keeps the keys of all earlier ones
    drafted = [(anchor, earlier) for earlier in range(1, step + 1)]
    return [(slot, 0) for slot in range(anchor + 1)] + drafted[-1:]


def ignore_vocabulary(
    mask: Tensor,
    sayable: Tensor,
    steps: int,
) -> dict[int, int]:
    """Return anchors with steps that go on behind a token that the head cannot say."""
    # a draft would end before such a token
    return anchors_of(mask, torch.ones_like(sayable), steps)


anchors_of = naive_unroll.anchors_of
FAULTS: dict[str, tuple[str, Any]] = {
    "place": ("eagle3 draft vocabulary", keep_position),
    "seen": ("hass", forget_drafted),
    "anchors_of": ("eagle3 draft vocabulary", ignore_vocabulary),
}


@pytest.mark.parametrize("function", FAULTS)
def test_a_fault_is_seen(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    function: str,
) -> None:
    """Without the fault, the loop agrees on the same text."""
    name, planted = FAULTS[function]
    head = new_head(tmp_path, name, steps=3)
    assert difference(head, ONE, torch.float32) < 1e-5
    monkeypatch.setattr(naive_unroll, function, planted)
    assert difference(head, ONE, torch.float32) > 1e-3
