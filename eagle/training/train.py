"""The training loop. The head's `forward` is the loss; nothing here depends on the method."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
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
from eagle.core.examples import Batch, Features, gate_mask, trim_mask
from eagle.device import PINNED
from eagle.disk import lock_folder
from eagle.drafters.parts.validation import add_sums, figures
from eagle.formats.checkpoint import save_head
from eagle.log import interrupted_by_user, memory_gb, progress
from eagle.recipe import Recipe
from eagle.training.about import describe_run, run_identity
from eagle.training.choice import Choice, Decoding, acceptance, decode_once, judged
from eagle.training.dealing import Dealer
from eagle.training.drafts_loss import DraftsLoss
from eagle.training.plan import Plan
from eagle.training.reached import describe_reached
from eagle.training.resume import DISK_FAULTS, Checkpoints, load_stem
from eagle.training.sharded import clip_gradients, gather, prepare_sharded, shard_head
from eagle.training.shares import sum_share
from eagle.training.trackers import TrackedMetrics

DECODING_SHARE = 0.05  # of a run's time: beyond it the log says how to spend less
LOG_EVERY = 10  # steps; only then does the host wait for the device


def train(
    accelerator: Accelerator,
    recipe: Recipe,
    head: TrainableDrafter,
    frozen: TargetHead,
    features: Features,
    decoding: Decoding | None = None,
    commit: str = "unknown",
) -> Path:
    """Train a head, or resume the run in the same folder; returns the folder of the best head.

    With `decoding` the best is the one that accepts most; the code's `commit` goes into the provenance.
    """
    with lock_folder(recipe.train.out, hold=accelerator.is_main_process):
        run = _Run(accelerator, recipe, head, frozen, features, decoding, commit)
        with interrupted_by_user(run.checkpoints.describe_resume):
            run.resume()
            run.train()
    if run.deepspeed:  # else its threads sometimes abort the interpreter's exit
        accelerator.wait_for_everyone()
        run.model.destroy()
        accelerator.free_memory()
    return run.out / "head"


@dataclass
class _Run:
    accelerator: Accelerator
    recipe: Recipe
    head: TrainableDrafter
    frozen: TargetHead
    features: Features
    decoding: Decoding | None
    commit: str

    def __post_init__(self) -> None:
        accelerator, settings = self.accelerator, self.recipe.train
        self.settings = settings
        self.out = Path(settings.out)
        masks = (self.features.mask(index) for index in range(len(self.features)))
        self.plan = Plan([int(trim_mask(gate_mask(mask, settings.gate)).sum()) for mask in masks], settings)
        self.print(
            f"{len(self.plan.training)} conversations to learn from, {len(self.plan.validation)} held out, "
            f"{self.plan.unusable} left out because nothing in them is supervised; {len(self.plan)} steps"
        )
        self.head = self.head.to(accelerator.device).train()
        self.pins = accelerator.device.type in PINNED
        self.dealer = Dealer(self.head, self.features, self.plan, accelerator.process_index, accelerator.num_processes)
        if settings.compile:
            self.head.compile_parts()
        if settings.on_policy is not None:
            self.head.register_forward_hook(DraftsLoss(settings.on_policy, settings.dtype))
        self.deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
        self.sharded = settings.shard_head and accelerator.num_processes > 1
        # whole weights, where those that train may be split
        self.mirror = copy.deepcopy(self.head) if self.deepspeed or self.sharded else self.head
        if self.sharded:
            shard_head(self.head)
        rates: dict[str, Any] = {"lr": settings.lr, "betas": settings.betas, "weight_decay": settings.weight_decay}
        self.optimizer = torch.optim.AdamW(self._trainable_weights(), **rates, fused=True)
        prepare = partial(prepare_sharded, accelerator) if self.sharded else accelerator.prepare
        self.model, self.prepared = prepare(self.head, self.optimizer)
        self.checkpoints = Checkpoints(accelerator, self.out / "checkpoints", settings.keep)
        self.stems = Checkpoints(accelerator, self.out / "stem", 1)
        self.step = self.skipped = 0
        self.choice, self.decoding_seconds = Choice(), 0.0
        self.window: list[tuple[int, Tensor]] = []  # steps since the last log, with norm, tokens and losses
        self.parts: list[tuple[int, Sequence[int], Tensor]] = []  # of this process since the last log
        self.loss_names: list[str] = []
        self.metrics: TrackedMetrics | None = None

    def train(self) -> None:
        """Run the remaining steps, with logs, validations and checkpoints between them."""
        if self.step >= len(self.plan) or self.choice.has_ended(self.settings.patience):
            self.print(f"{self.out} holds this run, complete: another train.out, or its removal, starts anew")
            return
        if self.accelerator.is_main_process:
            self.metrics = TrackedMetrics(self.recipe, before=self.step)
        batches = self.dealer.batches(self.step, self.pins)
        self.note = ""
        self.begun = self.log_time = perf_counter()
        if self.settings.init is not None and not self.step:
            self._decode_start()
        bar = {"show": self.accelerator.is_main_process, "done": self.step, "note": lambda: self.note}
        for number in progress(range(self.step, len(self.plan)), "train", len(self.plan), unit="steps", **bar):
            self._advance(number, batches)
            self.step = number + 1
            is_last = self.step == len(self.plan)
            validate, checkpoint = (
                is_last or self.step % (interval or self.plan.steps_an_epoch) == 0
                for interval in (self.settings.validate_every, self.settings.checkpoint_every)
            )
            if validate or checkpoint or self.step % LOG_EVERY == 0:
                self._log()
            if validate:
                self._validate(is_last)
            ends = validate and self.choice.has_ended(self.settings.patience)
            if checkpoint or ends:
                self._checkpoint(self.checkpoints)
                if self.settings.on_policy is not None:  # a run that goes on from here writes its texts anew
                    batches = self.dealer.batches(self.step, self.pins)
            if self.settings.schedule == "wsd" and self.step == self.plan.stem_steps:
                self._checkpoint(self.stems)
            if ends:
                self.print(f"the run ends: {self.choice.stale} validations brought no better head")
                break
        if reached := describe_reached(self.recipe.drafter.kind, self.plan.learned(self.step), self.mirror):
            self.print(reached)
        if self.decoding and self.choice.start and self.choice.counts:
            self.print(self.choice.describe_gain(self.decoding))
        if self.metrics:
            self.metrics.close()

    def _advance(self, number: int, batches: Iterator[Batch]) -> None:
        """One step: forward and backward of this process's parts, clip, update."""
        accelerator = self.accelerator
        for group in self.prepared.param_groups:
            group["lr"] = self.plan.lr(number)
        tokens = 0
        sums = torch.zeros((), device=accelerator.device)
        torch.manual_seed(self.settings.seed + number)  # for texts that are sampled now
        for texts, batch, share in self.dealer.deal(number, batches, self._count, self._add_up):
            torch.manual_seed(self.settings.seed + number)  # what has no text's seed is drawn alike in all parts
            with accelerator.accumulate(self.model):
                losses = self.model(batch.to(accelerator.device), self.frozen)
                # processes are averaged over, accumulated parts too
                accelerator.backward(losses["total"] * (share * self.dealer.count))
            self.loss_names = list(losses)
            self.parts.append((number, texts, losses["total"].detach()))
            tokens += len(batch.tokens)
            sums = sums + torch.stack([loss.detach().float() for loss in losses.values()]) * share
        norm = self._update().to(sums.device) / accelerator.num_processes  # the same on all; the log sums them
        self.window.append((number, torch.cat([norm[None], sums.new_full((1,), tokens), sums])))

    @torch.no_grad()
    def _count(self, batch: Batch) -> Tensor:
        """The divisor of a batch that only the head's forward knows."""
        device = self.accelerator.device
        head = self._whole_head() if self.deepspeed else self.model  # ZeRO-3 runs no forward without its backward
        with torch.autocast(device.type, torch.bfloat16, enabled=self.settings.dtype == "bfloat16"):
            divisor: Tensor = head(batch.to(device), self.frozen, count=True)["divisor"]
        return divisor

    def _add_up(self, counts: Tensor) -> Tensor:
        """Counts summed over all processes."""
        return self.accelerator.reduce(counts.to(self.accelerator.device), "sum")

    def _update(self) -> Tensor:
        """Clip the gradients and, if they are finite, step; returns their norm."""
        if self.deepspeed:  # the engine has done that within backward
            return torch.tensor(float(self.model.get_global_grad_norm()))
        norm = gather(clip_gradients(self._trainable_weights(), self.settings))
        # a fused optimizer skips the update where this is 1, without a synchronisation with the host
        self.optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
        self.prepared.step()
        self.prepared.zero_grad()
        return norm.float()

    def _trainable_weights(self) -> list[Tensor]:
        return [weight for weight in self.head.parameters() if weight.requires_grad]

    def print(self, line: str) -> None:
        """Print a line on the main process."""
        self.accelerator.print(line, flush=True)

    def _log(self) -> None:
        """Write means since the last log, and the conversations of steps whose gradients were not finite."""
        if not self.window:
            return
        numbers, rows = zip(*self.window, strict=True)
        table = dict(zip(numbers, self.accelerator.reduce(torch.stack(rows), "sum").tolist(), strict=True))
        tokens_per_second = sum(row[1] for row in table.values()) / (perf_counter() - self.log_time)
        finite = {number: row for number, row in table.items() if isfinite(row[0])}
        if skipped := sorted(table.keys() - finite.keys()):
            bad_parts = [part for number, part, loss in self.parts if number in skipped and not loss.isfinite()]
            indices = [index for parts in gather_object([bad_parts]) for part in parts for index in part]
            self.skipped += len(skipped)
            conversations = indices or "not known"
            self.print(f"skipped steps {skipped}: their gradients are not finite; conversations {conversations}")
            self._write(step=numbers[-1], skipped=skipped, conversations=indices)
        if finite:
            norm, _, *means = (sum(column) / len(finite) for column in zip(*finite.values(), strict=True))
            self.note = f"loss {means[0]:.3f}, {tokens_per_second:,.0f} tokens/s, {memory_gb():.1f} GB"
            self._write(
                step=numbers[-1],
                lr=self.plan.lr(numbers[-1]),
                gradient_norm=norm,
                tokens_per_second=tokens_per_second,
                memory_gb=memory_gb(),
                **dict(zip(self.loss_names, means, strict=True)),
            )
        self.window, self.parts = [], []
        self.log_time = perf_counter()

    def _write(self, **row: Any) -> None:
        if self.metrics:
            self.metrics.write(**row)

    @torch.no_grad()
    def _decode_start(self) -> None:
        """Decode the held-out prompts with the head of `train.init`, as it is."""
        head, started = self._whole_head().eval(), perf_counter()
        counts = decode_once(self.accelerator, self.decoding, head, self.features, self.plan.validation)
        self.head.train()
        if counts:
            self.choice.start, self.decoding_seconds = counts, perf_counter() - started
            tau, prompts = acceptance(judged(counts).values()), len(next(iter(counts.values())))
            self.print(f"before training: τ {tau:.2f} on {prompts} held-out prompts, by the head of train.init")

    @torch.no_grad()
    def _validate(self, is_last: bool) -> None:
        """Compute figures on the held-out conversations; save the head as the last and, if it is, as the best."""
        self.head.eval()  # on-policy features look at its mode, though the whole head is validated
        head, metrics = self._whole_head().eval(), {}
        if self.plan.validation:
            about = self.accelerator, self.dealer, head, self.frozen, self.settings, self.plan.validation
            shares = gather_object([sum_share(*about, pins=self.pins)])
            metrics = figures(reduce(add_sums, [share for share in shares if share]))
        start, is_main = perf_counter(), self.accelerator.is_main_process
        counts = decode_once(self.accelerator, self.decoding, head, self.features, self.plan.validation)
        metrics |= {f"decoded_{name}": acceptance(rows) for name, rows in counts.items()}
        is_best = self.choice.add(self.step, counts, metrics) or self.settings.choose == "last"
        if self.decoding and counts:
            self.decoding_seconds += perf_counter() - start
            share = self.decoding_seconds / (perf_counter() - self.begun)
            hint = ": raise train.validate_every" if share > DECODING_SHARE else ""
            comparison = self.choice.describe(self.step, counts, metrics, self.decoding)
            self.print(f"{comparison}; decoding took {share:.1%} of the time{hint}")
        if is_main:
            self._write(step=self.step - 1, validation=metrics)
            try:
                for name in ["last", "head"] if is_best else ["last"]:
                    save_head(self.out / name, head, self.recipe.dump(), self._provenance(metrics))
            except DISK_FAULTS as error:
                fault = f"the disk refused the head of step {self.step} in {self.out}: {error}. Make room on it"
                if is_last:
                    raise ValueError(f"{fault}, and give the same command again") from error
                self.print(f"{fault}; training goes on")
        self.accelerator.wait_for_everyone()
        self.head.train()

    def _whole_head(self) -> TrainableDrafter:
        """The head with its unsharded weights, on every process."""
        if self.sharded:
            self.mirror.load_state_dict(self.head.state_dict())
        if self.deepspeed:
            state = self.accelerator.get_state_dict(self.model)
            if self.accelerator.is_main_process:
                self.mirror.load_state_dict(state)
            for tensor in self.mirror.state_dict().values():
                dist.broadcast(tensor, 0)
        return self.mirror

    def _provenance(self, metrics: dict[str, Any]) -> dict[str, Any]:
        learned = {"step": self.step, "tokens": self.plan.learned(self.step), "skipped_steps": self.skipped}
        run = {**learned, "processes": self.accelerator.num_processes, "validation": metrics}
        return describe_run(self.commit, self.features.identity, **run)

    def _identity(self) -> dict[str, Any]:
        return run_identity(self.recipe, self.features.identity, self.accelerator.num_processes)

    def _checkpoint(self, checkpoints: Checkpoints) -> None:
        """Write a checkpoint; a full disk costs the checkpoint, not the run."""
        state = {"step": self.step, "best": self.choice.dump(), "skipped": self.skipped, "run": self._identity()}
        if fault := checkpoints.write(self.step, state):
            self.print(f"no checkpoint at step {self.step}: {fault}. Training goes on; make room on the disk")
            self._write(step=self.step - 1, checkpoint_failed=fault)

    def resume(self) -> None:
        """Load the newest complete checkpoint, if there is one."""
        if state := self.checkpoints.load(self._identity()):
            self.step, self.choice, self.skipped = state["step"], Choice.parse(state["best"]), state["skipped"]
        elif self.settings.stem is not None:
            state = load_stem(self.accelerator, self.head, self.settings, self.plan.stem_steps, self._identity())
            self.step, self.skipped = state["step"], state["skipped"]
        if self.step:
            self.print(f"going on after step {self.step} of {len(self.plan)}")
