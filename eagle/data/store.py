"""Feature stores: hidden features on disk with their identity, their examples and checksums."""

# N examples, T tokens of one

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from eagle.core.examples import Example
from eagle.data.identity import describe_difference, differences, in_precision
from eagle.data.shards import (
    RowPlaces,
    ShardPlan,
    ShardWriter,
    StoredPlan,
    changed_bytes,
    checksum_file,
    pack_shown,
    shard_fault,
    shard_header,
    unpack_shown,
    write_examples,
)
from eagle.data.stored_rows import (
    DTYPES,
    SequenceSizes,
    check_width,
    parts_of,
    restore_features,
    row_bytes,
)
from eagle.disk import sha256, write_whole
from eagle.markup import table

VERSION = 3  # of the layout; the second shares no states between sequences, and the first keeps all of every token


class Absent(ValueError):
    """The folder has no feature store."""


class Damaged(ValueError):
    """A file of a store cannot be read; its shards may be whole."""


def _read_index(path: Path) -> dict[str, Any]:
    """Return a feature store's index.json; raise Damaged if a field that a reader needs is missing or wrong."""
    try:
        index: dict[str, Any] = json.loads(path.read_text())
        # the first version did not name itself; the fields of newer versions are not known, so they are not checked
        version = index.get("version", 1)
        is_known = version in range(1, VERSION + 1)
        if is_known:
            _check_index(index)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{path} is damaged ({error!r}): --repair makes it anew") from None
    if not is_known:
        raise ValueError(
            f"{path} has version {version!r}, this program reads 1 to {VERSION}: update it, or name another "
            "features.store"
        )
    return index


def _check_index(index: dict[str, Any]) -> None:
    """Raise an error of any kind, which the caller reports, if a field of an index is missing or has a wrong value."""
    # a field that is missing raises a KeyError
    identity = index["identity"]
    if identity["dtype"] not in DTYPES:
        raise ValueError(f"dtype is {identity['dtype']!r}")
    numbers = (
        *identity["taps"],
        *identity.get("inputs", []),
        *index["shard_tokens"],
        index["made"]["width"],
    )
    if not index["examples"]["sha256"] or not all(isinstance(number, int) for number in numbers):
        raise ValueError(f"taps, inputs, shard_tokens and width are {numbers}, expected numbers")


