"""The training loop. The head's `forward` is the loss; nothing here depends on the method."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial, reduce
from importlib.metadata import version
from itertools import chain
from math import ceil, isfinite
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType
from accelerate.utils import gather_object
from torch import Tensor

from eagle import __version__
from eagle.core.drafter import TargetHead, TrainableDrafter
from eagle.core.examples import Batch, Features, gate_mask, trim_mask
from eagle.core.tree import PUBLISHED_TREE, chain_paths
from eagle.device import PINNED
from eagle.disk import lock_folder
from eagle.drafters.parts.validation import add_sums, figures
from eagle.formats.checkpoint import save_head
from eagle.interrupts import interrupted_by_user
from eagle.log import memory_gb, progress
from eagle.recipe import Recipe, TrainSection
from eagle.training.choice import (
    Choice,
    Counts,
    Decoding,
    acceptance_length,
    decode_once,
    describe_predicted,
    describe_tau,
)
from eagle.training.drafts_loss import DraftsLoss
from eagle.training.launch import gather, prepare_sharded, shard_head
from eagle.training.plan import Dealer, Plan
from eagle.training.reached import compare_with_curve
from eagle.training.resume import DISK_FAULTS, Checkpoints, load_stem, run_identity
from eagle.training.trackers import TrackedMetrics

# the trees whose acceptance lengths validation predicts
TREES = {
    "chain": chain_paths(4),
    "tree": PUBLISHED_TREE,
}
DECODING_SHARE = 0.05  # of a run's time: if decoding takes more, the log says how to spend less
LOG_EVERY = 10  # steps; only then does the host wait for the device


def train(
    accelerator: Accelerator,
    recipe: Recipe,
    head: TrainableDrafter,
    target_head: TargetHead,
    features: Features,
    decoding: Decoding | None = None,
    commit: str = "unknown",
) -> Path:
    """Train a head, or resume the run in the same folder.

    Args:
        accelerator: As `eagle.training.launch` returns it.
        recipe: Its section `train` decides the run.
        head: The head that training starts from.
        target_head: The target's embedding and LM head.
        features: What the head learns from.
        decoding: Decodes held-out prompts; with it the best head is the one that accepts most.
        commit: The code's, for the provenance.

    Returns:
        The folder of the best head.
    """
    with lock_folder(recipe.train.out, hold=accelerator.is_main_process):
        run = Run(
            accelerator, recipe, head, target_head, features, decoding=decoding, commit=commit
        )
        with interrupted_by_user(run.checkpoints.describe_resume):
            run.resume()
            run.train()
    # threads of a DeepSpeed engine that is not destroyed sometimes abort the interpreter's exit
    if run.deepspeed:
        accelerator.wait_for_everyone()
        run.model.destroy()
        accelerator.free_memory()
    return run.out / "head"


@dataclass
class Run:
    """The state of one training run in one process; `resume` and `train` do the work, in this order."""

    accelerator: Accelerator
    recipe: Recipe
    head: TrainableDrafter
    target_head: TargetHead
    features: Features
    decoding: Decoding | None
    commit: str

    def __post_init__(self) -> None:
        """Plan the steps and prepare head and optimizer. Nothing is trained or loaded yet."""
        accelerator = self.accelerator
        self.settings = self.recipe.train
        self.out = Path(self.settings.out)
        self.plan = Plan(self._count_supervised(), self.settings)
        self.print(
            f"{len(self.plan.training)} conversations to learn from, {len(self.plan.validation)} held out, "
            f"{self.plan.unusable} left out because nothing in them is supervised; {len(self.plan)} steps"
        )
        self.deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
        self.sharded = self.settings.shard_head and accelerator.num_processes > 1
        # whether batches are put into pinned host memory, from which this kind of device copies while it computes
        self.pins = accelerator.device.type in PINNED
        self.head = self.head.to(accelerator.device).train()
        self.dealer = Dealer(
            self.head,
            self.features,
            self.plan,
            rank=accelerator.process_index,
            processes=accelerator.num_processes,
        )
        self._prepare()
        self.checkpoints = Checkpoints(accelerator, self.out / "checkpoints", self.settings.keep)
        # of the one step before the learning rate of `wsd` falls, from which a longer run may start (`train.stem`)
        self.stems = Checkpoints(accelerator, self.out / "stem", keep=1)
        # how far the run is, which a checkpoint restores
        self.step = 0  # steps that are done
        self.skipped = 0  # of them, those whose gradients were not finite
        self.choice = Choice()
        # Since the last line of the log: (step, [norm, tokens, *losses]) of each step, and (step, indices of the
        # examples, loss) of this process's parts. The tensors stay on the device, so that no step waits for the host.
        self.unlogged_steps: list[tuple[int, Tensor]] = []
        self.unlogged_parts: list[tuple[int, Sequence[int], Tensor]] = []
        self.loss_names: list[str] = []
        self.figures: dict[str, Any] = {}  # of the last validation
        self.decoding_seconds = 0.0
        self.metrics: TrackedMetrics | None = None  # of the main process alone
        self.note = ""  # shown beside the progress bar

    def _count_supervised(self) -> list[int]:
        """Return how many tokens of each conversation are learned, after `train.gate` has changed its loss mask."""
        counts = []
        for index in range(len(self.features)):
            mask = gate_mask(self.features.mask(index), self.settings.gate)
            counts.append(int(trim_mask(mask).sum()))
        return counts

    def _prepare(self) -> None:
        """Make the head and its optimizer ready to train as the launcher asks: plain, sharded or under DeepSpeed."""
        settings = self.settings
        if settings.compile:
            self.head.compile_parts()
        if settings.on_policy is not None:
            self.head.register_forward_hook(DraftsLoss(settings.on_policy, settings.dtype))
        # a copy that gets the whole weights for validation and saving, where the head in training holds a share of each
        self.mirror = copy.deepcopy(self.head) if self.deepspeed or self.sharded else self.head
        # a function of head and optimizer that returns both as they are trained
        prepare = self.accelerator.prepare
        if self.sharded:
            shard_head(self.head)
            prepare = partial(prepare_sharded, self.accelerator)
        groups = self.head.weight_groups()
        # of each group, the factor of the plan's learning rate
        self.lr_factors = [factor for factor, _ in groups]
        self.optimizer = torch.optim.AdamW(
            [{"params": weights} for _, weights in groups],
            lr=settings.lr,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.model, self.prepared = prepare(self.head, self.optimizer)

    def train(self) -> None:
        """Run the remaining steps, with logs, validations and checkpoints between them."""
        settings = self.settings
        if self.step >= len(self.plan) or self.choice.has_ended(settings.patience):
            self.print(
                f"{self.out} holds this run, complete: another train.out, or its removal, starts anew"
            )
            return
        is_main = self.accelerator.is_main_process
        if is_main:
            self.metrics = TrackedMetrics(self.recipe, before=self.step)
        # this process's batches of all remaining steps, loaded ahead where possible
        batches = self.dealer.batches(self.step, self.pins)
        self.begun = self.log_time = perf_counter()
        # the head of `train.init` is the baseline that the best head is compared with at the end
        if settings.init is not None and not self.step:
            self._decode_start()
        steps = range(self.step, len(self.plan))
        for step in progress(
            steps,
            "train",
            len(self.plan),
            unit="steps",
            show=is_main,
            done=self.step,
            note=lambda: self.note,
        ):
            self._advance(step, batches)
            self.step = step + 1
            is_last = self.step == len(self.plan)
            validates = is_last or self._is_due(settings.validate_every)
            checkpoints = is_last or self._is_due(settings.checkpoint_every)
            # a checkpoint holds no unlogged steps: with a row before it, a resumed run logs the same rows
            if validates or checkpoints or self.step % LOG_EVERY == 0:
                self._log()
            if validates:
                self._validate(is_last)
            # early stopping
            ends = validates and self.choice.has_ended(settings.patience)
            if checkpoints or ends:
                self._checkpoint(self.checkpoints)
                # A run resumed from this checkpoint writes the answers of the next steps with the head of this step.
                # Write them again here too, so that both runs are equal.
                if settings.on_policy is not None:
                    batches = self.dealer.batches(self.step, self.pins)
            # kept for longer runs that start from it (`train.stem`)
            if settings.schedule == "wsd" and self.step == self.plan.stem_steps:
                self._checkpoint(self.stems)
            if ends:
                self.print(f"the run ends: {self.choice.stale} validations brought no better head")
                break
        self._report()

    def _is_due(self, interval: int | None) -> bool:
        """Return whether this step is a multiple of `interval`, or without one the last of an epoch.

        Validations and checkpoints are due at such steps.
        """
        return self.step % (interval or self.plan.steps_an_epoch) == 0

    def _report(self) -> None:
        """Print how far training came on the method's measured curve, and the gain over the head of `train.init`."""
        # the curves are those of heads whose target does not train
        if self.recipe.joint is None:
            comparison = compare_with_curve(
                self.recipe.drafter.kind, self.plan.learned(self.step), self.mirror
            )
            if comparison:
                self.print(comparison)
        if self.decoding and self.choice.start and self.choice.counts:
            self.print(self.choice.describe_gain(self.decoding))
        if self.metrics:
            self.metrics.close()

    def _advance(self, step: int, batches: Iterator[Batch]) -> None:
        """Take one optimizer step: forward and backward of this process's parts of the batch, clip, update.

        The losses and the gradient norm are kept for the log. A part is what one forward reads.

        Args:
            step: The index of the step, from 0.
            batches: This process's batches from this step on.
        """
        accelerator = self.accelerator
        for group, factor in zip(self.prepared.param_groups, self.lr_factors, strict=True):
            group["lr"] = self.plan.lr(step) * factor
        tokens = 0
        sums = torch.zeros((), device=accelerator.device)
        # sources of features read the step's examples when `deal` takes a batch: they sample by this seed, and
        # `OwnDrafts` knows the step by it
        torch.manual_seed(self.settings.seed + step)
        # a part is what one forward reads, and its `share` is its factor in the step's loss. For a head whose divisor
        # only a forward knows, `deal` counts it by the two methods.
        parts = self.dealer.deal(step, batches, self._count_divisor, self._sum_over_processes)
        for indices, batch, share in parts:
            # noise that has no seed by example is the same in every part, on any number of processes
            torch.manual_seed(self.settings.seed + step)
            with accelerator.accumulate(self.model):
                losses = self.model(batch.to(accelerator.device), self.target_head)
                # DDP takes the mean over processes, and accelerate that over accumulated parts: undo both, as `share`
                # makes the parts' losses add up to the step's
                accelerator.backward(losses["total"] * (share * self.dealer.part_count))
            self.loss_names = list(losses)
            self.unlogged_parts.append((step, indices, losses["total"].detach()))
            tokens += len(batch.tokens)
            sums = sums + torch.stack([loss.detach().float() for loss in losses.values()]) * share
        # the log sums over processes, which all have the same norm
        norm = self._update().to(sums.device) / accelerator.num_processes
        row = torch.cat([norm[None], sums.new_full((1,), tokens), sums])
        self.unlogged_steps.append((step, row))

    @torch.no_grad()
    def _count_divisor(self, batch: Batch) -> Tensor:
        """Return the number by which a batch's loss is divided, where only the head's forward knows it.

        Such a head has `counts_by_forward`.
        """
        # the engine of ZeRO-3 cannot run a forward that no backward follows
        head = self._whole_head() if self.deepspeed else self.model
        with self._autocast():
            counted = head(batch.to(self.accelerator.device), self.target_head, count=True)
        divisor: Tensor = counted["divisor"]
        return divisor

    def _sum_over_processes(self, counts: Tensor) -> Tensor:
        """Return a tensor of counts summed over all processes, on the device."""
        return self.accelerator.reduce(counts.to(self.accelerator.device), "sum")

    def _update(self) -> Tensor:
        """Clip the gradients and, if they are finite, take the optimizer step; return their norm before clipping."""
        # the engine has clipped and stepped within the last backward
        if self.deepspeed:
            return torch.tensor(float(self.model.get_global_grad_norm()))
        # gradients are clipped in place; the norm is sharded where they are
        weights = list(chain.from_iterable(group for _, group in self.head.weight_groups()))
        norm = gather(_clip_gradients(weights, self.settings))
        # a fused optimizer skips the update where this tensor is 1, so that the host need not wait for the norm
        self.optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
        self.prepared.step()
        self.prepared.zero_grad()
        return norm.float()

    def print(self, line: str) -> None:
        """Print a line, on the main process alone."""
        self.accelerator.print(line, flush=True)

    def _log(self) -> None:
        """Write a row of mean losses over the steps since the last log, and report steps that were skipped.

        A step is skipped if its gradients were not finite; it does not count in the means.
        """
        if not self.unlogged_steps:
            return
        steps = [step for step, _ in self.unlogged_steps]
        last = steps[-1]
        # norm, tokens and losses of each step, summed over all processes: only here the host waits for the device
        stacked = torch.stack([row for _, row in self.unlogged_steps])
        sums = self.accelerator.reduce(stacked, "sum").tolist()
        tokens_per_second = sum(row[1] for row in sums) / (perf_counter() - self.log_time)
        # by step: [norm, tokens, *losses]
        rows = dict(zip(steps, sums, strict=True))
        skipped = sorted(step for step, row in rows.items() if not isfinite(row[0]))
        if skipped:
            self._log_skipped(last, skipped)
        finite = [row for step, row in rows.items() if step not in skipped]
        if finite:
            norm, _, *losses = (sum(column) / len(finite) for column in zip(*finite, strict=True))
            self.note = (
                f"loss {losses[0]:.3f}, {tokens_per_second:,.0f} tokens/s, {memory_gb():.1f} GB"
            )
            self._write(
                step=last,
                lr=self.plan.lr(last),
                gradient_norm=norm,
                tokens_per_second=tokens_per_second,
                memory_gb=memory_gb(),
                **dict(zip(self.loss_names, losses, strict=True)),
            )
        self.unlogged_steps = []
        self.unlogged_parts = []
        self.log_time = perf_counter()

    def _log_skipped(self, last: int, skipped: list[int]) -> None:
        """Report skipped steps and the conversations to blame: those of forwards whose loss was not finite either.

        Args:
            last: The step of the row that is written.
            skipped: The steps whose gradients were not finite.
        """
        # of the conversations in this process's parts
        own_indices: list[int] = []
        for step, part_indices, loss in self.unlogged_parts:
            if step in skipped and not loss.isfinite():
                own_indices += part_indices
        # gathered from all processes
        indices = list(chain.from_iterable(gather_object([own_indices])))
        self.skipped += len(skipped)
        self.print(
            f"skipped steps {skipped}: their gradients are not finite; conversations {indices or 'not known'}"
        )
        self._write(step=last, skipped=skipped, conversations=indices)

    def _write(self, **row: Any) -> None:
        """Write a row of figures to metrics.jsonl and the trackers, on the main process alone."""
        if self.metrics:
            self.metrics.write(**row)

    def _decode(self, head: TrainableDrafter) -> Counts:
        """Decode the held-out prompts with a head, if the run decodes; all processes must call it.

        Returns:
            For each temperature, by its name in the metrics, [tokens, cycles] of each prompt. {} if the run does not
            decode.
        """
        return decode_once(
            self.accelerator,
            self.decoding,
            head,
            features=self.features,
            held_out=self.plan.validation,
        )

    @torch.no_grad()
    def _decode_start(self) -> None:
        """Decode the held-out prompts with the head of `train.init` before the first step, for `describe_gain`."""
        start = perf_counter()
        head = self._whole_head().eval()
        counts = self._decode(head)
        self.head.train()
        if counts:
            self.choice.start = counts
            self.decoding_seconds = perf_counter() - start
            self.print(f"before training: {describe_tau(counts)}, by the head of train.init")

    @torch.no_grad()
    def _validate(self, is_last: bool) -> None:
        """Compute figures on the held-out conversations; save the head in `last/` and, if it is the best, in `head/`.

        Args:
            is_last: Whether no step follows, so that a full disk must be an error.
        """
        # on-policy features look at the mode of this head, although the one with whole weights is validated
        self.head.eval()
        head = self._whole_head().eval()
        metrics = self._compute_figures(head)
        start = perf_counter()
        counts = self._decode(head)
        metrics |= {f"decoded_{name}": acceptance_length(pairs) for name, pairs in counts.items()}
        self.figures = metrics
        is_best = self.choice.add(self.step, counts, metrics) or self.settings.choose == "last"
        if self.decoding and counts:
            self.decoding_seconds += perf_counter() - start
            share = self.decoding_seconds / (perf_counter() - self.begun)
            hint = ": raise train.validate_every" if share > DECODING_SHARE else ""
            comparison = self.choice.describe(self.step, counts, metrics, self.decoding)
            self.print(f"{comparison}; decoding took {share:.1%} of the time{hint}")
        elif "tree/tau" in metrics:
            self.print(f"step {self.step}: {describe_predicted(metrics, TREES)}")
        if self.accelerator.is_main_process:
            # rows are named by the index of the step, self.step counts the steps done
            self._write(step=self.step - 1, validation=metrics)
            # a target that trains with its head is written once, after the last step
            if self.recipe.joint is None:
                self._save(head, is_best=is_best, is_last=is_last)
        # the others wait until the head is saved
        self.accelerator.wait_for_everyone()
        self.head.train()

    def _compute_figures(self, head: TrainableDrafter) -> dict[str, Any]:
        """Return the validation figures of a head on the held-out conversations, {} if none are held out.

        Each process computes a share of them, and all get the same figures.
        """
        if not self.plan.validation:
            return {}
        # a process without a share has no sums, and no process has them where nothing held out is supervised
        sums = reduce(add_sums, gather_object([self._sum_share(head)]))
        return figures(sums) if sums else {}

    def _sum_share(self, head: TrainableDrafter) -> dict[str, Tensor]:
        """Return the validation sums of a head over those held-out conversations that this process reads, on the host.

        They are by name, in float64; {} for a process that reads none.
        """
        accelerator = self.accelerator
        held_out = self.plan.validation
        # batches as large as a part of a step, so that validation fits into the memory in which training fits
        size = ceil(self.settings.batch_size / self.dealer.part_count)
        groups = [held_out[start : start + size] for start in range(0, len(held_out), size)]
        sums: dict[str, Tensor] = {}
        logged = self.note
        for first in range(0, len(groups), accelerator.num_processes):
            # the line of progress says what goes on while no step is done
            self.note = f"{logged}, validating: {first} of {len(groups)} batches".removeprefix(", ")
            # All processes must read equally often, or a sharded target would wait for ever. A process without a group
            # reads the last one, and does not use it.
            group_index = first + accelerator.process_index
            batch = self.dealer.load(groups[min(group_index, len(groups) - 1)], pin=self.pins)
            if group_index < len(groups):
                batch = batch.to(accelerator.device)
                with self._autocast():
                    batch_sums = head.validate(batch, self.target_head, TREES)
                on_host = {name: value.cpu().double() for name, value in batch_sums.items()}
                sums = add_sums(sums, on_host)
        self.note = logged
        return sums

    def _autocast(self) -> torch.autocast:
        """Return the context of matrix products in bf16; without effect if `train.dtype` is float32."""
        return torch.autocast(
            self.accelerator.device.type, torch.bfloat16, enabled=self.settings.dtype == "bfloat16"
        )

    def _save(self, head: TrainableDrafter, *, is_best: bool, is_last: bool) -> None:
        """Save the head in `last/` and, with `is_best`, in `head/`.

        A full disk is an error with `is_last`. Else it is only reported, as a later validation saves again.
        """
        names = ["last"]
        if is_best:
            names.append("head")
        provenance = {**self.provenance(), **self.features.identity}
        try:
            for name in names:
                save_head(self.out / name, head, self.recipe.dump(), provenance)
        except DISK_FAULTS as error:
            fault = f"the disk refused the head of step {self.step} in {self.out}: {error}. Make room on it"
            if is_last:
                raise ValueError(f"{fault}, and give the same command again") from error
            self.print(f"{fault}; training goes on")

    def _whole_head(self) -> TrainableDrafter:
        """Return the head with whole weights, on every process: itself, or its copy if the weights are sharded.

        All processes must call it together.
        """
        if self.sharded:
            self.mirror.load_state_dict(self.head.state_dict())
        if self.deepspeed:
            # ZeRO-3 gathers whole weights on the main process alone
            state = self.accelerator.get_state_dict(self.model)
            if self.accelerator.is_main_process:
                self.mirror.load_state_dict(state)
            for tensor in self.mirror.state_dict().values():
                dist.broadcast(tensor, 0)
        return self.mirror

    def provenance(self) -> dict[str, Any]:
        """Return what is saved with a head of its origin: code, versions, the run so far and its last validation."""
        return {
            "commit": self.commit,
            "eagle": __version__,
            **{name: version(name) for name in ("torch", "transformers", "accelerate")},
            "step": self.step,
            "tokens": self.plan.learned(self.step),
            "skipped_steps": self.skipped,
            "processes": self.accelerator.num_processes,
            "validation": self.figures,
        }

    def _identity(self) -> dict[str, Any]:
        """Return all settings and data that decide this run's result, which a run that resumes it must share.

        A checkpoint carries it.
        """
        return run_identity(self.recipe, self.features.identity, self.accelerator.num_processes)

    def _checkpoint(self, checkpoints: Checkpoints) -> None:
        """Write a checkpoint to one of the run's two folders; a full disk costs the checkpoint, not the run."""
        state = {
            "step": self.step,
            # the best head so far, by what it was chosen, and how many validations ago
            "best": asdict(self.choice),
            "skipped": self.skipped,
            "figures": self.figures,
            "run": self._identity(),
        }
        fault = checkpoints.write(self.step, state)
        if fault:
            self.print(
                f"no checkpoint at step {self.step}: {fault}. Training goes on; make room on the disk"
            )
            self._write(step=self.step - 1, checkpoint_failed=fault)

    def resume(self) -> None:
        """Load the newest complete checkpoint, else that of the shorter run `train.stem`, if there is one."""
        state = self.checkpoints.load(self._identity())
        if state is not None:
            self.choice = Choice.parse(state["best"])
        elif self.settings.stem is not None:
            state = load_stem(
                self.accelerator,
                self.head,
                self.settings,
                steps=self.plan.stem_steps,
                run=self._identity(),
            )
        if state is not None:
            self.step = state["step"]
            self.skipped = state["skipped"]
            # checkpoints of earlier releases do not have this key
            self.figures = state.get("figures", {})
        if self.step:
            self.print(f"going on after step {self.step} of {len(self.plan)}")


def _clip_gradients(weights: Sequence[Tensor], settings: TrainSection) -> Tensor:
    """Clip the gradients of these weights in place, by norm or by value, and return their norm before that.

    The weights may be sharded; then the norm is sharded, too.
    """
    if settings.clip_by == "norm":
        return torch.nn.utils.clip_grad_norm_(weights, settings.clip)
    norm = torch.nn.utils.get_total_norm(
        [weight.grad for weight in weights if weight.grad is not None]
    )
    torch.nn.utils.clip_grad_value_(weights, settings.clip)
    return norm
