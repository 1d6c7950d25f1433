"""A token cache holds what tokenising gives, whoever wrote it and however often that was interrupted."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from chats import changed

from data_prep import read_once
from data_prep.read_once import cache_folder, cache_identity, open_cache, read_examples
from data_prep.token_cache import REPEATED, TokenCache
from data_prep.tokens import load_tokenizer, tokenize_data
from eagle.data.identity import data_identity
from eagle.recipe import Recipe

SAID = "the a fox dog cat sees eats two red old very quick , . ? é 漢字 <|end|> \u2028 {{x}}"
WORDS = SAID.split(" ")
FILL = """
import sys
from data_prep import read_once
from eagle.recipe import Recipe
read_once.CONVERSATIONS = 9
if __name__ == "__main__":
    read_once.open_cache(Recipe.model_validate_json(open(sys.argv[1]).read()))
"""


def write_conversations(path: Path, count: int, seed: int = 0) -> None:
    """Random conversations in several layouts, some of them broken."""
    drawn = random.Random(seed)

    def say() -> str:
        return " ".join(drawn.choices(WORDS, k=drawn.randint(0, 12)))

    with path.open("w") as file:
        for number in range(count):
            turns = [say() for _ in range(drawn.randint(0, 5))]
            roles = ("human", "gpt") if number % 3 else ("user", "assistant")
            told = [{"from": roles[place % 2], "value": turn} for place, turn in enumerate(turns)]
            messages = [
                {"role": roles[place % 2], "content": turn} for place, turn in enumerate(turns)
            ]
            file.write(
                json.dumps({"conversations": told} if number % 3 else {"messages": messages}) + "\n"
            )


@pytest.fixture
def data(recipe: Recipe, tmp_path: Path) -> Recipe:
    """A recipe of 100 conversations, with a cache of its own."""
    write_conversations(tmp_path / "some.jsonl", 100)
    return changed(
        recipe,
        train=str(tmp_path / "some.jsonl"),
        cache=str(tmp_path / "cache"),
        num_proc=1,
        max_length=24,
    )


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dozen shards."""
    monkeypatch.setattr(read_once, "CONVERSATIONS", 9)


def folder_of(recipe: Recipe) -> Path:
    """The folder of a recipe's cache."""
    return cache_folder(recipe, cache_identity(recipe))


def files_of(folder: Path) -> dict[str, bytes]:
    """The bytes of all files in a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def assert_is_tokenised(cache: TokenCache, recipe: Recipe) -> None:
    """The cache holds what tokenising all conversations here and now gives."""
    examples, tally = tokenize_data(recipe, load_tokenizer(recipe))
    tally.noted += Counter(
        {REPEATED: cache.tally.noted[REPEATED]}
    )  # of which tokenising one at a time knows nothing
    assert (len(cache), cache.tally) == (len(examples), tally)
    for cached, example in zip(cache, examples, strict=True):
        assert torch.equal(cached.tokens, example.tokens) and cached.tokens.dtype == torch.long
        assert torch.equal(cached.loss_mask, example.loss_mask)
    assert list(cache.lengths) == [len(example.tokens) for example in examples]
    assert cache.supervised == sum(int(example.loss_mask.sum()) for example in examples)


def test_it_holds_what_tokenising_gives(data: Recipe) -> None:
    """Every example, in order, by its place from either end, and all counts."""
    cache = open_cache(data)
    assert cache.tally.dropped.total() > 5 and len(cache) > 30
    assert_is_tokenised(cache, data)
    assert torch.equal(cache[-1].tokens, cache[len(cache) - 1].tokens)
    assert [len(example.tokens) for example in cache[3:9:2]] == list(cache.lengths[3:9:2])
    with pytest.raises(IndexError):
        cache[len(cache)]


@pytest.mark.slow
@pytest.mark.long
def test_several_processes_write_the_same_bytes(data: Recipe, tmp_path: Path) -> None:
    """Their number is no part of the cache's identity, and of none of its files."""
    alone, together = data, changed(data, num_proc=2, cache=str(tmp_path / "other"))
    assert open_cache(alone).folder.name == open_cache(together).folder.name
    assert files_of(folder_of(alone)) == files_of(folder_of(together))


