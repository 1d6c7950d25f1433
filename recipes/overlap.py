"""Find evaluation prompts in the training data: `eagle overlap RECIPE [key=value ...]`.

A prompt is found where 13 of its tokens in a row stand in an example, or where a conversation asks the same, whatever
its case and punctuation.
"""

from __future__ import annotations

import numpy as np

from data_prep.conversations import read_conversations
from data_prep.ngrams import find_overlap
from data_prep.read_once import open_cache, text_key
from data_prep.tokens import encode, load_tokenizer
from eagle.log import script
from eagle.recipe import Recipe, command_line
from eval.prompts import question_sets, questions

SHOWN = 20  # prompts by name


def read_prompts(recipe: Recipe) -> dict[str, str]:
    """Every turn of the recipe's evaluation prompts, and all questions that are held out, by their names."""
    every = recipe.model_copy(update={"eval": recipe.eval.model_copy(update={"count": 10**9})})
    texts = {
        f"{asked.set} {asked.id}{f', turn {turn + 1}' if turn else ''}": text
        for asked in questions(every)
        for turn, text in enumerate(asked.turns)
    }
    heldout = recipe.data.heldout
    if heldout is None or heldout in question_sets(recipe).values():
        return texts
    broken, seeing = recipe.data.allow_broken, recipe.data.images is not None
    for conversation in read_conversations(heldout, answered=False, allow_broken=broken, images=seeing):
        asked_here = [turn["content"] for turn in conversation.messages if turn["role"] == "user"]
        texts |= {f"data.heldout {conversation.id}, turn {turn}": text for turn, text in enumerate(asked_here, 1)}
    return texts


def main(argv: list[str]) -> None:
    """Print the prompts that stand in the recipe's training data, and in how many of its examples."""
    parser = command_line("eagle overlap", __doc__)
    args = parser.parse_intermixed_args(argv)
    recipe = Recipe.load(args.recipe, args.overrides)
    prompts = read_prompts(recipe)
    cache, tokenizer = open_cache(recipe), load_tokenizer(recipe)
    tokens = {name: np.asarray(encode(text, tokenizer)[0]) for name, text in prompts.items()}
    counts = find_overlap(cache, tokens, {name: text_key(text) for name, text in prompts.items()})
    for name, count in list(counts.items())[:SHOWN]:
        print(f"{name}: in {count:,} of the examples")
    if len(counts) > SHOWN:
        print(f"and {len(counts) - SHOWN:,} more")
    print(f"{len(counts):,} of {len(prompts):,} evaluation prompts stand in the {len(cache):,} training examples")


if __name__ == "__main__":
    script(main)
