"""What a drafter says it keeps of texts is what hangs on its state while it decodes them."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from eagle import Budget, Sampling, Target, Trace
from eagle.core.drafter import Committed, Drafter
from eagle.core.tree import DraftTree
from eagle.decoding.loop import Decoding
from eagle.drafters import DRAFTERS, settings_of
from eagle.drafters.lookup.counts import Tables
from eagle.drafters.parts.text_state import PART
from eagle.drafters.self_speculation.sparse_kv import SparseKv
from eagle.drafters.several import FirstOf
from tests.batches import own_model
from tests.families import VOCAB_SIZE, random_tokens
from tests.registry import TRAINED

LIMIT, BUDGET = 12, Budget(6, 3, 2)
PROMPTS = (150, 150, 30)  # two texts at a time
LOOKUPS = [name for name in DRAFTERS if name not in (*TRAINED, "sparse_kv")]


@pytest.fixture(scope="module")
def target() -> Target:
    """A tiny llama in fp64, whose keys are fewer than its queries."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        num_hidden_layers=5,
        max_position_embeddings=2048,
        bos_token_id=0,
        **sizes,
    )
    return Target(LlamaForCausalLM(config).double().eval())


def head_of(target: Target, kind: str, **settings: Any) -> Any:
    """An untrained head."""
    torch.manual_seed(0)
    asked = settings_of({"kind": kind, **settings}, "test")
    weights = (
        {"weights": target.model.state_dict().__getitem__} if DRAFTERS[kind].reads.weights else {}
    )
    head = DRAFTERS[kind].for_target(asked, target.config, target.head, **weights)
    return head.double().bind(target.head)


def drafter_of(kind: str, target: Target) -> Any:
    """A drafter of the registry."""
    if kind == "draft_model":
        return own_model(target)
    if kind in TRAINED:
        return head_of(target, kind)
    if kind in ("unigram", "bigram"):
        none = torch.empty(0, dtype=torch.long)
        return DRAFTERS[kind](
            Tables(torch.ones(VOCAB_SIZE).long(), torch.zeros(VOCAB_SIZE + 1).long(), none, none)
        )
    return DRAFTERS[kind]()


class Always(Drafter):
    """Drafts after every token, so that nobody behind it is asked."""

    def begin(self, noise: Any = None) -> Any:
        """A text, of which nothing is kept."""
        return self

    def propose(self, update: Committed, budget: Budget) -> DraftTree:
        """One wrong token."""
        return DraftTree.chain([update.root, 1])


def captured(target: Target) -> Any:
    """A head whose drafts lie behind the room of texts."""
    head = head_of(target, "eagle1")
    head.capture = lambda function, inputs: function
    return head


OTHERS: dict[str, Callable[[Target], Any]] = {
    "captured": captured,
    "window": lambda target: head_of(target, "eagle3", window={"sinks": 2, "recent": 8}),
    "memory without window": lambda target: head_of(target, "spire", window=None),
    "prefix": lambda target: head_of(target, "hydra", prefix=True),
    "three blocks": lambda target: head_of(target, "dflash", blocks=3, slots=6),
    "recent": lambda target: SparseKv(100),
    "snap": lambda target: SparseKv(100, 0, "snap"),
    "lookup, head": lambda target: FirstOf([DRAFTERS["ngram"](), head_of(target, "eagle3")]),
    "waiting": lambda target: FirstOf([Always(), head_of(target, "eagle3")]),
}


def sum_bytes(part: Any, seen: set[int]) -> int:
    """Bytes of all tensors that hang on something, but not on what was `seen`."""
    if id(part) in seen or isinstance(
        part, (type, types.ModuleType, types.FunctionType, torch.dtype, torch.device)
    ):
        return 0
    seen.add(id(part))
    if isinstance(part, Tensor):
        return part.nbytes
    parts = list(part.values()) if isinstance(part, Mapping) else []
    if isinstance(part, (list, tuple, set, frozenset)):
        parts = list(part)
    parts += vars(part).values() if hasattr(part, "__dict__") else []
    slots = [name for kind in type(part).__mro__ for name in getattr(kind, "__slots__", ())]
    parts += [
        getattr(part, name, None) for name in slots if name not in ("__dict__", "__weakref__")
    ]
    return sum(sum_bytes(inner, seen) for inner in parts)


