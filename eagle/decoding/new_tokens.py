"""The items of `stream`: new tokens of an answer, and the text that they complete."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from eagle.core.spelling import Spelling
from eagle.core.trace import Trace


class NewTokens(list[int]):
    """New tokens of an answer, as a list of ids; `text` is what they add to its text."""

    def __init__(self, tokens: Iterable[int], spoken: SpokenText, place: int) -> None:
        super().__init__(tokens)
        self._spoken, self._place = spoken, place

    @property
    def text(self) -> str:
        """The text that these tokens complete; those of a whole answer together are `Trace.text`.

        Characters wait for their last token, and what may become a stop string until it is none.
        """
        return self._spoken.piece(self._place)


class SpokenText:
    """An answer's text in pieces, each spelt when it is first asked for."""

    def __init__(self, trace: Trace, stop_strings: Sequence[str]) -> None:
        self.trace, self.stop_strings = trace, stop_strings
        self.parts: list[tuple[list[int], bool]] = []  # tokens, and whether the answer ends with them
        self.texts: list[str] = []
        self.spelling: Spelling | None = None
        self.held, self.emitted = "", 0

    def add(self, tokens: list[int]) -> NewTokens:
        """The next tokens of the answer."""
        self.parts.append((tokens, self.trace.finish != "running"))
        return NewTokens(tokens, self, len(self.parts) - 1)

    def piece(self, place: int) -> str:
        """The text of a part, after all before it."""
        while len(self.texts) <= place:
            self.texts.append(self._spell(*self.parts[len(self.texts)]))
            self.emitted += len(self.texts[-1])
        return self.texts[place]

    def _spell(self, tokens: list[int], is_last: bool) -> str:
        if is_last:
            return self.trace.text[self.emitted :]
        if self.spelling is None:
            self.spelling = Spelling(self.trace.need_tokenizer())
        self.held += "".join(map(self.spelling, tokens))
        ready, self.held = self._split(self.held)
        return ready

    def _split(self, text: str) -> tuple[str, str]:
        """The text without its longest end that begins a stop string, and that end."""
        starts = (
            place
            for place in range(max(len(text) - max(map(len, self.stop_strings), default=0), 0), len(text))
            if any(string.startswith(text[place:]) for string in self.stop_strings)
        )
        place = next(starts, len(text))
        return text[:place], text[place:]
