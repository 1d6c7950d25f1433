"""Run the notebooks of `examples/` on what `eagle demo --tiny` left, with outputs: `python -m docs_build.notebooks`."""

from __future__ import annotations

import re
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "examples"
MARK = "eagle_code"  # in a notebook's metadata: the checksum of the code that its outputs belong to
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:home|root|tmp|usr|opt|mnt|private|Users)/")
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def run_notebook(path: Path, folder: Path) -> Any:
    """Run a notebook from its first cell to its last in a folder, by Jupyter's own kernel; a cell's error is raised."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        coalesce_streams=True,
    )
    client.execute()
    return notebook


def list_code(notebook: Any) -> list[Any]:
    """Return the cells that hold code."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def checksum(notebook: Any) -> str:
    """Return a checksum of a notebook's code."""
    code = "\0".join(cell.source for cell in list_code(notebook))
    return sha256(code.encode()).hexdigest()[:16]


def clean(notebook: Any) -> Any:
    """Remove times, progress bars and warnings, which belong to a run, and return the notebook."""
    for cell in list_code(notebook):
        # when each message of the kernel came
        cell.metadata.pop("execution", None)
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata = nbformat.from_dict({**METADATA, MARK: checksum(notebook)})
    return notebook


def find_faults(notebook: Any) -> list[str]:
    """Return why a notebook may not be kept: outputs of other code, errors, or paths of the machine that ran it."""
    code = list_code(notebook)
    faults = []
    for cell in code:
        # only the output of an exception has its name
        if any("ename" in output for output in cell.outputs):
            faults.append(f"cell {cell.execution_count}: an error")
    if notebook.metadata.get(MARK) != checksum(notebook):
        faults.append("its code is not that of its outputs: run `python -m docs_build.notebooks`")
    if [cell.execution_count for cell in code] != [*range(1, len(code) + 1)]:
        faults.append("its cells were not run once each, in their order")
    text = nbformat.writes(notebook)
    if MACHINE_PATH.search(text) or f"{ROOT}/" in text:
        faults.append("it shows a place of the machine that ran it")
    return faults


def write() -> None:
    """Run all notebooks where they lie, and write them with their outputs."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        notebook = clean(run_notebook(path, FOLDER))
        faults = find_faults(notebook)
        if faults:
            sys.exit(f"error: {path.name} is left as it was: {'; '.join(faults)}")
        nbformat.write(notebook, path)
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    write()
