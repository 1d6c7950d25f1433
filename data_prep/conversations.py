"""Files, folders and hub datasets -> conversations; every record is kept, or dropped for a reason that is counted."""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

from data_prep.chats.json_records import Numbered, json_records, place_of_damage
from data_prep.chats.records import Conversation, conversation_of
from data_prep.chats.turns import Damaged, Dropped
from eagle.log import script
from eagle.recipe.mixes import SourceSection, is_mix, read_mix

JSON = (".json", ".jsonl", ".ndjson")
TABLES = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv"}  # read by the datasets library
SPLITS = {  # the words that name a split in a file's name, as the hub reads them
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
MOST_DAMAGED = 0.01  # share of a file's lines that may be damaged; one line may always, as a killed writer leaves it
MAX_PLACES = 3  # records named for each reason


@dataclass
class Tally:
    """How many records were kept, how many were dropped for each reason, and how many were kept with each note."""

    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    noted: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[str]] = field(default_factory=dict)  # reason -> where its first few dropped records are
    broken: list[str] = field(
        default_factory=list, compare=False
    )  # what is wrong with files that are damaged beyond a few lines

    def drop(self, reason: str, place: str) -> None:
        """Count a dropped record, and remember its place if it is among the first for this reason."""
        self.dropped[reason] += 1
        places = self.places.setdefault(reason, [])
        if len(places) < MAX_PLACES:
            places.append(place)

    def table(self) -> str:
        """All counts as lines for the console, the most frequent reason first."""
        rows = [("kept", "", self.kept), ("dropped", "", sum(self.dropped.values()))]
        rows += [("dropped", reason, count) for reason, count in self.dropped.most_common()]
        rows += [("noted", reason, count) for reason, count in self.noted.most_common()]
        width = max(len(reason) for _, reason, _ in rows)
        return "\n".join(f"{fate:9}{reason:{width}}{count:>9}" for fate, reason, count in rows)

    def where(self) -> list[str]:
        """Lines that name the first few dropped records of each reason, the most frequent reason first."""
        return [
            f"{reason}: {', '.join(self.places[reason])}{' ...' if count > len(self.places[reason]) else ''}"
            for reason, count in self.dropped.most_common()
            if reason in self.places
        ]


def read_conversations(
    source: str | Path,
    tally: Tally | None = None,
    *,
    limit: int | None = None,
    strict: bool = False,
    split: str = "train",
    revision: str | None = None,
    config: str | None = None,
    answered: bool = True,
    allow_broken: bool = False,
    images: bool = False,
) -> Iterator[Conversation]:
    """The conversations of a file, a folder of files, a hub dataset or a mix, counted in `tally` as they are read.

    With `answered=False` questions alone will do: their answers are yet to come. A file that is damaged beyond a few
    lines is an error, unless `allow_broken`. Records with images are read with `images` alone.
    """
    tally = Tally() if tally is None else tally
    if is_mix(source):
        rest: dict[str, Any] = {"strict": strict, "answered": answered, "allow_broken": allow_broken, "images": images}
        return islice(chain.from_iterable(_read_part(part, tally, rest) for part in read_mix(source)), limit)
    files = read_records(source, split, revision, config)
    lists = (
        _convert(name, _watch(name, records, tally, allow_broken), tally, strict, answered=answered, images=images)
        for name, records in files
    )
    return islice(chain.from_iterable(lists), limit)


def _read_part(part: SourceSection, tally: Tally, rest: dict[str, Any]) -> Iterator[Conversation]:
    """The conversations of one source of a mix, as often as its weight says, evenly over it; all are counted."""
    options = {key: getattr(part, key) for key in ("limit", "split", "revision", "config")}
    for place, conversation in enumerate(read_conversations(part.path, tally, **options, **rest)):
        times = int((place + 1) * part.weight) - int(place * part.weight)
        tally.kept += times - 1
        tally.noted[f"from {part.path}"] += times
        if not times:
            tally.noted["left out by the weight of its source"] += 1
        yield from [conversation] * times


def _watch(name: str, records: Numbered, tally: Tally, allow_broken: bool) -> Numbered:
    """The records of a file; an error, or a word in the tally, where more of it is damaged than a few lines."""
    number, damaged = 0, list[tuple[int, Damaged]]()
    for number, record in records:
        yield number, record
        if isinstance(record, Damaged):
            damaged.append((number, record))
            if not record.of_one_line and len(damaged) == 1:
                line = place_of_damage(Path(name))
                _refuse(f"{name} is damaged{line}, at its record {number}: {record}", tally, allow_broken)
    if len(damaged) > max(1, MOST_DAMAGED * number) and damaged[0][1].of_one_line:
        first = f"the first is line {damaged[0][0]}: {damaged[0][1]}"
        _refuse(f"{len(damaged)} of {number} lines of {name} are damaged, {first}", tally, allow_broken)


def _refuse(damage: str, tally: Tally, allow_broken: bool) -> None:
    """An error that names the damage, or where it is allowed a word in the tally."""
    if not allow_broken:
        raise damage_error(damage)
    tally.broken.append(damage)


def damage_error(damage: str) -> ValueError:
    """The error that a damaged file is where it is not allowed."""
    return ValueError(
        f"{damage}. Write or load the file again, or set data.allow_broken=true to go on with what can be read"
    )


