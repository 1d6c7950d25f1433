"""Two nodes of two processes over a shared folder: extraction and measuring give what one process gives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from trained import BUSY, ROOT, free_port, prepared, run

from data_prep.extract import main as extract
from eagle.data.store import FeatureStore
from eval.measure import main as measure

pytestmark = [pytest.mark.slow, pytest.mark.long]
# what an answer is asked by, and what it must be whatever the machine
QUESTION = ("drafter", "set", "conversation", "turn", "temperature", "seed")
ANSWER = ("tokens", "text", "finish", "identical")
TIMES = {"seconds", "cpu_seconds"}


def start_nodes(words: list[str]) -> list[subprocess.Popen[bytes]]:
    """Start the same command on both nodes, each with a launcher of its own."""
    launcher = f"--config_file two_machines --processes 4 --main_process_ip 127.0.0.1 --main_process_port {free_port()}"
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, "-m", "eagle", *words, *launcher.split(), "--machine_rank"]
    return [
        subprocess.Popen([*command, str(rank)], env=env, cwd=ROOT, start_new_session=True)
        for rank in range(2)
    ]


def end_nodes(nodes: list[subprocess.Popen[bytes]]) -> list[int]:
    """Return the status of each; what hangs is ended."""
    try:
        return [node.wait(60 * BUSY) for node in nodes]
    finally:
        for node in nodes:
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGKILL)
                node.wait()


def lose_a_node(words: list[str], begun: Callable[[], bool]) -> None:
    """Run a command on both nodes and kill all processes of the second once some work is done."""
    nodes = start_nodes(words)
    # not before some work is done, and not after it has ended
    while not begun() and all(node.poll() is None for node in nodes):
        time.sleep(0.005)
    for process in [*psutil.Process(nodes[1].pid).children(recursive=True), nodes[1]]:
        process.kill()
    assert end_nodes(nodes)[0] != 0  # the other node notices


def shards_of(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all shards of a store."""
    return {path.name: path.read_bytes() for path in folder.glob("shard-*.safetensors")}


def answers_of(path: Path) -> dict[tuple[Any, ...], list[Any]]:
    """Return all answers of a results file by what was asked, without what depends on the clock."""
    answers: dict[tuple[Any, ...], list[Any]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if "drafter" not in row:
            continue
        question = tuple(row[name] for name in QUESTION)
        assert question not in answers
        for cycle in row["cycles"]:
            # times are the machine's, and everything else must be equal
            for name in TIMES & cycle.keys():
                del cycle[name]
        answers[question] = [*(row[name] for name in ANSWER), row["cycles"]]
    return answers


def test_extraction_of_two_nodes_is_that_of_one_process(
    tiny_target_dir: Path, tmp_path: Path
) -> None:
    """Bit for bit, with a node killed in its midst; the same command takes over what that had to do."""
    command = [*prepared(tiny_target_dir, tmp_path), "data.limit=400", "features.shard_bytes=6000"]
    alone = tmp_path / "alone"
    extract([*command, f"features.store={alone}"])
    shared = tmp_path / "shared"
    words = ["extract", *command, f"features.store={shared}"]
    lose_a_node(words, lambda: len(list(shared.glob("shard-*.sha256"))) > 2)
    assert end_nodes(start_nodes(words)) == [0, 0]
    assert len(shards_of(alone)) > 8
    assert shards_of(shared) == shards_of(alone)
    assert not FeatureStore(shared).absent


def test_measuring_on_two_nodes_is_that_of_one_process(
    tiny_target_dir: Path, tmp_path: Path
) -> None:
    """Every answer once, with the same cycles, and a node killed in the midst."""
    command = [
        *prepared(tiny_target_dir, tmp_path),
        "eval.count=12",
        "eval.max_new_tokens=24",
        f"eval.prompts={tiny_target_dir / 'data/heldout.jsonl'}",
        "eval.temperatures=[0.0, 1.0]",
    ]
    alone = run(command, tmp_path / "alone")
    measure([*command, f"train.out={alone}"])
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "head").symlink_to(alone / "head")
    words = ["measure", *command, f"train.out={shared}"]

    def has_answers() -> bool:
        lines = [path.read_bytes().count(b"\n") for path in shared.glob("*results*")]
        return sum(lines) > 8

    lose_a_node(words, has_answers)
    assert end_nodes(start_nodes(words)) == [0, 0]
    expected = answers_of(alone / "results.jsonl")
    assert len(expected) >= 2 * 12 * 2
    assert answers_of(shared / "results.jsonl") == expected
