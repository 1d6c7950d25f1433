"""The target's choice: probabilities are those of transformers, noise is as good as chance and repeats exactly."""

# P positions, V vocabulary, G groups of as many tokens as LAW has

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

VOCAB_SIZE = 50
NODES = range(7)
CPU = torch.device("cpu")
FILTER_NAMES = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")
FILTERS = [
    dict(zip(FILTER_NAMES, values, strict=True))
    for values in product((1.0, 1.3), (0.5, 1.7), (0, 5), (1.0, 0.8), (0.0, 0.1))
]
LAW = np.array([0.4, 0.25, 0.2, 0.1, 0.05])
# the p-value below which a statistic is not believed to be chance
CHANCE = 1e-4


def make_output(
    dtype: torch.dtype,
    seed: int = 0,
) -> TargetOutput:
    """Return an output on two branches and a twig; some of their tokens are in the prompt as well."""
    tree = DraftTree.from_paths(
        7,
        [
            [3, 9, 11],
            [4, 3],
            [3, 10],
        ],
    )
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(
        len(tree),
        VOCAB_SIZE,
        generator=generator,
        dtype=torch.float64,
    )
    return TargetOutput(
        tree,
        logits.to(dtype),
        features=None,
        start=4,
        sequence=[3, 20, 21, 21],
    )


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """Return the smallest model that can be asked for its logits processors."""
    sizes = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 1)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=8,
        intermediate_size=8,
        **sizes,
    )
    return LlamaForCausalLM(config)


def make_processors(
    model: LlamaForCausalLM,
    filters: dict[str, Any],
) -> LogitsProcessorList:
    """Return what transformers itself would sample with, in its own order."""
    config = copy.deepcopy(model.generation_config)
    config.update(do_sample=True, **filters)
    assert isinstance(config, GenerationConfig)
    return model._get_logits_processor(
        generation_config=config, input_ids_seq_length=4, device="cpu"
    )


