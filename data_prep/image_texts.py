"""Find the images of texts, check them, and put them in their places by the target's own processor."""

# T tokens

from __future__ import annotations

import base64
import copy
import hashlib
import mimetypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_prep.chats.images import MARK, Source, with_parts
from data_prep.chats.turns import Dropped
from eagle.core.arguments import token_ids
from eagle.core.examples import Shown
from eagle.data.identity import assets_folder
from eagle.disk import sha256, write_whole
from eagle.target.talk import process

LONGEST_PATH = 1024  # a longer text is data
PLACEHOLDERS = ("image_token", "boi_token")  # names of what templates print in an image's place
DATA_URL = "data:image/"


@dataclass(slots=True)
class ShownText:
    """A text as the processor tokenises it, and where the pieces between images stand in it."""

    shown: Shown
    text: str
    tokens: list[int]
    pieces: list[tuple[int, int, int]]  # start in the text of the template, start here, length
    image_tokens: int = 0  # that stand between the pieces, once they were counted

    def place(self, spans: Sequence[tuple[int, int]]) -> tuple[str, list[tuple[int, int]]]:
        """Return the text with its images, and where each (start, end) of an answer is in it."""
        return self.text, [self._move(start, end) for start, end in spans]

    def _move(self, start: int, end: int) -> tuple[int, int]:
        for template_start, piece_start, length in self.pieces:
            if template_start <= start and end <= template_start + length:
                shift = piece_start - template_start
                return start + shift, end + shift
        raise Dropped("an answer with the text that stands for an image")

    def check(self, tokens: Tensor, offsets: Tensor, max_length: int) -> None:
        """Count the tokens [T] of images; refuse others than the processor's, and an image that `max_length` cuts."""
        if tokens.tolist() != self.tokens:
            raise Dropped("the processor tokenises otherwise than its tokenizer")
        first, last = offsets.unbind(1)
        is_text = torch.zeros(len(tokens), dtype=torch.bool)
        for _, start, length in self.pieces:
            is_text |= (first < start + length) & (last > start)
        self.image_tokens = int((~is_text).sum())
        # The last piece of text starts after the last image.
        if len(tokens) > max_length and int(offsets[max_length - 1, 1]) < self.pieces[-1][1]:
            raise Dropped("an image that max_length cuts off")


class ImageReader:
    """Reads the images of conversations: paths within a folder, and data, of which a file is kept."""

    def __init__(self, processor: Any, folder: Path) -> None:
        self.folder = folder
        self.kept = assets_folder("images", "kept")
        self.listener = _Listener(processor.tokenizer)
        self.processor = copy.copy(processor)
        self.processor.tokenizer = self.listener

    def find(self, source: Source) -> Path:
        """Return the file of an image; data are written into one, named by their checksum."""
        if isinstance(source, bytes):
            return self._keep(source)
        if is_data(source):
            try:
                return self._keep(base64.b64decode(source.rpartition(",")[2], validate=True))
            except ValueError:
                raise Dropped("an image whose data are no base64") from None
        if "://" in source and not source.startswith("file://"):
            raise Dropped("an image on a server: nothing is downloaded")
        path = self.folder / source.removeprefix("file://")
        try:
            exists = path.is_file()
        except (OSError, ValueError):
            # A name that no file can have.
            exists = False
        if not exists:
            raise Dropped("an image that is not there")
        return path.absolute()

    def tokens(self, text: str, images: Sequence[Source]) -> list[int]:
        """Return the tokens of a text of the chat template, which hold its images as a decoder takes them."""
        return token_ids(process(self.processor, text, [str(self.find(image)) for image in images]))

    def _keep(self, data: bytes) -> Path:
        path = self.kept / hashlib.sha256(data).hexdigest()
        if not path.is_file():
            self.kept.mkdir(parents=True, exist_ok=True)
            write_whole(path, [data])
        return path

    def show(self, text: str, images: Sequence[Source]) -> ShownText:
        """Return a text of the chat template with its images in it."""
        paths = [self.find(image) for image in images]
        shown = Shown(text, tuple((str(path), sha256(path)) for path in paths))
        try:
            output = process(self.processor, text, [str(path) for path in paths])
        except Exception as error:
            # A decoder of images or a processor may raise anything.
            raise Dropped(f"the processor refuses: {' '.join(str(error).split())[:100]}") from error
        placeholder = self._placeholder(text, len(images))
        pieces = find_pieces(text.split(placeholder), self.listener.text, len(placeholder))
        return ShownText(shown, self.listener.text, output["input_ids"][0].tolist(), pieces)

    def _placeholder(self, text: str, count: int) -> str:
        """Return what the template prints in the place of an image, as often as there are images."""
        found = [getattr(self.processor, name, None) for name in PLACEHOLDERS]
        for placeholder in found:
            if placeholder and text.count(placeholder) == count:
                return placeholder
        times = ", ".join(f"{name!r} {text.count(name)} times" for name in found if name)
        raise Dropped(f"the template prints {times or 'nothing'} for {count} images")


