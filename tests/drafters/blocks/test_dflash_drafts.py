"""DFlash drafts what it was trained to: states with a cache, and the likeliest trees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from eagle import Budget
from eagle.core.drafter import Committed
from eagle.core.examples import collate
from eagle.core.tree import chain_paths
from eagle.drafters import DRAFTERS, settings_of
from eagle.drafters.blocks import injected_state
from eagle.drafters.blocks.injected_state import InjectedState
from tests.drafters.blocks.test_dflash import FP64, JETSPEC, VARIANTS, new_head
from tests.enumerate_law import texts_of as paths_of
from tests.naive_blocks import level_states
from tests.unrolled_heads import SHAPE, TAPS, frozen_head, texts_of

# cycles of three sequences in a batch: of each row, from which token to which it is committed
CYCLES: list[dict[int, tuple[int, int]]] = [
    {0: (0, 1)},
    {2: (0, 9), 0: (1, 4)},
    {1: (0, 2)},
    {
        0: (4, 5),
        1: (2, 9),
        2: (9, 20),
    },
    {1: (9, 12)},
]


def check_states(head: Any) -> None:
    """Compare the states that a draft reads with those that training makes at the same slots."""
    texts = texts_of(
        {
            31: [(2, 31)],
            14: [(2, 14)],
            23: [(2, 23)],
        },
        FP64,
    )
    batch = collate(texts, TAPS)
    target_head = frozen_head(FP64)
    with torch.no_grad():
        levels = head.draft_levels(batch, target_head, head.levels)
    by_slot = torch.stack([states for states, _ in levels], dim=1)
    trained = by_slot.split([length - 2 for length in batch.lengths])

    # ragged updates, so that rows of a forward end at different positions
    state = head.bind(target_head).open()
    for row in range(len(texts)):
        state.admit(row)
    for cycle in CYCLES:
        updates = {}
        for row, (start, end) in cycle.items():
            features = texts[row].features
            assert features is not None
            tokens = texts[row].tokens
            updates[row] = Committed(
                tokens[start:end],
                features[start:end, :-1],
                int(tokens[end]),
            )
        state.propose(updates, dict.fromkeys(updates, Budget.fixed(chain_paths(2))))
        roots = torch.tensor([update.root for update in updates.values()])
        with torch.inference_mode():
            drafted = state.read_blocks(state.take_rows(list(updates)), roots)
        for (row, (_, end)), states in zip(cycle.items(), drafted, strict=True):
            torch.testing.assert_close(
                states,
                trained[row][end - 1],
                rtol=0,
                atol=1e-10,
            )


@pytest.mark.parametrize(
    "name",
    [
        "dflash",
        "jetspec",
        "from the anchor",
        "no norms by head",
        "window",
        "window, whole blocks",
        "window up to the root",
        "window, sinks",
    ],
)
def test_a_draft_reads_what_training_makes(name: str) -> None:
    """Every level, whatever the lengths of the other sequences."""
    check_states(new_head(**VARIANTS[name]))


def test_columns_after_a_short_sequence_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison fails if a short row sees what its cache holds after its end."""
    level_mask = injected_state.level_mask

    def hide_nothing(
        committed: Tensor,
        tree_mask: Tensor,
        groups: int,
    ) -> Tensor:
        return level_mask(torch.zeros_like(committed), tree_mask, groups)

    monkeypatch.setattr(
        injected_state,
        "level_mask",
        hide_nothing,
    )
    with pytest.raises(AssertionError, match="not close"):
        check_states(new_head())


def likeliest_paths(log_probs: Tensor, nodes: int) -> list[tuple[float, tuple[int, ...]]]:
    """Return the best nodes of all trees over levels [K, V]: their log-likelihoods and tokens."""
    found = []
    level_paths: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for values, tokens in zip(*log_probs.topk(nodes), strict=True):
        grown = []
        for score, path in level_paths:
            for value, token in zip(values.tolist(), tokens.tolist(), strict=True):
                grown.append((score + value, (*path, token)))
        # a child is no likelier than its parent, so that worse paths have no good children
        level_paths = sorted(grown, reverse=True)[:nodes]
        found += level_paths
    return sorted(found, reverse=True)[:nodes]


