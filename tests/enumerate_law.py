"""Exact laws of randomised rules: run a rule on every answer that chance may give, and add up what it emits."""

# V vocabulary, M tokens that are counted

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from eagle.core.tree import DraftTree
from eagle.core.verify import Coin, Pick, Probs, Sampling, warp

Outcome = TypeVar("Outcome")
Text = tuple[int, ...]
"""Tokens after the root."""
Laws = list[Tensor]
"""laws[d], [V] * d + [V], holds the law of the next token after every text of d tokens."""
Rule = Callable[[DraftTree, Probs, Coin, Pick], tuple[list[int], int]]
Drawn = tuple[DraftTree, list[Text], float]
"""A tree, the text of each of its nodes, its probability."""

OPEN = -1  # stands for every token at once
# settings of the random laws below
TARGETS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_p=0.9),
    Sampling(temperature=0.5, top_k=3),
    Sampling(temperature=1.5, top_p=0.6, top_k=3),
]
DRAFTS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.5),
    Sampling(temperature=1.5, top_p=0.7),
    # leaves too few tokens where three siblings are wanted
    Sampling(temperature=1.0, top_k=2),
    Sampling(temperature=1.0, top_k=1),
]


class Chance:
    """The answers of one run: those of the script, then the first possible ones; the others are left for later."""

    def __init__(self, script: list[int]) -> None:
        self.script = script
        self.step = 0
        self.weight = 1.0
        self.later: list[list[int]] = []

    def draw(self, law: Sequence[float]) -> int:
        """Return an index drawn from a law."""
        if self.step == len(self.script):
            # the first possible answer is taken, and a script is kept for each other
            first, *others = [answer for answer, probability in enumerate(law) if probability > 0]
            self.later += [[*self.script, other] for other in others]
            self.script = [*self.script, first]
        answer = self.script[self.step]
        self.step += 1
        self.weight *= law[answer]
        return answer

    def coin(self, probability: float) -> bool:
        """Return True with this probability."""
        return bool(self.draw([1 - probability, probability]))


def every_outcome(run: Callable[[Chance], Outcome]) -> Iterator[tuple[Outcome, float]]:
    """Yield all that a randomised function may return, with probabilities."""
    # a script fixes the first answers of a run; each run adds those it did not take
    scripts: list[list[int]] = [[]]
    while scripts:
        chance = Chance(scripts.pop())
        outcome = run(chance)
        scripts += chance.later
        yield outcome, chance.weight


