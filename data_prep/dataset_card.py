"""The dataset card of regenerated conversations, or of a feature store."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from eagle.data.store import FeatureStore
from eagle.formats.card import LICENCE, count_conversations, is_hub_id
from eagle.formats.reading.files import resolve_inside


def dataset_card(path: Path, name: str) -> str:
    """Return the README.md of a file that `eagle prepare` wrote, or of a folder that `eagle extract` filled."""
    if path.is_dir():
        return store_card(path, name)
    note = Path(f"{path}.settings")
    if not note.is_file():
        raise ValueError(
            f"no card can be made of {path}: expected {note} beside it, as `eagle prepare` leaves it"
        )
    # The card shows the contents of both, so that neither may be a link to another folder.
    for file in (path, note):
        resolve_inside(file, file.parent)
    return conversations_card(path, json.loads(note.read_text()), name)


def conversations_card(path: Path, settings: dict[str, Any], name: str) -> str:
    """Return the card of answers: whose they are, how they were sampled, how many there are."""
    counts: Counter[str] = Counter()
    for line in read_lines(path):
        ends = line.get("finish_reasons", [])
        counts.update(
            {
                "conversations": 1,
                "answers": len(ends),
                "answers that were cut off": ends.count("length"),
            }
        )
    sections = [
        describe_target(settings["target"], "Answers by"),
        f"The questions come from another dataset (fingerprint `{settings['data']['source']}`). Every answer was "
        "sampled again from this model, so that a draft head learns what the model itself writes.",
        load_with(
            f'from datasets import load_dataset\n\ndata = load_dataset("{name}", split="train")'
        ),
        "\n".join(f"- {name}: {count:,}" for name, count in counts.items()),
        f"## Sampling\n\n```json\n{json.dumps(settings['sampling'], indent=2)}\n```",
    ]
    return card(name, settings["target"]["path"], ["conversations"], sections)


def store_card(folder: Path, name: str) -> str:
    """Return the card of features: whose they are, of which layers, of how many tokens."""
    resolve_inside(folder / "index.json", folder)
    store = FeatureStore(folder, partial=True)
    origin = store.index["made"]
    target = origin.get("target", {"path": "unknown"})
    tokens = sum(store.index["shard_tokens"])
    counts = origin.get("conversations")
    size = (
        f"{len(store):,} examples, {tokens:,} tokens, {len(store.index['shard_tokens'])} shards; inputs of the "
        f"layers {', '.join(map(str, store.taps))} (-1: the state behind the last), width {origin['width']}, "
        f"as {store.dtype}. "
    )
    if counts:
        size += count_conversations(counts)
    sections = [
        describe_target(target, "Hidden features of"),
        size,
        load_with('from eagle.data.store import FeatureStore\n\nstore = FeatureStore("FOLDER")'),
        f"## Identity\n\nTraining refuses features of anything else.\n\n"
        f"```json\n{json.dumps(store.identity, indent=2)}\n```",
    ]
    return card(name, target["path"], ["hidden-features"], sections)


def card(name: str, target: str, tags: list[str], sections: list[str]) -> str:
    """Return front matter, a title, the sections, and a place for the licence."""
    front: dict[str, Any] = {"tags": ["speculative-decoding", *tags]}
    if is_hub_id(target):
        front["base_model"] = target
    head = f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n\n# {name.split('/')[-1]}"
    return "\n\n".join([head, *sections, f"## Licence\n\n{LICENCE}"]) + "\n"


def describe_target(target: dict[str, Any], what: str) -> str:
    """Return a sentence that names the model, its revision and its adapter."""
    more = [f"{key} `{target[key]}`" for key in ("revision", "adapter") if target.get(key)]
    return f"{what} `{target['path']}`{''.join(f', {part}' for part in more)}."


def load_with(code: str) -> str:
    """Return a section that shows how to load the data."""
    return f"## How to load it\n\n```python\n{code}\n```"


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a JSONL file."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)
