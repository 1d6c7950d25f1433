"""The fast suite with the newest of every dependency: `python -m tests.newest [--python PYTHON ...] [-- OPTION ...]`.

With `--oldest` it runs with the lower bounds of pyproject.toml instead. Each Python gets an environment of its own,
made anew. What passed with which versions is written to docs/results/proven.json, whose table docs/versions.md shows.
The newest versions are also written to constraints-newest.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from docs_build.constraints import direct_requirements, lowest_pins
from eagle.shipped import commit
from tests.documents import ROOT

PROVEN = ROOT / "docs/results/proven.json"
PINS = ROOT / "constraints-newest.txt"
NEWEST = "newest"
OLDEST = "oldest"
PACKAGES = (
    "torch",
    "transformers",
    "datasets",
    "accelerate",
    "deepspeed",
    "wandb",
    "safetensors",
    "huggingface-hub",
)
# run inside an environment: its versions
ASK = f"""
import json, platform
from importlib.metadata import version
import torch
row = {{"python": platform.python_version()}} | {{name: version(name) for name in {PACKAGES!r}}}
print(json.dumps(row | {{"torch": torch.__version__, "cuda": torch.version.cuda}}))
"""


def make_environment(python: str, folder: Path, versions: str) -> Path:
    """Make an environment with the newest or oldest allowed versions; return its interpreter."""
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    inside = folder.absolute() / "bin/python"
    # torch first, so that pip does not choose another for the rest
    pinned = []
    if versions == OLDEST:
        pins = folder.absolute() / "pins.txt"
        pins.write_text("".join(f"{pin}\n" for pin in lowest_pins(direct_requirements())))
        pinned = ["-c", str(pins)]
    print(f"{python}: installing the {versions} versions", file=sys.stderr, flush=True)
    project = [*pinned, "-e", f"{ROOT}[dev,docs]"]
    for packages in (["--upgrade", "pip"], [*pinned, "torch"], project):
        install = [str(inside), "-m", "pip", "install", "--quiet", *packages]
        subprocess.run(install, check=True, cwd=ROOT)
    return inside


def run_suite(python: Path, options: list[str]) -> dict[str, Any]:
    """Return the versions of an environment, and how many tests passed there, were skipped and failed by name."""
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path}
    versions = subprocess.run(
        [python, "-c", ASK],
        check=True,
        capture_output=True,
        env=env,
    )
    report = python.parent / "report.xml"
    command = [python, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", *options]
    status = subprocess.run(command, cwd=ROOT, env=env).returncode
    # with status 1 tests have failed, which the report names
    if status not in (0, 1):
        raise ValueError(f"pytest ended with status {status}: expected a run of all tests")
    when = {"date": str(date.today()), "commit": commit()}
    return {**json.loads(versions.stdout), **read_report(report), **when}


def read_report(path: Path) -> dict[str, Any]:
    """Return the counts in a JUnit report, and the names of the tests that failed."""
    passed = 0
    skipped = 0
    # a test that fails and then errs has two entries
    failed = set()
    for case in ElementTree.parse(path).iter("testcase"):
        outcomes = {child.tag for child in case}
        if outcomes & {"failure", "error"}:
            failed.add(f"{case.get('classname')}::{case.get('name')}")
        elif "skipped" in outcomes:
            skipped += 1
        else:
            passed += 1
    return {"passed": passed, "skipped": skipped, "failed": sorted(failed)}


def place_of(row: dict[str, Any]) -> tuple[int, int, str]:
    """Return what a row stands for: an end of the ranges, a Python, and torch for GPUs or without."""
    build = "GPU" if row["cuda"] else "CPU"
    return (OLDEST, NEWEST).index(row["versions"]), int(row["python"].split(".")[1]), build


def merge_row(row: dict[str, Any], file: Path) -> None:
    """Put a run in the place of an earlier one that stands for the same."""
    rows = json.loads(file.read_text()) if file.is_file() else []
    latest = {place_of(old): old for old in [*rows, row]}
    file.write_text(json.dumps([latest[place] for place in sorted(latest)], indent=2) + "\n")


def proven_table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as Markdown."""
    names = [name for name in PACKAGES if name != "torch"]
    head = ["Python", "versions", "torch", *names, "passed", "skipped", "failed", "on"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in rows:
        # a build for CUDA also runs on a CPU
        build = f"for CUDA {row['cuda']}" if row["cuda"] else "CPU"
        versions = [row["python"], row["versions"], f"{row['torch']}, {build}"]
        counts = [f"{row['passed']:,}", str(row["skipped"]), str(len(row["failed"]))]
        cells = [*versions, *(row[name] for name in names), *counts, row["date"]]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """Run the suite in every environment; return 1 if a test failed in any."""
    about = __doc__.split("\n\n")[0]
    parser = argparse.ArgumentParser(prog="python -m tests.newest", description=about)
    oldest = "take the lower bounds of pyproject.toml"
    parser.add_argument("--oldest", action="store_true", help=oldest)
    pythons = "interpreters, the newest last"
    parser.add_argument(
        "--python",
        nargs="+",
        default=[sys.executable],
        help=pythons,
    )
    into = "folder of the environments, 7 GB each; by default in build"
    parser.add_argument("--into", type=Path, help=into)
    parser.add_argument("--out", type=Path, default=PROVEN)
    parser.add_argument(
        "options",
        nargs="*",
        metavar="OPTION",
        help="behind --: options of pytest",
    )
    args = parser.parse_args(argv)
    versions = OLDEST if args.oldest else NEWEST
    folder = args.into or ROOT / "build" / versions
    rows = []
    for python in args.python:
        inside = make_environment(python, folder / Path(python).name, versions)
        rows.append({"versions": versions, **run_suite(inside, args.options)})
        # written after each run, as a run takes long
        merge_row(rows[-1], args.out)
    if not args.oldest:
        subprocess.run([inside, "-m", "docs_build.constraints", str(PINS)], check=True, cwd=ROOT)
    print(f"\n{proven_table(rows)}")
    for row in rows:
        for name in row["failed"]:
            print(f"Python {row['python']}, {versions} versions: {name}")
    return int(any(row["failed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
