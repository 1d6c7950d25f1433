"""Draft trees: relations between nodes agree with brute force, malformed trees are refused, walks follow the target."""

from __future__ import annotations

import re
from itertools import pairwise, product

import pytest
import torch

from eagle.tree import PUBLISHED_TREE, DraftTree, Reading, chain_paths
from eagle.verify import walk

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
    assert tree.children() == [[child for child in range(5) if parents[child] == node] for node in range(5)]
    assert len(tree) == 5


@pytest.mark.parametrize("parents", EVERY_TREE_OF_FIVE, ids=str)
def test_a_tree_is_rebuilt_from_its_paths(parents: tuple[int, ...]) -> None:
    """Paths in the order of their last nodes give the very tree; in any order the same set of paths."""
    tree = make(parents)
    paths = [tree.tokens[tree.path(node)].tolist()[1:] for node in range(5)]
    again = DraftTree.from_paths(10, paths)
    assert again.tokens.tolist() == tree.tokens.tolist() and again.parents.tolist() == list(parents)
    backwards = DraftTree.from_paths(10, paths[::-1])
    assert sorted(backwards.tokens[backwards.path(node)].tolist()[1:] for node in range(5)) == sorted(paths)


def test_paths_share_what_they_have_in_common() -> None:
    """Equal beginnings are one branch, equal tokens after different ones are not; repeated paths add nothing."""
    tree = DraftTree.from_paths(7, [[1, 2], [1, 3], [2, 3], [1, 2], []])
    assert tree.tokens.tolist() == [7, 1, 2, 3, 2, 3]
    assert tree.parents.tolist() == [-1, 0, 1, 1, 0, 4]


def test_no_paths_leave_the_root_alone() -> None:
    """A drafter may propose nothing."""
    tree = DraftTree.from_paths(7, [])
    assert (tree.tokens.tolist(), tree.parents.tolist(), tree.depths(), tree.children()) == ([7], [-1], [0], [[]])
    assert tree.ancestors().tolist() == [[True]]


def test_a_chain_has_one_branch() -> None:
    """Every node but the last has one child; its laws stay with it."""
    laws = torch.rand(3, 4)
    tree = DraftTree.chain([5, 5, 6], laws)
    assert (tree.tokens.tolist(), tree.parents.tolist(), tree.laws) == ([5, 5, 6], [-1, 0, 1], laws)


def test_the_published_tree_has_25_nodes_on_5_levels() -> None:
    """EAGLE-1's: every node has its parent and the siblings before it, and the widths of its levels are known."""
    assert len(set(PUBLISHED_TREE)) == 25
    assert [sum(len(path) == depth for path in PUBLISHED_TREE) for depth in range(1, 7)] == [4, 8, 8, 3, 2, 0]
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
    ids=["late parent", "cycle", "loop", "below -1", "two roots", "rooted root", "twins", "lengths", "empty"],
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
    reading = Reading(tree, torch.zeros(4, 9), features, [3, 4, 4, 5], [1, 2])
    assert [reading.prefix(node) for node in range(4)] == [[1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 5, 6]]
    assert reading.features_at([0, 2]).equal(features[[0, 2]])
    assert Reading(tree, torch.zeros(4, 9), None, [3, 4, 4, 5], [1, 2]).features_at([0]) is None
