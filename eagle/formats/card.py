"""The model card of a head: usage, data, settings, loss curve, acceptance lengths and proof of equal output."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from eagle.core.budget import describe_budget
from eagle.formats.reading.files import CONFIG_BYTES, read_text
from eagle.recipe.plain_yaml import parse_yaml

CURVE_POINTS = 8  # rows of the table of training losses
MAX_BYTES = 10**9  # of a file with results or metrics of a run
CODE = (
    "Its method is not part of `eagle`: `method.py` beside the head, which was {file}. "
    "Read it before you trust it.\n\n"
)
LICENCE = "Not chosen yet: add `license:` to the lines at the top. Those of the target and of the data may bind it."


def model_card(folder: Path, name: str) -> str:
    """Return the text of a README.md for a head; ValueError if its recipe or its provenance cannot be read.

    Args:
        folder: The head's folder. Losses and acceptance are read from the run's folder around it, if they are there.
        name: The head's name on the hub.
    """
    recipe, provenance = _read_origin(folder)
    run = folder.parent
    target = recipe["target"]["path"]
    revision = recipe["target"].get("revision")
    kind, code_file = _method_of(folder, recipe)
    at_revision = f" at revision `{revision}`" if revision else ""
    sections = [
        f"{front_matter(kind, target)}\n# {name.split('/')[-1]}",
        f"A draft head of the kind `{kind}` for `{target}`{at_revision}. It guesses the next tokens, and the target "
        f"verifies them in one forward: the same output in fewer forwards. {_describe_exactness(run)}",
        f"## How to load it\n\n{_describe_usage(name, target, code_file)}",
        f"## Licence\n\n{LICENCE}",
        f"## Data\n\n{_key_table(recipe['data'])}{_describe_store(recipe)}",
        f"## Settings\n\n{_key_table({**recipe['drafter'], **recipe['train']})}",
    ]
    # sections on what was measured; those without data are left out
    curve = _curve_table(_read_rows(run / "metrics.jsonl"))
    if curve:
        sections.append(f"## Curve\n\n{curve}")
    # taken out, so that the section on what made the head does not repeat it
    validation = provenance.pop("validation", None)
    if validation:
        sections.append(f"## On held-out conversations\n\n{_key_table(validation)}")
    acceptance = acceptance_of(run)
    if acceptance:
        sections.append(
            f"## Acceptance\n\nTokens committed per forward of the target.\n\n{acceptance}"
        )
    sections.append(f"## What made it\n\n```json\n{json.dumps(provenance, indent=2)}\n```")
    return "\n\n".join(sections) + "\n"


def _read_origin(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a head's recipe and provenance, from which its model card is made.

    ValueError if one is missing, or the recipe is no recipe of this project.
    """
    # a head from the hub may lack them
    absent = [file for file in ("recipe.yaml", "provenance.json") if not (folder / file).is_file()]
    if absent:
        verb = "are" if len(absent) > 1 else "is"
        raise ValueError(
            f"{folder}: {' and '.join(absent)} {verb} missing, of which its card is made: write a README.md there by "
            "hand, or take the whole folder that training or `eagle import` leaves"
        )
    recipe = parse_yaml(read_text(folder, "recipe.yaml", CONFIG_BYTES), str(folder / "recipe.yaml"))
    provenance = json.loads(read_text(folder, "provenance.json", CONFIG_BYTES))
    if not isinstance(recipe, dict) or not {"target", "drafter", "data", "train"} <= recipe.keys():
        raise ValueError(
            f"{folder / 'recipe.yaml'} is no recipe of this project, of which its card is made"
        )
    return recipe, provenance


def _method_of(folder: Path, recipe: dict[str, Any]) -> tuple[str, str | None]:
    """Return the name of a head's method, and the file that its class was copied from.

    The second is None for a method of this project. ValueError if config.json cannot be read.

    Args:
        folder: The head's folder.
        recipe: Its recipe.
    """
    path = folder / "config.json"
    config = None
    try:
        if path.is_file():
            config = json.loads(read_text(folder, "config.json", CONFIG_BYTES))
    # no text, or no JSON
    except ValueError as error:
        raise ValueError(
            f"{path} cannot be read: {error}; is it cut short? Copy it again"
        ) from None
    # `save_pretrained` writes the key `code` for a class that is not part of the package
    if isinstance(config, dict) and isinstance(config.get("code"), dict):
        return config["settings"]["kind"], config["code"].get("file")
    return recipe["drafter"]["kind"], None


