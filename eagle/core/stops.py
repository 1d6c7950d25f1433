"""Where an answer ends: at a stop token or with a stop string."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any


class Stops:
    """The stop tokens and stop strings of a request, and the first place where one of them ends an answer."""

    def __init__(self, stop: Any, tokenizer: Any, vocab_size: int) -> None:
        items = [_stop_item(item, vocab_size) for item in _listed(stop)]
        self.tokens = {item for item in items if isinstance(item, int)}
        self.strings = [item for item in items if isinstance(item, str)]
        # tokens that a stop string can span; some print nothing and take places too
        self.reach = max((len(string.encode()) for string in self.strings), default=0) + 16
        self.tokenizer = tokenizer
        if self.strings and tokenizer is None:
            raise ValueError(f"stop strings {self.strings} need a tokenizer: load the target with one, or pass ids")

    def first_end(self, before: list[int], new: list[int]) -> tuple[int | None, str | None]:
        """How many of the new tokens belong to the answer, None for all and more, and the string that ends it."""
        end = next((place for place, token in enumerate(new, start=1) if token in self.tokens), None)
        for place in range(1, len(new[:end]) + 1) if self.strings else ():
            text = self.tokenizer.decode((before + new[:place])[-self.reach :], skip_special_tokens=False)
            complete = [string for string in self.strings if string in text]
            if complete:
                return place, min(complete, key=text.find)  # the one that begins first
        return end, None


def _listed(stop: Any) -> Iterable[Any]:
    """The items of a list, a tensor or an array; one string or number is a list of one."""
    if isinstance(stop, str) or (hasattr(type(stop), "__index__") and getattr(stop, "ndim", 0) == 0):
        return [stop]
    try:
        return list(stop)
    except TypeError:
        raise ValueError(f"stop is {stop!r}, expected token ids and strings in a list, or one of them") from None


def _stop_item(item: Any, vocab_size: int) -> int | str:
    """A token id as an int, or a string."""
    if isinstance(item, str) and item:
        return item
    if isinstance(item, str):
        raise ValueError("stop holds an empty string, which every text ends with: leave it out")
    try:
        if isinstance(item, bool):
            raise TypeError
        token = operator.index(item)
    except (TypeError, ValueError):
        raise ValueError(
            f"stop holds {item!r} of type {type(item).__name__}, expected token ids (whole numbers) and strings"
        ) from None
    if not 0 <= token < vocab_size:
        raise ValueError(f"stop holds the token id {token}, which no answer has: expected 0..{vocab_size - 1}")
    return token
