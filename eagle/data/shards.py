"""The files of a feature store: which examples a shard holds in which batches, how files are written, and checked."""

# N examples, T tokens of one. A row is one slot's states; a part is a set of taps kept at the same slots.

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle.core.examples import Example, Shown
from eagle.data.identity import assets_folder
from eagle.data.stored_rows import DTYPES, Part
from eagle.disk import part_file, sha256, write_whole

# -- plans ------------------------------------------------------------------------------------------------------------

# of each shard its batches, of each batch the indices of its examples
ShardPlan = Sequence[list[list[int]]]


def make_batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Return the indices of examples in batches, longest first, for forwards of at most `batch_tokens` tokens.

    Padding counts. An example that is longer than that has a batch for itself. `lengths` are the examples' tokens.
    Longest first: examples of a batch have similar lengths, so that padding is little, and too large a batch fails at
    once.
    """
    batches: list[list[int]] = []
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    for i in longest_first:
        # all examples of a batch are padded to its first one, the longest
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= batch_tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def group_sequences(shared: Sequence[int]) -> list[list[int]]:
    """Return the indices of sequences in groups with a common prefix, which one batch must hold together.

    The target reads a common prefix only once.

    Args:
        shared: How many of its first tokens each sequence shares with the one before it; 0 begins a new group.
    """
    groups: list[list[int]] = []
    for i, shared_count in enumerate(shared):
        if shared_count:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def plan_shards(
    lengths: Sequence[int],
    batch_tokens: int,
    shard_tokens: int,
    shared: Sequence[int] | None = None,
) -> list[list[list[int]]]:
    """Return the batches of each shard, as indices of sequences. They depend on the lengths alone, not on the machine.

    A shard is one file of a feature store, and a batch is what one forward of the target reads.

    Args:
        lengths: The tokens of each sequence.
        batch_tokens: The most tokens of a batch, padding included.
        shard_tokens: About how many tokens a shard holds.
        shared: How many of its first tokens each sequence shares with the one before it, which is then in the same
            batch. None: no tokens are shared.
    """
    shared = shared or [0] * len(lengths)
    groups = group_sequences(shared)
    # of each group, the tokens that are read: shared ones only once; a batch is made of whole groups
    new_tokens = [0] * len(groups)
    for i, group in enumerate(groups):
        new_tokens[i] = sum(lengths[index] - shared[index] for index in group)
    shards: list[list[list[int]]] = []
    # the tokens in the last shard; it counts as full at first, so that the first batch begins a shard
    filled = shard_tokens
    for group_indices in make_batches(new_tokens, batch_tokens):
        batch = list(chain.from_iterable(groups[i] for i in group_indices))
        if filled >= shard_tokens:
            shards.append([])
            filled = 0
        shards[-1].append(batch)
        filled += sum(lengths[i] for i in batch)
    return shards


class StoredPlan(Sequence[list[list[int]]]):
    """A `ShardPlan` in three tensors of a store, which take a few bytes an example; an index makes a shard's lists."""

    def __init__(self, order: Tensor, batch_sizes: Tensor, shard_batches: Tensor) -> None:
        """Take the tensors of a stored plan: which examples are in which batch of which shard (file).

        Args:
            order: The indices of the examples, shard by shard and batch by batch.
            batch_sizes: How many examples each batch has.
            shard_batches: How many batches each shard has.
        """
        self.order = order
        self.batch_sizes = batch_sizes
        # [shards] each: where each shard ends among all batches, and in `order`
        self.batch_ends = shard_batches.cumsum(0)
        self.ends = batch_sizes.cumsum(0)[self.batch_ends - 1]

    @classmethod
    def tensors_of(cls, plan: ShardPlan) -> dict[str, Tensor]:
        """Return the three tensors that store a plan of shards (files) and batches, by this class's argument names."""
        batches = list(chain.from_iterable(plan))
        return {
            "order": torch.tensor(list(chain.from_iterable(batches))),
            "batch_sizes": torch.tensor([len(batch) for batch in batches]),
            "shard_batches": torch.tensor([len(shard) for shard in plan]),
        }

    def __len__(self) -> int:
        """Return the number of shards, the files of a feature store."""
        return len(self.ends)

    def __getitem__(self, shard: int) -> list[list[int]]:  # type: ignore[override]
        """Return the batches of a shard (file) as lists of indices of examples; -1 is the last shard."""
        if not -len(self) <= shard < len(self):
            raise IndexError(shard)
        shard %= len(self)
        # of this shard: its first batch among all batches, and its first example in `order`
        first_batch = 0
        first = 0
        if shard:
            first_batch = int(self.batch_ends[shard - 1])
            first = int(self.ends[shard - 1])
        # batch sizes and examples of this shard
        sizes = self.batch_sizes[first_batch : self.batch_ends[shard]]
        indices = self.order[first : self.ends[shard]]
        return [batch.tolist() for batch in indices.split(sizes.tolist())]

    @property
    def shards(self) -> Tensor:
        """[N], the index of the shard (file) that each of N examples is in, in the data's order."""
        sizes = _sizes_of(self.ends)
        # examples lie in `order` shard by shard: write each shard's index to the examples that it holds
        shards = torch.empty(len(self.order), dtype=torch.int32)
        shards[self.order] = torch.arange(len(self), dtype=torch.int32).repeat_interleave(sizes)
        return shards

    def place_rows(self, counts: Tensor) -> tuple[Tensor, list[int]]:
        """Return [N], the first row of each of N examples within its shard (file), and the rows of every shard.

        A row is the states at one slot (token) of an example.

        Args:
            counts: [N], how many rows each example has. In a shard they lie one after the other, in the plan's order.
        """
        # all in the plan's order: where each example's rows end among those of all shards
        ordered_counts = counts[self.order]
        ends = ordered_counts.long().cumsum(0)
        # [shards]: where each shard's rows end among those of all shards
        shard_ends = ends[self.ends - 1]
        shard_rows = _sizes_of(shard_ends)
        # [N]: where the rows of each example's shard start
        shard_starts = (shard_ends - shard_rows)[self.shards[self.order]]
        # back to the data's order
        starts = torch.empty(len(self.order), dtype=torch.int32)
        starts[self.order] = (ends - ordered_counts - shard_starts).int()
        return starts, shard_rows.tolist()


