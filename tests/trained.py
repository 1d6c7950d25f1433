"""Real training runs on a store of 24 short conversations, which the suite's tiny target has read."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from data_prep.extract import main as extract
from eagle.data.shards import checksum_file
from eagle.data.store import FeatureStore
from eagle.data.stored_rows import row_bytes
from eagle.disk import sha256
from recipes.train_eagle import main as train

ROOT = Path(__file__).parent.parent
RECIPE = str(ROOT / "recipes/tiny/eagle1.yaml")
# pytest's option --fixture-seed, for this process and those that it begins
FIXTURE_SEED = "EAGLE_FIXTURE_SEED"
# how much longer a busy machine may take: a time limit ends what hangs, and says nothing of speed
BUSY = 8
SPEEDS = ("tokens_per_second", "memory_gb")


def fixture_seed() -> int:
    """Return the seed of what fixtures train."""
    return int(os.environ.get(FIXTURE_SEED, 0))


def prepared(target_dir: Path, folder: Path, *drafter: str) -> list[str]:
    """Return the tiny recipe in fp32 over a store that is made here: six steps of four conversations an epoch."""
    command = [
        RECIPE,
        f"target.path={target_dir / 'target'}",
        "target.dtype=float32",
        f"data.train={target_dir / 'data/train.jsonl'}",
        "data.limit=24",
        "data.max_length=96",
        f"features.store={folder / 'store'}",
        "features.dtype=float32",
        "train.dtype=float32",
        "train.epochs=2",
        "train.validation=0",
        "train.lr=1e-3",
        *drafter,
    ]
    extract(list(command))
    return command


def run(command: Sequence[str], out: Path, *overrides: str) -> Path:
    """Train in this process."""
    train([*command, f"train.out={out}", *overrides])
    return out


def weights(out: Path, name: str = "last") -> dict[str, Tensor]:
    """Return the tensors of a head that a run has left."""
    return load_file(out / name / "model.safetensors")


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference of any weight."""
    assert one.keys() == other.keys()
    differences = []
    for name, tensor in one.items():
        difference = tensor.double() - other[name].double()
        differences.append(float(difference.abs().max()))
    return max(differences)


def equal(one: Path, other: Path, name: str = "last") -> bool:
    """Return whether two runs have left the same bytes."""
    files = [run / name / "model.safetensors" for run in (one, other)]
    return files[0].read_bytes() == files[1].read_bytes()


def rows(out: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run without what depends on the machine."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in SPEEDS} for line in lines]


def poison(folder: Path, place: int) -> None:
    """Put one NaN into the features of an example, as a target would have written it: the checksum is right."""
    store = FeatureStore(folder)
    number = store.number(place)
    path = store.path(int(store.shards[number]))
    (part,) = store.parts
    ((start, stop),) = store.places[part.slots][number]
    # a row in the middle of the example, behind the header of the safetensors file
    row = (start + stop) // 2
    data = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    at = header + row * row_bytes(part, store.dtype, store.width)
    data[at : at + 4] = torch.tensor([float("nan")]).numpy().tobytes()
    path.write_bytes(data)
    checksum_file(path).write_text(f"{sha256(path)}  {path.name}\n")


def free_port() -> int:
    """A port that nobody listens on, below those that systems give to connections: another test's may take one."""
    while True:
        port = random.SystemRandom().randrange(12000, 32000)
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def launched(config: str, *arguments: str, processes: int = 2) -> list[str]:
    """Return the command line that a user gives for several processes."""
    accelerate = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    where = ["--num_processes", str(processes), "--main_process_port", str(free_port())]
    return [*accelerate, str(ROOT / f"recipes/accelerate/{config}.yaml"), *where, *arguments]


def finished(
    command: Sequence[str],
    *,
    seconds: int = 150,
    **env: str,
) -> subprocess.CompletedProcess[str]:
    """Return a command that has ended, with all that it printed; its whole group is killed where it hangs.

    `seconds` is the most that it takes on an idle machine.

    Args:
        command: its words.
        seconds: the most that it takes on an idle machine.
        env: further variables.
    """
    given = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    # a session of its own, so that all its processes can be killed together
    pipes: dict[str, Any] = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
    }
    with subprocess.Popen(command, env=given, cwd=ROOT, start_new_session=True, **pipes) as started:
        try:
            said, _ = started.communicate(timeout=BUSY * seconds)
        except BaseException:
            os.killpg(started.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(list(command), started.returncode, said)
