"""Build the sections on speed: the headline, pairwise comparison, batches, speed by task, and the time of a cycle."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf, log2

from eagle.markup import Html, tag
from eval.page.page_acceptance import cycle_seconds
from eval.page.page_parts import (
    ReportData,
    Rows,
    by_temperature,
    cell,
    code,
    drafter_panels,
    figures_by_task,
    missing,
    panels,
    section,
    side_by_side,
    table,
)
from eval.result_files.figures import Points, Scale, draw_plot, draw_stack
from eval.result_files.results import (
    ACCEPTANCE_LENGTH,
    CPU_SPEED_UP,
    LATENCY,
    MODELLED_SPEED_UP,
    SPEED_UP,
    TOKENS_PER_SECOND,
    Group,
    Metric,
)
from eval.result_files.statistics import Estimate

# of a cycle's seconds; the style sheet has a colour for each
PARTS = ("draft", "target", "verify", "other")
# by the sign of the difference from plain decoding
AGAINST_PLAIN = {
    1: "the speed of plain decoding",
    0: "the speed of plain decoding: no difference shown",
    -1: "the speed of plain decoding: drafting does not pay here",
}
BATCH_COLUMNS = (
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


def verdicts(report: ReportData) -> Html:
    """Show the fastest drafter at every temperature in large letters, also where plain decoding is faster."""
    items = [_verdict(*part) for part in by_temperature(report.drafting)]
    return tag("ul", items, class_="verdicts")


def _verdict(heading: str, groups: list[Group]) -> Html:
    """Return the fastest drafter of a temperature, its speed-up, and the drafters that are level with it."""
    best = max(groups, key=_speed)
    speed = best.estimate(SPEED_UP)
    length = best.estimate(ACCEPTANCE_LENGTH)
    names: list[object] = [f"{heading}: ", code(best.name)]
    for group in groups:
        if group is not best and not best.compare(group, SPEED_UP).estimate.sign:
            names += [", level with ", code(group.name)]
    # a speed-up of 1 is the speed of plain decoding
    sign = Estimate(speed.value - 1, speed.low - 1, speed.high - 1).sign
    parts = [
        tag("span", names, class_="when"),
        tag("span", f"{speed.value:.2f} ×", class_="big"),
        tag("p", f"{AGAINST_PLAIN[sign]} (95% interval {speed.low:.2f} to {speed.high:.2f})"),
    ]
    if best.is_modelled:
        value, low, high = best.estimate(MODELLED_SPEED_UP)
        parts.append(tag("p", f"{value:.2f} × in modelled time ({low:.2f} to {high:.2f})"))
    text = f"{length.value:.2f} tokens per target forward; output {describe_output(best)}"
    return tag("li", parts, tag("p", text))


def _speed(group: Group) -> float:
    return group.estimate(SPEED_UP).value


def describe_output(group: Group) -> str:
    """Describe whether the group's answers are those of `none`."""
    if group.differing:
        compared = group.identical + group.differing
        return f"identical in {group.identical} of {compared}; {group.parting}"
    if group.identical:
        return f"identical in {group.identical} of {len(group.answers)}"
    return "of the same distribution"


def headline(report: ReportData) -> Html:
    """Show every drafter at every temperature."""
    # columns that no drafter needs are left out
    has_modelled = any(group.is_modelled for group in report.drafting)
    waited = any(group.had_to_wait for group in report.drafting)
    columns = ["drafter", "τ", "tokens/s", "speed-up"]
    if waited:
        columns.append("in CPU seconds")
    if has_modelled:
        columns.append("modelled")
    columns += ["output", "loops"]
    lead = (
        "τ is the acceptance length: tokens committed per target forward, its own included, prefill excluded. Speed-up "
        "is tokens per second over those of plain decoding (none) on the same prompts in the same run, in wall time, "
        "and in CPU seconds too where answers had to wait for other work on the machine; modelled speed-up takes the "
        "recorded cycles at the costs of bare forwards and of the loop instead, which other work does not disturb. "
        "Beside each figure is its 95% interval: bootstrap over prompts, clustered by conversation."
    )
    parts = []
    for heading, groups in by_temperature(report.groups):
        parts.append((heading, [_headline_row(group, waited, has_modelled) for group in groups]))

    lines: dict[str, Rows] = {}
    for heading, groups in by_temperature(report.drafting):
        # a row of one point for each drafter
        rows: Rows = []
        for group in groups:
            point = (report.series[group.name], group.estimate(SPEED_UP))
            rows.append((group.name, [point]))
        lines[heading] = rows
    figures = side_by_side("Speed-up", lines, unit=" ×", note="The dashed line is plain decoding.")
    content = [table(columns, parts), panels(*figures)]
    return section("headline", "How fast, and how sure", lead, content)


def _headline_row(group: Group, waited: bool, has_modelled: bool) -> list[object]:
    """Return the cells of a drafter, with CPU and modelled time where the table has these columns."""
    speeds: list[object] = [_gain(group, SPEED_UP, group.drafts, "1 ×")]
    if waited:
        speeds.append(_gain(group, CPU_SPEED_UP, group.drafts and group.has_cpu_seconds))
    if has_modelled:
        speeds.append(_gain(group, MODELLED_SPEED_UP, group.drafts and group.is_modelled))
    return [
        code(group.name),
        cell(group.estimate(ACCEPTANCE_LENGTH)),
        cell(group.estimate(TOKENS_PER_SECOND), digits=1),
        *speeds,
        tag("span", describe_output(group), class_="warn" if group.differing else None),
        f"{group.looping:.0%}",
    ]


