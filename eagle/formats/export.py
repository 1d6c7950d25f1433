"""Heads in the layouts of the engines that serve them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from eagle.disk import LOCK, lock_folder, write_tensors, write_text
from eagle.formats.checkpoint import TEMPERATURES
from eagle.formats.engines.registry import ENGINES, write_layout, write_portable
from eagle.formats.layout import Layout, TargetConfig
from eagle.formats.notes import compose_notes

EXPORTERS: dict[str, Callable[[Any, Any], Layout]] = {
    "portable": write_portable,
    **{engine.name: partial(write_layout, engine) for engine in ENGINES},
}


def export(
    drafter: Any,
    target_config: TargetConfig,
    engine: str,
    out: str | Path,
    head: str | Path | None = None,
) -> bool:
    """Write a head in an engine's layout; return whether an earlier export was replaced.

    Args:
        drafter: The head, bound to its target where the layout holds a copy of the target's tensors.
        target_config: The target's config.
        engine: The name of the layout, one of `EXPORTERS`.
        out: The folder to write.
        head: The head's folder, whose recipe and provenance go into the notes.
    """
    if engine not in EXPORTERS:
        raise ValueError(f"no exporter for {engine!r}: expected one of {', '.join(EXPORTERS)}")
    out = Path(out)
    layout = EXPORTERS[engine](drafter, target_config)
    is_replaced = check_replaceable(out)
    target = getattr(target_config, "name_or_path", "")
    folder = Path(head) if head else None
    # the texts of README.md and provenance.json, by their names
    texts = compose_notes(layout, drafter, engine, out, head=folder, target=target)
    # the folder is made only now, so that a refused layout leaves none
    with lock_folder(out):
        # of an earlier export, whose head was calibrated
        (out / TEMPERATURES).unlink(missing_ok=True)
        # the notes first: by them a later call recognises an export that was cut short, and may replace it
        for name, text in texts.items():
            write_text(out / name, text)
        write_text(out / "config.json", json.dumps(layout.config, indent=2) + "\n")
        # older transformers refuse tensors without the format entry
        write_tensors(out / layout.file, layout.tensors, {"format": "pt"})
    return is_replaced


def check_replaceable(out: Path) -> bool:
    """Return whether a folder holds an earlier export, which may be replaced; False if it is empty or not there.

    ValueError if it holds anything else.
    """
    if (out / "recipe.yaml").exists():
        raise ValueError(
            f"{out} holds a head of this project, which an export would overwrite: name another folder"
        )
    names = {path.name for path in out.iterdir()} if out.is_dir() else set()
    # an export that was killed early leaves only its lock; a file in place of a folder is refused below
    if not names - {LOCK} and not out.is_file():
        return False
    try:
        # every export writes this file, with the engine's name
        provenance = json.loads((out / "provenance.json").read_text(encoding="utf-8"))
        is_export = provenance["engine"] in EXPORTERS
    except (OSError, ValueError, LookupError, TypeError):
        is_export = False
    if not is_export:
        raise ValueError(
            f"{out} is there already, and no export of this project: name a new folder, or take it away"
        )
    return True
