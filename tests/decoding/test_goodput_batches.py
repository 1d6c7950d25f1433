"""The policy for batches: in simulated worlds of known costs, against brute force."""

# R rows of a batch

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest

from eagle import Budget, Target
from eagle.core.trace import Cycle
from eagle.core.tree import DraftTree, chain_paths
from eagle.decoding.draft_depths import Batch, Forecast
from eagle.decoding.forward_costs import CostTable, CycleCosts
from eagle.decoding.goodput import Goodput
from eagle.drafters.lookup.ngram import NgramDrafter
from tests.families import build, random_tokens

LEVELS = 8
CHAIN = Budget.fixed(chain_paths(LEVELS))
# how often a drafter is right, at every level
GOOD = 0.9
FAIR = 0.7
BAD = 0.15


def read_seconds(count: int, levels: int) -> float:
    """Return the seconds of a forward that waits for memory up to 24 tokens, and for arithmetic beyond."""
    return 0.1 + max(1.0, count * (levels + 1) / 24)


def draft_seconds(depths: Sequence[int], price: float) -> float:
    """Return the seconds of a small head; each level costs `price` for every row that drafts it."""
    return 0.04 * max(depths) + price * sum(depths)


def make_costs(price: float = 0.001, max_rows: int = 32) -> CycleCosts:
    """Return the costs of this world as the policy is told them."""
    counts = range(1, max_rows + 1)
    depths = range(LEVELS + 1)
    draft = []
    read = []
    # a grid by batch size, context and depth, with one context
    for count in counts:
        draft.append((tuple(draft_seconds([depth] * count, price) for depth in depths),))
        read.append((tuple(read_seconds(count, depth) for depth in depths),))
    return CycleCosts(
        tuple(counts),
        (0,),
        tuple(draft),
        tuple(read),
    )


def make_cycle(
    context: int,
    depth: int,
    accepted: int,
    rows: int,
) -> Cycle:
    """Return one cycle of a chain."""
    path = tuple(range(1, accepted + 1))
    return Cycle(
        DraftTree.chain(range(depth + 1)),
        path,
        accepted + 1,
        context,
        rows=rows,
    )


def simulate(
    policy: Goodput, rates: dict[int, float], cycles: int, price: float = 0.001
) -> tuple[float, list[dict[int, int]]]:
    """Return the tokens per second of rows with these rates, and the levels of each cycle."""
    dice = random.Random(0)
    contexts = dict.fromkeys(rates, 10)
    tokens = 0
    seconds = 0.0
    history = []
    for _ in range(cycles):
        # no answer ends, so the rows stay
        budgets = policy.share(dict.fromkeys(rates, 99), contexts)
        depths = {row: budget.depth for row, budget in budgets.items()}
        seconds += draft_seconds([*depths.values()], price)
        seconds += read_seconds(len(rates), max(depths.values()))
        outcomes = {}
        for row, depth in depths.items():
            accepted = 0
            while accepted < depth and dice.random() < rates[row]:
                accepted += 1
            outcomes[row] = make_cycle(
                contexts[row],
                depth,
                accepted,
                len(rates),
            )
            contexts[row] += accepted + 1
            tokens += accepted + 1
        policy.learn_rows(outcomes)
        history.append(depths)
    return tokens / seconds, history


def expected_speed(
    rates: Sequence[float],
    depths: Sequence[int],
    price: float = 0.001,
) -> float:
    """Return tokens per second in closed form."""
    tokens = 0.0
    for rate, depth in zip(rates, depths, strict=True):
        # the target's own token, and every level that is reached
        tokens += sum(rate**level for level in range(depth + 1))
    seconds = draft_seconds(depths, price) + read_seconds(
        len(rates),
        max(depths),
    )
    return tokens / seconds


def best_speed(rates: Sequence[float], price: float = 0.001) -> float:
    """Return the speed of the best depth that all rows have, by trying all."""
    count = len(rates)
    return max(expected_speed(rates, [depth] * count, price) for depth in range(LEVELS + 1))


