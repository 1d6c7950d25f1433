"""Draft trees: relations agree with brute force, walks follow the target, and shapes are best."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise, product

import pytest
import torch

from eagle.core.budget import Budget
from eagle.core.tree import PUBLISHED_TREE, DraftTree, TargetOutput, best_tree, chain_paths
from eagle.core.verify import walk

NODES = range(5)
# the parents of all 24 trees of five nodes: node n hangs below any of the nodes before it
ALL_PARENTS = list(product([-1], [0], range(2), range(3), range(4)))


def make_tree(parents: tuple[int, ...]) -> DraftTree:
    """Return a tree of this form, every token different."""
    tokens = torch.arange(10, 10 + len(parents))
    return DraftTree(tokens, torch.tensor(parents))


def find_path(
    parents: tuple[int, ...],
    node: int,
) -> list[int]:
    """Return the nodes from the root to `node`, by recursion."""
    return [*find_path(parents, parents[node]), node] if node else [0]


@pytest.mark.parametrize("parents", ALL_PARENTS, ids=str)
def test_relations_of_every_tree_of_five_nodes(parents: tuple[int, ...]) -> None:
    """Paths, depths, ancestors, children and walks agree with brute force."""
    # what is compared is computed from the parents alone
    tree = make_tree(parents)
    ancestors = tree.ancestors()
    for node in NODES:
        path = find_path(parents, node)
        assert tree.path(node) == path
        assert tree.depths()[node] == len(path) - 1
        assert ancestors[node].tolist() == [other in path for other in NODES]
        assert tree.children()[node] == [child for child in NODES if parents[child] == node]
        # a target that chooses the tokens of the path is followed to its end; no node has token 0
        choices = [0] * 5
        for step, child in pairwise(path):
            choices[step] = int(tree.tokens[child])
        assert walk(tree, choices) == path


def test_paths_share_their_common_beginning() -> None:
    """Equal tokens after different ones are different nodes; repeated paths add nothing."""
    tree = DraftTree.from_paths(
        7,
        [
            [1, 2],
            [1, 3],
            [2, 3],
            [1, 2],
            [],
        ],
    )
    assert tree.tokens.tolist() == [
        7,
        1,
        2,
        3,
        2,
        3,
    ]
    assert tree.parents.tolist() == [
        -1,
        0,
        1,
        1,
        0,
        4,
    ]


def test_no_paths_leave_the_root_alone() -> None:
    """A drafter may propose nothing."""
    tree = DraftTree.from_paths(7, [])
    assert tree.tokens.tolist() == [7]
    assert tree.parents.tolist() == [-1]
    assert tree.depths() == [0]
    assert tree.children() == [[]]
    assert tree.ancestors().tolist() == [[True]]


def test_a_chain_has_one_branch() -> None:
    """Every node but the last has one child; draft probabilities stay with it."""
    # equal tokens may follow each other, as they are no siblings
    probs = torch.rand(3, 4)
    tree = DraftTree.chain([5, 5, 6], probs)
    assert tree.tokens.tolist() == [5, 5, 6]
    assert tree.parents.tolist() == [-1, 0, 1]
    assert tree.draft_probs is probs
    assert chain_paths(3) == (
        (0,),
        (0, 0),
        (0, 0, 0),
    )
    assert chain_paths(0) == ()


def test_the_published_tree_has_25_nodes_on_5_levels() -> None:
    """EAGLE-1's tree: every node has its parent and the siblings before it."""
    assert len(set(PUBLISHED_TREE)) == 25
    depths = [len(path) for path in PUBLISHED_TREE]
    # the widths of mc_sim_7b_63 in EAGLE's choices.py
    assert [depths.count(depth) for depth in range(1, 7)] == [
        4,
        8,
        8,
        3,
        2,
        0,
    ]
    for *parent, rank in PUBLISHED_TREE:
        assert not parent or tuple(parent) in PUBLISHED_TREE
        assert rank == 0 or (*parent, rank - 1) in PUBLISHED_TREE


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        (
            [1, 2, 3],
            [-1, 2, 0],
            "parents precede children: node 1",
        ),
        (
            [1, 2, 3],
            [-1, 0, 2],
            "parents precede children: node 2",
        ),
        (
            [1, 2, 3],
            [-1, 0, -2],
            "parents precede children: node 2",
        ),
        (
            [1, 2, 3],
            [-1, 0, -1],
            "one root: node 2",
        ),
        ([1, 2], [0, 0], "node 0 is the root"),
        (
            [1, 2, 2],
            [-1, 0, 0],
            "siblings differ: token 2",
        ),
        ([1, 2], [-1], "one parent per token"),
        ([], [], "one parent per token"),
    ],
)
def test_malformed_trees_are_refused(
    tokens: list[int],
    parents: list[int],
    message: str,
) -> None:
    """The message names the node and what was expected of it."""
    with pytest.raises(ValueError, match=message):
        DraftTree(torch.tensor(tokens), torch.tensor(parents))


