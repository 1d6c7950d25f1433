"""Convert records of benchmarks, as their own tools write them: SPEED-Bench, MRCR, LongBench-v2, agents' sessions."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from data_prep.chats.records import Conversation
from data_prep.chats.turns import Dropped, describe, layout_of
from eval.result_files.buckets import CONTEXT

# how the turns begin that SPEED-Bench's own preparation fills
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
UNFILLED = "a placeholder in place of a turn"
CHOICES = ("choice_A", "choice_B", "choice_C", "choice_D")
MESSAGES_AS_TEXT = re.compile(r'\s*\[\s*\{\s*"(role|content)"\s*:')
# by which MRCR's users estimate tokens before they have a tokenizer
CHARACTERS_PER_TOKEN = 4.9


class Replay(NamedTuple):
    """Stored messages, and the answers among them that the target writes again after the messages before."""

    messages: list[dict[str, Any]]
    answers: tuple[int, ...]
    tools: list[dict[str, Any]] | None


def convert_record(record: Any) -> tuple[Any, str | None]:
    """Return a record in a layout that `conversation_of` reads; one that is no benchmark's stays as it is.

    Args:
        record: A record of a file.

    Returns:
        The record, and which of its stored answers are replayed: "all", "last" or None.

    Raises:
        Dropped: A column is missing, or is not what the benchmark has there.
    """
    if not isinstance(record, dict):
        return record, None
    if "choice_A" in record:
        return {**record, **_multiple_choice(record)}, None
    if "messages_json" in record:
        return {**record, "messages": record["messages_json"]}, "all"
    prompt = record.get("prompt")
    is_text = isinstance(prompt, str) and MESSAGES_AS_TEXT.match(prompt)
    if is_text or "n_needles" in record:
        return {**record, "messages": prompt, "category": _length_bin(record)}, "last"
    # a text alone, as speculators writes the first turn
    if isinstance(record.get("turns"), str) and layout_of(record) is None:
        return {**record, "turns": [record["turns"]]}, None
    return record, None


def replay_of(conversation: Conversation, answers: str | None) -> Replay | None:
    """Return what is replayed of a conversation; of one with a tool's results all answers are, as no target has it.

    Args:
        conversation: Read with `answered=False`, so that an answer follows its last question.
        answers: "all", "last", or None for what the conversation asks for itself.
    """
    messages = conversation.messages
    roles = [message["role"] for message in messages]
    if answers is None and "tool" not in roles:
        return None
    indices = []
    for i, role in enumerate(roles):
        # a second message of the assistant goes on with the first
        if role == "assistant" and roles[i - 1] != "assistant":
            indices.append(i)
    if answers == "last":
        indices = indices[-1:]
    return Replay(messages, tuple(indices), conversation.tools)


def _multiple_choice(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record of LongBench-v2 as one prompt; its domain is its task."""
    for name in ("context", "question", *CHOICES):
        value = record.get(name)
        if value is None:
            raise Dropped(f"LongBench-v2 without {name}")
        if not isinstance(value, str):
            raise Dropped(f"LongBench-v2 with {name} that is not text: {describe(value)}")
    choices = "\n".join(f"{name[-1]}. {record[name]}" for name in CHOICES)
    ask = "Which choice is right? Give your reasons, then its letter."
    text = f"{record['context']}\n\n{record['question']}\n{choices}\n\n{ask}"
    return {"turns": [text], "category": record.get("domain")}


def _length_bin(record: dict[str, Any]) -> str:
    """Return the range of tokens, from one power of two to the next, that MRCR's letters are estimated to make."""
    letters = record.get("n_chars")
    if letters is None:
        letters = len(str(record.get("prompt")))
    if not isinstance(letters, int | float):
        raise Dropped(f"MRCR with n_chars that is no number: {describe(letters)}")
    return CONTEXT.name(CONTEXT.find(round(letters / CHARACTERS_PER_TOKEN)))
