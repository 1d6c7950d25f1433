"""Build the sections on evidence: sample answers, losslessness, and provenance."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from eagle.markup import Html, html, tag
from eval.page.page_parts import ReportData, code, missing, section, table, task_of
from eval.result_files.results import Answer, Group, count_cycles

# that are shown
ANSWERS = 6
# of one answer
LETTERS = 4000


def answers(report: ReportData) -> Html:
    """Show a few generations: drafted tokens are tinted, the target's own are dotted."""
    lead = html([
        "Tinted is what the draft guessed and the target confirmed; underlined with dots is the target's own. ",
        "The colours say who was first, not who decided: every token is the target's choice.",
    ])  # fmt: skip
    ranked = []
    for group in report.drafting:
        with_pieces = [answer for answer in group.answers if answer.get("pieces")]
        ranked += [(rank, group, answer) for rank, answer in enumerate(with_pieces)]
    # one of each drafter and temperature first, then the next of each
    ranked.sort(key=lambda item: item[0])
    figures = [_answer(group, answer) for _, group, answer in ranked[:ANSWERS]]
    content = tag("div", figures, class_="answers")
    if not figures:
        content = missing("These results keep no answers in pieces.")
    return section("answers", "Some answers", lead, content)


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


def losslessness(report: ReportData) -> Html:
    """Show whether the output is the untouched model's."""
    lead = (
        "Every answer is compared with plain decoding's in the same run, and by the certificate with the untouched "
        "model's own. A draft that is sampled from q keeps the distribution of the output, and not each token of it."
    )
    same = 0
    differing = 0
    total = 0
    for group in report.every:
        if group.drafts:
            same += group.identical
            differing += group.differing
            total += len(group.answers)
    text = f"Of the drafters' answers {same} are plain decoding's token by token, {differing} part from it"
    # the rest need not be identical
    sampled = total - same - differing
    if sampled:
        text += f", {sampled} were sampled from q"
    note = tag("p", f"{text}.", class_="warn" if differing else None)
    certificates = [_certificate(report, label) for label in report.runs]
    return section("lossless", "Nothing lost?", lead, [note, certificates])


def _certificate(report: ReportData, label: str) -> Html:
    """Show the certificate that `eagle measure --verify` wrote beside the results."""
    path = report.runs[label].path.with_name("lossless.json")
    name = f"{label}: " if label else ""
    if not path.exists():
        command = code("eagle measure RECIPE --verify")
        return missing(name, "no lossless.json lies beside the results; ", command, " makes it.")
    verdicts = json.loads(path.read_text(encoding="utf-8"))["verdicts"]
    rows = []
    for verdict in verdicts:
        num_answers = verdict["answers"]
        is_lossless: object = "lossless"
        if not verdict["lossless"]:
            is_lossless = tag("span", "parts beyond rounding", class_="warn")
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
        "at a time",
        "identical to plain decoding",
        "to the model's own",
        "to the model in fp32",
        "verdict",
        "first divergence",
    ]
    title = tag("h3", name, "certificate against the untouched model")
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


def provenance(report: ReportData) -> Html:
    """Show the machine, versions and commit of each run."""
    lead = (
        "Figures belong to a machine, versions and a commit; compare them with those of no other."
    )
    parts = []
    for label, run in report.runs.items():
        count = f"{len(run.answers)} answers"
        # a run that was interrupted has a header for each start
        if len(run.headers) > 1:
            count += f" from {len(run.headers)} starts, the newest shown here"
        title = tag("h3", f"{label}: " if label else "", code(run.path.name))
        parts.append(html([title, tag("p", count), _header(run.header)]))
    return section("made", "What made it", lead, parts)


def _header(values: Mapping[str, Any]) -> Html:
    """Return names and values, with nested values folded away as JSON."""
    items = []
    folded = []
    for key, value in values.items():
        name = key.replace("_", " ")
        if isinstance(value, dict | list):
            text = tag("pre", json.dumps(value, ensure_ascii=False))
            folded.append(tag("details", tag("summary", name), text))
        else:
            items.append([tag("dt", name), tag("dd", value)])
    return html([tag("dl", items) if items else "", folded])
