"""Children drawn from a head's law: what grows is drawn as its laws say, and verifying it emits the target's law."""

# K rows, V vocabulary, M tokens looked at

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import permutations, product
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

from eagle import Budget, DraftTree, Sampling
from eagle.core.noise import mix64
from eagle.core.tree import Paths, TargetOutput, best_tree, chain_paths
from eagle.core.verify import Choose, DrafterNoise, verify, warp
from eagle.drafters.parts.growth import grow
from tests.core.test_verify_law import verify_by
from tests.enumerate_law import (
    Chance,
    Drawn,
    Laws,
    Text,
    distance,
    emitted,
    every_outcome,
    futures,
    laws_of,
    random_logits,
    texts_of,
)

CPU = torch.device("cpu")
CHANCE = 1e-4  # the p-value below which a statistic is not believed to be chance
SAMPLINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.5),
    Sampling(temperature=1.0, top_p=0.7),
    Sampling(temperature=0.5, top_k=2),
    Sampling(temperature=1.0, rule="block"),
]
SHAPES: dict[str, Paths] = {
    "chain": chain_paths(3),
    "fixed": ((0,), (1,), (0, 0), (1, 0)),
    "wide": ((2,), (1,), (0,)),
    "best": best_tree([[0.6, 0.2], [0.4, 0.3]], 4, 2),
}
CASES = [
    pytest.param(
        shape,
        sampling,
        id=f"{shape}-T={sampling.temperature}-{sampling.top_p}-{sampling.top_k}-{sampling.rule}",
    )
    for shape, sampling in product(SHAPES, SAMPLINGS)
    if shape == "chain" or sampling.rule == "token"
]


def make_target_and_head(seed: int, vocab_size: int, lengths: int) -> tuple[Laws, Laws]:
    """Logits of a target and of a head that has learned something of it."""
    logits, errors = (
        random_logits(seed + far, vocab_size, lengths, torch.float32) for far in (0, 1000)
    )
    return logits, [row + 0.5 * error for row, error in zip(logits, errors, strict=True)]


def draw_tree(logits: Laws, paths: Paths, noise: Any, text: Text = ()) -> DraftTree:
    """A tree of this shape after a text, drawn from a head that is a table of logits by text."""
    read: list[list[Text]] = [[text]]

    def level(_: int, tokens: Tensor, before: Tensor, seen: Tensor) -> Tensor:
        read.append(
            [
                (*read[-1][row], token)
                for row, token in zip(before.tolist(), tokens.tolist(), strict=True)
            ]
        )
        return torch.stack([logits[len(text)][text] for text in read[-1]])

    return grow(
        0, logits[len(text)][text], level, Budget.fixed(paths, "sampled"), noise, 3 + len(text)
    )


# -- by enumeration ---------------------------------------------------------------------------------------------------


class Scripted(DrafterNoise):
    """An offer whose own noise is enumerated: it puts children in every order that draws may have, by their odds."""

    def __init__(self, sampling: Sampling, vocab_size: int, chance: Chance, width: int) -> None:
        super().__init__(Choose(sampling), vocab_size, CPU)
        self.chance, self.width = chance, width

    def filter_logits(self, logits: Tensor) -> Tensor:
        """The same, remembered."""
        self.scores = super().filter_logits(logits)
        return self.scores

    def own(self, rows: int) -> Tensor:
        """[rows, V] that ranks the children drawn, one after another from what is left, above all others."""
        orders = []
        for law in (self.scores / self.temperature).double().softmax(-1):
            order, left = torch.zeros_like(law), law.clone()
            for rank in range(min(self.width, int((law > 0).sum()))):
                token = self.chance.draw((left / left.sum()).tolist())
                order[token], left[token] = self.width - rank, 0
            orders.append(order)
        return torch.stack(orders).float() * 1000


def every_tree(logits: Laws, sampling: Sampling, paths: Paths) -> Iterator[Drawn]:
    """All trees that the shipped code may draw, with probabilities."""
    vocab_size, width = logits[0].shape[-1], 1 + max(rank for path in paths for rank in path)

    def draw(chance: Chance) -> DraftTree:
        return draw_tree(logits, paths, Scripted(sampling, vocab_size, chance, width))

    for tree, weight in every_outcome(draw):
        yield tree, texts_of(tree), weight


