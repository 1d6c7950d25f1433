"""What the target drafts behind a sparse cache is what the untouched model says if other columns are masked."""

# L layers, H heads of queries, X heads of keys, T tokens

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle import Budget, Target, Trace, generate, load_drafter
from eagle.conformance.own_answers import make_model
from eagle.drafters.self_speculation import sparse_kv
from eagle.drafters.self_speculation.sparse_kv import SparseKv, SparseState
from eagle.target.attention import layer_windows
from tests.families import build, own_choices, random_tokens

CHAIN = Budget(4, 4, 1)
# a budget of columns by position, and lengths of prompts within it and beyond
RECENT = SparseKv(12, 2)
LENGTHS = (5, 14, 23)
# the same for columns that the prompt's last 32 tokens choose
SNAP_BUDGET = 40
SNAP = SparseKv(SNAP_BUDGET, select="snap")
SNAP_LENGTHS = (36, 60, 45)
# model, text, length of the prompt -> [L, X, T], which columns each head of keys holds
Hold = Callable[[Any, list[int], int], Tensor]


@pytest.fixture(scope="module")
def model() -> Any:
    """Return a small llama in fp64, whose tokens depend on all that it sees."""
    return make_model().double()


def copy_target(model: Any) -> Target:
    """Return a target that leaves the model untouched."""
    return Target(copy.deepcopy(model))


def copy_eager(model: Any) -> Any:
    """Return a copy whose attention takes a mask for each head, and reports its probs."""
    # sdpa reports no probs
    other = copy.deepcopy(model)
    other.set_attn_implementation("eager")
    return other


def hold_recent(
    model: Any,
    text: list[int],
    prompt: int,
) -> Tensor:
    """Return which columns are among the first two tokens and the latest ten."""
    positions = torch.arange(len(text))
    held = (positions < 2) | (positions >= len(text) - 10)
    config = model.config
    return held.expand(
        config.num_hidden_layers,
        config.num_key_value_heads,
        -1,
    )


@torch.no_grad()
def hold_snapped(
    model: Any,
    text: list[int],
    prompt: int,
) -> Tensor:
    """Return which columns each head of keys keeps of a prompt, by SnapKV's description; all later ones are held."""
    config = model.config
    groups = config.num_attention_heads // config.num_key_value_heads
    shape = (config.num_hidden_layers, config.num_key_value_heads, len(text))
    held = torch.ones(shape, dtype=torch.bool)
    if prompt <= SNAP_BUDGET:
        return held
    tokens = torch.tensor([text[:prompt]])
    output = copy_eager(model)(
        tokens,
        output_attentions=True,
        use_cache=False,
    )
    first_query = prompt - 32
    for layer, probs in enumerate(output.attentions):
        for head in range(config.num_key_value_heads):
            # attention of the last 32 queries, of all heads that share the keys
            shared = probs[0, head * groups : (head + 1) * groups]
            sums = shared[:, first_query:, :first_query].sum((0, 1)).tolist()
            means = []
            for column in range(first_query):
                means.append(sum(sums[max(column - 2, 0) : column + 3]) / 5)
            ranked = sorted(range(first_query), key=lambda column: -means[column])
            held[layer, head, ranked[SNAP_BUDGET - 32 :]] = False
    return held


@contextmanager
def masking(model: Any, masks: Tensor) -> Iterator[None]:
    """Let each layer attend by its own of the masks [L, H, T, T]."""

    def change(
        mask: Tensor,
        _: Any,
        args: Any,
        kwargs: Any,
    ) -> Any:
        return args, {**kwargs, "attention_mask": mask[None]}

    handles = []
    for layer, mask in zip(model.model.layers, masks, strict=True):
        hook = partial(change, mask)
        handles.append(layer.self_attn.register_forward_pre_hook(hook, with_kwargs=True))
    yield
    for handle in handles:
        handle.remove()


