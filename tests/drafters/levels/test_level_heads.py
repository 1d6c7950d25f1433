"""Heads that guess several tokens from one state, against loops over single slots and all paths."""

# T tokens of a sequence, K levels, H hidden, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from eagle import Budget
from eagle.core.drafter import Committed, TargetHead
from eagle.core.examples import Batch, collate
from eagle.core.tree import PUBLISHED_TREE
from eagle.drafters.levels import level_heads
from eagle.drafters.levels.medusa import Medusa
from eagle.drafters.parts.objectives import align_steps
from tests import single_slots
from tests.enumerate_law import texts_of as paths_of
from tests.registry import LEVEL_HEADS
from tests.single_slots import distance_from_loop
from tests.unrolled_heads import SHAPE, TAPS, Weights, frozen_head, texts_of

FP64 = torch.float64
LEVELS = 4
VARIANTS: dict[str, dict[str, Any]] = {
    "own LM heads": {},
    "target's LM head": {"lm_head": "target"},
    "falling weights": {"weights": "falling", "layers": 2},
    "tokens": {"loss": "tokens"},
    "each level by its own": {"divisor": "levels", "weights": "falling"},
    "all that is reached": {"divisor": "reached", "weights": "falling"},
    "sum of the weights": {"divisor": "weights", "weights": "falling"},
    "tokens, target's LM head": {
        "loss": "tokens",
        "lm_head": "target",
        "weights": "falling",
    },
}
Path = tuple[int, ...]
"""The tokens from the root's child to a node."""


def new_head(name: str, **changes: Any) -> Any:
    """Return a head of four levels whose weights differ from how they start, without dropout."""
    return single_slots.new_head(**{"kind": name, "levels": LEVELS, **changes}).eval()


# -- Medusa's loss ------------------------------------------------------------------------------


def levels_of(
    weights: Weights,
    settings: Any,
    state: Tensor,
    tokens: Sequence[int],
) -> Iterator[Tensor]:
    """Yield [V], the logits of each level from the target's state alone, by the paper's formula."""
    for level in range(settings.levels):
        x = state
        for layer in range(settings.layers):
            block = f"blocks.{level}.{layer}"
            inner = weights[f"{block}.weight"] @ x + weights[f"{block}.bias"]
            x = x + inner * inner.sigmoid()
        yield weights.get(f"heads.{level}.weight", weights["frozen"]) @ x


