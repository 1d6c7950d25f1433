"""The method on docs/guides/own-method.md takes the way that the pages describe: checks, training, measuring, export.

Faults that are planted in this method are in tests/conformance/test_planted_methods.py.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from test_floors import wrong_imports

from data_prep.extract import main as extract
from eagle import Target
from eagle.__main__ import main as eagle
from eagle.conformance.checks import run_checks
from eagle.conformance.trial import make_head
from eagle.drafters import DRAFTERS
from eagle.formats.checkpoint import load_head
from eagle.formats.export import EXPORTERS
from eval.measure import main as measure
from recipes.train_eagle import main as train
from tests.documents import ROOT, blocks, commands
from tests.recipes import test_recipes

PAGE = ROOT / "docs/guides/own-method.md"
# how to export and to contribute the method
REFERENCE = ROOT / "docs/reference/methods.md"
(METHOD,) = [text for text in blocks(PAGE, "python") if "class Recurrent(" in text]
(LAYOUT,) = [text for text in blocks(REFERENCE, "python") if "def layout(" in text]
(OUTSIDE,) = [text for text in blocks(PAGE, "yaml") if text.startswith("# recurrent.yaml")]
# of a method that was contributed
RECIPE = OUTSIDE.replace("kind: recurrent.py:Recurrent", "kind: recurrent")
(ROW,) = blocks(REFERENCE, "markdown")
# what needs no model of the reader's, then the export
VERBS = ("eagle extract", "eagle train", "eagle measure", "eagle export")
COMMANDS = [
    line
    for line in [*commands(PAGE), *"".join(blocks(REFERENCE, "sh")).splitlines()]
    if line.startswith(VERBS) and "--verify" not in line
]
# the lines that a reader adds to the registries of engines and of methods
(ENGINE, _), (KIND, CLASS) = re.findall(
    r'^\+ +"(\w+)": (\w+),$', REFERENCE.read_text(), re.MULTILINE
)
STAGES: dict[str, Callable[[list[str]], None]] = {
    "extract": extract,
    "train": train,
    "measure": measure,
}
FEW = [
    "data.limit=100",
    "data.max_length=160",
    "eval.count=2",
    "eval.max_new_tokens=12",
    "train.epochs=4",
    "train.dtype=float32",  # accelerate takes one precision for a whole process
]


def import_text(name: str, text: str, folder: Path) -> ModuleType:
    """Return a module that is imported from this text."""
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    # pydantic looks for annotations there
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def registered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The method and the layout of the page are in the registries as long as these tests run."""
    folder = tmp_path_factory.mktemp("page")
    # both registries and sys.modules are as before when the tests end
    with pytest.MonkeyPatch.context() as patch:
        for name in ("method_of_the_page", "layout_of_the_page"):
            patch.setitem(sys.modules, name, ModuleType(name))
        method = import_text("method_of_the_page", METHOD, folder)
        layout = import_text("layout_of_the_page", LAYOUT, folder)
        patch.setitem(DRAFTERS, KIND, getattr(method, CLASS))
        patch.setitem(EXPORTERS, ENGINE, layout.layout)
        yield


@pytest.mark.slow
def test_the_example_conforms(registered: None) -> None:
    """It holds all that is asked of a method, and its layout holds all its weights."""
    outcomes = {outcome.about: outcome for outcome in run_checks(KIND, fast=True)}
    assert len(outcomes) > 15
    assert [outcome for outcome in outcomes.values() if outcome.fault] == []
    assert ENGINE in outcomes["every export holds all weights, or is refused"].note


def test_the_layout_refuses_other_methods(registered: None, tiny_target: Target) -> None:
    """By the name of the method that it has no layout for."""
    with pytest.raises(ValueError, match="no layout for 'medusa'"):
        EXPORTERS[ENGINE](make_head("medusa", tiny_target), tiny_target.config)


