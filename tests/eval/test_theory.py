"""The closed forms against the figures that their papers print, and against enumerations of all that may happen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate, combinations, product
from operator import mul

import pytest
import torch

from eagle import Budget, Target, generate
from eagle.core.tree import DraftTree, TargetOutput, chain_paths
from eagle.core.verify import Sampling, sample_tree, walk
from eagle.drafters.recurrent.eagle1 import Eagle1
from eagle.target.state import TargetState
from eval.page.page_theory import expected_tokens, tokens_of_rates
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
from tests.families import build, random_tokens

RATES = (0.0, 0.1, 0.37, 0.5, 0.8, 0.95, 1.0)


def laws(count: int, vocab_size: int, seed: int) -> torch.Tensor:
    """Random laws, some of whose tokens are impossible."""
    weights = (
        torch.rand(
            count, vocab_size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        ** 3
    )
    weights[:, seed % vocab_size] = 0
    return weights / weights.sum(-1, keepdim=True)


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
    """Growth in operations and speed-up with a draft that costs nothing, as Leviathan et al. print them."""
    assert round(operations(alpha, gamma, 0), 2) == growth
    assert round(speed_up(alpha, gamma, 0), 2) == speed


def test_figures_printed_elsewhere() -> None:
    """With a draft that costs something; and a well-known table of tokens per step, which cuts instead of rounding."""
    assert round(speed_up(0.8, 5, 0.05), 3) == 2.951 and round(speed_up(0.5, 3, 0.01), 3) == 1.820
    assert math.floor(1000 * expected_tokens(0.7, 3)) == 2532
    assert math.floor(1000 * expected_tokens(0.8, 4)) == 3361


@pytest.mark.parametrize("alpha", RATES)
def test_expected_tokens_are_those_of_every_run_of_luck(alpha: float) -> None:
    """A draft of gamma tokens ends at the first that is refused, and one more token is always the target's."""
    for gamma in range(6):
        outcomes = every_outcome(lambda chance, gamma=gamma: tokens(chance, [alpha] * gamma))
        expected = sum(count * odds for count, odds in outcomes)
        assert expected_tokens(alpha, gamma) == pytest.approx(expected, abs=1e-12)
        assert tokens_of_rates([alpha] * gamma) == pytest.approx(expected, abs=1e-12)


def tokens(chance: Chance, rates: list[float]) -> int:
    """How many tokens a chain brings whose positions are kept with these odds."""
    for place, rate in enumerate(rates):
        if not chance.coin(rate):
            return place + 1
    return len(rates) + 1


def test_rates_by_position_need_not_be_equal() -> None:
    """Each position with its own rate, given the one before."""
    rates = [0.9, 0.5, 0.7]
    expected = sum(
        count * odds for count, odds in every_outcome(lambda chance: tokens(chance, rates))
    )
    assert tokens_of_rates(rates) == pytest.approx(expected)


@pytest.mark.parametrize("lenience", [1.0, 0.5, 0.1])
def test_overlap_is_how_often_a_drawn_token_is_accepted(lenience: float) -> None:
    """Every token that the draft may draw, accepted with odds min(1, p / (l q)), in the mean over contexts."""
    p, q = laws(40, 5, 1), laws(40, 5, 2)
    odds = [
        sum(
            q[c, x] * min(1.0, float(p[c, x] / (lenience * q[c, x])))
            for x in range(5)
            if q[c, x] > 0
        )
        for c in range(40)
    ]
    assert overlap(p, q, lenience) == pytest.approx(float(sum(odds) / 40))
    assert overlap(p, p) == pytest.approx(1)


def test_the_best_chain_is_found_and_pays_where_it_should() -> None:
    """By trying all; where alpha exceeds the cost a chain of one already gains (1 + alpha) / (1 + cost)."""
    for alpha, cost in product(RATES, (0.0, 0.02, 0.2, 0.6)):
        every = [
            sum(alpha**i for i in range(gamma + 1)) / (gamma * cost + 1) for gamma in range(65)
        ]
        gamma = best_gamma(alpha, cost)
        assert every[gamma] == pytest.approx(max(every))
        if alpha > cost:
            assert gamma > 0 and max(every) >= (1 + alpha) / (1 + cost) - 1e-12
        elif cost:
            assert gamma == 0


@pytest.mark.parametrize("alpha", RATES[:-1])
def test_the_oracle_drafts_as_long_as_its_luck_lasts(alpha: float) -> None:
    """It is what an endless chain that costs nothing would bring."""
    assert oracle(alpha) == pytest.approx(speed_up(alpha, 2000, 0))
    assert oracle(1.0) == math.inf


