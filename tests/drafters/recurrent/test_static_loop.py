"""The draft loop of static shapes: what is captured in one cycle drafts the same trees in all later ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from eagle import Budget, Sampling
from eagle.core.drafter import Committed
from eagle.core.tree import PUBLISHED_TREE, DraftTree, chain_paths
from eagle.core.verify import Choose
from eagle.drafters.parts.growth import level_mask
from eagle.drafters.recurrent import head_state
from eagle.drafters.recurrent.eagle1 import Eagle1
from tests.unrolled_heads import SHAPE, frozen_head, moved, new_head

V, CPU = SHAPE.vocab_size, torch.device("cpu")
BUDGETS = {
    "chain": Budget.fixed(chain_paths(4)),
    "published": Budget.fixed(PUBLISHED_TREE),
    "dynamic": Budget(20, 4, 5),
}
SAMPLINGS = {"greedy": Sampling(), "noise": Sampling(temperature=1.0, seed=3, top_k=20)}


def make(name: str, folder: Path) -> Any:
    """A head in fp64, ready to draft."""
    if name == "eagle1":
        torch.manual_seed(2)
        return moved(Eagle1(Eagle1.Settings(), SHAPE)).double().bind(frozen_head(torch.float64))
    return new_head(folder, name, torch.float64).bind(frozen_head(torch.float64))


class Traces:
    """Captures by a trace, which no host read and no value of a tensor can pass; counts captures and replays."""

    def __init__(self) -> None:
        self.captured, self.replayed = 0, 0

    def __call__(
        self, function: Callable[..., Tensor], inputs: Sequence[Tensor]
    ) -> Callable[..., Tensor]:
        """The traced operations."""
        graph = make_fx(function)(*(part.clone() for part in inputs))
        self.captured += 1

        def replay(*inputs: Tensor) -> Tensor:
            self.replayed += 1
            return graph(*inputs)

        return replay


class Operations(TorchDispatchMode):
    """Notes every operation and the shapes that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shapes = [
            tuple(part.shape)
            for part in torch.utils._pytree.tree_leaves(args)
            if isinstance(part, Tensor)
        ]
        self.seen.append((str(func), *shapes))
        return func(*args, **(kwargs or {}))


class Recorded:
    """Runs the loop as it is, and keeps the operations of each cycle."""

    def __init__(self) -> None:
        self.cycles: list[list[tuple[Any, ...]]] = []

    def __call__(
        self, function: Callable[..., Tensor], inputs: Sequence[Tensor]
    ) -> Callable[..., Tensor]:
        """The function itself, watched."""

        def run(*inputs: Tensor) -> Tensor:
            with Operations() as watched:
                output = function(*inputs)
            self.cycles.append(watched.seen)
            return output

        return run


def draft(
    head: Any, capture: Any, budget: Budget, sampling: Sampling, texts: int, cycles: int
) -> list[DraftTree]:
    """The trees of texts that grow by random tokens; texts and features are the same for every capture."""
    head.capture = capture
    state, dice, generator, trees = (
        head.open(),
        random.Random(5),
        torch.Generator().manual_seed(5),
        list[DraftTree](),
    )
    for row in range(texts):
        state.admit(row, Choose(replace(sampling, request=row)).offer(V, CPU))
    for cycle in range(cycles):
        updates = {}
        for row in range(texts):
            size = dice.randint(1, 4) if cycle else 9 + 7 * row
            features = torch.randn(
                size, len(head.taps), 48, generator=generator, dtype=torch.float64
            )
            updates[row] = Committed(
                torch.tensor([dice.randrange(V) for _ in range(size)]), features, cycle
            )
        trees += state.propose(updates, dict.fromkeys(range(texts), budget)).values()
    head.capture = None
    return trees


def replay(head: Any, budget: Budget, sampling: Sampling, texts: int, cycles: int = 6) -> Traces:
    """Compare the trees of the replayed loop with those of the loop that follows the texts' lengths."""
    traces = Traces()
    expected = draft(head, None, budget, sampling, texts, cycles)
    for tree, true in zip(
        draft(head, traces, budget, sampling, texts, cycles), expected, strict=True
    ):
        assert tree.tokens.tolist() == true.tokens.tolist(), "another tree"
        assert tree.parents.tolist() == true.parents.tolist(), "another tree"
    return traces


