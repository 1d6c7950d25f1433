"""Convert a record of any known layout to a conversation in OpenAI's format, or say why that fails."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from data_prep.chats.images import Source, pick_images, take_images
from data_prep.chats.marks import (
    BROKEN,
    CUT_OFF,
    is_broken,
    is_truncated,
    medium_in,
    notes_of_marks,
    tag_in,
    unfinished_reason,
    weight_of,
)
from data_prep.chats.token_rows import IDS_NOTE, MASK, TokenRow, token_row_of
from data_prep.chats.turns import (
    ASSISTANT,
    CALLS,
    SYSTEM,
    TOOL,
    USER,
    Dropped,
    check_media,
    check_wanted,
    describe,
    first_of,
    is_spoken_by,
    parse_json,
    role_of,
    turns_of,
    with_reasons,
)

IDS = (
    "id",
    "conversation_id",
    "conversation_hash",
    "uuid",
    "uid",
    "prompt_id",
    "question_id",
    "message_tree_id",
)
NO_ANSWER = "no answer"  # why a question alone is dropped
TRUNCATED_NOTE = "a truncated answer is not learned"
# Zero-width characters alone are no answer.
VISIBLE = re.compile(r"[^\s\u200b-\u200d\u2060\ufeff]")


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in OpenAI's format: `role` and `content`; an answer may have tool calls, reasoning and a weight."""

    id: str
    messages: list[dict[str, Any]]  # with a mark in the content for each image
    tools: list[dict[str, Any]] | None = None
    images: tuple[Source, ...] = ()
    # token ids that stand for the messages, which are then left out
    row: TokenRow | None = None


def conversation_of(
    record: Any, place: str, *, answered: bool = True, images: bool = False
) -> tuple[Conversation, set[str]]:
    """Return the conversation of a record, and notes on changes; `place` is its id if the record has none.

    With `answered=False` the answers are yet to come: questions alone will do, and the answers are not checked.
    Records with images are read only with `images=True`. Token ids with a loss mask are taken in place of messages.
    """
    if not isinstance(record, dict):
        raise Dropped("not an object")
    row = token_row_of(record, place)
    if row is not None and not answered:
        # The messages are read, and its mask is not one of turns.
        record = {**record, MASK: None}
    elif row is not None:
        check_wanted(record)
        return Conversation(_name_of(record, place), [], row=row), {IDS_NOTE}
    notes: set[str] = set()
    sources: list[Source] = []
    try:
        if images:
            record, sources, notes = take_images(record)
        turns = turns_of(record, notes)
        if answered:
            check_wanted(record)
            turns = with_reasons(turns, record, notes)
            notes |= notes_of_marks(record, turns)
        messages = _trim(_messages_of(turns, notes, answered), notes, answered)
        if sources:
            # Images of turns that were cut are left out.
            messages, sources = pick_images(messages, sources)
        tools = tools_of(first_of(record, "tools", "functions"))
        conversation = Conversation(_name_of(record, place), messages, tools, tuple(sources))
        _check_text(conversation)
    except RecursionError:
        raise Dropped("nested too deeply") from None
    return conversation, notes


def _name_of(record: dict[str, Any], place: str) -> str:
    """Return the record's id; its place if it has none."""
    name = first_of(record, *IDS)
    if not isinstance(name, str | int) or name == "":
        name = place
    return str(name)


def reason_to_drop(answer: dict[str, Any]) -> str | None:
    """Return why a record with this answer gives no conversation, None if it gives one."""
    question = {"role": USER, "content": "?"}
    try:
        conversation_of({"messages": [question, answer]}, "an answer")
    except Dropped as reason:
        return str(reason)
    return None


