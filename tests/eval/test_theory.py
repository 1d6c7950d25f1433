"""The closed forms against the figures that papers print, and against enumerations of all that may happen."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import combinations, product
from statistics import fmean

import pytest
import torch
from torch import Tensor

from eagle.core.tree import DraftTree
from eagle.core.verify import sample_tree, walk
from eval.page.page_acceptance import expected_tokens, tokens_of_rates
from tests.enumerate_law import Chance, every_outcome
from tests.eval.closed_forms import (
    best_gamma,
    chain_accepted,
    operations,
    oracle,
    overlap,
    speed_up,
    tree_bound,
    tree_tokens,
)

# both ends, where formulas divide by zero, and rates between
RATES = (0.0, 0.1, 0.37, 0.5, 0.8, 0.95, 1.0)
Prefix = tuple[int, ...]


def draw_laws(count: int, vocab_size: int, seed: int) -> Tensor:
    """Return random distributions [count, V], one of whose tokens is impossible."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(count, vocab_size, generator=generator, dtype=torch.float64) ** 3
    # an impossible token is where implementations divide by zero
    weights[:, seed % vocab_size] = 0
    return weights / weights.sum(-1, keepdim=True)


def mean_of(outcomes: Iterable[tuple[int, float]]) -> float:
    """Return the mean over outcomes with their probabilities."""
    return sum(count * prob for count, prob in outcomes)


@pytest.mark.parametrize(
    ("alpha", "gamma", "growth", "speed"),
    [
        (0.6, 2, 1.53, 1.96),
        (0.7, 3, 1.58, 2.53),
        (0.8, 2, 1.23, 2.44),
        (0.8, 5, 1.63, 3.69),
        (0.9, 2, 1.11, 2.71),
        (0.9, 10, 1.60, 6.86),
    ],
)
def test_the_first_papers_table(alpha: float, gamma: int, growth: float, speed: float) -> None:
    """Growth in operations and speedup with a free draft are as Leviathan et al. print them."""
    assert round(operations(alpha, gamma, 0), 2) == growth
    assert round(speed_up(alpha, gamma, 0), 2) == speed


def test_figures_printed_elsewhere() -> None:
    """One source gives drafts a cost; the other prints tokens per step, cut off instead of rounded."""
    assert round(speed_up(0.8, 5, 0.05), 3) == 2.951
    assert round(speed_up(0.5, 3, 0.01), 3) == 1.820
    assert math.floor(1000 * expected_tokens(0.7, 3)) == 2532
    assert math.floor(1000 * expected_tokens(0.8, 4)) == 3361


def count_tokens(chance: Chance, rates: Sequence[float]) -> int:
    """Return the tokens of a chain: it ends at the first refusal, and the target always adds one."""
    for i, rate in enumerate(rates):
        if not chance.coin(rate):
            return i + 1
    return len(rates) + 1


def enumerate_tokens(rates: Sequence[float]) -> float:
    """Return the expected tokens of a chain over everything that its coins may say."""
    return mean_of(every_outcome(partial(count_tokens, rates=rates)))


@pytest.mark.parametrize("alpha", RATES)
def test_expected_tokens_are_those_of_every_outcome(alpha: float) -> None:
    """Both forms agree with an enumeration for chains of up to five tokens."""
    for gamma in range(6):
        expected = pytest.approx(enumerate_tokens([alpha] * gamma), abs=1e-12)
        assert expected_tokens(alpha, gamma) == expected
        assert tokens_of_rates([alpha] * gamma) == expected


def test_rates_by_position_need_not_be_equal() -> None:
    """Each position has its own rate, given that the one before was accepted."""
    rates = [0.9, 0.5, 0.7]
    assert tokens_of_rates(rates) == pytest.approx(enumerate_tokens(rates))


@pytest.mark.parametrize("lenience", [1.0, 0.5, 0.1])
def test_overlap_is_how_often_a_sampled_token_is_accepted(lenience: float) -> None:
    """Every token that the draft may sample is accepted with probability min(1, p / (l q))."""
    p = draw_laws(40, 5, 1)
    q = draw_laws(40, 5, 2)
    rate = 0.0
    for target, draft in zip(p.tolist(), q.tolist(), strict=True):
        for p_x, q_x in zip(target, draft, strict=True):
            if q_x > 0:
                rate += q_x * min(1.0, p_x / (lenience * q_x)) / 40

    assert overlap(p, q, lenience) == pytest.approx(rate)


