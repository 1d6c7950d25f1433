"""One HTML page that shows measured results: it needs no network and runs no script."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eval.markup import Html, html, tag
from eval.page_accepted import by_task, calibration, lengths, nodes, positions
from eval.page_evidence import answers, losslessness, provenance
from eval.page_parts import ReportData
from eval.page_speed import comparison, headline, speed_by_task, time_split, verdicts
from eval.page_theory import theory

SECTIONS = {
    "headline": ("Speed", headline),
    "comparison": ("Who is ahead", comparison),
    "speed": ("By task", speed_by_task),
    "position": ("Position", positions),
    "task": ("Task and rule", by_task),
    "length": ("Accepted length", lengths),
    "time": ("Time", time_split),
    "theory": ("Theory", theory),
    "calibration": ("Calibration", calibration),
    "nodes": ("Nodes", nodes),
    "answers": ("Answers", answers),
    "lossless": ("Losslessness", losslessness),
    "made": ("Made by", provenance),
}
# escaping keeps model text from being markup; should it ever fail, the browser still runs and fetches nothing
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def page(paths: Sequence[str | Path]) -> str:
    """The whole page for one results file, or for several side by side."""
    report = ReportData.load(paths)
    parts = {name: draw(report) for name, (_, draw) in SECTIONS.items()}
    links = [tag("a", SECTIONS[name][0], href=f"#{name}") for name, part in parts.items() if part]
    body = tag("main", _top(report, links), list(parts.values()))
    style = Html(Path(__file__).with_suffix(".css").read_text(encoding="utf-8"))
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("link", rel="icon", href="data:,"),
        tag("title", "Acceptance report: ", _target(report)),
        tag("style", style),
    ]
    return "<!doctype html>\n" + tag("html", tag("head", head), tag("body", body), lang="en") + "\n"


def _top(report: ReportData, links: list[Html]) -> Html:
    newest = next(iter(report.runs.values())).header
    facts = [str(newest[key]) for key in ("machine", "date") if key in newest]
    number = sum(len(run.answers) for run in report.runs.values())
    about = ", ".join([f"{number} answers", *facts])
    line = tag("p", "Target ", tag("code", _target(report)), ". ", about, class_="soft")
    return html([tag("header", tag("h1", "Acceptance report"), line, tag("nav", links)), verdicts(report)])


def _target(report: ReportData) -> str:
    return ", ".join(dict.fromkeys(str(run.header.get("target", "unknown")) for run in report.runs.values()))
