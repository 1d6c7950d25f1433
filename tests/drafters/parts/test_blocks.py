"""Growing trees: the nodes are those that plain Python keeps, none loses its parent, and a level costs one forward."""

# K nodes of a level, V vocabulary

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle import Budget, DraftTree, Sampling
from eagle.core.tree import PUBLISHED_TREE
from eagle.core.verify import Choose
from eagle.drafters.parts.growth import SHARPNESS, grow
from tests.enumerate_law import Text, random_logits, texts_of

# from a drafted text to the logits [V] after it
Table = Callable[[Text], Tensor]
Believe = Callable[[Text], list[float]]
ROOT = 0
POSITION = 11
CPU = torch.device("cpu")


class TableHead:
    """A head that is a table of logits; it records what it is asked to read, level by level."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.levels: list[list[Text]] = [[()]]

    def __call__(
        self,
        depth: int,
        tokens: Tensor,
        parents: Tensor,
        tree_mask: Tensor,
    ) -> Tensor:
        """Return the logits [K, V] after a level's nodes, which follow nodes of the level before."""
        above = self.levels[-1]
        pairs = zip(parents.tolist(), tokens.tolist(), strict=True)
        level = [(*above[parent], token) for parent, token in pairs]
        self.levels.append(level)
        assert len(self.levels) == depth + 1
        # a node sees the nodes of its own path and no other
        texts = [text for read in self.levels[1:] for text in read]
        assert tree_mask.shape == (len(level), len(texts))
        for text, row in zip(level, tree_mask.tolist(), strict=True):
            seen = [other for other, is_seen in zip(texts, row, strict=True) if is_seen]
            assert seen == [text[:end] for end in range(1, depth + 1)]
        return torch.stack([self.table(text) for text in level])

    def grow(self, budget: Budget, noise: Any = None) -> DraftTree:
        """Return the tree that this head grows."""
        return grow(
            ROOT,
            self.table(()),
            self,
            budget=budget,
            noise=noise,
            place=POSITION,
        )


def grow_plainly(believe: Believe, budget: Budget) -> dict[Text, float]:
    """Return the nodes of EAGLE-2 with their log-likelihoods, in plain Python.

    The `top_k` likeliest of each level are expanded, and of all nodes the `nodes` best are kept.
    """
    frontier: dict[Text, float] = {(): 0.0}
    nodes: dict[Text, float] = {}
    for _ in range(budget.depth):
        level: dict[Text, float] = {}
        for text, total in frontier.items():
            ranked = sorted(enumerate(believe(text)), key=lambda child: -child[1])
            for token, log_prob in ranked[: budget.top_k]:
                level[(*text, token)] = total + log_prob
        nodes |= level
        frontier = dict(sorted(level.items(), key=lambda item: -item[1])[: budget.top_k])
    # a parent comes before a child that is as likely
    best = sorted(nodes.items(), key=lambda item: (-item[1], len(item[0])))
    return dict(best[: budget.nodes])


def believe_table(
    table: Table,
    sharpness: float = SHARPNESS,
    noise: Callable[[Text], Tensor] | None = None,
    top_k: int = 9,
) -> Believe:
    """Return log-probs after a text in fp64: of the head's logits, filtered, with noise, sharpened."""

    def believe(text: Text) -> list[float]:
        scores = table(text).double()
        scores[scores < scores.sort().values[-top_k]] -= 1000
        if noise is not None:
            scores = scores + noise(text).double()
        return (sharpness * scores).log_softmax(-1).tolist()

    return believe


def random_table(seed: int, scale: float = 2.0) -> Table:
    """Return random logits of nine tokens after every text of up to three."""
    logits = random_logits(seed, 9, 4, torch.float32, scale=scale)
    return lambda text: logits[len(text)][text]


def nodes_of(tree: DraftTree) -> set[Text]:
    """Return the texts that a tree holds."""
    return set(texts_of(tree)) - {()}


BUDGETS = [
    Budget(9, 3, 9),
    Budget(20, 4, 3),
    Budget(60, 4, 4),
    Budget(3, 4, 1),
    Budget(5, 1, 3),
]


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
def test_a_dynamic_tree_is_that_of_plain_python(budget: Budget) -> None:
    """Nodes and likelihoods of greedy decoding are equal, from nearly certain heads to undecided ones."""
    for seed in range(10):
        # a small scale makes flat probs, a large one sharp ones
        table = random_table(seed, scale=(0.3, 1.0, 3.0)[seed % 3])
        tree = TableHead(table).grow(budget)
        expected = grow_plainly(believe_table(table), budget)
        assert max(map(len, tree.children())) <= budget.top_k
        likelihoods = dict(zip(texts_of(tree), tree.likelihoods.tolist(), strict=True))
        assert likelihoods == pytest.approx({(): 0.0, **expected}, abs=1e-4)


def test_a_budget_says_how_sharply_a_tree_follows_the_likeliest() -> None:
    """At 1 the head's own probs count, as published; the default grows other trees."""
    budget = Budget(6, 4, 3, sharpness=1.0)
    different = 0
    for seed in range(10):
        table = random_table(seed, scale=1.0)
        nodes = nodes_of(TableHead(table).grow(budget))
        assert nodes == set(grow_plainly(believe_table(table, sharpness=1.0), budget))
        different += nodes != nodes_of(TableHead(table).grow(Budget(6, 4, 3)))
    assert different > 0