@pytest.mark.parametrize("rows", [1, 3])
def test_probabilities_of_another_length_are_refused(rows: int) -> None:
    """There is one row per node, the root included."""
    with pytest.raises(ValueError, match=f"one row per node: got {rows}"):
        DraftTree.chain(
            [1, 2],
            torch.zeros(rows, 4),
        )


def test_the_walk_takes_only_children_of_the_last_node() -> None:
    """A chosen token that was drafted after another node does not count."""
    tree = DraftTree.from_paths(
        0,
        [[1, 2], [3, 4]],
    )
    assert walk(tree, [1, 4, 0, 2, 0]) == [0, 1]


def test_an_output_knows_the_whole_text_of_a_node() -> None:
    """Committed tokens, the root and drafted tokens; features follow a path."""
    tree = DraftTree.from_paths(
        3,
        [[4], [5, 6]],
    )
    logits = torch.zeros(4, 9)
    features = torch.rand(4, 2, 8)
    output = TargetOutput(
        tree,
        logits,
        features,
        start=2,
        sequence=[1, 2],
    )
    prefixes = [output.prefix(node) for node in range(4)]
    assert prefixes == [
        [1, 2, 3],
        [1, 2, 3, 4],
        [1, 2, 3, 5],
        [1, 2, 3, 5, 6],
    ]
    assert output.features_at([0, 2]).equal(features[[0, 2]])
    untapped = TargetOutput(
        tree,
        logits,
        None,
        start=2,
        sequence=[1, 2],
    )
    assert untapped.features_at([0]) is None


# -- the best shape ---------------------------------------------------------------------------------------------------

Rates = list[list[float]]
Path = tuple[int, ...]


def random_rates(
    seed: int,
    levels: int,
    ranks: int,
) -> Rates:
    """Return acceptance rates by depth and rank, of which those of a depth sum to at most 1."""
    dice = random.Random(seed)
    rates = []
    for _ in range(levels):
        row = [dice.random() ** 3 for _ in range(ranks)]
        total = max(1.0, sum(row))
        rates.append([rate / total for rate in row])
    return rates


def every_shape(
    ranks: int,
    depth: int,
    nodes: int,
) -> Iterator[frozenset[Path]]:
    """Yield all sets of at most `nodes` paths that contain the beginning of each of their paths."""
    shapes: set[frozenset[Path]] = {frozenset()}
    for _ in range(nodes + 1):
        yield from shapes
        larger = set()
        for shape in shapes:
            for parent, rank in product([(), *shape], range(ranks)):
                path = (*parent, rank)
                if len(path) <= depth and path not in shape:
                    larger.add(shape | {path})
        shapes = larger


