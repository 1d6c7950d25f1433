"""What the documents tell a reader to type works: snippets run, short commands run, long ones exist."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eagle.drafters.draft_model import DraftModel
from eagle.drafters.eagle1 import Eagle1
from eagle.formats.checkpoint import save_head
from eagle.recipe import Recipe
from eagle.target.target import Target
from eval.compare_plan import Comparison
from eval.measure import measure

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]
LONG = {"make", "git", "pip", "cd", "accelerate"}
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def fenced(language: str) -> list[tuple[str, str]]:
    """(page, text) of every fenced block of a language."""
    return [(page.name, text) for page in PAGES for found, text in FENCE.findall(page.read_text()) if found == language]


def commands() -> list[tuple[str, str]]:
    """(page, command) of every line of every shell block, without comments; each once, by its first page."""
    lines = [(page, line.partition(" #")[0].strip()) for page, text in fenced("bash") for line in text.splitlines()]
    first = {line: page for page, line in reversed(lines)}
    return [(page, line) for page, line in lines if line and not line.startswith("#") and first.pop(line, None)]


def run(rows: list[tuple[str, str]]) -> list[Any]:
    """What is run in a process of its own: of the first page always, of the others with the slow tests."""
    return [pytest.param(*row, marks=() if row[0] == "README.md" else pytest.mark.slow) for row in rows]


@pytest.fixture(scope="module")
def checkout(tiny_target_dir: Path, tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory in which `make demo` and `make tiny` seem to have run: a target, data, a head, results."""
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "runs").mkdir()
    (folder / "runs/tiny").symlink_to(tiny_target_dir)
    (folder / "runs/demo").symlink_to(tiny_target_dir)
    head = Eagle1.for_target(Eagle1.Settings(fc_bias=False), tiny_target.config)
    save_head(tiny_target_dir / "eagle1/head", head, "", {})
    small = DraftModel.for_target(DraftModel.Settings(), tiny_target.config)
    save_head(tiny_target_dir / "draft_model/head", small, "", {})
    said = (tiny_target_dir / "data/train.jsonl").read_text().splitlines(keepends=True)
    (tiny_target_dir / "data/regenerated.jsonl").write_text("".join(said[:20]))
    where = [f"target.path={tiny_target_dir / 'target'}", f"train.out={tiny_target_dir / 'eagle1'}"]
    few = [f"eval.prompts={tiny_target_dir / 'data/heldout.jsonl'}", "eval.count=2", "eval.max_new_tokens=4"]
    measure(Recipe.load(ROOT / "recipes/tiny/eagle1.yaml", [*where, *few]), "recipes/tiny/eagle1.yaml")
    for room in ("recipes", "eagle", "data_prep", "eval", "tests"):
        (folder / room).symlink_to(ROOT / room)
    return folder


@pytest.mark.parametrize(("page", "text"), run(fenced("python")))
def test_snippet_runs(page: str, text: str, checkout: Path) -> None:
    """Every Python snippet runs as it stands, in a process of its own."""
    subprocess.run([sys.executable, "-c", text], cwd=checkout, check=True, timeout=120)


@pytest.mark.parametrize(("page", "line"), run([row for row in commands() if row[1].split()[0] not in LONG]))
def test_short_command_runs(page: str, line: str, checkout: Path) -> None:
    """Every short command runs as it stands."""
    words = shlex.split(line)
    assert words[0] == "python", f"{page}: {line}: neither a known long command nor python"
    if is_long(words):
        assert exists(words), f"{page}: {line} names a file or module that does not exist"
        return
    subprocess.run([sys.executable, *words[1:]], cwd=checkout, check=True, timeout=120, env={**os.environ})


def is_long(words: list[str]) -> bool:
    """Whether a python command is a stage that takes minutes."""
    stages = ("data_prep.extract", "data_prep.regenerate", "eval.measure", "eval.lossless")
    stages += (
        "eval.tune",
        "eval.compare",
        "eval.engines",
        "recipes/tiny/make_target.py",
        "recipes/tiny/demo.py",
        "bench/",
        "pytest",  # of tests that run anyway
    )
    return any(word.startswith((*stages, "my/", "target.path=my/")) for word in words)  # a model of the reader's


def exists(words: list[str]) -> bool:
    """Whether all modules and files of a long command exist; recipes are parsed with their overrides."""
    modules = [words[place + 1] for place, word in enumerate(words) if word == "-m" and "pytest" not in words]
    files = [word for word in words if word.endswith((".py", ".yaml"))]
    for recipe in (word for word in files if word.endswith(".yaml") and "/accelerate/" not in word):
        load = Comparison.load if "/compare/" in recipe else Recipe.load
        load(ROOT / recipe, [word for word in words if "=" in word and not word.startswith("-")])
    places = [ROOT / module.replace(".", "/") for module in modules]
    return all(place.with_suffix(".py").exists() or (place / "__main__.py").exists() for place in places) and all(
        (ROOT / file).exists() for file in files
    )


@pytest.mark.parametrize(("page", "line"), [row for row in commands() if row[1].split()[0] in LONG])
def test_long_command_exists(page: str, line: str) -> None:
    """A long command names targets, files and recipes that exist."""
    words = shlex.split(line)
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(words[1:]) <= set(targets)
    if words[0] == "accelerate":
        assert words[1] == "launch"
        assert exists(words)


@pytest.mark.slow
def test_the_commands_for_your_model_work_in_their_order(checkout: Path, tiny_target_dir: Path) -> None:
    """From --check to an export, as written, but for less data, one process and no server."""
    (checkout / "my").mkdir()
    (checkout / "my/model").symlink_to(tiny_target_dir / "target")
    (checkout / "my/prompts.jsonl").symlink_to(tiny_target_dir / "data/heldout.jsonl")
    source = tiny_target_dir / "data/train.jsonl"
    less = f"data.limit=8 data.max_length=96 regenerate.source={source} regenerate.endpoint=null "
    less += "regenerate.max_new_tokens=8 regenerate.keep_truncated=true train.batch_size=4 train.max_steps=2 "
    less += "eval.count=1 eval.max_new_tokens=4"
    lines = [line for page, line in commands() if page == "README.md" and "my/model" in line]
    assert len(lines) == 6
    for line in lines:
        words = shlex.split(line.replace("--num_processes 8", "--num_processes 1"))
        program = ["-m", "accelerate.commands.launch", *words[2:]] if words[0] == "accelerate" else words[1:]
        overrides = less.split() if "target.path=my/model" in words else []
        if "--check" in words:
            overrides += ["train.dtype=float32"]
        done = subprocess.run(
            [sys.executable, *program, *overrides], cwd=checkout, timeout=300, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    assert (checkout / "runs/model/vllm/model.safetensors").is_file() and not (checkout / "runs/llama-3.1-8b").exists()
