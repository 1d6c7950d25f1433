"""The images of a record, in any known layout: taken out of it, with a mark in its text where each stood."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from data_prep.chats.marks import MEDIA, is_false, simplify
from data_prep.chats.turns import LISTS, Dropped, describe, first_of, layout_of, parse_json

Source = str | bytes  # a path, a data URL, or the bytes of a file
MARK = "\ue002"  # stands for an image in a text
FIRST, LAST = 0xF0000, 0xFFFFD  # private characters: what stands for each image until turns are cut
NUMBERED = re.compile(f"[{chr(FIRST)}-{chr(LAST)}]")
ABOUT = re.compile("has.*|.*ids?")  # names of what is said about images that are elsewhere
TAG = re.compile(r"<image>", re.IGNORECASE)
PARTS = ("image", "image_url", "input_image")  # types of parts of a content
KEYS = re.compile(
    "(?:input)?(?:image|img|picture|photo|screenshot)s?(?:path|url|uri|file|filename|name|data|bytes|base64|list|link|src)?s?"
)
ANSWERS = ("gpt", "assistant", "model", "chatgpt", "bot")


def take_images(record: dict[str, Any]) -> tuple[dict[str, Any], list[Source], set[str]]:
    """The record with marks in place of its images, the images in their order, and notes.

    An image stands where a text says `<image>`, or in a part of its own. Those beside a text that says so nowhere are
    shown before it.
    """
    record, beside = _take_beside(record)
    layout = layout_of(record)
    if layout is None:
        return record, [], set()
    turns = parse_json(record[layout], f"{layout}: text that is") if layout in LISTS else record[layout]
    plain = isinstance(turns, str)
    turns = [{"role": "user", "content": turns}] if plain else turns
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        if beside:
            raise Dropped(f"images beside turns of another form: {describe(layout)}")
        return record, [], set()
    taken = [_take_turn(turn, bool(beside)) for turn in turns]
    open_places = sum(images.count(None) for _, images in taken)
    notes = set[str]()
    if beside and not open_places:
        taken, notes = _show_first(taken, len(beside)), {"images without a place in the text: shown before it"}
    elif open_places != len(beside):
        raise Dropped(f"{len(beside)} images, and {open_places} places for them in the text")
    rest = iter(beside)
    images = [next(rest) if image is None else image for _, turn_images in taken for image in turn_images]
    if len(images) > LAST - FIRST:
        raise Dropped("more images than can be told apart")
    numbers = map(chr, count(FIRST))
    turns = [number_marks(turn, numbers) for turn, _ in taken]
    return {**record, layout: turns[0]["content"] if plain else turns}, images, notes


def number_marks(value: Any, numbers: Iterator[str]) -> Any:
    """A turn, a content or a part with another private character for each mark, in their order."""
    if isinstance(value, dict):
        return {key: number_marks(part, numbers) for key, part in value.items()}
    if isinstance(value, list):
        return [number_marks(part, numbers) for part in value]
    return re.sub(MARK, lambda _: next(numbers), value) if isinstance(value, str) and MARK in value else value


def pick_images(messages: list[dict[str, Any]], images: list[Source]) -> tuple[list[dict[str, Any]], list[Source]]:
    """The messages that are left of a record, with a plain mark for each image, and the images that these show."""
    picked = [images[ord(char) - FIRST] for turn in messages for char in NUMBERED.findall(turn["content"])]
    return [{**turn, "content": NUMBERED.sub(MARK, turn["content"])} for turn in messages], picked


def _take_beside(values: dict[str, Any]) -> tuple[dict[str, Any], list[Source]]:
    """A record or a turn without the keys of images beside its text, and those images."""
    found: list[Source] = []
    rest = {key: value for key, value in values.items() if not is_about_images(key)}
    for key in values:
        if KEYS.fullmatch(simplify(key)) and not is_false(values[key]):
            images = list(sources_of(rest.pop(key)))
            if images and found:
                raise Dropped(f"images under several keys, {describe(key)} among them")
            found += images
    return rest, found


def is_about_images(key: str) -> bool:
    """Whether a key tells the number of an image, or that there is one, and holds none."""
    name = simplify(key)
    return bool(ABOUT.fullmatch(name) and MEDIA.fullmatch(name))


def _take_turn(turn: dict[str, Any], beside: bool) -> tuple[dict[str, Any], list[Source | None]]:
    """A turn with marks in its text, and the images in their order; None stands for one beside all turns."""
    turn, own = _take_beside(turn)
    key = next((key for key in ("value", "content", "text") if turn.get(key) is not None), "content")
    content = turn.get(key)
    said = json.dumps(turn, ensure_ascii=False, default=str)
    if MARK in said or NUMBERED.search(said):
        raise Dropped("a private character that stands for images")
    speaker = str(first_of(turn, "from", "role")).strip().lower()
    images: list[Source | None] = []
    if isinstance(content, list):
        content = [_take_part(part, images) for part in content]
        places = images.count(None)
        if own and places == len(own):
            rest = iter(own)
            images = [next(rest) if image is None else image for image in images]
        elif own:
            raise Dropped(f"{len(own)} images of a turn, and {places} places for them in its text")
    elif isinstance(content, str) and speaker not in ANSWERS and (own or beside):
        places = len(TAG.findall(content))
        if own and not places:
            content = MARK * len(own) + content
        elif own and places != len(own):
            raise Dropped(f"{len(own)} images of a turn, and {places} places for them in its text")
        content = TAG.sub(MARK, content)
        images = list(own) if own else [None] * places
    if images and speaker in ANSWERS:
        raise Dropped("an image in an answer")
    return {**turn, key: content}, images


def _take_part(part: Any, images: list[Source | None]) -> Any:
    """A part of a content; an image becomes a mark in a part of text."""
    if not isinstance(part, dict) or part.get("type") not in PARTS:
        return part
    values = (part[key] for key in ("image", "image_url", "url", "path", "data", "base64") if part.get(key) is not None)
    found = list(sources_of(next(values, None)))
    if len(found) > 1:
        raise Dropped("several images in one part of a content")
    images.append(found[0] if found else None)
    return {"type": "text", "text": MARK}


def _show_first(
    taken: list[tuple[dict[str, Any], list[Source | None]]], many: int
) -> list[tuple[dict[str, Any], list[Source | None]]]:
    """The turns with so many marks before the first question's text."""
    for place, (turn, images) in enumerate(taken):
        key = next((key for key in ("value", "content", "text") if turn.get(key) is not None), "content")
        if str(first_of(turn, "from", "role")).strip().lower() in ("system", *ANSWERS):
            continue
        content = turn.get(key)
        marks = MARK * many
        content = [{"type": "text", "text": marks}, *content] if isinstance(content, list) else marks + (content or "")
        return [*taken[:place], ({**turn, key: content}, [*[None] * many, *images]), *taken[place + 1 :]]
    raise Dropped("images, and no question")


def sources_of(value: Any) -> Iterator[Source]:
    """The images of a value: paths, data URLs, bytes, what the datasets library makes of a table, or lists of such."""
    if value is None or value == "":
        return
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from sources_of(item)
    elif isinstance(value, dict):
        yield from sources_of(first_of(value, "bytes", "path", "url", "image", "data"))
    elif isinstance(value, (str, bytes)):
        yield value
    elif hasattr(value, "save") and hasattr(value, "size"):
        file = io.BytesIO()
        value.save(file, "PNG")
        yield file.getvalue()
    else:
        raise Dropped(f"an image that is neither a path nor data: {type(value).__name__}")


def for_template(messages: Sequence[dict[str, Any]], images: str | None) -> list[dict[str, Any]]:
    """Messages as the chat template is given them: in parts where `data.images` is set."""
    return list(messages) if images is None else list(map(with_parts, messages))


def with_parts(turn: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is the list of parts that templates of models that see print."""
    pieces = turn["content"].split(MARK)
    parts: list[dict[str, Any]] = [{"type": "text", "text": pieces[0]}] if pieces[0] else []
    for piece in pieces[1:]:
        parts += [{"type": "image"}, *([{"type": "text", "text": piece}] if piece else [])]
    return {**turn, "content": parts}
