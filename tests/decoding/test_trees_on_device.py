"""Trees that stay where they grew until the target has read them: the answers, cycles and errors of trees on the host.

A CPU is told that it must be waited for. tests/test_simulated_device.py counts the waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
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
from eagle.core.tree import PUBLISHED_TREE, DraftTree, chain_paths
from eagle.core.verify import walk
from eagle.decoding.forward_costs import CycleCosts
from eagle.decoding.goodput import Goodput
from eagle.drafters.parts import growth
from eagle.drafters.recurrent import head_state
from eagle.target.slots import SlotCache
from tests.simulated_runs import FILTERED, PROMPTS, new_drafter, new_hybrid, new_target

CPU = torch.device("cpu")
HEADS = (
    "eagle1",
    "eagle3",
    "falcon",
    "medusa",
    "hydra",
    "dflash",
    "dspark",
    "peagle",
    "bigram",
    "draft_model",
    "several",
)
SAMPLINGS = {
    "greedy": Sampling(),
    "T=1": Sampling(**FILTERED),
    "plain T=1": Sampling(temperature=1.0, seed=5),
}
BUDGETS = {
    "grown": Budget(8, 4, 3),
    "few of many levels": Budget(3, 6, 2),
    "fixed": Budget.fixed(PUBLISHED_TREE),
    "chain": Budget.fixed(chain_paths(4)),
    "likeliest": Budget(8, 4, 3, draw="likeliest"),
}


@pytest.fixture(scope="module")
def target() -> Target:
    """A random target."""
    return new_target(CPU)


def must_wait(patch: pytest.MonkeyPatch) -> None:
    """From here on the host does not look at values where they lie."""
    for module in (growth, head_state, verify):
        patch.setattr(module, "must_wait", lambda device: True)


def decode(target: Target, drafter: Any, **options: Any) -> list[Any]:
    """The tokens and cycles, with their trees, of several answers."""
    traces = generate(target, drafter, PROMPTS, stop=[], **{"max_new_tokens": 17, **options})
    assert all(trace.error is None for trace in traces)
    return [
        [
            trace.tokens,
            [
                (cycle, cycle.tree.tokens.tolist(), cycle.tree.parents.tolist())
                for cycle in trace.cycles
            ],
        ]
        for trace in traces
    ]


def check_alike(make: Callable[[], tuple[Any, dict[str, Any]]], target: Target) -> int:
    """Decode once by each way, compare, and return how many trees were verified where they lay."""
    drafter, options = make()
    expected = decode(target, drafter, **options)
    with pytest.MonkeyPatch.context() as patch:
        must_wait(patch)
        seen: list[int] = []
        read = grown.read_walks

        def count(rows: Any, *rest: Any) -> Any:
            seen.extend(1 for output, _ in rows if lies_on_device(output.tree))
            return read(rows, *rest)

        patch.setattr("eagle.decoding.loop.read_walks", count)
        drafter, options = make()
        assert decode(target, drafter, **options) == expected
    return len(seen)


@pytest.mark.quick("hydra-plain T=1", "several-T=1")
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", HEADS)
def test_answers_and_cycles_are_those_of_trees_on_the_host(
    name: str, sampling: str, target: Target
) -> None:
    """Texts of several lengths side by side, whose last drafts are shallower."""
    options = {"sampling": SAMPLINGS[sampling], "budget": BUDGETS["grown"]}
    assert check_alike(lambda: (new_drafter(name, target), options), target) > 10 * (
        name != "several"
    )


@pytest.mark.quick("grown-plain T=1", "chain-T=1")
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("budget", BUDGETS)
def test_every_kind_of_tree_can_stay(budget: str, sampling: str, target: Target) -> None:
    """Grown and fixed ones, more levels than nodes, and with each kind of draft."""
    options = {"sampling": SAMPLINGS[sampling], "budget": BUDGETS[budget]}
    assert check_alike(lambda: (new_drafter("eagle3", target), options), target) > 10


@pytest.mark.parametrize("paths", [None, chain_paths(4)])
def test_nodes_that_are_left_out_are_padding(paths: Any, target: Target) -> None:
    """A confidence that is often not reached: traces hold the trees without these nodes."""
    budget = (
        Budget(8, 4, 3, confidence=0.5) if paths is None else Budget.fixed(paths, confidence=0.5)
    )

    def make() -> Any:
        return new_drafter("dspark", target), {"budget": budget}

    assert check_alike(make, target) > 10
    sizes = {
        len(tokens)
        for _, cycles in decode(target, make()[0], budget=budget)
        for _, tokens, _ in cycles
    }
    assert len(sizes) > 1


def test_a_policy_learns_from_trees_that_stayed(target: Target) -> None:
    """Its budgets follow from the cycles' trees, so they are the same only if these are."""

    draft, read = (((0.0, 0.1, 0.2, 0.3),), ((1.0, 1.1, 1.2, 1.3),))
    costs = CycleCosts((1, 3), (0,), (draft, draft), (read, read))

    def make() -> tuple[Any, dict[str, Any]]:
        return new_drafter("eagle3", target), {"budget": Goodput.of_costs(costs, Budget(6, 3, 3))}

    assert check_alike(make, target) > 3


