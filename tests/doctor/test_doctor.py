"""The doctor's figures are those of a plain count, and its statistics tell faults from chance."""

# K levels, S slots of all sequences

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
from eagle.doctor.examine import describe_prompts, diagnose, forecast
from eagle.doctor.probes import Probe, list_probes
from eagle.doctor.target_answers import answer_prompts, every_tap, read_states, split_answers
from eagle.doctor.verdict import Diagnosis, Effect, Gain, decide
from eagle.doctor.wiring import Wiring
from eagle.drafters.parts.validation import figures
from tests.doctor.small_heads import answer_random, fit, make_agreement, make_head, train_head
from tests.families import random_tokens

LEVELS = 4
SECTIONS: dict[str, dict[str, Any]] = {
    "eagle1": {"kind": "eagle1"},
    "eagle3": {"kind": "eagle3"},
    "eagle3.1": {"kind": "eagle3", "fc_norm": True, "norm_output": True, "draft_vocab": 40},
}


@pytest.fixture(scope="module")
def texts(target: Target) -> Batch:
    """Return its greedy and sampled answers to four prompts."""
    return answer_random(4, target, 20, (0.0, 1.0))


@pytest.fixture(scope="module")
def heads(target: Target, texts: Batch) -> dict[str, Any]:
    """Return a head of each kind, trained a little on these texts."""
    return {name: train_head(section, target, texts, 6) for name, section in SECTIONS.items()}


def measure_head(head: Any, target: Target, texts: Batch) -> Agreement:
    """Return the figures of four levels."""
    return measure(
        Wiring(head, target.head, levels=LEVELS),
        texts,
        target.head,
    )


@pytest.mark.parametrize("name", ["eagle3", "eagle3.1"])
def test_figures_are_those_of_validation(
    name: str,
    heads: dict[str, Any],
    target: Target,
    texts: Batch,
) -> None:
    """Agreement, overlap, the rate of every level and τ are what training's validation finds."""
    found = measure_head(heads[name], target, texts)
    chain = {"chain": chain_paths(LEVELS)}
    expected = figures(heads[name].validate(texts, target.head, chain))
    rates = [expected[f"chain/{level}"] for level in range(1, LEVELS + 1)]
    assert found.rates() == pytest.approx(rates)
    assert chain_length(found.rates()) == pytest.approx(expected["chain/tau"])
    assert float(found.overlap[0].mean()) == pytest.approx(
        expected["overlap"],
        abs=1e-5,
    )
    assert float(found.hits[0].double().mean()) == pytest.approx(expected["agreement"])


def test_level_two_fed_by_the_target_is_level_one_of_the_next_slot(
    heads: dict[str, Any],
    target: Target,
    texts: Batch,
) -> None:
    """Counted by hand from the hits of level 1."""
    found = measure_head(heads["eagle3"], target, texts)
    slots = found.reached[1].nonzero()[:, 0]
    assert len(slots)
    assert found.seq_ids[slots].equal(found.seq_ids[slots + 1])
    # fed by the target, level 2 of a slot reads what level 1 of the next slot reads
    rate = found.hits[0, slots + 1].double().mean()
    assert found.teacher_forced_rates[1] == pytest.approx(float(rate))


def test_states_are_those_of_transformers(target: Target) -> None:
    """Every layer's input, and the last layer's output with and without the final norm."""
    tokens = torch.tensor(random_tokens(9, 1))
    states = read_states(target, tokens)
    count = len(target.layers)
    expected = target.model(input_ids=tokens[None], output_hidden_states=True).hidden_states
    assert every_tap(target) == (*range(count + 1), -1)
    for layer in range(count):
        assert states[:, layer].equal(expected[layer][0])
    assert states[:, -1].equal(expected[-1][0])
    normed = target.model.model.norm(states[:, count])
    torch.testing.assert_close(
        normed,
        states[:, -1],
        rtol=0,
        atol=1e-6,
    )


@torch.no_grad()
def compute_logits(wiring: Wiring, texts: Batch) -> Tensor:
    """Return the logits of level 3."""
    states, logits = wiring.draft_levels(texts, 3)[-1]
    return logits(states)


@pytest.mark.parametrize("name", SECTIONS)
def test_a_probe_leaves_the_head_as_it_was(
    name: str,
    heads: dict[str, Any],
    target: Target,
    texts: Batch,
) -> None:
    """Every change is made on a copy, changes something, and has a name of its own."""
    head = heads[name]
    # deepcopy, as state_dict shares memory
    before = copy.deepcopy(head.state_dict())
    wiring = Wiring(head, target.head)
    probes = list_probes(wiring, target)
    whole = compute_logits(wiring, texts)
    for probe in probes:
        is_same = compute_logits(probe.change(wiring), texts).equal(whole)
        # d2t says which tokens the logits are of
        assert probe.kind == "d2t" or not is_same, probe.fault
    for tensor_name, tensor in head.state_dict().items():
        assert tensor.equal(before[tensor_name])
    assert len({probe.fault for probe in probes}) == len(probes)


