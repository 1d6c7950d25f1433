"""Hydra and Hydra++: losses, states and trees against loops over slots, nodes and sequences."""

# T tokens of a sequence, H hidden, V vocabulary

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle import Budget
from eagle.core.drafter import Committed
from eagle.core.examples import collate
from eagle.core.tree import PUBLISHED_TREE
from eagle.drafters.levels.hydra import Hydra
from eagle.drafters.parts import sequence_state, spans
from eagle.drafters.parts.text_dropout import TextDropout
from tests import naive_hydra, single_slots
from tests.drafters.test_many_texts import BUDGETS, SAMPLINGS, play
from tests.enumerate_law import texts_of as paths_of
from tests.naive_hydra import level_hidden, level_logits, prefix_states
from tests.unrolled_heads import (
    LONG,
    ONE,
    SHAPE,
    SPANS,
    TAPS,
    Weights,
    apart,
    computed,
    frozen_head,
    gradients_of,
    texts_of,
)

FP64 = torch.float64
VARIANTS: dict[str, dict[str, Any]] = {
    "hydra": {"levels": 3, "loss": "tokens"},
    "deep": {
        "levels": 3,
        "layers": 3,
        "regression": 0.4,
    },
    "hydra++": {
        "levels": 3,
        "layers": 2,
        "prefix": True,
    },
    "hydra++ tokens": {
        "levels": 4,
        "layers": 2,
        "prefix": True,
        "loss": "tokens",
        "regression": 2.0,
    },
}


def new_head(name: str, **changes: Any) -> Any:
    """Return a head of a variant in fp64, whose weights differ from how they start."""
    return single_slots.new_head(**{"kind": "hydra", **VARIANTS[name], **changes})


# -- the loss -----------------------------------------------------------------------------------


def difference(name: str, answers: dict[int, list[tuple[int, int]]]) -> float:
    """Return how far training's loss and gradients are from the loop's."""
    head = new_head(name)
    target_head = frozen_head(FP64)
    texts = texts_of(answers, FP64)

    def loop(weights: Weights) -> Tensor:
        return naive_hydra.hydra_loss(
            weights,
            head.settings,
            head.shape,
            texts,
            target_head,
        )

    return apart(head, computed(head, collate(texts, TAPS), target_head), gradients_of(head, loop))


@pytest.mark.parametrize("name", VARIANTS)
def test_loss_and_gradients_are_those_of_the_loop(name: str) -> None:
    """Sequences with several answers, an answer of one token, and none."""
    assert difference(name, SPANS) < 1e-6


@pytest.mark.slow
def test_a_long_sequence_is_read_in_pieces() -> None:
    """It has more rows than attention reads at once."""
    assert difference("hydra++", LONG) < 1e-6


