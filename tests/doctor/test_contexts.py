"""A head that fades where much text lies before it is told from one that does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle import Target
from eagle.core.examples import Batch
from eagle.doctor import contexts
from eagle.doctor.agreement import measure
from eagle.doctor.contexts import TEXTS, examine_contexts, join_texts
from eagle.doctor.texts import answer_prompts
from eagle.doctor.wiring import Wiring, cut_seqs
from eagle.drafters.parts.decoder_block import Rotary
from tests.doctor.test_doctor import trained
from tests.families import build, random_tokens

LEVELS = 3
ROTARY = Rotary.forward


@pytest.fixture(scope="module")
def target() -> Target:
    """A llama whose answers are no loops."""
    return Target(build("llama"))


@pytest.fixture(scope="module")
def texts(target: Target) -> Batch:
    """Answers to sixteen prompts."""
    return answer_prompts(target, [random_tokens(6, seed) for seed in range(16)], 40, (1.0,))


@pytest.fixture(scope="module")
def head(target: Target, texts: Batch) -> Any:
    """A head that has learned from these texts, joined."""
    return trained(target, join_texts(target, texts, (-1,)), "eagle1", 150)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows that fit these texts."""
    monkeypatch.setattr(contexts, "WINDOWS", (16, 32, 64))
    monkeypatch.setattr(contexts, "FAR", 60)


@pytest.mark.slow
def test_joined_texts_are_the_same_tokens(target: Target, texts: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """In their order, with the states that the target has behind all of what lies before."""
    joined = join_texts(target, texts, (1, -1))
    assert torch.equal(joined.tokens, texts.tokens) and len(joined.lengths) >= TEXTS
    assert joined.loss_mask.sum() == texts.loss_mask.sum() and max(joined.lengths) > max(texts.lengths)
    length = joined.lengths[0]
    states = target.model(input_ids=joined.tokens[None, :length], output_hidden_states=True).hidden_states
    assert joined.taps == (1, -1)
    for place, tap in enumerate(joined.taps):
        assert torch.allclose(joined.features[:length, place], states[tap][0], atol=1e-5)
    monkeypatch.setattr(Target, "max_positions", 50)
    assert max(join_texts(target, texts, (-1,)).lengths) <= 50


@pytest.mark.quick("20", "4096")
@pytest.mark.parametrize("window", [16, 20, 4096])
def test_a_slot_sees_a_window(window: int, head: Any, target: Target, texts: Batch) -> None:
    """Every slot in its order, with half to all of the window before it; a wide one changes nothing."""
    joined = join_texts(target, texts, head.taps)
    cut, slots, first = cut_seqs(joined, window, LEVELS), [], 0
    seen = list[int]()
    for length in cut.lengths:
        places = cut.loss_mask[first : first + length].nonzero()[:, 0]
        slots += cut.tokens[first + places].tolist()
        seen += places.tolist()
        first += length
    assert slots == joined.tokens[joined.loss_mask].tolist()
    before = measure(Wiring(head, target.head), joined, target.head, LEVELS).context_lengths.tolist()
    halves = [min(place, window // 2) for place in before]
    assert all(half <= place <= window for half, place in zip(halves, seen, strict=True))
    plain, other = (Wiring(head, target.head, window=each).draft_levels(joined, LEVELS) for each in (None, window))
    same = [torch.allclose(left[0], right[0], atol=1e-5) for left, right in zip(plain, other, strict=True)]
    assert all(same) if window == 4096 else not any(same)
    near = torch.tensor(before) <= window // 2
    assert all(torch.allclose(a[0][near], b[0][near], atol=1e-5) for a, b in zip(plain, other, strict=True))


def sharp_behind(place: int) -> Callable[..., tuple[Tensor, Tensor]]:
    """Rotary tables of a head whose attention goes astray behind so many tokens."""

    def forward(rotary: Rotary, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        factor = torch.where(positions >= place, 6.0, 1.0)[..., None]
        cosine, sine = ROTARY(rotary, like, positions)
        return cosine * factor, sine * factor

    return forward


def test_a_head_that_fades_is_found_and_a_healthy_one_is_not(
    head: Any, target: Target, texts: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: attention that goes astray behind 32 tokens. What the head does before is as it was."""
    healthy, note = examine_contexts(Wiring(head, target.head), target, texts, LEVELS)
    longest = max(join_texts(target, texts, head.taps).lengths)
    assert healthy is None and f"nothing is known beyond {longest} tokens" in note
    monkeypatch.setattr(Rotary, "forward", sharp_behind(32))
    fading, worse = examine_contexts(Wiring(head, target.head), target, texts, LEVELS)
    assert fading is not None and fading.window == 32
    assert str(fading).startswith("fades behind 32 tokens of text: there τ")
    parts = [told.split(", ") for told in (note, worse)]
    assert parts[0][:2] == parts[1][:2] and parts[0][2:] != parts[1][2:]  # below 32 tokens


def test_ranges_are_counted_one_by_one(head: Any, target: Target, texts: Batch) -> None:
    """Rates of a range against a loop over its slots; ranges that touch hold every slot once."""
    figures = measure(Wiring(head, target.head), join_texts(target, texts, head.taps), target.head, LEVELS)
    near, far = figures.between(0, 20), figures.between(20)
    for part, keep in ((near, lambda place: place < 20), (far, lambda place: place >= 20)):
        for level in range(LEVELS):
            slots = [slot for slot in range(len(figures.context_lengths)) if keep(int(figures.context_lengths[slot]))]
            reached = [slot for slot in slots if figures.reached[level, slot]]
            right = sum(bool(figures.hits[level, slot]) for slot in reached)
            assert part.rates()[level] == pytest.approx(right / max(len(reached), 1))
    assert torch.equal(near.reached | far.reached, figures.reached) and not (near.reached & far.reached).any()
