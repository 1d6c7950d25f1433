"""Draft trees: relations agree with brute force, bad trees are refused, walks follow the target, shapes are best."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise, product
from math import prod

import pytest
import torch

from eagle.core.budget import Budget
from eagle.core.tree import PUBLISHED_TREE, DraftTree, TargetOutput, best_tree, chain_paths
from eagle.core.verify import walk

EVERY_TREE_OF_FIVE = [(-1, *parents) for parents in product(*(range(node) for node in range(1, 5)))]


def make(parents: tuple[int, ...]) -> DraftTree:
    """A tree of this form, every token different."""
    return DraftTree(torch.arange(10, 10 + len(parents)), torch.tensor(parents))


def path_by_hand(parents: tuple[int, ...], node: int) -> list[int]:
    """The nodes from the root to `node`, by recursion."""
    return [*path_by_hand(parents, parents[node]), node] if node else [0]


@pytest.mark.parametrize("parents", EVERY_TREE_OF_FIVE, ids=str)
def test_relations_between_nodes_are_those_of_brute_force(parents: tuple[int, ...]) -> None:
    """Paths, depths, ancestors and children of every tree with five nodes."""
    tree, paths = make(parents), [path_by_hand(parents, node) for node in range(5)]
    assert [tree.path(node) for node in range(5)] == paths
    assert tree.depths() == [len(path) - 1 for path in paths]
    assert tree.ancestors().tolist() == [[other in path for other in range(5)] for path in paths]
    assert tree.children() == [
        [child for child in range(5) if parents[child] == node] for node in range(5)
    ]
    assert len(tree) == 5


@pytest.mark.parametrize("parents", EVERY_TREE_OF_FIVE, ids=str)
def test_a_tree_is_rebuilt_from_its_paths(parents: tuple[int, ...]) -> None:
    """Paths in the order of their last nodes give the very tree; in any order the same set of paths."""
    tree = make(parents)
    paths = [tree.tokens[tree.path(node)].tolist()[1:] for node in range(5)]
    again = DraftTree.from_paths(10, paths)
    assert again.tokens.tolist() == tree.tokens.tolist() and again.parents.tolist() == list(parents)
    backwards = DraftTree.from_paths(10, paths[::-1])
    assert sorted(
        backwards.tokens[backwards.path(node)].tolist()[1:] for node in range(5)
    ) == sorted(paths)


def test_paths_share_what_they_have_in_common() -> None:
    """Equal beginnings are one branch, equal tokens after different ones are not; repeated paths add nothing."""
    tree = DraftTree.from_paths(7, [[1, 2], [1, 3], [2, 3], [1, 2], []])
    assert tree.tokens.tolist() == [7, 1, 2, 3, 2, 3]
    assert tree.parents.tolist() == [-1, 0, 1, 1, 0, 4]


def test_no_paths_leave_the_root_alone() -> None:
    """A drafter may propose nothing."""
    tree = DraftTree.from_paths(7, [])
    assert (tree.tokens.tolist(), tree.parents.tolist(), tree.depths(), tree.children()) == (
        [7],
        [-1],
        [0],
        [[]],
    )
    assert tree.ancestors().tolist() == [[True]]


def test_a_chain_has_one_branch() -> None:
    """Every node but the last has one child; its laws stay with it."""
    laws = torch.rand(3, 4)
    tree = DraftTree.chain([5, 5, 6], laws)
    assert (tree.tokens.tolist(), tree.parents.tolist(), tree.draft_probs) == (
        [5, 5, 6],
        [-1, 0, 1],
        laws,
    )


def test_the_published_tree_has_25_nodes_on_5_levels() -> None:
    """EAGLE-1's: every node has its parent and the siblings before it, and the widths of its levels are known."""
    assert len(set(PUBLISHED_TREE)) == 25
    assert [sum(len(path) == depth for path in PUBLISHED_TREE) for depth in range(1, 7)] == [
        4,
        8,
        8,
        3,
        2,
        0,
    ]
    for *above, rank in PUBLISHED_TREE:
        assert not above or tuple(above) in PUBLISHED_TREE
        assert rank == 0 or (*above, rank - 1) in PUBLISHED_TREE


