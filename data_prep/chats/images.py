"""The images of a record, in any known layout: taken out of it, with a mark in its text where each stood."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, count
from typing import Any

from data_prep.chats.marks import MEDIA, is_false, simplify
from data_prep.chats.turns import (
    ASSISTANT,
    LISTS,
    ROLES,
    Dropped,
    describe,
    first_of,
    layout_of,
    parse_json,
)
from eagle.recipe import DataSection

Source = str | bytes  # a path, a data URL, or the bytes of a file
MARK = "\ue002"  # stands for an image in a text
# Private characters, one of which stands for each image until turns are cut.
FIRST = 0xF0000
LAST = 0xFFFFD
NUMBERED = re.compile(f"[{chr(FIRST)}-{chr(LAST)}]")
# Names of keys that say something about images, and hold none.
ABOUT = re.compile("has.*|.*ids?")
TAG = re.compile(r"<image>", re.IGNORECASE)
PARTS = ("image", "image_url", "input_image")  # types of parts of a content
KEYS = re.compile(
    "(?:input)?(?:image|img|picture|photo|screenshot)s?(?:path|url|uri|file|filename|name|data|bytes|base64|list|link|src)?s?"
)
ANSWERS = [speaker for speaker, role in ROLES.items() if role == ASSISTANT]
IN_ANSWER = "an image in an answer"


def take_images(record: dict[str, Any]) -> tuple[dict[str, Any], list[Source], set[str]]:
    """Return the record with marks in place of its images, the images in their order, and notes.

    An image is placed where a text says `<image>`, or where it has a part of its own. If no text says so, images
    beside the turns are placed before the first question.
    """
    record, beside = _take_beside(record)
    layout = layout_of(record)
    if layout is None:
        return record, [], set()
    turns = record[layout]
    if layout in LISTS:
        turns = parse_json(turns, f"{layout}: text that is")
    is_one_text = isinstance(turns, str)
    if is_one_text:
        turns = [{"role": "user", "content": turns}]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        if beside:
            raise Dropped(f"images beside turns of another form: {describe(layout)}")
        return record, [], set()
    taken = [_take_turn(turn, bool(beside)) for turn in turns]
    notes: set[str] = set()
    num_places = sum(images.count(None) for _, images in taken)
    if beside and not num_places:
        taken = _show_first(taken, len(beside))
        notes.add("images without a place in the text: shown before it")
    elif num_places != len(beside):
        raise Dropped(f"{len(beside)} images, and {num_places} places for them in the text")
    images = _fill_places(chain.from_iterable(turn_images for _, turn_images in taken), beside)
    if len(images) > LAST - FIRST:
        raise Dropped("more images than can be told apart")
    # Numbered marks show which images are left when turns are cut.
    numbers = map(chr, count(FIRST))
    turns = [number_marks(turn, numbers) for turn, _ in taken]
    if is_one_text:
        turns = turns[0]["content"]
    return {**record, layout: turns}, images, notes


def _fill_places(images: Iterable[Source | None], beside: Iterable[Source]) -> list[Source]:
    """Return the images of texts, with the next of those beside the text in each empty place."""
    rest = iter(beside)
    return [next(rest) if image is None else image for image in images]


def number_marks(value: Any, numbers: Iterator[str]) -> Any:
    """Return a turn, a content or a part with the next private character in place of each mark."""
    if isinstance(value, dict):
        return {key: number_marks(part, numbers) for key, part in value.items()}
    if isinstance(value, list):
        return [number_marks(part, numbers) for part in value]
    if isinstance(value, str):
        return re.sub(MARK, lambda _: next(numbers), value)
    return value


def pick_images(
    messages: list[dict[str, Any]], images: list[Source]
) -> tuple[list[dict[str, Any]], list[Source]]:
    """Return the remaining messages of a record with a plain mark for each image, and the images that they show."""
    plain = []
    picked = []
    for turn in messages:
        picked += [images[ord(char) - FIRST] for char in NUMBERED.findall(turn["content"])]
        plain.append({**turn, "content": NUMBERED.sub(MARK, turn["content"])})
    return plain, picked


def _take_beside(values: dict[str, Any]) -> tuple[dict[str, Any], list[Source]]:
    """Return a record or a turn without the keys of images beside its text, and those images."""
    found: list[Source] = []
    rest = {key: value for key, value in values.items() if not is_about_images(key)}
    for key in values:
        if KEYS.fullmatch(simplify(key)) and not is_false(values[key]):
            images = list(sources_of(rest.pop(key)))
            if images and found:
                # Nobody knows in which order they are shown.
                raise Dropped(f"images under several keys, {describe(key)} among them")
            found += images
    return rest, found


def is_about_images(key: str) -> bool:
    """Return whether a key gives the number of an image, or says that there is one, and holds none."""
    name = simplify(key)
    return bool(ABOUT.fullmatch(name) and MEDIA.fullmatch(name))


def _take_turn(turn: dict[str, Any], beside: bool) -> tuple[dict[str, Any], list[Source | None]]:
    """Return a turn with marks in its text, and the images in their order; None stands for one beside all turns."""
    turn, own = _take_beside(turn)
    key = _content_key(turn)
    content = turn.get(key)
    printed = json.dumps(turn, ensure_ascii=False, default=str)
    if MARK in printed or NUMBERED.search(printed):
        raise Dropped("a private character that stands for images")
    is_answer = _speaker_of(turn) in ANSWERS
    if own and is_answer:
        raise Dropped(IN_ANSWER)
    if own and content is None:
        # an image alone may be a question
        content = ""
    images: list[Source | None] = []
    if isinstance(content, list):
        content = [_take_part(part, images) for part in content]
    elif isinstance(content, str) and not is_answer and (own or beside):
        if own and not TAG.search(content):
            content = MARK * len(own) + content
        # In an answer, or without images, the tag is text.
        content = TAG.sub(MARK, content)
        images = [None] * content.count(MARK)
    else:
        return {**turn, key: content}, images
    if own:
        num_places = images.count(None)
        if num_places != len(own):
            raise Dropped(
                f"{len(own)} images of a turn, and {num_places} places for them in its text"
            )
        images = [*_fill_places(images, own)]
    if images and is_answer:
        raise Dropped(IN_ANSWER)
    return {**turn, key: content}, images


def _content_key(turn: dict[str, Any]) -> str:
    """Return the key of a turn's content."""
    return next(
        (key for key in ("value", "content", "text") if turn.get(key) is not None), "content"
    )


