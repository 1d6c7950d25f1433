"""Answers from vLLM's own server are the target's own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle import Target
from tests.data_prep.fault_proxy import FaultProxy
from tests.data_prep.stub_servers import TINY
from tests.engines.engine_builds import holds
from tests.engines.test_readme_commands import serve
from tests.eval.jsonl_files import read_lines, write_lines

# conversations, and tokens of an answer
COUNT = 300
NEW = 32
# seconds after which a server counts as hung
SILENCE = 15
KEY = "sk-of-a-real-server"
SERVE = (
    "VLLM_CPU_KVCACHE_SPACE=1 python -m vllm.entrypoints.openai.api_server "
    f"--model {{}} --dtype float32 --max-num-seqs 8 --api-key {KEY}"
)


@pytest.fixture(scope="module")
def environment() -> Path:
    """The environment that holds vLLM."""
    folder = Path(os.environ.get("EAGLE_VLLM", "none"))
    if not holds("vllm", folder):
        pytest.skip(
            f"no vllm in {folder}: `make test-engines` makes its environment and sets EAGLE_VLLM"
        )
    return folder.absolute()


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Path:
    """The tiny target."""
    return tiny_target_dir / "target"


@pytest.fixture(scope="module")
def source(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations of the tiny corpus, of up to two answers."""
    records = read_lines(tiny_target_dir / "data/train.jsonl")[:COUNT]
    assert len(records) == COUNT
    # ids, by which files are compared
    for i, record in enumerate(records):
        record["id"] = f"c{i}"
        record["conversations"] = record["conversations"][:4]
    return write_lines(tmp_path_factory.mktemp("source") / "source.jsonl", records)


@pytest.fixture
def prepare(target: Path, source: Path) -> Callable[..., list[str]]:
    """Make the command line of `eagle prepare` for an output file and some servers."""

    def command(out: Path, *addresses: str, **fields: Any) -> list[str]:
        section = {
            "source": str(source),
            "out": str(out),
            "endpoint": addresses,
            "in_flight": 8,
            "max_new_tokens": NEW,
            "temperature": 0.0,
            "timeout": SILENCE,
            "attempts": 100,
            "model": str(target),
            **fields,
        }
        overrides = [
            f"target.path={target}",
            f"data.train={out}",
            f"regenerate={json.dumps(section)}",
        ]
        return [sys.executable, "-m", "eagle", "prepare", str(TINY), "--count", "1", *overrides]

    return command


def start(line: list[str]) -> subprocess.Popen[str]:
    """Start a command."""
    env = {**os.environ, "EAGLE_API_KEY": KEY, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        line, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen[str]) -> str:
    """Return what a command printed, once it ended well."""
    printed, _ = process.communicate()
    assert process.returncode == 0, printed[-3000:]
    return printed


def read_answers(out: Path) -> dict[str, Any]:
    """Return the records by id, each of which occurs once."""
    records = {record["id"]: record for record in read_lines(out)}
    assert len(records) == len(read_lines(out)) == COUNT
    return records


def assert_equal_but_for_rounding(first: Path, second: Path) -> None:
    """Compare two files: the server's rounding depends on what it computes in a batch."""
    expected = read_answers(first)
    found = read_answers(second)
    differing = [name for name in expected if expected[name] != found[name]]
    assert len(differing) <= COUNT // 50, differing


@pytest.mark.engine
def test_an_undisturbed_run_has_the_targets_own_answers(
    target: Path,
    environment: Path,
    prepare: Callable[..., list[str]],
    tmp_path: Path,
) -> None:
    """Without its key the server refuses; beside a slower one, a server answers more, and the file is the same."""
    quiet = tmp_path / "quiet.jsonl"
    both = tmp_path / "both.jsonl"
    with serve(SERVE.format(target), environment, tmp_path / "log") as address:
        url = f"{address}/v1"
        finish(start(prepare(quiet, url)))
        refused = start(prepare(tmp_path / "refused.jsonl", url, key_variable="NO_KEY"))
        printed, _ = refused.communicate()
        slow = SlowProxy(url)
        try:
            said = finish(start(prepare(both, url, slow.url, in_flight=4, timeout=60)))
        finally:
            slow.stop()

    check_against_target(target, quiet)

    assert refused.returncode == 1
    assert "401" in printed
    assert "variable NO_KEY, which is not set" in printed

    counts = {url: int(count) for url, count in re.findall(r"(http\S+): (\d+) answers", said)}
    # the slower one takes three times as long
    assert 1.5 * counts[slow.url] < counts[url] < 6 * counts[slow.url]
    assert_equal_but_for_rounding(quiet, both)


def check_against_target(folder: Path, out: Path) -> None:
    """Check that the server's greedy first answers are those of transformers, but for rounding."""
    target = Target.load(folder, dtype="float32")
    num_equal = 0
    for record in list(read_answers(out).values())[:20]:
        turns = [{"role": turn["role"], "content": turn["content"]} for turn in record["messages"]]
        roles = [turn["role"] for turn in turns]
        first = roles.index("assistant")
        prompt = target.chat(turns[:first])
        ids = target.model.dummy_inputs["input_ids"].new_tensor([prompt])
        answer = target.model.generate(input_ids=ids, do_sample=False, max_new_tokens=NEW)[0]
        text = target.tokenizer.decode(answer[len(prompt) :], skip_special_tokens=True)
        num_equal += text.strip() == turns[first]["content"].strip()

    assert num_equal >= 18


class SlowProxy(FaultProxy):
    """A proxy that waits twice as long as its server took."""

    def __init__(self, url: str) -> None:
        super().__init__(url, lambda *_: None)
        handler: Any = self.RequestHandlerClass
        forward = handler.forward

        def wait(self: Any, body: bytes | None) -> tuple[int, bytes]:
            begun = time.perf_counter()
            reply = forward(self, body)
            time.sleep(2 * (time.perf_counter() - begun))
            return reply

        self.RequestHandlerClass = type("Waiting", (handler,), {"forward": wait})
