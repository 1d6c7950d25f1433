"""Build the section on batches: throughput, speed-up and latency by batch size."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, log2

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
from eval.page.page_speed import describe_output
from eval.result_files.figures import Points, Scale, draw_plot
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

COLUMNS = (
    "at a time",
    "drafter",
    "texts a step",
    "tokens/s",
    "speed-up",
    "modelled",
    "latency",
    "τ",
    "output",
)
PLAIN = Estimate(1, -inf, inf)


class Doublings(Scale):
    """An axis of logarithms to base 2 that shows the numbers themselves."""

    def format(self, value: float) -> str:
        """Return the number whose logarithm this is."""
        return f"{2**value:g}"


def batches(report: ReportData) -> Html:
    """Show every drafter at every batch size, as a table and as plots over the batch size."""
    title = "Many texts at a time"
    lead = (
        "So many texts are written side by side, and a text begins when one before it has ended. The seconds of each "
        "step are split evenly over the texts in it, and tokens/s are those of all texts over all their seconds, "
        "prompts included. Speed-up is over plain decoding with as many at a time. Latency is the mean time from a "
        "text's admission to its end. Texts a step are fewer than asked for at the end of a prompt set. Intervals are "
        "bootstrap over conversations: what texts of one batch share is not in them."
    )
    if max(group.batch_size for group in report.every) == 1:
        note = missing("One text at a time: eval.batch_size=[1, 4, 16] adds batches.")
        return section("batches", title, lead, note)
    parts = []
    figures = []
    for heading, groups in by_temperature(report.every):
        # results that were added to hold their batch sizes in any order
        by_size = sorted(groups, key=lambda group: group.batch_size)
        parts.append((heading, [_row(group) for group in by_size]))

        drafting = [group for group in groups if group.drafts]
        name = f"Speed-up, {heading}"
        figures.append(_draw(name, report, drafting, SPEED_UP, unit="× plain decoding"))
        name = f"Tokens per second, {heading}"
        figures.append(_draw(name, report, groups, TOKENS_PER_SECOND, unit="tokens/s"))

    return section("batches", title, lead, [table(COLUMNS, parts), drafter_panels(report, figures)])


def _row(group: Group) -> list[object]:
    """Return the cells of a drafter at one batch size."""
    speed_up: object = "1 ×"
    modelled: object = "–"
    if group.drafts:
        speed_up = cell(group.estimate(SPEED_UP), " ×")
        if group.is_modelled:
            modelled = cell(group.estimate(MODELLED_SPEED_UP), " ×")
    return [
        group.batch_size,
        code(group.name),
        f"{texts_in_a_step(group):.1f}",
        cell(group.estimate(TOKENS_PER_SECOND), digits=1),
        speed_up,
        modelled,
        cell(group.estimate(LATENCY), " s"),
        cell(group.estimate(ACCEPTANCE_LENGTH)),
        describe_output(group),
    ]


def texts_in_a_step(group: Group) -> float:
    """Return the mean number of requests in a step."""
    num_steps = sum(batch["steps"] for batch in group.steps)
    # answers that were decoded alone record no steps
    if not num_steps:
        return 1.0
    return sum(batch["texts"] for batch in group.steps) / num_steps


def points_by_size(groups: Sequence[Group], metric: Metric) -> Points:
    """Return the metric over the logarithm of the batch size."""
    by_size = sorted(groups, key=lambda group: group.batch_size)
    return [(log2(group.batch_size), group.estimate(metric)) for group in by_size]


def _draw(
    title: str, report: ReportData, groups: Sequence[Group], metric: Metric, *, unit: str
) -> Html:
    """Draw a line for every drafter, and one for plain decoding."""
    by_name: dict[str, list[Group]] = {}
    for group in groups:
        by_name.setdefault(group.name, []).append(group)
    series = []
    ends: list[float] = []
    for name, sizes in by_name.items():
        points = points_by_size(sizes, metric)
        series.append((report.series[name], points))
        for _, value in points:
            ends += value.value, value.high
    logarithms = sorted({log2(group.batch_size) for group in groups})
    if metric is SPEED_UP:
        # plain decoding is the unit, at every size
        series.insert(0, (0, [(x, PLAIN) for x in logarithms]))
        ends += PLAIN.value, PLAIN.high
    x_axis = Doublings(logarithms[0], max(logarithms[-1], logarithms[0] + 1), step=1)
    return draw_plot(title, series, x=x_axis, y=Scale.over(ends), axes=("texts at a time", unit))
