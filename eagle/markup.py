"""Build HTML: whatever is not `Html` already is escaped, in attributes too."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

VOID = {"meta", "link", "br"}
PLAIN = "\n\t\u00a0\u200c\u200d\u3000"  # not printable in Python's eyes, and harmless: joiners hold emoji together


class Html(str):
    """Text that is already markup."""

    __slots__ = ()


def readable(text: object) -> str:
    """Return the text with control characters, direction marks and lone surrogates spelt out as ⟨U+....⟩.

    A page that shows text of models and data is then not changed by it.
    """
    characters = []
    for character in str(text):
        is_harmless = character.isprintable() or character in PLAIN
        characters.append(character if is_harmless else f"⟨U+{ord(character):04X}⟩")
    return "".join(characters)


def html(value: object) -> Html:
    """Return a value as markup: `Html` stays, an iterable is joined, everything else is escaped."""
    # text of models and data is hostile until it is escaped
    if isinstance(value, Html):
        return value
    if isinstance(value, Iterable) and not isinstance(value, str):
        return Html("".join(map(html, value)))
    return Html(escape(readable(value)))


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """Return an element.

    `class_` and `stroke_width` stand for the attributes `class` and `stroke-width`; None is no attribute.
    """
    start = f"<{name}"
    for key, value in attributes.items():
        if value is not None:
            attribute = key.rstrip("_").replace("_", "-")
            start += f' {attribute}="{escape(readable(value))}"'
    if name in VOID:
        return Html(f"{start}>")
    return Html(f"{start}>{html(children)}</{name}>")


def table(rows: Iterable[Iterable[object]], heading: Iterable[object] = ()) -> Html:
    """Return a table with plain cells, which takes its colours from the page that shows it."""
    lines = [tag("tr", [tag("th", cell) for cell in heading])] if heading else []
    for row in rows:
        cells = [tag("td", cell) for cell in row]
        lines.append(tag("tr", cells))
    return tag("table", lines)
