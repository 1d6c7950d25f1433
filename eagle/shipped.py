"""Files that come with the package beside its modules: programs of the stages, recipes; and its commit."""

from __future__ import annotations

import difflib
import subprocess
from pathlib import Path
from typing import Any

from eagle import __version__

PACKAGE = Path(__file__).parent
# the folder that holds data_prep, eval and recipes: inside an installed package, beside that of a checkout
STAGES = PACKAGE / "stages" if (PACKAGE / "stages").is_dir() else PACKAGE.parent
RECIPES = STAGES / "recipes"
HELP_PAGE = STAGES / "docs/reference/cli.md"  # the output of `--help` of every verb
DEMO = "recipes/tiny/demo.yaml"  # what training runs where no recipe is named


def recipe_names() -> list[str]:
    """The names of the recipes that come with the package, comparisons and settings of accelerate among them."""
    return sorted(path.relative_to(RECIPES).as_posix().removesuffix(".yaml") for path in RECIPES.glob("*/*.yaml"))


def find_recipe(name: str | Path) -> Path:
    """The file at this path, else the one in the package: `tiny/eagle1`, or `recipes/tiny/eagle1.yaml`."""
    if Path(name).is_file():
        return Path(name)
    short, names = str(name).removeprefix("recipes/").removesuffix(".yaml"), recipe_names()
    if short in names:
        return RECIPES / f"{short}.yaml"
    near = difflib.get_close_matches(short, names, n=3) or ["tiny/eagle1", "llama-3.1-8b/eagle3"]
    raise ValueError(
        f"no recipe at {name}: expected a YAML file, or the name of a recipe that comes with eagle, such as "
        f"{', '.join(near)}; `eagle recipes` lists them"
    )


def commit() -> str:
    """The git commit that figures are measured at; of an installed package, its version."""
    if STAGES.parent == PACKAGE:  # git would tell of the repository that the installation lies in
        return f"eagle {__version__}"
    command = ["git", "rev-parse", "--short", "HEAD"]
    output = subprocess.run(command, cwd=PACKAGE, capture_output=True, text=True).stdout
    return output.strip() or "unknown"


def move_to_target(values: Any, original: Any, overridden: set[str]) -> Any:
    """The values, with paths in `runs/RECIPE/` moved to `runs/TARGET/` if an override has replaced the target."""
    try:
        folder = Path(original["train"]["out"]).parent
        old, new = (
            Path(target.get("adapter") or target["path"]).name for target in (original["target"], values["target"])
        )
    except (KeyError, TypeError, AttributeError):  # which parsing explains
        return values

    def move(value: Any, key: str) -> Any:
        if key in overridden or key == "target":
            return value
        if isinstance(value, dict):
            return {name: move(child, f"{key}.{name}" if key else name) for name, child in value.items()}
        is_inside = isinstance(value, str) and value.startswith(f"{folder}/")
        return str(folder.with_name(new) / Path(value).relative_to(folder)) if is_inside else value

    return values if new == old else move(values, "")
