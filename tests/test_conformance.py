"""What every registered method must hold; registering it is what puts it under this test."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from itertools import product, zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from eagle import Budget, Sampling, Target, Trace, generate, load_drafter, stream
from eagle.core.drafter import Committed, TrainableDrafter
from eagle.core.examples import Batch, Example, collate
from eagle.core.tree import PUBLISHED_TREE, best_tree, chain_paths
from eagle.core.verify import Choose, warp
from eagle.data.features import LiveFeatures, taps_of
from eagle.drafters import DRAFTERS, settings_of
from eagle.drafters.lookup.counts import CountDrafter
from eagle.drafters.parts.validation import add_sums, figures
from eagle.formats.checkpoint import load_head, save_head
from eagle.formats.export import EXPORTERS, export
from eagle.formats.reading.foreign import read_head
from tests.families import own_answer, own_logits
from tests.tables import some_tables
from tests.trained import fixture_seed

TRAINED = [name for name, method in DRAFTERS.items() if issubclass(method, TrainableDrafter)]
COUNTED = [name for name, method in DRAFTERS.items() if issubclass(method, CountDrafter)]
LAWFUL = [*TRAINED, *COUNTED, "early_exit", "sparse_kv"]  # which grow trees of their own law
DYNAMIC = [Budget(8, 4, 3), Budget(3, 1, 3), Budget(5, 5, 1), Budget(0, 0, 0), Budget(8, 4, 3, draw="likeliest")]
SHAPES = [chain_paths(4), PUBLISHED_TREE, best_tree([[0.5, 0.2, 0.1], [0.4, 0.3]], 12, 4)]
RANKED = [*DYNAMIC, *map(Budget.fixed, SHAPES), Budget.fixed(PUBLISHED_TREE, "likeliest")]
DRAWN = [Budget.fixed(shape, "sampled") for shape in SHAPES]
SAMPLINGS = [
    Sampling(seed=3),
    Sampling(temperature=0.5, seed=3),
    Sampling(temperature=1.0, seed=3),
    Sampling(temperature=1.0, top_p=0.8, seed=3),
    Sampling(temperature=0.5, top_k=5, seed=3),
]
TREES = {"chain": chain_paths(3), "tree": PUBLISHED_TREE}
ASKED = "What does copy do?"


def new_head(name: str, target: Target) -> Any:
    """An untrained head, the same every time."""
    torch.manual_seed(fixture_seed())
    settings, method = settings_of({"kind": name}, "test"), DRAFTERS[name]
    weights = {"weights": target.tensor} if method.reads.weights else {}
    return method.for_target(settings, target.config, target.head, **weights)


def drafter_of(name: str, target: Target) -> Any:
    """A drafter ready to draft."""
    if name in COUNTED:
        return DRAFTERS[name](some_tables(target.vocab_size))
    return new_head(name, target).bind(target.head) if name in TRAINED else load_drafter(name, target)


def begin_text(drafter: Any, target: Target, prompt: list[int], choose: Choose, noise: Any = None) -> Any:
    """A text of the drafter's, and what the target has read of it."""
    if drafter.reads.view:
        drafter.bind_target(target.view())
    state = target.open(drafter.taps)
    update = state.begin(prompt, choose)
    if not drafter.reads.texts:
        return drafter.begin(noise), update
    drafts = drafter.open_with(state.lend())
    drafts.admit(0, noise)
    return SimpleNamespace(
        propose=lambda update, budget: drafts.propose({0: update}, {0: budget})[0],
        read=lambda new: state.extend({0: new}),
    ), update


@cache
def reference(target: Target, prompt: tuple[int, ...], sampling: Sampling, count: int) -> list[int]:
    """The untouched model's own uncached continuation, warped by transformers, with the noise of the place at T > 0."""
    noise = Choose(sampling).noise
    if noise is None:
        return own_answer(target.model, prompt, count)
    warpers = [TemperatureLogitsWarper(sampling.temperature)]
    warpers += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    warpers += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    place = partial(noise, vocab_size=target.vocab_size, device=target.device)
    return own_answer(target.model, prompt, count, LogitsProcessorList(warpers), lambda position: place([position])[0])


