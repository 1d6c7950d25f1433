"""Launch lines that would start one process, strangers, or plain DDP are refused in a sentence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from trained import RECIPE, finished, free_port, launched

from eagle.recipe import Recipe, TrainSection
from eagle.shipped import find_recipe
from eagle.training.launch import launch, refuse_other_engine

pytestmark = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="these launch lines fail so on CPUs alone"
)
ZERO3 = pytest.param("zero3", "DEEPSPEED", marks=pytest.mark.long)
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]
WORLD = """
import sys
from eagle.training.launch import launch
from eagle.log import script
from eagle.recipe import TrainSection
def main(argv):
    asked = TrainSection(out="nowhere", dtype="float32", **dict(word.split("=") for word in argv))
    accelerator = launch(asked)
    kind, parts = accelerator.distributed_type.value, accelerator.gradient_accumulation_steps
    print(f"joined {accelerator.num_processes} {kind} {parts}")
    accelerator.end_training()
script(main)
"""


@pytest.fixture
def world(tmp_path: Path) -> str:
    """A script that joins its processes and does nothing else."""
    (tmp_path / "world.py").write_text(WORLD)
    return str(tmp_path / "world.py")


def refused(done: subprocess.CompletedProcess[str], named: str) -> None:
    """It failed, with a message instead of a traceback of ours."""
    assert (
        done.returncode != 0 and f"error: {named}" in done.stdout and "joined" not in done.stdout
    ), done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("config", "kind"), [("ddp", "MULTI_CPU"), ("zero2", "DEEPSPEED"), ZERO3])
def test_the_shipped_configs_start_what_they_say(config: str, kind: str, world: str) -> None:
    """Two processes that know each other, with the recipe's accumulation."""
    done = finished(launched(config, world, "accumulation=3"), seconds=60)
    assert done.returncode == 0 and done.stdout.count(f"joined 2 {kind} 3") == 2, done.stdout
    refused(
        finished(launched(config, world, "processes=3"), seconds=60),
        "asked for 3 processes; 2 were started",
    )


@pytest.mark.slow
def test_one_process_is_one(world: str) -> None:
    """Without any launcher, and under `accelerate launch` without a word more."""
    for command in ([sys.executable, world], [*ACCELERATE, "--num_processes", "1", world]):
        assert "joined 1 NO 1" in finished(command, seconds=60).stdout
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        world,
    ]
    assert finished(torchrun, seconds=60).stdout.count("joined 2 MULTI_CPU") == 2


@pytest.mark.slow
def test_two_processes_of_which_one_starts(world: str) -> None:
    """`--cpu --num_processes 2` starts one and says nothing; we do."""
    done = finished([*ACCELERATE, "--cpu", "--num_processes", "2", world], seconds=60)
    refused(done, "more than one process was asked for and one was started")
    assert "ddp.yaml" in done.stdout and "unset MASTER_ADDR" in done.stdout


@pytest.mark.slow
def test_fsdp_is_refused(world: str) -> None:
    """Its processes would be strangers that write over each other."""
    fsdp = [
        "--use_fsdp",
        "--fsdp_version",
        "2",
        "--num_processes",
        "2",
        "--main_process_port",
        str(free_port()),
    ]
    done = finished([*ACCELERATE, *fsdp, world], seconds=60)
    assert done.returncode != 0 and "joined" not in done.stdout
    assert "error: accelerate was given use_fsdp = true" in done.stdout, done.stdout


@pytest.mark.slow
def test_precision_of_the_launcher_is_refused(world: str) -> None:
    """`accelerate launch --mixed_precision fp16` and a recipe in fp32; DeepSpeed's settings as well."""
    done = finished(
        [*ACCELERATE, "--num_processes", "1", "--mixed_precision", "fp16", world], seconds=60
    )
    refused(done, "accelerate was given mixed_precision = fp16")
    assert "train.dtype is float32" in done.stdout
    zero = launched("zero2", "--gradient_accumulation_steps", "4", world)
    refused(finished(zero, seconds=60), "accelerate was given gradient_accumulation_steps = 4")


