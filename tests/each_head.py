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
from eagle.drafters import settings_of
from eagle.log import script
from eagle.recipe import DrafterSection, Recipe
from eagle.training.launch import launch, splits_weights
from eagle.training.start import first_head, follow_head, open_features
from eagle.training.train import train
from tests.registry import TRAINED

# fewer anchors than a text has positions
BLOCKS = {"blocks": 1, "slots": 4, "anchors": 8}
# settings that make every kind of loss and divisor train in seconds
CHOSEN = {
    "hass": {"kind": "hass", "steps": 2},
    "draft_model": {"kind": "draft_model", "layers": 1},
    "own": {"kind": "draft_model", "layers": 1, "samples": "own"},
    "dflash": {"kind": "dflash", **BLOCKS},
    "pace": {"kind": "dflash", **BLOCKS, "loss": "tokens", "d_pace": True},
    "dflash2": {"kind": "dflash2", **BLOCKS, "selector_rank": 8},
    "lilicorr": {"kind": "lilicorr", **BLOCKS, "hidden_size": 16, "factor_dim": 8},
    "dspark": {"kind": "dspark", **BLOCKS, "rank": 8},
    "xpress": {"kind": "xpress", **BLOCKS, "rank": 8},
    "peagle": {"kind": "peagle", "blocks": 1, "depths": 4, "divisor": "reached"},
    "levels": {"kind": "medusa", "divisor": "levels"},
    "hydra": {"kind": "hydra", "levels": 3, "prefix": True, "dropout": 0.2, "regression": 0.1},
    "blockwise": {"kind": "blockwise", "inner_dim": 32, "drawn": True},
    "eagle3": {"kind": "eagle3", "steps": 3, "draft_vocab": 200, "fc_norm": True},
}
OTHERS = [name for name in TRAINED if name not in CHOSEN]
HEADS: dict[str, dict[str, Any]] = {name: {"kind": name} for name in OTHERS} | CHOSEN


def main(argv: list[str]) -> None:
    """Train these heads: a folder, the names of heads, and a recipe.

    With `kill` before the recipe, the last rank dies in the last head, once its second checkpoint is there.
    """
    folder = Path(argv.pop(0))
    names = argv.pop(0).split(",")
    is_killed = argv[0] == "kill"
    if is_killed:
        argv.pop(0)
    base = Recipe.load(argv[0], argv[1:])
    accelerator = launch(base.train)
    # else weights as small as these are not split
    plugin = accelerator.state.deepspeed_plugin
    if plugin is not None:
        zero = plugin.deepspeed_config["zero_optimization"]
        zero["stage3_param_persistence_threshold"] = 0
    is_last_rank = accelerator.process_index == accelerator.num_processes - 1
    for name in names:
        if is_killed and is_last_rank and name == names[-1]:
            checkpoint = folder / name / "checkpoints/step-2"
            threading.Thread(
                target=die_after,
                args=(checkpoint,),
                daemon=True,
            ).start()
        head = train_head(name, folder / name, base, accelerator)
        torch.save(dict(head.state_dict()), folder / f"{name}-{accelerator.process_index}.pt")
        accelerator.free_memory()  # else checkpoints hold the heads before, too
    accelerator.end_training()


def train_head(name: str, out: Path, base: Recipe, accelerator: Any) -> Any:
    """Train one of the heads by a recipe, and return it."""
    section = base.train.model_copy(update={"out": str(out)})
    update = {"drafter": DrafterSection(**HEADS[name]), "train": section}
    recipe = base.model_copy(update=update)
    settings = settings_of(recipe.drafter.model_dump(), name)
    target, features = open_features(recipe, settings, partial(read_examples, recipe))
    torch.manual_seed(section.seed)
    head = first_head(recipe, settings, target, features)
    # as the training script does it, step by step
    split = splits_weights(accelerator, section)
    features = follow_head(
        recipe,
        settings,
        target,
        features,
        head=head,
        weights_split=split,
    )
    target_head = target.head.cast(getattr(torch, section.dtype))
    train(accelerator, recipe, head, target_head, features=features)
    return head


def die_after(checkpoint: Path) -> None:
    """SIGKILL to this process as soon as that folder is there."""
    while not checkpoint.exists():
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    script(main)
