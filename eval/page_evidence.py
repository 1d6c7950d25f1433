"""The page's evidence: answers with what was drafted in them, whether anything was lost, and what made it all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from eval.markup import Html, html, tag
from eval.page_parts import Shown, code, missing, section, table
from eval.page_speed import task_of
from eval.results import Answer, Group, taken

ANSWERS = 6
LETTERS = 4000  # of one answer


def answers(shown: Shown) -> Html:
    """A few generations: what the draft guessed is tinted, the target's own tokens are dotted."""
    lead = html([
        "Tinted is what the draft guessed and the target confirmed; underlined with dots is the target's own. ",
        "The colours say who was first, not who decided: every token is the target's choice.",
    ])  # fmt: skip
    kept = [(group, answer) for group in shown.drafting for answer in group.answers if answer.get("pieces")]
    if not kept:
        return section("answers", "Some answers", lead, missing("These results keep no answers in pieces."))
    # one of each drafter and temperature first, then the next of each
    order = sorted(range(len(kept)), key=lambda n: sum(group is kept[n][0] for group, _ in kept[:n]))
    drawn = [_answer(*kept[number]) for number in order[:ANSWERS]]
    return section("answers", "Some answers", lead, tag("div", drawn, class_="answers"))


def _answer(group: Group, answer: Answer) -> Html:
    committed, cycles = taken(answer)
    about = f"{task_of(answer)}, T = {group.temperature:g}, {committed / max(cycles, 1):.2f} tokens per target forward"
    spans, left = [], LETTERS
    for text, accepted in answer["pieces"]:
        spans.append(tag("span", text[: max(left, 0)], class_="kept" if accepted else "own"))
        left -= len(text)
        if left <= 0:
            spans.append(html(f"… ({LETTERS} letters shown)"))
            break
    title = tag("figcaption", tag("strong", code(group.name)), tag("span", about, class_="note"))
    return tag("figure", title, tag("div", spans, class_="answer", dir="auto"))


def losslessness(shown: Shown) -> Html:
    """Whether the output is the untouched model's."""
    lead = (
        "Every answer is compared with plain decoding's in the same run, and by the certificate with the untouched "
        "model's own. A draft that is sampled from q keeps the law of the output, and not each token of it."
    )
    same, other = (sum(counts) for counts in zip(*[(g.identical, g.differing) for g in shown.drafting], strict=True))
    alike = sum(len(group.answers) for group in shown.drafting) - same - other
    said = f"Of the drafters' answers {same} are plain decoding's token by token, {other} differ"
    own = tag("p", said, f", {alike} were sampled from q." if alike else ".", class_="warn" if other else None)
    return section("lossless", "Nothing lost?", lead, own, [certificate(shown, label) for label in shown.runs])


def certificate(shown: Shown, label: str) -> Html:
    """What eval.lossless wrote beside the results."""
    path = shown.runs[label].path.with_name("lossless.json")
    name = f"{label}: " if label else ""
    if not path.exists():
        how = code("python -m eval.lossless RECIPE")
        return missing(name, "no lossless.json lies beside the results; ", how, " makes it.")
    verdicts = json.loads(path.read_text(encoding="utf-8"))["verdicts"]
    rows = [
        (code(v["drafter"]), f"{v['temperature']:g}", f"{v['identical']} of {v['answers']}", *_divergence(v))
        for v in verdicts
    ]
    columns = ["drafter", "T", "identical to the model's own", "verdict", "first divergence"]
    return html([tag("h3", name, "certificate against the untouched model"), table(columns, [("", rows)])])


def _divergence(verdict: Mapping[str, Any]) -> tuple[object, object]:
    """Whether nothing was lost, and the first divergence, of those that rounding does not explain if there are any."""
    said = "lossless" if verdict["lossless"] else tag("span", "differs", class_="warn")
    worst = sorted(verdict["divergences"], key=lambda one: one["is_rounding"])
    if not worst:
        return said, "none"
    one = worst[0]
    gap = "no logit gap to tell" if one["gap"] is None else f"logit gap {one['gap']:.2g}"
    drafted, own = one["texts"]
    place = f"{one['set']}, {one['conversation']}, turn {one['turn'] + 1}, token {one['position'] + 1}: "
    close = f", {gap} (rounding {one['rounding']:.2g})"
    return said, [place, code(drafted or "end"), " for ", code(own or "end"), close]


def provenance(shown: Shown) -> Html:
    """What made the figures."""
    lead = "Figures belong to a machine, versions and a commit; compare them with those of no other."
    return section("made", "What made it", lead, [_run(shown, label) for label in shown.runs])


def _run(shown: Shown, label: str) -> Html:
    run = shown.runs[label]
    starts = len(run.headers)
    title = tag("h3", f"{label}: " if label else "", code(run.path.name))
    restarts = f"{len(run.answers)} answers" + (f" from {starts} starts, the newest shown here" if starts > 1 else "")
    return html([title, tag("p", restarts), described(run.header)])


def described(values: Mapping[str, Any]) -> Html:
    """Names and values; what is itself a list or a table is folded away as JSON."""
    plain = {key: value for key, value in values.items() if not isinstance(value, dict | list)}
    deep = {key: value for key, value in values.items() if isinstance(value, dict | list)}
    listed = tag("dl", [[tag("dt", key.replace("_", " ")), tag("dd", value)] for key, value in plain.items()])
    folded = [
        tag("details", tag("summary", key.replace("_", " ")), tag("pre", json.dumps(value, ensure_ascii=False)))
        for key, value in deep.items()
    ]
    return html([listed if plain else "", folded])