class _Listener:
    """A tokenizer that remembers the text it was given last: that of the processor, with room for images."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.text = ""

    def __call__(self, text: Any = None, *args: Any, **kwargs: Any) -> Any:
        self.text = text
        if not isinstance(text, str):
            self.text = text[0]
        return self.tokenizer(text, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


def find_pieces(pieces: Sequence[str], text: str, gap: int) -> list[tuple[int, int, int]]:
    """Return where the pieces between placeholders of length `gap` are in the text in which these have grown.

    Each is after the one before; the first begins the text and the last ends it.
    """
    found = []
    template_start = 0
    previous_end = 0
    for i, piece in enumerate(pieces):
        # Between two pieces an image has at least one character.
        start = text.find(piece, previous_end + (i > 0))
        if i == len(pieces) - 1:
            start = len(text) - len(piece)
        if (i == 0 and start != 0) or start < previous_end or not text.startswith(piece, start):
            raise Dropped("the processor changes the text around an image")
        found.append((template_start, start, len(piece)))
        template_start += len(piece) + gap
        previous_end = start + len(piece)
    return found


def with_images(turns: Sequence[dict[str, Any]], images: Iterable[Any]) -> list[dict[str, Any]]:
    """Return messages with a part of the content for each mark, which shows the next image."""
    rest = iter(images)
    messages = []
    for turn in turns:
        if MARK in (turn["content"] or ""):
            parts = with_parts(turn)["content"]
            for part in parts:
                if part["type"] == "image":
                    part["image"] = next(rest)
            turn = {**turn, "content": parts}
        messages.append(turn)
    return messages


def as_text(image: Source, folder: str | None = None) -> str:
    """Return an image as a path, which is then that within a folder, or as a data URL."""
    if isinstance(image, bytes):
        return data_url(image)
    if image.startswith(DATA_URL):
        return image
    if is_data(image):
        return f"{DATA_URL}png;base64,{image}"
    if folder is None or "://" in image:
        return image
    return str(Path(folder, image).absolute())


def is_data(source: str) -> bool:
    """Return whether a text is an image's data: a data URL, or base64 that is too long for a path."""
    return source.startswith(DATA_URL) or len(source) > LONGEST_PATH


def data_url(data: bytes, name: str = "") -> str:
    """Return the bytes of an image as a URL; its kind is that of the file's name."""
    return f"data:{mimetypes.guess_type(name)[0] or 'image/png'};base64,{base64.b64encode(data).decode()}"


def for_server(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with each image as a data URL in OpenAI's format, as the server may be anywhere."""
    served = []
    for turn in messages:
        if isinstance(turn["content"], list):
            turn = {**turn, "content": list(map(_part_for_server, turn["content"]))}
        served.append(turn)
    return served


def _part_for_server(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] != "image":
        return part
    url = part["image"]
    if not url.startswith(DATA_URL):
        url = data_url(Path(url).read_bytes(), url)
    return {"type": "image_url", "image_url": {"url": url}}