def test_it_is_read_once(
    data: Recipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second command tokenises nothing, and says the same."""
    read_examples(data)
    said = capsys.readouterr().out

    def refuse(*_: object) -> None:
        raise AssertionError("tokenised again")

    monkeypatch.setattr(read_once, "examples_of", refuse)
    read_examples(data)
    assert capsys.readouterr().out == said and "supervised" in said
    with pytest.raises(AssertionError, match="tokenised again"):
        open_cache(changed(data, max_length=23))


@pytest.mark.quick("turns")
@pytest.mark.parametrize(
    "change",
    [
        lambda data, _: changed(data, max_length=20),
        lambda data, _: changed(data, turns="last"),
        lambda data, _: changed(data, limit=40),
        lambda data, _: changed(data, template_kwargs={"enable_thinking": False}),
        lambda data, _: write_conversations(Path(data.data.train), 100, seed=1) or data,
    ],
    ids=["max_length", "turns", "limit", "template_kwargs", "bytes"],
)
def test_what_changes_the_tokens_is_read_anew(
    data: Recipe, change: Callable[[Recipe, Path], Recipe]
) -> None:
    """Each setting, and the data's bytes."""
    before = open_cache(data).folder
    again = change(data, before)
    assert open_cache(again).folder != before
    assert_is_tokenised(open_cache(again), again)


def test_whole_shards_are_kept(data: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is stopped between shards goes on; a shard that is damaged is refused by its name, and made anew."""
    open_cache(data)
    folder = folder_of(data)
    whole = files_of(folder)
    (folder / "manifest.json").unlink()
    (folder / "shard-00003.safetensors").write_bytes(whole["shard-00003.safetensors"][:-1] + b"x")
    (folder / "shard-00005.json").write_text("{")
    (folder / "shard-00007.safetensors.0a.part").write_text("half")
    written: list[str] = []
    write = read_once.write_shard
    monkeypatch.setattr(
        read_once,
        "write_shard",
        lambda path, *more: written.append(path.name) or write(path, *more),
    )
    open_cache(data)
    assert written == ["shard-00003.safetensors", "shard-00005.safetensors"]
    assert files_of(folder) == whole
    (folder / "shard-00001.safetensors").write_bytes(whole["shard-00001.safetensors"][:-1] + b"x")
    cache = open_cache(data)
    assert len(cache[0].tokens)
    with pytest.raises(
        ValueError, match=r"shard-00001.safetensors is missing or damaged: remove .*manifest.json"
    ):
        list(cache)


def test_strict_and_damaged_files_are_refused_of_a_cache_too(data: Recipe) -> None:
    """As if there were none."""
    open_cache(data)
    with pytest.raises(
        ValueError, match=r"some.jsonl:\d+ .*: .*expected a record that gives a conversation"
    ):
        open_cache(data, strict=True)
    with Path(data.data.train).open("a") as file:
        file.write('{"conversations": [\n' * 30)
    allowed = changed(data, allow_broken=True)
    assert len(open_cache(allowed)) == len(tokenize_data(allowed, load_tokenizer(allowed))[0])
    with pytest.raises(
        ValueError, match=r"30 of 130 lines of .* are damaged.*set data.allow_broken=true"
    ):
        open_cache(data)


def test_questions_that_were_asked_before_are_counted_and_dropped(
    recipe: Recipe, tmp_path: Path
) -> None:
    """Whatever their case, punctuation and spaces, in any shard; of a planted set the right number."""
    drawn, asked, records = random.Random(0), 0, []
    for number in range(60):
        question = f"what does fox number {number} see {drawn.choice(['here', 'there'])}"
        for repeat in range(drawn.choice([1, 1, 1, 2, 4])):
            asked += bool(repeat)
            told = [question, question.upper() + "?", "  " + question.title().replace(" ", " , ")][
                repeat % 3
            ]
            records.append([("user", told), ("assistant", f"the dog {number} {repeat}")])
    records += [
        [("user", mark), ("assistant", "the cat")] for mark in ("?", "!", "?!")
    ]  # no words: none is another
    records.append([("system", "be quick"), *records[0]])  # another text
    drawn.shuffle(records)
    lines = [
        json.dumps({"messages": [{"role": role, "content": text} for role, text in one]})
        for one in records
    ]
    (tmp_path / "asked.jsonl").write_text("\n".join(lines))
    every = changed(
        recipe, train=str(tmp_path / "asked.jsonl"), cache=str(tmp_path / "cache"), num_proc=1
    )
    distinct = changed(every, drop_duplicates=True)
    whole, kept = open_cache(every), open_cache(distinct)
    assert asked > 10 and (whole.tally.noted[REPEATED], whole.tally.kept) == (asked, len(records))
    assert (kept.tally.dropped, kept.tally.kept) == ({REPEATED: asked}, len(records) - asked)
    assert kept.folder == whole.folder and data_identity(every) != data_identity(distinct)
    firsts, seen = [], set()
    for example, record in zip(whole, records, strict=True):
        key = tuple(
            "".join(letter for letter in text.casefold() if letter.isalnum()) or text
            for _, text in record[:-1]
        )
        firsts += [] if key in seen else [example.tokens.tolist()]
        seen.add(key)
    assert [example.tokens.tolist() for example in kept] == firsts
    assert list(kept.lengths) == list(map(len, firsts))


def test_strict_names_the_first_that_is_dropped(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a cache is written, too; a repeated question is none, and nothing is tokenised again for it."""
    turns = [
        {"role": "user", "content": "the fox " * 30},
        {"role": "assistant", "content": "the dog"},
    ]
    short = [{"role": "user", "content": "who"}, turns[1]]
    (tmp_path / "long.jsonl").write_text(
        "".join(
            json.dumps({"id": name, "messages": told}) + "\n"
            for name, told in (("short", short), ("long", turns))
        )
    )
    cut = changed(
        recipe,
        train=str(tmp_path / "long.jsonl"),
        cache=str(tmp_path / "c"),
        num_proc=1,
        max_length=16,
    )
    with pytest.raises(ValueError, match=r"^long: nothing supervised within max_length$"):
        open_cache(cut, strict=True)
    (tmp_path / "twice.jsonl").write_text((json.dumps({"messages": short}) + "\n") * 2)
    twice = changed(cut, train=str(tmp_path / "twice.jsonl"), drop_duplicates=True)
    monkeypatch.setattr(read_once, "tokenize_each", None)
    assert open_cache(twice, strict=True).tally.dropped == {REPEATED: 1}


def test_who_comes_second_waits(data: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two commands at once write one cache."""
    counted: list[int] = []
    fill = read_once.fill

    def count_fills(*arguments: object, **options: object) -> None:
        counted.append(1)
        time.sleep(0.2)
        fill(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(read_once, "fill", count_fills)
    with ThreadPoolExecutor(3) as threads:
        read = list(threads.map(open_cache, [data] * 3))
    assert counted == [1] and len({len(cache) for cache in read}) == 1
    assert_is_tokenised(open_cache(data), data)


@pytest.mark.parametrize(
    ("workers", "kills"),
    [
        pytest.param(1, 3, marks=pytest.mark.slow),
        pytest.param(2, 5, marks=[pytest.mark.slow, pytest.mark.long]),
    ],
)
def test_kills_change_no_byte(data: Recipe, tmp_path: Path, workers: int, kills: int) -> None:
    """A run goes on from the shards of the one before it; processes that helped a killed one end with it."""
    open_cache(data)
    killed = changed(data, cache=str(tmp_path / "killed"), num_proc=workers)
    (tmp_path / "fill.py").write_text(FILL)
    (tmp_path / "recipe.json").write_text(killed.model_dump_json())
    command = [sys.executable, str(tmp_path / "fill.py"), str(tmp_path / "recipe.json")]
    folder, environment = (
        folder_of(killed),
        {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    for kill in range(kills):
        run = subprocess.Popen(command, env=environment, start_new_session=True)
        while len(list(folder.glob("shard-*.json"))) < 2 * (kill + 1) and run.poll() is None:
            time.sleep(0.01)
        run.send_signal(signal.SIGKILL)
        run.wait()
        while subprocess.run(["ps", "-s", str(run.pid)], stdout=subprocess.DEVNULL).returncode == 0:
            time.sleep(0.1)
    subprocess.run(command, env=environment, check=True)
    assert files_of(folder) == files_of(folder_of(data))
