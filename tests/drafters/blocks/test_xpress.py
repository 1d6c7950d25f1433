"""XPress: loss and drafts are those of one slot after the other, and planted faults are seen."""

# A anchors, B slots of a block, K levels, H hidden, V vocabulary

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from eagle import Budget, Sampling
from eagle.core.budget import Draw
from eagle.core.drafter import Committed
from eagle.core.examples import Batch
from eagle.core.noise import DrafterNoise
from eagle.core.tree import chain_paths
from eagle.core.verify import Choose
from eagle.drafters import settings_of
from eagle.drafters.blocks.anchors import Anchors
from eagle.drafters.blocks.xpress import RefinedState, Refiner, XPress
from eagle.drafters.parts.divisors import Divisor
from tests.drafters.blocks import test_dspark
from tests.drafters.blocks.test_dspark import HIDDEN, TAPS, VOCAB, frozen_head, two_texts
from tests.naive_blocks import block_states
from tests.naive_xpress import draft, naive_loss

# each switch is on and off
SWITCHES: list[dict[str, Any]] = [
    {"sample_from_anchor": False, "causal": False},
    {"sample_from_anchor": True, "causal": False, "rounds": 1, "base": 0.0},
    {"sample_from_anchor": False, "causal": True, "consistency": 0.0},
    {"sample_from_anchor": True, "causal": True, "rounds": 2, "variation": 0.3},
]
SLOTS = 6


def new_head(**settings: Any) -> XPress:
    """Return a head of two blocks in fp64 with weights far from zero, so that its drafts depend on one another."""
    torch.manual_seed(6)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=24,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    small = {"kind": "xpress", "blocks": 2, "slots": SLOTS, "rank": 5, "taps": TAPS}
    checked = settings_of({**small, **settings}, "test")
    # every second token is frequent
    head = XPress.for_target(checked, config, supervised=[torch.arange(1, VOCAB, 2)])
    for weight in head.parameters():
        nn.init.normal_(weight, std=0.6)
    return head.double()


# -- the loss ---------------------------------------------------------------------------------------------------------


def largest_difference(head: XPress) -> float:
    """Return how far loss and gradients are from the naive ones."""
    return test_dspark.largest_difference(head, naive_loss, complete=True)


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_the_loss_is_that_of_one_slot_after_the_other(switches: dict[str, Any]) -> None:
    """Loss and gradients, with a draft vocabulary too, which the refiner writes and does not read."""
    assert largest_difference(new_head(**switches)) < 1e-8
    assert largest_difference(new_head(**switches, draft_vocab=9)) < 1e-8


@pytest.mark.parametrize("divisor", get_args(Divisor))
def test_the_loss_is_divided_as_the_recipe_says(divisor: str) -> None:
    """By what the weights of single anchors and levels add up to."""
    assert largest_difference(new_head(divisor=divisor)) < 1e-8


def read_own_tokens(head: XPress, batch: Batch, anchors: Anchors) -> Tensor:
    """Let every slot read the token that it predicts."""
    levels = range(-head.first_slot, head.levels)
    return torch.stack([anchors.tokens_at(batch, level) for level in levels], dim=1)


def read_root_twice(head: XPress, batch: Batch, anchors: Anchors) -> Tensor:
    """Let the first slot read the root, as it does in vLLM, in place of the token before it."""
    levels = [-1, *range(-1, head.levels - 1)]
    return torch.stack([anchors.tokens_at(batch, level) for level in levels], dim=1)


def keep_the_graph(head: XPress, states: Tensor, context: Tensor, previous: Tensor) -> Tensor:
    """Let the tokens that a round reads have the gradient of the codes that they were chosen by."""
    hidden: Tensor = REFINE(head, states, context, previous)
    last = getattr(head, "last", hidden)
    object.__setattr__(head, "last", hidden)
    # zero, but for its gradient
    return hidden + (last - last.detach()).flip(1)


REFINE = XPress.refine
LOSS_FAULTS: dict[str, tuple[Any, str, Any]] = {
    "a slot reads its own token": (XPress, "tokens_before", read_own_tokens),
    "the first slot reads the root": (XPress, "tokens_before", read_root_twice),
    "later slots are mixed in": (Tensor, "tril", lambda matrix: matrix),
    "drafted tokens have gradients": (XPress, "refine", keep_the_graph),
}


