"""Commands that write survive a second run of themselves: one is told who writes, or both finish; all is whole."""

from __future__ import annotations

import json
import os
import re
import shlex
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
UMASK = 0o027  # of no usual user, so that a mode that a library or another umask left is seen
# reads pairs of a command and two log files, and forks: both runs begin at once with everything imported
PROGRAM = """
import json, os, runpy, sys
import data_prep.count_tokens, data_prep.regenerate, eagle.command.generate, eagle.command.ship
import eval.lossless, eval.tune, recipes.train_eagle

for command, logs in json.load(sys.stdin):
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
# RECIPE, OUT and TARGET stand for paths; what a command writes is named after it
COMMANDS = {
    "extract": "data_prep.extract RECIPE features.store=OUT/extract",
    "regenerate": "data_prep.regenerate RECIPE regenerate.out=OUT/regenerate/answers.jsonl "
    "regenerate.source=DATA regenerate.max_new_tokens=4 data.limit=6",
    "count_tokens": "data_prep.count_tokens RECIPE --out OUT/count_tokens",
    "draft_vocab": "data_prep.draft_vocab RECIPE --size 64 --out OUT/draft_vocab/it.safetensors",
    "inspect_mask": "data_prep.inspect_mask RECIPE --count 1 --html OUT/inspect_mask/it.html",
    "train": f"{ROOT}/recipes/train_eagle.py RECIPE train.out=OUT/train features.store=null",
    "export": "eagle export OUT/measure/head --target TARGET --to vllm OUT/export",
    "import": "eagle import OUT/exported OUT/import --target TARGET",
    "measure": "eval.measure RECIPE train.out=OUT/measure",
    "lossless": "eval.lossless RECIPE train.out=OUT/lossless",
    "tune": "eval.tune RECIPE train.out=OUT/tune --write",
    "report": "eval.report OUT/measure/results.jsonl --html OUT/report/it.html",
}
RECIPE = f"""
{ROOT}/recipes/tiny/eagle1.yaml target.path=TARGET target.dtype=float32 data.train=DATA data.limit=24
data.max_length=96 features.shard_bytes=60000 features.dtype=float32 train.dtype=float32 train.epochs=1
eval.prompts=OUT/asked.jsonl eval.max_new_tokens=6 eval.count=1 eval.temperatures=[0]
"""
Outcomes = dict[str, list[tuple[int, str]]]


@pytest.fixture(scope="module")
def commands(
    tiny_target_dir: Path,
    tiny_target: Target,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, list[str]]:
    """The commands on the suite's target with tiny inputs."""
    out = tmp_path_factory.mktemp("at_once")
    torch.manual_seed(0)
    head = Eagle1.for_target(Eagle1.Settings(fc_bias=False), tiny_target.config)
    for run in ("measure", "lossless", "tune"):
        save_head(out / run / "head", head, "no: recipe", {})
    target = str(tiny_target_dir / "target")
    made = [str(out / "measure/head"), str(out / "exported")]
    eagle(["export", made[0], "--target", target, "--to", "vllm", made[1]])
    # one question twice, of which one is asked
    question = json.dumps({"turns": ["What does copy do?"]}) + "\n"
    (out / "asked.jsonl").write_text(question * 2)
    paths = {"RECIPE": RECIPE, "TARGET": target, "OUT": out}
    paths["DATA"] = tiny_target_dir / "data/train.jsonl"
    filled = {}
    for name, command in COMMANDS.items():
        for word, path in paths.items():
            command = command.replace(word, str(path))
        filled[name] = shlex.split(command)
    return filled


@pytest.fixture(scope="module")
def outcomes(commands: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """The exit status and the output of both runs of each command."""
    folder = tmp_path_factory.mktemp("logs")
    logs = {name: [str(folder / f"{name}-{run}") for run in (1, 2)] for name in commands}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps([[commands[name], logs[name]] for name in commands]),
        capture_output=True,
        text=True,
        cwd=ROOT,
        umask=UMASK,
    )
    assert done.returncode == 0, done.stderr
    found = {}
    # a line of two statuses for each command
    for name, line in zip(commands, done.stdout.splitlines(), strict=True):
        printed = [Path(log).read_text() for log in logs[name]]
        found[name] = list(zip(json.loads(line), printed, strict=True))
    return found


def find_output(command: list[str], name: str) -> Path:
    """Return what the command writes; pytest numbers the folder, as workers may share the module."""
    written = re.compile(rf"at_once\d+/{name}")
    return next(Path(word.partition("=")[2] or word) for word in command if written.search(word))


