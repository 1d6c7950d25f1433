"""One tiny target, trained at a fraction of its steps, for the whole suite; its tokenizer, and a recipe for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chats import TEMPLATES
from transformers import AutoTokenizer

from eagle import Target
from eagle.recipe import Recipe
from tests.registry import BY_DEFAULT

STEPS = 40
# cases of the conformance suite that are slow, or long, for methods that share most of their parts with one another
SLOW_CASES = {
    "test_output_is_the_untouched_models_own": ("top-p",),
    "test_begin_forgets": ("greedy",),
    "test_texts_side_by_side_are_as_each_alone": ("greedy",),
}
LONG_CASES = {"test_drawn_drafts_have_the_targets_law": ("chain-T=1", "chain-top-p", "published-T=1")}


@pytest.hookimpl(tryfirst=True)  # before marks select
def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Mark those cases."""
    for item in items:
        if item.path.name == "test_conformance.py" and (call := getattr(item, "callspec", None)):
            name, case = call.params.get("name"), call.id.partition("-")[2]
            for mark, cases in (("slow", SLOW_CASES), ("long", LONG_CASES)):
                if name in BY_DEFAULT and case in cases.get(item.originalname, ()):
                    item.add_marker(mark)


@pytest.fixture(scope="session")
def tiny_target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `target/` and `data/`, as `recipes/tiny/make_target.py` leaves it."""
    from recipes.tiny.make_target import make_target

    folder = tmp_path_factory.mktemp("tiny")
    make_target(folder, steps=STEPS, max_conversations=400)
    return folder


@pytest.fixture(scope="session")
def tiny_target(tiny_target_dir: Path) -> Target:
    """That target in fp32, shared by all tests: each `generate` begins anew."""
    return Target.load(tiny_target_dir / "target", dtype=torch.float32)


@pytest.fixture(scope="module")
def base(tiny_target_dir: Path) -> Any:
    """The tiny tokenizer."""
    return AutoTokenizer.from_pretrained(tiny_target_dir / "target")


@pytest.fixture
def using(base: Any) -> Callable[[str], Any]:
    """The tiny tokenizer with one of the templates of chats.py."""

    def chosen(name: str) -> Any:
        base.chat_template = TEMPLATES[name]
        return base

    return chosen


@pytest.fixture
def recipe(tiny_target_dir: Path, tmp_path: Path) -> Recipe:
    """The tiny recipe over three short records of its own."""
    turns = [[("human", "Who?"), ("gpt", text)] for text in ("One <b>&</b>.", "日本語 😀 ü \u202b שלום", "Three.")]
    lines = [{"conversations": [{"from": role, "value": said} for role, said in record]} for record in turns]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    where = [f"target.path={tiny_target_dir / 'target'}", f"data.train={tmp_path / 'data.jsonl'}"]
    return Recipe.load(Path(__file__).parent.parent / "recipes/tiny/eagle1.yaml", where)
