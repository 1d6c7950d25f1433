"""Write results as a page or a table: `eagle report RESULTS.jsonl [MORE.jsonl ...] [--html OUT] [--markdown]`."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle.disk import write_text
from eagle.log import script
from eagle.markup import Html, html, tag
from eval.page.page_acceptance import (
    by_bucket,
    calibration,
    lengths,
    positions,
    theory,
)
from eval.page.page_parts import (
    Missing,
    ReportData,
    Section,
    code,
    make_page,
    table,
)
from eval.page.page_speed import (
    batches,
    by_task,
    comparison,
    headline,
    time_split,
    verdicts,
)
from eval.result_files.buckets import EVERY, TASK, Buckets, Split, several_buckets
from eval.result_files.results import (
    ACCEPTANCE_LENGTH,
    CPU_SPEED_UP,
    LATENCY,
    MODELLED_SPEED_UP,
    SPEED_UP,
    TOKENS_PER_SECOND,
    Answer,
    Group,
    Metric,
    Results,
    count_cycles,
    describe_output,
    describe_tree,
    fewest_at_a_time,
    read_results,
    requests_per_step,
    task_of,
)
from eval.result_files.statistics import Estimate, format_number

FIGURES = {
    "acceptance_length": ACCEPTANCE_LENGTH,
    "tokens_per_second": TOKENS_PER_SECOND,
    "speedup": SPEED_UP,
}
# sample answers that are shown
ANSWERS = 6
# of one answer
LETTERS = 4000
# of the run details
FIRST = (
    "target",
    "dtype",
    "machine",
    "date",
    "prompts",
    "new_tokens",
    "temperatures",
    "batch_size",
)


def page(paths: Sequence[str | Path]) -> str:
    """Return the whole page for one results file, or for several that are compared.

    Raises:
        ValueError: The files hold no answers, or one is given twice.
    """
    report = ReportData.load(paths)
    links = []
    content = []
    # what the results cannot fill, by the reason
    left_out: dict[str, list[str]] = {}
    for name, (title, draw) in SECTIONS.items():
        part = draw(report)
        if isinstance(part, Missing):
            left_out.setdefault(part.reason, []).append(title)
        else:
            content.append(tag("section", tag("h2", title), part, id=name))
            links.append(tag("a", title, href=f"#{name}"))
    if left_out:
        reasons = [tag("li", f"{', '.join(titles)}: {why}.") for why, titles in left_out.items()]
        content.append(
            tag("section", tag("h2", "Not in this report"), tag("ul", reasons), id="missing")
        )

    title = tag("h1", "Speculative decoding of ", tag("code", _target(report)))
    header = tag("header", title, verdicts(report), tag("nav", links))
    return make_page(f"Speculative decoding of {_target(report)}", header, content)


def _target(report: ReportData) -> str:
    targets = [str(run.header.get("target", "unknown")) for run in report.runs.values()]
    return ", ".join(dict.fromkeys(targets))


def answers(report: ReportData) -> Section:
    """Show a few generations: accepted drafted tokens are tinted, the target's own are dotted."""
    lead = (
        "Accepted drafted tokens are tinted; the target's own tokens are underlined with dots. Every token is the "
        "target's choice, whoever proposed it."
    )
    ranked = []
    for group in report.drafting:
        with_pieces = [answer for answer in group.answers if answer.get("pieces")]
        ranked += [(rank, group, answer) for rank, answer in enumerate(with_pieces)]
    if not ranked:
        return Missing("the results file holds no tokens of answers")
    # one of each drafter and temperature first, then the next of each
    ranked.sort(key=lambda item: item[0])
    figures = [_answer(group, answer) for _, group, answer in ranked[:ANSWERS]]
    return [tag("p", lead), tag("div", figures, class_="answers")]


def _answer(group: Group, answer: Answer) -> Html:
    """Return one answer with its tokens marked, cut after so many letters."""
    committed, num_cycles = count_cycles(answer)
    length = committed / max(num_cycles, 1)
    note = f"{task_of(answer)}, T = {group.temperature:g}, {length:.2f} tokens per target forward"
    spans = []
    left = LETTERS
    for text, accepted in answer["pieces"]:
        spans.append(tag("span", text[:left], class_="kept" if accepted else "own"))
        left -= len(text)
        if left <= 0:
            spans.append(html(f"… ({LETTERS} letters shown)"))
            break
    title = tag("figcaption", tag("strong", code(group.name)), tag("span", note, class_="note"))
    return tag("figure", title, tag("div", spans, class_="answer", dir="auto"))


