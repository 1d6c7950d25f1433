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
LOWEST, NEXT = "3.10", "3.11"  # Pythons: the lowest that is supported, and the next
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
    return [Requirement(text) for part in lists for text in re.findall(r'"(.*?)"', part)]


def lowest_pins(requirements: Iterable[Requirement]) -> list[str]:
    """Return a line of a constraints file for every lower bound: `>=5.17` becomes `==5.17`."""
    return [
        f"{requirement.name}=={bound.version}"
        for requirement in requirements
        for bound in requirement.specifier
        if bound.operator == ">="
    ]


def list_requirements(package: str, extras: set[str]) -> list[Requirement]:
    """What an installed package requires with these extras, on this machine."""
    requirements = map(Requirement, distribution(package).requires or ())
    environments = [{"extra": extra} for extra in {"", *extras}]
    return [
        requirement
        for requirement in requirements
        if requirement.marker is None or any(requirement.marker.evaluate(some) for some in environments)
    ]


def collect_pins(package: str, extras: set[str]) -> dict[str, str]:
    """Name -> line of all installed packages that a package with extras needs, directly or not."""
    pins: dict[str, str] = {}
    seen, queue = set(), [(package, frozenset(extras))]
    while queue:
        name, wanted = queue.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        try:
            metadata = distribution(name).metadata
        except PackageNotFoundError:  # an alternative that another one provides
            continue
        if name != package:
            version = Version(metadata["Version"]).public
            needs = SpecifierSet(str(metadata.json.get("requires_python", "")))
            marker = "" if needs.contains(f"{LOWEST}.99") else f'; python_version >= "{NEXT}"'
            pins[name] = f"{name}=={version}{marker}"
        queue += [
            (canonicalize_name(part.name), frozenset(part.extras)) for part in list_requirements(name, set(wanted))
        ]
    return pins


if __name__ == "__main__":
    pins = collect_pins("eagle-heads", {"dev", "docs"})
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else FILE
    about = INTRODUCTION if file == FILE else NEWEST.format(python=".".join(map(str, sys.version_info[:2])))
    file.write_text(about + "".join(f"{pins[name]}\n" for name in sorted(pins)))
    print(f"{file}: {len(pins)} packages")
