"""ShareGPT-style records -> conversations, every dropped record counted by the reason."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

Conversation = list[dict[str, str]]

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


def read_conversations(path: str | Path, limit: int | None = None) -> tuple[list[Conversation], Counter[str]]:
    """The conversations of a JSONL file, and how many records were dropped for which reason."""
    kept: list[Conversation] = []
    dropped: Counter[str] = Counter()
    with Path(path).open(encoding="utf-8") as file:
        for line in file:
            if limit is not None and len(kept) == limit:
                break
            conversation, reason = conversation_of(json.loads(line))
            if reason:
                dropped[reason] += 1
            else:
                kept.append(conversation)
    return kept, dropped


def conversation_of(record: dict[str, Any]) -> tuple[Conversation, str | None]:
    """A record as a conversation, or the reason for which it is none."""
    turns = record.get("conversations")
    if not isinstance(turns, list) or not turns:
        return [], "no turns"
    if unknown := next((turn for turn in turns if turn.get("from") not in ROLES), None):
        return [], f"unknown role {unknown.get('from')!r}"
    conversation = [{"role": ROLES[turn["from"]], "content": turn["value"]} for turn in turns]
    while conversation and conversation[0]["role"] == "assistant":
        conversation.pop(0)
    if not any(turn["role"] == "assistant" for turn in conversation):
        return [], "no assistant turn"
    return conversation, None
