"""Files that come with the package beside its modules: programs of the stages, recipes; and its commit."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from eagle import __version__

PACKAGE = Path(__file__).parent
# the folder that holds data_prep, eval and recipes: inside an installed package, beside that of a checkout
STAGES = PACKAGE / "stages" if (PACKAGE / "stages").is_dir() else PACKAGE.parent
RECIPES = STAGES / "recipes"
HELP_PAGE = STAGES / "docs/reference/cli.md"  # the output of `--help` of every verb
# the trained head of SmolLM2-135M-Instruct, by which `eagle demo` and `eagle generate` show what a head does
SHIPPED_HEAD = STAGES / "heads/smollm2-135m-eagle1"
DEMO = "recipes/tiny/demo.yaml"  # what training runs where no recipe is named


def reach_stages() -> None:
    """Let this process and those that it starts import data_prep, eval and recipes.

    It adds their folder to `sys.path` and to the environment variable PYTHONPATH.
    """
    if str(STAGES) not in sys.path:
        sys.path.insert(0, str(STAGES))
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if str(STAGES) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(STAGES), *paths])


def recipe_names() -> list[str]:
    """Return the names of the recipes that come with the package, comparisons and settings of accelerate among them."""
    paths = RECIPES.glob("*/*.yaml")
    return sorted(path.relative_to(RECIPES).as_posix().removesuffix(".yaml") for path in paths)


def find_recipe(name: str | Path) -> Path:
    """Return the file at this path, else the one in the package: `tiny/eagle1`, or `recipes/tiny/eagle1.yaml`."""
    if Path(name).is_file():
        return Path(name)
    short = str(name).removeprefix("recipes/").removesuffix(".yaml")
    names = recipe_names()
    if short in names:
        return RECIPES / f"{short}.yaml"
    near = difflib.get_close_matches(short, names, n=3) or ["tiny/eagle1", "llama-3.1-8b/eagle3"]
    raise ValueError(
        f"no recipe at {name}: expected a YAML file, or the name of a recipe that comes with eagle, such as "
        f"{', '.join(near)}; `eagle recipes` lists them"
    )


def check_shipped_head() -> None:
    """Refuse an installation that lacks the shipped head."""
    if not (SHIPPED_HEAD / "model.safetensors").is_file():
        raise ValueError(
            f"no head at {SHIPPED_HEAD}: expected the one that comes with eagle; install eagle again"
        )


def commit() -> str:
    """Return the git commit that figures are measured at; of an installed package, its version."""
    # inside an installed package git would report the commit of whatever repository surrounds it
    if STAGES.parent == PACKAGE:
        return f"eagle {__version__}"
    command = ["git", "rev-parse", "--short", "HEAD"]
    output = subprocess.run(command, cwd=PACKAGE, capture_output=True, text=True).stdout
    return output.strip() or "unknown"


def move_to_target(values: Any, original: Any, overridden: set[str]) -> Any:
    """Move paths in `runs/RECIPE/` to `runs/TARGET/` if an override has replaced the target.

    A run for another target then does not overwrite the files of the recipe's own.

    Args:
        values: A recipe with its overrides.
        original: The recipe without them.
        overridden: The keys of the overrides, whose values stay.
    """
    try:
        folder = Path(original["train"]["out"]).parent
        old_name = _target_name(original["target"])
        new_name = _target_name(values["target"])
    except (
        KeyError,
        TypeError,
        AttributeError,
    ):  # of a malformed recipe, which parsing refuses later
        return values
    if new_name == old_name:
        return values

    def move(value: Any, key: str) -> Any:
        """Return a value with the paths in it moved; `key` is its dotted key, as in an override, "" for all values."""
        # values that the user gave stay, and so does the target
        if key in overridden or key == "target":
            return value
        if isinstance(value, dict):
            return {
                name: move(child, f"{key}.{name}" if key else name) for name, child in value.items()
            }
        if isinstance(value, str) and value.startswith(f"{folder}/"):
            return str(folder.with_name(new_name) / Path(value).relative_to(folder))
        return value

    return move(values, "")


def _target_name(target: Any) -> str:
    """Return the name of the folder of a target's runs: the last part of its adapter's or model's path."""
    return Path(target.get("adapter") or target["path"]).name
