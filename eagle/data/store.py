"""Feature stores: hidden features on disk with their identity, their examples and checksums."""

# T tokens, L taps, D target width

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from eagle.core.examples import Example
from eagle.data.identity import in_precision
from eagle.data.shards import (
    DTYPES,
    ShardWriter,
    checksum_file,
    shard_fault,
    shard_header,
    token_bytes,
    unpack_features,
)
from eagle.disk import sha256, write_tensors, write_whole
from eagle.markup import table

FINGERPRINTS = {  # fields of an identity that are fingerprints, and of which files
    "target.weights": "the target's weights (*.safetensors or *.bin)",
    "target.config": "the target's config.json",
    "target.adapter": "the adapter's weights and adapter_config.json",
    "tokenizer": "the target's tokenizer (tokenizer*, vocab*, merges.txt, *.model and the like)",
    "template": "the chat template (data.template, or the target's chat_template* and tokenizer_config.json)",
    "data.source": "the files of data.train",
}
Plan = list[list[list[int]]]  # shards of batches of example numbers


def make_batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Example numbers, longest first, in batches that fill at most `batch_tokens` slots with their padding."""
    batches: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= batch_tokens:
            batches[-1].append(number)
        else:
            batches.append([number])
    return batches


def plan_shards(lengths: Sequence[int], batch_tokens: int, shard_tokens: int) -> Plan:
    """The batches, grouped into shards of about `shard_tokens` tokens; depends only on the lengths."""
    shards: Plan = []
    filled = shard_tokens
    for batch in make_batches(lengths, batch_tokens):
        if filled >= shard_tokens:
            shards.append([])
            filled = 0
        shards[-1].append(batch)
        filled += sum(lengths[number] for number in batch)
    return shards


def differences(got: Any, expected: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted name, got, expected) of every leaf in which two nested dicts differ."""
    if isinstance(got, dict) and isinstance(expected, dict):
        for key in sorted({*got, *expected}):
            yield from differences(got.get(key), expected.get(key), f"{name}.{key}" if name else key)
    elif got != expected:
        yield name, got, expected


def describe_difference(name: str, got: Any, needed: Any) -> str:
    """One difference between a store and a run, with the files that its fingerprint is of."""
    files = f" as the fingerprint of {FINGERPRINTS[name]}" if name in FINGERPRINTS else ""
    return f"the store has {got!r}, this run needs {needed!r}{files}"


class Absent(ValueError):
    """There is no store."""


class Damaged(ValueError):
    """A file of a store cannot be read; its shards may be whole."""


def _read_index(path: Path) -> dict[str, Any]:
    """The index of a store, with the fields that a reader needs checked."""
    try:
        index: dict[str, Any] = json.loads(path.read_text())
        if index["identity"]["dtype"] not in DTYPES:
            raise ValueError(f"dtype is {index['identity']['dtype']!r}")
        numbers = (*index["identity"]["taps"], *index["shard_tokens"], index["made"]["width"])
        if index["examples"]["sha256"] and all(isinstance(number, int) for number in numbers):
            return index
        raise ValueError(f"taps, shard_tokens and width are {numbers}, expected numbers")
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{path} is damaged ({error!r}): --repair makes it anew") from None


