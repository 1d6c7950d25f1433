"""Files with one JSON object a line, which tests of results write and read."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_lines(path: Path, records: Iterable[Any]) -> Path:
    """Write one record a line, and return the path."""
    # one folder for each set of prompts
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]
