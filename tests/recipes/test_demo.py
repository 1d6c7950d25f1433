"""What `make demo` says in the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eval.report import markdown
from recipes.tiny.demo import STAGES, outcome


def test_the_outcome_is_what_was_measured(tmp_path: Path) -> None:
    """The head's acceptance length and speed-up by temperature, and whether all of the certificate holds."""
    cycle = {"nodes": 4, "depth": 2, "accepted": 1, "committed": 2, "context": 9}
    flat = {"contexts": [0], "sizes": [1, 5], "target": [[1.0, 1.5]], "first": [[0.1, 0.1]], "level": [[0.1, 0.1]]}
    budget = {"nodes": 4, "depth": 2, "top_k": 1}
    settings = {name: {"weights": "w", "budget": budget} for name in ("ngram", "head")} | {"none": {"budget": {}}}
    alone = {key: flat[key] for key in ("contexts", "sizes", "target")}
    header = {"id": "1", "drafters": settings, "costs": {"none": alone, "ngram": alone, "head": flat}}
    lines: list[dict[str, Any]] = [{"run": header}]
    for temperature, seconds in ((0, 1.0), (1, 4.0)):
        for prompt in ("a", "b"):
            common = {"set": "s", "conversation": prompt, "turn": 0, "seed": 0, "tokens": 21, "identical": True}
            for name, spent, count in (("none", 2.0, 20), ("ngram", 9.0, 20), ("head", seconds, 10)):
                shape = {"nodes": 0, "depth": 0, "accepted": 0} if name == "none" else {}
                cycles = [{**cycle, **shape, "committed": 20 // count}] * count
                row = {**common, "run": "1", "drafter": name, "temperature": temperature, "seconds": spent}
                lines.append({**row, "loops": False, "cycles": cycles})
    results, certificate = tmp_path / "results.jsonl", tmp_path / "lossless.json"
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    verdicts = [{"lossless": True, "identical": 5, "answers": 5}, {"lossless": True, "identical": 4, "answers": 5}]
    certificate.write_text(json.dumps({"verdicts": verdicts}))
    modelled = 20 / (10 * (1.5 + 2 * 0.1))  # 20 forwards of one token, over 10 of five and their drafts of two levels
    assert outcome(results, certificate).splitlines() == [
        f"head at T = {heat}: acceptance length τ 2.00; speed of plain decoding × {modelled:.2f} [{modelled:.2f}, "
        f"{modelled:.2f}] in modelled time, which other work leaves alone, × {clock} [{clock}, {clock}] by the clock"
        for heat, clock in ((0, "2.00"), (1, "0.50"))
    ] + ["lossless: yes, 9 of 10 answers are the untouched model's own"]
    table = markdown(results).splitlines()
    assert "| speed-up | in modelled time |" in table[0]
    assert (
        table[4].startswith("| 0 | `head` |") and f"| {modelled:.2f} × [{modelled:.2f}, {modelled:.2f}] |" in table[4]
    )
    verdicts[1]["lossless"] = False
    certificate.write_text(json.dumps({"verdicts": verdicts}))
    assert "lossless: NO, 9 of 10" in outcome(results, certificate)


def test_the_report_is_made_of_what_was_measured_and_certified() -> None:
    """Measure, certify, report, in this order."""
    modules = [command[1] for command in STAGES.values() if command[0] == "-m"]
    order = [modules.index(name) for name in ("eval.measure", "eval.lossless", "eval.report")]
    assert order == sorted(order)
