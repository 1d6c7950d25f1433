"""The examples of a recipe: its conversations are tokenised once, and read from a cache ever after."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from functools import lru_cache
from itertools import chain, islice, takewhile
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from data_prep.chats.images import MARK
from data_prep.chats.records import Conversation
from data_prep.conversations import Tally, damage_error, read_conversations
from data_prep.token_cache import (
    MANIFEST,
    REPEATED,
    Note,
    TokenCache,
    read_note,
    shard_path,
    write_manifest,
    write_shard,
)
from data_prep.tokens import check_supervision, examples_of, load_tokenizer, reading_options, tokenize_each
from eagle.data.identity import MASK_RULES, assets_folder, data_identity, stop_ids
from eagle.disk import lock_folder
from eagle.log import progress
from eagle.recipe import Recipe

CONVERSATIONS = 1024  # of a shard
WORD = re.compile(r"\w+")
VERSION = 3  # of the cache's format, and of the rules by which records become conversations
Job = tuple[int, list[Conversation]]  # a shard's number and conversations


def read_examples(recipe: Recipe, *, strict: bool = False) -> TokenCache:
    """The recipe's examples, after a table of what was kept and dropped."""
    cache = open_cache(recipe, strict=strict)
    share = cache.supervised / cache.tokens
    print(f"{cache.tally.table()}\n{len(cache):,} examples, {cache.lengths.sum():,} tokens, {share:.0%} supervised")
    return cache


def open_cache(recipe: Recipe, *, strict: bool = False) -> TokenCache:
    """The recipe's examples from their cache, which is filled first where it is absent or incomplete."""
    identity = cache_identity(recipe)
    folder = cache_folder(recipe, identity)
    if not (folder / MANIFEST).is_file():
        with lock_folder(folder, wait=True):
            if not (folder / MANIFEST).is_file():  # by a run that this one waited for
                fill(folder, recipe, identity, strict=strict)
    cache = TokenCache(folder, distinct=recipe.data.drop_duplicates)
    if cache.tally.broken and not recipe.data.allow_broken:
        raise damage_error(cache.tally.broken[0])
    if strict and cache.tally.dropped.keys() - {REPEATED}:
        name_first_drop(recipe)
    check_supervision(cache.supervised, cache.tokens, recipe.data.train, cache.tally)
    return cache


def name_first_drop(recipe: Recipe) -> None:
    """Tokenise up to the first record that would be dropped, which is an error that names it."""
    for _ in tokenize_each(recipe, load_tokenizer(recipe), Tally(), strict=True):
        pass


def cache_identity(recipe: Recipe) -> dict[str, Any]:
    """All that decides the tokens and masks of a recipe's data; which of them are dropped is decided on reading."""
    whole = recipe.model_copy(update={"data": recipe.data.model_copy(update={"drop_duplicates": False})})
    where = {"images": str(Path(recipe.data.images).absolute())} if recipe.data.images is not None else {}
    return {"cache": VERSION, "masks": MASK_RULES, "stop_ids": stop_ids(recipe.target), **data_identity(whole), **where}


def cache_folder(recipe: Recipe, identity: dict[str, Any]) -> Path:
    """The folder of a cache: within `data.cache`, or where Hugging Face's libraries keep what can be made anew."""
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    return Path(recipe.data.cache) / key if recipe.data.cache else assets_folder("tokens", key)


def fill(folder: Path, recipe: Recipe, identity: dict[str, Any], *, strict: bool) -> None:
    """Tokenise all conversations in shards; those that an earlier run left whole are kept."""
    for part in folder.glob("*.part"):
        part.unlink()
    read = Tally()
    conversations = read_conversations(recipe.data.train, read, strict=strict, **reading_options(recipe))
    jobs = enumerate(iter(lambda: list(islice(conversations, CONVERSATIONS)), []))
    workers = recipe.data.num_proc or count_processors()
    notes: list[Note] = []
    shards = write_shards(folder, recipe, jobs, workers)
    for note in progress(shards, "tokenise", None, unit="conversations", size=lambda note: note["read"]):
        notes.append(note)
        if strict and note["dropped"]:
            name_first_drop(recipe)
    tally = Tally(0, read.dropped.copy(), read.noted.copy(), read.places, read.broken)
    for note in notes:
        tally.kept += note["kept"]
        tally.dropped.update(note["dropped"])
        tally.noted.update(note["noted"])
    write_manifest(folder, identity, notes, tally)


def count_processors() -> int:
    """Those that this process may use, where the system tells, else all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def write_shards(folder: Path, recipe: Recipe, jobs: Iterable[Job], workers: int) -> Iterator[Note]:
    """The notes of all shards in their order; the first is written here, further ones by so many processes."""
    jobs, text, tokenizer = iter(jobs), recipe.model_dump_json(), load_tokenizer(recipe)
    for number, conversations in islice(jobs, 1 if workers > 1 else None):
        path = shard_path(folder, number)
        yield read_note(path) or tokenise_shard(path, conversations, recipe, tokenizer)
    if (second := next(jobs, None)) is None:
        return
    pending: deque[Note | Future[Note]] = deque()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=begin_worker) as pool:
        for number, conversations in chain([second], jobs):
            path = shard_path(folder, number)
            pending.append(read_note(path) or pool.submit(tokenise_in_worker, path, conversations, text))
            while len(pending) > 2 * workers:
                yield _result(pending.popleft())
        while pending:
            yield _result(pending.popleft())


def _result(note: Note | Future[Note]) -> Note:
    return note.result() if isinstance(note, Future) else note


def begin_worker() -> None:
    """Prepare a process that tokenises: one thread, and an end with the process that began it."""
    torch.set_num_threads(1)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # a pool's processes would wait for ever for work from one that was killed


def tokenise_shard(path: Path, conversations: list[Conversation], recipe: Recipe, tokenizer: Any) -> Note:
    """Write one shard of a recipe's conversations."""
    tally = Tally()
    read = [examples_of(conversation, tokenizer, recipe.data, tally) for conversation in conversations]
    tally.kept = sum(map(bool, read))
    return write_shard(path, read, list(map(prompt_key, conversations)), tally)


def prompt_key(conversation: Conversation) -> int:
    """A number for what stands before the first answer, its images too, whatever case, punctuation and spaces."""
    asked = takewhile(lambda turn: turn["role"] != "assistant", conversation.messages)
    asked_text = "\n".join(str(turn.get("content") or "") for turn in asked)
    shown = [hashlib.sha256(image if isinstance(image, bytes) else image.encode()) for image in conversation.images]
    return text_key("\n".join([asked_text, *(digest.hexdigest() for digest in shown[: asked_text.count(MARK)])]))


def text_key(text: str) -> int:
    """A number for a text, whatever its case, punctuation and spaces; one without words counts as it is."""
    words = " ".join(WORD.findall(text.casefold())) or text
    digest = hashlib.blake2b(words.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def tokenise_in_worker(path: Path, conversations: list[Conversation], recipe_text: str) -> Note:
    """Write one shard, with a tokenizer that the process loads once."""
    return tokenise_shard(path, conversations, *_load_once(recipe_text))


@lru_cache(1)
def _load_once(recipe_text: str) -> tuple[Recipe, Any]:
    recipe = Recipe.model_validate_json(recipe_text)
    return recipe, load_tokenizer(recipe)
