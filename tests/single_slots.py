"""Heads of several levels position by position: their loss, what each level knows, the best trees by enumeration."""

# T tokens of a text, H hidden, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from eagle import Budget
from eagle.core.drafter import Committed, TargetHead
from eagle.core.examples import Batch, Example, collate
from eagle.drafters import DRAFTERS, settings_of
from tests.unrolled_heads import (
    SHAPE,
    SPANS,
    TAPS,
    Weights,
    apart,
    computed,
    frozen_head,
    gradients_of,
    moved,
    texts_of,
)

LEVELS = 3
FP64 = torch.float64
Levels = Callable[[Weights, Any, Tensor, Sequence[int]], Iterator[Tensor]]
"""Weights by name, settings, a state [H] and the tokens after it -> logits [V] of one level after the other."""


def new_head(shape: LlamaConfig = SHAPE, **settings: Any) -> Any:
    """Return a head in fp64 with all its weights away from where they start."""
    torch.manual_seed(2)
    # checked as a recipe's settings are
    checked = settings_of({"levels": LEVELS, **settings}, "test")
    head = DRAFTERS[checked.kind].for_target(checked, shape, frozen_head(torch.float32))
    return moved(head).double().train()


def loop_over_slots(
    levels: Levels, weights: Weights, settings: Any, texts: list[Example], frozen: TargetHead
) -> Tensor:
    """Return the loss by definition: of each position, all levels up to the first gap in what is supervised.

    Args:
        levels: the method's levels, one logits after the other.
        weights: the head's weights by name.
        settings: the head's.
        texts: the batch.
        frozen: the target's embedding and LM head.
    """
    total = torch.zeros((), dtype=FP64)
    count = 0
    for text in texts:
        assert text.features is not None
        states = text.features[:, TAPS.index(-1)]
        tokens = text.tokens.tolist()
        for first in range(2, len(tokens)):
            if not text.loss_mask[first]:
                continue
            count += 1
            # a head knows the state before the root and all tokens up to the one that a level guesses
            logits = levels(weights, settings, states[first - 2], tokens[first - 1 :])
            for position in range(first, min(first + settings.levels, len(tokens))):
                if not text.loss_mask[position]:
                    break
                log_probs = next(logits).log_softmax(-1)
                if settings.loss == "tokens":
                    total -= log_probs[tokens[position]]
                else:
                    probs = frozen.logits(states[position - 1]).softmax(-1)
                    total -= (probs * log_probs).sum()
    return total / count


def distance_from_loop(levels: Levels, head: Any) -> float:
    """Return how far loss and gradients of training are from the loop's, in fp64."""
    texts = texts_of(SPANS, FP64)
    frozen = frozen_head(FP64)

    def loop(weights: Weights) -> Tensor:
        every = {**weights, "frozen": frozen.weight}
        return loop_over_slots(levels, every, head.settings, texts, frozen=frozen)

    return apart(head, computed(head, collate(texts, TAPS), frozen), gradients_of(head, loop))


def knowledge(head: Any, slot: int = 5) -> list[tuple[set[int], set[int]]]:
    """Return for each level at one position: the positions of tokens and those of states that change its logits.

    Args:
        head: the head.
        slot: the position in training whose logits are looked at.
    """
    frozen = frozen_head(FP64)
    (text,) = texts_of({14: [(2, 14)]}, FP64)
    batch = collate([text], TAPS)

    @torch.no_grad()
    def guesses(batch: Batch) -> list[Tensor]:
        levels = head.draft_levels(batch, frozen, LEVELS)
        return [logits(states)[slot] for states, logits in levels]

    # one change at a time: whatever moves a level's logits is known to it
    before = guesses(batch)
    known = [(set[int](), set[int]()) for _ in range(LEVELS)]
    for position in range(len(batch.tokens)):
        tokens = batch.tokens.clone()
        tokens[position] = (tokens[position] + 1) % SHAPE.vocab_size
        features = batch.features.clone()
        features[position] += 1
        changes = (replace(batch, tokens=tokens), replace(batch, features=features))
        for kind, changed in enumerate(changes):
            for level, logits in enumerate(guesses(changed)):
                if not torch.equal(before[level], logits):
                    known[level][kind].add(position)
    return known


def best_paths(
    levels: Levels, head: Any, frozen: TargetHead, state: Tensor, root: int, nodes: int
) -> set[Any]:
    """Return the likeliest paths under a root, by the likelihoods of all paths that there are.

    Args:
        levels: the method's levels, one logits after the other.
        head: the head.
        frozen: the target's embedding and LM head.
        state: [H], the target's at the root.
        root: a token.
        nodes: how many paths are returned.
    """
    weights = {**head.state_dict(), "frozen": frozen.weight}
    vocabulary = range(head.shape.vocab_size)
    # the likelihood of every node of the full tree, by the path to it
    log_probs: dict[tuple[int, ...], float] = {}
    for path in product(vocabulary, repeat=head.levels):
        logits = levels(weights, head.settings, state, [root, *path])
        log_prob = 0.0
        for depth, token in enumerate(path, start=1):
            log_prob += next(logits).log_softmax(-1)[token].item()
            log_probs[path[:depth]] = log_prob
    assert len(log_probs) == sum(len(vocabulary) ** depth for depth in range(1, head.levels + 1))
    ranked = sorted(log_probs, key=lambda path: -log_probs[path])
    return set(ranked[:nodes])


def drafted_paths(head: Any, frozen: TargetHead, state: Tensor, root: int, nodes: int) -> set[Any]:
    """Return the paths of the tree that the head drafts after a state, by plain probs.

    Args:
        head: the head.
        frozen: the target's embedding and LM head.
        state: [H], the target's at the root.
        root: a token.
        nodes: how many nodes the tree may have.
    """
    features = torch.stack([torch.zeros_like(state), state])[:, None]
    # sharpness 1 ranks nodes by their plain likelihoods
    budget = Budget(nodes, head.levels, nodes, sharpness=1.0)
    update = Committed(torch.tensor([0, 1]), features, root)
    tree = head.bind(frozen).begin(None).propose(update, budget)
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens.tolist()[1:], tree.parents.tolist()[1:], strict=True):
        paths.append((*paths[parent], token))
    return set(paths[1:])


def small_target(vocab_size: int = 8) -> tuple[LlamaConfig, TargetHead, Tensor]:
    """Return sizes, a random LM head and a state, with so few tokens that all paths can be enumerated."""
    torch.manual_seed(4)
    # 8 tokens and 3 levels make 584 paths
    sizes = {"vocab_size": vocab_size, "hidden_size": 16, "intermediate_size": 12}
    shape = LlamaConfig(**{**SHAPE.to_dict(), **sizes})
    output = torch.nn.Linear(16, vocab_size, bias=False, dtype=FP64).requires_grad_(False)
    torch.nn.init.normal_(output.weight, std=0.5)
    embedding = torch.nn.Embedding(vocab_size, 16, dtype=FP64).requires_grad_(False)
    return shape, TargetHead(embedding, output), torch.randn(16, dtype=FP64)
