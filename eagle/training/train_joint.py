"""The loop that trains a target together with heads, and writes the new target and its heads."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from functools import reduce
from importlib.metadata import version
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
from eagle.log import interrupted_by_user, memory_gb, progress
from eagle.recipe import JointSection, Recipe
from eagle.training.about import decisive_settings
from eagle.training.dealing import Dealer
from eagle.training.joint import Joint, StepPart, heads_weight
from eagle.training.plan import Plan
from eagle.training.resume import Checkpoints
from eagle.training.shares import TREES
from eagle.training.trackers import TrackedMetrics
from eagle.training.train import LOG_EVERY

UNUSED = {
    **{"shard_head": False, "compile": False, "gate": "predicted", "clip_by": "norm"},
    **{"decode": None, "choose": "best", "patience": None},
    **{"stem": None, "mean_over": "step"},
}


def train_jointly(
    accelerator: Accelerator, recipe: Recipe, head: TrainableDrafter, features: LiveFeatures, commit: str = "unknown"
) -> Path:
    """Train the features' target with a head, or resume; returns the folder with the new `target` and its `head`."""
    if recipe.joint is None:
        raise ValueError("this recipe has no section `joint`: train its head alone, by recipes/train_eagle.py")
    if given := [name for name, value in UNUSED.items() if getattr(recipe.train, name) != value]:
        raise ValueError(
            f"train.{given[0]} is for heads alone, which are trained by recipes/train_eagle.py: leave it out"
        )
    if features.target.border < float("inf"):
        raise ValueError("this target's rotary frequencies depend on the longest text of a batch: it is not trained")
    with lock_folder(recipe.train.out, hold=accelerator.is_main_process):
        run = _JointRun(accelerator, recipe, recipe.joint, head, features, commit)
        with interrupted_by_user(run.checkpoints.describe_resume):
            run.train()
            run.finish()
    return run.out


