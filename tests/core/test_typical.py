"""Typical acceptance: the rule as released, on random trees; it is lossy, and nobody gets it unasked."""

# N nodes, V vocabulary

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle import Budget, DraftTree, Sampling, Target, generate
from eagle.core import verify as verification
from eagle.core.sampling import PUBLISHED_TYPICAL
from eagle.core.verify import Choose, verify, walk_typically
from tests.batches import Bench, new_head
from tests.core.test_verify_law import PLAIN, random_tree, read
from tests.enumerate_law import distance, futures, laws_of, random_logits
from tests.families import random_tokens

VOCAB = 5


def random_probs(seed: int, nodes: int) -> Tensor:
    """[N, V], flat and peaked."""
    dice = torch.Generator().manual_seed(seed)
    scale = 4 * torch.rand(nodes, 1, generator=dice, dtype=torch.float64)
    return (scale * torch.randn(nodes, VOCAB, generator=dice, dtype=torch.float64)).softmax(-1)


def accepted_by_force(tree: DraftTree, probs: Tensor, epsilon: float, delta: float) -> list[int]:
    """Every path from the root, walked by itself; the longest whose tokens all pass, the likeliest of the longest."""
    found = []
    for leaf in range(len(tree)):
        path, likelihood, passes = tree.path(leaf), 0.0, True
        for parent, node in pairwise(path):
            row = probs[parent].tolist()
            prob = row[int(tree.tokens[node])]
            entropy = -sum(p * math.log(p + 1e-5) for p in row)
            passes = passes and prob > min(epsilon, delta * math.exp(-entropy))
            likelihood += math.log(prob)
        if passes:
            found.append((len(path), likelihood, path))
    return max(found)[2]


def disagreements() -> int:
    """On how many random trees the walk and brute force part."""
    wrong = 0
    for seed in range(60):
        tree = random_tree(seed, 14, VOCAB)
        probs = random_probs(seed, len(tree))
        bounds = PUBLISHED_TYPICAL if seed % 2 else (0.3, 0.6)
        wrong += walk_typically(tree, lambda nodes, p=probs: p[nodes], bounds) != accepted_by_force(
            tree, probs, *bounds
        )
    return wrong


def test_the_walk_is_that_of_brute_force() -> None:
    """The same path on every tree; none of one node."""
    assert disagreements() == 0
    assert walk_typically(
        DraftTree.chain([3]), lambda nodes: random_probs(0, len(nodes)), PUBLISHED_TYPICAL
    ) == [0]


FAULTS: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "bounds swapped": lambda probs, epsilon, delta: FLOORS(probs, delta, epsilon),
    "the larger bound": lambda probs, epsilon, delta: FLOORS(probs, 9.0, delta).clamp(min=epsilon),
    "certainty for entropy": lambda probs, epsilon, delta: (delta * probs.amax(-1)).clamp(
        max=epsilon
    ),
    "a fixed bound": lambda probs, epsilon, delta: probs.new_full((len(probs),), epsilon),
}
FLOORS = verification.typical_floors