def difference(variant: str) -> float:
    """Return how far training's loss and gradients are from the loop's."""
    return distance_from_loop(levels_of, new_head("medusa", **VARIANTS[variant]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_gradients_are_those_of_single_slots(variant: str) -> None:
    """For answers of many tokens, of one, at a sequence's end, and of none."""
    assert difference(variant) < 1e-12


def read_next_states(
    head: Any,
    batch: Batch,
    places: Tensor,
) -> Tensor:
    """Return the states one token further: the fault that tests plant."""
    states: Tensor = batch.select_taps((-1,))[places + 1, 0]
    return states


def learn_in_reverse(states: Sequence[Tensor]) -> Tensor:
    """Return the levels' states in reverse order: the first level learns what is the last one's."""
    return align_steps(states[::-1])


@pytest.mark.parametrize(
    ("home", "name", "fault"),
    [
        (Medusa, "start_states", read_next_states),
        (level_heads, "align_steps", learn_in_reverse),
    ],
    ids=["states", "tokens"],
)
def test_a_fault_is_seen(
    home: Any,
    name: str,
    fault: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The comparison fails if slots begin from the state of their root, or levels learn other tokens."""
    monkeypatch.setattr(home, name, fault)
    assert difference("falling weights") > 1e-3


# -- what a level reads -------------------------------------------------------------------------

Change = Callable[[Batch], Batch]
SLOT = 5


def change_states(*positions: int) -> Change:
    """Return a change of the target's states at these positions."""

    def change(batch: Batch) -> Batch:
        features = batch.features.clone()
        features[list(positions)] += 1
        return replace(batch, features=features)

    return change


def change_tokens(*positions: int) -> Change:
    """Return a change of the tokens at these positions."""

    def change(batch: Batch) -> Batch:
        tokens = batch.tokens.clone()
        tokens[list(positions)] = (tokens[list(positions)] + 1) % SHAPE.vocab_size
        return replace(batch, tokens=tokens)

    return change


def changed_levels(head: Any, change: Change) -> list[bool]:
    """Return which levels of one slot have other logits after a change of a batch."""
    batch = collate(texts_of({20: [(3, 20)], 9: [(2, 9)]}, FP64), TAPS)
    target_head = frozen_head(FP64)
    # the first supervised token, 3, is that of slot 1
    row = SLOT - 1

    def logits_of(batch: Batch) -> list[Tensor]:
        with torch.no_grad():
            levels = head.draft_levels(batch, target_head, LEVELS)
            return [logits(states[row]) for states, logits in levels]

    before = logits_of(batch)
    after = logits_of(change(batch))
    return [not torch.equal(old, new) for old, new in zip(before, after, strict=True)]


@pytest.mark.parametrize("name", LEVEL_HEADS)
def test_no_level_reads_what_is_not_known_when_it_drafts(name: str) -> None:
    """No level reads a later state; each reads the tokens before its own, if the head does."""
    head = new_head(name)
    assert not any(changed_levels(head, change_states(*range(SLOT + 1, 29))))
    assert all(changed_levels(head, change_states(SLOT)))
    for first in range(LEVELS + 2):
        got = changed_levels(head, change_tokens(*range(SLOT + 1 + first, 29)))
        assert got == [head.reads_tokens and first <= level for level in range(LEVELS)]


def test_a_later_state_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check fails if slots begin from the state of their root."""
    monkeypatch.setattr(
        Medusa,
        "start_states",
        read_next_states,
    )
    assert all(changed_levels(new_head("medusa"), change_states(SLOT + 1)))


# -- trees --------------------------------------------------------------------------------------

# so few tokens that all paths of three levels can be scored
SMALL = LlamaConfig(
    vocab_size=12,
    hidden_size=16,
    intermediate_size=32,
    num_attention_heads=2,
)
DEPTH = 3
TOKENS = range(12)


def small_head(name: str) -> Any:
    """Return a head of three levels over twelve tokens, ready to draft."""
    torch.manual_seed(1)
    embedding = nn.Embedding(12, 16, dtype=FP64).requires_grad_(False)
    output = nn.Linear(16, 12, bias=False, dtype=FP64).requires_grad_(False)
    target_head = TargetHead(embedding, output)
    head = new_head(name, shape=SMALL, target_head=target_head, levels=DEPTH)
    return head.bind(target_head)


def small_state(scale: float) -> Tensor:
    """Return a random state [H]; the larger it is, the surer a head."""
    return scale * torch.randn(
        16,
        generator=torch.Generator().manual_seed(0),
        dtype=FP64,
    )


def draft_paths(
    head: Any,
    state: Tensor,
    budget: Budget,
) -> list[Path]:
    """Return the paths of a drafted tree."""
    update = Committed(torch.tensor([3]), state[None, None], 5)
    return paths_of(head.begin().propose(update, budget))[1:]


@torch.inference_mode()
def score_paths(head: Any, state: Tensor) -> dict[Path, float]:
    """Return the log-likelihood of every path, each level read after all tokens before it."""
    target_head = head.target_head
    scores: dict[Path, float] = {}
    states = state[None]
    tokens = torch.tensor([5])
    totals = torch.zeros(1, dtype=FP64)
    for level in range(DEPTH):
        states = head.read_token(level, states, tokens, target_head)
        log_probs = head.level_logits(level, states, target_head).log_softmax(-1)
        totals = (totals[:, None] + log_probs).flatten()
        scores |= dict(
            zip(
                product(TOKENS, repeat=level + 1),
                totals.tolist(),
                strict=True,
            )
        )
        states = states.repeat_interleave(12, 0)
        tokens = torch.arange(12).repeat(len(states) // 12)
    return scores


@pytest.mark.parametrize("name", LEVEL_HEADS)
def test_a_tree_holds_the_likeliest_paths(name: str) -> None:
    """Of all paths there are, from states that leave a head unsure and sure."""
    head = small_head(name)
    # five levels are asked of three; more nodes than the first level has tokens
    budget = Budget(30, 5, 12, sharpness=1.0)
    for scale in (0.3, 1.0, 3.0):
        state = small_state(scale)
        scores = score_paths(head, state)
        likeliest = sorted(scores, key=lambda path: -scores[path])[:30]
        assert set(draft_paths(head, state, budget)) == set(likeliest)


@pytest.mark.parametrize("name", LEVEL_HEADS)
def test_a_fixed_tree_has_the_children_of_its_ranks(name: str) -> None:
    """The child of rank r is its parent's likeliest but r; paths deeper than the head go."""
    head = small_head(name)
    state = small_state(1.0)
    scores = score_paths(head, state)
    expected = []
    for ranks in PUBLISHED_TREE:
        if len(ranks) > DEPTH:
            continue
        path: Path = ()
        for rank in ranks:
            children = [(*path, token) for token in TOKENS]
            path = sorted(children, key=lambda child: -scores[child])[rank]
        expected.append(path)
    assert sorted(draft_paths(head, state, Budget.fixed(PUBLISHED_TREE))) == sorted(expected)
