"""Each step of training is a level of drafting."""

# K steps, S slots, V vocabulary, D of the draft

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle import Budget
from eagle.core.drafter import Committed, TargetHead
from eagle.core.examples import Batch, Example, collate
from eagle.core.tree import DraftTree
from eagle.drafters.parts import sequence_blocks
from eagle.drafters.parts.spans import Spans
from eagle.drafters.recurrent import head_state
from eagle.drafters.recurrent.unroll import Unrolled, UnrolledDrafter
from tests.unrolled_heads import TAPS, everywhere, frozen_head, new_head


def trained_logits(
    head: Any,
    batch: Batch,
    target_head: TargetHead,
    patch: pytest.MonkeyPatch,
) -> Tensor:
    """Return [K, S, V or D], the logits at each step of all supervised slots while the loss is computed."""
    # the loss keeps no logits, so that its states are recorded on the way
    recorded: list[Unrolled] = []
    unroll = UnrolledDrafter.unroll

    def record(*args: Any, **options: Any) -> Unrolled:
        recorded.append(unroll(*args, **options))
        return recorded[-1]

    with patch.context() as inner:
        inner.setattr(UnrolledDrafter, "unroll", record)
        head(batch, target_head)
    with torch.no_grad():
        return torch.stack([head.logits(state, target_head) for state in recorded[0].states])


def drafted_logits(
    head: Any,
    text: Example,
    pieces: list[int],
    patch: pytest.MonkeyPatch,
) -> dict[int, Tensor]:
    """Return, by the number of committed tokens, the logits [K, V or D] at each level of a chain of the text's own."""
    recorded: dict[int, Tensor] = {}
    tokens = text.tokens
    features = text.features[:, [TAPS.index(tap) for tap in head.taps]]  # type: ignore[index]

    # in place of a tree, which would choose tokens by itself
    def follow_text(
        seeds: Any,
        logits: Tensor,
        read_level: Any,
        *_: Any,
    ) -> list[DraftTree]:
        levels = [logits[0]]
        # each level has one node, the child of the last
        parent = torch.zeros(1, 1, dtype=torch.long)
        for depth in range(1, min(head.settings.steps, len(tokens) - 1 - committed)):
            tree_mask = torch.ones(1, 1, depth, dtype=torch.bool)
            token = tokens[committed + depth][None, None]
            level = read_level(depth, [0], token, parent, tree_mask=tree_mask)
            levels.append(level[0, 0])
        recorded[committed] = torch.stack(levels)
        return [DraftTree.chain([seeds[0].root])]

    with patch.context() as inner:
        inner.setattr(head_state, "grow_rows", follow_text)
        draft = head.begin()
        for start, committed in pairwise(pieces):
            root = int(tokens[committed])
            update = Committed(
                tokens[start:committed],
                features[start:committed],
                root,
            )
            draft.propose(update, Budget(8, head.settings.steps, 3))
    return recorded


def drafting_is_training(head: Any, patch: pytest.MonkeyPatch) -> None:
    """Assert that step s of slot i says what level s of a chain says when i + 1 tokens are committed."""
    # the text that is drafted for stands behind another in training
    texts = everywhere([9, 24])
    target_head = frozen_head(torch.float32)
    # the seven slots of the first text come before those of the second
    trained = trained_logits(head, collate(texts, TAPS), target_head, patch)[:, 7:]
    drafted = drafted_logits(
        head.bind(target_head),
        texts[1],
        [0, 5, 6, 11, 15, 22],
        patch,
    )
    for committed, levels in drafted.items():
        expected = trained[: len(levels), committed - 1]
        torch.testing.assert_close(levels, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        "eagle3 draft vocabulary",
        "eagle3 normed residual",
        "eagle3.1",
        "hass",
    ],
)
def test_each_step_of_training_is_a_level_of_drafting(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """The text comes in pieces, and something is drafted after each of them."""
    drafting_is_training(new_head(tmp_path, name), monkeypatch)


attend = sequence_blocks.attend


def attend_to_neighbours(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Spans,
    own: Any = (),
) -> Tensor:
    """Attend to the keys that the neighbouring anchor has drafted."""
    rolled = [(keys.roll(1, 1), values.roll(1, 1)) for keys, values in own]
    return attend(query, key, value, spans, step_pairs=rolled)


def test_a_fault_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If training sees what its neighbour has drafted, drafting says something else."""
    monkeypatch.setattr(sequence_blocks, "attend", attend_to_neighbours)
    with pytest.raises(AssertionError, match="not close"):
        drafting_is_training(new_head(tmp_path, "hass"), monkeypatch)