@pytest.mark.parametrize("fault", LOSS_FAULTS)
def test_a_planted_fault_changes_the_loss(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above fails."""
    monkeypatch.setattr(*LOSS_FAULTS[fault])
    assert largest_difference(new_head()) > 1e-4


# -- drafts -----------------------------------------------------------------------------------------------------------


def new_noise() -> DrafterNoise:
    """Return the noise of a target that samples at T = 1."""
    noise = Choose(Sampling(temperature=1.0, seed=4)).offer(VOCAB, torch.device("cpu"))
    assert noise is not None
    return noise


def naive_drafts(head: XPress, noise: DrafterNoise | None = None) -> list[list[int]]:
    """Return the tokens that are drafted after each token of a sequence but the first, one slot after the other."""
    batch = two_texts()
    target_head = frozen_head()
    tokens = batch.tokens[: batch.lengths[0]]
    weights = dict(head.named_parameters())
    found = []
    for root in range(1, len(tokens)):
        features = batch.select_taps(TAPS)[:root]
        first = root if head.settings.sample_from_anchor else root - 1
        # the first level is the token after the root
        added = None if noise is None else noise([root + 1 + level for level in range(head.levels)])
        with torch.no_grad():
            states = block_states(head, weights, features, tokens[root], target_head)
            first_tokens = tokens[first : root + 1].tolist()
            found.append(draft(head, states, first_tokens, target_head, added))
    return found


def drafts(
    head: XPress, depth: int, noise: DrafterNoise | None = None, draw: Draw = "noise"
) -> list[list[int]]:
    """Return chains after the same roots, drafted in a batch: of this depth after every second root, else of one."""
    batch = two_texts()
    tokens = batch.tokens[: batch.lengths[0]]
    state = head.bind(frozen_head()).open()
    updates = {}
    budgets = {}
    for root in range(1, len(tokens)):
        state.admit(root, noise)
        features = batch.select_taps(TAPS)[:root]
        updates[root] = Committed(tokens[:root], features, int(tokens[root]))
        budgets[root] = Budget.fixed(chain_paths(depth if root % 2 else 1), draw)
    trees = state.propose(updates, budgets)
    return [trees[root].tokens[1:].tolist() for root in updates]


def differ(got: list[list[int]], naive: list[list[int]]) -> bool:
    """Return whether drafts are others than the naive ones, which are never shorter."""
    assert max(len(row) for row in got) > 1
    return any(row != longer[: len(row)] for row, longer in zip(got, naive, strict=True))


@pytest.mark.parametrize("passes", [1, 2, 4])
@pytest.mark.parametrize("anchored", [False, True])
def test_drafts_are_those_of_naive_passes(passes: int, anchored: bool) -> None:
    """The tokens after every root, for chains as long as the block and shorter, with a draft vocabulary too."""
    for vocab in (None, 9):
        head = new_head(passes=passes, sample_from_anchor=anchored, draft_vocab=vocab)
        naive = naive_drafts(head)
        for depth in (2, SLOTS):
            assert not differ(drafts(head, depth), naive)


def test_enough_passes_draft_one_token_after_the_other() -> None:
    """With as many passes as levels, each token is final before the next one reads it: more passes change nothing."""
    head = new_head(passes=SLOTS)
    naive = naive_drafts(new_head(passes=SLOTS + 3))
    assert naive_drafts(head) == naive
    assert not differ(drafts(head, SLOTS), naive)


@pytest.mark.parametrize("vocab", [None, 9])
def test_passes_choose_what_a_sampling_target_would(vocab: int | None) -> None:
    """Each pass adds the target's noise, so that a draft is one path; drafts that are sampled do not use it."""
    head = new_head(passes=2, draft_vocab=vocab)
    naive = naive_drafts(head, new_noise())
    assert not differ(drafts(head, SLOTS, new_noise()), naive)
    assert naive != naive_drafts(head)
    # the likeliest children of the likeliest path
    assert not differ(drafts(head, SLOTS, new_noise(), "likeliest"), naive_drafts(head))


def test_a_draft_is_priced_with_its_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One forward over a block, and the refiner as often as it reads one; levels read no tokens."""
    head = new_head(passes=3).bind(frozen_head())
    assert head.forwards(Budget(10, SLOTS, 3)) == ()
    read: list[torch.Size] = []
    forward = Refiner.forward

    def count_reads(refiner: Refiner, context: Tensor, previous: Tensor) -> Tensor:
        read.append(previous.shape)
        return forward(refiner, context, previous)

    monkeypatch.setattr(Refiner, "forward", count_reads)
    levels = head.probe(9, SLOTS + 2, 1)()
    assert levels.logits.shape == (1, SLOTS - 1, VOCAB)
    assert 1 <= len(read) <= 3
    assert set(read) == {(1, SLOTS)}


def forget_last_tokens(head: Any) -> RefinedState:
    """Return a state for which the root is the token before the root too, as in vLLM."""
    state = RefinedState(head)
    read_blocks = state.read_blocks

    def read_root_twice(cache_rows: Any, roots: Tensor) -> Tensor:
        state.last_tokens = dict(zip(cache_rows, roots.tolist(), strict=True))
        state.last_tokens = {state.rows[row]: root for row, root in state.last_tokens.items()}
        return read_blocks(cache_rows, roots)

    object.__setattr__(state, "read_blocks", read_root_twice)
    return state


READ_STATES = Refiner.read_states
DRAFT_FAULTS: dict[str, tuple[Any, str, Any]] = {
    "the first slot reads the root": (XPress, "open", forget_last_tokens),
    "later slots are mixed in": (Tensor, "tril", lambda matrix: matrix),
    "the mean is of a part of a block": (
        Refiner,
        "read_states",
        lambda refiner, states: READ_STATES(refiner, states[:, :3]),
    ),
}


@pytest.mark.parametrize("fault", DRAFT_FAULTS)
def test_a_planted_fault_changes_drafts(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparisons above fail."""
    head = new_head(passes=4)
    naive = naive_drafts(head)
    monkeypatch.setattr(*DRAFT_FAULTS[fault])
    assert differ(drafts(head, 2), naive)


@pytest.mark.parametrize("passes", [1, 2])
def test_a_pass_too_few_changes_drafts(passes: int) -> None:
    """The comparisons above fail."""
    naive = naive_drafts(new_head(passes=passes + 1))
    assert differ(drafts(new_head(passes=passes), SLOTS), naive)
