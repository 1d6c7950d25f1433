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
from eagle.interrupts import MESSAGES, STOPPED_BY_SIGINT, children_start_with_sigint_blocked
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
    """Return the accelerator of this process, with mixed precision, accumulation and DeepSpeed set by the recipe.

    It refuses launches whose settings contradict the recipe, before anything is loaded.
    """
    _refuse_other_settings(settings)
    check_trackers(settings)
    cpu = not torch.accelerator.is_available()
    zero = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    # every launcher (accelerate, torchrun) sets it; without one there is no process group
    launched = "LOCAL_RANK" in os.environ
    bf16 = settings.dtype == "bfloat16"
    # a rank may load or decode for hours while the others wait, and the default timeout is minutes
    group = InitProcessGroupKwargs(backend="gloo" if cpu else None, timeout=timedelta(days=1))
    if zero:
        if find_spec("deepspeed") is None:
            raise ValueError(NO_DEEPSPEED)
        _silence_deepspeed_warnings(cpu)
    # with DeepSpeed autocast is set by its own options: "bf16" here would hold the weights in bf16, too
    mixed_precision = "bf16" if bf16 and not zero else "no"
    accelerator = Accelerator(
        # on a CPU, DDP without cpu=True would silently drop the ranks, and DeepSpeed with cpu=True would drop ZeRO
        cpu=cpu and not zero,
        mixed_precision=mixed_precision,
        gradient_accumulation_steps=settings.accumulation,
        kwargs_handlers=[group] if launched else [],
    )
    accelerator.ddp_handler = _DataParallel() if launched else None
    _check_processes(accelerator, settings, zero)
    if zero:
        _configure_deepspeed(accelerator, settings)
    return accelerator


def _configure_deepspeed(accelerator: Accelerator, settings: TrainSection) -> None:
    """Set the options of the DeepSpeed engine by the recipe's section `train`; refuse a file that contradicts it."""
    plugin = accelerator.state.deepspeed_plugin
    # the handle by which transformers learns of ZeRO: it would split the target as well, and load it without weights
    plugin.dschf = None
    engine = plugin.deepspeed_config
    refuse_other_engine(engine, settings)
    # accelerate would read the micro-batch size from a prepared dataloader, but batches come from a `Dealer`
    engine.update(train_micro_batch_size_per_gpu=1, gradient_clipping=settings.clip)
    # matrix products in bf16, weights and the sums of their gradients in fp32: as without DeepSpeed
    engine["torch_autocast"] = {
        "enabled": settings.dtype == "bfloat16",
        "dtype": "bfloat16",
        "lower_precision_safe_modules": [],
    }
    # validation needs whole weights
    engine["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True


def launch_processes(options: list[str], program: list[str]) -> None:
    """Run a program on several processes by accelerate's launcher, and report a failure once, without a traceback.

    Args:
        options: Options of `accelerate launch`.
        program: The program and its arguments.
    """
    args = launch_command_parser().parse_args([*options, *program])
    # the launcher would log the failure again that its processes have reported
    logging.disable()
    if not torch.accelerator.is_available():
        # accelerate imports DeepSpeed, which warns of a CPU otherwise
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with TemporaryDirectory() as folder:
        # each process leaves the sentence that ends it in this folder, in a file named by its rank
        os.environ[MESSAGES] = folder
        try:
            with children_start_with_sigint_blocked():
                launch_command(args)
        except ImportError as error:
            # accelerate raises this before it starts a process, and only a missing DeepSpeed is explained
            if "deepspeed" not in str(error).lower() or find_spec("deepspeed") is not None:
                raise
            raise ValueError(NO_DEEPSPEED) from error
        except ChildFailedError as failed:
            files = sorted(Path(folder).iterdir(), key=lambda path: int(path.name))
            messages = [path.read_text() for path in files]
            exit_like_first_failure(failed.get_first_failure(), messages)
        except SignalException as ended:
            # Ctrl-C came before a process could say from which checkpoint the run goes on, so this process says it
            if ended.sigval == signal.SIGINT and not any(Path(folder).iterdir()):
                raise KeyboardInterrupt from None
            # the status that shells give to a program ended by a signal
            sys.exit(128 + ended.sigval)


def exit_like_first_failure(failure: tuple[int, ProcessFailure], messages: list[str]) -> None:
    """End this process, the launcher, with the message or the status of the process that failed first.

    Args:
        failure: The rank that failed first, and how.
        messages: The sentences that processes have left. Equal ones are told once; without any, the status is told.
    """
    rank, process = failure
    status = process.exitcode
    # the process has told the user already that it was stopped
    if status == STOPPED_BY_SIGINT:
        sys.exit(status)
    if messages:
        raise ValueError("\n".join(dict.fromkeys(messages)))
    # a negative status is minus the number of a signal
    if status < 0:
        hint = "; so a system ends what takes too much memory" if status == -signal.SIGKILL else ""
        raise ValueError(f"process {rank} was ended by {signal.Signals(-status).name}{hint}")
    print(f"error: process {rank} failed: what it printed says why", file=sys.stderr)
    sys.exit(status)


def resolve_dtype(recipe: Recipe) -> Recipe:
    """Return the recipe with `train.dtype: auto` replaced by the fastest dtype of this device.

    It also refuses decoding during training with a sharded target: only the main process decodes, and a forward of a
    sharded target needs all processes.
    """
    if recipe.train.decode and recipe.features.shard_target:
        raise ValueError(
            "a sharded target cannot decode while a head is trained: set train.decode=0"
        )
    if recipe.train.dtype != "auto":
        return recipe
    dtype = str(fastest_dtype(best_device())).removeprefix("torch.")
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"dtype": dtype})})


