"""Files, folders and hub datasets -> conversations; every record is kept, or dropped for a reason that is counted."""

from __future__ import annotations

import argparse
import codecs
import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, cast

from data_prep.records import ROLES, Conversation, Dropped, conversation_of, layout_of
from eagle.log import script

__all__ = ["ROLES", "Conversation", "Tally", "read_conversations", "read_records"]

JSON = (".json", ".jsonl", ".ndjson")
TABLES = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv"}  # read by the datasets library
PIECE = 1 << 12  # bytes read at once: what was unzipped in the same step as damage is lost
HEAD = 1 << 20  # bytes looked at to tell lines from other JSON
VALUE = re.compile(r"[^\s,\[\]\ufeff]")
OBJECT = re.compile(r'\{\s*(?:\Z|"[^"]{0,99}(?:\Z|"\s*(?:\Z|:)))')  # with its first key, as far as the text goes
DECODER = json.JSONDecoder()
NOT_JSON, DEEP, CUT = "not JSON", "nested too deeply", "the file ends in the middle of a record"

Numbered = Iterator[tuple[int, Any]]  # line or record number; the record, or `Dropped` in its place


@dataclass
class Tally:
    """How many records were kept, dropped for which reason, and kept with which remark."""

    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    noted: Counter[str] = field(default_factory=Counter)

    def table(self) -> str:
        """Lines for the console, the most frequent reason first."""
        rows = [("kept", "", self.kept), ("dropped", "", sum(self.dropped.values()))]
        rows += [("dropped", reason, count) for reason, count in self.dropped.most_common()]
        rows += [("noted", reason, count) for reason, count in self.noted.most_common()]
        width = max(len(reason) for _, reason, _ in rows)
        return "\n".join(f"{fate:9}{reason:{width}}{count:>9}" for fate, reason, count in rows)


def read_conversations(
    source: str | Path,
    tally: Tally | None = None,
    *,
    limit: int | None = None,
    strict: bool = False,
    split: str = "train",
    revision: str | None = None,
) -> Iterator[Conversation]:
    """The conversations of a file, a folder of files or a hub dataset, counted in `tally` as they are read."""
    tally = Tally() if tally is None else tally
    opened = read_records(source, split, revision)
    return islice((one for name, records in opened for one in _kept(name, records, tally, strict)), limit)


def _kept(name: str, records: Numbered, tally: Tally, strict: bool) -> Iterator[Conversation]:
    """The conversations among the records of one file."""
    number = 0
    for number, record in records:
        try:
            conversation, notes = conversation_of(_or_raise(record), f"{Path(name).name}:{number}")
        except Dropped as reason:
            if strict:
                raise ValueError(
                    f"{name}:{number} (line, or number of the record): {reason}; expected a record that gives a "
                    "conversation: correct or remove it, or drop and count such records by leaving out --strict"
                ) from None
            tally.dropped[str(reason)] += 1
            continue
        tally.kept += 1
        tally.noted.update(notes)
        yield conversation
    if not number:
        tally.noted["a file without records"] += 1


def _or_raise(record: Any) -> Any:
    if isinstance(record, Dropped):
        raise record
    return record


def read_records(source: str | Path, split: str, revision: str | None) -> list[tuple[str, Numbered]]:
    """Name and records of each file, or of the hub dataset."""
    path = Path(source)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.is_file() and _suffix(file) in (*JSON, *TABLES))
        if not files:
            raise ValueError(f"no data in the folder {path}: expected files named {', '.join((*JSON, *TABLES))}")
        return [(str(file), _records(file)) for file in files]
    if path.exists():
        return [(str(path), _records(path))]
    if (
        _suffix(path) in (*JSON, *TABLES, ".txt")
        or str(source).startswith((".", "/", "~"))
        or str(source).count("/") > 1
    ):
        raise ValueError(
            f"no file or folder at {source}: expected {', '.join((*JSON, *TABLES))}, or a hub dataset's name"
        )
    return [(str(source), _hub_records(str(source), split, revision))]


def _suffix(path: Path) -> str:
    return Path(path.name.lower().removesuffix(".gz")).suffix


def _records(path: Path) -> Numbered:
    return _table_records(path) if _suffix(path) in TABLES else _json_records(path)


def _hub_records(name: str, split: str, revision: str | None) -> Numbered:
    from datasets import load_dataset

    try:
        dataset = load_dataset(name, split=split, revision=revision, streaming=True)
    except Exception as error:  # of many kinds: no such name, no network, no such split
        raise ValueError(f"{name}: no file or folder of this name, and as a hub dataset: {error}") from error
    yield from enumerate(dataset, 1)


def _table_records(path: Path) -> Numbered:
    from datasets import load_dataset

    number, kind = 0, TABLES[_suffix(path)]
    try:
        for number, record in enumerate(load_dataset(kind, data_files=str(path), split="train", streaming=True), 1):
            yield number, record
    except Exception as error:  # each format has errors of its own for damage
        yield number + 1, Dropped(f"the rest of the {kind} file cannot be read: {type(error).__name__}")


