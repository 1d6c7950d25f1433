"""Commands that write survive a second run of themselves: one is told who writes, or both finish; all is whole."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from data_prep.count_tokens import main as count_tokens
from data_prep.extract import main as extract
from data_prep.regenerate import main as regenerate
from eagle import Target
from eagle.__main__ import main as eagle
from eagle.data.store import FeatureStore
from eagle.data.stored_rows import slots_of
from eagle.disk import lock_folder, lock_path
from eagle.drafters.recurrent.eagle1 import Eagle1
from eagle.formats.checkpoint import save_head
from eval.measure import main as measure
from recipes.tiny import make_target as tiny
from recipes.train_eagle import main as train
from tests.engines.engine_builds import build_environment as build_engine

ROOT = Path(__file__).parent.parent
UMASK = 0o027  # that of no usual user: what another umask or a library's own mode has left is seen
PROGRAM = """
import json, os, runpy, sys
import data_prep.count_tokens, data_prep.regenerate, eagle.command.generate, eagle.command.ship
import eval.lossless, eval.tune, recipes.train_eagle

for command, logs in json.load(sys.stdin):  # forked, so that both begin at once with everything imported
    children = []
    for log in logs:
        if not (pid := os.fork()):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 1)
            os.dup2(1, 2)
            sys.argv = command
            name = command[0]
            runpy.run_path(name, run_name="__main__") if "/" in name else runpy.run_module(name, run_name="__main__")
            sys.exit()
        children.append(pid)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]), flush=True)
"""


@pytest.fixture(scope="module")
def commands(
    tiny_target_dir: Path, tiny_target: Target, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[str]]:
    """Commands on the suite's target with tiny inputs; what each writes is named after it."""
    out = tmp_path_factory.mktemp("at_once")
    torch.manual_seed(0)
    head = Eagle1.for_target(Eagle1.Settings(fc_bias=False), tiny_target.config)
    for run in ("measure", "lossless", "tune"):
        save_head(out / run / "head", head, "no: recipe", {})
    exported = out / "exported"
    target, data = (
        str(tiny_target_dir / "target"),
        f"data.train={tiny_target_dir / 'data/train.jsonl'}",
    )
    eagle(["export", str(out / "measure/head"), "--target", target, "--to", "vllm", str(exported)])
    asked = [{"turns": ["What does copy do?"]}, {"turns": ["What does chain do?"]}]
    (out / "asked.jsonl").write_text("".join(json.dumps(question) + "\n" for question in asked))
    recipe = [
        str(ROOT / "recipes/tiny/eagle1.yaml"),
        f"target.path={target}",
        "target.dtype=float32",
    ]
    recipe += [
        data,
        "data.limit=24",
        "data.max_length=96",
        "features.shard_bytes=60000",
        "features.dtype=float32",
    ]
    recipe += ["train.dtype=float32", "train.epochs=1"]
    recipe += [
        f"eval.prompts={out / 'asked.jsonl'}",
        "eval.max_new_tokens=6",
        "eval.count=1",
        "eval.temperatures=[0]",
    ]
    source = f"regenerate.source={tiny_target_dir / 'data/train.jsonl'}"
    return {
        "extract": ["data_prep.extract", *recipe, f"features.store={out / 'extract'}"],
        "regenerate": [
            *(
                "data_prep.regenerate",
                *recipe,
                source,
                f"regenerate.out={out / 'regenerate/answers.jsonl'}",
            ),
            *("regenerate.max_new_tokens=4", "data.limit=6"),
        ],
        "count_tokens": ["data_prep.count_tokens", *recipe, "--out", f"{out / 'count_tokens'}"],
        "draft_vocab": [
            "data_prep.draft_vocab",
            *recipe,
            "--size",
            "64",
            "--out",
            f"{out / 'draft_vocab/it.safetensors'}",
        ],
        "inspect_mask": [
            "data_prep.inspect_mask",
            *recipe,
            "--count",
            "1",
            "--html",
            f"{out / 'inspect_mask/it.html'}",
        ],
        "train": [
            str(ROOT / "recipes/train_eagle.py"),
            *recipe,
            f"train.out={out / 'train'}",
            "features.store=null",
        ],
        "export": [
            "eagle",
            "export",
            str(out / "measure/head"),
            "--target",
            target,
            "--to",
            "vllm",
            str(out / "export"),
        ],
        "import": ["eagle", "import", str(exported), str(out / "import"), "--target", target],
        "measure": ["eval.measure", *recipe, f"train.out={out / 'measure'}"],
        "lossless": ["eval.lossless", *recipe, f"train.out={out / 'lossless'}"],
        "tune": ["eval.tune", *recipe, f"train.out={out / 'tune'}", "--write"],
        "report": [
            "eval.report",
            str(out / "measure/results.jsonl"),
            "--html",
            str(out / "report/it.html"),
        ],
    }


@pytest.fixture(scope="module")
def outcomes(
    commands: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[tuple[int, str]]]:
    """The exit status and the output of both runs of each command."""
    folder = tmp_path_factory.mktemp("logs")
    logs = {name: [str(folder / f"{name}-{number}") for number in (1, 2)] for name in commands}
    jobs = json.dumps([[commands[name], logs[name]] for name in commands])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=jobs,
        capture_output=True,
        text=True,
        cwd=ROOT,
        umask=UMASK,
    )
    assert done.returncode == 0, done.stderr
    statuses = [json.loads(line) for line in done.stdout.splitlines()]
    return {
        name: [
            (status, Path(log).read_text()) for status, log in zip(pair, logs[name], strict=True)
        ]
        for name, pair in zip(commands, statuses, strict=True)
    }