def front_matter(kind: str, target: str, *more: str) -> str:
    """Return the YAML at the top of a model card, which the hub reads.

    Args:
        kind: The head's method.
        target: The target, which is named as base model unless it is a local folder.
        more: Further tags.
    """
    values: dict[str, Any] = {
        "library_name": "eagle",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "draft-head", kind, *more],
    }
    if is_hub_id(target):
        values["base_model"] = target
    return f"---\n{yaml.safe_dump(values, sort_keys=False)}---\n"


def is_hub_id(target: str) -> bool:
    """Return whether a target may be a hub id and no local folder; the hub refuses a card whose base model is none."""
    return bool(re.fullmatch(r"[\w.-]+(/[\w.-]+)?", target)) and not Path(target).exists()


def _describe_exactness(run: Path) -> str:
    """Return sentences on lossless output: by construction, and as compared with undrafted decoding in this run.

    Args:
        run: The run's folder, which may hold the comparison, lossless.json.
    """
    text = (
        "With exact verification, the default, the output is the target's own at any temperature."
    )
    path = run / "lossless.json"
    if not path.is_file():
        return text
    verdicts = json.loads(read_text(run, path.name, MAX_BYTES))["verdicts"]
    # each verdict counts the answers of one comparison
    same = sum(verdict["identical"] for verdict in verdicts)
    answers = sum(verdict["answers"] for verdict in verdicts)
    return f"{text} Compared with undrafted decoding, {same} of {answers} answers are identical token by token."


def _describe_store(recipe: dict[str, Any]) -> str:
    """Return a paragraph on the conversations kept and dropped; "" if the feature store is not on this machine."""
    store = recipe.get("features", {}).get("store")
    if not store or not (Path(store) / "index.json").is_file():
        return ""
    index = Path(store) / "index.json"
    counts = json.loads(index.read_text())["made"].get("conversations")
    if counts is None:  # as of a store that an older release made
        return ""
    return f"\n\n{count_conversations(counts)}"


def count_conversations(counts: dict[str, Any]) -> str:
    """Return a sentence on the conversations that were kept and dropped, with the reasons.

    Args:
        counts: "kept", the number of conversations, and "dropped", a number for each reason.
    """
    dropped = counts["dropped"]
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items())
    sentence = f"{counts['kept']:,} conversations were kept, {sum(dropped.values()):,} dropped"
    if reasons:
        sentence += f": {reasons}"
    return f"{sentence}."


def _describe_usage(name: str, target: str, code_file: str | None) -> str:
    """Return Python code, in Markdown, that decodes with the head; a head with its own code also gets a warning.

    Args:
        name: The head's name on the hub.
        target: The target, a folder or a hub id.
        code_file: The file that the class of the head's method was copied from; None for a method of this project.
    """
    note = ""
    trust = ""
    if code_file:
        note = CODE.format(file=code_file)
        trust = ", trust_code=True"
    return f"""{note}```python
from eagle import Target, generate, load_drafter

target = Target.load("{target}")
drafter = load_drafter("{name}", target{trust})
print(generate(target, drafter, target.chat("What is a draft head?"), max_new_tokens=128).text)
```"""


# -- tables -----------------------------------------------------------------------------------------------------------


def _table(head: list[str], rows: list[list[Any]]) -> str:
    """Return a table in Markdown: the names of its columns, `head`, and its rows."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(value: Any) -> str:
    """Return a value as the text of one cell of a Markdown table."""
    text = str(value)
    if isinstance(value, float):
        text = f"{value:.4g}"
    # what would end the cell or the row
    return text.replace("|", "\\|").replace("\n", " ")


def _key_table(values: dict[str, Any]) -> str:
    """Return a Markdown table of keys and values, without those that are None."""
    rows = [[f"`{key}`", value] for key, value in values.items() if value is not None]
    return _table(["key", "value"], rows)


def _read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the mappings in a .jsonl file, one a line; none if it is not there."""
    if not path.exists():
        return []
    return [json.loads(line) for line in read_text(path.parent, path.name, MAX_BYTES).splitlines()]


