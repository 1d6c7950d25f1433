"""Build the sections on speed: the headline, pairwise comparison, batches, speed by task, and the time of a cycle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf, isfinite, log2

from eagle.markup import Html, html, tag
from eval.page.page_acceptance import cycle_seconds
from eval.page.page_parts import (
    BySeries,
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
from eval.result_files.figures import Doublings, Points, Scale, draw_plot
from eval.result_files.results import (
    ACCEPTANCE_LENGTH,
    CPU_SPEED_UP,
    LATENCY,
    MODELLED_SPEED_UP,
    SPEED_UP,
    TOKENS_PER_SECOND,
    Answer,
    Group,
    Metric,
    describe_output,
    describe_tree,
    prompt_key,
    requests_per_step,
    task_of,
)
from eval.result_files.statistics import Estimate

# of a cycle's seconds
PARTS = ("draft", "target", "verify", "other")
# by the sign of the difference from plain decoding
AGAINST_PLAIN = {1: "", 0: "; no difference shown", -1: "; plain decoding is faster"}
PLAIN = Estimate(1, -inf, inf)


def verdicts(report: ReportData) -> Html:
    """Show the fastest drafter at every temperature in large letters, also where plain decoding is faster."""
    items = [_verdict(report, *part) for part in by_temperature(report.drafting)]
    return tag("ul", items, class_="verdicts")


def _verdict(report: ReportData, heading: str, groups: list[Group]) -> Html:
    """Return the fastest drafter of a temperature with its speed, and the drafters that are level with it."""
    best = max(groups, key=_speed)
    speed = best.estimate(SPEED_UP)
    names: list[object] = [f"{heading}: ", code(best.name)]
    # without intervals nothing shows that drafters are level
    others = [group for group in groups if group is not best and isfinite(speed.low)]
    for group in others:
        if not best.compare(group, SPEED_UP).estimate.sign:
            names += [", level with ", code(group.name)]
    rate = f"{best.estimate(TOKENS_PER_SECOND).value:.1f} tokens/s"
    parts = [
        tag("span", names, class_="when"),
        tag("span", f"{speed.value:.2f} × ", tag("span", rate, class_="rate"), class_="big"),
        tag("p", _against_plain(report, best, speed)),
    ]
    if best.had_to_wait:
        value, *_ = best.estimate(CPU_SPEED_UP)
        parts.append(tag("p", f"{value:.2f} × in CPU seconds: other processes used this machine"))
    if best.is_modelled:
        value, low, high = best.estimate(MODELLED_SPEED_UP)
        text = f"{value:.2f} × in modelled time"
        if isfinite(low):
            text += f" ({low:.2f} to {high:.2f})"
        parts.append(tag("p", text))

    length = f"acceptance length τ = {best.estimate(ACCEPTANCE_LENGTH).value:.2f}"
    if best.accepts_nothing:
        length = "no drafted token was accepted"
    parts.append(tag("p", f"{length}; output {describe_output(best)}"))
    return tag("li", parts, tag("p", _setup(report, best), class_="soft"))


def _against_plain(report: ReportData, best: Group, speed: Estimate) -> str:
    """Describe the speedup, and how sure it is."""
    for group in report.groups:
        if not group.drafts and (group.run, group.temperature) == (best.run, best.temperature):
            plain = group.estimate(TOKENS_PER_SECOND).value
    text = f"speedup over plain decoding ({plain:.1f} tokens/s)"
    if not isfinite(speed.low):
        return f"{text}; one conversation has no interval"
    # a speedup of 1 is the speed of plain decoding
    sign = Estimate(speed.value - 1, speed.low - 1, speed.high - 1).sign
    return f"{text}, 95% interval {speed.low:.2f} to {speed.high:.2f}{AGAINST_PLAIN[sign]}"


def _setup(report: ReportData, group: Group) -> list[object]:
    """Describe what was measured: tree, head, dtype, prompts, batch size."""
    run = report.runs[group.run]
    settings = run.settings(group.drafter)
    num_prompts = len({prompt_key(answer)[:3] for answer in group.answers})
    facts = [describe_tree(settings)]
    if settings.get("head"):
        facts.append(html(["head ", code(settings["head"])]))
    facts.append(str(run.header.get("dtype", "")))
    facts.append(_count(num_prompts, "prompt"))
    if group.batch_size > 1:
        facts.append(f"batch size {group.batch_size}")
    parts: list[object] = []
    # results of early releases have no settings
    for fact in filter(None, facts):
        parts += [" · ", fact]
    return parts[1:]


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _speed(group: Group) -> float:
    return group.estimate(SPEED_UP).value


def headline(report: ReportData) -> Section:
    """Show every drafter at every temperature."""
    # columns that no drafter needs are left out
    has_modelled = any(group.is_modelled for group in report.drafting)
    waited = any(group.had_to_wait for group in report.drafting)
    columns = ["drafter", "τ", "tokens/s", "speedup"]
    lead = (
        "τ is the acceptance length: tokens committed per target forward, prefill excluded. Speedup is tokens/s over "
        "those of plain decoding (none) on the same prompts in the same run. "
    )
    if waited:
        columns.append("in CPU seconds")
        lead += "CPU seconds leave out the time in which other processes used the machine. "
    if has_modelled:
        columns.append("modelled")
        lead += (
            "Modelled speedup takes the recorded cycles at the measured costs of single forwards. "
        )
    columns += ["output", "end in a loop"]
    if _has_intervals(report):
        lead += "Small numbers are 95% intervals, by bootstrap over conversations."

    parts = []
    lines: dict[str, Rows] = {}
    for heading, groups in by_temperature(report.groups):
        parts.append((heading, [_headline_row(group, waited, has_modelled) for group in groups]))
        # a row of one point for each drafter
        rows: Rows = []
        for group in groups:
            if group.drafts:
                point = (report.series[group.name], group.estimate(SPEED_UP))
                rows.append((group.name, [point]))
        lines[heading] = rows
    content = [tag("p", lead), table(columns, parts)]
    # a single drafter would be a single point
    if len(report.names) > 1:
        note = "The dashed line is plain decoding."
        content.append(panels(*side_by_side("Speedup", lines, unit=" ×", note=note)))
    return content


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


def comparison(report: ReportData) -> Section:
    """Show differences between drafters by prompt, without a ranking where the interval contains zero."""
    if len(report.names) < 2:
        return Missing("one drafter was measured; eval.drafters names more")
    if not _has_intervals(report):
        return Missing("one conversation gives no intervals; eval.count asks for more")
    has_modelled = all(group.is_modelled for group in report.drafting)
    columns = ["drafter", "against", "prompts", "difference in τ", "in speedup"]
    if has_modelled:
        columns.append("in modelled speedup")
    parts = []
    for heading, groups in by_temperature(report.drafting):
        rows = [_compare(group, other, has_modelled) for group, other in _pairs(groups)]
        if rows:
            parts.append((heading, rows))
    lead = (
        "Differences are paired by prompt, with 95% intervals. Drafters are not ranked where the interval contains "
        "zero: no difference shown."
    )
    return [tag("p", lead), table(columns, parts)]


def _has_intervals(report: ReportData) -> bool:
    return any(isfinite(group.estimate(SPEED_UP).low) for group in report.drafting)


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


def by_task(report: ReportData) -> Section:
    """Show speedup and acceptance length by prompt set and task."""
    tasks: set[str] = set()
    for group in report.drafting:
        tasks |= {task_of(answer) for answer in group.answers}
    if len(tasks) < 2:
        return Missing("all prompts are of one set and task")
    lead = (
        "Speedup and acceptance length by prompt set and task. The dashed line is plain decoding."
    )
    figures = _figures_by_task(report, "Speedup", SPEED_UP, unit=" ×")
    if all(group.is_modelled for group in report.drafting):
        figures += _figures_by_task(report, "Modelled speedup", MODELLED_SPEED_UP, unit=" ×")
    figures += _figures_by_task(report, "Acceptance length τ", ACCEPTANCE_LENGTH, start=1)
    parts = []
    # as tasks differ in the cycles of an answer, so do the two means
    for heading, groups in by_temperature(report.drafting):
        rows: list[list[object]] = []
        for group in groups:
            means = (group.estimate(ACCEPTANCE_LENGTH), group.average_length())
            rows.append([code(group.name), *map(cell, means)])
        parts.append((heading, rows))
    averages = table(["drafter", "τ", "Average_AL"], parts)
    note = "Average_AL is SPEED-Bench's mean: every request counts alike, however many cycles it takes."
    return [tag("p", lead), drafter_panels(report.names, figures), tag("p", note), averages]


def _figures_by_task(
    report: ReportData, label: str, metric: Metric, start: float = 0, unit: str = ""
) -> list[Html]:
    """Draw a panel per temperature with the metric of each drafter by set and task.

    Args:
        report: The results.
        label: The metric's name, in the titles of the figures.
        metric: What is drawn.
        start: The beginning of the axis.
        unit: What stands after every number.
    """
    lines: dict[str, Rows] = {}
    for heading, groups in by_temperature(report.drafting):
        tasks: dict[str, BySeries] = {}
        for group in groups:
            # a panel lists the tasks in the order of the answers
            by_name: dict[str, list[Answer]] = {}
            for answer in group.answers:
                by_name.setdefault(task_of(answer), []).append(answer)

            for name, answers in by_name.items():
                estimate = replace(group, answers=answers).estimate(metric)
                tasks.setdefault(name, []).append((report.series[group.name], estimate))
        lines[heading] = list(tasks.items())
    return side_by_side(f"{label} by task", lines, start=start, unit=unit)


def time_split(report: ReportData) -> Section:
    """Show the milliseconds of a mean cycle, by part."""
    # plain decoding too: its cycle is what a draft has to pay for
    timed = [group for group in report.groups if cycle_seconds(group.cycles)]
    if not timed:
        return Missing("the results file holds no seconds of cycles")
    lead = (
        "Milliseconds of a mean cycle: a draft, one target forward over it, verification and bookkeeping. Drafting "
        "pays where τ is larger than the cycle time over that of plain decoding."
    )
    parts = []
    for heading, groups in by_temperature(timed):
        rows: list[list[object]] = []
        for group in groups:
            means = mean_milliseconds(group)
            cells = [f"{value:.3g}" for value in (*means, sum(means))]
            rows.append([code(group.name), *cells])
        parts.append((heading, rows))
    return [tag("p", lead), table(["drafter", *PARTS, "cycle"], parts)]


def mean_milliseconds(group: Group) -> list[float]:
    """Return the mean milliseconds of each part of a cycle."""
    timed = cycle_seconds(group.cycles)
    means = []
    for part in PARTS:
        total = sum(seconds.get(part, 0.0) for seconds in timed)
        means.append(1000 * total / len(timed))
    return means


def batches(report: ReportData) -> Section:
    """Show every drafter at every batch size, as a table and as plots over the batch size."""
    sizes = {group.batch_size for group in report.every}
    if sizes == {1}:
        return Missing(
            "requests were decoded one at a time; eval.batch_size=[1, 4, 16] adds batches"
        )
    lead = (
        "The batch size is the largest number of requests in a step; a request starts when one before it ends. "
        "Speedup is over plain decoding at the same batch size, prefill included. Latency is the mean time from a "
        "request's start to its end. The end of a prompt set does not fill a batch. Intervals leave out what requests "
        "of one batch share."
    )
    has_modelled = any(group.is_modelled for group in report.every if group.drafts)
    columns = ["drafter", "batch size", "requests a step", "tokens/s", "speedup"]
    if has_modelled:
        columns.append("modelled")
    columns += ["latency", "τ", "output"]
    parts = []
    figures = []
    for heading, groups in by_temperature(report.every):
        # results that were added to hold their batch sizes in any order
        by_size = sorted(groups, key=lambda group: group.batch_size)
        parts.append((heading, [_batch_row(group, has_modelled) for group in by_size]))

        drafting = [group for group in groups if group.drafts]
        name = f"Speedup, {heading}"
        figures.append(_draw_by_size(name, report, drafting, SPEED_UP, unit="× plain decoding"))
        name = f"Tokens per second, {heading}"
        figures.append(
            _draw_by_size(name, report, groups, TOKENS_PER_SECOND, unit="tokens per second")
        )

    content = [tag("p", lead), table(columns, parts)]
    # one size would be one point
    if len(sizes) > 1:
        content += drafter_panels({"none": 0, **report.names}, figures)
    return content


def _batch_row(group: Group, has_modelled: bool) -> list[object]:
    """Return the cells of a drafter at one batch size."""
    speeds = [_gain(group, SPEED_UP, group.drafts, "1 ×")]
    if has_modelled:
        speeds.append(_gain(group, MODELLED_SPEED_UP, group.drafts and group.is_modelled))
    return [
        code(group.name),
        group.batch_size,
        f"{requests_per_step(group):.1f}",
        cell(group.estimate(TOKENS_PER_SECOND), digits=1),
        *speeds,
        cell(group.estimate(LATENCY), " s"),
        cell(group.estimate(ACCEPTANCE_LENGTH)),
        describe_output(group),
    ]


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
    return draw_plot(title, series, x=x_axis, y=Scale.over(ends), axes=("batch size", unit))
