"""The section on batches: throughput, speed-up and latency by the number of texts that are written side by side."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, log2

from eagle.markup import Html
from eval.page.page_parts import ReportData, by_temperature, cell, code, missing, panels, section, table
from eval.page.page_speed import describe_output
from eval.result_files.figures import Points, Scale, draw_plot, legend
from eval.result_files.results import (
    ACCEPTANCE_LENGTH,
    LATENCY,
    MODELLED_SPEED_UP,
    SPEED_UP,
    TOKENS_PER_SECOND,
    Group,
    Metric,
)
from eval.result_files.statistics import Estimate

COLUMNS = ("at a time", "drafter", "texts a step", "tokens/s", "speed-up", "modelled", "latency", "τ", "output")
PLAIN = Estimate(1, -inf, inf)


class Doublings(Scale):
    """An axis of logarithms to base 2, with the numbers themselves beside it."""

    def format(self, value: float) -> str:
        """The number whose logarithm this is."""
        return f"{2**value:g}"


def batches(report: ReportData) -> Html:
    """Every drafter at every batch size, as a table and as plots over the batch size."""
    title = "Many texts at a time"
    lead = (
        "So many texts are written side by side, and a text begins when one before it has ended. The seconds of each "
        "step are split evenly over the texts in it, and tokens/s are those of all texts over all their seconds, "
        "prompts included. Speed-up is over plain decoding with as many at a time. Latency is the mean time from a "
        "text's admission to its end. Texts a step are fewer than asked for at the end of a prompt set. Intervals are "
        "bootstrap over conversations: what texts of one batch share is not in them."
    )
    if max(group.batch_size for group in report.every) == 1:
        return section("batches", title, lead, missing("One text at a time: eval.batch_size=[1, 4, 16] adds batches."))
    parts = [
        (heading, [_row(group) for group in sorted(groups, key=lambda group: group.batch_size)])
        for heading, groups in by_temperature(report.every)
    ]
    figures = []
    for heading, groups in by_temperature(report.every):
        drafting = [group for group in groups if group.drafter != "none"]
        figures.append(_draw(f"Speed-up, {heading}", report, drafting, SPEED_UP, "× plain decoding"))
        figures.append(_draw(f"Tokens per second, {heading}", report, groups, TOKENS_PER_SECOND, "tokens/s"))
    return section("batches", title, lead, table(COLUMNS, parts), legend(report.names), panels(*figures))


def _row(group: Group) -> list[object]:
    """The cells of a drafter at one batch size."""
    drafts = group.drafter != "none"
    speeds: list[object] = [cell(group.estimate(SPEED_UP), " ×") if drafts else "1 ×", "–"]
    if drafts and group.is_modelled:
        speeds[1] = cell(group.estimate(MODELLED_SPEED_UP), " ×")
    rate, latency = cell(group.estimate(TOKENS_PER_SECOND), digits=1), cell(group.estimate(LATENCY), " s")
    length, texts = cell(group.estimate(ACCEPTANCE_LENGTH)), f"{texts_in_a_step(group):.1f}"
    return [group.batch_size, code(group.name), texts, rate, *speeds, latency, length, describe_output(group)]


def texts_in_a_step(group: Group) -> float:
    """Mean texts of a step."""
    steps = sum(batch["steps"] for batch in group.steps)
    return sum(batch["texts"] for batch in group.steps) / steps if steps else 1.0


def points_by_size(groups: Sequence[Group], metric: Metric) -> Points:
    """The metric over the logarithm of the batch size."""
    by_size = sorted(groups, key=lambda group: group.batch_size)
    return [(log2(group.batch_size), group.estimate(metric)) for group in by_size]


def _draw(title: str, report: ReportData, groups: Sequence[Group], metric: Metric, unit: str) -> Html:
    """A line for every drafter, and one for plain decoding."""
    names = dict.fromkeys(group.name for group in groups)
    series = [
        (report.series[name], points_by_size([group for group in groups if group.name == name], metric))
        for name in names
    ]
    places = sorted({place for _, points in series for place, _ in points})
    if metric is SPEED_UP:
        series.insert(0, (0, [(place, PLAIN) for place in places]))
    y = Scale.over([end for _, points in series for _, value in points for end in (value.value, value.high)])
    x = Doublings(places[0], max(places[-1], places[0] + 1), step=1)
    return draw_plot(title, series, x, y, ("texts at a time", unit))
