"""The doctor's figures are those of a plain count, and it names what was broken and nothing else."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from eagle import Target
from eagle.core.examples import Batch
from eagle.core.tree import chain_paths
from eagle.doctor.agreement import Agreement, chain_length, measure
from eagle.doctor.examine import diagnose
from eagle.doctor.probes import Probe, list_probes
from eagle.doctor.texts import answer_prompts, every_tap, read_states, split_texts
from eagle.doctor.verdict import Effect, Gain
from eagle.doctor.wiring import Wiring
from eagle.drafters import DRAFTERS, settings_of
from eagle.drafters.parts.validation import figures
from tests.families import build, random_tokens
from tests.trained import fixture_seed
from tests.unrolled_heads import causal_states

LEVELS = 4
KINDS: dict[str, dict[str, Any]] = {
    "eagle1": {"kind": "eagle1"},
    "eagle3": {"kind": "eagle3"},
    "eagle3.1": {"kind": "eagle3", "fc_norm": True, "norm_output": True, "draft_vocab": 40},
}


@pytest.fixture(scope="module")
def target() -> Target:
    """A llama whose answers are no loops."""
    return Target(build("llama"))


@pytest.fixture(scope="module")
def texts(target: Target) -> Batch:
    """Its answers to ten prompts."""
    return answer_prompts(target, [random_tokens(6, seed) for seed in range(4)], 20, (0.0, 1.0))


def trained(target: Target, texts: Batch, kind: str, steps: int) -> Any:
    """A head that has seen nothing but these texts."""
    torch.manual_seed(fixture_seed())
    settings = settings_of(KINDS[kind], "here")
    head = (
        DRAFTERS[settings.kind]
        .for_target(settings, target.config, target.head, [texts.tokens])
        .train()
    )
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        head(texts, target.head)["total"].backward()
        optimizer.step()
    return head.eval()


@pytest.fixture(scope="module")
def heads(target: Target, texts: Batch) -> dict[str, Any]:
    """One of each kind, trained a little."""
    return {kind: trained(target, texts, kind, 6) for kind in KINDS}


@pytest.mark.quick("eagle3", "eagle3.1")
@pytest.mark.parametrize("kind", KINDS)
def test_figures_are_those_of_validation(
    kind: str, heads: dict[str, Any], target: Target, texts: Batch
) -> None:
    """Agreement, overlap, every level and τ are what `judge` finds, text by text too."""
    found = measure(Wiring(heads[kind], target.head, levels=LEVELS), texts, target.head)
    expected = figures(heads[kind].validate(texts, target.head, {"chain": chain_paths(LEVELS)}))
    assert found.rates() == pytest.approx(
        [expected[f"chain/{level}"] for level in range(1, LEVELS + 1)]
    )
    assert chain_length(found.rates()) == pytest.approx(expected["chain/tau"])
    assert float(found.overlap[0].mean()) == pytest.approx(expected["overlap"], abs=1e-5)
    assert float(found.hits[0].double().mean()) == pytest.approx(expected["agreement"])


def test_level_two_fed_by_the_target_is_level_one_of_the_next_slot(
    heads: dict[str, Any], target: Target, texts: Batch
) -> None:
    """Counted by hand from the hits of level 1."""
    found = measure(Wiring(heads["eagle3"], target.head, levels=LEVELS), texts, target.head)
    asked = [slot for slot in range(len(found.seq_ids)) if found.reached[1, slot]]
    assert asked and all(found.seq_ids[slot] == found.seq_ids[slot + 1] for slot in asked)
    right = sum(bool(found.hits[0, slot + 1]) for slot in asked)
    assert found.teacher_forced_rates[1] == pytest.approx(right / len(asked))


def test_states_are_those_of_transformers(target: Target) -> None:
    """Every layer's input, and the last layer's output with and without the final norm."""
    text = torch.tensor(random_tokens(9, 1))
    states, count = read_states(target, text), len(target.layers)
    expected = target.model(input_ids=text[None], output_hidden_states=True).hidden_states
    assert every_tap(target) == (*range(count + 1), -1)
    for place in range(count):
        assert torch.equal(states[:, place], expected[place][0])
    assert torch.equal(states[:, -1], expected[-1][0])
    assert torch.allclose(target.model.model.norm(states[:, count]), states[:, -1], atol=1e-6)


def test_all_positions_may_be_moved(heads: dict[str, Any], target: Target) -> None:
    """Why there is no probe of a common offset: rotary positions are relative, and nothing changes."""
    head, tokens = heads["eagle3"], torch.tensor([random_tokens(9, 2)])
    hidden = torch.randn(1, 9, head.shape.hidden_size)
    near, far = (causal_states(head, tokens, hidden, start, target.head) for start in (0, 57))
    assert torch.allclose(near, far, atol=1e-4)


def last_states(wiring: Wiring, texts: Batch) -> Tensor:
    """The states of level 2."""
    return wiring.draft_levels(texts, 2)[-1][0]


def last_logits(wiring: Wiring, texts: Batch) -> Tensor:
    """What level 3 makes of its states."""
    states, logits = wiring.draft_levels(texts, 3)[-1]
    return logits(states)


@pytest.mark.parametrize("kind", KINDS)
def test_a_probe_leaves_the_head_as_it_was(
    kind: str, heads: dict[str, Any], target: Target, texts: Batch
) -> None:
    """Every change is made on a copy, changes something, and has a name of its own."""
    head = heads[kind]
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    wiring = Wiring(head, target.head)
    asked = list_probes(wiring, target)
    with torch.no_grad():
        whole = last_logits(wiring, texts)
        for probe in asked:
            same = torch.equal(last_logits(probe.change(wiring), texts), whole)
            assert probe.kind == "d2t" or not same, (
                probe.fault
            )  # it tells what the rows of logits stand for
    assert all(torch.equal(tensor, before[name]) for name, tensor in head.state_dict().items())
    assert len({probe.fault for probe in asked}) == len(asked)
    assert (head.taps, head.settings) == (wiring.head.taps, wiring.head.settings)


def change(head: Any, target: Target, fault: str) -> Any:
    """The head with the change of the probe whose words begin so."""
    (probe,) = (
        one for one in list_probes(Wiring(head, target.head), target) if one.fault.startswith(fault)
    )
    return probe.change(Wiring(head, target.head)).head


@torch.no_grad()
def undone(
    heads: dict[str, Any], target: Target, texts: Batch, kind: str, broken: str
) -> list[Probe]:
    """The probes that give back exactly the states of the whole head."""
    whole = last_states(Wiring(heads[kind], target.head), texts)
    wiring = Wiring(change(heads[kind], target, broken), target.head)
    assert not torch.allclose(last_states(wiring, texts), whole, atol=1e-4)
    probes = list_probes(wiring, target)
    return [
        probe
        for probe in probes
        if torch.allclose(last_states(probe.change(wiring), texts), whole, atol=1e-5)
    ]


@pytest.mark.quick(
    "eagle3.1-norm_output is True-norm_output is False, expected True",
    "eagle1-trained on the state in front of-trained on the state behind the final norm",
)
@pytest.mark.parametrize(
    ("kind", "broken", "named"),
    [
        ("eagle3", "the blocks of fc stand in the order [1, 2, 0]", "the blocks of fc stand in the order [2, 0, 1]"),
        ("eagle3", "q, k and v take [state; embedding]", "q, k and v take [state; embedding]"),
        ("eagle3", "norm_before_residual is False", "norm_before_residual is True, expected False"),
        ("eagle3", "layers.0.post_attention_layernorm and norm", "layers.0.post_attention_layernorm and norm"),
        ("eagle3", "rope theta is 10000 (default), expected ten times higher", "rope theta is 100000"),
        ("eagle3", "rows of q and k are not in halves", "rows of q and k are not interleaved"),
        ("eagle3.1", "norm_output is True", "norm_output is False, expected True"),
        ("eagle1", "fc takes [state; embedding]", "fc takes [state; embedding]"),
        ("eagle1", "mlp.gate_proj and mlp.up_proj", "mlp.gate_proj and mlp.up_proj"),
        ("eagle1", "trained on the state in front of", "trained on the state behind the final norm"),
    ],
)  # fmt: skip
def test_a_fault_has_the_one_probe_that_undoes_it(
    kind: str, broken: str, named: str, heads: dict[str, Any], target: Target, texts: Batch
) -> None:
    """One alone gives the head's own states back, and its words name the fault; theta also by the target's."""
    found = undone(heads, target, texts, kind, broken)
    assert [probe.fault for probe in found if probe.fault.startswith(named)] == [found[0].fault]
    assert len(found) == 1


def test_the_order_of_blocks_is_named_as_they_stand(heads: dict[str, Any], target: Target) -> None:
    """Written out by hand: what reads layers 2, 0, 1 stands in front of each other in that order."""
    head = copy.deepcopy(heads["eagle3"])
    whole = head.fc.weight.data.clone()
    low, middle, high = whole.chunk(3, dim=1)
    head.fc.weight.data = torch.cat([high, low, middle], dim=1)
    wiring = Wiring(head, target.head)
    found = [
        one
        for one in list_probes(wiring, target)
        if torch.equal(one.change(wiring).head.fc.weight.data, whole)
    ]
    assert [one.fault for one in found] == [
        "the blocks of fc stand in the order [2, 0, 1] of the layers"
    ]


def test_d2t_that_holds_ids_is_undone(heads: dict[str, Any], target: Target) -> None:
    """The offsets are found again."""
    head = copy.deepcopy(heads["eagle3.1"])
    offsets = head.d2t.clone()
    head.d2t.copy_(head.drafts)
    wiring = Wiring(head, target.head)
    probes = [probe for probe in list_probes(wiring, target) if probe.kind == "d2t"]
    mended = [probe.change(wiring).head.d2t for probe in probes]
    assert any(torch.equal(found, offsets) for found in mended)


def compare(kind: str, fault: str, before: Agreement, after: Agreement) -> Effect:
    """The effect of a change that led from one to the other."""
    return Effect(Probe(kind, fault, lambda wiring: wiring), before, after)


def test_an_effect_is_paired_by_text(heads: dict[str, Any], target: Target, texts: Batch) -> None:
    """No change is no gain; the interval holds the gain, and far more narrowly than the texts differ."""
    before = measure(Wiring(heads["eagle3"], target.head, levels=LEVELS), texts, target.head)
    none = compare("none", "none", before, before)
    assert (none.min_share, none.sampled.errors, none.greedy.error, none.is_sure) == (
        0,
        0,
        0,
        False,
    )
    better = replace(before, overlap=before.overlap * 1.02)
    some = compare("some", "some", before, better)
    tokens, cycles = before.sampled_cycles
    assert (
        some.sampled.before == pytest.approx(float(tokens.sum() / cycles.sum()))
        and some.sampled.errors > 3
    )
    assert some.sampled.error < 0.2 * float((tokens / cycles).std())


def test_the_error_of_a_gain_is_that_of_drawing_texts_again() -> None:
    """A difference of two ratios, beside the spread over many draws of as many texts."""
    chance = torch.Generator().manual_seed(0)
    cycles = 10 + 20 * torch.rand(80, generator=chance, dtype=torch.double)
    tokens = cycles * (2 + 0.3 * torch.randn(80, generator=chance, dtype=torch.double))
    after = tokens * (1.05 + 0.05 * torch.randn(80, generator=chance, dtype=torch.double)), cycles
    gain = Gain.between((tokens, cycles), after)
    drawn = torch.randint(80, (4000, 80), generator=chance)
    lengths = [part[0][drawn].sum(1) / part[1][drawn].sum(1) for part in ((tokens, cycles), after)]
    assert gain.error == pytest.approx(float((lengths[1] - lengths[0]).std()), rel=0.06)


def by_hand(hits: Tensor, overlap: float, texts: int) -> Agreement:
    """A head of two levels that is right where `hits` [2, S] says so, in texts of equal length that all go on."""
    there, owner = torch.ones_like(hits), torch.arange(hits.shape[1]) * texts // hits.shape[1]
    jitter = 0.01 * torch.rand(
        hits.shape, generator=torch.Generator().manual_seed(0), dtype=torch.double
    )
    kept = (overlap + jitter).clamp(max=1)
    return Agreement(overlap + jitter, hits, there, there[0], owner, kept)


def test_what_raises_drawn_drafts_alone_is_no_fault() -> None:
    """A flattened law overlaps more and is right as seldom, or less often; one that is mended is right more often."""
    chance = torch.rand(2, 600, generator=torch.Generator().manual_seed(1))
    before, worse, mended = (by_hand(chance < rate, 0.4, 20) for rate in (0.6, 0.55, 0.75))
    flat, flatter = (replace(one, overlap=one.overlap + 0.2) for one in (before, worse))
    for changed in (flat, flatter):
        said = compare("projections", "gate and up are swapped", before, changed)
        assert said.sampled.errors > 10 and said.sampled.share > 0.3 and not said.is_sure
    assert compare(
        "projections", "k and v are swapped", before, replace(mended, overlap=flat.overlap)
    ).is_sure
    assert not compare(
        "projections", "k and v are swapped", before, mended
    ).is_sure  # right more often by chance alone


def test_a_head_that_never_saw_its_own_states_is_not_mended_by_easing_them() -> None:
    """What leaves level 1 as it is must make level 2 what it is fed with the target's states, or it is no fault."""
    chance = torch.rand(2, 600, generator=torch.Generator().manual_seed(1))
    weak, eased, mended = (
        by_hand(chance < torch.tensor([[0.8], [rate]]), 0.4, 20) for rate in (0.2, 0.35, 0.78)
    )
    sure = [
        compare("norm_output", "is off", weak, replace(after, overlap=after.overlap + 0.2))
        for after in (eased, mended)
    ]
    assert [(one.greedy.errors > 3, one.only_eases, one.is_sure) for one in sure] == [
        (True, True, False),
        (True, False, True),
    ]