def check_file(path: Path) -> None:
    """Check that a file can be read to its end, and has the mode of the user's umask."""
    assert path.stat().st_size
    # safetensors gives the files of a head a mode of its own
    assert path.stat().st_mode & 0o777 == 0o666 & ~UMASK or "/head/" in str(path), path
    if path.suffix == ".safetensors":
        assert load_file(path)
    elif path.suffix == ".json":
        json.loads(path.read_text())
    elif path.suffix == ".jsonl":
        assert [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_two_runs_at_once_leave_a_whole_result(
    name: str,
    commands: dict[str, list[str]],
    outcomes: Outcomes,
) -> None:
    """A run that is refused is told which folder another writes; all files are whole, and no others are left."""
    folder = find_output(commands[name], name)
    folder = folder.parent if folder.suffix else folder
    assert 0 in [status for status, _ in outcomes[name]]
    for status, log in outcomes[name]:
        if status:
            assert f"another run is writing {folder}" in log
            assert "Traceback" not in log
    assert [path for path in folder.parent.rglob("*") if path.suffix in (".part", ".lock")] == []
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    for path in files:
        check_file(path)


@pytest.mark.slow
def test_two_extractions_at_once_store_the_targets_states(
    commands: dict[str, list[str]],
    outcomes: Outcomes,
    tiny_target: Target,
) -> None:
    """Compared with the untouched model's hidden states, at the positions that a head reads."""
    extract([*commands["extract"][1:], "--verify"])
    store = FeatureStore(find_output(commands["extract"], "extract"))
    for example in store.read(range(len(store))):
        output = tiny_target.model(example.tokens[None], output_hidden_states=True)
        states = torch.stack([output.hidden_states[tap][0] for tap in store.taps], dim=1)
        read = slots_of(example.loss_mask, "read")
        assert torch.equal(example.features[read], states[read])


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
    """The sentence names what is written and by whom; nothing of it is touched."""
    out = find_output(commands[name], name)
    if name == "measure":
        out = out / "results.jsonl"
    lock = lock_path if name in ("regenerate", "import", "measure") else lock_folder
    with lock(out):
        before = sorted(out.parent.rglob("*"))
        with pytest.raises((ValueError, SystemExit)) as ended:
            main(commands[name][1:])
        refusal = f"{ended.value} {capsys.readouterr().err}"
        assert f"another run is writing {out} (process {os.getpid()} on" in refusal
        assert sorted(out.parent.rglob("*")) == before


def test_a_target_and_an_engine_are_made_once(tmp_path: Path) -> None:
    """Both take long, and a second run would spoil them."""
    refusal = f"another run is writing {tmp_path}"
    with lock_folder(tmp_path):
        with pytest.raises(ValueError, match=refusal):
            tiny.make_target(tmp_path, steps=1)
        with pytest.raises(ValueError, match=refusal):
            build_engine("vllm", tmp_path)


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    """However the process ends; the file that it leaves is no obstacle."""
    folder = tmp_path / "deep/store"
    pid = os.fork()
    if not pid:
        with lock_folder(folder):
            os.kill(os.getpid(), signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)
    refusal = f"another run is writing {folder} .*process {pid} on .*: wait for its end"
    with pytest.raises(ValueError, match=refusal), lock_folder(folder):
        pass
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert (folder / ".lock").exists()
    with lock_folder(folder):
        (folder / "result").touch()
    assert [path.name for path in folder.iterdir()] == ["result"]
    # a folder that the lock made goes with it, if nothing was written there
    with pytest.raises(KeyError), lock_folder(tmp_path / "new"):
        raise KeyError
    assert not (tmp_path / "new").exists()


def take_and_leave(folder: Path) -> None:
    """Hold the lock of a folder as often as possible for half a second; a second holder finds a file."""
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        try:
            with lock_folder(folder):
                (folder / "inside").touch(exist_ok=False)
                (folder / "inside").unlink()
        except ValueError:
            continue


@pytest.mark.slow
def test_one_process_at_a_time_holds_a_lock(tmp_path: Path) -> None:
    """Many that take and leave it as fast as they can never meet, though the lock file comes and goes."""
    children = []
    for _ in range(4):
        pid = os.fork()
        if not pid:
            try:
                take_and_leave(tmp_path / "folder")
                os._exit(0)
            except BaseException as error:
                os.write(2, repr(error).encode())
                os._exit(1)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 4


def test_the_other_processes_of_a_command_do_without(tmp_path: Path) -> None:
    """The first process holds the lock for all."""
    with lock_folder(tmp_path), lock_folder(tmp_path, hold=False):
        with lock_path(tmp_path / "file", hold=False):
            pass
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file cannot be written"), lock_folder(tmp_path / "file"):
        pass
