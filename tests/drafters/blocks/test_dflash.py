"""DFlash: its loss and its drafts are those of single blocks, and no block reads what it names."""

# A anchors, B slots, K levels, H width, V vocabulary

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from eagle.core.drafter import TargetHead
from eagle.core.examples import Batch, Example, collate
from eagle.drafters.blocks import block_spans, injected_head
from eagle.drafters.blocks.anchors import Anchors
from eagle.drafters.blocks.dflash import DFlash
from eagle.drafters.parts.objectives import Kind
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
    "from the anchor": {"sample_from_anchor": True, "slots": 3, "decay": 4.0},
    "jetspec": JETSPEC,
    "no norms by head": {"qk_norm": False, "blocks": 1},
    "published": {"loss": "tokens"},
    "d_pace": {"loss": "tokens", "d_pace": True},
    "d_pace, by places": {"loss": "tokens", "d_pace": True, "divisor": "reached"},
    "each level by its own": {"divisor": "levels"},
    "by anchors": {"divisor": "slots"},
    "by places": {"divisor": "reached"},
    "even": {"loss": "tokens", "decay": None, "causal": True, "sample_from_anchor": True},
}


def new_head(shape: LlamaConfig = SHAPE, **settings: Any) -> Any:
    """A head in fp64, its weights away from where they start, and its mask token one of the middle."""
    torch.manual_seed(2)
    values = {"taps": TAPS[:-1], "blocks": 2, "slots": 4, "mask_token": 2, **settings}
    head = moved(DFlash.for_target(DFlash.Settings(**values), shape)).to(FP64).train()
    with torch.no_grad():
        for weight in head.parameters():
            weight *= 1 + 3 * (
                weight.ndim > 1
            )  # blocks that differ in more than the mask's embedding
    return head


def naive(
    head: Any, texts: list[Example], frozen: TargetHead, chosen: Callable[..., bool] | None = None
) -> Weights:
    """Loss and gradients by a loop over single blocks; of those anchors alone that are chosen."""
    weights = {
        name: tensor.detach().clone().requires_grad_() for name, tensor in head.state_dict().items()
    }
    anchors = [
        anchor for anchor in anchors_of(texts, head.levels) if chosen is None or chosen(anchor)
    ]
    loss = naive_loss(head, weights, anchors, frozen)
    return {
        "total": loss.detach(),
        **dict(zip(weights, torch.autograd.grad(loss, [*weights.values()]), strict=True)),
    }


def difference(head: Any, spans: dict[int, list[tuple[int, int]]]) -> float:
    """Of training's loss and gradients from the loop's."""
    texts, frozen = texts_of(spans, FP64), frozen_head(FP64)
    return apart(head, computed(head, collate(texts, TAPS), frozen), naive(head, texts, frozen))


@pytest.mark.quick("no norms by head")
@pytest.mark.parametrize(
    "settings",
    [*VARIANTS.values(), *({"loss": kind} for kind in get_args(Kind)[1:])],
    ids=[*VARIANTS, *get_args(Kind)[1:]],
)
def test_loss_and_gradients_are_those_of_single_blocks(settings: dict[str, Any]) -> None:
    """Every switch and every loss, over texts with answers of many tokens, of one, and of none."""
    assert difference(new_head(**settings), SPANS) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] * (number > 3))
        for number, name in enumerate(VARIANTS)
    ],
)
def test_long_texts_too(name: str) -> None:
    """Attention reads them in several pieces."""
    assert difference(new_head(**VARIANTS[name]), LONG) < 1e-6


def see_all(*given: Any) -> Any:
    """Pieces whose rows see all of their text."""
    for rows, seen, hidden in pieces(*given):
        yield rows, seen, torch.zeros_like(hidden)


def see_the_first_text(*given: Any) -> Any:
    """Pieces whose rows see the texts before theirs."""
    for rows, seen, hidden in pieces(*given):
        yield rows, [slice(0, seen[0].stop)], hidden


def turn(block: Any, inputs: Any, tables: Any) -> Any:
    """Queries that stand one place further."""
    return queries(block, inputs, tuple(table.roll(-1, 0) for table in tables))


