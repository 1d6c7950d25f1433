"""Tokens as text, as soon as it is certain."""

from __future__ import annotations

import re
from typing import Any

BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # a token that is one byte, where a vocabulary falls back to bytes


class Spelling:
    """Tokens as text, one by one; a character whose bytes are not all there yet waits for them.

    A run of single bytes waits for its end: where one of them is no text, all of them are decoded as no text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        # spelt before, and up to which: what stands in front decides whether a token begins with a space
        self.begin = self.end = 0
        self.in_bytes = False

    def __call__(self, token: int) -> str:
        """What can be said once this token is there."""
        self.tokens.append(token)
        if BYTE.fullmatch(str(self.tokenizer.convert_ids_to_tokens(token))):
            self.in_bytes = True
        elif self.in_bytes:  # tokens that print nothing do not end a run
            self.in_bytes = not self.tokenizer.decode([token], skip_special_tokens=True)
        new = self.rest()
        if not new or new.endswith("\ufffd") or self.in_bytes:
            return ""
        self.begin, self.end = self.end, len(self.tokens)
        return new

    def rest(self) -> str:
        """What waits."""
        spelt, text = (self._text(end) for end in (self.end, len(self.tokens)))
        return text[len(spelt) :]

    def _text(self, end: int) -> str:
        return self.tokenizer.decode(self.tokens[self.begin : end], skip_special_tokens=True)
