"""What a drafter says it keeps of sequences is what its state holds while it decodes them."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from eagle import Budget, Sampling, Target, Trace
from eagle.conformance.trial import make_head
from eagle.core.drafter import Committed, Drafter
from eagle.core.tree import DraftTree
from eagle.decoding.loop import Decoding
from eagle.drafters import DRAFTERS
from eagle.drafters.parts.sequence_state import WINDOW_CHUNK_TOKENS
from eagle.drafters.self_speculation.sparse_kv import SparseKv
from eagle.drafters.several import FirstOf
from tests.batches import own_model
from tests.families import VOCAB_SIZE, random_tokens
from tests.registry import TRAINED
from tests.tables import some_tables

NEW_TOKENS = 12
BUDGET = Budget(6, 3, 2)
# two at a time
PROMPTS = (150, 150, 30)
KEEPING = [*TRAINED, "sparse_kv"]
WITHOUT_STATES = [name for name in DRAFTERS if name not in KEEPING]


@pytest.fixture(scope="module")
def target() -> Target:
    """Return a tiny llama in fp64, with fewer key heads than query heads."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=0,
    )
    return Target(LlamaForCausalLM(config).double().eval())


# -- drafters -----------------------------------------------------------------------------------


def head_of(
    target: Target,
    kind: str,
    **settings: Any,
) -> Any:
    """Return an untrained head."""
    return make_head(kind, target, **settings).double().bind(target.head)


def drafter_of(kind: str, target: Target) -> Any:
    """Return a drafter of the registry."""
    if kind == "draft_model":
        return own_model(target)
    if kind in TRAINED:
        return head_of(target, kind)
    if kind in ("unigram", "bigram"):
        return DRAFTERS[kind](some_tables(VOCAB_SIZE))
    return DRAFTERS[kind]()


class Always(Drafter):
    """A drafter that always drafts, so that those after it are never asked."""

    def begin(self, noise: Any = None) -> Any:
        """Begin a sequence, of which nothing is kept."""
        return self

    def propose(
        self,
        update: Committed,
        budget: Budget,
    ) -> DraftTree:
        """Return a chain of one token."""
        return DraftTree.chain([update.root, 1])


def captured(target: Target) -> Any:
    """Return a head that drafts by a captured graph, whose rows lie after those of sequences."""
    head = head_of(target, "eagle1")
    head.capture = lambda function, inputs: function
    return head


VARIANTS: dict[str, Callable[[Target], Any]] = {
    "captured": captured,
    "window": lambda target: head_of(target, "eagle3", window={"sinks": 2, "recent": 8}),
    "memory without window": lambda target: head_of(target, "spire", window=None),
    "prefix": lambda target: head_of(target, "hydra", prefix=True),
    "recent": lambda target: SparseKv(100),
    "snap": lambda target: SparseKv(100, 0, "snap"),
    # it is told of nothing until it is asked
    "waiting": lambda target: FirstOf([Always(), head_of(target, "eagle3")]),
}


# -- bytes --------------------------------------------------------------------------------------

NOT_STATE = (
    type,
    types.ModuleType,
    types.FunctionType,
    torch.dtype,
    torch.device,
)


def sum_bytes(item: Any, visited: set[int]) -> int:
    """Return the bytes of all tensors that an object leads to, without those that it visited."""
    if id(item) in visited or isinstance(item, NOT_STATE):
        return 0
    visited.add(id(item))
    if isinstance(item, Tensor):
        return item.nbytes
    members: list[Any] = []
    if isinstance(item, Mapping):
        members += item.values()
    elif isinstance(item, (list, tuple, set, frozenset)):
        members += item
    if hasattr(item, "__dict__"):
        members += vars(item).values()
    # objects with slots have no __dict__
    for base in type(item).__mro__:
        for name in getattr(base, "__slots__", ()):
            if name not in ("__dict__", "__weakref__"):
                members.append(getattr(item, name, None))
    return sum(sum_bytes(member, visited) for member in members)


