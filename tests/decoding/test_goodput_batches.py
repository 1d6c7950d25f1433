"""The policy for several texts at once, against brute force in worlds whose probabilities and costs are known."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import pytest

from eagle import Budget, Sampling, Target, generate
from eagle.core.trace import Cycle
from eagle.core.tree import DraftTree, chain_paths
from eagle.decoding.draft_depths import Batch, Forecast
from eagle.decoding.forward_costs import CostTable, CycleCosts
from eagle.decoding.goodput import Goodput
from eagle.drafters.lookup.ngram import NgramDrafter
from tests.families import build, own_answer, random_tokens

LEVELS = 8
CHAIN = Budget.fixed(chain_paths(LEVELS))
SIZES = (1, 2, 4, 8, 16)
GOOD, FAIR, BAD = [0.9] * LEVELS, [0.7] * LEVELS, [0.15] * LEVELS


def read_seconds(texts: int, levels: int) -> float:
    """A forward that waits for memory up to 24 tokens, and for arithmetic beyond."""
    return 0.1 + max(1.0, texts * (levels + 1) / 24)


def draft_seconds(texts: int, levels: int, each: float = 0.001) -> float:
    """A small head, which takes so long for each further text."""
    return levels * (0.04 + each * texts)


def costs_with(each: float) -> CycleCosts:
    """All costs of this world."""
    texts, levels = range(1, 33), range(LEVELS + 1)
    draft = tuple(
        (tuple(draft_seconds(count, level, each) for level in levels),) for count in texts
    )
    read = tuple((tuple(read_seconds(count, level) for level in levels),) for count in texts)
    return CycleCosts(tuple(texts), (0,), draft, read)


COSTS = costs_with(0.001)


def accept(rates: Sequence[float], offered: int, dice: random.Random) -> int:
    """How many of the offered levels are accepted."""
    return next((level for level in range(offered) if dice.random() >= rates[level]), offered)


def chain_cycle(context: int, depth: int, accepted: int, rows: int) -> Cycle:
    """One cycle of a chain."""
    tree = DraftTree.chain(range(depth + 1))
    return Cycle(tree, tuple(range(1, accepted + 1)), accepted + 1, context, rows=rows)


def simulate(
    policy: Any, rows: dict[int, list[float]], cycles: int, each: float = 0.001
) -> tuple[float, list[dict[int, int]]]:
    """Tokens per second of cycles of these texts, and the levels of each."""
    dice, contexts, tokens, seconds, asked = random.Random(0), dict.fromkeys(rows, 10), 0, 0.0, []
    for _ in range(cycles):
        if isinstance(policy, Goodput):
            levels = {
                row: budget.depth
                for row, budget in policy.share(dict.fromkeys(rows, 99), contexts).items()
            }
        else:
            levels = dict.fromkeys(rows, policy)
        outcome = {row: accept(rows[row], levels[row], dice) for row in rows}
        drafting = sum(
            draft_seconds(count, level, each) - draft_seconds(count, level - 1, each)
            for level in range(1, max(levels.values()) + 1)
            if (count := sum(depth >= level for depth in levels.values()))
        )
        seconds += drafting + read_seconds(len(rows), max(levels.values()))
        done = {
            row: chain_cycle(contexts[row], levels[row], outcome[row], len(rows)) for row in rows
        }
        for row, cycle in done.items():
            contexts[row] += cycle.committed
            tokens += cycle.committed
        if isinstance(policy, Goodput):
            policy.learn_rows(done)
        asked.append(levels)
    return tokens / seconds, asked


def expected_speed(
    rows: Sequence[Sequence[float]], levels: Sequence[int], each: float = 0.001
) -> float:
    """Tokens per second in closed form, of chains that are always proposed."""
    tokens = 0.0
    for rates, depth in zip(rows, levels, strict=True):
        chance = 1.0
        for level in range(depth + 1):
            tokens += chance
            chance *= rates[level] if level < depth else 0
    drafting, before = 0.0, 0
    for depth in sorted(set(levels) - {0}):
        count = sum(other >= depth for other in levels)
        drafting += draft_seconds(count, depth, each) - draft_seconds(count, before, each)
        before = depth
    return tokens / (drafting + read_seconds(len(rows), max(levels)))


def best_length(rates: Sequence[float], texts: int) -> int:
    """The best of all fixed lengths, by trying all of them."""
    return max(
        range(LEVELS + 1), key=lambda level: expected_speed([rates] * texts, [level] * texts)
    )


@pytest.mark.quick("good-1")
@pytest.mark.parametrize(
    "texts", [pytest.param(n, marks=[pytest.mark.slow] * (n > 4)) for n in SIZES]
)
@pytest.mark.parametrize("rates", [GOOD, FAIR, BAD], ids=["good", "fair", "bad"])
def test_it_finds_the_best_length_of_every_batch(rates: list[float], texts: int) -> None:
    """It asks for what is best by trying all lengths, and is within 3% of it, start and exploration included."""
    best = best_length(rates, texts)
    speed, asked = simulate(
        Goodput.of_costs(COSTS, CHAIN), dict.fromkeys(range(texts), rates), 1200
    )
    common = Counter(depth for levels in asked[200:] for depth in levels.values()).most_common(1)[
        0
    ][0]
    ideal = expected_speed([rates] * texts, [best] * texts)
    near = expected_speed([rates] * texts, [common] * texts)
    assert near > 0.99 * ideal and speed > 0.97 * ideal


def test_the_best_length_differs_between_batches() -> None:
    """The test above is about something: a length that is best for one batch is far from it for another."""
    lengths = [best_length(GOOD, texts) for texts in (*SIZES, 32)]
    assert lengths[0] == 8 and lengths == sorted(lengths, reverse=True) and lengths[-1] <= 1
    stuck = expected_speed([GOOD] * 32, [8] * 32) / expected_speed([GOOD] * 32, [lengths[-1]] * 32)
    assert stuck < 0.8


@pytest.mark.slow
def test_a_policy_that_takes_a_batch_for_one_text_is_seen() -> None:
    """A planted fault: costs of one text for every batch. It drafts far too much, and the 3% are not kept."""
    one = tuple(grid[:1] * len(SIZES) for grid in (COSTS.draft, COSTS.read))
    wrong = CycleCosts(SIZES, (0,), *one)
    speed, _ = simulate(Goodput.of_costs(wrong, CHAIN), dict.fromkeys(range(16), FAIR), 600)
    assert speed < 0.9 * max(
        expected_speed([FAIR] * 16, [level] * 16) for level in range(LEVELS + 1)
    )


def random_batches(levels: int, count: int) -> Iterator[tuple[Batch, list[int]]]:
    """Texts and costs at random, costs as uneven as kernels have them, and the levels that each text has left."""
    dice = random.Random(1)
    for number in range(count):
        texts = dice.randint(1, 3)
        read = [1.0]
        for _ in range(levels):
            read.append(read[-1] + dice.choice((0.0, 0.02, 0.3, 1.0)))
        price, more = dice.uniform(0, 0.3), dice.uniform(0, 0.2)
        draft = [
            [level * (price + more * texts) if texts else 0.0 for level in range(levels + 1)]
            for texts in range(4)
        ]
        forecasts = []
        for _ in range(texts):
            level, reached = dice.random(), [1.0]
            for _ in range(levels):
                reached.append(reached[-1] * level)
            silence = [dice.choice((1.0, 0.5)) if number % 2 else 1.0] * levels
            forecasts.append(Forecast(reached[1:], silence))
        yield (
            Batch(forecasts, CostTable(draft[: texts + 1], read)),
            [dice.choice((levels, levels, 1)) for _ in range(texts)],
        )


def test_levels_of_each_text_are_the_best_of_all_assignments() -> None:
    """Texts of different worth, uneven costs, limits: nothing is lost against trying all levels of all texts."""
    pruned, ratios = 0, []
    for batch, limits in random_batches(4, 300):
        chosen = batch.best_levels(limits, 4)
        every = product(*(range(limit + 1) for limit in limits))
        ratios.append(batch.speed(chosen) / max(map(batch.speed, every)))
        pruned += len(set(chosen)) > 1
    assert pruned > 30
    assert min(ratios) > 0.99 and sum(ratio > 1 - 1e-9 for ratio in ratios) > 0.97 * len(ratios)


def test_speeds_of_assignments_are_those_of_the_closed_form() -> None:
    """The seconds and tokens that are maximised, against this file's own arithmetic."""
    rates = [GOOD, FAIR, BAD]
    reached = [[rate[0] ** (level + 1) for level in range(LEVELS)] for rate in rates]
    batch = Batch([Forecast(chances, [1.0] * LEVELS) for chances in reached], COSTS.at(3, 0))
    for levels in product((0, 1, 3, 8), repeat=3):
        assert batch.speed(levels) == pytest.approx(expected_speed(rates, levels))


