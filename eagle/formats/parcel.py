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
from eagle.formats.checkpoint import DRAFT_VOCAB, ON_HUB, TEMPERATURES, from_pretrained
from eagle.formats.reading.files import check_not_hollow, resolve_inside
from eagle.recipe.plain_yaml import parse_yaml

REASONS = {
    "config.json": "the head's method, settings and sizes",
    "model.safetensors": "its weights",
    DRAFT_VOCAB: "the tokens that it drafts",
    TEMPERATURES: "how its confidence is calibrated",
    "recipe.yaml": "what it was trained by",
    "provenance.json": "what made it",
    "README.md": "its card",
    METHOD_FILE: "its method, which others run with --trust-code",
}
RUN_FILES = {  # files in a run's folder that document its head, and the reason to send them
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


class UploadFile(NamedTuple):
    """A file to upload: its path on this machine or its contents, and the reason in words."""

    source: Path | bytes
    why: str

    @property
    def size(self) -> int:
        """The number of its bytes."""
        if isinstance(self.source, bytes):
            return len(self.source)
        return self.source.stat().st_size

    def read(self) -> bytes:
        """Return its contents."""
        if isinstance(self.source, bytes):
            return self.source
        return self.source.read_bytes()


@dataclass
class UploadPlan:
    """The files to upload to a repository, by their names in it, and what is left out or replaced in them."""

    repo_type: str  # "model" or "dataset"
    home: Path  # the user's home, whose path is replaced
    files: dict[str, UploadFile] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)  # path -> why it is not uploaded
    # private words, such as homes and servers -> what replaces them
    replacements: dict[str, str] = field(default_factory=dict)
    replaced: dict[str, list[str]] = field(default_factory=dict)  # file -> the words replaced in it
    # file -> paths of this machine that it still names
    remaining_paths: dict[str, list[str]] = field(default_factory=dict)
    # files in which nothing is replaced, as their checksums are known or they are data
    verbatim: set[str] = field(default_factory=set)

    def add(self, name: str, source: Path | bytes, why: str, root: Path | None = None) -> None:
        """Add a file to `files`.

        ValueError for a second file of the same name, a file without data on the disk, and a link that leads outside.

        Args:
            name: Its name in the repository.
            source: The file on this machine, or its contents.
            why: The reason in words, which the user sees.
            root: The folder that a link must not leave; by default the file's own.
        """
        if name in self.files:
            raise ValueError(
                f"two files would be {name} in the repository: name another folder, or rename one of them"
            )
        if isinstance(source, Path):
            check_not_hollow(resolve_inside(source, root or source.parent), source)
        self.files[name] = UploadFile(source, why)

    def add_folder(self, folder: Path, below: str, why: str) -> None:
        """Add all files of a folder and its subfolders but hidden ones; links to folders are not followed.

        Args:
            folder: The folder.
            below: The prefix of their names in the repository, "" or one that ends in a slash.
            why: The reason in words, which the user sees.
        """
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder)
            if any(part.startswith(".") for part in name.parts):
                continue
            if path.is_file():
                self.add(f"{below}{name.as_posix()}", path, why, folder)
            elif path.is_symlink():
                self.left_out[str(path)] = "is a link to no file, which is not followed"

    def leave(self, folder: Path) -> None:
        """Add to `left_out` what is in a folder and not uploaded, hidden files apart, so that the user sees it."""
        # a folder from which anything is uploaded is not listed as left out
        sent: set[Path] = set()
        for item in self.files.values():
            if isinstance(item.source, Path):
                sent |= {item.source, *item.source.parents}
        for path in sorted(folder.iterdir()):
            if not path.name.startswith(".") and path not in sent:
                self.left_out.setdefault(str(path), "is not part of what is shared")

    def clean(self) -> UploadPlan:
        """Replace homes and addresses of servers in all text files that are not verbatim; refuse likely secrets.

        The plan is changed, and the files on this machine are not.

        Returns:
            The plan itself.
        """
        texts: dict[str, bytes] = {}
        for name, item in self.files.items():
            suffix = Path(name).suffix
            if name in self.verbatim or suffix not in {*TEXTS, ".py"}:
                continue
            text = item.read()
            _refuse_secrets(name, text)
            # nothing is replaced in code
            if suffix != ".py":
                texts[name] = text
        # what one file shows to be private, in its settings, is replaced in all of them
        for name, text in texts.items():
            for key, value in _read_values(name, text):
                self._note_private(key, value)
        home = str(self.home)
        # a home of "/" is a part of every absolute path, and tells nothing
        if len(home) > 1:
            self.replacements[home] = "~"
        for name, text in texts.items():
            self._replace_private(name, text.decode("utf-8", "surrogateescape"))
        return self

    def _note_private(self, key: str, value: str) -> None:
        """Add to `replacements` what a value of some file tells that must be replaced: a home, or a server's address.

        Args:
            key: The value's key in the file.
            value: The value.
        """
        home = HOME.match(value)
        if home:
            self.replacements[home[0]] = "~"
            return
        address = ADDRESS.match(value)
        if address and not address["host"].startswith(THIS_MACHINE):
            host = address["host"]
            # a private server and no public page: it is an endpoint, has a password or a port, or has no domain
            if (
                key == "endpoint"
                or "@" in host
                or ":" in host
                or re.fullmatch(r"[\d.]+|[\w-]+", host)
            ):
                self.replacements[host] = "SERVER"

    def _replace_private(self, name: str, text: str) -> None:
        """Replace the private words in one file of the plan, and note paths of this machine that it still names.

        Args:
            name: The file's name in the repository.
            text: Its text; bytes that are no UTF-8 are in it as surrogates.
        """
        # the longest first, since one home may be a part of another
        for word in sorted(self.replacements, key=len, reverse=True):
            # not where it is a part of a longer name
            whole = re.compile(rf"(?<![\w.-]){re.escape(word)}(?![\w.-])")
            if whole.search(text):
                text = whole.sub(self.replacements[word], text)
                self.replaced.setdefault(name, []).append(word)
        if name in self.replaced:
            self.files[name] = UploadFile(
                text.encode("utf-8", "surrogateescape"), self.files[name].why
            )
        # absolute paths that exist here say something of this machine; the user is told of them
        paths = sorted({path for path in ABSOLUTE_PATH.findall(text) if _exists_here(path)})
        if paths:
            self.remaining_paths[name] = paths


