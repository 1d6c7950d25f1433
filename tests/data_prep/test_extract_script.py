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
from tests.data.test_store import flip_bit, read_files, read_times

ROOT = Path(__file__).parents[2]
RECIPE = str(ROOT / "recipes/tiny/eagle1.yaml")


@pytest.fixture
def command(tiny_target_dir: Path, tmp_path: Path) -> list[str]:
    """The recipe on the suite's target and conversations, with a store of about two dozen shards."""
    overrides = {
        "target.path": tiny_target_dir / "target",
        "data.train": tiny_target_dir / "data/train.jsonl",
        "data.limit": 80,
        "features.store": tmp_path / "store",
        "features.shard_bytes": 120_000,
        **dict.fromkeys(("target.dtype", "features.dtype", "train.dtype"), "float32"),
    }
    return [RECIPE, *(f"{key}={value}" for key, value in overrides.items())]


@pytest.fixture
def short(
    command: list[str],
    tiny_target_dir: Path,
    tmp_path: Path,
) -> list[str]:
    """The command for a store of twelve examples, which is there, of a target that a test may take away."""
    shutil.copytree(tiny_target_dir / "target", tmp_path / "target")
    target = f"target.path={tmp_path / 'target'}"
    short = [*command, target, "data.limit=12", "train.epochs=1", "train.lr=1e-3"]
    main(short)
    return short


