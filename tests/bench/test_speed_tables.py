"""Tables of speed: wrong answers are counted, and speedups are of the same prompts."""

from __future__ import annotations

import json
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
import yaml

from bench import speed_arms, speed_tables
from bench.speed_arms import HEAD_SHARE, MODEL_SHARE, Watch, widen_drafter
from bench.speed_report import Setting, compute_cells, table
from bench.speed_tables import group_prompts, list_arms, main
from bench.widen import count_weights
from eagle import Budget, Target, generate, load_drafter
from eagle.conformance.trial import trees_of
from eagle.drafters.recurrent.eagle1 import Eagle1
from eagle.formats.checkpoint import save_head
from eagle.recipe import Recipe

# `main` sets the number of threads
pytestmark = pytest.mark.usefixtures("same_threads")
ARMS = [
    "none",
    "transformers",
    "transformers, assisted",
    "copy, chain 3",
    "copy, tuned",
    "copy, Goodput",
    "eagle1, chain 3",
    "ngram, chain 3",
]


@pytest.fixture(scope="module")
def recipe(mixing_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a recipe of two questions to a random target, for a random head and a copy of it."""
    # an untrained head is hardly ever right, a copy always is
    folder = tmp_path_factory.mktemp("speed")
    target = Target.load(mixing_target_dir, dtype="float32")
    save_head(
        folder / "head",
        Eagle1.for_target(Eagle1.Settings(), target.config),
        "",
        {},
    )
    (folder / "questions.jsonl").write_text('{"prompt": "Who?"}\n{"prompt": "What?"}\n')
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
            "temperatures": [0.0],
            "drafters": {
                "ngram": {"head": "ngram"},
                "eagle1": {"head": str(folder / "head")},
                "copy": {"head": str(mixing_target_dir)},
            },
        },
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(sections, sort_keys=False))
    return path


@pytest.mark.slow
def test_wrong_answers_are_counted(
    recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the one drafter whose last token is changed; tuned budgets and policies answer as plain."""
    decode = speed_arms.decode_here

    def decode_wrong(
        target: Any,
        drafter: Any,
        *given: Any,
    ) -> Any:
        # the last token of the first answer
        figures, answers = decode(target, drafter, *given)
        if isinstance(drafter, Eagle1):
            answers[0][-1] += 1
        return figures, answers

    monkeypatch.setattr(
        speed_arms,
        "decode_here",
        decode_wrong,
    )
    monkeypatch.setattr(
        speed_tables,
        "CANDIDATES",
        [Budget(3, 3, 1), Budget(5, 5, 1)],
    )
    out = tmp_path / "out.json"
    options = [
        "--size",
        "0.002 B",
        "--dtype",
        "float32",
        "--out",
        str(out),
        "--arms",
        *ARMS,
    ]
    main([str(recipe), *options])
    cells = {cell["arm"]: cell for cell in json.loads(out.read_text())["cells"]}
    # answers of two prompts; plain decoding is what they are compared with
    expected: dict[str, Any] = {arm: [0, 2] for arm in ARMS}
    expected["none"] = None
    expected["eagle1, chain 3"] = [2, 2]
    assert {arm: cell["unequal"] for arm, cell in cells.items()} == expected
    # all drafts of a copy of the target are accepted
    assert cells["copy, chain 3"]["tau"] > 2.5
    assert cells["copy, tuned"]["cycle"] >= 1
    assert cells["copy, Goodput"]["cycle"] is None


def test_a_real_target_decodes_as_it_is(recipe: Path, tmp_path: Path) -> None:
    """Neither the target nor a drafter is widened, and its row names no size."""
    out = tmp_path / "own.json"
    options = ["--size", "own", "--dtype", "float32", "--out", str(out)]
    main([str(recipe), *options, "--arms", "eagle1, chain 3", "transformers"])
    results = json.loads(out.read_text())
    assert results["shares"] == {}
    cells = {cell["arm"]: cell for cell in results["cells"]}
    assert list(cells) == ["none", "transformers", "eagle1, chain 3"]
    assert cells["eagle1, chain 3"]["unequal"] == [0, 2]
    assert cells["transformers"]["unequal"] == [0, 2]


def test_several_threads_are_timed_in_wall_seconds(recipe: Path, tmp_path: Path) -> None:
    """CPU seconds would add up those of all threads; the table tells the number."""
    out = tmp_path / "threads.json"
    options = ["--size", "own", "--dtype", "float32", "--threads", "2", "--out", str(out)]
    main([str(recipe), *options, "--arms", "none"])
    results = json.loads(out.read_text())
    assert results["machine"]["threads"] == 2
    assert "2 threads" in table(results)
    assert Watch(torch.device("cpu")).clock is perf_counter


@pytest.mark.parametrize(("kind", "share"), [("head", HEAD_SHARE), ("model", MODEL_SHARE)])
def test_a_widened_drafter_drafts_as_before(
    kind: str,
    share: float,
    recipe: Path,
    mixing_target_dir: Path,
) -> None:
    """It reaches its share of the target's weights and keeps every tree."""
    target = Target.load(mixing_target_dir, dtype=torch.float64)
    folder = recipe.parent / "head" if kind == "head" else mixing_target_dir
    drafter: Any = load_drafter(folder, target)

    def draft() -> Any:
        trace = generate(
            target,
            drafter,
            [5, 6, 7],
            max_new_tokens=12,
            stop=[],
            budget=budget,
        )
        return trees_of(trace)

    budget = Budget(8, 4, 4)
    before = draft()
    # of a target for which the drafter would need twice its weights
    weights = 2 * count_weights(drafter) / share
    assert widen_drafter(drafter, weights) == pytest.approx(share, rel=0.02)
    assert count_weights(drafter) == pytest.approx(weights * share, rel=0.02)
    assert draft() == before


def test_speedups_are_of_the_same_prompts() -> None:
    """With an interval over batches; assisted generation is that of its faster settings."""

    def rows(*seconds: float) -> list[dict[str, Any]]:
        return [{"seconds": time, "tokens": 10, "unequal": 0, "texts": 1} for time in seconds]

    arms = {
        "none": rows(4.0, 4.0, 4.0),
        "transformers, assisted": rows(8.0, 8.0, 8.0),
        "transformers, assisted by 5": rows(2.0, 2.0, 2.0),
        "a, chain 3": rows(1.0, 1.0, 2.0),
    }
    setting = Setting(
        "1 B",
        "bfloat16",
        1,
        context=0,
        batch=1,
        temperature=0.0,
    )
    cells = {cell["arm"]: cell for cell in compute_cells(setting, arms, {"a, chain 3": 1.5})}
    assert cells["none"]["over plain"] == [1.0, 1.0, 1.0]
    assert cells["none"]["over transformers"] is None
    drafted = cells["a, chain 3"]
    # 30 tokens in 4 seconds instead of 12, and in 4 instead of 6
    assert drafted["over plain"] == [3.0, 2.0, 4.0]
    assert drafted["over assisted"] == [1.5, 1.0, 2.0]
    assert drafted["cycle"] == 1.5
    assert drafted["tau"] is None


def test_batches_take_prompts_in_turn() -> None:
    """Each prompt once, or again where there are fewer than a batch holds."""
    assert group_prompts([[0], [1], [2]], 2) == [[[0], [1]]]
    assert group_prompts([[0], [1], [2]], 4) == [[[0], [1], [2], [0]]]


def test_assisted_generation_has_no_batches(recipe: Path) -> None:
    """Transformers' assisted generation takes one prompt alone."""
    loaded = Recipe.load(recipe)
    assert "transformers, assisted" in list_arms(loaded, 1)
    assert list_arms(loaded, 4)[:3] == ["none", "transformers", "ngram, chain 3"]
