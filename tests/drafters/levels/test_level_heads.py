"""Heads that guess several tokens from one state, against loops over single slots and paths with whole logits."""

# T tokens of one text, K levels, H width, V vocabulary

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from eagle import Budget
from eagle.core.drafter import Committed, TargetHead
from eagle.core.examples import Batch, Example, collate
from eagle.core.tree import PUBLISHED_TREE
from eagle.drafters import DRAFTERS, settings_of
from eagle.drafters.levels import level_heads
from eagle.drafters.levels.medusa import FALLING, Medusa
from tests.naive_divisors import Term, divide_terms
from tests.registry import LEVEL_HEADS
from tests.unrolled_heads import SHAPE, SPANS, TAPS, apart, computed, frozen_head, moved, texts_of

VARIANTS: dict[str, dict[str, Any]] = {
    "own LM heads": {},
    "target's LM head": {"lm_head": "target"},
    "falling weights": {"weights": "falling", "layers": 2},
    "tokens": {"loss": "tokens"},
    "each level by its own": {"divisor": "levels", "weights": "falling"},
    "all that is reached": {"divisor": "reached", "weights": "falling"},
    "sum of the weights": {"divisor": "weights", "weights": "falling"},
    "tokens, target's LM head": {"loss": "tokens", "lm_head": "target", "weights": "falling"},
}
LEVELS = 4


def new_head(
    name: str, shape: LlamaConfig = SHAPE, frozen: TargetHead | None = None, **changes: Any
) -> Any:
    """A head in fp64 whose weights are away from where they start, and which leaves nothing to chance."""
    torch.manual_seed(2)
    settings = settings_of({"kind": name, "levels": LEVELS, **changes}, "test")
    head = DRAFTERS[name].for_target(settings, shape, frozen or frozen_head(torch.float32))
    return moved(head).double().eval()


# -- the loss ---------------------------------------------------------------------------------------------------------


def level_logits(head: Medusa, level: int, state: Tensor, frozen: TargetHead) -> Tensor:
    """[V], what a level makes of one state [H], by the formula of the paper."""
    for layer in head.blocks[level]:
        inner = layer.weight @ state + layer.bias
        state = state + inner * inner.sigmoid()
    return (head.heads[level].weight if len(head.heads) else frozen.weight) @ state


def loop_over_slots(head: Medusa, texts: list[Example], frozen: TargetHead) -> Tensor:
    """The loss, slot by slot and level by level: what stands in a text that is supervised without a gap."""
    settings, terms = head.settings, list[Term]()
    for number, text in enumerate(texts):
        assert text.features is not None
        states = text.features[:, TAPS.index(-1)]
        for place in (place for place in range(2, len(text.tokens)) if text.loss_mask[place]):
            for level in range(settings.levels):
                if not text.loss_mask[place : place + level + 1].all() or place + level >= len(
                    text.tokens
                ):
                    break
                log_probs = level_logits(head, level, states[place - 2], frozen).log_softmax(-1)
                if settings.loss == "tokens":
                    loss = -log_probs[text.tokens[place + level]]
                else:
                    loss = -(frozen.logits(states[place + level - 1]).softmax(-1) * log_probs).sum()
                terms.append(
                    (
                        number,
                        level,
                        FALLING ** (level + 1) if settings.weights == "falling" else 1,
                        loss,
                    )
                )
    return divide_terms(settings.divisor, terms, [int(text.loss_mask[2:].sum()) for text in texts])


def difference(variant: str, planted: Callable[[Any], None] = lambda head: None) -> float:
    """Of training's loss and gradients from the loop's; the planted change is unknown to the loop."""
    texts, frozen = texts_of(SPANS, torch.float64), frozen_head(torch.float64)
    head = new_head("medusa", **VARIANTS[variant])
    loss = loop_over_slots(head, texts, frozen)
    learned = dict(head.named_parameters())
    gradients = torch.autograd.grad(loss, list(learned.values()))
    planted(head)
    own = computed(head, collate(texts, TAPS), frozen)
    return apart(head, own, {"total": loss.detach(), **dict(zip(learned, gradients, strict=True))})


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_gradients_are_those_of_single_slots(variant: str) -> None:
    """In fp64, of answers of many tokens, of one, at a text's end, and of none."""
    assert difference(variant) < 1e-12


def reads_the_next_state(head: Any) -> None:
    """Slots begin from the state behind the one that they know."""
    head.start_states = lambda batch, places: type(head).start_states(head, batch, places + 1)


