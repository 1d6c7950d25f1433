"""Store tokens and loss masks of conversations on disk: written once, memory-mapped by every reader.

A cache is a folder. It has shards of examples with a note each, which tells a resumed run that the shard is complete,
an index of all examples, and `manifest.json`, which is written last.
"""

# C conversations, E examples, N tokens

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from data_prep.conversations import Tally
from eagle.core.examples import Example
from eagle.data.shards import pack_shown, unpack_shown
from eagle.disk import open_tensors, sha256, write_tensors, write_whole

MANIFEST = "manifest.json"
INDEX = "index.safetensors"
REPEATED = "asks the same as an earlier conversation"
# Shards that stay mapped; a training step reads from any of them.
OPEN = 16
Note = dict[str, Any]


def shard_path(folder: Path, number: int) -> Path:
    """Return the file of a shard; its note is beside it."""
    return folder / f"shard-{number:05d}.safetensors"


def write_shard(
    path: Path, read: Sequence[Sequence[Example]], prompts: Sequence[int], tally: Tally
) -> Note:
    """Write the examples of each conversation and its prompt's key as a shard; return its note, which is written last.

    Conversations without examples are left out.
    """
    kept = [(key, group) for key, group in zip(prompts, read, strict=True) if group]
    examples = list(chain.from_iterable(group for _, group in kept))
    tokens = torch.zeros(0).int()
    loss_mask = torch.zeros(0).bool()
    if examples:
        tokens = torch.cat([example.tokens.int() for example in examples])
        loss_mask = torch.cat([example.loss_mask for example in examples])
    tensors = {
        "tokens": tokens,
        "loss_mask": loss_mask,
        "lengths": torch.tensor([len(example.tokens) for example in examples], dtype=torch.int32),
        "shared": torch.tensor([example.shared for example in examples], dtype=torch.int32),
        # The number of examples of each conversation.
        "conversations": torch.tensor([len(group) for _, group in kept], dtype=torch.int32),
        "prompts": torch.tensor([key for key, _ in kept], dtype=torch.long),
        **pack_shown(example.shown for example in examples),
    }
    write_tensors(path, tensors)
    note = {
        "read": len(read),
        "examples": len(examples),
        "tokens": len(tokens),
        "supervised": int(loss_mask.sum()),
        "bytes": path.stat().st_size,
        "sha256": sha256(path),
        "kept": tally.kept,
        "dropped": tally.dropped,
        "noted": tally.noted,
    }
    write_whole(path.with_suffix(".json"), [json.dumps(note, sort_keys=True).encode()])
    return note


def read_note(path: Path) -> Note | None:
    """Return the note of a complete shard, None if it is absent or damaged."""
    try:
        note: Note = json.loads(path.with_suffix(".json").read_text())
        return note if note["sha256"] == sha256(path) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_manifest(
    folder: Path, identity: dict[str, Any], notes: Sequence[Note], tally: Tally
) -> None:
    """Write the index of all examples and the manifest, with which a cache is complete."""
    # Empty tensors, so that a cache without shards has an index too.
    lengths = [torch.zeros(0, dtype=torch.int32)]
    conversations = [torch.zeros(0, dtype=torch.int32)]
    prompts = [torch.zeros(0, dtype=torch.long)]
    for number in range(len(notes)):
        with open_tensors(shard_path(folder, number)) as file:
            lengths.append(file.get_tensor("lengths").clone())
            conversations.append(file.get_tensor("conversations").clone())
            prompts.append(file.get_tensor("prompts").clone())
    keys = torch.cat(prompts)
    is_repeated = find_repeated(keys)
    index = {
        "lengths": torch.cat(lengths),
        "prompts": keys,
        "repeated": is_repeated.repeat_interleave(torch.cat(conversations).long()),
    }
    write_tensors(folder / INDEX, index)
    names = ("examples", "tokens", "supervised", "bytes", "sha256")
    manifest = {
        "identity": identity,
        "conversations": vars(tally),
        "repeated": int(is_repeated.sum()),
        "shards": [{name: note[name] for name in names} for note in notes],
    }
    write_whole(folder / MANIFEST, [json.dumps(manifest, indent=1, sort_keys=True).encode()])