def find_output(command: list[str], name: str) -> Path:
    """What the command writes; its folder is numbered, as a process may work the module off in several parts."""
    written = re.compile(rf"at_once\d+/{name}")
    return next(Path(word.partition("=")[2] or word) for word in command if written.search(word))


NAMES = (
    "extract",
    "regenerate",
    "count_tokens",
    "draft_vocab",
    "inspect_mask",
    "train",
    "export",
    "import",
)
NAMES += ("measure", "lossless", "tune", "report")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_two_runs_at_once_leave_a_whole_result(
    name: str,
    commands: dict[str, list[str]],
    outcomes: dict[str, list[tuple[int, str]]],
    tiny_target: Target,
) -> None:
    """Who loses is told which folder another run writes; every file can be read, and nothing is left beside them."""
    folder = find_output(commands[name], name)
    folder = folder.parent if folder.suffix else folder
    won = [log for status, log in outcomes[name] if status == 0]
    for status, log in outcomes[name]:
        assert status == 0 or (
            f"another run is writing {folder}" in log and "Traceback" not in log
        ), log
    assert won
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files and not [
        path for path in folder.parent.rglob("*") if path.suffix in (".part", ".lock")
    ]
    for path in files:
        if path.suffix == ".safetensors":
            assert load_file(path)
        elif path.suffix in (".json", ".jsonl"):
            text = path.read_text()
            assert [
                json.loads(part)
                for part in (text.splitlines() if path.suffix == ".jsonl" else [text])
            ]
        assert path.stat().st_size
        assert path.stat().st_mode & 0o777 == 0o666 & ~UMASK or "/head/" in str(path), path
    if name == "extract":
        extract([*commands[name][1:], "--verify"])
        store = FeatureStore(folder)
        for example in store.read(range(len(store))):
            states = tiny_target.model(
                example.tokens[None], output_hidden_states=True
            ).hidden_states
            kept = [states[tap][0] for tap in store.taps]
            read = slots_of(example.loss_mask, "read")
            assert torch.equal(example.features[read], torch.stack(kept, dim=1)[read])


@pytest.mark.parametrize(
    ("name", "main"),
    [
        ("extract", extract),
        ("count_tokens", count_tokens),
        ("regenerate", regenerate),
        ("train", train),
        ("export", eagle),
        ("import", eagle),
        ("measure", measure),
    ],
)
def test_a_command_is_refused_while_another_writes(
    name: str,
    main: Callable[[list[str]], None],
    commands: dict[str, list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By a sentence that names what is written and by whom; nothing of it is touched."""
    out = find_output(commands[name], name)
    out = out / "results.jsonl" if name == "measure" else out
    lock = lock_path if name in ("regenerate", "import", "measure") else lock_folder
    with lock(out):
        before = sorted(out.parent.rglob("*"))
        with pytest.raises((ValueError, SystemExit)) as ended:
            main(commands[name][1:])
        refusal = f"{ended.value} {capsys.readouterr().err}"
        assert f"another run is writing {out} (process {os.getpid()} on" in refusal
        assert sorted(out.parent.rglob("*")) == before


def test_a_target_and_an_engine_are_made_once(tmp_path: Path) -> None:
    """Two that take long, and that a second run would spoil."""
    for work in (
        lambda: tiny.make_target(tmp_path, steps=1),
        lambda: build_engine("vllm", tmp_path),
    ):
        with (
            lock_folder(tmp_path),
            pytest.raises(ValueError, match=f"another run is writing {tmp_path}"),
        ):
            work()


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    """However that ends; what is left of it is no obstacle."""
    folder = tmp_path / "deep/store"
    if not (pid := os.fork()):
        with lock_folder(folder):
            os.kill(os.getpid(), signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)
    with pytest.raises(
        ValueError, match=f"another run is writing {folder} .*process {pid} on .*: wait for its end"
    ):
        with lock_folder(folder):
            pass
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert (folder / ".lock").exists()
    with lock_folder(folder):
        (folder / "result").touch()
    assert [path.name for path in folder.iterdir()] == ["result"]
    with pytest.raises(KeyError), lock_folder(tmp_path / "new"):
        raise KeyError
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_one_process_at_a_time_holds_a_lock(tmp_path: Path) -> None:
    """Many that take and leave it as fast as they can never meet, though the lock file comes and goes."""

    def work() -> None:
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            try:
                with lock_folder(tmp_path / "folder"):
                    (tmp_path / "folder/inside").touch(exist_ok=False)
                    (tmp_path / "folder/inside").unlink()
            except ValueError:
                pass

    children = []
    for _ in range(4):
        if not (pid := os.fork()):
            try:
                work()
                os._exit(0)
            except BaseException as error:
                os.write(2, repr(error).encode())
                os._exit(1)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 4


def test_the_other_processes_of_a_command_do_without(tmp_path: Path) -> None:
    """The first holds the lock for all."""
    with (
        lock_folder(tmp_path),
        lock_folder(tmp_path, hold=False),
        lock_path(tmp_path / "file", hold=False),
    ):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file cannot be written"), lock_folder(tmp_path / "file"):
        pass
