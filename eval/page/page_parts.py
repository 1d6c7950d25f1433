"""Parts that the sections of the report share: its data, headings, tables, panels and figures by task."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from eagle.markup import Html, html, tag
from eval.result_files.figures import Scale, draw_dots
from eval.result_files.results import Answer, Group, Metric, Results, read_results, show_groups
from eval.result_files.statistics import Estimate

Rows = list[tuple[str, list[tuple[int, Estimate]]]]  # names, each with figures by series


@dataclass(frozen=True)
class ReportData:
    """The results that a report shows."""

    runs: dict[str, Results]  # by label; the label of a single run is empty
    every: list[Group]  # by temperature, at all batch sizes
    groups: list[Group]  # those with the fewest texts at a time
    series: dict[str, int]  # a number for every drafter, 0 for `none`

    @classmethod
    def load(cls, paths: Sequence[str | Path]) -> ReportData:
        """Read results files and label each by the part of its path that tells them apart."""
        runs = {label: read_results(path) for label, path in zip(labels(paths), paths, strict=True)}
        every = [group for label, run in runs.items() for group in run.groups(label)]
        every.sort(key=lambda group: group.temperature)
        groups = fewest_at_a_time(every)
        if not groups:
            raise ValueError(f"no answers in {', '.join(map(str, paths))}: run eval.measure first")
        names = dict.fromkeys(group.name for group in every if group.drafter != "none")
        series = {name: number for number, name in enumerate(names, start=1)}
        series |= {group.name: 0 for group in every if group.drafter == "none"}
        return cls(runs, every, groups, series)

    def _repr_html_(self) -> str:
        return show_groups(self.every)

    @property
    def drafting(self) -> list[Group]:
        """The groups that draft: all but `none`."""
        return [group for group in self.groups if group.drafter != "none"]

    @property
    def names(self) -> dict[str, int]:
        """The drafters and their numbers, for a legend."""
        return {name: number for name, number in self.series.items() if number}


def fewest_at_a_time(groups: Sequence[Group]) -> list[Group]:
    """Of each run the groups of its smallest batch size: acceptance does not depend on it."""
    sizes: dict[str, int] = {}
    for group in groups:
        sizes[group.run] = min(group.batch_size, sizes.get(group.run, group.batch_size))
    return [group for group in groups if group.batch_size == sizes[group.run]]


def labels(paths: Sequence[str | Path]) -> list[str]:
    """A short name for every file: the first of file name, folder and whole path in which they all differ."""
    if len(paths) == 1:
        return [""]
    full = [Path(path).resolve() for path in paths]
    kinds = [[path.stem for path in full], [path.parent.name for path in full], [str(path) for path in full]]
    for names in kinds:
        if len(set(names)) == len(full):
            return names
    raise ValueError(f"the same results file is given twice: {', '.join(map(str, paths))}; give each once")


def by_temperature(groups: Iterable[Group]) -> list[tuple[str, list[Group]]]:
    """Groups under the heading of their temperature."""
    parts: dict[str, list[Group]] = {}
    for group in groups:
        parts.setdefault(f"T = {group.temperature:g}", []).append(group)
    return list(parts.items())


def section(name: str, title: str, lead: object, *content: object) -> Html:
    """A part of the page with an address of its own."""
    return tag("section", tag("h2", title), tag("p", lead), content, id=name)


def panels(*figures: object) -> Html:
    """Figures side by side where there is room."""
    return tag("div", figures, class_="panels two" if len(figures) in (2, 4) else "panels")


def missing(*message: object) -> Html:
    """A note that data are missing, and what would make them."""
    return tag("p", message, class_="missing")


def code(name: object) -> Html:
    """A name in typewriter letters."""
    return tag("code", name)


def table(columns: Sequence[str], parts: Iterable[tuple[str, Sequence[Sequence[object]]]]) -> Html:
    """Rows under a heading for every part; on a phone each row becomes a card, so a cell knows its column's name."""
    body = []
    for heading, rows in parts:
        if heading:
            body.append(tag("tr", tag("td", heading, colspan=len(columns)), class_="part"))
        for row in rows:
            body.append(tag("tr", [tag("td", tag("div", c), data_label=n) for n, c in zip(columns, row, strict=True)]))
    head = tag("thead", tag("tr", [tag("th", name, scope="col") for name in columns]))
    return tag("table", head, tag("tbody", body))


def cell(value: Estimate, unit: str = "", digits: int = 2, signed: bool = False) -> Html:
    """A figure in a table, with its interval in small letters."""
    sign = "+" if signed else ""
    if not isfinite(value.value):
        return html("–")
    text = f"{value.value:{sign}.{digits}f}{unit} "
    if not isfinite(value.low):
        return html([text, tag("span", "one conversation: no interval", class_="low")])
    interval = f"{value.low:{sign}.{digits}f} to {value.high:{sign}.{digits}f}"
    return html([text.replace("-", "−"), tag("span", interval.replace("-", "−"), class_="low")])


def task_of(answer: Answer) -> str:
    """The prompt set, and the task within it."""
    return " · ".join(str(part) for part in (answer.get("set") or "prompts", answer.get("task")) if part)


def figures_by_task(report: ReportData, label: str, metric: Metric, start: float = 0, unit: str = "") -> list[Html]:
    """A panel per temperature with the metric of each drafter by set and task."""
    lines: dict[str, Rows] = {}
    for heading, groups in by_temperature(report.drafting):
        tasks: dict[str, list[tuple[int, Estimate]]] = {
            task_of(answer): [] for group in groups for answer in group.answers
        }
        for name, points in tasks.items():
            for group in groups:
                part = group.select(lambda answer, name=name: task_of(answer) == name)  # type: ignore[misc]
                if part.answers:
                    points.append((report.series[group.name], part.estimate(metric)))
        lines[heading] = list(tasks.items())
    return side_by_side(f"{label} by task", lines, start, unit)


def side_by_side(label: str, lines: dict[str, Rows], start: float, unit: str, note: str = "") -> list[Html]:
    """A panel per temperature, all over one axis; plain decoding is at 1."""
    values = [value for rows in lines.values() for _, points in rows for _, value in points]
    scale = Scale.over([1, *(end for value in values for end in value)], start)
    return [draw_dots(f"{label}, {heading}", rows, scale, 1, unit, note) for heading, rows in lines.items()]
