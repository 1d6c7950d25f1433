"""Read the examples of a recipe, whose conversations are tokenised once and then read from a cache.

A cache is a folder. It has shards of examples with a note each, which tells a resumed run that the shard is complete,
an index of all examples, and `manifest.json`, which is written last. Every reader maps its files into memory.
"""

# C conversations, E examples, N tokens

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from functools import lru_cache
from itertools import accumulate, chain, islice, takewhile
from pathlib import Path
from threading import Thread
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from data_prep.chats.images import MARK
from data_prep.chats.records import Conversation
from data_prep.conversations import Tally, damage_error, read_conversations
from data_prep.tokens import (
    check_supervision,
    examples_of,
    load_tokenizer,
    reading_options,
    tokenize_each,
)
from eagle.core.examples import Example
from eagle.data.identity import MASK_RULES, assets_folder, data_identity, stop_ids
from eagle.data.shards import pack_shown, unpack_shown
from eagle.disk import lock_folder, open_tensors, sha256, write_tensors, write_whole
from eagle.log import progress
from eagle.recipe import Recipe

CONVERSATIONS = 1024  # of a shard
WORD = re.compile(r"\w+")
# The version of the cache's format, and of the rules by which records become conversations.
VERSION = 4
# A shard's number and conversations.
Job = tuple[int, list[Conversation]]
MANIFEST = "manifest.json"
INDEX = "index.safetensors"
REPEATED = "asks the same as an earlier conversation"
# Shards that stay mapped; a training step reads from any of them.
OPEN = 16
Note = dict[str, Any]


def read_examples(recipe: Recipe, *, strict: bool = False) -> TokenCache:
    """Return the recipe's examples, after a table of what was kept and dropped."""
    cache = open_cache(recipe, strict=strict)
    share = cache.supervised / cache.tokens
    print(
        f"{cache.tally.table()}\n{len(cache):,} examples, {cache.lengths.sum():,} tokens, {share:.0%} supervised"
    )
    return cache


def open_cache(recipe: Recipe, *, strict: bool = False) -> TokenCache:
    """Return the recipe's examples from their cache, which is filled first if it is absent or incomplete."""
    identity = cache_identity(recipe)
    folder = cache_folder(recipe, identity)
    manifest = folder / MANIFEST
    if not manifest.is_file():
        with lock_folder(folder, wait=True):
            # The run that held the lock may have filled it.
            if not manifest.is_file():
                fill(folder, recipe, identity, strict=strict)
    cache = TokenCache(folder, distinct=recipe.data.drop_duplicates)
    if cache.tally.broken and not recipe.data.allow_broken:
        raise damage_error(cache.tally.broken[0])
    if strict and cache.tally.dropped.keys() - {REPEATED}:
        name_first_drop(recipe)
    check_supervision(cache.supervised, cache.tokens, recipe.data.train, cache.tally)
    return cache


def counted_tokens(recipe: Recipe) -> int | None:
    """Return the tokens of the recipe's data from its cache; None where they have not been tokenised."""
    if not Path(recipe.data.train).exists():
        return None
    try:
        folder = cache_folder(recipe, cache_identity(recipe))
        manifest = folder / MANIFEST
        return TokenCache(folder).tokens if manifest.is_file() else None
    except (OSError, ValueError):
        # a target that is not here has no tokenizer to compare
        return None


def name_first_drop(recipe: Recipe) -> None:
    """Tokenise up to the first record that would be dropped, which is an error that names it."""
    for _ in tokenize_each(recipe, load_tokenizer(recipe), Tally(), strict=True):
        pass


def cache_identity(recipe: Recipe) -> dict[str, Any]:
    """Return everything that decides the tokens and masks of a recipe's data."""
    # Duplicates are stored, and dropped on reading.
    data = recipe.data.model_copy(update={"drop_duplicates": False})
    recipe = recipe.model_copy(update={"data": data})
    made_by = {"cache": VERSION, "masks": MASK_RULES, "stop_ids": stop_ids(recipe.target)}
    identity = {**made_by, **data_identity(recipe)}
    if data.images is not None:
        identity["images"] = str(Path(data.images).absolute())
    return identity


def cache_folder(recipe: Recipe, identity: dict[str, Any]) -> Path:
    """Return the folder of a cache: in `data.cache`, or in the cache of Hugging Face's libraries."""
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    if recipe.data.cache:
        return Path(recipe.data.cache) / key
    return assets_folder("tokens", key)


