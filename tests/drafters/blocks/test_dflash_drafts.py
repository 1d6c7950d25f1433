"""DFlash drafts what it was trained to: states with a cache, its trees, and what validation expects of them."""

from __future__ import annotations

import heapq
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from eagle import Budget
from eagle.core.drafter import Committed, TargetHead
from eagle.core.examples import Batch, collate
from eagle.core.tree import chain_paths
from eagle.drafters import DRAFTERS, settings_of
from eagle.drafters.blocks import injected_state
from eagle.drafters.blocks.injected_head import InjectedHead
from eagle.drafters.blocks.injected_state import InjectedState
from tests.drafters.blocks.test_dflash import FP64, JETSPEC, VARIANTS, new_head
from tests.drafters.parts.test_judge import counted_by_drafting
from tests.naive_blocks import level_states
from tests.unrolled_heads import SHAPE, TAPS, frozen_head, texts_of


def check_states(head: Any) -> int:
    """Of texts written side by side in ragged updates: what a draft reads is what training makes there."""
    batch, frozen = (
        collate(texts_of({31: [(2, 31)], 14: [(2, 14)], 23: [(2, 23)]}, FP64), TAPS),
        frozen_head(FP64),
    )
    state, compared = head.bind(frozen).open(), 0
    texts = dict(
        enumerate(
            zip(batch.tokens.split(batch.lengths), batch.features.split(batch.lengths), strict=True)
        )
    )
    with torch.no_grad():
        trained = torch.stack(
            [states for states, _ in head.draft_levels(batch, frozen, head.levels)], dim=1
        )
    rows = dict(enumerate(trained.split([length - 2 for length in batch.lengths])))
    for row in texts:
        state.admit(row)
    for cycle in [
        {0: (0, 1)},
        {2: (0, 9), 0: (1, 4)},
        {1: (0, 2)},
        {0: (4, 5), 1: (2, 9), 2: (9, 20)},
        {1: (9, 12)},
    ]:
        updates = {
            row: Committed(tokens[start:end], features[start:end, :-1], int(tokens[end]))
            for row, (start, end) in cycle.items()
            for tokens, features in [texts[row]]
        }
        state.propose(updates, dict.fromkeys(updates, Budget.fixed(chain_paths(2))))
        roots = torch.tensor([update.root for update in updates.values()])
        with torch.inference_mode():
            states = state.read_blocks(state.take_rows(list(updates)), roots)
        for (row, (_, end)), drafted in zip(cycle.items(), states, strict=True):
            torch.testing.assert_close(drafted, rows[row][end - 1], rtol=0, atol=1e-10)
            compared += 1
    return compared


@pytest.mark.parametrize("name", ["dflash", "jetspec", "from the anchor", "no norms by head"])
def test_a_draft_reads_what_training_makes(name: str) -> None:
    """Every level, for texts of other lengths beside it."""
    assert check_states(new_head(**VARIANTS[name])) == 8


def shift_block(starts: list[int], counts: list[int], device: torch.device) -> Tensor:
    """Blocks that stand one place further."""
    return positions(
        [start + (len(set(counts)) == 1 and counts[0] == 4) for start in starts], counts, device
    )


def show_all(committed: Tensor, seen: Tensor, groups: int) -> Tensor:
    """A mask that shows a short row what lies behind its text."""
    return mask(torch.zeros_like(committed), seen, groups)


def inject_twice(self: Any, slots: Any, features: Any) -> None:
    """Keys of a token that stand in the place of those of the one before."""
    inject(self, slots, [part.roll(1, 0) for part in features])


positions, mask, inject = (
    injected_state.slot_positions,
    injected_state.level_mask,
    InjectedState.inject,
)


