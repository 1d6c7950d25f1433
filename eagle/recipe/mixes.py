"""Mixes: a YAML file that lists sources of conversations, and stands wherever a recipe names one source."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from eagle.recipe import Section, parse_section
from eagle.recipe.plain_yaml import parse_yaml


class SourceSection(Section):
    """A source of conversations in a mix, a YAML file that lists several sources."""

    path: str  # a file, a folder of files, or a hub dataset
    config: str | None = None  # configuration of a hub dataset that has several
    split: str = "train"  # split of a hub dataset, or of the files in a folder
    revision: str | None = None  # branch, tag or commit of a hub dataset
    # how often each conversation is used: 2 uses each twice, 0.5 every second one
    weight: float = Field(1.0, gt=0)
    limit: int | None = Field(None, ge=1)  # use only the first so many conversations


def is_mix(source: str | Path) -> bool:
    """Return whether a source is a mix, by its name."""
    return Path(source).suffix.lower() in (".yaml", ".yml")


def read_mix(path: str | Path) -> list[SourceSection]:
    """Return the sources that a mix lists; the errors name the file and the source."""
    if not Path(path).is_file():
        raise ValueError(
            f"no mix at {path}: expected a YAML file that lists sources, each with a path"
        )
    # the extension alone does not say that it is a list of sources
    values = parse_yaml(Path(path).read_bytes(), str(path))
    if not isinstance(values, list) or not values:
        got = "a mapping" if isinstance(values, dict) else "no list"
        raise ValueError(
            f"{path} holds {got}, expected a list of sources, as '- {{path: my/chats.jsonl, weight: 2}}'"
        )
    # counted from 1, as people count the entries of a list
    sources = [
        parse_section(SourceSection, value, f"{path}, source {number}")
        for number, value in enumerate(values, start=1)
    ]
    # a mix in a mix could contain itself
    for source in sources:
        if is_mix(source.path):
            raise ValueError(f"{path} lists the mix {source.path}: list its sources instead")
    return sources


def files_of(source: str | Path) -> list[Path]:
    """Return all local files of a source of conversations; for a mix, its own file and those of its sources."""
    path = Path(source)
    if is_mix(path):
        files = [path]
        for listed in read_mix(path):
            # a source that is not on this machine is a dataset of the hub
            if Path(listed.path).exists():
                files += files_of(listed.path)
        return files
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.is_file())
    return [path]
