"""The policy for one sequence: in simulated worlds of known costs, and in decoding against the untouched model."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import accumulate, cycle
from operator import mul
from typing import Any, NamedTuple

import pytest
from torch import Tensor

from eagle import Budget, Sampling, Target, generate
from eagle.core.trace import Cycle
from eagle.core.tree import DraftTree, chain_paths
from eagle.core.verify import Choose
from eagle.decoding.goodput import Goodput
from eagle.drafters.lookup.ngram import NgramDrafter
from eval.replay import answer, record_cycles, replay
from tests.batches import new_head
from tests.families import build, own_answer, random_tokens

LEVELS = 8
# seconds of a forward of the target, by drafted levels
READ = [1 + 0.02 * level for level in range(LEVELS + 1)]
WALL = [1.0, *[1.8] * LEVELS]
# as kernels have it: two tokens cost much more than one, and six more than seven
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
]


class World(NamedTuple):
    """A drafter and a target of known quality and costs."""

    rates: list[float]  # how often each level is accepted where the one above was
    level: float  # seconds to draft one
    read: list[float]  # seconds of the target, by levels
    best: int  # the number of levels with the highest speed
    silent: float = 0.0  # how often the drafter has no draft

    @property
    def draft(self) -> list[float]:
        """Seconds of a draft, by levels."""
        return [self.level * level for level in range(LEVELS + 1)]

    def speed(self, levels: int) -> float:
        """Return expected tokens over expected seconds, in closed form."""
        tokens = 1 + sum(accumulate(self.rates[:levels], mul))
        tokens = self.silent + (1 - self.silent) * tokens
        read = self.silent * self.read[0] + (1 - self.silent) * self.read[levels]
        return tokens / (self.draft[levels] + read)

    def make_policy(self, **options: Any) -> Goodput:
        """Return a policy that knows the costs."""
        return Goodput(self.draft, self.read, **options)


WORLDS = {
    "none": World([0.1] * 8, 0.2, READ, best=0),
    "one": World(
        [0.6, *[0.1] * 7],
        0.2,
        READ,
        best=1,
    ),
    "four": World(
        [0.9, 0.9, 0.8, 0.8, *[0.1] * 4],
        0.1,
        READ,
        best=4,
    ),
    "eight": World([0.95] * 8, 0.05, READ, best=8),
    "four, uneven costs": World(
        [0.8, 0.8, 0.9, 0.9, *[0.1] * 4],
        0.15,
        JUMP,
        best=4,
    ),
    # one level alone never pays
    "four, after a wall": World(
        [0.8, 0.8, 0.9, 0.9, *[0.05] * 4],
        0.1,
        WALL,
        best=4,
    ),
    "late": World(
        [0.4, *[0.97] * 7],
        0.05,
        READ,
        best=8,
    ),
    "mostly silent": World(
        [0.9] * 8,
        0,
        [1 + 0.1 * n for n in range(9)],
        best=8,
        silent=0.9,
    ),
}


@lru_cache
def make_cycle(depth: int, accepted: int) -> Cycle:
    """Return one cycle of a chain."""
    path = tuple(range(1, accepted + 1))
    return Cycle(
        DraftTree.chain(range(depth + 1)),
        path,
        accepted + 1,
        0,
    )


def simulate(
    policy: Any, world: World, tokens: int, left: Sequence[int] = (99,)
) -> tuple[float, list[int]]:
    """Return the seconds of so many tokens, and the levels of each cycle; answers have `left` tokens to go, in turn."""
    dice = random.Random(0)
    limits = cycle(left)
    seconds = 0.0
    depths = []
    while tokens > 0:
        depth = policy.within(next(limits)).depth
        offered = 0 if dice.random() < world.silent else depth
        accepted = 0
        while accepted < offered and dice.random() < world.rates[accepted]:
            accepted += 1
        # a silent drafter costs its time too
        seconds += world.draft[depth] + world.read[offered]
        tokens -= accepted + 1
        depths.append(depth)
        if isinstance(policy, Goodput):
            policy.learn(make_cycle(offered, accepted))
    return seconds, depths


@pytest.mark.quick("four", "eight")
@pytest.mark.parametrize("name", WORLDS)
def test_it_finds_the_best_number_of_levels(name: str) -> None:
    """It mostly asks for what the closed form says, and is never 3% slower than the best fixed length."""
    world = WORLDS[name]
    assert world.best == max(range(LEVELS + 1), key=world.speed)
    seconds, depths = simulate(world.make_policy(), world, 3000)
    # after a start
    late = Counter(depths[300:])
    assert late.most_common(1)[0][0] == world.best
    assert late[world.best] > 0.7 * late.total()
    fixed = []
    for levels in (0, 1, 2, 4, 8):
        budget = Budget.fixed(chain_paths(levels))
        fixed.append(simulate(budget, world, 3000)[0])
    assert seconds < 1.03 * min(fixed)


def simulate_change(
    policy: Goodput,
    world: World,
    rates: list[float],
) -> tuple[float, int]:
    """Change a drafter; return the seconds over the best fixed length's, and what is asked for at the end."""
    # the costs stay
    before = world._replace(rates=rates)
    first, _ = simulate(policy, before, 2000)
    second, depths = simulate(policy, world, 6000)
    expected = 0.0
    for count, stage in ((2000, before), (6000, world)):
        expected += count / max(map(stage.speed, range(LEVELS + 1)))
    return (first + second) / expected, Counter(depths[-500:]).most_common(1)[0][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("none", "eight"),
        ("none", "four, after a wall"),
        ("none", "late"),
        ("four", "none"),
    ],
)
def test_it_follows_a_drafter_that_changes(before: str, after: str) -> None:
    """A drafter that was stopped is asked again when it has become good, and a good one is stopped."""
    world = WORLDS[after]
    ratio, depth = simulate_change(
        world.make_policy(),
        world,
        WORLDS[before].rates,
    )
    assert depth == world.best
    assert ratio < 1.1