def losslessness(report: ReportData) -> Section:
    """Show whether the output is the untouched model's."""
    lead = (
        "Every answer is compared with that of plain decoding in the same run. Drafts sampled from q keep the "
        "distribution of the output, not each token."
    )
    same = 0
    differing = 0
    total = 0
    for group in report.every:
        if group.drafts:
            same += group.identical
            differing += group.differing
            total += len(group.answers)
    text = f"{same} of the drafters' {total} answers are identical to plain decoding's, {differing} differ"
    # the rest need not be identical
    sampled = total - same - differing
    if sampled:
        text += f", {sampled} were sampled from q"
    note = tag("p", f"{text}.", class_="warn" if differing else None)
    return [tag("p", lead), note, [_certificate(report, label) for label in report.runs]]


def _certificate(report: ReportData, label: str) -> Html:
    """Show the certificate that `eagle measure --verify` wrote beside the results."""
    path = report.runs[label].path.with_name("lossless.json")
    name = f"{label}: " if label else ""
    if not path.exists():
        return tag(
            "p",
            name,
            code("eagle measure RECIPE --verify"),
            " adds a certificate against the unmodified model.",
        )
    verdicts = json.loads(path.read_text(encoding="utf-8"))["verdicts"]
    rows = []
    for verdict in verdicts:
        num_answers = verdict["answers"]
        is_lossless: object = "lossless"
        if not verdict["lossless"]:
            is_lossless = tag("span", "differs beyond rounding", class_="warn")
        # certificates of early releases lack some of the keys
        row = (
            code(verdict["drafter"]),
            f"{verdict['temperature']:g}",
            verdict.get("batch_size", 1),
            _identical(verdict.get("to_plain"), num_answers),
            _identical(verdict["identical"], num_answers),
            _identical(verdict.get("to_float32"), num_answers),
            is_lossless,
            _divergence(verdict["divergences"]),
        )
        rows.append(row)

    columns = [
        "drafter",
        "T",
        "batch size",
        "identical to plain decoding",
        "to the unmodified model",
        "to the model in fp32",
        "verdict",
        "first difference",
    ]
    title = tag("h3", name, "Certificate against the unmodified model")
    return html([title, table(columns, [("", rows)])])


def _identical(count: int | None, answers: int) -> str:
    """Return how many of the answers are identical, or a dash where that was not compared."""
    if count is None:
        return "–"
    return f"{count} of {answers}"


def _divergence(divergences: list[dict[str, Any]]) -> object:
    """Describe the first divergence that rounding does not explain, else the first."""
    if not divergences:
        return "none"
    worst = min(divergences, key=lambda divergence: divergence["is_rounding"])
    # the end of an answer has no logit
    gap = "no logit gap to tell"
    if worst["gap"] is not None:
        gap = f"logit gap {worst['gap']:.2g}"
    drafted, expected = worst["texts"]
    position = f"{worst['set']}, {worst['conversation']}, turn {worst['turn'] + 1}, token {worst['position'] + 1}: "
    rounding = f", {gap} (rounding {worst['rounding']:.2g})"
    return [position, code(drafted or "end"), " for ", code(expected or "end"), rounding]


def run_details(report: ReportData) -> Section:
    """Show the settings, machine, versions and commit of each run, and its drafters."""
    parts: list[object] = []
    for label, run in report.runs.items():
        count = str(len(run.answers))
        # a run that was interrupted has a header for each start
        if len(run.headers) > 1:
            count += f" from {len(run.headers)} starts, the newest shown here"
        if label:
            parts.append(tag("h3", label))
        parts.append(
            _header(
                {**dict.fromkeys(FIRST), **run.header, "results": run.path.name, "answers": count}
            )
        )

    # of the highest temperature, where the rule of the draft matters
    rows = []
    for group in {group.name: group for group in report.drafting}.values():
        settings = report.runs[group.run].settings(group.drafter)
        if settings:
            head = code(settings.get("head", "–"))
            rows.append((code(group.name), head, describe_tree(settings), group.rule))
    if rows:
        parts.append(table(["drafter", "head", "draft tree", "candidates"], [("", rows)]))
    return parts


def _header(values: Mapping[str, Any]) -> Html:
    """Return names and values, with nested values folded away as JSON."""
    items = []
    folded = {}
    for key, value in values.items():
        if isinstance(value, list) and not any(isinstance(item, dict | list) for item in value):
            value = ", ".join(map(str, value))
        if isinstance(value, dict | list):
            folded[key] = value
        elif value is not None:
            items.append(tag("div", tag("dt", key.replace("_", " ")), tag("dd", value)))
    nested = Html()
    if folded:
        text = tag("pre", json.dumps(folded, ensure_ascii=False, indent=1))
        nested = tag("details", tag("summary", "all settings, as JSON"), text)
    return html([tag("dl", items), nested])


