"""The method on docs/adding-a-method.md goes the way that the page tells: conformance, train, measure, export."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from inspect import signature
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import test_conformance as conformance
import torch
import torch.nn.functional as F
from _pytest.mark import ParameterSet
from safetensors.torch import load_file
from test_floors import wrong_imports

from data_prep.extract import main as extract
from eagle import Budget, Target, generate, load_drafter
from eagle.__main__ import main as eagle
from eagle.drafters import DRAFTERS
from eagle.formats.checkpoint import load_head
from eagle.formats.export import EXPORTERS
from eval.measure import main as measure
from recipes.train_eagle import main as train
from tests.documents import FENCE
from tests.drafters.parts.test_judge import TREES, batch_of, counted_by_drafting
from tests.families import build, random_tokens
from tests.recipes import test_recipes

PAGE = Path(__file__).parent.parent / "docs/adding-a-method.md"
FENCES = FENCE.findall(PAGE.read_text())
METHOD, LAYOUT = (text for language, text in FENCES if language == "python")
(RECIPE,), (ROW,) = (
    [text for found, text in FENCES if found == language] for language in ("yaml", "markdown")
)
COMMANDS = [line for language, text in FENCES if language == "sh" for line in text.splitlines()]
# the lines that a reader adds to the registries
(KIND, CLASS), (ENGINE, _) = re.findall(r'^\+ +"(\w+)": (\w+),$', PAGE.read_text(), re.MULTILINE)
STAGES: dict[str, Callable[[list[str]], None]] = {
    "data_prep.extract": extract,
    "recipes/train_eagle.py": train,
    "eval.measure": measure,
    "eagle": eagle,
}
LONG = {"test_output_is_the_untouched_models_own"}  # over a second a case
FEW = ["data.limit=100", "data.max_length=160", "eval.count=2", "eval.max_new_tokens=12"]
FEW += [
    "train.epochs=4",
    "train.dtype=float32",
]  # accelerate takes one precision for a whole process

examples, batch, answers = conformance.examples, conformance.batch, conformance.answers  # fixtures
letters = conformance.letters


def executed(name: str, text: str, folder: Path) -> ModuleType:
    """A module that is imported from this text."""
    (folder / f"{name}.py").write_text(text)
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec and spec.loader
    module = sys.modules[name] = importlib.util.module_from_spec(
        spec
    )  # where pydantic looks for annotations
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def registered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[type[Any]]:
    """The method of the page, and the layout, in the registries as long as these tests run."""
    folder, names = tmp_path_factory.mktemp("page"), ("method_of_the_page", "layout_of_the_page")
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setitem(sys.modules, name, ModuleType(name))
        method = getattr(executed(names[0], METHOD, folder), CLASS)
        patch.setitem(DRAFTERS, KIND, method)
        patch.setitem(EXPORTERS, ENGINE, executed(names[1], LAYOUT, folder).layout)
        patch.setattr(conformance, "TRAINED", [*conformance.TRAINED, KIND])
        patch.setattr(conformance, "LAWFUL", [*conformance.LAWFUL, KIND])
        yield method


def checks() -> list[Any]:
    """Every check of the conformance suite with every case of it but its methods."""
    found = []
    for name, check in vars(conformance).items():
        if not name.startswith("test_") or "name" not in signature(check).parameters:
            continue
        marks = {mark.args[0]: mark for mark in check.pytestmark if mark.name == "parametrize"}
        del marks["name"]
        slow = name in LONG or any(mark.name == "slow" for mark in check.pytestmark)
        for case in product(*(mark.args[1] for mark in marks.values())):
            fewer = slow or any(
                isinstance(value, ParameterSet) for value in case
            )  # one with marks, which are slow
            values = [
                value.values[0] if isinstance(value, ParameterSet) else value for value in case
            ]
            given = dict(zip(marks, values, strict=True))
            found.append(pytest.param(check, given, marks=[pytest.mark.slow] * fewer, id=name[5:]))
    return found


@pytest.mark.parametrize(("check", "given"), checks())
def test_the_example_conforms(
    check: Callable[..., None],
    given: dict[str, Any],
    registered: type[Any],
    request: pytest.FixtureRequest,
) -> None:
    """All that is asked of registered methods."""
    asked = signature(check).parameters.keys() - given.keys() - {"name"}
    check(name=KIND, **given, **{name: request.getfixturevalue(name) for name in asked})


@pytest.mark.parametrize("name", [*conformance.TRAINED, KIND])
def test_the_layout_takes_the_example_alone(
    name: str, registered: type[Any], tiny_target: Target, tiny_target_dir: Path, tmp_path: Path
) -> None:
    """As a layout of the project it holds a head whole, or says why it cannot."""
    conformance.test_exports_hold_every_tensor_of_the_head(
        name, ENGINE, tiny_target, tiny_target_dir, tmp_path
    )
    if name != KIND:
        with pytest.raises(ValueError, match=f"no layout for '{name}'"):
            EXPORTERS[ENGINE](conformance.new_head(name, tiny_target), tiny_target.config)


def test_the_example_keeps_to_the_rules_of_its_places(
    registered: type[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imports go down only and to no other method; the recipe and the row are found."""
    for module, text in (
        (f"eagle.drafters.{KIND}", METHOD),
        (f"eagle.formats.engines.{ENGINE}", LAYOUT),
    ):
        assert not wrong_imports(module, ast.parse(text))
    methods = {method.__module__ for method in DRAFTERS.values()}
    assert not methods & set(re.findall(r"^from (\S+)", METHOD, re.MULTILINE))
    places = {
        "docs/papers.md": ROW,
        f"recipes/tiny/{KIND}.yaml": RECIPE,
        f"eagle/drafters/{KIND}.py": METHOD,
    }
    for place, text in places.items():
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(text)
        assert place == "docs/papers.md" or place in PAGE.read_text()
    monkeypatch.setattr(test_recipes, "ROOT", tmp_path)
    test_recipes.test_every_method_has_a_row_among_the_papers_and_a_recipe(KIND)
    test_recipes.test_recipe_parses_and_survives_a_round_trip(
        tmp_path / f"recipes/tiny/{KIND}.yaml", tmp_path
    )


