"""Trees that stay on the device until the target has read them: answers, cycles and errors of trees on the host.

Here the CPU is declared a device that must be waited for. tests/test_simulated_device.py compares every drafter and
kind of tree in this way, and counts the waits.
"""

# N nodes, B sequences of a batch

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle import Budget, Sampling, Target, Trace, generate
from eagle.core import grown, verify
from eagle.core.grown import (
    DeviceTrees,
    GrownTree,
    find_shape,
    hand_over,
    lies_on_device,
    place_trees,
    walk_trees,
)
from eagle.core.sampling import penalise, penalise_nodes
from eagle.core.tree import DraftTree, chain_paths
from eagle.core.verify import walk
from eagle.drafters.parts import growth
from eagle.drafters.recurrent import head_state
from tests.simulated_runs import FILTERED, PROMPTS, new_drafter, new_target

CPU = torch.device("cpu")
PLAIN = Sampling(temperature=1.0, seed=5)
GROWN = Budget(8, 4, 3)
Answers = list[tuple[list[int], list[Any]]]


@pytest.fixture(scope="module")
def target() -> Target:
    """Return a random target."""
    return new_target(CPU)


def keep_on_device(patch: pytest.MonkeyPatch) -> None:
    """Make the host leave values where they are, as on a GPU."""
    for module in (growth, head_state, verify):
        patch.setattr(module, "must_wait", lambda device: True)


def decode(target: Target, drafter: Any, **options: Any) -> Answers:
    """Return the tokens and the cycles of several answers, with the trees of each cycle."""
    options = {"max_new_tokens": 17, "stop": [], **options}
    answers: Answers = []
    for trace in generate(target, drafter, PROMPTS, **options):
        assert trace.error is None
        cycles = []
        for cycle in trace.cycles:
            cycles.append((cycle, cycle.tree.tokens.tolist(), cycle.tree.parents.tolist()))
        answers.append((trace.tokens, cycles))
    return answers


def check_alike(
    make_drafter: Callable[[], Any],
    target: Target,
    make_budget: Any,
    **options: Any,
) -> int:
    """Decode in both ways, compare, and return how many trees were verified on the device."""
    # on a CPU nothing waits, so trees are on the host
    expected = decode(target, make_drafter(), budget=make_budget(), **options)
    count = 0
    read_walks = grown.read_walks

    def count_trees(rows: Any, *rest: Any) -> Any:
        nonlocal count
        count += sum(lies_on_device(output.tree) for output, _ in rows)
        return read_walks(rows, *rest)

    with pytest.MonkeyPatch.context() as patch:
        keep_on_device(patch)
        patch.setattr("eagle.decoding.loop.read_walks", count_trees)
        assert decode(target, make_drafter(), budget=make_budget(), **options) == expected
    return count


CONFIDENT = {"confidence": 0.5}


@pytest.mark.parametrize(
    ("name", "sampling", "budget"),
    [
        ("hydra", PLAIN, GROWN),
        ("eagle3", Sampling(**FILTERED), Budget.fixed(chain_paths(4))),
        # nodes below the confidence are left out, and are padding on the device
        ("dspark", Sampling(), Budget(8, 4, 3, **CONFIDENT)),
        (
            "dspark",
            Sampling(),
            Budget.fixed(chain_paths(4), **CONFIDENT),
        ),
    ],
    ids=["grown", "chain", "confident tree", "confident chain"],
)
def test_answers_and_cycles_are_those_of_trees_on_the_host(
    name: str,
    sampling: Sampling,
    budget: Budget,
    target: Target,
) -> None:
    """In a ragged batch, whose last drafts are shallower."""

    def make_drafter() -> Any:
        return new_drafter(name, target)

    count = check_alike(make_drafter, target, lambda: budget, sampling=sampling)
    assert count > 10
    if budget.confidence:
        sizes = set()
        for _, cycles in decode(target, make_drafter(), sampling=sampling, budget=budget):
            sizes.update(len(tokens) for _, tokens, _ in cycles)
        assert len(sizes) > 1


# -- errors of one sequence -------------------------------------------------------------------------------------------


def check_one_error(target: Target, message: str, expected: Answers) -> None:
    """Check that the second of three answers ends with this error, and the others as they must."""
    options: dict[str, Any] = {
        "budget": GROWN,
        "max_new_tokens": 17,
        "stop": [],
    }
    with pytest.warns(RuntimeWarning, match="1 of 3 sequences"):
        traces: list[Trace] = generate(
            target,
            new_drafter("eagle3", target),
            PROMPTS,
            **options,
        )
    assert [trace.finish for trace in traces] == ["length", "error", "length"]
    assert message in str(traces[1].error)
    for row in (0, 2):
        assert traces[row].tokens == expected[row][0]


