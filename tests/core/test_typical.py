"""Typical acceptance: the published rule on random trees; it is lossy, and never a default."""

# N nodes, V vocabulary

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle import DraftTree, Sampling
from eagle.core import verify as verification
from eagle.core.sampling import PUBLISHED_TYPICAL
from eagle.core.verify import Choose, verify, walk_typically
from tests.core.test_verify_law import PLAIN, random_tree, read
from tests.enumerate_law import distance, futures, laws_of, random_logits

VOCAB_SIZE = 5


def random_probs(seed: int, nodes: int) -> Tensor:
    """Return probabilities [N, V], some flat and some peaked."""
    dice = torch.Generator().manual_seed(seed)
    scale = 4 * torch.rand(
        nodes,
        1,
        generator=dice,
        dtype=torch.float64,
    )
    logits = torch.randn(
        nodes,
        VOCAB_SIZE,
        generator=dice,
        dtype=torch.float64,
    )
    return (scale * logits).softmax(-1)


def find_best_path(
    tree: DraftTree,
    probs: Tensor,
    epsilon: float,
    delta: float,
) -> list[int]:
    """Check every path from the root by itself; return the longest that passes, of these the likeliest."""
    paths = []
    for leaf in range(len(tree)):
        path = tree.path(leaf)
        likelihood = 0.0
        passes = True
        for parent, node in pairwise(path):
            row = probs[parent].tolist()
            prob = row[int(tree.tokens[node])]
            # Cai et al. 2024, equation 1, with the 1e-5 of Medusa's code
            entropy = -sum(p * math.log(p + 1e-5) for p in row)
            passes = passes and prob > min(
                epsilon,
                delta * math.exp(-entropy),
            )
            likelihood += math.log(prob)
        if passes:
            paths.append((len(path), likelihood, path))
    return max(paths)[2]


def count_disagreements() -> int:
    """Count the random trees on which the walk and brute force differ."""
    wrong = 0
    for seed in range(60):
        tree = random_tree(seed, 14, VOCAB_SIZE)
        probs = random_probs(seed, len(tree))
        # the published bounds, and some that let less through
        bounds = PUBLISHED_TYPICAL if seed % 2 else (0.3, 0.6)
        path = walk_typically(tree, probs.__getitem__, bounds)
        wrong += path != find_best_path(tree, probs, *bounds)
    return wrong


def test_the_walk_is_that_of_brute_force() -> None:
    """The same path on every tree, and the root of a tree of one node."""
    assert count_disagreements() == 0
    root = DraftTree.chain([3])
    assert walk_typically(root, random_probs(0, 1).__getitem__, PUBLISHED_TYPICAL) == [0]


def test_a_fixed_threshold_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault, the entropy forgotten, makes paths differ."""

    def compute_floors(
        probs: Tensor,
        epsilon: float,
        delta: float,
    ) -> Tensor:
        return probs.new_full((len(probs),), epsilon)

    monkeypatch.setattr(verification, "typical_floors", compute_floors)
    assert count_disagreements() > 0


def test_the_output_is_not_the_targets_law() -> None:
    """A drafted token that is likely enough is always emitted; any other leaves the distribution as it is."""
    losses = []
    # one drafted token: the law of what is emitted is known in closed form
    tree = DraftTree.chain([0, 1])
    epsilon, delta = PUBLISHED_TYPICAL
    for seed in range(20):
        logits = random_logits(seed, 4, 2, torch.float64)
        target = laws_of(logits, PLAIN)
        choose = Choose(Sampling(temperature=1.0, typical=PUBLISHED_TYPICAL))
        path, _ = verify(read(tree, logits), choose)
        entropy = -float((target[0] * target[0].log()).sum())
        is_likely = target[0][1] > min(
            epsilon,
            delta * math.exp(-entropy),
        )
        assert path == ([0, 1] if is_likely else [0])
        joint = futures(target)[0].copy()
        if is_likely:
            joint[:] = 0
            joint[1] = target[1][1].numpy()
        losses.append(distance(joint, target))
    assert max(losses) > 0.5
    assert min(losses) == 0


def test_the_token_after_the_path_is_the_targets_own_choice() -> None:
    """By the same noise as without drafts, whatever was accepted."""
    tree = DraftTree.from_paths(
        0,
        [[1, 2], [3, 0]],
    )
    for seed in range(20):
        output = read(
            tree,
            random_logits(seed, 4, 4, torch.float32),
        )
        exact = Sampling(temperature=1.0, seed=seed)
        # the noise depends on seed, request and position alone
        typical = Sampling(temperature=1.0, seed=seed, typical=PUBLISHED_TYPICAL)
        path, token = verify(output, Choose(typical))
        assert [token] == Choose(exact)(
            output,
            path[-1:],
        )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 0.0}, "temperature above 0"),
        ({"rule": "block"}, "a rule of its own"),
        ({"lenience": 0.5}, "a rule of its own"),
        ({"typical": 0.3}, "Sampling.typical is 0.3"),
        ({"typical": (0.0, 0.3)}, "each above 0"),
        ({"typical": ("a", 0.3)}, "each above 0"),
        (
            {"typical": None, "rule": "block", "lenience": 0.5},
            "for the token rule alone",
        ),
    ],
)
def test_rules_that_contradict_each_other_are_refused(
    fields: dict[str, Any],
    message: str,
) -> None:
    """Typical acceptance excludes temperature 0 and all other rules; lenience excludes the block rule."""
    options = {"temperature": 1.0, "typical": PUBLISHED_TYPICAL, **fields}
    with pytest.raises(ValueError, match=message):
        Sampling(**options)


def test_it_is_never_a_default() -> None:
    """Only who asks for a lossy rule gets one."""
    assert Sampling().is_lossless
    assert Sampling(temperature=1.0).is_lossless
    assert not Sampling(temperature=1.0, typical=PUBLISHED_TYPICAL).is_lossless
    assert not Sampling(lenience=0.5).is_lossless
