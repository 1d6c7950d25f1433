"""Incremental detokenisation."""

from __future__ import annotations

import re
from typing import Any

# the name of a byte token, in a vocabulary that spells unknown characters byte by byte
BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Spelling:
    """Decodes tokens one by one; incomplete characters are held back until their remaining bytes arrive.

    A run of byte tokens is held back to its end, because an invalid byte changes how the whole run is decoded.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        # tokens[begin:end] is decoded as context: it decides whether the next token begins with a space
        self.begin = self.end = 0
        self.in_bytes = False  # whether the last tokens are a run of byte tokens

    def __call__(self, token: int) -> str:
        """Add a token and return the text that it completes."""
        self.tokens.append(token)
        if BYTE.fullmatch(str(self.tokenizer.convert_ids_to_tokens(token))):
            self.in_bytes = True
        elif self.in_bytes:  # tokens that print nothing do not end a run
            self.in_bytes = not self.tokenizer.decode([token], skip_special_tokens=True)
        # nothing is returned yet where the last character is incomplete, which is decoded as U+FFFD
        new = self.rest()
        if not new or new.endswith("\ufffd") or self.in_bytes:
            return ""
        self.begin = self.end
        self.end = len(self.tokens)
        return new

    def rest(self) -> str:
        """Return the text of the tokens still held back."""
        context = self._decode(self.begin, self.end)
        text = self._decode(self.begin, len(self.tokens))
        return text[len(context) :]

    def _decode(self, begin: int, end: int) -> str:
        return self.tokenizer.decode(self.tokens[begin:end], skip_special_tokens=True)
