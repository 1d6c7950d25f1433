"""Join the processes of a run and spread a head over them; refuse launch settings that contradict the recipe."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from warnings import filterwarnings

import torch
import torch.distributed as dist
from accelerate import (
    Accelerator,
    DistributedDataParallelKwargs,
    DistributedType,
    InitProcessGroupKwargs,
)
from accelerate.commands.launch import launch_command, launch_command_parser
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from eagle.device import best_device, fastest_dtype
from eagle.log import MESSAGES, STOPPED_BY_SIGINT
from eagle.recipe import Recipe, TrainSection
from eagle.training.trackers import check_trackers

LAUNCH_HINT = (
    "launch with `eagle train RECIPE --processes N`, which is `accelerate launch --config_file "
    "recipes/accelerate/ddp.yaml --num_processes N recipes/train_eagle.py RECIPE`, or by torchrun"
)
NO_DEEPSPEED = (
    "this launch asks for ZeRO, which needs the package deepspeed, and it is not installed here: "
    "`pip install deepspeed`, or launch with DDP (`--config_file ddp`)"
)
SHARDED = "heads are not trained with it: use recipes/accelerate/ddp.yaml, zero2.yaml or zero3.yaml"
FSDP = "heads are sharded by train.shard_head=true, launched with recipes/accelerate/ddp.yaml"


def launch(settings: TrainSection) -> Accelerator:
    """Return the accelerator of this process, with mixed precision, accumulation and DeepSpeed set by the recipe."""
    _refuse_other_settings(settings)
    check_trackers(settings)
    cpu = not torch.accelerator.is_available()
    zero = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    launched = "LOCAL_RANK" in os.environ
    bf16 = settings.dtype == "bfloat16"
    # a rank may load or decode for long while the others wait
    group = InitProcessGroupKwargs(backend="gloo" if cpu else None, timeout=timedelta(days=1))
    if zero:
        if find_spec("deepspeed") is None:
            raise ValueError(NO_DEEPSPEED)
        _quiet_deepspeed(cpu)
    accelerator = Accelerator(
        cpu=cpu and not zero,  # either mistake on a CPU would silently drop the ranks or ZeRO
        mixed_precision="bf16"
        if bf16 and not zero
        else "no",  # DeepSpeed would hold the weights in bf16 too
        gradient_accumulation_steps=settings.accumulation,
        kwargs_handlers=[group] if launched else [],
    )
    accelerator.ddp_handler = _DataParallel() if launched else None
    _check_processes(accelerator, settings, zero)
    if zero:
        _configure_deepspeed(accelerator, settings)
    return accelerator


def _configure_deepspeed(accelerator: Accelerator, settings: TrainSection) -> None:
    """Set the options of the DeepSpeed engine by the recipe."""
    plugin = accelerator.state.deepspeed_plugin
    # else transformers splits the target too, and loads it without weights
    plugin.dschf = None
    engine = plugin.deepspeed_config
    refuse_other_engine(engine, settings)
    engine.update(train_micro_batch_size_per_gpu=1, gradient_clipping=settings.clip)
    # products in bf16, weights and the sums of their gradients in fp32: as without DeepSpeed
    engine["torch_autocast"] = {
        "enabled": settings.dtype == "bfloat16",
        "dtype": "bfloat16",
        "lower_precision_safe_modules": [],
    }
    # validation needs whole weights
    engine["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True


def launch_processes(options: list[str], program: list[str]) -> None:
    """Run a program on several processes by accelerate's launcher; how it ends is told once, without a traceback."""
    args = launch_command_parser().parse_args([*options, *program])
    # launchers would add lines to what their processes have said
    logging.disable()
    if not torch.accelerator.is_available():
        # accelerate imports DeepSpeed, which warns of a CPU otherwise
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with TemporaryDirectory() as folder:
        os.environ[MESSAGES] = folder
        try:
            launch_command(args)
        except ImportError as error:
            # accelerate raises it before it starts a process
            if "deepspeed" not in str(error).lower() or find_spec("deepspeed") is not None:
                raise
            raise ValueError(NO_DEEPSPEED) from error
        except ChildFailedError as failed:
            files = sorted(Path(folder).iterdir(), key=lambda path: int(path.name))
            end_as_the_first(failed.get_first_failure(), [path.read_text() for path in files])
        except SignalException as ended:
            if ended.sigval == signal.SIGINT and not any(Path(folder).iterdir()):
                # before the first process could tell what is kept
                raise KeyboardInterrupt from None
            sys.exit(128 + ended.sigval)