def expected_accepted(rates: Rates, paths: Iterable[Path]) -> float:
    """Return the mean number of accepted nodes, by following the target's choices level by level."""
    shape = set(paths)

    def below(path: Path) -> float:
        total = 0.0
        row = rates[len(path)] if len(path) < len(rates) else []
        for rank, rate in enumerate(row):
            child = (*path, rank)
            if child in shape:
                total += rate * (1 + below(child))
        return total

    return below(())


@pytest.mark.parametrize("seed", range(3))
def test_the_best_tree_is_the_best_of_all_trees(seed: int) -> None:
    """Of all shapes with up to four nodes on up to three levels, none has a longer acceptance length."""
    rates = random_rates(seed, levels=3, ranks=3)
    for nodes, depth in product((1, 2, 4), (1, 2, 3)):
        # ties are possible, so values are compared, not shapes
        shape = best_tree(rates, nodes, depth)
        # one level has room for three ranks
        assert len(set(shape)) == len(shape) == (min(nodes, 3) if depth == 1 else nodes)
        assert max(map(len, shape)) <= depth
        best = max(expected_accepted(rates, other) for other in every_shape(3, depth, nodes))
        assert expected_accepted(rates, shape) == pytest.approx(best, abs=1e-12)


def sequoia(
    rates: Rates,
    nodes: int,
    depth: int,
) -> float:
    """Return the best mean number of accepted nodes by Sequoia's dynamic programme (Chen et al. 2024)."""

    @cache
    def best(
        left: int,
        level: int,
        rank: int,
    ) -> float:
        # of `left` nodes that are siblings of this rank and above, or below them
        if left == 0 or level == depth or rank == len(rates[0]):
            return 0.0
        # how many of the other nodes hang below this one
        totals = []
        for below in range(left):
            own = rates[level][rank] * (1 + best(below, level + 1, 0))
            totals.append(own + best(left - 1 - below, level, rank + 1))
        return max(totals)

    return best(nodes, 0, 0)


@pytest.mark.parametrize(
    ("nodes", "depth", "levels"),
    [
        (25, 6, 1),
        (25, 3, 3),
        (60, 8, 8),
    ],
)
def test_the_best_tree_is_sequoias(
    nodes: int,
    depth: int,
    levels: int,
) -> None:
    """Where rates fall with the rank, the shape is as good as the dynamic programme's and can be drafted."""
    rates = [sorted(row, reverse=True) for row in random_rates(nodes, levels, 10)]
    shape = best_tree(rates, nodes, depth)
    # levels below the last rates have the last rates
    all_rates = [rates[min(level, levels - 1)] for level in range(depth)]
    expected = sequoia(all_rates, nodes, depth)
    assert expected_accepted(all_rates, shape) == pytest.approx(expected, rel=1e-9)
    assert Budget.fixed(shape, "sampled").nodes == nodes


@pytest.mark.parametrize(
    ("rates", "nodes", "depth", "expected"),
    [
        (
            [[0.5, 0.5, 0.0]],
            3,
            9,
            (
                (0,),
                (1,),
                (0, 0),
            ),
        ),
        (
            [[1.0, 0.0]],
            5,
            3,
            chain_paths(3),
        ),
        ([[0.9]], 0, 3, ()),
        ([[0.9]], 3, 0, ()),
        ([[0.0, 0.0]], 3, 3, ()),
    ],
)
def test_ties_go_to_shallow_nodes_and_low_ranks(
    rates: Rates,
    nodes: int,
    depth: int,
    expected: tuple[Path, ...],
) -> None:
    """What is never chosen is left out."""
    assert best_tree(rates, nodes, depth) == expected


@pytest.mark.parametrize(
    "rates",
    [
        [],
        [[0.5, 1.1]],
        [[-0.1]],
        [[float("nan")]],
    ],
)
def test_rates_that_are_no_probabilities_are_refused(rates: Rates) -> None:
    """Counts, for example."""
    with pytest.raises(ValueError, match="probabilities by depth and rank"):
        best_tree(rates, 3, 3)