def test_d2t_that_holds_ids_is_undone(heads: dict[str, Any], target: Target) -> None:
    """One of the probes finds the offsets again."""
    head = copy.deepcopy(heads["eagle3.1"])
    offsets = head.d2t.clone()
    # ids in place of offsets: a known mistake of conversions
    head.d2t.copy_(head.drafts)
    wiring = Wiring(head, target.head)
    probes = [probe for probe in list_probes(wiring, target) if probe.kind == "d2t"]
    assert any(probe.change(wiring).head.d2t.equal(offsets) for probe in probes)


# -- effects of changes -----------------------------------------------------------------------------------------------


def compare(kind: str, before: Agreement, after: Agreement) -> Effect:
    """Return the effect of a change with these figures."""
    return Effect(Probe(kind, kind, lambda wiring: wiring), before, after)


def test_an_effect_is_paired_by_sequence(
    heads: dict[str, Any],
    target: Target,
    texts: Batch,
) -> None:
    """No change is no gain; the error of a gain is far smaller than the sequences differ."""
    before = measure_head(heads["eagle3"], target, texts)
    same = compare("none", before, before)
    assert same.min_share == 0
    assert same.sampled.errors == 0
    assert same.greedy.error == 0
    assert not same.is_sure
    better = compare(
        "some",
        before,
        replace(before, overlap=before.overlap * 1.02),
    )
    tokens, cycles = before.sampled_cycles
    assert better.sampled.before == pytest.approx(float(tokens.sum() / cycles.sum()))
    assert better.sampled.errors > 3
    assert better.sampled.error < 0.2 * float((tokens / cycles).std())


def test_the_error_of_a_gain_is_that_of_a_bootstrap() -> None:
    """A difference of two ratios, beside its spread over 4,000 samples of as many sequences."""
    dice = torch.Generator().manual_seed(0)

    def normal() -> Tensor:
        return torch.randn(80, generator=dice, dtype=torch.double)

    cycles = 10 + 20 * torch.rand(
        80,
        generator=dice,
        dtype=torch.double,
    )
    before = cycles * (2 + 0.3 * normal())
    after = before * (1.05 + 0.05 * normal())
    gain = Gain.between((before, cycles), (after, cycles))
    samples = torch.randint(80, (4000, 80), generator=dice)
    gains = (after - before)[samples].sum(1) / cycles[samples].sum(1)
    assert gain.error == pytest.approx(
        float(gains.std()),
        rel=0.06,
    )


@pytest.mark.parametrize("rate", [0.6, 0.55])
def test_flatter_probs_are_no_repair(rate: float) -> None:
    """They overlap more with the target's, but the likeliest tokens are right as seldom."""
    before = make_agreement(0.6, 0.6)
    # sampled drafts gain, greedy ones do not
    flat = make_agreement(rate, rate)
    effect = compare(
        "projections",
        before,
        replace(flat, overlap=flat.overlap + 0.2),
    )
    assert effect.sampled.errors > 10
    assert effect.sampled.share > 0.3
    assert not effect.is_sure


@pytest.mark.parametrize(
    ("overlap", "is_sure"),
    [(0.6, True), (0.4, False)],
)
def test_a_repair_raises_greedy_and_sampled_drafts(overlap: float, is_sure: bool) -> None:
    """Likeliest tokens that are right more often by chance are none."""
    before = make_agreement(0.6, 0.6)
    mended = replace(
        make_agreement(0.75, 0.75), overlap=make_agreement(0.75, 0.75, overlap).overlap
    )
    assert compare("projections", before, mended).is_sure == is_sure


@pytest.mark.parametrize(
    ("second_rate", "is_sure"),
    [(0.35, False), (0.78, True)],
)
def test_a_change_that_only_eases_own_states_is_no_repair(
    second_rate: float, is_sure: bool
) -> None:
    """Of a head never trained on its own states; a repair makes level 2 as good as on the target's states."""
    weak = make_agreement(0.8, 0.2)
    after = make_agreement(0.8, second_rate)
    effect = compare(
        "norm_output",
        weak,
        replace(after, overlap=after.overlap + 0.2),
    )
    assert effect.greedy.errors > 3
    assert effect.only_eases == (not is_sure)
    assert effect.is_sure == is_sure


# -- heads that were trained on few tokens ---------------------------------------------------------------------------


def test_what_does_not_help_yet_is_no_fault_after_few_tokens() -> None:
    """A branch that adds nothing is a fault of a trained head; after few tokens it may have learned nothing yet."""
    figures = make_agreement(0.41, 0.4)
    idle = compare("attention", figures, figures)
    assert idle.is_idle
    assert not replace(idle, needs_more=True).is_idle
    # half of the first drafts are right: such a head has learned
    able = make_agreement(0.6, 0.6)
    assert replace(compare("attention", able, able), needs_more=True).is_idle


