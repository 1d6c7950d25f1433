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
from trained import apart, equal, poison, prepared, rows, run, weights

from data_prep.extract import main as extract
from eagle import Target
from tests.training.test_train import naive, orders, same

EVERY = ("train.checkpoint_every=2", "train.validate_every=4")


@pytest.fixture(scope="module")
def command(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The recipe over a store of its own."""
    return prepared(tiny_target_dir, tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def whole(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve steps to which nothing happens."""
    return run(command, tmp_path_factory.mktemp("whole") / "run", *EVERY)


def child(work: Callable[[], object]) -> int:
    """A forked process that does the work: everything is imported, so that it starts at once."""
    if pid := os.fork():
        return pid
    try:
        torch.set_num_threads(1)  # threads do not survive a fork
        work()
        os._exit(0)
    except BaseException as error:
        os.write(2, repr(error).encode())
        os._exit(1)


def succeeds(work: Callable[[], object]) -> bool:
    """Whether a forked process has done its work."""
    return os.waitpid(child(work), 0)[1] == 0


@pytest.mark.slow
def test_thirty_kills_cost_nothing(command: list[str], tmp_path: Path) -> None:
    """At any moment, some inside the writing of a checkpoint: the weights and metrics of a run that nobody touched."""
    chance = random.Random(4)
    asked = (
        "train.epochs=40",
        "train.checkpoint_every=2",
        "train.validate_every=50",
        "train.validation=0.1",
    )
    assert succeeds(lambda: run(command, tmp_path / "whole", *asked))
    out, inside, steps = tmp_path / "run", 0, [0]

    def newest() -> int:
        return max(
            (int(path.name[5:]) for path in (out / "checkpoints").glob("step-*[0-9]")), default=0
        )

    for kill in range(30):
        before, wanted = time.time(), kill * 240 // 32  # from the first checkpoint to the last ones
        pid = child(lambda: run(command, out, *asked))

        def until(seen: Callable[[], object], pid: int = pid) -> None:
            while not seen():
                assert os.waitpid(pid, os.WNOHANG) == (0, 0)
                time.sleep(0.0005)

        until(lambda: (out / "metrics.jsonl").exists())
        until(
            lambda before=before: (out / "metrics.jsonl").stat().st_mtime > before
        )  # this life has begun its steps
        until(lambda wanted=wanted: newest() >= max(wanted, 2))
        time.sleep(chance.random() * 0.05)
        if kill % 3 == 0:
            until(lambda: list((out / "checkpoints").glob("*.part")))
            time.sleep(chance.random() * 0.004)
        os.kill(pid, signal.SIGKILL)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL
        inside += bool(list((out / "checkpoints").glob("*.part")))
        steps.append(newest())
    print(f"{inside} kills inside a checkpoint; newest checkpoint after each kill: {steps}")
    assert inside >= 5 and steps == sorted(steps) and len(set(steps)) > 15 and steps[-1] >= 200
    assert succeeds(lambda: run(command, out, *asked))
    assert equal(out, tmp_path / "whole") and equal(out, tmp_path / "whole", "head")
    assert rows(out) == rows(tmp_path / "whole")
    assert not list(out.rglob("*.part"))


def cut(path: Path) -> None:
    """The second half of a file is lost."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    """One bit of one byte changes."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


TORN = {
    "truncated": ("optimizer.bin", cut, "of .* bytes"),
    "flipped": ("model.safetensors", flip, "not those that were written"),
    "missing": ("random_states_0.pkl", Path.unlink, "is missing"),
    "unmarked": ("complete.json", Path.unlink, r"complete\.json is missing or damaged"),
    "half a mark": ("complete.json", cut, r"complete\.json is missing or damaged"),
}


@pytest.mark.quick("flipped", "missing", "unmarked", "half a mark")
@pytest.mark.parametrize("fault", TORN)
def test_a_torn_checkpoint_is_named_and_passed_over(
    fault: str, whole: Path, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one before it is taken, and the end is the same."""
    name, damage, named = TORN[fault]
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    damage(out / "checkpoints/step-12" / name)
    run(command, out, *EVERY)
    output = capsys.readouterr().out
    assert "step-12 is passed over" in output and "going on after step 10 of 12" in output
    assert re.search(named, output)
    assert equal(out, whole) and rows(out) == rows(whole)


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(
    whole: Path, command: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every checkpoint is refused, the head is not: it is the same head, and nothing half is left."""
    sizes = {path.name: path.stat().st_size for path in (whole / "checkpoints/step-12").iterdir()}
    limit = (sizes["model.safetensors"] + sizes["optimizer.bin"]) // 2

    def train_limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        run(command, tmp_path / "run", *EVERY)

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    assert succeeds(train_limited)
    output = capfd.readouterr().out
    assert output.count("no checkpoint at step") == 6 and "make room on the disk" in output
    assert equal(tmp_path / "run", whole) and not list((tmp_path / "run/checkpoints").iterdir())
    assert [line["step"] for line in rows(tmp_path / "run") if "checkpoint_failed" in line] == [
        1,
        3,
        5,
        7,
        9,
        11,
    ]


def test_a_checkpoint_is_not_begun_without_room_for_it(
    whole: Path,
    command: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first shows how large they are; those that would not fit are left out, and the head is the same."""
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(
        "eagle.training.resume.shutil.disk_usage", lambda folder: usage._replace(free=1000)
    )
    run(command, tmp_path / "run", *EVERY)
    output = capsys.readouterr().out
    assert output.count("has room for 1,000 bytes, and a checkpoint takes") == 5
    assert equal(tmp_path / "run", whole)
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-2"]


@pytest.mark.slow
def test_a_disk_too_full_for_the_head_is_said(
    whole: Path, command: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The last head is the run: without it the command fails, and the same command again makes it."""
    limit = (whole / "last/model.safetensors").stat().st_size // 2

    def train_limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        run(command, tmp_path / "run", *EVERY)

    assert not succeeds(train_limited)
    output = "".join(capfd.readouterr())
    assert (
        "the disk refused the head of step 4" in output and "give the same command again" in output
    )
    run(command, tmp_path / "run", *EVERY)
    assert equal(tmp_path / "run", whole)


@pytest.mark.quick("1")
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_step_with_nan_is_left_out_and_named(
    accumulation: int,
    command: list[str],
    tiny_target: Target,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Counted in the metrics and in the head's papers; the weights are those of a run without that update."""
    steps = orders()
    place = steps[2][1]  # of the third step, and of one in the second epoch
    other = next(number for number in range(6, 12) if place in steps[number])
    shutil.copytree(store_of(command), tmp_path / "store")
    poison(tmp_path / "store", place)
    bad = [*command, f"features.store={tmp_path / 'store'}", f"train.accumulation={accumulation}"]
    out = run(bad, tmp_path / "run", "train.max_steps=6")
    output = capsys.readouterr().out
    assert "skipped steps [2]: their gradients are not finite; conversations [" in output
    (row,) = [line for line in rows(out) if "skipped" in line]
    assert (
        row["skipped"] == [2]
        and place in row["conversations"]
        and set(row["conversations"]) <= set(steps[2])
    )
    assert accumulation == 1 or len(row["conversations"]) < 4
    assert json.loads((out / "last/provenance.json").read_text())["skipped_steps"] == 1
    clean = [*command, "train.max_steps=6"]
    assert same(weights(out), naive(clean, tiny_target, steps[:6], left_out=2))
    assert apart(weights(out), naive(clean, tiny_target, steps[:6])) > 1e-3
    again = run(
        [*bad, "train.checkpoint_every=1"], tmp_path / "again"
    )  # the count survives a resume
    (again / "checkpoints/step-12/complete.json").unlink()
    run([*bad, "train.checkpoint_every=1"], again)
    assert [line["skipped"] for line in rows(again) if "skipped" in line] == [[2], [other]]
    assert json.loads((again / "last/provenance.json").read_text())["skipped_steps"] == 2


def store_of(command: list[str]) -> Path:
    """The store of a command."""
    return Path(next(part.split("=")[1] for part in command if part.startswith("features.store=")))


@pytest.mark.slow
def test_another_store_is_refused(whole: Path, command: list[str], tmp_path: Path) -> None:
    """Features made anew from other texts do not slip into a run that has begun."""
    out, texts = tmp_path / "run", tmp_path / "data.jsonl"
    shutil.copytree(whole, out)
    data = Path(next(part.split("=")[1] for part in command if part.startswith("data.train=")))
    texts.write_text("".join(data.read_text().splitlines(keepends=True)[1:40]))
    changed = [*command, f"data.train={texts}", f"features.store={tmp_path / 'store'}"]
    extract(list(changed))
    with pytest.raises(
        ValueError, match=r"holds a run with features\.data\.source = .* another train\.out"
    ):
        run(changed, out, *EVERY)
    with pytest.raises(
        ValueError, match=r"features .* are not those that this run needs: .*data\.source"
    ):
        run([*command, f"features.store={tmp_path / 'store'}"], out, *EVERY)


@pytest.mark.slow
@pytest.mark.parametrize(
    "server", ["closed", pytest.param("silent", marks=pytest.mark.long), "no key"]
)
def test_wandb_out_of_reach_costs_seconds(
    server: str, whole: Path, command: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The run goes on and is kept on the disk for later."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if server == "silent":
            listener.listen(50)  # accepted by the system, never answered
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        env = {"WANDB_BASE_URL": url, **({} if server == "no key" else {"WANDB_API_KEY": "0" * 40})}

        def train_with_wandb() -> None:
            for name in [name for name in os.environ if name.startswith("WANDB_")]:
                del os.environ[name]
            os.environ |= env | {
                "HOME": str(tmp_path),
                "WANDB_CONFIG_DIR": str(tmp_path / "config"),
            }
            run(command, tmp_path / "run", *EVERY, "train.wandb=test")

        assert succeeds(train_with_wandb)
    output = "".join(capfd.readouterr())
    assert "wandb is not reached" in output and "wandb sync" in output
    assert list((tmp_path / "run/wandb").glob("offline-run-*/*.wandb"))
    assert equal(tmp_path / "run", whole) and rows(tmp_path / "run") == rows(whole)