@pytest.fixture(scope="session")
def examples(tiny_target: Target) -> LiveFeatures:
    """Two short texts of different length with the target's features at all taps."""
    generator = torch.Generator().manual_seed(1)
    examples = []
    for length in (24, 17):
        tokens = torch.randint(5, tiny_target.vocab_size, (length,), generator=generator)
        examples.append(Example(tokens, torch.arange(length) >= 6))
    read = [taps_of(settings_of({"kind": name}, "test"), tiny_target.config) for name in TRAINED]
    taps = sorted({tap for taps in read for tap in taps})
    return LiveFeatures(tiny_target, examples, {"taps": taps, "dtype": "float32"})


@pytest.fixture(scope="session")
def batch(examples: LiveFeatures) -> Batch:
    """Both texts in one."""
    return collate(examples.read([0, 1]), examples.taps)


FEWER = [pytest.param(sampling, marks=pytest.mark.slow) for sampling in (SAMPLINGS[1], SAMPLINGS[2], SAMPLINGS[4])]


@pytest.mark.parametrize(
    "sampling", [SAMPLINGS[0], SAMPLINGS[3], *FEWER], ids=["greedy", "top-p", "T=0.5", "T=1", "top-k"]
)
@pytest.mark.parametrize("name", DRAFTERS)
def test_output_is_the_untouched_models_own(name: str, sampling: Sampling, tiny_target: Target) -> None:
    """Whatever is drafted, in whatever tree, the output is plain decoding's; drawn drafts keep its law alone."""
    prompt, drafter = tiny_target.chat(ASKED), drafter_of(name, tiny_target)
    expected = reference(tiny_target, tuple(prompt), sampling, 12)
    drawn_too = sampling.temperature == 0  # what is drawn above it has the target's law, not its tokens
    for budget in RANKED + DRAWN * drawn_too if name in LAWFUL else DYNAMIC:
        options = {"sampling": sampling, "budget": budget, "max_new_tokens": 12, "stop": []}
        assert generate(tiny_target, drafter, prompt, **options).tokens == expected


