"""What goes wrong in a long run: kills, full disks, torn checkpoints, NaN, another store, wandb out of reach."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from trained import apart, equal, poison, rows, run, weights

from data_prep.extract import main as extract
from eagle import Target
from tests.training.test_train import draw_steps, is_same, train_naively

EVERY = ("train.checkpoint_every=2", "train.validate_every=4")


@pytest.fixture(scope="module")
def whole(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of twelve steps to which nothing happens."""
    return run(command, tmp_path_factory.mktemp("whole") / "run", *EVERY)


def fork(work: Callable[[], object]) -> int:
    """Do some work in a forked process: everything is imported, so that it starts at once."""
    pid = os.fork()
    if pid:
        return pid

    try:
        torch.set_num_threads(1)  # threads do not survive a fork
        work()
        os._exit(0)
    except BaseException as error:
        os.write(2, repr(error).encode())
        os._exit(1)


def succeeds(work: Callable[[], object]) -> bool:
    """Tell whether a forked process has done its work."""
    return os.waitpid(fork(work), 0)[1] == 0


def find_newest(out: Path) -> int:
    """Return the step of the newest checkpoint."""
    steps = [int(path.name[5:]) for path in (out / "checkpoints").glob("step-*[0-9]")]
    return max(steps, default=0)


def wait_for(pid: int, condition: Callable[[], object]) -> None:
    """Wait until something holds; fail if the process ends before."""
    while not condition():
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
        time.sleep(0.0005)


