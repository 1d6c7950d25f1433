"""The policy against a world whose probabilities and costs are known, and in the loop against the untouched model."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, cycle
from operator import mul
from typing import Any, NamedTuple

import pytest

from eagle import Budget, Sampling, Target, generate
from eagle.core.drafter import Committed
from eagle.core.trace import Cycle
from eagle.core.tree import DraftTree, chain_paths
from eagle.core.verify import Choose
from eagle.decoding.goodput import Goodput
from eagle.drafters import DRAFTERS, settings_of
from eagle.drafters.lookup.ngram import NgramDrafter
from eval.replay import answer, record_cycles, replay
from tests.families import PlantedTrees, build, own_answer, random_tokens

LEVELS, FIXED = 8, (0, 1, 2, 4, 8)
READ = [1 + 0.02 * levels for levels in range(LEVELS + 1)]
WALL = [1.0, *[1.8] * 8]
JUMP = [
    1.0,
    1.4,
    1.6,
    1.35,
    1.4,
    1.45,
    1.6,
    1.5,
    1.7,
]  # as kernels have it: two tokens cost far more than one


class World(NamedTuple):
    """Where all is known: what the drafter is worth, what it costs, and how many levels are best."""

    rates: list[float]  # how often each level is accepted where the one above was
    level: float  # seconds to draft one
    read: list[float]  # seconds, by levels
    best: int
    silent: float = 0.0  # how often the drafter has nothing to say

    @property
    def draft(self) -> list[float]:
        """Seconds, by levels."""
        return [self.level * levels for levels in range(LEVELS + 1)]

    def speed(self, levels: int) -> float:
        """Expected tokens over expected seconds."""
        tokens = 1 + sum(accumulate(self.rates[:levels], mul))
        read = self.silent * self.read[0] + (1 - self.silent) * self.read[levels]
        return (self.silent + (1 - self.silent) * tokens) / (self.draft[levels] + read)


WORLDS = {
    "none": World([0.1] * 8, 0.2, READ, 0),
    "one": World([0.6, *[0.1] * 7], 0.2, READ, 1),
    "two": World([0.8, 0.7, *[0.1] * 6], 0.2, READ, 2),
    "four": World([0.9, 0.9, 0.8, 0.8, *[0.1] * 4], 0.1, READ, 4),
    "eight": World([0.95] * 8, 0.05, READ, 8),
    "none, behind a step": World([0.2] * 8, 0.2, JUMP, 0),
    "four, behind a step": World([0.8, 0.8, 0.9, 0.9, *[0.1] * 4], 0.15, JUMP, 4),
    "one, behind a wall": World([0.99, *[0.05] * 7], 0.1, WALL, 1),
    "four, behind a wall": World([0.8, 0.8, 0.9, 0.9, *[0.05] * 4], 0.1, WALL, 4),
    "late": World([0.4, *[0.97] * 7], 0.05, READ, 8),
    "mostly silent": World(
        [0.9] * 8, 0, [1 + 0.1 * levels for levels in range(LEVELS + 1)], 8, silent=0.9
    ),
    "mostly silent and dear": World([0.9] * 8, 0.2, READ, 0, silent=0.9),
}


def policy_in(world: World, **options: Any) -> Goodput:
    """One that knows the costs."""
    return Goodput(world.draft, world.read, **options)


@lru_cache
def cycle_of(depth: int, accepted: int) -> Cycle:
    """One cycle of a chain."""
    return Cycle(DraftTree.chain(range(depth + 1)), tuple(range(1, accepted + 1)), accepted + 1, 0)


def simulate(
    policy: Any, world: World, tokens: int, left: Sequence[int] = (99,)
) -> tuple[float, list[int]]:
    """Seconds until there are so many tokens, and what was asked for; answers have `left` tokens to go, in turn."""
    dice, most = random.Random(0), cycle(left)
    seconds, asked = 0.0, []
    while tokens > 0:
        levels = policy.within(next(most)).depth
        offered = 0 if dice.random() < world.silent else levels
        accepted = next(
            (level for level in range(offered) if dice.random() >= world.rates[level]), offered
        )
        seconds += world.draft[levels] + world.read[offered]
        tokens -= accepted + 1
        asked.append(levels)
        if isinstance(policy, Goodput):
            policy.learn(cycle_of(offered, accepted))
    return seconds, asked


def best_fixed(world: World, tokens: int) -> float:
    """Seconds of the best fixed length."""
    return min(simulate(Budget.fixed(chain_paths(levels)), world, tokens)[0] for levels in FIXED)


@pytest.mark.quick("four", "eight")
@pytest.mark.parametrize("name", WORLDS)
def test_it_finds_the_best_number_of_levels(name: str) -> None:
    """After a start it asks for what the closed form says, and is never 3% slower than the best fixed length."""
    world = WORLDS[name]
    assert world.best == max(range(LEVELS + 1), key=world.speed)
    seconds, asked = simulate(policy_in(world), world, 3000)
    late = Counter(asked[300:])
    assert late.most_common(1)[0][0] == world.best and late[world.best] > 0.7 * late.total()
    assert seconds < 1.03 * best_fixed(world, 3000)


def test_the_closed_form_is_that_of_equal_rates() -> None:
    """The worlds' own arithmetic, against (1 - a^(g + 1)) / ((1 - a) (g c + 1)) of Leviathan et al. (2211.17192)."""
    for rate, cost, levels, expected in ((0.8, 0.05, 5, 2.951), (0.5, 0.01, 3, 1.820)):
        assert World([rate] * 8, cost, [1.0] * 9, 0).speed(levels) == pytest.approx(
            expected, abs=6e-4
        )