@torch.no_grad()
def draft_naively(
    model: Any,
    text: list[int],
    root: int,
    depth: int,
    held: Tensor,
) -> list[int]:
    """Return a chain by a forward over everything for each token; drafted tokens see what is held of the text."""
    config = model.config
    groups = config.num_attention_heads // config.num_key_value_heads
    kinds = getattr(config, "layer_types", None) or ["any"] * config.num_hidden_layers
    path = [root]
    while len(path) <= depth:
        positions = torch.arange(len(text) + len(path))
        # [T, T] for each layer and head: the text is causal, drafted rows see less
        distance = positions[:, None] - positions
        seen = (distance >= 0).repeat(
            len(kinds),
            config.num_attention_heads,
            1,
            1,
        )
        seen[:, :, len(text) :, : len(text)] = held.repeat_interleave(groups, 1)[:, :, None]
        for layer, kind in enumerate(kinds):
            # a layer's own window counts positions, held or not
            window = layer_windows(config)[kind]
            if window:
                seen[layer] &= distance < window
        masks = torch.zeros(seen.shape, dtype=model.dtype)
        masks.masked_fill_(~seen, torch.finfo(model.dtype).min)
        with masking(model, masks):
            logits = model(torch.tensor([[*text, *path]]), use_cache=False).logits
        path.append(int(logits[0, -1].argmax()))
    return path[1:]


def decode(
    target: Target,
    drafter: Any,
    lengths: tuple[int, ...],
    **options: Any,
) -> list[Trace]:
    """Return answers of 20 tokens to random prompts, in one batch."""
    # a prompt's length is its seed, so that a test can ask for one again
    prompts = [random_tokens(length, seed=length) for length in lengths]
    options = {
        "budget": CHAIN,
        "max_new_tokens": 20,
        "batch_size": len(prompts),
        **options,
    }
    return generate(target, drafter, prompts, stop=[], **options)


def drafts_are_naive(
    model: Any,
    traces: list[Trace],
    hold: Hold,
) -> bool:
    """Return whether every chain of every text is the naive one."""
    eager = copy_eager(model)
    for trace in traces:
        whole = [*trace.prompt, *trace.tokens]
        for cycle in trace.cycles:
            text = whole[: cycle.context]
            root, *chain = cycle.tree.tokens.tolist()
            held = hold(model, text, len(trace.prompt))
            if chain != draft_naively(eager, text, root, len(chain), held=held):
                return False
    return True


@pytest.mark.slow
def test_recent_drafts_are_the_models_behind_sinks_and_window(model: Any) -> None:
    """Texts of unlike lengths keep some drafts and drop others."""
    traces = decode(copy_target(model), RECENT, LENGTHS)
    accepted = {cycle.accepted for trace in traces for cycle in trace.cycles}
    assert len(accepted) >= 3
    assert drafts_are_naive(model, traces, hold_recent)


@pytest.mark.parametrize("name", ["mistral-sliding", "qwen2-sliding"])
def test_sliding_windows_count_positions(name: str) -> None:
    """Held columns are not in the order of their positions, by which the model's windows of 8 hide them."""
    model = build(name, torch.float64)
    traces = decode(
        copy_target(model),
        RECENT,
        LENGTHS[1:],
        max_new_tokens=16,
    )
    assert drafts_are_naive(model, traces, hold_recent)


