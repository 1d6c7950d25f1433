"""The target's first layers draft what the untouched model says when it is cut to them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle import Budget, Sampling, Target, Trace, generate, load_drafter
from eagle.core.trace import Cycle
from eagle.core.tree import chain_paths
from eagle.decoding.cycle_times import bare_costs
from eagle.decoding.loop import Decoding
from eagle.drafters.self_speculation import exit_state
from eagle.drafters.self_speculation.early_exit import EarlyExit
from eagle.target.view import TargetTexts
from tests.families import NUM_LAYERS, build, own_answer, own_logits, random_tokens

PROMPTS = [random_tokens(count, seed) for seed, count in enumerate((6, 11, 3))]
SHAPE = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0))
KEPT = 2  # layers that draft


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma2"])
def model(request: Any) -> Any:
    """The untouched model in fp64."""
    return build(request.param, torch.float64)


def cut(model: Any, layers: int) -> Any:
    """The untouched model without its last layers."""
    short = copy.deepcopy(model)
    short.model.layers = short.model.layers[:layers]
    short.config.num_hidden_layers = layers
    return short


def check_drafts(short: Any, text: list[int], cycle: Cycle) -> None:
    """Every node of a draft is the token of its rank by the cut model behind the text and the path to its parent."""
    tree, children = cycle.tree, cycle.tree.children()
    paths = {0: [*text[: cycle.context], int(tree.tokens[0])]}
    for node, below in enumerate(children):
        if below:
            ranked = own_logits(short, paths[node])[-1].topk(len(below)).indices.tolist()
            drafted = [int(tree.tokens[child]) for child in below]
            assert drafted == ranked, f"drafted {drafted}, the cut model says {ranked}"
        for child in below:
            paths[child] = [*paths[node], int(tree.tokens[child])]


def check_layers(model: Any, drafter: EarlyExit) -> None:
    """All drafts of answers that are written side by side."""
    options: dict[str, Any] = {"budget": Budget.fixed(SHAPE), "max_new_tokens": 10, "stop": []}
    traces = generate(Target(copy.deepcopy(model)), drafter, PROMPTS, **options)
    short = cut(model, KEPT)
    for prompt, trace in zip(PROMPTS, traces, strict=True):
        assert trace.tokens == own_answer(model, prompt, 10)
        assert any(
            cycle.accepted < cycle.depth for cycle in trace.cycles
        )  # drafts that were rejected leave no trace
        for cycle in trace.cycles:
            check_drafts(short, [*prompt, *trace.tokens], cycle)


@pytest.mark.quick("llama")
def test_drafts_are_those_of_the_cut_model(model: Any) -> None:
    """Of three texts at a time, in trees, before and behind drafts that were rejected."""
    check_layers(model, EarlyExit(KEPT))


ahead = TargetTexts.ahead


def unseen_root(
    self: TargetTexts, rows: Any, tokens: Tensor, depths: list[int], seen: Any, layers: Any
) -> Tensor:
    """Nodes that do not see the root."""
    if seen is not None:
        seen = torch.cat([torch.zeros_like(seen[..., :1]), seen[..., 1:]], dim=-1)
    return ahead(self, rows, tokens, depths, seen, layers)


def kept_reject(
    self: TargetTexts, rows: Any, tokens: Tensor, depths: list[int], seen: Any, layers: Any
) -> Tensor:
    """Drafts that see a column more than is committed: that of a node that was rejected, or of none."""
    slots = [self.state.rows.index(row) for row in rows]
    for slot in slots:
        self.state.cache.lengths[slot] += 1
    states = ahead(self, rows, tokens, [depth - 1 for depth in depths], seen, layers)
    for slot in slots:
        self.state.cache.lengths[slot] -= 1
    return states


@pytest.mark.parametrize("fault", [unseen_root, kept_reject, None])
def test_planted_faults_are_seen(
    fault: Callable[..., Tensor] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The root hidden, a rejected column seen, and a layer too many: each drafts something else."""
    if fault is not None:
        monkeypatch.setattr(TargetTexts, "ahead", fault)
    with pytest.raises(AssertionError, match="the cut model says"):
        check_layers(build("llama", torch.float64), EarlyExit(KEPT + (fault is None)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_layers_draft_what_is_accepted(temperature: float) -> None:
    """Chains of seven in whole, where the target is greedy and where its noise is known."""
    target, sampling = (
        Target(build("llama", torch.float64)),
        Sampling(temperature=temperature, seed=3),
    )
    options: dict[str, Any] = {
        "budget": Budget.fixed(chain_paths(7)),
        "max_new_tokens": 25,
        "stop": [],
    }
    drafter = load_drafter("early_exit", target, layers=NUM_LAYERS)
    trace = generate(target, drafter, PROMPTS[0], sampling=sampling, **options)
    assert [cycle.accepted for cycle in trace.cycles] == [7, 7, 7]
    none = generate(target, load_drafter("none", target), PROMPTS[0], sampling=sampling, **options)
    assert trace.tokens == none.tokens


def columns_held(target: Target, room: int) -> tuple[list[Trace], int]:
    """Answers by wide and deep trees in a cache of so many columns, and the most that it came to."""
    budget = Budget(8, 6, 8)
    decoding = Decoding(
        target, EarlyExit(KEPT), budget=budget, batch_size=3, max_tokens_in_cache=room
    )
    traces, most = [Trace([]) for _ in PROMPTS], 0
    for number, prompt in enumerate(PROMPTS):
        decoding.add(number, prompt, Sampling(), 12, traces[number], stop=[])
    while not decoding.is_done:
        decoding.step()
        slots, columns = decoding.state.cache.sizes
        most = max(most, slots * columns)
    return traces, most


@pytest.mark.slow
def test_drafts_stay_within_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts read more nodes than they keep: they end a level earlier where the cache may not grow."""
    model = build("llama", torch.float64)
    target, room = Target(copy.deepcopy(model)), 3 * (max(map(len, PROMPTS)) + 12 + 8 + 1)
    traces, held = columns_held(target, room)
    assert held <= room and max(cycle.rows for cycle in traces[0].cycles) == 3
    assert [trace.tokens for trace in traces] == [
        own_answer(model, prompt, 12) for prompt in PROMPTS
    ]
    assert any(0 < cycle.depth < 6 for cycle in traces[0].cycles[:2])
    monkeypatch.setattr(exit_state, "_fit_columns", lambda budget, room: budget)
    assert columns_held(target, room)[1] > room


def test_texts_that_are_read_alone_are_drafted_for_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a target cannot read rows side by side, each text's draft has forwards of its own, and is the same."""
    options: dict[str, Any] = {"budget": Budget(5, 3, 2), "max_new_tokens": 8, "stop": []}
    target, texts = Target(build("qwen3", torch.float64)), list[int]()
    expected = generate(target, EarlyExit(), PROMPTS, **options)
    target.reader.reads_rows = False

    def count(self: TargetTexts, rows: Any, *args: Any) -> Tensor:
        texts.append(len(rows))
        return ahead(self, rows, *args)

    monkeypatch.setattr(TargetTexts, "ahead", count)
    assert [trace.cycles for trace in generate(target, EarlyExit(), PROMPTS, **options)] == [
        trace.cycles for trace in expected
    ]
    assert set(texts) == {1}


def test_texts_are_drafted_for_up_to_the_last_position() -> None:
    """No draft stands where the model has no position, and the last token is still the model's own."""
    model = build("llama", torch.float64)
    prompt = random_tokens(model.config.max_position_embeddings - 9, 5)
    options: dict[str, Any] = {
        "budget": Budget.fixed(chain_paths(10)),
        "max_new_tokens": 9,
        "stop": [],
    }
    trace = generate(Target(copy.deepcopy(model)), EarlyExit(NUM_LAYERS), prompt, **options)
    assert trace.tokens == own_answer(model, prompt, 9) and len(trace.cycles) == 1


def test_a_forward_is_timed_by_itself() -> None:
    """A probe runs the layers behind a context; forwards are the root, then the levels' rows."""
    target = Target(build("llama"))
    drafter: Any = load_drafter("early_exit", target)
    assert drafter.probe(20, 5, 2)().shape == (2, 96) and drafter.probe(0, 1, 1)().shape == (1, 96)
    assert drafter.forwards(Budget(8, 4, 3)) == (3, 3, 3) and drafter.unread(3, 4) == 1
    costs = bare_costs(target, drafter, [8, 16], sizes=[1, 3], rounds=1)
    assert costs.first is not None and len(costs.first) == 2


@pytest.mark.parametrize("layers", [0, NUM_LAYERS + 1])
def test_layers_that_the_target_has_not_are_refused(layers: int) -> None:
    """Before anything is drafted, with what there is."""
    with pytest.raises(ValueError, match=f"layers is {layers}, expected 1 to {NUM_LAYERS}"):
        load_drafter("early_exit", Target(build("llama")), layers=layers)
