"""P-EAGLE: loss and drafts are those of single anchors with a dense mask; no mask sees its answer."""

# T tokens of a sequence, S supervised slots, E masks, V vocabulary

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import scipy.stats
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from eagle import Budget
from eagle.core.drafter import Committed
from eagle.core.examples import Batch, Example, collate
from eagle.core.tree import chain_paths
from eagle.drafters.blocks import peagle
from eagle.drafters.blocks.peagle import MaskedState, MaskRows, Peagle, draw_masks
from eagle.drafters.parts import spans
from tests import naive_masks
from tests.enumerate_law import texts_of as paths_of
from tests.unrolled_heads import (
    SHAPE,
    TAPS,
    apart,
    computed,
    draft_vocab,
    frozen_head,
    moved,
    texts_of,
)

V = SHAPE.vocab_size
FP64 = torch.float64
Answers = dict[int, list[tuple[int, int]]]
"""The length of each sequence, and the spans of it that are supervised."""

# answers of one token and of many, and a sequence without any
SPANS: Answers = {
    13: [(3, 5), (6, 7), (8, 13)],
    9: [(2, 4), (8, 9)],
    8: [(0, 1)],
    7: [(3, 7)],
}
FEW: Answers = {8: [(2, 8)], 6: [(2, 4), (5, 6)]}
ALL_MASKS = {
    "blocks": 1,
    "keep": 1.0,
    "depths": 4,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "one block": {"blocks": 1},
    "two blocks": {
        "blocks": 2,
        "draft_vocab": True,
        "keep": 1.0,
        "depths": 4,
    },
    "all rows alike": {**ALL_MASKS, "divisor": "reached"},
    "each level by its own": {**ALL_MASKS, "divisor": "levels"},
    "by slots": {**ALL_MASKS, "divisor": "slots"},
    "four blocks": {
        "norm_before_residual": True,
        "loss": "acceptance",
        "fc_norm": True,
        "mask_token": 5,
    },
}


def new_head(
    folder: Path,
    name: str = "two blocks",
    **changes: Any,
) -> Any:
    """Return a head in fp64 whose attention is far from even."""
    values = {**VARIANTS[name], **changes}
    if values.get("draft_vocab"):
        values["draft_vocab"] = str(draft_vocab(folder / "draft_vocab.safetensors", V, 70))
    torch.manual_seed(2)
    head = Peagle.for_target(
        Peagle.Settings(**values),
        SHAPE,
        frozen_head(torch.float32),
    )
    head = moved(head).double()
    with torch.no_grad():
        for layer in head.layers:
            for weight in layer.self_attn.parameters():
                weight *= 3
    return head.train()


def batch_of(answers: Answers, seed: int = 0) -> tuple[list[Example], Batch]:
    """Return sequences, each cut after its last supervised token, and the batch of them."""
    texts = texts_of(answers, FP64)
    batch = collate(texts, TAPS, range(seed, seed + len(texts)))
    columns = (batch.tokens, batch.loss_mask, batch.features)
    chunks = zip(*(column.split(batch.lengths) for column in columns), strict=True)
    return [Example(*chunk) for chunk in chunks], batch


# -- the loss -----------------------------------------------------------------------------------


def difference(
    head: Any,
    answers: Answers,
    seed: int = 0,
) -> float:
    """Return how far training's loss and gradients are from those of single anchors."""
    texts, batch = batch_of(answers, seed)
    target_head = frozen_head(FP64)
    settings = head.settings
    weights = {name: tensor.detach().clone() for name, tensor in head.state_dict().items()}
    learned = {}
    for name, tensor in weights.items():
        # the map of a draft vocabulary is no weight
        if tensor.is_floating_point():
            learned[name] = tensor.requires_grad_()
    counts = draw_masks(
        batch,
        settings.depths - 1,
        settings.keep,
        settings.keep_least,
    )
    loss = naive_masks.loss(
        weights,
        settings,
        head.shape,
        texts,
        target_head,
        counts,
    )
    gradients = torch.autograd.grad(loss, list(learned.values()))
    expected = {"total": loss.detach(), **dict(zip(learned, gradients, strict=True))}
    return apart(head, computed(head, batch, target_head), expected)


