"""What stands beside an exported head: how it is served, what it was trained under, what it is known to accept."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from eagle.core.drafter import TrainableDrafter
from eagle.drafters.parts.validation import kept
from eagle.formats.card import acceptance_of
from eagle.formats.layout import Layout

USUAL = 3  # tokens of a chain where nothing is known
WORTH = 1 / 8  # of all drafts must be kept whole, lest a level costs more than it saves


def write_notes(
    layout: Layout, drafter: TrainableDrafter, engine: str, out: Path, head: Path | None, target: str = ""
) -> dict[str, str]:
    """The texts of README.md and provenance.json; `head` is where the drafter came from, `target` its target's path."""
    recipe = _read_mapping(head / "recipe.yaml", lambda text: yaml.safe_load(text) or {}) if head else {}
    made = _read_mapping(head / "provenance.json", json.loads) if head else {}
    shares = kept(made.get("validation", {}))
    depth, why = _chain(drafter, shares)
    trained_on = _section(recipe, "target").get("path", "unknown")
    named = target or trained_on
    served = "TARGET" if named == "unknown" else str(Path(named).resolve()) if Path(named).exists() else named
    stands_for = {"DEPTH": str(depth), "NODES": str(depth + 1), "HEAD": str(out.resolve()), "TARGET": served}
    serve = re.sub("|".join(stands_for), lambda word: stands_for[word[0]], layout.serve)
    sections = [
        f"# A draft head for {trained_on if trained_on != 'unknown' else target or 'a target that is not known'}",
        f"Layout: {engine}. A wrong export changes no word that the target says: it shows in acceptance alone.",
        f"## How to serve it\n\n{_places(out, served)}\n\n{serve}",
        f"## How long a chain\n\n{depth} tokens: {why}.",
        f"## What it was trained under\n\n{_template(recipe)}",
        f"## What it accepts\n\n{_accepted(shares, head)}",
    ]
    provenance = {"engine": engine, "settings": drafter.settings.model_dump(mode="json"), **made}
    if shares:
        provenance["acceptance"] = {"tau": 1 + sum(shares), "per_position": shares, "by": "validation"}
    return {"README.md": "\n\n".join(sections) + "\n", "provenance.json": json.dumps(provenance, indent=2) + "\n"}


def _places(out: Path, served: str) -> str:
    """What the paths of the commands stand for."""
    if served == "TARGET":
        target = "`TARGET` stands for the folder or the hub id of the target, which the head does not name."
    else:
        target = f"`{served}` is the target."
    return f"`{out.resolve()}` is where this folder was written: name the place where it lies now. {target}"


def _chain(drafter: TrainableDrafter, shares: list[float]) -> tuple[int, str]:
    """A chain's length, and why."""
    if drafter.budget is not None:
        return drafter.budget.depth, "as deep as the tree that the head was tuned to"
    if shares:
        depth = max(sum(share >= WORTH for share in shares), 1)
        return depth, f"on held-out texts {shares[depth - 1]:.0%} of such drafts are kept whole; longer ones rarely pay"
    return USUAL, "the usual length; nothing was measured with this head"


def _template(recipe: dict[str, Any]) -> str:
    """What the server must be told so that prompts look as in training."""
    data = _section(recipe, "data")
    if tool := _section(recipe, "train").get("imported_from"):
        return (
            f"Unknown: the head was imported ({tool}). Ask whoever trained it for the chat template and its arguments."
        )
    if not {"template", "template_kwargs"} & data.keys():
        return "Unknown: the head's folder holds no recipe that tells it."
    template, given = data.get("template"), data.get("template_kwargs") or {}
    lines = [f"The chat template: {f'the one of `{template}`' if template else 'the target’s own'}."]
    if given:
        lines.append(f"Its arguments, which requests must repeat (`chat_template_kwargs`): `{json.dumps(given)}`.")
    else:
        lines.append("It was given no arguments; requests that give some (`chat_template_kwargs`) change the prompts.")
    return " ".join(lines)


def _accepted(shares: list[float], head: Path | None) -> str:
    """What validation predicted, and what was measured beside the head."""
    parts = []
    if shares:
        told = ", ".join(f"{share:.2f}" for share in shares)
        parts.append(
            f"On held-out texts, chains of {len(shares)}: the first n tokens are kept in {told} of the drafts, "
            f"τ = {1 + sum(shares):.2f} tokens per forward of the target, its own included. Engines that do not count "
            f"that one say {sum(shares):.2f}."
        )
    if head and (measured := acceptance_of(head.parent)):
        parts.append(f"Decoded by this project:\n\n{measured}")
    return "\n\n".join(parts) or "Nothing was measured: `python -m eagle doctor` tells."


def _read_mapping(path: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    """The mapping in a file, an empty one where there is no file; ValueError with its name for anything else."""
    if not path.is_file():
        return {}
    try:
        value = parse(path.read_text())
    except (yaml.YAMLError, ValueError) as error:  # text that is none, and JSON that is none, are ValueErrors
        raise ValueError(f"{path} cannot be read: {error}; copy it again, or take it away") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds {type(value).__name__}, expected a mapping: copy it again, or take it away")
    return value


def _section(recipe: dict[str, Any], name: str) -> dict[str, Any]:
    """A part of a recipe, empty where it has none."""
    section = recipe.get(name)
    return section if isinstance(section, dict) else {}
