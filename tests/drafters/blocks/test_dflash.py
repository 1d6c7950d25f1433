"""DFlash: its loss is that of single blocks after anchors that are sampled evenly."""

# A anchors, B slots of a block, K levels, H hidden, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from eagle.core.drafter import TargetHead
from eagle.core.examples import Example, collate
from eagle.drafters.blocks import block_spans
from eagle.drafters.blocks.anchors import Anchors
from eagle.drafters.blocks.dflash import DFlash
from eagle.drafters.parts.window import Window
from tests.naive_blocks import anchors_of, naive_loss
from tests.unrolled_heads import (
    LONG,
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

FP64 = torch.float64
JETSPEC = {"causal": True, "decay": None}
VARIANTS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "from the anchor": {
        "sample_from_anchor": True,
        "slots": 3,
        "decay": 4.0,
    },
    "jetspec": JETSPEC,
    "no norms by head": {"qk_norm": False, "blocks": 1},
    # sliding windows: as z-lab has them, in all blocks, as speculators trains, and with first tokens
    "window": {"window": {"recent": 5}, "window_blocks": (0,), "causal": "window"},
    "window, whole blocks": {"window": {"recent": 4}, "sample_from_anchor": True},
    "window up to the root": {"window": {"recent": 4}, "window_end": "root", "causal": True},
    "window, sinks": {"window": {"sinks": 2, "recent": 5}, "window_blocks": (1,)},
    # 60 of 97 tokens: every second one, and some of the others
    "draft vocabulary": {"draft_vocab": 60},
    "draft vocabulary, tokens": {"draft_vocab": 60, "loss": "tokens"},
    "draft vocabulary, d_pace": {"draft_vocab": 60, "loss": "tokens", "d_pace": True},
    "draft vocabulary, likeliest": {"draft_vocab": 60, "loss": "likeliest"},
    "published": {"loss": "tokens"},
    "d_pace": {"loss": "tokens", "d_pace": True},
    "d_pace, by places": {
        "loss": "tokens",
        "d_pace": True,
        "divisor": "reached",
    },
    "each level by its own": {"divisor": "levels"},
    "by anchors": {"divisor": "slots"},
    "by places": {"divisor": "reached"},
    # all other losses are called in the same way
    "total variation": {"loss": "tv"},
}


def new_head(shape: LlamaConfig = SHAPE, **settings: Any) -> Any:
    """Return a head in fp64, all of whose weights differ from how they start."""
    torch.manual_seed(2)
    values = {
        "taps": TAPS[:-1],
        "blocks": 2,
        "slots": 4,
        "mask_token": 2,
        **settings,
    }
    frequent = [torch.arange(0, 97, 2).repeat(2), torch.arange(1, 40, 2)]
    head = DFlash.for_target(DFlash.Settings(**values), shape, supervised=frequent)
    head = moved(head).to(FP64).train()
    with torch.no_grad():
        for weight in head.parameters():
            # large matrices, so that what a block reads changes its states by much
            if weight.ndim > 1:
                weight *= 4
    return head


def naive(
    head: Any,
    texts: list[Example],
    target_head: TargetHead,
    is_chosen: Callable[[Example, int], bool] = lambda text, root: True,
) -> Weights:
    """Return loss and gradients by a loop over single blocks, of the chosen roots alone."""
    weights = {}
    for name, tensor in head.state_dict().items():
        weights[name] = tensor.detach().clone()
        if tensor.is_floating_point():
            weights[name].requires_grad_()
    anchors = [anchor for anchor in anchors_of(texts, head.levels) if is_chosen(*anchor[:2])]
    loss = naive_loss(head, weights, anchors, target_head)
    trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
    gradients = torch.autograd.grad(loss, list(trained.values()))
    return {"total": loss.detach(), **dict(zip(trained, gradients, strict=True))}


def difference(head: Any, spans: dict[int, list[tuple[int, int]]]) -> float:
    """Return how far training's loss and gradients are from the loop's."""
    texts = texts_of(spans, FP64)
    target_head = frozen_head(FP64)
    return apart(
        head,
        computed(head, collate(texts, TAPS), target_head),
        naive(head, texts, target_head),
    )


@pytest.mark.quick("no norms by head")
@pytest.mark.parametrize("name", VARIANTS)
def test_loss_and_gradients_are_those_of_single_blocks(name: str) -> None:
    """Sequences with answers of many tokens, of one, and of none."""
    assert difference(new_head(**VARIANTS[name]), SPANS) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["jetspec", "window"])
def test_a_long_sequence_is_read_in_pieces(name: str) -> None:
    """It has more anchors than attention reads at once."""
    assert difference(new_head(**VARIANTS[name]), LONG) < 1e-6


