"""What the target drafts behind a sparse cache is the untouched model's own, with the other columns hidden from it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, partialmethod
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from eagle import Budget, Sampling, Target, Trace, generate, load_drafter
from eagle.core.tree import chain_paths
from eagle.drafters.self_speculation import sparse_kv
from eagle.drafters.self_speculation.sparse_kv import SparseKv, SparseState
from eagle.target.attention import layer_windows
from eagle.target.view import TargetTexts
from tests.families import build, own_choices, own_logits, random_tokens

BUDGET, SINKS, CHAIN = 12, 2, Budget(4, 4, 1)
LENGTHS = (5, 14, 23)
SNAP_BUDGET, SNAP_LENGTHS = 40, (36, 60, 45)
Held = Callable[[Any, list[int], int], Tensor]
"""Model, text, length of the prompt -> [L, X, T], which of a text's columns each head of keys holds."""


@pytest.fixture(scope="module")
def model() -> Any:
    """A tiny llama in fp64, whose answers hang on what it sees."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    llama = LlamaForCausalLM(
        LlamaConfig(vocab_size=96, num_hidden_layers=2, bos_token_id=0, **sizes)
    )
    for weight in llama.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.3)
    torch.nn.init.normal_(llama.model.embed_tokens.weight, std=0.1)
    return llama.double().eval()


def hold_recent(model: Any, text: list[int], prompt: int) -> Tensor:
    """The first tokens and the latest."""
    places = torch.arange(len(text))
    held = (places < SINKS) | (places >= len(text) - (BUDGET - SINKS))
    return held.expand(model.config.num_hidden_layers, model.config.num_key_value_heads, -1)


def hold_snapped(model: Any, text: list[int], prompt: int) -> Tensor:
    """By the attention of the prompt's last 32 tokens, as the untouched model reports it, and all that follows."""
    layers, heads = model.config.num_hidden_layers, model.config.num_key_value_heads
    held = torch.ones(layers, heads, len(text), dtype=torch.bool)
    before = prompt - 32
    if prompt <= SNAP_BUDGET:
        return held
    with torch.no_grad():
        attentions = eager(model)(
            torch.tensor([text[:prompt]]), output_attentions=True, use_cache=False
        ).attentions
    for layer, probs in enumerate(attentions):
        for head in range(heads):
            shared = range(head * probs.shape[1] // heads, (head + 1) * probs.shape[1] // heads)
            sums = [
                sum(float(probs[0, h, q, c]) for h in shared for q in range(before, prompt))
                for c in range(before)
            ]
            means = [sum(sums[max(c - 2, 0) : c + 3]) / 5 for c in range(before)]
            best = sorted(range(before), key=lambda column: -means[column])
            held[layer, head, best[SNAP_BUDGET - 32 :]] = False
    return held


def eager(model: Any) -> Any:
    """The untouched model with attention that takes a mask for each head."""
    other = copy.deepcopy(model)
    other.set_attn_implementation("eager")
    return other


@contextmanager
def masking(model: Any, masks: Tensor) -> Iterator[None]:
    """While open, each layer attends by its own of the masks [L, H, T, T]."""

    def change(mask: Tensor, _: Any, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "attention_mask": mask[None]}

    attentions = [layer.self_attn for layer in model.model.layers]
    handles = [
        attention.register_forward_pre_hook(partial(change, mask), with_kwargs=True)
        for attention, mask in zip(attentions, masks, strict=True)
    ]
    yield
    for handle in handles:
        handle.remove()


@torch.no_grad()
def draft_naively(model: Any, text: list[int], root: int, depth: int, held: Tensor) -> list[int]:
    """A chain by one forward over everything for each token: the text sees all before, the draft what is held."""
    config, path = model.config, [root]
    groups = config.num_attention_heads // config.num_key_value_heads
    kinds = getattr(config, "layer_types", None) or ["any"] * config.num_hidden_layers
    while len(path) <= depth:
        size = len(text) + len(path)
        places = torch.arange(size)
        seen = (places[:, None] >= places).repeat(len(kinds), config.num_attention_heads, 1, 1)
        seen[:, :, len(text) :, : len(text)] = held.repeat_interleave(groups, 1)[:, :, None]
        for layer, kind in enumerate(kinds):
            if window := layer_windows(config)[kind]:
                seen[layer] &= places[:, None] - places < window
        masks = torch.zeros(seen.shape, dtype=model.dtype).masked_fill(
            ~seen, torch.finfo(model.dtype).min
        )
        with masking(model, masks):
            path.append(
                int(model(torch.tensor([[*text, *path]]), use_cache=False).logits[0, -1].argmax())
            )
    return path[1:]


def decode(target: Target, drafter: Any, lengths: tuple[int, ...], **options: Any) -> list[Trace]:
    """Answers to random prompts, side by side."""
    prompts = [random_tokens(length, seed=length) for length in lengths]
    options = {
        "budget": CHAIN,
        "max_new_tokens": 20,
        "stop": [],
        "batch_size": len(prompts),
        **options,
    }
    return generate(target, drafter, prompts, **options)


def drafts_are_naive(model: Any, traces: list[Trace], hold: Held) -> bool:
    """Whether every chain of every text is the naive one."""
    naive = eager(model)
    for trace in traces:
        whole = [*trace.prompt, *trace.tokens]
        for cycle in trace.cycles:
            text, (root, *chain) = whole[: cycle.context], cycle.tree.tokens.tolist()
            held = hold(model, text, len(trace.prompt))
            if chain != draft_naively(naive, text, root, len(chain), held):
                return False
    return True


@pytest.mark.slow
def test_recent_drafts_are_the_models_behind_sinks_and_window(model: Any) -> None:
    """Of texts of unlike lengths, over cycles that keep some drafts and drop others."""
    traces = decode(Target(copy.deepcopy(model)), SparseKv(BUDGET, SINKS), LENGTHS)
    assert len({cycle.accepted for trace in traces for cycle in trace.cycles}) >= 4
    assert drafts_are_naive(model, traces, hold_recent)


@pytest.mark.parametrize("name", ["mistral-sliding", "qwen2-sliding"])
def test_sliding_windows_count_positions(name: str) -> None:
    """Columns of a ring are not in the order of their positions, by which the windows of 8 hide them."""
    model = build(name, torch.float64)
    traces = decode(
        Target(copy.deepcopy(model)), SparseKv(BUDGET, SINKS), LENGTHS[1:], max_new_tokens=16
    )
    assert drafts_are_naive(model, traces, hold_recent)


def test_snapped_drafts_are_the_models_behind_what_each_head_chose(model: Any) -> None:
    """By the attention of the prompt's last tokens; a prompt within the budget is held whole."""
    traces = decode(
        Target(copy.deepcopy(model)), SparseKv(SNAP_BUDGET, select="snap"), SNAP_LENGTHS
    )
    assert len({cycle.accepted for trace in traces for cycle in trace.cycles}) >= 4
    assert drafts_are_naive(model, traces, hold_snapped)


def keep_drafted(copy_columns: Any, texts: TargetTexts, cache: Any, moves: dict[int, Any]) -> None:
    """Keep the root and the three tokens behind it as they were drafted: they saw what is held alone."""
    for row, (slot, here, there) in moves.items():
        own = min(len(here), 4) if len(here) <= 5 else 0  # a prompt was not drafted
        slots, drafted = torch.full((own,), slot), BUDGET + torch.arange(own)
        if own:
            cache.copy_columns(
                cache, torch.stack([slots, drafted]), torch.stack([slots, there[:own]])
            )
        if own < len(here):
            copy_columns(texts, cache, {row: (slot, here[own:], there[own:])})


def test_faults_are_seen(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafted keys that stay, a ring that turns one too far, one head that chooses for its group, ignored positions."""
    target, columns, score = (
        Target(copy.deepcopy(model)),
        SparseState._columns,
        sparse_kv.score_columns,
    )
    recent, snap = SparseKv(BUDGET, SINKS), SparseKv(SNAP_BUDGET, select="snap")
    with monkeypatch.context() as fault:
        fault.setattr(
            TargetTexts,
            "copy_columns",
            partialmethod(partial(keep_drafted, TargetTexts.copy_columns)),
        )
        assert not drafts_are_naive(model, decode(target, recent, LENGTHS[1:]), hold_recent)
    with monkeypatch.context() as fault:
        fault.setattr(
            SparseState,
            "_columns",
            lambda self, row, places: columns(self, row, places + (places > 1)),
        )
        assert not drafts_are_naive(model, decode(target, recent, LENGTHS), hold_recent)
    with monkeypatch.context() as fault:
        fault.setattr(sparse_kv, "score_columns", lambda queries, *rest: score(queries[::2], *rest))
        assert not drafts_are_naive(model, decode(target, snap, SNAP_LENGTHS), hold_snapped)
    sliding = build("mistral-sliding", torch.float64)
    with monkeypatch.context() as fault:
        fault.setattr(
            SparseState,
            "_held_positions",
            lambda self, rows: torch.arange(BUDGET + 1).repeat(len(rows), 1),
        )
        traces = decode(Target(copy.deepcopy(sliding)), recent, LENGTHS[1:], max_new_tokens=16)
        assert not drafts_are_naive(sliding, traces, hold_recent)


@pytest.mark.quick("phi3-sliding")
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "mistral", "phi3-sliding"])
def test_what_the_budget_holds_whole_is_drafted_as_the_target_writes_it(name: str) -> None:
    """A kept path ends at a leaf, in texts of unlike lengths and beyond windows; the answers are the model's own."""
    model = build(name)
    target = Target(copy.deepcopy(model))
    for budget in (Budget(7, 7, 1), Budget(8, 4, 3)):
        traces = decode(target, SparseKv(64), LENGTHS, budget=budget)
        ends = [(cycle.tree, (0, *cycle.kept)[-1]) for trace in traces for cycle in trace.cycles]
        assert not any(tree.children()[end] for tree, end in ends)
    for trace in decode(target, SparseKv(BUDGET, SINKS), LENGTHS):
        assert trace.tokens == own_choices(model, trace.prompt, trace.tokens)


@pytest.mark.slow
def test_rows_come_and_go(model: Any) -> None:
    """More texts than are written at a time, some behind a lookup that is asked first: each as if it were alone."""
    target = Target(copy.deepcopy(model))
    for select, budget, lengths in (
        ("recent", BUDGET, (23, 5, 14, 9)),
        ("snap", SNAP_BUDGET, (53, 35, 44, 39)),
    ):
        for names in ("sparse_kv", "ngram,sparse_kv"):
            drafter = load_drafter(names, target, budget=budget, select=select)
            beside = decode(target, drafter, lengths, batch_size=2, max_new_tokens=12)
            alone = [decode(target, drafter, (length,), max_new_tokens=12)[0] for length in lengths]
            drafts = [
                [cycle.tree.tokens.tolist() for cycle in trace.cycles]
                for trace in (*beside, *alone)
            ]
            assert drafts[: len(lengths)] == drafts[len(lengths) :]


@pytest.mark.slow
def test_drawn_drafts_of_another_distribution_keep_the_targets() -> None:
    """Two tokens of 400 answers with drawn chains, whose drafts see three columns of eight and more."""
    torch.manual_seed(1)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=4, num_hidden_layers=2, bos_token_id=0, **sizes)
    ).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.25)
    target, prompt, counts = Target(model), [1, 2, 3, 0, 1, 3, 2, 2], torch.zeros(4, 4)
    drafter, rejected = SparseKv(3, 1), 0
    options: dict[str, Any] = {
        "budget": Budget.fixed(chain_paths(3), "sampled"),
        "max_new_tokens": 4,
        "stop": [],
    }
    for request in range(400):
        sampling = Sampling(temperature=1.0, seed=5, request=request)
        answer = generate(target, drafter, prompt, sampling=sampling, **options)
        counts[tuple(answer.tokens[:2])] += 1
        rejected += sum(cycle.accepted < cycle.depth for cycle in answer.cycles)
    probs = torch.stack([own_logits(model, [*prompt, token])[-1].softmax(-1) for token in range(4)])
    expected = 400 * probs * own_logits(model, prompt)[-1].softmax(-1)[:, None]
    rare = expected < 5  # for which together the statistic is what it is taken for
    seen, due = (
        torch.cat([cells[~rare], cells[rare].sum()[None]]).double() for cells in (counts, expected)
    )
    assert rejected > 100 and chisquare(seen, due * (400 / due.sum())).pvalue > 1e-4


