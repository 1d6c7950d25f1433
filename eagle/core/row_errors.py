"""Errors of one sequence among several, which end that sequence alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")
# errors of the machine and not of a sequence: they end all sequences, as the next one would meet them as well
FATAL = (MemoryError, torch.OutOfMemoryError)


class RowErrors(Exception):
    """Raised where only some rows of a batch failed.

    Args:
        trees: The results of the rows that did not fail, by row; draft trees where a drafter raises it.
        errors: The error of each row that failed, by row.
    """

    def __init__(self, trees: Mapping[int, Any], errors: Mapping[int, Exception]) -> None:
        """Keep the results and the errors, both by row (sequence of the batch), for the caller that catches this."""
        self.trees = dict(trees)
        self.errors = dict(errors)
        details = "; ".join(f"row {row}: {error!r:.200}" for row, error in self.errors.items())
        total = len(self.trees) + len(self.errors)
        super().__init__(f"{len(self.errors)} of {total} drafts failed: {details}")


def run_rows(rows: Iterable[int], run: Callable[[int], Result]) -> dict[int, Result]:
    """Call `run` for each row and return the results by row; an error in one row does not keep the others from running.

    Args:
        rows: Numbers of rows; a row is one sequence of a batch.
        run: Row -> its result, such as a draft tree.

    Raises:
        RowErrors: If rows fail, with the results of the others.
        Exception: The error itself if there is a single row.
    """
    results: dict[int, Result] = {}
    errors: dict[int, Exception] = {}
    for row in rows:
        try:
            results[row] = run(row)
        # out of memory: the next row would meet the same error
        except FATAL:
            raise
        except Exception as error:
            errors[row] = error
    # a caller with a single row gets its error as it was raised
    if len(errors) == 1 and not results:
        raise next(iter(errors.values()))
    if errors:
        raise RowErrors(results, errors)
    return results
