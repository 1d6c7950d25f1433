"""Build the sections on acceptance: by position, task and rule, accepted lengths, theory, calibration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul
from typing import Any

from eagle.markup import tag
from eval.page.page_parts import (
    Missing,
    ReportData,
    Rows,
    Section,
    by_temperature,
    cell,
    code,
    drafter_panels,
    panels,
    side_by_side,
    table,
)
from eval.result_files.buckets import ENOUGH, EVERY, several_buckets
from eval.result_files.figures import Points, Scale, draw_bars, draw_plot
from eval.result_files.results import (
    ACCEPTANCE_LENGTH,
    MODELLED_SPEED_UP,
    SPEED_UP,
    Answer,
    Group,
    Metric,
    cycles,
    prompt_key,
)
from eval.result_files.statistics import Row, estimate

Cycle = dict[str, Any]  # as a row holds it
Shapes = Counter[tuple[int, int]]  # cycles by accepted tokens and levels of the tree
SHARE = Scale(0, 1, percent=True, step=0.2)
# of equally many drafted tokens
BINS = 8


def positions(report: ReportData) -> Section:
    """Show the acceptance rate of each level of the draft: of all cycles, and of those that reached the level."""
    groups_with_cycles = [group for group in report.drafting if group.cycles]
    if not _accepts(report):
        return _no_acceptance(report)
    if max(_num_levels(group) for group in groups_with_cycles) < 2:
        return Missing("drafts have a single position")
    lead = (
        "Of all cycles: the share that accepted this position. Of cycles that reached it: the share among those that "
        "accepted the position before and drafted this one."
    )
    figures = []
    for heading, groups in by_temperature(groups_with_cycles):
        for name, reached in (("of all cycles", False), ("of cycles that reached it", True)):
            series = [(report.series[group.name], by_position(group, reached)) for group in groups]
            # two levels at least, so that the axis has a length
            num_levels = max(2, *map(_num_levels, groups))
            figure = draw_plot(
                f"{heading}, {name}",
                series,
                x=Scale(1, num_levels, step=1),
                y=SHARE,
                axes=("position in the draft", "accepted"),
            )
            figures.append(figure)
    return [tag("p", lead), drafter_panels(report.names, figures)]


def _accepts(report: ReportData) -> bool:
    """Return whether cycles are recorded that accepted drafted tokens."""
    return any(group.cycles and not group.accepts_nothing for group in report.drafting)


def _no_acceptance(report: ReportData) -> Missing:
    """Say why nothing can be shown of accepted tokens."""
    if any(group.cycles for group in report.drafting):
        return Missing("no drafted token was accepted")
    return Missing("the results file holds no cycles")


def _num_levels(group: Group) -> int:
    return max(cycle["depth"] for cycle in group.cycles)


def by_position(group: Group, reached: bool) -> Points:
    """Return the share of cycles that accepted each level.

    Args:
        group: Answers with recorded cycles.
        reached: Whether the share is of the cycles that accepted the level before and had this one, not of all.
    """
    # counted once for all levels
    shapes = {id(answer): count_shapes(cycles(answer)) for answer in group.answers}

    def count(level: int) -> Callable[[Answer], Row]:
        return lambda answer: count_level(shapes[id(answer)], level, reached)

    return [
        (level, group.estimate(Metric(count(level)))) for level in range(1, _num_levels(group) + 1)
    ]


def by_bucket(report: ReportData) -> Section:
    """Show the acceptance length by turn, by tokens of context, and by tokens of the answer."""
    figures = []
    for buckets in EVERY:
        lines: dict[str, Rows] = {}
        for heading, groups in by_temperature(report.drafting):
            lengths = [buckets.acceptance_lengths(group) for group in groups]
            rows: Rows = []
            for bucket in several_buckets(lengths):
                points = []
                # a drafter has no figure where it has too few cycles
                for group, length in zip(groups, lengths, strict=True):
                    if bucket in length:
                        points.append((report.series[group.name], length[bucket]))
                rows.append((buckets.name(bucket), points))
            if rows:
                lines[heading] = rows
        figures += side_by_side(f"τ by {buckets.title}", lines, start=1)

    if not _accepts(report):
        return _no_acceptance(report)
    if not figures:
        return Missing(
            "all cycles are in one turn and one range of tokens, or in ranges of too few cycles"
        )
    lead = (
        "Acceptance length by the turn of the conversation, and by the number of tokens before a cycle: of prompt and "
        "answer, and of the answer alone. "
        f"A drafter with fewer than {ENOUGH} cycles in a range is left out there."
    )
    return [tag("p", lead), drafter_panels(report.names, figures)]


def lengths(report: ReportData) -> Section:
    """Show the distribution of the accepted tokens of a cycle."""
    # a single bar is no distribution
    groups = [group for group in report.drafting if len(accepted_lengths(group)) > 1]
    if not groups:
        return _no_acceptance(report)
    lead = (
        "The share of cycles by the number of drafted tokens that they accepted. Each cycle commits one token more, "
        "the target's own."
    )
    shares_by_group = [accepted_lengths(group) for group in groups]
    # one axis for all panels, so that their bars can be compared
    y = Scale.over([max(shares) for shares in shares_by_group], percent=True)

    figures = []
    for group, shares in zip(groups, shares_by_group, strict=True):
        mean = sum(length * share for length, share in enumerate(shares))
        figure = draw_bars(
            f"{group.name}, T = {group.temperature:g}",
            shares,
            y=y,
            series=report.series[group.name],
            axes=("accepted tokens", "share"),
            note=f"mean {mean:.2f}",
        )
        figures.append(figure)
    return [tag("p", lead), panels(*figures)]


def accepted_lengths(group: Group) -> list[float]:
    """Return the share of cycles that accepted 0, 1, 2 ... drafted tokens."""
    counts = Counter(cycle["accepted"] for cycle in group.cycles)
    total = counts.total()
    longest = max(counts, default=-1)
    return [counts[length] / total for length in range(longest + 1)]


def calibration(report: ReportData) -> Section:
    """Show the draft's confidence against the share accepted."""
    bins_by_temperature: dict[float, dict[str, Points]] = {}
    for group in report.drafting:
        bins = bin_confidences(group)
        # drafters without probabilities have no confidences, and equal ones are one point
        if len({round(confidence, 2) for confidence, _ in bins}) > 1:
            bins_by_temperature.setdefault(group.temperature, {})[group.name] = bins
    if not bins_by_temperature:
        return Missing("drafted tokens have no probabilities, or all the same one")
    lead = (
        "The drafter's probability of a token against the share that was accepted, for tokens whose parent was "
        f"accepted. A point is an {BINS}th of these tokens. On the dashed line the probabilities are right."
    )
    figures = []
    names: dict[str, int] = {}
    for temperature, bins_by_name in bins_by_temperature.items():
        names |= {name: report.series[name] for name in bins_by_name}
        errors = ", ".join(
            f"{name} {_calibration_error(bins):.0%}" for name, bins in bins_by_name.items()
        )

        # points on the diagonal are as often right as the draft believes
        figure = draw_plot(
            f"T = {temperature:g}",
            [(report.series[name], bins) for name, bins in bins_by_name.items()],
            x=SHARE,
            y=SHARE,
            axes=("probability in the draft", "accepted"),
            note=f"Mean distance from the line: {errors}.",
            diagonal=True,
        )
        figures.append(figure)
    return [tag("p", lead), drafter_panels(names, figures)]


