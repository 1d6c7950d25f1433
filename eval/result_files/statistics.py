"""Compute bootstrap intervals over conversations and differences paired by prompt, and write them as text."""

# C clusters (conversations), D bootstrap samples, K columns

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from math import inf, isfinite, sqrt
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
from torch import Tensor

# bootstrap samples
DRAWS = 2000
# the share of the samples that an interval holds, for many clusters
LEVEL = 0.95
Row = Sequence[float]  # numbers that one answer adds: cycles, tokens, seconds
Clusters = Mapping[Any, Sequence[Row]]  # the rows of every conversation
# of the sums of the columns; a sum is a number, or a tensor [D]
Statistic = Callable[[Any], Any]


class Estimate(NamedTuple):
    """A figure and the ends of its 95% interval."""

    value: float
    low: float
    high: float

    @property
    def sign(self) -> int:
        """Return the sign of a significant difference, 0 where the interval contains zero."""
        return (self.low > 0) - (self.high < 0)


def format_number(value: Estimate, unit: str = "", digits: int = 2) -> str:
    """Return a number with its interval as text.

    Args:
        value: A figure; one without a finite interval is shown alone.
        unit: What stands after the number, and not after its interval.
        digits: Decimal places of the number and of its interval.
    """
    text = f"{value.value:.{digits}f}{unit}"
    if not isfinite(value.low):
        return text
    return f"{text} [{value.low:.{digits}f}, {value.high:.{digits}f}]"


def format_percent(value: Estimate) -> str:
    """Return a share with its interval as text."""
    text = f"{value.value:.1%}"
    if not isfinite(value.low):
        return text
    return f"{text} [{value.low:.1%}, {value.high:.1%}]"


class Difference(NamedTuple):
    """Second minus first, over the prompts that both answered."""

    estimate: Estimate
    pairs: int


def ratio(sums: Any) -> Any:
    """Return the first column over the second: tokens per cycle, tokens per second."""
    return sums[0] / sums[1]


def interval(
    values_by_cluster: Clusters, statistic: Statistic = ratio, draws: int = DRAWS
) -> tuple[float, float]:
    """Return the bootstrap interval of a statistic of column sums.

    Args:
        values_by_cluster: The rows of every conversation.
        statistic: Of the sums of the columns over all rows.
        draws: The number of bootstrap samples.

    Returns:
        Both ends, which are infinite for a single cluster.
    """
    num_clusters = len(values_by_cluster)
    if num_clusters < 2:
        return -inf, inf
    # whole clusters are resampled, because their rows are not independent
    sums = draw_counts(num_clusters, draws) @ column_sums(values_by_cluster)  # [D, K]
    samples = statistic(sums.T)  # [D]
    # not finite where no row of a sample was counted
    samples = samples[samples.isfinite()]
    if not len(samples):
        return -inf, inf
    tail = _tail(num_clusters)
    ends = torch.tensor([tail, 1 - tail], dtype=samples.dtype)
    low, high = torch.quantile(samples, ends).tolist()
    return low, high


def estimate(values_by_cluster: Clusters, statistic: Statistic = ratio) -> Estimate:
    """Return the statistic of all rows, with its interval."""
    value = statistic(column_sums(values_by_cluster).sum(0))
    low, high = interval(values_by_cluster, statistic)
    return Estimate(float(value), low, high)


def estimate_difference(
    first: Mapping[Any, Row],
    second: Mapping[Any, Row],
    cluster: Callable[[Any], Hashable],
    statistic: Statistic = ratio,
) -> Difference:
    """Return the second's statistic minus the first's, over the prompts that both have.

    Args:
        first: A row by prompt.
        second: A row by prompt.
        cluster: Maps a prompt to its conversation.
        statistic: Of the sums of the columns.

    Raises:
        ValueError: They have no prompt in common.
    """
    shared = [prompt for prompt in first if prompt in second]
    if not shared:
        raise ValueError(
            f"the two share no prompt: {len(first)} and {len(second)} answers have no key in common; "
            "measure both on the same prompt sets, temperatures and seeds"
        )
    # columns of both stand side by side and are resampled together: a prompt that is easy for both cancels out
    width = len(first[shared[0]])
    rows: dict[Hashable, list[Row]] = {}
    for prompt in shared:
        rows.setdefault(cluster(prompt), []).append([*first[prompt], *second[prompt]])

    def subtract(sums: Any) -> Any:
        return statistic(sums[width:]) - statistic(sums[:width])

    return Difference(estimate(rows, subtract), len(shared))


def column_sums(clusters: Clusters) -> Tensor:
    """Return the column sums of every cluster  # [C, K]"""
    return torch.stack(
        [torch.tensor(rows, dtype=torch.float64).sum(0) for rows in clusters.values()]
    )


@lru_cache(maxsize=8)
def draw_counts(number: int, draws: int) -> Tensor:
    """Return how often each bootstrap sample contains each of `number` clusters  # [D, C]"""
    picks = torch.randint(number, (draws, number), generator=torch.Generator().manual_seed(0))
    counts = torch.zeros(draws, number, dtype=torch.float64)
    return counts.scatter_add_(1, picks, torch.ones_like(counts))


def _tail(number: int) -> float:
    """Return the share to cut off at each end, less than (1 - LEVEL) / 2 where clusters are few.

    Percentiles of a bootstrap are too narrow by sqrt((n-1)/n) and by the thin tails of the normal distribution.
    Cutting at Φ(-t sqrt(n/(n-1))) makes up for both (Hesterberg 2015, "expanded percentile").
    """
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    df = number - 1
    # Student's t by its expansion in 1/df (Abramowitz and Stegun 26.7.5)
    student = z + (z**3 + z) / (4 * df) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)
    return NormalDist().cdf(-student * sqrt(number / df))
