"""What a template that rewrites history costs: `python -m bench.shared_prefixes TOKENIZER`.

Made-up conversations with thoughts, as long as those of ShareGPT, go through the tokenizer's own chat template. Their
features are extracted twice, each time by the same random target: example by example, and with what the examples of a
conversation share computed and stored once.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from bench.machine import made_on, markdown, take_turns, write_results
from bench.read_speed import ANSWER, PAIRS, QUESTION, make_text
from data_prep.extract import sizes_of
from data_prep.read_once import open_cache
from eagle.core.examples import Example
from eagle.data.features import extract, plan_extraction, roles_of
from eagle.data.identity import identity, in_precision
from eagle.data.store import FeatureStore
from eagle.data.stored_rows import parts_of
from eagle.drafters import settings_of
from eagle.log import progress, script
from eagle.recipe import Recipe
from eagle.target.target import Target

THOUGHT = (6.9, 0.7)  # mean and width of the logarithm of its characters: as long as an answer
CHARACTERS = 20_000  # of the longest text
WAYS = ("example by example", "prefixes shared")


def write_conversations(path: Path, count: int) -> None:
    """A file of so many conversations whose answers have thoughts."""
    drawn = np.random.default_rng(1)
    text = make_text(drawn)

    def piece(mean: float, width: float) -> str:
        start, size = int(drawn.integers(0, len(text) - CHARACTERS)), drawn.lognormal(mean, width)
        return text[start : start + int(np.clip(size, 4, CHARACTERS))]

    lines = []
    for number in range(count):
        turns = []
        for _ in range(int(np.clip(drawn.lognormal(*PAIRS), 1, 20))):
            answer = {"content": piece(*ANSWER), "reasoning_content": piece(*THOUGHT)}
            turns += [{"role": "user", "content": piece(*QUESTION)}, {"role": "assistant", **answer}]
        lines.append(json.dumps({"id": str(number), "messages": turns}))
    path.write_text("\n".join(lines))


def make_target(folder: Path, tokenizer: str, width: int, layers: int) -> None:
    """A random Qwen3 of this size, with the tokenizer."""
    words = AutoTokenizer.from_pretrained(tokenizer)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(words), hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=width // 64, num_key_value_heads=max(width // 128, 1), head_dim=64,
        max_position_embeddings=32_768, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    words.save_pretrained(folder)


def fill(folder: Path, recipe: Recipe, target: Target, examples: Sequence[Example]) -> dict[str, float]:
    """Extract the features of all examples; the CPU seconds and bytes that it took."""
    roles = roles_of(settings_of(recipe.drafter.model_dump(), "recipe"), target.config)
    expected = in_precision(identity(recipe, roles), target.model.dtype)
    sizes = sizes_of(examples)
    plan = plan_extraction(sizes, target, parts_of(expected), recipe.features)
    about: dict[str, Any] = {"width": target.width_of(roles.taps), "target": {}}
    store = FeatureStore.create(folder, examples, expected, plan, sizes, **about)
    begin = process_time()
    total = int(sizes.tokens.sum())
    for _ in progress(extract(target, store, sorted(store.absent)), "extract", total, unit="tokens", size=int):
        pass
    return {"CPU s": process_time() - begin, "bytes": store.total_bytes, "new": total - int(sizes.shared.sum())}


def largest_difference(one: FeatureStore, other: FeatureStore) -> float:
    """The largest difference of two stores' states, as a part of the largest state."""
    worst, most = 0.0, 0.0
    for index in progress(range(len(one)), "compare", len(one)):
        left, right = (store.read([index])[0].features for store in (one, other))
        assert left is not None and right is not None and torch.equal(left.isnan(), right.isnan())
        worst = max(worst, float((left.float() - right.float()).nan_to_num().abs().max()))
        most = max(most, float(left.float().nan_to_num().abs().max()))
    return worst / most


def table(results: dict[str, Any]) -> str:
    """Tokens, bytes and time of both ways, and their ratio."""
    rows = [[name, *(f"{row[way]:,}" for way in WAYS), f"{row['ratio']:.2f}"] for name, row in results["rows"].items()]
    return markdown(["", *WAYS, "ratio"], rows)


def main(argv: list[str]) -> None:
    """Extract both ways; print the table and write the results."""
    parser = argparse.ArgumentParser(prog="python -m bench.shared_prefixes", description=__doc__)
    parser.add_argument("tokenizer", help="a folder with a tokenizer whose chat template rewrites history")
    parser.add_argument("--conversations", type=int, default=40)
    parser.add_argument("--width", type=int, default=512, help="of the random target")
    parser.add_argument("--layers", type=int, default=6, help="of the random target")
    parser.add_argument("--rounds", type=int, default=3, help="extractions of each way")
    parser.add_argument("--out", type=Path, default=Path("docs/results/shared_prefixes.json"))
    args = parser.parse_args(argv)
    if not Path(args.tokenizer).is_dir():
        raise ValueError(f"no tokenizer at {args.tokenizer}: expected a folder")
    with tempfile.TemporaryDirectory() as folder:
        results = measure(Path(folder), args)
    write_results(args.out, results)
    print(table(results), f"largest difference of states: {results['largest difference of states']:.1e}", sep="\n\n")


def measure(work: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Both ways in turns."""
    make_target(work / "target", args.tokenizer, args.width, args.layers)
    write_conversations(work / "data.jsonl", args.conversations)
    recipe_file = work / "recipe.json"
    data = {"train": str(work / "data.jsonl"), "cache": str(work / "tokens"), "max_length": 4096}
    recipe_file.write_text(json.dumps({
        "target": {"path": str(work / "target"), "dtype": "float32"}, "data": data,
        "features": {"store": str(work / "features"), "dtype": "float32"},
        "drafter": {"kind": "eagle3", "draft_vocab": 4096},
        "train": {"out": str(work / "run")},
        "eval": {"prompts": str(work / "data.jsonl")},
    }))  # fmt: skip
    recipe = Recipe.load(str(recipe_file))
    target, examples = Target.load(work / "target", dtype="float32"), open_cache(recipe)
    texts = {WAYS[0]: [replace(example, shared=0) for example in examples], WAYS[1]: list(examples)}
    rounds = iter(range(2 * args.rounds))

    def run(way: str) -> Callable[[], dict[str, float]]:
        return lambda: fill(work / way / str(next(rounds)), recipe, target, texts[way])

    figures = take_turns(args.rounds, {way: run(way) for way in WAYS})
    folders = {way: sorted((work / way).iterdir())[0] for way in WAYS}
    tokens = {way: round(figures[way][0]["new"]) for way in WAYS}
    rows = {
        "tokens computed": tokens,
        "MB stored": {way: round(figures[way][0]["bytes"] / 1e6) for way in WAYS},
        "CPU s": {way: round(median(figure["CPU s"] for figure in figures[way]), 1) for way in WAYS},
    }
    about = made_on(
        tokenizer=Path(args.tokenizer).name, conversations=args.conversations, examples=len(examples),
        width=args.width, layers=args.layers, rounds=args.rounds,
    )  # fmt: skip
    states = largest_difference(*(FeatureStore(folders[way]) for way in WAYS))
    ratios = {name: {**row, "ratio": round(row[WAYS[0]] / row[WAYS[1]], 2)} for name, row in rows.items()}
    return {**about, "largest difference of states": states, "rows": ratios}


if __name__ == "__main__":
    script(main)
