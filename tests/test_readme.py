"""What the documents tell a reader to type works: snippets run, short commands run, long ones exist."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from math import ceil, floor
from pathlib import Path
from typing import Any

import pytest

from docs_build.methods_table import methods_table
from eagle.recipe import Recipe
from eagle.target.target import Target
from eval.comparison.compare_plan import Comparison
from eval.result_files.results import ACCEPTANCE_LENGTH, SPEED_UP, read_results
from tests import documents
from tests.documents import PAGES, ROOT, STAGES, blocks
from tests.forked import Server
from tests.trained import BUSY

LONG = {"make", "git", "pip", "cd", "source", "accelerate"}


def fenced(language: str) -> list[tuple[str, str]]:
    """(page, text) of every fenced block of a language."""
    return [(page.name, text) for page in PAGES for text in blocks(page, language)]


def commands() -> list[tuple[str, str]]:
    """(page, command) of every command; each once, by its first page."""
    lines = [(page.name, line) for page in PAGES for line in documents.commands(page)]
    first = {line: page for page, line in reversed(lines)}
    return [(page, line) for page, line in lines if first.pop(line, None)]


def short_commands() -> list[tuple[str, list[str]]]:
    """(page, commands) of every page with commands that are not known to be long."""
    rows = [
        (page.name, [line for line in documents.commands(page) if line.split()[0] not in LONG])
        for page in PAGES
    ]
    return [row for row in rows if row[1]]


def run(rows: list[tuple[str, Any]]) -> list[Any]:
    """What is run in a process of its own: of the first page always, of the others with the slow tests."""
    return [
        pytest.param(*row, marks=() if row[0] == "README.md" else pytest.mark.slow) for row in rows
    ]


@pytest.fixture(scope="module")
def made(
    tiny_target_dir: Path, tiny_target: Target, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A working directory in which `make demo` seems to have run."""
    folder = tmp_path_factory.mktemp("made")
    documents.make_checkout(folder, tiny_target_dir, tiny_target)
    return folder


