"""A place for folders that were made to do harm: a healthy head, a marker that code would make, a secret outside."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import load_file, save_file

from eagle import Target, load_drafter
from eagle.core.trace import Trace
from eagle.decoding.decode import generate as decode
from eagle.drafters.outside import METHOD_FILE
from eagle.recipe import Recipe

SECRET = "what lies outside of the folder"
EVIL = """
from pathlib import Path
Path({marker!r}).touch()
from eagle.drafters.recurrent.eagle1 import Eagle1
class Evil(Eagle1):
    pass
"""
# files that lie beside a head in the folder of a run
NOTES = ("results.jsonl", "metrics.jsonl", "lossless.json", "report.html")
# the paths that Python opens; a hook cannot be taken away again, so one stays for all tests
OPENED: list[str] = []


class Code:
    """Runs when it is unpickled: it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def in_little_memory(action: Callable[[], str], megabytes: int = 60) -> str:
    """Return what an action returns when the process may grow by so many megabytes and no further."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    size = pages * resource.getpagesize()
    # address space counts what is mapped, also where no page is touched
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + megabytes * 10**6, hard))
    try:
        return action()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class Place:
    """A run's folder with a healthy head, a marker that hostile code would make, and a secret outside."""

    def __init__(
        self,
        root: Path,
        recipe: Recipe,
        target_dir: Path,
    ) -> None:
        self.run = root / "run"
        self.head = self.run / "head"
        self.marker = root / "marker"
        self.outside = root / "outside"
        self.outside.mkdir()
        self.target = str(target_dir)
        # the code names the marker of this place
        self.evil = EVIL.format(marker=str(self.marker))
        values = recipe.model_dump(mode="json")
        values["target"]["path"] = self.target
        values["train"]["out"] = str(self.run)
        # measure, tune and lossless read the head by this key
        values["eval"]["drafters"] = {"foreign": {"head": str(self.head)}}
        self.recipe = Recipe.parse(values, "test")
        self.recipe_file = root / "recipe.yaml"
        self.recipe_file.write_text(self.recipe.dump())

    def fill(self, head: Path) -> None:
        """Copy a healthy head to the place, with the recipe that the place has."""
        shutil.copytree(head, self.head)
        (self.head / "recipe.yaml").write_text(self.recipe.dump())

    def write_module(self, name: str) -> None:
        """Write code that makes the marker."""
        (self.head / name).write_text(self.evil)

    def change(self, section: str | None = None, **changes: Any) -> None:
        """Write other values into the head's config, or into a section of it."""
        config = json.loads((self.head / "config.json").read_text())
        values = config if section is None else config[section]
        values.update(changes)
        (self.head / "config.json").write_text(json.dumps(config))

    def add_to_recipe(self, text: str) -> None:
        """Append YAML to the recipe beside the head."""
        with (self.head / "recipe.yaml").open("a") as file:
            file.write(f"\n{text}\n")

    def link(self, name: str) -> None:
        """Replace a file of the head by a link to a file outside that is as whole and holds the secret."""
        path = self.head / name
        outside = self.outside / name
        if name == "config.json":
            # as whole as before: a reader that follows the link finds nothing wrong
            outside.write_text(json.dumps({**json.loads(path.read_text()), "note": SECRET}))
        elif name == "recipe.yaml":
            values = yaml.safe_load(path.read_text())
            values["data"]["train"] = SECRET
            outside.write_text(yaml.safe_dump(values))
        elif name == "model.safetensors":
            save_file(load_file(path), outside, {"note": SECRET})
        else:
            outside.write_text(json.dumps({"note": SECRET}))
        # absolute, as an unpacked archive may hold it
        path.unlink(missing_ok=True)
        path.symlink_to(outside)

    def opened_outside(self) -> list[str]:
        """Return the opened files that lie outside of the run's folder, where links lead to."""
        # a hook hears of the link, not of what it leads to
        return [path for path in OPENED if os.path.realpath(path).startswith(str(self.outside))]


def name_a_file(place: Place) -> None:
    """Make the kind a path to code."""
    place.write_module("evil.py")
    place.change("settings", kind=f"{place.head}/evil.py:Evil")


def bring_a_method(place: Place) -> None:
    """Put a method.py beside the head, with its right checksum."""
    place.write_module(METHOD_FILE)
    # what a head that another trained with --trust-code records
    digest = hashlib.sha256(place.evil.encode()).hexdigest()
    place.change("settings", kind="evil")
    place.change(code={"file": "evil.py", "class": "Evil", "sha256": digest})


def link_notes(place: Place) -> None:
    """Make what a run tells beside its head links to files outside."""
    for name in NOTES:
        row = {"note": SECRET, "step": 1, "total": 1.0}
        (place.outside / name).write_text(json.dumps(row) + "\n")
        (place.run / name).symlink_to(place.outside / name)


def draft(place: Place, name: Any) -> None:
    """Load a drafter by a name and draft a little."""
    target = Target.load(place.target)
    drafter = load_drafter(name, target)
    decode(target, drafter, [1, 2, 3, 4], max_new_tokens=3, trace=Trace())