def test_the_example_is_judged_by_the_steps_that_it_drafts_by(registered: type[Any]) -> None:
    """Slot by slot with real trees, to the last count, on what a random target says itself."""
    target = Target(build("llama"))
    prompts = [random_tokens(12, seed) for seed in range(2)]
    none = load_drafter("none", target)
    texts = [
        one + generate(target, none, one, max_new_tokens=24, stop=[]).tokens for one in prompts
    ]
    masks = [torch.arange(len(text)) >= len(text) - 24 for text in texts]
    told, head = batch_of(target, texts, masks), conformance.new_head(KIND, target)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        head(told, target.head)["total"].backward()
        optimizer.step()
    sums = head.bind(target.head).validate(told, target.head, TREES)
    for name, paths in TREES.items():
        counts = counted_by_drafting(head, target, told, paths)
        assert {kind: sums[f"{name}/{kind}"].tolist() for kind in counts} == counts
        assert min(counts["accepted"][:2]) > 0  # there was something to count


@pytest.fixture(scope="module")
def followed(
    registered: type[Any], tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The page's commands, one after the other, on little data in a folder where `make tiny` seems to have run."""
    folder = tmp_path_factory.mktemp("followed")
    (folder / "recipes/tiny").mkdir(parents=True)
    (folder / f"recipes/tiny/{KIND}.yaml").write_text(RECIPE)
    (folder / "runs/tiny/data").mkdir(parents=True)
    (folder / "runs/tiny/target").symlink_to(tiny_target_dir / "target")
    for name, made in {"regenerated": "train", "heldout": "heldout"}.items():
        (folder / f"runs/tiny/data/{name}.jsonl").symlink_to(tiny_target_dir / f"data/{made}.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for line in COMMANDS:
            words = [
                word for word in shlex.split(line, comments=True) if word not in ("python", "-m")
            ]
            words = words[2:] if words[:2] == ["accelerate", "launch"] else words
            STAGES[words[0]]([*words[1:], *(FEW if words[1].endswith(".yaml") else [])])
    return folder


@pytest.mark.slow
def test_the_example_learns(followed: Path) -> None:
    """By the project's own training: the loss falls, validation sees it, and checkpoints are there."""
    rows = [
        json.loads(line)
        for line in (followed / f"runs/tiny/{KIND}/metrics.jsonl").read_text().splitlines()
    ]
    totals = [row["total"] for row in rows if "total" in row]
    judged = [row["validation"] for row in rows if "validation" in row]
    assert len(judged) == 4 and totals[-1] < 0.9 * totals[0]
    assert judged[-1]["tree/tau"] > judged[0]["tree/tau"] > 1


@pytest.mark.slow
def test_the_example_is_measured(followed: Path) -> None:
    """Beside plain decoding, at both temperatures, with the same output in fewer steps."""
    lines = (followed / f"runs/tiny/{KIND}/results.jsonl").read_text().splitlines()[1:]
    rows = [json.loads(line) for line in lines]
    own = [row for row in rows if row["drafter"] not in ("none", "ngram")]
    assert {row["temperature"] for row in own} == {0.0, 1.0}
    assert len(own) == 4 and all(row["identical"] for row in rows)
    assert sum(cycle["accepted"] for row in own for cycle in row["cycles"]) > 0


@pytest.mark.slow
def test_the_exported_example_is_the_trained_one(followed: Path, tiny_target: Target) -> None:
    """What the folder holds is enough to take a step as the head takes it."""
    folder, head = (
        followed / f"runs/tiny/{KIND}/{ENGINE}",
        load_head(followed / f"runs/tiny/{KIND}/head"),
    )
    config, tensors = (
        json.loads((folder / "config.json").read_text()),
        load_file(folder / "model.safetensors"),
    )
    embedding = tiny_target.model.get_input_embeddings().weight * config["embed_scale"]
    tokens, states = torch.tensor([5, 9]), torch.randn(2, config["hidden_size"])
    both = torch.cat([embedding[tokens], states], dim=1)
    normed = F.rms_norm(both, both.shape[1:], tensors["norm.weight"], config["rms_norm_eps"])
    entered = F.silu(F.linear(normed, tensors["enter.weight"], tensors["enter.bias"]))
    expected = states + F.linear(entered, tensors["leave.weight"], tensors["leave.bias"])
    torch.testing.assert_close(head.step(tokens, states, tiny_target.head), expected)
    assert (
        f"my-engine {(followed / 'runs/tiny/target').resolve()} "
        in (folder / "README.md").read_text()
    )


def test_a_budget_that_is_ignored_is_seen(
    registered: type[Any], mixing_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: one node more than was asked for."""
    text = type(registered.begin(None))  # type: ignore[arg-type]
    honest = text.propose
    monkeypatch.setattr(
        text, "propose", lambda self, update, budget: honest(self, update, Budget(12, 4, 3))
    )
    with pytest.raises(AssertionError):
        conformance.test_trees_are_rooted_and_within_budget(KIND, Budget(8, 4, 3), mixing_target)


def test_a_place_that_outlives_its_text_is_seen(
    registered: type[Any], mixing_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: a second text goes on counting where the first one ended, so that its noise is another's."""
    conformance.test_begin_forgets(KIND, conformance.SAMPLINGS[2], mixing_target)
    honest = registered.begin

    def forgetful(self: Any, noise: Any = None) -> Any:
        text, before = honest(self, noise), getattr(self, "last", None)
        text.length = before.length if before else 0
        self.last = text
        return text

    monkeypatch.setattr(registered, "begin", forgetful)
    with pytest.raises(AssertionError):
        conformance.test_begin_forgets(KIND, conformance.SAMPLINGS[2], mixing_target)


def keep_one_text(registered: type[Any], patch: pytest.MonkeyPatch) -> None:
    """Every text is the one that began first, at its own place and with its noise."""
    honest, texts = registered.begin, []

    def shared(self: Any, noise: Any = None) -> Any:
        texts.append(honest(self, noise))
        return texts[0]

    patch.setattr(registered, "begin", shared)


def share_noise(registered: type[Any], patch: pytest.MonkeyPatch) -> None:
    """Every text is drafted with the noise of the one that began first."""
    honest, noises = registered.begin, []

    def shared(self: Any, noise: Any = None) -> Any:
        noises.append(noise)
        return honest(self, noises[0])

    patch.setattr(registered, "begin", shared)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [keep_one_text, share_noise])
def test_texts_that_share_what_is_kept_are_seen(
    fault: Any, registered: type[Any], mixing_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: what belongs to one text is used for all that are written side by side."""
    honest, alone = (
        registered.begin,
        conformance.drafted_alone(KIND, conformance.SAMPLINGS[2], mixing_target),
    )
    fault(registered, monkeypatch)
    beside = conformance.drafted_beside(KIND, conformance.SAMPLINGS[2], mixing_target)
    assert [trace.tokens for trace in beside] == [
        trace.tokens for trace in alone
    ]  # which no draft can change
    assert list(map(conformance.trees_of, beside)) != list(map(conformance.trees_of, alone))
    monkeypatch.setattr(registered, "begin", honest)
    conformance.test_texts_side_by_side_are_as_each_alone(
        KIND, conformance.SAMPLINGS[2], mixing_target
    )
