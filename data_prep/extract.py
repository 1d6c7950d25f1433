"""Conversations -> feature store: `python -m data_prep.extract RECIPE [key=value ...]`."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import torch

from data_prep.conversations import read_conversations
from data_prep.tokens import example_of
from eagle.drafters import DRAFTERS, settings_of
from eagle.examples import Example, FeatureStore
from eagle.extract import identity, taps_of, with_features
from eagle.log import progress
from eagle.recipe import Recipe
from eagle.target import Target


def tokenized(recipe: Recipe, tokenizer: Any) -> tuple[list[Example], Counter[str]]:
    """The recipe's training examples, and what was dropped for which reason."""
    conversations, dropped = read_conversations(recipe.data.train, recipe.data.limit)
    examples = []
    for conversation in conversations:
        example = example_of(conversation, tokenizer, recipe.data.max_length, **recipe.data.template_kwargs)
        if isinstance(example, str):
            dropped[example] += 1
        else:
            examples.append(example)
    return examples, dropped


def main(argv: list[str]) -> None:
    """Tokenise, extract, store, and say what was kept."""
    recipe = Recipe.load(argv[0], argv[1:])
    settings = settings_of(recipe.drafter.model_dump(), argv[0])
    target = Target.load(recipe.target.path, dtype=recipe.target.dtype, revision=recipe.target.revision)
    examples, dropped = tokenized(recipe, target.tokenizer)
    total, supervised = sum(len(e.tokens) for e in examples), sum(int(e.loss_mask.sum()) for e in examples)
    print(f"kept {len(examples)} conversations, dropped {sum(dropped.values())} {dict(dropped) or ''}")
    print(f"{total} tokens, {supervised / total:.0%} supervised")
    taps = taps_of(DRAFTERS[settings.kind])
    features = with_features(target, examples, taps, getattr(torch, recipe.features.dtype))
    bar = progress(features, "extract", len(examples))
    store = FeatureStore.write(recipe.features.store, bar, identity(recipe, taps), recipe.features.shard_bytes)
    print(f"features of {len(store)} conversations, taps {taps}, in {recipe.features.store}")


if __name__ == "__main__":
    main(sys.argv[1:])