def test_texts_that_confirm_had_no_part_in_choosing(texts: Batch) -> None:
    """One part chooses; the parts share no prompt, hold their own features, and are all texts together."""
    chosen, others = split_texts(texts, 4)
    whole = [
        column.split(texts.lengths) for column in (texts.tokens, texts.loss_mask, texts.features)
    ]
    for part, numbers in ((chosen, (0, 1)), (others, (2, 3, 4, 5, 6, 7))):
        assert part.lengths == tuple(texts.lengths[number] for number in numbers)
        columns = (part.tokens, part.loss_mask, part.features)
        for column, all_rows in zip(columns, whole, strict=True):
            assert torch.equal(column, torch.cat([all_rows[number] for number in numbers]))
    first, second, third = (
        tokens[:6].tolist() for tokens in others.tokens.split(others.lengths)[:3]
    )
    assert chosen.tokens[:6].tolist() not in (first, third) and first == second != third
    assert (
        chosen.features.data_ptr() == texts.features.data_ptr()
    )  # 7 GB of a target of 70B are not copied
    assert split_texts(chosen, 3) == (chosen, chosen)


def test_answers_end_once_there_are_enough(target: Target) -> None:
    """Whole rounds of prompts, each drawn anew; the first of greedy answers."""
    prompts = [random_tokens(6, seed) for seed in range(2)]
    texts = answer_prompts(target, prompts, 10, (0.0, 1.0, 1.0, 1.0), enough=35)
    assert len(texts.lengths) == 4 and texts.slots >= 35
    drawn = answer_prompts(target, prompts, 10, (1.0, 1.0)).tokens.split(16)
    assert torch.equal(drawn[0][:6], drawn[1][:6]) and not torch.equal(drawn[0], drawn[1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_a_head_that_learned_hard_labels_is_not_called_broken(kind: str, target: Target) -> None:
    """Too sure of the target's likeliest tokens, as many tools train: what flattens its law would lower greedy τ."""
    texts = answer_prompts(target, [random_tokens(6, seed) for seed in range(24)], 20, (0.0, 1.0))
    true = target.head.logits(texts.select_taps((-1,))[:, 0]).argmax(-1)
    head = trained(target, texts, kind, 0).train()
    optimizer = torch.optim.AdamW([one for one in head.parameters() if one.requires_grad], lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        ((states, logits),) = head.draft_levels(texts, target.head, 1)
        cross_entropy(logits(states), true[texts.loss_mask.nonzero()[:, 0] - 1]).backward()
        optimizer.step()
    said = diagnose(head, target, texts)
    assert said.figures is not None and said.figures.rates()[0] > 0.7
    assert not said.broken and not said.faults