@pytest.mark.slow
def test_without_trials_it_would_not() -> None:
    """A policy that never tries a drafter again does not find out."""
    world = WORLDS["eight"]
    ratio, depth = simulate_change(
        world.make_policy(share=0),
        world,
        [0.01] * 8,
    )
    assert ratio > 1.5
    assert depth == 0


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.002, 0.05])
def test_trials_cost_no_more_than_their_share(share: float) -> None:
    """Where nothing is ever accepted, all that is lost after the first cycles is the share that may be."""
    world = WORLDS["none"]._replace(rates=[0.0] * LEVELS)
    policy = world.make_policy(share=share)
    start, _ = simulate(policy, world, 100)
    assert start < 1.3 * 100
    # plain decoding takes a second a token
    seconds, depths = simulate(policy, world, 5000)
    assert set(depths) == {0, 1}
    assert policy.explored <= share * policy.spent
    assert 0.8 * share < seconds / 5000 - 1 < share / (1 - share) + 0.002


@pytest.mark.slow
def test_the_end_of_an_answer_is_no_rejection() -> None:
    """Where nine cycles of ten are cut short, the averages are what they would be without."""
    world = WORLDS["eight"]
    # a long memory, so that averages come near the rates
    policy = world.make_policy(memory=2000)
    _, depths = simulate(
        policy,
        world,
        20000,
        left=(
            -1,
            0,
            1,
            2,
            1,
            0,
            2,
            1,
            0,
            99,
        ),
    )
    assert max(depths[:9]) <= 2
    assert set(depths[9::10]) == {8}
    accepted = [average.value for average in policy.accepted]
    assert accepted == pytest.approx(world.rates, abs=0.025)
    assert [average.value for average in policy.proposed] == [1] * 8


# -- in decoding ------------------------------------------------------------------------------------------------------


@pytest.mark.quick("ngram-T=0")
@pytest.mark.parametrize(
    "temperature",
    [0.0, 1.0],
    ids=["T=0", "T=1"],
)
@pytest.mark.parametrize("name", ["ngram", "eagle1"])
def test_the_output_is_the_untouched_models(name: str, temperature: float) -> None:
    """With a policy that changes its mind all the time, for lookup and for a head's trees."""
    target = Target(build("llama"))
    prompt = random_tokens(20, seed=1)
    sampling = Sampling(temperature=temperature, seed=5)
    noise = Choose(sampling).noise

    def noise_at(position: int) -> Tensor:
        return noise([position], target.vocab_size, target.device)[0]

    expected = own_answer(target.model, prompt, 16, warp=None, noise=noise_at if noise else None)
    lookup = name == "ngram"
    drafter: Any = NgramDrafter() if lookup else new_head(name, target)
    budget = Budget.fixed(chain_paths(4)) if lookup else Budget(8, 4, 3)
    draft = [0.01 * level for level in range(5)]
    policy = Goodput(
        draft,
        READ[:5],
        budget,
        share=1.0,
        memory=3,
    )
    decode = partial(generate, target, drafter, prompt, sampling=sampling, budget=policy)
    depths = set()
    # one policy serves two requests
    for _ in range(2):
        trace = decode(max_new_tokens=16, stop=[])
        assert trace.tokens == expected
        depths |= {cycle.depth for cycle in trace.cycles}
    assert len(depths) > 2


def test_replay_learns_what_decoding_does(tiny_target: Target) -> None:
    """The cycles along recorded answers are those of decoding, request after request."""
    world = WORLDS["four, uneven costs"]
    # two policies that must end alike
    replaying = world.make_policy()
    decoding = world.make_policy()
    drafter = NgramDrafter()
    for text in ("What does copy do?", "Say one two one two one two."):
        recorded = answer(
            tiny_target,
            (),
            tiny_target.chat(text),
            limit=24,
            sampling=Sampling(),
        )
        rows = record_cycles(recorded, replay(tiny_target, drafter, recorded, replaying))
        prompt = recorded.tokens[: recorded.prompt]
        trace = generate(tiny_target, drafter, prompt, max_new_tokens=24, budget=decoding)
        decoded = [(cycle.depth, cycle.committed) for cycle in trace.cycles]
        assert [(row["depth"], row["committed"]) for row in rows] == decoded
    assert replaying.forecast() == decoding.forecast()
    assert replaying.spent == decoding.spent > 0


@pytest.mark.parametrize(
    ("read", "options", "message"),
    [
        (
            [1, 1],
            {"budget": Budget.fixed(chain_paths(4))},
            "draft holds 2 figures",
        ),
        ([1, -1], {}, "from -1 on"),
        ([0, 1], {}, "expected seconds to read the root"),
        ([1, 1], {"share": 2}, "expected seconds to read the root"),
        ([1, 1], {"memory": 1}, "expected seconds to read the root"),
    ],
)
def test_impossible_costs_are_refused(
    read: list[float], options: dict[str, Any], message: str
) -> None:
    """Tables of another length, negative seconds, and settings out of range."""
    with pytest.raises(ValueError, match=message):
        Goodput([0, 1], read, **options)
