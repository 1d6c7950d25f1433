"""Sections on acceptance: by position, by task and rule, accepted lengths, calibration, and nodes of the tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise

from eagle.markup import Html
from eval.page.page_parts import (
    ReportData,
    Rows,
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
from eval.page.page_theory import count_level, count_shapes
from eval.result_files.buckets import ENOUGH, EVERY, several_buckets
from eval.result_files.figures import Points, Scale, draw_bars, draw_plot, draw_tree, legend
from eval.result_files.results import ACCEPTANCE_LENGTH, Answer, Group, Metric, cycles, prompt_key
from eval.result_files.statistics import Row, estimate

SHARE = Scale(0, 1, percent=True, step=0.2)
BINS = 8  # of equally many drafted tokens
NODES, RARE = 16, 0.01  # most used nodes drawn, and none that fewer cycles reach


def positions(report: ReportData) -> Html:
    """Acceptance rate of each level of the draft: of all cycles, and of those that reached the level."""
    title = "Acceptance by position"
    lead = (
        "Of all cycles: how often at least so many drafted tokens were accepted. Of those that came so far: how often "
        "a level's token was, where the one before it was accepted and the tree had this level."
    )
    groups_with_cycles = [group for group in report.drafting if any(cycles(answer) for answer in group.answers)]
    if not groups_with_cycles:
        return section("position", title, lead, missing("These results keep no cycles."))
    figures = []
    for heading, groups in by_temperature(groups_with_cycles):
        for name, reached in (("of all cycles", False), ("of those that came so far", True)):
            series = [(report.series[group.name], by_position(group, reached)) for group in groups]
            x = Scale(1, max(2, *(len(points) for _, points in series)), step=1)
            figures.append(draw_plot(f"{heading}, {name}", series, x, SHARE, ("position in the draft", "accepted")))
    return section("position", title, lead, legend(report.names), panels(*figures))


def by_position(group: Group, reached: bool) -> Points:
    """The share of cycles that accepted each level, of all or of those that had accepted the level before it."""
    shapes = {id(answer): count_shapes([answer]) for answer in group.answers}
    levels = max(depth for counts in shapes.values() for _, depth in counts)

    def count(level: int) -> Callable[[Answer], Row]:
        return lambda answer: count_level(shapes[id(answer)], level, reached)

    return [(level, group.estimate(Metric(count(level)))) for level in range(1, levels + 1)]


def by_task(report: ReportData) -> Html:
    """Acceptance length by task and by rule."""
    lead = "Tokens per target forward by prompt set and task; a τ of 1 is plain decoding."
    figures = figures_by_task(report, "τ", ACCEPTANCE_LENGTH, start=1)
    rows = [
        (code(group.name), heading, group.rule, cell(group.estimate(ACCEPTANCE_LENGTH)))
        for heading, groups in by_temperature(report.drafting)
        for group in groups
    ]
    by_rule = table(["drafter", "temperature", "children drafted", "τ"], [("", rows)])
    title = "Acceptance by task, temperature and rule"
    return section("task", title, lead, legend(report.names), panels(*figures), by_rule)


def by_bucket(report: ReportData) -> Html:
    """Acceptance length by tokens of context, and by tokens of the answer."""
    figures = []
    for buckets in EVERY:
        lines: dict[str, Rows] = {}
        for heading, groups in by_temperature(report.drafting):
            lengths = [(report.series[group.name], buckets.acceptance_lengths(group)) for group in groups]
            for bucket in several_buckets([part for _, part in lengths]):
                points = [(number, part[bucket]) for number, part in lengths if bucket in part]
                lines.setdefault(heading, []).append((buckets.name(bucket), points))
        figures += side_by_side(f"τ by {buckets.title}", lines, 1, "")
    title = "Acceptance by context and place in the answer"
    lead = (
        "Tokens per target forward by what stood before it: tokens of prompt and answer, and tokens of the answer "
        f"alone. A drafter with fewer than {ENOUGH} cycles in a range is left out there."
    )
    return section("context", title, lead, legend(report.names), panels(*figures)) if figures else Html()


def lengths(report: ReportData) -> Html:
    """Distribution of the accepted tokens of a cycle."""
    lead = "The share of cycles that accepted so many drafted tokens; the target's own token comes on top."
    shares_by_group = [(group, shares) for group in report.drafting if (shares := accepted_lengths(group))]
    if not shares_by_group:
        return section("length", "Accepted length", lead, missing("These results keep no cycles."))
    y = Scale.over([share for _, shares in shares_by_group for share in shares], percent=True)
    figures = [
        draw_bars(
            f"{group.name}, T = {group.temperature:g}",
            shares,
            y,
            report.series[group.name],
            ("accepted tokens", "share"),
            f"mean {sum(number * share for number, share in enumerate(shares)):.2f}",
        )
        for group, shares in shares_by_group
    ]
    return section("length", "Accepted length", lead, panels(*figures))


def accepted_lengths(group: Group) -> list[float]:
    """The share of cycles that accepted 0, 1, 2 ... drafted tokens."""
    counts = Counter(cycle["accepted"] for answer in group.answers for cycle in cycles(answer))
    return [counts[length] / counts.total() for length in range(max(counts, default=-1) + 1)]


def calibration(report: ReportData) -> Html:
    """The draft's confidence against the share accepted."""
    lead = (
        "Each drafted token whose parent was accepted has a probability in the draft's eyes, and was accepted or not. "
        f"A point holds an {BINS}th of them, by confidence; on the dashed line the draft is as right as it believes."
    )
    bins_by_group = [(group, bins) for group in report.drafting if (bins := bin_confidences(group))]
    if not bins_by_group:
        note = "These results keep no confidences: a cycle's “confidence” would be a list of [probability, accepted]."
        return section("calibration", "Calibration", lead, missing(note))
    figures = []
    for temperature in dict.fromkeys(group.temperature for group, _ in bins_by_group):
        bins_by_name = {group.name: bins for group, bins in bins_by_group if group.temperature == temperature}
        series = [(report.series[name], bins) for name, bins in bins_by_name.items()]
        errors = ", ".join(f"{name} {_calibration_error(bins):.0%}" for name, bins in bins_by_name.items())
        title, note = f"Accepted by confidence, T = {temperature:g}", f"Mean distance from the line: {errors}."
        axes = ("confidence of the draft", "accepted")
        figures.append(draw_plot(title, series, SHARE, SHARE, axes, note, diagonal=True))
    return section("calibration", "Calibration", lead, legend(report.names), panels(*figures))