def test_a_prefix_without_a_mask_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison fails if no later row is hidden."""

    def hide_nothing(count: int, stride: int, dtype: torch.dtype, device: Any) -> Tensor:
        return torch.zeros(count, count, dtype=dtype, device=device)

    monkeypatch.setattr(spans, "_future", hide_nothing)
    assert difference("hydra++", ONE) > 1e-3


# -- drafting -----------------------------------------------------------------------------------

SHALLOW = tuple(path for path in PUBLISHED_TREE if len(path) <= 3)


def plain_paths(head: Any, states: Tensor, root: int) -> set[tuple[int, ...]]:
    """Return the nodes of the tree, each computed alone from all committed states [T, H]."""
    weights = dict(head.state_dict())
    target_head = head.target_head
    last = prefix_states(weights, head.shape, states)[-1]
    # by ranks: the path that leads to a node, and the node's token
    tokens: dict[tuple[int, ...], int] = {(): root}
    for ranks in sorted(SHALLOW, key=len):
        level = len(ranks) - 1
        read = [tokens[ranks[:depth]] for depth in range(len(ranks))]
        embedded = list(target_head.embed(torch.tensor(read)))
        logits = level_logits(
            weights,
            level,
            level_hidden(weights, level, last, embedded),
        )
        order = logits.argsort(descending=True, stable=True)
        tokens[ranks] = int(order[ranks[-1]])
    paths = set()
    for ranks in SHALLOW:
        paths.add(tuple(tokens[ranks[:depth]] for depth in range(1, len(ranks) + 1)))
    return paths


def check_drafts(head: Any) -> None:
    """Compare the trees of several cycles with those of the loop."""
    (example,) = texts_of({31: []}, FP64)
    assert example.features is not None
    tokens = example.tokens
    states = example.features[:, -1:]
    text = head.bind(frozen_head(FP64)).begin()
    # updates of one token and of many
    for start, end in pairwise((0, 1, 2, 9, 10, 13, 14, 29)):
        root = int(tokens[end])
        update = Committed(tokens[start:end], states[start:end], root)
        tree = text.propose(update, Budget.fixed(SHALLOW))
        expected = plain_paths(head, states[:end, 0], root)
        assert set(paths_of(tree)[1:]) == expected, "another tree"


@pytest.mark.parametrize("name", ["deep", "hydra++"])
@torch.no_grad()
def test_drafts_are_those_of_a_loop_without_a_cache(name: str) -> None:
    """Each path is computed alone; `play` compares batches with single sequences."""
    check_drafts(new_head(name))


@torch.no_grad()
def test_updates_at_other_positions_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check fails if every update stands at the start of its sequence."""
    positions = sequence_state.new_positions

    def start_over(
        starts: list[int],
        counts: list[int],
        device: torch.device,
    ) -> Tensor:
        return positions([0] * len(starts), counts, device)

    monkeypatch.setattr(
        sequence_state,
        "new_positions",
        start_over,
    )
    with pytest.raises(AssertionError, match="another tree"):
        check_drafts(new_head("hydra++"))


def test_rows_with_a_prefix_draft_as_each_alone() -> None:
    """Sequences that come, go and are passed over at random, with noise of their own."""
    head = new_head("hydra++").bind(frozen_head(FP64))
    assert (
        play(
            head,
            BUDGETS["mixed"],
            SAMPLINGS["T=1"],
            5,
            cycles=15,
        )
        > 5
    )


# -- dropout ------------------------------------------------------------------------------------


def test_dropout_follows_the_seed_and_training_alone() -> None:
    """Another seed of a sequence has another loss, and a head that does not train has none."""
    head = new_head("hydra++", dropout=0.3)
    target_head = frozen_head(FP64)
    batch = collate(texts_of(SPANS, FP64), TAPS)

    def loss_of(seed: int) -> float:
        seeded = replace(batch, seeds=(seed, *batch.seeds[1:]))
        return float(head(seeded, target_head)["total"].detach())

    first = loss_of(3)
    assert first == loss_of(3) != loss_of(4)
    head.eval()
    assert first != loss_of(3) == loss_of(4)


@pytest.mark.parametrize("layers", [1, 3])
def test_dropout_is_before_every_block_and_lm_head(
    layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the widths of what is dropped from."""
    head = new_head(
        "deep",
        layers=layers,
        dropout=0.5,
        regression=0.0,
    )
    widths: list[int] = []

    def note_width(dropout: TextDropout, state: Tensor) -> Tensor:
        widths.append(state.shape[-1])
        return state

    monkeypatch.setattr(TextDropout, "__call__", note_width)
    head(collate(texts_of(ONE, FP64), TAPS), frozen_head(FP64))
    # a level's first block reads the state and all tokens so far, all else reads the target's width
    width = SHAPE.hidden_size
    concatenated = [width * (level + 2) for level in range(3)]
    assert sorted(widths) == sorted(concatenated + 3 * layers * [width])


def test_a_first_forward_is_timed_with_its_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Further levels are timed without it."""
    head = new_head("hydra++").bind(frozen_head(FP64))
    reads: list[int] = []
    read = Hydra.read

    def count_rows(
        head: Any,
        tokens: Tensor,
        *given: Any,
    ) -> Any:
        reads.append(tokens.shape[1])
        return read(head, tokens, *given)

    first = head.probe(32, 5, 1)
    level = head.probe(32, 5, 5)
    monkeypatch.setattr(Hydra, "read", count_rows)
    first()
    level()
    assert reads == [5]
