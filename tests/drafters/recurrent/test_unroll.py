"""EAGLE-3 and HASS train on what they will see when they draft; loss and gradients equal a loop over single tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eagle.core.examples import Example, collate
from tests import naive_unroll
from tests.unrolled_heads import (
    LONG,
    ONE,
    ONE_FIRST,
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


@pytest.mark.quick("*-1")
@pytest.mark.parametrize(
    ("steps", "dtype"),
    [
        (1, torch.float32),
        (3, torch.float32),
        (7, torch.float32),
        (3, torch.float64),
        pytest.param(7, torch.float64, marks=pytest.mark.slow),
    ],
    ids=["1", "3", "7", "3 in fp64", "7 in fp64"],
)
@pytest.mark.parametrize("name", VARIANTS)
def test_loss_and_all_gradients_equal_the_loop(
    tmp_path: Path, name: str, steps: int, dtype: torch.dtype
) -> None:
    """For one step, three and seven, with every switch."""
    allowed = 1e-5 if dtype == torch.float32 else 1e-6  # norms may compute in fp32
    assert difference(new_head(tmp_path, name, dtype, steps=steps), SPANS, dtype) < allowed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle3.1", "hass"])
def test_a_long_text_in_pieces_is_no_other(tmp_path: Path, name: str) -> None:
    """Attention reads an answer of 145 tokens piece by piece, and not the text beside it."""
    assert difference(new_head(tmp_path, name, steps=2), LONG, torch.float32) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle3.1", "hass"])
def test_a_long_answer_at_seven_steps(tmp_path: Path, name: str) -> None:
    """More than 300 tokens, in fp32 and in bf16."""
    head, texts = new_head(tmp_path, name, steps=7), texts_of({310: [(2, 310)]}, torch.float32)
    true = rendered(head, texts, frozen_head(torch.float32))
    assert (
        apart(head, computed(head, collate(texts, TAPS), frozen_head(torch.float32)), true) < 1e-5
    )
    in_bf16(head, texts, true)


@pytest.mark.parametrize("name", ["eagle3 draft vocabulary", "hass"])
def test_a_target_with_a_softcap_and_scales(tmp_path: Path, name: str) -> None:
    """What bends or scales the target's embeddings and logits is part of both laws."""
    head, texts = new_head(tmp_path, name, torch.float64, steps=3), texts_of(SPANS, torch.float64)
    frozen = replace(frozen_head(torch.float64), softcap=2.0, logit_scale=1.5, embed_scale=3.0)
    assert (
        apart(head, computed(head, collate(texts, TAPS), frozen), rendered(head, texts, frozen))
        < 1e-6
    )


def in_bf16(head: Any, texts: list[Example], true: Weights) -> None:
    """Every gradient under autocast points where the true one does."""
    with torch.autocast("cpu", torch.bfloat16):
        own = computed(head, collate(texts, TAPS), frozen_head(torch.float32))
    for part, value in true.items():
        cosine = nn.functional.cosine_similarity(
            own[part].float().flatten(), value.flatten(), dim=0
        )
        assert cosine > 0.999, f"{part}: {cosine:.4f}"


@pytest.mark.parametrize("name", ["eagle3.1", "hass"])
def test_a_head_whose_weights_are_bf16_learns(tmp_path: Path, name: str) -> None:
    """As engines hold them that split weights: gradients are those of fp32, up to the roundings."""
    whole, half = (
        new_head(tmp_path, name, dtype, steps=2) for dtype in (torch.float32, torch.bfloat16)
    )
    batch, frozen = (collate(texts_of(SPANS, torch.float32), TAPS), frozen_head(torch.bfloat16))
    true, ours = computed(whole, batch, frozen), computed(half, batch, frozen)
    assert true.keys() == ours.keys()
    for part, expected in true.items():
        assert (
            torch.cosine_similarity(ours[part].float().flatten(), expected.flatten(), dim=0) > 0.99
        )


@pytest.mark.parametrize("name", ["eagle3", "eagle3.1", "hass"])
def test_gradients_in_bf16_point_the_same_way(tmp_path: Path, name: str) -> None:
    """As they do on an accelerator."""
    head, texts = new_head(tmp_path, name), texts_of(SPANS, torch.float32)
    in_bf16(head, texts, rendered(head, texts, frozen_head(torch.float32)))


# -- planted faults: a rendering that differs from the formulas in one place is not ours ------------------------------

network_of = naive_unroll.hass_network


def true_slots(count: int) -> list[tuple[int, int]]:
    """The keys of a text's first slots."""
    return [(slot, 0) for slot in range(count)]


def own(anchor: int, steps: int) -> list[tuple[int, int]]:
    """The keys that an anchor has drafted."""
    return [(anchor, step) for step in range(1, steps + 1)]


def to_the_end(mask: Tensor, sayable: Tensor, steps: int) -> dict[int, int]:
    """Steps that go on where the answer, or what the head can say, has ended."""
    return {
        anchor: min(steps, len(mask) - 2 - anchor)
        for anchor in range(len(mask) - 2)
        if mask[anchor + 2]
    }


FAULTS: dict[str, tuple[str, str, Any]] = {
    "position stays": ("eagle3", "place", lambda anchor, step: anchor),
    "position advances twice": ("hass", "place", lambda anchor, step: anchor + 2 * step),
    "causal mask moves": (
        "eagle3",
        "seen",
        lambda anchor, step: true_slots(anchor + 1 - step) + own(anchor, step),
    ),
    "true keys for drafted": ("hass", "seen", lambda anchor, step: true_slots(anchor + 1 + step)),
    "drafted keys forgotten": (
        "hass",
        "seen",
        lambda anchor, step: true_slots(anchor + 1) + own(anchor, step)[-1:],
    ),
    "another's drafted keys": (
        "eagle3",
        "seen",
        lambda anchor, step: true_slots(anchor + 1) + own(max(anchor - 1, ONE_FIRST), step),
    ),
    "answer has ended": ("eagle3", "anchors_of", to_the_end),
    "cannot be said": ("eagle3 draft vocabulary", "anchors_of", to_the_end),
    "offsets are no ids": (
        "eagle3 draft vocabulary",
        "sayable_ids",
        lambda weights, vocabulary: weights["d2t"],
    ),
    "gradient between passes": (
        "hass",
        "hass_network",
        lambda *given: replace(network_of(*given), handed=lambda x: x),
    ),
}


@pytest.mark.parametrize("name", ["eagle3 draft vocabulary", "hass"])
def test_without_a_fault_the_loop_is_ours(tmp_path: Path, name: str) -> None:
    """On the text that the faults below are seen on."""
    assert difference(new_head(tmp_path, name, steps=3), ONE, torch.float32) < 1e-5


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """A loop that departs from the formulas in one place is not taken for ours."""
    name, function, planted = FAULTS[fault]
    monkeypatch.setattr(naive_unroll, function, planted)
    assert difference(new_head(tmp_path, name, steps=3), ONE, torch.float32) > 1e-3
