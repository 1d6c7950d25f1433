"""Heads of several levels slot by slot: their loss, what each level knows, and the best trees by brute force."""

# T tokens of a text, H width, V vocabulary

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
    moved,
    texts_of,
)

LEVELS = 3
Levels = Callable[[Weights, Any, Tensor, Sequence[int]], Iterator[Tensor]]
"""Weights by name, settings, a state [H] and the tokens behind it -> logits [V] of one level after the other."""


def new_head(shape: LlamaConfig = SHAPE, **settings: Any) -> Any:
    """A head in fp64 with all its weights away from where they start."""
    torch.manual_seed(2)
    checked = settings_of({"levels": LEVELS, **settings}, "test")
    head = DRAFTERS[checked.kind].for_target(checked, shape, frozen_head(torch.float32))
    return moved(head).double().train()


def loop_over_slots(
    levels: Levels, weights: Weights, settings: Any, texts: list[Example], frozen: TargetHead
) -> Tensor:
    """The loss from its definition: of a slot at all levels up to the first gap in what is supervised."""
    total = torch.zeros((), dtype=torch.float64)
    for text in texts:
        assert text.features is not None
        states, tokens = text.features[:, TAPS.index(-1)], text.tokens.tolist()
        for place in (place for place in range(2, len(tokens)) if text.loss_mask[place]):
            logits = levels(weights, settings, states[place - 2], tokens[place - 1 :])
            for named in range(place, min(place + settings.levels, len(tokens))):
                if not text.loss_mask[named]:
                    break
                log_probs = next(logits).log_softmax(-1)
                target_probs = frozen.logits(states[named - 1]).softmax(-1)
                total -= (
                    log_probs[tokens[named]]
                    if settings.loss == "tokens"
                    else (target_probs * log_probs).sum()
                )
    return total / sum(int(text.loss_mask[2:].sum()) for text in texts)


def distance_from_loop(levels: Levels, head: Any) -> float:
    """How far loss and gradients of training are from the loop's, in fp64."""
    texts, frozen = texts_of(SPANS, torch.float64), frozen_head(torch.float64)
    weights = {
        name: tensor.detach().clone().requires_grad_() for name, tensor in head.state_dict().items()
    }
    weights_and_lm_head = {**weights, "frozen": frozen.weight}
    loss = loop_over_slots(levels, weights_and_lm_head, head.settings, texts, frozen)
    gradients = torch.autograd.grad(loss, list(weights.values()))
    looped = {"total": loss.detach(), **dict(zip(weights, gradients, strict=True))}
    return apart(head, computed(head, collate(texts, TAPS), frozen), looped)


def knowledge(head: Any, slot: int = 5) -> list[tuple[set[int], set[int]]]:
    """Of each level at one slot: the places of tokens and those of states whose change alters its logits."""
    (text,), frozen = texts_of({14: [(2, 14)]}, torch.float64), frozen_head(torch.float64)

    def guesses(batch: Batch) -> list[Tensor]:
        with torch.no_grad():
            return [
                logits(states)[slot] for states, logits in head.draft_levels(batch, frozen, LEVELS)
            ]

    batch = collate([text], TAPS)
    before, known = guesses(batch), [(set[int](), set[int]()) for _ in range(LEVELS)]
    for place in range(len(batch.tokens)):
        tokens, features = batch.tokens.clone(), batch.features.clone()
        tokens[place] = (tokens[place] + 1) % SHAPE.vocab_size
        features[place] += 1
        for kind, changed in enumerate(
            (replace(batch, tokens=tokens), replace(batch, features=features))
        ):
            for level, (one, other) in enumerate(zip(before, guesses(changed), strict=True)):
                if not torch.equal(one, other):
                    known[level][kind].add(place)
    return known


def best_paths(
    levels: Levels, head: Any, frozen: TargetHead, state: Tensor, root: int, nodes: int
) -> set[Any]:
    """The likeliest paths under a root, among all paths that there are."""
    weights, likelihoods = (
        {**head.state_dict(), "frozen": frozen.weight},
        dict[tuple[int, ...], float](),
    )
    vocabulary = range(head.shape.vocab_size)
    for path in product(vocabulary, repeat=head.levels):
        logits = levels(weights, head.settings, state, [root, *path])
        log_prob = 0.0
        for depth, token in enumerate(path, start=1):
            log_prob += next(logits).log_softmax(-1)[token].item()
            likelihoods[path[:depth]] = log_prob
    assert len(likelihoods) == sum(len(vocabulary) ** depth for depth in range(1, head.levels + 1))
    return set(sorted(likelihoods, key=lambda path: -likelihoods[path])[:nodes])


def drafted_paths(head: Any, frozen: TargetHead, state: Tensor, root: int, nodes: int) -> set[Any]:
    """The paths of the tree that the head drafts behind a state, by plain probs."""
    features = torch.stack([torch.zeros_like(state), state])[:, None]
    budget = Budget(nodes, head.levels, nodes, sharpness=1.0)
    tree = (
        head.bind(frozen)
        .begin(None)
        .propose(Committed(torch.tensor([0, 1]), features, root), budget)
    )
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens.tolist()[1:], tree.parents.tolist()[1:], strict=True):
        paths.append((*paths[parent], token))
    return set(paths[1:])


def small_target(vocab_size: int = 8) -> tuple[LlamaConfig, TargetHead, Tensor]:
    """Sizes, a random LM head, and a state, with so few tokens that all paths can be gone through."""
    torch.manual_seed(4)
    shape = LlamaConfig(
        **{**SHAPE.to_dict(), "vocab_size": vocab_size, "hidden_size": 16, "intermediate_size": 12}
    )
    output = torch.nn.Linear(16, vocab_size, bias=False, dtype=torch.float64).requires_grad_(False)
    torch.nn.init.normal_(output.weight, std=0.5)
    embedding = torch.nn.Embedding(vocab_size, 16, dtype=torch.float64).requires_grad_(False)
    return shape, TargetHead(embedding, output), torch.randn(16, dtype=torch.float64)
