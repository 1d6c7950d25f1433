"""Build the sections on acceptance: by position, task and rule, accepted lengths, calibration, tree nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise

from eagle.markup import Html
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
from eval.page.page_theory import count_level, count_shapes
from eval.result_files.buckets import ENOUGH, EVERY, several_buckets
from eval.result_files.figures import Points, Scale, draw_bars, draw_plot, draw_tree
from eval.result_files.results import ACCEPTANCE_LENGTH, Answer, Group, Metric, cycles, prompt_key
from eval.result_files.statistics import Row, estimate

SHARE = Scale(0, 1, percent=True, step=0.2)
# of equally many drafted tokens
BINS = 8
# most used nodes shown
NODES = 16
# nodes that a smaller share of the cycles reached are not shown
RARE = 0.01


def positions(report: ReportData) -> Html:
    """Show the acceptance rate of each level of the draft: of all cycles, and of those that reached the level."""
    title = "Acceptance by position"
    lead = (
        "Of all cycles: how often at least so many drafted tokens were accepted. Of those that came so far: how often "
        "a level's token was, where the one before it was accepted and the tree had this level."
    )
    groups_with_cycles = [group for group in report.drafting if group.cycles]
    if not groups_with_cycles:
        return section("position", title, lead, missing("These results keep no cycles."))
    figures = []
    for heading, groups in by_temperature(groups_with_cycles):
        for name, reached in (("of all cycles", False), ("of those that came so far", True)):
            series = [(report.series[group.name], by_position(group, reached)) for group in groups]
            # two levels at least, so that the axis has a length
            num_levels = max(2, *(len(points) for _, points in series))
            figure = draw_plot(
                f"{heading}, {name}",
                series,
                x=Scale(1, num_levels, step=1),
                y=SHARE,
                axes=("position in the draft", "accepted"),
            )
            figures.append(figure)
    return section("position", title, lead, drafter_panels(report, figures))


def by_position(group: Group, reached: bool) -> Points:
    """Return the share of cycles that accepted each level.

    Args:
        group: Answers with recorded cycles.
        reached: Whether the share is of the cycles that accepted the level before and had this one, not of all.
    """
    # counted once for all levels
    shapes = {id(answer): count_shapes(cycles(answer)) for answer in group.answers}
    num_levels = max(cycle["depth"] for cycle in group.cycles)

    def count(level: int) -> Callable[[Answer], Row]:
        return lambda answer: count_level(shapes[id(answer)], level, reached)

    return [(level, group.estimate(Metric(count(level)))) for level in range(1, num_levels + 1)]


def by_task(report: ReportData) -> Html:
    """Show the acceptance length by task and by rule."""
    lead = "Tokens per target forward by prompt set and task; a τ of 1 is plain decoding."
    figures = figures_by_task(report, "τ", ACCEPTANCE_LENGTH, start=1)
    rows = []
    for heading, groups in by_temperature(report.drafting):
        for group in groups:
            length = cell(group.estimate(ACCEPTANCE_LENGTH))
            rows.append((code(group.name), heading, group.rule, length))
    by_rule = table(["drafter", "temperature", "children drafted", "τ"], [("", rows)])

    title = "Acceptance by task, temperature and rule"
    return section("task", title, lead, [drafter_panels(report, figures), by_rule])


def by_bucket(report: ReportData) -> Html:
    """Show the acceptance length by tokens of context, and by tokens of the answer."""
    figures = []
    for buckets in EVERY:
        lines: dict[str, Rows] = {}
        for heading, groups in by_temperature(report.drafting):
            lengths = [buckets.acceptance_lengths(group) for group in groups]
            rows: Rows = []
            for bucket in several_buckets(lengths):
                points = []
                # a drafter has no figure where it has too few cycles
                for group, length in zip(groups, lengths, strict=True):
                    if bucket in length:
                        points.append((report.series[group.name], length[bucket]))
                rows.append((buckets.name(bucket), points))
            if rows:
                lines[heading] = rows
        figures += side_by_side(f"τ by {buckets.title}", lines, start=1)

    # all answers are in one bucket
    if not figures:
        return Html()
    title = "Acceptance by context and place in the answer"
    lead = (
        "Tokens per target forward by what stood before it: tokens of prompt and answer, and tokens of the answer "
        f"alone. A drafter with fewer than {ENOUGH} cycles in a range is left out there."
    )
    return section("context", title, lead, drafter_panels(report, figures))


def lengths(report: ReportData) -> Html:
    """Show the distribution of the accepted tokens of a cycle."""
    lead = "The share of cycles that accepted so many drafted tokens; the target's own token comes on top."
    groups = [group for group in report.drafting if group.cycles]
    if not groups:
        return section("length", "Accepted length", lead, missing("These results keep no cycles."))
    shares_by_group = [accepted_lengths(group) for group in groups]
    # one axis for all panels, so that their bars can be compared
    y = Scale.over([max(shares) for shares in shares_by_group], percent=True)

    figures = []
    for group, shares in zip(groups, shares_by_group, strict=True):
        mean = sum(length * share for length, share in enumerate(shares))
        figure = draw_bars(
            f"{group.name}, T = {group.temperature:g}",
            shares,
            y=y,
            series=report.series[group.name],
            axes=("accepted tokens", "share"),
            note=f"mean {mean:.2f}",
        )
        figures.append(figure)
    return section("length", "Accepted length", lead, panels(*figures))


def accepted_lengths(group: Group) -> list[float]:
    """Return the share of cycles that accepted 0, 1, 2 ... drafted tokens."""
    counts = Counter(cycle["accepted"] for cycle in group.cycles)
    total = counts.total()
    longest = max(counts, default=-1)
    return [counts[length] / total for length in range(longest + 1)]


def calibration(report: ReportData) -> Html:
    """Show the draft's confidence against the share accepted."""
    lead = (
        "Each drafted token whose parent was accepted has a probability in the draft's eyes, and was accepted or not. "
        f"A point holds an {BINS}th of them, by confidence; on the dashed line the draft is as right as it believes."
    )
    bins_by_temperature: dict[float, dict[str, Points]] = {}
    for group in report.drafting:
        bins = bin_confidences(group)
        # results of drafters without probabilities have no confidences
        if bins:
            bins_by_temperature.setdefault(group.temperature, {})[group.name] = bins
    if not bins_by_temperature:
        note = "These results keep no confidences: a cycle's “confidence” would be a list of [probability, accepted]."
        return section("calibration", "Calibration", lead, missing(note))
    figures = []
    for temperature, bins_by_name in bins_by_temperature.items():
        errors = ", ".join(
            f"{name} {_calibration_error(bins):.0%}" for name, bins in bins_by_name.items()
        )

        # points on the diagonal are as often right as the draft believes
        figure = draw_plot(
            f"Accepted by confidence, T = {temperature:g}",
            [(report.series[name], bins) for name, bins in bins_by_name.items()],
            x=SHARE,
            y=SHARE,
            axes=("confidence of the draft", "accepted"),
            note=f"Mean distance from the line: {errors}.",
            diagonal=True,
        )
        figures.append(figure)
    return section("calibration", "Calibration", lead, drafter_panels(report, figures))


