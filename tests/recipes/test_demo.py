"""What the demo runs, and what it says in the end."""

from __future__ import annotations

import json
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from eagle.recipe import Recipe
from eval.result_files.results import read_results
from recipes.tiny import demo
from recipes.tiny.corpora import draw_stories
from recipes.tiny.make_target import make_target


def write_results(path: Path) -> None:
    """Two answers of each of three drafters: `head` takes 10 passes where `none` takes 20."""
    lines: list[dict[str, Any]] = [{"run": {"id": "1"}}]
    for temperature, seconds in ((0, 1.0), (1, 4.0)):
        for prompt in ("a", "b"):
            common = {
                "set": "s",
                "conversation": prompt,
                "turn": 0,
                "seed": 0,
                "tokens": 21,
                "identical": True,
            }
            for name, spent, count in (
                ("none", 2.0, 20),
                ("ngram", 9.0, 20),
                ("head", seconds, 10),
            ):
                cycle = {
                    "nodes": 4,
                    "depth": 2,
                    "accepted": 1,
                    "committed": 20 // count,
                    "context": 9,
                }
                row = {
                    **common,
                    "run": "1",
                    "drafter": name,
                    "temperature": temperature,
                    "seconds": spent,
                }
                lines.append(
                    {**row, "cpu_seconds": spent, "loops": False, "cycles": [cycle] * count}
                )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_outcome_is_what_was_measured(tmp_path: Path) -> None:
    """The head's acceptance length and speed-up by temperature, and whether all of the certificate holds."""
    results, certificate = tmp_path / "results.jsonl", tmp_path / "lossless.json"
    write_results(results)
    console = Console(file=StringIO(), width=200)
    console.print(demo.outcome(read_results(results)))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in text.splitlines()
        if line.startswith("│")
    ]
    assert rows == [
        ["0", "none", "1.00 [1.00, 1.00]", "10 [10, 10]", "1.00 ×"],
        ["0", "ngram", "1.00 [1.00, 1.00]", "2 [2, 2]", "0.22 × [0.22, 0.22]"],
        ["0", "head", "2.00 [2.00, 2.00]", "21 [21, 21]", "2.00 × [2.00, 2.00]"],
        ["1", "none", "1.00 [1.00, 1.00]", "10 [10, 10]", "1.00 ×"],
        ["1", "ngram", "1.00 [1.00, 1.00]", "2 [2, 2]", "0.22 × [0.22, 0.22]"],
        ["1", "head", "2.00 [2.00, 2.00]", "5 [5, 5]", "0.50 × [0.50, 0.50]"],
    ]
    verdicts = [
        {"lossless": True, "identical": 5, "answers": 5},
        {"lossless": True, "identical": 4, "answers": 5},
    ]
    certificate.write_text(json.dumps({"verdicts": verdicts}))
    assert demo.verdict(read_results(results), certificate).splitlines() == [
        "With the head at T = 0: 2.00 [2.00, 2.00] times as fast",
        "With the head at T = 1: 0.50 [0.50, 0.50] times as fast",
        "Lossless: yes, 9 of 10 answers are the model's own",
    ]
    verdicts[1]["lossless"] = False
    certificate.write_text(json.dumps({"verdicts": verdicts}))
    assert "Lossless: NO, 9 of 10" in demo.verdict(read_results(results), certificate)


def test_a_busy_machine_is_named(tmp_path: Path) -> None:
    """Where answers waited for other work, the speed-up in CPU seconds stands beside."""
    results, certificate = tmp_path / "results.jsonl", tmp_path / "lossless.json"
    write_results(results)
    busy = results.read_text().replace('"cpu_seconds": 1.0', '"cpu_seconds": 0.5')
    results.write_text(busy)
    certificate.write_text(json.dumps({"verdicts": []}))
    first = demo.verdict(read_results(results), certificate).splitlines()[0]
    assert first.endswith(
        "as fast; in CPU seconds 4.00 [4.00, 4.00] times, as other work had part of this machine"
    )


def test_the_report_is_made_of_what_was_measured_and_certified() -> None:
    """Measure, certify, report, in this order."""
    modules = [stage.command[1] for stage in demo.STAGES]
    order = [modules.index(name) for name in ("eval.measure", "eval.lossless", "eval.report")]
    assert order == sorted(order)


def test_the_stages_use_the_files_of_the_recipe() -> None:
    """What the demo names is what its recipe writes."""
    recipe = Recipe.load(demo.RECIPE)
    assert recipe.target.path == demo.TARGET
    assert f"{recipe.train.out}/head" == demo.HEAD
    assert {recipe.eval.prompts, recipe.regenerate.source} == {  # type: ignore[union-attr]
        f"{demo.DATA}/heldout.jsonl",
        f"{demo.DATA}/train.jsonl",
    }
    assert sum(stage.seconds for stage in demo.STAGES) < 300


def test_conversations_are_the_same_again_and_avoid_what_is_held_out() -> None:
    """One seed gives one text; no question that is avoided is asked."""
    first, again = (list(islice(draw_stories(0), 50)) for _ in range(2))
    assert first == again
    avoided = {record["conversations"][0]["value"] for record in first[:25]}
    others = islice(draw_stories(0, avoid=avoided), 200)
    assert not avoided & {record["conversations"][0]["value"] for record in others}


@pytest.mark.slow
def test_the_target_of_the_demo_is_made_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A few steps leave a target and data; the same call again finds them."""
    report = make_target(tmp_path, steps=2, corpus="stories")
    held_out = len((tmp_path / "data/heldout.jsonl").read_text().splitlines())
    assert report["conversations"] == {"train": 3000, "heldout": held_out}
    assert 15 <= held_out <= 24
    assert (tmp_path / "target/model.safetensors").is_file()
    assert make_target(tmp_path, steps=2, corpus="stories") == report
    assert "is already there" in capsys.readouterr().out