def _sizes_of(ends: Tensor) -> Tensor:
    """Return the sizes of consecutive pieces, given where each of them ends: [2, 5, 9] gives [2, 3, 4]."""
    return ends.diff(prepend=ends.new_zeros(1))


class RowPlaces:
    """Where in its shard the rows of each sequence are. Rows of a shared prefix are those of an earlier sequence.

    A row is the states at one slot (token) of a sequence.
    """

    def __init__(self, plan: StoredPlan, counts: Tensor, shared: Tensor) -> None:
        """Find where the rows of each sequence begin in their shard (file); a row is the states at one token.

        Args:
            plan: The plan of the store's shards and batches.
            counts: [N], how many rows each sequence has.
            shared: [N], how many of them, from its beginning, are those of the sequence before it.
        """
        self.counts = counts
        self.shared = shared
        # [N], the first row in its shard that each sequence stores itself; and the number of rows of every shard
        self.starts, self.totals = plan.place_rows(counts - shared)

    def __getitem__(self, index: int) -> list[tuple[int, int]]:
        """Return the pieces of a sequence in order, each as its first row in the shard and the row after its last one.

        A row is the states at one token. A prefix that an earlier sequence shares is stored there, and is a piece of
        its own.
        """
        pieces: list[tuple[int, int]] = []
        # rows from `end` on are found already
        end = int(self.counts[index])
        # from the sequence itself back to one that shares nothing with the sequence before it
        while True:
            shared = int(self.shared[index])
            # This sequence stores its rows from `shared` on, and of those that are looked for none if it shares all of
            # them. If nothing is shared, a piece is made even if it has no rows.
            if shared < end or not shared:
                # what to add to an index in the sequence for an index in the shard
                offset = int(self.starts[index]) - shared
                pieces.append((offset + shared, offset + end))
                end = shared
            # found from the last rows to the first
            if not shared:
                return pieces[::-1]
            index -= 1


# -- writing ----------------------------------------------------------------------------------------------------------

CODES = {torch.int64: "I64", torch.int32: "I32"}  # the names of dtypes in a safetensors header
# bytes: packed conversations are stored as int64, so that the tensors after them are aligned
SHOWN_ENTRY = 8


def shard_header(
    parts: Sequence[Part], rows: Sequence[int], dtype: str, width: int, metadata: dict[str, str]
) -> bytes:
    """Return the safetensors header of a shard. It follows from the shapes, so it can be written before the tensors.

    Args:
        parts: The parts of the store: sets of taps (layer inputs), each kept at the same slots.
        rows: How many rows (states at one token) each part has in this shard.
        dtype: The storage dtype, one of `DTYPES`.
        width: The width of the target, the length of a state vector.
        metadata: Further entries of the header, strings by name.
    """
    # by name: the header's name of the dtype, the shape, and the bytes of an entry
    tensors = {}
    for part, count in zip(parts, rows, strict=True):
        for field in DTYPES[dtype]:
            shape = field.shape(count, len(part.taps), width)
            tensors[part.prefix + field.name] = (field.code, shape, field.dtype.itemsize)
    return tensor_header(tensors, metadata)


