"""Several processes: DDP, ZeRO-2 and ZeRO-3, features of a target that is spread over them, two hosts, faults."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from trained import (
    ROOT,
    apart,
    equal,
    finished,
    free_port,
    launched,
    poison,
    prepared,
    rows,
    run,
    weights,
)

from eagle.data.store import FeatureStore

pytestmark = pytest.mark.slow
ZERO2, ZERO3 = (
    pytest.param(name, marks=pytest.mark.long) for name in ("zero2", "zero3")
)  # a minute each
SCRIPT = str(ROOT / "recipes/train_eagle.py")
WATCHED = str(ROOT / "tests/each_rank.py")
TOLERANCE = 5e-6  # of weights of size 0.1, after 12 steps of 1e-3: sums taken in another order
EVERY = (
    "train.checkpoint_every=3",
    "train.validation=0.2",
    "train.decode=3",
    "eval.max_new_tokens=8",
)


@pytest.fixture(scope="module")
def command(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The recipe over a store of its own."""
    return prepared(tiny_target_dir, tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def alone(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    return run(command, tmp_path_factory.mktemp("alone") / "run", *EVERY)


@pytest.fixture(scope="module")
def three_steps(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of one process."""
    return run(command, tmp_path_factory.mktemp("alone") / "run", "train.max_steps=3")


@pytest.mark.parametrize("config", ["ddp", ZERO2, ZERO3])
def test_two_processes_are_one_on_the_same_steps(
    config: str, command: list[str], alone: Path, tmp_path: Path
) -> None:
    """Losses, validation and weights agree; stopped after a checkpoint and gone on with, the bytes are equal."""
    asked = [SCRIPT, *command, f"train.out={tmp_path / 'run'}", *EVERY]
    done = finished(launched(config, *asked))
    assert done.returncode == 0, done.stdout
    assert apart(weights(tmp_path / "run"), weights(alone)) < TOLERANCE
    for ours, other in zip(rows(tmp_path / "run"), rows(alone), strict=True):
        assert ours.keys() == other.keys() and ours["step"] == other["step"]
        assert ours.get("total", 0) == pytest.approx(other.get("total", 0), rel=1e-4)
        assert ours.get("gradient_norm", 0) == pytest.approx(
            other.get("gradient_norm", 0), rel=1e-3
        )
        assert ours.get("validation", {}) == pytest.approx(other.get("validation", {}), rel=1e-4)
    shutil.copytree(tmp_path / "run", tmp_path / "first")
    (tmp_path / "run/checkpoints/step-10/complete.json").unlink()
    done = finished(launched(config, *asked))
    assert done.returncode == 0 and "going on after step 9 of 10" in done.stdout, done.stdout
    assert equal(tmp_path / "run", tmp_path / "first") and rows(tmp_path / "run") == rows(
        tmp_path / "first"
    )
    done = finished([sys.executable, *asked])
    if config == "ddp":  # whose checkpoints any number of processes reads
        assert done.returncode == 0 and "holds this run, complete" in done.stdout, done.stdout
    else:
        assert (
            done.returncode == 1
            and "was written by DeepSpeed on 2 processes, this is DDP on 1 process" in done.stdout
        )
        assert "Traceback" not in done.stdout


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("config", ["ddp", ZERO2])
def test_all_ranks_hold_the_same_weights(
    config: str, accumulation: int, command: list[str], three_steps: Path, tmp_path: Path
) -> None:
    """Bit for bit after three steps, and what is saved is what they hold."""
    asked = [
        f"train.out={tmp_path / 'run'}",
        "train.max_steps=3",
        f"train.accumulation={accumulation}",
    ]
    done = finished(launched(config, WATCHED, str(tmp_path), *command, *asked))
    assert done.returncode == 0, done.stdout
    one, other = (torch.load(tmp_path / f"head-{rank}.pt") for rank in (0, 1))
    assert apart(one, other) == 0 == apart(one, weights(tmp_path / "run"))
    assert apart(one, weights(three_steps)) < TOLERANCE


@pytest.mark.parametrize("accumulation", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("config", ["ddp", ZERO2, ZERO3])
def test_nan_on_one_of_two_processes_is_skipped_by_both(
    config: str, accumulation: int, command: list[str], tmp_path: Path
) -> None:
    """Nobody hangs; the conversation is named, and the weights are those of one process that skips it too."""
    shutil.copytree(store_of(command), tmp_path / "store")
    poison(tmp_path / "store", 5)
    bad = [*command, f"features.store={tmp_path / 'store'}", f"train.accumulation={accumulation}"]
    one = run(bad, tmp_path / "one")
    done = finished(launched(config, SCRIPT, *bad, f"train.out={tmp_path / 'two'}"))
    assert done.returncode == 0 and "skipped steps" in done.stdout, done.stdout
    skipped, expected = (
        [line for line in rows(out) if "skipped" in line] for out in (tmp_path / "two", one)
    )
    assert [line["skipped"] for line in skipped] == [line["skipped"] for line in expected] and len(
        skipped
    ) == 2
    assert all(5 in line["conversations"] and len(line["conversations"]) < 4 for line in skipped)
    assert apart(weights(tmp_path / "two"), weights(one)) < TOLERANCE
    assert all(torch.isfinite(tensor).all() for tensor in weights(tmp_path / "two").values())


def store_of(command: list[str]) -> Path:
    """The store of a command."""
    return Path(next(part.split("=")[1] for part in command if part.startswith("features.store=")))


def test_a_sharded_target_gives_the_same_features(
    command: list[str], three_steps: Path, tmp_path: Path
) -> None:
    """Layers spread over two processes, features computed while training: equal to the store's, and so is the head."""
    asked = [
        f"train.out={tmp_path / 'run'}",
        "train.max_steps=3",
        "features.store=null",
        "features.shard_target=true",
    ]
    done = finished(launched("ddp", WATCHED, str(tmp_path), *command, *asked))
    assert done.returncode == 0, done.stdout
    expected = [example.features for example in FeatureStore(store_of(command)).read(range(4))]
    for rank in (0, 1):
        seen = torch.load(tmp_path / f"features-{rank}.pt")
        pairs = zip(seen, expected, strict=True)  # NaN where no state is kept
        assert all(torch.allclose(one, other, atol=1e-5, equal_nan=True) for one, other in pairs)
        assert apart(torch.load(tmp_path / f"head-{rank}.pt"), weights(three_steps)) < TOLERANCE


def test_zero_splits_the_head_and_not_the_target(
    command: list[str], three_steps: Path, tmp_path: Path
) -> None:
    """With ZeRO-3 the target that computes features while training is loaded whole, on every process."""
    asked = [*command, f"train.out={tmp_path / 'run'}", "train.max_steps=3", "features.store=null"]
    done = finished(launched("zero3", SCRIPT, *asked))
    assert done.returncode == 0, done.stdout
    assert apart(weights(tmp_path / "run"), weights(three_steps)) < TOLERANCE


@pytest.mark.long
def test_a_killed_rank_ends_the_run_which_then_goes_on(
    command: list[str], alone: Path, tmp_path: Path
) -> None:
    """The launcher ends the others; the same command again reaches the bytes of a run that was not touched."""
    asked = [SCRIPT, *command, *EVERY, "train.checkpoint_every=1", "train.epochs=30"]
    assert finished(launched("ddp", *asked, f"train.out={tmp_path / 'whole'}")).returncode == 0
    out = tmp_path / "run"
    started = subprocess.Popen(
        launched("ddp", *asked, f"train.out={out}"),
        start_new_session=True,
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
    )
    try:
        until = time.monotonic() + 900
        while not list((out / "checkpoints").glob("step-1?")):
            assert started.poll() is None and time.monotonic() < until
            time.sleep(0.005)
        ranks = subprocess.run(
            ["pgrep", "-P", str(started.pid)], capture_output=True, text=True
        ).stdout.split()
        os.kill(int(ranks[-1]), signal.SIGKILL)
        assert started.wait(900) != 0
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()
    assert finished(launched("ddp", *asked, f"train.out={out}")).returncode == 0
    assert equal(out, tmp_path / "whole") and rows(out) == rows(tmp_path / "whole")


@pytest.mark.parametrize("config", ["ddp", ZERO2])
def test_a_disk_that_is_full_for_one_process_hangs_nobody(
    config: str, command: list[str], tmp_path: Path
) -> None:
    """The checkpoint fails for all and the run goes on; with DeepSpeed it ends at once, and can be gone on with."""
    limited = (
        "import resource, os, signal, runpy, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    )
    limited += "os.environ['RANK'] == '0' and resource.setrlimit(resource.RLIMIT_FSIZE, (1_200_000,) * 2); "
    limited += f"sys.argv = sys.argv[1:]; runpy.run_path({SCRIPT!r}, run_name='__main__')"
    (tmp_path / "limited.py").write_text(limited)
    asked = [
        str(tmp_path / "limited.py"),
        SCRIPT,
        *command,
        *EVERY,
        f"train.out={tmp_path / 'run'}",
    ]
    done = finished(launched(config, *asked), seconds=100)
    if config == "ddp":
        assert "no checkpoint at step 3" in done.stdout and done.returncode == 0, done.stdout
        assert not list((tmp_path / "run/checkpoints").iterdir())
    else:
        assert "error: no checkpoint in" in done.stdout and done.returncode == 1, done.stdout
        done = finished(launched(config, SCRIPT, *command, *EVERY, f"train.out={tmp_path / 'run'}"))
        assert done.returncode == 0 and not list((tmp_path / "run").rglob("*.part"))


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces joined by a wire."""
    names = (f"eagle{os.getpid()}a", f"eagle{os.getpid()}b")
    wires = (f"ve{os.getpid()}a", f"ve{os.getpid()}b")

    def ip(line: str) -> None:
        subprocess.run(["ip", *line.split()], check=True, capture_output=True, timeout=20)

    try:
        ip(f"netns add {names[0]}")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(
            f"two hosts need the right to make network namespaces (root, iproute2): {error}"
        )
    try:
        ip(f"netns add {names[1]}")
        ip(f"link add {wires[0]} type veth peer name {wires[1]}")
        for number, (name, wire) in enumerate(zip(names, wires, strict=True), start=1):
            ip(f"link set {wire} netns {name}")
            ip(f"-n {name} addr add 10.77.0.{number}/24 dev {wire}")
            ip(f"-n {name} link set {wire} up")
            ip(f"-n {name} link set lo up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)


def test_two_hosts_are_one(
    hosts: tuple[str, str], command: list[str], alone: Path, tmp_path: Path
) -> None:
    """Joined by a wire, with a folder that both see: the head of one process."""
    config = str(ROOT / "recipes/accelerate/two_machines.yaml")
    asked = [SCRIPT, *command, *EVERY, f"train.out={tmp_path / 'run'}"]
    started = []
    for rank, name in enumerate(hosts):
        where = [
            "--machine_rank",
            str(rank),
            "--main_process_ip",
            "10.77.0.1",
            "--num_processes",
            "2",
        ]
        launch = [
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            "--config_file",
            config,
            *where,
            *asked,
        ]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": f"ve{name[5:]}"}
        inside = ["ip", "netns", "exec", name, *launch]
        started.append(subprocess.Popen(inside, env=env, cwd=ROOT, start_new_session=True))
    try:
        assert [process.wait(150) for process in started] == [0, 0]
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    assert apart(weights(tmp_path / "run"), weights(alone)) < TOLERANCE
    papers = json.loads((tmp_path / "run/last/provenance.json").read_text())
    assert papers["processes"] == 2 and free_port()
