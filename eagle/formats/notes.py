"""The notes beside an exported head: how to serve it, its training settings, and its known acceptance."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle.core.drafter import TrainableDrafter
from eagle.drafters.parts.validation import chain_rates
from eagle.formats.card import acceptance_of, front_matter, list_acceptance
from eagle.formats.checkpoint import TEMPERATURES
from eagle.formats.layout import Layout
from eagle.formats.reading.files import CONFIG_BYTES, has, read_text
from eagle.recipe.plain_yaml import parse_yaml

USUAL_DEPTH = 3  # draft tokens of a chain for a head that was never measured
UNMEASURED = "the usual length; nothing was measured with this head"
CALIBRATION = f"""## How its confidence is calibrated

`{TEMPERATURES}` has a temperature for each draft position, by which the logit of the confidence is divided. SGLang
reads it: `--speculative-dspark-confidence-sts-path {TEMPERATURES}`."""
# a level that a smaller share of drafts is accepted up to costs more than it saves
MIN_KEPT_SHARE = 1 / 8


def compose_notes(
    layout: Layout,
    drafter: TrainableDrafter,
    engine: str,
    out: Path,
    head: Path | None,
    target: str = "",
) -> dict[str, str]:
    """Return the texts beside an exported head by their names, README.md and provenance.json; nothing is written.

    The temperatures of the head's confidence are among them if its folder holds some.

    Args:
        layout: The exported head, which is written beside them.
        drafter: The head.
        engine: The name of its layout.
        out: The folder of the export, which the commands name.
        head: The folder that the head came from, whose recipe and provenance are read; None if there is no folder.
        target: The path of its target; "" if unknown.
    """
    recipe: dict[str, Any] = {}
    provenance: dict[str, Any] = {}
    if head:
        # the parser returns None for an empty file
        recipe = _read_mapping(head / "recipe.yaml", lambda text: parse_yaml(text, "it") or {})
        provenance = _read_mapping(head / "provenance.json", json.loads)
    # shares[i]: the share of all drafts of which the first i + 1 tokens are accepted. Validation may know more levels,
    # the tokens of a chain in order, than the layout can draft.
    shares = chain_rates(provenance.get("validation", {}))[: layout.max_depth]
    depth, reason = _choose_depth(layout, drafter, shares)
    trained_on = _section(recipe, "target").get("path", "unknown")
    if trained_on == "unknown":  # `eagle import` writes the word
        trained_on = ""
    base = trained_on or target  # the target that the card names
    kind = _section(recipe, "drafter").get("kind", "unknown")
    path = target or trained_on or "TARGET"  # the target in the commands
    # a local folder: commands are run from anywhere
    if path != "TARGET" and Path(path).exists():
        path = str(Path(path).resolve())
    sections = [
        f"{front_matter(kind, base, engine)}\n# A draft head for {base or 'a target that is not known'}",
        f"Layout: {engine}. A wrong export changes no word that the target says: it shows in acceptance alone.",
        f"## How to serve it\n\n{_explain_paths(out, path)}\n\n{_fill_placeholders(layout.serve, depth, out, path)}",
        f"## How long a chain\n\n{depth} token{'' if depth == 1 else 's'}: {reason}.",
        f"## What it was trained under\n\n{_describe_template(recipe)}",
        f"## What it accepts\n\n{_describe_acceptance(shares, head)}",
    ]
    provenance = {
        "engine": engine,
        "settings": drafter.settings.model_dump(mode="json"),
        **provenance,
        # for programs that start engines
        "num_speculative_tokens": depth,
        "num_speculative_tokens_by": reason,
    }
    data = _section(recipe, "data")
    if shares:
        provenance["acceptance"] = {
            "tau": 1 + sum(shares),
            "per_position": shares,
            "by": "validation",
            "prompts": data.get("heldout") or data.get("train"),
        }
    if head:
        provenance["measured"] = list_acceptance(head.parent)
    texts = {"provenance.json": json.dumps(provenance, indent=2) + "\n"}
    if head and has(head, TEMPERATURES):
        sections.append(CALIBRATION)
        texts[TEMPERATURES] = read_text(head, TEMPERATURES, CONFIG_BYTES)
    texts["README.md"] = "\n\n".join(sections) + "\n"
    return texts


def _fill_placeholders(serve: str, depth: int, out: Path, path: str) -> str:
    """Return the guide to serving with the placeholders of its commands filled in.

    All are replaced in one pass, since a path that is filled in may hold the word of another placeholder.

    Args:
        serve: The layout's guide (Markdown).
        depth: The number of draft tokens of a chain.
        out: The folder of the export.
        path: The target's path, or "TARGET" if it is unknown.
    """
    words = {
        "DEPTH": str(depth),
        # of the tree: the draft tokens and the root
        "NODES": str(depth + 1),
        "HEAD": str(out.resolve()),
        "TARGET": path,
    }
    return re.sub("|".join(words), lambda match: words[match[0]], serve)


def _explain_paths(out: Path, path: str) -> str:
    """Return a sentence on the paths in the commands: that of the export may have changed, the target may be unknown.

    Args:
        out: The folder of the export.
        path: The target's path, or "TARGET" if it is unknown.
    """
    if path == "TARGET":
        target = "`TARGET` stands for the folder or the hub id of the target, which the head does not name."
    else:
        target = f"`{path}` is the target."
    return f"`{out.resolve()}` is where this folder was written: name the place where it lies now. {target}"


def _choose_depth(
    layout: Layout, drafter: TrainableDrafter, shares: list[float]
) -> tuple[int, str]:
    """Return the number of draft tokens to recommend for a chain, and the reason in words.

    Args:
        layout: The layout, which may limit the number.
        drafter: The head, which may have a tuned budget: the draft tree that measurements found to be the fastest.
        shares: The share of drafts of which the first 1, 2, ... tokens are accepted; empty if unknown.
    """
    depth = USUAL_DEPTH
    reason = UNMEASURED
    # tuning may have found that no draft pays, which is no length of a chain
    if drafter.budget is not None and drafter.budget.nodes:
        depth = drafter.budget.depth
        reason = "the depth of the draft shape that `eagle measure --tune` found to be the fastest"
    elif shares:
        # shares fall with the length, so this counts the first levels; a head drafts one token at least
        depth = max(sum(share >= MIN_KEPT_SHARE for share in shares), 1)
        share = shares[depth - 1]
        reason = (
            f"on held-out texts {share:.0%} of such drafts are kept whole; longer ones rarely pay. The head was "
            "not tuned: `eagle measure --tune RECIPE --write` measures which length is fastest"
        )
    # but no more than the layout can draft, and as many as one forward drafts anyway unless measurements say fewer
    if layout.max_depth is None:
        return depth, reason
    # the first tokens of such a head change if it is asked for fewer
    if layout.fixed_length:
        return (
            layout.max_depth,
            "as many as the head guesses at once; asked for fewer, it guesses otherwise",
        )
    if depth > layout.max_depth or (layout.one_forward and reason == UNMEASURED):
        return layout.max_depth, "as many as the head guesses"
    return depth, reason


def _describe_template(recipe: dict[str, Any]) -> str:
    """Return sentences on the chat template of training and its arguments, which requests should repeat.

    Args:
        recipe: The head's recipe.yaml; empty if it has none.
    """
    data = _section(recipe, "data")
    # only `eagle import` writes this key
    tool = _section(recipe, "train").get("imported_from")
    if tool:
        return (
            f"Unknown: the head was imported ({tool}). "
            "Ask whoever trained it for the chat template and its arguments."
        )
    # older recipes lack the keys, and the head may have no recipe
    if not {"template", "template_kwargs"} & data.keys():
        return "Unknown: the head's folder holds no recipe that tells it."
    template = data.get("template")
    owner = f"the one of `{template}`" if template else "the target’s own"
    arguments = data.get("template_kwargs") or {}
    if arguments:
        explained = f"Its arguments, which requests must repeat (`chat_template_kwargs`): `{json.dumps(arguments)}`."
    else:
        explained = "It was given no arguments; requests that give some (`chat_template_kwargs`) change the prompts."
    return f"The chat template: {owner}. {explained}"


def _describe_acceptance(shares: list[float], head: Path | None) -> str:
    """Return paragraphs on acceptance: as validation predicts it, and as it was measured in the head's run.

    Args:
        shares: The share of drafts of which the first 1, 2, ... tokens are accepted; empty if unknown.
        head: The head's folder, inside of its run's, which may hold measurements; None if there is no folder.
    """
    paragraphs = []
    if shares:
        by_position = ", ".join(f"{share:.2f}" for share in shares)
        paragraphs.append(
            f"Predicted by training's validation on held-out texts, for chains of {len(shares)}: the first n tokens "
            f"are kept in {by_position} of the drafts, τ = {1 + sum(shares):.2f} tokens per forward of the target, its "
            f"own included. Engines that do not count that one say {sum(shares):.2f}. Trees, which offer several "
            "tokens a level, have a longer τ."
        )
    table = acceptance_of(head.parent) if head else ""
    if table:
        paragraphs.append(f"Decoded by this project:\n\n{table}")
    return "\n\n".join(paragraphs) or "Nothing was measured: `eagle doctor` tells."


def _read_mapping(path: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    """Return the mapping in a file, an empty one where there is no file; ValueError with its name for anything else.

    Args:
        path: The file.
        parse: The parser of its text, of YAML or JSON.
    """
    if not path.is_file():
        return {}
    try:
        value = parse(read_text(path.parent, path.name, CONFIG_BYTES))
    # a link out of the folder, or text that is neither YAML nor JSON
    except ValueError as error:
        raise ValueError(
            f"{path} cannot be read: {error}; copy it again, or take it away"
        ) from None
    if not isinstance(value, dict):
        raise ValueError(
            f"{path} holds {type(value).__name__}, expected a mapping: copy it again, or take it away"
        )
    return value


def _section(recipe: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a section of a recipe by its name, empty where the recipe has none."""
    section = recipe.get(name)
    return section if isinstance(section, dict) else {}