@pytest.mark.slow
def test_good_texts_draft_more_than_bad_ones() -> None:
    """Where a draft of one more text has its price, each gets the levels that it is worth by its own acceptance."""
    rows = {row: GOOD if row < 4 else BAD for row in range(8)}
    speed, asked = simulate(Goodput.of_costs(costs_with(0.04), CHAIN), rows, 800, each=0.04)
    late = asked[200:]
    good, bad = (
        sum(sum(levels[row] for row in group) for levels in late)
        for group in (range(4), range(4, 8))
    )
    assert good > 5 * bad
    common = max(
        expected_speed(list(rows.values()), [level] * 8, 0.04) for level in range(LEVELS + 1)
    )
    assert speed > 1.1 * common


@pytest.mark.slow
def test_texts_that_come_and_go() -> None:
    """Three batches after one another, larger and smaller, with what was learned before; none is 3% off."""
    policy = Goodput.of_costs(COSTS, CHAIN)
    for texts, rates in ((1, FAIR), (16, GOOD), (4, BAD), (2, GOOD)):
        rows = dict.fromkeys(range(100 * texts, 100 * texts + texts), rates)
        speed, _ = simulate(policy, rows, 800)
        assert speed > 0.97 * expected_speed([rates] * texts, [best_length(rates, texts)] * texts)
        assert policy.acceptance.ends.keys() == rows.keys()


