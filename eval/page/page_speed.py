"""Sections on speed: the headline, pairwise comparison, speed by task, and the time of a cycle."""

from __future__ import annotations

from itertools import pairwise

from eagle.markup import Html, tag
from eval.page.page_parts import (
    ReportData,
    by_temperature,
    cell,
    code,
    figures_by_task,
    missing,
    panels,
    section,
    side_by_side,
    table,
)
from eval.result_files.figures import draw_stack, legend
from eval.result_files.results import (
    ACCEPTANCE_LENGTH,
    CPU_SPEED_UP,
    MODELLED_SPEED_UP,
    SPEED_UP,
    TOKENS_PER_SECOND,
    Group,
    cycles,
)
from eval.result_files.statistics import Estimate

PARTS = ("draft", "target", "verify", "other")
AGAINST_PLAIN = {
    1: "the speed of plain decoding",
    0: "the speed of plain decoding: no difference shown",
    -1: "the speed of plain decoding: drafting does not pay here",
}


def verdicts(report: ReportData) -> Html:
    """The fastest drafter at every temperature in a large figure, also where it is slower than plain decoding."""
    return tag("ul", [_verdict(*part) for part in by_temperature(report.drafting)], class_="verdicts")


def _verdict(heading: str, groups: list[Group]) -> Html:
    best = max(groups, key=_speed)
    speed, length = best.estimate(SPEED_UP), best.estimate(ACCEPTANCE_LENGTH)
    level = [g.name for g in groups if g is not best and not best.compare(g, SPEED_UP).estimate.sign]
    names = [f"{heading}: ", code(best.name), *[[", level with ", code(name)] for name in level]]
    sign = Estimate(speed.value - 1, speed.low - 1, speed.high - 1).sign
    modelled = Html()
    if best.is_modelled:
        value, low, high = best.estimate(MODELLED_SPEED_UP)
        modelled = tag("p", f"{value:.2f} × in modelled time ({low:.2f} to {high:.2f})")
    return tag("li", [
        tag("span", names, class_="when"),
        tag("span", f"{speed.value:.2f} ×", class_="big"),
        tag("p", f"{AGAINST_PLAIN[sign]} (95% interval {speed.low:.2f} to {speed.high:.2f})"),
        modelled,
        tag("p", f"{length.value:.2f} tokens per target forward; output {describe_output(best)}"),
    ])  # fmt: skip


def _speed(group: Group) -> float:
    return group.estimate(SPEED_UP).value


def describe_output(group: Group) -> str:
    """Whether the group's answers are those of `none`."""
    if group.differing:
        return f"identical in {group.identical} of {group.identical + group.differing}; {group.parting}"
    return f"identical in {group.identical} of {len(group.answers)}" if group.identical else "of the same distribution"


def headline(report: ReportData) -> Html:
    """Every drafter at every temperature."""
    has_modelled = any(group.is_modelled for group in report.drafting)
    waited = any(group.had_to_wait for group in report.drafting)
    columns = ["drafter", "τ", "tokens/s", "speed-up", *["in CPU seconds"] * waited, *["modelled"] * has_modelled]
    columns += ["output", "loops"]

    def row(group: Group) -> list[object]:
        drafts = group.drafter != "none"
        speed = cell(group.estimate(SPEED_UP), " ×") if drafts else "1 ×"
        in_cpu = cell(group.estimate(CPU_SPEED_UP), " ×") if group.has_cpu_seconds and drafts else "–"
        rate = cell(group.estimate(TOKENS_PER_SECOND), digits=1)
        modelled = cell(group.estimate(MODELLED_SPEED_UP), " ×") if group.is_modelled and drafts else "–"
        output = tag("span", describe_output(group), class_="warn" if group.differing else None)
        length = cell(group.estimate(ACCEPTANCE_LENGTH))
        speeds = [speed, *[in_cpu] * waited, *[modelled] * has_modelled]
        return [code(group.name), length, rate, *speeds, output, f"{group.looping:.0%}"]

    lead = (
        "τ is the acceptance length: tokens committed per target forward, its own included, prefill excluded. Speed-up "
        "is tokens per second over those of plain decoding (none) on the same prompts in the same run, in wall time, "
        "and in CPU seconds too where answers had to wait for other work on the machine; modelled speed-up takes the "
        "recorded cycles at the costs of bare forwards and of the loop instead, which other work does not disturb. "
        "Beside each figure is its 95% interval: bootstrap over prompts, clustered by conversation."
    )
    rows = [(heading, [row(group) for group in groups]) for heading, groups in by_temperature(report.groups)]
    lines = {
        heading: [(group.name, [(report.series[group.name], group.estimate(SPEED_UP))]) for group in groups]
        for heading, groups in by_temperature(report.drafting)
    }
    figures = side_by_side("Speed-up", lines, 0, " ×", "The dashed line is plain decoding.")
    return section("headline", "How fast, and how sure", lead, table(columns, rows), panels(*figures))


