"""`data_prep.extract` as a user runs it: launched, killed, damaged, repaired."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from data_prep.extract import main
from eagle.data.store import FeatureStore
from recipes.train_eagle import main as train

ROOT = Path(__file__).parents[2]
RECIPE = str(ROOT / "recipes/tiny/eagle1.yaml")


@pytest.fixture
def command(tiny_target_dir: Path, tmp_path: Path) -> list[str]:
    """The recipe on the suite's target and conversations, with a store of about two dozen shards."""
    return [
        RECIPE,
        f"target.path={tiny_target_dir / 'target'}",
        f"data.train={tiny_target_dir / 'data/train.jsonl'}",
        f"features.store={tmp_path / 'store'}",
        "target.dtype=float32",
        "data.limit=80",
        "features.dtype=float32",
        "features.shard_bytes=120000",
        "train.dtype=float32",
    ]


def files(folder: Path) -> dict[str, bytes]:
    """Every file of a store."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_extract_verify_repair(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A store is made, found whole, damaged, named, and mended; a finished one is not made again."""
    folder = tmp_path / "store"
    main([*command, "--forecast"])
    assert "forecast: " in capsys.readouterr().out and not folder.exists()
    main(command)
    printed = capsys.readouterr().out
    assert "80 examples" in printed and "% supervised" in printed and f"in {folder}" in printed
    whole, when = files(folder), {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    main(command)
    main([*command, "--verify"])
    assert "hold what was written" in capsys.readouterr().out
    assert when == {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    damaged = bytearray(whole["shard-00002.safetensors"])
    damaged[-7] ^= 4
    (folder / "shard-00002.safetensors").write_bytes(damaged)
    (folder / "examples.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"examples\.safetensors is missing or damaged"):
        main([*command, "--verify"])
    main([*command, "--repair"])
    assert files(folder) == whole
    (folder / "shard-00002.safetensors").write_bytes(damaged)
    with pytest.raises(ValueError, match=r"shard-00002.*its bytes"):
        main([*command, "--verify"])
    main([*command, "--repair"])
    assert files(folder) == whole and "shard-00002" in capsys.readouterr().out


@pytest.mark.slow
def test_a_second_extraction_sees_a_flipped_byte(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a store that is whole, and of one that lacks a shard: it is named, and nothing is computed before."""
    short = [*command, "data.limit=12"]
    main(short)
    assert "verify" not in capsys.readouterr().err  # nothing was there
    whole = files(tmp_path / "store")
    for absent in (None, "shard-00000.safetensors"):
        damaged = bytearray(whole["shard-00001.safetensors"])
        damaged[-7] ^= 4
        (tmp_path / "store/shard-00001.safetensors").write_bytes(damaged)
        if absent:
            (tmp_path / "store" / absent).unlink()
        with pytest.raises(
            ValueError, match=r"shard-00001.* not those that were written.* --repair"
        ):
            main(short)
        assert not (absent and (tmp_path / "store" / absent).is_file())
        main([*short, "--repair"])
        assert files(tmp_path / "store") == whole
    capsys.readouterr()
    main(short)
    assert "0 of " in capsys.readouterr().out


@pytest.mark.slow
def test_a_changed_recipe_is_refused(command: list[str]) -> None:
    """Another max_length or other taps do not mix into a store that is there."""
    main(command)
    with pytest.raises(
        ValueError, match=r"data\.max_length: the store has 512, this run needs 100"
    ):
        main([*command, "data.max_length=100"])


def test_what_cannot_be_meant_is_refused(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistyped option and a recipe without a store."""
    with pytest.raises(SystemExit):
        main([*command, "--forcast"])
    assert "--forcast" in capsys.readouterr().err
    with pytest.raises(ValueError, match="computed while training"):
        main([*command, "features.store=null"])


def test_the_precision_of_auto_is_kept(
    command: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is said, recorded, and kept to: a store that is there decides, also where auto is something else."""

    def auto_is(dtype: torch.dtype) -> None:
        for module in ("data_prep.extract", "eagle.target.target"):
            monkeypatch.setattr(f"{module}.fastest_dtype", lambda _: dtype)

    short = [*command, "data.limit=12", "target.dtype=auto", f"train.out={tmp_path / 'run'}"]
    auto_is(torch.bfloat16)
    main(short)
    printed = capsys.readouterr().out
    assert (
        "target.dtype auto is bfloat16 on this machine" in printed
        and "no more accurate than bfloat16" in printed
    )
    store = FeatureStore(tmp_path / "store")
    assert store.identity["target"]["dtype"] == "bfloat16"
    whole = files(tmp_path / "store")
    auto_is(torch.float32)
    main(short)  # nothing is left to compute, and a reader takes what is there
    train([*short, "train.epochs=1"])
    store.discard([1])
    main(short)
    assert files(tmp_path / "store") == whole
    with pytest.raises(
        ValueError, match=r"target\.dtype: the store has 'bfloat16', this run needs 'float32'"
    ):
        main([*short, "target.dtype=float32"])
    store.discard([1])
    main([*short, "target.dtype=bfloat16"])
    assert files(tmp_path / "store") == whole
    live = [*short, "features.store=null", "train.epochs=1", f"train.out={tmp_path / 'live'}"]
    train(live)
    auto_is(torch.bfloat16)
    with pytest.raises(
        ValueError, match=r"features\.target\.dtype = 'float32', this one has 'bfloat16'"
    ):
        train(live)


@pytest.mark.slow
def test_a_mistake_ends_in_a_message_and_a_fault_in_a_traceback(command: list[str]) -> None:
    """Who can mend it is told how; who cannot, needs to report it whole."""
    script = [sys.executable, "-m", "data_prep.extract", *command, "data.train=nowhere.jsonl"]
    done = subprocess.run(script, capture_output=True, text=True, cwd=ROOT)
    assert (
        done.returncode == 1 and "\nerror: no file or folder at nowhere.jsonl" in "\n" + done.stderr
    )
    assert "Traceback" not in done.stderr
    fault = "import eagle.log, json; eagle.log.script(lambda argv: json.loads('{'))"
    done = subprocess.run([sys.executable, "-c", fault], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1 and "Traceback" in done.stderr


def launch_command(command: list[str], processes: int) -> list[str]:
    """The command line that a user gives for several processes."""
    # accelerate starts several processes only where there are accelerators; on a CPU its launcher's own launcher does
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        str(processes),
    ]
    return [*launch, "-m", "data_prep.extract", *command]


@pytest.mark.slow
@pytest.mark.long
def test_one_two_and_three_processes_make_equal_stores(command: list[str], tmp_path: Path) -> None:
    """Bit for bit, index included, with no step that merges anything."""
    stores = {}
    for processes in (1, 2, 3):
        run = [*launch_command(command, processes), f"features.store={tmp_path / str(processes)}"]
        printed = subprocess.run(
            run, check=True, stdout=subprocess.PIPE, text=True, timeout=120
        ).stdout
        assert f"to compute, {processes} process" in printed
        stores[processes] = files(tmp_path / str(processes))
    assert stores[1] == stores[2] == stores[3]
    assert len(FeatureStore(tmp_path / "3").plan) >= 20


@pytest.mark.slow
def test_a_killed_script_goes_on_with_any_number_of_processes(
    command: list[str], tmp_path: Path
) -> None:
    """Started by two, killed whole, ended by three: the store that one process makes."""
    subprocess.run(
        [*launch_command(command, 1), f"features.store={tmp_path / 'one'}"], check=True, timeout=120
    )
    folder = tmp_path / "store"
    run = subprocess.Popen(launch_command(command, 2), start_new_session=True)
    while len(list(folder.glob("*.sha256"))) < 5:
        assert run.poll() is None
        time.sleep(0.005)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    kept = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.sha256")}
    assert 5 <= len(kept) < len(FeatureStore(folder, partial=True).plan)
    subprocess.run(launch_command(command, 3), check=True, timeout=120)
    assert files(folder) == files(tmp_path / "one")
    assert all((folder / name).stat().st_mtime_ns == when for name, when in kept.items())


@pytest.mark.slow
def test_training_cannot_tell_live_features_from_stored_ones(
    command: list[str], tmp_path: Path
) -> None:
    """The same head, bit for bit, from a store and without one."""
    short = [*command, "data.limit=12", "train.epochs=1", "train.lr=1e-3"]
    main(short)
    train([*short, f"train.out={tmp_path / 'stored'}"])
    train([*short, f"train.out={tmp_path / 'live'}", "features.store=null"])
    train([*short, f"train.out={tmp_path / 'other'}", "train.seed=1"])
    stored, live, other = (
        (tmp_path / name / "head/model.safetensors").read_bytes()
        for name in ("stored", "live", "other")
    )
    assert stored == live != other


@pytest.fixture
def short(command: list[str], tiny_target_dir: Path, tmp_path: Path) -> list[str]:
    """A store of twelve examples of a target that a test may take away, and one epoch."""
    shutil.copytree(tiny_target_dir / "target", tmp_path / "target")
    overrides = [
        f"target.path={tmp_path / 'target'}",
        "data.limit=12",
        "train.epochs=1",
        "train.lr=1e-3",
    ]
    main([*command, *overrides])
    return [*command, *overrides]


def train_head(command: list[str], out: Path) -> bytes:
    """The weights of the head that a run leaves."""
    train([*command, f"train.out={out}"])
    return (out / "head/model.safetensors").read_bytes()


def without_head(folder: Path) -> None:
    """Make of a store one that was made before stores held what a head borrows."""
    index = json.loads((folder / "index.json").read_text())
    del index["made"]["borrowed"], index["made"]["target"]
    (folder / "index.json").write_text(json.dumps(index))
    for name in ("head.safetensors", "config.json"):
        (folder / name).unlink()


@pytest.mark.slow
def test_a_store_trains_without_its_target(
    short: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same head, bit for bit, with the target there, taken away, and loaded, as an older store needs it."""
    there = train_head(short, tmp_path / "there")
    assert "could not be compared" not in capsys.readouterr().out
    (tmp_path / "target").rename(tmp_path / "moved")
    away = train_head(short, tmp_path / "away")
    assert capsys.readouterr().out.count("could not be compared") == 1
    without_head(tmp_path / "store")
    with pytest.raises(ValueError, match="no model at"):
        train_head(short, tmp_path / "lost")
    (tmp_path / "moved").rename(tmp_path / "target")
    assert there == away == train_head(short, tmp_path / "loaded")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.max_length=100", r"data\.max_length: the store has 512, this run needs 100"),
        ("target.dtype=bfloat16", r"target\.dtype: the store has 'float32'"),
        (
            "target.path=nobody/has-this",
            r"nobody/has-this.* is not here, and .* was made from .*: name that one",
        ),
        ("data.template=TEMPLATE", "template: the store has"),
    ],
)
def test_another_run_is_refused_without_the_target_too(
    override: str, message: str, short: list[str], tmp_path: Path
) -> None:
    """All that the recipe itself decides is compared, and the target's name."""
    (tmp_path / "template.jinja").write_text("{{ messages }}")
    (tmp_path / "target").rename(tmp_path / "moved")
    override = override.replace("TEMPLATE", str(tmp_path / "template.jinja"))
    with pytest.raises(ValueError, match=message):
        train_head([*short, override], tmp_path / "run")


@pytest.mark.slow
def test_a_changed_target_is_refused(short: list[str], tmp_path: Path) -> None:
    """Where its files are there they are compared, though nothing of them is loaded."""
    config = json.loads((tmp_path / "target/config.json").read_text())
    (tmp_path / "target/config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    with pytest.raises(ValueError, match=r"target\.config: the store has"):
        train_head(short, tmp_path / "run")


def test_what_a_head_borrows_is_mended(short: list[str], tmp_path: Path) -> None:
    """Damaged, it is refused by every command that would read it, until a repair makes it anew, and it alone."""
    folder = tmp_path / "store"
    whole = files(folder)
    when = {path: path.stat().st_mtime_ns for path in folder.glob("shard*")}
    damaged = bytearray(whole["head.safetensors"])
    damaged[len(damaged) // 2] ^= 1
    (folder / "head.safetensors").write_bytes(damaged)
    for refused in (main, train, lambda argv: main([*argv, "--verify"])):
        with pytest.raises(
            ValueError, match=r"head\.safetensors is missing or damaged: .*--repair"
        ):
            refused([*short, f"train.out={tmp_path / 'run'}"])
    main([*short, "--repair"])
    assert files(folder) == whole
    assert when == {path: path.stat().st_mtime_ns for path in folder.glob("shard*")}
