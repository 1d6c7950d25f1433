"""constraints.txt is one whole set of versions, which pyproject.toml allows."""

from __future__ import annotations

import re

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from docs_build.constraints import FILE, collect_pins, direct_requirements

DIRECT = direct_requirements()
PINS = [Requirement(line) for line in FILE.read_text().splitlines() if not line.startswith("#")]


def test_every_line_pins_one_version() -> None:
    """Each package stands once, with one exact version and without a machine's own build."""
    # indirect requirements are pinned too
    assert len({pin.name for pin in PINS}) == len(PINS) > len(DIRECT) > 10
    assert [pin.name for pin in PINS] == sorted(canonicalize_name(pin.name) for pin in PINS)
    # neither ranges nor local builds such as +cu130
    assert all(re.fullmatch(r"==[^*+,]+", str(pin.specifier)) for pin in PINS)


@pytest.mark.parametrize("requirement", DIRECT, ids=lambda requirement: requirement.name)
def test_what_is_asked_for_is_pinned_within_its_range(requirement: Requirement) -> None:
    """Every requirement of the package and of its extras."""
    (pin,) = (pin for pin in PINS if pin.name == canonicalize_name(requirement.name))
    assert requirement.specifier.contains(str(pin.specifier).removeprefix("=="), prereleases=True)


def test_packages_that_others_need_are_pinned() -> None:
    """Not the direct ones alone: huggingface-hub brings fsspec here, and transformers brings tokenizers."""
    # from the packages that are installed here
    pins = collect_pins("eagle-heads", set())
    assert {"fsspec", "tokenizers", "numpy"} <= pins.keys() & {pin.name for pin in PINS}
    assert "ruff" not in pins and "eagle-heads" not in pins