def comparison(report: ReportData) -> Html:
    """Differences between drafters by prompt; without a ranking where the interval contains zero."""
    if len(report.drafting) < 2:
        return Html()
    has_modelled = all(group.is_modelled for group in report.drafting)
    columns = ["drafter", "against", "prompts", "difference in τ", "in speed-up"]
    columns += ["in modelled speed-up"] * has_modelled
    parts = [
        (heading, [_compare(*pair, has_modelled) for pair in _pairs(groups)])
        for heading, groups in by_temperature(report.drafting)
    ]
    lead = (
        "Pairs answered the same prompts, and each difference is taken by prompt, with its 95% interval. Where the "
        "interval holds zero the report does not rank: no difference shown."
    )
    return section("comparison", "Who is ahead", lead, table(columns, [part for part in parts if part[1]]))


def _pairs(groups: list[Group]) -> list[tuple[Group, Group]]:
    """Each drafter against the fastest of its run, and each run's against the same drafter in the run before it."""
    pairs = []
    for run in dict.fromkeys(group.run for group in groups):
        fastest, *others = sorted((group for group in groups if group.run == run), key=lambda group: -_speed(group))
        pairs += [(fastest, other) for other in others]
    for name in dict.fromkeys(group.drafter for group in groups):
        pairs += [(later, before) for before, later in pairwise(g for g in groups if g.drafter == name)]
    if not pairs:  # runs of one drafter each, under names of their own
        pairs = [(later, before) for before, later in pairwise(groups)]
    return pairs


def _compare(group: Group, other: Group, has_modelled: bool) -> list[object]:
    length = group.compare(other, ACCEPTANCE_LENGTH)
    speeds = [group.compare(other, metric) for metric in (SPEED_UP, *[MODELLED_SPEED_UP] * has_modelled)]
    cells = [_difference(length.estimate, "longer", "shorter")]
    cells += [_difference(speed.estimate, "faster", "slower") for speed in speeds]
    return [code(group.name), code(other.name), length.pairs, *cells]


def _difference(value: Estimate, more: str, less: str) -> list[object]:
    """A difference and its meaning in a word."""
    return [cell(value, signed=True), tag("div", {1: more, -1: less, 0: "no difference shown"}[value.sign])]


def speed_by_task(report: ReportData) -> Html:
    """Speed-up by prompt set and task."""
    lead = "Speed-up in wall time by prompt set and task. Left of the dashed line plain decoding is faster."
    figures = figures_by_task(report, "Speed-up", SPEED_UP, unit=" ×")
    if all(group.is_modelled for group in report.drafting):
        figures += figures_by_task(report, "Modelled speed-up", MODELLED_SPEED_UP, unit=" ×")
    return section("speed", "Speed by task", lead, legend(report.names), panels(*figures))


def time_split(report: ReportData) -> Html:
    """Milliseconds of a mean cycle, by part."""
    title = "Where the time goes"
    lead = (
        "A cycle is one target forward with the draft before it and the bookkeeping after it. The draft pays while τ "
        "is larger than the length of its cycle in cycles of plain decoding."
    )
    timed = [group for group in report.groups if _cycle_seconds(group)]
    if not timed:
        return section("time", title, lead, missing("These results keep no seconds per cycle."))
    chips = [tag("li", tag("i", class_=part), tag("span", part)) for part in PARTS]
    figures = [
        draw_stack(f"Milliseconds per cycle, {heading}", [(g.name, mean_milliseconds(g)) for g in groups], "ms")
        for heading, groups in by_temperature(timed)
    ]
    return section("time", title, lead, tag("ul", chips, class_="legend"), panels(*figures))


def _cycle_seconds(group: Group) -> list[dict[str, float]]:
    """Seconds by part of every cycle that has them."""
    return [cycle["seconds"] for answer in group.answers for cycle in cycles(answer) if cycle.get("seconds")]


def mean_milliseconds(group: Group) -> list[tuple[str, float]]:
    """Mean milliseconds of a cycle, by part."""
    timed = _cycle_seconds(group)
    return [(part, 1000 * sum(seconds.get(part, 0.0) for seconds in timed) / len(timed)) for part in PARTS]
