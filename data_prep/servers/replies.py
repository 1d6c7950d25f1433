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
    """Return the models that a server lists, each with its `id` as text."""
    entries = reply
    if isinstance(reply, dict):
        entries = reply.get("data") or reply.get("models") or []
    if isinstance(entries, dict):
        entries = [entries]
    if not isinstance(entries, list):
        raise OddReply(f"sent a list of models that is {describe_type(entries)}")
    models = [{"id": entry} if isinstance(entry, str) else entry for entry in entries]
    return [
        model for model in models if isinstance(model, dict) and isinstance(model.get("id"), str)
    ]


def whole_number(value: Any) -> int | None:
    """Return a whole number above 0, given as it is or as text; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        return None
    try:
        number = int(value)
    except ValueError:
        return None
    return number if number > 0 else None


def first_choice(reply: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the first choice of a chat completion, with its message, and the tokens used."""
    choices = reply.get("choices") if isinstance(reply, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict) or not isinstance(choice.get("message"), dict):
        raise OddReply(f"sent no answer: {reply}")
    usage = reply.get("usage")
    return choice, usage if isinstance(usage, dict) else {}


def answer_in(choice: dict[str, Any], usage: dict[str, Any]) -> Answer:
    """Return the answer of a choice: its text, reasoning and calls, and why it ended."""
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
    answer: dict[str, Any] = {"role": "assistant", "content": text}
    thoughts += reasoning or ""
    if thoughts:
        answer["reasoning_content"] = thoughts
    # Calls are kept as they came: later requests repeat them to the server.
    if calls or more_calls:
        answer["tool_calls"] = calls or more_calls
    fault = reason_to_drop(answer) if says_something(answer) else None
    if fault:
        raise OddReply(f"sent an answer that cannot be learned from: {fault}")
    written = whole_number(usage.get("completion_tokens")) or 0
    read = whole_number(usage.get("prompt_tokens")) or 0
    return Answer(answer, finish_of(choice), written, read)


def finish_of(choice: dict[str, Any]) -> str:
    """Return why an answer ended, in one word for all that met a limit, and one for all that a filter stopped."""
    reason = unfinished_reason(choice)
    if reason is None:
        finish_reason = choice.get("finish_reason")
        if isinstance(finish_reason, str) and finish_reason:
            return finish_reason
        return "stop"
    if is_truncated(reason):
        return TRUNCATED
    if is_filtered(reason):
        return FILTERED
    raise OddReply(f"broke an answer off: finish_reason {reason}")


def describe_type(value: Any) -> str:
    """Return the name of a value's type in JSON's words."""
    names = {
        str: "text",
        dict: "an object",
        list: "a list",
        bool: "true or false",
        type(None): "null",
    }
    return names.get(type(value), "a number")
