"""HTML from plain values: whatever is not `Html` already is escaped, in attributes too."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

VOID = {"meta", "link", "br"}
PLAIN = "\n\t\u00a0\u200c\u200d\u3000"  # not printable in Python's eyes, and harmless: joiners hold emoji together


class Html(str):
    """Text that is markup already."""

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
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    opened = f"<{name}" + "".join(f' {key}="{escape(readable(value))}"' for key, value in given.items()) + ">"
    return Html(opened if name in VOID else f"{opened}{html(children)}</{name}>")
