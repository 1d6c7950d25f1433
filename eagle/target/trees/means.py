"""How a model is brought to read trees."""

from __future__ import annotations

from dataclasses import dataclass

# means that go with others
TABLES = "tables by position"
OFFSETS = "offsets"
ROWS = "attention as rows"


@dataclass(frozen=True, slots=True)
class Means:
    """One way in which a model reads trees."""

    grouped: bool = False  # attention by `grouped_attention`, else the model's own
    levels: bool = False  # modules that keep a state read one depth at a time, else all paths at once
    whole: bool = False  # the whole model reads paths as rows, with its own cache
    singly: bool = False  # and rows of one token by themselves
    extras: tuple[str, ...] = ()

    def describe(self) -> str:
        """In words, as logs and result files name it."""
        way = "levels" if self.levels else "paths"
        return f"the whole model over {way}" if self.whole else " + ".join(["mask", *self.extras])