def tensor_header(
    tensors: Mapping[str, tuple[str, list[int], int]], metadata: dict[str, str]
) -> bytes:
    """Return the safetensors header of tensors that follow it in this order.

    Args:
        tensors: By name of the tensor: the header's name of its dtype, its shape, and the bytes of an entry.
        metadata: Further entries of the header, strings by name.
    """
    entries: dict[str, Any] = {"__metadata__": metadata}
    start = 0  # the tensor's first byte after the header
    for name, (code, shape, entry_bytes) in tensors.items():
        end = start + math.prod(shape) * entry_bytes
        entries[name] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries).encode()
    # the format: the length in 8 bytes, then JSON, padded with spaces so that the tensors begin at a multiple of 8
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_examples(
    path: Path, examples: Sequence[Example], count: int, tensors: dict[str, Tensor]
) -> None:
    """Write the safetensors file of a store's examples: some tensors, then the tokens and loss masks of all examples.

    Args:
        path: The file.
        examples: The examples, which may be on disk: only one is in memory at a time.
        count: The number of tokens of all examples.
        tensors: The tensors that come first, by name.
    """
    # as `tensor_header` takes them
    shapes = {
        name: (CODES[tensor.dtype], list(tensor.shape), tensor.itemsize)
        for name, tensor in tensors.items()
    }
    # every tensor begins at a multiple of its entry's bytes: tokens (four bytes) after the others, masks (one) last
    shapes |= {"tokens": ("I32", [count], 4), "loss_mask": ("BOOL", [count], 1)}
    # generators, which read one example after the other while the file is written
    tokens = (example.tokens.int() for example in examples)
    masks = (example.loss_mask for example in examples)
    content = map(_bytes_of, chain(tensors.values(), tokens, masks))
    write_whole(path, chain([tensor_header(shapes, {})], content))


def pack_shown(conversations: Iterable[Shown | None]) -> dict[str, Tensor]:
    """Return the conversations with images as JSON, packed in one int64 tensor, and the byte after the end of each.

    Args:
        conversations: For each example its conversation as the chat template prints it, with the files of its images;
            None for an example without images.

    Returns:
        The tensors "shown" and "shown_ends" of a store's file; {} if no example has images.
    """
    # of each example: its conversation in JSON, or nothing
    lines = [
        json.dumps([shown.text, shown.images]).encode() if shown else b"" for shown in conversations
    ]
    if not any(lines):
        return {}
    packed = b"".join(lines)
    # padded with spaces to whole int64 entries (see SHOWN_ENTRY); the ends count bytes, so they leave the padding out
    packed += b" " * (-len(packed) % SHOWN_ENTRY)
    ends = torch.tensor(list(accumulate(map(len, lines))), dtype=torch.long)
    return {"shown": torch.frombuffer(bytearray(packed), dtype=torch.long), "shown_ends": ends}


def unpack_shown(tensors: Mapping[str, Tensor], number: int) -> Shown | None:
    """Return the conversation with images of an example from what `pack_shown` packed; None if it has no images.

    Args:
        tensors: The tensors of a store's file, by name.
        number: The index of the example in the data.
    """
    # no example of the store has images
    if "shown" not in tensors:
        return None
    ends = tensors["shown_ends"]
    # its first byte and the byte after its last
    start = int(ends[number - 1]) if number else 0
    end = int(ends[number])
    # an example without images takes no bytes
    if start == end:
        return None
    text, images = json.loads(tensors["shown"].view(torch.uint8)[start:end].numpy().tobytes())
    return Shown(text, tuple((path, checksum) for path, checksum in images))