def test_a_chains_shape_is_the_first_child_of_the_first_child() -> None:
    """One node a level."""
    assert chain_paths(3) == ((0,), (0, 0), (0, 0, 0))
    assert chain_paths(0) == ()


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        ([1, 2, 3], [-1, 2, 0], "parents precede children: node 1 has parent 2, expected 0..0"),
        ([1, 2, 3], [-1, 2, 1], "parents precede children: node 1 has parent 2, expected 0..0"),
        ([1, 2, 3], [-1, 0, 2], "parents precede children: node 2 has parent 2, expected 0..1"),
        ([1, 2, 3], [-1, 0, -2], "parents precede children: node 2 has parent -2, expected 0..1"),
        ([1, 2, 3], [-1, 0, -1], "a tree has one root: node 2 has parent -1 too"),
        ([1, 2], [0, 0], "node 0 is the root, with parent -1: got parent 0"),
        ([1, 2, 2], [-1, 0, 0], "siblings differ: token 2 stands twice under node 0"),
        ([1, 2], [-1], "one parent per token and a root: got 2 and 1"),
        ([], [], "one parent per token and a root: got 0 and 0"),
    ],
    ids=[
        "late parent",
        "cycle",
        "loop",
        "below -1",
        "two roots",
        "rooted root",
        "twins",
        "lengths",
        "empty",
    ],
)
def test_malformed_trees_are_refused(tokens: list[int], parents: list[int], message: str) -> None:
    """The message names the node and what was expected of it."""
    with pytest.raises(ValueError, match=re.escape(message)):
        DraftTree(torch.tensor(tokens), torch.tensor(parents))


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_laws_of_another_length_are_refused(rows: int) -> None:
    """There is one row per node, the root included."""
    with pytest.raises(ValueError, match=f"one row per node: got {rows}, expected 2"):
        DraftTree.chain([1, 2], torch.zeros(rows, 4))


@pytest.mark.parametrize("parents", EVERY_TREE_OF_FIVE, ids=str)
def test_the_walk_goes_where_the_target_chooses(parents: tuple[int, ...]) -> None:
    """It reaches whatever node the target speaks for, and ends where no child agrees."""
    tree = make(parents)
    for node in range(5):
        path, choices = tree.path(node), [0] * 5  # token 0 is nobody's
        for step, after in pairwise(path):
            choices[step] = int(tree.tokens[after])
        assert walk(tree, choices) == path


def test_the_walk_takes_only_children_of_the_last_node() -> None:
    """The token chosen does not count where it stands under another node."""
    tree = DraftTree.from_paths(0, [[1, 2], [3, 4]])
    assert walk(tree, [1, 4, 0, 2, 0]) == [0, 1]


def test_a_reading_knows_the_whole_text_of_a_node() -> None:
    """Committed text, root and drafted tokens; features follow a path, or are none."""
    tree, features = DraftTree.from_paths(3, [[4], [5, 6]]), torch.rand(4, 2, 8)
    output = TargetOutput(tree, torch.zeros(4, 9), features, 2, [1, 2])
    assert [output.prefix(node) for node in range(4)] == [
        [1, 2, 3],
        [1, 2, 3, 4],
        [1, 2, 3, 5],
        [1, 2, 3, 5, 6],
    ]
    assert output.features_at([0, 2]).equal(features[[0, 2]])
    assert TargetOutput(tree, torch.zeros(4, 9), None, 2, [1, 2]).features_at([0]) is None


# -- the best shape ---------------------------------------------------------------------------------------------------

Rates = list[list[float]]


def random_rates(seed: int, levels: int, ranks: int) -> Rates:
    """Rates by depth and rank that a target may have: no more than certain together, in any order."""
    dice = random.Random(seed)
    rows = [[dice.random() ** 3 for _ in range(ranks)] for _ in range(levels)]
    return [[rate / max(1.0, sum(row)) for rate in row] for row in rows]


