"""The target's first layers draft what the untouched model says when it is cut to them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle import Budget, Sampling, Target, Trace, generate, load_drafter
from eagle.core.tree import chain_paths
from eagle.decoding.cycle_times import bare_costs
from eagle.decoding.loop import Decoding
from eagle.drafters.self_speculation import exit_state
from eagle.drafters.self_speculation.early_exit import EarlyExit
from eagle.target.view import TargetSequences
from tests.families import NUM_LAYERS, build, own_answer, own_logits, random_tokens

PROMPTS = [random_tokens(count, seed) for seed, count in enumerate((6, 11, 3))]
TREE = Budget.fixed(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0)))
# the layers that draft
LAYERS = 2


@pytest.fixture(scope="module")
def llama() -> Any:
    """Return an untouched llama in fp64."""
    return build("llama", torch.float64)


def cut(model: Any, layers: int) -> Any:
    """Return a copy of the model without its last layers."""
    # the final norm and the LM head stay
    short = copy.deepcopy(model)
    short.model.layers = short.model.layers[:layers]
    short.config.num_hidden_layers = layers
    return short


def check_drafts(model: Any, drafter: EarlyExit) -> None:
    """Assert that every drafted node has its rank among the cut model's logits after the path to its parent."""
    # the target may not share weights with the model that judges it
    target = Target(copy.deepcopy(model))
    traces = generate(
        target,
        drafter,
        PROMPTS,
        budget=TREE,
        max_new_tokens=10,
        stop=[],
    )
    short = cut(model, LAYERS)
    for prompt, trace in zip(PROMPTS, traces, strict=True):
        assert trace.tokens == own_answer(model, prompt, 10)
        # rejected drafts must leave no trace in the cache
        assert any(cycle.accepted < cycle.depth for cycle in trace.cycles)
        text = [*prompt, *trace.tokens]
        for cycle in trace.cycles:
            tree = cycle.tree
            for node, children in enumerate(tree.children()):
                path = tree.tokens[tree.path(node)].tolist()
                if not children:
                    continue
                logits = own_logits(short, [*text[: cycle.context], *path])[-1]
                ranked = logits.topk(len(children)).indices.tolist()
                drafted = [int(tree.tokens[child]) for child in children]
                assert drafted == ranked, "the cut model says something else"


@pytest.mark.quick("llama")
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_drafts_are_those_of_the_cut_model(family: str) -> None:
    """Three texts are drafted for in a batch, after drafts that were accepted and rejected."""
    check_drafts(build(family, torch.float64), EarlyExit(LAYERS))


read_ahead = TargetSequences.ahead