@pytest.mark.parametrize("fault", FAULTS)
def test_another_floor_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail."""
    monkeypatch.setattr(verification, "typical_floors", FAULTS[fault])
    assert disagreements() > 0


def test_the_output_is_not_the_targets_law() -> None:
    """A drafted token that is likely enough comes as certain; one that is not leaves the law as it is."""
    losses, bounds = [], Sampling(temperature=1.0, typical=PUBLISHED_TYPICAL)
    for seed in range(20):
        logits = random_logits(seed, 4, 2, torch.float64)
        target, tree = laws_of(logits, PLAIN), DraftTree.chain([0, 1])
        path, _ = verify(read(tree, logits), Choose(bounds))
        kept = target[0][1] > min(0.09, 0.3 * math.exp(float((target[0] * target[0].log()).sum())))
        assert path == ([0, 1] if kept else [0])
        joint = futures(target)[0].copy()
        if kept:
            joint[:] = 0
            joint[1] = target[1][1].numpy()
        losses.append(distance(joint, target))
    assert max(losses) > 0.5 and min(losses) == 0


def test_the_token_behind_the_path_is_the_targets_own_choice() -> None:
    """By the same noise as without drafts, whatever was accepted."""
    for seed in range(20):
        logits, tree = (
            random_logits(seed, 4, 4, torch.float32),
            DraftTree.from_paths(0, [[1, 2], [3, 0]]),
        )
        output = read(tree, logits)
        path, token = verify(
            output, Choose(Sampling(temperature=1.0, seed=seed, typical=PUBLISHED_TYPICAL))
        )
        assert token == Choose(Sampling(temperature=1.0, seed=seed))(output, path[-1:])[0]


@pytest.fixture(scope="module")
def bench() -> Bench:
    """A small target."""
    return Bench("llama")


def answers(target: Target, budget: Budget, **options: Any) -> list[Any]:
    """Of a head to three prompts."""
    sampling = options.pop("sampling")
    prompts = [random_tokens(length, seed=length) for length in (3, 9, 14)]
    return generate(
        target,
        new_head("medusa", target),
        prompts,
        sampling=sampling,
        budget=budget,
        stop=[],
        **options,
    )


@pytest.mark.slow
def test_texts_in_a_batch_answer_as_alone_and_more_is_accepted(bench: Bench) -> None:
    """Rows do not meddle; more drafts stay than without, and what is written then is not what the target writes."""
    sampling, budget = (
        Sampling(temperature=0.7, top_k=20, seed=1, typical=(0.02, 0.3)),
        Budget(12, 3, 4),
    )
    together, alone = (
        answers(bench.target, budget, sampling=sampling, max_new_tokens=24, batch_size=size)
        for size in (3, 1)
    )
    exact = Sampling(temperature=0.7, top_k=20, seed=1)
    plain = answers(bench.target, budget, sampling=exact, max_new_tokens=24, batch_size=3)
    assert [trace.tokens for trace in together] == [trace.tokens for trace in alone]
    assert [trace.tokens for trace in together] != [trace.tokens for trace in plain]
    assert sum(len(trace.cycles) for trace in together) < sum(len(trace.cycles) for trace in plain)


def test_sampled_drafts_are_refused(bench: Bench) -> None:
    """The rule does not look at what they were drawn from."""
    budget, sampling = (
        Budget.fixed(((0,), (0, 0)), "sampled"),
        Sampling(temperature=1.0, typical=PUBLISHED_TYPICAL),
    )
    with pytest.raises(ValueError, match=r"got sampled drafts, use Budget\(draw='likeliest'\)"):
        answers(bench.target, budget, sampling=sampling, max_new_tokens=4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 0.0}, "needs a temperature above 0"),
        ({"rule": "block"}, "a rule of its own: leave out Sampling.rule='block' and lenience"),
        ({"lenience": 0.5}, "a rule of its own"),
        (
            {"typical": 0.3},
            r"Sampling.typical is 0.3, expected None \(lossless\), or epsilon and delta",
        ),
        ({"typical": (0.0, 0.3)}, "each above 0, at most 1"),
        ({"typical": ("a", 0.3)}, "each above 0, at most 1"),
    ],
)
def test_what_it_is_not_defined_for_is_refused(fields: dict[str, Any], message: str) -> None:
    """At temperature 0, beside other rules, and with bounds that are none."""
    with pytest.raises(ValueError, match=message):
        Sampling(**{"temperature": 1.0, "typical": PUBLISHED_TYPICAL, **fields})


def test_it_is_never_a_default() -> None:
    """Whoever has not asked for it gets the target's own output."""
    assert Sampling().is_lossless and Sampling(temperature=1.0).is_lossless
    assert not Sampling(temperature=1.0, typical=PUBLISHED_TYPICAL).is_lossless
    assert not Sampling(lenience=0.5).is_lossless