def _calibration_error(bins: Points) -> float:
    return sum(abs(confidence - share.value) for confidence, share in bins) / len(bins)


def bin_confidences(group: Group) -> Points:
    """Return mean confidence and share accepted, in bins of equally many drafted tokens."""
    tokens = sorted(_confidences(group), key=lambda token: token[1])
    cuts = [len(tokens) * i // BINS for i in range(BINS + 1)]
    points = []
    for left, right in pairwise(cuts):
        # fewer tokens than bins leave some of them empty
        if left == right:
            continue
        rows: dict[object, list[Row]] = {}
        for conversation, _, accepted in tokens[left:right]:
            rows.setdefault(conversation, []).append((accepted, 1))

        total = sum(confidence for _, confidence, _ in tokens[left:right])
        points.append((total / (right - left), estimate(rows)))
    return points


def _confidences(group: Group) -> Iterator[tuple[object, float, bool]]:
    """Yield conversation, confidence and acceptance of each drafted token whose parent was accepted."""
    for answer in group.answers:
        for cycle in cycles(answer):
            for confidence, accepted in cycle.get("confidence") or ():
                yield prompt_key(answer)[:2], confidence, accepted


def nodes(report: ReportData) -> Html:
    """Show where the accepted tokens are in the tree."""
    lead = (
        f"The {NODES} most used nodes, of those that at least {RARE:.0%} of the cycles reached: in each its rank among "
        "its siblings, below it the share of cycles in which the target went there."
    )
    figures = []
    for group in report.drafting:
        shares = most_used_nodes(group)
        # the root alone is no tree
        if len(shares) > 1:
            figures.append(draw_tree(f"{group.name}, T = {group.temperature:g}", shares))

    content = panels(*figures)
    if not figures:
        content = missing(
            "These results keep no paths: a cycle's “path” would be the ranks of its accepted tokens among siblings."
        )
    return section("nodes", "Most used nodes", lead, content)


def most_used_nodes(group: Group) -> dict[tuple[int, ...], float]:
    """Return the most often accepted nodes, by their ranks, as shares of all cycles."""
    paths = [tuple(cycle["path"]) for cycle in group.cycles if cycle.get("path") is not None]
    counts: Counter[tuple[int, ...]] = Counter()
    for path in paths:
        # an accepted path passes every node on its way
        counts.update(path[:length] for length in range(len(path) + 1))

    # a parent is never rarer than its child, and comes first where they are level: so no node lacks its parent
    order = sorted(counts, key=lambda path: (-counts[path], len(path), path))
    common = [path for path in order[: NODES + 1] if counts[path] >= RARE * len(paths)]
    return {path: counts[path] / len(paths) for path in common}
