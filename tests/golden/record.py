"""Make the golden record, compare it or write it: `python -m tests.golden.record [GROUP ...] [--write]`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isclose
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from tests.golden.command_items import command_items
from tests.golden.decoding_items import decoding_items, family_items
from tests.golden.file_items import file_items
from tests.golden.run_items import run_items
from tests.golden.training_items import training_items

FOLDER = Path(__file__).parent
ABSENT = "absent"


@dataclass(frozen=True)
class Group:
    """Items that are made together, and how far their numbers may be from those that are recorded."""

    make: Callable[[Path], dict[str, Any]]
    # relative; hashes and counts are equal or not
    tolerance: float = 0.0
    # how the names of items end whose numbers are computed in fp32; no name has a line break
    in_fp32: str = "\n"


# of twenty steps: processors take sums in another order
EXACT = 1e-9
IN_FP32 = 1e-4
GROUPS = {
    "decoding": Group(decoding_items),
    "families": Group(family_items),
    "training": Group(training_items, EXACT, in_fp32="validation"),
    "runs": Group(run_items, IN_FP32),
    "files": Group(file_items),
    "commands": Group(command_items),
}


def record_path(name: str) -> Path:
    """Return the file that holds the record of a group."""
    return FOLDER / f"{name}.json"


def make(name: str) -> dict[str, Any]:
    """Make the items of a group anew, on one thread."""
    # the number of threads decides the order of sums
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            items = GROUPS[name].make(Path(folder))
    finally:
        torch.set_num_threads(threads)
    # as a file gives them back: tuples become lists, and keys strings
    made: dict[str, Any] = json.loads(json.dumps(items))
    return made


def read(name: str) -> dict[str, Any]:
    """Return the recorded items of a group."""
    items: dict[str, Any] = json.loads(record_path(name).read_text(encoding="utf-8"))
    return items


def write(name: str, items: Mapping[str, Any]) -> None:
    """Write the items of a group, one a line."""
    lines = [
        f"{json.dumps(key, ensure_ascii=False)}: {json.dumps(items[key], ensure_ascii=False)}"
        for key in items
    ]
    record_path(name).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def are_equal(recorded: Any, made: Any, tolerance: float) -> bool:
    """Whether two values are equal, their numbers up to a relative tolerance."""
    if isinstance(recorded, dict) and isinstance(made, dict):
        return recorded.keys() == made.keys() and all(
            are_equal(value, made[key], tolerance) for key, value in recorded.items()
        )
    if isinstance(recorded, list) and isinstance(made, list):
        return len(recorded) == len(made) and all(
            map(are_equal, recorded, made, [tolerance] * len(made))
        )
    if isinstance(recorded, float) and isinstance(made, float):
        return isclose(recorded, made, rel_tol=tolerance)
    return bool(recorded == made)


def differences(group: str, recorded: Mapping[str, Any], made: Mapping[str, Any]) -> dict[str, str]:
    """Return the items that differ by name, with what is recorded and what is made now."""
    found = {}
    for name in sorted({*recorded, *made}):
        before = recorded.get(name, ABSENT)
        now = made.get(name, ABSENT)
        tolerance = IN_FP32 if name.endswith(GROUPS[group].in_fp32) else GROUPS[group].tolerance
        if not are_equal(before, now, tolerance):
            found[name] = describe(before, now)
    return found


def describe(before: Any, now: Any) -> str:
    """Return two values side by side; of mappings only the keys that differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = [key for key in {**before, **now} if before.get(key, ABSENT) != now.get(key, ABSENT)]
        before = {key: before.get(key, ABSENT) for key in keys}
        now = {key: now.get(key, ABSENT) for key in keys}
    return f"recorded {before}, now {now}"


def compare(group: str) -> dict[str, str]:
    """Return the items of a group that differ from the record."""
    return differences(group, read(group), make(group))


def main(argv: list[str]) -> None:
    """Compare the record, or write it anew."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden.record", description=__doc__)
    parser.add_argument(
        "groups", nargs="*", metavar="GROUP", help=f"some of {', '.join(GROUPS)}; all by default"
    )
    parser.add_argument(
        "--write", action="store_true", help="write the record instead of comparing it"
    )
    args = parser.parse_args(argv)
    total = 0
    for name in args.groups or GROUPS:
        start = perf_counter()
        made = make(name)
        print(f"{name}: {len(made)} items in {perf_counter() - start:.0f} s", flush=True)
        found = differences(name, read(name), made) if record_path(name).exists() else {}
        for item, text in found.items():
            print(f"  {item}: {text}", flush=True)
        total += len(found)
        if args.write:
            write(name, made)
    if total and not args.write:
        sys.exit(f"{total} items differ from the record")


if __name__ == "__main__":
    main(sys.argv[1:])
