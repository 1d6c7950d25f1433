"""How a model is brought to read trees."""

from __future__ import annotations

from dataclasses import dataclass

# of a model that is read in a way that it does not take
FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError, NotImplementedError)

# means that go with others
TABLES = "tables by position"
ORIGIN = "the model's own first position"
OFFSETS = "offsets"
UNLIMITED = "windows unused"
ROWS = "attention as rows"


@dataclass(frozen=True, slots=True)
class Means:
    """One way in which a model reads trees."""

    grouped: bool = False  # attention by `grouped_attention`, else the model's own
    levels: bool = False  # modules that keep a state read one depth at a time, else all paths at once
    cheaper: bool = False  # both ways are right, and each forward takes the cheaper one
    whole: bool = False  # the whole model reads paths as rows, with its own cache
    singly: bool = False  # and rows of one token by themselves
    # half precision whose bits do not depend on rows, padding and columns
    invariant: bool = False  # attention by `invariant_attention`
    sums: bool = False  # all sums of products in fp64, where attention cannot be replaced, or not everywhere
    extras: tuple[str, ...] = ()

    @property
    def keeps_bits(self) -> bool:
        """Whether a token's bits should not depend on what is read with it."""
        return self.invariant or self.sums

    def describe(self, *, has_mixers: bool = False) -> str:
        """In words, as logs and result files name it."""
        way = "paths or levels by cost" if self.cheaper else "levels" if self.levels else "paths"
        if self.whole:
            return f"the whole model over {way}" + (", steps one by one" if self.singly else "")
        return " + ".join(["mask", *([f"mixers over {way}"] if has_mixers else []), *self.extras])
