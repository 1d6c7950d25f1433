"""A token cache holds what tokenising gives, whoever wrote it and however often that was interrupted."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep import read_once
from data_prep.read_once import (
    REPEATED,
    TokenCache,
    cache_folder,
    cache_identity,
    open_cache,
    read_examples,
)
from data_prep.tokens import load_tokenizer, tokenize_data
from eagle.data.identity import data_identity
from eagle.recipe import Recipe
from tests.chats import changed
from tests.data.test_store import read_files
from tests.data_prep.stub_servers import write_records

ROOT = Path(__file__).parents[2]
WORDS = "the a fox dog cat sees eats two red old very quick , . ? é 漢字 <|end|> \u2028 {{x}}"
FILL = """
import sys
from data_prep import read_once
from eagle.recipe import Recipe
read_once.CONVERSATIONS = 9
if __name__ == "__main__":
    read_once.open_cache(Recipe.model_validate_json(open(sys.argv[1]).read()))
"""


def make_record(*turns: str) -> dict[str, Any]:
    """Return a record of a user's and an assistant's turns, one after the other."""
    roles = ("user", "assistant") * len(turns)
    pairs = zip(roles, turns, strict=False)
    return {"messages": [{"role": role, "content": text} for role, text in pairs]}


def write_conversations(path: Path, count: int, seed: int = 0) -> None:
    """Write random conversations in two layouts, some of them broken."""
    chance = random.Random(seed)
    words = WORDS.split(" ")
    records = []
    for number in range(count):
        turns = [
            " ".join(chance.choices(words, k=chance.randint(0, 12)))
            for _ in range(chance.randint(0, 5))
        ]
        record = make_record(*turns)
        # ShareGPT's layout
        if number % 3:
            sharegpt = [
                {"from": turn["role"], "value": turn["content"]} for turn in record["messages"]
            ]
            record = {"conversations": sharegpt}
        records.append(record)
    write_records(path, records)


@pytest.fixture
def own_cache(recipe: Recipe, tmp_path: Path) -> Recipe:
    """The recipe with a cache of its own."""
    return changed(recipe, cache=str(tmp_path / "cache"), num_proc=1)


@pytest.fixture
def data(own_cache: Recipe, tmp_path: Path) -> Recipe:
    """A recipe of 100 conversations."""
    write_conversations(tmp_path / "some.jsonl", 100)
    return changed(
        own_cache,
        train=str(tmp_path / "some.jsonl"),
        max_length=24,
    )


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of 100 conversations has a dozen shards."""
    monkeypatch.setattr(read_once, "CONVERSATIONS", 9)


def folder_of(recipe: Recipe) -> Path:
    """Return the folder of a recipe's cache."""
    return cache_folder(recipe, cache_identity(recipe))


def assert_is_tokenised(cache: TokenCache, recipe: Recipe) -> None:
    """Check that the cache holds what tokenising all conversations here and now gives."""
    examples, tally = tokenize_data(recipe, load_tokenizer(recipe))
    # tokenising one at a time cannot know of repeated questions
    tally.noted[REPEATED] = cache.tally.noted[REPEATED]
    assert len(cache) == len(examples)
    assert cache.tally == tally
    for cached, example in zip(cache, examples, strict=True):
        assert cached.tokens.dtype == torch.long
        assert torch.equal(cached.tokens, example.tokens)
        assert torch.equal(cached.loss_mask, example.loss_mask)
    assert list(cache.lengths) == [len(example.tokens) for example in examples]
    assert cache.supervised == sum(int(example.loss_mask.sum()) for example in examples)


def test_it_holds_what_tokenising_gives(data: Recipe) -> None:
    """Every example is there in order, by its index from either end, with all counts."""
    cache = open_cache(data)
    assert cache.tally.dropped.total() > 5
    assert len(cache) > 30
    assert_is_tokenised(cache, data)
    assert torch.equal(cache[-1].tokens, cache[len(cache) - 1].tokens)
    assert [len(example.tokens) for example in cache[3:9:2]] == list(cache.lengths[3:9:2])
    with pytest.raises(IndexError):
        cache[len(cache)]