class FeatureStore:
    """Examples with features: `index.json`, `examples.safetensors`, and shards that carry a `.sha256` each.

    The folder may also hold the target's embedding and LM head: `head.safetensors` and `config.json`.
    """

    # a process reads without the others, and the loss masks are those of the data: see `eagle.core.examples.Features`
    together = False
    sampled = False

    def __init__(
        self, folder: str | Path, expected: dict[str, Any] | None = None, *, partial: bool = False
    ) -> None:
        """Open a store of features: the target's hidden states of examples, on disk.

        Args:
            folder: The folder of the store.
            expected: The identity that it must have; None for any.
            partial: Whether shards may be absent, as while a store is written. Their examples are left out.
        """
        self.folder = Path(folder)
        if not (self.folder / "index.json").is_file():
            raise Absent(
                f"no feature store at {folder}: run `eagle prepare RECIPE`, then `eagle extract RECIPE`"
            )
        self.index = _read_index(self.folder / "index.json")
        # older stores have the dtype "auto", and the precision of the target among the notes
        self.identity = in_precision(self.index["identity"], self.index["made"].get("precision"))
        if expected is not None:
            self.expect(expected)
        self.taps: tuple[int, ...] = tuple(self.identity["taps"])
        self.dtype: str = self.identity["dtype"]
        self.width: int = self.index["made"]["width"]
        self.parts = parts_of(self.identity)
        # the shards whose bytes this process has verified
        self._checked = set[int]()
        self._load_examples()
        self.refresh()
        if self.absent and not partial:
            raise ValueError(f"{self.describe_absent()}. Run `eagle extract RECIPE` to complete it")

    @classmethod
    def create(
        cls,
        folder: str | Path,
        examples: Sequence[Example],
        identity: dict[str, Any],
        plan: ShardPlan,
        sizes: SequenceSizes | None = None,
        **made: Any,
    ) -> FeatureStore:
        """Write the index and the examples of a store, and return it. Its shards are absent until they are extracted.

        Args:
            folder: The folder of the store.
            examples: The conversations, which may be on disk.
            identity: The settings and fingerprints that decide the features.
            plan: The examples of each batch of each shard.
            sizes: The sizes of the examples; None to count them.
            **made: The target's `width` and other notes. An entry `borrowed` maps files that are in the folder already
                (the target's embedding and LM head) to their checksums.
        """
        folder = Path(folder)
        # an error must come before anything is written
        check_width(identity["dtype"], made["width"])
        sizes = sizes or SequenceSizes.of(
            (example.loss_mask, example.shared) for example in examples
        )
        # [N], the tokens of each of N examples
        lengths = sizes.tokens.long()
        token_count = int(lengths.sum())
        plan_tensors = StoredPlan.tensors_of(plan)
        tensors = {"lengths": lengths, **plan_tensors}
        if "images" in identity.get("data", {}):
            tensors |= pack_shown(example.shown for example in examples)
        # An identity without `inputs` makes a store of the first version, which keeps all slots. Others note how many
        # slots of each example are kept for taps that heads read, for taps that teach, and shared with the one before.
        if "inputs" in identity:
            tensors |= {"read": sizes.read, "taught": sizes.teacher, "shared": sizes.shared}
        path = folder / "examples.safetensors"
        write_examples(path, examples, token_count, tensors)
        index = {
            **({"version": VERSION} if "inputs" in identity else {}),
            "identity": identity,
            "examples": {"count": len(lengths), "tokens": token_count, "sha256": sha256(path)},
            # the tokens of every shard
            "shard_tokens": StoredPlan(**plan_tensors).place_rows(lengths)[1],
            "made": {"torch": torch.__version__, "machine": platform.machine(), **made},
        }
        write_whole(folder / "index.json", [json.dumps(index, indent=1).encode()])
        return cls(folder, partial=True)

    def expect(self, identity: dict[str, Any]) -> None:
        """Refuse this store if a run needs features with another identity; the error names every difference."""
        wrong = []
        for name, stored, needed in differences(self.identity, identity):
            # a run that leaves the precision open takes the store's
            is_open = name == "target.dtype" and needed == "auto"
            if not is_open and not _suffices(name, stored, needed):
                wrong.append(f"{name}: {describe_difference(name, stored, needed)}")
        if wrong:
            raise ValueError(
                f"the features in {self.folder} are not those that this run needs: {'; '.join(wrong)}. "
                "Point features.store at another folder, or remove this one"
            )

    def borrowed_folder(self) -> Path | None:
        """Return the folder with the target's config, embedding and LM head, or None if the store has no copy of them.

        With it training needs no other weights of the target. The checksums of these files are verified.
        """
        files = self.index["made"].get("borrowed", {})
        for name, checksum in files.items():
            self._check_file(name, checksum)
        return self.folder if files else None

    def __len__(self) -> int:
        """Return the number of examples in complete shards (files); others cannot be read."""
        return len(self.served)

    def __getitem__(self, index: int) -> Example:
        """Return an example of the complete shards, with its features: the target's hidden states."""
        return self._read(self.number(index))

    def read(self, indices: Sequence[int]) -> list[Example]:
        """Return the examples at these indices, with their features from memory-mapped shards."""
        return [self._read(self.number(index)) for index in indices]

    def _read(self, number: int) -> Example:
        """Return an example with its features (the target's hidden states), by its index in the data."""
        tokens, mask = self.stored_tokens(number)
        packed = []  # of each part (taps kept at the same slots): a tensor for each field of the dtype
        with safe_open(self._checked_path(int(self.shards[number])), "pt") as file:
            for part in self.parts:
                tensors = []
                for field in DTYPES[self.dtype]:
                    # only the rows of this example are read; a shared prefix makes several pieces
                    rows = file.get_slice(part.prefix + field.name)
                    pieces = [rows[start:stop] for start, stop in self.places[part.slots][number]]
                    tensors.append(torch.cat(pieces))
                packed.append(tensors)
        (features,) = restore_features(self.parts, packed, self.taps, [mask])
        return Example(tokens, mask, features, shown=self.shown(number))

    def verify(self, shards: Iterable[int]) -> Iterator[Path]:
        """Verify every byte of these shards and yield each file once it is verified; raise Damaged at a fault.

        Nothing is verified until the caller iterates.
        """
        return map(self._checked_path, shards)

    def _checked_path(self, shard: int) -> Path:
        """Return the file of a shard, after its bytes were verified at the first call; raise Damaged if they differ."""
        path = self.path(shard)
        if shard not in self._checked:
            fault = changed_bytes(path)
            if fault:
                raise Damaged(
                    f"{path} is damaged: {fault}. `eagle extract RECIPE --verify` checks all shards, and --repair "
                    "computes anew what is damaged, and only that; then the same command goes on"
                )
            self._checked.add(shard)
        return path

    def number(self, index: int) -> int:
        """Return the index in the whole data of the example at an index of this store.

        They differ where shards are absent: a store serves only the examples of whole shards.
        """
        return int(self.served[index])

    def mask(self, index: int) -> Tensor:
        """Return [T], the loss mask of an example of T tokens, by its index in this store."""
        return self.tokens_and_mask(index)[1]

    def tokens_and_mask(self, index: int) -> tuple[Tensor, Tensor]:
        """Return tokens [T] and loss mask [T] of an example of T tokens, by its index in this store."""
        return self.stored_tokens(self.number(index))

    def stored_tokens(self, number: int) -> tuple[Tensor, Tensor]:
        """Return tokens [T] and loss mask [T] of an example of T tokens, by its index in the data."""
        # the tokens of all examples lie one after the other
        end = int(self.ends[number])
        start = end - int(self.lengths[number])
        return self.tokens[start:end].long(), self.loss_mask[start:end]

    def path(self, shard: int) -> Path:
        """Return the path of a shard's file, by the shard's index."""
        return self.folder / f"shard-{shard:05d}.safetensors"

    def faults(self, *, read: bool = False) -> Iterator[tuple[int, str | None]]:
        """Yield every shard (file) with its fault, or None. `read` checks all its bytes, not only header and size."""
        for shard in range(len(self.plan)):
            header = self._header(shard)
            size = len(header) + self.shard_bytes(shard)
            yield shard, shard_fault(self.path(shard), header, size, read=read)

    def refresh(self) -> None:
        """Check again which shards (files) are complete, and serve the examples of these; their bytes are not read."""
        self.serve_all_but({shard: fault for shard, fault in self.faults() if fault})

    def describe_absent(self) -> str:
        """Return the absent shards (files of the store) and their faults in one sentence."""
        faults = [f"{self.path(shard).name} ({fault})" for shard, fault in self.absent.items()]
        # a store may have thousands of shards
        listed = ", ".join(faults[:5])
        if len(faults) > 5:
            listed += f" and {len(faults) - 5} more"
        return f"{len(faults)} of {len(self.plan)} shards in {self.folder} are not whole: {listed}"

    def serve_all_but(self, absent: dict[int, str]) -> None:
        """Serve the examples of all shards (files) but some, in the data's order.

        The store's indices count these examples alone.

        Args:
            absent: By shard that is left out, its fault.
        """
        self.absent = absent
        # the index in the data of each example that is served
        self.served: Sequence[int] | Tensor = range(len(self.shards))
        if absent:
            is_served = torch.isin(self.shards, torch.tensor([*absent]), invert=True)
            self.served = is_served.nonzero()[:, 0]

    def discard(self, shards: Sequence[int]) -> None:
        """Remove the files of these shards, which are damaged, so that extraction computes them again."""
        for shard in shards:
            # the checksum first: without it a shard counts as incomplete
            checksum_file(self.path(shard)).unlink(missing_ok=True)
            self.path(shard).unlink(missing_ok=True)
            self._checked.discard(shard)
        self.refresh()

    def writer(self, shard: int) -> ShardWriter:
        """Return a writer of a shard (file), which takes its examples in the order of the plan of batches."""
        return ShardWriter(self.path(shard), self._header(shard))

    def shard_bytes(self, shard: int) -> int:
        """Return the bytes of a shard's hidden states, without its file's header."""
        total = 0
        # rows times bytes of a row, for each set of taps that are kept at the same slots
        for part in self.parts:
            total += self.places[part.slots].totals[shard] * row_bytes(part, self.dtype, self.width)
        return total

    @property
    def total_bytes(self) -> int:
        """The bytes of all shards' states, once they are complete."""
        return sum(map(self.shard_bytes, range(len(self.plan))))

    @property
    def bytes_per_token(self) -> float:
        """The bytes on disk of one token of the sequences, once all shards are complete."""
        return self.total_bytes / max(len(self.tokens), 1)

    def _repr_html_(self) -> str:
        """Return a table of what the store holds as HTML, which a notebook shows."""
        counts = self.index["examples"]
        rows = {
            "folder": self.folder,
            "target": self.identity.get("target", {}).get("path", "not known"),
            "features": f"{len(self.taps)} layers {self.taps} × {self.width}, {self.dtype}",
            "conversations": f"{counts['count']:,}, {counts['tokens']:,} tokens, {int(self.loss_mask.sum()):,} learned",
            "shards": f"{len(self.plan) - len(self.absent)} of {len(self.plan)} complete",
            "size when complete": f"{self.total_bytes / 1e6:,.1f} MB, {self.bytes_per_token:,.0f} bytes a token",
        }
        return table(rows.items())

    def _header(self, shard: int) -> bytes:
        """Return the safetensors header that a shard's file begins with; it follows from the plan of batches alone."""
        # the fingerprint is in it so that a shard of another store is refused
        metadata = {"store": self._fingerprint, "shard": str(shard)}
        # of each set of taps that are kept at the same slots
        rows = [self.places[part.slots].totals[shard] for part in self.parts]
        return shard_header(self.parts, rows, self.dtype, width=self.width, metadata=metadata)

    @cached_property
    def _fingerprint(self) -> str:
        """A checksum of all that decides the shards of this store: a shard of another store is refused by it."""
        content = [self.index[key] for key in ("identity", "examples", "shard_tokens")]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def _check_file(self, name: str, checksum: str) -> Path:
        """Return the path of a file of this store, by its name; raise Damaged if its SHA-256 is not `checksum`."""
        path = self.folder / name
        if not path.is_file() or sha256(path) != checksum:
            raise Damaged(
                f"{path} is missing or damaged: `eagle extract RECIPE --repair` makes it anew and keeps the shards"
            )
        return path

    def _load_examples(self) -> None:
        """Set the attributes for the examples and the plan of the shards (files), from `examples.safetensors`.

        Tokens and loss masks stay on the disk: safetensors maps tensors into memory.
        """
        path = self._check_file("examples.safetensors", self.index["examples"]["sha256"])
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dict
        # of all examples, one after the other
        self.tokens = tensors["tokens"]
        self.loss_mask = tensors["loss_mask"]
        # of each example: its number of tokens, and where they end among all tokens
        self.lengths = tensors["lengths"]
        self.ends = self.lengths.cumsum(0)
        # a method: the conversation with images of an example, by its index in the data
        self.shown = partial(unpack_shown, tensors)
        self.plan = StoredPlan(tensors["order"], tensors["batch_sizes"], tensors["shard_batches"])
        self.shards = self.plan.shards  # of each example
        # one zero for all examples, which takes no memory; older stores share nothing
        nothing = torch.zeros(1, dtype=torch.int32).expand(len(self.lengths))
        # of each example: how many of its first rows the example before it stores
        self.shared = tensors.get("shared", nothing)
        # by the slots that are kept ("all", "read", "taught"): where in its shard the rows of each example are
        self.places: dict[str, RowPlaces] = {}
        for part in self.parts:
            # of each example: how many rows it has
            counts = self.lengths if part.slots == "all" else tensors[part.slots]
            # only "read" parts share rows of common prefixes
            shared = self.shared if part.slots == "read" else nothing
            self.places[part.slots] = RowPlaces(self.plan, counts, shared)
        # the plan, counted in tokens, must give the tokens of every shard that the index has
        if self.plan.place_rows(self.lengths)[1] != self.index["shard_tokens"]:
            raise Damaged(
                f"{self.folder / 'index.json'} is not of these examples: --repair makes it anew"
            )


def _suffices(name: str, stored: Any, needed: Any) -> bool:
    """Return whether a run can do with a difference: a store has more taps (layers), or has them at more tokens.

    The difference is between the identity of a store and that which a run needs.

    Args:
        name: The dotted name of the difference.
        stored: The store's value, None if it has no such key.
        needed: The run's value, None if it has no such key.
    """
    if name == "inputs":
        # a store without this key has every tap at every slot, and a run without it needs every tap at every slot
        return stored is None or (needed is not None and set(needed) <= set(stored))
    return name == "taps" and set(needed) <= set(stored)