CHANGES = [
    ("none", "eight"),
    ("none, behind a step", "four, behind a step"),
    (
        "one, behind a wall",
        "none",
        "four, behind a wall",
    ),  # one level alone never pays, and trials are dear
    ("none", "late"),
    ("four", "none"),
]


def lived_through(policy: Goodput, worlds: Sequence[World], tokens: int) -> tuple[float, list[int]]:
    """Seconds in all over those expected of the best fixed lengths, and what was asked for at the end."""
    counts = [2000] * (len(worlds) - 1) + [tokens]
    runs = [simulate(policy, world, count) for world, count in zip(worlds, counts, strict=True)]
    expected = sum(
        count / max(map(world.speed, FIXED)) for world, count in zip(worlds, counts, strict=True)
    )
    return sum(seconds for seconds, _ in runs) / expected, runs[-1][1][-500:]


@pytest.mark.slow
@pytest.mark.parametrize("names", CHANGES, ids=", then ".join)
def test_it_comes_back(names: tuple[str, ...]) -> None:
    """A drafter that was stopped is asked again when it has become good, and one that was good is stopped."""
    last = WORLDS[names[-1]]
    worlds = [last._replace(rates=WORLDS[name].rates) for name in names]  # the costs stay
    ratio, asked = lived_through(policy_in(last), worlds, tokens=24000 if len(worlds) > 2 else 6000)
    assert Counter(asked).most_common(1)[0][0] == last.best
    assert ratio < 1.04


@pytest.mark.slow
def test_without_trying_it_would_not() -> None:
    """The test above can fail."""
    world = WORLDS["eight"]
    ratio, asked = lived_through(
        policy_in(world, share=0), [world._replace(rates=[0.01] * 8), world], 6000
    )
    assert ratio > 1.5 and not any(asked)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.002, 0.01, 0.05])
def test_trying_costs_no_more_than_its_share(share: float) -> None:
    """Where nothing is ever accepted, all that it loses after the first cycles is the share that it may."""
    world = WORLDS["none"]._replace(rates=[0.0] * LEVELS)
    policy = policy_in(world, share=share)
    start, _ = simulate(policy, world, 100)
    assert start < 1.3 * 100
    seconds, asked = simulate(policy, world, 5000)
    assert set(asked) == {0, 1}
    assert policy.explored <= share * policy.spent
    assert 0.8 * share < seconds / 5000 - 1 < share / (1 - share) + 0.002


@pytest.mark.slow
def test_the_end_of_an_answer_is_no_rejection() -> None:
    """Where nine cycles of ten are cut short, the averages are what they would be without."""
    world = WORLDS["eight"]
    policy = policy_in(world, memory=2000)
    _, asked = simulate(policy, world, 20000, left=(-1, 0, 1, 2, 1, 0, 2, 1, 0, 99))
    assert max(asked[:9]) <= 2 and set(asked[9::10]) == {8}
    assert [one.value for one in policy.accepted] == pytest.approx(world.rates, abs=0.025)
    assert [one.value for one in policy.proposed] == [1] * 8


GREEDY, WARM = Sampling(), Sampling(temperature=1.0, seed=5)
CHAIN, GROWN = Budget.fixed(chain_paths(4)), Budget(8, 4, 3)


