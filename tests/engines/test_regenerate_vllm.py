"""Answers from vLLM's own server: whatever fails, on either side, the file is that of a run in which nothing did."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle import Target
from tests.data_prep.fault_proxy import FAULTS, FaultProxy, faults_before
from tests.data_prep.stub_servers import TINY
from tests.engines.engine_builds import holds
from tests.engines.test_readme_commands import serve

COUNT, NEW, SILENCE = (
    300,
    32,
    15,
)  # conversations, tokens of an answer, seconds after which a server counts as hung
KEY = "sk-of-a-real-server"
SERVE = (
    "VLLM_CPU_KVCACHE_SPACE=1 python -m vllm.entrypoints.openai.api_server "
    "--model {} --dtype float32 --max-num-seqs 8"
)


@pytest.fixture(scope="module")
def environment() -> Path:
    """Where vLLM is."""
    folder = Path(os.environ.get("EAGLE_VLLM", "none"))
    if not holds("vllm", folder):
        pytest.skip(
            f"no vllm in {folder}: `make test-engines` makes its environment and sets EAGLE_VLLM"
        )
    return folder.absolute()


@pytest.fixture(scope="module")
def command(tiny_target_dir: Path) -> str:
    """The command that serves the tiny target behind a key."""
    return f"{SERVE.format(tiny_target_dir / 'target')} --api-key {KEY}"


@pytest.fixture(scope="module")
def source(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """So many conversations of the tiny corpus, of up to two answers."""
    path = tmp_path_factory.mktemp("source") / "source.jsonl"
    lines = (tiny_target_dir / "data/train.jsonl").read_text().splitlines()[:COUNT]
    records = [json.loads(line) for line in lines]
    for number, record in enumerate(records):
        record["id"] = f"c{number}"
        record["conversations"] = record["conversations"][:4]
    assert len(records) == COUNT
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def prepare(
    target: Path, source: Path, out: Path, addresses: list[str], **fields: Any
) -> list[str]:
    """The command line of `eagle prepare` with these servers."""
    section = {
        "source": str(source), "out": str(out), "endpoint": addresses, "in_flight": 8, "max_new_tokens": NEW,
        "temperature": 0.0, "timeout": SILENCE, "attempts": 100, "model": str(target), **fields,
    }  # fmt: skip
    where = [f"target.path={target}", f"data.train={out}", f"regenerate={json.dumps(section)}"]
    return [sys.executable, "-m", "eagle", "prepare", str(TINY), "--count", "1", *where]


def start(line: list[str]) -> subprocess.Popen[str]:
    """The command in a process of its own."""
    env = {**os.environ, "EAGLE_API_KEY": KEY, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        line, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(line: list[str]) -> str:
    """What the command printed, once it ended well."""
    process = start(line)
    printed, _ = process.communicate()
    assert process.returncode == 0, printed[-3000:]
    return printed


def done(out: Path) -> int:
    """How many conversations are answered."""
    return sum(path.read_text().count("\n") for path in Path(f"{out}.parts").glob("*"))


def answers(out: Path) -> dict[str, Any]:
    """What the file holds, by id; every id once."""
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert len({record["id"] for record in records}) == len(records) == COUNT
    return {record["id"]: record for record in records}


def differing(one: Path, other: Path) -> list[str]:
    """The conversations whose answers differ: rounding depends on what the server computed side by side."""
    left, right = answers(one), answers(other)
    return [name for name in left if left[name] != right[name]]


@pytest.mark.engine
def test_a_real_server(
    command: str, environment: Path, source: Path, tiny_target_dir: Path, tmp_path: Path
) -> None:
    """Alone, behind every fault, killed, with the client killed, and beside one that is three times slower."""
    target, outs = (
        tiny_target_dir / "target",
        {name: tmp_path / f"{name}.jsonl" for name in ("quiet", "faults", "two")},
    )
    figures: dict[str, Any] = {}
    with serve(command, environment, tmp_path / "log") as address:
        begun = time.perf_counter()
        finish(prepare(target, source, outs["quiet"], [f"{address}/v1"]))
        figures["seconds, undisturbed"] = round(time.perf_counter() - begun)
        check_against_target(target, outs["quiet"], figures)
        refused = start(
            prepare(
                target, source, tmp_path / "refused.jsonl", [f"{address}/v1"], key_variable="NO_KEY"
            )
        )
        printed, _ = refused.communicate()
        assert (
            refused.returncode == 1
            and "401" in printed
            and "variable NO_KEY, which is not set" in printed
        )
        figures["two"] = beside_a_slow_one(target, source, outs["two"], f"{address}/v1")
    with faults_before(f"{address}/v1", plant(40)) as proxy:
        line = prepare(target, source, outs["faults"], [proxy.url])
        with serve(command, environment, tmp_path / "log") as address:  # at another port
            proxy.behind = address.removeprefix("http://")
            client = start(line)
            wait_until(lambda: done(outs["faults"]) > 40, client)
            client.send_signal(signal.SIGKILL)
            client.wait()
            client = start(line)
            wait_until(lambda: done(outs["faults"]) > 120, client)
        assert client.poll() is None  # it waits for the server, which was stopped
        with serve(command, environment, tmp_path / "log") as address:
            proxy.behind = address.removeprefix("http://")
            printed, _ = client.communicate()
        assert client.returncode == 0, printed[-3000:]
        figures["planted"] = dict(proxy.planted)
        assert set(FAULTS) <= set(proxy.planted)
        figures["hung, seconds until it is told"] = re.findall(r"silent for ([\d.]+) s", printed)[
            :1
        ]
    figures["answers that rounding changed"] = {
        name: differing(outs["quiet"], outs[name]) for name in ("faults", "two")
    }  # fmt: skip
    print(json.dumps(figures, indent=1))
    assert all(
        len(names) <= COUNT // 50 for names in figures["answers that rounding changed"].values()
    )


def plant(every: int) -> Callable[[int, dict[str, Any]], str | None]:
    """Every kind of fault in turn, each after so many requests, and none of the probe's."""
    counts: Counter[str] = Counter()

    def rule(_: int, request: dict[str, Any]) -> str | None:
        if request["max_tokens"] == 1:
            return None
        counts["asked"] += 1
        number, rest = divmod(counts["asked"], max(every // len(FAULTS), 2))
        return FAULTS[number % len(FAULTS)] if rest == 0 else None

    return rule


def wait_until(is_so: Callable[[], bool], client: subprocess.Popen[str]) -> None:
    """Wait while the client works."""
    while not is_so():
        assert client.poll() is None, client.communicate()[0][-3000:]
        time.sleep(0.05)


def check_against_target(target: Path, out: Path, figures: dict[str, Any]) -> None:
    """The server's greedy answers are the target's own, but for what rounding decides."""
    ours, same, asked = Target.load(target, dtype="float32"), 0, 0
    for record in list(answers(out).values())[:20]:
        turns = [{"role": turn["role"], "content": turn["content"]} for turn in record["messages"]]
        place = next(place for place, turn in enumerate(turns) if turn["role"] == "assistant")
        prompt = ours.chat(turns[:place])
        said_here = ours.model.generate(
            input_ids=ours.model.dummy_inputs["input_ids"].new_tensor([prompt]),
            do_sample=False,
            max_new_tokens=NEW,
        )
        text = ours.tokenizer.decode(said_here[0, len(prompt) :], skip_special_tokens=True)
        same, asked = same + (text.strip() == turns[place]["content"].strip()), asked + 1
    figures["first answers as the target's own generate"] = f"{same} of {asked}"
    assert same >= asked - 2


def beside_a_slow_one(target: Path, source: Path, out: Path, address: str) -> dict[str, int]:
    """Answers by a server, and by the same behind a proxy that takes three times as long."""

    class Slow(FaultProxy):
        """It waits twice as long as the server took."""

        def __init__(self, url: str) -> None:
            super().__init__(url, lambda *_: None)
            forward = self.RequestHandlerClass.forward  # type: ignore[attr-defined]

            class Waiting(self.RequestHandlerClass):  # type: ignore[name-defined]
                def forward(self, body: bytes | None) -> tuple[int, bytes]:
                    begun = time.perf_counter()
                    reply = forward(self, body)
                    threading.Event().wait(2 * (time.perf_counter() - begun))
                    return reply

            self.RequestHandlerClass = Waiting

    slow = Slow(address)
    try:
        printed = finish(prepare(target, source, out, [address, slow.url], in_flight=4, timeout=60))
    finally:
        slow.stop()
    given = {url: int(count) for url, count in re.findall(r"(http\S+): (\d+) answers", printed)}
    fast, less = given[address], given[slow.url]
    assert 1.5 * less < fast < 6 * less, given
    return {"fast": fast, "slow": less}