def _refuse_secrets(name: str, text: bytes) -> None:
    """Raise ValueError if the contents of the file `name` hold what looks like a token, a key of an API or the like."""
    for what, pattern in SECRETS.items():
        if pattern.search(text):
            raise ValueError(
                f"{name} holds what looks like {what}: take it out, as all could read it there"
            )


def _exists_here(path: str) -> bool:
    """Return whether a path found in a text exists on this machine."""
    try:
        return Path(path).exists()
    except OSError:  # such as a name that is too long
        return False


def _read_values(name: str, text: bytes) -> Iterator[tuple[str, str]]:
    """Yield the key and the text of every string in a file of settings or results; nothing of other files.

    Args:
        name: The file's name in the repository, whose ending tells how it is parsed.
        text: The file's contents.
    """
    try:
        if name.endswith("results.jsonl"):
            for line in text.splitlines():
                # headers of runs hold settings, the other rows answers
                if line.startswith(b'{"run": {'):
                    yield from _flatten("", json.loads(line))
        elif Path(name).suffix in PARSERS:
            yield from _flatten("", PARSERS[Path(name).suffix](text.decode()))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{name} cannot be read: {error}; write it anew, or take it away"
        ) from None


def _flatten(key: str, values: Any) -> Iterator[tuple[str, str]]:
    """Yield every string of nested values, with the nearest key above it.

    Args:
        key: The key of `values`.
        values: Any value of JSON or YAML.
    """
    if isinstance(values, str):
        yield key, values
    elif isinstance(values, dict):
        for name, value in values.items():
            yield from _flatten(str(name), value)
    elif isinstance(values, list):
        for value in values:
            yield from _flatten(key, value)


def pack_head(folder: Path, name: str) -> UploadPlan:
    """Return the plan to upload a trained head, with its model card and the results in its run's folder.

    ValueError if the head cannot be loaded.

    Args:
        folder: The head's folder.
        name: The repository, which the card names.
    """
    folder = folder.absolute()
    # called to refuse a damaged head before others fetch it
    from_pretrained(folder)
    upload = UploadPlan("model", Path.home())
    for file in ON_HUB:
        if (folder / file).is_file():
            upload.add(file, folder / file, REASONS[file])
    # a card that the user wrote or edited is kept
    if "README.md" not in upload.files:
        upload.add("README.md", model_card(folder, name).encode(), REASONS["README.md"])
    upload.leave(folder)
    # training writes RUN/head, so that the files of the run's folder are about this head
    if folder.name == "head":
        for file, why in RUN_FILES.items():
            if (folder.parent / file).is_file():
                upload.add(file, folder.parent / file, why)
        upload.leave(folder.parent)
    return upload


def pack_export(folder: Path) -> UploadPlan:
    """Return the plan to upload an exported head or a table of n-gram counts: all files of its folder."""
    upload = UploadPlan("model", Path.home())
    upload.add_folder(folder, "", "as it lies there")
    return upload


def is_export(folder: Path) -> bool:
    """Return whether a folder holds what an engine or a method reads: a config, without a recipe."""
    return (folder / "config.json").is_file() and not (folder / "recipe.yaml").exists()