def _calibration_error(bins: Points) -> float:
    return sum(abs(confidence - share.value) for confidence, share in bins) / len(bins)


def bin_confidences(group: Group) -> Points:
    """Return mean confidence and share accepted, in bins of equally many drafted tokens."""
    tokens = sorted(_confidences(group), key=lambda token: token[1])
    cuts = [len(tokens) * i // BINS for i in range(BINS + 1)]
    points = []
    for left, right in pairwise(cuts):
        # fewer tokens than bins leave some of them empty
        if left == right:
            continue
        rows: dict[object, list[Row]] = {}
        for conversation, _, accepted in tokens[left:right]:
            rows.setdefault(conversation, []).append((accepted, 1))

        total = sum(confidence for _, confidence, _ in tokens[left:right])
        points.append((total / (right - left), estimate(rows)))
    return points


def _confidences(group: Group) -> Iterator[tuple[object, float, bool]]:
    """Yield conversation, confidence and acceptance of each drafted token whose parent was accepted."""
    for answer in group.answers:
        for cycle in cycles(answer):
            for confidence, accepted in cycle.get("confidence") or ():
                yield prompt_key(answer)[:2], confidence, accepted


def expected_tokens(alpha: float, gamma: int) -> float:
    """Return the tokens per target forward of a chain of `gamma` tokens, accepted independently with rate `alpha`.

    Raises:
        ValueError: `alpha` is no probability, or `gamma` is negative.
    """
    check_rate(alpha, gamma)
    # the limit of the formula, which divides by zero there
    if alpha == 1:
        return gamma + 1.0
    # equation 1 of Leviathan et al. 2023 (arXiv 2211.17192)
    return (1 - alpha ** (gamma + 1)) / (1 - alpha)


def tokens_of_rates(rates: Sequence[float]) -> float:
    """Return 1 + r1 + r1 r2 + ..., the tokens per target forward.

    A rate is given that the position before was accepted.
    """
    return 1 + sum(accumulate(rates, mul))


def check_rate(alpha: float, gamma: int = 0) -> None:
    """Refuse what is no acceptance rate or no length."""
    if not 0 <= alpha <= 1 or gamma < 0:
        raise ValueError(
            f"alpha = {alpha}, gamma = {gamma}: expected a probability, and a chain of 0 or more tokens"
        )


def count_shapes(recorded: Iterable[Cycle]) -> Shapes:
    """Count cycles by accepted tokens and levels of the tree."""
    return Counter((cycle["accepted"], cycle["depth"]) for cycle in recorded)


def count_level(shapes: Shapes, level: int, reached: bool = True) -> tuple[int, int]:
    """Return the cycles that accepted a level's token, and those that tried it.

    Args:
        shapes: Cycles by accepted tokens and levels of the tree.
        level: A level of the tree, from 1.
        reached: Whether only cycles that accepted the level before and had this one count as tried, not all.
    """
    accepted = 0
    tried = 0
    for (length, depth), count in shapes.items():
        if length >= level:
            accepted += count
        if not reached or (depth >= level and length >= level - 1):
            tried += count
    return accepted, tried


@dataclass(frozen=True)
class Rates:
    """Acceptance rates of drafted tokens, and the depths of their trees."""

    alpha: float  # over all levels
    by_level: list[float]  # given that the level before was accepted
    depths: Counter[int]  # cycles by the levels of their tree

    @classmethod
    def count(cls, group: Group) -> Rates:
        """Count over the cycles of a group."""
        recorded = group.cycles
        shapes = count_shapes(recorded)
        depths = Counter[int](cycle["depth"] for cycle in recorded)
        total_accepted = 0
        total_tried = 0
        by_level = []
        for level in range(1, max(depths) + 1):
            accepted, tried = count_level(shapes, level)
            # a level that no cycle reached has a rate of 0
            by_level.append(accepted / max(tried, 1))
            total_accepted += accepted
            total_tried += tried
        return cls(total_accepted / max(total_tried, 1), by_level, depths)

    @property
    def mean_depth(self) -> float:
        """Return the mean levels of a tree."""
        return self._mean(float)

    @property
    def by_alpha(self) -> float:
        """Return the tokens per target forward if all levels had one rate, independent of what came before."""
        return self._mean(lambda depth: expected_tokens(self.alpha, depth))

    @property
    def by_position(self) -> float:
        """Return the tokens per target forward if each level had its own rate, independent of what came before."""
        return self._mean(lambda depth: tokens_of_rates(self.by_level[:depth]))

    def _mean(self, value: Callable[[int], float]) -> float:
        total = sum(value(depth) * times for depth, times in self.depths.items())
        return total / self.depths.total()


def theory(report: ReportData) -> Section:
    """Show predicted against measured τ and speed."""
    groups_with_cycles = [group for group in report.drafting if group.cycles]
    if not _accepts(report):
        return _no_acceptance(report)
    lead = (
        "With one acceptance rate α at every position, a cycle of γ levels commits (1 − α^(γ+1)) / (1 − α) tokens. "
        "“By position” takes each position's own rate. Break-even τ is the cycle time over that of plain decoding; "
        "drafting is faster with a larger τ. Accepted tokens after the end of an answer are not in the measured τ. "
    )
    if any(group.is_modelled for group in groups_with_cycles):
        lead += "Predicted speedup is that of modelled time, from the measured costs of single forwards."
    else:
        lead += "Predicted speedup is τ over break-even τ; eval.costs=true predicts it from single forwards."
    columns = ["drafter", "α", "levels", "τ by α", "τ by position", "τ measured", "break-even τ"]
    columns += ["predicted speedup", "measured"]

    parts = []
    for heading, groups in by_temperature(groups_with_cycles):
        rows = [_theory_row(group) for group in groups]
        parts.append((heading, rows))
    return [tag("p", lead), table(columns, parts)]


def _theory_row(group: Group) -> list[object]:
    rates = Rates.count(group)
    # both are unknown without seconds of cycles, unless there are bare costs
    even = break_even(group)
    predicted = predict_speed_up(group, even)
    return [
        code(group.name),
        f"{rates.alpha:.2f}",
        f"{rates.mean_depth:.1f}",
        f"{rates.by_alpha:.2f}",
        f"{rates.by_position:.2f}",
        cell(group.estimate(ACCEPTANCE_LENGTH)),
        f"{even:.2f}" if even else "–",
        f"{predicted:.2f} ×" if predicted else "–",
        cell(group.estimate(SPEED_UP), " ×"),
    ]


def break_even(group: Group) -> float | None:
    """Return a cycle's mean seconds over those of plain decoding, or None where they were not recorded."""
    plain = []
    for answer in group.answers:
        plain += cycles(answer["baseline"])
    drafting_seconds = _mean_cycle_seconds(group.cycles)
    plain_seconds = _mean_cycle_seconds(plain)
    if not drafting_seconds or not plain_seconds:
        return None
    return drafting_seconds / plain_seconds


def cycle_seconds(recorded: Iterable[Cycle]) -> list[dict[str, float]]:
    """Return the seconds by part of each cycle that has them."""
    return [cycle["seconds"] for cycle in recorded if cycle.get("seconds")]


def _mean_cycle_seconds(recorded: Iterable[Cycle]) -> float:
    seconds = [sum(parts.values()) for parts in cycle_seconds(recorded)]
    return sum(seconds) / len(seconds) if seconds else 0.0


def predict_speed_up(group: Group, even: float | None) -> float | None:
    """Return the modelled speedup where there are bare costs, else τ over break-even."""
    if group.is_modelled:
        return group.estimate(MODELLED_SPEED_UP).value
    if not even:
        return None
    return group.estimate(ACCEPTANCE_LENGTH).value / even