@contextmanager
def isolated_accelerate_state() -> Iterator[None]:
    """A context at whose end accelerate's global state is forgotten.

    Else the next run in this process could not launch with other settings, such as another precision.
    """
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


class _DataParallel(DistributedDataParallelKwargs):
    """The arguments of DDP: do not send buffers, which are constants, and share memory of gradients and messages."""

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments by their names in this version of torch, as newer ones warn of the old name."""
        parameters = signature(DistributedDataParallel).parameters
        name = "broadcast_buffers"
        if "forward_sync_buffers" in parameters:
            name = "forward_sync_buffers"
        return {name: False, "gradient_as_bucket_view": True}


def _silence_deepspeed_warnings(cpu: bool) -> None:
    """Silence two warnings of DeepSpeed: that it runs on a CPU, as was asked, and of functions renamed in torch."""
    if cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)


def _refuse_other_settings(settings: TrainSection) -> None:
    """Refuse settings of accelerate that contradict the recipe, which decides how a head is trained.

    `accelerate launch` passes its config and options to the processes in ACCELERATE_ variables.
    """
    precision = "bf16" if settings.dtype == "bfloat16" else "no"
    # by variable: the values that agree with the recipe, and the reason for a refusal of all others
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
    """Refuse DeepSpeed's configuration `engine`, given in a file, if it contradicts the recipe."""
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
        # a section without the key `enabled` is switched on by being there
        options = engine.get(section)
        enabled = options.get("enabled", True) if options else None
        _refuse_unless(
            f"{section} in DeepSpeed's file",
            enabled,
            {"false"},
            "that is the recipe's `train` section",
        )


def _refuse_unless(name: str, got: object, accepted: set[str], reason: str) -> None:
    """Raise if a setting was given (not None) and its value is not accepted; `reason` says what the recipe has.

    A launcher's own config may set what the recipe decides.
    """
    if got is not None and str(got).lower() not in accepted:
        raise ValueError(
            f"accelerate was given {name} = {got}, which the recipe does not follow: {reason}. Leave it out of the "
            "launch line, and of accelerate's config file"
        )


def _check_processes(accelerator: Accelerator, settings: TrainSection, zero: bool) -> None:
    """Refuse too few or unconnected processes, which launchers start silently if a flag is missing.

    Args:
        accelerator: Of this process, already joined with the others.
        settings: Of the recipe.
        zero: Whether the launcher asked for DeepSpeed.
    """
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
    """Return whether every process holds only a shard of the head's weights, by FSDP2 or DeepSpeed's ZeRO-3."""
    engine = accelerator.state.deepspeed_plugin
    return settings.shard_head or (engine is not None and engine.zero_stage == 3)


def shard_head(head: nn.Module) -> None:
    """Spread a head's weights over all processes; each gathers them for a step and keeps its share of the gradients.

    The head is one FSDP unit, because drafters read weights outside of their modules' forwards. `state_dict` gathers
    whole tensors, so all processes must call it together; `load_state_dict` takes whole ones. FSDP is torch's fully
    sharded data parallelism.
    """
    device = next(head.parameters()).device
    fully_shard(head, mesh=init_device_mesh(device.type, (dist.get_world_size(),)))
    head.register_state_dict_post_hook(_gather_weights)
    head.register_load_state_dict_pre_hook(_split_weights)


def prepare_sharded(
    accelerator: Any, head: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[Any, Any]:
    """Return a sharded head in the accelerator's precision, without DDP, and its optimizer with whole state dicts.

    FSDP2 has split the weights over the processes.
    """
    optimizer.register_state_dict_post_hook(lambda _, state: tree_map(gather, state))
    optimizer.register_load_state_dict_post_hook(_split_moments)
    # in "evaluation mode" accelerate sets the precision and does not wrap the head in DDP
    model = accelerator.prepare_model(head, evaluation_mode=True)
    return model, accelerator.prepare_optimizer(optimizer)


def gather(value: Any) -> Any:
    """Return a sharded tensor as a whole tensor, and any other value unchanged. All processes must call it.

    State dicts that are saved hold whole tensors.
    """
    return value.full_tensor() if isinstance(value, DTensor) else value


def _gather_weights(head: nn.Module, state: dict[str, Any], *_: Any) -> None:
    """Replace the sharded weights of a head's state dict by whole ones, in place: a hook of `state_dict`.

    All processes must take the state dict together, since each gives its share.
    """
    for name, tensor in state.items():
        state[name] = gather(tensor)


def _split_weights(head: nn.Module, state: dict[str, Any], *_: Any) -> None:
    """Replace the whole weights of a state dict by this process's shards, in place: a hook before the head loads it.

    Further arguments of the hook are not read.
    """
    weights = dict(head.named_parameters())
    for name, tensor in state.items():
        if name in weights:
            state[name] = _split_like(tensor, weights[name])


def _split_moments(optimizer: torch.optim.Optimizer) -> None:
    """Replace the whole moments (Adam's running means) that an optimizer has loaded by this process's shards.

    It is a hook of the optimizer's `load_state_dict`.
    """
    for weight, moments in optimizer.state.items():
        for name, moment in moments.items():
            # the optimizer's count of steps is no moment and stays whole
            if moment.shape == weight.shape:
                moments[name] = _split_like(moment, weight)


def _split_like(whole: Tensor, weight: Tensor) -> Tensor:
    """Return this process's shard of a whole tensor, split like a weight of the same shape (FSDP2)."""
    # an unsharded weight, or a tensor that is split already
    if not isinstance(weight, DTensor) or isinstance(whole, DTensor):
        return whole
    # every process has the whole tensor: without a source rank each takes its own share and nothing is sent
    return distribute_tensor(
        whole.to(weight.device), weight.device_mesh, weight.placements, src_data_rank=None
    )
