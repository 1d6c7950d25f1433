"""P-EAGLE: its loss and its drafts are those of single anchors with a dense mask, and no mask reads what it guesses."""

# T tokens of a text, S supervised slots, V vocabulary

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
SPANS = {13: [(3, 5), (6, 7), (8, 13)], 9: [(2, 4), (8, 9)], 8: [(0, 1)], 7: [(3, 7)]}
FEW = {8: [(2, 8)], 6: [(2, 4), (5, 6)]}
VARIANTS: dict[str, dict[str, Any]] = {
    "one block": {"blocks": 1},
    "two blocks": {"blocks": 2, "draft_vocab": True, "keep": 1.0, "depths": 4},
    "all rows alike": {"blocks": 1, "keep": 1.0, "depths": 4, "divisor": "reached"},
    "each level by its own": {"blocks": 1, "keep": 1.0, "depths": 4, "divisor": "levels"},
    "by slots": {"blocks": 1, "keep": 1.0, "depths": 4, "divisor": "slots"},
    "four blocks": {
        "norm_before_residual": True,
        "loss": "acceptance",
        "fc_norm": True,
        "mask_token": 5,
    },
}


def new_head(folder: Path, name: str = "two blocks", **changes: Any) -> Any:
    """A head in fp64, whose rows look at one another sharply."""
    values = {**VARIANTS[name], **changes}
    if values.get("draft_vocab"):
        values["draft_vocab"] = str(draft_vocab(folder / "draft_vocab.safetensors", V, 70))
    torch.manual_seed(2)
    head = moved(
        Peagle.for_target(Peagle.Settings(**values), SHAPE, frozen_head(torch.float32))
    ).double()
    with torch.no_grad():
        for layer in head.layers:
            for weight in layer.self_attn.parameters():
                weight *= 3
    return head.train()


def batch_of(spans: dict[int, list[tuple[int, int]]], seed: int = 0) -> tuple[list[Example], Batch]:
    """Texts as a batch has them, each cut behind its last supervised token, and the batch."""
    texts = texts_of(spans, torch.float64)
    batch = collate(texts, TAPS, range(seed, seed + len(texts)))
    parts = zip(
        *(part.split(batch.lengths) for part in (batch.tokens, batch.loss_mask, batch.features)),
        strict=True,
    )
    return [Example(*part) for part in parts], batch


def difference(head: Any, spans: dict[int, list[tuple[int, int]]], seed: int = 0) -> float:
    """Of training's loss and gradients from those of single anchors."""
    (texts, batch), frozen, settings = (
        batch_of(spans, seed),
        frozen_head(torch.float64),
        head.settings,
    )
    weights = {name: tensor.detach().clone() for name, tensor in head.state_dict().items()}
    learned = {
        name: tensor.requires_grad_()
        for name, tensor in weights.items()
        if tensor.is_floating_point()
    }
    counts = draw_masks(batch, settings.depths - 1, settings.keep, settings.keep_least)
    loss = naive_masks.loss(weights, settings, head.shape, texts, frozen, counts)
    gradients = torch.autograd.grad(loss, list(learned.values()))
    expected = {"total": loss.detach(), **dict(zip(learned, gradients, strict=True))}
    return apart(head, computed(head, batch, frozen), expected)


@pytest.mark.parametrize("name", VARIANTS)
def test_loss_and_gradients_are_those_of_single_anchors(name: str, tmp_path: Path) -> None:
    """For answers of one token and of many, and a text without any, to rounding of the weights in fp32."""
    assert difference(new_head(tmp_path, name), SPANS, seed=3) < 1e-6


def unmasked(places: Any, end: int, like: Tensor) -> Tensor:
    """No future is hidden from scattered rows."""
    return like.new_zeros(len(places), end - places[0])