@pytest.mark.quick("lookup T=0")
@pytest.mark.parametrize(
    ("name", "shape", "sampling"),
    [
        ("ngram", CHAIN, GREEDY),
        ("ngram", CHAIN, WARM),
        ("eagle1", CHAIN, GREEDY),
        ("eagle1", GROWN, WARM),
    ],
    ids=["lookup T=0", "lookup T=1", "head T=0", "head T=1"],
)
def test_the_output_is_the_untouched_models(name: str, shape: Budget, sampling: Sampling) -> None:
    """With a policy that changes its mind all the time, for lookup and for a head, and that serves two requests.

    A random target of 96 tokens says some of them again, so that lookup drafts at times.
    """
    target, prompt, noise = (
        Target(build("llama")),
        random_tokens(20, seed=1),
        Choose(sampling).noise,
    )
    drafter: Any = NgramDrafter()
    if name == "eagle1":
        method = DRAFTERS[name]
        drafter = method.for_target(settings_of({"kind": name}, "test"), target.config).bind(
            target.head
        )
    policy = Goodput([0.01 * level for level in range(5)], READ[:5], shape, share=1.0, memory=3)
    noised = noise and (lambda at: noise([at], target.vocab_size, target.device)[0])
    expected = own_answer(target.model, prompt, 16, None, noised)
    asked = set()
    for _ in range(2):
        trace = generate(
            target, drafter, prompt, budget=policy, sampling=sampling, max_new_tokens=16, stop=[]
        )
        assert trace.tokens == expected
        asked |= {one.depth for one in trace.cycles}
    assert len(asked) > 2


def test_replaying_learns_what_decoding_does(tiny_target: Target) -> None:
    """The cycles along known answers are those of decoding, request after request."""
    policies = [policy_in(WORLDS["none, behind a step"]) for _ in range(2)]
    for text in ("What does copy do?", "Say one two one two one two.", "What does copy do?"):
        told = answer(tiny_target, (), tiny_target.chat(text), limit=24, sampling=Sampling())
        rows = record_cycles(told, replay(tiny_target, NgramDrafter(), told, policies[0]))
        prompt = told.tokens[: told.prompt]
        trace = generate(tiny_target, NgramDrafter(), prompt, max_new_tokens=24, budget=policies[1])
        assert [(row["depth"], row["committed"]) for row in rows] == [
            (o.depth, o.committed) for o in trace.cycles
        ]
    assert (
        policies[0].forecast() == policies[1].forecast()
        and policies[0].spent == policies[1].spent > 0
    )


class Slow(PlantedTrees):
    """Takes two milliseconds for a level, by a clock of its own, and says at most three."""

    def __init__(self, text: list[int]) -> None:
        super().__init__(text)
        self.clock = 0.0

    def propose(self, update: Committed, budget: Budget) -> DraftTree:
        """A chain that was long in the making."""
        self.clock += 0.002 * budget.depth
        self.read += len(update.tokens)
        right = self.text[self.read + 1 :][: min(3, budget.depth)]
        return DraftTree.chain([update.root, *right])


@pytest.mark.slow
def test_costs_are_measured() -> None:
    """Drafting takes what it was made to take, and reading too, of trees that were never proposed as well."""
    target, prompt = Target(build("llama")), random_tokens(20, seed=3)
    told = own_answer(target.model, prompt, 40)
    slow = Slow(prompt + told)

    def tick(*seen: Any) -> None:
        slow.clock += 0.5 + 0.1 * seen[2].last_hidden_state.shape[1]

    target.model.base_model.register_forward_hook(tick)
    budget, clock = Budget.fixed(chain_paths(5)), lambda: slow.clock
    policy = Goodput.measure(target, slow, prompt, budget, max_new_tokens=40, clock=clock)
    assert policy.draft == pytest.approx([0.002 * level for level in range(6)])
    assert policy.read == pytest.approx([0.6 + 0.1 * level for level in range(6)])
    assert Goodput.measure(target, Slow(prompt + told), prompt, max_new_tokens=40).budget.depth == 8
    with pytest.raises(ValueError, match="raise max_new_tokens, which is 6"):
        Goodput.measure(target, Slow(prompt + told), prompt, max_new_tokens=6)


def test_what_makes_no_sense_is_refused() -> None:
    """Tables of another length, negative seconds, and settings out of range."""
    with pytest.raises(
        ValueError, match=r"draft holds 2 figures .* expected the seconds of 0 to 4 levels"
    ):
        Goodput([0, 1], [1, 1], Budget.fixed(chain_paths(4)))
    with pytest.raises(ValueError, match="from -1 on"):
        Goodput([0, 1], [1, -1])
    for wrong in ({"share": 2}, {"memory": 1}):
        with pytest.raises(ValueError, match="expected seconds to read the root"):
            Goodput([0, 1], [1, 1], **wrong)
