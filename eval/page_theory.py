"""The page's figures of theory: what acceptance, and what the bare costs of forwards, predict of τ and of speed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from eval.figures import Scale, figure, legend, plot
from eval.markup import Html
from eval.page_parts import (
    Shown,
    by_temperature,
    code,
    figure_of,
    is_modelled,
    missing,
    modelled,
    panels,
    section,
    table,
)
from eval.results import Answer, Group, beside, cycles, speed_up, taken
from eval.statistics import Estimate
from eval.theory import expected_tokens, tokens_of_rates

Agreement = list[tuple[int, list[tuple[float, Estimate]]]]  # of predicted and measured, by series


def theory(shown: Shown) -> Html:
    """What acceptance predicts against what was measured: tokens per forward, then speed."""
    known = [group for group in shown.drafting if any(cycles(answer) for answer in group.answers)]
    lead = (
        "If every drafted token were kept with the same chance α, whatever came before it, a cycle of γ levels would "
        "commit (1 − α^(γ+1)) / (1 − α) tokens. “By position” gives each level its own chance; both are means over "
        "the cycles, each with the levels that its tree had. Break-even is the length of a cycle in cycles of plain "
        "decoding: with a longer τ the draft is faster. What an answer's end cuts off was accepted and is not in the "
        "measured τ, which short answers feel. "
    )
    if not known:
        return section("theory", "Measured against theory", lead, missing("These results keep no cycles."))
    priced = any(map(is_modelled, known))
    lead += (
        "Predicted speed-up is that of modelled time, from bare forwards measured outside of the loop."
        if priced
        else "Predicted speed-up is τ over break-even: the header has no bare costs (eval.costs) to model it from."
    )
    predictions = {id(group): _predicted(group) for group in known}
    columns = ["drafter", "α", "levels", "τ by α", "τ by position", "τ measured", "break-even τ"]
    columns += ["predicted", "measured"]
    rows = [
        (heat, [[code(group.name), *_theory_row(group, predictions[id(group)])] for group in groups])
        for heat, groups in by_temperature(known)
    ]
    lengths, speeds = Agreement(), Agreement()
    for group in known:
        number, predicted = shown.series[group.name], predictions[id(group)]
        lengths.append((number, [(Rates.of(group).by_alpha, group.estimate(taken))]))
        if predicted:
            speeds.append((number, [(predicted, group.estimate(beside, speed_up))]))
    figures = [_agree("τ", "from α", lengths, 1)]
    if speeds:
        figures.append(_agree("Speed-up", "modelled" if priced else "τ over break-even", speeds, 0))
    shapes = legend(shown.names)
    return section("theory", "Measured against theory", lead, table(columns, rows), shapes, panels(*figures))


def _agree(what: str, how: str, series: Agreement, low: float) -> Html:
    top = [value for _, points in series for at, e in points for value in (at, e.value, e.high)]
    both = Scale.over(top, low)
    titles = (f"predicted ({how})", "measured")
    drawing = plot(series, both, both, titles, f"{what}, measured over predicted", joined=False, diagonal=True)
    return figure(f"{what}: measured over predicted", drawing, "On the dashed line they agree.")


def _theory_row(group: Group, predicted: float | None) -> list[object]:
    known, even = Rates.of(group), break_even(group)
    return [
        f"{known.alpha:.2f}", f"{known.mean_depth:.1f}", f"{known.by_alpha:.2f}", f"{known.by_position:.2f}",
        figure_of(group.estimate(taken)), f"{even:.2f}" if even else "–",
        f"{predicted:.2f} ×" if predicted else "–", figure_of(group.estimate(beside, speed_up), " ×"),
    ]  # fmt: skip


@dataclass(frozen=True)
class Rates:
    """How often drafted tokens are kept, and how deep the trees were that they stood in."""

    alpha: float  # over all levels
    by_level: list[float]  # given that the level before it was kept
    depths: Counter[int]  # cycles by the levels of their tree

    @classmethod
    def of(cls, group: Group) -> Rates:
        """Counted over the cycles of a group."""
        seen = Counter((cycle["accepted"], cycle["depth"]) for answer in group.answers for cycle in cycles(answer))
        depths: Counter[int] = Counter()
        for (_, depth), times in seen.items():
            depths[depth] += times
        levels = range(1, max(depths) + 1)
        tried = [sum(n for (kept, d), n in seen.items() if d >= level and kept >= level - 1) for level in levels]
        right = [sum(n for (kept, _), n in seen.items() if kept >= level) for level in levels]
        by_level = [one / max(number, 1) for one, number in zip(right, tried, strict=True)]
        return cls(sum(right) / max(sum(tried), 1), by_level, depths)

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
        """The same if every level had its own chance."""
        return self._mean(lambda depth: tokens_of_rates(self.by_level[:depth]))

    def _mean(self, of_depth: Callable[[int], float]) -> float:
        return sum(of_depth(depth) * times for depth, times in self.depths.items()) / self.depths.total()


def break_even(group: Group) -> float | None:
    """Seconds of a cycle over those of one of plain decoding; None where they were not kept."""
    mine = _cycle_seconds(group.answers)
    plain = _cycle_seconds(answer["plain"] for answer in group.answers)
    return mine / plain if mine and plain else None


def _cycle_seconds(answers: Iterable[Answer]) -> float:
    spent = [sum(cycle["seconds"].values()) for a in answers for cycle in cycles(a) if cycle.get("seconds")]
    return sum(spent) / len(spent) if spent else 0.0


def _predicted(group: Group) -> float | None:
    """Modelled speed-up where there are bare costs, else τ over break-even."""
    if is_modelled(group):
        return group.estimate(modelled, speed_up).value
    even = break_even(group)
    return group.estimate(taken).value / even if even else None