@pytest.mark.parametrize(
    ("rate", "count"),
    [
        (GOOD, 1),
        *(pytest.param(GOOD, count, marks=pytest.mark.slow) for count in (4, 16)),
        *(pytest.param(FAIR, count, marks=pytest.mark.slow) for count in (1, 8)),
        pytest.param(BAD, 2, marks=pytest.mark.slow),
    ],
)
def test_it_finds_the_best_depth_of_every_batch(rate: float, count: int) -> None:
    """Within 1% of the best by trying all, and 3% with start and exploration included."""
    policy = Goodput.of_costs(make_costs(), CHAIN)
    speed, history = simulate(
        policy,
        dict.fromkeys(range(count), rate),
        1200,
    )
    late: Counter[int] = Counter()
    for depths in history[200:]:
        late.update(depths.values())
    ((depth, _),) = late.most_common(1)
    best = best_speed([rate] * count)
    assert expected_speed([rate] * count, [depth] * count) > 0.99 * best
    assert speed > 0.97 * best


def test_the_best_depth_differs_between_batches() -> None:
    """What is best for one sequence is far too much for 32."""
    single = [expected_speed([GOOD], [depth]) for depth in range(LEVELS + 1)]
    assert single.index(max(single)) == LEVELS
    assert expected_speed([GOOD] * 32, [LEVELS] * 32) < 0.8 * best_speed([GOOD] * 32)


@pytest.mark.slow
def test_costs_of_single_sequences_are_seen() -> None:
    """A planted fault: with the costs of one sequence for every batch it drafts too much."""
    costs = make_costs()
    wrong = CycleCosts(
        (1, 16),
        (0,),
        costs.draft[:1] * 2,
        costs.read[:1] * 2,
    )
    speed, _ = simulate(
        Goodput.of_costs(wrong, CHAIN),
        dict.fromkeys(range(16), FAIR),
        600,
    )
    assert speed < 0.9 * best_speed([FAIR] * 16)


def random_batch(dice: random.Random, levels: int) -> Batch:
    """Return a batch of up to three rows, with costs as uneven as those of kernels."""
    count = dice.randint(1, 3)
    read = [1.0]
    for _ in range(levels):
        read.append(read[-1] + dice.choice((0.0, 0.02, 0.3, 1.0)))
    level_price = dice.uniform(0, 0.3)
    row_price = dice.uniform(0, 0.2)
    # by the number of rows that draft, from none on
    draft = [[0.0] * (levels + 1)]
    for drafting in range(1, count + 1):
        price = level_price + row_price * drafting
        draft.append([level * price for level in range(levels + 1)])
    forecasts = []
    for _ in range(count):
        rate = dice.random()
        accepted = [rate**level for level in range(1, levels + 1)]
        proposed = [dice.choice((1.0, 1.0, 0.5)) for _ in range(levels)]
        forecasts.append(Forecast(accepted, proposed))
    return Batch(forecasts, CostTable(draft, read))


def test_depths_of_each_row_are_the_best_of_all() -> None:
    """With rows of different worth, uneven costs and limits, nothing is lost against trying all depths of all rows."""
    dice = random.Random(1)
    levels = 4
    mixed = 0
    ratios = []
    for _ in range(300):
        batch = random_batch(dice, levels)
        limits = [dice.choice((levels, levels, 1)) for _ in batch.forecasts]
        chosen = batch.best_levels(limits, levels)
        every = product(*(range(limit + 1) for limit in limits))
        ratios.append(batch.speed(chosen) / max(map(batch.speed, every)))
        mixed += len(set(chosen)) > 1
    assert mixed > 30
    assert min(ratios) > 0.99
    optimal = sum(ratio > 1 - 1e-9 for ratio in ratios)
    assert optimal > 0.97 * len(ratios)