def test_a_hidden_root_is_seen(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that do not see the root draft something else."""

    def hide_root(
        self: TargetSequences,
        rows: Any,
        tokens: Tensor,
        depths: list[int],
        tree_mask: Any,
        layers: Any,
    ) -> Tensor:
        if tree_mask is not None:
            tree_mask = tree_mask.clone()
            tree_mask[..., 0] = False
        return read_ahead(
            self,
            rows,
            tokens,
            depths,
            tree_mask=tree_mask,
            layers=layers,
        )

    monkeypatch.setattr(TargetSequences, "ahead", hide_root)
    with pytest.raises(AssertionError, match="the cut model says"):
        check_drafts(llama, EarlyExit(LAYERS))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_layers_draft_what_is_accepted(llama: Any, temperature: float) -> None:
    """Chains of seven are accepted whole, since the drafts know the target's noise."""
    target = Target(copy.deepcopy(llama))
    options: dict[str, Any] = {
        "sampling": Sampling(temperature=temperature, seed=3),
        "budget": Budget.fixed(chain_paths(7)),
        "max_new_tokens": 25,
        "stop": [],
    }
    # a draft by all layers is the target itself
    drafter = load_drafter("early_exit", target, layers=NUM_LAYERS)
    trace = generate(target, drafter, PROMPTS[0], **options)
    assert [cycle.accepted for cycle in trace.cycles] == [7, 7, 7]


def decode_in_cache(model: Any, columns: int) -> tuple[list[Trace], int]:
    """Return answers by wide and deep trees in a cache of so many columns, and the most that it came to."""
    decoding = Decoding(
        Target(copy.deepcopy(model)),
        EarlyExit(LAYERS),
        budget=Budget(8, 6, 8),
        batch_size=3,
        max_tokens_in_cache=columns,
    )
    traces = [Trace([]) for _ in PROMPTS]
    for row, (prompt, trace) in enumerate(zip(PROMPTS, traces, strict=True)):
        decoding.add(row, prompt, Sampling(), 12, trace, stop=[])  # fmt: skip
    most = 0
    while not decoding.is_done:
        decoding.step()
        slots, width = decoding.state.cache.sizes
        most = max(most, slots * width)
    return traces, most


@pytest.mark.slow
def test_drafts_stay_within_the_cache(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts read more nodes than they keep: they end a level earlier where the cache may not grow."""
    # as much as three texts, their answers and their verified nodes need
    columns = 3 * (max(map(len, PROMPTS)) + 12 + 8 + 1)
    traces, most = decode_in_cache(llama, columns)
    assert most <= columns
    assert max(cycle.rows for cycle in traces[0].cycles) == 3
    assert any(0 < cycle.depth < 6 for cycle in traces[0].cycles[:2])
    for prompt, trace in zip(PROMPTS, traces, strict=True):
        assert trace.tokens == own_answer(llama, prompt, 12)
    # without the cut, drafts outgrow the cache
    monkeypatch.setattr(
        exit_state,
        "_fit_columns",
        lambda budget, room: budget,
    )
    assert decode_in_cache(llama, columns)[1] > columns


def test_texts_that_are_read_alone_are_drafted_for_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that cannot read rows in a batch drafts the same in a forward for each text."""
    options: dict[str, Any] = {
        "budget": Budget(5, 3, 2),
        "max_new_tokens": 8,
        "stop": [],
    }
    target = Target(build("qwen3", torch.float64))
    expected = generate(target, EarlyExit(), PROMPTS, **options)
    target.reader.reads_rows = False
    rows_read = []

    def count_rows(self: TargetSequences, rows: Any, *args: Any) -> Tensor:
        rows_read.append(len(rows))
        return read_ahead(self, rows, *args)

    monkeypatch.setattr(TargetSequences, "ahead", count_rows)
    traces = generate(target, EarlyExit(), PROMPTS, **options)
    assert [trace.cycles for trace in traces] == [trace.cycles for trace in expected]
    assert set(rows_read) == {1}


def test_texts_are_drafted_for_up_to_the_last_position(llama: Any) -> None:
    """No draft stands beyond the model's positions, and the last token is the model's own."""
    prompt = random_tokens(llama.config.max_position_embeddings - 9, 5)
    trace = generate(
        Target(copy.deepcopy(llama)),
        EarlyExit(NUM_LAYERS),
        prompt,
        budget=Budget.fixed(chain_paths(10)),
        max_new_tokens=9,
        stop=[],
    )
    assert trace.tokens == own_answer(llama, prompt, 9)
    assert len(trace.cycles) == 1


def test_a_forward_is_timed_by_itself() -> None:
    """A probe runs the layers after a context; forwards are the root's and the levels'."""
    target = Target(build("llama"))
    drafter: Any = load_drafter("early_exit", target)
    # the context is read, whatever forward reads it
    torch.testing.assert_close(drafter.probe(20, 5, 2)(), drafter.probe(0, 25, 2)())
    assert drafter.probe(0, 1, 1)().shape == (1, 96)
    assert drafter.forwards(Budget(8, 4, 3)) == (3, 3, 3)
    assert drafter.unread(3, 4) == 1
    costs = bare_costs(target, drafter, [8, 16], sizes=[1, 3], rounds=1)
    assert costs.first is not None
    assert len(costs.first) == 2


@pytest.mark.parametrize("layers", [0, NUM_LAYERS + 1])
def test_layers_that_the_target_does_not_have_are_refused(layers: int) -> None:
    """The message names what is possible."""
    with pytest.raises(ValueError, match=f"expected 1 to {NUM_LAYERS}"):
        load_drafter(
            "early_exit",
            Target(build("llama")),
            layers=layers,
        )
