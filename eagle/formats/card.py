"""The model card of a head: usage, data, settings, loss curve, acceptance lengths and proof of equal output."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from eagle.formats.reading.files import CONFIG_BYTES, read_text
from eagle.recipe.plain_yaml import parse_yaml

POINTS = 8  # of a curve
MOST_BYTES = 10**9  # of the answers of a run
CODE = (
    "Its method is not part of `eagle`: `method.py` beside the head, which was {file}. Read it before you trust it.\n\n"
)
LICENCE = "Not chosen yet: add `license:` to the lines at the top. Those of the target and of the data may bind it."


def model_card(folder: Path, name: str) -> str:
    """The README.md of a head's folder, with loss curve and acceptance lengths from files beside the folder, if any."""
    if absent := [part for part in ("recipe.yaml", "provenance.json") if not (folder / part).is_file()]:
        verb = "are" if len(absent) > 1 else "is"
        raise ValueError(
            f"{folder}: {' and '.join(absent)} {verb} missing, of which its card is made: write a README.md there by "
            "hand, or take the whole folder that training or `eagle import` leaves"
        )
    recipe = parse_yaml(read_text(folder, "recipe.yaml", CONFIG_BYTES), str(folder / "recipe.yaml"))
    provenance = json.loads(read_text(folder, "provenance.json", CONFIG_BYTES))
    if not isinstance(recipe, dict) or not {"target", "drafter", "data", "train"} <= recipe.keys():
        raise ValueError(f"{folder / 'recipe.yaml'} is no recipe of this project, of which its card is made")
    target, revision = recipe["target"]["path"], recipe["target"].get("revision")
    kind, file = _method_of(folder, recipe)
    at_revision = f" at revision `{revision}`" if revision else ""
    sections = [
        f"{front_matter(kind, target)}\n# {name.split('/')[-1]}",
        f"A draft head of the kind `{kind}` for `{target}`{at_revision}. It guesses the next tokens, and the target "
        f"verifies them in one forward: the same output in fewer forwards. {_exactness(folder.parent)}",
        f"## How to load it\n\n{_usage(name, target, file)}",
        f"## Licence\n\n{LICENCE}",
        f"## Data\n\n{_keys(recipe['data'])}{_counts(recipe)}",
        f"## Settings\n\n{_keys({**recipe['drafter'], **recipe['train']})}",
    ]
    if curve := _curve(_rows(folder.parent / "metrics.jsonl")):
        sections.append(f"## Curve\n\n{curve}")
    if validation := provenance.pop("validation", None):
        sections.append(f"## On held-out conversations\n\n{_keys(validation)}")
    if acceptance := acceptance_of(folder.parent):
        sections.append(f"## Acceptance\n\nTokens committed per forward of the target.\n\n{acceptance}")
    sections.append(f"## What made it\n\n```json\n{json.dumps(provenance, indent=2)}\n```")
    return "\n\n".join(sections) + "\n"


def _method_of(folder: Path, recipe: dict[str, Any]) -> tuple[str, str | None]:
    """The name of a head's method, and the file that its class comes from, if the head brings one."""
    path = folder / "config.json"
    try:
        config = json.loads(read_text(folder, "config.json", CONFIG_BYTES)) if path.is_file() else {}
    except ValueError as error:  # no text, or no JSON
        raise ValueError(f"{path} cannot be read: {error}; is it cut short? Copy it again") from None
    code = config.get("code") if isinstance(config, dict) else None
    if not isinstance(code, dict):
        return recipe["drafter"]["kind"], None
    return config["settings"]["kind"], code.get("file")


def front_matter(kind: str, target: str, *more: str) -> str:
    """The YAML that a hub reads: library, tags, and the base model unless it is a local folder."""
    values: dict[str, Any] = {
        "library_name": "eagle",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "draft-head", kind, *more],
    }
    if is_hub_id(target):
        values["base_model"] = target
    return f"---\n{yaml.safe_dump(values, sort_keys=False)}---\n"


def is_hub_id(target: str) -> bool:
    """Whether a target may be one of a hub: a hub refuses cards that name another one as their base."""
    return bool(re.fullmatch(r"[\w.-]+(/[\w.-]+)?", target)) and not Path(target).exists()


