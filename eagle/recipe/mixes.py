"""Mixes: a YAML file that lists sources of conversations, and stands wherever a recipe names one source."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from eagle.recipe import Section
from eagle.recipe.mistakes import parse_section
from eagle.recipe.plain_yaml import parse_yaml


class SourceSection(Section):
    """One of the sources of a mix."""

    path: str  # a file, a folder of files, or a hub dataset
    config: str | None = None  # of a hub dataset that has several
    split: str = "train"  # of a hub dataset, or of the files in a folder
    revision: str | None = None  # of a hub dataset
    weight: float = Field(1.0, gt=0)  # how often each conversation counts: 0.5 takes every second, 2 each twice
    limit: int | None = Field(None, ge=1)  # use only the first conversations, this many


def is_mix(source: str | Path) -> bool:
    """Whether a source is a mix, by its name."""
    return Path(source).suffix.lower() in (".yaml", ".yml")


def read_mix(path: str | Path) -> list[SourceSection]:
    """The sources that a mix lists."""
    if not Path(path).is_file():
        raise ValueError(f"no mix at {path}: expected a YAML file that lists sources, each with a path")
    listed = parse_yaml(Path(path).read_bytes(), str(path))
    if not isinstance(listed, list) or not listed:
        kind = "a mapping" if isinstance(listed, dict) else "no list"
        raise ValueError(f"{path} holds {kind}, expected a list of sources, as '- {{path: my/chats.jsonl, weight: 2}}'")
    sources = [parse_section(SourceSection, one, f"{path}, source {place}") for place, one in enumerate(listed, 1)]
    if nested := [source.path for source in sources if is_mix(source.path)]:
        raise ValueError(f"{path} lists the mix {nested[0]}: list its sources instead")
    return sources


def files_of(source: str | Path) -> list[Path]:
    """All local files of a source, of a mix those of its sources behind its own."""
    path = Path(source)
    if is_mix(path):
        local = [part.path for part in read_mix(path) if Path(part.path).exists()]
        return [path, *(file for source in local for file in files_of(source))]
    return sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