@pytest.mark.parametrize("nodes", [1, 60])
@pytest.mark.parametrize("settings", [JETSPEC, {"window": {"recent": 7}, "causal": "window"}])
def test_trees_hold_the_likeliest_paths(nodes: int, settings: dict[str, Any]) -> None:
    """As JetSpec's heap does, at sharpness 1 and T = 0."""
    target_head = frozen_head(FP64)
    head = new_head(slots=7, **settings).bind(target_head)
    (text,) = texts_of({30: []}, FP64)
    assert text.features is not None
    features = text.features[:9, :-1]
    update = Committed(text.tokens[:9], features, 7)
    tree = head.begin().propose(update, Budget(nodes, 6, nodes, sharpness=1.0))
    # the levels from their formulas, for this one block
    states = level_states(head, head.state_dict(), features, torch.tensor(7), target_head)
    expected = likeliest_paths(target_head.logits(states).log_softmax(-1), nodes)
    assert set(paths_of(tree)[1:]) == {path for _, path in expected}
    assert tree.likelihoods is not None
    likelihoods = sorted(tree.likelihoods[1:].tolist(), reverse=True)
    assert likelihoods == pytest.approx([score for score, _ in expected], abs=1e-5)


def test_no_draft_copies_the_lm_head() -> None:
    """States reach the LM head as rows: a product of three dimensions may copy its matrix."""
    head = new_head().bind(frozen_head(FP64))
    target_head = frozen_head(FP64)
    shapes: list[torch.Size] = []
    target_head.output.register_forward_pre_hook(lambda _, inputs: shapes.append(inputs[0].shape))
    # not contiguous, as the slots of a block without its root
    states = torch.randn(1, 4, 48, dtype=FP64)[:, 1:]
    logits = head.logits(states, target_head)
    assert shapes == [(3, 48)]
    torch.testing.assert_close(logits, states @ target_head.weight.T)


def test_a_draft_is_priced_by_its_rows() -> None:
    """One forward over the accepted tokens and a block; no forward for a level."""
    head = new_head(slots=7).bind(frozen_head(FP64))
    assert head.forwards(Budget(10, 8, 3)) == ()
    # three accepted tokens, the root and seven slots
    assert head.unread(3, 6) == 11
    levels = head.probe(12, 11, 1)()
    assert levels.logits.shape == (1, 6, SHAPE.vocab_size)


@pytest.mark.parametrize("slots", [7, 2])
def test_a_level_that_reads_tokens_is_priced_without_blocks(
    slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DSpark computes a bias for each node of a level; its first forward alone reads a block."""
    torch.manual_seed(2)
    settings = {
        "kind": "dspark",
        "slots": slots,
        "taps": TAPS[:-1],
        "blocks": 1,
    }
    checked: Any = settings_of(settings, "test")
    method: Any = DRAFTERS["dspark"]
    target_head = frozen_head(torch.float32)
    head = method.for_target(checked, SHAPE, target_head).bind(target_head)
    assert head.forwards(Budget.fixed(chain_paths(4))) == (1,) * min(3, slots - 1)
    # what is timed must not hold what a level does not compute
    reads: list[int] = []
    read_blocks = InjectedState.read_blocks

    def count_reads(*given: Any) -> Tensor:
        reads.append(1)
        return read_blocks(*given)

    monkeypatch.setattr(
        InjectedState,
        "read_blocks",
        count_reads,
    )
    level = head.probe(12, 5, 5)
    assert level().shape == (1, 5, SHAPE.vocab_size)
    assert not reads
    first = head.probe(12, slots + 3, 1)
    first()
    assert reads