@pytest.mark.parametrize(
    ("filters", "dtype"),
    [
        *((filters, torch.float32) for filters in FILTERS),
        (FILTERS[-1], torch.float64),
        (FILTERS[-1], torch.bfloat16),
    ],
)
def test_probabilities_are_those_of_transformers(
    model: LlamaForCausalLM,
    filters: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    """Every combination of filters, at every node of a tree, whose path counts as text."""
    # the processors and filters are built from one dict, in the way of each library
    output = make_output(dtype)
    warpers = make_processors(model, filters)
    sampling = Sampling(**filters)
    # transformers' processors, read back, are the same sampling; a field given by name stays
    assert Sampling.from_processors(warpers, seed=3) == Sampling(
        **filters,
        seed=3,
    )
    choose = Choose(sampling)
    for node, row in enumerate(output.logits):
        scores = row if dtype == torch.float64 else row.float()
        text = torch.tensor([output.prefix(node)])
        expected = warpers(text, scores[None]).softmax(-1)[0]
        probs = choose.probs(output, node)
        torch.testing.assert_close(
            probs,
            expected,
            atol=1e-6,
            rtol=0,
        )


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16],
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_p": 1e-9},
        {"temperature": 1.0, "min_p": 1.0},
    ],
    ids=str,
)
def test_greedy_and_the_strictest_filters_choose_the_likeliest_token(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    """The argmax after every node has all probability: filters never leave nothing."""
    output = make_output(dtype)
    # bf16 logits tie now and then: both sides take the first
    choose = Choose(Sampling(**options))
    likeliest = output.logits.argmax(-1).tolist()
    assert choose(output, NODES) == likeliest
    for node, token in enumerate(likeliest):
        assert choose.probs(output, node)[token] == 1


@pytest.mark.parametrize(
    ("unsupported", "message"),
    [
        ([processors.NoRepeatNGramLogitsProcessor(2)], "NoRepeatNGramLogitsProcessor"),
        (
            [processors.TopPLogitsWarper(0.9), processors.TopKLogitsWarper(5)],
            "order",
        ),
        (
            [processors.TopKLogitsWarper(5), processors.TopKLogitsWarper(6)],
            "at most once",
        ),
        ([processors.TopPLogitsWarper(0.5, min_tokens_to_keep=3)], "min_tokens_to_keep"),
        (
            [processors.TopKLogitsWarper(5, filter_value=-9.0)],
            "filter_value",
        ),
        (
            [processors.RepetitionPenaltyLogitsProcessor(1.3, prompt_ignore_length=2)],
            "prompt_ignore_length",
        ),
    ],
)
def test_processors_that_sampling_cannot_express_are_refused(
    unsupported: list[Any], message: str
) -> None:
    """Unknown processors, another order, and options that change what a known one does."""
    with pytest.raises(ValueError, match=message):
        Sampling.from_processors(unsupported)


@pytest.mark.parametrize(
    "filters",
    [{}, FILTERS[-1]],
    ids=["greedy", "filtered"],
)
def test_a_choice_depends_on_its_node_alone(filters: dict[str, Any]) -> None:
    """Neither the other nodes that are asked about nor their order changes it."""
    for seed in range(20):
        output = make_output(torch.float32, seed)
        sampling = Sampling(**filters, seed=seed)
        # a new Choose each time, so that no noise is remembered
        alone = [Choose(sampling)(output, [node])[0] for node in NODES]
        assert Choose(sampling)(output, NODES) == alone
        assert Choose(sampling)(output, NODES[::-1]) == alone[::-1]
        assert Choose(sampling)(output, [2, 4]) == [
            alone[2],
            alone[4],
        ]


def test_the_choice_is_the_warped_logits_plus_the_offered_noise() -> None:
    """A drafter that adds this noise to its own guess of the logits guesses the target's sample."""
    output = make_output(torch.float32)
    sampling = Sampling(temperature=0.8, top_k=9, seed=5)
    choose = Choose(sampling)
    probs = torch.stack([choose.probs(output, node) for node in NODES])
    noise = Choose(sampling).offer(VOCAB_SIZE, CPU)
    assert noise is not None
    scores = probs.log() * 0.8 + noise(output.positions)
    assert choose(output, NODES) == scores.argmax(-1).tolist()
    # a greedy target has none to offer
    assert Choose(Sampling()).offer(VOCAB_SIZE, CPU) is None


@pytest.mark.parametrize(
    "uniform",
    [0.0, 0.3, 0.5, 1 - 2**-53],
)
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64],
)
def test_a_pick_inverts_the_cumulative_probabilities(uniform: float, dtype: torch.dtype) -> None:
    """A token of probability 0 is never picked, whatever number comes and however rounding left the sum."""
    choose = Choose(Sampling(temperature=1.0))
    # the least and the largest number that Python's generator returns are among the cases
    loaded = random.Random()
    loaded.random = lambda: uniform  # type: ignore[method-assign]
    choose.dice = loaded
    for law in ([0, 0.5, 0, 0.5, 0], [0, 0, 1, 0], [0.3, 0, 0.7], [0, 0.1, 0.2, 0]):
        weights = torch.tensor(law, dtype=dtype)
        probs = weights / weights.sum()
        picked = choose.pick(weights)
        assert probs[picked] > 0
        upper = probs.cumsum(-1)[picked]
        assert upper - probs[picked] - 1e-7 <= uniform <= upper + 1e-7


# -- noise ------------------------------------------------------------------------------------------------------------


def choose_tokens(
    noise: Noise,
    positions: range,
    groups: int = 1,
) -> np.ndarray:
    """Return [P, G], what LAW and the noise choose in each group of neighbouring tokens at each position."""
    # Gumbel-max: the argmax of log p + noise is a sample of p
    rows = noise(positions, groups * len(LAW), CPU).double().numpy()
    scores = rows.reshape(len(positions), groups, len(LAW)) + np.log(LAW)
    return scores.argmax(-1)


