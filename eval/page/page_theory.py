"""The section on theory: τ and speed as predicted from acceptance and bare costs, against the measured ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from eagle.markup import Html
from eval.page.page_parts import ReportData, by_temperature, cell, code, missing, panels, section, table
from eval.result_files.figures import Scale, draw_plot, legend
from eval.result_files.results import ACCEPTANCE_LENGTH, MODELLED_SPEED_UP, SPEED_UP, Answer, Group, cycles
from eval.result_files.statistics import Estimate

Agreement = list[tuple[int, list[tuple[float, Estimate]]]]  # of predicted and measured, by series
Shapes = Counter[tuple[int, int]]  # cycles by accepted tokens and levels of the tree


def expected_tokens(alpha: float, gamma: int) -> float:
    """(1 - alpha^(gamma+1)) / (1 - alpha): tokens per target forward of a chain with independent acceptances.

    Leviathan et al. 2023 (arXiv 2211.17192); alpha is the acceptance rate of a drafted token, gamma the chain's length.
    """
    check_rate(alpha, gamma)
    return gamma + 1.0 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def tokens_of_rates(rates: Sequence[float]) -> float:
    """1 + r1 + r1 r2 + ...: tokens per target forward; a rate is given that the position before was accepted."""
    return 1 + sum(accumulate(rates, mul))


def check_rate(alpha: float, gamma: int = 0) -> None:
    """Refuse what is no acceptance rate or no length."""
    if not 0 <= alpha <= 1 or gamma < 0:
        raise ValueError(f"alpha = {alpha}, gamma = {gamma}: expected a probability, and a chain of 0 or more tokens")


def count_shapes(answers: Iterable[Answer]) -> Shapes:
    """Count the cycles of answers by accepted tokens and levels of the tree."""
    return Counter((cycle["accepted"], cycle["depth"]) for answer in answers for cycle in cycles(answer))


def count_level(shapes: Shapes, level: int, reached: bool = True) -> tuple[int, int]:
    """Cycles that accepted a level's token, and all cycles, or those that accepted the level before and had this."""
    accepted = sum(count for (length, _), count in shapes.items() if length >= level)
    tried = sum(
        count for (length, depth), count in shapes.items() if not reached or (depth >= level and length >= level - 1)
    )
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
        shapes = count_shapes(group.answers)
        depths: Counter[int] = Counter()
        for (_, depth), times in shapes.items():
            depths[depth] += times
        levels = [count_level(shapes, level) for level in range(1, max(depths) + 1)]
        by_level = [accepted / max(tried, 1) for accepted, tried in levels]
        accepted, tried = (sum(counts) for counts in zip((0, 0), *levels, strict=True))
        return cls(accepted / max(tried, 1), by_level, depths)

    @property
    def mean_depth(self) -> float:
        """Levels of a mean tree."""
        return self._mean(float)

    @property
    def by_alpha(self) -> float:
        """Tokens per target forward if every level had the same chance, whatever came before it."""
        return self._mean(lambda depth: expected_tokens(self.alpha, depth))

    @property
    def by_position(self) -> float:
        """Tokens per target forward if every level had its own chance, whatever came before it."""
        return self._mean(lambda depth: tokens_of_rates(self.by_level[:depth]))

    def _mean(self, value: Callable[[int], float]) -> float:
        return sum(value(depth) * times for depth, times in self.depths.items()) / self.depths.total()


def theory(report: ReportData) -> Html:
    """Predicted against measured τ and speed."""
    title = "Measured against theory"
    groups_with_cycles = [group for group in report.drafting if any(cycles(answer) for answer in group.answers)]
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
    lead += (
        "Predicted speed-up is that of modelled time, from bare forwards measured outside of the loop."
        if has_modelled
        else "Predicted speed-up is τ over break-even: the header has no bare costs (eval.costs) to model it from."
    )
    columns = ["drafter", "α", "levels", "τ by α", "τ by position", "τ measured", "break-even τ"]
    columns += ["predicted", "measured"]
    parts = []
    lengths, speeds = Agreement(), Agreement()
    for heading, groups in by_temperature(groups_with_cycles):
        rows = []
        for group in groups:
            rates, series = Rates.count(group), report.series[group.name]
            length, speed = group.estimate(ACCEPTANCE_LENGTH), group.estimate(SPEED_UP)
            even = break_even(group)
            predicted = predict_speed_up(group, even)
            lengths.append((series, [(rates.by_alpha, length)]))
            if predicted:
                speeds.append((series, [(predicted, speed)]))
            rows.append([
                code(group.name), f"{rates.alpha:.2f}", f"{rates.mean_depth:.1f}", f"{rates.by_alpha:.2f}",
                f"{rates.by_position:.2f}", cell(length), f"{even:.2f}" if even else "–",
                f"{predicted:.2f} ×" if predicted else "–", cell(speed, " ×"),
            ])  # fmt: skip
        parts.append((heading, rows))
    figures = [_draw_agreement("τ", "from α", lengths, 1)]
    if speeds:
        figures.append(_draw_agreement("Speed-up", "modelled" if has_modelled else "τ over break-even", speeds, 0))
    return section("theory", title, lead, table(columns, parts), legend(report.names), panels(*figures))


def _draw_agreement(what: str, how: str, series: Agreement, low: float) -> Html:
    top = [value for _, points in series for at, e in points for value in (at, e.value, e.high)]
    both = Scale.over(top, low)
    title, note = f"{what}: measured over predicted", "On the dashed line they agree."
    axes = (f"predicted ({how})", "measured")
    return draw_plot(title, series, both, both, axes, note, joined=False, diagonal=True)


def break_even(group: Group) -> float | None:
    """Mean seconds of a cycle over those of a cycle of plain decoding; None where they were not kept."""
    drafting = _mean_cycle_seconds(group.answers)
    plain = _mean_cycle_seconds(answer["baseline"] for answer in group.answers)
    return drafting / plain if drafting and plain else None


def _mean_cycle_seconds(answers: Iterable[Answer]) -> float:
    seconds = [sum(cycle["seconds"].values()) for a in answers for cycle in cycles(a) if cycle.get("seconds")]
    return sum(seconds) / len(seconds) if seconds else 0.0


def predict_speed_up(group: Group, even: float | None) -> float | None:
    """Modelled speed-up where there are bare costs, else τ over break-even."""
    if group.is_modelled:
        return group.estimate(MODELLED_SPEED_UP).value
    return group.estimate(ACCEPTANCE_LENGTH).value / even if even else None
