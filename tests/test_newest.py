"""What `make test-newest` and `make test-oldest` write: counts, rows, and a set of versions."""

from __future__ import annotations

import json
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from docs_build.constraints import direct_requirements, lowest_pins
from tests import newest
from tests.documents import ROOT
from tests.newest import OLDEST, PACKAGES, PINS, PROVEN, main, merge_row, proven_table, read_report
from tests.test_constraints import DIRECT

REPORT = """<?xml version="1.0"?><testsuites><testsuite>
<testcase classname="tests.one" name="test_a"/>
<testcase classname="tests.one" name="test_b[1]"><skipped message="no GPU"/></testcase>
<testcase classname="tests.one" name="test_c"><failure message="1 != 2"/></testcase>
<testcase classname="tests.two" name="test_d"><error message="no fixture"/></testcase>
<testcase classname="tests.two" name="test_d"><failure message="and failed"/></testcase>
</testsuite></testsuites>"""


def row(**values: Any) -> dict[str, Any]:
    """Return a run of Python 3.13 with the newest versions and the GPU build, but for these values."""
    return {
        "versions": "newest",
        **dict.fromkeys(PACKAGES, "1.0"),
        "python": "3.13.0",
        "torch": "2.15.0+cu130",
        "cuda": "13.0",
        "passed": 9,
        "skipped": 1,
        "failed": [],
        "date": "2026-01-01",
        **values,
    }


def lowest_bounds() -> dict[str, Version]:
    """Return the lower bounds of pyproject.toml by the name of the requirement."""
    pins = map(Requirement, lowest_pins(direct_requirements()))
    return {pin.name: Version(str(pin.specifier).removeprefix("==")) for pin in pins}


def test_a_report_is_counted(tmp_path: Path) -> None:
    """An error counts as a failure, and a test that has both is named once."""
    (tmp_path / "report.xml").write_text(REPORT)
    found = read_report(tmp_path / "report.xml")
    assert (found["passed"], found["skipped"]) == (1, 1)
    assert found["failed"] == ["tests.one::test_c", "tests.two::test_d"]


def test_a_later_run_takes_the_place_of_an_earlier(tmp_path: Path) -> None:
    """By versions, Python and build of torch: the oldest first, 3.9 before 3.13, and the table has a line for each."""
    file = tmp_path / "proven.json"
    # in the order in which they ran
    for run in (
        row(passed=1),
        row(python="3.9.1"),
        row(cuda=None, torch="2.15.0+cpu"),
        row(versions=OLDEST, passed=2),
        row(python="3.13.5", passed=7),
        row(versions=OLDEST, passed=4),
    ):
        merge_row(run, file)
    rows = json.loads(file.read_text())
    assert [(each["versions"], each["python"], each["cuda"], each["passed"]) for each in rows] == [
        ("oldest", "3.13.0", "13.0", 4),
        ("newest", "3.9.1", "13.0", 9),
        ("newest", "3.13.0", None, 9),
        ("newest", "3.13.5", "13.0", 7),
    ]
    table = proven_table(rows).splitlines()
    assert len(table) == 2 + len(rows)
    assert ", CPU |" in table[-2]
    assert "| 3.13.5 | newest | 2.15.0+cu130, for CUDA 13.0 |" in table[-1]


def test_lower_bounds_are_pinned() -> None:
    """Whatever else a requirement says; one without a lower bound is left to pip."""
    requirements = [
        "torch>=2.11",
        "mkdocs<2,>=1.6",
        "tool[extra]>=0.3; sys_platform == 'linux'",
        "types-PyYAML",
        "odd==1",
    ]
    pins = ["torch==2.11", "mkdocs==1.6", "tool==0.3"]
    assert lowest_pins(map(Requirement, requirements)) == pins
    bounds = lowest_bounds()
    assert {"torch", "transformers", "wandb", "pytest", "mkdocs"} <= bounds.keys()


@pytest.mark.parametrize("versions", ["oldest", "newest"])
def test_an_environment_gets_its_versions(
    versions: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The oldest are pinned in each installation, and no set of them is written down."""
    # the commands that would install packages and run the suite
    steps: list[list[str]] = []

    def run(step: list[Any], **_: Any) -> None:
        (tmp_path / "python").mkdir(exist_ok=True)  # as the first step makes it
        steps.append([str(word) for word in step])

    found = row()
    found.pop("versions")
    monkeypatch.setattr(newest, "run_suite", lambda python, options: found)
    monkeypatch.setattr(subprocess, "run", run)
    rows = tmp_path / "rows.json"
    words = ["--python", "python", "--into", str(tmp_path), "--out", str(rows)]
    is_oldest = versions == OLDEST
    assert main(["--oldest", *words] if is_oldest else words) == 0
    assert [each["versions"] for each in json.loads(rows.read_text())] == [versions]
    pins = tmp_path / "python/pins.txt"
    installed = [step for step in steps if step[-1] in ("torch", f"{ROOT}[dev,docs]")]
    assert [str(pins) in step for step in installed] == [is_oldest, is_oldest]
    if is_oldest:
        assert "torch==2.11\n" in pins.read_text()
    written = [step for step in steps if "docs_build.constraints" in step]
    assert len(written) == (not is_oldest)


def test_the_newest_versions_lie_within_the_ranges() -> None:
    """The set that the suite was last run with is one that pyproject.toml allows, down to each direct requirement."""
    lines = [line for line in PINS.read_text().splitlines() if not line.startswith("#")]
    pins = {pin.name: str(pin.specifier).removeprefix("==") for pin in map(Requirement, lines)}
    for requirement in DIRECT:
        pin = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pin, prereleases=True), requirement


def test_what_is_shown_as_proven_passed() -> None:
    """The lowest and the highest Python that pyproject.toml and the page name, and no failure hidden in the file."""
    rows = json.loads(PROVEN.read_text())
    assert {"3.10", "3.13"} <= {each["python"].rpartition(".")[0] for each in rows}
    # a run of a part of the suite proves little
    assert all(each["passed"] > 2_000 for each in rows)
    assert proven_table(rows) in (ROOT / "docs/versions.md").read_text()


def test_the_oldest_row_has_the_lower_bounds() -> None:
    """Else pyproject.toml promises what was not tried: a moved bound asks for `make test-oldest`."""
    bounds = {name: lowest_bounds()[name] for name in PACKAGES}
    if all(Version(Version(version(name)).public) == bounds[name] for name in PACKAGES):
        pytest.skip("this run of the oldest versions makes the row")
    rows = [each for each in json.loads(PROVEN.read_text()) if each["versions"] == OLDEST]
    assert rows
    for each in rows:
        assert {name: Version(Version(each[name]).public) for name in PACKAGES} == bounds
