"""Children sampled from a head's probabilities: verifying them emits the target's distribution."""

# K rows, V vocabulary

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle import Budget, DraftTree, Sampling
from eagle.core.tree import Paths, best_tree, chain_paths
from eagle.core.verify import Choose, DrafterNoise, warp
from eagle.drafters.parts.growth import grow
from tests.core.test_verify_law import verify_by
from tests.enumerate_law import (
    Chance,
    Drawn,
    Laws,
    Text,
    distance,
    emitted,
    every_outcome,
    laws_of,
    random_logits,
    texts_of,
)

CPU = torch.device("cpu")
# the p-value below which a statistic is not believed to be chance
CHANCE = 1e-4
PLAIN = Sampling(temperature=1.0)
COLD = Sampling(temperature=0.5)
TOP_P = Sampling(temperature=1.0, top_p=0.7)
TOP_K = Sampling(temperature=0.5, top_k=2)
BLOCK = Sampling(temperature=1.0, rule="block")
SHAPES: dict[str, Paths] = {
    "chain": chain_paths(3),
    "fixed": (
        (0,),
        (1,),
        (0, 0),
        (1, 0),
    ),
    "wide": (
        (2,),
        (1,),
        (0,),
    ),
    "best": best_tree(
        [[0.6, 0.2], [0.4, 0.3]],
        nodes=4,
        depth=2,
    ),
}


def make_target_and_head(
    seed: int,
    vocab_size: int,
    lengths: int,
) -> tuple[Laws, Laws]:
    """Return logits of a target, and of a head that is similar to it."""
    target = random_logits(seed, vocab_size, lengths, torch.float32)
    errors = random_logits(seed + 1000, vocab_size, lengths, torch.float32)
    head = []
    for logits, error in zip(target, errors, strict=True):
        head.append(logits + 0.5 * error)
    return target, head


def draw_tree(
    logits: Laws,
    paths: Paths,
    noise: Any,
    text: Text = (),
) -> DraftTree:
    """Grow a tree of this shape after a text, by a head that is a table of logits by text."""
    level_texts: list[Text] = [text]

    def read_level(
        _: int,
        tokens: Tensor,
        parents: Tensor,
        mask: Tensor,
    ) -> Tensor:
        nonlocal level_texts
        children = []
        for parent, token in zip(parents.tolist(), tokens.tolist(), strict=True):
            children.append((*level_texts[parent], token))
        level_texts = children
        return torch.stack([logits[len(child)][child] for child in children])

    budget = Budget.fixed(paths, "sampled")
    # the root is at position 2
    position = 3 + len(text)
    return grow(
        0,
        logits[len(text)][text],
        read_level,
        budget,
        noise,
        position,
    )


# -- by enumeration ---------------------------------------------------------------------------------------------------


class Scripted(DrafterNoise):
    """Noise that is enumerated: children come in every order that sampling may give, by its probability."""

    def __init__(
        self,
        sampling: Sampling,
        vocab_size: int,
        chance: Chance,
        width: int,
    ) -> None:
        super().__init__(Choose(sampling), vocab_size, CPU)
        self.chance = chance
        self.width = width

    def filter_logits(self, logits: Tensor) -> Tensor:
        """Filter as always, and remember the result."""
        self.scores = super().filter_logits(logits)
        return self.scores

    def draft_noise(self, rows: int) -> Tensor:
        """Return [K, V] that ranks the sampled children above all other tokens, in their order."""
        orders = []
        for probs in (self.scores / self.temperature).double().softmax(-1):
            order = torch.zeros_like(probs)
            left = probs.clone()
            # without replacement: each child from what the ones before it left
            for rank in range(min(self.width, int((probs > 0).sum()))):
                token = self.chance.draw((left / left.sum()).tolist())
                order[token] = self.width - rank
                left[token] = 0
            orders.append(order)
        return torch.stack(orders).float() * 1000


def every_tree(
    logits: Laws,
    sampling: Sampling,
    paths: Paths,
) -> Iterator[Drawn]:
    """Yield all trees that the shipped code may grow, with their probabilities."""
    vocab_size = logits[0].shape[-1]
    width = 1 + max(max(path) for path in paths)

    def draw(chance: Chance) -> DraftTree:
        return draw_tree(
            logits,
            paths,
            Scripted(sampling, vocab_size, chance, width),
        )

    for tree, weight in every_outcome(draw):
        yield tree, texts_of(tree), weight


@pytest.mark.parametrize(
    ("shape", "sampling"),
    [
        ("chain", BLOCK),
        ("fixed", COLD),
        ("wide", TOP_P),
        ("best", TOP_K),
    ],
)
def test_sampled_trees_keep_the_targets_law(shape: str, sampling: Sampling) -> None:
    """Over every tree that may be grown, the first four tokens have the target's own joint distribution."""
    for seed in range(3):
        logits, head = make_target_and_head(seed, vocab_size=3, lengths=4)
        # what the target samples from after every text
        target = laws_of(logits, sampling)
        trees = list(every_tree(head, sampling, SHAPES[shape]))
        assert sum(weight for *_, weight in trees) == pytest.approx(1, abs=1e-6)
        joint, accepted = emitted(
            partial(verify_by, logits, sampling),
            target,
            trees,
        )
        assert distance(joint, target) < 1e-5
        assert accepted > 0.3


# -- with the shipped noise -------------------------------------------------------------------------------------------


def test_a_drafters_noise_is_its_own() -> None:
    """It differs from the target's and from other requests', and repeats when all starts again."""

    def offer(request: int) -> DrafterNoise:
        sampling = Sampling(temperature=1.0, seed=5, request=request)
        noise = Choose(sampling).offer(50, CPU)
        assert noise is not None
        return noise

    def sample_rows(noise: DrafterNoise) -> Tensor:
        return torch.cat([noise.draft_noise(3), noise.draft_noise(2)])

    first = sample_rows(offer(0))
    assert sample_rows(offer(0)).equal(first)
    other = sample_rows(offer(1))
    # the target's noise at forty positions
    target = offer(0)(list(range(40)))
    assert len(torch.cat([first, other, target]).unique(dim=0)) == 50


@pytest.mark.parametrize("vocab_size", [5, 2000])
@pytest.mark.parametrize(
    "sampling",
    [
        PLAIN,
        TOP_P,
        TOP_K,
        Sampling(temperature=0.8, top_p=0.9, min_p=0.01),
    ],
    ids=str,
)
def test_filtered_logits_have_the_targets_law(sampling: Sampling, vocab_size: int) -> None:
    """It is that of the target's filters over the whole vocabulary; filtered tokens keep their order."""
    noise = Choose(sampling).offer(vocab_size, CPU)
    assert noise is not None
    generator = torch.Generator().manual_seed(1)
    logits = 6 * torch.randn(7, vocab_size, generator=generator)
    expected = warp(logits, sampling).softmax(-1)
    filtered = noise.filter_logits(logits)
    probs = (filtered / sampling.temperature).softmax(-1)
    torch.testing.assert_close(
        probs,
        expected,
        rtol=0,
        atol=1e-6,
    )
    assert (probs == 0)[expected == 0].all()
    assert filtered.topk(5).indices.equal(logits.topk(5).indices)
