"""The processes of a run, refused where they are not those that were asked for."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
from accelerate import Accelerator, DistributedType, InitProcessGroupKwargs

from eagle.recipe import TrainSection

HOW = (
    "launch with `accelerate launch --config_file recipes/accelerate/ddp.yaml --num_processes N`, or by "
    "`torchrun --standalone --nproc_per_node N`"
)


def launch(settings: TrainSection) -> Accelerator:
    """Joins the processes that were started, on their own devices."""
    cpu, zero = not torch.accelerator.is_available(), os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    launched = "LOCAL_RANK" in os.environ
    # a rank may read or decode for long while the others wait
    group = InitProcessGroupKwargs(backend="gloo" if cpu else None, timeout=timedelta(days=1))
    accelerator = Accelerator(
        cpu=cpu and not zero,  # on a CPU each of two mistakes costs the ranks or ZeRO, in silence
        mixed_precision="bf16" if settings.dtype == "bfloat16" else "no",
        gradient_accumulation_steps=settings.accumulation,
        kwargs_handlers=[group] if launched else [],
    )
    _check(accelerator, settings, zero)
    if zero:
        plugin = accelerator.state.deepspeed_plugin
        plugin.dschf = None  # through which transformers would split the target too, and load it without weights
        engine = plugin.deepspeed_config
        engine.update(train_micro_batch_size_per_gpu=1, gradient_clipping=settings.clip)
        engine["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True  # at each validation
    return accelerator


def _check(accelerator: Accelerator, settings: TrainSection, zero: bool) -> None:
    """Launchers start one process, or several strangers, where a flag is missing; neither would be noticed."""
    got, kind = accelerator.num_processes, accelerator.distributed_type
    if "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ:
        raise ValueError(
            "more than one process was asked for and one was started (MASTER_ADDR is set, WORLD_SIZE is not): "
            f"{HOW}; if one process is what you want, `unset MASTER_ADDR`"
        )
    started = int(os.environ.get("WORLD_SIZE", "1"))
    asked = settings.processes or started
    if not got == started == asked:
        raise ValueError(f"asked for {asked} processes; {started} were started, {got} work together: {HOW}")
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        raise ValueError("heads are not trained with FSDP: use recipes/accelerate/ddp.yaml, zero2.yaml or zero3.yaml")
    if zero != (kind == DistributedType.DEEPSPEED) or (got > 1 and kind == DistributedType.NO):
        raise ValueError(f"{'DeepSpeed' if zero else 'DDP'} was asked for on {got} processes, accelerate gives {kind}")
    if zero and settings.clip_by == "value":
        raise ValueError("DeepSpeed clips by norm alone: set train.clip_by=norm, or use recipes/accelerate/ddp.yaml")
