"""Evaluation prompts that stand in the training data are found, and no others."""

from __future__ import annotations

import random
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

from data_prep import ngrams, read_once
from data_prep.conversations import Tally
from data_prep.ngrams import LENGTH, find_overlap
from data_prep.read_once import TokenCache, open_cache, write_manifest, write_shard
from eagle.core.examples import Example
from eagle.recipe import Recipe
from recipes import overlap
from tests.chats import changed
from tests.data_prep.stub_servers import write_records


def write_cache(folder: Path, shards: list[list[list[int]]]) -> TokenCache:
    """Write a cache of these sequences, every token supervised."""
    folder.mkdir()
    notes = []
    for number, texts in enumerate(shards):
        examples = []
        for text in texts:
            tokens = torch.tensor(text)
            examples.append([Example(tokens, torch.ones_like(tokens, dtype=torch.bool))])
        path = folder / f"shard-{number:05d}.safetensors"
        keys = list(range(100 * number, 100 * number + len(texts)))
        notes.append(write_shard(path, examples, keys, Tally()))
    write_manifest(folder, {}, notes, Tally())
    return TokenCache(folder)


def runs_of(tokens: list[int]) -> set[tuple[int, ...]]:
    """Return all runs of tokens of the length that is compared."""
    starts = range(len(tokens) - LENGTH + 1)
    return {tuple(tokens[start : start + LENGTH]) for start in starts}


@pytest.mark.parametrize("seed", range(3))
def test_shared_runs_are_those_that_a_search_finds(tmp_path: Path, seed: int) -> None:
    """In sequences of only two tokens runs meet by chance; none is found across two sequences."""
    chance = random.Random(seed)

    def sample(length: int) -> list[int]:
        return chance.choices((0, 7), k=length)

    shards = []
    for _ in range(3):
        shards.append([sample(chance.randint(0, 60)) for _ in range(12)])
    # a sequence that continues another, and one of rare tokens
    shards[1][4] = shards[0][3] + [9]
    shards[2][0] = list(range(100, 120))
    texts = [*chain.from_iterable(shards)]
    # lengths around the 13 tokens that are compared
    prompts = {str(length): sample(length) for length in (0, 5, 12, 13, 14, 20, 30)}
    prompts |= {"planted": texts[20][-13:], "across": texts[5][-7:] + texts[6][:7]}
    prompts |= {"first": texts[24][:13], "last": texts[24][-13:]}
    cache = write_cache(tmp_path / "cache", shards)
    arrays = {name: np.array(ids, dtype=int) for name, ids in prompts.items()}
    found = find_overlap(cache, arrays, dict.fromkeys(prompts, -1))
    expected = {}
    for name, prompt in prompts.items():
        count = sum(bool(runs_of(prompt) & runs_of(text)) for text in texts)
        if count:
            expected[name] = count
    assert found == expected
    assert list(found.values()) == sorted(found.values(), reverse=True)


def test_the_hash_of_a_run_depends_on_all_its_tokens_in_order() -> None:
    """No two of many runs of close tokens share a hash."""
    # three distinct tokens make runs that are close to each other
    tokens = np.random.default_rng(0).integers(0, 3, 40_000)
    hashes = set(ngrams.hash_runs(tokens).tolist())
    assert len(hashes) == len(runs_of(tokens.tolist()))


def test_planted_prompts_are_named(
    recipe: Recipe,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A long prompt within a question and an answer, and a short one in another spelling; others are not."""
    long = "the quick red fox sees two old dogs and the cat eats a very old fish here"
    pairs = {
        f"Please say: {long} . Thanks": "a fox",
        "what is it": f"it is that {long}",
        "WHO sees  the fox?": "the dog",
        "who sees the dog": "the fox",
    }
    records = [{"prompt": question, "completion": answer} for question, answer in pairs.items()]
    new = "where does the quick dog eat the old red cat now"
    # too short for a run of tokens, the second prompt is compared as a whole question
    prompts = {
        "planted": long,
        "short": "who sees the fox",
        "new": new,
    }
    asked = [{"question_id": name, "turns": [text]} for name, text in prompts.items()]
    data = {
        "train": write_records(tmp_path / "train.jsonl", records),
        "heldout": write_records(tmp_path / "heldout.jsonl", records[3:]),
        "cache": tmp_path / "cache",
    }
    planted = changed(recipe, **{key: str(path) for key, path in data.items()})
    questions = str(write_records(tmp_path / "asked.jsonl", asked))
    evaluation = planted.eval.model_copy(update={"prompts": questions})
    planted = planted.model_copy(update={"eval": evaluation})
    (tmp_path / "recipe.yaml").write_text(planted.model_dump_json())
    overlap.main([str(tmp_path / "recipe.yaml")])
    printed = capsys.readouterr().out.splitlines()
    assert printed[:3] == [
        "asked planted: in 2 of the examples",
        "asked short: in 1 of the examples",
        "data.heldout heldout.jsonl:1, turn 1: in 1 of the examples",
    ]
    assert printed[-1] == "3 of 4 evaluation prompts stand in the 4 training examples"
    assert len(open_cache(planted)) == 4
    assert read_once.CONVERSATIONS > 4
