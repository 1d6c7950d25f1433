"""What `make demo` says in the end."""

from __future__ import annotations

import json
from pathlib import Path

from recipes.tiny.demo import STAGES, outcome


def test_the_outcome_is_what_was_measured(tmp_path: Path) -> None:
    """The head's acceptance length and speed-up by temperature, and whether all of the certificate holds."""
    common = {"set": "s", "conversation": "c", "turn": 0, "seed": 0, "tokens": 21, "identical": True, "loops": False}
    cycle = {"nodes": 4, "depth": 2, "accepted": 1, "committed": 2, "context": 9}
    lines = [{"run": {"id": "1"}}]
    for temperature, seconds in ((0, 1.0), (1, 4.0)):
        for name, spent, cycles in (("none", 2.0, 20), ("ngram", 9.0, 20), ("head", seconds, 10)):
            row = {**common, "run": "1", "drafter": name, "temperature": temperature, "seconds": spent}
            lines.append({**row, "cycles": [{**cycle, "committed": 20 // cycles}] * cycles})
    results, certificate = tmp_path / "results.jsonl", tmp_path / "lossless.json"
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    verdicts = [{"lossless": True, "identical": 5, "answers": 5}, {"lossless": True, "identical": 4, "answers": 5}]
    certificate.write_text(json.dumps({"verdicts": verdicts}))
    assert outcome(results, certificate).splitlines() == [
        "head at T = 0: acceptance length τ 2.00, 2.00 × the speed of plain decoding",
        "head at T = 1: acceptance length τ 2.00, 0.50 × the speed of plain decoding",
        "lossless: yes, 9 of 10 answers are the untouched model's own",
    ]
    verdicts[1]["lossless"] = False
    certificate.write_text(json.dumps({"verdicts": verdicts}))
    assert "lossless: NO, 9 of 10" in outcome(results, certificate)


def test_the_report_is_made_of_what_was_measured_and_certified() -> None:
    """Measure, certify, report, in this order."""
    modules = [command[1] for command in STAGES.values() if command[0] == "-m"]
    order = [modules.index(name) for name in ("eval.measure", "eval.lossless", "eval.report")]
    assert order == sorted(order)
