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
RUN_FILES = {  # files of a run that tell of its head
    "report.html": "the report page, with the texts of all answers",
    "results.jsonl": "what was measured, with the texts of all answers",
    "lossless.json": "the comparison with undrafted decoding",
    "metrics.jsonl": "the curves of its training",
}
PARSERS: dict[str, Callable[[str], Any]] = {
    ".json": json.loads,
    ".yaml": partial(parse_yaml, source="it"),
    ".settings": json.loads,
}
TEXTS = {*PARSERS, ".jsonl", ".html", ".md", ".svg"}
HOME = re.compile(r"^(?:/home/[^/]+|/Users/[^/]+|/root)(?=/|$)")
ADDRESS = re.compile(r"^[a-z]+://(?P<host>[^/\s]+)")
THIS_MACHINE = ("localhost", "127.0.0.1", "[::1]")
ABSOLUTE_PATH = re.compile(r"(?<![\w:/.~])/(?:[\w.-]+/)+[\w.-]+")
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
        if isinstance(self.source, bytes):
            return len(self.source)
        return self.source.stat().st_size

    def read(self) -> bytes:
        """Return its bytes themselves."""
        if isinstance(self.source, bytes):
            return self.source
        return self.source.read_bytes()


@dataclass
class Parcel:
    """The files of a repository by their names in it; what stays here; what was changed on the way."""

    kind: str  # "model" or "dataset", as a hub calls its repositories
    home: Path
    files: dict[str, Sent] = field(default_factory=dict)
    stays: dict[str, str] = field(default_factory=dict)
    # what others need not know, and what stands there instead
    hidden: dict[str, str] = field(default_factory=dict)
    changed: dict[str, list[str]] = field(default_factory=dict)  # file -> what was hidden in it
    # file -> paths of this machine that it still names
    named: dict[str, list[str]] = field(default_factory=dict)
    # files that go as they are, as checksums or data do
    frozen: set[str] = field(default_factory=set)

    def add(self, name: str, source: Path | bytes, why: str, root: Path | None = None) -> None:
        """Add a file; two of one name are refused, and links that leave its root, by default the folder around it."""
        if name in self.files:
            raise ValueError(
                f"two files would be {name} in the repository: name another folder, or rename one of them"
            )
        if isinstance(source, Path):
            check_not_hollow(resolve_inside(source, root or source.parent), source)
        self.files[name] = Sent(source, why)

    def add_folder(self, folder: Path, below: str, why: str) -> None:
        """Add all files of a folder but hidden ones, below a name; links to folders are not followed."""
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder)
            if any(part.startswith(".") for part in name.parts):
                continue
            if path.is_file():
                self.add(f"{below}{name.as_posix()}", path, why, folder)
            elif path.is_symlink():
                self.stays[str(path)] = "is a link to no file, which is not followed"

    def leave(self, folder: Path) -> None:
        """Note what stays of a folder, hidden files apart."""
        # a folder that anything is sent from does not stay
        sent: set[Path] = set()
        for item in self.files.values():
            if isinstance(item.source, Path):
                sent |= {item.source, *item.source.parents}
        for path in sorted(folder.iterdir()):
            if not path.name.startswith(".") and path not in sent:
                self.stays.setdefault(str(path), "is not part of what is shared")

    def clean(self) -> Parcel:
        """Replace homes and addresses of servers in all texts that are not frozen; refuse what looks like a secret."""
        texts: dict[str, bytes] = {}
        for name, item in self.files.items():
            suffix = Path(name).suffix
            if name in self.frozen or suffix not in {*TEXTS, ".py"}:
                continue
            text = item.read()
            _refuse_secrets(name, text)
            if suffix != ".py":  # code goes as it is
                texts[name] = text
        # what one file tells is hidden in all of them
        for name, text in texts.items():
            for key, value in _read_values(name, text):
                self._learn(key, value)
        home = str(self.home)
        if len(home) > 1:
            self.hidden[home] = "~"
        for name, text in texts.items():
            self._hide(name, text.decode("utf-8", "surrogateescape"))
        return self

    def _learn(self, key: str, value: str) -> None:
        """Note the home or the server that a value names."""
        home = HOME.match(value)
        if home:
            self.hidden[home[0]] = "~"
            return
        address = ADDRESS.match(value)
        if address and not address["host"].startswith(THIS_MACHINE):
            host = address["host"]
            # a server's, or one with a password or a port, by number or without a domain: no page of the web
            if (
                key == "endpoint"
                or "@" in host
                or ":" in host
                or re.fullmatch(r"[\d.]+|[\w-]+", host)
            ):
                self.hidden[host] = "SERVER"

    def _hide(self, name: str, text: str) -> None:
        """Replace in one text what others need not know, and note what it still names."""
        # the longest first: a home may lie in another one
        for word in sorted(self.hidden, key=len, reverse=True):
            whole = re.compile(rf"(?<![\w.-]){re.escape(word)}(?![\w.-])")
            if whole.search(text):
                text = whole.sub(self.hidden[word], text)
                self.changed.setdefault(name, []).append(word)
        if name in self.changed:
            self.files[name] = Sent(text.encode("utf-8", "surrogateescape"), self.files[name].why)
        paths = sorted({path for path in ABSOLUTE_PATH.findall(text) if _is_here(path)})
        if paths:
            self.named[name] = paths