@pytest.mark.parametrize(
    ("home", "name", "fault"),
    [
        (injected_state, "slot_positions", shift_block),
        (injected_state, "level_mask", show_all),
        (InjectedState, "inject", inject_twice),
    ],
)
def test_another_draft_is_seen(
    home: Any, name: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted faults: blocks that stand elsewhere, columns behind a text, and keys in other places."""
    monkeypatch.setattr(home, name, fault)
    with pytest.raises(AssertionError, match="not close"):
        check_states(new_head())


def test_validation_counts_what_drafting_at_every_slot_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Texts that mostly say what the target would, and few words to choose from; trees deeper than a block too.

    Planted fault: blocks that are their neighbours'.
    """
    torch.manual_seed(1)
    parts = nn.Embedding(3, 48).double(), nn.Linear(48, 3, bias=False).double()
    frozen = TargetHead(*(part.requires_grad_(False) for part in parts))
    head = new_head(LlamaConfig(**{**SHAPE.to_dict(), "vocab_size": 3}), taps=(-1,), slots=5).bind(
        frozen
    )
    mask = torch.zeros(38, dtype=torch.bool)
    mask[2:15] = mask[17:26] = mask[28:38] = True
    features = torch.randn(38, 1, 48, dtype=FP64)
    tokens = frozen.logits(features[:, 0]).argmax(-1).roll(1)
    tokens[::11] = 0
    batch = Batch(tokens, mask, features, (26, 12), (-1,), (0, 1))
    trees = {
        "chain": chain_paths(5),
        "tree": tuple(path for n in range(1, 5) for path in product((0, 1), repeat=n)),
    }
    target: Any = SimpleNamespace(head=frozen)
    expected = {
        f"{name}/{kind}": counts
        for name, paths in trees.items()
        for kind, counts in counted_by_drafting(head, target, batch, paths).items()
    }
    assert min(expected["tree/accepted"]) > 0 and expected["chain/accepted"][4] == 0
    sums = head.validate(batch, frozen, trees)
    assert {name: value.tolist() for name, value in sums.items() if "/" in name} == expected
    read = InjectedHead.read_blocks
    monkeypatch.setattr(InjectedHead, "read_blocks", lambda *given: read(*given).roll(1, 0))
    sums = head.validate(batch, frozen, trees)
    assert {name: value.tolist() for name, value in sums.items() if "/" in name} != expected


def heap_paths(log_probs: Tensor, nodes: int, width: int) -> list[tuple[float, tuple[int, ...]]]:
    """JetSpec's tree: the likeliest node that is left, with its next sibling and its first child, until it is full."""
    values, tokens = log_probs.topk(width)
    heap, kept = [(-values[0, 0].item(), (0,))], []
    while heap and len(kept) < nodes:
        cost, ranks = heapq.heappop(heap)
        kept.append((-cost, tuple(int(tokens[level, rank]) for level, rank in enumerate(ranks))))
        level, rank = len(ranks) - 1, ranks[-1]
        if rank + 1 < width:
            heapq.heappush(
                heap,
                (
                    cost + (values[level, rank] - values[level, rank + 1]).item(),
                    (*ranks[:-1], rank + 1),
                ),
            )
        if len(ranks) < len(values):
            heapq.heappush(heap, (cost - values[level + 1, 0].item(), (*ranks, 0)))
    return kept


@pytest.mark.parametrize("nodes", [1, 12, 60])
def test_trees_are_jetspecs_heap(nodes: int) -> None:
    """At sharpness 1 and T = 0, where a level may read as many tokens as the tree has nodes."""
    head, frozen = new_head(slots=7, **JETSPEC).bind(frozen_head(FP64)), frozen_head(FP64)
    (text,) = texts_of({30: []}, FP64)
    assert text.features is not None
    tree = head.begin().propose(
        Committed(text.tokens[:9], text.features[:9, :-1], 7),
        Budget(nodes, 6, nodes, sharpness=1.0),
    )
    states = level_states(head, head.state_dict(), text.features[:9, :-1], torch.tensor(7), frozen)
    expected = heap_paths(frozen.logits(states).log_softmax(-1), nodes, nodes)
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens.tolist()[1:], tree.parents.tolist()[1:], strict=True):
        paths.append((*paths[parent], token))
    assert set(paths[1:]) == {path for _, path in expected} and len(paths) == nodes + 1
    assert tree.likelihoods is not None
    likelihoods = sorted(tree.likelihoods[1:].tolist(), reverse=True)
    assert likelihoods == pytest.approx([value for value, _ in expected], abs=1e-5)


def test_no_draft_copies_the_lm_head() -> None:
    """Products of some slots of a block are of two dimensions: those of three may copy the matrix on a CPU."""
    head, frozen, shapes = new_head().bind(frozen_head(FP64)), frozen_head(FP64), list[torch.Size]()
    frozen.output.register_forward_pre_hook(lambda _, inputs: shapes.append(inputs[0].shape))
    states = torch.randn(1, 4, 48, generator=torch.Generator().manual_seed(0), dtype=FP64)[:, 1:]
    logits = head.logits(states, frozen)
    assert shapes == [(3, 48)]
    torch.testing.assert_close(logits, states @ frozen.weight.T)


def test_a_draft_is_priced_by_its_rows() -> None:
    """One forward, over what was accepted and a block; none for levels."""
    head = new_head(slots=7).bind(frozen_head(FP64))
    assert head.forwards(Budget(10, 8, 3)) == () and head.unread(3, 6) == 11
    levels = head.probe(12, 11, 1)()
    assert levels.logits.shape == (1, 6, SHAPE.vocab_size)


@pytest.mark.parametrize("slots", [1 + 6, 2])
def test_a_level_that_reads_tokens_is_priced_without_blocks(
    slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bias for each of its nodes; the first forward has the block."""
    torch.manual_seed(2)
    settings: Any = settings_of(
        {"kind": "dspark", "slots": slots, "taps": TAPS[:-1], "blocks": 1}, "test"
    )
    head: Any = DRAFTERS["dspark"].for_target(settings, SHAPE, frozen_head(torch.float32))  # type: ignore[attr-defined]
    head.bind(frozen_head(torch.float32))
    assert head.forwards(Budget.fixed(chain_paths(4))) == (1,) * min(3, slots - 1)
    blocks: list[int] = []
    read = InjectedState.read_blocks
    monkeypatch.setattr(
        InjectedState, "read_blocks", lambda *given: (blocks.append(1), read(*given))[1]
    )
    run = head.probe(12, 5, 5)
    assert [run().shape for _ in range(2)] == [(1, 5, SHAPE.vocab_size)] * 2 and not blocks
    head.probe(12, slots + 3, 1)()
    assert blocks