@pytest.mark.quick("lenient")
@pytest.mark.parametrize("asked", ["drawn", "typical", "lenient", "hybrid"])
def test_what_needs_trees_on_the_host_reads_them_first(asked: str, target: Target) -> None:
    """Rules that look at a tree, and mixers that run over its paths: nothing is verified on the device."""
    sampling = {
        "typical": Sampling(temperature=1.0, typical=(0.02, 0.3), seed=3),
        "lenient": Sampling(lenience=0.5),
        "drawn": Sampling(temperature=1.0, seed=3),
    }.get(asked, Sampling())
    budget = Budget.fixed(PUBLISHED_TREE, "sampled") if asked == "drawn" else Budget(8, 4, 3)
    reader = (
        new_hybrid(CPU) if asked == "hybrid" else new_target(CPU)
    )  # whose draws are not counted yet
    other = new_hybrid(CPU) if asked == "hybrid" else new_target(CPU)
    expected = decode(reader, new_drafter("eagle3", reader), sampling=sampling, budget=budget)
    with pytest.MonkeyPatch.context() as patch:
        must_wait(patch)
        patch.delattr("eagle.decoding.loop.read_walks")
        assert (
            decode(other, new_drafter("eagle3", other), sampling=sampling, budget=budget)
            == expected
        )


# -- errors of one text -----------------------------------------------------------------------------------------------


def decode_with_an_error(target: Target) -> list[Trace]:
    """Three answers, of which the second ends with an error."""
    options: dict[str, Any] = {"budget": Budget(8, 4, 3), "max_new_tokens": 17, "stop": []}
    with pytest.warns(RuntimeWarning, match="1 of 3 texts"):
        traces = generate(target, new_drafter("eagle3", target), PROMPTS, **options)
    assert [trace.finish for trace in traces] == ["length", "error", "length"]
    return traces


def spoil(kind: str) -> Callable[..., Any]:
    """`hand_over` of trees of which the middle text's second one is wrong."""
    calls: list[int] = []

    def hand(grown: list[DeviceTrees], roots: list[int], *, at_once: bool) -> list[DraftTree]:
        calls.append(1)
        if len(calls) == 2:
            columns = grown[0].columns[1]
            if kind == "siblings":
                columns[0, :2], columns[1, :2] = 3, 0
            elif kind == "token":
                columns[0, -1] = 99
            else:
                columns[1, -1] = 30
        return hand_over(grown, roots, at_once=at_once)

    return hand


