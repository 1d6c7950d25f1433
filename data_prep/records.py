"""One record of any known layout -> a conversation, or the reason for which it is none."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

USER, ASSISTANT, SYSTEM, TOOL = "user", "assistant", "system", "tool"
CALLS = ("function_call", "tool_call")  # turns whose text is a call
ROLES = {
    **dict.fromkeys(("human", "user", "prompter"), USER),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bot", "model", "bard", "bing", "claude", *CALLS), ASSISTANT),
    **dict.fromkeys(("system", "developer"), SYSTEM),
    **dict.fromkeys(("observation", "tool", "function", "tool_response", "ipython"), TOOL),
}
LAYOUTS = ("conversations", "messages", "instruction")
VISIBLE = re.compile(r"[^\s\u200b-\u200d\u2060\ufeff]")  # zero-width characters alone are no answer


class Dropped(Exception):
    """The reason for which a record gives no conversation."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns as OpenAI writes them: `role` and `content`; an assistant's may carry calls, reasoning and a weight."""

    id: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


def conversation_of(record: Any, place: str) -> tuple[Conversation, set[str]]:
    """The conversation and what was changed in it; `place` is its id where the record has none."""
    if not isinstance(record, dict):
        raise Dropped("not an object")
    notes: set[str] = set()
    try:
        messages = _shaped(_until_empty(_turns(record, notes), notes), notes)
        conversation = Conversation(_id(record, place), messages, _tools(_first(record, "tools", "functions")))
        _check_text(conversation)
    except RecursionError:
        raise Dropped("nested too deeply") from None
    return conversation, notes


def layout_of(record: Any) -> str | None:
    """The key that holds the turns, if the record has one that is known."""
    return next((key for key in LAYOUTS if record.get(key) is not None), None) if isinstance(record, dict) else None


def parsed(value: Any, what: str) -> Any:
    """JSON text as what it says, anything else as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        raise Dropped(f"{what} not JSON") from None


def _turns(record: dict[str, Any], notes: set[str]) -> list[Any]:
    """The turns as the record has them, of whichever layout."""
    layout = layout_of(record)
    if layout is None:
        raise Dropped("unknown layout: keys " + ", ".join(_shown(key) for key in sorted(record)[:6]))
    turns = _alpaca(record) if layout == "instruction" else parsed(record[layout], f"{layout}: text that is")
    if not isinstance(turns, list):
        raise Dropped(f"{layout}: not a list")
    if not turns:
        raise Dropped("no turns")
    if isinstance(chosen := record.get("chosen"), dict):
        notes.add("preference record: the chosen answer is taken")
        turns = [*turns, chosen]
    system = record.get("system")
    return [{"role": SYSTEM, "content": system}, *turns] if system else turns


def _alpaca(record: dict[str, Any]) -> list[Any]:
    """Instruction and input are one question, the output its answer, the history what went before."""
    question, added, history = record["instruction"], record.get("input"), record.get("history") or []
    if added:
        if not isinstance(question, str) or not isinstance(added, str):
            raise Dropped("instruction or input: not text")
        question = f"{question}\n\n{added}"
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise Dropped("history: not a list of pairs")
    pairs = [*history, [question, record.get("output")]]
    return [
        {"role": role, "content": said} for pair in pairs for role, said in zip((USER, ASSISTANT), pair, strict=True)
    ]


def _until_empty(turns: Iterable[Any], notes: set[str]) -> list[dict[str, Any]]:
    """The messages up to the first that says nothing."""
    messages: list[dict[str, Any]] = []
    for message in map(_message, turns):
        if VISIBLE.search(message["content"]) or "tool_calls" in message:
            messages.append(message)
        elif message["role"] == SYSTEM:
            notes.add("empty system turn removed")
        else:
            notes.add("cut at an empty turn")
            break
    return messages


def _shaped(messages: list[dict[str, Any]], notes: set[str]) -> list[dict[str, Any]]:
    """System turns, then from the first question to the last answer."""
    roles = [message["role"] for message in messages]
    if ASSISTANT in roles and USER not in roles:
        raise Dropped("no user turn")
    first = roles.index(USER) if USER in roles else 0
    if ASSISTANT not in roles[first:]:
        raise Dropped("no answer")
    end = len(roles) - roles[::-1].index(ASSISTANT)
    notes.update(f"leading {role} turns cut" for role in roles[:first] if role != SYSTEM)
    if end < len(roles):
        notes.add("turns after the last answer cut")
    return [message for message in messages[:first] if message["role"] == SYSTEM] + messages[first:end]


def _message(turn: Any) -> dict[str, Any]:
    """One turn in OpenAI's words."""
    if not isinstance(turn, dict):
        raise Dropped("a turn that is not an object")
    speaker, content = _first(turn, "from", "role"), _first(turn, "value", "content")
    speaker = speaker.strip().lower() if isinstance(speaker, str) else speaker
    role = ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise Dropped("a turn without a role" if speaker is None else f"unknown role {_shown(speaker)!r}")
    text, thought, calls = ("", "", _calls(content, "function_call")) if speaker in CALLS else _parts(content)
    thought += _text(_first(turn, "reasoning_content", "reasoning", "thinking"), "reasoning_content")
    calls += _calls(_first(turn, "tool_calls", "function_call") or [], "tool_calls")
    if role != ASSISTANT and (thought or calls):
        raise Dropped(f"reasoning or tool calls in a turn of the {role}")
    message = {"role": role, "content": text, "reasoning_content": thought, "tool_calls": calls}
    message.update({key: _text(turn.get(key), key) for key in ("name", "tool_call_id")})
    message = {key: value for key, value in message.items() if value or key == "content"}
    return message | _weight(turn) if role == ASSISTANT else message