@pytest.mark.parametrize("draw", ["noise", "likeliest"])
@pytest.mark.parametrize(("temperature", "top_k"), [(0.5, 9), (1.0, 2)])
def test_above_temperature_0_it_knows_the_noise_or_expects_it(
    draw: Any,
    temperature: float,
    top_k: int,
) -> None:
    """Known noise joins the logits at its token's position; unknown noise makes the tree less sure."""
    sampling = Sampling(temperature=temperature, seed=3, top_k=top_k)
    noise = Choose(sampling).offer(9, CPU)
    budget = Budget(12, 4, 3, draw=draw)
    for seed in range(10):
        table = random_table(seed)
        if draw == "noise":
            believe = believe_table(
                table,
                noise=lambda text: noise([POSITION + len(text)])[0],
                top_k=top_k,
            )
        else:
            # the noise of a sample widens the head's distribution
            sharpness = 1 / math.hypot(temperature, 1 / SHARPNESS)
            believe = believe_table(table, sharpness=sharpness, top_k=top_k)
        assert nodes_of(TableHead(table).grow(budget, noise)) == set(grow_plainly(believe, budget))


# -- ties and rounding ------------------------------------------------------------------------------------------------


def certain_table(seed: int) -> Table:
    """Return a head in bf16 that is certain or torn between equals, depending on a text's length."""

    def logits(text: Text) -> Tensor:
        generator = torch.Generator().manual_seed(100 * seed + len(text))
        coarse = torch.randint(0, 3, (9,), generator=generator)
        is_certain = torch.rand((), generator=generator) < 0.5
        peak = torch.where(torch.arange(9) == coarse[0], 60.0, 0.0) * is_certain
        return (coarse + peak).bfloat16()

    return logits


def large_table(seed: int) -> Table:
    """Return a head whose logits are so large that sums in fp32 lose the last bits of a likelihood near 0."""

    def logits(text: Text) -> Tensor:
        generator = torch.Generator().manual_seed(100 * seed + len(text))
        scores = 3 * torch.rand(9, generator=generator)
        return scores + torch.where(scores == scores.max(), 300.0, 290.0)

    return logits


@pytest.mark.quick("large_table")
@pytest.mark.parametrize("make", [certain_table, large_table])
def test_no_node_loses_its_parent(make: Callable[[int], Table]) -> None:
    """Of equally likely nodes the shallower one stays, and all are as likely as those of plain Python."""
    for seed in range(40):
        table = make(seed)
        believe = believe_table(table)
        budget = Budget(6 + seed % 9, 5, 3)
        nodes = nodes_of(TableHead(table).grow(budget))
        assert {text[:-1] for text in nodes} <= nodes | {()}
        likelihoods = []
        for text in nodes:
            likelihoods.append(sum(believe(text[:end])[token] for end, token in enumerate(text)))
        expected = grow_plainly(believe, budget).values()
        assert sorted(likelihoods) == pytest.approx(sorted(expected), abs=1e-3)


def test_a_certain_head_grows_a_chain_first() -> None:
    """Where every prob is 1, depth decides, and the chain is whole."""
    rows = 100.0 * torch.eye(9, dtype=torch.bfloat16)
    tree = TableHead(lambda text: rows[len(text)]).grow(Budget(5, 5, 3))
    assert nodes_of(tree) == {tuple(range(end)) for end in range(1, 6)}


# -- shapes -----------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no parent": (lambda: Budget.fixed(((0, 0),)), "ranks on its way"),
    "no such rank": (lambda: Budget.fixed(((-1,),)), "ranks on its way"),
    "too many nodes": (lambda: Budget(paths=PUBLISHED_TREE), "holds 25 nodes, expected 10"),
    "too many children": (lambda: Budget(2, 2, 1, ((0,), (1,))), "ranks below top_k = 1"),
    # a tree that keeps what is likely would bend the distribution, as would a sibling that skips an earlier one
    "dynamic": (lambda: Budget(8, 4, 2, draw="sampled"), "needs a fixed shape"),
    "no earlier sibling": (lambda: Budget.fixed(((0,), (2,)), "sampled"), "siblings drawn before"),
    "no such draw": (lambda: Budget(draw="greedy"), "noise, likeliest, sampled"),  # type: ignore[arg-type]
    "sharpness": (lambda: Budget(sharpness=0), "above 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_budget_that_cannot_be_is_refused(case: str) -> None:
    """The message says what is expected."""
    make, keyword = REFUSED[case]
    with pytest.raises(ValueError, match=keyword):
        make()


def test_a_level_costs_one_forward_over_the_nodes_with_children() -> None:
    """Leaves of the published tree are never read."""
    head = TableHead(random_table(0))
    head.grow(Budget.fixed(tuple(path for path in PUBLISHED_TREE if len(path) < 5)))
    assert [len(level) for level in head.levels[1:]] == [4, 4, 1]


def test_siblings_come_in_the_order_of_their_ranks() -> None:
    """The order in which a shape is written down makes no difference."""
    table = random_table(0)
    first, second = (
        TableHead(table).grow(Budget.fixed(paths))
        for paths in (((1,), (0,), (1, 0)), ((0,), (1, 0), (1,)))
    )
    assert first.tokens.equal(second.tokens)
    assert first.parents.equal(second.parents)
    assert first.tokens[1:3].equal(table(()).topk(2).indices)
