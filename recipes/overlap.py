"""Find evaluation prompts in the training data: `eagle prepare RECIPE --only overlap`.

A prompt is listed if it shares 13 consecutive tokens with a training example, or if a training conversation asks the
same question, apart from case and punctuation.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from data_prep.conversations import read_conversations
from data_prep.ngrams import find_overlap
from data_prep.read_once import open_cache, text_key
from data_prep.tokens import encode, load_tokenizer
from eagle.log import JSON_HELP, json_alone, script
from eagle.recipe import Recipe
from eagle.recipe.command_lines import command_line
from eval.prompts import question_sets, questions

SHOWN = 20  # prompts by name


def read_prompts(recipe: Recipe) -> dict[str, str]:
    """Return the text of every turn of the recipe's evaluation prompts and held-out questions, by name."""
    # `eval.count` limits what is measured; training on any prompt of a set is a leak.
    unlimited = recipe.eval.model_copy(update={"count": 10**9})
    texts = {}
    for prompt in questions(recipe.model_copy(update={"eval": unlimited})):
        for turn, text in enumerate(prompt.turns, start=1):
            # The first turn has the name of its prompt.
            suffix = f", turn {turn}" if turn > 1 else ""
            texts[f"{prompt.set} {prompt.id}{suffix}"] = text
    heldout = recipe.data.heldout
    if heldout is None or heldout in question_sets(recipe).values():
        return texts
    conversations = read_conversations(
        heldout,
        answered=False,
        allow_broken=recipe.data.allow_broken,
        images=recipe.data.images is not None,
    )
    for conversation in conversations:
        asked = [
            message["content"] for message in conversation.messages if message["role"] == "user"
        ]
        for turn, text in enumerate(asked, start=1):
            texts[f"data.heldout {conversation.id}, turn {turn}"] = text
    return texts


def main(argv: list[str]) -> None:
    """Print the prompts that occur in the recipe's training data, and in how many of its examples."""
    parser = command_line("eagle prepare --only overlap", __doc__)
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    args = parser.parse_intermixed_args(argv)
    with json_alone(args.json) as write_json:
        write_json(report(args))


def report(args: argparse.Namespace) -> dict[str, Any]:
    """Print the prompts that are found, and return in how many examples each is."""
    recipe = Recipe.load(args.recipe, args.overrides)
    prompts = read_prompts(recipe)
    cache = open_cache(recipe)
    tokenizer = load_tokenizer(recipe)
    tokens = {name: np.asarray(encode(text, tokenizer)[0]) for name, text in prompts.items()}
    keys = {name: text_key(text) for name, text in prompts.items()}
    counts = find_overlap(cache, tokens, keys)
    for name, count in list(counts.items())[:SHOWN]:
        print(f"{name}: in {count:,} of the examples")
    if len(counts) > SHOWN:
        print(f"and {len(counts) - SHOWN:,} more")
    print(
        f"{len(counts):,} of {len(prompts):,} evaluation prompts stand in the {len(cache):,} training examples"
    )
    return {"prompts": len(prompts), "examples": len(cache), "overlap": counts}


if __name__ == "__main__":
    script(main)
