"""Growing trees: what is kept is what plain Python keeps, no node loses its parent, and a level costs one reading."""

# K rows, V vocabulary

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
from tests.enumerate_law import Laws, Text, random_logits, texts_of

Likelihoods = dict[Text, float]
Table = Callable[[Text], Tensor]
ROOT, PLACE = 0, 11
CPU = torch.device("cpu")


class Asked:
    """A head that is a table of logits by drafted text; it keeps what it was asked to read."""

    def __init__(self, table: Table) -> None:
        self.table, self.read = table, [[()]]
        self.rows: list[Text] = []  # all that was read, in order

    def __call__(self, depth: int, tokens: Tensor, before: Tensor, seen: Tensor) -> Tensor:
        """[K, V] behind the rows read; they follow rows of the level before, and see their own path alone."""
        above = self.read[-1]
        self.read.append(
            [
                (*above[row], token)
                for row, token in zip(before.tolist(), tokens.tolist(), strict=True)
            ]
        )
        self.rows += self.read[-1]
        assert len(self.read) == depth + 1 and seen.shape == (len(tokens), len(self.rows))
        for text, marks in zip(self.read[-1], seen.tolist(), strict=True):
            assert sum(marks) == depth
            assert {self.rows[row] for row, mark in enumerate(marks) if mark} == {
                text[:end] for end in range(1, depth + 1)
            }
        return torch.stack([self.table(text) for text in self.read[-1]])

    def grow(self, budget: Budget, noise: Any = None) -> DraftTree:
        """The tree that this head grows."""
        return grow(ROOT, self.table(()), self, budget, noise, PLACE)


def eagle2(belief: Callable[[Text], list[float]], budget: Budget) -> Likelihoods:
    """EAGLE-2 in plain Python: expand the `top_k` likeliest of each level, rerank all to the `nodes` best."""
    frontier: Likelihoods = {(): 0.0}
    found: Likelihoods = {}
    for _ in range(budget.depth):
        level: Likelihoods = {}
        for text, total in frontier.items():
            children = sorted(enumerate(belief(text)), key=lambda child: -child[1])[: budget.top_k]
            level |= {(*text, token): total + odds for token, odds in children}
        found |= level
        frontier = dict(sorted(level.items(), key=lambda item: -item[1])[: budget.top_k])
    return dict(sorted(found.items(), key=lambda item: (-item[1], len(item[0])))[: budget.nodes])


def believed(
    table: Table, exponent: float, noise: Callable[[Text], Tensor] | None = None, top_k: int = 9
) -> Callable[[Text], list[float]]:
    """Log-odds of what may follow a text, in double precision: a power of the head's law, filtered, noise added."""

    def odds(text: Text) -> list[float]:
        scores = table(text).double()
        scores[scores < scores.sort().values[-top_k]] -= 1000
        scores = scores if noise is None else scores + noise(text).double()
        return (exponent * scores).log_softmax(-1).tolist()

    return odds


def table_of(logits: Laws) -> Table:
    """The logits after a text."""
    return lambda text: logits[len(text)][text]


def held(tree: DraftTree) -> set[Text]:
    """The texts that a tree holds."""
    return set(texts_of(tree)) - {()}


BUDGETS = [
    Budget(9, 3, 9),
    Budget(6, 4, 2),
    Budget(20, 4, 3),
    Budget(60, 4, 4),
    Budget(3, 4, 1),
    Budget(2, 3, 4),
    Budget(5, 1, 3),
]


def offered(temperature: float, seed: int = 0, **filters: Any) -> Any:
    """The noise of a target that samples over nine tokens."""
    return Choose(Sampling(temperature=temperature, seed=seed, **filters)).offer(9, CPU)


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
def test_a_dynamic_tree_is_that_of_plain_python(budget: Budget, scale: float) -> None:
    """Greedy: the same nodes, whatever is left unread, in a form that a tree accepts."""
    for seed in range(10):
        table = table_of(random_logits(seed, 9, 4, torch.float32, scale))
        tree, expected = Asked(table).grow(budget), eagle2(believed(table, SHARPNESS), budget)
        assert held(tree) == set(expected)
        assert max(map(len, tree.children())) <= budget.top_k
        assert tree.likelihoods is not None
        likely = dict(zip(texts_of(tree), tree.likelihoods.tolist(), strict=True))
        assert likely == pytest.approx({(): 0.0, **expected}, abs=1e-4)


@pytest.mark.parametrize("sharpness", [1.0, 2.0])
def test_a_budget_says_how_sharply_a_tree_follows_the_likeliest(sharpness: float) -> None:
    """At 1 the published rule's tree, of the head's own probabilities; by default another."""
    budget, others = Budget(6, 4, 3, sharpness=sharpness), 0
    for seed in range(10):
        table = table_of(random_logits(seed, 9, 4, torch.float32, 1.0))
        nodes = held(Asked(table).grow(budget))
        assert nodes == set(eagle2(believed(table, sharpness), budget))
        others += nodes != held(Asked(table).grow(Budget(6, 4, 3)))
    assert others > 0
    with pytest.raises(ValueError, match=r"Budget\.sharpness is 0, expected a number above 0"):
        Budget(sharpness=0)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize("draw", ["noise", "likeliest"])
