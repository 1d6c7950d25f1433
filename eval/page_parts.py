"""What the page's sections share: the groups that they show, and their headings, tables and words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from eagle.core.drafter import Budget
from eval.costs import Costs, draft_seconds
from eval.markup import Html, html, tag
from eval.results import Answer, Group, Results, cycles, read, taken
from eval.statistics import Estimate, Row


@dataclass(frozen=True)
class Shown:
    """Everything that the page is made of."""

    runs: dict[str, Results]  # by label; the label of a single one is empty
    groups: list[Group]  # by temperature
    series: dict[str, int]  # a number for every drafter, 0 for `none`

    @classmethod
    def load(cls, paths: Sequence[str | Path]) -> Shown:
        """Results files, told apart by what their paths do not share."""
        runs = dict(zip(labels(paths), map(read, paths), strict=True))
        groups = [group for label, run in runs.items() for group in run.groups(label)]
        groups.sort(key=lambda group: group.temperature)
        for group in groups:
            price(runs[group.run], group)
        if not groups:
            raise ValueError(f"no answers in {', '.join(map(str, paths))}: run eval.measure first")
        names = dict.fromkeys(group.name for group in groups if group.drafter != "none")
        series = {name: number for number, name in enumerate(names, start=1)}
        series |= {group.name: 0 for group in groups if group.drafter == "none"}
        return cls(runs, groups, series)

    @property
    def drafting(self) -> list[Group]:
        """The groups that draft: all but `none`."""
        return [group for group in self.groups if group.drafter != "none"]

    @property
    def names(self) -> dict[str, int]:
        """The drafters and their numbers, for a legend."""
        return {name: number for name, number in self.series.items() if number}


def by_temperature(groups: Iterable[Group]) -> list[tuple[str, list[Group]]]:
    """Groups under the heading of their temperature."""
    found: dict[str, list[Group]] = {}
    for group in groups:
        found.setdefault(f"T = {group.temperature:g}", []).append(group)
    return list(found.items())


def price(run: Results, group: Group) -> None:
    """Give each answer the seconds of its cycles and of `none`'s at the bare costs in the header, if it has them."""
    if (bare := (run.header.get("costs") or {}).get(group.drafter)) is None:
        return
    costs, budget = Costs.parse(bare), run.settings(group.drafter)["budget"]
    paths = budget.get("paths")
    given = Budget(**{**budget, "paths": paths and tuple(map(tuple, paths))})
    recorded = (cycle for answer in group.answers for cycle in cycles(answer))
    drafting = {} if costs.first or not given.nodes else draft_seconds(recorded)
    for answer in group.answers:
        spent = costs.modelled(cycles(answer), given, run.header.get("new_tokens"))
        spent += sum(drafting.get((cycle["nodes"], cycle["depth"]), 0.0) for cycle in cycles(answer))
        answer["modelled"] = spent, costs.modelled(cycles(answer["plain"]))


def is_modelled(group: Group) -> bool:
    """Whether the bare costs of its forwards are known."""
    return all("modelled" in answer for answer in group.answers)


def modelled(answer: Answer) -> Row:
    """Tokens and modelled seconds of an answer, prefill excluded, then those of `none` on the same prompt."""
    mine, plain = answer["modelled"]
    return taken(answer)[0], mine, taken(answer["plain"])[0], plain


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


def section(name: str, title: str, lead: object, *content: object) -> Html:
    """A part of the page with an address of its own."""
    return tag("section", tag("h2", title), tag("p", lead), content, id=name)


def panels(*figures: object) -> Html:
    """Figures side by side where there is room."""
    return tag("div", figures, class_="panels two" if len(figures) in (2, 4) else "panels")


def missing(*what: object) -> Html:
    """Says that something is not there, and what would make it."""
    return tag("p", what, class_="missing")


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


def code(name: object) -> Html:
    """A name as one types it."""
    return tag("code", name)


def figure_of(value: Estimate, unit: str = "", digits: int = 2, signed: bool = False) -> Html:
    """A figure in a table, its interval small beside it."""
    sign = "+" if signed else ""
    if not isfinite(value.value):
        return html("–")
    said = f"{value.value:{sign}.{digits}f}{unit} "
    if not isfinite(value.low):
        return html([said, tag("span", "one conversation: no interval", class_="low")])
    reach = f"{value.low:{sign}.{digits}f} to {value.high:{sign}.{digits}f}"
    return html([said.replace("-", "−"), tag("span", reach.replace("-", "−"), class_="low")])
