"""Several processes: DDP, ZeRO-2 and ZeRO-3, features of a target that is spread over them, two hosts, faults.

`test_launchers.py` compares the weights of every method under every launcher.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from trained import ROOT, apart, equal, finished, launched, poison, rows, run, weights

pytestmark = pytest.mark.slow
ZERO2 = pytest.param("zero2", marks=pytest.mark.long)  # a minute each
SCRIPT = str(ROOT / "recipes/train_eagle.py")
TOLERANCE = 5e-6  # of weights of size 0.1, after 12 steps of 1e-3: sums taken in another order
EVERY = (
    "train.checkpoint_every=3",
    "train.validation=0.2",
    "train.decode=3",
    "eval.max_new_tokens=8",
)


@pytest.fixture(scope="module")
def alone(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run of one process."""
    return run(command, tmp_path_factory.mktemp("alone") / "run", *EVERY)


@pytest.fixture(scope="module")
def three_steps(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return three steps of one process."""
    return run(command, tmp_path_factory.mktemp("alone") / "run", "train.max_steps=3")


@pytest.mark.parametrize("config", ["ddp", ZERO2])
def test_two_processes_are_one_on_the_same_steps(
    config: str,
    command: list[str],
    alone: Path,
    tmp_path: Path,
) -> None:
    """Losses, validation and weights agree; stopped after a checkpoint and gone on with, the bytes are equal."""
    out = tmp_path / "run"
    asked = [SCRIPT, *command, f"train.out={out}", *EVERY]
    done = finished(launched(config, *asked))
    assert done.returncode == 0, done.stdout
    assert apart(weights(out), weights(alone)) < TOLERANCE

    for row, other in zip(rows(out), rows(alone), strict=True):
        assert row.keys() == other.keys()
        assert row["step"] == other["step"]
        for name, tolerance in (("total", 1e-4), ("gradient_norm", 1e-3), ("validation", 1e-4)):
            if name in row:
                assert row[name] == pytest.approx(other[name], rel=tolerance)

    shutil.copytree(out, tmp_path / "first")
    # the last checkpoint was not written to its end
    (out / "checkpoints/step-10/complete.json").unlink()
    done = finished(launched(config, *asked))
    assert done.returncode == 0, done.stdout
    assert "going on after step 9 of 10" in done.stdout
    assert equal(out, tmp_path / "first")
    assert rows(out) == rows(tmp_path / "first")

    # any number of processes reads DDP's checkpoints, and only DeepSpeed its own
    done = finished([sys.executable, *asked])
    if config == "ddp":
        assert done.returncode == 0
        assert "holds this run, complete" in done.stdout
    else:
        assert done.returncode == 1
        assert "was written by DeepSpeed on 2 processes, this is DDP on 1" in done.stdout
        assert "Traceback" not in done.stdout


@pytest.mark.parametrize("config", ["ddp", ZERO2])
def test_nan_on_one_of_two_processes_is_skipped_by_both(
    config: str,
    command: list[str],
    store_folder: Path,
    tmp_path: Path,
) -> None:
    """Nobody hangs; the conversation is named, and the weights are those of one process that skips it too."""
    shutil.copytree(store_folder, tmp_path / "store")
    # a copy, since other tests read the store
    poison(tmp_path / "store", 5)
    bad = [*command, f"features.store={tmp_path / 'store'}"]
    one = run(bad, tmp_path / "one")
    two = tmp_path / "two"
    done = finished(launched(config, SCRIPT, *bad, f"train.out={two}"))

    assert done.returncode == 0, done.stdout
    assert "skipped steps" in done.stdout

    skipped = [row for row in rows(two) if "skipped" in row]
    expected = [row for row in rows(one) if "skipped" in row]

    # once an epoch
    assert len(skipped) == 2
    assert [row["skipped"] for row in skipped] == [row["skipped"] for row in expected]

    for row in skipped:
        assert 5 in row["conversations"]
        assert len(row["conversations"]) < 4

    assert apart(weights(two), weights(one)) < TOLERANCE
    assert all(tensor.isfinite().all() for tensor in weights(two).values())


@pytest.mark.parametrize(
    ("config", "override"),
    [
        # ZeRO-3 would split any model that is made after the launch
        ("zero3", "features.shard_target=false"),
        ("ddp", "features.shard_target=true"),
    ],
)
def test_features_computed_while_training_are_those_of_the_store(
    config: str,
    override: str,
    command: list[str],
    three_steps: Path,
    tmp_path: Path,
) -> None:
    """By a target that every process holds whole under ZeRO-3, or whose layers are spread: the same head is learned."""
    out = tmp_path / "run"
    asked = [*command, f"train.out={out}", "train.max_steps=3", "features.store=null", override]
    done = finished(launched(config, SCRIPT, *asked))
    assert done.returncode == 0, done.stdout
    assert apart(weights(out), weights(three_steps)) < TOLERANCE


LIMITED = f"""
import os, resource, runpy, signal, sys

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
if os.environ["RANK"] == "0":
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_200_000, 1_200_000))
runpy.run_path({SCRIPT!r}, run_name="__main__")
"""


@pytest.mark.parametrize("config", ["ddp", ZERO2])
def test_a_disk_that_is_full_for_one_process_hangs_nobody(
    config: str,
    command: list[str],
    tmp_path: Path,
) -> None:
    """The checkpoint fails for all and the run goes on; with DeepSpeed it ends at once, and can be gone on with."""
    out = tmp_path / "run"
    limited = tmp_path / "limited.py"
    limited.write_text(LIMITED)
    asked = [*command, *EVERY, f"train.out={out}"]
    # the first process writes the checkpoints' weights
    done = finished(launched(config, str(limited), *asked), seconds=100)
    if config == "ddp":
        assert done.returncode == 0, done.stdout
        assert "no checkpoint at step 3" in done.stdout
        assert not list((out / "checkpoints").iterdir())
        return
    assert done.returncode == 1, done.stdout
    assert "error: no checkpoint in" in done.stdout

    done = finished(launched(config, SCRIPT, *asked))

    assert done.returncode == 0, done.stdout
    assert not list(out.rglob("*.part"))


def ip(line: str) -> None:
    """Run a command of iproute2."""
    subprocess.run(
        ["ip", *line.split()],
        check=True,
        capture_output=True,
        timeout=20,
    )


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Yield two network namespaces, named after the ends of the wire that joins them."""
    names = [f"ve{os.getpid()}a", f"ve{os.getpid()}b"]

    try:
        ip(f"netns add {names[0]}")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"two hosts need root and iproute2: {error}")

    try:
        ip(f"netns add {names[1]}")
        # a wire with two ends, one for each host
        ip(f"link add {names[0]} type veth peer name {names[1]}")
        for number, name in enumerate(names, start=1):
            ip(f"link set {name} netns {name}")
            ip(f"-n {name} addr add 10.77.0.{number}/24 dev {name}")
            ip(f"-n {name} link set {name} up")
            ip(f"-n {name} link set lo up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)


def test_two_hosts_are_one(
    hosts: list[str],
    command: list[str],
    alone: Path,
    tmp_path: Path,
) -> None:
    """Joined by a wire, with a folder that both see: the head of one process."""
    out = tmp_path / "run"
    config = str(ROOT / "recipes/accelerate/two_machines.yaml")
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config]
    where = "--num_processes 2 --main_process_ip 10.77.0.1 --machine_rank"
    started = []

    for rank, name in enumerate(hosts):
        line = ["ip", "netns", "exec", name, *launcher, *where.split(), str(rank)]
        line += [SCRIPT, *command, *EVERY, f"train.out={out}"]
        # Gloo must find the wire
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": name,
        }
        started.append(subprocess.Popen(line, env=env, cwd=ROOT, start_new_session=True))

    try:
        assert [process.wait(150) for process in started] == [0, 0]
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    assert apart(weights(out), weights(alone)) < TOLERANCE
    assert json.loads((out / "last/provenance.json").read_text())["processes"] == 2