@pytest.mark.quick("parent-parents precede")
@pytest.mark.parametrize(
    ("kind", "message"),
    [("siblings", "siblings differ"), ("token", "token ids"), ("parent", "parents precede")],
)
def test_a_wrong_tree_ends_its_text_alone(
    kind: str, message: str, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused once the host has it; until then the target has read it, and its neighbours go on."""
    expected = decode(target, new_drafter("eagle3", target), budget=Budget(8, 4, 3))
    must_wait(monkeypatch)
    monkeypatch.setattr(growth, "hand_over", spoil(kind))
    traces = decode_with_an_error(target)
    assert message in str(traces[1].error)
    assert [traces[0].tokens, traces[2].tokens] == [expected[0][0], expected[2][0]]


def test_logits_that_are_nan_end_their_text_alone(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The choice after them is none, on the device as on the host."""
    expected = decode(target, new_drafter("eagle3", target), budget=Budget(8, 4, 3))
    must_wait(monkeypatch)
    pick = verify.Choose.pick_where_it_lies
    calls: list[int] = []

    def damage(self: Any, output: Any, *rest: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 5:
            output.logits[:] = torch.nan
        return pick(self, output, *rest)

    monkeypatch.setattr(verify.Choose, "pick_where_it_lies", damage)
    traces = decode_with_an_error(target)
    assert "logits are nan" in str(traces[1].error)
    assert [traces[0].tokens, traces[2].tokens] == [expected[0][0], expected[2][0]]


# -- the walk ---------------------------------------------------------------------------------------------------------


def random_tree(nodes: int, seed: int) -> DraftTree:
    """A tree of any shape over few tokens."""
    generator = torch.Generator().manual_seed(seed)
    paths = torch.randint(3, (nodes, 4), generator=generator).tolist()
    return DraftTree.from_paths(0, paths)


def test_the_walk_is_that_of_the_host() -> None:
    """Random trees of several sizes, side by side, and random choices."""
    longest = 0
    for seed in range(60):
        trees = [random_tree(count, 3 * seed + count) for count in (1, 4, 9)]
        generator = torch.Generator().manual_seed(seed)
        tokens, shape = place_trees(trees, CPU)
        for number, tree in enumerate(trees):
            assert torch.equal(shape.seen[number, : len(tree), : len(tree)], tree.ancestors())
            assert shape.depths[number, : len(tree)].tolist() == tree.depths()
        choices = torch.randint(3, tokens.shape, generator=generator)
        walks = walk_trees(tokens, shape, choices, 5)
        for number, tree in enumerate(trees):
            path = walk(tree, choices[number].tolist())
            assert walks.paths[number, : walks.counts[number]].tolist() == path
            assert walks.paths[number, len(path) :].tolist() == list(range(len(path), 5))
            assert walks.following[number] == choices[number, path[-1]]
            longest = max(longest, len(path))
    assert longest > 3


def test_a_walk_that_asks_no_ancestors_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a node counts that is chosen after a parent which is not accepted."""

    def alone(trees: Any, device: Any) -> Any:
        tokens, shape = honest(trees, device)
        shape.seen[:] = torch.eye(tokens.shape[1], dtype=torch.bool)
        return tokens, shape

    honest = place_trees
    monkeypatch.setattr(grown, "place_trees", alone)
    target = new_target(CPU)
    with pytest.raises(AssertionError):
        check_alike(lambda: (new_drafter("eagle3", target), {"budget": Budget(8, 4, 3)}), target)


def test_a_penalty_counts_the_path_of_each_node() -> None:
    """The same numbers as for one node after the other."""
    tree, text = random_tree(9, 7), [5, 5, 2]
    logits = torch.randn(len(tree), 8, generator=torch.Generator().manual_seed(0))
    tokens = tree.tokens.tolist()
    prefixes = [text + [tokens[step] for step in tree.path(node)] for node in range(len(tree))]
    expected = [penalise(row, prefix, 1.3) for row, prefix in zip(logits, prefixes, strict=True)]
    assert torch.equal(
        penalise_nodes(logits, text, tree.tokens, tree.ancestors(), 1.3), torch.stack(expected)
    )


def test_a_tree_is_read_when_it_is_asked_for() -> None:
    """With all that grew beside it; its length and levels are known without."""
    parts = [torch.tensor([[[4, 5, 6], [0, 0, 1], [0, 0, 0]]]), torch.tensor([[[7], [0], [0]]])]
    grown = [DeviceTrees([1], parts[0], 2), DeviceTrees([0], parts[1], 1)]
    first, second, root = hand_over(grown, [1, 2, 3], at_once=False)
    assert (len(second), second.levels, second.columns, len(root)) == (4, 2, 4, 1)
    assert lies_on_device(first) and lies_on_device(second) and not lies_on_device(root)
    assert second.tokens.tolist() == [2, 4, 5, 6]
    assert not lies_on_device(first) and first.parents.tolist() == [-1, 0]
    assert isinstance(second, GrownTree) and second.path(3) == [0, 1, 3]
    with pytest.raises(AttributeError):
        _ = second.nothing  # type: ignore[attr-defined]


@pytest.mark.parametrize("levels", [1, 2, 3, 5, 9, 70])
def test_shapes_reach_to_the_root(levels: int) -> None:
    """Chains of every length, by products that double the reach."""
    shape = find_shape(torch.arange(-1, levels)[None], levels)
    assert torch.equal(shape.seen[0], torch.ones(levels + 1, levels + 1, dtype=torch.bool).tril())
    assert shape.depths[0].tolist() == list(range(levels + 1))


# -- fixed shapes -----------------------------------------------------------------------------------------------------


class Compiled:
    """Captures growth, a walk and the move of what it accepts as one graph without a break.

    The target that it stands beside chooses the highest drafted token after every node.
    """

    def __init__(self) -> None:
        self.cache, self.moved = SlotCache(), 0
        self.cache.reserve(len(PROMPTS), 64)
        self.cache.lengths, self.rows = [3, 5, 4], self.cache.add()
        self.rows.make_room(torch.zeros(1, 2, 1, 4), len(PROMPTS), 64)

    def __call__(
        self, function: Callable[..., Tensor], inputs: Sequence[Tensor]
    ) -> Callable[..., Tensor]:
        """The graph, which is compared with the same operations one by one."""
        columns = torch.arange(self.rows.buffer.numel(), dtype=torch.float32).view_as(
            self.rows.buffer
        )

        def run(*inputs: Tensor) -> tuple[Tensor, ...]:
            grown = function(*inputs)
            tokens, parents = F.pad(grown[:, 0], (1, 0), value=1), F.pad(grown[:, 1], (1, 0))
            shape = find_shape(parents, 4)
            choices = torch.zeros_like(tokens).scatter_reduce(1, shape.parents, tokens, "amax")
            walks = walk_trees(tokens, shape, choices, 5)
            self.rows.buffer.copy_(columns)
            self.cache.move(range(len(PROMPTS)), walks.paths)
            return grown, walks.paths, walks.counts, walks.following, self.rows.buffer.clone()

        compiled = torch.compile(run, fullgraph=True, backend="eager", dynamic=False)

        def replay(*inputs: Tensor) -> Tensor:
            got, expected = compiled(*inputs), run(*inputs)
            assert all(map(torch.equal, got, expected))
            self.moved += int(not torch.equal(got[-1], columns))
            return got[0]

        return replay


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["greedy", pytest.param("plain T=1", marks=pytest.mark.slow)])
def test_a_cycle_beside_the_target_is_one_graph(sampling: str, target: Target) -> None:
    """Nothing in it asks the host; the trees are those of a loop that is not captured."""
    options = {"sampling": SAMPLINGS[sampling], "budget": Budget(8, 4, 3), "max_new_tokens": 13}
    head, captured = new_drafter("eagle3", target), Compiled()
    head.capture = captured
    assert decode(target, head, **options) == decode(
        target, new_drafter("eagle3", target), **options
    )
    assert captured.moved > 0


def test_a_graph_that_asks_the_host_is_refused(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: a level that looks at a value."""
    level_mask = head_state.level_mask

    def look(committed: Any, seen: Tensor, groups: Any) -> Tensor:
        masks: Tensor = level_mask(committed, seen, groups) * int(seen.sum().item() > 0)
        return masks

    monkeypatch.setattr(head_state, "level_mask", look)
    head = new_drafter("eagle3", target)
    head.capture = Compiled()
    with pytest.raises(RuntimeError):
        generate(target, head, PROMPTS[0], budget=Budget(8, 4, 3), max_new_tokens=9, stop=[])
