"""The bench of distillation: every arm is a valid recipe, and its table says what its rows do."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from bench.distill import AGAIN, ARMS, RAW, arguments, laid_over, overrides, shown, table
from eagle.drafters import settings_of
from eagle.recipe import Recipe

ROOT = Path(__file__).parents[2]


@pytest.fixture
def args(monkeypatch: pytest.MonkeyPatch) -> Namespace:
    """What the command line says by itself."""
    monkeypatch.chdir(ROOT)
    return arguments(["--target", "some/target", "--train", "some.jsonl"])


@pytest.mark.parametrize("name", ARMS)
def test_every_arm_is_a_recipe(name: str, args: Namespace) -> None:
    """Of the divergence and the answers that it is named after; only its own words are not stored."""
    path, *common = overrides(args)
    recipe = Recipe.load(path, [*common, *laid_over(args, ARMS[name])])
    settings = settings_of(recipe.drafter.model_dump(), name)
    assert settings.divergence == ARMS[name].divergence
    assert (settings.samples == "own") == (recipe.features.store is None) == ("own samples" in name)
    assert ("target's" in name) == ("said.jsonl" in recipe.data.train)


def test_the_table_is_the_mean_over_tokens() -> None:
    """Two conversations of 10 and 30 tokens, two seeds: means by hand, and a difference that is equal in all."""
    counts = [10, 30]
    rows = {RAW: [[5.0, 9.0], [4.0, 12.0]], AGAIN: [[6.0, 12.0], [5.0, 15.0]], "JSD": [[5.0, 9.0], [4.0, 16.0]]}
    runs = [
        {"arm": name, "seed": seed, "supervised": 7, "overlap": overlap, "agreement": overlap}
        for name, by_seed in rows.items()
        for seed, overlap in enumerate(by_seed)
    ]
    raw, again, jsd = table(runs, counts)
    assert raw["overlap"] == {"mean": 0.375, "by_seed": [0.35, 0.4]}
    assert (again["overlap"]["mean"], again["seeds"]) == (0.475, 2)
    more = again["overlap"][f"over {RAW}"]
    assert [more[end] for end in ("value", "low", "high")] == pytest.approx([0.1] * 3)
    assert more["by_seed"] == pytest.approx([0.1, 0.1])
    assert jsd["overlap"][f"over {RAW}"]["value"] == pytest.approx(0.05)
    assert jsd["overlap"][f"over {RAW}"]["by_seed"] == pytest.approx([0, 0.1])
    assert jsd["overlap"][f"over {AGAIN}"]["value"] == pytest.approx(-0.05)
    lines = list(shown([raw, again, jsd]))
    assert len(lines) == 5 and "| 0.3750 | 0.3500, 0.4000 | – | – | 0.3750 |" in lines[2]
    assert "+0.1000 (+0.1000 to +0.1000)" in lines[3]
