"""Every method that trains, one after the other in the same processes; each leaves what its process holds."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from data_prep.read_once import read_examples
from eagle.data.open import follow_head, open_features
from eagle.drafters import settings_of
from eagle.log import script
from eagle.recipe import DrafterSection, Recipe
from eagle.training.first_head import first_head
from eagle.training.launch import launch, splits_weights
from eagle.training.train import train
from tests.registry import TRAINED

BLOCKS = {"blocks": 1, "slots": 4, "anchors": 8}  # fewer anchors than a text has slots
CHOSEN = {
    "hass": {"kind": "hass", "steps": 2},
    "draft_model": {"kind": "draft_model", "layers": 1},
    "own": {"kind": "draft_model", "layers": 1, "samples": "own"},
    "dflash": {"kind": "dflash", **BLOCKS},
    "pace": {"kind": "dflash", **BLOCKS, "loss": "tokens", "d_pace": True},
    "dspark": {"kind": "dspark", **BLOCKS, "rank": 8},
    "peagle": {"kind": "peagle", "blocks": 1, "depths": 4, "divisor": "reached"},
    "levels": {"kind": "medusa", "divisor": "levels"},
    "hydra": {"kind": "hydra", "levels": 3, "prefix": True, "dropout": 0.2, "regression": 0.1},
    "blockwise": {"kind": "blockwise", "inner_dim": 32, "drawn": True},
    "eagle3": {"kind": "eagle3", "steps": 3, "draft_vocab": 200, "fc_norm": True},
}
HEADS: dict[str, dict[str, Any]] = {
    name: {"kind": name} for name in TRAINED if name not in CHOSEN
} | CHOSEN


def main(argv: list[str]) -> None:
    """A folder, the names of heads, and a recipe; with `kill` the last rank dies in the last head, once it is kept."""
    folder, names, kill = (
        Path(argv.pop(0)),
        argv.pop(0).split(","),
        argv[0] == "kill" and argv.pop(0),
    )
    base = Recipe.load(argv[0], argv[1:])
    accelerator = launch(base.train)
    if (
        accelerator.state.deepspeed_plugin is not None
    ):  # else weights as small as these are not split
        engine = accelerator.state.deepspeed_plugin.deepspeed_config
        engine["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    for name in names:
        train_section = base.train.model_copy(update={"out": str(folder / name)})
        recipe = base.model_copy(
            update={"drafter": DrafterSection(**HEADS[name]), "train": train_section}
        )
        settings = settings_of(recipe.drafter.model_dump(), name)
        target, features = open_features(recipe, settings, partial(read_examples, recipe))
        torch.manual_seed(recipe.train.seed)
        head = first_head(recipe, settings, target, features)
        split = splits_weights(accelerator, recipe.train)
        features = follow_head(recipe, settings, target, features, head, weights_split=split)
        if (
            kill
            and name == names[-1]
            and accelerator.process_index == accelerator.num_processes - 1
        ):
            threading.Thread(
                target=die_after, args=(folder / name / "checkpoints/step-2",), daemon=True
            ).start()
        train(
            accelerator,
            recipe,
            head,
            target.head.cast(getattr(torch, recipe.train.dtype)),
            features,
        )
        torch.save(dict(head.state_dict()), folder / f"{name}-{accelerator.process_index}.pt")
        accelerator.free_memory()  # else checkpoints hold the heads before, too
    accelerator.end_training()


def die_after(checkpoint: Path) -> None:
    """SIGKILL to this process as soon as that folder is there."""
    while not checkpoint.exists():
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    script(main)