@pytest.mark.parametrize("name", VARIANTS)
def test_loss_and_gradients_are_those_of_single_anchors(name: str, tmp_path: Path) -> None:
    """Up to the rounding of the weights of slots, which are fp32."""
    assert difference(new_head(tmp_path, name), SPANS, seed=3) < 1e-6


def test_a_look_at_the_future_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison fails if nothing is hidden from scattered rows."""

    def hide_nothing(places: Any, end: int, like: Tensor) -> Tensor:
        return like.new_zeros(len(places), end - places[0])

    monkeypatch.setattr(spans, "_hide_later", hide_nothing)
    assert difference(new_head(tmp_path), FEW) > 1e-4


def test_the_fused_kernel_computes_the_same() -> None:
    """Attention as on accelerators, of slots with different numbers of masks."""
    _, batch = batch_of({40: [(2, 9), (12, 40)], 30: [(7, 30)], 5: [(2, 3)]}, seed=1)
    masks = MaskRows.of(draw_masks(batch, 3, 0.7, 0.2), torch.device("cpu"))
    count = len(masks.depths)
    torch.manual_seed(0)
    # [heads, E, w] of masks, and [heads, T, w] of what they see
    query = torch.randn(4, count, 16)
    own = (torch.randn(2, count, 16), torch.randn(2, count, 16))
    context = (torch.randn(2, masks.spans.count, 16), torch.randn(2, masks.spans.count, 16))
    fused = masks.attend(query, context, own, flex_attention)
    torch.testing.assert_close(fused, masks.attend(query, context, own), rtol=0, atol=1e-5)


# -- which masks are trained --------------------------------------------------------------------


def test_masks_are_sampled_as_defined() -> None:
    """At depth d of n slots (n - d) * max(keep^d, least), where depth d - 1 was sampled."""
    _, batch = batch_of({90: [(10, 90)], 70: [(2, 30), (33, 70)]}, seed=5)
    counts = draw_masks(batch, 7, 0.7, 0.2)
    for supervised, found in zip(peagle.supervised_slots(batch), counts, strict=True):
        slots = int(supervised.sum())
        assert not found[~supervised].any()
        for depth in range(1, 8):
            # the answer must go on for as many tokens as there are masks
            windows = [supervised[slot : slot + depth + 1] for slot in range(len(found))]
            goes_on = [int(window.sum()) == depth + 1 for window in windows]
            candidates = (found >= depth - 1) & supervised & torch.tensor(goes_on)
            sampled = found >= depth
            assert not sampled[~candidates].any()
            wanted = int((slots - depth) * max(0.7**depth, 0.2))
            assert int(sampled.sum()) == min(int(candidates.sum()), wanted)
    again = draw_masks(batch, 7, 0.7, 0.2)
    assert all(map(torch.equal, counts, again))
    other = draw_masks(replace(batch, seeds=(7, 8)), 7, 0.7, 0.2)
    assert not counts[0].equal(other[0])


def test_every_slot_is_sampled_alike() -> None:
    """Over 600 seeds, by a chi-square test."""
    _, batch = batch_of({14: [(2, 14)]})
    counts = torch.zeros(12)
    for seed in range(600):
        counts += draw_masks(replace(batch, seeds=(seed,)), 1, 0.5, 0.0)[0]
    # no token follows the last slot; of the others half are sampled, rounded down
    assert counts[-1] == 0
    assert counts.sum() == 600 * 5
    assert scipy.stats.chisquare(counts[:-1].numpy()).pvalue > 0.01


# -- drafting -----------------------------------------------------------------------------------

TREE = (
    (0,),
    (2,),
    (0, 1),
    (0, 0),
    (2, 0),
    (0, 1, 1),
    (0, 0, 0),
    (2, 0, 2),
    (0, 1, 1, 0),
    (0, 1, 1, 0, 1),
)
LEVELS = 4
# where cycles end: updates of one token and of many
CYCLES = (0, 1, 2, 9, 10, 13, 14, 29)


def single_anchor(
    head: Any,
    tokens: Tensor,
    taps: Tensor,
    anchor: int,
) -> Tensor:
    """Return [4, D], the logits of an anchor and three masks after it, in a dense pass."""
    return naive_masks.anchor_logits(
        head.state_dict(),
        head.settings,
        head.shape,
        text=(tokens, taps),
        target_head=frozen_head(FP64),
        anchor=anchor,
        masks=3,
    )


def check_drafts(head: Any) -> None:
    """Every node in several cycles is the child of its rank by the logits of a single anchor."""
    (example,) = texts_of({31: [(2, 31)]}, FP64)
    assert example.features is not None
    tokens = example.tokens
    taps = example.features[:, :-1]
    text = head.bind(frozen_head(FP64)).begin()
    ids = naive_masks.sayable_ids(head.state_dict(), V)
    for start, end in pairwise(CYCLES):
        update = Committed(
            tokens[start:end],
            taps[start:end],
            int(tokens[end]),
        )
        tree = text.propose(update, Budget.fixed(TREE))
        with torch.no_grad():
            logits = single_anchor(head, tokens, taps, end - 1)
        ranked = ids[logits.argsort(descending=True)]
        # the path of five levels is deeper than the head
        expected = set()
        for path in TREE:
            if len(path) <= LEVELS:
                expected.add(tuple(int(ranked[level, rank]) for level, rank in enumerate(path)))
        assert set(paths_of(tree)[1:]) == expected
        assert len(tree) == 1 + len(expected)


def test_drafts_with_a_cache_are_those_of_single_anchors(tmp_path: Path) -> None:
    """As deep as the head was trained."""
    check_drafts(new_head(tmp_path))


def test_masks_that_stay_in_the_cache_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check fails if one mask of each cycle is kept as if it were a token."""
    read_group = MaskedState._read_group

    def keep_mask(state: Any, updates: Any) -> Tensor:
        states = read_group(state, updates)
        state.cache.lengths[0] += 1
        return states

    monkeypatch.setattr(MaskedState, "_read_group", keep_mask)
    with pytest.raises(AssertionError):
        check_drafts(new_head(tmp_path))


