"""Metrics on the disk: a line at once, none twice, none lost."""

from __future__ import annotations

import json
from pathlib import Path

from eagle.log import Metrics, memory_gb


def lines(path: Path) -> list[dict[str, object]]:
    """The rows of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_row_is_there_as_soon_as_it_is_written(tmp_path: Path) -> None:
    """A kill costs no row."""
    metrics = Metrics(tmp_path / "new/metrics.jsonl")
    metrics.write(step=0, total=1.5)
    assert lines(tmp_path / "new/metrics.jsonl") == [{"step": 0, "total": 1.5}]
    metrics.close()


def test_going_on_drops_what_will_be_told_again(tmp_path: Path) -> None:
    """Rows of later steps, torn lines, and such as are of no step."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 1}\n{"step": 2, "validation": {}}\n{"step": 3}\nnull\n{"total": 1}\n{"step": 1, "to'
    )
    metrics = Metrics(path, before=3)
    metrics.write(step=3, total=2)
    metrics.close()
    assert lines(path) == [
        {"step": 1},
        {"step": 2, "validation": {}},
        {"step": 3, "total": 2},
    ]
    Metrics(path).close()
    assert not lines(path)  # a run that begins anew


def test_memory_is_told_in_gigabytes() -> None:
    """This process holds more than torch alone and less than the machine."""
    assert 0.1 < memory_gb() < 1000
