"""The target's choice by itself: laws are those of transformers, noise is as good as chance and repeats exactly."""

# P positions, V vocabulary

from __future__ import annotations

import copy
import random
from functools import reduce
from itertools import product
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, LogitsProcessorList
from transformers.generation import logits_process as processors

from eagle.core.tree import DraftTree, TargetOutput
from eagle.core.verify import Choose, Noise, Sampling

VOCAB = 50
NODES = range(7)
CPU = torch.device("cpu")
FILTERS = [
    dict(zip(("repetition_penalty", "temperature", "top_k", "top_p", "min_p"), values, strict=True))
    for values in product((1.0, 1.3), (0.5, 1.0, 1.7), (0, 5), (1.0, 0.8), (0.0, 0.1))
]
LAW = np.array([0.4, 0.25, 0.2, 0.1, 0.05])
CHANCE = 1e-4  # the p-value below which a statistic is not believed to be chance


def make_output(dtype: torch.dtype, seed: int = 0) -> TargetOutput:
    """Two branches and a twig after a prompt, tokens of which come back in the tree."""
    tree = DraftTree.from_paths(7, [[3, 9, 11], [4, 3], [3, 10]])
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(len(tree), VOCAB, generator=generator, dtype=torch.float64)).to(dtype)
    return TargetOutput(tree, logits, None, 4, [3, 20, 21, 21])


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """The smallest model that can be asked for its logits processors."""
    sizes = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 1)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCAB, hidden_size=8, intermediate_size=8, **sizes)
    )


def processors_of(model: LlamaForCausalLM, filters: dict[str, Any]) -> LogitsProcessorList:
    """What transformers itself would sample with, in its own order."""
    config = copy.deepcopy(model.generation_config)
    config.update(do_sample=True, **filters)
    assert isinstance(config, GenerationConfig)
    return model._get_logits_processor(
        generation_config=config, input_ids_seq_length=4, device="cpu"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "filters", FILTERS, ids=lambda filters: "-".join(map(str, filters.values()))
)
def test_laws_are_those_of_transformers(
    model: LlamaForCausalLM, filters: dict[str, Any], dtype: torch.dtype
) -> None:
    """At every node of a tree, whose path counts as text, each combination of filters gives transformers' own law."""
    output, warpers, choose = (
        make_output(dtype),
        processors_of(model, filters),
        Choose(Sampling(**filters)),
    )
    for node, row in enumerate(output.logits):
        scores = row if dtype == torch.float64 else row.float()
        expected = warpers(torch.tensor([output.prefix(node)]), scores[None]).softmax(-1)[0]
        torch.testing.assert_close(choose.probs(output, node), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}], ids=str)
def test_the_strictest_filters_leave_the_likeliest_token(filters: dict[str, Any]) -> None:
    """However little is let through, it is never nothing."""
    output, choose = make_output(torch.float32), Choose(Sampling(temperature=1.0, **filters))
    likeliest = output.logits.argmax(-1).tolist()
    assert [choose.probs(output, node)[token].item() for node, token in enumerate(likeliest)] == [
        1.0
    ] * 7
    assert choose(output, NODES) == likeliest


@pytest.mark.parametrize(
    "filters", FILTERS, ids=lambda filters: "-".join(map(str, filters.values()))
)
def test_sampling_is_read_from_processors(model: LlamaForCausalLM, filters: dict[str, Any]) -> None:
    """Fields given by name stay; what transformers leaves out is off."""
    assert Sampling.from_processors(processors_of(model, filters), seed=3) == Sampling(
        **filters, seed=3
    )


@pytest.mark.parametrize(
    ("unsupported", "message"),
    [
        ([processors.NoRepeatNGramLogitsProcessor(2)], r"NoRepeatNGramLogitsProcessor.*remove"),
        (
            [processors.TopKLogitsWarper(5), processors.TypicalLogitsWarper(0.9)],
            r"\['TypicalLogitsWarper'\]",
        ),
        (
            [processors.TopPLogitsWarper(0.9), processors.TopKLogitsWarper(5)],
            r"order.*TopP.*TopK.*expected",
        ),
        (
            [processors.TopKLogitsWarper(5), processors.TemperatureLogitsWarper(0.5)],
            r"order.*TopK.*Temperature",
        ),
        ([processors.TopKLogitsWarper(5), processors.TopKLogitsWarper(6)], r"each at most once"),
        ([processors.TopPLogitsWarper(0.5, min_tokens_to_keep=3)], "min_tokens_to_keep"),
        ([processors.MinPLogitsWarper(0.5, min_tokens_to_keep=3)], "min_tokens_to_keep"),
        ([processors.TopKLogitsWarper(5, filter_value=-9.0)], "filter_value"),
        (
            [processors.RepetitionPenaltyLogitsProcessor(1.3, prompt_ignore_length=2)],
            "prompt_ignore_length",
        ),
    ],
)
def test_processors_that_cannot_be_followed_are_refused(
    unsupported: list[Any], message: str
) -> None:
    """Unknown ones by the names of their classes, wrong orders, and known ones with options that change their law."""
    with pytest.raises(ValueError, match=message):
        Sampling.from_processors(unsupported)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("temperature", -0.1, "0 (greedy) or more"),
        ("temperature", float("nan"), "0 (greedy) or more"),
        ("temperature", float("inf"), "0 (greedy) or more"),
        ("top_p", 0.0, "above 0, at most 1"),
        ("top_p", 1.2, "above 0, at most 1"),
        ("min_p", -1.0, "0 (off) to 1"),
        ("top_k", -3, "0 (off) or more"),
        ("repetition_penalty", 0.0, "above 0"),
        ("rule", "tree", "'token' or 'block'"),
        ("lenience", 0.0, "above 0, at most 1"),
    ],
)
def test_impossible_sampling_is_refused(field: str, value: Any, expected: str) -> None:
    """The message names the field, what it got and what it expects."""
    with pytest.raises(ValueError) as error:
        Sampling(**{field: value})
    assert f"Sampling.{field} is {value!r}, expected {expected}" in str(error.value)


