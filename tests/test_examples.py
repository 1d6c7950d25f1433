"""The examples run as they stand, with a random model and with a trained one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from eagle.drafters.recurrent.eagle1 import Eagle1
from eagle.formats.checkpoint import save_head
from eagle.target.target import Target

ROOT = Path(__file__).parent.parent
EXAMPLES = ["decode_with_a_head", "compare_two_heads", "write_a_drafter"]


def run(name: str, folder: Path) -> str:
    """What an example prints in a working directory."""
    command = [sys.executable, str(ROOT / f"examples/{name}.py")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def demo_folder(tiny_target_dir: Path, tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a small target and an untrained head where the demo leaves its own."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "runs/demo").mkdir(parents=True)
    (folder / "runs/demo/target").symlink_to(tiny_target_dir / "target")
    head = Eagle1.for_target(Eagle1.Settings(fc_bias=False), tiny_target.config)
    save_head(folder / "runs/demo/eagle1/head", head, "", {})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_where_nothing_is_trained(name: str, tmp_path: Path) -> None:
    """A random model stands in, and says so."""
    text = run(name, tmp_path)
    assert "a random one stands in" in text
    assert re.search(r"acceptance length [1-9]\.\d\d", text)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_on_what_the_demo_leaves(name: str, demo_folder: Path) -> None:
    """The target and the head in `runs/demo` are used."""
    text = run(name, demo_folder)
    assert "stands in" not in text
    assert re.search(r"acceptance length [1-9]\.\d\d", text)


def test_the_readme_names_every_example() -> None:
    """Each of them, and nothing else, has a line."""
    files = {path.name for path in (ROOT / "examples").glob("*.py")} - {"small_model.py"}
    named = set(re.findall(r"^python examples/(\w+\.py) +#", (ROOT / "examples/README.md").read_text(), re.MULTILINE))
    assert files == named == {f"{name}.py" for name in EXAMPLES}
