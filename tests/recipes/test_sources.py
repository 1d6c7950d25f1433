"""Every recipe trains as its source does, but for the settings that it names as its own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from eagle.drafters import settings_of
from eagle.recipe import Recipe
from recipes.forecast import read_sizes
from recipes.suggestions import find_unusual, suggest_rate

ROOT = Path(__file__).parents[2] / "recipes"
PUBLISHED = yaml.safe_load(Path(__file__).with_name("published_training.yaml").read_text())
SOURCES: dict[str, dict[str, Any]] = PUBLISHED["sources"]
RECIPES: dict[str, tuple[str, dict[str, Any]]] = PUBLISHED["recipes"]

# settings that a recipe writes down, whatever their defaults
STATED = {
    "epochs",
    "batch_size",
    "dtype",
    "lr",
    "betas",
    "weight_decay",
    "clip",
    "schedule",
    "warmup",
}


def values_of(name: str, *overrides: str) -> dict[str, Any]:
    """Return what a recipe trains with, including defaults, by key."""
    recipe = Recipe.load(ROOT / f"{name}.yaml", overrides)
    drafter = settings_of(recipe.drafter.model_dump(), name).model_dump()
    train = recipe.train.model_dump(exclude={"out", "init", "keep"})
    data = {"path": recipe.target.path, "max_length": recipe.data.max_length}

    # no key may hide another one
    assert not drafter.keys() & (data.keys() | train.keys())

    values = {
        **data,
        **drafter,
        **train,
        "betas": list(recipe.train.betas),
    }
    if recipe.joint is not None:
        values |= {f"joint.{key}": value for key, value in recipe.joint.model_dump().items()}
    return values


# folders whose targets no paper trains for: settings follow the rule of `eagle init`
SMALL_TARGETS = ("smollm2-135m", "qwen2.5-coder-0.5b", "gemma3-270m")


def test_every_recipe_has_a_source() -> None:
    """Only recipes of the tiny target and of small published ones have none."""
    names = set()
    for path in ROOT.glob("*/*.yaml"):
        if path.parent.name not in ("accelerate", "compare", "tiny", *SMALL_TARGETS):
            names.add(f"{path.parent.name}/{path.stem}")
    assert names == RECIPES.keys()


@pytest.mark.parametrize("folder", SMALL_TARGETS)
def test_recipes_for_small_targets_follow_the_rule(folder: str) -> None:
    """Their rates are what `eagle init` would write, and nothing in them is unusual."""
    known = json.loads((ROOT.parent / "docs/results/sizes.json").read_text())
    for path in (ROOT / folder).glob("*.yaml"):
        recipe = Recipe.load(path)
        sizes = read_sizes(known[recipe.target.path])
        rate = suggest_rate(recipe.drafter.kind, sizes.hidden_size)
        assert recipe.train.lr == rate, path.name
        assert list(find_unusual(recipe, sizes, 10_000)) == []


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_as_its_source(name: str) -> None:
    """A setting that the recipe leaves out counts by its default; each departure differs from the source."""
    source, ours = RECIPES[name]
    expected = {**SOURCES[source], **ours}
    found = values_of(name)
    assert {key: found.get(key) for key in expected} == expected
    for key, value in ours.items():
        assert SOURCES[source].get(key, "none") != value


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_whose_each_setting_is(name: str) -> None:
    """Each line of `train` says where its value is from, and calls it ours where it differs from the source."""
    text = (ROOT / f"{name}.yaml").read_text()
    assert yaml.safe_load(text)["train"].keys() >= STATED

    section = text.split("\ntrain:\n")[1].split("\neval:")[0].split("\njoint:")[0]
    lines = re.findall(r"^  (\w+): [^#\n]*(?:# (.*))?$", section, flags=re.M)
    assert lines
    source, ours = RECIPES[name]
    for key, comment in lines:
        if key in ours:
            is_named = re.search(r"ours|SpecForge|code: float16", comment)
            assert is_named, f"{name} differs from {source} in {key}: name its line ours"

        assert comment or key in ("out", "init")


def test_the_first_stage_of_medusa_2_is_the_published_one() -> None:
    """The command in the recipe trains heads at four times the joint rate, and limits gradients accordingly."""
    text = (ROOT / "vicuna-7b/medusa2.yaml").read_text()
    command = r"^#   eagle train vicuna-7b/medusa2 (joint=null .*) --processes 8$"
    [overrides] = re.findall(command, text, flags=re.M)
    joint = values_of("vicuna-7b/medusa2")
    found = values_of("vicuna-7b/medusa2", *overrides.split())

    assert found["lr"] == joint["lr"] * joint["joint.head_lr"] == 2e-3
    # AdamW notices that the joint loss counts a fifth only by the limit on gradients
    assert found["clip"] == pytest.approx(joint["clip"] / joint["joint.heads"])

    changed = {key for key, value in SOURCES["Medusa-2"].items() if found.get(key) != value}
    of_joint = {key for key in joint if key.startswith("joint.")}
    assert changed == {"lr", "clip"} | of_joint
    assert of_joint.isdisjoint(found)


@pytest.mark.parametrize("clip_by", ["norm", "value"])
def test_without_a_limit_gradients_stay_as_they_are(clip_by: str) -> None:
    """A recipe's `.inf` passes through torch's own clipping."""
    overrides = ["train.clip=.inf", f"train.clip_by={clip_by}"]
    settings = Recipe.load(ROOT / "tiny/eagle1.yaml", overrides).train
    weight = torch.nn.Parameter(torch.zeros(5))
    weight.grad = torch.tensor([1e15, -3.0, 0.0, 1e-30, 7.0])
    before = weight.grad.clone()
    getattr(torch.nn.utils, f"clip_grad_{clip_by}_")([weight], settings.clip)
    assert torch.equal(weight.grad, before)
