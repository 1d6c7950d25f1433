"""Evaluation prompts that stand in the training data are found, and no others."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from chats import changed

from data_prep import ngrams, read_once
from data_prep.conversations import Tally
from data_prep.ngrams import LENGTH, find_overlap
from data_prep.read_once import open_cache
from data_prep.token_cache import TokenCache, write_manifest, write_shard
from eagle.core.examples import Example
from eagle.recipe import Recipe
from recipes import overlap


def write_cache(folder: Path, shards: list[list[list[int]]]) -> TokenCache:
    """A cache of these texts, every token supervised."""
    folder.mkdir()
    notes = []
    for number, texts in enumerate(shards):
        examples = [
            [Example(torch.tensor(text), torch.ones(len(text), dtype=torch.bool))] for text in texts
        ]
        path = folder / f"shard-{number:05d}.safetensors"
        notes.append(
            write_shard(
                path, examples, [100 * number + place for place in range(len(texts))], Tally()
            )
        )
    write_manifest(folder, {}, notes, Tally())
    return TokenCache(folder)


def count_by_hand(texts: list[list[int]], prompt: list[int]) -> int:
    """How many texts hold so many tokens of the prompt in a row."""
    runs = {tuple(prompt[start : start + LENGTH]) for start in range(len(prompt) - LENGTH + 1)}
    return sum(
        any(tuple(text[start : start + LENGTH]) in runs for start in range(len(text) - LENGTH + 1))
        for text in texts
    )


@pytest.mark.parametrize("seed", range(3))
def test_shared_runs_are_those_that_a_search_finds(tmp_path: Path, seed: int) -> None:
    """Of texts of two tokens alone, where runs meet by chance, and across the ends of texts."""
    drawn = random.Random(seed)
    shards = [
        [[drawn.choice((0, 7)) for _ in range(drawn.randint(0, 60))] for _ in range(12)]
        for _ in range(3)
    ]
    shards[1][4] = shards[0][3] + [9]
    shards[2][0] = list(range(100, 120))
    cache = write_cache(tmp_path / "cache", shards)
    texts = [text for shard in shards for text in shard]
    prompts = {
        str(length): [drawn.choice((0, 7)) for _ in range(length)]
        for length in (0, 5, 12, 13, 14, 20, 30)
    }
    prompts |= {"planted": texts[20][-13:], "across": texts[5][-7:] + texts[6][:7]}
    prompts |= {"first": texts[24][:13], "last": texts[24][-13:]}
    found = find_overlap(
        cache,
        {name: np.array(ids, dtype=int) for name, ids in prompts.items()},
        dict.fromkeys(prompts, -1),
    )
    by_hand = {name: count_by_hand(texts, prompt) for name, prompt in prompts.items()}
    assert found == {name: count for name, count in by_hand.items() if count}
    assert list(found.values()) == sorted(found.values(), reverse=True)


def test_a_run_is_numbered_by_all_its_tokens_in_order() -> None:
    """No two of many runs of close tokens share a number."""
    drawn = np.random.default_rng(0)
    tokens = drawn.integers(0, 3, 40_000)
    runs = {
        tuple(tokens[start : start + LENGTH].tolist()) for start in range(len(tokens) - LENGTH + 1)
    }
    assert len(set(ngrams.hash_runs(tokens).tolist())) == len(runs)


def test_planted_prompts_are_named(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A long one inside a longer question and in an answer, a short one asked otherwise spelled; others are not."""
    long = "the quick red fox sees two old dogs and the cat eats a very old fish here"
    records = [
        [f"Please say: {long} . Thanks", "a fox"],
        ["what is it", f"it is that {long}"],
        ["WHO sees  the fox?", "the dog"],
        ["who sees the dog", "the fox"],
    ]
    lines = [
        json.dumps(
            {
                "messages": [
                    {"role": role, "content": text}
                    for role, text in zip(("user", "assistant"), one, strict=True)
                ]
            }
        )
        for one in records
    ]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    asked = {
        "planted": long,
        "short": "who sees the fox",
        "new": "where does the quick dog eat the old red cat now",
    }
    (tmp_path / "asked.jsonl").write_text(
        "\n".join(
            json.dumps({"question_id": name, "turns": [text]}) for name, text in asked.items()
        )
    )
    (tmp_path / "heldout.jsonl").write_text(lines[3])
    planted = changed(
        recipe,
        train=str(tmp_path / "train.jsonl"),
        heldout=str(tmp_path / "heldout.jsonl"),
        cache=str(tmp_path / "c"),
    )
    planted = planted.model_copy(
        update={"eval": planted.eval.model_copy(update={"prompts": str(tmp_path / "asked.jsonl")})}
    )
    (tmp_path / "recipe.yaml").write_text(planted.model_dump_json())
    overlap.main([str(tmp_path / "recipe.yaml")])
    said = capsys.readouterr().out.splitlines()
    assert said[:3] == [
        "asked planted: in 2 of the examples",
        "asked short: in 1 of the examples",
        "data.heldout heldout.jsonl:1, turn 1: in 1 of the examples",
    ]
    assert said[-1] == "3 of 4 evaluation prompts stand in the 4 training examples"
    assert len(open_cache(planted)) == 4 and read_once.CONVERSATIONS > 4