def _speaker_of(turn: dict[str, Any]) -> str:
    """Return the dataset's own word for who speaks."""
    return str(first_of(turn, "from", "role")).strip().lower()


def _take_part(part: Any, images: list[Source | None]) -> Any:
    """Return a part of a content; an image is added to `images`, and becomes a mark in a part of text."""
    if not isinstance(part, dict) or part.get("type") not in PARTS:
        return part
    value = first_of(part, "image", "image_url", "url", "path", "data", "base64")
    sources = list(sources_of(value))
    if len(sources) > 1:
        raise Dropped("several images in one part of a content")
    # A part without a source shows one of the images beside the text.
    images.append(sources[0] if sources else None)
    return {"type": "text", "text": MARK}


def _show_first(
    taken: list[tuple[dict[str, Any], list[Source | None]]], many: int
) -> list[tuple[dict[str, Any], list[Source | None]]]:
    """Return the turns with `many` marks before the text of the first question."""
    for i, (turn, images) in enumerate(taken):
        if _speaker_of(turn) in ("system", *ANSWERS):
            continue
        key = _content_key(turn)
        content = turn.get(key)
        marks = MARK * many
        content = (
            [{"type": "text", "text": marks}, *content]
            if isinstance(content, list)
            else marks + (content or "")
        )
        places: list[Source | None] = [None] * many
        return [*taken[:i], ({**turn, key: content}, places + images), *taken[i + 1 :]]
    raise Dropped("images, and no question")


def sources_of(value: Any) -> Iterator[Source]:
    """Yield the images of a value: paths, data URLs, bytes, images of the datasets library, or lists of such."""
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
        # An image of pillow, as the datasets library decodes them.
        file = io.BytesIO()
        value.save(file, "PNG")
        yield file.getvalue()
    else:
        raise Dropped(f"an image that is neither a path nor data: {type(value).__name__}")


def apply_template(
    messages: Sequence[dict[str, Any]],
    tools: Any,
    tokenizer: Any,
    data: DataSection,
    **options: Any,
) -> Any:
    """Return messages as the chat template prints them, which gets them in parts if `data.images` is set."""
    if data.images is not None:
        messages = list(map(with_parts, messages))
    return tokenizer.apply_chat_template(
        list(messages), tools=tools, **options, **data.template_kwargs
    )


def with_parts(turn: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose content is the list of parts that templates of vision models print."""
    parts: list[dict[str, Any]] = []
    for i, piece in enumerate(turn["content"].split(MARK)):
        # An image is between two pieces of text.
        if i > 0:
            parts.append({"type": "image"})
        if piece:
            parts.append({"type": "text", "text": piece})
    return {**turn, "content": parts}