# by anchor: the title in the navigation, and what draws the section
SECTIONS = {
    "made": ("Run details", run_details),
    "headline": ("Speed", headline),
    "comparison": ("Comparison of drafters", comparison),
    "batches": ("Batch size", batches),
    "task": ("Tasks", by_task),
    "position": ("Acceptance by position", positions),
    "length": ("Accepted tokens per cycle", lengths),
    "context": ("Acceptance by context", by_bucket),
    "time": ("Time per cycle", time_split),
    "theory": ("Predicted and measured", theory),
    "calibration": ("Calibration", calibration),
    "answers": ("Sample answers", answers),
    "lossless": ("Losslessness", losslessness),
}


def markdown(path: str | Path) -> str:
    """Return the results as tables with intervals, and what made them.

    The first table is over all; others are by batch size, task, turn, context and position where there are several of
    these.
    """
    results = read_results(path)
    every = results.groups()
    groups = fewest_at_a_time(every)
    lines = _overall_lines(groups)
    if any(group.batch_size > 1 for group in every):
        lines += ["", *_batch_lines(every)]
    drafting = [group for group in groups if group.drafts]
    lines += _task_lines(drafting)
    for buckets in EVERY:
        lines += _bucket_lines(drafting, buckets)

    # nested values would not fit a line
    header = [
        f"{key} {value}"
        for key, value in results.header.items()
        if key != "id" and not isinstance(value, dict | list)
    ]
    lines.append("")
    trees = _describe_trees(results, groups)
    if trees:
        lines += [f"<sub>{trees}</sub>", ""]
    return "\n".join([*lines, f"<sub>{', '.join(header)}</sub>"])


def conclude(path: str | Path) -> str:
    """Return a sentence for each temperature: the fastest drafter, or that none is faster than plain decoding."""
    by_temperature: dict[float, list[tuple[float, str]]] = defaultdict(list)
    for group in fewest_at_a_time(read_results(path).groups()):
        if group.drafts:
            speedup = group.estimate(SPEED_UP).value
            by_temperature[group.temperature].append((speedup, f"{group.name} {speedup:.2f} ×"))
    lines = []
    for temperature, drafters in by_temperature.items():
        speeds = [text for _, text in sorted(drafters, reverse=True)]
        line = f"T = {temperature:g}: fastest is {', then '.join(speeds)}"
        if max(drafters)[0] < 1:
            line = (
                f"T = {temperature:g}: no drafter is faster than plain decoding ({', '.join(speeds)}); look for a "
                f"better draft with `eagle measure --tune RECIPE eval.temperatures=[{temperature:g}]`"
            )
        lines.append(line)
    return "\n".join(lines)


def _describe_trees(results: Results, groups: Sequence[Group]) -> str:
    """Return what each drafter drafted in a cycle, as τ of one tree says little of another; "" where it is unknown."""
    trees = []
    for name in dict.fromkeys(group.drafter for group in groups):
        tree = describe_tree(results.settings(name))
        if tree:
            trees.append(f"`{name}`: {tree}")
    return "; ".join(trees)


def figures(path: str | Path) -> dict[str, Any]:
    """Return the figures over all answers of each drafter, for programs, and what made them."""
    results = read_results(path)
    groups = []
    for group in results.groups():
        row: dict[str, Any] = {
            "drafter": group.drafter,
            "temperature": group.temperature,
            "batch_size": group.batch_size,
            "answers": len(group.answers),
            "identical": group.identical,
            "differing": group.differing,
        }
        # each with the ends of its interval
        for name, metric in FIGURES.items():
            row[name] = group.estimate(metric)
        row["average_al"] = group.average_length()
        by_split = row["acceptance_length_by"] = {}
        for split in (TASK, *EVERY):
            lengths = split.acceptance_lengths(group)
            by_split[split.title] = {split.name(kind): lengths[kind] for kind in lengths}
        groups.append(row)
    return {"file": str(path), "run": results.header, "groups": groups}


def _overall_lines(groups: Sequence[Group]) -> list[str]:
    """Return a table by temperature and drafter."""
    speeds = {"speedup": SPEED_UP}
    # CPU seconds are of interest where wall time was disturbed
    disturbed = any(group.had_to_wait for group in groups)
    if disturbed and all(group.has_cpu_seconds for group in groups):
        speeds["in CPU seconds"] = CPU_SPEED_UP
    if groups and all(group.is_modelled for group in groups):
        speeds["in modelled time"] = MODELLED_SPEED_UP
    columns = [
        "T",
        "drafter",
        "acceptance length τ",
        "tokens/s",
        *speeds,
        "output",
        "answers that loop",
    ]
    lines = [_row(columns), "|" + "---|" * len(columns)]
    for group in groups:
        cells = [
            f"{group.temperature:g}",
            f"`{group.drafter}`",
            _format(group, ACCEPTANCE_LENGTH),
            _format(group, TOKENS_PER_SECOND, digits=0),
            *(_format_gain(group, metric) for metric in speeds.values()),
            _output(group),
            f"{group.looping:.0%}",
        ]
        lines.append(_row(cells))
    return lines