def test_another_loss_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted faults: masks that see later ones or a text's future, stand elsewhere, or read nothing; other weights."""
    head, attend, read = new_head(tmp_path), peagle.attend_block, Peagle._read_blocks
    assert difference(head, FEW) < 1e-6

    def see_all(*given: Any, causal: bool) -> Tensor:
        return attend(*given, causal=False)

    def elsewhere(head: Any, frozen: Any, masks: Any, tables: Any, context: Any) -> Tensor:
        return read(head, frozen, masks, tuple(table.roll(1, 0) for table in tables), context)

    def every_row_alike(batch: Batch, masks: MaskRows) -> Tensor:
        rows = batch.slots + len(masks.depths)
        return torch.full((rows,), batch.slots / rows)

    for home, name, fault in (
        (peagle, "attend_block", see_all),
        (spans, "_hide_later", unmasked),
        (Peagle, "_read_blocks", elsewhere),
        (Peagle, "mask_state", lambda head: head.fuse_taps(0 * head.mask_hidden.view(1, 3, -1))),
        (peagle, "weigh_texts", every_row_alike),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(home, name, fault)
            assert difference(head, FEW) > 1e-4, name


@pytest.mark.parametrize("fault", [False, True])
def test_the_fused_kernel_computes_the_same(fault: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention as accelerators have it, of masks of several numbers; what a text begins with is seen to be missing."""
    _, batch = batch_of({40: [(2, 9), (12, 40)], 30: [(7, 30)], 5: [(2, 3)]}, seed=1)
    masks = MaskRows.of(draw_masks(batch, 3, 0.7, 0.2), torch.device("cpu"))
    torch.manual_seed(0)
    query, *own = (torch.randn(heads, len(masks.depths), 16) for heads in (4, 2, 2))
    context = torch.randn(2, masks.spans.count, 16), torch.randn(2, masks.spans.count, 16)
    if fault:
        monkeypatch.setattr(spans.Spans, "begins", masks.spans.rows)
    fused = masks.attend(query, context, (own[0], own[1]), flex_attention)
    apart = (fused - masks.attend(query, context, (own[0], own[1]))).abs().max()
    assert (apart > 1e-2) if fault else (apart < 1e-5)


def check_sight(head: Any) -> None:
    """What stands at a slot or is read there changes the levels behind it and later slots of its text, and no other."""
    (_, batch), frozen, length = batch_of({9: [(2, 9)], 7: [(2, 7)]}), frozen_head(torch.float64), 9
    slots = [*range(length - 2), *range(length, 14)]  # that guess supervised tokens
    with torch.no_grad():
        before = head.level_states(batch, frozen, 3)
        for slot in slots:
            tokens, features = batch.tokens.clone(), batch.features.clone()
            tokens[slot + 1] = (tokens[slot + 1] + 1) % V
            features[slot] += 1
            after = head.level_states(replace(batch, tokens=tokens, features=features), frozen, 3)
            for old, new in zip(before, after, strict=True):
                expected = [
                    slot <= other and (slot < length) == (other < length) for other in slots
                ]
                assert (old != new).any(-1).tolist() == expected, slot


def test_masks_see_their_text_up_to_their_slot(tmp_path: Path) -> None:
    """Nothing of what they guess, of what follows, or of other texts."""
    check_sight(new_head(tmp_path))


def test_another_sight_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted faults: the future, and the text before."""
    at = spans.Spans.at

    def from_the_first_text(*given: Any) -> spans.Spans:
        found = at(*given)
        return replace(found, runs=[(0, first, end) for _, first, end in found.runs])

    monkeypatch.setattr(spans, "_hide_later", unmasked)
    with pytest.raises(AssertionError):
        check_sight(new_head(tmp_path))
    monkeypatch.undo()
    monkeypatch.setattr(spans.Spans, "at", from_the_first_text)
    with pytest.raises(AssertionError):
        check_sight(new_head(tmp_path))


def test_validation_reads_what_single_anchors_read(tmp_path: Path) -> None:
    """Of every level, at every supervised slot, whatever the text holds behind it; no more levels than are trained."""
    head, frozen = new_head(tmp_path), frozen_head(torch.float64)
    texts, batch = batch_of(FEW)
    weights = head.state_dict()
    with torch.no_grad():
        levels = [logits(state) for state, logits in head.draft_levels(batch, frozen, 9)]
        expected = [
            naive_masks.anchor_logits(
                weights,
                head.settings,
                head.shape,
                (text.tokens, text.features[:, :-1]),
                frozen,
                anchor,
                3,
            )
            for text in texts
            for anchor in text.loss_mask[2:].nonzero()[:, 0].tolist()
        ]
    torch.testing.assert_close(
        torch.stack(levels, dim=1), torch.stack(expected), rtol=0, atol=1e-10
    )


# -- which masks are trained ------------------------------------------------------------------------------------------


def test_masks_are_drawn_as_defined() -> None:
    """At depth d of n slots (n - d) * max(keep^d, least), of those that were drawn before and whose answer goes on."""
    _, batch = batch_of({90: [(10, 90)], 70: [(2, 30), (33, 70)]}, seed=5)
    counts = draw_masks(batch, 7, 0.7, 0.2)
    for supervised, found in zip(peagle.supervised_slots(batch), counts, strict=True):
        slots = int(supervised.sum())
        assert not found[~supervised].any()
        for depth in range(1, 8):
            before = (found >= depth - 1) & supervised
            inside = [
                bool(supervised[slot : slot + depth + 1].sum() == depth + 1)
                for slot in range(len(found))
            ]
            candidates = before & torch.tensor(inside)
            drawn = found >= depth
            assert not drawn[~candidates].any()
            assert int(drawn.sum()) == min(
                int(candidates.sum()), int((slots - depth) * max(0.7**depth, 0.2))
            )
    assert [part.tolist() for part in counts] == [
        part.tolist() for part in draw_masks(batch, 7, 0.7, 0.2)
    ]
    other = draw_masks(replace(batch, seeds=(7, 8)), 7, 0.7, 0.2)
    assert not counts[0].equal(other[0])


def test_every_slot_is_drawn_alike() -> None:
    """Over seeds, of an answer that is long enough for all; one that is never drawn, or always, would be seen."""
    _, batch = batch_of({14: [(2, 14)]})
    counts = torch.zeros(12)
    for seed in range(600):
        counts += draw_masks(replace(batch, seeds=(seed,)), 1, 0.5, 0.0)[0]
    assert counts[-1] == 0  # nothing follows it
    assert counts.sum() == 600 * 5  # (12 - 1) / 2
    assert scipy.stats.chisquare(counts[:-1].numpy()).pvalue > 0.01


# -- drafting ---------------------------------------------------------------------------------------------------------

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


def check_drafts(head: Any) -> int:
    """Every node of the drafts of several cycles is the child of its rank by single anchors; how many there were."""
    frozen, nodes = frozen_head(torch.float64), 0
    texts = texts_of({31: [(2, 31)]}, torch.float64)[0]
    tokens, taps, text = texts.tokens, texts.features[:, :-1], head.bind(frozen).begin()
    weights, ids = head.state_dict(), naive_masks.sayable_ids(head.state_dict(), V)
    for start, end in pairwise([0, 1, 2, 9, 10, 13, 14, 29]):
        tree = text.propose(
            Committed(tokens[start:end], taps[start:end], int(tokens[end])), Budget.fixed(TREE)
        )
        with torch.no_grad():
            logits = naive_masks.anchor_logits(
                weights, head.settings, head.shape, (tokens, taps), frozen, end - 1, 3
            )
        ranked = ids[logits.argsort(descending=True)]
        wanted = [
            [int(ranked[level, rank]) for level, rank in enumerate(path)]
            for path in TREE
            if len(path) <= 4
        ]
        paths: list[list[int]] = []
        for node, parent in enumerate(tree.parents.tolist()):
            paths.append([] if parent < 0 else [*paths[parent], int(tree.tokens[node])])
        assert sorted(paths[1:]) == sorted(wanted)
        nodes += len(wanted)
    return nodes


def test_drafts_with_a_cache_are_those_of_single_anchors(tmp_path: Path) -> None:
    """Over cycles of one token and of many, as deep as the head was trained."""
    assert check_drafts(new_head(tmp_path)) == 7 * 9


def test_other_drafts_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted faults: masks that are kept, levels in another order, and masks of another token."""
    head, read = new_head(tmp_path), MaskedState._read_group

    def keep_masks(state: Any, updates: Any) -> Tensor:
        found = read(state, updates)
        state.cache.lengths[0] += 1
        return found

    def other_token(state: Any, updates: Any) -> Tensor:
        state.masks = state.masks[0] * 0, state.masks[1]
        return read(state, updates)

    for fault in (keep_masks, other_token, lambda state, updates: read(state, updates).flip(1)):
        with monkeypatch.context() as patch, pytest.raises(AssertionError):
            patch.setattr(MaskedState, "_read_group", fault)
            check_drafts(head)


def test_a_draft_is_one_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of as many rows as `unread` says, and none where nothing is to be drafted but the root's own."""
    head, rows, read = new_head(tmp_path).bind(frozen_head(torch.float64)), list[int](), Peagle.read

    def counted(head: Any, tokens: Tensor, *given: Any) -> Tensor:
        rows.append(tokens.shape[1])
        return read(head, tokens, *given)

    monkeypatch.setattr(Peagle, "read", counted)
    text, features = head.begin(), torch.zeros(5, 3, SHAPE.hidden_size, dtype=torch.float64)
    for accepted, depth in ((4, 2), (0, 3), (2, 9), (3, 0)):
        budget = Budget.fixed(chain_paths(depth))
        text.propose(
            Committed(torch.ones(accepted + 1, dtype=torch.long), features[: accepted + 1], 1),
            budget,
        )
        assert rows.pop() == head.unread(accepted, depth) and not rows
        assert head.forwards(budget) == ()


def test_the_mask_token_is_written_out(tmp_path: Path) -> None:
    """The last of the vocabulary, where none is named; one outside of it is refused."""
    assert new_head(tmp_path).settings.mask_token == V - 1
    with pytest.raises(ValueError, match=r"mask_token is 97, expected 0 to 96"):
        new_head(tmp_path, mask_token=97)