QUICK = [("eagle1", "chain", "noise"), ("eagle3.1", "chain", "greedy")]
CASES = [
    pytest.param(*case, marks=[pytest.mark.slow] * (case not in QUICK))
    for case in product(["eagle1", "hass", "eagle3", "eagle3.1"], BUDGETS, SAMPLINGS)
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "budget", "sampling"), CASES)
def test_one_capture_drafts_all_later_cycles(
    name: str, budget: str, sampling: str, tmp_path: Path
) -> None:
    """The same trees as the eager loop's, by one trace, of the third cycle: one makes room, the next warms up."""
    traces = replay(make(name, tmp_path), BUDGETS[budget], SAMPLINGS[sampling], texts=1)
    assert (traces.captured, traces.replayed) == (1, 4)


@pytest.mark.slow
def test_texts_of_different_lengths_share_a_capture(tmp_path: Path) -> None:
    """Three rows, each with its own length and noise."""
    assert (
        replay(make("eagle3.1", tmp_path), BUDGETS["dynamic"], SAMPLINGS["noise"], texts=3).captured
        == 1
    )


@pytest.mark.slow
def test_a_text_that_outgrows_its_room_is_captured_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for each room; the trees stay the same."""
    monkeypatch.setattr(head_state, "text_capacity", lambda length: 16 if length <= 16 else 64)
    traces = replay(
        make("eagle1", tmp_path), BUDGETS["chain"], SAMPLINGS["greedy"], texts=1, cycles=9
    )
    assert traces.captured == 2 and traces.replayed < 8


def operations(head: Any) -> list[list[tuple[Any, ...]]]:
    """Those of each cycle."""
    recorded = Recorded()
    draft(head, recorded, BUDGETS["dynamic"], SAMPLINGS["noise"], texts=2, cycles=6)
    return recorded.cycles


def test_no_operation_follows_the_length_of_a_text(tmp_path: Path) -> None:
    """From cycle to cycle the same operations on the same shapes."""
    cycles = operations(make("eagle3.1", tmp_path))
    assert len(cycles) == 4 and len(cycles[0]) > 100 and all(cycle == cycles[0] for cycle in cycles)


# -- planted faults ---------------------------------------------------------------------------------------------------


def test_a_host_read_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A level that looks at a value cannot be traced."""
    head = make("eagle1", tmp_path)
    monkeypatch.setattr(head, "next_input", lambda state: state if state.sum().item() else -state)
    with pytest.raises(RuntimeError, match="tracing tensor"):
        replay(head, BUDGETS["chain"], SAMPLINGS["greedy"], texts=1)


@pytest.mark.slow
def test_a_mask_that_is_not_an_input_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay that hides what the first cycle hid drafts other trees."""
    first: list[Tensor] = []

    def frozen(committed: Tensor, *rest: Any) -> Tensor:
        first.append(torch.zeros(committed.shape, dtype=committed.dtype))
        return level_mask(first[-1], *rest)

    monkeypatch.setattr(head_state, "level_mask", frozen)
    with pytest.raises(AssertionError, match="another tree"):
        replay(make("eagle1", tmp_path), BUDGETS["chain"], SAMPLINGS["greedy"], texts=1)


def test_a_shape_that_follows_the_text_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room that is as long as the text changes in every cycle: nothing can be captured."""
    monkeypatch.setattr(head_state, "text_capacity", lambda length: length)
    assert (
        replay(make("eagle1", tmp_path), BUDGETS["chain"], SAMPLINGS["greedy"], texts=1).captured
        == 0
    )


def test_an_operation_that_follows_the_text_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that grows by a column a level differs from cycle to cycle."""
    head, lengths = make("eagle3.1", tmp_path), count(20)
    read = head.read

    def follow(tokens: Tensor, *rest: Any) -> Tensor:
        torch.zeros(next(lengths)).add_(1)
        return read(tokens, *rest)

    monkeypatch.setattr(head, "read", follow)
    cycles = operations(head)
    assert any(cycle != cycles[0] for cycle in cycles)