class FeatureStore:
    """Examples with features: `index.json`, `examples.safetensors`, and shards that carry a `.sha256` each.

    The folder may also hold the target's embedding and LM head: `head.safetensors` and `config.json`.
    """

    together = sampled = False

    def __init__(self, folder: str | Path, expected: dict[str, Any] | None = None, *, partial: bool = False) -> None:
        self.folder = Path(folder)
        if not (self.folder / "index.json").is_file():
            raise Absent(f"no feature store at {folder}: run `eagle extract RECIPE` first")
        self.index = _read_index(self.folder / "index.json")
        # older stores have dtype "auto" and the precision beside it
        self.identity = in_precision(self.index["identity"], self.index["made"].get("precision"))
        if expected is not None:
            self.expect(expected)
        self.taps: tuple[int, ...] = tuple(self.identity["taps"])
        self.dtype: str = self.identity["dtype"]
        self._load_examples()
        self.refresh()
        if self.absent and not partial:
            raise ValueError(f"{self.describe_absent()}. Run `eagle extract RECIPE` to complete it")

    @classmethod
    def create(
        cls, folder: str | Path, examples: Sequence[Example], identity: dict[str, Any], plan: Plan, **made: Any
    ) -> FeatureStore:
        """A store without features yet; `made` holds the target's `width` and other notes.

        Its entry `borrowed` maps files that are in the folder already to their checksums.
        """
        folder = Path(folder)
        lengths = [len(example.tokens) for example in examples]
        batches = [batch for shard in plan for batch in shard]
        tensors = {
            "tokens": torch.cat([example.tokens.int() for example in examples]),
            "loss_mask": torch.cat([example.loss_mask for example in examples]),
            "lengths": torch.tensor(lengths),
            "order": torch.tensor([number for batch in batches for number in batch]),
            "batch_sizes": torch.tensor([len(batch) for batch in batches]),
            "shard_batches": torch.tensor([len(shard) for shard in plan]),
        }
        path = folder / "examples.safetensors"
        write_tensors(path, tensors)
        index = {
            "identity": identity,
            "examples": {"count": len(lengths), "tokens": sum(lengths), "sha256": sha256(path)},
            "shard_tokens": [sum(lengths[number] for batch in shard for number in batch) for shard in plan],
            "made": {"torch": torch.__version__, "machine": platform.machine(), **made},
        }
        write_whole(folder / "index.json", [json.dumps(index, indent=1).encode()])
        return cls(folder, partial=True)

    def expect(self, identity: dict[str, Any]) -> None:
        """Refuse a store of another identity, naming every difference."""
        wrong = [
            f"{name}: {describe_difference(name, got, needed)}"
            for name, got, needed in differences(self.identity, identity)
            # a store may have more taps than needed, and any precision where the recipe leaves it open
            if not (name == "taps" and set(needed) <= set(got)) and (name, needed) != ("target.dtype", "auto")
        ]
        if wrong:
            raise ValueError(
                f"the features in {self.folder} are not those that this run needs: {'; '.join(wrong)}. "
                "Point features.store at another folder, or remove this one"
            )

    def borrowed_folder(self) -> Path | None:
        """The folder with the target's config, embedding and LM head, checksums verified; None without them."""
        files = self.index["made"].get("borrowed", {})
        for name, checksum in files.items():
            self._check_file(name, checksum)
        return self.folder if files else None

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Example:
        return self.read([index])[0]

    def read(self, indices: Sequence[int]) -> list[Example]:
        """The examples at these indices, with their features from memory-mapped shards."""
        return [self._read(*self.places[index]) for index in indices]

    def _read(self, number: int, shard: int, start: int) -> Example:
        stop = start + self.lengths[number]
        with safe_open(self.path(shard), "pt") as file:
            values = file.get_slice("features")[start:stop]
            scales = [file.get_slice("scales")[start:stop]] if self.dtype == "float8" else []
        return Example(*self.text(number), unpack_features(values, *scales))

    def mask(self, index: int) -> Tensor:
        """[T], the loss mask of an example."""
        return self.text(self.places[index][0])[1]

    def supervised_tokens(self, index: int) -> Tensor:
        """The supervised tokens of an example."""
        tokens, mask = self.text(self.places[index][0])
        return tokens[mask]

    def text(self, number: int) -> tuple[Tensor, Tensor]:
        """Tokens and loss mask of an example, by its number in the data."""
        end = self.ends[number]
        start = end - self.lengths[number]
        return self.tokens[start:end].long(), self.loss_mask[start:end]

    def path(self, shard: int) -> Path:
        """The file of a shard."""
        return self.folder / f"shard-{shard:05d}.safetensors"

    def faults(self, *, read: bool = False) -> Iterator[tuple[int, str | None]]:
        """Every shard and its fault or None, by its header and size or, with `read`, by every byte."""
        for shard, tokens in enumerate(self.index["shard_tokens"]):
            header = self._header(shard)
            size = len(header) + tokens * self.bytes_per_token
            yield shard, shard_fault(self.path(shard), header, size, read=read)

    def refresh(self) -> None:
        """Check again which shards are complete, and serve their examples."""
        self.serve_all_but({shard: fault for shard, fault in self.faults() if fault})

    def describe_absent(self) -> str:
        """The absent shards and their faults in one sentence."""
        count = len(self.absent)
        listed = ", ".join(f"{self.path(shard).name} ({fault})" for shard, fault in list(self.absent.items())[:5])
        more = f" and {count - 5} more" if count > 5 else ""
        return f"{count} of {len(self.plan)} shards in {self.folder} are not whole: {listed}{more}"

    def serve_all_but(self, absent: dict[int, str]) -> None:
        """Serve the examples of all other shards, in the data's order."""
        self.absent = absent
        self.places: list[tuple[int, int, int]] = []  # (example number, shard, its first token there)
        for shard, batches in enumerate(self.plan):
            start = 0
            for number in (number for batch in batches for number in batch):
                if shard not in absent:
                    self.places.append((number, shard, start))
                start += self.lengths[number]
        self.places.sort()

    def discard(self, shards: Sequence[int]) -> None:
        """Remove these shards, so that they are computed again."""
        for shard in shards:
            checksum_file(self.path(shard)).unlink(missing_ok=True)
            self.path(shard).unlink(missing_ok=True)
        self.refresh()

    def writer(self, shard: int) -> ShardWriter:
        """A writer of a shard, which takes its examples in the order of the plan."""
        return ShardWriter(self.path(shard), self._header(shard))

    @property
    def bytes_per_token(self) -> int:
        """Bytes on disk of one token's features."""
        return token_bytes(self.dtype, len(self.taps), self.index["made"]["width"])

    def _repr_html_(self) -> str:
        """The store's contents as HTML, for a notebook."""
        counts = self.index["examples"]
        size = sum(self.index["shard_tokens"]) * self.bytes_per_token
        rows = {
            "folder": self.folder,
            "target": self.identity.get("target", {}).get("path", "not known"),
            "features": f"{len(self.taps)} layers {self.taps} × {self.index['made']['width']}, {self.dtype}",
            "conversations": f"{counts['count']:,}, {counts['tokens']:,} tokens, {int(self.loss_mask.sum()):,} learned",
            "shards": f"{len(self.plan) - len(self.absent)} of {len(self.plan)} complete",
            "size when complete": f"{size / 1e6:,.1f} MB",
        }
        return table(rows.items())

    def _header(self, shard: int) -> bytes:
        metadata = {"store": self._fingerprint, "shard": str(shard)}  # so that a shard of another store is refused
        width, tokens = self.index["made"]["width"], self.index["shard_tokens"][shard]
        return shard_header(self.dtype, tokens, len(self.taps), width, metadata)

    @cached_property
    def _fingerprint(self) -> str:
        content = [self.index[key] for key in ("identity", "examples", "shard_tokens")]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def _check_file(self, name: str, checksum: str) -> Path:
        """The path of a file of this store; raises Damaged if its checksum differs."""
        path = self.folder / name
        if not path.is_file() or sha256(path) != checksum:
            raise Damaged(
                f"{path} is missing or damaged: `eagle extract RECIPE --repair` makes it anew and keeps the shards"
            )
        return path

    def _load_examples(self) -> None:
        with safe_open(self._check_file("examples.safetensors", self.index["examples"]["sha256"]), "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dict
        self.tokens, self.loss_mask = tensors["tokens"], tensors["loss_mask"]
        self.lengths = tensors["lengths"].tolist()
        self.ends = list(accumulate(self.lengths))
        order, batch_sizes = iter(tensors["order"].tolist()), iter(tensors["batch_sizes"].tolist())
        self.plan: Plan = [
            [[next(order) for _ in range(next(batch_sizes))] for _ in range(batches)]
            for batches in tensors["shard_batches"].tolist()
        ]
        tokens = [sum(self.lengths[number] for batch in shard for number in batch) for shard in self.plan]
        if tokens != self.index["shard_tokens"]:
            raise Damaged(f"{self.folder / 'index.json'} is not of these examples: --repair makes it anew")
