"""What the target is asked when a drafter is measured."""

from __future__ import annotations

from data_prep.conversations import read_conversations
from eagle.recipe import Recipe
from eagle.target import Target


def first_turns(recipe: Recipe, target: Target) -> list[list[int]]:
    """Token ids of the first user turn of the recipe's prompts, as the chat template asks them."""
    talks = read_conversations(recipe.eval.prompts, limit=recipe.eval.count)
    asked = [next(turn for turn in talk.messages if turn["role"] == "user") for talk in talks]
    return [target.chat([turn], **recipe.data.template_kwargs) for turn in asked]
