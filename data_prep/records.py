"""One record of any known layout -> a conversation, or the reason for which it gives none."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from data_prep.messages import BROKEN_OFF, TRUNCATED, finish_of, message_of, says_something, tools_of
from data_prep.turns import ASSISTANT, SYSTEM, USER, Dropped, check_wanted, first_of, turns_of

IDS = ("id", "conversation_id", "conversation_hash", "uuid", "uid", "prompt_id", "question_id", "message_tree_id")


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages as OpenAI writes them: `role` and `content`; an answer may have tool calls, reasoning and a weight."""

    id: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


def conversation_of(record: Any, place: str, *, answered: bool = True) -> tuple[Conversation, set[str]]:
    """The conversation of a record, and notes of what was changed; `place` is its id where the record has none.

    With `answered=False` the answers are yet to come: questions alone will do, and the answers are not checked.
    """
    if not isinstance(record, dict):
        raise Dropped("not an object")
    notes: set[str] = set()
    try:
        turns = turns_of(record, notes)
        if answered:
            check_wanted(record)
        messages = _trim(_messages_of(turns, notes, answered), notes, answered)
        name = first_of(record, *IDS)
        name = str(name) if isinstance(name, str | int) and name != "" else place
        conversation = Conversation(name, messages, tools_of(first_of(record, "tools", "functions")))
        _check_text(conversation)
    except RecursionError:
        raise Dropped("nested too deeply") from None
    return conversation, notes


def _messages_of(turns: list[Any], notes: set[str], answered: bool) -> list[dict[str, Any]]:
    """The messages up to the first that is empty or broken off; before the first question such are left out."""
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
            _check_first_answer(messages, turns[place:], finish if broken_off else None)
            notes.add(f"cut at an answer that was broken off: {finish}" if broken_off else "cut at an empty turn")
            break
    return messages


def _check_first_answer(messages: list[dict[str, Any]], cut_turns: list[Any], broken_off: str | None) -> None:
    """Refuse a conversation of which the cut leaves questions alone, if what is cut away has an answer."""
    roles = [message["role"] for message in messages]
    if ASSISTANT in roles[roles.index(USER) :]:
        return
    if broken_off:
        raise Dropped(f"the first answer was broken off: {broken_off}")
    if any(message["role"] == ASSISTANT and says_something(message) for message in map(message_of, cut_turns)):
        raise Dropped("an empty turn before the first answer")


def _trim(messages: list[dict[str, Any]], notes: set[str], answered: bool) -> list[dict[str, Any]]:
    """System turns, then from the first question to the last answer; without `answered`, an empty one may be added."""
    roles = [message["role"] for message in messages]
    if USER not in roles:
        if "leading user turns cut" in notes:
            raise Dropped("every user turn is empty")
        raise Dropped("no user turn" if ASSISTANT in roles or not answered else "no answer")
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


def _check_text(conversation: Conversation) -> None:
    """Refuse what cannot be written as UTF-8 or as JSON: it cannot be tokenised or stored either."""
    try:
        json.dumps([conversation.id, conversation.messages, conversation.tools], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Dropped("text with lone surrogates") from None
    except TypeError:
        raise Dropped("a value that is not JSON") from None