def test_a_chains_expectation_is_that_of_the_shipped_rule_over_all_coins() -> None:
    """For drafts that are given, sampling's verification accepts on average what the ratios say."""
    p, q = laws(30, 5, 3).view(10, 3, 5), laws(30, 5, 4).view(10, 3, 5)
    drafts = torch.stack(
        [
            q[cycle].multinomial(1, generator=torch.Generator().manual_seed(cycle))
            for cycle in range(10)
        ]
    )
    ratios, accepted = [], 0.0
    for target, draft, drawn in zip(p, q, drafts[..., 0], strict=True):
        tree = DraftTree.chain([0, *drawn.tolist()], torch.cat([torch.zeros(1, 5), draft]))
        rows = torch.cat([target, target[:1]])

        def run(chance: Chance, tree: DraftTree = tree, rows: torch.Tensor = rows) -> int:
            return len(sample_tree(tree, lambda node: rows[node], chance.coin, lambda _: 0)[0]) - 1

        accepted += sum(count * odds for count, odds in every_outcome(run)) / 10
        ratios.append([float(target[i, x] / draft[i, x]) for i, x in enumerate(drawn)])
    assert chain_accepted(ratios) == pytest.approx(accepted)


def target_law(prefix: tuple[int, ...]) -> list[float]:
    """A target's law of three tokens after every text."""
    return laws(1, 3, 7 + sum((token + 1) * 5**place for place, token in enumerate(prefix)))[
        0
    ].tolist()


def parts(prefixes: tuple[tuple[int, ...], ...]) -> tuple[list[int], list[float]]:
    """The parents of a tree's nodes, and the target's probability of each after its parent."""
    order = [(), *sorted(prefixes, key=len)]
    probabilities = [1.0, *(target_law(prefix[:-1])[prefix[-1]] for prefix in order[1:])]
    return [-1, *(order.index(prefix[:-1]) for prefix in order[1:])], probabilities


def test_a_trees_tokens_are_those_of_every_text_the_target_may_say() -> None:
    """The shipped walk over all texts of four tokens, each with its probability."""
    prefixes = ((0,), (2,), (0, 1), (0, 2), (2, 2), (0, 1, 1))
    tree, expected = DraftTree.from_paths(9, prefixes), 0.0
    for text in product(range(3), repeat=4):
        odds = list(accumulate((target_law(text[:place])[text[place]] for place in range(4)), mul))[
            -1
        ]
        expected += odds * len(walk(tree, [text[depth] for depth in tree.depths()]))
    assert tree_tokens(*parts(prefixes)) == pytest.approx(expected)


@pytest.mark.parametrize("nodes", [0, 1, 2, 4])
def test_no_tree_beats_the_bound_and_one_reaches_it(nodes: int) -> None:
    """All trees of so many nodes on at most two levels."""
    every = [prefix for depth in (1, 2) for prefix in product(range(3), repeat=depth)]
    closed = [tree for tree in combinations(every, nodes) if {p[:-1] for p in tree} <= {(), *tree}]
    best = max(tree_tokens(*parts(tree)) for tree in closed)
    assert tree_bound(target_law, nodes, 2) == pytest.approx(best)


@pytest.mark.parametrize(("alpha", "gamma"), [(1.2, 1), (-0.1, 1), (0.5, -1)])
def test_what_is_no_rate_is_refused(alpha: float, gamma: int) -> None:
    """With a word on what was expected."""
    with pytest.raises(ValueError, match="expected a probability"):
        expected_tokens(alpha, gamma)


@pytest.mark.slow
def test_a_sampled_chain_keeps_what_its_tokens_let_one_expect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop's mean over its coins lies in the 95% interval around the exact expectation, given what was drafted."""
    target, read, outputs = Target(build("llama")), TargetState.read, list[TargetOutput]()

    def record(state: TargetState, trees: Mapping[int, DraftTree]) -> dict[int, TargetOutput]:
        new = read(state, trees)
        outputs.extend(new.values())
        return new

    torch.manual_seed(0)
    head = Eagle1.for_target(Eagle1.Settings(), target.config).bind(target.head)
    monkeypatch.setattr(TargetState, "read", record)
    accepted, ratios = [], []
    for request in range(12):
        sampling, budget = (
            Sampling(temperature=1.0, request=request),
            Budget.fixed(chain_paths(4), "sampled"),
        )
        options = {"sampling": sampling, "budget": budget, "max_new_tokens": 48, "stop": []}
        trace = generate(target, head, random_tokens(12, seed=request), **options)
        accepted += [cycle.accepted for cycle in trace.cycles if cycle.nodes]
    for output in outputs:
        if output.tree.draft_probs is None:  # at the end of an answer nothing is drafted
            continue
        laws = zip(
            output.logits.softmax(-1),
            output.tree.draft_probs[1:],
            output.tree.tokens[1:].tolist(),
            strict=False,
        )
        ratios.append([float(own[token] / drawn[token]) for own, drawn, token in laws])
    reached = [list(accumulate((min(1.0, ratio) for ratio in cycle), mul)) for cycle in ratios]
    square = [
        sum((2 * place + 1) * chance for place, chance in enumerate(cycle)) for cycle in reached
    ]
    spread = sum(
        second - sum(cycle) ** 2 for second, cycle in zip(square, reached, strict=True)
    ) ** 0.5 / len(ratios)
    assert len(accepted) == len(ratios) > 100 and 0.3 < chain_accepted(ratios) < 3.7
    assert abs(sum(accepted) / len(accepted) - chain_accepted(ratios)) < 1.96 * spread < 0.25
