"""Tokens and loss masks of conversations on disk: written once, memory-mapped by all that learns from them.

A cache is a folder: shards of examples with a note each, by which a killed run knows them to be whole, an index of all
examples, and `manifest.json`, which is written last.
"""

# C conversations, E examples, N tokens

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from data_prep.conversations import Tally
from eagle.core.examples import Example
from eagle.data.shown import pack_shown, unpack_shown
from eagle.disk import open_tensors, sha256, write_tensors, write_whole

MANIFEST, INDEX = "manifest.json", "index.safetensors"
REPEATED = "asks the same as an earlier conversation"
OPEN = 16  # shards that stay mapped; a training step reads anywhere
Note = dict[str, Any]


def shard_path(folder: Path, number: int) -> Path:
    """The file of a shard; its note lies beside it."""
    return folder / f"shard-{number:05d}.safetensors"


def write_shard(path: Path, read: Sequence[Sequence[Example]], prompts: Sequence[int], tally: Tally) -> Note:
    """Write the examples of each conversation and its prompt's key as a shard; return its note, which is written last.

    Conversations without examples are left out.
    """
    prompts = [key for key, some in zip(prompts, read, strict=True) if some]
    examples = [example for some in read for example in some]
    tensors = {
        "tokens": torch.cat([example.tokens.int() for example in examples]) if examples else torch.zeros(0).int(),
        "loss_mask": torch.cat([example.loss_mask for example in examples]) if examples else torch.zeros(0).bool(),
        "lengths": torch.tensor([len(example.tokens) for example in examples], dtype=torch.int32),
        "shared": torch.tensor([example.shared for example in examples], dtype=torch.int32),
        "conversations": torch.tensor([len(some) for some in read if some], dtype=torch.int32),  # examples of each
        "prompts": torch.tensor(prompts, dtype=torch.long),
        **pack_shown(example.shown for example in examples),
    }
    write_tensors(path, tensors)
    note = {
        "read": len(read),
        "examples": len(examples),
        "tokens": len(tensors["tokens"]),
        "supervised": int(tensors["loss_mask"].sum()),
        "bytes": path.stat().st_size,
        "sha256": sha256(path),
        **{name: getattr(tally, name) for name in ("kept", "dropped", "noted")},
    }
    write_whole(path.with_suffix(".json"), [json.dumps(note, sort_keys=True).encode()])
    return note


def read_note(path: Path) -> Note | None:
    """The note of a shard that is whole; None where it is absent or damaged."""
    try:
        note: Note = json.loads(path.with_suffix(".json").read_text())
        return note if note["sha256"] == sha256(path) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_manifest(folder: Path, identity: dict[str, Any], notes: Sequence[Note], tally: Tally) -> None:
    """Write the index of all examples and the manifest, with which a cache is complete."""
    kinds = {"lengths": torch.int32, "conversations": torch.int32, "prompts": torch.long}
    parts = {name: [torch.zeros(0, dtype=dtype)] for name, dtype in kinds.items()}
    for number in range(len(notes)):
        with open_tensors(shard_path(folder, number)) as file:
            for name, part in parts.items():
                part.append(file.get_tensor(name).clone())
    lengths, conversations, prompts = (torch.cat(part) for part in parts.values())
    repeated = find_repeated(prompts)
    index = {"lengths": lengths, "prompts": prompts, "repeated": repeated.repeat_interleave(conversations.long())}
    write_tensors(folder / INDEX, index)
    shards = [{key: note[key] for key in ("examples", "tokens", "supervised", "bytes", "sha256")} for note in notes]
    about = {"identity": identity, "conversations": vars(tally), "repeated": int(repeated.sum()), "shards": shards}
    write_whole(folder / MANIFEST, [json.dumps(about, indent=1, sort_keys=True).encode()])


def find_repeated(keys: Tensor) -> Tensor:
    """[C] bool, whether a conversation's key is that of an earlier one."""
    order = keys.argsort(stable=True)
    same = torch.zeros(len(keys), dtype=torch.bool)
    same[order[1:]] = keys[order[1:]] == keys[order[:-1]]
    return same


class TokenCache(Sequence[Example]):
    """The examples of conversations, or with `distinct` those that ask what no earlier one asks.

    A shard is checked by its checksum when it is first read.
    """

    def __init__(self, folder: Path, *, distinct: bool = False) -> None:
        self.folder = folder
        try:
            manifest = json.loads((folder / MANIFEST).read_text())
            self.shards: list[Note] = manifest["shards"]
            counts, repeated = manifest["conversations"], manifest["repeated"]
            self.tally = Tally(**{**counts, **{name: Counter(counts[name]) for name in ("dropped", "noted")}})
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{folder / MANIFEST} is damaged ({error!r}): remove {folder}; it is made anew") from None
        self.firsts = list(accumulate((shard["examples"] for shard in self.shards), initial=0))
        with open_tensors(folder / INDEX) as file:
            self.lengths: np.ndarray = file.get_tensor("lengths").numpy()
            self.prompts: np.ndarray = file.get_tensor("prompts").numpy()  # keys of all conversations
            self.places = np.flatnonzero(~file.get_tensor("repeated").numpy()) if distinct and repeated else None
        if self.places is not None:
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
            return [self[place] for place in range(*index.indices(len(self)))]
        place = range(len(self))[index]  # which counts from the end, too, and refuses what is beyond
        place = place if self.places is None else int(self.places[place])
        shard = bisect_right(self.firsts, place) - 1
        tokens, loss_mask, ends, shared, shown = self._shard(shard)
        number = place - self.firsts[shard]
        start, end = ends[number], ends[number + 1]
        mask, image_text = loss_mask[start:end], unpack_shown(shown, number)
        return Example(tokens[start:end].long(), mask, shared=shared[number], shown=image_text)

    @property
    def tokens(self) -> int:
        """The tokens of all examples, repeated ones among them."""
        return sum(shard["tokens"] for shard in self.shards)

    @property
    def supervised(self) -> int:
        """The supervised tokens of all examples, repeated ones among them."""
        return sum(shard["supervised"] for shard in self.shards)

    def texts(self) -> Iterator[tuple[Tensor, list[int]]]:
        """The tokens of each shard, and where its examples end, repeated ones among them."""
        for shard in range(len(self.shards)):
            tokens, _, ends, *_ = self._open(shard)
            yield tokens, ends

    def _open(self, shard: int) -> tuple[Tensor, Tensor, list[int], list[int], dict[str, Tensor]]:
        """Tokens and loss mask of a shard, where examples end, what each shares with the one before, images' texts."""
        path = shard_path(self.folder, shard)
        if not path.is_file() or sha256(path) != self.shards[shard]["sha256"]:
            raise ValueError(f"{path} is missing or damaged: remove {self.folder / MANIFEST}; it alone is made anew")
        with open_tensors(path) as file:
            names = ("tokens", "loss_mask", "lengths", "shared")
            tokens, loss_mask, lengths, shared = (file.get_tensor(name) for name in names)
            shown = {name: file.get_tensor(name) for name in ("shown", "shown_ends") if name in file.keys()}  # noqa: SIM118
        return tokens, loss_mask, list(accumulate(lengths.tolist(), initial=0)), shared.tolist(), shown