class ShardWriter:
    """Writes one shard to disk as a stream; it is complete once its checksum file exists.

    The header and the shard's first tensor, the largest by far, are written at once. The others follow at the end.
    """

    def __init__(self, path: Path, header: bytes) -> None:
        """Begin the file of a shard (a part of a feature store) under a temporary name, with its safetensors header."""
        self.path = path
        self.part = part_file(path)  # the temporary name
        self.digest = hashlib.sha256()  # of all that is written
        # Of every tensor but the first, the chunks that were appended. They wait in memory until the shard is closed,
        # as tensors lie one after the other in the file.
        self.pending: list[list[Tensor]] = []
        self.file = self.part.open("xb", buffering=0)
        self._write(header)

    def append(self, packed: Sequence[Sequence[Tensor]]) -> None:
        """Append the packed rows (states by token) of the next examples; states that are not finite are refused.

        Args:
            packed: For each part of the store its tensors, one for each field of the storage dtype, such as numbers and
                scales. Those of the next call follow them, so examples come in the order of the plan.
        """
        # a state that is not finite shows in the last tensor of its part, which holds the scales if the dtype has any
        if not all(tensors[-1].sum(dtype=torch.float32).isfinite() for tensors in packed):
            raise ValueError(
                "the target's hidden states are not finite: load it in another target.dtype"
            )
        first, *others = chain.from_iterable(packed)
        self._write(_bytes_of(first))
        # at the first call the number of tensors becomes known
        if not self.pending:
            self.pending = [[] for _ in others]
        for chunks, tensor in zip(self.pending, others, strict=True):
            chunks.append(tensor)

    def close(self) -> int:
        """Write the tensors that wait in memory, rename the shard into place, and write its checksum file.

        Returns:
            0, the tokens that it adds: `extract` runs it in one queue with the jobs that append batches, each of which
            returns its number of tokens for the progress bar.
        """
        for tensor in chain.from_iterable(self.pending):
            self._write(_bytes_of(tensor))
        self.pending.clear()
        # the bytes must be on the disk before the name is
        os.fsync(self.file.fileno())
        self.file.close()
        os.replace(self.part, self.path)
        # last, as a shard counts as complete once it has a checksum file
        line = f"{self.digest.hexdigest()}  {self.path.name}\n"
        write_whole(checksum_file(self.path), [line.encode()])
        return 0

    def discard(self) -> None:
        """Remove the temporary file of a shard that was not completed by `close`; a completed one stays."""
        self.file.close()
        self.part.unlink(missing_ok=True)

    def _write(self, data: Any) -> None:
        """Write a buffer to the file, and add it to the checksum, so that the file need not be read again for it."""
        view = memoryview(data).cast("B")
        while len(view):
            # an unbuffered file may write less than asked
            written = self.file.write(view)
            self.digest.update(view[:written])
            view = view[written:]


def _bytes_of(tensor: Tensor) -> Any:
    """Return the bytes of a tensor on the host, as a buffer that shares its memory.

    It can be written to a file without a copy.
    """
    return tensor.contiguous().view(torch.uint8).numpy().data


# -- checking ---------------------------------------------------------------------------------------------------------

CHANGED = "its bytes are not those that were written"


def shard_fault(path: Path, header: bytes, size: int, *, read: bool) -> str | None:
    """Return the fault of a shard's file (a part of a feature store) as a phrase, None if it has none.

    Cheap checks come first.

    Args:
        path: The shard.
        header: The header that it must begin with, by which shards of other stores are told apart.
        size: The size that it must have, in bytes.
        read: Whether to read the whole file and compare its checksum.
    """
    if not path.is_file():
        return "missing"
    if path.stat().st_size != size:
        return f"truncated: {path.stat().st_size} of {size} bytes"
    if not checksum_file(path).is_file():
        return "without checksum"
    # the SHA-256 in 64 hex digits, and the name of the file
    checksum = checksum_file(path).read_bytes().split()
    if len(checksum) != 2 or len(checksum[0]) != 64 or checksum[1] != path.name.encode():
        return f"{checksum_file(path).name} is damaged"
    with path.open("rb") as file:
        if file.read(len(header)) != header:
            return "damaged at its start, or of another store"
    if read and sha256(path).encode() != checksum[0]:
        return CHANGED
    return None


def changed_bytes(path: Path) -> str | None:
    """Return a fault if the bytes of a shard are not those that were written, or None.

    A shard whose checksum was right is not read again on this machine until its file changes: a note in the cache of
    Hugging Face's assets keeps its checksum, size, time of change and inode.
    """
    state = path.stat()
    checksum = checksum_file(path).read_text().split()[0]
    content = f"{checksum} {state.st_size} {state.st_mtime_ns} {state.st_ino}"
    # a note is named by its shard's path
    name = hashlib.sha256(str(path.resolve()).encode(errors="surrogateescape")).hexdigest()[:32]
    # if the cache cannot be read or written, the shard is read in every run
    with suppress(OSError):
        note = assets_folder("shards", "checked") / name
        if note.is_file() and note.read_text() == content:
            return None
    if sha256(path) != checksum:
        return CHANGED
    with suppress(OSError):
        write_whole(assets_folder("shards", "checked") / name, [content.encode()])
    return None


def checksum_file(path: Path) -> Path:
    """Return the checksum file of a shard, in the format of `sha256sum --check`.

    A shard without it counts as incomplete.
    """
    return path.with_name(f"{path.name}.sha256")
