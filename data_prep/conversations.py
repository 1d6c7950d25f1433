"""Read conversations from files, folders and hub datasets; records are kept, or dropped for a reason and counted."""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
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
# The words that name a split in a file's name, as the hub reads them.
SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
# The share of a file's lines that may be damaged; one line always may, as a killed writer leaves it.
MOST_DAMAGED = 0.01
MAX_PLACES = 3  # records named for each reason


@dataclass
class Tally:
    """Counts of records: kept, dropped for each reason, and kept with each note."""

    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    noted: Counter[str] = field(default_factory=Counter)
    # Where the first few dropped records of each reason are.
    places: dict[str, list[str]] = field(default_factory=dict)
    # The damage of files with more than a few damaged lines.
    broken: list[str] = field(default_factory=list, compare=False)

    def drop(self, reason: str, place: str) -> None:
        """Count a dropped record, and remember its place if it is among the first for this reason."""
        self.dropped[reason] += 1
        places = self.places.setdefault(reason, [])
        if len(places) < MAX_PLACES:
            places.append(place)

    def table(self) -> str:
        """Return all counts as lines for the console, the most frequent reason first."""
        rows = [("kept", "", self.kept), ("dropped", "", sum(self.dropped.values()))]
        rows += [("dropped", reason, count) for reason, count in self.dropped.most_common()]
        rows += [("noted", reason, count) for reason, count in self.noted.most_common()]
        width = max(len(reason) for _, reason, _ in rows)
        return "\n".join(f"{fate:9}{reason:{width}}{count:>9}" for fate, reason, count in rows)

    def where(self) -> list[str]:
        """Return lines that name the first few dropped records of each reason, the most frequent reason first."""
        lines = []
        for reason, count in self.dropped.most_common():
            # Reasons of a cache have no places.
            if reason in self.places:
                places = self.places[reason]
                more = " ..." if count > len(places) else ""
                lines.append(f"{reason}: {', '.join(places)}{more}")
        return lines


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
    """Return the conversations of a file, a folder of files, a hub dataset or a mix, and count them in `tally`.

    Args:
        source: A path, the name of a hub dataset, or a mix of such.
        tally: Counts of what is kept and dropped, to which this adds.
        limit: The most conversations to return.
        strict: Whether the first record that would be dropped is an error.
        split: Which split of a dataset, or of a folder's files by their names.
        revision: Of a hub dataset.
        config: Of a hub dataset.
        answered: With False, questions alone will do: their answers are yet to come.
        allow_broken: Whether to read on in a file with more than a few damaged lines.
        images: Whether records with images are read.

    Raises:
        ValueError: No such source, a dropped record with `strict`, or damage without `allow_broken`.
    """
    if tally is None:
        tally = Tally()
    parts: Iterable[Iterator[Conversation]]
    if is_mix(source):
        rest: dict[str, Any] = {
            "strict": strict,
            "answered": answered,
            "allow_broken": allow_broken,
            "images": images,
        }
        parts = (_read_part(part, tally, rest) for part in read_mix(source))
    else:
        # The source is opened here, so that a wrong name is an error at once.
        files = read_records(source, split, revision, config)
        options = {"answered": answered, "images": images}
        parts = (
            _convert(name, _watch(name, records, tally, allow_broken), tally, strict, **options)
            for name, records in files
        )
    return islice(chain.from_iterable(parts), limit)


def _read_part(part: SourceSection, tally: Tally, rest: dict[str, Any]) -> Iterator[Conversation]:
    """Yield the conversations of one source of a mix, as often as its weight says; all are counted."""
    options = {key: getattr(part, key) for key in ("limit", "split", "revision", "config")}
    for i, conversation in enumerate(read_conversations(part.path, tally, **options, **rest)):
        # A weight of 2.5 gives two and three copies in turn, evenly over the source.
        copies = int((i + 1) * part.weight) - int(i * part.weight)
        tally.kept += copies - 1
        tally.noted[f"from {part.path}"] += copies
        if not copies:
            tally.noted["left out by the weight of its source"] += 1
        yield from [conversation] * copies


def _watch(name: str, records: Numbered, tally: Tally, allow_broken: bool) -> Numbered:
    """Yield the records of a file; more damage than a few lines is an error, or noted in the tally."""
    number = 0
    damaged: list[tuple[int, Damaged]] = []
    for number, record in records:
        yield number, record
        if isinstance(record, Damaged):
            damaged.append((number, record))
            if not record.of_one_line and len(damaged) == 1:
                # Nobody knows how many records were lost.
                line = place_of_damage(Path(name))
                _refuse(
                    f"{name} is damaged{line}, at its record {number}: {record}",
                    tally,
                    allow_broken,
                )
    if len(damaged) > max(1, MOST_DAMAGED * number):
        first_number, first = damaged[0]
        if first.of_one_line:
            message = (
                f"{len(damaged)} of {number} lines of {name} are damaged, "
                f"the first is line {first_number}: {first}"
            )
            _refuse(message, tally, allow_broken)