def test_extract_verify_repair(
    command: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A store is made, found whole, damaged, named, and mended; a finished one is not made again."""
    folder = tmp_path / "store"
    main([*command, "--forecast"])
    assert "forecast: " in capsys.readouterr().out
    assert not folder.exists()
    main(command)
    printed = capsys.readouterr().out
    for text in ("80 examples", "% supervised", f"in {folder}"):
        assert text in printed
    whole = read_files(folder)
    times = read_times(folder, "*")
    main(command)
    # neither a second extraction nor a check writes a file
    main([*command, "--verify"])
    assert "hold what was written" in capsys.readouterr().out
    assert read_times(folder, "*") == times
    # the tokens are mended first, as shards are checked by them
    shard = folder / "shard-00002.safetensors"
    flip_bit(shard)
    (folder / "examples.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"examples\.safetensors is missing or damaged"):
        main([*command, "--verify"])
    main([*command, "--repair"])
    assert read_files(folder) == whole
    flip_bit(shard)
    with pytest.raises(ValueError, match=r"shard-00002.*its bytes"):
        main([*command, "--verify"])
    main([*command, "--repair"])
    assert read_files(folder) == whole
    assert "shard-00002" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("absent", [None, "shard-00000.safetensors"])
def test_a_second_extraction_sees_a_flipped_bit(
    absent: str | None,
    short: list[str],
    tmp_path: Path,
) -> None:
    """The shard is named before anything is computed, in a whole store and in one that lacks a shard."""
    folder = tmp_path / "store"
    whole = read_files(folder)
    flip_bit(folder / "shard-00001.safetensors")
    if absent:
        (folder / absent).unlink()
    message = r"shard-00001.* not those that were written.* --repair"
    with pytest.raises(ValueError, match=message):
        main(short)
    assert absent is None or not (folder / absent).is_file()
    main([*short, "--repair"])
    assert read_files(folder) == whole


def test_what_cannot_be_meant_is_refused(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistyped option and a recipe without a store are errors."""
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
    """It is printed and recorded; a store or run that is there decides, also where auto is something else."""

    def make_auto(dtype: torch.dtype) -> None:
        for module in ("data_prep.extract", "eagle.target.target"):
            monkeypatch.setattr(f"{module}.fastest_dtype", lambda _: dtype)

    folder = tmp_path / "store"
    short = [*command, "data.limit=12", "target.dtype=auto", "train.epochs=1"]
    make_auto(torch.bfloat16)
    main(short)
    printed = capsys.readouterr().out
    assert "target.dtype auto is bfloat16 on this machine" in printed
    assert "no more accurate than bfloat16" in printed
    assert FeatureStore(folder).identity["target"]["dtype"] == "bfloat16"
    whole = read_files(folder)
    # a machine where auto is float32 reads the store and completes it as it was begun
    make_auto(torch.float32)
    train([*short, f"train.out={tmp_path / 'run'}"])
    FeatureStore(folder).discard([1])
    main(short)
    assert read_files(folder) == whole
    message = r"target\.dtype: the store has 'bfloat16', this run needs 'float32'"
    with pytest.raises(ValueError, match=message):
        main([*short, "target.dtype=float32"])
    # a run without a store goes on in its own precision
    live = [*short, "features.store=null", f"train.out={tmp_path / 'live'}"]
    train(live)
    make_auto(torch.bfloat16)
    message = r"features\.target\.dtype = 'float32', this one has 'bfloat16'"
    with pytest.raises(ValueError, match=message):
        train(live)


def launch_command(command: list[str], processes: int) -> list[str]:
    """Return the command line that a user gives for several processes."""
    # accelerate starts several processes only where there are accelerators; on a CPU its launcher's own launcher does
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [
        *launch,
        "--nproc_per_node",
        str(processes),
        "-m",
        "data_prep.extract",
        *command,
    ]


@pytest.mark.slow
def test_a_killed_script_goes_on_with_any_number_of_processes(
    command: list[str], tmp_path: Path
) -> None:
    """A store begun by two processes, killed, and ended by three is the store that one process makes."""
    main([*command, f"features.store={tmp_path / 'one'}"])
    folder = tmp_path / "store"
    run = subprocess.Popen(launch_command(command, 2), start_new_session=True)
    # a checksum is the last file of a shard
    while len(list(folder.glob("*.sha256"))) < 5:
        assert run.poll() is None
        time.sleep(0.005)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    kept = read_times(folder, "*.sha256")
    assert 5 <= len(kept) < len(FeatureStore(folder, partial=True).plan)
    subprocess.run(launch_command(command, 3), check=True, timeout=120)
    assert read_files(folder) == read_files(tmp_path / "one")
    assert kept.items() <= read_times(folder, "*.sha256").items()


def train_head(command: list[str], out: Path, *overrides: str) -> bytes:
    """Return the weights of the head that a run leaves."""
    train([*command, f"train.out={out}", *overrides])
    return (out / "head/model.safetensors").read_bytes()


def remove_head(folder: Path) -> None:
    """Make of a store one that was made before stores held what a head borrows."""
    index = json.loads((folder / "index.json").read_text())
    del index["made"]["borrowed"], index["made"]["target"]
    (folder / "index.json").write_text(json.dumps(index))
    (folder / "head.safetensors").unlink()
    (folder / "config.json").unlink()


@pytest.mark.slow
def test_a_store_trains_without_its_target(
    short: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The head is the same bit for bit: from a store with and without the target, an older store, and live."""
    # the features in memory are those that a store holds
    heads = [
        train_head(short, tmp_path / "there"),
        train_head(short, tmp_path / "live", "features.store=null"),
    ]
    assert "could not be compared" not in capsys.readouterr().out
    # a store may be copied to a machine without the target
    (tmp_path / "target").rename(tmp_path / "moved")
    heads.append(train_head(short, tmp_path / "away"))
    assert capsys.readouterr().out.count("could not be compared") == 1
    # an older store needs the target itself
    remove_head(tmp_path / "store")
    with pytest.raises(ValueError, match="no model at"):
        train_head(short, tmp_path / "lost")
    (tmp_path / "moved").rename(tmp_path / "target")
    heads.append(train_head(short, tmp_path / "loaded"))
    assert len(set(heads)) == 1
    assert train_head(short, tmp_path / "other", "train.seed=1") not in heads


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.max_length=100", r"data\.max_length: the store has 512, this run needs 100"),
        ("target.path=nobody/has-this", r"has-this.* is not here, and .* was made from .*: name"),
        ("data.template=TEMPLATE", "template: the store has"),
    ],
    ids=["max_length", "path", "template"],
)
def test_another_run_is_refused_without_the_target_too(
    override: str,
    message: str,
    short: list[str],
    tmp_path: Path,
) -> None:
    """All that the recipe itself decides is compared, and the target's name."""
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    (tmp_path / "target").rename(tmp_path / "moved")
    override = override.replace("TEMPLATE", str(template))
    with pytest.raises(ValueError, match=message):
        train_head([*short, override], tmp_path / "run")


@pytest.mark.parametrize("verb", ["extract", "train", "verify"])
def test_a_damaged_borrowed_head_is_refused(
    verb: str,
    short: list[str],
    tmp_path: Path,
) -> None:
    """Every command that would read it names the repair, which makes it again, and it alone."""
    folder = tmp_path / "store"
    whole = read_files(folder)
    times = read_times(folder, "shard*")
    flip_bit(folder / "head.safetensors")
    message = r"head\.safetensors is missing or damaged: .*--repair"
    with pytest.raises(ValueError, match=message):
        if verb == "train":
            train_head(short, tmp_path / "run")
        else:
            main([*short, *(["--verify"] if verb == "verify" else [])])
    main([*short, "--repair"])
    assert read_files(folder) == whole
    assert read_times(folder, "shard*") == times
