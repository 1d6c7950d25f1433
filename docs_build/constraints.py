"""Pin what this environment has installed, as one known-good set: `python -m docs_build.constraints [FILE]`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent
FILE = ROOT / "constraints.txt"
LOWEST_PYTHON = "3.10"  # that is supported
NEXT_PYTHON = "3.11"
# what pyproject.toml asks for; Python 3.10 has no reader of such files
LISTS = re.compile(r"^(?:dependencies|dev|docs) = \[(.*?)\n?\]$", re.DOTALL | re.MULTILINE)
INTRODUCTION = """\
# One known-good set, written by `python -m docs_build.constraints`; pyproject.toml holds the ranges.
# On a machine with a GPU, torch comes with its GPU build.
"""
NEWEST = """\
# The newest of every dependency that the tests were run with, written by `make test-newest`, on Python {python}.
"""


def direct_requirements() -> list[Requirement]:
    """Return what pyproject.toml asks for, for the package and for its extras dev and docs."""
    lists = LISTS.findall((ROOT / "pyproject.toml").read_text())
    return [Requirement(text) for text in re.findall(r'"(.*?)"', "".join(lists))]


def lowest_pins(requirements: Iterable[Requirement]) -> list[str]:
    """Return a line of a constraints file for every lower bound: `>=5.17` becomes `==5.17`."""
    pins = []
    for requirement in requirements:
        for bound in requirement.specifier:
            if bound.operator == ">=":
                pins.append(f"{requirement.name}=={bound.version}")
    return pins


def list_requirements(package: str, extras: set[str]) -> list[Requirement]:
    """Return what an installed package requires with these extras, on this machine."""
    # a marker is evaluated with one extra at a time
    environments = [{"extra": extra} for extra in {"", *extras}]
    required = []
    for requirement in map(Requirement, distribution(package).requires or ()):
        marker = requirement.marker
        if marker is None or any(marker.evaluate(environment) for environment in environments):
            required.append(requirement)
    return required


def collect_pins(package: str, extras: set[str]) -> dict[str, str]:
    """Return the line of each installed package that a package with extras needs, directly or not, by its name."""
    pins: dict[str, str] = {}
    queue = [(package, frozenset(extras))]
    visited = set()
    while queue:
        name, wanted = queue.pop()
        if (name, wanted) in visited:
            continue
        visited.add((name, wanted))
        try:
            metadata = distribution(name).metadata
        except PackageNotFoundError:
            # an alternative that another package provides
            continue
        if name != package:
            version = Version(metadata["Version"]).public
            pins[name] = f"{name}=={version}"
            # the lowest Python takes another version, which pip chooses
            pythons = SpecifierSet(str(metadata.json.get("requires_python", "")))
            if not pythons.contains(f"{LOWEST_PYTHON}.99"):
                pins[name] += f'; python_version >= "{NEXT_PYTHON}"'
        for requirement in list_requirements(name, set(wanted)):
            queue.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    return pins


if __name__ == "__main__":
    pins = collect_pins("eagle-heads", {"dev", "docs"})
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else FILE
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    about = INTRODUCTION if file == FILE else NEWEST.format(python=python)
    file.write_text(about + "".join(f"{pins[name]}\n" for name in sorted(pins)))
    print(f"{file}: {len(pins)} packages")