@pytest.mark.slow
def test_thirty_kills_cost_nothing(command: list[str], tmp_path: Path) -> None:
    """At any moment, some inside the writing of a checkpoint: weights and metrics of a run that nobody touched."""
    dice = random.Random(4)
    asked = (
        "train.epochs=40",
        "train.checkpoint_every=2",
        "train.validate_every=50",
        "train.validation=0.1",
    )

    assert succeeds(lambda: run(command, tmp_path / "whole", *asked))

    out = tmp_path / "run"
    metrics = out / "metrics.jsonl"
    inside = 0
    steps = [0]

    for kill in range(30):
        begun = time.time()
        # the same command each time
        pid = fork(lambda: run(command, out, *asked))
        # this life has begun its steps, and the kills spread from the first checkpoint to the last ones
        wait_for(pid, metrics.exists)
        wait_for(pid, lambda begun=begun: metrics.stat().st_mtime > begun)
        wait_for(pid, lambda kill=kill: find_newest(out) >= max(kill * 240 // 32, 2))
        # some moment of the next steps
        time.sleep(dice.random() * 0.05)
        if kill % 3 == 0:
            # every third kill hits a checkpoint that is being written
            wait_for(pid, lambda: list((out / "checkpoints").glob("*.part")))
            time.sleep(dice.random() * 0.004)
        os.kill(pid, signal.SIGKILL)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL
        inside += bool(list((out / "checkpoints").glob("*.part")))
        steps.append(find_newest(out))

    # else the kills missed what they should hit
    assert inside >= 5
    assert steps == sorted(steps)
    assert len(set(steps)) > 15
    assert steps[-1] >= 200
    assert succeeds(lambda: run(command, out, *asked))

    for name in ("last", "head"):
        assert equal(out, tmp_path / "whole", name)

    assert rows(out) == rows(tmp_path / "whole")
    assert not list(out.rglob("*.part"))


def cut(path: Path) -> None:
    """Lose the second half of a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    """Change one bit of one byte."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


TORN = {
    "truncated": ("optimizer.bin", cut, "of .* bytes"),
    "flipped": ("model.safetensors", flip, "not those that were written"),
    "missing": ("random_states_0.pkl", Path.unlink, "is missing"),
    "half a mark": ("complete.json", cut, r"complete\.json is missing or damaged"),
}


@pytest.mark.quick("flipped", "missing", "half a mark")
@pytest.mark.parametrize("fault", TORN)
def test_a_torn_checkpoint_is_named_and_passed_over(
    fault: str,
    whole: Path,
    command: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The one before it is taken, and the end is the same."""
    name, damage, message = TORN[fault]
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    damage(out / "checkpoints/step-12" / name)
    run(command, out, *EVERY)
    printed = capsys.readouterr().out

    assert "step-12 is passed over" in printed
    assert "going on after step 10 of 12" in printed
    assert re.search(message, printed)
    assert equal(out, whole)
    assert rows(out) == rows(whole)


def train_limited(command: list[str], out: Path, limit: int) -> bool:
    """Train in a process that may write files of so many bytes; tell whether it succeeded."""

    def work() -> None:
        # the disk answers with an error instead of a signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        run(command, out, *EVERY)

    return succeeds(work)


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(
    whole: Path,
    command: list[str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Every checkpoint is refused, the head is not: it is the same head, and nothing half is left."""
    out = tmp_path / "run"
    checkpoint = whole / "checkpoints/step-12"
    # between the head and the optimizer, which is twice as large
    head_size = (checkpoint / "model.safetensors").stat().st_size
    optimizer_size = (checkpoint / "optimizer.bin").stat().st_size

    assert train_limited(command, out, (head_size + optimizer_size) // 2)

    printed = capfd.readouterr().out

    assert printed.count("no checkpoint at step") == 6
    assert "make room on the disk" in printed
    assert equal(out, whole)
    assert not list((out / "checkpoints").iterdir())
    assert sum("checkpoint_failed" in row for row in rows(out)) == 6


def test_a_checkpoint_is_not_begun_without_room_for_it(
    whole: Path,
    command: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first shows how large they are; those that would not fit are left out, and the head is the same."""
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("eagle.training.resume.shutil.disk_usage", lambda folder: usage)
    out = run(command, tmp_path / "run", *EVERY)

    assert capsys.readouterr().out.count("has room for 1,000 bytes, and a checkpoint takes") == 5
    assert equal(out, whole)
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-2"]


@pytest.mark.slow
def test_a_disk_too_full_for_the_head_is_said(
    whole: Path,
    command: list[str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The last head is the run: without it the command fails, and the same command again makes it."""
    out = tmp_path / "run"
    # half a head is written, and no more
    limit = (whole / "last/model.safetensors").stat().st_size // 2

    assert not train_limited(command, out, limit)

    printed = "".join(capfd.readouterr())

    assert "the disk refused the head of step 4" in printed
    assert "give the same command again" in printed
    assert equal(run(command, out, *EVERY), whole)


@pytest.mark.quick("1")
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_step_with_nan_is_left_out_and_named(
    accumulation: int,
    command: list[str],
    store_folder: Path,
    tiny_target: Target,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Counted in the metrics and in the head's papers; the weights are those of a run without that update."""
    steps = draw_steps()
    bad_index = steps[2][1]  # of the third step
    shutil.copytree(store_folder, tmp_path / "store")
    # a copy, since other tests read the store
    poison(tmp_path / "store", bad_index)
    bad = [*command, f"features.store={tmp_path / 'store'}", f"train.accumulation={accumulation}"]
    out = run(bad, tmp_path / "run", "train.max_steps=6")

    assert "skipped steps [2]: their gradients are not finite" in capsys.readouterr().out

    (row,) = [row for row in rows(out) if "skipped" in row]

    assert row["skipped"] == [2]
    assert bad_index in row["conversations"]
    assert {*row["conversations"]} <= {*steps[2]}
    # only those of the part that is not finite
    assert accumulation == 1 or len(row["conversations"]) < 4
    assert json.loads((out / "last/provenance.json").read_text())["skipped_steps"] == 1

    clean = [*command, "train.max_steps=6"]

    assert is_same(weights(out), train_naively(clean, tiny_target, steps[:6], left_out=2))
    assert apart(weights(out), train_naively(clean, tiny_target, steps[:6])) > 1e-3

    # the second epoch meets it once more, and the count survives a resume
    again = run([*bad, "train.checkpoint_every=1"], tmp_path / "again")
    (again / "checkpoints/step-12/complete.json").unlink()
    run([*bad, "train.checkpoint_every=1"], again)
    second = next(number for number in range(6, 12) if bad_index in steps[number])
    skipped = [row["skipped"] for row in rows(again) if "skipped" in row]

    assert skipped == [[2], [second]]
    assert json.loads((again / "last/provenance.json").read_text())["skipped_steps"] == 2


@pytest.mark.slow
def test_another_store_is_refused(
    whole: Path,
    command: list[str],
    tiny_target_dir: Path,
    tmp_path: Path,
) -> None:
    """Features made from other conversations do not slip into a run that has begun."""
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    lines = (tiny_target_dir / "data/train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "data.jsonl").write_text("".join(lines[1:40]))
    other_store = f"features.store={tmp_path / 'store'}"
    changed = [*command, f"data.train={tmp_path / 'data.jsonl'}", other_store]
    # features of conversations 1 to 39, in another store
    extract(list(changed))

    with pytest.raises(ValueError, match=r"holds a run with features\.data\.source"):
        run(changed, out, *EVERY)
    with pytest.raises(ValueError, match="are not those that this run needs"):
        run([*command, other_store], out, *EVERY)


@pytest.mark.slow
@pytest.mark.parametrize("key", ["0" * 40, ""])
def test_wandb_out_of_reach_costs_seconds(
    key: str,
    whole: Path,
    command: list[str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The run goes on and is kept on the disk for later, with a key and without."""
    with socket.socket() as listener:
        # bound and never listening: nobody else gets the port, and nobody answers
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        def train_with_wandb() -> None:
            for name in [name for name in os.environ if name.startswith("WANDB_")]:
                # the suite's own settings keep wandb offline
                del os.environ[name]

            os.environ |= {"WANDB_BASE_URL": url, "HOME": str(tmp_path)}
            os.environ["WANDB_CONFIG_DIR"] = str(tmp_path / "config")
            if key:
                os.environ["WANDB_API_KEY"] = key
            run(command, tmp_path / "run", *EVERY, "train.wandb=test")

        assert succeeds(train_with_wandb)

    printed = "".join(capfd.readouterr())

    assert "wandb is not reached" in printed
    assert "wandb sync" in printed
    assert list((tmp_path / "run/wandb").glob("offline-run-*/*.wandb"))
    assert equal(tmp_path / "run", whole)
    assert rows(tmp_path / "run") == rows(whole)