def _gain(group: Group, metric: Metric, is_measured: bool, otherwise: str = "–") -> object:
    if not is_measured:
        return otherwise
    return cell(group.estimate(metric), " ×")


def comparison(report: ReportData) -> Html:
    """Show differences between drafters by prompt, without a ranking where the interval contains zero."""
    if len(report.drafting) < 2:
        return Html()
    has_modelled = all(group.is_modelled for group in report.drafting)
    columns = ["drafter", "against", "prompts", "difference in τ", "in speed-up"]
    if has_modelled:
        columns.append("in modelled speed-up")
    parts = []
    for heading, groups in by_temperature(report.drafting):
        rows = [_compare(group, other, has_modelled) for group, other in _pairs(groups)]
        if rows:
            parts.append((heading, rows))
    lead = (
        "Pairs answered the same prompts, and each difference is taken by prompt, with its 95% interval. Where the "
        "interval holds zero the report does not rank: no difference shown."
    )
    return section("comparison", "Who is ahead", lead, table(columns, parts))


def _pairs(groups: list[Group]) -> list[tuple[Group, Group]]:
    """Pair each drafter with the fastest of its run, and each run's with the same drafter in the run before."""
    by_run: dict[str, list[Group]] = {}
    by_drafter: dict[str, list[Group]] = {}
    for group in groups:
        by_run.setdefault(group.run, []).append(group)
        by_drafter.setdefault(group.drafter, []).append(group)

    pairs = []
    # within a run, where both drafters met the same machine
    for of_run in by_run.values():
        fastest, *slower = sorted(of_run, key=lambda group: -_speed(group))
        pairs += [(fastest, other) for other in slower]
    for of_drafter in by_drafter.values():
        pairs += [(later, earlier) for earlier, later in pairwise(of_drafter)]
    # runs of one drafter each, under names of their own
    if not pairs:
        pairs = [(later, earlier) for earlier, later in pairwise(groups)]
    return pairs


def _compare(group: Group, other: Group, has_modelled: bool) -> list[object]:
    length = group.compare(other, ACCEPTANCE_LENGTH)
    metrics = [SPEED_UP, MODELLED_SPEED_UP] if has_modelled else [SPEED_UP]
    cells = [_difference(length.estimate, "longer", "shorter")]
    for metric in metrics:
        cells.append(_difference(group.compare(other, metric).estimate, "faster", "slower"))
    return [code(group.name), code(other.name), length.pairs, *cells]


def _difference(value: Estimate, more: str, less: str) -> list[object]:
    """Return a difference and its meaning in a word."""
    words = {1: more, -1: less, 0: "no difference shown"}
    return [cell(value, signed=True), tag("div", words[value.sign])]


def speed_by_task(report: ReportData) -> Html:
    """Show the speed-up by prompt set and task."""
    lead = "Speed-up in wall time by prompt set and task. Left of the dashed line plain decoding is faster."
    figures = figures_by_task(report, "Speed-up", SPEED_UP, unit=" ×")
    if all(group.is_modelled for group in report.drafting):
        figures += figures_by_task(report, "Modelled speed-up", MODELLED_SPEED_UP, unit=" ×")
    return section("speed", "Speed by task", lead, drafter_panels(report, figures))


def time_split(report: ReportData) -> Html:
    """Show the milliseconds of a mean cycle, by part."""
    title = "Where the time goes"
    lead = (
        "A cycle is one target forward with the draft before it and the bookkeeping after it. The draft pays while τ "
        "is larger than the length of its cycle in cycles of plain decoding."
    )
    # plain decoding too: its cycle is what a draft has to pay for
    timed = [group for group in report.groups if cycle_seconds(group.cycles)]
    if not timed:
        return section("time", title, lead, missing("These results keep no seconds per cycle."))

    chips = [tag("li", tag("i", class_=part), tag("span", part)) for part in PARTS]
    figures = []
    for heading, groups in by_temperature(timed):
        rows = [(group.name, mean_milliseconds(group)) for group in groups]
        figures.append(draw_stack(f"Milliseconds per cycle, {heading}", rows, "ms"))
    content = [tag("ul", chips, class_="legend"), panels(*figures)]
    return section("time", title, lead, content)


def mean_milliseconds(group: Group) -> list[tuple[str, float]]:
    """Return the mean milliseconds of a cycle, by part."""
    timed = cycle_seconds(group.cycles)
    means = []
    for part in PARTS:
        total = sum(seconds.get(part, 0.0) for seconds in timed)
        means.append((part, 1000 * total / len(timed)))
    return means


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
        parts.append((heading, [_batch_row(group) for group in by_size]))

        drafting = [group for group in groups if group.drafts]
        name = f"Speed-up, {heading}"
        figures.append(_draw_by_size(name, report, drafting, SPEED_UP, unit="× plain decoding"))
        name = f"Tokens per second, {heading}"
        figures.append(_draw_by_size(name, report, groups, TOKENS_PER_SECOND, unit="tokens/s"))

    return section(
        "batches", title, lead, [table(BATCH_COLUMNS, parts), drafter_panels(report, figures)]
    )


def _batch_row(group: Group) -> list[object]:
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


def _draw_by_size(
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