def _parts(content: Any) -> tuple[str, str, list[dict[str, Any]]]:
    """What a content says, thinks and calls."""
    if not isinstance(content, list):
        return _text(content, "content"), "", []
    text, thought, calls = "", "", []
    for part in content:
        kind = part.get("type") or "text" if isinstance(part, dict) else type(part).__name__
        if kind == "text":
            text += _text(_first(part, "text", "value"), "a text part")
        elif kind in ("reasoning", "thinking"):
            thought += _text(_first(part, "text", "value", kind), "a reasoning part")
        elif kind == "tool_call":
            calls += _calls(_first(part, "value", "tool_call") or part, "tool_call")
        else:
            raise Dropped(f"content that is not text: {_shown(kind)}")
    return text, thought, calls


def _calls(value: Any, what: str) -> list[dict[str, Any]]:
    """Tool calls, from JSON text, one object or a list of them."""
    calls = parsed(value, f"{what} that is")
    return [_call(one) for one in (calls if isinstance(calls, list) else [calls])]


def _call(call: Any) -> dict[str, Any]:
    """One tool call, its arguments as an object, since templates print them as JSON themselves."""
    function = (call.get("function") or call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Dropped("a tool call without a name")
    arguments = parsed(_first(function, "arguments", "parameters") or {}, "tool call arguments that are")
    if not isinstance(arguments, dict):
        raise Dropped("tool call arguments that are not an object")
    identity = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**identity, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    """The tools that the assistant may call, each wrapped as OpenAI does."""
    tools = parsed(tools or None, "tools that are")
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list):
        raise Dropped("tools that are not a list")
    return [_tool(tool) for tool in tools]


def _tool(tool: Any) -> dict[str, Any]:
    wrapped = tool if isinstance(tool, dict) and "function" in tool else {"function": tool}
    function = wrapped["function"]
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Dropped("a tool without a name")
    return {"type": "function", **wrapped}


def _weight(turn: dict[str, Any]) -> dict[str, int]:
    weight = turn.get("weight")
    if weight is not None and weight not in (0, 1):
        raise Dropped("weight that is neither 0 nor 1")
    return {} if weight is None else {"weight": int(weight)}


def _id(record: dict[str, Any], place: str) -> str:
    own = _first(record, "id", "conversation_id", "uuid")
    return str(own) if isinstance(own, str | int) and own != "" else place


def _text(value: Any, what: str) -> str:
    if value is not None and not isinstance(value, str):
        raise Dropped(f"{what} that is not text: {type(value).__name__}")
    return value or ""


def _first(values: dict[str, Any], *keys: str) -> Any:
    """The first of these that is there; a table from Arrow holds None for keys that a record lacks."""
    return next((values[key] for key in keys if values.get(key) is not None), None)


def _shown(value: Any) -> str:
    """A word of the data on one short printable line."""
    return repr(value)[1:-1][:40] if isinstance(value, str) else type(value).__name__


def _check_text(conversation: Conversation) -> None:
    """What cannot be written as UTF-8 or as JSON cannot be tokenised or stored either."""
    try:
        whole = [conversation.id, conversation.messages, conversation.tools]
        json.dumps(whole, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Dropped("text with lone surrogates") from None
    except TypeError:
        raise Dropped("a value that is not JSON") from None