def _json_records(path: Path) -> Numbered:
    """The records of JSON of any shape; where its compressed form breaks, that is one drop more."""
    number, broken = 0, list[Dropped]()
    pieces = _pieces(path, broken)
    head = b"".join(islice(pieces, HEAD // PIECE))
    reader = _in_lines if _has_lines(head) else _in_stream
    for number, record in reader(chain([head], pieces)):
        if not (broken and isinstance(record, Dropped) and str(record) == CUT):
            yield number, record
    yield from ((number + 1, reason) for reason in broken)


def _pieces(path: Path, broken: list[Dropped]) -> Iterator[bytes]:
    """The bytes of a file as UTF-8, unzipped; `broken` gets the reason if that does not go to the end."""
    with path.open("rb") as file:
        zipped = file.peek(3).startswith(b"\x1f\x8b\x08")
        pieces = _unzipped(cast(IO[bytes], file), broken) if zipped else iter(lambda: file.read(PIECE), b"")
        first = next(pieces, b"")
        pieces = chain([first], pieces)
        if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            # a backslash where it is damaged makes that record invalid JSON
            pieces = (text.encode() for text in codecs.iterdecode(pieces, "utf-16", errors="backslashreplace"))
        yield from pieces


def _unzipped(file: IO[bytes], broken: list[Dropped]) -> Iterator[bytes]:
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
    lines = (_on_line(line)[0] for line in head.split(b"\n")[:100] if line.startswith(b"{"))
    return not head.startswith(b"[") and any(
        isinstance(record, dict) and _unwrapped(record)[0] is record for record in lines
    )


def _in_lines(pieces: Iterable[bytes]) -> Numbered:
    """The records of JSONL; a line that is damaged takes no other with it."""
    for number, line in enumerate(_lines(pieces), 1):
        yield from ((number, record) for record in _on_line(line))


def _lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Lines with their ends; a line ends at a newline and at nothing else."""
    begun: list[bytes] = []
    for piece in pieces:
        *ends, rest = piece.split(b"\n")
        for end in ends:
            yield b"".join([*begun, end, b"\n"])
            begun = []
        begun.append(rest)
    yield b"".join(begun)


def _on_line(line: bytes) -> list[Any]:
    """The record of a line, or what is left of it: a writer that was killed and resumed puts two on one."""
    try:
        text = line.decode().strip("\ufeff \t\r\n")
        found = [json.loads(text)] if text else []
    except UnicodeDecodeError as error:  # the end of the line cannot be missing if its newline is there
        found = [Dropped(CUT if error.reason == "unexpected end of data" else "not UTF-8")]
    except RecursionError:
        found = [Dropped(DEEP)]
    except ValueError:
        found = list(_values(iter([text]), NOT_JSON if line.endswith(b"\n") else CUT)) or [Dropped(NOT_JSON)]
    return found


def _in_stream(pieces: Iterable[bytes]) -> Numbered:
    """The records of an array, of an object that holds one, or of objects one after another over many lines."""
    values = _values(codecs.iterdecode(pieces, "utf-8", errors="surrogateescape"), CUT)
    return enumerate((record for value in values for record in _unwrapped(value)), 1)


def _unwrapped(value: Any) -> list[Any]:
    """The records of an object that is none itself and has one list of them."""
    lists = [one for one in value.values() if isinstance(one, list)] if isinstance(value, dict) else []
    holds = len(lists) == 1 and layout_of(value) is None and any(map(layout_of, lists[0]))
    return lists[0] if holds else [value]


def _values(texts: Iterator[str], cut: str) -> Iterator[Any]:
    """JSON values, commas and brackets between them; damage is one drop, and ends at the next record."""
    text, at, lost = "", 0, False
    while True:
        found = (OBJECT if lost else VALUE).search(text, at)
        start = found.start() if found else len(text)
        value, end, unsure = _value_at(text, start)
        if unsure and (more := _more(texts, len(text) - start)):
            text, at = text[start:] + more, 0
        elif start == len(text):
            return
        elif isinstance(value, Dropped):
            if not lost:
                yield Dropped(cut) if unsure and text[start] == "{" else value
            at, lost = start + 1, True
        elif lost and not any(map(layout_of, _unwrapped(value))):
            at = start + 1
        else:
            yield value if _is_utf8(text[start:end]) else Dropped("not UTF-8")
            at, lost = end, False


def _value_at(text: str, start: int) -> tuple[Any, int, bool]:
    """The value that begins there, its end, and whether more text could change it."""
    try:
        value, end = DECODER.raw_decode(text, start)
        return value, end, end == len(text) and not isinstance(value, dict)
    except RecursionError:
        return Dropped(DEEP), start, False
    except ValueError as error:
        # no escape and no literal is longer than 16; only the end of the text leaves a string open
        unsure = getattr(error, "pos", 0) > len(text) - 16 or "Unterminated string" in str(error)
        return Dropped(NOT_JSON), start, unsure


def _more(texts: Iterator[str], size: int) -> str:
    """At least so much text again, so that a long record is tried a few times only."""
    taken: list[str] = []
    while size >= 0 and (text := next(texts, "")):
        taken.append(text)
        size -= len(text)
    return "".join(taken)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def main(argv: list[str]) -> None:
    """What a source holds: kept, dropped and noted, by reason."""
    parser = argparse.ArgumentParser(prog="python -m data_prep.conversations", description=main.__doc__)
    parser.add_argument("source", metavar="SOURCE", help="a file, a folder of files, or a hub dataset")
    parser.add_argument("--strict", action="store_true", help="take the first record that would be dropped as an error")
    args, tally = parser.parse_args(argv), Tally()
    for _ in read_conversations(args.source, tally, strict=args.strict):
        pass
    print(tally.table())


if __name__ == "__main__":
    script(main)
