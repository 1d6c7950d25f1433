"""What goes to a hub: files with the reason for each, without the names of this machine, and what stays here."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from eagle.drafters.outside import METHOD_FILE
from eagle.formats.card import model_card
from eagle.formats.checkpoint import ON_HUB, from_pretrained
from eagle.formats.reading.files import check_not_hollow, resolve_inside
from eagle.recipe.plain_yaml import parse_yaml

REASONS = {
    "config.json": "the head's method, settings and sizes",
    "model.safetensors": "its weights",
    "recipe.yaml": "what it was trained by",
    "provenance.json": "what made it",
    "README.md": "its card",
    METHOD_FILE: "its method, which others run with --trust-code",
}
BESIDE = {  # files of a run that tell of its head
    "report.html": "the report page, with the texts of all answers",
    "results.jsonl": "what was measured, with the texts of all answers",
    "lossless.json": "the comparison with undrafted decoding",
    "metrics.jsonl": "the curves of its training",
}
VALUES: dict[str, Callable[[str], Any]] = {
    ".json": json.loads,
    ".yaml": partial(parse_yaml, source="it"),
    ".settings": json.loads,
}
TEXTS = {*VALUES, ".jsonl", ".html", ".md", ".svg"}
HOMES = re.compile(r"^(?:/home/[^/]+|/Users/[^/]+|/root)(?=/|$)")
ADDRESS = re.compile(r"^[a-z]+://(?P<host>[^/\s]+)")
HERE = ("localhost", "127.0.0.1", "[::1]")
PATHS = re.compile(r"(?<![\w:/.~])/(?:[\w.-]+/)+[\w.-]+")
SECRETS = {  # by what they look like
    "a token of the hub": re.compile(rb"\bhf_[A-Za-z0-9]{30,}\b"),
    "a key of an API": re.compile(rb"\bsk-[A-Za-z0-9_-]{20,}|\bAKIA[0-9A-Z]{16}\b"),
    "a token of GitHub": re.compile(rb"\bgh[pousr]_[A-Za-z0-9]{36,}\b"),
    "a private key": re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
}


class Sent(NamedTuple):
    """A file on its way: where it lies here, or its bytes, and why it goes."""

    source: Path | bytes
    why: str

    @property
    def size(self) -> int:
        """Its bytes."""
        return len(self.source) if isinstance(self.source, bytes) else self.source.stat().st_size

    def read(self) -> bytes:
        """Its bytes themselves."""
        return self.source if isinstance(self.source, bytes) else self.source.read_bytes()


@dataclass
class Parcel:
    """The files of a repository by their names in it; what stays here; what was changed on the way."""

    kind: str  # "model" or "dataset", as a hub calls its repositories
    home: Path
    files: dict[str, Sent] = field(default_factory=dict)
    stays: dict[str, str] = field(default_factory=dict)
    hidden: dict[str, str] = field(default_factory=dict)  # what others need not know, and what stands there instead
    changed: dict[str, list[str]] = field(default_factory=dict)  # file -> what was hidden in it
    named: dict[str, list[str]] = field(default_factory=dict)  # file -> paths of this machine that it still names
    frozen: set[str] = field(default_factory=set)  # files that go as they are, as checksums or data do

    def add(self, name: str, source: Path | bytes, why: str, root: Path | None = None) -> None:
        """Add a file; two of one name are refused, and links that leave its root, by default the folder around it."""
        if name in self.files:
            raise ValueError(f"two files would be {name} in the repository: name another folder, or rename one of them")
        if isinstance(source, Path):
            check_not_hollow(resolve_inside(source, root or source.parent), source)
        self.files[name] = Sent(source, why)

    def add_folder(self, folder: Path, below: str, why: str) -> None:
        """Add all files of a folder but hidden ones, below a name; links to folders are not followed."""
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder)
            if any(part.startswith(".") for part in name.parts):
                continue
            if path.is_symlink() and not path.is_file():
                self.stays[str(path)] = "is a link to no file, which is not followed"
            elif path.is_file():
                self.add(f"{below}{name.as_posix()}", path, why, folder)

    def leave(self, folder: Path) -> None:
        """Note what stays of a folder, hidden files apart."""
        sent = [item.source for item in self.files.values() if isinstance(item.source, Path)]
        for path in sorted(folder.iterdir()):
            if not path.name.startswith(".") and not any(path in (source, *source.parents) for source in sent):
                self.stays.setdefault(str(path), "is not part of what is shared")

    def clean(self) -> Parcel:
        """Replace homes and addresses of servers in all texts that are not frozen; refuse what looks like a secret."""
        texts = {
            name: item.read()
            for name, item in self.files.items()
            if Path(name).suffix in {*TEXTS, ".py"} and name not in self.frozen
        }
        for name, text in texts.items():
            for what, pattern in SECRETS.items():
                if pattern.search(text):
                    raise ValueError(f"{name} holds what looks like {what}: take it out, as all could read it there")
        texts = {name: text for name, text in texts.items() if Path(name).suffix in TEXTS}  # code goes as it is
        for name, text in texts.items():
            for key, value in _values(name, text):
                self._learn(key, value)
        home = str(self.home)
        if len(home) > 1:
            self.hidden[home] = "~"
        for name, text in texts.items():
            new = text.decode("utf-8", "surrogateescape")
            for old in sorted(self.hidden, key=len, reverse=True):
                whole = re.compile(rf"(?<![\w.-]){re.escape(old)}(?![\w.-])")
                if whole.search(new):
                    new = whole.sub(self.hidden[old], new)
                    self.changed.setdefault(name, []).append(old)
            if name in self.changed:
                self.files[name] = Sent(new.encode("utf-8", "surrogateescape"), self.files[name].why)
            if paths := sorted({path for path in PATHS.findall(new) if _is_here(path)}):
                self.named[name] = paths
        return self

    def _learn(self, key: str, value: str) -> None:
        """Note the home or the server that a value names."""
        if home := HOMES.match(value):
            self.hidden[home[0]] = "~"
        elif (address := ADDRESS.match(value)) and not address["host"].startswith(HERE):
            host = address["host"]
            # a server's, or one with a password or a port, by number or without a domain: no page of the web
            if key == "endpoint" or "@" in host or ":" in host or re.fullmatch(r"[\d.]+|[\w-]+", host):
                self.hidden[host] = "SERVER"


def _is_here(path: str) -> bool:
    try:
        return Path(path).exists()
    except OSError:
        return False


def _values(name: str, text: bytes) -> Iterator[tuple[str, str]]:
    """Key and text of every value in a file that holds values; of results, in the rows that tell of their run."""
    parse = VALUES.get(Path(name).suffix)
    try:
        if name.endswith("results.jsonl"):
            headers = [line for line in text.splitlines() if line.startswith(b'{"run": {')]
            yield from (pair for line in headers for pair in _pairs("", json.loads(line)))
        elif parse is not None:
            yield from _pairs("", parse(text.decode()))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} cannot be read: {error}; write it anew, or take it away") from None


def _pairs(key: str, values: Any) -> Iterator[tuple[str, str]]:
    """Every string of nested values, with the nearest key above it."""
    if isinstance(values, str):
        yield key, values
    elif isinstance(values, dict):
        for name, value in values.items():
            yield from _pairs(str(name), value)
    elif isinstance(values, list):
        for value in values:
            yield from _pairs(key, value)


def pack_head(folder: Path, name: str) -> Parcel:
    """A trained head, its card, and what its run tells of it; a head that does not load is refused."""
    folder = folder.absolute()
    from_pretrained(folder)
    parcel = Parcel("model", Path.home())
    for part in ON_HUB:
        if (folder / part).is_file():
            parcel.add(part, folder / part, REASONS.get(part, "a part of the head"))
    if "README.md" not in parcel.files:  # an edited card stays
        parcel.add("README.md", model_card(folder, name).encode(), REASONS["README.md"])
    parcel.leave(folder)
    if folder.name == "head":  # as training leaves it in a run's folder, and what is told there is of this one
        for part, why in BESIDE.items():
            if (folder.parent / part).is_file():
                parcel.add(part, folder.parent / part, why)
        parcel.leave(folder.parent)
    return parcel


def pack_export(folder: Path) -> Parcel:
    """An exported head, or a drafter of counts, as it lies there."""
    parcel = Parcel("model", Path.home())
    parcel.add_folder(folder, "", "as it lies there")
    return parcel


def is_export(folder: Path) -> bool:
    """Whether a folder holds what an engine or a method reads: a config, without a recipe."""
    return (folder / "config.json").is_file() and not (folder / "recipe.yaml").exists()
