"""The page's figures of speed: the headline, who is ahead, where it pays, and where the time goes."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from math import isfinite

from eval.figures import dots, figure, legend, stack
from eval.markup import Html, tag
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
from eval.results import Answer, Group, Measure, beside, cycles, pace, speed_up, taken
from eval.statistics import Estimate, Statistic, ratio

Rows = list[tuple[str, list[tuple[int, Estimate]]]]  # of names, each with figures by series
PARTS = ("draft", "target", "verify", "other")


def verdicts(shown: Shown) -> Html:
    """The fastest at every temperature, in a large figure; slower than plain decoding is said as loudly."""
    return tag("ul", [_verdict(heat, groups) for heat, groups in by_temperature(shown.drafting)], class_="verdicts")


def _verdict(heat: str, groups: list[Group]) -> Html:
    best = max(groups, key=lambda group: group.estimate(beside, speed_up).value)
    speed, length = best.estimate(beside, speed_up), best.estimate(taken)
    level = [g.name for g in groups if g is not best and _ahead(best, g) == 0]
    ahead = [f"{heat}: ", code(best.name), *[[", level with ", code(name)] for name in level]]
    against = Estimate(speed.value - 1, speed.low - 1, speed.high - 1).sign
    said = {
        1: "the speed of plain decoding",
        0: "the speed of plain decoding: no difference shown",
        -1: "the speed of plain decoding: drafting does not pay here",
    }[against]
    return tag("li", [
        tag("span", ahead, class_="when"),
        tag("span", f"{speed.value:.2f} ×", class_="big"),
        tag("p", f"{said} (95% interval {speed.low:.2f} to {speed.high:.2f})"),
        _modelled_too(best),
        tag("p", f"{length.value:.2f} tokens per target forward; output {said_of(best)}"),
    ])  # fmt: skip


def _modelled_too(group: Group) -> Html:
    if not is_modelled(group):
        return Html()
    speed = group.estimate(modelled, speed_up)
    return tag("p", f"{speed.value:.2f} × in modelled time ({speed.low:.2f} to {speed.high:.2f})")


def _ahead(group: Group, other: Group) -> int:
    """Whether speed-up differs beyond its interval, and to which side."""
    return group.more_than(other, beside, speed_up).estimate.sign


def said_of(group: Group) -> str:
    """Whether the group's answers are those of `none`."""
    if group.differing:
        return f"differs in {group.differing} of {len(group.answers)}"
    return f"identical in {group.identical} of {len(group.answers)}" if group.identical else "of the same law"


def headline(shown: Shown) -> Html:
    """Every drafter at every temperature."""
    known = any(map(is_modelled, shown.drafting))
    columns = ["drafter", "τ", "tokens/s", "speed-up", *["modelled"] * known, "output", "loops"]

    def row(group: Group) -> list[object]:
        speed = figure_of(group.estimate(beside, speed_up), " ×") if group.drafter != "none" else "1 ×"
        rate = figure_of(group.estimate(pace), digits=1)
        priced = is_modelled(group) and group.drafter != "none"
        modelled_speed = [figure_of(group.estimate(modelled, speed_up), " ×") if priced else "–"] * known
        output = tag("span", said_of(group), class_="warn" if group.differing else None)
        length = figure_of(group.estimate(taken))
        return [code(group.name), length, rate, speed, *modelled_speed, output, f"{group.looping:.0%}"]

    lead = (
        "τ is the acceptance length: tokens committed per target forward, its own included, prefill excluded. Speed-up "
        "is tokens per second over those of plain decoding (none) on the same prompts in the same run, in wall time; "
        "modelled speed-up takes the recorded cycles at the bare costs of their forwards instead, which other work on "
        "the machine does not disturb. Beside each figure is its 95% interval: bootstrap over prompts, clustered by "
        "conversation."
    )
    rows = [(heat, [row(group) for group in groups]) for heat, groups in by_temperature(shown.groups)]
    lines = {
        heat: [(group.name, [(shown.series[group.name], group.estimate(beside, speed_up))]) for group in groups]
        for heat, groups in by_temperature(shown.drafting)
    }
    drawn = side_by_side("Speed-up", lines, 0, " ×", "The dashed line is plain decoding.")
    return section("headline", "How fast, and how sure", lead, table(columns, rows), panels(*drawn))


def side_by_side(label: str, lines: dict[str, Rows], start: float, unit: str, note: str = "") -> list[Html]:
    """A panel per temperature, all over one axis; plain decoding is at 1."""
    ends = [
        end for rows in lines.values() for _, points in rows for _, value in points for end in value if isfinite(end)
    ]
    return [
        figure(f"{label}, {heat}", dots(rows, f"{label} at {heat}", unit, start, 1, max(ends)), note)
        for heat, rows in lines.items()
    ]