def end_as_the_first(failure: tuple[int, ProcessFailure], messages: list[str]) -> None:
    """End this process as that which failed first.

    Args:
        failure: The rank that failed first, and how.
        messages: The sentences that processes have left. Each is told once; without any the status says it.
    """
    rank, process = failure
    status = process.exitcode
    if status == STOPPED_BY_SIGINT:
        sys.exit(status)
    if messages:
        raise ValueError("\n".join(dict.fromkeys(messages)))
    if status < 0:
        hint = "; so a system ends what takes too much memory" if status == -signal.SIGKILL else ""
        raise ValueError(f"process {rank} was ended by {signal.Signals(-status).name}{hint}")
    print(f"error: process {rank} failed: what it printed says why", file=sys.stderr)
    sys.exit(status)


def resolve_dtype(recipe: Recipe) -> Recipe:
    """Return the recipe with `train.dtype: auto` replaced by the dtype for this device."""
    if recipe.train.decode and recipe.features.shard_target:
        raise ValueError(
            "a sharded target cannot decode while a head is trained: set train.decode=0"
        )
    if recipe.train.dtype != "auto":
        return recipe
    dtype = str(fastest_dtype(best_device())).removeprefix("torch.")
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"dtype": dtype})})


@contextmanager
def own_state() -> Iterator[None]:
    """A context after whose end another run in this process may launch with other settings, as another precision."""
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


class _DataParallel(DistributedDataParallelKwargs):
    """How DDP runs: without sending buffers, which are constants, and with gradients as views of what is sent."""

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments by the names that this torch has: of the old one newer versions warn."""
        known = signature(DistributedDataParallel).parameters
        name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        return {name: False, "gradient_as_bucket_view": True}


def _quiet_deepspeed(cpu: bool) -> None:
    """Spare the user warnings that DeepSpeed causes: of a CPU that is meant, and of names that torch has replaced."""
    if cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)


def _refuse_other_settings(settings: TrainSection) -> None:
    """Refuse accelerate settings that contradict the recipe, which decides how a head is trained."""
    precision = "bf16" if settings.dtype == "bfloat16" else "no"
    accepted = {
        "MIXED_PRECISION": (
            {"no", precision},
            f"train.dtype is {settings.dtype}, of auto, float32 and bfloat16",
        ),
        "DYNAMO_BACKEND": (
            {"no"},
            "heads are not compiled as a whole: train.compile=true compiles their parts",
        ),
        "USE_FSDP": ({"false"}, FSDP),
        "USE_MEGATRON_LM": ({"false"}, SHARDED),
        "USE_PARALLELISM_CONFIG": ({"false"}, SHARDED),
    }
    for variable, (values, reason) in accepted.items():
        _refuse_unless(variable.lower(), os.environ.get(f"ACCELERATE_{variable}"), values, reason)


def refuse_other_engine(engine: dict[str, Any], settings: TrainSection) -> None:
    """Refuse a DeepSpeed configuration that contradicts the recipe."""
    accumulation = engine.get("gradient_accumulation_steps")
    _refuse_unless(
        "gradient_accumulation_steps",
        accumulation,
        {"auto", str(settings.accumulation)},
        f"train.accumulation is {settings.accumulation}",
    )
    clipping = engine.get("gradient_clipping")
    _refuse_unless(
        "gradient_clipping",
        clipping,
        {"auto", str(settings.clip)},
        f"train.clip is {settings.clip}",
    )
    for kind in ("optimizer", "param"):
        offload = engine["zero_optimization"].get(f"offload_{kind}") or {}
        _refuse_unless(
            f"offload_{kind}_device",
            offload.get("device"),
            {"none"},
            "heads are trained without offloading",
        )
    for section in ("fp16", "bf16", "optimizer", "scheduler"):
        options = engine.get(section)
        enabled = options.get("enabled", True) if options else None
        _refuse_unless(
            f"{section} in DeepSpeed's file",
            enabled,
            {"false"},
            "that is the recipe's `train` section",
        )


def _refuse_unless(name: str, got: object, accepted: set[str], reason: str) -> None:
    """Refuse a setting that is given and contradicts the recipe."""
    if got is not None and str(got).lower() not in accepted:
        raise ValueError(
            f"accelerate was given {name} = {got}, which the recipe does not follow: {reason}. Leave it out of the "
            "launch line, and of accelerate's config file"
        )


def _check_processes(accelerator: Accelerator, settings: TrainSection, zero: bool) -> None:
    """Refuse too few or unconnected processes, which launchers start silently if a flag is missing."""
    got = accelerator.num_processes
    kind = accelerator.distributed_type
    if "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ:
        raise ValueError(
            "more than one process was asked for and one was started (MASTER_ADDR is set, WORLD_SIZE is not): "
            f"{LAUNCH_HINT}; if one process is what you want, `unset MASTER_ADDR`"
        )
    started = int(os.environ.get("WORLD_SIZE", "1"))
    expected = settings.processes or started
    if not got == started == expected:
        raise ValueError(
            f"asked for {expected} processes; {started} were started, {got} work together: {LAUNCH_HINT}"
        )
    if zero != (kind == DistributedType.DEEPSPEED) or (got > 1 and kind == DistributedType.NO):
        raise ValueError(
            f"{'DeepSpeed' if zero else 'DDP'} was asked for on {got} processes, accelerate gives {kind}"
        )
    if zero and settings.clip_by == "value":
        raise ValueError(
            "DeepSpeed clips by norm alone: set train.clip_by=norm, or use recipes/accelerate/ddp.yaml"
        )
    if zero and settings.shard_head:
        raise ValueError(
            "DeepSpeed splits the head itself: leave train.shard_head out, or use ddp.yaml with it"
        )


# -- a head that is spread over all processes (FSDP2); its state dicts are whole ---------------------------------------


def splits_weights(accelerator: Accelerator, settings: TrainSection) -> bool:
    """Return whether every process holds a share of the head's weights, as under ZeRO-3."""
    engine = accelerator.state.deepspeed_plugin
    return settings.shard_head or (engine is not None and engine.zero_stage == 3)


