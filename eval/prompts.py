"""What the target is asked when a drafter is measured."""

from __future__ import annotations

from data_prep.conversations import read_conversations
from eagle.target import Target


def first_turns(path: str, target: Target, count: int) -> list[list[int]]:
    """Token ids of the first user turn of `count` conversations, as the chat template asks them."""
    conversations, _ = read_conversations(path, count)
    return [target.chat([next(turn for turn in talk if turn["role"] == "user")]) for talk in conversations]