def test_the_best_chain_is_found_and_pays_where_it_should() -> None:
    """Where alpha exceeds the cost, a chain of one already gains (1 + alpha) / (1 + cost)."""
    for alpha, cost in product(RATES, (0.0, 0.02, 0.2, 0.6)):
        speeds = []
        tokens = 0.0
        for gamma in range(65):
            tokens += alpha**gamma
            speeds.append(tokens / (gamma * cost + 1))

        gamma = best_gamma(alpha, cost)

        assert speeds[gamma] == pytest.approx(max(speeds))
        if alpha > cost:
            assert gamma > 0
            assert speeds[gamma] >= (1 + alpha) / (1 + cost) - 1e-12
        elif cost:
            assert gamma == 0


def test_the_oracle_drafts_as_long_as_it_is_right() -> None:
    """A perfect stop gives what an endless chain without cost would."""
    for alpha in RATES[:-1]:
        assert oracle(alpha) == pytest.approx(speed_up(alpha, 2000, 0))
    assert oracle(1.0) == math.inf


def verify_chain(chance: Chance, tree: DraftTree, probs: Tensor) -> int:
    """Return how many drafted tokens the decoder's own sampling rule accepts."""
    path, _ = sample_tree(tree, lambda node: probs[node], chance.coin, lambda _: 0)
    return len(path) - 1


def test_a_chains_expectation_is_that_of_the_decoders_rule() -> None:
    """Over all coins, verification accepts on average what the ratios of the drafted tokens say."""
    # [cycle, position, V]
    p = draw_laws(30, 5, 3).view(10, 3, 5)
    q = draw_laws(30, 5, 4).view(10, 3, 5)
    generator = torch.Generator().manual_seed(0)
    ratios = []
    accepted = []
    for target, draft in zip(p, q, strict=True):
        tokens = draft.multinomial(1, generator=generator)[:, 0].tolist()
        # a chain carries the distributions that it was sampled from; the root has none
        tree = DraftTree.chain([0, *tokens], torch.cat([torch.zeros(1, 5), draft]))
        # the last row is the choice after the whole chain, which is always made
        probs = torch.cat([target, target[:1]])
        accepted.append(mean_of(every_outcome(partial(verify_chain, tree=tree, probs=probs))))
        ratios.append([float(target[i, x] / draft[i, x]) for i, x in enumerate(tokens)])

    assert chain_accepted(ratios) == pytest.approx(fmean(accepted))


def next_probs(prefix: Prefix) -> list[float]:
    """Return a target's distribution over three tokens, another one after every prefix."""
    seed = 7 + sum((token + 1) * 5**i for i, token in enumerate(prefix))
    return draw_laws(1, 3, seed)[0].tolist()


def probability(text: Prefix) -> float:
    """Return the target's probability of a whole text."""
    return math.prod(next_probs(text[:i])[token] for i, token in enumerate(text))


def tokens_of_tree(prefixes: Iterable[Prefix]) -> float:
    """Return the closed form for a tree with these paths."""
    nodes = [(), *sorted(prefixes, key=len)]
    parents = [-1]
    probs = [1.0]
    for prefix in nodes[1:]:
        parents.append(nodes.index(prefix[:-1]))
        probs.append(next_probs(prefix[:-1])[prefix[-1]])
    return tree_tokens(parents, probs)


def test_a_trees_tokens_are_those_of_every_text_the_target_may_say() -> None:
    """The decoder's own walk over all texts of four tokens, weighted by their probability, gives the closed form."""
    # siblings, an inner node with two children, and a leaf on the third level
    prefixes = ((0,), (2,), (0, 1), (0, 2), (2, 2), (0, 1, 1))
    tree = DraftTree.from_paths(9, prefixes)
    outcomes = []
    for text in product(range(3), repeat=4):
        choices = [text[depth] for depth in tree.depths()]
        outcomes.append((len(walk(tree, choices)), probability(text)))

    assert tokens_of_tree(prefixes) == pytest.approx(mean_of(outcomes))


@pytest.mark.parametrize("nodes", [0, 1, 2, 4])
def test_no_tree_beats_the_bound_and_one_reaches_it(nodes: int) -> None:
    """The bound is the best of all trees with so many nodes on at most two levels."""
    prefixes = [*product(range(3), repeat=1), *product(range(3), repeat=2)]
    best = 0.0
    for paths in combinations(prefixes, nodes):
        # a tree holds the parent of each of its nodes
        if {path[:-1] for path in paths} <= {(), *paths}:
            best = max(best, tokens_of_tree(paths))
    assert tree_bound(next_probs, nodes, 2) == pytest.approx(best)


@pytest.mark.parametrize(("alpha", "gamma"), [(1.2, 1), (-0.1, 1), (0.5, -1)])
def test_what_is_no_rate_is_refused(alpha: float, gamma: int) -> None:
    """The error says that a probability was expected."""
    with pytest.raises(ValueError, match="expected a probability"):
        expected_tokens(alpha, gamma)