def _exactness(run: Path) -> str:
    """The facts known about the output: by construction, and by comparison where one lies in the run's folder."""
    text = "With exact verification, the default, the output is the target's own at any temperature."
    path = run / "lossless.json"
    if not path.is_file():
        return text
    verdicts = json.loads(read_text(run, path.name, MOST_BYTES))["verdicts"]
    same, answers = (sum(verdict[key] for verdict in verdicts) for key in ("identical", "answers"))
    return f"{text} Compared with undrafted decoding, {same} of {answers} answers are identical token by token."


def _counts(recipe: dict[str, Any]) -> str:
    """How many conversations were kept and dropped, where the feature store still lies here."""
    index = Path(recipe.get("features", {}).get("store") or "") / "index.json"
    counts = json.loads(index.read_text())["made"].get("conversations") if index.is_file() else None
    return "" if counts is None else f"\n\n{count_conversations(counts)}"


def count_conversations(counts: dict[str, Any]) -> str:
    """A sentence on the conversations that were kept and dropped, with the reasons."""
    dropped = counts["dropped"]
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items())
    total = f"{counts['kept']:,} conversations were kept, {sum(dropped.values()):,} dropped"
    return f"{total}: {reasons}." if reasons else f"{total}."


def _usage(name: str, target: str, file: str | None) -> str:
    trust, note = (", trust_code=True", CODE.format(file=file)) if file else ("", "")
    return f"""{note}```python
from eagle import Target, generate, load_drafter

target = Target.load("{target}")
drafter = load_drafter("{name}", target{trust})
print(generate(target, drafter, target.chat("What is a draft head?"), max_new_tokens=128).text)
```"""


def _table(head: list[str], rows: list[list[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def _keys(values: dict[str, Any]) -> str:
    return _table(["key", "value"], [[f"`{key}`", value] for key, value in values.items() if value is not None])


def _rows(path: Path) -> list[dict[str, Any]]:
    text = read_text(path.parent, path.name, MOST_BYTES) if path.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def _curve(rows: list[dict[str, Any]]) -> str:
    """A table of the losses at evenly spread steps, the first and last included."""
    steps = [row for row in rows if "total" in row]
    if not steps:
        return ""
    count = min(POINTS, len(steps))
    chosen = [steps[i * (len(steps) - 1) // max(count - 1, 1)] for i in range(count)]
    names = [name for name in ("total", "regression", "cross_entropy") if name in steps[0]]
    return _table(["step", *names], [[row["step"], *(row[name] for name in names)] for row in chosen])


def acceptance_of(run: Path) -> str:
    """A table of the newest measurement in a run's folder, pooled over prompts; "" without one."""
    rows = _rows(run / "results.jsonl")
    headers = [index for index, row in enumerate(rows) if isinstance(row.get("run"), dict)]
    header, newest = (rows[headers[-1]]["run"], rows[headers[-1] + 1 :]) if headers else ({}, rows)
    if "id" in header:  # a run that was resumed has several headers, and its rows name it
        newest = [row for row in rows if row["run"] == header["id"]]
    groups: dict[tuple[float, str], list[dict[str, Any]]] = {}
    for row in newest:
        groups.setdefault((row["temperature"], row["drafter"]), []).append(row)
    if not groups:
        return ""
    lines = [[temperature, f"`{drafter}`", _length(group)] for (temperature, drafter), group in groups.items()]
    keys = [key for key in ("prompts", "tree", "torch", "machine", "date") if key in header]
    note = ", ".join(f"{key} {header[key]}" for key in keys)
    return f"{_table(['T', 'drafter', 'acceptance length'], lines)}\n\n<sub>{note}</sub>"


def _length(rows: list[dict[str, Any]]) -> float:
    """Tokens per cycle, of rows that count their cycles or list them."""
    tokens = cycles = 0
    for row in rows:
        if isinstance(row["cycles"], list):
            tokens += sum(cycle["committed"] for cycle in row["cycles"])
            cycles += len(row["cycles"])
        else:
            tokens += row["committed"]
            cycles += row["cycles"]
    return tokens / max(cycles, 1)