def find_repeated(keys: Tensor) -> Tensor:
    """Return whether each conversation's key is that of an earlier one, [C] bool."""
    # A stable sort keeps the first of equal keys first.
    order = keys.argsort(stable=True)
    is_repeated = torch.zeros(len(keys), dtype=torch.bool)
    is_repeated[order[1:]] = keys[order[1:]] == keys[order[:-1]]
    return is_repeated


class TokenCache(Sequence[Example]):
    """The examples of conversations, or with `distinct` those that ask what no earlier one asks.

    A shard is checked by its checksum when it is first read.
    """

    def __init__(self, folder: Path, *, distinct: bool = False) -> None:
        self.folder = folder
        try:
            manifest = json.loads((folder / MANIFEST).read_text())
            self.shards: list[Note] = manifest["shards"]
            counts = manifest["conversations"]
            repeated = manifest["repeated"]
            for name in ("dropped", "noted"):
                counts[name] = Counter(counts[name])
            self.tally = Tally(**counts)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{folder / MANIFEST} is damaged ({error!r}): remove {folder}; it is made anew"
            ) from None
        # The index of each shard's first example.
        self.firsts = list(accumulate((shard["examples"] for shard in self.shards), initial=0))
        with open_tensors(folder / INDEX) as file:
            self.lengths: np.ndarray = file.get_tensor("lengths").numpy()
            # Keys of all conversations.
            self.prompts: np.ndarray = file.get_tensor("prompts").numpy()
            is_repeated = file.get_tensor("repeated").numpy()
        # The indices of the examples that are served, None for all.
        self.places: np.ndarray | None = None
        if repeated and distinct:
            self.places = np.flatnonzero(~is_repeated)
            self.lengths = self.lengths[self.places]
            self.tally.kept -= repeated
            self.tally.dropped[REPEATED] = repeated
        elif repeated:
            self.tally.noted[REPEATED] = repeated
        self._shard = lru_cache(OPEN)(self._open)

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> Example: ...

    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...

    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        # A range also counts from the end, and raises an IndexError.
        index = range(len(self))[index]
        if self.places is not None:
            index = int(self.places[index])
        shard = bisect_right(self.firsts, index) - 1
        tokens, loss_mask, ends, shared, shown = self._shard(shard)
        i = index - self.firsts[shard]
        span = slice(ends[i], ends[i + 1])
        return Example(
            tokens[span].long(), loss_mask[span], shared=shared[i], shown=unpack_shown(shown, i)
        )

    @property
    def tokens(self) -> int:
        """Return the tokens of all examples, repeated ones among them."""
        return sum(shard["tokens"] for shard in self.shards)

    @property
    def supervised(self) -> int:
        """Return the supervised tokens of all examples, repeated ones among them."""
        return sum(shard["supervised"] for shard in self.shards)

    def texts(self) -> Iterator[tuple[Tensor, list[int]]]:
        """Yield the tokens of each shard, and where its examples end, repeated ones among them."""
        for shard in range(len(self.shards)):
            tokens, _, ends, *_ = self._open(shard)
            yield tokens, ends

    def _open(self, shard: int) -> tuple[Tensor, Tensor, list[int], list[int], dict[str, Tensor]]:
        """Return a shard's tokens and loss mask, and of its examples the ends, shared tokens and texts of images."""
        path = shard_path(self.folder, shard)
        if not path.is_file() or sha256(path) != self.shards[shard]["sha256"]:
            raise ValueError(
                f"{path} is missing or damaged: remove {self.folder / MANIFEST}; it alone is made anew"
            )
        with open_tensors(path) as file:
            tokens = file.get_tensor("tokens")
            loss_mask = file.get_tensor("loss_mask")
            ends = list(accumulate(file.get_tensor("lengths").tolist(), initial=0))
            shared = file.get_tensor("shared").tolist()
            # Only shards with images have these tensors.
            shown = {
                name: file.get_tensor(name)
                for name in ("shown", "shown_ends")
                if name in file.keys()  # noqa: SIM118
            }
        return tokens, loss_mask, ends, shared, shown
