"""Launch lines that would start one process, strangers, or plain DDP are refused in a sentence."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from trained import RECIPE, finished, launched

from eagle.recipe import Recipe, TrainSection
from eagle.shipped import find_recipe
from eagle.training.launch import launch, refuse_other_engine

pytestmark = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="these launch lines fail so on CPUs alone"
)
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
WORLD = """
import sys
from eagle.training.launch import launch
from eagle.log import script
from eagle.recipe import TrainSection

def main(argv):
    changes = dict(word.split("=") for word in argv)
    accelerator = launch(TrainSection(out="nowhere", dtype="float32", **changes))
    kind = accelerator.distributed_type.value
    print(f"joined {accelerator.num_processes} {kind} {accelerator.gradient_accumulation_steps}")
    accelerator.end_training()

script(main)
"""


@pytest.fixture
def world(tmp_path: Path) -> str:
    """Return a script that joins its processes and does nothing else."""
    (tmp_path / "world.py").write_text(WORLD)
    return str(tmp_path / "world.py")


def assert_refused(command: list[str], *messages: str) -> None:
    """Check that a command fails with a message of ours before its processes join."""
    done = finished(command, seconds=60)
    assert done.returncode != 0, done.stdout
    assert "joined" not in done.stdout
    for message in messages:
        assert message in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("config", "kind"), [("ddp", "MULTI_CPU"), ("zero2", "DEEPSPEED")])
def test_the_shipped_configs_start_what_they_say(config: str, kind: str, world: str) -> None:
    """Two processes that know each other, with the recipe's accumulation."""
    done = finished(launched(config, world, "accumulation=3"), seconds=60)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(f"joined 2 {kind} 3") == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "joined"),
    [([sys.executable], "1 NO 1"), ([*ACCELERATE, "1"], "1 NO 1"), (TORCHRUN, "2 MULTI_CPU 1")],
)
def test_other_launchers_start_what_they_say(launcher: list[str], joined: str, world: str) -> None:
    """None, `accelerate launch` without a word more, and torchrun."""
    assert f"joined {joined}" in finished([*launcher, world], seconds=60).stdout


@pytest.mark.slow
def test_launch_lines_against_the_recipe_are_refused(world: str) -> None:
    """One process instead of two, strangers that write over each other, and what the engine does otherwise."""
    # accelerate starts one process here and says nothing
    one = [*ACCELERATE, "2", "--cpu", world]
    assert_refused(one, "error: more than one process was asked for and one", "unset MASTER_ADDR")
    # two processes that do not know each other
    fsdp = [*ACCELERATE, "2", "--use_fsdp", "--fsdp_version", "2", world]
    assert_refused(fsdp, "error: accelerate was given use_fsdp = true")
    # the recipe decides, and says fp32
    precision = [*ACCELERATE, "1", "--mixed_precision", "fp16", world]
    assert_refused(precision, "error: accelerate was given mixed_precision = fp16", "is float32")
    zero = launched("zero2", "--gradient_accumulation_steps", "4", world)
    assert_refused(zero, "error: accelerate was given gradient_accumulation_steps = 4")
    assert_refused(launched("zero2", world, "clip_by=value"), "error: DeepSpeed clips by norm")
    more = launched("ddp", world, "processes=3")
    assert_refused(more, "error: asked for 3 processes; 2 were started")


@pytest.mark.parametrize(
    ("variable", "value", "dtype"),
    [
        ("MIXED_PRECISION", "fp16", "bfloat16"),
        ("MIXED_PRECISION", "bf16", "float32"),
        ("DYNAMO_BACKEND", "INDUCTOR", "float32"),
        ("USE_MEGATRON_LM", "true", "float32"),
        ("USE_PARALLELISM_CONFIG", "true", "float32"),
    ],
)
def test_what_accelerate_is_told_against_the_recipe_is_refused(
    variable: str,
    value: str,
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By name, before anything begins."""
    # as `accelerate launch` hands on its options
    monkeypatch.setenv(f"ACCELERATE_{variable}", value)
    with pytest.raises(ValueError, match=f"accelerate was given {variable.lower()} = {value}"):
        launch(TrainSection.model_validate({"out": "nowhere", "dtype": dtype}))


AGREED: dict[str, Any] = {
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 2},
    "fp16": {"enabled": False},
}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
CLIP = TrainSection(out="nowhere", clip=0.5, accumulation=3)


@pytest.mark.parametrize(
    "engine", [{}, {"gradient_accumulation_steps": 3, "gradient_clipping": 0.5}]
)
def test_what_deepspeed_is_told_as_the_recipe_says_passes(engine: dict[str, Any]) -> None:
    """What agrees with the recipe, or leaves it to accelerate."""
    refuse_other_engine({**AGREED, **engine}, CLIP)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps = 4"),
        ({"gradient_clipping": 1.0}, "gradient_clipping = 1.0"),
        ({"zero_optimization": OFFLOAD}, "offload_optimizer_device = cpu"),
        ({"fp16": {"enabled": True}}, "fp16 in DeepSpeed's file"),
        ({"optimizer": {"type": "Adam"}}, "optimizer in DeepSpeed's file"),
    ],
)
def test_what_deepspeed_is_told_against_the_recipe_is_refused(
    engine: dict[str, Any], message: str
) -> None:
    """By name."""
    with pytest.raises(ValueError, match=f"accelerate was given {message}"):
        refuse_other_engine({**AGREED, **engine}, CLIP)


@pytest.mark.parametrize(
    ("variables", "processes", "message"),
    [
        ({}, 2, "asked for 2 processes; 1 were started, 1 work together"),
        ({"WORLD_SIZE": "2"}, None, "asked for 2 processes; 2 were started, 1 work together"),
        ({"MASTER_ADDR": "127.0.0.1"}, None, "`unset MASTER_ADDR`"),
    ],
)
def test_a_world_of_another_size_is_refused(
    variables: dict[str, str],
    processes: int | None,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The number in the environment, the number in the recipe, and what works together must be one."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        launch(TrainSection(out="nowhere", dtype="float32", processes=processes))


def test_the_script_alone_is_the_recipe_of_the_demo() -> None:
    """Its first argument may be left out; what is laid over is laid over that."""
    from recipes.tiny import demo

    assert find_recipe(demo.RECIPE).samefile(Path(RECIPE).with_name("demo.yaml"))
    assert Recipe.load(demo.RECIPE, ["train.max_steps=2"]).train.max_steps == 2
