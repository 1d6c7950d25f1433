"""Sections on evidence: sample answers, whether the output is unchanged, and what made the figures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from eagle.markup import Html, html, tag
from eval.page.page_parts import ReportData, code, missing, section, table, task_of
from eval.result_files.results import Answer, Group, count_cycles

ANSWERS = 6
LETTERS = 4000  # of one answer


def answers(report: ReportData) -> Html:
    """A few generations: drafted tokens are tinted, the target's own are dotted."""
    lead = html([
        "Tinted is what the draft guessed and the target confirmed; underlined with dots is the target's own. ",
        "The colours say who was first, not who decided: every token is the target's choice.",
    ])  # fmt: skip
    # one of each drafter and temperature first, then the next of each
    ranked = [
        (rank, group, answer)
        for group in report.drafting
        for rank, answer in enumerate(answer for answer in group.answers if answer.get("pieces"))
    ]
    if not ranked:
        return section("answers", "Some answers", lead, missing("These results keep no answers in pieces."))
    ranked.sort(key=lambda item: item[0])
    figures = [_answer(group, answer) for _, group, answer in ranked[:ANSWERS]]
    return section("answers", "Some answers", lead, tag("div", figures, class_="answers"))


def _answer(group: Group, answer: Answer) -> Html:
    committed, count = count_cycles(answer)
    note = f"{task_of(answer)}, T = {group.temperature:g}, {committed / max(count, 1):.2f} tokens per target forward"
    spans = []
    left = LETTERS
    for text, accepted in answer["pieces"]:
        spans.append(tag("span", text[: max(left, 0)], class_="kept" if accepted else "own"))
        left -= len(text)
        if left <= 0:
            spans.append(html(f"… ({LETTERS} letters shown)"))
            break
    title = tag("figcaption", tag("strong", code(group.name)), tag("span", note, class_="note"))
    return tag("figure", title, tag("div", spans, class_="answer", dir="auto"))


def losslessness(report: ReportData) -> Html:
    """Whether the output is the untouched model's."""
    lead = (
        "Every answer is compared with plain decoding's in the same run, and by the certificate with the untouched "
        "model's own. A draft that is sampled from q keeps the distribution of the output, and not each token of it."
    )
    drafting = [group for group in report.every if group.drafter != "none"]
    same = sum(group.identical for group in drafting)
    differing = sum(group.differing for group in drafting)
    sampled = sum(len(group.answers) for group in drafting) - same - differing
    text = f"Of the drafters' answers {same} are plain decoding's token by token, {differing} part from it"
    text += f", {sampled} were sampled from q." if sampled else "."
    note = tag("p", text, class_="warn" if differing else None)
    return section("lossless", "Nothing lost?", lead, note, [_certificate(report, label) for label in report.runs])


def _certificate(report: ReportData, label: str) -> Html:
    """The certificate that `eagle lossless` wrote beside the results."""
    path = report.runs[label].path.with_name("lossless.json")
    name = f"{label}: " if label else ""
    if not path.exists():
        command = code("eagle lossless RECIPE")
        return missing(name, "no lossless.json lies beside the results; ", command, " makes it.")
    verdicts = json.loads(path.read_text(encoding="utf-8"))["verdicts"]
    rows = [
        (
            code(verdict["drafter"]),
            f"{verdict['temperature']:g}",
            verdict.get("batch_size", 1),
            _identical(verdict.get("to_plain"), verdict["answers"]),
            f"{verdict['identical']} of {verdict['answers']}",
            _identical(verdict.get("to_float32"), verdict["answers"]),
            "lossless" if verdict["lossless"] else tag("span", "parts beyond rounding", class_="warn"),
            _divergence(verdict["divergences"]),
        )
        for verdict in verdicts
    ]
    columns = ["drafter", "T", "at a time", "identical to plain decoding", "to the model's own", "to the model in fp32"]
    columns += ["verdict", "first divergence"]
    return html([tag("h3", name, "certificate against the untouched model"), table(columns, [("", rows)])])


def _identical(count: int | None, answers: int) -> str:
    """How many of the answers are identical; a dash where that was not compared."""
    return "–" if count is None else f"{count} of {answers}"


def _divergence(divergences: list[dict[str, Any]]) -> object:
    """The first divergence that rounding does not explain, else the first."""
    if not divergences:
        return "none"
    worst = min(divergences, key=lambda divergence: divergence["is_rounding"])
    gap = "no logit gap to tell" if worst["gap"] is None else f"logit gap {worst['gap']:.2g}"
    drafted, expected = worst["texts"]
    place = f"{worst['set']}, {worst['conversation']}, turn {worst['turn'] + 1}, token {worst['position'] + 1}: "
    rounding = f", {gap} (rounding {worst['rounding']:.2g})"
    return [place, code(drafted or "end"), " for ", code(expected or "end"), rounding]


def provenance(report: ReportData) -> Html:
    """The machine, versions and commit of each run."""
    lead = "Figures belong to a machine, versions and a commit; compare them with those of no other."
    parts = []
    for label, run in report.runs.items():
        starts = len(run.headers)
        count = f"{len(run.answers)} answers"
        count += f" from {starts} starts, the newest shown here" if starts > 1 else ""
        title = tag("h3", f"{label}: " if label else "", code(run.path.name))
        parts.append(html([title, tag("p", count), _header(run.header)]))
    return section("made", "What made it", lead, parts)


def _header(values: Mapping[str, Any]) -> Html:
    """Names and values; nested values are folded away as JSON."""
    plain = {key: value for key, value in values.items() if not isinstance(value, dict | list)}
    nested = {key: value for key, value in values.items() if isinstance(value, dict | list)}
    items = tag("dl", [[tag("dt", key.replace("_", " ")), tag("dd", value)] for key, value in plain.items()])
    folded = [
        tag("details", tag("summary", key.replace("_", " ")), tag("pre", json.dumps(value, ensure_ascii=False)))
        for key, value in nested.items()
    ]
    return html([items if plain else "", folded])