def test_a_wrong_tree_ends_its_sequence_alone(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused once the host has it; until then the target has read it."""
    expected = decode(target, new_drafter("eagle3", target), budget=GROWN)
    calls = 0

    def spoil(
        trees: list[DeviceTrees],
        roots: list[int],
        *,
        at_once: bool,
    ) -> list[DraftTree]:
        nonlocal calls
        calls += 1
        # the second tree of the second sequence: its last node's parent comes after it
        if calls == 2:
            trees[0].fields[1][1, -1] = 30
        return hand_over(trees, roots, at_once=at_once)

    keep_on_device(monkeypatch)
    monkeypatch.setattr(growth, "hand_over", spoil)
    check_one_error(target, "parents precede", expected)


def test_logits_that_are_nan_end_their_sequence_alone(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No token is chosen by them, on the device as on the host."""
    expected = decode(target, new_drafter("eagle3", target), budget=GROWN)
    pick = verify.Choose.pick_on_device
    calls = 0

    def damage(choose: Any, output: Any, *rest: Any) -> Tensor:
        nonlocal calls
        calls += 1
        # the second sequence in the second cycle of three
        if calls == 5:
            output.logits[:] = torch.nan
        return pick(choose, output, *rest)

    keep_on_device(monkeypatch)
    monkeypatch.setattr(verify.Choose, "pick_on_device", damage)
    check_one_error(target, "logits are nan", expected)


# -- the walk ---------------------------------------------------------------------------------------------------------


def random_tree(nodes: int, seed: int) -> DraftTree:
    """Return a tree of any shape over few tokens."""
    generator = torch.Generator().manual_seed(seed)
    return DraftTree.from_paths(
        0,
        torch.randint(3, (nodes, 4), generator=generator).tolist(),
    )


def test_the_walk_is_that_of_the_host() -> None:
    """For a batch of random trees of several sizes, and random choices."""
    longest = 0
    for seed in range(60):
        trees = [random_tree(nodes, 3 * seed + nodes) for nodes in (1, 4, 9)]
        tokens, shape = place_trees(trees, CPU)
        # [B, N], of which a small tree fills the beginning
        choices = torch.randint(
            3,
            tokens.shape,
            generator=torch.Generator().manual_seed(seed),
        )
        walks = walk_trees(tokens, shape, choices, 5)
        for row, tree in enumerate(trees):
            size = len(tree)
            assert shape.tree_mask[row, :size, :size].equal(tree.ancestors())
            assert shape.depths[row, :size].tolist() == tree.depths()
            path = walk(tree, choices[row].tolist())
            length = len(path)
            assert walks.counts[row] == length
            assert walks.paths[row].tolist() == [
                *path,
                *range(length, 5),
            ]
            assert walks.following[row] == choices[row, path[-1]]
            longest = max(longest, length)
    assert longest > 3


def test_a_walk_that_skips_ancestors_is_seen(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault: a node counts although its parent is not accepted."""
    original = place_trees

    def forget_ancestors(trees: Any, device: Any) -> Any:
        tokens, shape = original(trees, device)
        shape.tree_mask[:] = torch.eye(
            tokens.shape[1],
            dtype=torch.bool,
        )
        return tokens, shape

    monkeypatch.setattr(grown, "place_trees", forget_ancestors)
    with pytest.raises(AssertionError):
        check_alike(lambda: new_drafter("eagle3", target), target, lambda: GROWN)


def test_a_penalty_counts_the_path_of_each_node() -> None:
    """The numbers are those of one node after the other."""
    tree = random_tree(9, 7)
    text = [5, 5, 2]
    tokens = tree.tokens.tolist()
    logits = torch.randn(
        len(tree),
        8,
        generator=torch.Generator().manual_seed(0),
    )
    expected = []
    for node, row in enumerate(logits):
        path = [tokens[step] for step in tree.path(node)]
        expected.append(penalise(row, text + path, 1.3))
    penalised = penalise_nodes(logits, text, tree.tokens, tree.ancestors(), 1.3)
    assert penalised.equal(torch.stack(expected))


def test_a_tree_is_copied_when_it_is_looked_at() -> None:
    """With all trees of its batch; its size and levels are known before."""
    # tokens, parents and whether a node is left out, for one row of 3 nodes and one of 1 node
    large = torch.tensor([[[4, 5, 6], [0, 0, 1], [0, 0, 0]]])
    small = torch.tensor([[[7], [0], [0]]])
    batches = [
        DeviceTrees([1], large, 2),
        DeviceTrees([0], small, 1),
    ]
    first, second, root = hand_over(
        batches,
        [1, 2, 3],
        at_once=False,
    )
    assert lies_on_device(first)
    assert lies_on_device(second)
    assert not lies_on_device(root)
    assert (len(second), second.levels, second.columns) == (4, 2, 4)
    assert len(root) == 1
    assert second.tokens.tolist() == [2, 4, 5, 6]
    assert not lies_on_device(first)
    assert first.parents.tolist() == [-1, 0]
    assert isinstance(second, GrownTree)
    assert second.path(3) == [0, 1, 3]
    assert not hasattr(second, "nothing")


@pytest.mark.parametrize("levels", [1, 2, 5, 70])
def test_ancestors_reach_to_the_root(levels: int) -> None:
    """In chains, by products that double the reach."""
    # 70 is more than a word of 64 bits
    shape = find_shape(torch.arange(-1, levels)[None], levels)
    expected = torch.ones(levels + 1, levels + 1, dtype=torch.bool).tril()
    assert shape.tree_mask[0].equal(expected)
    assert shape.depths[0].tolist() == list(range(levels + 1))
