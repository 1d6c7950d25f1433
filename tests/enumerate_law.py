"""Exact laws of randomised rules: run a rule on everything that chance may answer, and add up what it emits."""

# V vocabulary, M tokens looked at

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from eagle.core.tree import DraftTree
from eagle.core.verify import Coin, Pick, Probs, Sampling, warp

Outcome = TypeVar("Outcome")
Text = tuple[int, ...]  # tokens after the root
Laws = list[
    Tensor
]  # laws[d], [V] * d + [V], holds the law of the next token after every text of d tokens
Rule = Callable[[DraftTree, Probs, Coin, Pick], tuple[list[int], int]]
Drawn = tuple[
    DraftTree, list[Text], float
]  # a tree, the text of each of its nodes, its probability

OPEN = -1  # stands for every token at once


class Chance:
    """The answers of one run: those of the script first, then the first possible ones; others are left for later."""

    def __init__(self, script: list[int]) -> None:
        self.script, self.step, self.weight = script, 0, 1.0
        self.later: list[list[int]] = []

    def draw(self, law: Sequence[float]) -> int:
        """An index drawn from a law."""
        if self.step == len(self.script):
            first, *others = [answer for answer, probability in enumerate(law) if probability > 0]
            self.later += [[*self.script, other] for other in others]
            self.script = [*self.script, first]
        answer = self.script[self.step]
        self.step += 1
        self.weight *= law[answer]
        return answer

    def coin(self, probability: float) -> bool:
        """True with this probability."""
        return bool(self.draw([1 - probability, probability]))


def every_outcome(run: Callable[[Chance], Outcome]) -> Iterator[tuple[Outcome, float]]:
    """All that a randomised function may return, with probabilities."""
    scripts: list[list[int]] = [[]]
    while scripts:
        chance = Chance(scripts.pop())
        outcome = run(chance)
        scripts += chance.later
        yield outcome, chance.weight


def random_logits(
    seed: int, vocab_size: int, lengths: int, dtype: torch.dtype, scale: float = 2.0
) -> Laws:
    """Logits after every text shorter than `lengths`."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ([vocab_size] * (length + 1) for length in range(lengths))
    return [
        scale * torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in shapes
    ]


def laws_of(logits: Laws, sampling: Sampling) -> Laws:
    """What a model with these logits says under these filters."""
    return [
        warp(rows.reshape(-1, rows.shape[-1]), sampling).softmax(-1).view_as(rows)
        for rows in logits
    ]


def futures(target: Laws) -> list[np.ndarray]:
    """[V] * M each: after a text of d tokens (the first d axes), the joint law of the next M - d."""
    vocab_size, length = target[0].shape[-1], len(target)
    joint = [np.ones([vocab_size] * length)]
    for laws in reversed(target):
        now = (
            laws.double()
            .numpy()
            .reshape([vocab_size] * (length - len(joint) + 1) + [1] * (len(joint) - 1))
        )
        joint.insert(0, now * joint[0])
    return joint


def siblings(law: np.ndarray, count: int) -> Iterator[tuple[Text, float]]:
    """Ordered draws without replacement, with probabilities; fewer than `count` where the law runs dry."""
    tokens = law.nonzero()[0].tolist() if count else []
    if not tokens:
        yield (), 1.0
    for token in tokens:
        rest = law.copy()
        rest[token] = 0
        for others, weight in siblings(rest, count - 1):
            yield (token, *others), weight * float(law[token] / law.sum())


def drawn_trees(
    draft: Laws,
    branching: Sequence[int],
    texts: tuple[Text, ...] = ((),),
    parents: Text = (-1,),
    node: int = 0,
) -> Iterator[Drawn]:
    """Every tree that sampling from `draft` may propose, with `branching[d]` children drawn at each node of depth d."""
    if node == len(texts):
        laws = [torch.full_like(draft[0], torch.nan)] + [
            draft[len(text) - 1][text[:-1]] for text in texts[1:]
        ]
        tokens = torch.tensor([0] + [text[-1] for text in texts[1:]])
        yield DraftTree(tokens, torch.tensor(parents), torch.stack(laws)), list(texts), 1.0
        return
    text = texts[node]
    law, count = (
        (draft[len(text)][text], branching[len(text)])
        if len(text) < len(branching)
        else (draft[0], 0)
    )
    for children, weight in siblings(law.double().numpy(), count):
        below = texts + tuple((*text, child) for child in children)
        for tree, all_texts, rest in drawn_trees(
            draft, branching, below, parents + (node,) * len(children), node + 1
        ):
            yield tree, all_texts, weight * rest


def texts_of(tree: DraftTree) -> list[Text]:
    """The tokens after the root, up to each node."""
    tokens = tree.tokens.tolist()
    return [tuple(tokens[step] for step in tree.path(node)[1:]) for node in range(len(tree))]


def emitted(rule: Rule, target: Laws, trees: Iterable[Drawn]) -> tuple[np.ndarray, float]:
    """The joint law [V] * M of the first M tokens, and the mean number of drafts accepted.

    One cycle is run; what it leaves open is said by the target itself, what goes beyond M tokens is not looked at.
    """
    after = futures(target)
    joint, accepted = np.zeros_like(after[0]), 0.0
    for tree, texts, weight in trees:

        def law(node: int, texts: list[Text] = texts) -> Tensor:
            return target[len(texts[node])][texts[node]]

        for (path, last), odds in every_outcome(partial(_run, rule, tree, law)):
            assert path == tree.path(path[-1]), "a rule accepts a path from the root"
            text, probability = texts[path[-1]], weight * odds
            future = after[len(text) + 1][text]
            joint[text] += probability * last.reshape([-1] + [1] * (future.ndim - 1)) * future
            accepted += probability * len(text)
    return joint, accepted


def _run(rule: Rule, tree: DraftTree, law: Probs, chance: Chance) -> tuple[list[int], np.ndarray]:
    """The accepted path and the law of the token after it: a rule returns its only pick as it is, so it stays open."""
    picked: list[np.ndarray] = []

    def pick(law: Tensor) -> int:
        picked.append(law.double().numpy())
        return OPEN

    path, token = rule(tree, law, chance.coin, pick)
    assert token == OPEN and len(picked) == 1
    return path, picked[0] / picked[0].sum()


def distance(joint: np.ndarray, target: Laws) -> float:
    """Total variation between a joint law and the target's own; that of fewer tokens is never larger."""
    return float(np.abs(joint - futures(target)[0]).sum() / 2)
