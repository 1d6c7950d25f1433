"""The page's figures of acceptance: by position, task, temperature and rule; how long, how sure, and where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import accumulate, pairwise

from eval.figures import Points, Scale, bars, branches, figure, legend, plot
from eval.markup import Html
from eval.page_parts import Shown, by_temperature, code, figure_of, missing, panels, section, table
from eval.page_speed import tasks
from eval.page_theory import Rates
from eval.results import Answer, Group, cycles, prompt_of, taken
from eval.statistics import Estimate, Row, estimate

SHARE = Scale(0, 1, percent=True, step=0.2)
BINS = 8  # of equally many drafted tokens
NODES, RARE = 16, 0.01  # most used nodes drawn, and none that fewer cycles reach


def positions(shown: Shown) -> Html:
    """How often the drafted token of each level is accepted: of all cycles, and of those that reached the level."""
    lead = (
        "Of all cycles: how often at least so many drafted tokens were accepted. Of those that came so far: how often "
        "a level's token was, where the one before it was accepted and the tree had this level."
    )
    known = [group for group in shown.drafting if any(cycles(answer) for answer in group.answers)]
    if not known:
        return section("position", "Acceptance by position", lead, missing("These results keep no cycles."))
    drawn = []
    for heat, groups in by_temperature(known):
        levels = max(len(Rates.of(group).by_level) for group in groups)
        x = Scale(1, max(levels, 2), step=1)
        for title, given in (("of all cycles", False), ("of those that came so far", True)):
            series = [(shown.series[group.name], by_position(group, levels, given)) for group in groups]
            label = f"share accepted by position, {title}, {heat}"
            drawn.append(
                figure(f"{heat}, {title}", plot(series, x, SHARE, ("position in the draft", "accepted"), label))
            )
    return section("position", "Acceptance by position", lead, legend(shown.names), panels(*drawn))


def by_position(group: Group, levels: int, given: bool) -> Points:
    """The share of cycles that accepted each level, of all or of those that had accepted the level before it."""

    def counts(level: int) -> Estimate:
        def of_answer(answer: Answer) -> Row:
            seen = [(cycle["accepted"], cycle["depth"]) for cycle in cycles(answer)]
            tried = [kept for kept, depth in seen if not given or (kept >= level - 1 and depth >= level)]
            return sum(kept >= level for kept in tried), len(tried)

        return group.estimate(of_answer)

    return [(level, counts(level)) for level in range(1, min(levels, len(Rates.of(group).by_level)) + 1)]


def by_task(shown: Shown) -> Html:
    """Acceptance length by task and by rule."""
    lead = "Tokens per target forward by prompt set and task; a τ of 1 is plain decoding."
    figures = tasks(shown, "τ", taken, start=1)
    rows = [
        (code(group.name), heat, group.rule, figure_of(group.estimate(taken)))
        for heat, groups in by_temperature(shown.drafting)
        for group in groups
    ]
    by_rule = table(["drafter", "temperature", "children drafted", "τ"], [("", rows)])
    title, shapes = "Acceptance by task, temperature and rule", legend(shown.names)
    return section("task", title, lead, shapes, panels(*figures), by_rule)


def lengths(shown: Shown) -> Html:
    """How many drafted tokens a cycle accepts."""
    lead = "The share of cycles that accepted so many drafted tokens; the target's own token comes on top."
    found = [(group, accepted_lengths(group)) for group in shown.drafting]
    found = [(group, shares) for group, shares in found if shares]
    if not found:
        return section("length", "Accepted length", lead, missing("These results keep no cycles."))
    y = Scale.over([share for _, shares in found for share in shares], percent=True)
    drawn = [
        figure(
            f"{group.name}, T = {group.temperature:g}",
            bars(shares, y, shown.series[group.name], ("accepted tokens", "share"), f"accepted length, {group.name}"),
            f"mean {sum(number * share for number, share in enumerate(shares)):.2f}",
        )
        for group, shares in found
    ]
    return section("length", "Accepted length", lead, panels(*drawn))


def accepted_lengths(group: Group) -> list[float]:
    """The share of cycles that accepted 0, 1, 2 ... drafted tokens."""
    seen = Counter(cycle["accepted"] for answer in group.answers for cycle in cycles(answer))
    return [seen[number] / seen.total() for number in range(max(seen) + 1)] if seen else []


def calibration(shown: Shown) -> Html:
    """The draft's confidence against what was accepted."""
    lead = (
        "Each drafted token whose parent was accepted has a probability in the draft's eyes, and was accepted or not. "
        f"A point holds an {BINS}th of them, by confidence; on the dashed line the draft is as right as it believes."
    )
    found = [(group, calibrated(group)) for group in shown.drafting]
    found = [(group, bins) for group, bins in found if bins]
    if not found:
        said = "These results keep no confidences: a cycle's “confidence” would be a list of [probability, accepted]."
        return section("calibration", "Calibration", lead, missing(said))
    bins = {id(group): points for group, points in found}
    drawn = []
    for heat, groups in by_temperature(group for group, _ in found):
        series = [(shown.series[group.name], bins[id(group)]) for group in groups]
        titles, label = ("confidence of the draft", "accepted"), f"acceptance by confidence at {heat}"
        off = ", ".join(f"{group.name} {_off(bins[id(group)]):.0%}" for group in groups)
        drawing = plot(series, SHARE, SHARE, titles, label, diagonal=True)
        drawn.append(figure(f"Accepted by confidence, {heat}", drawing, f"Mean distance from the line: {off}."))
    return section("calibration", "Calibration", lead, legend(shown.names), panels(*drawn))


