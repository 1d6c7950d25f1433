"""The forecasts that guides show are those that the forecast makes."""

from __future__ import annotations

import pytest

from eagle.recipe import Recipe
from eagle.shipped import find_recipe
from recipes.forecast import GB, forecast, sizes_of
from tests.documents import ROOT

CONVERSATIONS = 10_000
# rows of docs/guides/hardware.md: model, head, features; recipe and what changes it
ONE_GPU = {
    "Llama 3.1 8B | EAGLE-1 | stored": "llama-3.1-8b/eagle1 train.accumulation=8",
    "Qwen3 8B | EAGLE-1 | stored": "qwen3-8b/eagle1 train.accumulation=8",
    "Qwen3 8B | EAGLE-1 | stored, float8": (
        "qwen3-8b/eagle1 train.accumulation=8 features.dtype=float8"
    ),
    "Qwen3 8B | EAGLE-3 | stored": (
        "qwen3-8b/eagle3 train.accumulation=8 features.store=runs/features"
    ),
    "Qwen3 8B | EAGLE-3 | stored, float6": (
        "qwen3-8b/eagle3 train.accumulation=8 features.store=runs/features features.dtype=float6"
    ),
    "Vicuna 7B | Medusa | stored": "vicuna-7b/medusa train.accumulation=32",
    "Qwen3 8B | EAGLE-1 | live": "qwen3-8b/eagle1 train.accumulation=32 features.store=null",
    "Qwen3 8B | EAGLE-3 | live": "qwen3-8b/eagle3 train.accumulation=16",
    "Gemma 2B | EAGLE-3 | live": (
        "qwen3-8b/eagle3 train.accumulation=16 target.path=google/gemma-2b-it"
    ),
    "Gemma 3 1B | EAGLE-3 | live": (
        "qwen3-8b/eagle3 train.accumulation=16 target.path=google/gemma-3-1b-it"
    ),
    "Qwen3 0.6B | EAGLE-3 | live": (
        "qwen3-8b/eagle3 train.accumulation=16 target.path=Qwen/Qwen3-0.6B"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("row", ONE_GPU)
def test_a_row_of_the_guide_for_one_gpu_is_its_forecast(row: str) -> None:
    """It shows memory, disk and hours of 10,000 conversations on one GPU."""
    name, *overrides = ONE_GPU[row].split()
    recipe = Recipe.load(find_recipe(name), [*overrides, f"data.limit={CONVERSATIONS}"])
    run = forecast(recipe, sizes_of(recipe.target.path), CONVERSATIONS, cards=1)
    page = (ROOT / "docs/guides/hardware.md").read_text()
    shown = page.partition(f"\n| {row} |")[2].splitlines()[0]
    # the first cells after the name of the row
    memory, disk, hours = (cell.strip() for cell in shown.split("|")[:3])

    assert memory.startswith(f"{run.memory / GB:.1f} GB")
    assert disk == (f"{run.features / GB:.0f} GB" if run.features else "none")
    assert hours == f"{run.extract_hours + run.train_hours:.1f}"