def fill(folder: Path, recipe: Recipe, identity: dict[str, Any], *, strict: bool) -> None:
    """Tokenise all conversations in shards; complete shards of an earlier run are kept."""
    for unfinished in folder.glob("*.part"):
        unfinished.unlink()
    tally = Tally()
    conversations = read_conversations(
        recipe.data.train, tally, strict=strict, **reading_options(recipe)
    )
    jobs = enumerate(iter(lambda: list(islice(conversations, CONVERSATIONS)), []))
    workers = recipe.data.num_proc or count_processors()
    notes: list[Note] = []
    shards = write_shards(folder, recipe, jobs, workers)
    for note in progress(
        shards, "tokenise", None, unit="conversations", size=lambda note: note["read"]
    ):
        notes.append(note)
        if strict and note["dropped"]:
            name_first_drop(recipe)
    # Reading has counted records, among them those that tokenising dropped.
    tally.kept = sum(note["kept"] for note in notes)
    for note in notes:
        tally.dropped.update(note["dropped"])
        tally.noted.update(note["noted"])
    write_manifest(folder, identity, notes, tally)


def count_processors() -> int:
    """Return the number of processors that this process may use, if the system tells, else of all."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def write_shards(folder: Path, recipe: Recipe, jobs: Iterable[Job], workers: int) -> Iterator[Note]:
    """Yield the notes of all shards in their order; the first is written here, further ones by `workers` processes."""
    jobs = iter(jobs)
    tokenizer = load_tokenizer(recipe)
    # A small dataset has one shard, for which starting processes would take longer.
    for number, conversations in islice(jobs, 1 if workers > 1 else None):
        path = shard_path(folder, number)
        yield read_note(path) or tokenise_shard(path, conversations, recipe, tokenizer)
    second = next(jobs, None)
    if second is None:
        return
    recipe_text = recipe.model_dump_json()
    pending: deque[Note | Future[Note]] = deque()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=begin_worker) as pool:
        for number, conversations in chain([second], jobs):
            path = shard_path(folder, number)
            pending.append(
                read_note(path) or pool.submit(tokenise_in_worker, path, conversations, recipe_text)
            )
            # So many shards are read ahead, which bounds memory.
            while len(pending) > 2 * workers:
                yield _result(pending.popleft())
        while pending:
            yield _result(pending.popleft())


def _result(note: Note | Future[Note]) -> Note:
    if isinstance(note, Future):
        return note.result()
    return note


def begin_worker() -> None:
    """Prepare a process that tokenises: one thread, and an end with the process that began it."""
    torch.set_num_threads(1)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    # A pool's processes would wait for ever for work from a parent that was killed.
    os._exit(1)


def tokenise_shard(
    path: Path, conversations: list[Conversation], recipe: Recipe, tokenizer: Any
) -> Note:
    """Write one shard of a recipe's conversations; return its note."""
    tally = Tally()
    read = [
        examples_of(conversation, tokenizer, recipe.data, tally) for conversation in conversations
    ]
    tally.kept = sum(map(bool, read))
    return write_shard(path, read, list(map(prompt_key, conversations)), tally)


def prompt_key(conversation: Conversation) -> int:
    """Return a hash of what is before the first answer, images too, whatever its case, punctuation and spaces."""
    if conversation.row is not None:
        tokens, mask = conversation.row
        before = takewhile(lambda pair: not pair[1], zip(tokens, mask, strict=True))
        return text_key(" ".join(str(token) for token, _ in before))
    asked = takewhile(lambda turn: turn["role"] != "assistant", conversation.messages)
    text = "\n".join(str(turn.get("content") or "") for turn in asked)
    lines = [text]
    for image in conversation.images[: text.count(MARK)]:
        if isinstance(image, str):
            image = image.encode()
        lines.append(hashlib.sha256(image).hexdigest())
    return text_key("\n".join(lines))


def text_key(text: str) -> int:
    """Return a hash of a text, whatever its case, punctuation and spaces; one without words is hashed as it is."""
    words = " ".join(WORD.findall(text.casefold())) or text
    digest = hashlib.blake2b(words.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def tokenise_in_worker(path: Path, conversations: list[Conversation], recipe_text: str) -> Note:
    """Write one shard with a tokenizer that the process loads once; return its note."""
    return tokenise_shard(path, conversations, *_load_once(recipe_text))


@lru_cache(1)
def _load_once(recipe_text: str) -> tuple[Recipe, Any]:
    recipe = Recipe.model_validate_json(recipe_text)
    return recipe, load_tokenizer(recipe)


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
                f"{folder / MANIFEST} is damaged ({error!r}): remove {folder}; it is created again"
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
                f"{path} is missing or damaged: remove {self.folder / MANIFEST}; only this file is created again"
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
