"""Closed forms of speculative decoding, from Leviathan et al. 2023 (arXiv 2211.17192) unless noted.

p is the target's distribution and q the draft's, both after temperature and truncation; alpha is the acceptance rate of
a drafted token, gamma the length of a chain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from itertools import accumulate
from operator import mul
from statistics import fmean

from torch import Tensor

from eval.page.page_acceptance import check_rate, expected_tokens


def overlap(p: Tensor, q: Tensor, lenience: float = 1.0) -> float:
    """alpha = E sum min(p / l, q) over contexts [.., V]: acceptance rate of a token sampled from q; l = 1 is exact."""
    return float((p / lenience).minimum(q).sum(-1).mean())


def speed_up(alpha: float, gamma: int, cost: float) -> float:
    """Speedup where one draft step costs `cost` target forwards, and verifying more tokens costs nothing."""
    return expected_tokens(alpha, gamma) / (gamma * cost + 1)


def operations(alpha: float, gamma: int, cost: float) -> float:
    """Factor of arithmetic per token where a drafted token costs `cost` times the target's operations."""
    return (gamma * cost + gamma + 1) / expected_tokens(alpha, gamma)


def best_gamma(alpha: float, cost: float, longest: int = 64) -> int:
    """Length of the fastest chain; 0 where drafting is slower."""
    return max(range(longest + 1), key=lambda gamma: speed_up(alpha, gamma, cost))


def oracle(alpha: float) -> float:
    """1 / (1 - alpha): tokens per target forward if the accepted length were known before each draft."""
    check_rate(alpha)
    return math.inf if alpha == 1 else 1 / (1 - alpha)


def chain_accepted(ratios: Iterable[Sequence[float]]) -> float:
    """Expected accepted tokens per cycle, given p(x) / q(x) of the tokens that each sampled chain drafted, in order."""
    return fmean(sum(accumulate((min(1.0, ratio) for ratio in cycle), mul)) for cycle in ratios)


def tree_tokens(parents: Sequence[int], probabilities: Sequence[float]) -> float:
    """Exact tokens per target forward of a tree that is independent of the target's noise.

    `probabilities` holds the target's probability of each node's token after its parent; node 0 is the root.
    """
    # the probability of each whole path
    paths = [1.0]
    for parent, probability in zip(parents[1:], probabilities[1:], strict=True):
        paths.append(paths[parent] * probability)
    return sum(paths)


def tree_bound(
    next_probs: Callable[[tuple[int, ...]], Sequence[float]], nodes: int, depth: int
) -> float:
    """The largest `tree_tokens` of any tree of this size: that of the likeliest prefixes, which form a tree.

    `next_probs` gives the target's probabilities of the next token after a prefix.
    """
    # the most probable prefixes first, so that a prefix always comes before what extends it
    heap: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
    total = 0.0
    for _ in range(nodes + 1):
        if not heap:
            break
        likelihood, prefix = heappop(heap)
        total -= likelihood
        for token, probability in enumerate(next_probs(prefix) if len(prefix) < depth else ()):
            heappush(heap, (likelihood * probability, (*prefix, token)))

    return total
