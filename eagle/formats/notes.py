"""The notes beside an exported head: how to serve it, its training settings, and its known acceptance."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle.core.drafter import TrainableDrafter
from eagle.drafters.parts.validation import chain_rates
from eagle.formats.card import acceptance_of, front_matter
from eagle.formats.layout import Layout
from eagle.formats.reading.files import CONFIG_BYTES, read_text
from eagle.recipe.plain_yaml import parse_yaml

USUAL = 3  # tokens of a chain where nothing is known
UNMEASURED = "the usual length; nothing was measured with this head"
WORTH = 1 / 8  # of all drafts must be kept whole, lest a level costs more than it saves


def write_notes(
    layout: Layout, drafter: TrainableDrafter, engine: str, out: Path, head: Path | None, target: str = ""
) -> dict[str, str]:
    """The texts of README.md and provenance.json; `head` is where the drafter came from, `target` its target's path."""
    recipe = _read_mapping(head / "recipe.yaml", lambda text: parse_yaml(text, "it") or {}) if head else {}
    provenance = _read_mapping(head / "provenance.json", json.loads) if head else {}
    shares = chain_rates(provenance.get("validation", {}))[: layout.deepest]  # validation counts levels that it lacks
    depth, why = _choose_depth(drafter, shares)
    if layout.deepest is not None and layout.whole:
        depth, why = layout.deepest, "as many as the head guesses at once; asked for fewer, it guesses otherwise"
    elif layout.deepest is not None and (depth > layout.deepest or (layout.at_once and why == UNMEASURED)):
        depth, why = layout.deepest, "as many as the head guesses"
    trained_on = _section(recipe, "target").get("path", "unknown")
    trained_on = "" if trained_on == "unknown" else trained_on  # as an import writes
    path = target or trained_on
    path = str(Path(path).resolve()) if path and Path(path).exists() else path or "TARGET"
    words = {"DEPTH": str(depth), "NODES": str(depth + 1), "HEAD": str(out.resolve()), "TARGET": path}
    serve = re.sub("|".join(words), lambda match: words[match[0]], layout.serve)
    sections = [
        f"{front_matter(_section(recipe, 'drafter').get('kind', 'unknown'), trained_on or target, engine)}\n"
        f"# A draft head for {trained_on or target or 'a target that is not known'}",
        f"Layout: {engine}. A wrong export changes no word that the target says: it shows in acceptance alone.",
        f"## How to serve it\n\n{_explain_paths(out, path)}\n\n{serve}",
        f"## How long a chain\n\n{depth} tokens: {why}.",
        f"## What it was trained under\n\n{_describe_template(recipe)}",
        f"## What it accepts\n\n{_describe_acceptance(shares, head)}",
    ]
    provenance = {"engine": engine, "settings": drafter.settings.model_dump(mode="json"), **provenance}
    if shares:
        provenance["acceptance"] = {"tau": 1 + sum(shares), "per_position": shares, "by": "validation"}
    return {"README.md": "\n\n".join(sections) + "\n", "provenance.json": json.dumps(provenance, indent=2) + "\n"}


def _explain_paths(out: Path, path: str) -> str:
    """Explain the placeholders in the commands."""
    if path == "TARGET":
        target = "`TARGET` stands for the folder or the hub id of the target, which the head does not name."
    else:
        target = f"`{path}` is the target."
    return f"`{out.resolve()}` is where this folder was written: name the place where it lies now. {target}"


def _choose_depth(drafter: TrainableDrafter, shares: list[float]) -> tuple[int, str]:
    """The recommended chain length and its reason."""
    if drafter.budget is not None:
        return drafter.budget.depth, "as deep as the tree that the head was tuned to"
    if shares:
        depth = max(sum(share >= WORTH for share in shares), 1)
        return depth, f"on held-out texts {shares[depth - 1]:.0%} of such drafts are kept whole; longer ones rarely pay"
    return USUAL, UNMEASURED


def _describe_template(recipe: dict[str, Any]) -> str:
    """The chat-template arguments that the server needs to match training."""
    data = _section(recipe, "data")
    if tool := _section(recipe, "train").get("imported_from"):
        return (
            f"Unknown: the head was imported ({tool}). Ask whoever trained it for the chat template and its arguments."
        )
    if not {"template", "template_kwargs"} & data.keys():
        return "Unknown: the head's folder holds no recipe that tells it."
    template, arguments = data.get("template"), data.get("template_kwargs") or {}
    lines = [f"The chat template: {f'the one of `{template}`' if template else 'the target’s own'}."]
    if arguments:
        lines.append(f"Its arguments, which requests must repeat (`chat_template_kwargs`): `{json.dumps(arguments)}`.")
    else:
        lines.append("It was given no arguments; requests that give some (`chat_template_kwargs`) change the prompts.")
    return " ".join(lines)


def _describe_acceptance(shares: list[float], head: Path | None) -> str:
    """The acceptance predicted by validation, and the one measured in the head's run."""
    parts = []
    if shares:
        listed = ", ".join(f"{share:.2f}" for share in shares)
        parts.append(
            f"On held-out texts, chains of {len(shares)}: the first n tokens are kept in {listed} of the drafts, "
            f"τ = {1 + sum(shares):.2f} tokens per forward of the target, its own included. Engines that do not count "
            f"that one say {sum(shares):.2f}."
        )
    if head and (table := acceptance_of(head.parent)):
        parts.append(f"Decoded by this project:\n\n{table}")
    return "\n\n".join(parts) or "Nothing was measured: `eagle doctor` tells."


def _read_mapping(path: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    """The mapping in a file, an empty one where there is no file; ValueError with its name for anything else."""
    if not path.is_file():
        return {}
    try:
        value = parse(read_text(path.parent, path.name, CONFIG_BYTES))
    except ValueError as error:  # a link that leads elsewhere, or text that is no YAML or JSON
        raise ValueError(f"{path} cannot be read: {error}; copy it again, or take it away") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds {type(value).__name__}, expected a mapping: copy it again, or take it away")
    return value


def _section(recipe: dict[str, Any], name: str) -> dict[str, Any]:
    """A part of a recipe, empty where it has none."""
    section = recipe.get(name)
    return section if isinstance(section, dict) else {}