def test_what_cannot_be_is_refused(model: Any) -> None:
    """Options that make no sense, and targets by whose attention nothing can be chosen."""
    for options, message in [
        ({"select": "last"}, "expected one of recent, snap"),
        ({"budget": 4}, "expected 0 <= sinks < budget"),
        ({"budget": 32, "select": "snap"}, "expected more than 32"),
    ]:
        with pytest.raises(ValueError, match=message):
            SparseKv(**options)
    with pytest.raises(ValueError, match="sliding windows"):
        load_drafter("sparse_kv", Target(build("mistral-sliding")), select="snap")
    with pytest.raises(ValueError, match="shows no queries to choose by: load it with 'sdpa'"):
        load_drafter("sparse_kv", Target(eager(model)), select="snap")


def test_costs_are_those_of_what_is_held(model: Any) -> None:
    """A draft reads its root and its levels behind the budget at most, and is probed so."""
    drafter = load_drafter("sparse_kv", Target(copy.deepcopy(model)), budget=BUDGET)
    assert drafter.forwards(Budget(7, 4, 2)) == (2, 2, 2) and drafter.unread(3, 4) == 1
    for context in (3, 200):
        assert drafter.probe(context, 2, 1)().shape == (1, 1, 96)
    assert SparseKv().probe(3, 2, 1) is None


@pytest.mark.quick("mistral-sliding-12-4")
@pytest.mark.parametrize(("budget", "sinks"), [(3, 2), (6, 4), (12, 4), (5, 0)])
@pytest.mark.parametrize("name", ["mistral-sliding", "qwen2-sliding"])
def test_short_prompts_draft_behind_windows(name: str, budget: int, sinks: int) -> None:
    """Prompts shorter than the sinks, alone and side by side, are the untouched model's own answers."""
    model = build(name)
    target, drafter = Target(copy.deepcopy(model)), SparseKv(budget, sinks)
    lengths = tuple(range(1, 9))
    prompts = [random_tokens(length, seed=length) for length in lengths]
    together = decode(target, drafter, lengths, max_new_tokens=8)
    for prompt, trace in zip(prompts, together, strict=True):
        alone = generate(target, drafter, prompt, budget=CHAIN, max_new_tokens=8, stop=[])
        assert alone.tokens == trace.tokens == own_choices(model, prompt, trace.tokens)
        assert alone.cycles == trace.cycles
