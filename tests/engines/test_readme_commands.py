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
# seconds: the server compiles the target first, on a machine that may have other work
START = 1500
# prompts, and tokens of each answer
COUNT = 16
NEW = 16
PER_POSITION = re.compile(
    r'vllm:spec_decode_num_accepted_tokens_per_pos_total\{.*position="(\d+)"\} (\S+)'
)
DRAFTS = re.compile(r"vllm:spec_decode_num_drafts_total\{.*\} (\S+)")


def find_commands(readme: str) -> list[str]:
    """Return the shell commands of a README that serve on a CPU."""
    blocks: list[str] = re.findall(r"```sh\n(.*?)\n```", readme, re.DOTALL)
    return [block for block in blocks if block.startswith("VLLM_CPU_KVCACHE_SPACE=")]


def find_length(command: str) -> int:
    """Return the draft length that a command asks for."""
    found = re.search(r'"num_speculative_tokens": (\d+)', command)
    assert found is not None, command
    return int(found[1])


@contextmanager
def serve(command: str, environment: Path, log: Path) -> Iterator[str]:
    """Start a server by this command, with only its port changed, and yield its address."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]

    quiet = dict(setting.split("=") for setting in (*QUIET, "VLLM_CPU_OMP_THREADS_BIND=nobind"))
    # the command itself calls vllm by name
    path = f"{(environment / 'bin').absolute()}:{os.environ['PATH']}"
    with log.open("w") as output:
        process = subprocess.Popen(
            ["bash", "-c", f"{command} --port {port}"],
            env={**os.environ, **quiet, "PATH": path},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        address = f"http://localhost:{port}"
        try:
            wait_for(f"{address}/health", process, log)
            yield address
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)


def wait_for(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a server answers; fail with its last words if it ends before, or takes too long."""
    for _ in range(START):
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            urlopen(address).close()
            return
        except OSError:
            time.sleep(1)

    last_words = log.read_text()[-3000:]
    raise AssertionError(f"no answer from {address} after {START} seconds:\n{last_words}")


def read_counts(address: str, depth: int) -> list[int]:
    """Return the drafts so far, and how many had each of their positions accepted."""
    metrics = urlopen(f"{address}/metrics").read().decode()
    accepted = {int(position): float(value) for position, value in PER_POSITION.findall(metrics)}
    drafts = float(DRAFTS.findall(metrics)[0])
    return [int(drafts), *(int(accepted.get(position, 0)) for position in range(depth))]


def ask(address: str, model: str, prompt: list[int], depth: int) -> Row:
    """Return one greedy answer, and what the server counted meanwhile."""
    before = read_counts(address, depth)
    request = {
        "model": model,
        "prompt": prompt,
        "max_tokens": NEW,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    body = json.dumps(request).encode()
    answer: Any = json.load(
        urlopen(Request(f"{address}/v1/completions", body, {"content-type": "application/json"}))
    )
    # one request at a time, so that the difference is this answer's
    after = read_counts(address, depth)
    drafts, *accepted = (later - earlier for later, earlier in zip(after, before, strict=True))
    tokens = answer["choices"][0]["token_ids"]
    return {"tokens": tokens, "drafts": drafts, "accepted": accepted}


@pytest.mark.engine
@pytest.mark.parametrize("head", ["eagle1", "eagle3", "medusa", "peagle", "dflash"])
def test_the_printed_command_serves(head: str, tmp_path: Path) -> None:
    """Text and counts are this decoder's; of DFlash, whose norms vLLM mixes up on a CPU, only the text."""
    environment = Path(os.environ.get("EAGLE_VLLM", "none"))
    if not holds("vllm", environment):
        pytest.skip(
            f"no vllm in {environment}: `make test-engines` makes its environment and sets EAGLE_VLLM"
        )

    folder = TINY / head / "head"
    if not folder.is_dir():
        pytest.skip(f"no trained head in {folder}: `make test-engines` trains it")
    target = Target.load(TINY / "target", dtype="float32")
    drafter: Any = load_drafter(folder, target)
    export(drafter, target.config, "vllm", out=tmp_path / "out", head=folder)
    # the README of the export is the only source of the command
    [command] = find_commands((tmp_path / "out/README.md").read_text())
    depth = find_length(command)
    prompts = read_prompts(target, TINY / "data/heldout.jsonl", COUNT, room=64)
    model = str((TINY / "target").resolve())
    with serve(command, environment, tmp_path / "log") as address:
        theirs = [ask(address, model, prompt, depth) for prompt in prompts]

    job = Job(TINY / "target", prompts, Budget(depth, depth, 1), NEW)
    ours = decode_as_engine(job, folder, target, Rule())

    assert sum(row["accepted"][0] for row in theirs) > 0

    for their_row, our_row in zip(theirs, ours, strict=True):
        assert same_text(their_row, our_row)
        assert head == "dflash" or same_counts(their_row, our_row)


def test_the_command_is_found_as_it_is_printed() -> None:
    """The command for a CPU is found whole, with its continued line, and none that needs a GPU."""
    on_cpu = "VLLM_CPU_KVCACHE_SPACE=4 x \\\n    '{\"num_speculative_tokens\": 7}'"
    readme = f"a\n\n```sh\nvllm serve T\n```\n\n```sh\n{on_cpu}\n```"
    assert find_commands(readme) == [on_cpu]
    assert find_length(on_cpu) == 7