def every_shape(ranks: int, depth: int, nodes: int) -> Iterator[frozenset[tuple[int, ...]]]:
    """All sets of at most `nodes` paths that hold every path's beginning."""
    shapes = {frozenset[tuple[int, ...]]()}
    for _ in range(nodes + 1):
        yield from shapes
        shapes = {
            shape | {(*path, rank)}
            for shape in shapes
            for path in ((), *shape)
            for rank in range(ranks)
            if len(path) < depth and (*path, rank) not in shape
        }


def sum_gains(rates: Rates, paths: Iterable[tuple[int, ...]]) -> float:
    """The expected number of accepted nodes: a node is when all choices on its way are."""
    return sum(prod(rates[level][rank] for level, rank in enumerate(path)) for path in paths)


def expected_accepted(rates: Rates, paths: Iterable[tuple[int, ...]]) -> float:
    """The same by playing through everything that the target may choose, level by level, until it leaves the tree."""
    inside = set(paths)

    def below(path: tuple[int, ...]) -> float:
        row = rates[len(path)] if len(path) < len(rates) else []
        children = ((rate, (*path, rank)) for rank, rate in enumerate(row))
        return sum(rate * (1 + below(child)) for rate, child in children if child in inside)

    return below(())


@pytest.mark.parametrize("seed", range(12))
def test_the_best_tree_is_the_best_of_all_trees(seed: int) -> None:
    """Of all shapes with up to four nodes on up to three levels, at rates by depth, none keeps more."""
    rates = random_rates(seed, levels=3, ranks=3)
    for nodes, depth in product((1, 2, 3, 4), (1, 2, 3)):
        shape = best_tree(rates, nodes, depth)
        assert len(set(shape)) == len(shape) == min(nodes, 3 if depth == 1 else nodes)
        assert max(map(len, shape)) <= depth
        best = max(expected_accepted(rates, shape) for shape in every_shape(3, depth, nodes))
        assert expected_accepted(rates, shape) == pytest.approx(best, abs=1e-12)
        assert sum_gains(rates, shape) == pytest.approx(expected_accepted(rates, shape), abs=1e-12)


def sequoia(rates: Rates, nodes: int, depth: int) -> float:
    """The published dynamic programme: the most that is kept below a level by siblings of `rank` and above."""

    @cache
    def most(left: int, level: int, rank: int) -> float:
        if left == 0 or level == depth or rank == len(rates[0]):
            return 0.0
        row = rates[min(level, len(rates) - 1)]
        shares = (
            row[rank] * (1 + most(below, level + 1, 0)) + most(left - 1 - below, level, rank + 1)
            for below in range(left)
        )
        return max(shares)

    return most(nodes, 0, 0)


@pytest.mark.parametrize(
    ("nodes", "depth", "levels"), [(8, 6, 6), (25, 6, 1), (25, 3, 3), (60, 8, 8)]
)
def test_the_best_tree_is_sequoias(nodes: int, depth: int, levels: int) -> None:
    """Where rates fall with the rank it keeps what the dynamic programme says, and can be drafted."""
    rates = [sorted(row, reverse=True) for row in random_rates(nodes, levels, 10)]
    shape = best_tree(rates, nodes, depth)
    everywhere = [rates[min(level, levels - 1)] for level in range(depth)]
    assert sum_gains(everywhere, shape) == pytest.approx(sequoia(rates, nodes, depth), rel=1e-9)
    assert Budget.fixed(shape, "sampled").nodes == nodes


def test_ties_of_the_best_tree_go_to_shallow_nodes_and_low_ranks() -> None:
    """And what is never chosen is left out."""
    assert best_tree([[0.5, 0.5, 0.0]], 3, 9) == ((0,), (1,), (0, 0))
    assert best_tree([[1.0, 0.0]], 5, 3) == chain_paths(3)
    assert (
        best_tree([[0.9]], 0, 3) == best_tree([[0.9]], 3, 0) == best_tree([[0.0, 0.0]], 3, 3) == ()
    )


@pytest.mark.parametrize("rates", [[], [[0.5, 1.1]], [[-0.1]], [[float("nan")]]])
def test_rates_that_are_no_probabilities_are_refused(rates: Rates) -> None:
    """Counts, for one."""
    with pytest.raises(
        ValueError, match=r"probabilities by depth and rank, expected rows of 0\.\.1"
    ):
        best_tree(rates, 3, 3)