def random_logits(
    seed: int,
    vocab_size: int,
    lengths: int,
    dtype: torch.dtype,
    scale: float = 2.0,
) -> Laws:
    """Return logits after every text shorter than `lengths`.

    Args:
        seed: draws the logits.
        vocab_size: V.
        lengths: how many lengths of texts have logits.
        dtype: that the logits are rounded to.
        scale: their standard deviation.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = []
    for length in range(lengths):
        shape = [vocab_size] * (length + 1)
        rows = torch.randn(shape, generator=generator, dtype=torch.float64)
        logits.append(scale * rows.to(dtype))
    return logits


def laws_of(logits: Laws, sampling: Sampling) -> Laws:
    """Return the laws of a model with these logits under these filters."""
    laws = []
    for rows in logits:
        warped = warp(rows.reshape(-1, rows.shape[-1]), sampling)
        laws.append(warped.softmax(-1).view_as(rows))
    return laws


def random_laws(
    seed: int,
    vocab_size: int,
    depth: int,
    dtype: torch.dtype = torch.float64,
) -> tuple[Laws, Laws]:
    """Return distributions of a target and a draft: flat or peaked, filtered or not, sometimes equal."""
    dice = random.Random(seed)
    lengths = max(depth + 1, 4)
    target_scale = dice.choice((1.0, 2.0, 6.0))
    draft_scale = dice.choice((1.0, 4.0))
    target_logits = random_logits(
        seed,
        vocab_size,
        lengths,
        dtype,
        scale=target_scale,
    )
    draft_logits = random_logits(
        seed + 10_000,
        vocab_size,
        depth,
        dtype,
        scale=draft_scale,
    )
    target = laws_of(target_logits, dice.choice(TARGETS))
    draft = laws_of(draft_logits, dice.choice(DRAFTS))
    return target, target if dice.random() < 0.1 else draft


def futures(target: Laws) -> list[np.ndarray]:
    """Return [V] * M each: after a text of d tokens (the first d axes), the joint law of the next M - d."""
    vocab_size = target[0].shape[-1]
    length = len(target)
    joint = [np.ones([vocab_size] * length)]
    for depth in reversed(range(length)):
        # p(next | text), spread over the tokens after it, times p(those after it)
        shape = [vocab_size] * (depth + 1) + [1] * (length - depth - 1)
        law = target[depth].double().numpy().reshape(shape)
        joint.insert(0, law * joint[0])
    return joint


def siblings(law: np.ndarray, count: int) -> Iterator[tuple[Text, float]]:
    """Yield ordered draws without replacement, with probabilities; fewer than `count` where the law runs dry."""
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
    """Yield every tree that sampling from `draft` may propose.

    Args:
        draft: the laws that drafts are drawn from.
        branching: how many children are drawn at a node of each depth.
        texts: the text of each node so far.
        parents: the parent of each node so far.
        node: the next node whose children are drawn.
    """
    if node == len(texts):
        # the tree is whole: the root was not drawn
        drawn = texts[1:]
        laws = [draft[len(text) - 1][text[:-1]] for text in drawn]
        probs = torch.stack([torch.full_like(draft[0], torch.nan), *laws])
        tokens = torch.tensor([0, *(text[-1] for text in drawn)])
        yield DraftTree(tokens, torch.tensor(parents), probs), list(texts), 1.0
        return
    text = texts[node]
    is_leaf = len(text) == len(branching)
    law = draft[0] if is_leaf else draft[len(text)][text]
    count = 0 if is_leaf else branching[len(text)]
    for children, weight in siblings(law.double().numpy(), count):
        grown = (*texts, *((*text, child) for child in children))
        grown_parents = parents + (node,) * len(children)
        trees = drawn_trees(draft, branching, grown, grown_parents, node=node + 1)
        for tree, all_texts, rest in trees:
            yield tree, all_texts, weight * rest


def texts_of(tree: DraftTree) -> list[Text]:
    """Return the tokens after the root, up to each node."""
    tokens = tree.tokens.tolist()
    return [tuple(tokens[step] for step in tree.path(node)[1:]) for node in range(len(tree))]


def emitted(rule: Rule, target: Laws, trees: Iterable[Drawn]) -> tuple[np.ndarray, float]:
    """Return the joint law [V] * M of the first M tokens, and the mean number of accepted drafts.

    One cycle is run. The target itself continues what the cycle leaves open, and tokens beyond M are not counted.

    Args:
        rule: of verification.
        target: the target's laws, for the first M tokens.
        trees: what may be drafted.
    """
    after = futures(target)
    joint = np.zeros_like(after[0])
    accepted = 0.0
    for tree, texts, weight in trees:

        def law(node: int, texts: list[Text] = texts) -> Tensor:
            return target[len(texts[node])][texts[node]]

        for (path, last), odds in every_outcome(partial(_run, rule, tree, law)):
            assert path == tree.path(path[-1]), "a rule accepts a path from the root"
            text = texts[path[-1]]
            probability = weight * odds
            # p(path) p(token | path) p(what follows)
            future = after[len(text) + 1][text]
            joint[text] += probability * last.reshape([-1] + [1] * (future.ndim - 1)) * future
            accepted += probability * len(text)
    return joint, accepted


def _run(rule: Rule, tree: DraftTree, law: Probs, chance: Chance) -> tuple[list[int], np.ndarray]:
    """Return the accepted path and the law of the token after it: a rule returns its only pick, which stays open."""
    picked: list[np.ndarray] = []

    def pick(law: Tensor) -> int:
        picked.append(law.double().numpy())
        return OPEN

    path, token = rule(tree, law, chance.coin, pick)
    assert token == OPEN
    (last,) = picked
    return path, last / last.sum()


def distance(joint: np.ndarray, target: Laws) -> float:
    """Return the total variation between a joint law and the target's own; that of fewer tokens is never larger."""
    return float(np.abs(joint - futures(target)[0]).sum() / 2)
