"""Load the report's data, and build what its sections share: tables, panels and figures by temperature."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import NamedTuple

from eagle.markup import Html, html, tag
from eval.result_files.figures import Scale, draw_dots, legend
from eval.result_files.results import (
    Group,
    Results,
    fewest_at_a_time,
    read_results,
    show_groups,
)
from eval.result_files.statistics import Estimate

# escaping keeps model text from being markup; should it ever fail, the browser still runs and fetches nothing
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
BySeries = list[tuple[int, Estimate]]  # figures by series
Rows = list[tuple[str, BySeries]]  # by name


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


def make_page(title: str, *content: object) -> str:
    """Return an HTML file with the style sheet in it."""
    style = Html(Path(__file__).with_name("page.css").read_text(encoding="utf-8"))
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("link", rel="icon", href="data:,"),
        tag("title", title),
        tag("style", style),
    ]
    body = tag("body", tag("main", content))
    return "<!doctype html>\n" + tag("html", tag("head", head), body, lang="en") + "\n"


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


class Missing(NamedTuple):
    """Why a section is left out, and what would fill it."""

    reason: str


Section = Sequence[object] | Missing  # what stands below the heading


def panels(*figures: object) -> Html:
    """Lay figures side by side where there is room."""
    # two columns where these are filled
    return tag("div", figures, class_="panels two" if len(figures) in (2, 4) else "panels")


def drafter_panels(names: Mapping[str, int], figures: Sequence[object]) -> list[Html]:
    """Return figures of several drafters, with what tells these apart above them.

    Args:
        names: The series of each drafter.
        figures: What is shown.
    """
    return [legend(names) if len(names) > 1 else Html(), panels(*figures)]


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
    # one conversation has no interval, which the headline says once
    if not isfinite(value.low):
        return html(text.rstrip())
    interval = f"{value.low:{form}} to {value.high:{form}}"
    # a hyphen is too short for a minus
    small = tag("span", interval.replace("-", "−"), class_="low")
    return html([text.replace("-", "−"), small])


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