def test_snapped_drafts_are_the_models_behind_what_each_head_chose(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the prompts is within the budget, and held whole also when the answer has outgrown that."""
    begun: list[int] = []
    begin = sparse_kv.SnapState._copy_prompt

    def count(self: Any, row: int, cache_row: int) -> None:
        begun.append(row)
        begin(self, row, cache_row)

    monkeypatch.setattr(sparse_kv.SnapState, "_copy_prompt", count)
    traces = decode(copy_target(model), SNAP, SNAP_LENGTHS)
    assert drafts_are_naive(model, traces, hold_snapped)
    assert len(begun) == len(SNAP_LENGTHS)


def test_wrong_columns_are_seen(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring that turns one too far, or one head that chooses for its group, drafts something else."""
    target = copy_target(model)
    columns = SparseState._columns
    score = sparse_kv.score_columns

    def turn_further(self: SparseState, row: int, positions: Tensor) -> Tensor:
        return columns(self, row, positions + (positions > 1))

    monkeypatch.setattr(SparseState, "_columns", turn_further)
    assert not drafts_are_naive(
        model,
        decode(target, RECENT, LENGTHS),
        hold_recent,
    )
    monkeypatch.undo()
    monkeypatch.setattr(
        sparse_kv,
        "score_columns",
        lambda queries, *rest: score(queries[::2], *rest),
    )
    assert not drafts_are_naive(
        model,
        decode(target, SNAP, SNAP_LENGTHS),
        hold_snapped,
    )


@pytest.mark.quick("phi3-sliding")
@pytest.mark.parametrize("name", ["gemma2", "phi3-sliding"])
def test_what_the_budget_holds_whole_is_drafted_as_the_target_writes_it(name: str) -> None:
    """Every draft of the best path is accepted, up to a leaf."""
    target = copy_target(build(name))
    for budget in (Budget(7, 7, 1), Budget(8, 4, 3)):
        for trace in decode(target, SparseKv(64), LENGTHS, budget=budget):
            for cycle in trace.cycles:
                # all drafts are right, so that the path ends where the tree does
                last = (0, *cycle.kept)[-1]
                assert not cycle.tree.children()[last]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "select", "budget", "lengths"),
    [
        ("sparse_kv", "recent", 12, (23, 5, 14, 9)),
        # a lookup is asked first, so that rows are passed over
        ("ngram,sparse_kv", "snap", SNAP_BUDGET, (53, 35, 44, 39)),
    ],
    ids=["recent", "snap"],
)
def test_rows_come_and_go(
    names: str,
    select: str,
    budget: int,
    lengths: tuple[int, ...],
    model: Any,
) -> None:
    """Four texts of which two are written at a time draft as each of them alone."""
    target = copy_target(model)
    drafter = load_drafter(names, target, budget=budget, select=select)
    together = decode(
        target,
        drafter,
        lengths,
        batch_size=2,
        max_new_tokens=12,
    )
    for length, trace in zip(lengths, together, strict=True):
        alone = decode(target, drafter, (length,), max_new_tokens=12)[0]
        assert [cycle.tree.tokens.tolist() for cycle in trace.cycles] == [
            cycle.tree.tokens.tolist() for cycle in alone.cycles
        ]


def test_what_cannot_be_is_refused(model: Any) -> None:
    """Options that contradict one another, and targets whose attention does not say what to hold."""
    for options, keyword in [
        ({"select": "last"}, "recent, snap"),
        ({"budget": 4}, "sinks < budget"),
        ({"budget": 32, "select": "snap"}, "more than 32"),
    ]:
        with pytest.raises(ValueError, match=keyword):
            SparseKv(**options)
    with pytest.raises(ValueError, match="sliding windows"):
        load_drafter(
            "sparse_kv",
            Target(build("mistral-sliding")),
            select="snap",
        )
    with pytest.raises(ValueError, match="sdpa"):
        load_drafter(
            "sparse_kv",
            Target(copy_eager(model)),
            select="snap",
        )


def test_costs_are_those_of_what_is_held(model: Any) -> None:
    """A draft reads its root and its levels; a probe reads as many columns as the budget holds at most."""
    drafter = load_drafter("sparse_kv", copy_target(model), budget=12)
    assert drafter.forwards(Budget(7, 4, 2)) == (2, 2, 2)
    assert drafter.unread(3, 4) == 1
    for context in (3, 200):
        assert drafter.probe(context, 2, 1)().shape == (1, 1, 96)
    assert SparseKv().probe(3, 2, 1) is None


@pytest.mark.quick("12-4")
@pytest.mark.parametrize(("budget", "sinks"), [(3, 2), (12, 4)])
def test_short_prompts_draft_behind_windows(budget: int, sinks: int) -> None:
    """Prompts that are shorter than the sinks are answered as the untouched model does, alone and in a batch."""
    model = build("mistral-sliding")
    target = copy_target(model)
    drafter = SparseKv(budget, sinks)
    lengths = tuple(range(1, 9))
    for length, trace in zip(
        lengths,
        decode(target, drafter, lengths, max_new_tokens=8),
        strict=True,
    ):
        alone = decode(target, drafter, (length,), max_new_tokens=8)[0]
        assert alone.tokens == trace.tokens == own_choices(model, trace.prompt, trace.tokens)
        assert alone.cycles == trace.cycles