def comparison(shown: Shown) -> Html:
    """Who is ahead of whom, by prompt; where the interval spans zero nobody is."""
    if len(shown.drafting) < 2:
        return Html()
    known = all(map(is_modelled, shown.drafting))
    columns = ["drafter", "against", "prompts", "difference in τ", "in speed-up", *["in modelled speed-up"] * known]
    rows = [(heat, [_versus(*pair) for pair in _pairs(groups)]) for heat, groups in by_temperature(shown.drafting)]
    lead = (
        "Pairs answered the same prompts, and each difference is taken by prompt, with its 95% interval. Where the "
        "interval holds zero the report does not rank: no difference shown."
    )
    return section("comparison", "Who is ahead", lead, table(columns, [part for part in rows if part[1]]))


def _pairs(groups: list[Group]) -> list[tuple[Group, Group]]:
    """Each drafter against the fastest of its run, and each run's against the same drafter in the run before it."""
    pairs = []
    for run in dict.fromkeys(group.run for group in groups):
        own = sorted((g for g in groups if g.run == run), key=lambda g: -g.estimate(beside, speed_up).value)
        pairs += [(own[0], other) for other in own[1:]]
    for name in dict.fromkeys(group.drafter for group in groups):
        pairs += [(later, before) for before, later in pairwise(g for g in groups if g.drafter == name)]
    if not pairs and len(groups) > 1:  # runs of one drafter each, under names of their own
        pairs = [(later, before) for before, later in pairwise(groups)]
    return pairs


def _versus(group: Group, other: Group) -> list[object]:
    length, speed = group.more_than(other, taken), group.more_than(other, beside, speed_up)
    said = [_said(length.estimate, "longer", "shorter"), _said(speed.estimate, "faster", "slower")]
    if is_modelled(group) and is_modelled(other):
        said.append(_said(group.more_than(other, modelled, speed_up).estimate, "faster", "slower"))
    return [code(group.name), code(other.name), length.pairs, *said]


def _said(difference: Estimate, more: str, less: str) -> list[object]:
    """A difference, and what may be said of it."""
    said = {1: more, -1: less, 0: "no difference shown"}[difference.sign]
    return [figure_of(difference, signed=True), tag("div", said)]


def tasks(
    shown: Shown, label: str, measure: Measure, statistic: Statistic = ratio, start: float = 0, unit: str = ""
) -> list[Html]:
    """A panel per temperature: a statistic by set and task."""
    lines: dict[str, Rows] = {}
    for heat, groups in by_temperature(shown.drafting):
        rows = lines.setdefault(heat, [])
        for name in dict.fromkeys(task_of(answer) for group in groups for answer in group.answers):
            parts = [(g, g.part(partial(_is_of, name))) for g in groups]
            points = [(shown.series[g.name], part.estimate(measure, statistic)) for g, part in parts if part.answers]
            rows.append((name, points))
    return side_by_side(f"{label} by task", lines, start, unit)


def _is_of(task: str, answer: Answer) -> bool:
    return task_of(answer) == task


def speed_by_task(shown: Shown) -> Html:
    """Where it pays, and where it does not."""
    lead = "Speed-up in wall time by prompt set and task. Left of the dashed line plain decoding is faster."
    figures = tasks(shown, "Speed-up", beside, speed_up, unit=" ×")
    if all(map(is_modelled, shown.drafting)):
        figures += tasks(shown, "Modelled speed-up", modelled, speed_up, unit=" ×")
    return section("speed", "Speed by task", lead, legend(shown.names), panels(*figures))


def task_of(answer: Answer) -> str:
    """The prompt set, and the task within it."""
    return " · ".join(str(part) for part in (answer.get("set") or "prompts", answer.get("task")) if part)


def time_split(shown: Shown) -> Html:
    """Milliseconds of a mean cycle, by part."""
    timed = [g for g in shown.groups if any(cycle.get("seconds") for a in g.answers for cycle in cycles(a))]
    lead = (
        "A cycle is one target forward with the draft before it and the bookkeeping after it. The draft pays while τ "
        "is larger than the length of its cycle in cycles of plain decoding."
    )
    if not timed:
        return section("time", "Where the time goes", lead, missing("These results keep no seconds per cycle."))
    chips = [tag("li", tag("i", class_=part), tag("span", part)) for part in PARTS]
    figures = [
        figure(
            f"Milliseconds per cycle, {heat}",
            stack([(g.name, split(g)) for g in groups], f"milliseconds per cycle at {heat}, by part", "ms"),
        )
        for heat, groups in by_temperature(timed)
    ]
    return section("time", "Where the time goes", lead, tag("ul", chips, class_="legend"), panels(*figures))


def split(group: Group) -> list[tuple[str, float]]:
    """Mean milliseconds of a cycle, by part."""
    timed = [cycle["seconds"] for answer in group.answers for cycle in cycles(answer) if cycle.get("seconds")]
    return [(part, 1000 * sum(seconds.get(part, 0.0) for seconds in timed) / len(timed)) for part in PARTS]