def read_the_answer(anchors: Anchors, batch: Batch, level: int) -> Tensor:
    """Roots that are what level 0 names, and levels as they are."""
    return tokens_at(anchors, batch, max(level, 0))


def count_gaps(batch: Batch, levels: int, most: int) -> Anchors:
    """Levels that count behind a gap in what is supervised."""
    found = drawn(batch, levels, most)
    return replace(found, reached=torch.ones_like(found.reached))


pieces, queries, tokens_at, drawn = (
    block_spans._pieces,
    injected_head.query_and_residual,
    Anchors.tokens_at,
    Anchors.drawn,
)
FAULTS = [
    (block_spans, "_pieces", see_all),
    (block_spans, "_pieces", see_the_first_text),
    (injected_head, "query_and_residual", turn),
    (Anchors, "tokens_at", read_the_answer),
    (Anchors, "drawn", count_gaps),
]


@pytest.mark.parametrize(
    ("home", "name", "fault"), FAULTS, ids=[fault.__name__ for _, _, fault in FAULTS]
)
def test_another_loss_is_seen(
    home: Any, name: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted faults are far from the loop."""
    monkeypatch.setattr(home, name, fault)
    assert difference(new_head(blocks=1), {12: [(3, 5), (8, 12)], 6: [(2, 6)]}) > 1e-4


# -- what a block reads -----------------------------------------------------------------------------------------------


def read_by(head: Any, slot: int = 6) -> list[tuple[set[int], set[int]]]:
    """Of each level at one slot: the places of tokens and those of features whose change alters its state."""
    batch, frozen = (
        collate(texts_of({5: [(2, 5)], 14: [(2, 14)], 6: [(2, 6)]}, FP64), TAPS),
        frozen_head(FP64),
    )
    row = 3 + slot  # behind the slots of the first text

    def states(batch: Batch) -> list[Tensor]:
        with torch.no_grad():
            return [states[row] for states, _ in head.draft_levels(batch, frozen, head.levels)]

    before, known = states(batch), [(set[int](), set[int]()) for _ in range(head.levels)]
    for place in range(len(batch.tokens)):
        tokens, features = batch.tokens.clone(), batch.features.clone()
        tokens[place] = (tokens[place] + 1) % SHAPE.vocab_size
        features[place] += 1
        for kind, changed in enumerate(
            (replace(batch, tokens=tokens), replace(batch, features=features))
        ):
            for level, (old, new) in enumerate(zip(before, states(changed), strict=True)):
                if not torch.equal(old, new):
                    known[level][kind].add(place - 5)
    return known


@pytest.mark.parametrize("settings", [{}, JETSPEC], ids=["dflash", "jetspec"])
def test_a_block_reads_its_root_and_the_text_before(settings: dict[str, Any]) -> None:
    """No token but the root, no state at the root or behind, nothing of other texts; to the bit."""
    assert read_by(new_head(**settings)) == [({7}, set(range(7)))] * 3


@pytest.mark.parametrize(
    ("home", "name", "fault"), FAULTS[:4], ids=[fault.__name__ for _, _, fault in FAULTS[:4]]
)
def test_another_sight_is_seen(
    home: Any, name: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted faults: the future, the text before, and the answer are read."""
    monkeypatch.setattr(home, name, fault)
    right = [({7}, set(range(7)))] * 3
    assert (read_by(new_head(blocks=1)) == right) == (fault is turn)


# -- anchors ----------------------------------------------------------------------------------------------------------


def test_so_many_anchors_are_drawn_of_each_text() -> None:
    """Supervised ones, in order, by the text's seed alone and as likely each; all where there are no more."""
    batch = collate(texts_of({40: [(10, 38)], 9: [(4, 9)], 30: [(2, 30)]}, FP64), TAPS)
    ends, counts = torch.tensor(batch.lengths).cumsum(0), torch.zeros(len(batch.tokens))
    for epoch in range(200):
        seeded = replace(batch, seeds=(3 * epoch, 3 * epoch + 1, 3 * epoch + 2))
        places = Anchors.drawn(seeded, 3, 7).places
        assert places.equal(places.unique()) and places.equal(Anchors.drawn(seeded, 3, 7).places)
        assert torch.bucketize(places, ends, right=True).bincount().tolist() == [7, 5, 7]
        counts[places + 2] += 1
    expected = [
        200 * min(7 / len(marked), 1)
        for mask in batch.loss_mask.split(batch.lengths)
        for marked in [mask.nonzero()]
        for _ in marked
    ]
    assert (counts[batch.loss_mask] - torch.tensor(expected)).abs().max() < 28 and not counts[
        ~batch.loss_mask
    ].any()


def test_drawn_anchors_alone_count() -> None:
    """The loss is the loop's at these, and another seed has another."""
    head, texts, frozen = (
        new_head(blocks=1, anchors=3),
        texts_of({17: [(3, 5), (8, 17)], 12: [(2, 12)]}, FP64),
        frozen_head(FP64),
    )
    batch = replace(collate(texts, TAPS), seeds=(5, 6))
    places = Anchors.drawn(batch, head.levels, 3).places.tolist()
    roots = {(number, place + 1 - 17 * number) for place in places for number in (place >= 17,)}
    ours = computed(head, batch, frozen)
    assert (
        apart(
            head,
            ours,
            naive(head, texts, frozen, lambda anchor: (anchor[0] is texts[1], anchor[1]) in roots),
        )
        < 1e-6
    )
    assert not computed(head, replace(batch, seeds=(7, 8)), frozen)["total"].isclose(
        ours["total"], rtol=1e-3
    )


@pytest.mark.parametrize("settings", [{}, {"loss": "tv", "d_pace": True}])
def test_nothing_is_learned_where_nothing_is_supervised(settings: dict[str, Any]) -> None:
    """A loss of zero without a gradient, and no slots to validate."""
    head, frozen = new_head(**settings), frozen_head(FP64)
    batch = collate(texts_of({8: [(0, 1)], 5: []}, FP64), TAPS)
    assert not batch.slots
    found = computed(head, batch, frozen)
    assert not any(value is not None and value.any() for value in found.values())
    assert [len(states) for states, _ in head.draft_levels(batch, frozen, 3)] == [0, 0, 0]


def published_taps(layers: int) -> list[int]:
    """The inputs behind the layers 1 + i (L - 4) / 4 that the method's code counts, halves to the even one."""
    quarters = [4 + number * (layers - 4) for number in range(5)]
    below = [quarter // 4 for quarter in quarters]
    rounded = [
        low + (4 * low + 2 < quarter or (4 * low + 2 == quarter and low % 2))
        for low, quarter in zip(below, quarters, strict=True)
    ]
    return [layer + 1 for layer in rounded]


def test_taps_are_the_published_ones() -> None:
    """Of targets of every depth; of one that is too shallow for five different ones, all but the first."""
    for layers in range(4, 101):
        taps = DFlash.taps_for(DFlash.Settings(), LlamaConfig(num_hidden_layers=layers))
        assert list(taps) == (published_taps(layers) if layers > 7 else [*range(1, layers)]), layers
    assert [len({*published_taps(layers)}) for layers in (7, 8)] == [4, 5]
    assert published_taps(36) == [2, 10, 18, 26, 34] and published_taps(30) == [2, 9, 15, 21, 28]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"taps": (2, 2)}, r"taps is \(2, 2\) for a target of 8 layers"),
        ({"taps": (2, 8)}, "to 7, or -1"),
        ({"mask_token": 97}, "mask_token is 97, expected one of the target's tokens 0 to 96"),
    ],
)
def test_settings_that_no_target_has_are_refused(settings: dict[str, Any], message: str) -> None:
    """They say what is expected."""
    with pytest.raises(ValueError, match=message):
        new_head(**settings)


def test_a_store_with_more_states_serves_it() -> None:
    """Those of other methods, in any order; to the bit."""
    head, texts, frozen = new_head(blocks=1), texts_of({12: [(2, 12)]}, FP64), frozen_head(FP64)
    batch = collate(texts, TAPS)
    other = replace(batch, features=batch.features[:, [3, 2, 0, 0, 1]], taps=(-1, 5, 7, 2, 4))
    for name, value in computed(head, batch, frozen).items():
        value = value.clone()
        assert computed(head, other, frozen)[name].equal(value), name
