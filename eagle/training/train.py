"""The loop. It calls the head, whose forward is the loss, and knows nothing else of methods."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial, reduce
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType
from accelerate.utils import gather_object
from torch import Tensor

from eagle.core.drafter import TargetHead, TrainableDrafter
from eagle.core.tree import PUBLISHED_TREE, chain_paths
from eagle.data.examples import Batch, Features, collate, read_ahead, trim_mask
from eagle.disk import lock_folder
from eagle.drafters.parts.validation import added, figures
from eagle.formats.checkpoint import save_head
from eagle.log import Metrics, interrupted_by_user, memory_gb, progress
from eagle.recipe import Recipe
from eagle.training.plan import Plan, gate_mask
from eagle.training.resume import DISK_FAULTS, Checkpoints

TREES = {"chain": chain_paths(4), "tree": PUBLISHED_TREE}  # of which validation predicts the acceptance length
LOG_EVERY = 10  # steps; only then does the host wait for the device
# what may change between a run and its continuation
FREE = {"out", "wandb", "keep", "checkpoint_every", "validate_every", "decode", "processes"}


def train(
    accelerator: Accelerator,
    recipe: Recipe,
    head: TrainableDrafter,
    frozen: TargetHead,
    features: Features,
    decode: Callable[[TrainableDrafter], dict[str, float]] | None = None,
    commit: str = "unknown",
) -> Path:
    """Train a head, or go on where a run in the same folder stopped; returns the folder of the best.

    `decode` measures a head at each validation; `commit` of the code goes into the provenance.
    """
    with lock_folder(recipe.train.out, hold=accelerator.is_main_process):
        run = _Run(accelerator, recipe, head, frozen, features, decode, commit)
        with interrupted_by_user(run.checkpoints.how_to_go_on):
            run.resume()
            run.to_the_end()
    if run.deepspeed:  # else its threads sometimes abort the interpreter's exit
        accelerator.wait_for_everyone()
        run.model.destroy()
        accelerator.free_memory()
    return run.out / "head"


class _Run:
    def __init__(
        self,
        accelerator: Accelerator,
        recipe: Recipe,
        head: TrainableDrafter,
        frozen: TargetHead,
        features: Features,
        decode: Callable[[TrainableDrafter], dict[str, float]] | None,
        commit: str,
    ) -> None:
        self.commit = commit
        self.accelerator, self.recipe, self.frozen = accelerator, recipe, frozen
        self.features, self.decode, self.settings = features, decode, recipe.train
        self.out = Path(recipe.train.out)
        slots = [
            int(trim_mask(gate_mask(features.mask(place), recipe.train.gate)).sum()) for place in range(len(features))
        ]
        self.plan = Plan(slots, recipe.train)
        self.say(
            f"{len(self.plan.training)} conversations to learn from, {len(self.plan.validation)} held out, "
            f"{self.plan.unusable} left out because nothing in them is supervised; {len(self.plan)} steps"
        )
        self.head = head.to(accelerator.device).train()
        self.deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
        self.mirror = copy.deepcopy(self.head) if self.deepspeed else self.head  # whole weights outside of the engine
        self.optimizer = torch.optim.AdamW(
            self._learned(),
            lr=recipe.train.lr,
            betas=recipe.train.betas,
            weight_decay=recipe.train.weight_decay,
            fused=True,
        )
        self.model, self.prepared = accelerator.prepare(self.head, self.optimizer)
        self.checkpoints = Checkpoints(accelerator, self.out / "checkpoints", recipe.train.keep)
        self.step, self.best, self.skipped = 0, float("-inf"), 0
        self.window: list[tuple[int, Tensor]] = []  # since the last log: steps, and their norm, tokens and losses
        self.parts: list[tuple[int, list[int], Tensor]] = []  # since then: steps, this process's parts and their losses
        self.names: list[str] = []
        self.metrics: Metrics | None = None

    # -- from the start to the end ------------------------------------------------------------------------------------

    def to_the_end(self) -> None:
        """Every step that is left; validation and checkpoints between them."""
        if self.step >= len(self.plan):
            self.say(f"{self.out} holds this run, complete: another train.out, or its removal, starts anew")
            return
        if self.accelerator.is_main_process:
            where, config = self.out / "metrics.jsonl", self.recipe.model_dump(mode="json")
            self.metrics = Metrics(where, before=self.step, project=self.settings.wandb, config=config)
        batches = self._batches()
        self.note, self.since = "", perf_counter()
        shown = {"show": self.accelerator.is_main_process, "done": self.step, "note": lambda: self.note}
        for number in progress(range(self.step, len(self.plan)), "train", len(self.plan), unit="steps", **shown):
            self._advance(number, batches)
            self.step, last = number + 1, number + 1 == len(self.plan)
            validates, checkpoints = (
                last or self.step % (every or self.plan.steps_an_epoch) == 0
                for every in (self.settings.validate_every, self.settings.checkpoint_every)
            )
            if validates or checkpoints or self.step % LOG_EVERY == 0:
                self._log()
            if validates:
                self._validate(last)
            if checkpoints:
                self._checkpoint()
        if self.metrics:
            self.metrics.close()

    def _advance(self, number: int, batches: Iterator[Batch]) -> None:
        """One step: forward and backward of every part that is this process's, clip, update."""
        accelerator, lr = self.accelerator, self.plan.lr(number)
        for group in self.prepared.param_groups:
            group["lr"] = lr
        parts = self._parts(number)
        weights = self.plan.weights(number, parts)
        torch.manual_seed(self.settings.seed + number)  # for heads that draw without a text's own seed
        tokens, sums = 0, torch.zeros((), device=accelerator.device)
        for part in range(accelerator.process_index, len(parts), accelerator.num_processes):
            batch = next(batches)
            with accelerator.accumulate(self.model):
                losses = self.model(batch.to(accelerator.device), self.frozen)
                # processes are averaged over, accumulated parts too
                accelerator.backward(losses["total"] * (weights[part] * len(parts)))
            self.names = list(losses)
            self.parts.append((number, parts[part], losses["total"].detach()))
            tokens += len(batch.tokens)
            sums = sums + torch.stack([loss.detach().float() for loss in losses.values()]) * weights[part]
        norm = self._update().to(sums.device) / accelerator.num_processes  # which all know: their sum is taken
        self.window.append((number, torch.cat([norm[None], sums.new_tensor([tokens]), sums])))

    def _update(self) -> Tensor:
        """Clip and step, unless the gradients are not finite; says their norm."""
        if self.deepspeed:  # the engine has done all of that within backward
            return torch.tensor(float(self.model.get_global_grad_norm()))
        weights = self._learned()
        if self.settings.clip_by == "value":
            norm = torch.nn.utils.get_total_norm([weight.grad for weight in weights if weight.grad is not None])
            torch.nn.utils.clip_grad_value_(weights, self.settings.clip)
        else:
            norm = torch.nn.utils.clip_grad_norm_(weights, self.settings.clip)
        # a fused optimizer leaves weights and moments alone where this is 1, and the host need not know yet
        self.optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
        self.prepared.step()
        self.prepared.zero_grad()
        return norm.float()

    def _learned(self) -> list[Tensor]:
        return [weight for weight in self.head.parameters() if weight.requires_grad]

    # -- reading ------------------------------------------------------------------------------------------------------

    def _parts(self, number: int) -> list[list[int]]:
        return self.plan.parts(number, self.accelerator.num_processes * self.settings.accumulation)

    def _batches(self) -> Iterator[Batch]:
        """This process's batches from the current step on, read ahead by a thread."""
        rank, count = self.accelerator.process_index, self.accelerator.num_processes
        jobs = (
            partial(self._load, part, self.plan.seeds(number, part), self.settings.gate)
            for number in range(self.step, len(self.plan))
            for part in self._parts(number)[rank::count]
        )
        # a sharded target reads on all processes together, and must not do so while gradients are exchanged
        return (job() for job in jobs) if self.features.together else read_ahead(jobs)

    def _load(self, places: Sequence[int], seeds: Sequence[int] = (), gate: str = "predicted") -> Batch:
        examples = [replace(held, loss_mask=gate_mask(held.loss_mask, gate)) for held in self.features.read(places)]
        batch = collate(examples, self.features.taps, seeds)
        return batch.pin_memory() if self.accelerator.device.type == "cuda" else batch

    # -- telling ------------------------------------------------------------------------------------------------------

    def say(self, line: str) -> None:
        """One line, from one process."""
        self.accelerator.print(line, flush=True)

    def _log(self) -> None:
        """Means since the last log; steps whose gradients were not finite are counted and their parts named."""
        if not self.window:
            return
        numbers, rows = zip(*self.window, strict=True)
        table = dict(zip(numbers, self.accelerator.reduce(torch.stack(rows), "sum").tolist(), strict=True))
        tokens, seconds = sum(row[1] for row in table.values()), perf_counter() - self.since
        finite = {number: row for number, row in table.items() if isfinite(row[0])}
        if wrong := sorted(table.keys() - finite.keys()):
            mine = [part for number, part, loss in self.parts if number in wrong and not loss.isfinite()]
            named = [place for parts in gather_object([mine]) for part in parts for place in part]
            self.skipped += len(wrong)
            self.say(f"skipped steps {wrong}: their gradients are not finite; conversations {named or 'not known'}")
            self._write(step=numbers[-1], skipped=wrong, conversations=named)
        if finite:
            norm, _, *means = (sum(column) / len(finite) for column in zip(*finite.values(), strict=True))
            self.note = f"loss {means[0]:.3f}, {tokens / seconds:,.0f} tokens/s, {memory_gb():.1f} GB"
            self._write(
                step=numbers[-1],
                lr=self.plan.lr(numbers[-1]),
                gradient_norm=norm,
                tokens_per_second=tokens / seconds,
                memory_gb=memory_gb(),
                **dict(zip(self.names, means, strict=True)),
            )
        self.window, self.parts, self.since = [], [], perf_counter()

    def _write(self, **row: Any) -> None:
        if self.metrics:
            self.metrics.write(**row)

    # -- validation ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _validate(self, last: bool) -> None:
        """Figures on the held-out conversations; the last head is saved, and the best."""
        self.head.eval()  # which features that follow the head look at, beside the whole one
        head, found = self._whole_head().eval(), {}
        if self.plan.validation:
            shares = gather_object([self._judged(head)])
            found = figures(reduce(added, [share for share in shares if share]))
        main = self.accelerator.is_main_process
        if self.decode and main:
            found |= self.decode(head)
        score = found.get("tree/tau", float(self.step))  # without a held-out share the last is the best
        better = score > self.best
        self.best = max(score, self.best)
        if main:
            self._write(step=self.step - 1, validation=found)
            try:
                for name in ["last", "head"] if better else ["last"]:
                    save_head(self.out / name, head, self.recipe.dump(), self._provenance(found))
            except DISK_FAULTS as error:
                fault = f"the disk refused the head of step {self.step} in {self.out}: {error}. Make room on it"
                if last:
                    raise ValueError(f"{fault}, and give the same command again") from error
                self.say(f"{fault}; training goes on")
        self.accelerator.wait_for_everyone()
        self.head.train()

    def _judged(self, head: TrainableDrafter) -> dict[str, Tensor]:
        """This process's share of the sums; every process reads as often as the others."""
        held, size = self.plan.validation, self.settings.batch_size
        sums: dict[str, Tensor] = {}
        groups = [held[start : start + size] for start in range(0, len(held), size)]
        for first in range(0, len(groups), self.accelerator.num_processes):
            mine = first + self.accelerator.process_index
            batch = self._load(groups[min(mine, len(groups) - 1)])  # whatever train.gate says
            if mine < len(groups):
                device = self.accelerator.device
                with torch.autocast(device.type, torch.bfloat16, enabled=self.settings.dtype == "bfloat16"):
                    found = head.validate(batch.to(device), self.frozen, TREES)
                sums = added(sums, {name: value.double().cpu() for name, value in found.items()})
        return sums

    def _whole_head(self) -> TrainableDrafter:
        """The head with all of its weights, on every process."""
        if self.deepspeed:
            state = self.accelerator.get_state_dict(self.model)
            if self.accelerator.is_main_process:
                self.mirror.load_state_dict(state)
            for tensor in self.mirror.state_dict().values():
                dist.broadcast(tensor, 0)
        return self.mirror

    def _provenance(self, found: dict[str, Any]) -> dict[str, Any]:
        versions = {name: version(name) for name in ("eagle", "torch", "transformers", "accelerate")}
        run = {"step": self.step, "processes": self.accelerator.num_processes, "skipped_steps": self.skipped}
        return {"commit": self.commit, **versions, **run, "validation": found, **self.features.identity}

    # -- resuming -----------------------------------------------------------------------------------------------------

    def _about(self) -> dict[str, Any]:
        """What a continuation must have in common with the run."""
        recipe = self.recipe.model_dump(mode="json")
        settings = {key: value for key, value in recipe["train"].items() if key not in FREE}
        return {
            "processes": self.accelerator.num_processes,
            "features": self.features.identity,
            "drafter": recipe["drafter"],
            "train": settings,
        }

    def _checkpoint(self) -> None:
        """A disk that refuses a checkpoint costs that checkpoint, not the run."""
        state = {"step": self.step, "best": self.best, "skipped": self.skipped, "run": self._about()}
        if fault := self.checkpoints.write(self.step, state):
            self.say(f"no checkpoint at step {self.step}: {fault}. Training goes on; make room on the disk")
            self._write(step=self.step - 1, checkpoint_failed=fault)

    def resume(self) -> None:
        """Go on from the newest whole checkpoint, if there is one of the same run."""
        if state := self.checkpoints.load(self._about()):
            self.step, self.best, self.skipped = state["step"], state["best"], state["skipped"]
            self.say(f"going on after step {self.step} of {len(self.plan)}")
