"""The records of JSON files of any shape, plain or compressed; damage loses no good record."""

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

PIECE = 1 << 12  # bytes read at once: what was unzipped in the same step as damage is lost
HEAD = 1 << 20  # bytes looked at to tell lines from other JSON
LARGE = 1 << 30  # bytes of a file that is not read a second time for the line of its damage
VALUE = re.compile(r"[^\s,\[\]\ufeff]")
OBJECT = re.compile(r'\{\s*(?:\Z|"[^"]{0,99}(?:\Z|"\s*(?:\Z|:)))')  # with its first key, as far as the text goes
DECODER = json.JSONDecoder()
NOT_JSON, DEEP, CUT = "not JSON", "nested too deeply", "the file ends in the middle of a record"

Numbered = Iterator[tuple[int, Any]]  # line or record number; the record, or `Dropped` in its place


def json_records(path: Path) -> Numbered:
    """The records of JSON of any shape; where the compressed form breaks, that is one more drop at the end."""
    number, broken = 0, list[Dropped]()
    pieces = _read_pieces(path, broken)
    head = b"".join(islice(pieces, HEAD // PIECE))
    has_lines = _has_lines(head)
    for number, record in (_read_lines if has_lines else _read_stream)(chain([head], pieces)):
        if not isinstance(record, Dropped):
            yield number, record
        elif not (broken and str(record) == CUT):
            yield number, Damaged(str(record), of_one_line=has_lines)
    yield from ((number + 1, Damaged(str(reason), of_one_line=False)) for reason in broken)


def place_of_damage(path: Path) -> str:
    """Where JSON that is no lines is damaged, as far as that is easily found; nothing else."""
    try:
        text = path.read_bytes() if path.stat().st_size < LARGE else b""
        json.loads(text.decode(errors="replace"))
    except ValueError as error:
        offset = getattr(error, "pos", 0)
        return f" at line {getattr(error, 'lineno', 1)}" if offset and "Extra data" not in str(error) else ""
    except RecursionError:
        pass
    return ""


def _read_pieces(path: Path, broken: list[Dropped]) -> Iterator[bytes]:
    """The bytes of a file as UTF-8, unzipped; the reason is added to `broken` if that stops before the end."""
    with path.open("rb") as file:
        zipped = file.peek(3).startswith(b"\x1f\x8b\x08")
        pieces = _unzip(cast(IO[bytes], file), broken) if zipped else iter(lambda: file.read(PIECE), b"")
        first = next(pieces, b"")
        pieces = chain([first], pieces)
        if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            # a backslash where it is damaged makes that record invalid JSON
            pieces = (text.encode() for text in codecs.iterdecode(pieces, "utf-16", errors="backslashreplace"))
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
    """Whether one of the first lines is a record by itself; in other JSON a record begins indented, or in an array."""
    head = head.removeprefix(codecs.BOM_UTF8).lstrip()
    if head.startswith(b"["):
        return False
    records = (_parse_line(line)[0] for line in head.split(b"\n")[:100] if line.startswith(b"{"))
    return any(isinstance(record, dict) and _unwrap(record)[0] is record for record in records)


def _read_lines(pieces: Iterable[bytes]) -> Numbered:
    """The records of JSONL; a damaged line loses no other."""
    for number, line in enumerate(_split_lines(pieces), 1):
        yield from ((number, record) for record in _parse_line(line))


def _split_lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Lines with their ends; a line ends at a newline and at nothing else."""
    pending: list[bytes] = []
    for piece in pieces:
        *ends, rest = piece.split(b"\n")
        for end in ends:
            yield b"".join([*pending, end, b"\n"])
            pending = []
        pending.append(rest)
    yield b"".join(pending)


def _parse_line(line: bytes) -> list[Any]:
    """The records of a line, or what is left of them: a writer that was killed and resumed puts two on one line."""
    try:
        text = line.decode().strip("\ufeff \t\r\n")
        return [json.loads(text)] if text else []
    except UnicodeDecodeError as error:  # the end of the line cannot be missing if its newline is there
        return [Dropped(CUT if error.reason == "unexpected end of data" else "not UTF-8")]
    except RecursionError:
        return [Dropped(DEEP)]
    except ValueError:
        return list(_scan_values(iter([text]), NOT_JSON if line.endswith(b"\n") else CUT)) or [Dropped(NOT_JSON)]


def _read_stream(pieces: Iterable[bytes]) -> Numbered:
    """The records of an array, of an object that holds one, or of objects one after another over many lines."""
    values = _scan_values(codecs.iterdecode(pieces, "utf-8", errors="surrogateescape"), CUT)
    return enumerate((record for value in values for record in _unwrap(value)), 1)


def _unwrap(value: Any) -> list[Any]:
    """The records in the one list of an object that is no record itself; else the value alone."""
    lists = [item for item in value.values() if isinstance(item, list)] if isinstance(value, dict) else []
    # questions about one text, which stands beside their list, are no records without it
    holds_records = len(lists) == 1 and layout_of(value) is None
    holds_records = holds_records and any(layout_of(item) not in (None, "question", "query") for item in lists[0])
    return lists[0] if holds_records else [value]


def _is_record(value: Any) -> bool:
    """Whether a value behind damage is a record; the arguments of a tool call may hold a query, too."""
    layout = layout_of(value)
    return layout is not None and (layout != "query" or first_of(value, *ANSWERS["query"]) is not None)


def _scan_values(texts: Iterator[str], cut: str) -> Iterator[Any]:
    """JSON values with commas and brackets between them; damage is one drop, and ends at the next record."""
    text, place, lost = "", 0, False
    while True:
        match = (OBJECT if lost else VALUE).search(text, place)
        start = match.start() if match else len(text)
        value, end, unsure = _decode_value(text, start)
        if unsure and (more := _take_text(texts, len(text) - start)):
            text, place = text[start:] + more, 0
        elif start == len(text):
            return
        elif isinstance(value, Dropped):
            if not lost:
                yield Dropped(cut) if unsure and text[start] == "{" else value
            place, lost = start + 1, True
        elif lost and not any(map(_is_record, _unwrap(value))):
            place = start + 1
        else:
            yield Dropped("not UTF-8") if SURROGATE.search(text, start, end) else value
            place, lost = end, False


def _decode_value(text: str, start: int) -> tuple[Any, int, bool]:
    """The value that begins at `start`, its end, and whether more text could change it."""
    try:
        value, end = DECODER.raw_decode(text, start)
        return value, end, end == len(text) and not isinstance(value, dict)
    except RecursionError:
        return Dropped(DEEP), start, False
    except ValueError as error:
        # no escape and no literal is longer than 16; only the end of the text leaves a string open
        unsure = getattr(error, "pos", 0) > len(text) - 16 or "Unterminated string" in str(error)
        return Dropped(NOT_JSON), start, unsure


def _take_text(texts: Iterator[str], size: int) -> str:
    """More than `size` further characters if there are: reading doubles, so a long record is tried a few times only."""
    pieces: list[str] = []
    while size >= 0 and (text := next(texts, "")):
        pieces.append(text)
        size -= len(text)
    return "".join(pieces)