@pytest.fixture(scope="module")
def letters() -> Target:
    """A target of four tokens, whose laws are neither flat nor certain."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=4, num_hidden_layers=4, bos_token_id=0, **sizes))
    torch.nn.init.normal_(model.lm_head.weight, std=0.4)
    return Target(model)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS[2:4], ids=["T=1", "top-p"])
@pytest.mark.parametrize("budget", DRAWN[:2], ids=["chain", "published"])
@pytest.mark.parametrize("name", LAWFUL)
def test_drawn_drafts_have_the_targets_law(name: str, budget: Budget, sampling: Sampling, letters: Target) -> None:
    """The first three tokens of 600 requests, against the law by which the untouched model says them."""
    prompt, drafter, counts = [1, 2, 3, 0, 1], drafter_of(name, letters), np.zeros([4] * 3)
    for request in range(600):
        options = {"sampling": replace(sampling, request=request), "budget": budget, "max_new_tokens": 4, "stop": []}
        counts[tuple(generate(letters, drafter, prompt, **options).tokens[:3])] += 1
    law = np.ones_like(counts)
    for said in product(range(4), repeat=3):
        for end in range(3):
            scores = warp(own_logits(letters.model, [*prompt, *said[:end]])[-1:], sampling)
            law[said] *= scores.softmax(-1)[0, said[end]].item()
    assert counts[law == 0].sum() == 0
    expected = 600 * law / law.sum()
    rare = expected < 5  # for which together the statistic is what it is taken for
    seen, due = (np.array([*cells[~rare], cells[rare].sum()]) for cells in (counts, expected))
    assert scipy.stats.chisquare(seen[due > 0], due[due > 0]).pvalue > 1e-4


def trees_of(trace: Trace) -> list[tuple[list[int], list[int]]]:
    """Tokens and parents of what was drafted in each cycle, kept or not."""
    return [(cycle.tree.tokens.tolist(), cycle.tree.parents.tolist()) for cycle in trace.cycles]


@pytest.mark.parametrize("sampling", [SAMPLINGS[0], SAMPLINGS[2]], ids=["greedy", "T=1"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_begin_forgets(name: str, sampling: Sampling, tiny_target: Target) -> None:
    """A second sequence is drafted as if it were the first, by the noise of its own places."""
    prompt, used = tiny_target.chat(ASKED), drafter_of(name, tiny_target)
    generate(tiny_target, used, tiny_target.chat("Something else entirely, and longer"), max_new_tokens=8, stop=[])
    traces = [
        generate(tiny_target, drafter, prompt, sampling=sampling, max_new_tokens=16, stop=[])
        for drafter in (used, drafter_of(name, tiny_target))
    ]
    assert traces[0].cycles == traces[1].cycles and trees_of(traces[0]) == trees_of(traces[1])


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_text_that_parts_is_drafted_for_as_two(name: str, tiny_target: Target) -> None:
    """After a fork both rows, and the second once the first is gone, draft as texts that were told all of it do."""
    drafter, budget = drafter_of(name, tiny_target), Budget(8, 4, 3)
    if drafter.reads.texts:
        pytest.skip("it drafts behind the target's own rows")
    if drafter.reads.view:
        drafter.bind_target(tiny_target.view())
    shared = [5, 6, 7, 8, 5, 6, 7]
    texts = {0: [*shared, 8, 5, 9, 5, 6, 7, 8], 1: [*shared, 9, 5, 6, 7, 8, 5, 6]}

    def tell(state: Any, start: int, end: int, rows: list[int]) -> Any:
        updates = {}
        for row in rows:
            tokens = torch.tensor(texts[row])
            features = tiny_target.features(tokens[None, :end], drafter.taps)[0, start:] if drafter.taps else None
            updates[row] = Committed(tokens[start:end], features, texts[row][end])
        trees = state.propose(updates, dict.fromkeys(rows, budget))
        return {row: (trees[row].tokens.tolist(), trees[row].parents.tolist()) for row in rows}

    def open_state(rows: list[int]) -> Any:
        state = drafter.open()
        for row in rows:
            state.admit(row)
        return state

    forked, alone = open_state([0]), open_state([0, 1])
    tell(forked, 0, 6, [0])
    forked.fork(0, 1)
    tell(alone, 0, 6, [0, 1])
    assert tell(forked, 6, 10, [0, 1]) == tell(alone, 6, 10, [0, 1])
    forked.release(0)
    assert tell(forked, 10, 12, [1]) == tell(alone, 10, 12, [1])


BESIDE = [ASKED, "Why is the sky blue?", "Who?"]  # of three lengths


def drafted_alone(name: str, sampling: Sampling, target: Target) -> list[Trace]:
    """Three answers, one after the other, each with a drafter of its own."""
    options: dict[str, Any] = {"max_new_tokens": 12, "stop": []}
    return [
        generate(
            target, drafter_of(name, target), target.chat(asked), sampling=replace(sampling, request=row), **options
        )
        for row, asked in enumerate(BESIDE)
    ]


def drafted_beside(name: str, sampling: Sampling, target: Target) -> list[Trace]:
    """The same in one batch of one drafter."""
    prompts = [target.chat(asked) for asked in BESIDE]
    options: dict[str, Any] = {"sampling": sampling, "max_new_tokens": 12, "stop": [], "batch_size": 3}
    return generate(target, drafter_of(name, target), prompts, **options)


@pytest.mark.parametrize("sampling", [SAMPLINGS[0], SAMPLINGS[2]], ids=["greedy", "T=1"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_texts_side_by_side_are_as_each_alone(name: str, sampling: Sampling, tiny_target: Target) -> None:
    """Cycle by cycle: a batch of three, and two streams on one drafter that are asked in turn."""
    alone, drafter = drafted_alone(name, sampling, tiny_target), drafter_of(name, tiny_target)
    beside = drafted_beside(name, sampling, tiny_target)
    assert [(trace.tokens, trace.cycles) for trace in beside] == [(trace.tokens, trace.cycles) for trace in alone]
    traces = [Trace([]), Trace([])]
    streams = [
        stream(
            tiny_target,
            drafter,
            alone[row].prompt,
            sampling=replace(sampling, request=row),
            max_new_tokens=12,
            stop=[],
            trace=trace,
        )
        for row, trace in enumerate(traces)
    ]
    for _ in zip_longest(*streams):
        pass
    assert [(trace.tokens, trace.cycles) for trace in traces] == [(trace.tokens, trace.cycles) for trace in alone[:2]]


@pytest.mark.parametrize("name", LAWFUL)
def test_noise_is_that_of_the_places_that_are_drafted_for(name: str, tiny_target: Target) -> None:
    """What follows a root behind n tokens stands at place n + 1; two tokens more, and it stands two places further."""
    drafter, choose = drafter_of(name, tiny_target), Choose(SAMPLINGS[2])
    noise = choose.offer(tiny_target.vocab_size, tiny_target.device)
    text, news = begin_text(drafter, tiny_target, [5, 6, 7, 5, 6], choose, noise)
    more = Committed(torch.tensor([7, 8]), None if news.features is None else news.features[:2], 9)
    for told, first in ((Committed(news.tokens, news.features, 7), 6), (more, 8)):
        choose.noise.forget(99)
        if drafter.reads.texts and told is more:
            text.read([7, 8])
        text.propose(told, Budget(8, 3, 2))
        assert sorted(choose.noise.rows) == [first, first + 1, first + 2]


@pytest.mark.parametrize("budget", RANKED + DRAWN, ids=str)
@pytest.mark.parametrize("name", DRAFTERS)
def test_trees_are_rooted_and_within_budget(name: str, budget: Budget, tiny_target: Target) -> None:
    """The root is the token that the target chose; nodes, levels and children stay within the budget."""
    drafter, prompt = drafter_of(name, tiny_target), [5, 6, 7, 5, 6]
    text, news = begin_text(drafter, tiny_target, prompt, Choose(Sampling()))
    tree = text.propose(Committed(news.tokens, news.features, 7), budget)
    assert int(tree.tokens[0]) == 7
    assert len(tree) - 1 <= budget.nodes
    assert max(tree.depths()) <= budget.depth
    assert max(len(children) for children in tree.children()) <= max(budget.top_k, 0 if budget.nodes == 0 else 1)


def divergence(head: Any, target: Target, batch: Batch) -> float:
    """How far its laws are from the target's: their cross-entropy without the part that no head can learn."""
    before = batch.loss_mask.nonzero()[:, 0] - 1
    law = target.head.logits(batch.select_taps((-1,))[before, 0]).log_softmax(-1)
    entropy = -(law.exp() * law).sum(-1).mean().item()
    return figures(head.validate(batch, target.head, TREES))["cross_entropy"] - entropy