def shard_head(head: nn.Module) -> None:
    """Spread a head's weights over all processes; each gathers them for a step and keeps its share of the gradients.

    The head is one unit, as drafters read weights outside of their modules' forwards. `state_dict` gathers whole
    tensors, so all processes must call it together; `load_state_dict` takes whole ones.
    """
    device = next(head.parameters()).device
    fully_shard(head, mesh=init_device_mesh(device.type, (dist.get_world_size(),)))
    head.register_state_dict_post_hook(_gather_weights)
    head.register_load_state_dict_pre_hook(_split_weights)


def prepare_sharded(
    accelerator: Any, head: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[Any, Any]:
    """Return a sharded head in the accelerator's precision, without DDP, and its optimizer with whole state dicts."""
    optimizer.register_state_dict_post_hook(lambda _, state: tree_map(gather, state))
    optimizer.register_load_state_dict_post_hook(_split_moments)
    return accelerator.prepare_model(head, evaluation_mode=True), accelerator.prepare_optimizer(
        optimizer
    )


def gather(value: Any) -> Any:
    """Return the whole of a sharded tensor, and anything else as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def _gather_weights(head: nn.Module, state: dict[str, Any], *_: Any) -> None:
    for name, tensor in state.items():
        state[name] = gather(tensor)


def _split_weights(head: nn.Module, state: dict[str, Any], *_: Any) -> None:
    weights = dict(head.named_parameters())
    for name, tensor in state.items():
        if name in weights:
            state[name] = _split_like(tensor, weights[name])


def _split_moments(optimizer: torch.optim.Optimizer) -> None:
    for weight, moments in optimizer.state.items():
        for name, moment in moments.items():
            if moment.shape == weight.shape:
                # the number of steps, which is no moment, stays whole
                moments[name] = _split_like(moment, weight)


def _split_like(whole: Tensor, weight: Tensor) -> Tensor:
    """Return this process's share of a tensor, split as a weight is."""
    if not isinstance(weight, DTensor) or isinstance(whole, DTensor):
        return whole
    return distribute_tensor(
        whole.to(weight.device), weight.device_mesh, weight.placements, src_data_rank=None
    )
