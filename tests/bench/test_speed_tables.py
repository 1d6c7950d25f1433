"""Tables of speed: a run in parts is one run, wrong answers are counted, drafters widen without other drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from bench import speed_arms
from bench.speed_arms import HEAD_SHARE, MODEL_SHARE, Setting, count_weights, widen_drafter
from bench.speed_report import compute_cells, list_goals
from bench.speed_tables import group_prompts, list_arms, main, read_records
from eagle import Budget, Target, generate, load_drafter
from eagle.drafters.recurrent.eagle1 import Eagle1
from eagle.formats.checkpoint import save_head
from eagle.recipe import Recipe

ARMS = ["none", "transformers", "transformers, assisted", "copy, chain 3", "eagle1, chain 3", "ngram, chain 3"]


@pytest.fixture(scope="module")
def recipe(mixing_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two questions to a random target; the drafters are a random head, and a draft model that is the target again."""
    folder = tmp_path_factory.mktemp("speed")
    target = Target.load(mixing_target_dir, dtype="float32")
    save_head(folder / "head", Eagle1.for_target(Eagle1.Settings(), target.config), "", {})
    (folder / "questions.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("Who?", "What?")))
    sections = {
        "target": {"path": str(mixing_target_dir)},
        "data": {"train": "none"},
        "features": {},
        "drafter": {"kind": "eagle1"},
        "train": {"out": "none"},
        "eval": {
            "prompts": str(folder / "questions.jsonl"),
            "count": 2,
            "max_new_tokens": 8,
            "temperatures": [0.0, 1.0],
            "drafters": {
                "ngram": {"head": "ngram"},
                "eagle1": {"head": str(folder / "head")},
                "copy": {"head": str(mixing_target_dir)},
            },
        },
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(sections, sort_keys=False))
    return folder / "recipe.yaml"


def run(recipe: Path, work: Path, *options: str) -> list[dict[str, Any]]:
    """The cells of a run on one thread in fp32."""
    sizes = ["--sizes", "0.002 B", "--dtypes", "float32", "--shapes", "chain 3"]
    main([str(recipe), *sizes, "--work", str(work), "--out", str(work / "out.json"), *options])
    cells: list[dict[str, Any]] = json.loads((work / "out.json").read_text())["cells"]
    return cells


def without_seconds(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """What a clock has no part in, by setting and arm."""
    names = ("tau", "unequal", "prompts")
    return {f"{cell['setting']}, {cell['arm']}": [cell[name] for name in names] for cell in cells}


@pytest.mark.slow
def test_a_run_in_parts_is_one_run(recipe: Path, tmp_path: Path) -> None:
    """Also after it was killed within a line; no turn is measured twice but plain decoding beside what is new."""
    whole = run(recipe, tmp_path / "whole", "--arms", *ARMS)
    again = run(recipe, tmp_path / "whole", "--arms", *ARMS)
    assert again == whole
    parts = tmp_path / "parts"
    run(recipe, parts, "--arms", "none", "eagle1, chain 3")
    run(recipe, parts, "--arms", *ARMS)
    turns = parts / "turns.jsonl"
    text = turns.read_text()
    turns.write_text(text[: len(text) - 20])
    cells = run(recipe, parts, "--arms", *ARMS)
    assert without_seconds(cells) == without_seconds(whole)
    known = without_seconds(cells)
    assert all(row[1] in ([0, 2], None) for row in known.values())
    assert all(row[0] > 2.5 for name, row in known.items() if "copy" in name)  # it drafts what the target says
    records = [record for record in read_records(turns) if record["arm"] != "none"]
    places = [(*record["setting"], record["arm"], record["group"]) for record in records]
    assert len(places) == len({*places})


@pytest.mark.slow
def test_a_wrong_answer_is_counted(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one drafter, whose last token is another one."""
    decode = speed_arms.decode_here

    def decode_wrong(target: Any, drafter: Any, *asked: Any) -> Any:
        figures, answers = decode(target, drafter, *asked)
        if isinstance(drafter, Eagle1):
            answers[0][-1] += 1
        return figures, answers

    monkeypatch.setattr(speed_arms, "decode_here", decode_wrong)
    cells = run(recipe, tmp_path, "eval.temperatures=[0.0]", "--arms", *ARMS)
    wrong = {cell["arm"]: cell["unequal"] for cell in cells}
    assert wrong == {"none": None, **{arm: [2 if arm.startswith("eagle1") else 0, 2] for arm in ARMS[1:]}}


@pytest.mark.parametrize("kind", ["head", "model"])
def test_a_widened_drafter_drafts_as_before(kind: str, recipe: Path, mixing_target_dir: Path) -> None:
    """A head and a draft model reach their share of the target and keep every tree."""
    target = Target.load(mixing_target_dir, dtype=torch.float64)
    folder = recipe.parent / "head" if kind == "head" else mixing_target_dir
    share = HEAD_SHARE if kind == "head" else MODEL_SHARE
    trees = []
    for wide in (False, True):
        drafter: Any = load_drafter(folder, target)
        weights = 2 * count_weights(drafter) / share
        if wide:
            assert widen_drafter(drafter, weights) == pytest.approx(share, rel=0.02)
            assert count_weights(drafter) == pytest.approx(weights * share, rel=0.02)
        trace = generate(target, drafter, [5, 6, 7], max_new_tokens=12, stop=[], budget=Budget(8, 4, 4))
        trees.append([(cycle.tree.tokens.tolist(), cycle.tree.parents.tolist()) for cycle in trace.cycles])
    assert trees[0] == trees[1]


def test_speed_ups_are_of_the_same_turns() -> None:
    """Arms that were added later are compared with the plain decoding beside them, and so with those of other runs."""
    place = {"setting": [*Setting("1 B", "bfloat16", 1, 0, 1, 0.0)], "unequal": 0, "texts": 1, "wall": 1.0}

    def turn(arm: str, run: int, group: int, cpu: float) -> dict[str, Any]:
        return {**place, "arm": arm, "run": run, "group": group, "cpu": cpu, "tokens": 10}

    records = [turn("none", 1, group, 4.0) for group in range(3)] + [turn("a, chain 3", 1, g, 2.0) for g in range(3)]
    records += [turn("none", 2, group, 8.0) for group in range(3)] + [turn("b, chain 3", 2, g, 2.0) for g in range(3)]
    records += [turn("transformers, assisted", 2, g, 4.0) for g in range(3)]
    cells = {cell["arm"]: cell for cell in compute_cells(records, {})}
    assert cells["a, chain 3"]["over plain"] == [2.0, 2.0, 2.0]
    assert cells["b, chain 3"]["over plain"] == [4.0, 4.0, 4.0]
    assert cells["b, chain 3"]["over assisted"] == [2.0, 2.0, 2.0]
    assert cells["a, chain 3"]["over assisted"] == [1.0, 1.0, 1.0]  # both are twice as fast as plain decoding
    verdicts = [(reached.split(",")[0], verdict) for _, reached, verdict in list_goals([*cells.values()], {})]
    assert verdicts == [("b", "met"), ("b", "met")]


def test_a_tuned_budget_is_checked(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tuner that says not to draft, where drafts are right, misses all that the best budget gains."""
    monkeypatch.setattr(speed_arms, "CANDIDATES", [Budget(3, 3, 1), Budget(5, 5, 1)])
    plan = {"tuned": {"nodes": 0, "depth": 0, "top_k": 0}, "cycles": {}, "share": None}
    (tmp_path / "plans.json").write_text(json.dumps({"0.002 B, float32, 1, copy": plan}))
    run(recipe, tmp_path, "eval.temperatures=[0.0]", "--arms", "none", "--check-tuned", "copy")
    results = json.loads((tmp_path / "out.json").read_text())
    figures = results["drafters"]["0.002 B, float32, 1, copy"]["T = 0"]
    assert figures["tuned / best"] == pytest.approx(1 / figures["best over plain"], rel=2e-3)
    (goal,) = list_goals(results["cells"], results["drafters"])
    assert goal[2] == ("met" if figures["tuned / best"] >= 0.97 else "missed")


def test_batches_take_prompts_in_turn() -> None:
    """Each prompt once; where there are fewer than a batch holds, again."""
    prompts = [[number] for number in range(5)]
    assert group_prompts(prompts, 2) == [[[0], [1]], [[2], [3]]]
    assert group_prompts(prompts, 7) == [[[0], [1], [2], [3], [4], [0], [1]]]


def test_peers_of_a_batch(recipe: Path) -> None:
    """Transformers' assisted generation takes one text alone."""
    known = Recipe.load(recipe)
    assert "transformers, assisted" in list_arms(known, ["chain 3"], 1)
    assert list_arms(known, ["chain 3"], 4)[:3] == ["none", "transformers", "ngram, chain 3"]