@pytest.mark.parametrize(
    ("variable", "value", "dtype", "named"),
    [
        ("MIXED_PRECISION", "fp16", "bfloat16", "mixed_precision = fp16"),
        ("MIXED_PRECISION", "fp8", "bfloat16", "mixed_precision = fp8"),
        ("MIXED_PRECISION", "bf16", "float32", "mixed_precision = bf16"),
        ("DYNAMO_BACKEND", "INDUCTOR", "float32", "dynamo_backend = INDUCTOR"),
        ("USE_FSDP", "true", "float32", "use_fsdp = true"),
        ("USE_MEGATRON_LM", "true", "float32", "use_megatron_lm = true"),
        ("USE_PARALLELISM_CONFIG", "true", "float32", "use_parallelism_config = true"),
    ],
)
def test_what_accelerate_is_told_against_the_recipe_is_refused(
    variable: str, value: str, dtype: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name, before anything begins."""
    monkeypatch.setenv(f"ACCELERATE_{variable}", value)
    with pytest.raises(
        ValueError, match=f"accelerate was given {named}, which the recipe does not follow"
    ):
        launch(TrainSection.model_validate({"out": "nowhere", "dtype": dtype}))


@pytest.mark.parametrize(
    ("engine", "named"),
    [
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps = 4"),
        ({"gradient_clipping": 1.0}, "gradient_clipping = 1.0"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            "offload_optimizer_device = cpu",
        ),
        (
            {"zero_optimization": {"offload_param": {"device": "nvme"}}},
            "offload_param_device = nvme",
        ),
        ({"fp16": {"enabled": True}}, "fp16 in DeepSpeed's file"),
        ({"optimizer": {"type": "Adam"}}, "optimizer in DeepSpeed's file"),
    ],
)
def test_what_deepspeed_is_told_against_the_recipe_is_refused(
    engine: dict[str, Any], named: str
) -> None:
    """By name; what agrees with the recipe, or leaves it to accelerate, passes."""
    settings = TrainSection(out="nowhere", clip=0.5, accumulation=3)
    agreed = {
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": 2},
        "fp16": {"enabled": False},
    }
    refuse_other_engine(agreed, settings)
    refuse_other_engine(
        {**agreed, "gradient_accumulation_steps": 3, "gradient_clipping": 0.5}, settings
    )
    with pytest.raises(ValueError, match=f"accelerate was given {named}"):
        refuse_other_engine({**agreed, **engine}, settings)


@pytest.mark.slow
def test_zero_clips_by_norm_alone(world: str) -> None:
    """What DeepSpeed cannot do is said before anything begins."""
    refused(
        finished(launched("zero2", world, "clip_by=value"), seconds=60),
        "DeepSpeed clips by norm alone",
    )


def test_a_world_of_another_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number in the environment, the number in the recipe, and what works together must be one."""
    with pytest.raises(
        ValueError, match="asked for 2 processes; 1 were started, 1 work together: launch with"
    ):
        launch(TrainSection(out="nowhere", dtype="float32", processes=2))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="asked for 2 processes; 2 were started, 1 work together"):
        launch(TrainSection(out="nowhere", dtype="float32"))
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(ValueError, match=r"one was started .* `unset MASTER_ADDR`"):
        launch(TrainSection(out="nowhere", dtype="float32"))


def test_the_script_alone_is_the_recipe_of_the_demo() -> None:
    """Its first argument may be left out; what is laid over is laid over that."""
    from recipes.tiny import demo

    assert find_recipe(demo.RECIPE).samefile(Path(RECIPE).with_name("demo.yaml"))
    assert Recipe.load(demo.RECIPE, ["train.max_steps=2"]).train.max_steps == 2
