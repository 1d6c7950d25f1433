"""What the documents tell a reader to type works: snippets run and short commands run; figures are those of the files.

tests/test_guides.py parses all commands of all pages, and runs README and the guides whole.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from math import ceil, floor
from pathlib import Path

import pytest

from docs_build.methods_table import methods_table
from eagle.target.target import Target
from eval.result_files.results import ACCEPTANCE_LENGTH, SPEED_UP, read_results
from tests.documents import GUIDES, PAGES, ROOT, STAGES, blocks, commands, make_checkout, words_of
from tests.forked import Server

SNIPPETS = [(page.name, text) for page in PAGES for text in blocks(page, "python")]


def is_short(line: str) -> bool:
    """Return whether a command is a verb of `eagle` that takes seconds and needs no model of the reader's."""
    words = words_of(line)
    needs_mine = any(word.startswith(("my/", "target.path=my/", "runs/model/")) for word in words)
    # steps of a stage that need no training and no answers
    is_step = "--estimate" in words or ("--only" in words and "answers" not in words)
    return words[0] == "eagle" and (is_step or words[1] not in STAGES) and not needs_mine


@pytest.fixture(scope="module")
def made(
    tiny_target_dir: Path,
    tiny_target: Target,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A working directory in which `eagle demo --tiny` seems to have run."""
    folder = tmp_path_factory.mktemp("made")
    make_checkout(folder, tiny_target_dir, tiny_target)
    return folder


@pytest.fixture
def checkout(made: Path, tmp_path: Path) -> Path:
    """A copy of it that no other case writes to."""
    return shutil.copytree(made, tmp_path / "checkout", symlinks=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One process that has imported everything, and is forked for each command."""
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.close()


@pytest.mark.slow
@pytest.mark.parametrize(("page", "text"), SNIPPETS)
def test_snippet_runs(page: str, text: str, checkout: Path, server: Server) -> None:
    """Every Python snippet runs as it stands, in a process of its own."""
    ended = server.run(["-c", text], checkout)
    assert ended.status == 0, str(ended)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_short_commands_run(page: Path, checkout: Path, server: Server) -> None:
    """Every short command of a page runs as it stands, after those above it."""
    for line in filter(is_short, commands(page)):
        ended = server.run(words_of(line)[1:], checkout)
        assert ended.status == 0, str(ended)


def test_pages_name_targets_of_make_that_exist() -> None:
    """All other commands are parsed by their programs in tests/test_guides.py."""
    # a target is a word before a colon at the start of a line
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = set()
    for page in [*PAGES, *GUIDES]:
        for line in commands(page):
            program, *words = words_of(line)
            if program == "make":
                named |= {word for word in words if "=" not in word}
    assert named - set(targets) == set()


def test_the_first_commands_are_those_of_a_fresh_clone() -> None:
    """The main job and the tests; tests/test_fresh_clone.py runs both as they stand."""
    assert commands(ROOT / "README.md")[:2] == ["make demo", "make test"]


def test_no_page_installs_what_is_not_published() -> None:
    """There is no release: a page that says otherwise leaves every reader with an error."""
    lines = [line for page in [*PAGES, *GUIDES] for line in commands(page)]
    assert [line for line in lines if "install eagle-heads" in line] == []


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/index.md",
        "docs/guides/hardware.md",
        "recipes/tiny/demo.py",
        "Makefile",
        "eagle/README.md",
    ],
)
def test_the_demos_minutes_are_told_in_one_way(page: str) -> None:
    """They are the measured ones, rounded outwards."""
    runs = json.loads((ROOT / "docs/results/demo_times.json").read_text())["runs"]
    minutes = [run["minutes"] for run in runs]
    assert floor(min(minutes)) == 2
    assert ceil(max(minutes)) == 5
    assert "two to five minutes" in " ".join((ROOT / page).read_text().split())


def test_the_laptop_guide_has_the_demos_figures() -> None:
    """They are those of the result file that README's table is made of."""
    # eagle1 at T = 0 is the head that the guide speaks of
    groups = read_results(ROOT / "docs/results/demo.jsonl").groups()
    (head,) = [group for group in groups if (group.drafter, group.temperature) == ("eagle1", 0)]
    length = head.estimate(ACCEPTANCE_LENGTH).value
    speedup = head.estimate(SPEED_UP).value
    sentence = f"τ {length:.2f} at T = 0 and decoded {speedup:.2f} ×"
    assert sentence in (ROOT / "docs/guides/hardware.md").read_text()


def test_the_table_across_methods_is_that_of_the_result_files() -> None:
    """README's table is what its command prints."""
    assert methods_table() in (ROOT / "README.md").read_text()


@pytest.mark.slow
def test_the_text_of_an_index_page_has_no_relative_links() -> None:
    """On a package index they lead nowhere, nor do pictures."""
    (name,) = re.findall(r'^readme = "(.*?)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert not re.findall(r"\]\((?!https?:)", (ROOT / name).read_text())
