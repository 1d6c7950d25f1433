"""Results as a page or as a table: `eagle report RESULTS.jsonl [MORE.jsonl ...] [--html OUT] [--markdown]`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from eagle.disk import write_text
from eagle.log import script
from eagle.markup import Html, html, tag
from eval.page.page_accepted import by_bucket, by_task, calibration, lengths, nodes, positions
from eval.page.page_batches import batches, texts_in_a_step
from eval.page.page_evidence import answers, losslessness, provenance
from eval.page.page_parts import ReportData, fewest_at_a_time
from eval.page.page_speed import comparison, describe_output, headline, speed_by_task, time_split, verdicts
from eval.page.page_theory import theory
from eval.result_files.buckets import EVERY, Buckets, several_buckets
from eval.result_files.figures import format_number
from eval.result_files.results import (
    ACCEPTANCE_LENGTH,
    CPU_SPEED_UP,
    LATENCY,
    MODELLED_SPEED_UP,
    SPEED_UP,
    TOKENS_PER_SECOND,
    Group,
    Metric,
    read_results,
)

SECTIONS = {
    "headline": ("Speed", headline),
    "comparison": ("Who is ahead", comparison),
    "batches": ("Batches", batches),
    "speed": ("By task", speed_by_task),
    "position": ("Position", positions),
    "task": ("Task and rule", by_task),
    "context": ("Context", by_bucket),
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
    style = Html((Path(__file__).parent / "page/page.css").read_text(encoding="utf-8"))
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
    """Title, target, amount, machine and links; then the fastest drafters."""
    newest = next(iter(report.runs.values())).header
    facts = [str(newest[key]) for key in ("machine", "date") if key in newest]
    if (size := report.groups[0].batch_size) > 1:
        facts.append(f"sections below are of {size} texts at a time unless they say otherwise")
    number = sum(len(run.answers) for run in report.runs.values())
    about = ", ".join([f"{number} answers", *facts])
    line = tag("p", "Target ", tag("code", _target(report)), ". ", about, class_="soft")
    return html([tag("header", tag("h1", "Acceptance report"), line, tag("nav", links)), verdicts(report)])


def _target(report: ReportData) -> str:
    return ", ".join(dict.fromkeys(str(run.header.get("target", "unknown")) for run in report.runs.values()))


def markdown(path: str | Path) -> str:
    """The results as tables with intervals: overall, by batch size, context and place in the answer where several
    of these are there; and what made them.
    """
    results = read_results(path)
    every = results.groups()
    groups = fewest_at_a_time(every)
    speeds = {"speed-up": SPEED_UP}
    if any(group.had_to_wait for group in groups) and all(group.has_cpu_seconds for group in groups):
        speeds["in CPU seconds"] = CPU_SPEED_UP
    if groups and all(group.is_modelled for group in groups):
        speeds["in modelled time"] = MODELLED_SPEED_UP
    columns = ["T", "drafter", "acceptance length τ", "tokens/s", *speeds, "output", "answers that loop"]
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for group in groups:
        gains = ["1.00 ×" if group.drafter == "none" else _format(group, metric, " ×") for metric in speeds.values()]
        lines.append(
            f"| {group.temperature:g} | `{group.drafter}` | {_format(group, ACCEPTANCE_LENGTH)} | "
            f"{_format(group, TOKENS_PER_SECOND, digits=0)} | {' | '.join(gains)} | {_output(group)} | "
            f"{group.looping:.0%} |"
        )
    if any(group.batch_size > 1 for group in every):
        lines += ["", *_batch_lines(every)]
    for buckets in EVERY:
        lines += _bucket_lines([group for group in groups if group.drafter != "none"], buckets)
    header = {key: value for key, value in results.header.items() if key != "id" and not isinstance(value, dict | list)}
    return "\n".join([*lines, "", f"<sub>{', '.join(f'{key} {value}' for key, value in header.items())}</sub>"])


def _batch_lines(groups: Sequence[Group]) -> list[str]:
    """A table by temperature and number of texts at a time."""
    columns = ["T", "texts at a time", "drafter", "texts a step", "tokens/s", "speed-up"]
    columns += ["in modelled time", "latency", "acceptance length τ", "output"]
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for group in sorted(groups, key=lambda group: (group.temperature, group.batch_size)):
        drafts = group.drafter != "none"
        speed = _format(group, SPEED_UP, " ×") if drafts else "1.00 ×"
        modelled = _format(group, MODELLED_SPEED_UP, " ×") if drafts and group.is_modelled else "–"
        cells = [f"{group.temperature:g}", str(group.batch_size), f"`{group.drafter}`", f"{texts_in_a_step(group):.1f}"]
        cells += [_format(group, TOKENS_PER_SECOND, digits=0), speed, modelled, _format(group, LATENCY, " s")]
        lines.append(f"| {' | '.join([*cells, _format(group, ACCEPTANCE_LENGTH), describe_output(group)])} |")
    return lines


def _bucket_lines(groups: Sequence[Group], buckets: Buckets) -> list[str]:
    """A table of τ by temperature, drafter and bucket; nothing where all cycles are in one bucket."""
    lengths = [buckets.acceptance_lengths(group) for group in groups]
    if not (every := several_buckets(lengths)):
        return []
    columns = ["T", f"τ by {buckets.title}", *map(buckets.name, every)]
    lines = ["", f"| {' | '.join(columns)} |", "|---|---|" + "---:|" * len(every)]
    for group, length in zip(groups, lengths, strict=True):
        cells = [format_number(length[bucket]) if bucket in length else "–" for bucket in every]
        lines.append(f"| {group.temperature:g} | `{group.drafter}` | {' | '.join(cells)} |")
    return lines


def _format(group: Group, metric: Metric, unit: str = "", digits: int = 2) -> str:
    return format_number(group.estimate(metric), unit, digits)


def _output(group: Group) -> str:
    """Whether the answers are those of `none`, for a cell of a table."""
    if group.differing:
        text = f"{group.identical} of {group.identical + group.differing} identical; {group.parting}"
        return f"**{text}**" if group.parts_widely else text
    return "identical" if group.identical else "same distribution"


def main(argv: list[str]) -> None:
    """Write the page, print the table, or both; by default the page lies beside the first file."""
    parser = argparse.ArgumentParser(prog="eagle report", description=__doc__)
    parser.add_argument("results", nargs="+", type=Path, help="what eval.measure wrote; several are compared by prompt")
    parser.add_argument("--html", type=Path, metavar="OUT", help="where the page goes (default: beside the first file)")
    parser.add_argument("--markdown", action="store_true", help="print a table for a README, and write no page")
    args = parser.parse_args(argv)
    if args.markdown:
        for path in args.results:
            print(markdown(path))
    if args.html or not args.markdown:
        out = args.html or args.results[0].with_name("report.html")
        write_text(out, page(args.results))
        print(f"report: {out}")


if __name__ == "__main__":
    script(main)