def _refuse(damage: str, tally: Tally, allow_broken: bool) -> None:
    """Raise an error that names the damage, or note it if it is allowed."""
    if not allow_broken:
        raise damage_error(damage)
    tally.broken.append(damage)


def damage_error(damage: str) -> ValueError:
    """Return the error that a damaged file is where it is not allowed."""
    return ValueError(
        f"{damage}. Write or load the file again, or set data.allow_broken=true to go on with what can be read"
    )


def _convert(
    name: str, records: Numbered, tally: Tally, strict: bool, **options: bool
) -> Iterator[Conversation]:
    """Yield the conversations among the records of one file, by options; in strict mode the first drop is an error."""
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
    """Return the name and the records of each file, or of the hub dataset."""
    path = Path(source)
    suffixes = (*JSON, *TABLES)
    if path.is_dir():
        files = sorted(
            file for file in path.iterdir() if file.is_file() and _suffix(file) in suffixes
        )
        if not files:
            raise ValueError(
                f"no data in the folder {path}: expected files named {', '.join(suffixes)}"
            )
        return [(str(file), _file_records(file)) for file in _files_of_split(path, files, split)]
    if path.exists():
        return [(str(path), _file_records(path))]
    name = str(source)
    # What looks like a path is a wrong path, and not the name of a dataset.
    if (
        _suffix(path) in (*suffixes, ".txt")
        or name.startswith((".", "/", "~"))
        or name.count("/") > 1
    ):
        raise ValueError(
            f"no file or folder at {source}: expected {', '.join(suffixes)}, or a hub dataset's name"
        )
    return [(name, _hub_records(name, split, revision, config))]


def _files_of_split(folder: Path, files: list[Path], split: str) -> list[Path]:
    """Return the files of a folder without those named after another split, whose names are printed."""
    # The datasets library also takes a slice (`train[:10%]`) and sums (`train+test`).
    wanted = {name.partition("[")[0].strip().lower() for name in split.split("+")}
    chosen = [file for file in files if "all" in wanted or _is_of_split(file, wanted)]
    left_out = [file.name for file in files if file not in chosen]
    if not chosen:
        raise ValueError(
            f"no file of the split {split} in the folder {folder}, which holds {', '.join(left_out[:6])}: name one of "
            "these files, or its split (data.split, eval.split)"
        )
    if left_out:
        more = " ..." if len(left_out) > 6 else ""
        names = ", ".join(left_out[:6])
        print(f"{folder}: left out, as another split than {split}: {names}{more}", file=sys.stderr)
    return chosen


def _is_of_split(file: Path, wanted: set[str]) -> bool:
    """Return whether a file's name contains one of these splits, or none at all."""
    name = file.name.lower()
    words = set(re.split("[^a-z]+", name))
    named = {split for split, spellings in SPLITS.items() if words.intersection(spellings)}
    # A split may have a name of its own, with digits.
    is_named = any(
        re.search(rf"(?<![a-z0-9]){re.escape(split)}(?![a-z0-9])", name) for split in wanted
    )
    return is_named or bool(named & wanted) or not named


def _suffix(path: Path) -> str:
    return Path(path.name.lower().removesuffix(".gz")).suffix


def _file_records(path: Path) -> Numbered:
    if _suffix(path) in TABLES:
        return _table_records(path)
    return json_records(path)


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
    options = {}
    if config is not None:
        options["name"] = config
    try:
        dataset = load_dataset(name, split=split, revision=revision, streaming=True, **options)
    except Exception as error:
        # Errors are of many types: no such name, no network, no such split.
        raise ValueError(
            f"{name}: no file or folder of this name, and as a hub dataset: {error}"
        ) from error
    yield from enumerate(dataset, 1)


def _table_records(path: Path) -> Numbered:
    number = 0
    kind = TABLES[_suffix(path)]
    load_dataset = _find_loader(f"{path}: a {kind} file")
    try:
        for number, record in enumerate(
            load_dataset(kind, data_files=str(path), split="train", streaming=True), 1
        ):
            yield number, record
    except Exception as error:
        # Each format has its own errors for damage.
        reason = f"the rest of the {kind} file cannot be read: {type(error).__name__}"
        yield number + 1, Damaged(reason, of_one_line=False)


def main(argv: list[str]) -> None:
    """Print how many records of a source are kept, dropped and noted, by reason."""
    parser = argparse.ArgumentParser(
        prog="python -m data_prep.conversations", description=main.__doc__
    )
    parser.add_argument(
        "source", metavar="SOURCE", help="a file, a folder of files, a hub dataset, or a mix"
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="stop with an error instead of dropping a record",
    )
    args = parser.parse_args(argv)
    tally = Tally()
    for _ in read_conversations(args.source, tally, strict=args.strict, allow_broken=True):
        pass
    print(tally.table())
    if tally.dropped:
        print(
            "\nThe first that were dropped, by file and line (or number of the record):",
            *tally.where(),
            sep="\n",
        )
    if tally.broken:
        raise SystemExit(
            "\n".join(
                ["", *tally.broken, "no stage reads such files without data.allow_broken=true"]
            )
        )


if __name__ == "__main__":
    script(main)
