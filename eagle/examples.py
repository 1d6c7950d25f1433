"""Training examples, and the store of hidden features that they are read from."""

# B batch, T tokens, L taps, D target width

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation as the target reads it; `loss_mask` marks the tokens that the assistant said."""

    tokens: Tensor  # [T]
    loss_mask: Tensor  # [T] bool
    features: Tensor | None = None  # [T, L, D]


@dataclass(frozen=True, slots=True)
class Batch:
    """Examples side by side, padded on the right with unsupervised slots."""

    tokens: Tensor  # [B, T]
    loss_mask: Tensor  # [B, T] bool
    features: Tensor  # [B, T, L, D]
    lengths: Tensor  # [B]
    taps: tuple[int, ...]  # which target state each of the L is

    def tapped(self, taps: tuple[int, ...]) -> Tensor:
        """[B, T, len(taps), D], the states of those taps."""
        return self.features[:, :, [self.taps.index(tap) for tap in taps]]

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        tokens, loss_mask, features, lengths = (
            tensor.to(device) for tensor in (self.tokens, self.loss_mask, self.features, self.lengths)
        )
        return Batch(tokens, loss_mask, features, lengths, self.taps)


def collate(examples: Sequence[Example], taps: tuple[int, ...]) -> Batch:
    """One batch of examples that carry features."""

    def side_by_side(tensors: list[Tensor]) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)

    features = [example.features for example in examples]
    assert all(feature is not None for feature in features), "collate needs examples with features"
    return Batch(
        side_by_side([example.tokens for example in examples]),
        side_by_side([example.loss_mask for example in examples]),
        side_by_side(features),  # type: ignore[arg-type]
        torch.tensor([len(example.tokens) for example in examples]),
        taps,
    )


class FeatureStore:
    """Examples with features in safetensors shards; `index.json` says what made them and holds their checksums."""

    def __init__(self, folder: str | Path, expected: dict[str, Any] | None = None) -> None:
        self.folder = Path(folder)
        index = self.folder / "index.json"
        if not index.is_file():
            raise ValueError(f"no feature store at {folder}: run `python -m data_prep.extract RECIPE` first")
        self.index = json.loads(index.read_text())
        for key, value in (expected or {}).items():
            if self.index["identity"].get(key) != value:
                raise ValueError(
                    f"the features in {folder} were made with {key} = {self.index['identity'].get(key)!r}, this run "
                    f"needs {value!r}: extract again, or point features.store elsewhere"
                )
        self.taps: tuple[int, ...] = tuple(self.index["identity"]["taps"])
        self.places = [(shard["file"], row) for shard in self.index["shards"] for row in range(shard["examples"])]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, place: int) -> Example:
        file, row = self.places[place]
        with safe_open(self.folder / file, "pt") as shard:
            names = (f"{row}.tokens", f"{row}.loss_mask", f"{row}.features")
            tokens, loss_mask, features = (shard.get_tensor(name) for name in names)
        return Example(tokens.long(), loss_mask, features)

    def verify(self) -> list[str]:
        """The shards whose bytes are not those that were written."""
        return [
            shard["file"] for shard in self.index["shards"] if _digest(self.folder / shard["file"]) != shard["sha256"]
        ]

    @classmethod
    def write(
        cls, folder: str | Path, examples: Iterable[Example], identity: dict[str, Any], shard_bytes: int
    ) -> FeatureStore:
        """Write all examples in shards of about that size; the index comes last, so that half a store is none."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "index.json").unlink(missing_ok=True)
        shards = [_write_shard(folder, number, part) for number, part in enumerate(_parts(examples, shard_bytes))]
        _replace(folder / "index.json", json.dumps({"identity": identity, "shards": shards}, indent=1))
        return cls(folder)


def _parts(examples: Iterable[Example], size: int) -> Iterator[list[Example]]:
    part: list[Example] = []
    held = 0
    for example in examples:
        part.append(example)
        held += example.features.nbytes if example.features is not None else 0
        if held >= size:
            yield part
            part, held = [], 0
    if part:
        yield part


def _write_shard(folder: Path, number: int, part: list[Example]) -> dict[str, Any]:
    tensors = {}
    for row, example in enumerate(part):
        assert example.features is not None
        tensors[f"{row}.tokens"] = example.tokens.int()
        tensors[f"{row}.loss_mask"] = example.loss_mask
        tensors[f"{row}.features"] = example.features.contiguous()
    file = f"shard-{number:05d}.safetensors"
    save_file(tensors, folder / f"{file}.part")
    os.replace(folder / f"{file}.part", folder / file)
    return {"file": file, "examples": len(part), "sha256": _digest(folder / file)}


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _replace(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    os.replace(part, path)
