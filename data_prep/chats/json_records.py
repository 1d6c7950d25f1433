"""Read the records of JSON files of any shape, plain or compressed; damage loses no good record."""

from __future__ import annotations

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, cast

from data_prep.chats.turns import ANSWERS, SURROGATE, Damaged, Dropped, first_of, layout_of

# Bytes that are read at once: those unzipped in the same step as damage are lost.
PIECE = 1 << 12
# Bytes by which lines are told from other JSON.
HEAD = 1 << 20
# Bytes of a file that is not read a second time for the line of its damage.
LARGE = 1 << 30
VALUE = re.compile(r"[^\s,\[\]\ufeff]")
# An object with its first key, as far as the text goes.
OBJECT = re.compile(r'\{\s*(?:\Z|"[^"]{0,99}(?:\Z|"\s*(?:\Z|:)))')
DECODER = json.JSONDecoder()
NOT_JSON = "not JSON"
DEEP = "nested too deeply"
CUT = "the file ends in the middle of a record"

# The number of a line or record; the record, or `Dropped` in its place.
Numbered = Iterator[tuple[int, Any]]


def json_records(path: Path) -> Numbered:
    """Yield the records of JSON of any shape; damage of the compressed form is one more drop at the end."""
    number = 0
    broken: list[Dropped] = []
    pieces = _read_pieces(path, broken)
    head = b"".join(islice(pieces, HEAD // PIECE))
    has_lines = _has_lines(head)
    read = _read_lines if has_lines else _read_stream
    for number, record in read(chain([head], pieces)):
        if not isinstance(record, Dropped):
            yield number, record
        elif not (broken and str(record) == CUT):
            yield number, Damaged(str(record), of_one_line=has_lines)
    for reason in broken:
        yield number + 1, Damaged(str(reason), of_one_line=False)


def place_of_damage(path: Path) -> str:
    """Return where JSON that is not in lines is damaged, if that is easily found, else ""."""
    try:
        if path.stat().st_size >= LARGE:
            return ""
        json.loads(path.read_bytes().decode(errors="replace"))
    except ValueError as error:
        offset = getattr(error, "pos", 0)
        # Extra data are a second record, and no damage.
        if offset and "Extra data" not in str(error):
            return f" at line {getattr(error, 'lineno', 1)}"
    except RecursionError:
        pass
    return ""


def _read_pieces(path: Path, broken: list[Dropped]) -> Iterator[bytes]:
    """Yield the bytes of a file as UTF-8, unzipped; the reason is added to `broken` if that stops before the end."""
    with path.open("rb") as file:
        zipped = file.peek(3).startswith(b"\x1f\x8b\x08")
        pieces: Iterator[bytes] = iter(lambda: file.read(PIECE), b"")
        if zipped:
            pieces = _unzip(cast(IO[bytes], file), broken)
        first = next(pieces, b"")
        pieces = chain([first], pieces)
        if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            # a backslash where it is damaged makes that record invalid JSON
            pieces = (
                text.encode()
                for text in codecs.iterdecode(pieces, "utf-16", errors="backslashreplace")
            )
        yield from pieces


def _unzip(file: IO[bytes], broken: list[Dropped]) -> Iterator[bytes]:
    try:
        with gzip.GzipFile(fileobj=file) as unzipped:
            yield from iter(lambda: unzipped.read1(PIECE), b"")
    except EOFError:
        broken.append(Dropped("the compressed file ends early"))
    except (zlib.error, gzip.BadGzipFile):
        broken.append(Dropped("the compressed file is damaged"))


def _has_lines(head: bytes) -> bool:
    """Return whether one of the first lines is a record by itself; in other JSON they are indented or in an array."""
    head = head.removeprefix(codecs.BOM_UTF8).lstrip()
    if head.startswith(b"["):
        return False
    records = (_parse_line(line)[0] for line in head.split(b"\n")[:100] if line.startswith(b"{"))
    return any(isinstance(record, dict) and _unwrap(record)[0] is record for record in records)


def _read_lines(pieces: Iterable[bytes]) -> Numbered:
    """Yield the records of JSONL; a damaged line loses no other."""
    for number, line in enumerate(_split_lines(pieces), 1):
        for record in _parse_line(line):
            yield number, record


def _split_lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield lines with their ends; a line ends at a newline and at nothing else."""
    pending: list[bytes] = []
    for piece in pieces:
        *ends, rest = piece.split(b"\n")
        for end in ends:
            yield b"".join([*pending, end, b"\n"])
            pending = []
        pending.append(rest)
    yield b"".join(pending)


def _parse_line(line: bytes) -> list[Any]:
    """Return the records of a line, or what is left of them; a writer that was resumed may put two on one line."""
    try:
        text = line.decode().strip("\ufeff \t\r\n")
        return [json.loads(text)] if text else []
    except UnicodeDecodeError as error:
        # The end of the line cannot be missing if its newline is there.
        if error.reason == "unexpected end of data":
            return [Dropped(CUT)]
        return [Dropped("not UTF-8")]
    except RecursionError:
        return [Dropped(DEEP)]
    except ValueError:
        fault = CUT
        if line.endswith(b"\n"):
            fault = NOT_JSON
        return list(_scan_values(iter([text]), fault)) or [Dropped(NOT_JSON)]


def _read_stream(pieces: Iterable[bytes]) -> Numbered:
    """Return the records of an array, of an object that holds one, or of objects one after another over many lines."""
    values = _scan_values(codecs.iterdecode(pieces, "utf-8", errors="surrogateescape"), CUT)
    return enumerate(chain.from_iterable(map(_unwrap, values)), 1)


def _unwrap(value: Any) -> list[Any]:
    """Return the records in the one list of an object that is no record itself; else the value alone."""
    if not isinstance(value, dict):
        return [value]
    lists = [item for item in value.values() if isinstance(item, list)]
    if len(lists) != 1 or layout_of(value) is not None:
        return [value]
    # Questions about one text, which is beside their list, are no records without it.
    holds_records = any(layout_of(item) not in (None, "question", "query") for item in lists[0])
    if holds_records:
        return lists[0]
    return [value]


def _is_record(value: Any) -> bool:
    """Return whether a value behind damage is a record; the arguments of a tool call may hold a query, too."""
    layout = layout_of(value)
    return layout is not None and (
        layout != "query" or first_of(value, *ANSWERS["query"]) is not None
    )


def _scan_values(texts: Iterator[str], cut: str) -> Iterator[Any]:
    """Yield JSON values with commas and brackets between them; damage is one drop, and ends at the next record."""
    text = ""
    position = 0
    is_lost = False
    while True:
        # After damage only an object can be told from the inside of a value.
        match = (OBJECT if is_lost else VALUE).search(text, position)
        start = match.start() if match else len(text)
        value, end, unsure = _decode_value(text, start)
        more = ""
        if unsure:
            more = _take_text(texts, len(text) - start)
        if more:
            text = text[start:] + more
            position = 0
        elif start == len(text):
            return
        elif isinstance(value, Dropped):
            if not is_lost:
                if unsure and text[start] == "{":
                    value = Dropped(cut)
                yield value
            position = start + 1
            is_lost = True
        elif is_lost and not any(map(_is_record, _unwrap(value))):
            position = start + 1
        else:
            if SURROGATE.search(text, start, end):
                value = Dropped("not UTF-8")
            yield value
            position = end
            is_lost = False


def _decode_value(text: str, start: int) -> tuple[Any, int, bool]:
    """Return the value that begins at `start`, its end, and whether more text could change it."""
    try:
        value, end = DECODER.raw_decode(text, start)
        return value, end, end == len(text) and not isinstance(value, dict)
    except RecursionError:
        return Dropped(DEEP), start, False
    except ValueError as error:
        # No escape and no literal is longer than 16; only the end of the text leaves a string open.
        unsure = getattr(error, "pos", 0) > len(text) - 16 or "Unterminated string" in str(error)
        return Dropped(NOT_JSON), start, unsure


def _take_text(texts: Iterator[str], size: int) -> str:
    """Return more than `size` further characters if there are any."""
    # What has been read doubles each time, so that a long record is tried only a few times.
    pieces: list[str] = []
    while size >= 0:
        text = next(texts, "")
        if not text:
            break
        pieces.append(text)
        size -= len(text)
    return "".join(pieces)
