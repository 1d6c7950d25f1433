"""A small comparison over the suite's tiny target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
PATHS = [[0], [0, 0], [1]]


def small_comparison(target_dir: Path, folder: Path) -> dict[str, Any]:
    """A method without weights, a head, and a head that goes on from it: few steps on 24 conversations, two seeds."""
    # small enough that a comparison with four runs takes seconds
    recipe = {
        "target": {"path": str(target_dir / "target"), "dtype": "float32"},
        "data": {"train": str(target_dir / "data/train.jsonl"), "limit": 24, "max_length": 96},
        "features": {"store": str(folder / "store"), "dtype": "float32"},
        "train": {"dtype": "float32", "validation": 0, "lr": 1e-3, "checkpoint_every": 1},
        "eval": {
            "prompts": str(target_dir / "data/heldout.jsonl"),
            "count": 3,
            "max_new_tokens": 10,
        },
    }
    # the same shape, by rank and sampled
    shapes = {"tree": {"paths": PATHS}, "drawn": {"paths": PATHS, "draw": "sampled"}}
    return {
        "out": str(folder / "out"),
        "base": str(ROOT / "recipes/tiny/eagle1.yaml"),
        "recipe": recipe,
        "seeds": [0, 1],
        "tokens": 300,
        "shapes": shapes,
        "arms": {
            "counts": {"untrained": "ngram"},
            "head": {"tokens": 150},
            "longer": {"base": str(ROOT / "recipes/tiny/hass.yaml"), "start": "head"},
        },
    }


def written(values: dict[str, Any], folder: Path, **changes: Any) -> str:
    """A comparison file with some keys changed."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "comparison.yaml"
    path.write_text(yaml.safe_dump({**values, **changes}, sort_keys=False))
    return str(path)