def _messages_of(turns: list[Any], notes: set[str], answered: bool) -> list[dict[str, Any]]:
    """Return the messages up to the first that is empty or broken off; before the first question such are left out.

    An empty answer is left out with its question, as nobody has read it: later turns follow complete ones.
    """
    messages: list[dict[str, Any]] = []
    for i, turn in enumerate(turns):
        message = message_of(turn)
        role = message["role"]
        finish = unfinished_reason(turn)
        is_answer = role == ASSISTANT
        is_broken_off = is_answer and finish is not None and not is_truncated(finish)
        if is_answer and answered:
            _mark_answer(message, finish, messages, notes)
        tag = tag_in(message["content"])
        if tag:
            notes.add(f"a tag that may stand for a medium is taken as text: {tag}")
        if (is_answer and not answered) or (says_something(message) and not is_broken_off):
            messages.append(message)
        elif role == SYSTEM:
            notes.add("empty system turn removed")
        elif (
            role == TOOL
            and messages
            and (messages[-1]["role"] == TOOL or "tool_calls" in messages[-1])
        ):
            # A tool may return nothing.
            messages.append(message)
        elif is_answer and not is_broken_off and _goes_on(messages, turns[i + 1 :]):
            while messages and messages[-1]["role"] == USER:
                messages.pop()
            notes.add("a question with an empty answer is left out")
        elif not any(earlier["role"] == USER for earlier in messages):
            notes.add(f"leading {role} turns cut")
        else:
            _check_first_answer(messages, turns[i:], finish if is_broken_off else None)
            if is_broken_off:
                notes.add(f"cut at an answer that was broken off: {finish}")
            elif any(is_spoken_by(ASSISTANT, later) for later in turns[i + 1 :]):
                notes.add(f"cut at an empty turn of the {role}, on which later answers depend")
            else:
                notes.add("cut at an empty turn")
            break
    return messages


def _mark_answer(
    message: dict[str, Any], finish: str | None, history: list[dict[str, Any]], notes: set[str]
) -> None:
    """Give an answer the weight 0 if it was truncated or has broken characters, unless a mark of its own decides."""
    truncated = finish is not None and is_truncated(finish)
    if truncated and message.get("weight") == 1:
        notes.add("a truncated answer is learned without an end mark")
        message[CUT_OFF] = finish
        # the limit may cut through a character, whose first bytes are decoded as this mark
        message["content"] = message["content"].rstrip(BROKEN)
    elif truncated:
        notes.add(TRUNCATED_NOTE)
        message["weight"] = 0
    elif message.get("weight") == 0:
        notes.add("an answer is marked as not to be learned")
    elif finish is None:
        text = message.get("reasoning_content", "") + message["content"]
        if is_broken(text, "stop", history):
            notes.add("an answer with broken characters (U+FFFD) is not learned")
            message["weight"] = 0


def _goes_on(messages: list[dict[str, Any]], later: list[Any]) -> bool:
    """Return whether an empty answer here is between two questions, of which the first may be left out."""
    return (
        bool(messages)
        and messages[-1]["role"] == USER
        and bool(later)
        and is_spoken_by(USER, later[0])
    )


def _check_first_answer(
    messages: list[dict[str, Any]], cut_turns: list[Any], broken_off: str | None
) -> None:
    """Refuse a conversation of which a cut leaves only questions, if the turns that are cut have an answer."""
    roles = [message["role"] for message in messages]
    if ASSISTANT in roles[roles.index(USER) :]:
        return
    if broken_off:
        raise Dropped(f"the first answer was broken off: {broken_off}")
    for message in map(message_of, cut_turns):
        if message["role"] == ASSISTANT and says_something(message):
            raise Dropped("an empty turn before the first answer")


def _trim(messages: list[dict[str, Any]], notes: set[str], answered: bool) -> list[dict[str, Any]]:
    """Return system turns, then the turns from the first question to the last answer.

    Without `answered`, a last question gets an empty answer, which is to be written.
    """
    roles = [message["role"] for message in messages]
    if USER not in roles:
        if "leading user turns cut" in notes:
            raise Dropped("every user turn is empty")
        if ASSISTANT in roles or not answered:
            raise Dropped("no user turn")
        raise Dropped(NO_ANSWER)
    first = roles.index(USER)
    after_last_question = len(roles) - roles[::-1].index(USER)
    if not answered and ASSISTANT not in roles[after_last_question:]:
        messages = [*messages[:after_last_question], {"role": ASSISTANT, "content": ""}]
        roles = [*roles[:after_last_question], ASSISTANT]
    if ASSISTANT not in roles[first:]:
        raise Dropped(NO_ANSWER)
    if any(message["role"] == ASSISTANT and not says_something(message) for message in messages):
        notes.add("a question without an answer")
    end = len(roles) - roles[::-1].index(ASSISTANT)
    notes.update(f"leading {role} turns cut" for role in roles[:first] if role != SYSTEM)
    if end < len(roles):
        notes.add("turns after the last answer cut")
    # A system turn in the middle stays where it is.
    system_turns = [message for message in messages[:first] if message["role"] == SYSTEM]
    return system_turns + messages[first:end]


def _check_text(conversation: Conversation) -> None:
    """Refuse what cannot be written as UTF-8 or as JSON: it cannot be tokenised or stored either."""
    try:
        json.dumps(
            [conversation.id, conversation.messages, conversation.tools], ensure_ascii=False
        ).encode()
    except UnicodeEncodeError:
        raise Dropped("text with lone surrogates") from None
    except TypeError:
        raise Dropped("a value that is not JSON") from None