def test_another_text_of_the_same_number_is_another_text() -> None:
    """What a text was like is forgotten when its number stands for a new one, at another place."""
    policy = Goodput.of_costs(COSTS, CHAIN)
    simulate(policy, {0: GOOD, 1: BAD}, 200)
    ends = dict(policy.acceptance.ends)
    policy.share({0: 9, 1: 9}, ends)
    assert policy.acceptance.rows.keys() == {0, 1}
    policy.share({0: 9, 1: 9}, {**ends, 1: 10})
    assert policy.acceptance.rows.keys() == {0}


def test_a_batch_of_which_nothing_is_known_is_refused() -> None:
    """Costs of one text say nothing of four side by side."""
    policy = Goodput([0.0, 0.1], [1.0, 1.1])
    with pytest.raises(
        ValueError, match=r"what 1 text at a time costs, got 4 side by side: measure more"
    ):
        policy.share(dict.fromkeys(range(4), 1), dict.fromkeys(range(4), 1))


def test_costs_between_and_beyond_what_was_measured() -> None:
    """Linear in texts and in context; drafts of no text cost nothing."""
    read = tuple(tuple((float(b * c), 2.0 * b * c) for c in (100, 300)) for b in (2, 4))
    draft = tuple(tuple((0.5 * b * c, 1.0 * b * c) for c in (100, 300)) for b in (2, 4))
    costs = CycleCosts((2, 4), (100, 300), draft, read)
    assert costs.at(3, 192).read == pytest.approx([3 * 192, 6 * 192])
    assert costs.at(6, 320).read == pytest.approx([6 * 320, 12 * 320])
    assert costs.at(1, 128).read == pytest.approx(
        [2 * 128, 4 * 128]
    )  # before the first: as the first
    drafts = costs.at(4, 256).draft
    assert drafts[0] == [0.0, 0.0] and drafts[4] == pytest.approx([512, 1024])


def test_measured_costs_are_those_of_whole_cycles() -> None:
    """Of several batch sizes and contexts, of real decoding; a batch costs more than one text, a long text too."""
    target = Target(build("llama"))
    prompts = [random_tokens(9 + number, seed=number) for number in range(3)]
    budget = Budget.fixed(chain_paths(2))
    policy = Goodput.measure(
        target, NgramDrafter(), prompts, budget, (1, 2, 4), (9, 69), max_new_tokens=60
    )
    assert policy.costs.batch_sizes == (1, 2, 4) and policy.costs.contexts == (9, 69)
    assert min(min(row) for grid in policy.costs.read for row in grid) > 0
    assert len(policy.draft) == 3
    with pytest.raises(ValueError, match="raise max_new_tokens, which is 2"):
        Goodput.measure(target, NgramDrafter(), prompts, budget, (2,), max_new_tokens=2)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_batches_under_the_policy_are_the_untouched_models(temperature: float) -> None:
    """Texts that change their lengths all the time, among others that come and go: each is what it is alone."""
    target = Target(build("llama"))
    prompts = [random_tokens(5 + 3 * number, seed=number) for number in range(5)]
    costs = CycleCosts((1, 2, 3), (0,), *(tuple(grid[:3]) for grid in (COSTS.draft, COSTS.read)))
    policy = Goodput.of_costs(costs, CHAIN, share=1.0, memory=3)
    limits = [8, 20, 14, 30, 11]
    samplings = [Sampling(temperature, seed=3, request=number) for number in range(5)]
    traces = generate(
        target,
        NgramDrafter(),
        prompts,
        budget=policy,
        sampling=samplings,
        max_new_tokens=limits,
        stop=[],
        batch_size=3,
    )
    depths = {cycle.depth for trace in traces for cycle in trace.cycles}
    for prompt, sampling, limit, trace in zip(prompts, samplings, limits, traces, strict=True):
        alone = generate(
            target, NgramDrafter(), prompt, sampling=sampling, max_new_tokens=limit, stop=[]
        )
        assert trace.tokens == alone.tokens
        if temperature == 0:
            assert trace.tokens == own_answer(target.model, prompt, limit)
    assert len(depths) > 2