def test_a_small_gain_is_chance_after_few_tokens() -> None:
    """The same gain mends a trained head; a large one is a fault of either."""
    before = make_agreement(0.41, 0.4)
    for rate, overlap, is_sure in ((0.43, 0.412, False), (0.49, 0.48, True)):
        after = make_agreement(rate, 0.4, overlap)
        effect = compare("projections", before, after)
        assert effect.is_sure
        assert replace(effect, needs_more=True).is_sure == is_sure


def test_the_verdict_says_that_more_tokens_help() -> None:
    """And only where they do."""
    figures = make_agreement(0.41, 0.4)
    early = Diagnosis(decide(figures, [], [], 0.1, needs_more=True))
    assert not early.broken
    assert early.verdict.startswith("under-trained: ")
    assert early.verdict.endswith("it was trained on few tokens, and more data or epochs help")
    assert decide(figures, [], [], 0.1).endswith("no single change mends it")


@pytest.mark.parametrize(
    ("file", "says"),
    [
        (None, "the doctor's own 12 prompts, which may differ from your data: --prompts FILE"),
        ("mine.jsonl", "measured on 12 prompts of mine.jsonl"),
    ],
)
def test_it_tells_whose_prompts_were_answered(file: str | None, says: str) -> None:
    """Acceptance differs from one kind of prompts to another."""
    assert says in describe_prompts(12, file)


# -- texts ------------------------------------------------------------------------------------------------------------


def test_texts_that_confirm_had_no_part_in_choosing(texts: Batch) -> None:
    """The parts share no prompt, have their own features, and are all texts together."""
    chosen, others = split_answers(texts, 4)
    assert chosen.lengths == texts.lengths[:2]
    assert others.lengths == texts.lengths[2:]
    for name in ("tokens", "loss_mask", "features"):
        both = torch.cat([getattr(chosen, name), getattr(others, name)])
        assert both.equal(getattr(texts, name))
    prompts = [tokens[:6].tolist() for tokens in texts.tokens.split(texts.lengths)]
    assert prompts[0] == prompts[1]
    assert prompts[0] not in prompts[2:]
    # features of a 70B target take 7 GB, and are not copied
    assert chosen.features.data_ptr() == texts.features.data_ptr()
    # there is too little to divide
    assert split_answers(chosen, 3) == (chosen, chosen)


# of answers of ten tokens to two prompts: the second round has enough
ROUNDS: dict[str, Any] = {
    "new_tokens": 10,
    "temperatures": (0.0, 1.0, 1.0, 1.0),
    "enough": 35,
}


def test_answers_end_once_there_are_enough(target: Target) -> None:
    """Whole rounds of prompts, each sampled again; the first is greedy."""
    prompts = [random_tokens(6, seed) for seed in range(2)]
    texts = answer_prompts(target, prompts, **ROUNDS)
    assert len(texts.lengths) == 4
    assert texts.slots >= 35
    first, second, *_ = answer_prompts(
        target,
        prompts,
        10,
        (1.0, 1.0),
    ).tokens.split(16)
    assert first[:6].equal(second[:6])
    assert not first.equal(second)


def test_the_forecast_comes_after_the_first_round(
    heads: dict[str, Any],
    target: Target,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is told once, with the rounds that are needed for enough tokens."""
    prompts = [random_tokens(6, seed) for seed in range(2)]
    told: list[tuple[Batch, float, int]] = []
    texts = answer_prompts(
        target,
        prompts,
        **ROUNDS,
        after_first=lambda *first: told.append(first),
    )
    ((first, _, num_rounds),) = told
    assert len(first.lengths) * num_rounds == len(texts.lengths)
    forecast(heads["eagle1"], target, first, seconds=60.0, num_rounds=num_rounds)
    said = capsys.readouterr().err
    assert "in all: 0:02:00 until the target has answered" in said
    assert "--tokens makes it shorter" in said


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle1", "eagle3"])
def test_a_head_that_learned_hard_labels_is_not_called_broken(name: str, target: Target) -> None:
    """It is too sure of the target's likeliest tokens, as many tools train."""
    texts = answer_random(24, target, 20, (0.0, 1.0))
    # the target's likeliest token after each position
    labels = target.head.logits(texts.select_taps((-1,))[:, 0]).argmax(-1)
    slots = texts.loss_mask.nonzero()[:, 0] - 1
    head = make_head(SECTIONS[name], target)

    def compute_loss() -> Tensor:
        ((states, logits),) = head.draft_levels(
            texts,
            target.head,
            1,
        )
        return cross_entropy(logits(states), labels[slots])

    diagnosis = diagnose(fit(head, compute_loss, 60, 3e-3), target, texts)
    assert diagnosis.figures is not None
    assert diagnosis.figures.rates()[0] > 0.7
    assert not diagnosis.broken
    assert not diagnosis.faults