@pytest.mark.parametrize(("shape", "sampling"), CASES)
def test_drawn_trees_leave_the_targets_law_as_it_is(shape: str, sampling: Sampling) -> None:
    """Every tree that may be drawn, through the public rule: the first four tokens have the target's own joint law."""
    for seed in range(3):
        logits, head = make_target_and_head(seed, 3, 4)
        trees = list(every_tree(head, sampling, SHAPES[shape]))
        assert sum(weight for *_, weight in trees) == pytest.approx(1, abs=1e-6)
        joint, accepted = emitted(
            partial(verify_by, logits, sampling), laws_of(logits, sampling), trees
        )
        assert distance(joint, laws_of(logits, sampling)) < 1e-5
        assert accepted > 0.3


def faulty(tree: DraftTree, head: Laws, fault: str) -> DraftTree:
    """The same tree with laws that its nodes were not drawn from, or with siblings in another order."""
    assert tree.draft_probs is not None
    if fault == "unfiltered":
        return replace(
            tree,
            draft_probs=torch.stack(
                [head[len(text[:-1])][text[:-1]] for text in texts_of(tree)]
            ).softmax(-1),
        )
    if fault == "of the level above":
        return replace(tree, draft_probs=tree.draft_probs[tree.parents.clamp(min=0)])
    order = torch.tensor([0, 2, 1, *range(3, len(tree))])
    parents = [int(order.argsort()[parent]) for parent in tree.parents[order[1:]].tolist()]
    return DraftTree(tree.tokens[order], torch.tensor([-1, *parents]), tree.draft_probs)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["unfiltered", "of the level above", "out of order"])
def test_laws_that_nodes_were_not_drawn_from_are_seen(fault: str) -> None:
    """Planted faults: laws without temperature, those of other nodes, siblings that are not in the order of drawing."""
    sampling, losses = Sampling(temperature=0.5), []
    for seed in range(3):
        logits, head = make_target_and_head(seed, 3, 4)
        wrong = [
            (faulty(tree, head, fault), weight)
            for tree, _, weight in every_tree(head, sampling, SHAPES["fixed"])
        ]
        trees = [(tree, texts_of(tree), weight) for tree, weight in wrong]
        joint, _ = emitted(partial(verify_by, logits, sampling), laws_of(logits, sampling), trees)
        losses.append(distance(joint, laws_of(logits, sampling)))
    assert np.mean(losses) > 1e-3


# -- by the dice ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_draws_follow_the_law_without_replacement() -> None:
    """The first two of 3,000 rankings by the law's log-odds and the offered noise, with and without temperature."""
    law = torch.tensor([0.5, 0.3, 0.15, 0.05])
    for temperature in (1.0, 0.4):
        noise = Choose(Sampling(temperature=temperature, seed=1)).offer(4, CPU)
        assert noise is not None
        pairs = (temperature * law.log() + noise.own(3000)).topk(2).indices
        counts = [
            int((pairs == torch.tensor(pair)).all(1).sum()) for pair in permutations(range(4), 2)
        ]
        odds = [
            float(law[one] * law[other] / (1 - law[one]))
            for one, other in permutations(range(4), 2)
        ]
        assert scipy.stats.chisquare(counts, 3000 * np.array(odds) / sum(odds)).pvalue > CHANCE


def test_noise_of_its_own_is_new_in_every_call_and_nobody_elses() -> None:
    """Not the target's at any place, not that of another request, and the same when all begins again."""
    offers = [
        Choose(Sampling(temperature=1.0, seed=5, request=request)).offer(50, CPU)
        for request in (0, 0, 1)
    ]
    rows = [torch.cat([offer.own(3), offer.own(2)]) for offer in offers if offer is not None]
    assert rows[0].equal(rows[1])
    everyones = torch.cat([rows[0], rows[2], offers[0](list(range(40)))])  # type: ignore[misc]
    assert len(everyones.unique(dim=0)) == 50