def message_of(turn: Any) -> dict[str, Any]:
    """Return a turn's role, content, reasoning, tool calls and, if it has one, its weight."""
    role, speaker = role_of(turn)
    check_media(turn)
    content = first_of(turn, "value", "content", "text")
    if speaker in CALLS:
        # Such a turn is a call and nothing else.
        text, reasoning, calls = "", "", calls_of(content, "function_call")
    else:
        text, reasoning, calls = parts_of(content)
    medium = medium_in(text, asked=role == USER)
    if medium:
        raise Dropped(f"a placeholder in the text: {describe(medium)}")
    reasoning += _text(
        first_of(turn, "reasoning_content", "reasoning", "thinking"), "reasoning_content"
    )
    calls += calls_of(first_of(turn, "tool_calls", "function_call") or [], "tool_calls")
    if role != ASSISTANT and (reasoning or calls):
        raise Dropped(f"reasoning or tool calls in a turn of the {role}")
    message: dict[str, Any] = {"role": role, "content": text}
    optional: dict[str, Any] = {"reasoning_content": reasoning, "tool_calls": calls}
    for key in ("name", "tool_call_id"):
        optional[key] = _text(turn.get(key), key)
    message |= {key: value for key, value in optional.items() if value}
    if role == ASSISTANT:
        message |= _weight(turn)
    return message


def says_something(message: dict[str, Any]) -> bool:
    """Return whether a message has visible text or tool calls."""
    return bool(VISIBLE.search(message["content"])) or "tool_calls" in message


def tools_of(tools: Any) -> list[dict[str, Any]] | None:
    """Return the tools that the assistant may call, each wrapped as OpenAI does."""
    tools = parse_json(tools or None, "tools that are")
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list):
        raise Dropped("tools that are not a list")
    return [_tool(parse_json(tool, "a tool that is")) for tool in tools]


def parts_of(content: Any) -> tuple[str, str, list[dict[str, Any]]]:
    """Return the text, the reasoning and the tool calls in a content."""
    if not isinstance(content, list):
        return _text(content, "content"), "", []
    text = ""
    reasoning = ""
    calls = []
    for part in content:
        kind = type(part).__name__
        if isinstance(part, dict):
            kind = part.get("type") or "text"
        if kind == "text":
            text += _text(first_of(part, "text", "value"), "a text part")
        elif kind in ("reasoning", "thinking"):
            reasoning += _text(first_of(part, "text", "value", kind), "a reasoning part")
        elif kind == "tool_call":
            calls += calls_of(first_of(part, "value", "tool_call") or part, "tool_call")
        else:
            raise Dropped(f"content that is not text: {describe(kind)}")
    return text, reasoning, calls


def calls_of(value: Any, name: str) -> list[dict[str, Any]]:
    """Return the tool calls in JSON text, in one object or in a list of objects."""
    calls = parse_json(value, f"{name} that is")
    if not isinstance(calls, list):
        calls = [calls]
    return [_call(call) for call in calls]


def _call(call: Any) -> dict[str, Any]:
    """Return one tool call with its arguments as an object, since templates print them as JSON themselves."""
    function = None
    if isinstance(call, dict):
        function = call.get("function") or call
    function = _check_name(function, "a tool call")
    arguments = parse_json(
        first_of(function, "arguments", "parameters") or {}, "tool call arguments that are"
    )
    if not isinstance(arguments, dict):
        raise Dropped("tool call arguments that are not an object")
    call_id = {}
    if isinstance(call.get("id"), str):
        call_id["id"] = call["id"]
    return {
        **call_id,
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _tool(tool: Any) -> dict[str, Any]:
    wrapped = tool
    if not isinstance(tool, dict) or "function" not in tool:
        wrapped = {"function": tool}
    _check_name(wrapped["function"], "a tool")
    return {"type": "function", **wrapped}


def _check_name(function: Any, kind: str) -> dict[str, Any]:
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Dropped(f"{kind} without a name")
    return function


def _weight(turn: dict[str, Any]) -> dict[str, int]:
    """Return the weight of an answer, if a mark says whether it is learned."""
    try:
        weight = weight_of(turn)
    except ValueError as error:
        raise Dropped(str(error)) from None
    if weight is None:
        return {}
    return {"weight": weight}


def _text(value: Any, name: str) -> str:
    if value is not None and not isinstance(value, str):
        raise Dropped(f"{name} that is not text: {type(value).__name__}")
    return value or ""