def _batch_lines(groups: Sequence[Group]) -> list[str]:
    """Return a table by temperature and batch size."""
    columns = ["T", "batch size", "drafter", "requests per step", "tokens/s", "speedup"]
    columns += ["in modelled time", "latency", "acceptance length τ", "output"]
    lines = [_row(columns), "|" + "---|" * len(columns)]
    for group in sorted(groups, key=lambda group: (group.temperature, group.batch_size)):
        modelled = "–"
        if group.drafts and group.is_modelled:
            modelled = _format(group, MODELLED_SPEED_UP, " ×")
        cells = [
            f"{group.temperature:g}",
            str(group.batch_size),
            f"`{group.drafter}`",
            f"{requests_per_step(group):.1f}",
            _format(group, TOKENS_PER_SECOND, digits=0),
            _format_gain(group, SPEED_UP),
            modelled,
            _format(group, LATENCY, " s"),
            _format(group, ACCEPTANCE_LENGTH),
            describe_output(group),
        ]
        lines.append(_row(cells))
    return lines


def _task_lines(groups: Sequence[Group]) -> list[str]:
    """Return a table of τ by task, a row for each; nothing where all answers are of one task."""
    lengths = [TASK.acceptance_lengths(group) for group in groups]
    tasks = several_buckets(lengths)
    if not tasks:
        return []
    columns = [f"`{group.drafter}`, T = {group.temperature:g}" for group in groups]
    lines = ["", _row(["τ by task", *columns]), "|---|" + "---:|" * len(columns)]
    for task in tasks:
        lines.append(_row([task, *(_cell(length, task) for length in lengths)]))
    averages = [format_number(group.average_length()) for group in groups]
    # they are equal where requests have as many cycles
    if averages != [_format(group, ACCEPTANCE_LENGTH) for group in groups]:
        lines.append(_row(["Average_AL, every request alike", *averages]))
    return lines


def _bucket_lines(groups: Sequence[Group], buckets: Buckets | Split) -> list[str]:
    """Return a table of τ by temperature, drafter and bucket; nothing where all cycles are in one bucket."""
    lengths = [buckets.acceptance_lengths(group) for group in groups]
    shown = several_buckets(lengths)
    if not shown:
        return []
    columns = ["T", f"τ by {buckets.title}", *map(buckets.name, shown)]
    lines = ["", _row(columns), "|---|---|" + "---:|" * len(shown)]
    for group, length in zip(groups, lengths, strict=True):
        # a drafter has no figure where it has too few cycles
        cells = [f"{group.temperature:g}", f"`{group.drafter}`"]
        lines.append(_row([*cells, *(_cell(length, bucket) for bucket in shown)]))
    return lines


def _cell(lengths: Mapping[Any, Estimate], kind: Any) -> str:
    return format_number(lengths[kind]) if kind in lengths else "–"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _format(group: Group, metric: Metric, unit: str = "", digits: int = 2) -> str:
    return format_number(group.estimate(metric), unit, digits)


def _format_gain(group: Group, metric: Metric) -> str:
    if not group.drafts:
        return "1.00 ×"
    return _format(group, metric, " ×")


def _output(group: Group) -> str:
    """Describe whether the answers are those of `none`, in bold where rounding cannot be the reason."""
    if not group.differing:
        return "identical" if group.identical else "same distribution"
    compared = group.identical + group.differing
    text = f"{group.identical} of {compared} identical; {group.parting}"
    if group.parts_widely:
        return f"**{text}**"
    return text


def main(argv: list[str]) -> None:
    """Write the page, print the table, or both; by default the page lies beside the first file."""
    parser = argparse.ArgumentParser(prog="eagle report", description=__doc__)
    parser.add_argument(
        "results",
        nargs="+",
        type=Path,
        help="results of `eagle measure`; several files are compared prompt by prompt",
    )
    parser.add_argument(
        "--html",
        type=Path,
        metavar="OUT",
        help="the page to write (default: in the folder of the first file)",
    )
    parser.add_argument("--markdown", action="store_true", help="only print a table in Markdown")
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
