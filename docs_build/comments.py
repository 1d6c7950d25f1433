"""The comments by which the code describes its fields, as the pages of reference take them over."""

from __future__ import annotations

from collections.abc import Sequence


def read_field_comment(lines: Sequence[str], first: int, last: int) -> str:
    """Return the comment at the end of a field's assignment, or the one above it; "" without one.

    Args:
        lines: Of the source.
        first: The number of the line that the assignment begins on, from 1.
        last: That of its last line.
    """
    comment = lines[last - 1].partition("  # ")[2]
    above: list[str] = []
    for line in reversed(lines[: first - 1]):
        if not line.strip().startswith("# "):
            break
        above.insert(0, line.strip().removeprefix("# "))
    return comment or " ".join(above)
