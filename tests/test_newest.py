"""What `make test-newest` writes: counts of a run, one row for each Python and build, and a set of versions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.documents import ROOT
from tests.newest import PINS, PROVEN, merge_row, proven_table, read_report
from tests.test_constraints import DIRECT

REPORT = """<?xml version="1.0"?><testsuites><testsuite>
<testcase classname="tests.one" name="test_a"/>
<testcase classname="tests.one" name="test_b[1]"><skipped message="no GPU"/></testcase>
<testcase classname="tests.one" name="test_c"><failure message="1 != 2"/></testcase>
<testcase classname="tests.two" name="test_d"><error message="no fixture"/></testcase>
<testcase classname="tests.two" name="test_d"><failure message="and failed"/></testcase>
</testsuite></testsuites>"""


def row(**values: Any) -> dict[str, Any]:
    """A run of Python 3.13 with the GPU build, but for what is given."""
    versions = dict.fromkeys(("transformers", "accelerate", "datasets", "deepspeed"), "1.0")
    counts = {"passed": 9, "skipped": 1, "failed": [], "date": "2026-01-01"}
    return {"python": "3.13.0", "torch": "2.15.0+cu130", "cuda": "13.0", **versions, **counts, **values}


def test_a_report_is_counted(tmp_path: Path) -> None:
    """Passed, skipped and failed; an error counts as a failure, and a test that has both is named once."""
    (tmp_path / "report.xml").write_text(REPORT)
    found = read_report(tmp_path / "report.xml")
    assert found == {"passed": 1, "skipped": 1, "failed": ["tests.one::test_c", "tests.two::test_d"]}


def test_a_later_run_takes_the_place_of_an_earlier(tmp_path: Path) -> None:
    """By Python and build of torch; 3.9 stands before 3.13, and the table has a line for each."""
    file = tmp_path / "proven.json"
    for run in (row(passed=1), row(python="3.9.1"), row(cuda=None, torch="2.15.0+cpu"), row(python="3.13.5", passed=7)):
        merge_row(run, file)
    rows = json.loads(file.read_text())
    assert [(each["python"], each["cuda"], each["passed"]) for each in rows] == [
        ("3.9.1", "13.0", 9),
        ("3.13.0", None, 9),
        ("3.13.5", "13.0", 7),
    ]
    table = proven_table(rows).splitlines()
    assert len(table) == 5 and "| 3.13.5 | 2.15.0+cu130, for CUDA 13.0 |" in table[-1] and ", CPU |" in table[-2]


@pytest.mark.parametrize("requirement", DIRECT, ids=lambda requirement: requirement.name)
def test_the_newest_versions_lie_within_the_ranges(requirement: Requirement) -> None:
    """The set that the suite was last run with is one that pyproject.toml allows, down to each direct requirement."""
    pins = [Requirement(line) for line in PINS.read_text().splitlines() if not line.startswith("#")]
    (pin,) = (pin for pin in pins if pin.name == canonicalize_name(requirement.name))
    assert requirement.specifier.contains(str(pin.specifier).removeprefix("=="), prereleases=True)


def test_what_is_shown_as_proven_passed() -> None:
    """The lowest and the highest Python that pyproject.toml and the page name, and no failure hidden in the file."""
    rows = json.loads(PROVEN.read_text())
    assert {"3.10", "3.13"} <= {each["python"].rpartition(".")[0] for each in rows}
    assert all(each["passed"] > 5_000 for each in rows)
    assert proven_table(rows) in (ROOT / "docs/versions.md").read_text()