@pytest.fixture
def checkout(made: Path, tmp_path: Path) -> Path:
    """A copy of it that no other case writes to."""
    return shutil.copytree(made, tmp_path / "checkout", symlinks=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Runs what pages say, each in a fork of one process that has imported all."""
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.close()


@pytest.mark.slow
@pytest.mark.parametrize(("page", "text"), run(fenced("python")))
def test_snippet_runs(page: str, text: str, checkout: Path, server: Server) -> None:
    """Every Python snippet runs as it stands, in a process of its own."""
    ended = server.run(["-c", text], checkout)
    assert ended.status == 0, str(ended)


@pytest.mark.slow
@pytest.mark.parametrize(("page", "lines"), run(short_commands()))
def test_short_commands_run(page: str, lines: list[str], checkout: Path, server: Server) -> None:
    """Every short command of a page runs as it stands, after those above it."""
    for line in lines:
        check_short_command(page, line, checkout, server)


def check_short_command(page: str, line: str, checkout: Path, server: Server) -> None:
    """Parse a command of the project's, and run it unless it takes minutes."""
    words = shlex.split(line)
    if words[0] == "eagle":
        documents.check_call(documents.as_call(line), {})
        if words[1] not in STAGES and not is_long(words):
            ended = server.run(words[1:], checkout)
            assert ended.status == 0, str(ended)
        return
    assert words[0] == "python", f"{page}: {line}: neither a known long command nor python"
    if is_long(words):
        assert exists(words), f"{page}: {line} names a file or module that does not exist"
        return
    subprocess.run(
        [sys.executable, *words[1:]],
        cwd=checkout,
        check=True,
        timeout=BUSY * 120,
        env={**os.environ},
    )


def is_long(words: list[str]) -> bool:
    """Whether a python command is a stage that takes minutes."""
    stages = ("data_prep.extract", "data_prep.regenerate", "eval.measure", "eval.lossless")
    stages += (
        "eval.tune",
        "eval.compare",
        "tests.engines",
        "recipes/tiny/make_target.py",
        "recipes/tiny/demo.py",
        "bench/",
        "bench.gpu",
        "pytest",  # of tests that run anyway
    )
    return any(
        word.startswith((*stages, "my/", "target.path=my/")) for word in words
    )  # a model of the reader's


def exists(words: list[str]) -> bool:
    """Whether all modules and files of a long command exist; recipes are parsed with their overrides."""
    modules = [
        words[place + 1]
        for place, word in enumerate(words)
        if word == "-m" and "pytest" not in words
    ]
    files = [word for word in words if word.endswith((".py", ".yaml"))]
    for recipe in (word for word in files if word.endswith(".yaml") and "/accelerate/" not in word):
        load = Comparison.load if "/compare/" in recipe else Recipe.load
        load(ROOT / recipe, [word for word in words if "=" in word and not word.startswith("-")])
    places = [ROOT / module.replace(".", "/") for module in modules]
    return all(
        place.with_suffix(".py").exists() or (place / "__main__.py").exists() for place in places
    ) and all((ROOT / file).exists() for file in files)


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


def test_the_first_commands_are_those_of_a_fresh_clone() -> None:
    """One that runs the main job and one that passes the tests; tests/test_fresh_clone.py runs both as they stand."""
    assert blocks(ROOT / "README.md", "bash")[0].splitlines()[0].startswith("make demo")
    assert documents.commands(ROOT / "README.md")[:2] == ["make demo", "make test"]


@pytest.mark.parametrize("page", [*PAGES, *documents.GUIDES], ids=lambda page: page.name)
def test_no_page_installs_what_is_not_published(page: Path) -> None:
    """There is no release: a page that says otherwise leaves every reader with an error."""
    assert not [line for line in documents.commands(page) if "install eagle-heads" in line]


def test_the_demos_minutes_and_figures_are_told_in_one_way() -> None:
    """Every page has the minutes that were measured, rounded outwards, and the laptop guide has README's figures."""
    minutes = [
        run["minutes"]
        for run in json.loads((ROOT / "docs/results/demo_times.json").read_text())["runs"]
    ]
    assert (floor(min(minutes)), ceil(max(minutes))) == (2, 5)
    pages = [
        "README.md",
        "docs/index.md",
        "docs/guides/laptop.md",
        "recipes/tiny/demo.py",
        "Makefile",
        "eagle/README.md",
    ]
    assert not [
        page
        for page in pages
        if "two to five minutes" not in " ".join((ROOT / page).read_text().split())
    ]
    results = read_results(ROOT / "docs/results/demo.jsonl")
    head = next(
        group for group in results.groups() if (group.drafter, group.temperature) == ("eagle1", 0)
    )
    length, gain = (head.estimate(quantity).value for quantity in (ACCEPTANCE_LENGTH, SPEED_UP))
    assert (
        f"τ {length:.2f} at T = 0 and decoded {gain:.2f} ×"
        in (ROOT / "docs/guides/laptop.md").read_text()
    )


def test_the_table_across_methods_is_that_of_the_result_files() -> None:
    """README's table is what its command prints."""
    assert methods_table() in (ROOT / "README.md").read_text()


@pytest.mark.slow
def test_the_text_of_an_index_page_has_no_relative_links() -> None:
    """They lead nowhere there, nor do pictures."""
    (name,) = re.findall(r'^readme = "(.*?)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert not re.findall(r"\]\((?!https?:)", (ROOT / name).read_text())


@pytest.mark.slow
def test_the_commands_for_your_model_work_in_their_order(
    checkout: Path, tiny_target_dir: Path, mixing_target_dir: Path
) -> None:
    """From --check to an export, as written, but for less data, one process and no server.

    The model is one that says something whatever a training run came to.
    """
    (checkout / "my").mkdir(exist_ok=True)
    (checkout / "my/model").symlink_to(mixing_target_dir)
    (checkout / "my/prompts.jsonl").symlink_to(tiny_target_dir / "data/heldout.jsonl")
    source = tiny_target_dir / "data/train.jsonl"
    less = f"data.limit=8 data.max_length=96 regenerate.source={source} regenerate.endpoint=null "
    less += "regenerate.max_new_tokens=8 regenerate.keep_truncated=true train.batch_size=4 train.max_steps=2 "
    less += "eval.count=1 eval.max_new_tokens=4"
    lines = [line for page, line in commands() if page == "README.md" and "my/model" in line]
    assert len(lines) == 6
    for line in lines:
        words = shlex.split(line.replace("--processes 8", "--processes 1"))
        program = ["-m", *words]
        overrides = less.split() if "target.path=my/model" in words else []
        if "--check" in words:
            overrides += ["train.dtype=float32"]
        done = subprocess.run(
            [sys.executable, *program, *overrides],
            cwd=checkout,
            timeout=BUSY * 120,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    assert (checkout / "runs/model/vllm/model.safetensors").is_file() and not (
        checkout / "runs/llama-3.1-8b"
    ).exists()
