"""Launch lines that would start one process, strangers, or plain DDP are refused in a sentence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from trained import RECIPE, ROOT, finished, free_port, launched

from eagle.launch import launch
from eagle.recipe import Recipe, TrainSection

pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="these launch lines fail so on CPUs alone")
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]
WORLD = """
import sys
from eagle.launch import launch
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
    assert done.returncode != 0 and f"error: {named}" in done.stdout and "joined" not in done.stdout, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("config", "kind"), [("ddp", "MULTI_CPU"), ("zero2", "DEEPSPEED"), ("zero3", "DEEPSPEED")])
def test_the_shipped_configs_start_what_they_say(config: str, kind: str, world: str) -> None:
    """Two processes that know each other, with the recipe's accumulation."""
    done = finished(launched(config, world, "accumulation=3"), seconds=60)
    assert done.returncode == 0 and done.stdout.count(f"joined 2 {kind} 3") == 2, done.stdout
    refused(finished(launched(config, world, "processes=3"), seconds=60), "asked for 3 processes; 2 were started")


@pytest.mark.slow
def test_one_process_is_one(world: str) -> None:
    """Without any launcher, and under `accelerate launch` without a word more."""
    for command in ([sys.executable, world], [*ACCELERATE, "--num_processes", "1", world]):
        assert "joined 1 NO 1" in finished(command, seconds=60).stdout
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", world]
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
    fsdp = ["--use_fsdp", "--fsdp_version", "2", "--num_processes", "2", "--main_process_port", str(free_port())]
    done = finished([*ACCELERATE, *fsdp, world], seconds=60)
    assert done.returncode != 0 and "joined" not in done.stdout
    assert "error: heads are not trained with FSDP" in done.stdout, done.stdout


@pytest.mark.slow
def test_zero_clips_by_norm_alone(world: str) -> None:
    """What DeepSpeed cannot do is said before anything begins."""
    refused(finished(launched("zero2", world, "clip_by=value"), seconds=60), "DeepSpeed clips by norm alone")


def test_a_world_of_another_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number in the environment, the number in the recipe, and what works together must be one."""
    with pytest.raises(ValueError, match="asked for 2 processes; 1 were started, 1 work together: launch with"):
        launch(TrainSection(out="nowhere", dtype="float32", processes=2))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="asked for 2 processes; 2 were started, 1 work together"):
        launch(TrainSection(out="nowhere", dtype="float32"))
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(ValueError, match=r"one was started .* `unset MASTER_ADDR`"):
        launch(TrainSection(out="nowhere", dtype="float32"))


def test_the_script_alone_is_the_tiny_recipe() -> None:
    """Its first argument may be left out; what is laid over is laid over that."""
    from recipes.tiny import demo

    assert Path(demo.RECIPE) == Path(RECIPE) and demo.ROOT == ROOT
    assert Recipe.load(demo.RECIPE, ["train.max_steps=2"]).train.max_steps == 2
