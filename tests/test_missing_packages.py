"""Without wandb, deepspeed and datasets: what does without them works, what needs one names it."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import venv
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

from tests.trained import RECIPE, ROOT

MISSING = ("wandb", "deepspeed", "datasets")
# in one process, as each would import torch and transformers anew
WORKS = """
import sys
import eagle
from eagle.__main__ import main
from eagle import Target, generate, load_drafter, stream

run, target, *recipe = sys.argv[1:]
for stage in ("extract", "train", "measure"):
    main([stage, *recipe])
main(["generate", f"{run}/head", "--target", target, "--max-new-tokens", "4", "Once"])
main(["export", f"{run}/head", "--target", target, "--to", "vllm", f"{run}/export"])
model = Target.load(target)
answers = []
for drafter in ("none", "ngram", "suffix", f"{run}/head"):
    loaded = load_drafter(drafter, model)
    trace = generate(model, loaded, [5, 6, 7], max_new_tokens=6, stop=[])
    answers.append(trace.tokens)
    answers.append([])
    for new in stream(model, loaded, [5, 6, 7], max_new_tokens=6, stop=[]):
        answers[-1] += new
assert answers == [answers[0]] * 8, answers
assert not {"wandb", "deepspeed", "datasets"} & set(sys.modules)
print("all of it works")
"""
# a name of a hub, a table, a tracker, ZeRO in this process, and by the launcher
REFUSED = """
import os, sys
from contextlib import suppress
from eagle.__main__ import main

table, *recipe = sys.argv[1:]
train = ["train", *recipe]
for words in (
    ["extract", *recipe, "data.train=someone/chats"],
    ["extract", *recipe, f"data.train={table}"],
    [*train, "train.log_with=wandb"],
    [*train, "--processes", "2", "--config_file", "zero2"],
    [*train, "ZeRO"],
):
    print(f"-- {words[-1]}", file=sys.stderr)
    if words[-1] == "ZeRO":
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        words.pop()
    with suppress(SystemExit):
        main(words)
        print("it was not refused", file=sys.stderr)
"""


def entries_of(package: str) -> set[str]:
    """Return the names in site-packages that belong to an installed distribution."""
    return {Path(file).parts[0] for file in distribution(package).files or ()}


def make_environment(folder: Path, without: tuple[str, ...]) -> Path:
    """Make an environment of links to all that is installed but these; return its interpreter."""
    venv.create(folder, symlinks=True)
    (inside,) = folder.glob("lib/python*/site-packages")
    left_out = set[str]().union(*map(entries_of, without))
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        # a .pth file would lead back to what is left out
        if entry.name not in left_out and entry.suffix != ".pth":
            (inside / entry.name).symlink_to(entry)
    return folder / "bin/python"


@pytest.fixture(scope="module")
def run_without(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Run a text of Python with arguments, in this checkout, where the packages are missing."""
    python = make_environment(tmp_path_factory.mktemp("without") / "env", MISSING)
    inside = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}

    def run(code: str, *arguments: Any) -> Any:
        words = [python, "-c", code, *map(str, arguments)]
        return subprocess.run(
            words,
            env=inside,
            cwd=ROOT,
            capture_output=True,
            text=True,
        )

    return run


@pytest.fixture
def words(tiny_target_dir: Path, tmp_path: Path) -> list[str]:
    """The tiny recipe with few conversations, and its files in a folder of the test."""
    return [
        RECIPE,
        f"target.path={tiny_target_dir / 'target'}",
        "target.dtype=float32",
        f"data.train={tiny_target_dir / 'data/train.jsonl'}",
        "data.limit=12",
        "data.max_length=96",
        f"features.store={tmp_path / 'store'}",
        "train.max_steps=2",
        "train.validation=0",
        f"train.out={tmp_path / 'run'}",
        f"eval.prompts={tiny_target_dir / 'data/heldout.jsonl'}",
        "eval.count=1",
        "eval.max_new_tokens=4",
        "eval.temperatures=[0.0]",
    ]


def test_they_are_installed_here() -> None:
    """Else the tests below would show nothing; that they are missing there, each refusal shows."""
    for package in MISSING:
        assert package in entries_of(package)


@pytest.mark.slow
def test_all_else_works_without_them(
    run_without: Callable[..., Any],
    words: list[str],
    tmp_path: Path,
) -> None:
    """Extraction, training, measuring, exporting and decoding; no answer depends on its drafter."""
    ended = run_without(
        WORKS,
        tmp_path / "run",
        words[1].removeprefix("target.path="),
        *words,
    )
    assert ended.returncode == 0 and "all of it works" in ended.stdout, ended.stdout + ended.stderr


@pytest.mark.slow
def test_what_needs_one_names_it(
    run_without: Callable[..., Any],
    words: list[str],
    tmp_path: Path,
) -> None:
    """In one sentence, with what to install, and without a traceback."""
    # the magic bytes are enough for a table
    (tmp_path / "chats.parquet").write_bytes(b"PAR1")
    ended = run_without(REFUSED, tmp_path / "chats.parquet", *words)
    assert ended.returncode == 0 and "Traceback" not in ended.stderr, ended.stderr
    assert "it was not refused" not in ended.stderr, ended.stderr
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    needed = ["datasets", "datasets", "wandb", "deepspeed", "deepspeed"]
    assert len(errors) == len(needed), ended.stderr
    for error, package in zip(errors, needed, strict=True):
        assert "not installed here" in error and f"`pip install {package}`" in error, error