@pytest.mark.parametrize("name", TRAINED)
def test_loss_falls_on_one_batch(name: str, tiny_target: Target, batch: Batch) -> None:
    """Thirty steps on one batch teach it half of what the target says there."""
    head = new_head(name, tiny_target).train()
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3)
    losses, lacking = [], divergence(head, tiny_target, batch)
    for _ in range(30):
        losses.append(head(batch, tiny_target.head))
        optimizer.zero_grad()
        losses[-1]["total"].backward()
        optimizer.step()
    first, last = losses[0], losses[-1]
    # a confidence follows what would be accepted, which moves with the head
    assert all(last[part] < first[part] for part in first.keys() - {"confidence"})
    assert "regression" not in first or last["regression"] < 0.7 * first["regression"]
    assert 0 < divergence(head, tiny_target, batch) < lacking / 2


@pytest.mark.parametrize("name", TRAINED)
def test_loss_counts_supervised_tokens_alone(name: str, tiny_target: Target, batch: Batch) -> None:
    """What follows the last supervised token of a text changes neither the loss nor a gradient."""
    head = new_head(name, tiny_target).eval()
    places = torch.cat([torch.arange(length) for length in batch.lengths])
    mask = batch.loss_mask & (places < 12)
    changed_tokens, changed_features = batch.tokens.clone(), batch.features.clone()
    changed_tokens[places >= 13] = 9
    changed_features[places >= 13] += 1
    results = []
    for tokens, features in ((batch.tokens, batch.features), (changed_tokens, changed_features)):
        head.zero_grad()
        changed = replace(batch, tokens=tokens, features=features, loss_mask=mask)
        loss = head(changed, tiny_target.head)["total"]
        loss.backward()
        results.append((loss.item(), [p.grad.clone() for p in head.parameters()]))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(one, other) for one, other in zip(results[0][1], results[1][1], strict=True))


@pytest.mark.parametrize("name", TRAINED)
def test_loss_depends_on_what_is_supervised(name: str, tiny_target: Target, batch: Batch) -> None:
    """The same change inside the supervised part does change the loss: the test above can fail."""
    head = new_head(name, tiny_target).eval()
    features = batch.features.clone()
    features[8] += 1
    changed = replace(batch, features=features)
    assert head(changed, tiny_target.head)["total"] != head(batch, tiny_target.head)["total"]


@pytest.mark.parametrize("name", TRAINED)
def test_what_follows_the_runs_progress_says_so(name: str, tiny_target: Target, batch: Batch) -> None:
    """A step of a longer run is the same step, unless the head says otherwise."""
    head, losses = new_head(name, tiny_target).train(), []
    for progress in (0.0, 0.9):
        torch.manual_seed(1)
        losses.append(head(replace(batch, progress=progress), tiny_target.head)["total"].item())
    assert head.follows_progress or losses[0] == losses[1]