def test_it_is_read_once(
    data: Recipe,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A second command tokenises nothing, and prints the same."""
    read_examples(data)
    printed = capsys.readouterr().out
    # calling it would be a TypeError
    monkeypatch.setattr(read_once, "examples_of", None)
    read_examples(data)
    assert capsys.readouterr().out == printed
    assert "supervised" in printed
    with pytest.raises(TypeError):
        open_cache(changed(data, max_length=23))


@pytest.mark.parametrize(
    "change",
    [
        {"turns": "last"},
        {"limit": 40},
        {"template_kwargs": {"enable_thinking": False}},
        None,
    ],
    ids=["turns", "limit", "template_kwargs", "bytes"],
)
def test_what_changes_the_tokens_is_read_again(data: Recipe, change: dict[str, Any] | None) -> None:
    """Each setting counts, and so do the data's bytes."""
    before = open_cache(data).folder
    if change is None:
        write_conversations(Path(data.data.train), 100, seed=1)
    again = changed(data, **(change or {}))
    cache = open_cache(again)
    assert cache.folder != before
    assert_is_tokenised(cache, again)


def test_whole_shards_are_kept(data: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was stopped between shards goes on, and damaged shards are made again."""
    open_cache(data)
    folder = folder_of(data)
    whole = read_files(folder)
    # the manifest is the last file that a run writes
    (folder / "manifest.json").unlink()
    (folder / "shard-00003.safetensors").write_bytes(whole["shard-00003.safetensors"][:-1] + b"x")
    (folder / "shard-00005.json").write_text("{")
    (folder / "shard-00007.safetensors.0a.part").write_text("half")
    written: list[str] = []
    write_shard = read_once.write_shard

    def note_shard(path: Path, *more: Any) -> Any:
        written.append(path.name)
        return write_shard(path, *more)

    monkeypatch.setattr(read_once, "write_shard", note_shard)
    open_cache(data)
    assert written == ["shard-00003.safetensors", "shard-00005.safetensors"]
    assert read_files(folder) == whole


def test_a_damaged_shard_is_refused_as_it_is_read(data: Recipe) -> None:
    """The others serve, and the error says what to remove."""
    path = open_cache(data).folder / "shard-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    cache = open_cache(data)
    assert len(cache[0].tokens)
    message = r"shard-00001.safetensors is missing or damaged: remove .*manifest.json"
    with pytest.raises(ValueError, match=message):
        list(cache)


def test_strict_and_damaged_files_are_refused_of_a_cache_too(data: Recipe) -> None:
    """They are refused as if there were no cache."""
    open_cache(data)
    with pytest.raises(ValueError, match=r"some.jsonl:\d+ .*: .*expected a record that gives"):
        open_cache(data, strict=True)
    with Path(data.data.train).open("a") as file:
        file.write('{"conversations": [\n' * 30)
    allowed = changed(data, allow_broken=True)
    assert len(open_cache(allowed)) == len(tokenize_data(allowed, load_tokenizer(allowed))[0])
    message = r"30 of 130 lines of .* are damaged.*set data.allow_broken=true"
    with pytest.raises(ValueError, match=message):
        open_cache(data)


def simplify(text: str) -> str:
    """Return the letters and digits of a text in small letters, or the text if it has none."""
    return "".join(letter for letter in text.casefold() if letter.isalnum()) or text


def make_repeated_questions() -> list[dict[str, Any]]:
    """Return records in a random order, of which some ask a question again in another spelling."""
    chance = random.Random(0)
    records = []
    for number in range(60):
        question = f"what does fox number {number} see {chance.choice(['here', 'there'])}"
        spaced = "  " + question.title().replace(" ", " , ")
        spellings = [
            question,
            question.upper() + "?",
            spaced,
            question,
        ]
        for repeat in range(chance.choice([1, 1, 1, 2, 4])):
            records.append(make_record(spellings[repeat], f"the dog {number} {repeat}"))
    # without words no question is another's, and a system turn makes another text
    records += [make_record(mark, "the cat") for mark in ("?", "!", "?!")]
    system = {"role": "system", "content": "be quick"}
    records.append({"messages": [system, *records[0]["messages"]]})
    chance.shuffle(records)
    return records


def test_questions_that_were_asked_before_are_counted_and_dropped(
    own_cache: Recipe, tmp_path: Path
) -> None:
    """Case, punctuation and spaces make no other question, in any shard; a naive count is the truth."""
    records = make_repeated_questions()
    # the first record of each question, as a naive comparison finds it
    firsts: dict[tuple[str, ...], int] = {}
    for index, record in enumerate(records):
        key = tuple(simplify(turn["content"]) for turn in record["messages"][:-1])
        firsts.setdefault(key, index)
    repeated = len(records) - len(firsts)
    source = write_records(tmp_path / "asked.jsonl", records)
    every = changed(own_cache, train=str(source))
    distinct = changed(every, drop_duplicates=True)
    whole = open_cache(every)
    kept = open_cache(distinct)
    assert repeated > 10
    assert whole.tally.noted[REPEATED] == repeated
    assert whole.tally.kept == len(records)
    assert kept.tally.dropped == {REPEATED: repeated}
    assert kept.tally.kept == len(firsts)
    # one cache serves both, and features know which it was
    assert kept.folder == whole.folder
    assert data_identity(every) != data_identity(distinct)
    expected = [whole[index].tokens.tolist() for index in firsts.values()]
    assert [example.tokens.tolist() for example in kept] == expected
    assert list(kept.lengths) == list(map(len, expected))


def test_strict_names_the_first_that_is_dropped(
    own_cache: Recipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A repeated question is none of them, and nothing is tokenised again for it."""
    short = make_record("who", "the dog")
    long = make_record("the fox " * 30, "the dog")
    source = write_records(tmp_path / "long.jsonl", [short, {"id": "long", **long}])
    cut = changed(own_cache, train=str(source), max_length=16)
    with pytest.raises(ValueError, match=r"^long: nothing supervised within max_length$"):
        open_cache(cut, strict=True)
    source = write_records(tmp_path / "twice.jsonl", [short, short])
    twice = changed(cut, train=str(source), drop_duplicates=True)
    monkeypatch.setattr(read_once, "tokenize_each", None)
    assert open_cache(twice, strict=True).tally.dropped == {REPEATED: 1}


def test_who_comes_second_waits(data: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three commands at once write one cache, once."""
    fills: list[int] = []
    fill = read_once.fill

    def count_fills(*arguments: Any, **options: Any) -> None:
        fills.append(1)
        # long enough that all three have begun
        time.sleep(0.2)
        fill(*arguments, **options)

    monkeypatch.setattr(read_once, "fill", count_fills)
    with ThreadPoolExecutor(3) as threads:
        caches = list(threads.map(open_cache, [data] * 3))
    assert len(fills) == 1
    assert len({len(cache) for cache in caches}) == 1
    assert_is_tokenised(open_cache(data), data)


@pytest.mark.slow
@pytest.mark.not_long("one process")
@pytest.mark.parametrize(
    ("workers", "kills"), [(1, 3), (2, 3)], ids=["one process", "two processes"]
)
def test_kills_change_no_byte(
    data: Recipe,
    tmp_path: Path,
    workers: int,
    kills: int,
) -> None:
    """A run goes on from the shards of the one before it; processes that helped a killed one end with it."""
    open_cache(data)
    killed = changed(
        data,
        cache=str(tmp_path / "killed"),
        num_proc=workers,
    )
    (tmp_path / "fill.py").write_text(FILL)
    (tmp_path / "recipe.json").write_text(killed.model_dump_json())
    command = [sys.executable, str(tmp_path / "fill.py"), str(tmp_path / "recipe.json")]
    folder = folder_of(killed)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for kill in range(kills):
        run = subprocess.Popen(
            command,
            env=environment,
            start_new_session=True,
        )
        while len(list(folder.glob("shard-*.json"))) < 2 * (kill + 1) and run.poll() is None:
            time.sleep(0.01)
        run.send_signal(signal.SIGKILL)
        run.wait()
        # until no process of its session is left
        alive = ["ps", "-s", str(run.pid)]
        while subprocess.run(alive, stdout=subprocess.DEVNULL).returncode == 0:
            time.sleep(0.1)
    subprocess.run(command, env=environment, check=True)
    assert read_files(folder) == read_files(folder_of(data))
