"""The fast suite with the newest of every dependency: `python -m tests.newest [--python PYTHON ...] [-- OPTION ...]`.

With `--oldest` it runs with the lower bounds of pyproject.toml instead. Each Python gets an
environment of its own, made anew. What passed with which versions is written to
docs/results/proven.json, whose table docs/versions.md shows. The newest versions are also written
to constraints-newest.txt.
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
NEWEST, OLDEST = "newest", "oldest"
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
    pip = [str(inside), "-m", "pip", "install", "--quiet"]
    pinned = []
    if versions == OLDEST:
        pins = folder.absolute() / "pins.txt"
        pins.write_text("".join(f"{pin}\n" for pin in lowest_pins(direct_requirements())))
        pinned = ["-c", str(pins)]
    print(f"{python}: installing the {versions} versions", file=sys.stderr, flush=True)
    for packages in (
        ["--upgrade", "pip"],
        [*pinned, "torch"],
        [*pinned, "-e", f"{ROOT}[dev,docs]"],
    ):
        subprocess.run([*pip, *packages], check=True, cwd=ROOT)
    return inside


def run_suite(python: Path, options: list[str]) -> dict[str, Any]:
    """The versions of an environment, and how many tests passed there, were skipped and failed by which names."""
    inside = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
    }
    asked = subprocess.run(
        [python, "-c", ASK], check=True, capture_output=True, text=True, env=inside
    )
    report = python.parent / "report.xml"
    command = [python, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", *options]
    ended = subprocess.run(command, cwd=ROOT, env=inside)
    if ended.returncode not in (0, 1):  # 1: tests failed, which the report tells
        raise ValueError(
            f"pytest ended with status {ended.returncode}: expected a run of all tests"
        )
    return {
        **json.loads(asked.stdout),
        **read_report(report),
        "date": str(date.today()),
        "commit": commit(),
    }


def read_report(path: Path) -> dict[str, Any]:
    """The counts in a JUnit report, and the names of the tests that failed."""
    cases = list(ElementTree.parse(path).iter("testcase"))
    skipped = [case for case in cases if case.find("skipped") is not None]
    failed = [
        case for case in cases if case.find("failure") is not None or case.find("error") is not None
    ]
    names = sorted({f"{case.get('classname')}::{case.get('name')}" for case in failed})
    return {
        "passed": len(cases) - len(skipped) - len(failed),
        "skipped": len(skipped),
        "failed": names,
    }


def merge_row(row: dict[str, Any], file: Path) -> None:
    """Put a run in the place of an earlier one that stands for the same."""
    rows = json.loads(file.read_text()) if file.is_file() else []
    kept = {place_of(old): old for old in [*rows, row]}
    file.write_text(json.dumps([kept[place] for place in sorted(kept)], indent=2) + "\n")


def place_of(row: dict[str, Any]) -> tuple[int, int, str]:
    """Return what a row stands for: an end of the ranges, a Python, and torch for GPUs or without."""
    build = "GPU" if row["cuda"] else "CPU"
    return (OLDEST, NEWEST).index(row["versions"]), int(row["python"].split(".")[1]), build


def proven_table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as Markdown."""
    names = [name for name in PACKAGES if name != "torch"]
    head = ["Python", "versions", "torch", *names, "passed", "skipped", "failed", "on"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in rows:
        build = f"{row['torch']}, {'for CUDA ' + row['cuda'] if row['cuda'] else 'CPU'}"
        found = [row[name] for name in names]
        counts = [f"{row['passed']:,}", str(row["skipped"]), str(len(row["failed"]))]
        cells = [row["python"], row["versions"], build, *found, *counts, row["date"]]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """Run the suite in every environment; 1 if a test failed in any."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.newest", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument(
        "--oldest", action="store_true", help="take the lower bounds of pyproject.toml"
    )
    parser.add_argument(
        "--python", nargs="+", default=[sys.executable], help="interpreters, the newest last"
    )
    parser.add_argument(
        "--into", type=Path, help="folder of the environments, 7 GB each; by default in build"
    )
    parser.add_argument("--out", type=Path, default=PROVEN)
    parser.add_argument("options", nargs="*", metavar="OPTION", help="behind --: options of pytest")
    args = parser.parse_args(argv)
    versions = OLDEST if args.oldest else NEWEST
    into = args.into or ROOT / "build" / versions
    rows = []
    for python in args.python:
        inside = make_environment(python, into / Path(python).name, versions)
        rows.append({"versions": versions, **run_suite(inside, args.options)})
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
