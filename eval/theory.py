"""The closed forms of speculative decoding: what acceptance makes possible, and what it costs.

Leviathan et al. 2023 (arXiv 2211.17192) unless said otherwise. p is the target's law and q the draft's, both after
temperature and truncation; alpha is how often a drafted token is kept, gamma the length of a chain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from itertools import accumulate
from operator import mul
from statistics import fmean

from torch import Tensor


def overlap(p: Tensor, q: Tensor, lenience: float = 1.0) -> float:
    """alpha = E sum min(p / l, q) over contexts [.., V]: how often a token drawn from q is accepted; l = 1 is exact."""
    return float((p / lenience).minimum(q).sum(-1).mean())


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens per target forward of a chain whose tokens are kept independently, the target's own token included."""
    _check(alpha, gamma)
    return gamma + 1.0 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def tokens_of_rates(rates: Sequence[float]) -> float:
    """The same where each position has its own rate, given that the one before was kept."""
    return 1 + sum(accumulate(rates, mul))


def speed_up(alpha: float, gamma: int, cost: float) -> float:
    """Improvement in time where one step of the draft takes `cost` target forwards, and a longer read is free."""
    return expected_tokens(alpha, gamma) / (gamma * cost + 1)


def operations(alpha: float, gamma: int, cost: float) -> float:
    """Growth in arithmetic per token where one token of the draft takes `cost` times the target's operations."""
    return (gamma * cost + gamma + 1) / expected_tokens(alpha, gamma)


def best_gamma(alpha: float, cost: float, longest: int = 64) -> int:
    """The fastest chain; 0 where none pays."""
    return max(range(longest + 1), key=lambda gamma: speed_up(alpha, gamma, cost))


def oracle(alpha: float) -> float:
    """Tokens per target forward if one knew before each draft how long it will last."""
    _check(alpha, 0)
    return math.inf if alpha == 1 else 1 / (1 - alpha)


def chain_accepted(ratios: Iterable[Sequence[float]]) -> float:
    """Accepted tokens per cycle that the drafted tokens let one expect, without the coins' luck.

    Each cycle holds p(x) / q(x) of the tokens that a sampled chain drafted, in order.
    """
    return fmean(sum(accumulate((min(1.0, ratio) for ratio in cycle), mul)) for cycle in ratios)


def tree_tokens(parents: Sequence[int], probabilities: Sequence[float]) -> float:
    """Tokens per target forward of a tree whose tokens did not depend on the target's noise: exact.

    `probabilities` holds the target's of each node's token after its parent; node 0 is the root.
    """
    paths = [1.0]
    for parent, probability in zip(parents[1:], probabilities[1:], strict=True):
        paths.append(paths[parent] * probability)
    return sum(paths)


def tree_bound(law: Callable[[tuple[int, ...]], Sequence[float]], nodes: int, depth: int) -> float:
    """The most that any such tree can expect: that of the likeliest prefixes, which are a tree.

    `law` gives the target's probabilities of the next token after a prefix.
    """
    heap: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
    found = 0.0
    for _ in range(nodes + 1):
        if not heap:
            break
        likelihood, prefix = heappop(heap)
        found -= likelihood
        for token, probability in enumerate(law(prefix) if len(prefix) < depth else ()):
            heappush(heap, (likelihood * probability, (*prefix, token)))
    return found


def _check(alpha: float, gamma: int) -> None:
    if not 0 <= alpha <= 1 or gamma < 0:
        raise ValueError(f"alpha = {alpha}, gamma = {gamma}: expected a probability, and a chain of 0 or more tokens")