def forecast(target: Target, drafter: Any, longest: int, texts: int) -> int:
    """Bytes that a drafter says it keeps of so many texts, as the target tells them beside its own."""
    tokens = texts * (longest + LIMIT + 1 + max(BUDGET.nodes, sum(drafter.forwards(BUDGET) or ())))
    return target.cache_bytes(tokens, drafter=drafter, texts=texts) - target.cache_bytes(
        tokens, drafter.taps
    )


def kept_and_said(
    target: Target, drafter: Any, prompts: tuple[int, ...], texts: int
) -> tuple[int, int]:
    """The most bytes that hang on a drafter's state while so many texts are decoded at a time, and the forecast."""
    drafter.budget = BUDGET
    decoding = Decoding(target, drafter, batch_size=texts)

    def held() -> int:
        return sum_bytes(decoding.drafts, {id(target), id(decoding.state)})

    before, most = held(), 0  # weights, and copies of them
    for number, length in enumerate(prompts):
        prompt = random_tokens(length, seed=number)
        decoding.add(number, prompt, Sampling(), LIMIT, Trace([]), stop=[])
    while not decoding.is_done:
        decoding.step()
        most = max(most, held() - before)
    decoding.close()
    return most, forecast(target, drafter, max(prompts), texts)


def check(target: Target, drafter: Any, prompts: tuple[int, ...] = PROMPTS, texts: int = 2) -> int:
    """Compare the two, and return the forecast: no more is kept, and it is not far more than what is."""
    kept, said = kept_and_said(target, drafter, prompts, texts)
    assert kept <= said <= 2 * kept, f"{kept} bytes are kept, {said} forecast"
    return said


@pytest.mark.quick("draft_model", "hydra", "falcon", "spire")
@pytest.mark.parametrize("kind", [name for name in DRAFTERS if name not in LOOKUPS])
def test_a_drafter_tells_what_its_state_keeps(kind: str, target: Target) -> None:
    """By the registry: a new method that keeps something and says nothing fails here."""
    check(target, drafter_of(kind, target))


@pytest.mark.quick("memory without window", "recent", "snap", "lookup, head", "waiting")
@pytest.mark.parametrize("name", OTHERS)
def test_so_do_other_settings_and_several_drafters(name: str, target: Target) -> None:
    """Windows, blocks, sparse caches, captured drafts; and one drafter that waits while another is asked."""
    check(target, OTHERS[name](target))


@pytest.mark.quick("none", "suffix")
@pytest.mark.parametrize("kind", LOOKUPS)
def test_what_reads_tokens_alone_keeps_ids(kind: str, target: Target) -> None:
    """No more than some bytes of each token, which nobody counts."""
    kept, said = kept_and_said(target, drafter_of(kind, target), PROMPTS, 2)
    assert said == 0 and kept <= 2 * 8 * (max(PROMPTS) + LIMIT)


@pytest.mark.parametrize("kind", ["eagle3", "spire", "sparse_kv"])
def test_a_window_bounds_what_is_kept(kind: str, target: Target) -> None:
    """Of a long text."""
    make = {
        "eagle3": OTHERS["window"],
        "spire": lambda target: head_of(target, "spire"),
        "sparse_kv": OTHERS["recent"],
    }
    drafter, long = make[kind](target), 2 * PART
    said = check(target, drafter, (long,), texts=1)
    assert forecast(target, drafter, 8 * long, 1) == said
    assert forecast(target, drafter, 8 * long, 3) == 3 * said


def test_a_head_that_says_nothing_is_seen(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault."""
    head = head_of(target, "eagle1")
    monkeypatch.setattr(type(head), "kept_bytes", Drafter.kept_bytes)
    with pytest.raises(AssertionError, match="bytes are kept, 0 forecast"):
        check(target, head)


def test_a_wrong_number_of_texts_is_told(target: Target) -> None:
    """Instead of a division by zero."""
    with pytest.raises(ValueError, match="texts is 0, expected"):
        target.cache_bytes(100, drafter=Always(), texts=0)