def forecast(
    target: Target,
    drafter: Any,
    longest: int,
    texts: int,
) -> int:
    """Return the bytes that a drafter says it keeps of so many sequences."""
    drafted = max(BUDGET.nodes, sum(drafter.forwards(BUDGET) or ()))
    tokens = texts * (longest + NEW_TOKENS + 1 + drafted)
    with_drafter = target.cache_bytes(tokens, drafter=drafter, sequences=texts)
    return with_drafter - target.cache_bytes(tokens, drafter.taps)


def measure(
    target: Target,
    drafter: Any,
    prompts: tuple[int, ...],
    texts: int,
) -> int:
    """Return the most bytes that a drafter's state holds while it decodes so many at a time."""
    drafter.budget = BUDGET
    decoding = Decoding(target, drafter, batch_size=texts)

    def held() -> int:
        return sum_bytes(decoding.drafts, {id(target), id(decoding.state)})

    # weights, and copies of them
    before = held()
    for row, length in enumerate(prompts):
        prompt = random_tokens(length, seed=row)
        decoding.add(
            row,
            prompt,
            Sampling(),
            NEW_TOKENS,
            Trace([]),
            stop=[],
        )
    most = 0
    while not decoding.is_done:
        decoding.step()
        most = max(most, held() - before)
    decoding.close()
    return most


def check(
    target: Target,
    drafter: Any,
    prompts: tuple[int, ...] = PROMPTS,
    texts: int = 2,
) -> int:
    """Return the forecast, which covers what is kept and is at most twice that."""
    kept = measure(target, drafter, prompts, texts)
    expected = forecast(target, drafter, max(prompts), texts)
    assert kept <= expected <= 2 * kept, f"{kept} bytes are kept, {expected} forecast"
    return expected


@pytest.mark.quick(
    "draft_model",
    "hydra",
    "falcon",
    "spire",
)
@pytest.mark.parametrize("kind", KEEPING)
def test_a_drafter_forecasts_what_its_state_keeps(kind: str, target: Target) -> None:
    """By the registry: a new method that keeps something and says nothing fails here."""
    check(target, drafter_of(kind, target))


@pytest.mark.quick("recent", "snap", "waiting")
@pytest.mark.parametrize("name", VARIANTS)
def test_other_settings_forecast_what_is_kept(name: str, target: Target) -> None:
    """Windows, sparse caches, captured drafts, and a drafter that waits for its turn."""
    check(target, VARIANTS[name](target))


@pytest.mark.quick("none", "suffix")
@pytest.mark.parametrize("kind", WITHOUT_STATES)
def test_a_drafter_without_states_keeps_ids_alone(kind: str, target: Target) -> None:
    """At most two ids of each token, which no forecast counts."""
    drafter = drafter_of(kind, target)
    if drafter.remembers:
        # its table belongs to no sequence, and has a row for each of these tokens after they were read once
        measure(target, drafter, PROMPTS, 2)
    assert measure(target, drafter, PROMPTS, 2) <= 2 * 8 * (max(PROMPTS) + NEW_TOKENS)
    assert forecast(target, drafter, max(PROMPTS), 2) == 0


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("eagle3", {"window": {"sinks": 2, "recent": 8}}),
        ("spire", {}),
        ("sparse_kv", {}),
    ],
)
def test_a_window_bounds_what_is_kept(
    kind: str,
    settings: dict[str, Any],
    target: Target,
) -> None:
    """Of a long sequence, and of each of several."""
    drafter = SparseKv(100) if kind == "sparse_kv" else head_of(target, kind, **settings)
    long = 2 * WINDOW_CHUNK_TOKENS
    expected = check(target, drafter, (long,), texts=1)
    assert forecast(target, drafter, 8 * long, 1) == expected
    assert forecast(target, drafter, 8 * long, 3) == 3 * expected


def test_a_head_that_forecasts_nothing_is_seen(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison fails if a head keeps states and does not count them."""
    head = head_of(target, "eagle1")
    monkeypatch.setattr(
        type(head),
        "kept_bytes",
        Drafter.kept_bytes,
    )
    with pytest.raises(AssertionError, match="bytes are kept, 0 forecast"):
        check(target, head)


def test_a_wrong_number_of_sequences_is_refused(target: Target) -> None:
    """Instead of a division by zero."""
    with pytest.raises(ValueError, match="sequences is 0"):
        target.cache_bytes(100, drafter=Always(), sequences=0)