def compute_p_value(*samples: np.ndarray) -> float:
    """Return the p-value of one or several arrays of choices: each follows LAW, and all are independent."""
    flat = [sample.ravel() for sample in samples]
    # one cell for each combination of choices
    cells = np.ravel_multi_index(
        flat,
        [len(LAW)] * len(flat),
    )
    joint = reduce(np.multiply.outer, [LAW] * len(flat)).ravel()
    counts = np.bincount(cells, minlength=joint.size)
    return float(scipy.stats.chisquare(counts, cells.size * joint).pvalue)


@pytest.mark.parametrize(
    ("seed", "request_id"),
    [
        (1, 0),
        (0, 1),
        (1, 1),
        (-1, 0),
        (2**63, 0),
        (0, 2**40),
    ],
)
def test_streams_are_independent(seed: int, request_id: int) -> None:
    """Another seed or request shows no trace of this one, at the same positions or at shifted ones."""
    here = choose_tokens(
        Noise(0, 0),
        range(200),
        groups=200,
    )
    there = choose_tokens(
        Noise(seed, request_id),
        range(200),
        groups=200,
    )
    assert compute_p_value(here, there) > CHANCE
    assert compute_p_value(here[1:], there[:-1]) > CHANCE
    # planted: a stream that forgets its request is this one again
    assert compute_p_value(here, here) < 1e-12


def test_choices_of_neighbours_follow_the_law() -> None:
    """In 200,000 samples, neither neighbouring positions nor neighbouring tokens depend on each other."""
    tokens = choose_tokens(
        Noise(3, 4),
        range(50),
        groups=4000,
    )
    assert compute_p_value(tokens) > CHANCE
    assert compute_p_value(tokens[:, ::2], tokens[:, 1::2]) > CHANCE
    assert compute_p_value(tokens[::2], tokens[1::2]) > CHANCE


def test_noise_has_gumbels_law() -> None:
    """Mean, variance and the whole distribution are right, and tokens do not depend on each other."""
    row = Noise(5, 6)([100], 400_000, CPU)[0].double().numpy()
    assert row.mean() == pytest.approx(
        np.euler_gamma,
        abs=5 * row.std() / len(row) ** 0.5,
    )
    assert row.var() == pytest.approx(
        np.pi**2 / 6,
        rel=0.02,
    )
    assert scipy.stats.kstest(row, "gumbel_r").pvalue > CHANCE
    # 64 and 65536 are sizes at which generators of numbers tend to repeat
    for lag in (1, 2, 64, 65536):
        correlation = np.corrcoef(row[lag:], row[:-lag])[0, 1]
        assert abs(correlation) < 5 / len(row) ** 0.5


def test_noise_depends_on_seed_request_position_and_token_alone() -> None:
    """Neither the order of questions, nor other positions, nor the vocabulary's size change a row."""
    fresh = [Noise(1, 2)([position], 8, CPU)[0] for position in range(6)]
    noise = Noise(1, 2)
    for positions in ([4, 1], [1, 4, 4, 0], [5], list(range(6))):
        expected = torch.stack([fresh[position] for position in positions])
        assert noise(positions, 8, CPU).equal(expected)
        # what is made again is the same
        noise.forget(positions[0])
    assert Noise(1, 2)([3], 20, CPU)[0, :8].equal(fresh[3])
    for seed, request, position in ((1, 2, 4), (1, 3, 3), (2, 2, 3), (2, 1, 3)):
        other = Noise(seed, request)([position], 8, CPU)[0]
        assert not other.isclose(fresh[3]).any()


def test_forgotten_rows_are_no_longer_held() -> None:
    """Only rows of positions that the text has not passed yet stay in memory."""
    noise = Noise(0, 0)
    noise(range(10), 8, CPU)
    noise.forget(7)
    assert sorted(noise.rows) == [7, 8, 9]