def _calibration_error(bins: Points) -> float:
    return sum(abs(confidence - share.value) for confidence, share in bins) / len(bins)


def bin_confidences(group: Group) -> Points:
    """Mean confidence and share accepted, in bins of equally many drafted tokens."""
    tokens = sorted(_confidences(group), key=lambda token: token[1])
    cuts = [len(tokens) * place // BINS for place in range(BINS + 1)]
    points = []
    for left, right in pairwise(cuts):
        if inside := tokens[left:right]:
            rows: dict[object, list[Row]] = {}
            for conversation, _, accepted in inside:
                rows.setdefault(conversation, []).append((accepted, 1))
            points.append((sum(confidence for _, confidence, _ in inside) / len(inside), estimate(rows)))
    return points


def _confidences(group: Group) -> Iterator[tuple[object, float, bool]]:
    """Conversation, confidence and whether it was accepted, of every drafted token whose parent was."""
    for answer in group.answers:
        for cycle in cycles(answer):
            for confidence, accepted in cycle.get("confidence") or ():
                yield prompt_key(answer)[:2], confidence, accepted


def nodes(report: ReportData) -> Html:
    """Places of the accepted tokens in the tree."""
    lead = (
        f"The {NODES} most used nodes, of those that at least {RARE:.0%} of the cycles reached: in each its rank among "
        "its siblings, below it the share of cycles in which the target went there."
    )
    shares_by_group = [(group, shares) for group in report.drafting if len(shares := most_used_nodes(group)) > 1]
    if not shares_by_group:
        note = "These results keep no paths: a cycle's “path” would be the ranks of its accepted tokens among siblings."
        return section("nodes", "Most used nodes", lead, missing(note))
    figures = [draw_tree(f"{group.name}, T = {group.temperature:g}", shares) for group, shares in shares_by_group]
    return section("nodes", "Most used nodes", lead, panels(*figures))


def most_used_nodes(group: Group) -> dict[tuple[int, ...], float]:
    """The most often accepted nodes, by their ranks, as shares of all cycles."""
    paths = [cycle["path"] for answer in group.answers for cycle in cycles(answer) if cycle.get("path") is not None]
    counts: Counter[tuple[int, ...]] = Counter()
    for ranks in paths:
        counts.update(tuple(path) for path in accumulate(([rank] for rank in ranks), initial=[]))
    # a parent is never rarer than its child, and comes first where they are level: so no node lacks its parent
    order = sorted(counts, key=lambda path: (-counts[path], len(path), path))
    return {path: counts[path] / len(paths) for path in order[: NODES + 1] if counts[path] >= RARE * len(paths)}
