"""Load the report's data, and build what its sections share: headings, tables, panels and figures by task."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path

from eagle.markup import Html, html, tag
from eval.result_files.figures import Scale, draw_dots, legend
from eval.result_files.results import Answer, Group, Metric, Results, read_results, show_groups
from eval.result_files.statistics import Estimate

Points = list[tuple[int, Estimate]]  # figures by series
Rows = list[tuple[str, Points]]  # by name


@dataclass(frozen=True)
class ReportData:
    """The results that a report shows."""

    runs: dict[str, Results]  # by label; the label of a single run is empty
    every: list[Group]  # by temperature, at all batch sizes
    groups: list[Group]  # those with the smallest batch size
    series: dict[str, int]  # a number for every drafter, 0 for `none`

    @classmethod
    def load(cls, paths: Sequence[str | Path]) -> ReportData:
        """Read results files, and label each by the part of its path in which they differ.

        Raises:
            ValueError: The files hold no answers, or one is given twice.
        """
        runs = {label: read_results(path) for label, path in zip(labels(paths), paths, strict=True)}
        every = []
        for label, run in runs.items():
            every += run.groups(label)
        if not every:
            raise ValueError(f"no answers in {', '.join(map(str, paths))}: run eval.measure first")
        every.sort(key=lambda group: group.temperature)

        # one number for a drafter in all figures, so that its colour is the same in all of them
        names = dict.fromkeys(group.name for group in every if group.drafts)
        series = {name: i for i, name in enumerate(names, start=1)}
        series |= {group.name: 0 for group in every if not group.drafts}
        return cls(runs, every, fewest_at_a_time(every), series)

    def _repr_html_(self) -> str:
        return show_groups(self.every)

    @property
    def drafting(self) -> list[Group]:
        """Return the groups of drafters, without plain decoding."""
        return [group for group in self.groups if group.drafts]

    @property
    def names(self) -> dict[str, int]:
        """Return the drafters and their series, for a legend."""
        return {name: series for name, series in self.series.items() if series}


def fewest_at_a_time(groups: Sequence[Group]) -> list[Group]:
    """Return the groups of each run's smallest batch size, since acceptance does not depend on it."""
    sizes: dict[str, int] = {}
    for group in groups:
        sizes[group.run] = min(group.batch_size, sizes.get(group.run, group.batch_size))
    return [group for group in groups if group.batch_size == sizes[group.run]]


def labels(paths: Sequence[str | Path]) -> list[str]:
    """Return a short name for each file: the first of file name, folder and path in which they all differ.

    Raises:
        ValueError: One file is given twice.
    """
    if len(paths) == 1:
        return [""]
    full = [Path(path).resolve() for path in paths]
    kinds = [
        [path.stem for path in full],
        [path.parent.name for path in full],
        [str(path) for path in full],
    ]
    for names in kinds:
        if len(set(names)) == len(full):
            return names
    raise ValueError(
        f"the same results file is given twice: {', '.join(map(str, paths))}; give each once"
    )


def by_temperature(groups: Iterable[Group]) -> list[tuple[str, list[Group]]]:
    """Return the groups of each temperature, with a heading."""
    parts: dict[str, list[Group]] = {}
    for group in groups:
        parts.setdefault(f"T = {group.temperature:g}", []).append(group)
    return list(parts.items())


def section(name: str, title: str, lead: object, *content: object) -> Html:
    """Return a section of the page.

    Args:
        name: The anchor to link to.
        title: The heading.
        lead: The paragraph below the heading.
        content: Elements, or lists of them.
    """
    return tag("section", tag("h2", title), tag("p", lead), content, id=name)


def panels(*figures: object) -> Html:
    """Lay figures side by side where there is room."""
    # two columns where these are filled
    return tag("div", figures, class_="panels two" if len(figures) in (2, 4) else "panels")


def drafter_panels(report: ReportData, figures: Sequence[object]) -> list[Html]:
    """Return figures of several drafters, with what tells these apart above them."""
    return [legend(report.names), panels(*figures)]


def missing(*message: object) -> Html:
    """Return a note that data are missing, and what would make them."""
    return tag("p", message, class_="missing")


def code(name: object) -> Html:
    """Return a name in typewriter letters."""
    return tag("code", name)


def table(columns: Sequence[str], parts: Iterable[tuple[str, Sequence[Sequence[object]]]]) -> Html:
    """Return a table.

    Args:
        columns: The names of the columns.
        parts: A heading, or "" for none, and the rows below it.
    """
    body = []
    for heading, rows in parts:
        if heading:
            body.append(tag("tr", tag("td", heading, colspan=len(columns)), class_="part"))
        for row in rows:
            cells = []
            # on a phone each row becomes a card, so a cell knows its column's name
            for name, value in zip(columns, row, strict=True):
                cells.append(tag("td", tag("div", value), data_label=name))
            body.append(tag("tr", cells))

    titles = [tag("th", name, scope="col") for name in columns]
    head = tag("thead", tag("tr", titles))
    return tag("table", head, tag("tbody", body))


def cell(value: Estimate, unit: str = "", digits: int = 2, signed: bool = False) -> Html:
    """Return a number for a table, with its interval in small letters.

    Args:
        value: A figure; one that is not finite is a dash.
        unit: What stands after the number.
        digits: Decimal places.
        signed: Whether a positive number has a plus, as differences do.
    """
    if not isfinite(value.value):
        return html("–")
    form = f"{'+' if signed else ''}.{digits}f"
    text = f"{value.value:{form}}{unit} "
    if not isfinite(value.low):
        return html([text, tag("span", "one conversation: no interval", class_="low")])
    interval = f"{value.low:{form}} to {value.high:{form}}"
    # a hyphen is too short for a minus
    small = tag("span", interval.replace("-", "−"), class_="low")
    return html([text.replace("-", "−"), small])


def task_of(answer: Answer) -> str:
    """Return the prompt set of an answer, and its task within the set."""
    prompt_set = answer.get("set") or "prompts"
    if not answer.get("task"):
        return str(prompt_set)
    return f"{prompt_set} · {answer['task']}"


def figures_by_task(
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
        tasks: dict[str, Points] = {}
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


def side_by_side(
    label: str, lines: dict[str, Rows], *, start: float = 0, unit: str = "", note: str = ""
) -> list[Html]:
    """Draw a panel per temperature, all on one scale; plain decoding is at 1.

    Args:
        label: What is drawn, in the titles of the figures.
        lines: The rows of each panel, by its temperature.
        start: The beginning of the axis.
        unit: What stands after every number.
        note: A sentence below each title.
    """
    # the scale holds plain decoding and all ends of intervals
    ends: list[float] = [1]
    for rows in lines.values():
        for _, points in rows:
            for _, value in points:
                ends += value
    scale = Scale.over(ends, start)

    return [
        draw_dots(f"{label}, {heading}", rows, scale, reference=1, unit=unit, note=note)
        for heading, rows in lines.items()
    ]
