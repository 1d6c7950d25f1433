"""One record of any known layout -> a conversation, or the reason for which it is none."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from data_prep.messages import BROKEN_OFF, ROLES, TRUNCATED, finish_of, message_of, says_something, tools_of
from data_prep.turns import ASSISTANT, SYSTEM, USER, Dropped, check_wanted, first_of, layout_of, turns_of

__all__ = ["ROLES", "Conversation", "Dropped", "conversation_of", "layout_of"]

IDS = ("id", "conversation_id", "conversation_hash", "uuid", "uid", "prompt_id", "question_id", "message_tree_id")


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns as OpenAI writes them: `role` and `content`; an assistant's may carry calls, reasoning and a weight."""

    id: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


def conversation_of(record: Any, place: str, *, answered: bool = True) -> tuple[Conversation, set[str]]:
    """The conversation and what was changed in it; `place` is its id where the record has none.

    With `answered=False` answers are yet to come: questions alone will do, and what answers are like is not looked at.
    """
    if not isinstance(record, dict):
        raise Dropped("not an object")
    notes: set[str] = set()
    try:
        turns = turns_of(record, notes)
        if answered:
            check_wanted(record)
        messages = _shaped(_usable(turns, notes, answered), notes, answered)
        conversation = Conversation(_id(record, place), messages, tools_of(first_of(record, "tools", "functions")))
        _check_text(conversation)
    except RecursionError:
        raise Dropped("nested too deeply") from None
    return conversation, notes


def _usable(turns: list[Any], notes: set[str], answered: bool) -> list[dict[str, Any]]:
    """The messages up to the first that is empty or broken off; before the first question such are passed over."""
    messages: list[dict[str, Any]] = []
    for place, turn in enumerate(turns):
        message = message_of(turn)
        role, finish = message["role"], finish_of(turn)
        is_answer = role == ASSISTANT
        broken_off = is_answer and finish in BROKEN_OFF
        if is_answer and answered and finish in TRUNCATED:
            notes.add("a truncated answer is not learned")
            message["weight"] = 0
        elif is_answer and answered and message.get("weight") == 0:
            notes.add("an answer is marked as not to be learned")
        if (is_answer and not answered) or (says_something(message) and not broken_off):
            messages.append(message)
        elif role == SYSTEM:
            notes.add("empty system turn removed")
        elif not any(before["role"] == USER for before in messages):
            notes.add(f"leading {role} turns cut")
        else:
            _check_answered(messages, turns[place:], finish if broken_off else None)
            notes.add(f"cut at an answer that was broken off: {finish}" if broken_off else "cut at an empty turn")
            break
    return messages


def _check_answered(messages: list[dict[str, Any]], cut: list[Any], broken_off: str | None) -> None:
    """Name what stands before the first answer, where what is cut away holds it."""
    roles = [message["role"] for message in messages]
    if ASSISTANT in roles[roles.index(USER) :]:
        return
    if broken_off:
        raise Dropped(f"the first answer was broken off: {broken_off}")
    if any(message["role"] == ASSISTANT and says_something(message) for message in map(message_of, cut)):
        raise Dropped("an empty turn before the first answer")


def _shaped(messages: list[dict[str, Any]], notes: set[str], answered: bool) -> list[dict[str, Any]]:
    """System turns, then from the first question to the last answer, or to where the last question's would stand."""
    roles = [message["role"] for message in messages]
    if USER not in roles:
        empty = "leading user turns cut" in notes
        named = "every user turn is empty" if empty else "no user turn"
        raise Dropped(named if empty or ASSISTANT in roles or not answered else "no answer")
    first = roles.index(USER)
    last = len(roles) - 1 - roles[::-1].index(USER)
    if not answered and ASSISTANT not in roles[last:]:
        messages = [*messages[: last + 1], {"role": ASSISTANT, "content": ""}]
        roles = [*roles[: last + 1], ASSISTANT]
    if ASSISTANT not in roles[first:]:
        raise Dropped("no answer")
    if any(message["role"] == ASSISTANT and not says_something(message) for message in messages):
        notes.add("a question without an answer")
    end = len(roles) - roles[::-1].index(ASSISTANT)
    notes.update(f"leading {role} turns cut" for role in roles[:first] if role != SYSTEM)
    if end < len(roles):
        notes.add("turns after the last answer cut")
    return [message for message in messages[:first] if message["role"] == SYSTEM] + messages[first:end]


def _id(record: dict[str, Any], place: str) -> str:
    name = first_of(record, *IDS)
    return str(name) if isinstance(name, str | int) and name != "" else place


def _check_text(conversation: Conversation) -> None:
    """What cannot be written as UTF-8 or as JSON cannot be tokenised or stored either."""
    try:
        whole = [conversation.id, conversation.messages, conversation.tools]
        json.dumps(whole, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Dropped("text with lone surrogates") from None
    except TypeError:
        raise Dropped("a value that is not JSON") from None