def _off(bins: Points) -> float:
    return sum(abs(at - kept.value) for at, kept in bins) / len(bins)


def calibrated(group: Group) -> Points:
    """Mean confidence and share accepted, in bins of equally many drafted tokens."""
    pairs = sorted(confidences(group), key=lambda pair: pair[1])
    cuts = [len(pairs) * place // BINS for place in range(BINS + 1)]
    points = []
    for left, right in pairwise(cuts):
        if inside := pairs[left:right]:
            rows: dict[object, list[Row]] = {}
            for conversation, _, kept in inside:
                rows.setdefault(conversation, []).append((kept, 1))
            points.append((sum(sure for _, sure, _ in inside) / len(inside), estimate(rows)))
    return points


def confidences(group: Group) -> Iterator[tuple[object, float, bool]]:
    """Conversation, confidence and whether it was accepted, of every drafted token whose parent was."""
    for answer in group.answers:
        for cycle in cycles(answer):
            for sure, kept in cycle.get("confidence") or ():
                yield prompt_of(answer)[:2], sure, kept


def nodes(shown: Shown) -> Html:
    """Where in the tree the accepted tokens were."""
    lead = (
        f"The {NODES} most used nodes, of those that at least {RARE:.0%} of the cycles reached: in each its rank among "
        "its siblings, below it the share of cycles in which the target went there."
    )
    found = [(group, used(group)) for group in shown.drafting]
    found = [(group, shares) for group, shares in found if len(shares) > 1]
    if not found:
        said = "These results keep no paths: a cycle's “path” would be the ranks of its accepted tokens among siblings."
        return section("nodes", "Most used nodes", lead, missing(said))
    drawn = [
        figure(f"{group.name}, T = {group.temperature:g}", branches(shares, f"most used nodes of {group.name}"))
        for group, shares in found
    ]
    return section("nodes", "Most used nodes", lead, panels(*drawn))


def used(group: Group) -> dict[tuple[int, ...], float]:
    """The nodes that the target went to most often, by their ranks, as shares of all cycles."""
    seen: Counter[tuple[int, ...]] = Counter()
    number = 0
    for answer in group.answers:
        for cycle in cycles(answer):
            if (ranks := cycle.get("path")) is not None:
                number += 1
                seen.update(tuple(path) for path in accumulate(([rank] for rank in ranks), initial=[]))
    # a parent is never rarer than its child, and comes first where they are level: so no node lacks its parent
    order = sorted(seen, key=lambda path: (-seen[path], len(path), path))
    return {path: seen[path] / number for path in order[: NODES + 1] if seen[path] >= RARE * number}
