"""Hidden features on disk: what made them, which examples they belong to, and the shards that hold them."""

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

from eagle.data.examples import Example
from eagle.data.identity import in_precision
from eagle.data.shards import DTYPES, ShardWriter, checksum_file, shard_fault, shard_header, token_bytes, unpacked
from eagle.disk import sha256, write_tensors, write_whole

Plan = list[list[list[int]]]  # shards of batches of example numbers


def batches_of(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Example numbers, longest first, in batches that fill at most `batch_tokens` slots with their padding."""
    batches: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= batch_tokens:
            batches[-1].append(number)
        else:
            batches.append([number])
    return batches


def plan_of(lengths: Sequence[int], batch_tokens: int, shard_tokens: int) -> Plan:
    """The batches in shards of about that many tokens; it depends on the lengths alone, not on who computes."""
    shards: Plan = []
    held = shard_tokens
    for batch in batches_of(lengths, batch_tokens):
        if held >= shard_tokens:
            shards.append([])
            held = 0
        shards[-1].append(batch)
        held += sum(lengths[number] for number in batch)
    return shards


def differences(found: Any, expected: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every leaf in which two identities differ: its dotted name, what was found, what was expected."""
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in sorted({*found, *expected}):
            yield from differences(found.get(key), expected.get(key), f"{name}.{key}" if name else key)
    elif found != expected:
        yield name, found, expected


class Absent(ValueError):
    """There is no store."""


class Damaged(ValueError):
    """A file of a store cannot be read; its shards may be whole."""


def _read_index(path: Path) -> dict[str, Any]:
    """The index of a store; what a reader relies on is there."""
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

    Beside them may lie what a head borrows of the target: `head.safetensors` and `config.json`.
    """

    together = False

    def __init__(self, folder: str | Path, expected: dict[str, Any] | None = None, *, partial: bool = False) -> None:
        self.folder = Path(folder)
        if not (self.folder / "index.json").is_file():
            raise Absent(f"no feature store at {folder}: run `python -m data_prep.extract RECIPE` first")
        self.index = _read_index(self.folder / "index.json")
        # stores once said "auto", and beside it what that was
        self.identity = in_precision(self.index["identity"], self.index["made"].get("precision"))
        if expected is not None:
            self.expect(expected)
        self.taps: tuple[int, ...] = tuple(self.identity["taps"])
        self.dtype: str = self.identity["dtype"]
        self._load_examples()
        self.look()
        if self.absent and not partial:
            raise ValueError(f"{self.described()}. Run `python -m data_prep.extract RECIPE` to complete it")

    @classmethod
    def create(
        cls, folder: str | Path, examples: Sequence[Example], identity: dict[str, Any], plan: Plan, **made: Any
    ) -> FeatureStore:
        """A store without features yet; `made` holds the target's `width` and what else is of interest.

        Of it, `borrowed` names files that lie in the folder already, with their checksums.
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
        """Refuses features that another identity made, and names every difference."""
        wrong = [
            f"{name}: the store has {found!r}, this run needs {needed!r}"
            for name, found, needed in differences(self.identity, identity)
            # a store of more taps serves a reader of some, and one of any precision a reader to whom all are right
            if not (name == "taps" and set(needed) <= set(found)) and (name, needed) != ("target.dtype", "auto")
        ]
        if wrong:
            raise ValueError(
                f"the features in {self.folder} are not those that this run needs: {'; '.join(wrong)}. "
                "Point features.store at another folder, or remove this one"
            )

    def borrowed(self) -> Path | None:
        """Where the target's config, embedding and LM head lie, every byte checked; None in a store without them."""
        files = self.index["made"].get("borrowed", {})
        for name, checksum in files.items():
            self._checked(name, checksum)
        return self.folder if files else None

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, place: int) -> Example:
        return self.read([place])[0]

    def read(self, places: Sequence[int]) -> list[Example]:
        """Those examples with their features, read from memory-mapped shards."""
        return [self._read(*self.places[place]) for place in places]

    def _read(self, number: int, shard: int, start: int) -> Example:
        stop = start + self.lengths[number]
        with safe_open(self.path(shard), "pt") as file:
            values = file.get_slice("features")[start:stop]
            scales = [file.get_slice("scales")[start:stop]] if self.dtype == "float8" else []
        return Example(*self.text(number), unpacked(values, *scales))

    def mask(self, place: int) -> Tensor:
        """The loss mask of an example."""
        return self.text(self.places[place][0])[1]

    def said(self, place: int) -> Tensor:
        """The supervised tokens of an example."""
        tokens, mask = self.text(self.places[place][0])
        return tokens[mask]

    def text(self, number: int) -> tuple[Tensor, Tensor]:
        """Tokens and loss mask of an example, by its number in the data."""
        begin, end = self.ends[number] - self.lengths[number], self.ends[number]
        return self.tokens[begin:end].long(), self.loss_mask[begin:end]

    def path(self, shard: int) -> Path:
        """The file of a shard."""
        return self.folder / f"shard-{shard:05d}.safetensors"

    def faults(self, *, read: bool = False) -> Iterator[tuple[int, str | None]]:
        """Every shard and what is wrong with it: by a look at its start and size or, with `read`, at every byte."""
        for shard, tokens in enumerate(self.index["shard_tokens"]):
            header = self._header(shard)
            size = len(header) + tokens * self.bytes_per_token
            yield shard, shard_fault(self.path(shard), header, size, read=read)

    def look(self) -> None:
        """Serve the shards that are there."""
        self.serve_all_but({shard: fault for shard, fault in self.faults() if fault})

    def described(self) -> str:
        """The absent shards in one sentence."""
        listed = [f"{self.path(shard).name} ({fault})" for shard, fault in list(self.absent.items())[:5]]
        more = f" and {len(self.absent) - 5} more" if len(self.absent) > 5 else ""
        return (
            f"{len(self.absent)} of {len(self.plan)} shards in {self.folder} are not whole: {', '.join(listed)}{more}"
        )

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
        """Remove those shards, so that they are computed again."""
        for shard in shards:
            checksum_file(self.path(shard)).unlink(missing_ok=True)
            self.path(shard).unlink(missing_ok=True)
        self.look()

    def writer(self, shard: int) -> ShardWriter:
        """Opens a shard for its examples, in the order of the plan."""
        return ShardWriter(self.path(shard), self._header(shard))

    @property
    def bytes_per_token(self) -> int:
        """What the features of one token take on disk."""
        return token_bytes(self.dtype, len(self.taps), self.index["made"]["width"])

    def _header(self, shard: int) -> bytes:
        metadata = {"store": self._name, "shard": str(shard)}  # so that a shard of another store is seen
        width, tokens = self.index["made"]["width"], self.index["shard_tokens"][shard]
        return shard_header(self.dtype, tokens, len(self.taps), width, metadata)

    @cached_property
    def _name(self) -> str:
        made_of = json.dumps(
            [self.index["identity"], self.index["examples"], self.index["shard_tokens"]], sort_keys=True
        )
        return hashlib.sha256(made_of.encode()).hexdigest()

    def _checked(self, name: str, checksum: str) -> Path:
        """A file of the store that is no shard, if its bytes are those that were written."""
        path = self.folder / name
        if not path.is_file() or sha256(path) != checksum:
            raise Damaged(
                f"{path} is missing or damaged: `python -m data_prep.extract RECIPE --repair` makes it anew and keeps "
                "the shards"
            )
        return path

    def _load_examples(self) -> None:
        with safe_open(self._checked("examples.safetensors", self.index["examples"]["sha256"]), "pt") as file:
            held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dict
        self.tokens, self.loss_mask, self.lengths = held["tokens"], held["loss_mask"], held["lengths"].tolist()
        self.ends = list(accumulate(self.lengths))
        order, batch_sizes = iter(held["order"].tolist()), iter(held["batch_sizes"].tolist())
        self.plan: Plan = [
            [[next(order) for _ in range(next(batch_sizes))] for _ in range(batches)]
            for batches in held["shard_batches"].tolist()
        ]
        tokens = [sum(self.lengths[number] for batch in shard for number in batch) for shard in self.plan]
        if tokens != self.index["shard_tokens"]:
            raise Damaged(f"{self.folder / 'index.json'} is not of these examples: --repair makes it anew")
