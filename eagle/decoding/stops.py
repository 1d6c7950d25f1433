"""Where an answer ends: at a stop token or a stop string."""

from __future__ import annotations

from typing import Any

from eagle.core.sampling import to_int

SILENT_TOKENS = 16  # that print nothing and may stand among those of a stop string


class Stops:
    """The stop tokens and stop strings of a request."""

    def __init__(self, stop: Any, tokenizer: Any, vocab_size: int) -> None:
        items = [_stop_item(item, vocab_size) for item in _as_items(stop)]
        self.tokens = {item for item in items if isinstance(item, int)}
        self.strings = [item for item in items if isinstance(item, str)]
        # tokens that a stop string can span: a token that prints anything has a byte at least
        longest = max((len(string.encode()) for string in self.strings), default=0)
        self.reach = longest + SILENT_TOKENS
        self.tokenizer = tokenizer
        if self.strings and tokenizer is None:
            raise ValueError(
                f"stop strings {self.strings} need a tokenizer: load the target with one, or pass ids"
            )

    def first_end(self, before: list[int], new: list[int]) -> tuple[int | None, str | None]:
        """Find where an answer ends.

        Args:
            before: The answer so far.
            new: Tokens that follow it.

        Returns:
            How many of the new tokens belong to the answer (None: it goes on), and the stop string that ends it.
        """
        end = None
        for count, token in enumerate(new, start=1):
            if token in self.tokens:
                end = count
                break
        if not self.strings:
            return end, None
        # token by token, so that nothing after the string's last token is kept
        for count in range(1, len(new[:end]) + 1):
            last_tokens = (before + new[:count])[-self.reach :]
            text = self.tokenizer.decode(last_tokens, skip_special_tokens=False)
            complete = [string for string in self.strings if string in text]
            if complete:
                return count, min(complete, key=text.find)  # the one that begins first
        return end, None


def stops_for(target: Any, stop: Any) -> Stops:
    """Return the stops of a request to a target; None means the target's stop tokens."""
    if isinstance(stop, Stops):
        return stop
    if stop is None:
        stop = [token for token in target.stop_tokens if 0 <= token < target.vocab_size]
    return Stops(stop, target.tokenizer, target.vocab_size)


def stop_strings(stop: Any) -> list[str]:
    """Return the stop strings among stops of any kind."""
    if stop is None:
        return []
    return [item for item in _as_items(stop) if isinstance(item, str)]


def _as_items(stop: Any) -> list[Any]:
    """Return the items of a list, tensor or array; a string or number is one item."""
    # numpy's and torch's numbers have an index, as their arrays of one element do
    is_number = hasattr(type(stop), "__index__") and getattr(stop, "ndim", 0) == 0
    if isinstance(stop, str) or is_number:
        return [stop]
    try:
        return list(stop)
    except TypeError:
        raise ValueError(
            f"stop is {stop!r}, expected token ids and strings in a list, or one of them"
        ) from None


def _stop_item(item: Any, vocab_size: int) -> int | str:
    """Return a stop token as an int, or a stop string."""
    if isinstance(item, str):
        if not item:
            raise ValueError("stop holds an empty string, which every text ends with: leave it out")
        return item
    token = to_int(item)
    if token is None:
        raise ValueError(
            f"stop holds {item!r} of type {type(item).__name__}, expected token ids (whole numbers) and strings"
        )
    if not 0 <= token < vocab_size:
        raise ValueError(
            f"stop holds the token id {token}, which no answer has: expected 0..{vocab_size - 1}"
        )
    return token
