"""Tables of speed: wrong answers are counted, speedups are of the same turns, drafters widen without other drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from bench import speed_arms, speed_tables
from bench.speed_arms import HEAD_SHARE, MODEL_SHARE, widen_drafter
from bench.speed_report import Setting, compute_cells
from bench.speed_tables import group_prompts, list_arms, main
from bench.widen import count_weights
from eagle import Budget, Target, generate, load_drafter
from eagle.drafters.recurrent.eagle1 import Eagle1
from eagle.formats.checkpoint import save_head
from eagle.recipe import Recipe

ARMS = [
    "none",
    "transformers",
    "transformers, assisted",
    "copy, chain 3",
    "eagle1, chain 3",
    "ngram, chain 3",
]


@pytest.fixture(scope="module")
def recipe(mixing_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two questions to a random target; the drafters are a random head, and a draft model that is the target again."""
    folder = tmp_path_factory.mktemp("speed")
    target = Target.load(mixing_target_dir, dtype="float32")
    save_head(folder / "head", Eagle1.for_target(Eagle1.Settings(), target.config), "", {})
    (folder / "questions.jsonl").write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in ("Who?", "What?"))
    )
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


def run(recipe: Path, folder: Path, *options: str) -> dict[str, Any]:
    """The cells of a run on one thread in fp32, by arm."""
    out = folder / "out.json"
    main([str(recipe), "--size", "0.002 B", "--dtype", "float32", "--out", str(out), *options])
    return {cell["arm"]: cell for cell in json.loads(out.read_text())["cells"]}


@pytest.mark.slow
def test_a_wrong_answer_is_counted(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one drafter, whose last token is another one; a copy of the target drafts what the target says."""
    decode = speed_arms.decode_here

    def decode_wrong(target: Any, drafter: Any, *asked: Any) -> Any:
        figures, answers = decode(target, drafter, *asked)
        if isinstance(drafter, Eagle1):
            answers[0][-1] += 1
        return figures, answers

    monkeypatch.setattr(speed_arms, "decode_here", decode_wrong)
    cells = run(recipe, tmp_path, "eval.temperatures=[0.0]", "--arms", *ARMS)
    wrong = {arm: cell["unequal"] for arm, cell in cells.items()}
    assert wrong == {
        "none": None,
        **{arm: [2 if arm.startswith("eagle1") else 0, 2] for arm in ARMS[1:]},
    }
    assert cells["copy, chain 3"]["tau"] > 2.5


@pytest.mark.slow
def test_a_budget_is_tuned_and_a_policy_stays_within_it(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both give plain decoding's answers, and a cycle of the tuned budget has a cost."""
    monkeypatch.setattr(speed_tables, "CANDIDATES", [Budget(3, 3, 1), Budget(5, 5, 1)])
    cells = run(
        recipe, tmp_path, "eval.temperatures=[0.0]", "--arms", "copy, tuned", "copy, Goodput"
    )
    assert [cells[arm]["unequal"] for arm in ("copy, tuned", "copy, Goodput")] == [[0, 2], [0, 2]]
    assert cells["copy, tuned"]["cycle"] >= 1 and cells["copy, Goodput"]["cycle"] is None


@pytest.mark.parametrize("kind", ["head", "model"])
def test_a_widened_drafter_drafts_as_before(
    kind: str, recipe: Path, mixing_target_dir: Path
) -> None:
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
        trace = generate(
            target, drafter, [5, 6, 7], max_new_tokens=12, stop=[], budget=Budget(8, 4, 4)
        )
        trees.append(
            [(cycle.tree.tokens.tolist(), cycle.tree.parents.tolist()) for cycle in trace.cycles]
        )
    assert trees[0] == trees[1]


def test_speedups_are_of_the_same_prompts() -> None:
    """With an interval over batches of prompts; assisted generation is that of the faster settings."""

    def rows(*cpu: float) -> list[dict[str, Any]]:
        return [{"cpu": seconds, "tokens": 10, "unequal": 0, "texts": 1} for seconds in cpu]

    arms = {
        "none": rows(4.0, 4.0, 4.0),
        "transformers, assisted": rows(8.0, 8.0, 8.0),
        "transformers, assisted by 5": rows(2.0, 2.0, 2.0),
        "a, chain 3": rows(1.0, 1.0, 2.0),
    }
    setting = Setting("1 B", "bfloat16", 1, context=0, batch=1, temperature=0.0)
    cells = {cell["arm"]: cell for cell in compute_cells(setting, arms, {"a, chain 3": 1.5})}
    assert (
        cells["none"]["over plain"] == [1.0, 1.0, 1.0]
        and cells["none"]["over transformers"] is None
    )
    assert cells["a, chain 3"]["over plain"] == [3.0, 2.0, 4.0]
    assert cells["a, chain 3"]["over assisted"] == [1.5, 1.0, 2.0]
    assert cells["a, chain 3"]["cycle"] == 1.5 and cells["a, chain 3"]["tau"] is None


def test_batches_take_prompts_in_turn() -> None:
    """Each prompt once; where there are fewer than a batch holds, again."""
    prompts = [[number] for number in range(5)]
    assert group_prompts(prompts, 2) == [[[0], [1]], [[2], [3]]]
    assert group_prompts(prompts, 7) == [[[0], [1], [2], [3], [4], [0], [1]]]


def test_peers_of_a_batch(recipe: Path) -> None:
    """Transformers' assisted generation takes one text alone."""
    known = Recipe.load(recipe)
    assert "transformers, assisted" in list_arms(known, 1)
    assert list_arms(known, 4)[:3] == ["none", "transformers", "ngram, chain 3"]