@pytest.mark.parametrize("top_k", [9, 2])
def test_above_temperature_0_it_knows_the_noise_or_expects_it(
    draw: Any, temperature: float, top_k: int
) -> None:
    """Known noise joins the logits where its token would stand; unknown noise makes it less sure; filters hold."""
    noise = offered(temperature, seed=3, top_k=top_k)

    def here(text: Text) -> Tensor:
        return noise([PLACE + len(text)])[0]

    for seed in range(10):
        table, budget = (
            table_of(random_logits(seed, 9, 4, torch.float32)),
            Budget(12, 4, 3, draw=draw),
        )
        beliefs = {
            "noise": believed(table, SHARPNESS, here, top_k),
            "likeliest": believed(table, 1 / math.hypot(temperature, 1 / SHARPNESS), None, top_k),
        }
        assert held(Asked(table).grow(budget, noise)) == set(eagle2(beliefs[draw], budget))


# -- ties and rounding ------------------------------------------------------------------------------------------------


def sure(seed: int, dtype: torch.dtype) -> Table:
    """A head that is certain or torn between equals, as half precision makes it; its depth alone decides."""

    def logits(text: Text) -> Tensor:
        generator = torch.Generator().manual_seed(100 * seed + len(text))
        coarse = torch.randint(0, 3, (9,), generator=generator)
        peak = 60.0 * (torch.rand((), generator=generator) < 0.5)
        return torch.where(torch.arange(9) == coarse[0], coarse + peak, coarse).to(dtype)

    return logits


def large(seed: int, dtype: torch.dtype) -> Table:
    """A head whose logits are so large that sums of them lose the last bits of a likelihood near 0."""

    def logits(text: Text) -> Tensor:
        generator = torch.Generator().manual_seed(100 * seed + len(text))
        scores = 3 * torch.rand(9, generator=generator)
        return (scores + torch.where(scores == scores.max(), 300.0, 290.0)).to(dtype)

    return logits


@pytest.mark.quick("large-torch.float32")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head", [sure, large])
def test_no_node_loses_its_parent(head: Callable[..., Table], dtype: torch.dtype) -> None:
    """Ties go to the shallow node, and what is kept is as likely as what plain Python keeps."""
    for seed in range(40):
        table, budget = head(seed, dtype), Budget(6 + seed % 9, 5, 3)
        kept, likely = held(Asked(table).grow(budget)), eagle2(believed(table, SHARPNESS), budget)
        likelihood = {
            text: sum(believed(table, SHARPNESS)(text[:end])[text[end]] for end in range(len(text)))
            for text in kept
        }
        assert {text[:-1] for text in kept} <= kept | {()}
        assert sorted(likelihood.values()) == pytest.approx(sorted(likely.values()), abs=1e-3)


def test_a_certain_head_grows_a_chain_first() -> None:
    """Where everything is a tie at certainty, depth decides, and the chain is whole."""
    chain = Asked(lambda text: 100.0 * torch.eye(9, dtype=torch.bfloat16)[len(text)]).grow(
        Budget(5, 5, 3)
    )
    assert held(chain) == {tuple(range(end)) for end in range(1, 6)}


# -- shapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("paths", [((0, 0),), ((0,), (1,), (2, 0)), ((-1,),)])
def test_shapes_with_holes_are_refused(paths: tuple[tuple[int, ...], ...]) -> None:
    """A node needs its parent and a rank."""
    with pytest.raises(ValueError, match="name every node by the ranks on its way"):
        Budget.fixed(paths)


def test_a_shape_beyond_the_budget_is_refused() -> None:
    """The nodes allowed and the children allowed hold for shapes too."""
    with pytest.raises(ValueError, match=r"holds 25 nodes, expected 10: use Budget\.fixed"):
        Budget(paths=PUBLISHED_TREE)
    with pytest.raises(ValueError, match="ranks below top_k = 1"):
        Budget(2, 2, 1, ((0,), (1,)))


def test_draws_that_would_bend_the_law_are_refused() -> None:
    """A tree that keeps what is likely, and a sibling without the one drawn before it; and what is no draw at all."""
    with pytest.raises(
        ValueError, match=r"'sampled', which needs a fixed shape.*Budget\.fixed\(paths, 'sampled'\)"
    ):
        Budget(8, 4, 2, draw="sampled")
    with pytest.raises(ValueError, match="expected all siblings drawn before it"):
        Budget.fixed(((0,), (2,)), "sampled")
    assert Budget.fixed(((0,), (2,)), "likeliest").top_k == 3
    with pytest.raises(
        ValueError, match=r"Budget\.draw is 'greedy', expected one of noise, likeliest, sampled"
    ):
        Budget(draw="greedy")  # type: ignore[arg-type]


def test_a_level_costs_one_reading_of_the_nodes_with_children() -> None:
    """What is read of the published tree, level by level; `Asked` looks at whom it sees."""
    asked = Asked(lambda text: torch.rand(9, generator=torch.Generator().manual_seed(len(text))))
    asked.grow(Budget.fixed(PUBLISHED_TREE))
    assert [len(rows) for rows in asked.read[1:]] == [4, 4, 1, 1]


def test_siblings_come_in_the_order_of_their_ranks() -> None:
    """However the shape was written down."""
    table = table_of(random_logits(0, 9, 3, torch.float32))
    trees = [
        Asked(table).grow(Budget.fixed(paths))
        for paths in (((1,), (0,), (1, 0)), ((0,), (1, 0), (1,)))
    ]
    assert trees[0].tokens.equal(trees[1].tokens) and trees[0].parents.equal(trees[1].parents)
    assert trees[0].tokens[1:3].equal(table(()).topk(2).indices)