def _refuse_secrets(name: str, text: bytes) -> None:
    for what, pattern in SECRETS.items():
        if pattern.search(text):
            raise ValueError(
                f"{name} holds what looks like {what}: take it out, as all could read it there"
            )


def _is_here(path: str) -> bool:
    try:
        return Path(path).exists()
    except OSError:  # as for a name that is too long
        return False


def _read_values(name: str, text: bytes) -> Iterator[tuple[str, str]]:
    """Yield key and text of every value in a file that holds values; of results, in the rows that tell of their run."""
    try:
        if name.endswith("results.jsonl"):
            for line in text.splitlines():
                # the other rows hold answers, not settings
                if line.startswith(b'{"run": {'):
                    yield from _flatten("", json.loads(line))
        elif Path(name).suffix in PARSERS:
            yield from _flatten("", PARSERS[Path(name).suffix](text.decode()))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{name} cannot be read: {error}; write it anew, or take it away"
        ) from None


def _flatten(key: str, values: Any) -> Iterator[tuple[str, str]]:
    """Yield every string of nested values, with the nearest key above it."""
    if isinstance(values, str):
        yield key, values
    elif isinstance(values, dict):
        for name, value in values.items():
            yield from _flatten(str(name), value)
    elif isinstance(values, list):
        for value in values:
            yield from _flatten(key, value)


def pack_head(folder: Path, name: str) -> Parcel:
    """Pack a trained head, its card, and what its run tells of it; a head that does not load is refused."""
    folder = folder.absolute()
    # whoever fetches a damaged head would be told of it too late
    from_pretrained(folder)
    parcel = Parcel("model", Path.home())
    for file in ON_HUB:
        if (folder / file).is_file():
            parcel.add(file, folder / file, REASONS[file])
    if "README.md" not in parcel.files:  # an edited card stays
        parcel.add("README.md", model_card(folder, name).encode(), REASONS["README.md"])
    parcel.leave(folder)
    if (
        folder.name == "head"
    ):  # as training leaves it in a run's folder, and what is told there is of this one
        for file, why in RUN_FILES.items():
            if (folder.parent / file).is_file():
                parcel.add(file, folder.parent / file, why)
        parcel.leave(folder.parent)
    return parcel


def pack_export(folder: Path) -> Parcel:
    """Pack an exported head, or a drafter of counts, as it lies there."""
    parcel = Parcel("model", Path.home())
    parcel.add_folder(folder, "", "as it lies there")
    return parcel


def is_export(folder: Path) -> bool:
    """Return whether a folder holds what an engine or a method reads: a config, without a recipe."""
    return (folder / "config.json").is_file() and not (folder / "recipe.yaml").exists()