def test_a_look_at_the_future_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison fails if rows see all of their piece."""
    pieces = block_spans._pieces

    def hide_nothing(*given: Any) -> Iterator[Any]:
        for rows, columns, hidden in pieces(*given):
            yield rows, columns, torch.zeros_like(hidden)

    monkeypatch.setattr(block_spans, "_pieces", hide_nothing)
    assert difference(new_head(blocks=1), {12: [(3, 5), (8, 12)], 6: [(2, 6)]}) > 1e-4


@pytest.mark.parametrize(
    "planted", [{"recent": 6}, {"recent": 4}, {"end": "root"}, {"blocks": (1,)}]
)
def test_a_wrong_window_is_seen(planted: dict[str, Any]) -> None:
    """The comparison fails for a window off by one, of the other rule, or in another block."""
    head = new_head(window={"recent": 5}, window_blocks=(0,))
    texts = texts_of(SPANS, FP64)
    target_head = frozen_head(FP64)
    expected = naive(head, texts, target_head)
    settings = head.settings
    head.settings = settings.model_copy(
        update={
            "window": Window(recent=planted.get("recent", 5)),
            "window_end": planted.get("end", "slot"),
            "window_blocks": planted.get("blocks", (0,)),
        }
    )
    assert apart(head, computed(head, collate(texts, TAPS), target_head), expected) > 1e-4


# -- anchors ------------------------------------------------------------------------------------


def test_anchors_are_sampled_evenly_from_each_sequence() -> None:
    """They are supervised and in order; the sequence's seed decides; all where there are few."""
    texts = texts_of({40: [(10, 38)], 9: [(4, 9)], 30: [(2, 30)]}, FP64)
    batch = collate(texts, TAPS)
    ends = torch.tensor(batch.lengths).cumsum(0)
    counts = torch.zeros(len(batch.tokens))
    epochs = 200
    for epoch in range(epochs):
        seeds = (3 * epoch, 3 * epoch + 1, 3 * epoch + 2)
        seeded = replace(batch, seeds=seeds)
        indices = Anchors.sampled(seeded, 3, 7).token_indices
        assert indices.equal(indices.unique())
        assert indices.equal(Anchors.sampled(seeded, 3, 7).token_indices)
        assert torch.bucketize(indices, ends, right=True).bincount().tolist() == [7, 5, 7]
        counts[indices + 2] += 1
    # 7 of 28 supervised tokens, 5 of 5, and 7 of 28
    expected = torch.tensor([epochs * 7 / 28] * 28 + [epochs] * 5 + [epochs * 7 / 28] * 28)
    # 28 is 4.6 standard deviations of a count
    assert (counts[batch.loss_mask] - expected).abs().max() < 28
    assert not counts[~batch.loss_mask].any()


def test_only_sampled_anchors_count() -> None:
    """The loss is the loop's at these, and another seed has another loss."""
    head = new_head(blocks=1, anchors=3)
    texts = texts_of({17: [(3, 5), (8, 17)], 12: [(2, 12)]}, FP64)
    target_head = frozen_head(FP64)
    batch = replace(collate(texts, TAPS), seeds=(5, 6))
    places = Anchors.sampled(batch, head.levels, 3).token_indices.tolist()
    # the second sequence begins at index 17; a root is one token after its slot
    first_roots = {place + 1 for place in places if place < 17}
    second_roots = {place + 1 - 17 for place in places if place >= 17}

    def is_sampled(text: Example, root: int) -> bool:
        return root in (first_roots if text is texts[0] else second_roots)

    got = computed(head, batch, target_head)
    assert apart(head, got, naive(head, texts, target_head, is_sampled)) < 1e-6
    other = computed(head, replace(batch, seeds=(7, 8)), target_head)
    assert not other["total"].isclose(got["total"], rtol=1e-3)


# -- settings -----------------------------------------------------------------------------------


def published_taps(layers: int) -> list[int]:
    """Return the inputs after the layers 1 + i (L - 4) / 4, where halves go to the even one."""
    taps = []
    for i in range(5):
        # in quarters, so that no float decides what a half is
        below, quarters = divmod(4 + i * (layers - 4), 4)
        is_odd_half = quarters == 2 and below % 2 == 1
        rounded = below + (quarters > 2 or is_odd_half)
        taps.append(rounded + 1)
    return taps


def test_taps_are_the_published_ones() -> None:
    """All layers but the first of a target that is too shallow for five different ones."""
    for layers in range(4, 101):
        taps = DFlash.taps_for(DFlash.Settings(), LlamaConfig(num_hidden_layers=layers))
        expected = published_taps(layers) if layers > 7 else list(range(1, layers))
        assert list(taps) == expected, layers
    # of the published heads for targets of 36 and 30 layers
    assert published_taps(36) == [2, 10, 18, 26, 34]
    assert published_taps(30) == [2, 9, 15, 21, 28]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"taps": (2, 2)}, "for a target of 8 layers"),
        ({"taps": (2, 8)}, "to 7, or -1"),
        ({"mask_token": 97}, "mask_token is 97"),
        ({"window": {"recent": 3}}, "window.recent is 3, expected at least slots, 4"),
        ({"window": {"recent": 5}, "window_blocks": (2,)}, "expected some of 0 to 1"),
        ({"causal": "window"}, "window is null"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], words: str) -> None:
    """Taps twice or beyond the target's layers, a token outside its vocabulary, and windows that cannot be."""
    with pytest.raises(ValueError, match=words):
        new_head(**settings)
