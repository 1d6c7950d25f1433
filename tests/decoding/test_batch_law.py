"""Rows of a batch whose drafts are sampled: each has the target's distribution, and all are independent."""

# R rows, V vocabulary, N tokens looked at

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch

from eagle import Budget, Sampling, Target, generate
from eagle.core.tree import chain_paths
from eagle.core.verify import Choose
from eagle.drafters.lookup.bigram import BigramDrafter
from eagle.drafters.lookup.suffix import SuffixDrafter
from eagle.drafters.several import FirstOf
from tests.decoding import test_seed_reuse
from tests.decoding.test_seed_reuse import CHANCE, PLAIN, VOCAB_SIZE, compute_law, make_bigram

target = test_seed_reuse.target
PROMPTS = [
    [1, 2, 0, 1],
    [0],
    [2, 2, 1, 0, 1, 2, 0],
    [1, 0],
]
BATCHES = 400
COUNT = 3
CHAIN = Budget.fixed(chain_paths(3), "sampled")
TREE = Budget.fixed(
    (
        (0,),
        (1,),
        (0, 0),
        (1, 0),
    ),
    "sampled",
)
BLOCK = replace(PLAIN, rule="block")
TOP_P = Sampling(temperature=0.7, top_p=0.9)


def make_repeater() -> BigramDrafter:
    """Return a drafter that mostly samples the last token again, so that rows are drafted for differently."""
    return make_bigram(5 + 90 * torch.eye(VOCAB_SIZE, dtype=torch.long))


def answer_batches(
    target: Target,
    sampling: Sampling,
    budget: Budget,
    *,
    drafter: Any = None,
    is_alike: bool = False,
    batch_size: int = 4,
) -> np.ndarray:
    """Return [batches, R, N], the first tokens of batches of different seeds."""
    answers = []
    for seed in range(BATCHES):
        samplings: Any = replace(sampling, seed=seed, request=7)
        # one sampling given four times is four uses of one seed and request
        if is_alike:
            samplings = [samplings] * len(PROMPTS)
        traces = generate(
            target,
            drafter or make_repeater(),
            PROMPTS,
            budget=budget,
            sampling=samplings,
            max_new_tokens=COUNT + 2,
            stop=[],
            batch_size=batch_size,
        )
        answers.append([trace.tokens[:COUNT] for trace in traces])
    return np.array(answers)


def compute_p_value(target: Target, answers: np.ndarray, sampling: Sampling) -> float:
    """Return the least p-value of each row under the target's law, and of pairs of rows as independent."""
    p_values = []
    rows = range(len(PROMPTS))
    for row in rows:
        law = compute_law(target, PROMPTS[row], COUNT, sampling).ravel()
        cells = np.ravel_multi_index(
            answers[:, row].T,
            [VOCAB_SIZE] * COUNT,
        )
        # one cell for each answer that there is
        counts = np.bincount(cells, minlength=law.size)
        # tokens that a filter excludes
        if counts[law == 0].any():
            return 0.0
        expected = len(answers) * law / law.sum()
        # chi-square needs five of each: rarer ones are one cell
        is_rare = expected < 5
        counts = np.array([*counts[~is_rare], counts[is_rare].sum()])
        expected = np.array([*expected[~is_rare], expected[is_rare].sum()])
        is_possible = expected > 0
        test = scipy.stats.chisquare(counts[is_possible], expected[is_possible])
        p_values.append(test.pvalue)
    for (one, other), position in product(combinations(rows, 2), range(COUNT)):
        table = np.zeros([VOCAB_SIZE, VOCAB_SIZE])
        np.add.at(
            table,
            (answers[:, one, position], answers[:, other, position]),
            1,
        )
        table = table[table.sum(1) > 0][:, table.sum(0) > 0]
        p_values.append(scipy.stats.chi2_contingency(table).pvalue)
    # Bonferroni: as many were tried
    return min(p_values) * len(p_values)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampling", "budget", "is_alike"),
    [
        (PLAIN, CHAIN, True),
        (BLOCK, CHAIN, False),
        (TOP_P, TREE, False),
    ],
    ids=["chain", "block", "top-p"],
)
def test_rows_have_the_targets_law(
    sampling: Sampling,
    budget: Budget,
    is_alike: bool,
    target: Target,
) -> None:
    """Also where all rows have the same seed and request."""
    answers = answer_batches(target, sampling, budget, is_alike=is_alike)
    assert compute_p_value(target, answers, sampling) > CHANCE


@pytest.mark.slow
def test_rows_that_come_later_have_the_targets_law(target: Target) -> None:
    """Two of four prompts are written at a time, with a lookup that remembers what the others sampled."""
    # what it remembers depends on the coins of requests before
    drafter = FirstOf([SuffixDrafter(remember=1000), make_repeater()])
    answers = answer_batches(target, PLAIN, TREE, drafter=drafter, batch_size=2)
    assert compute_p_value(target, answers, PLAIN) > CHANCE


@pytest.mark.slow
def test_shared_coins_are_seen(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: every row of a batch samples with the first one's numbers."""
    original = Choose.__init__

    def share(
        choose: Choose,
        sampling: Sampling,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        original(choose, replace(sampling, request=0), *args, **kwargs)

    monkeypatch.setattr(Choose, "private_seed", property(lambda choose: choose.sampling.seed))
    monkeypatch.setattr(Choose, "__init__", share)
    answers = answer_batches(target, PLAIN, CHAIN)
    assert compute_p_value(target, answers, PLAIN) < CHANCE
