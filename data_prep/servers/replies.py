"""Reading a server's JSON, whichever form it has: odd values are named, and none goes further."""

from __future__ import annotations

from typing import Any

from data_prep.chats.marks import is_filtered, is_truncated, unfinished_reason
from data_prep.chats.records import calls_of, parts_of, reason_to_drop, says_something
from data_prep.chats.turns import Dropped
from data_prep.servers.answers import FILTERED, TRUNCATED, Answer


class OddReply(ValueError):
    """A server's mistake, as a predicate."""


def models_in(reply: Any) -> list[dict[str, Any]]:
    """The models that a server lists, each with its `id` as text."""
    listed = (reply.get("data") or reply.get("models") or []) if isinstance(reply, dict) else reply
    listed = [listed] if isinstance(listed, dict) else listed
    if not isinstance(listed, list):
        raise OddReply(f"sent a list of models that is {describe_type(listed)}")
    named = ({"id": entry} if isinstance(entry, str) else entry for entry in listed)
    return [entry for entry in named if isinstance(entry, dict) and isinstance(entry.get("id"), str)]


def whole_number(value: Any) -> int | None:
    """A whole number above 0, as it is or as text; None of anything else."""
    try:
        number = int(value) if isinstance(value, int | str) and not isinstance(value, bool) else 0
    except ValueError:
        return None
    return number if number > 0 else None


def first_choice(reply: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The first choice of a chat completion, with its message, and the tokens used."""
    choices = reply.get("choices") if isinstance(reply, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict) or not isinstance(choice.get("message"), dict):
        raise OddReply(f"sent no answer: {reply}")
    usage = reply.get("usage")
    return choice, usage if isinstance(usage, dict) else {}


def answer_in(choice: dict[str, Any], usage: dict[str, Any]) -> Answer:
    """The answer of a choice: its text, reasoning and calls, and why it ended."""
    message = choice["message"]
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    calls = message.get("tool_calls")
    try:
        text, thoughts, more_calls = parts_of(message.get("content"))
        if calls:
            calls_of(calls, "tool_calls")
    except Dropped as reason:
        raise OddReply(f"sent an answer with {reason}") from None
    if reasoning and not isinstance(reasoning, str):
        raise OddReply(f"sent an answer with reasoning that is {describe_type(reasoning)}")
    parts = {"reasoning_content": thoughts + (reasoning or ""), "tool_calls": calls or more_calls}
    answer = {"role": "assistant", "content": text} | {key: part for key, part in parts.items() if part}
    if says_something(answer) and (why := reason_to_drop(answer)):
        raise OddReply(f"sent an answer that cannot be learned from: {why}")
    written, read = (whole_number(usage.get(f"{part}_tokens")) or 0 for part in ("completion", "prompt"))
    return Answer(answer, finish_of(choice), written, read)


def finish_of(choice: dict[str, Any]) -> str:
    """Why an answer ended, in one word for all that met a limit, and one for all that a filter stopped."""
    reason = unfinished_reason(choice)
    if reason is None:
        finish_reason = choice.get("finish_reason")
        return finish_reason if isinstance(finish_reason, str) and finish_reason else "stop"
    if is_truncated(reason):
        return TRUNCATED
    if is_filtered(reason):
        return FILTERED
    raise OddReply(f"broke an answer off: finish_reason {reason}")


def describe_type(value: Any) -> str:
    """The name of a value's type in JSON's words."""
    names = {str: "text", dict: "an object", list: "a list", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
