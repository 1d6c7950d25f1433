"""The loop that trains a target together with heads, and writes the new target and its heads."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from functools import reduce
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from eagle import __version__
from eagle.core.drafter import TrainableDrafter
from eagle.data.features import LiveFeatures
from eagle.disk import lock_folder
from eagle.drafters.parts.validation import add_sums, figures
from eagle.formats.checkpoint import save_head
from eagle.interrupts import interrupted_by_user
from eagle.log import memory_gb, progress
from eagle.recipe import JointSection, Recipe
from eagle.training.joint import Joint, StepPart, heads_weight
from eagle.training.plan import Dealer, Plan
from eagle.training.resume import Checkpoints, decisive_settings
from eagle.training.trackers import TrackedMetrics
from eagle.training.train import LOG_EVERY, TREES

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
    # such a target's states of a sequence would depend on the others of its batch
    if features.target.border < float("inf"):
        raise ValueError(
            "this target's rotary frequencies depend on the longest sequence of a batch: it is not trained"
        )
    with lock_folder(recipe.train.out, hold=accelerator.is_main_process):
        run = _JointRun(accelerator, recipe, recipe.joint, head, features, commit=commit)
        with interrupted_by_user(run.checkpoints.describe_resume):
            run.train()
            run.finish()
    return run.out


@dataclass
class _JointRun:
    """The state of one joint training run in one process."""

    accelerator: Accelerator
    recipe: Recipe
    settings: JointSection
    head: TrainableDrafter
    features: LiveFeatures
    commit: str

    def __post_init__(self) -> None:
        """Plan the steps, prepare model and optimizer, and load the newest checkpoint, if there is one.

        Called by the dataclass once its fields are set.
        """
        accelerator = self.accelerator
        self.section = self.recipe.train  # `settings` is the section `joint`
        self.out = Path(self.section.out)
        # no drafter predicts the first two tokens of a sequence
        slots = [int(self.features.mask(index)[2:].sum()) for index in range(len(self.features))]
        self.plan = Plan(slots, self.section)
        self.dealer = Dealer(
            self.head,
            self.features,
            self.plan,
            rank=accelerator.process_index,
            processes=accelerator.num_processes,
        )
        target = self.features.target
        target_head = target.head.cast(getattr(torch, self.section.dtype))
        self.joint = Joint(
            target.model, self.head.to(accelerator.device), target_head, self.settings
        ).train()
        # adapters and the heads' vectors learn at `lr`, the heads' matrices at a multiple of it
        groups = self.joint.parameter_groups(self.section.lr)
        self.trained = list(chain.from_iterable(group["params"] for group in groups))
        self.optimizer = torch.optim.AdamW(
            groups,
            lr=self.section.lr,
            betas=self.section.betas,
            weight_decay=self.section.weight_decay,
            fused=True,
        )
        self.model, self.prepared = accelerator.prepare(self.joint, self.optimizer)
        self.checkpoints = Checkpoints(accelerator, self.out / "checkpoints", self.section.keep)
        # by name, the losses and the gradient norm of each step since the last log
        self.unlogged_steps: list[dict[str, Tensor]] = []
        # how far the run is, which a checkpoint restores
        self.step = 0  # steps that are done
        self.skipped = 0  # of them, those whose gradients were not finite
        self.figures: dict[str, float] = {}  # of the last validation
        state = self.checkpoints.load(self._identity())
        if state is not None:
            self.step = state["step"]
            self.skipped = state["skipped"]
            self.figures = state["figures"]
            accelerator.print(f"going on after step {self.step} of {len(self.plan)}", flush=True)

    def train(self) -> None:
        """Run the remaining steps, with logs, validations and checkpoints between them."""
        is_main = self.accelerator.is_main_process
        metrics = TrackedMetrics(self.recipe, before=self.step) if is_main else None
        steps = range(self.step, len(self.plan))
        for step in progress(
            steps, "train", len(self.plan), unit="steps", show=is_main, done=self.step
        ):
            self._advance(step)
            self.step = step + 1
            validates = self._is_due(self.section.validate_every)
            checkpoints = self._is_due(self.section.checkpoint_every)
            # a checkpoint holds no unlogged steps: with a row before it, a resumed run logs the same rows
            if validates or checkpoints or self.step % LOG_EVERY == 0:
                means = self._means()
                if metrics:
                    metrics.write(step=step, lr=self.plan.lr(step), memory_gb=memory_gb(), **means)
            if validates:
                self.figures = self._validate()
                if metrics:
                    metrics.write(step=step, validation=self.figures)
            if checkpoints:
                self._checkpoint()
        if metrics:
            metrics.close()

    def _is_due(self, interval: int | None) -> bool:
        """Return whether this step is the last, or a multiple of `interval`, or without one the end of an epoch.

        Validations and checkpoints are due at such steps.
        """
        return (
            self.step == len(self.plan) or self.step % (interval or self.plan.steps_an_epoch) == 0
        )

    def _checkpoint(self) -> None:
        """Write a checkpoint of the run; a full disk costs the checkpoint, not the run."""
        state = {
            "step": self.step,
            "skipped": self.skipped,
            # every checkpoint has this key; joint training chooses no best head
            "best": 0,
            "figures": self.figures,
            "run": self._identity(),
        }
        fault = self.checkpoints.write(self.step, state)
        if fault:
            self.accelerator.print(
                f"no checkpoint at step {self.step}: {fault}. Training goes on", flush=True
            )

    def _advance(self, step: int) -> None:
        """Take one step, counted from 0: forward and backward of this process's parts of the batch, clip, update.

        The losses and the gradient norm are kept for the log.
        """
        accelerator = self.accelerator
        lr = self.plan.lr(step)
        # the two groups of `Joint.parameter_groups`
        for group, scale in zip(
            self.prepared.param_groups, (1.0, self.settings.head_lr), strict=True
        ):
            group["lr"] = lr * scale
        # for each forward of the step, on all processes: the indices of its examples, and its factor in the step's loss
        parts = self.plan.parts(step, self.dealer.part_count)
        weights = self.plan.weights(step, parts)
        # a resumed run draws the same dropout
        torch.manual_seed(self.section.seed + step)
        # by what the heads divide their losses in this step; None if by the supervised tokens of each part
        divisors = self.dealer.divisors_of(step)
        heads_factor = heads_weight(self.settings, step, len(self.plan))
        sums: dict[str, Tensor] = {}
        for i in range(accelerator.process_index, len(parts), accelerator.num_processes):
            examples = [self.features.examples[index] for index in parts[i]]
            part = StepPart(
                seeds=tuple(self.plan.seeds(step, parts[i])), divisors=divisors, share=weights[i]
            )
            with accelerator.accumulate(self.model):
                losses = self.model(examples, heads_factor, part)
                # DDP takes the mean over processes, and accelerate that over accumulated parts: undo both, as the
                # parts' losses are shares that add up to the step's loss
                accelerator.backward(losses["total"] * len(parts))
            # in double precision, as the shares of many parts are added up
            part_losses = {name: loss.detach().double() for name, loss in losses.items()}
            sums = add_sums(sums, part_losses)
        norm = torch.nn.utils.clip_grad_norm_(self.trained, self.section.clip)
        # a fused optimizer skips the update where this tensor is 1, so that the host need not wait for the norm
        self.optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
        self.prepared.step()
        self.prepared.zero_grad()
        # the log sums over processes, which all have the same norm
        self.unlogged_steps.append(
            {**sums, "gradient_norm": norm.double() / accelerator.num_processes}
        )

    def _means(self) -> dict[str, float]:
        """Return the mean losses and gradient norm since the last log, over steps whose gradients were finite.

        It empties the list of unlogged steps, and counts those without finite gradients as skipped.
        """
        names = list(self.unlogged_steps[0])
        # [steps, names], summed over processes; the norm is the last column
        rows = torch.stack([torch.stack(list(row.values())) for row in self.unlogged_steps])
        rows = self.accelerator.reduce(rows, "sum")
        finite = rows[rows[:, -1].isfinite()]
        self.skipped += len(rows) - len(finite)
        self.unlogged_steps = []
        if not len(finite):
            return {}
        return dict(zip(names, finite.mean(0).tolist(), strict=True))

    def _validate(self) -> dict[str, float]:
        """Return figures on the held-out conversations: the heads' acceptance, and KL(old target, new target).

        Each process computes a share of them; all get the same figures, {} if none are held out.
        """
        self.joint.eval()
        accelerator = self.accelerator
        # sums over supervised tokens, by name; `figures` makes means of them
        sums: dict[str, Tensor] = {}
        for index in self.plan.validation[accelerator.process_index :: accelerator.num_processes]:
            with accelerator.autocast():
                example_sums = self.joint.validate([self.features.examples[index]], TREES)
            on_host = {name: value.double().cpu() for name, value in example_sums.items()}
            sums = add_sums(sums, on_host)
        self.joint.train()
        sums = reduce(add_sums, gather_object([sums]))
        return figures(sums) if sums else {}

    def finish(self) -> None:
        """Write the new target, with the adapters merged, and the heads, whose recipe names it."""
        if self.accelerator.is_main_process:
            # the heads are written last, so that a folder with heads always has their target, too
            self._write_target(self.out / "target")
            section = self.recipe.target.model_copy(
                update={"path": str(self.out / "target"), "revision": None, "adapter": None}
            )
            recipe = self.recipe.model_copy(update={"target": section, "joint": None})
            save_head(self.out / "head", self.joint.head, recipe.dump(), self._provenance())
        self.accelerator.wait_for_everyone()

    def _write_target(self, folder: Path) -> None:
        """Write the new target with its tokenizer. The folder gets its name only once it is complete."""
        temporary = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(temporary, ignore_errors=True)
        self.joint.merge().save_pretrained(temporary)
        tokenizer = self.features.target.tokenizer
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        (temporary / "provenance.json").write_text(json.dumps(self._provenance(), indent=2) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(temporary, folder)

    def _provenance(self) -> dict[str, Any]:
        """Return the provenance of the new target and its heads: code, versions, origin, and what the run has done."""
        return {
            "commit": self.commit,
            "eagle": __version__,
            **{name: version(name) for name in ("torch", "transformers", "accelerate", "peft")},
            "step": self.step,
            "processes": self.accelerator.num_processes,
            "skipped_steps": self.skipped,
            "made_from": self.recipe.target.model_dump(),
            "joint": self.settings.model_dump(mode="json"),
            # in nats a token, on the held-out conversations
            "kl_from_the_old_target": self.figures.get("kl"),
            "validation": self.figures,
        }

    def _identity(self) -> dict[str, Any]:
        """Return all settings and data that decide the result of this run. A run that resumes it has the same."""
        recipe = self.recipe.model_dump(mode="json")
        return {
            "processes": self.accelerator.num_processes,
            "features": self.features.identity,
            "drafter": recipe["drafter"],
            "joint": recipe["joint"],
            "train": decisive_settings(recipe["train"]),
        }