def _curve_table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table of the training losses at evenly spread steps, the first and last included; "" if none.

    Args:
        rows: The rows of metrics.jsonl. Those of training steps hold losses by name, with "total" as the minimised one.
    """
    steps = [row for row in rows if "total" in row]
    if not steps:
        return ""
    # a long run is shown at some of its steps
    count = min(CURVE_POINTS, len(steps))
    names = [
        "step",
        *(name for name in ("total", "regression", "cross_entropy") if name in steps[0]),
    ]
    lines = []
    for point in range(count):
        # the max is for a single step, where a division by zero would fail
        row = steps[point * (len(steps) - 1) // max(count - 1, 1)]
        lines.append([row[name] for name in names])
    return _table(names, lines)


def acceptance_of(run: Path) -> str:
    """Return a Markdown table of the acceptance lengths that were measured last in a run; "" without a measurement.

    Each row is of one temperature and drafter, with all prompts pooled.

    Args:
        run: The run's folder, which may hold the file of measurements, results.jsonl.
    """
    header, groups = _read_newest(run)
    if not groups:
        return ""
    lines = [
        [temperature, f"`{drafter}`", _describe_tree(header, drafter), _pool_lengths(group)]
        for (temperature, drafter), group in groups.items()
    ]
    keys = [key for key in ("prompts", "tree", "torch", "machine", "date") if key in header]
    note = ", ".join(f"{key} {header[key]}" for key in keys)
    # a measurement that is running or was stopped has answered some prompts only
    prompts = header.get("prompts")
    answered = min(len(group) for group in groups.values())
    if isinstance(prompts, int) and answered < prompts:
        note = f"unfinished: {answered} of {prompts} prompts were answered by every drafter. {note}"
    return f"{_table(['T', 'drafter', 'draft', 'acceptance length'], lines)}\n\n<sub>{note}</sub>"


def list_acceptance(run: Path) -> list[dict[str, Any]]:
    """Return the acceptance that was measured last in a run, for programs; an entry for each temperature and drafter.

    Args:
        run: The run's folder, which may hold the file of measurements, results.jsonl.

    Returns:
        Each entry has the acceptance length `tau` and the prompts; and, where the file lists cycles, `per_position`:
        the share of drafts of which the first 1, 2, ... tokens were accepted.
    """
    header, groups = _read_newest(run)
    entries = []
    for (temperature, drafter), rows in groups.items():
        entry: dict[str, Any] = {
            "by": "eagle measure",
            "drafter": drafter,
            "draft": _describe_tree(header, drafter),
            "temperature": temperature,
            "tau": _pool_lengths(rows),
            "prompts": len(rows),
            "sets": sorted({row["set"] for row in rows if row.get("set")}),
        }
        cycles = [row["cycles"] for row in rows]
        if all(isinstance(listed, list) for listed in cycles):
            # cycles without a draft, such as the last of an answer, say nothing of it
            drafts = [cycle for listed in cycles for cycle in listed if cycle["depth"]]
            deepest = max((cycle["depth"] for cycle in drafts), default=0)
            entry["per_position"] = [
                sum(cycle["accepted"] > position for cycle in drafts) / len(drafts)
                for position in range(deepest)
            ]
        entries.append(entry)
    return entries


def _read_newest(
    run: Path,
) -> tuple[dict[str, Any], dict[tuple[float, str], list[dict[str, Any]]]]:
    """Return the header of a run's newest measurement, and its rows by temperature and drafter; empty without one."""
    header: dict[str, Any] = {}
    newest: list[dict[str, Any]] = []  # its rows: one for each prompt, drafter and temperature
    rows = _read_rows(run / "results.jsonl")
    for row in rows:
        # a row whose `run` is a mapping is the header of a measurement, which its rows follow
        if isinstance(row.get("run"), dict):
            header = row["run"]
            newest = []
        else:
            newest.append(row)
    # a measurement that was resumed has several headers, so find its rows by its id
    if "id" in header:
        newest = [row for row in rows if row["run"] == header["id"]]
    groups: dict[tuple[float, str], list[dict[str, Any]]] = {}
    for row in newest:
        groups.setdefault((row["temperature"], row["drafter"]), []).append(row)
    return header, groups


def _describe_tree(header: dict[str, Any], drafter: str) -> str:
    """Return the draft tree of a drafter in words; a dash for none or an unknown one.

    Args:
        header: The header of a measurement, which describes each drafter and its budget, the limits of its tree.
        drafter: The drafter's name in it.
    """
    try:
        tree = describe_budget(header["drafters"][drafter]["budget"])
    except (KeyError, TypeError):
        # headers of early releases list names alone
        return "–"
    return tree or "–"


def _pool_lengths(rows: list[dict[str, Any]]) -> float:
    """Return the acceptance length of a group of rows: committed tokens per cycle, pooled over all prompts.

    A cycle is one draft and its verification by one forward of the target, whose own token counts as committed too.

    Args:
        rows: The rows of results.jsonl of one drafter at one temperature, one for each answer.
    """
    tokens = 0
    cycles = 0
    for row in rows:
        # most rows count their cycles; rows with traces list them
        if isinstance(row["cycles"], list):
            tokens += sum(cycle["committed"] for cycle in row["cycles"])
            cycles += len(row["cycles"])
        else:
            tokens += row["committed"]
            cycles += row["cycles"]
    # rows without a cycle must not divide by zero
    return tokens / max(cycles, 1)