def test_lenient_block_verification_is_refused() -> None:
    """Lenience belongs to the token rule."""
    with pytest.raises(ValueError, match="lenience is defined for the token rule alone"):
        Sampling(rule="block", lenience=0.5)


@pytest.mark.parametrize("nodes", [NODES, [*NODES][::-1], [2, 4]], ids=["all", "backwards", "some"])
@pytest.mark.parametrize("filters", [{"temperature": 0.0}, FILTERS[-1]], ids=["greedy", "filtered"])
def test_nodes_may_be_asked_one_by_one_or_together(
    filters: dict[str, Any], nodes: list[int]
) -> None:
    """A node's choice depends on the node, not on what else is asked or in which order."""
    for seed in range(20):
        output, sampling = make_output(torch.float32, seed), Sampling(**filters, seed=seed)
        together = Choose(sampling)(output, list(nodes))
        assert together == [Choose(sampling)(output, [node])[0] for node in nodes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_greedy_target_chooses_the_likeliest_token(dtype: torch.dtype) -> None:
    """The argmax after every node, with certainty as its law, and no noise to offer."""
    output, choose = make_output(dtype), Choose(Sampling())
    likeliest = output.logits.argmax(-1).tolist()
    assert choose(output, NODES) == likeliest
    assert [choose.probs(output, node)[token].item() for node, token in enumerate(likeliest)] == [
        1.0
    ] * 7
    assert choose.offer(VOCAB, CPU) is None


def test_the_choice_is_the_warped_logits_plus_the_noise_on_offer() -> None:
    """A drafter that adds the noise offered to what it believes guesses what the target will choose."""
    output, sampling = make_output(torch.float32), Sampling(temperature=0.8, top_k=9, seed=5)
    choose = Choose(sampling)
    laws = torch.stack([choose.probs(output, node) for node in NODES])
    noise = Choose(sampling).offer(VOCAB, CPU)(output.positions)
    assert choose(output, NODES) == (laws.log() * 0.8 + noise).argmax(-1).tolist()


@pytest.mark.parametrize("uniform", [0.0, 0.3, 0.5, 1 - 2**-53])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_pick_is_never_impossible(uniform: float, dtype: torch.dtype) -> None:
    """Not even where the dice show their least or their most, and for laws that rounding left short of one."""
    choose = Choose(Sampling(temperature=1.0))
    choose.dice = type("Loaded", (random.Random,), {"random": lambda self: uniform})()
    for law in ([0, 0.5, 0, 0.5, 0], [0, 0, 1, 0], [0.3, 0, 0.7], [0, 0.1, 0.2, 0]):
        law = torch.tensor(law, dtype=dtype)
        cumulative = (law / law.sum()).cumsum(-1)
        picked = choose.pick(law)
        assert law[picked] > 0
        assert (
            cumulative[picked] >= uniform - 1e-7
            and (cumulative - law / law.sum())[picked] <= uniform + 1e-7
        )


@pytest.mark.slow
def test_coins_and_picks_follow_their_laws() -> None:
    """Frequencies of 20,000 draws each."""
    choose = Choose(Sampling(temperature=1.0, seed=1))
    heads = sum(choose.coin(0.3) for _ in range(20_000))
    assert scipy.stats.binomtest(heads, 20_000, 0.3).pvalue > CHANCE
    picks = [choose.pick(torch.from_numpy(LAW)) for _ in range(20_000)]
    assert goodness(np.array(picks)) > CHANCE


def choices(noise: Noise, positions: range, groups: int = 1) -> np.ndarray:
    """[P, groups], what LAW and noise choose at each position; each group is as many neighbours of one vocabulary."""
    rows = noise(positions, groups * len(LAW), CPU).double().numpy()
    return (rows.reshape(len(positions), groups, len(LAW)) + np.log(LAW)).argmax(-1)


def goodness(*drawn: np.ndarray) -> float:
    """The p-value of one or several arrays of choices: each follows LAW, and none knows of the others."""
    places = np.ravel_multi_index([places.ravel() for places in drawn], [len(LAW)] * len(drawn))
    joint = reduce(np.multiply.outer, [LAW] * len(drawn)).ravel()
    return float(
        scipy.stats.chisquare(np.bincount(places, minlength=joint.size), places.size * joint).pvalue
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "count", [20_000, pytest.param(200_000, marks=[pytest.mark.slow, pytest.mark.long])]
)
def test_choices_over_positions_follow_the_law(count: int) -> None:
    """Adding the noise and taking the largest is sampling; what follows does not depend on what went before."""
    drawn = choices(Noise(0, 0), range(count))
    assert goodness(drawn) > CHANCE
    assert goodness(drawn[::2], drawn[1::2]) > CHANCE
    assert goodness(drawn[:-2:3], drawn[1:-1:3], drawn[2::3]) > CHANCE


@pytest.mark.slow
@pytest.mark.parametrize("count", [5_000, pytest.param(50_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("field", ["seed", "request"])
def test_choices_over_seeds_and_requests_follow_the_law(field: str, count: int) -> None:
    """Neighbouring streams are as independent as neighbouring positions."""
    streams = (Noise(**{"seed": 1, "request": 1, field: value}) for value in range(count))
    drawn = np.concatenate([choices(noise, range(7, 8), groups=4) for noise in streams])
    assert goodness(drawn) > CHANCE
    assert goodness(drawn[::2], drawn[1::2]) > CHANCE


@pytest.mark.parametrize(
    "other", [(1, 0), (0, 1), (1, 1), (-1, 0), (2**63, 0), (0, 2**40)], ids=str
)
def test_streams_are_independent(other: tuple[int, int]) -> None:
    """Another seed or request shows no trace of this one, at the same positions or at shifted ones."""
    here, there = (
        choices(Noise(0, 0), range(200), groups=200),
        choices(Noise(*other), range(200), groups=200),
    )
    assert goodness(here, there) > CHANCE
    assert goodness(here[1:], there[:-1]) > CHANCE


def test_choices_among_neighbouring_tokens_follow_the_law() -> None:
    """200,000 draws from a large vocabulary: neither positions nor groups of tokens know of each other."""
    drawn = choices(Noise(3, 4), range(50), groups=4000)
    assert goodness(drawn) > CHANCE
    assert goodness(drawn[:, ::2], drawn[:, 1::2]) > CHANCE
    assert goodness(drawn[::2], drawn[1::2]) > CHANCE


def test_noise_has_gumbels_law() -> None:
    """Mean, variance and the whole distribution, no token knowing of its neighbours."""
    row = Noise(5, 6)([100], 400_000, CPU)[0].double().numpy()
    assert row.mean() == pytest.approx(np.euler_gamma, abs=5 * row.std() / len(row) ** 0.5)
    assert row.var() == pytest.approx(np.pi**2 / 6, rel=0.02)
    assert scipy.stats.kstest(row, "gumbel_r").pvalue > CHANCE
    for lag in (1, 2, 3, 64, 65536):
        assert abs(np.corrcoef(row[lag:], row[:-lag])[0, 1]) < 5 / len(row) ** 0.5


class SameEverywhere(Noise):
    """A planted fault: the position is forgotten."""

    def key(self, position: int) -> int:
        return super().key(0)


class SharedByRequests(Noise):
    """A planted fault: the request is forgotten."""

    def __init__(self, seed: int, request: int) -> None:
        super().__init__(seed, 0)


def test_noise_that_repeats_is_seen() -> None:
    """The statistics above tell planted faults from chance."""
    stuck = choices(SameEverywhere(0, 0), range(200), groups=100)
    assert goodness(stuck[::2], stuck[1::2]) < 1e-12
    here, there = (
        choices(SharedByRequests(0, request), range(200), groups=100) for request in (0, 1)
    )
    assert goodness(here) > CHANCE
    assert goodness(here, there) < 1e-12


def test_noise_depends_on_seed_request_position_and_token_alone() -> None:
    """Neither the order of questions, nor other positions, nor forgetting, nor the vocabulary's size change a row."""
    fresh = {place: Noise(1, 2)([place], 8, CPU)[0] for place in range(6)}
    noise = Noise(1, 2)
    for places in ([4, 1], [1, 4, 4, 0], [5], list(range(6))):
        assert noise(places, 8, CPU).equal(torch.stack([fresh[place] for place in places]))
        noise.forget(places[0])
    assert Noise(1, 2)([3], 20, CPU)[0, :8].equal(fresh[3])
    others = [
        Noise(1, 2)([4], 8, CPU),
        Noise(1, 3)([3], 8, CPU),
        Noise(2, 2)([3], 8, CPU),
        Noise(2, 1)([3], 8, CPU),
    ]
    assert not any(other[0].isclose(fresh[3]).any() for other in others)


def test_forgotten_rows_are_no_longer_held() -> None:
    """The rows at hand are those that the text has not passed yet."""
    noise = Noise(0, 0)
    noise(range(10), 8, CPU)
    noise.forget(7)
    assert sorted(noise.rows) == [7, 8, 9]
