"""Errors of one sequence among several, which end that sequence alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")
FATAL = (MemoryError, torch.OutOfMemoryError)  # of the machine, whichever sequence met them


class RowErrors(Exception):
    """Raised by a drafter's state for several sequences if only some of them failed; it keeps the others' trees."""

    def __init__(self, trees: Mapping[int, Any], errors: Mapping[int, Exception]) -> None:
        self.trees = dict(trees)
        self.errors = dict(errors)
        details = "; ".join(f"row {row}: {error!r:.200}" for row, error in self.errors.items())
        total = len(self.trees) + len(self.errors)
        super().__init__(f"{len(self.errors)} of {total} drafts failed: {details}")


def run_rows(rows: Iterable[int], run: Callable[[int], Result]) -> dict[int, Result]:
    """Return the results of `run` by row; `RowErrors` if some rows fail, the error itself if there is one row."""
    results: dict[int, Result] = {}
    errors: dict[int, Exception] = {}
    for row in rows:
        try:
            results[row] = run(row)
        except FATAL:
            raise
        except Exception as error:
            errors[row] = error
    # a caller with one row needs no wrapper around its error
    if len(errors) == 1 and not results:
        raise next(iter(errors.values()))
    if errors:
        raise RowErrors(results, errors)
    return results
