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
from tests.eval.jsonl_files import read_lines, write_lines


def make_answer(drafter: str, temperature: int, seconds: float, cycles: int) -> dict[str, Any]:
    """Return an answer of 21 tokens, of which prefill gives the first."""
    # all cycles commit the same number of tokens
    committed = 20 // cycles
    cycle = {
        "nodes": 4,
        "depth": 2,
        "accepted": 1,
        "committed": committed,
        "context": 9,
    }
    return {
        "run": "1",
        "drafter": drafter,
        "set": "s",
        "turn": 0,
        "seed": 0,
        "temperature": temperature,
        "tokens": 21,
        "identical": True,
        "loops": False,
        "seconds": seconds,
        "cpu_seconds": seconds,
        "cycles": [cycle] * cycles,
    }


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Two answers of each of three drafters: `head` takes 10 cycles where `none` takes 20."""
    lines: list[dict[str, Any]] = [{"run": {"id": "1"}}]
    for temperature, seconds in ((0, 1.0), (1, 4.0)):
        for conversation in ("a", "b"):
            for answer in (
                make_answer("none", temperature, 2.0, 20),
                make_answer("ngram", temperature, 9.0, 20),
                make_answer("head", temperature, seconds, 10),
            ):
                lines.append({**answer, "conversation": conversation})

    return write_lines(tmp_path / "results.jsonl", lines)


def say_verdict(results: Path, *verdicts: dict[str, Any]) -> list[str]:
    """Return the demo's last lines with a certificate of these verdicts."""
    certificate = results.with_name("lossless.json")
    certificate.write_text(json.dumps({"verdicts": verdicts}))
    return demo.verdict(read_results(results), certificate).splitlines()


def test_the_outcome_is_what_was_measured(results: Path) -> None:
    """The table has acceptance length, tokens per second and speedup of each drafter at each temperature."""
    printed = StringIO()
    Console(file=printed, width=200).print(demo.outcome(read_results(results)))
    # rich draws the borders of a table with these characters
    rows = []
    for line in printed.getvalue().splitlines():
        if line.startswith("│"):
            rows.append([cell.strip() for cell in line.split("│")[1:-1]])

    assert rows == [
        ["0", "none", "1.00 [1.00, 1.00]", "10 [10, 10]", "1.00 ×"],
        ["0", "ngram", "1.00 [1.00, 1.00]", "2 [2, 2]", "0.22 × [0.22, 0.22]"],
        ["0", "head", "2.00 [2.00, 2.00]", "21 [21, 21]", "2.00 × [2.00, 2.00]"],
        ["1", "none", "1.00 [1.00, 1.00]", "10 [10, 10]", "1.00 ×"],
        ["1", "ngram", "1.00 [1.00, 1.00]", "2 [2, 2]", "0.22 × [0.22, 0.22]"],
        ["1", "head", "2.00 [2.00, 2.00]", "5 [5, 5]", "0.50 × [0.50, 0.50]"],
    ]


def test_the_verdict_sums_up_speed_and_certificate(results: Path) -> None:
    """The head's speedup at each temperature, and whether every verdict is lossless."""
    whole = {"lossless": True, "identical": 5, "answers": 5}
    partly = {"lossless": True, "identical": 4, "answers": 5}

    assert say_verdict(results, whole, partly) == [
        "With the head at T = 0: 2.00 [2.00, 2.00] times as fast",
        "With the head at T = 1: 0.50 [0.50, 0.50] times as fast",
        "Lossless: yes, 9 of 10 answers are the model's own",
    ]
    wrong = {**partly, "lossless": False}
    assert say_verdict(results, whole, wrong)[-1].startswith("Lossless: NO, 9 of 10")


def test_a_busy_machine_is_named(results: Path) -> None:
    """If answers waited for other work, the speedup in CPU seconds is said too."""
    lines = read_lines(results)
    # only the head at T = 0 took a second
    for line in lines:
        if line.get("cpu_seconds") == 1.0:
            line["cpu_seconds"] = 0.5

    write_lines(results, lines)
    in_cpu_seconds = (
        "in CPU seconds 4.00 [4.00, 4.00] times, as other work had part of this machine"
    )

    assert say_verdict(results)[0].endswith(f"as fast; {in_cpu_seconds}")


def test_the_report_is_made_of_what_was_measured_and_certified() -> None:
    """Stages measure, certify and report, in this order."""
    modules = [stage.command[1] for stage in demo.STAGES]
    order = [modules.index(name) for name in ("eval.measure", "eval.lossless", "eval.report")]
    assert order == sorted(order)


def test_the_stages_use_the_files_of_the_recipe() -> None:
    """The files that the demo names are those that its recipe writes."""
    recipe = Recipe.load(demo.RECIPE)
    assert recipe.target.path == demo.TARGET
    assert f"{recipe.train.out}/head" == demo.HEAD
    assert recipe.eval.prompts == f"{demo.DATA}/heldout.jsonl"
    assert recipe.regenerate is not None
    assert recipe.regenerate.source == f"{demo.DATA}/train.jsonl"
    # the README promises five minutes
    assert sum(stage.seconds for stage in demo.STAGES) < 300


def test_conversations_are_the_same_again_and_avoid_what_is_held_out() -> None:
    """One seed gives one text; no avoided question is asked."""
    first, again = (list(islice(draw_stories(0), 50)) for _ in range(2))
    assert first == again
    # the first half counts as held out
    avoided = {record["conversations"][0]["value"] for record in first[:25]}
    for record in islice(draw_stories(0, avoid=avoided), 200):
        assert record["conversations"][0]["value"] not in avoided


@pytest.mark.slow
def test_the_target_of_the_demo_is_made_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A few steps leave a target and data; the same call again finds them."""
    report = make_target(tmp_path, steps=2, corpus="stories")
    held_out = len(read_lines(tmp_path / "data/heldout.jsonl"))

    assert report["conversations"] == {"train": 3000, "heldout": held_out}
    assert 15 <= held_out <= 24
    assert (tmp_path / "target/model.safetensors").is_file()
    assert make_target(tmp_path, steps=2, corpus="stories") == report
    assert "is already there" in capsys.readouterr().out