@dataclass
class _JointRun:
    accelerator: Accelerator
    recipe: Recipe
    settings: JointSection
    head: TrainableDrafter
    features: LiveFeatures
    commit: str

    def __post_init__(self) -> None:
        accelerator, section, target = self.accelerator, self.recipe.train, self.features.target
        self.out = Path(section.out)
        self.plan = Plan([_supervised(self.features, index) for index in range(len(self.features))], section)
        frozen = target.head.cast(getattr(torch, section.dtype))
        self.dealer = Dealer(self.head, self.features, self.plan, accelerator.process_index, accelerator.num_processes)
        self.joint = Joint(target.model, self.head.to(accelerator.device), frozen, self.settings).train()
        groups = self.joint.groups(section.lr)
        self.trained = [part for group in groups for part in group["params"]]
        rates: dict[str, Any] = {"lr": section.lr, "betas": section.betas, "weight_decay": section.weight_decay}
        self.optimizer = torch.optim.AdamW(groups, **rates, fused=True)
        self.model, self.prepared = accelerator.prepare(self.joint, self.optimizer)
        self.checkpoints = Checkpoints(accelerator, self.out / "checkpoints", section.keep)
        self.window: list[dict[str, Tensor]] = []  # of the steps since the last log
        self.step = self.skipped = 0
        self.figures: dict[str, float] = {}
        if state := self.checkpoints.load(self._identity()):
            self.step, self.skipped, self.figures = state["step"], state["skipped"], state["figures"]
            accelerator.print(f"going on after step {self.step} of {len(self.plan)}", flush=True)

    def train(self) -> None:
        """Run the remaining steps, with logs, validations and checkpoints between them."""
        main, section = self.accelerator.is_main_process, self.recipe.train
        metrics = TrackedMetrics(self.recipe, before=self.step) if main else None
        bar = {"show": main, "done": self.step}
        for number in progress(range(self.step, len(self.plan)), "train", len(self.plan), unit="steps", **bar):
            self._advance(number)
            self.step = number + 1
            validate, checkpoint = (
                self.step == len(self.plan) or self.step % (interval or self.plan.steps_an_epoch) == 0
                for interval in (section.validate_every, section.checkpoint_every)
            )
            if validate or checkpoint or self.step % LOG_EVERY == 0:
                row = self._means()
                if metrics:
                    metrics.write(step=number, lr=self.plan.lr(number), memory_gb=memory_gb(), **row)
            if validate:
                self.figures = self._validate()
                if metrics:
                    metrics.write(step=number, validation=self.figures)
            if checkpoint:
                state = {"step": self.step, "skipped": self.skipped, "best": 0, "figures": self.figures}
                if fault := self.checkpoints.write(self.step, {**state, "run": self._identity()}):
                    self.accelerator.print(f"no checkpoint at step {self.step}: {fault}. Training goes on", flush=True)
        if metrics:
            metrics.close()

    def _advance(self, number: int) -> None:
        """One step: forward and backward of this process's parts, clip, update."""
        accelerator, rate = self.accelerator, self.plan.lr(number)
        for group, scale in zip(self.prepared.param_groups, (1.0, self.settings.head_lr), strict=True):
            group["lr"] = rate * scale
        parts = self.plan.parts(number, accelerator.num_processes * self.recipe.train.accumulation)
        weights = self.plan.weights(number, parts)
        torch.manual_seed(self.recipe.train.seed + number)  # dropout is the same in a run that goes on
        divisors = self.dealer.divisors_of(number)
        heads, sums = heads_weight(self.settings, number, len(self.plan)), dict[str, Tensor]()
        for part in range(accelerator.process_index, len(parts), accelerator.num_processes):
            with accelerator.accumulate(self.model):
                about = StepPart(tuple(self.plan.seeds(number, parts[part])), divisors, weights[part])
                losses = self.model([self.features.examples[index] for index in parts[part]], heads, about)
                # processes are averaged over, accumulated parts too
                accelerator.backward(losses["total"] * len(parts))
            sums = add_sums(sums, {name: loss.detach().double() for name, loss in losses.items()})
        norm = torch.nn.utils.clip_grad_norm_(self.trained, self.recipe.train.clip)
        # a fused optimizer skips the update where this is 1, without a synchronisation with the host
        self.optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
        self.prepared.step()
        self.prepared.zero_grad()
        self.window.append({**sums, "gradient_norm": norm.double() / accelerator.num_processes})

    def _means(self) -> dict[str, float]:
        """The means since the last log, of steps with finite gradients."""
        names = list(self.window[0])
        rows = self.accelerator.reduce(torch.stack([torch.stack([*row.values()]) for row in self.window]), "sum")
        finite = rows[rows[:, -1].isfinite()]
        self.skipped += len(rows) - len(finite)
        self.window = []
        return dict(zip(names, finite.mean(0).tolist(), strict=True)) if len(finite) else {}

    def _validate(self) -> dict[str, float]:
        """Figures on the held-out conversations: the heads' acceptance, and the new target's KL from the old one."""
        self.joint.eval()
        accelerator, sums = self.accelerator, dict[str, Tensor]()
        for index in self.plan.validation[accelerator.process_index :: accelerator.num_processes]:
            with accelerator.autocast():
                head_sums = self.joint.validate([self.features.examples[index]], TREES)
            sums = add_sums(sums, {name: value.double().cpu() for name, value in head_sums.items()})
        self.joint.train()
        shares = [share for share in gather_object([sums]) if share]
        return figures(reduce(add_sums, shares)) if shares else {}

    def finish(self) -> None:
        """Write the new target, with the adapters merged, and the heads, whose recipe names it."""
        folder = self.out / "target"
        if self.accelerator.is_main_process:
            part = self.out / "target.part"
            shutil.rmtree(part, ignore_errors=True)
            target = self.features.target
            self.joint.merge().save_pretrained(part)
            if target.tokenizer is not None:
                target.tokenizer.save_pretrained(part)
            (part / "provenance.json").write_text(json.dumps(self._provenance(), indent=2) + "\n")
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(part, folder)
            section = self.recipe.target.model_copy(update={"path": str(folder), "revision": None, "adapter": None})
            served = self.recipe.model_copy(update={"target": section, "joint": None})
            save_head(self.out / "head", self.joint.head, served.dump(), self._provenance())
        self.accelerator.wait_for_everyone()

    def _provenance(self) -> dict[str, Any]:
        versions = {"eagle": __version__} | {
            name: version(name) for name in ("torch", "transformers", "accelerate", "peft")
        }
        origin = {"made_from": self.recipe.target.model_dump(), "joint": self.settings.model_dump(mode="json")}
        run = {"step": self.step, "processes": self.accelerator.num_processes, "skipped_steps": self.skipped}
        kl = {"kl_from_the_old_target": self.figures.get("kl")}  # in nats a token, on the held-out conversations
        return {"commit": self.commit, **versions, **run, **origin, **kl, "validation": self.figures}

    def _identity(self) -> dict[str, Any]:
        """The identity of this run, which a continuation must share."""
        recipe, count = self.recipe.model_dump(mode="json"), self.accelerator.num_processes
        train = decisive_settings(recipe["train"])
        about = {"features": self.features.identity, "drafter": recipe["drafter"], "joint": recipe["joint"]}
        return {"processes": count, **about, "train": train}


def _supervised(features: LiveFeatures, index: int) -> int:
    """The number of supervised tokens of an example, without the first two, which no drafter predicts."""
    return int(features.mask(index)[2:].sum())