def test_forecast_speeds_are_those_of_the_closed_form() -> None:
    """What is maximised are the tokens per second of this file's own arithmetic."""
    rates = [GOOD, FAIR, BAD]
    forecasts = []
    for rate in rates:
        accepted = [rate**level for level in range(1, LEVELS + 1)]
        forecasts.append(Forecast(accepted, [1.0] * LEVELS))
    batch = Batch(forecasts, make_costs().at(3, 0))
    for depths in product((0, 1, 3, 8), repeat=3):
        assert batch.speed(depths) == pytest.approx(expected_speed(rates, depths))


@pytest.mark.slow
def test_batches_that_grow_and_shrink() -> None:
    """Three after another, with what was learned before; none is 3% slower than its best."""
    policy = Goodput.of_costs(make_costs(), CHAIN)
    for number, (count, rate) in enumerate([(16, GOOD), (4, BAD), (2, GOOD)]):
        rates = dict.fromkeys(
            range(100 * number, 100 * number + count),
            rate,
        )
        speed, _ = simulate(policy, rates, 800)
        assert speed > 0.97 * best_speed([rate] * count)
        # rows that ended are forgotten
        assert policy.acceptance.ends.keys() == rates.keys()


def test_another_sequence_of_the_same_row_is_another_one() -> None:
    """What is known of a row is forgotten when it continues at another position."""
    policy = Goodput.of_costs(make_costs(), CHAIN)
    simulate(policy, {0: GOOD, 1: BAD}, 200)
    # the position at which each row must go on
    ends = dict(policy.acceptance.ends)
    policy.share({0: 9, 1: 9}, ends)
    assert policy.acceptance.rows.keys() == {0, 1}
    policy.share(
        {0: 9, 1: 9},
        {**ends, 1: 10},
    )
    assert policy.acceptance.rows.keys() == {0}


def test_a_batch_of_unknown_costs_is_refused() -> None:
    """Costs of one sequence say nothing of four."""
    policy = Goodput([0.0, 0.1], [1.0, 1.1])
    rows = dict.fromkeys(range(4), 1)
    with pytest.raises(ValueError, match="what 1 sequence at a time costs"):
        policy.share(rows, rows)


def test_costs_between_and_beyond_what_was_measured() -> None:
    """Linear in batch size and context; smaller than the smallest are as that, and no draft costs nothing."""

    def grid(first: float, second: float) -> Any:
        # seconds of zero and one level, proportional to batch size and context
        by_size = []
        for count in (2, 4):
            products = [count * context for context in (100, 300)]
            by_size.append(tuple((first * size, second * size) for size in products))
        return tuple(by_size)

    costs = CycleCosts(
        (2, 4),
        (100, 300),
        grid(0.5, 1.0),
        grid(1.0, 2.0),
    )
    assert costs.at(3, 192).read == pytest.approx([3 * 192, 6 * 192])
    assert costs.at(6, 320).read == pytest.approx([6 * 320, 12 * 320])
    assert costs.at(1, 128).read == pytest.approx([2 * 128, 4 * 128])
    drafts = costs.at(4, 256).draft
    assert drafts[0] == [0.0, 0.0]
    assert drafts[4] == pytest.approx([512, 1024])


def test_costs_of_batches_are_measured() -> None:
    """For several batch sizes and contexts, in real decoding."""
    target = Target(build("llama"))
    prompts = [random_tokens(9 + index, seed=index) for index in range(3)]
    budget = Budget.fixed(chain_paths(2))
    measure = partial(Goodput.measure, target, NgramDrafter(), prompts, budget)
    policy = measure(
        batch_sizes=(1, 2, 4),
        contexts=(9, 69),
        max_new_tokens=60,
    )
    assert policy.costs.batch_sizes == (1, 2, 4)
    assert policy.costs.contexts == (9, 69)
    seconds = [min(row) for by_context in policy.costs.read for row in by_context]
    assert min(seconds) > 0
    assert len(policy.draft) == 3
    with pytest.raises(ValueError, match="raise max_new_tokens, which is 2"):
        measure(batch_sizes=(2,), max_new_tokens=2)
