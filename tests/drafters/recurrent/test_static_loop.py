"""The draft loop of static shapes: what is captured in one cycle drafts the same trees in all later ones."""

# V vocabulary

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from eagle import Budget, Sampling
from eagle.core.drafter import Committed
from eagle.core.tree import PUBLISHED_TREE, DraftTree, chain_paths
from eagle.core.verify import Choose
from eagle.drafters.recurrent import head_state
from tests.unrolled_heads import SHAPE, frozen_head, new_head

V = SHAPE.vocab_size
CPU = torch.device("cpu")
BUDGETS = {
    "chain": Budget.fixed(chain_paths(4)),
    "published": Budget.fixed(PUBLISHED_TREE),
    "dynamic": Budget(20, 4, 5),
}
GREEDY = Sampling()
SAMPLED = Sampling(temperature=1.0, seed=3, top_k=20)
Run = Callable[..., Tensor]


def make_head(folder: Path, name: str = "hass") -> Any:
    """Return a head in fp64, ready to draft; EAGLE-1's network is HASS's."""
    # in fp64 no rounding decides between two tokens
    return new_head(folder, name, torch.float64).bind(frozen_head(torch.float64))


class Traces:
    """Capture by a trace, which cannot pass a value of a tensor to Python; count captures and replays.

    A CUDA graph, which is what eagle captures on a GPU, has the same limits.
    """

    def __init__(self) -> None:
        self.captured = 0
        self.replayed = 0

    def __call__(self, function: Run, inputs: Sequence[Tensor]) -> Run:
        """Return a function that replays the operations of this one."""
        graph = make_fx(function)(*(tensor.clone() for tensor in inputs))
        self.captured += 1

        def replay_graph(*inputs: Tensor) -> Tensor:
            self.replayed += 1
            return graph(*inputs)

        return replay_graph


def draft(
    head: Any,
    capture: Any,
    budget: Budget,
    sampling: Sampling,
    texts: int,
    cycles: int,
) -> list[DraftTree]:
    """Return the trees of texts that grow by random tokens, which are the same in every call."""
    head.capture = capture
    state = head.open()
    dice = random.Random(5)
    generator = torch.Generator().manual_seed(5)
    budgets = dict.fromkeys(range(texts), budget)
    trees: list[DraftTree] = []
    for row in range(texts):
        state.admit(row, Choose(replace(sampling, request=row)).offer(V, CPU))
    for cycle in range(cycles):
        updates = {}
        for row in range(texts):
            # prompts of unlike lengths, then a few tokens a cycle
            size = dice.randint(1, 4) if cycle else 9 + 7 * row
            tokens = torch.tensor(dice.choices(range(V), k=size))
            features = torch.randn(
                size,
                len(head.taps),
                SHAPE.hidden_size,
                generator=generator,
                dtype=torch.float64,
            )
            updates[row] = Committed(tokens, features, cycle)
        trees += state.propose(updates, budgets).values()
    head.capture = None
    return trees


def replay(
    head: Any,
    budget: Budget,
    sampling: Sampling,
    texts: int,
    cycles: int = 6,
) -> Traces:
    """Assert that a replayed loop drafts the trees of the eager one, and return what was captured."""
    traces = Traces()
    options = {
        "budget": budget,
        "sampling": sampling,
        "texts": texts,
        "cycles": cycles,
    }
    # without a capture, the loop's shapes follow the texts
    expected = draft(head, None, **options)
    for tree, eager_tree in zip(draft(head, traces, **options), expected, strict=True):
        assert tree.tokens.tolist() == eager_tree.tokens.tolist(), "another tree"
        assert tree.parents.tolist() == eager_tree.parents.tolist(), "another tree"
    return traces


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "budget", "sampling", "texts"),
    [
        ("hass", "chain", SAMPLED, 1),
        ("eagle3", "published", GREEDY, 1),
        # three rows, each with its own length and noise
        ("eagle3.1", "dynamic", SAMPLED, 3),
    ],
    ids=["chain", "published", "dynamic"],
)
def test_one_capture_drafts_all_later_cycles(
    name: str,
    budget: str,
    sampling: Sampling,
    texts: int,
    tmp_path: Path,
) -> None:
    """The third cycle is captured: the first makes a buffer, and the second warms up."""
    traces = replay(
        make_head(tmp_path, name),
        BUDGETS[budget],
        sampling,
        texts=texts,
    )
    assert traces.captured == 1
    assert traces.replayed == 4


@pytest.mark.slow
def test_a_text_that_outgrows_its_buffer_is_captured_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is one capture for each size of the buffer, and the trees stay the same."""
    monkeypatch.setattr(
        head_state,
        "sequence_capacity",
        lambda length: 16 if length <= 16 else 64,
    )
    traces = replay(
        make_head(tmp_path),
        BUDGETS["chain"],
        GREEDY,
        texts=1,
        cycles=9,
    )
    assert traces.captured == 2
    assert traces.replayed < 8


# -- planted faults ---------------------------------------------------------------------------------------------------


def test_a_host_read_is_seen(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A level that looks at a value cannot be traced."""
    head = make_head(tmp_path)
    monkeypatch.setattr(
        head,
        "next_input",
        lambda state: state if state.sum().item() else -state,
    )
    with pytest.raises(RuntimeError, match="tracing tensor"):
        replay(head, BUDGETS["chain"], GREEDY, texts=1)
