"""Where an answer ends: at a stop token or a stop string."""

from __future__ import annotations

from typing import Any

from eagle.core.sampling import to_int

# how many tokens that print nothing may lie between the tokens of a stop string
SILENT_TOKENS = 16


class Stops:
    """The stop tokens and stop strings of a request."""

    def __init__(self, stop: Any, tokenizer: Any, vocab_size: int) -> None:
        """Sort the stops of a request into tokens and strings.

        Args:
            stop: A token id, a string, or several of them.
            tokenizer: The target's; only stop strings need it.
            vocab_size: V.
        """
        items = [_stop_item(item, vocab_size) for item in _as_items(stop)]
        self.tokens = {item for item in items if isinstance(item, int)}
        self.strings = [item for item in items if isinstance(item, str)]
        # The most tokens that a stop string can span: a token that prints anything prints at least one byte. Only so
        # many last tokens are decoded to find it.
        longest = max((len(string.encode()) for string in self.strings), default=0)
        self.max_span = longest + SILENT_TOKENS
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
        # token by token, because the answer ends with the token that completes the stop string
        for count in range(1, len(new[:end]) + 1):
            last_tokens = (before + new[:count])[-self.max_span :]
            text = self.tokenizer.decode(last_tokens, skip_special_tokens=False)
            complete = [string for string in self.strings if string in text]
            if complete:
                # of several stop strings the one that begins first counts
                return count, min(complete, key=text.find)
        return end, None


def stops_for(target: Any, stop: Any) -> Stops:
    """Return the stop tokens and strings of a request.

    Args:
        target: The target, whose stop tokens hold where `stop` is None.
        stop: As `stop` of `generate`; or a `Stops`, which is returned.
    """
    if isinstance(stop, Stops):
        return stop
    if stop is None:
        # a generation config may name tokens that the vocabulary lacks
        stop = [token for token in target.stop_tokens if 0 <= token < target.vocab_size]
    return Stops(stop, target.tokenizer, target.vocab_size)


def stop_strings(stop: Any) -> list[str]:
    """Return the strings among the stops that a caller passed."""
    if stop is None:
        return []
    return [item for item in _as_items(stop) if isinstance(item, str)]


def _as_items(stop: Any) -> list[Any]:
    """Return the items of a list, tensor or array; a string or number is one item."""
    # numbers of numpy and torch have __index__, too; so have their arrays of one element, which are lists here
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
    """Return an item of `stop` as a token id or a string; ValueError for anything else."""
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
