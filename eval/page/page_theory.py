"""Build the section on theory: τ and speed predicted from acceptance and bare costs, against measured ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any

from eagle.markup import Html
from eval.page.page_parts import (
    ReportData,
    by_temperature,
    cell,
    code,
    drafter_panels,
    missing,
    section,
    table,
)
from eval.result_files.figures import Scale, draw_plot
from eval.result_files.results import ACCEPTANCE_LENGTH, MODELLED_SPEED_UP, SPEED_UP, Group, cycles
from eval.result_files.statistics import Estimate

Cycle = dict[str, Any]  # as a row holds it
Agreement = list[tuple[int, list[tuple[float, Estimate]]]]  # of predicted and measured, by series
Shapes = Counter[tuple[int, int]]  # cycles by accepted tokens and levels of the tree


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


def theory(report: ReportData) -> Html:
    """Show predicted against measured τ and speed."""
    title = "Measured against theory"
    groups_with_cycles = [group for group in report.drafting if group.cycles]
    lead = (
        "If every drafted token were kept with the same chance α, whatever came before it, a cycle of γ levels would "
        "commit (1 − α^(γ+1)) / (1 − α) tokens. “By position” gives each level its own chance; both are means over "
        "the cycles, each with the levels that its tree had. Break-even is the length of a cycle in cycles of plain "
        "decoding: with a longer τ the draft is faster. What an answer's end cuts off was accepted and is not in the "
        "measured τ, which short answers feel. "
    )
    if not groups_with_cycles:
        return section("theory", title, lead, missing("These results keep no cycles."))
    has_modelled = any(group.is_modelled for group in groups_with_cycles)
    if has_modelled:
        how = "modelled"
        lead += "Predicted speed-up is that of modelled time, from bare forwards measured outside of the loop."
    else:
        how = "τ over break-even"
        lead += "Predicted speed-up is τ over break-even: the header has no bare costs (eval.costs) to model it from."
    columns = ["drafter", "α", "levels", "τ by α", "τ by position", "τ measured", "break-even τ"]
    columns += ["predicted", "measured"]

    parts = []
    lengths = Agreement()
    speeds = Agreement()
    for heading, groups in by_temperature(groups_with_cycles):
        rows = []
        for group in groups:
            series = report.series[group.name]
            rates = Rates.count(group)
            even = break_even(group)
            # unknown without seconds of cycles and bare costs: the plot has no point then
            predicted = predict_speed_up(group, even)
            lengths.append((series, [(rates.by_alpha, group.estimate(ACCEPTANCE_LENGTH))]))
            if predicted:
                speeds.append((series, [(predicted, group.estimate(SPEED_UP))]))
            rows.append(_row(group, rates, even, predicted))
        parts.append((heading, rows))
    figures = [_draw_agreement("τ", "from α", lengths, low=1)]
    if speeds:
        figures.append(_draw_agreement("Speed-up", how, speeds, low=0))
    return section("theory", title, lead, [table(columns, parts), drafter_panels(report, figures)])


def _row(group: Group, rates: Rates, even: float | None, predicted: float | None) -> list[object]:
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


def _draw_agreement(what: str, how: str, series: Agreement, *, low: float) -> Html:
    """Draw measured over predicted values, both on one scale."""
    values: list[float] = []
    for _, points in series:
        for predicted, measured in points:
            values += predicted, measured.value, measured.high
    scale = Scale.over(values, low)
    return draw_plot(
        f"{what}: measured over predicted",
        series,
        x=scale,
        y=scale,
        axes=(f"predicted ({how})", "measured"),
        note="On the dashed line they agree.",
        joined=False,
        diagonal=True,
    )


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
    """Return the modelled speed-up where there are bare costs, else τ over break-even."""
    if group.is_modelled:
        return group.estimate(MODELLED_SPEED_UP).value
    if not even:
        return None
    return group.estimate(ACCEPTANCE_LENGTH).value / even