@pytest.mark.parametrize(("accepted", "depth"), [(4, 2), (0, 3), (2, 9), (3, 0)])
def test_a_draft_is_one_forward(
    accepted: int,
    depth: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of as many rows as `unread` says, and no forward for further levels."""
    head = new_head(tmp_path).bind(frozen_head(FP64))
    rows: list[int] = []
    read = Peagle.read

    def count_rows(
        head: Any,
        tokens: Tensor,
        *given: Any,
    ) -> Tensor:
        rows.append(tokens.shape[1])
        return read(head, tokens, *given)

    monkeypatch.setattr(Peagle, "read", count_rows)
    budget = Budget.fixed(chain_paths(depth))
    # the accepted tokens and the root
    tokens = torch.ones(accepted + 1, dtype=torch.long)
    features = torch.zeros(accepted + 1, 3, SHAPE.hidden_size, dtype=FP64)
    head.begin().propose(Committed(tokens, features, 1), budget)
    assert rows == [head.unread(accepted, depth)]
    assert head.forwards(budget) == ()


def test_the_mask_token_is_resolved(tmp_path: Path) -> None:
    """It is the last of the vocabulary by default, and must be one of it."""
    assert new_head(tmp_path).settings.mask_token == V - 1
    with pytest.raises(ValueError, match="mask_token is 97"):
        new_head(tmp_path, mask_token=97)