def test_the_example_keeps_to_the_rules_of_its_places(
    registered: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Imports go down only and to no other method; the recipe and the row are found."""
    assert not wrong_imports(f"eagle.drafters.recurrent.{KIND}", ast.parse(METHOD))
    assert not wrong_imports(f"eagle.formats.engines.{ENGINE}", ast.parse(LAYOUT))
    methods = {method.__module__ for method in DRAFTERS.values()}
    assert not methods & set(re.findall(r"^from (\S+)", METHOD, re.MULTILINE))
    # the files that a reader writes, where the page says
    recipe = f"recipes/tiny/{KIND}.yaml"
    module = f"eagle/drafters/recurrent/{KIND}.py"
    files = {"docs/papers.md": ROW, recipe: RECIPE, module: METHOD}
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert recipe in REFERENCE.read_text()
    assert f"| `{module}` | the method |" in REFERENCE.read_text()
    # the project's own tests of recipes and rows, in a folder with the page's files alone
    monkeypatch.setattr(test_recipes, "ROOT", tmp_path)
    test_recipes.test_every_method_has_a_row_among_the_papers_and_a_recipe(KIND)
    test_recipes.test_recipe_parses_and_survives_a_round_trip(tmp_path / recipe, tmp_path)


@pytest.fixture(scope="module")
def followed(
    registered: None,
    tiny_target_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """The page's commands, run in order on little data, in a folder where `make tiny` seems to have run."""
    folder = tmp_path_factory.mktemp("followed")
    (folder / f"{KIND}.yaml").write_text(RECIPE)
    data = folder / "runs/tiny/data"
    data.mkdir(parents=True)
    (folder / "runs/tiny/target").symlink_to(tiny_target_dir / "target")
    (data / "regenerated.jsonl").symlink_to(tiny_target_dir / "data/train.jsonl")
    (data / "heldout.jsonl").symlink_to(tiny_target_dir / "data/heldout.jsonl")
    # commands run in this process, so that the page's method is registered
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for line in COMMANDS:
            _, verb, *arguments = shlex.split(line)
            if verb in STAGES:
                STAGES[verb]([*arguments, *FEW])
            else:
                eagle([verb, *arguments])
    return folder / f"runs/{KIND}"


@pytest.mark.slow
def test_the_example_learns_and_is_measured(followed: Path) -> None:
    """The loss falls, validation sees it, and answers with drafts are plain decoding's in fewer steps."""
    rows = [json.loads(line) for line in (followed / "metrics.jsonl").read_text().splitlines()]
    totals = [row["total"] for row in rows if "total" in row]
    validated = [row["validation"]["tree/tau"] for row in rows if "validation" in row]
    assert len(validated) == 4
    assert totals[-1] < 0.9 * totals[0]
    assert validated[-1] > validated[0] > 1
    lines = (followed / "results.jsonl").read_text().splitlines()[1:]
    # without the header of the file
    answers = [json.loads(line) for line in lines]
    assert all(answer["identical"] for answer in answers)
    own = [answer for answer in answers if answer["drafter"] not in ("none", "ngram")]
    assert {answer["temperature"] for answer in own} == {0.0, 1.0}
    assert len(own) == 4
    cycles = [cycle for answer in own for cycle in answer["cycles"]]
    assert sum(cycle["accepted"] for cycle in cycles) > 0


@pytest.mark.slow
def test_the_exported_example_is_the_trained_one(followed: Path, tiny_target: Target) -> None:
    """What the exported folder holds is enough to take a step as the head takes it."""
    folder = followed / ENGINE
    # the head of the checkpoint takes the same step by its own code
    head = load_head(followed / "head")
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    # the engine scales the target's embedding by a number of its config
    embedding = tiny_target.model.get_input_embeddings().weight * config["embed_scale"]
    tokens = torch.tensor([5, 9])
    states = torch.randn(2, config["hidden_size"])
    # the formula of the page, from the exported tensors alone
    both = torch.cat([embedding[tokens], states], dim=1)
    normed = F.rms_norm(
        both,
        both.shape[1:],
        tensors["norm.weight"],
        config["rms_norm_eps"],
    )
    entered = F.silu(F.linear(normed, tensors["enter.weight"], tensors["enter.bias"]))
    expected = states + F.linear(entered, tensors["leave.weight"], tensors["leave.bias"])
    torch.testing.assert_close(head.step(tokens, states, tiny_target.head), expected)
    target = (followed.parent / "tiny/target").resolve()
    assert f"my-engine {target} " in (folder / "README.md").read_text()
