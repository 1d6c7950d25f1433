"""The notebooks of `examples/` run by Jupyter's own kernel, and what they show is of the code that they hold."""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

from docs_build.links import find_links
from docs_build.notebooks import FOLDER, clean, find_faults, list_code, run_notebook
from eagle.drafters.recurrent.eagle1 import Eagle1
from eagle.formats.checkpoint import save_head
from eagle.target.target import Target

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def read(path: Path) -> Any:
    """A notebook as it is kept."""
    return nbformat.read(path, as_version=4)


def kinds(notebook: Any) -> list[set[str]]:
    """What each cell shows: printed text, HTML, or nothing."""
    return [
        {kind for output in cell.outputs for kind in output.get("data", [output.get("name")])}
        for cell in list_code(notebook)
    ]


@pytest.fixture(scope="module")
def checkout(
    tiny_target_dir: Path,
    tiny_target: Target,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A folder with a small target and an untrained head where the demo leaves its own."""
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "runs/demo").mkdir(parents=True)
    (folder / "examples").mkdir()
    (folder / "docs").symlink_to(ROOT / "docs")
    (folder / "runs/demo/target").symlink_to(tiny_target_dir / "target")
    # untrained: the notebooks must run, not be fast
    head = Eagle1.for_target(Eagle1.Settings(fc_bias=False), tiny_target.config)
    save_head(folder / "runs/demo/eagle1/head", head, "", {})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_on_what_the_demo_leaves(path: Path, checkout: Path) -> None:
    """From the first cell to the last; each shows as much as it does in the repository."""
    # by the same clean-up as `docs_build.notebooks` uses
    notebook = clean(run_notebook(path, checkout / "examples"))
    assert not find_faults(notebook)
    assert kinds(notebook) == kinds(read(path))
    assert {"text/html", "stdout"} <= set.union(*kinds(notebook))


@pytest.mark.slow
def test_a_cell_that_fails_is_seen(checkout: Path, tmp_path: Path) -> None:
    """Planted: an answer that differs, as a wrong drafter would make it."""
    path = shutil.copy(FOLDER / "own_method.ipynb", tmp_path)
    notebook = read(path)
    # before the cell that compares the answer with plain decoding
    place = next(
        place for place, cell in enumerate(notebook.cells) if "assert trace.tokens" in cell.source
    )
    notebook.cells.insert(place, nbformat.v4.new_code_cell("trace.tokens[-1] += 1"))
    nbformat.write(notebook, path)
    with pytest.raises(CellExecutionError, match="AssertionError"):
        run_notebook(path, checkout / "examples")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_a_notebook_shows_is_of_its_code(path: Path) -> None:
    """No error, no place of a machine, and its links lead somewhere."""
    notebook = read(path)
    assert find_faults(notebook) == []
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    links = [link[0].partition("#")[0] for link in find_links(text)]
    assert links and not [link for link in links if not (FOLDER / link).exists()]


def show_place(notebook: Any) -> None:
    """An output that names a folder."""
    list_code(notebook)[0].outputs = [nbformat.v4.new_output("stream", text=f"{'/home'}/me/runs")]


def show_error(notebook: Any) -> None:
    """An output that is an error."""
    list_code(notebook)[0].outputs = [
        nbformat.v4.new_output("error", ename="ValueError", evalue="", traceback=[])
    ]


def change_code(notebook: Any) -> None:
    """A number of the code that was not run."""
    cell = next(cell for cell in list_code(notebook) if "96" in cell.source)
    cell.source = cell.source.replace("96", "95")


def run_again(notebook: Any) -> None:
    """A cell that was run after later ones."""
    list_code(notebook)[0].execution_count = 9


@pytest.mark.parametrize(
    ("plant", "fault"),
    [
        (show_place, "it shows a place of the machine"),
        (show_error, "an error"),
        (change_code, "its code is not that of its outputs"),
        (run_again, "not run once each"),
    ],
)
def test_a_planted_fault_is_named(plant: Callable[[Any], None], fault: str) -> None:
    """Each alone, in a notebook that has none."""
    # one without faults, so that the planted one is all that is found
    notebook = copy.deepcopy(read(FOLDER / "quick_start.ipynb"))
    plant(notebook)
    (named,) = find_faults(notebook)
    assert fault in named


def test_the_readme_names_every_notebook() -> None:
    """Each has a line, and there is nothing else."""
    # lines such as "- [name.ipynb](name.ipynb): what it shows"
    named = re.findall(
        r"^- \[(\w+\.ipynb)\]\(\1\): ", (FOLDER / "README.md").read_text(), re.MULTILINE
    )
    assert sorted(named) == [path.name for path in NOTEBOOKS]
    assert {path.suffix for path in FOLDER.iterdir() if path.is_file()} == {".ipynb", ".md"}