def learns_the_next_label(head: Any) -> None:
    """All levels learn what stands one place further."""
    honest = level_heads.choose_teacher

    def planted(loss: Any, batch: Batch, places: Tensor, frozen: Any) -> Any:
        return honest(loss, batch, (places + 1).clamp(max=len(batch.tokens) - 3), frozen)

    head.planted.setattr(level_heads, "choose_teacher", planted)


def level_behind(head: Any) -> None:
    """Every level but the first learns what the level before it should, and the first what the last one should."""
    honest = level_heads.align_steps
    head.planted.setattr(
        level_heads, "align_steps", lambda states: honest([*states[1:], states[0]])
    )


def weight_behind(head: Any) -> None:
    """Every level counts as the one before."""
    honest = Medusa.level_weights.fget  # type: ignore[attr-defined]
    head.planted.setattr(Medusa, "level_weights", property(lambda self: [1.0, *honest(self)[:-1]]))


@pytest.mark.parametrize(
    "fault", [reads_the_next_state, learns_the_next_label, level_behind, weight_behind]
)
@pytest.mark.parametrize("variant", ["falling weights", "tokens, target's LM head"])
def test_a_slot_or_level_that_is_off_by_one_is_seen(
    variant: str, fault: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted faults, each far from the loop."""
    monkeypatch.setattr(Medusa, "planted", monkeypatch, raising=False)
    assert difference(variant, fault) > 1e-3


# -- what a level may know ---------------------------------------------------------------------------------------------


def levels_at(head: Any, batch: Batch, frozen: TargetHead, slot: int) -> list[Tensor]:
    """The logits of every level at one slot."""
    place = batch.loss_mask.nonzero()[:, 0].tolist().index(slot + 2)
    with torch.no_grad():
        return [
            logits(states[place]) for states, logits in head.draft_levels(batch, frozen, LEVELS)
        ]


def changed_levels(head: Any, change: Callable[[Batch], Batch], slot: int) -> list[bool]:
    """Which levels guess something else at a slot after a change of what the head is given."""
    batch, frozen = (
        collate(texts_of({20: [(3, 20)], 9: [(2, 9)]}, torch.float64), TAPS),
        frozen_head(torch.float64),
    )
    before, after = (levels_at(head, given, frozen, slot) for given in (batch, change(batch)))
    return [not torch.equal(logits, others) for logits, others in zip(before, after, strict=True)]


def with_states(*places: int) -> Callable[[Batch], Batch]:
    """Other states at these places."""

    def change(batch: Batch) -> Batch:
        features = batch.features.clone()
        features[list(places)] += 1
        return replace(batch, features=features)

    return change


def with_tokens(*places: int) -> Callable[[Batch], Batch]:
    """Other tokens at these places."""

    def change(batch: Batch) -> Batch:
        tokens = batch.tokens.clone()
        tokens[list(places)] = (tokens[list(places)] + 1) % SHAPE.vocab_size
        return replace(batch, tokens=tokens)

    return change


@pytest.mark.parametrize("name", LEVEL_HEADS)
def test_no_level_sees_what_is_not_known_when_it_drafts(name: str) -> None:
    """States behind the slot change no level; a token changes those alone that are drafted behind it."""
    head, slot = new_head(name), 5
    assert not any(changed_levels(head, with_states(*range(slot + 1, 29)), slot))
    assert all(changed_levels(head, with_states(slot), slot))
    for level in range(LEVELS + 2):
        seen = changed_levels(head, with_tokens(*range(slot + 1 + level, 29)), slot)
        assert seen == [head.reads_tokens and level <= own for own in range(LEVELS)]


def test_a_state_from_further_on_is_seen() -> None:
    """Planted: slots that begin from the state of their root."""
    head = new_head("medusa")
    reads_the_next_state(head)
    assert all(changed_levels(head, with_states(6), 5))


@pytest.mark.parametrize("loss", ["tokens", "cross_entropy"])
@pytest.mark.parametrize("name", LEVEL_HEADS)
def test_labels_that_are_masked_change_nothing(name: str, loss: str) -> None:
    """Neither loss nor gradients do; a supervised label changes both, and so does a mask that is forgotten."""
    batch, frozen = (
        collate(texts_of({20: [(4, 9), (15, 18)]}, torch.float64), TAPS),
        frozen_head(torch.float64),
    )
    head = new_head(name, loss=loss)
    before = computed(head, batch, frozen)
    # of places 9 to 12 nothing is a label, a slot's state, a teacher's, or a token on the way of a draft
    masked = with_states(9, 10, 11, 12)(with_tokens(9, 10, 11, 12)(batch))
    assert apart(head, computed(head, masked, frozen), before) == 0
    label = with_tokens(7)(batch) if loss == "tokens" else with_states(7)(batch)
    forgotten = replace(batch, loss_mask=batch.loss_mask | (torch.arange(len(batch.tokens)) == 11))
    for other in (label, forgotten):
        assert apart(head, computed(head, other, frozen), before) > 1e-3


# -- trees ------------------------------------------------------------------------------------------------------------

LETTERS = LlamaConfig(vocab_size=12, hidden_size=16, intermediate_size=32, num_attention_heads=2)


def letters() -> TargetHead:
    """What a head of twelve tokens borrows."""
    torch.manual_seed(1)
    parts = (
        torch.nn.Embedding(12, 16, dtype=torch.float64),
        torch.nn.Linear(16, 12, bias=False, dtype=torch.float64),
    )
    return TargetHead(*(part.requires_grad_(False) for part in parts))


def drafted(head: Any, state: Tensor, budget: Budget) -> list[tuple[int, ...]]:
    """The paths of tokens of a drafted tree, in the order of its nodes."""
    tree = head.begin().propose(Committed(torch.tensor([3]), state[None, None], 5), budget)
    return [tuple(tree.tokens[tree.path(node)[1:]].tolist()) for node in range(1, len(tree))]


def score_paths(head: Any, state: Tensor) -> dict[tuple[int, ...], float]:
    """The log-probs of all paths of three tokens or fewer, each token read where the head reads it."""
    (frozen,), scores = head.frozen, dict[tuple[int, ...], float]()
    states, tokens, totals = state[None], torch.tensor([5]), torch.zeros(1, dtype=torch.float64)
    for level in range(3):
        states = head.read_token(level, states, tokens, frozen)
        totals = (
            totals[:, None] + head.level_logits(level, states, frozen).log_softmax(-1)
        ).flatten()
        scores |= dict(zip(product(range(12), repeat=level + 1), totals.tolist(), strict=True))
        states, tokens = states.repeat_interleave(12, 0), torch.arange(12).repeat(len(states))
    return scores


def small_head(name: str) -> tuple[Any, list[Tensor]]:
    """A head of three levels, ready to draft, and states for it: hardly sure of anything, and rather sure."""
    frozen, generator = letters(), torch.Generator().manual_seed(0)
    head = new_head(name, LETTERS, frozen, levels=3).bind(frozen)
    return head, [
        scale * torch.randn(16, generator=generator, dtype=torch.float64)
        for scale in (0.3, 1.0, 3.0)
    ]


LIKELIEST = Budget(12, 5, 12, sharpness=1.0)  # five levels are asked of three


@pytest.mark.parametrize("name", LEVEL_HEADS)
def test_the_tree_holds_the_paths_with_the_greatest_product_of_probs(name: str) -> None:
    """Of all paths there are, by brute force; planted: levels that are drafted in another order."""
    head, states = small_head(name)
    best = []
    with torch.inference_mode():
        for state in states:
            scores = score_paths(head, state)
            best.append(set(sorted(scores, key=lambda path: -scores[path])[:12]))
            assert set(drafted(head, state, LIKELIEST)) == best[-1]
    assert max(len(path) for paths in best for path in paths) > 1
    if len(head.lm_heads(head.frozen[0])) > 1:
        head.head_of = lambda level, frozen: type(head).head_of(head, 2 - level, frozen)
    else:
        head.hidden = lambda level, state: type(head).hidden(head, 2 - level, state)
    assert set(drafted(head, states[2], LIKELIEST)) != best[2]


@pytest.mark.parametrize("name", LEVEL_HEADS)
def test_a_fixed_shape_has_the_ranks_that_it_names(name: str) -> None:
    """The child of rank r is the level's token of rank r behind its path; what is deeper than the head is left out."""
    head, (_, state, _) = small_head(name)
    expected = []
    with torch.inference_mode():
        scores = score_paths(head, state)
        for ranks in (path for path in PUBLISHED_TREE if len(path) <= 3):
            path: tuple[int, ...] = ()
            for rank in ranks:
                children = sorted(
                    ((*path, token) for token in range(12)), key=lambda child: -scores[child]
                )
                path = children[rank]
            expected.append(path)
        assert sorted(drafted(head, state, Budget.fixed(PUBLISHED_TREE))) == sorted(expected)