def _convert(name: str, records: Numbered, tally: Tally, strict: bool, **options: bool) -> Iterator[Conversation]:
    """The conversations among the records of one file, by options; in strict mode the first drop is an error."""
    number = 0
    for number, record in records:
        try:
            if isinstance(record, Dropped):
                raise record
            conversation, notes = conversation_of(record, f"{Path(name).name}:{number}", **options)
        except Dropped as reason:
            if strict:
                raise ValueError(
                    f"{name}:{number} (line, or number of the record): {reason}; expected a record that gives a "
                    "conversation: correct or remove it, or drop and count such records by leaving out --strict"
                ) from None
            tally.drop(str(reason), f"{name}:{number}")
            continue
        tally.kept += 1
        tally.noted.update(notes)
        yield conversation
    if not number:
        tally.noted["a file without records"] += 1


def read_records(
    source: str | Path, split: str, revision: str | None, config: str | None = None
) -> list[tuple[str, Numbered]]:
    """The name and the records of each file, or of the hub dataset."""
    path = Path(source)
    suffixes = (*JSON, *TABLES)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.is_file() and _suffix(file) in suffixes)
        if not files:
            raise ValueError(f"no data in the folder {path}: expected files named {', '.join(suffixes)}")
        return [(str(file), _file_records(file)) for file in _files_of_split(path, files, split)]
    if path.exists():
        return [(str(path), _file_records(path))]
    name = str(source)
    if _suffix(path) in (*suffixes, ".txt") or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(f"no file or folder at {source}: expected {', '.join(suffixes)}, or a hub dataset's name")
    return [(name, _hub_records(name, split, revision, config))]


def _files_of_split(folder: Path, files: list[Path], split: str) -> list[Path]:
    """The files of a folder without those named after another split, which are printed."""
    wanted = {part.partition("[")[0].strip().lower() for part in split.split("+")}
    chosen = [file for file in files if "all" in wanted or _is_of_split(file, wanted)]
    left_out = [file.name for file in files if file not in chosen]
    if not chosen:
        raise ValueError(
            f"no file of the split {split} in the folder {folder}, which holds {', '.join(left_out[:6])}: name one of "
            "these files, or its split (data.split, eval.split)"
        )
    if left_out:
        names = ", ".join(left_out[:6]) + " ..." * (len(left_out) > 6)
        print(f"{folder}: left out, as another split than {split}: {names}", file=sys.stderr)
    return chosen


def _is_of_split(file: Path, wanted: set[str]) -> bool:
    """Whether a file's name has one of these splits in it, or none at all."""
    name = file.name.lower()
    words = set(re.split("[^a-z]+", name))
    named = {split for split, spellings in SPLITS.items() if words.intersection(spellings)}
    exact = any(re.search(rf"(?<![a-z0-9]){re.escape(split)}(?![a-z0-9])", name) for split in wanted)
    return exact or bool(named & wanted) or not named


def _suffix(path: Path) -> str:
    return Path(path.name.lower().removesuffix(".gz")).suffix


def _file_records(path: Path) -> Numbered:
    return _table_records(path) if _suffix(path) in TABLES else json_records(path)


def _find_loader(what: str) -> Any:
    """Return `load_dataset`; where its package is missing, refuse what it would have read."""
    try:
        from datasets import load_dataset
    except ModuleNotFoundError as error:
        if error.name != "datasets":
            raise
        raise ValueError(
            f"{what} is read by the package datasets, which is not installed here: "
            f"`pip install datasets`, or name a file of JSON lines ({', '.join(JSON)})"
        ) from None
    return load_dataset


def _hub_records(name: str, split: str, revision: str | None, config: str | None) -> Numbered:
    load_dataset = _find_loader(f"{name}: no file or folder of this name, and a hub dataset")
    try:
        chosen = {} if config is None else {"name": config}
        dataset = load_dataset(name, split=split, revision=revision, streaming=True, **chosen)
    except Exception as error:  # of many kinds: no such name, no network, no such split
        raise ValueError(f"{name}: no file or folder of this name, and as a hub dataset: {error}") from error
    yield from enumerate(dataset, 1)


def _table_records(path: Path) -> Numbered:
    number, kind = 0, TABLES[_suffix(path)]
    load_dataset = _find_loader(f"{path}: a {kind} file")
    try:
        for number, record in enumerate(load_dataset(kind, data_files=str(path), split="train", streaming=True), 1):
            yield number, record
    except Exception as error:  # each format has errors of its own for damage
        reason = f"the rest of the {kind} file cannot be read: {type(error).__name__}"
        yield number + 1, Damaged(reason, of_one_line=False)


def main(argv: list[str]) -> None:
    """Print how many records of a source are kept, dropped and noted, by reason."""
    parser = argparse.ArgumentParser(prog="python -m data_prep.conversations", description=main.__doc__)
    parser.add_argument("source", metavar="SOURCE", help="a file, a folder of files, a hub dataset, or a mix")
    parser.add_argument("--strict", action="store_true", help="take the first record that would be dropped as an error")
    args, tally = parser.parse_args(argv), Tally()
    for _ in read_conversations(args.source, tally, strict=args.strict, allow_broken=True):
        pass
    print(tally.table())
    if tally.dropped:
        print("\nThe first that were dropped, by file and line (or number of the record):", *tally.where(), sep="\n")
    if tally.broken:
        raise SystemExit("\n".join(["", *tally.broken, "no stage reads such files without data.allow_broken=true"]))


if __name__ == "__main__":
    script(main)
