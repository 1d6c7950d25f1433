"""Exports' READMEs as a user follows them: their commands, as printed, start vLLM's server, and it accepts as here."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from eagle import Budget, Target
from eagle.formats.checkpoint import load_drafter
from eagle.formats.export import export
from tests.engines.compare_engines import QUIET, read_prompts
from tests.engines.engine_builds import holds
from tests.engines.engine_reference import Job, Row, Rule, decode_as_engine, same_counts, same_text

TINY = Path(__file__).parents[2] / "runs/tiny"
START = 1500  # seconds: it compiles the target first, on a machine that may have other work
COUNT, NEW = 16, 16  # prompts, and tokens of each answer
PER_PLACE = re.compile(
    r'vllm:spec_decode_num_accepted_tokens_per_pos_total\{.*position="(\d+)"\} (\S+)'
)
DRAFTS = re.compile(r"vllm:spec_decode_num_drafts_total\{.*\} (\S+)")


def printed_commands(readme: str) -> list[str]:
    """The shell commands of a README that serve on a CPU, and none else."""
    blocks: list[str] = re.findall(r"```sh\n(.*?)\n```", readme, re.DOTALL)
    return [block for block in blocks if block.startswith("VLLM_CPU_KVCACHE_SPACE=")]


def asked_length(command: str) -> int:
    """The draft length that a command asks for."""
    found = re.search(r'"num_speculative_tokens": (\d+)', command)
    assert found is not None, command
    return int(found[1])


@contextmanager
def serve(command: str, environment: Path, log: Path) -> Iterator[str]:
    """The address of a server that this command starts in an environment; nothing of it is changed but the port."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    quiet = dict(setting.split("=") for setting in (*QUIET, "VLLM_CPU_OMP_THREADS_BIND=nobind"))
    path = f"{(environment / 'bin').absolute()}:{os.environ['PATH']}"
    line = f"{command} --port {port}"
    with log.open("w") as output:
        process = subprocess.Popen(
            ["bash", "-c", line],
            env={**os.environ, **quiet, "PATH": path},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            wait_for(f"http://localhost:{port}/health", process, log)
            yield f"http://localhost:{port}"
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)


def wait_for(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a server answers; its last words if it ends before, or takes too long."""
    for _ in range(START):
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            urlopen(address).close()
            return
        except OSError:
            time.sleep(1)
    raise AssertionError(
        f"no answer from {address} after {START} seconds:\n{log.read_text()[-3000:]}"
    )


def read_counts(address: str, depth: int) -> tuple[int, list[int]]:
    """Drafts so far, and how many had each of their places accepted."""
    metrics = urlopen(f"{address}/metrics").read().decode()
    places = {int(place): int(float(value)) for place, value in PER_PLACE.findall(metrics)}
    return int(float(DRAFTS.findall(metrics)[0])), [places.get(place, 0) for place in range(depth)]


def ask(address: str, model: str, prompt: list[int], depth: int) -> Row:
    """One greedy answer, and what the server counted meanwhile."""
    drafts, accepted = read_counts(address, depth)
    asked = {"model": model, "prompt": prompt, "max_tokens": NEW, "temperature": 0}
    body = json.dumps({**asked, "ignore_eos": True, "return_token_ids": True}).encode()
    answer: Any = json.load(
        urlopen(Request(f"{address}/v1/completions", body, {"content-type": "application/json"}))
    )
    later, gained = read_counts(address, depth)
    counts = [now - then for now, then in zip(gained, accepted, strict=True)]
    return {
        "tokens": answer["choices"][0]["token_ids"],
        "drafts": later - drafts,
        "accepted": counts,
    }


@pytest.mark.engine
@pytest.mark.parametrize("head", ["eagle1", "eagle3", "medusa", "peagle", "dflash"])
def test_the_printed_command_serves(head: str, tmp_path: Path) -> None:
    """Text and counts are this decoder's; of DFlash, whose norms vLLM mixes up on a CPU, the text."""
    environment = Path(os.environ.get("EAGLE_VLLM", "none"))
    if not holds("vllm", environment):
        pytest.skip(
            f"no vllm in {environment}: `make test-engines` makes its environment and sets EAGLE_VLLM"
        )
    if not (TINY / head / "head").is_dir():
        pytest.skip(f"no trained head in runs/tiny/{head}/head: `make test-engines` trains it")
    target, out = Target.load(TINY / "target", dtype="float32"), tmp_path / "out"
    drafter: Any = load_drafter(TINY / head / "head", target)
    export(drafter, target.config, "vllm", out, TINY / head / "head")
    (command,) = printed_commands((out / "README.md").read_text())
    depth = asked_length(command)
    prompts = read_prompts(target, TINY / "data/heldout.jsonl", COUNT, room=64)
    with serve(command, environment, tmp_path / "log") as address:
        theirs = [
            ask(address, str((TINY / "target").resolve()), prompt, depth) for prompt in prompts
        ]
    job = Job(TINY / "target", prompts, Budget(depth, depth, 1), NEW)
    ours = decode_as_engine(job, TINY / head / "head", target, Rule())
    assert all(same_text(*rows) for rows in zip(theirs, ours, strict=True))
    assert sum(row["accepted"][0] for row in theirs) > 0
    if head != "dflash":
        assert all(same_counts(*rows) for rows in zip(theirs, ours, strict=True))


def test_the_command_is_found_as_it_is_printed() -> None:
    """Whole, with its continued line, and no command that needs a GPU."""
    plain, on_cpu = (
        "vllm serve T",
        "VLLM_CPU_KVCACHE_SPACE=4 x \\\n    '{\"num_speculative_tokens\": 7}'",
    )
    told = "\n\n".join(f"a\n\n```sh\n{command}\n```" for command in (plain, on_cpu))
    (command,) = printed_commands(told)
    assert command == on_cpu
    assert asked_length(command) == 7