@pytest.mark.parametrize("name", TRAINED)
def test_what_is_judged_adds_up(name: str, tiny_target: Target, batch: Batch, examples: LiveFeatures) -> None:
    """Sums of two texts are those of each; the loss terms are those of training; nothing is drawn at random."""
    head = new_head(name, tiny_target)
    whole = head.train().validate(batch, tiny_target.head, TREES)
    sums: dict[str, Tensor] = {}
    for place in (0, 1):
        alone = collate(examples.read([place]), examples.taps)
        sums = add_sums(sums, head.eval().validate(alone, tiny_target.head, TREES))
    assert sums.keys() == whole.keys()
    for key, value in whole.items():
        torch.testing.assert_close(sums[key], value, rtol=1e-6, atol=1e-6)
    found, losses = figures(whole), head(batch, tiny_target.head)
    for term in found.keys() & losses.keys():
        assert found[term] == pytest.approx(losses[term].item(), rel=1e-5)
    assert int(whole["slots"]) == batch.slots
    assert {"cross_entropy", "agreement", "overlap", "chain/tau", "tree/5"} <= found.keys()
    assert 1 <= found["chain/tau"] <= found["tree/tau"] <= 6


@pytest.mark.parametrize("name", TRAINED)
def test_save_and_load_give_the_same_proposal(name: str, tiny_target: Target, tmp_path: Path) -> None:
    """A head from disk drafts what it drafted before it was saved, and a torn one is refused."""
    head = new_head(name, tiny_target)
    save_head(tmp_path / "head", head, "recipe", {})
    loaded = load_drafter(tmp_path / "head", tiny_target)
    prompt = tiny_target.chat(ASKED)
    drafts = []
    for drafter in (head.bind(tiny_target.head), loaded):
        text, update = begin_text(drafter, tiny_target, prompt, Choose(Sampling()))
        drafts.append(text.propose(update, Budget(12, 4, 3)))
    assert torch.equal(drafts[0].tokens, drafts[1].tokens)
    assert torch.equal(drafts[0].parents, drafts[1].parents)


@pytest.mark.parametrize("engine", EXPORTERS)
@pytest.mark.parametrize("name", TRAINED)
def test_exports_hold_every_tensor_of_the_head(
    name: str, engine: str, tiny_target: Target, tiny_target_dir: Path, tmp_path: Path
) -> None:
    """Nothing that was learned is lost on the way into an engine's layout; one that cannot serve the head says so."""
    head: Any = new_head(name, tiny_target).bind(tiny_target.head)
    if hasattr(head.settings, "fc_bias"):  # which some have no place for
        settings = settings_of({"kind": name, "fc_bias": False}, "test")
        head = DRAFTERS[name].for_target(settings, tiny_target.config).bind(tiny_target.head)
    try:
        layout = EXPORTERS[engine](head, tiny_target.config)
    except ValueError as error:
        assert f"{engine}: " in str(error)
        return
    held = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in layout.tensors.items()}
    held |= {f"model.{name}": tensor for name, tensor in held.items()}  # a draft model is one part of its drafter
    if not head.state_dict().keys() <= held.keys():  # by names of its own: an import of the files must find all again
        export(head, tiny_target.config, engine, tmp_path)
        held = read_head(tmp_path, str(tiny_target_dir / "target")).state_dict()
    for key, tensor in head.state_dict().items():
        assert torch.equal(held[key], tensor)


def test_a_head_for_another_target_is_refused(tiny_target: Target, tmp_path: Path) -> None:
    """A folder that is no head, a head of another width, and a torn one each say what is wrong."""
    with pytest.raises(ValueError, match="expected a folder with a trained head"):
        load_drafter(tmp_path / "nothing", tiny_target)
    head = new_head("eagle1", tiny_target)
    head.shape.hidden_size //= 2
    other = type(head)(head.settings, head.shape)
    save_head(tmp_path / "narrow", other, "", {})
    with pytest.raises(ValueError, match="was made for a target"):
        load_drafter(tmp_path / "narrow", tiny_target)
    del other.fc
    save_head(tmp_path / "torn", other, "", {})
    with pytest.raises(ValueError, match="missing tensors"):
        load_head(tmp_path / "torn")
