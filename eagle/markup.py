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
    """The text with its control, direction and half characters spelt out, so that they act on nothing."""
    return "".join(c if c.isprintable() or c in PLAIN else f"⟨U+{ord(c):04X}⟩" for c in str(text))


def html(value: object) -> Html:
    """A value as markup: `Html` stays, an iterable is joined, everything else is escaped."""
    if isinstance(value, Html):
        return value
    if isinstance(value, Iterable) and not isinstance(value, str):
        return Html("".join(map(html, value)))
    return Html(escape(readable(value)))


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """An element; `class_` and `stroke_width` stand for `class` and `stroke-width`, None for no attribute."""
    start = f"<{name}"
    for key, value in attributes.items():
        if value is not None:
            start += f' {key.rstrip("_").replace("_", "-")}="{escape(readable(value))}"'
    return Html(f"{start}>" if name in VOID else f"{start}>{html(children)}</{name}>")


def table(rows: Iterable[Iterable[object]], heading: Iterable[object] = ()) -> Html:
    """A table with plain cells, which takes its colours from the page that shows it."""
    head = tag("tr", [tag("th", cell) for cell in heading]) if heading else ""
    return tag("table", head, [tag("tr", [tag("td", cell) for cell in row]) for row in rows])