@pytest.mark.parametrize(
    "sampling", [*SAMPLINGS[:4], Sampling(temperature=0.8, top_p=0.9, min_p=0.01)], ids=str
)
@pytest.mark.parametrize("vocab_size", [5, 2000])
def test_filtered_logits_leave_the_law_that_the_target_would_make_of_them(
    sampling: Sampling, vocab_size: int
) -> None:
    """The same law as by its filters over the whole vocabulary; what is outside keeps its order."""
    noise = Choose(sampling).offer(vocab_size, CPU)
    assert noise is not None
    logits = 6 * torch.randn(7, vocab_size, generator=torch.Generator().manual_seed(1))
    filtered, law = noise.filter_logits(logits), warp(logits, sampling).softmax(-1)
    torch.testing.assert_close(
        (filtered / sampling.temperature).softmax(-1), law, rtol=0, atol=1e-6
    )
    assert ((filtered / sampling.temperature).softmax(-1) == 0)[law == 0].all()
    assert filtered.topk(5).indices.equal(logits.topk(5).indices)


class CoinSharing(DrafterNoise):
    """A planted fault: the draft's noise is made of the very numbers that its verification tosses."""

    def own(self, rows: int) -> Tensor:
        """[rows, V] from the dice of `Choose`."""
        if not hasattr(self, "dice"):
            self.dice = random.Random(
                mix64(mix64(self.choose.sampling.seed) ^ self.choose.sampling.request)
            )
        uniform = [[self.dice.random() for _ in range(self.vocab_size)] for _ in range(rows)]
        return -(-torch.tensor(uniform).log()).log() * self.temperature


class Positional(DrafterNoise):
    """A planted fault for rules that look ahead: a place that is drafted again is drawn with what it was before."""


def generate_tokens(
    target: Laws, head: Laws, sampling: Sampling, paths: Paths, offer: Any = None, length: int = 3
) -> Text:
    """The first tokens of a generation whose target and head are tables of logits by text."""
    choose = Choose(sampling)
    text: Text = ()
    noise = (offer or DrafterNoise)(choose, target[0].shape[-1], CPU)
    while len(text) < length:
        if isinstance(noise, Positional):
            noise.used_rows = 3 + len(text)
        tree = draw_tree(head, paths, noise, text)
        texts = [(*text, *path) for path in texts_of(tree)]
        logits = torch.stack([target[len(text)][text] for text in texts])
        path, token = verify(TargetOutput(tree, logits, None, 2, [1, 2]), choose)
        text = (*texts[path[-1]], token)
    return text[:length]


def p_value(sampling: Sampling, paths: Paths, offer: Any = None, count: int = 600) -> float:
    """The p-value of what that many requests say, under the target's joint law of three tokens."""
    (logits, head), length = make_target_and_head(2, 3, 6), 3
    joint = futures(laws_of(logits[:length], sampling))[0]
    counts = np.zeros_like(joint)
    for request in range(count):
        counts[generate_tokens(logits, head, replace(sampling, request=request), paths, offer)] += 1
    assert counts[joint == 0].sum() == 0
    expected = joint[joint > 0]
    return float(scipy.stats.chisquare(counts[joint > 0], count * expected / expected.sum()).pvalue)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "rule"), [("chain", 0), ("chain", 4), ("wide", 2), ("best", 3)])
def test_generations_of_drawn_drafts_have_the_targets_law(shape: str, rule: int) -> None:
    """Cycle after cycle with the shipped dice, the draft's stream and the target's."""
    assert p_value(SAMPLINGS[rule], SHAPES[shape]) > CHANCE


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "rule", "count"), [(CoinSharing, 0, 600), (Positional, 4, 2000)])
def test_drafts_drawn_with_used_numbers_are_seen(fault: Any, rule: int, count: int) -> None:
    """The planted faults bend the law."""
    assert p_value(SAMPLINGS[rule], SHAPES["chain"], fault, count) < CHANCE / 100
