"""Train a target together with heads by the training loop, and write the new target and its heads."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from eagle.core.drafter import TrainableDrafter
from eagle.core.examples import Example
from eagle.data.features import LiveFeatures
from eagle.disk import lock_folder
from eagle.formats.checkpoint import save_head
from eagle.interrupts import interrupted_by_user
from eagle.recipe import Recipe
from eagle.target.target import Target
from eagle.training.joint import Joint
from eagle.training.train import Run

# training settings that joint training does not have, with the defaults that they must keep
UNUSED = {
    "shard_head": False,
    "compile": False,
    "gate": "predicted",
    "clip_by": "norm",
    "decode": None,
    "choose": "best",
    "patience": None,
    "stem": None,
    "mean_over": "step",
    "on_policy": None,
}


class TokensOnly:
    """The examples of live features without features, as a target that trains computes them in the loss."""

    together = False
    sampled = False
    taps: tuple[int, ...] = (-1,)

    def __init__(self, features: LiveFeatures) -> None:
        """Take over the examples and their identity."""
        self.examples = features.examples
        self.identity = features.identity

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.examples)

    def mask(self, index: int) -> Tensor:
        """Return the loss mask of an example, [T]."""
        return self.examples[index].loss_mask

    def tokens_and_mask(self, index: int) -> tuple[Tensor, Tensor]:
        """Return tokens and loss mask of an example, both [T]."""
        return self.examples[index].tokens, self.mask(index)

    def read(self, indices: Sequence[int]) -> list[Example]:
        """Return the examples at these indices, with features [T, 1, 0]: one tap, of which no number is kept."""
        examples = [self.examples[index] for index in indices]
        return [
            replace(example, features=torch.empty(len(example.tokens), 1, 0))
            for example in examples
        ]


def train_jointly(
    accelerator: Accelerator,
    recipe: Recipe,
    head: TrainableDrafter,
    features: LiveFeatures,
    commit: str = "unknown",
) -> Path:
    """Train the features' target together with a head, or resume the run in the same folder.

    Args:
        accelerator: As `eagle.training.launch` returns it.
        recipe: Its sections `train` and `joint` decide the run.
        head: The head that training starts from.
        features: The conversations, and the target that is trained.
        commit: The code's, for the provenance.

    Returns:
        The folder with the new `target` and its `head`.
    """
    if recipe.joint is None:
        raise ValueError(
            "this recipe has no section `joint`: train its head alone, by recipes/train_eagle.py"
        )
    for name, value in UNUSED.items():
        if getattr(recipe.train, name) != value:
            raise ValueError(
                f"train.{name} is for heads alone, which are trained by recipes/train_eagle.py: leave it out"
            )
    target = features.target
    # such a target's states of a sequence would depend on the others of its batch
    if target.border < float("inf"):
        raise ValueError(
            "this target's rotary frequencies depend on the longest sequence of a batch: it is not trained"
        )
    target_head = target.head.cast(getattr(torch, recipe.train.dtype))
    with lock_folder(recipe.train.out, hold=accelerator.is_main_process):
        joint = Joint(target.model, head, recipe.joint)
        run = Run(
            accelerator,
            recipe,
            joint,
            target_head,
            TokensOnly(features),
            decoding=None,
            commit=commit,
        )
        with interrupted_by_user(run.checkpoints.describe_resume):
            run.resume()
            run.train()
            if accelerator.is_main_process:
                _write(run, joint, target)
            accelerator.wait_for_everyone()
    return run.out


def _write(run: Run, joint: Joint, target: Target) -> None:
    """Write the new target, with the adapters merged, and the head, whose recipe names it."""
    recipe = run.recipe
    provenance = {
        **run.provenance(),
        "peft": version("peft"),
        "made_from": recipe.target.model_dump(),
        "joint": joint.section.model_dump(mode="json"),
        # in nats a token, on the held-out conversations
        "kl_from_the_old_target": run.figures.get("kl"),
    }
    folder = run.out / "target"
    # the head is written last, so that a folder with a head always has its target, too
    _write_target(folder, joint.merge(), target.tokenizer, provenance)
    section = recipe.target.model_copy(
        update={"path": str(folder), "revision": None, "adapter": None}
    )
    head_recipe = recipe.model_copy(update={"target": section, "joint": None})
    save_head(run.out / "head", joint.head, head_recipe.dump(), provenance)


def _write_target(folder: Path, model: Any, tokenizer: Any, provenance: dict[str, Any]) -> None:
    """Write the new target with its tokenizer. The folder gets its name only once it is complete."""
    temporary = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary)
    if tokenizer is not None:
        tokenizer.save_pretrained(temporary)
    (temporary / "provenance.json").write_text(json.dumps(provenance, indent=2) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(temporary, folder)
