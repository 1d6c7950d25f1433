"""Records that are token ids already, with a mask of the assistant's: those of speculators and of ModelOpt."""

from __future__ import annotations

from typing import Any, NamedTuple

from data_prep.chats.turns import describe

IDS = ("input_ids", "token_ids")  # of speculators and of ModelOpt
MASK = "loss_mask"
IDS_NOTE = "token ids taken as they are"


class TokenRow(NamedTuple):
    """A text as token ids; mask[i] = 1 says that token i is the assistant's, and so is predicted from those before."""

    tokens: list[int]
    mask: list[int]


def token_row_of(record: dict[str, Any], place: str) -> TokenRow | None:
    """Return the token ids and the mask of a record; None if it has not both.

    Args:
        record: Any record. Columns that a table has for other records are None.
        place: File and number of the record, for an error.

    Raises:
        ValueError: The lists are no ids and no mask, or of different lengths: the file is wrong, not one conversation.
    """
    key = next((key for key in IDS if record.get(key) is not None), None)
    if key is None or record.get(MASK) is None:
        return None
    tokens = _whole_numbers(record[key], f"{place}: {key}", "token ids")
    mask = _whole_numbers(record[MASK], f"{place}: {MASK}", "0 and 1")
    if len(mask) != len(tokens):
        raise ValueError(
            f"{place}: {MASK} has {len(mask)} entries, expected {len(tokens)}, one for each of {key}: write the record "
            "again, with 1 where the token is the assistant's and 0 elsewhere"
        )
    for i, value in enumerate(mask):
        if value not in (0, 1):
            raise ValueError(
                f"{place}: {MASK} holds {value} at {i}, expected 0 or 1: write 1 where the token is the assistant's; "
                "weights of tokens are not read"
            )
    return TokenRow(tokens, mask)


def _whole_numbers(value: Any, name: str, expected: str) -> list[int]:
    """Return a list of whole numbers, true and false among them; refuse anything else by its name."""
    if not isinstance(value, list):
        raise ValueError(
            f"{name} is a {type(value).__name__}, expected a list of {expected}: write it as a list of JSON"
        )
    for i, number in enumerate(value):
        if not isinstance(number, int):
            raise ValueError(
                f"{name} holds {describe(number)} at {i}, expected {expected}: write whole numbers"
            )
    return value
