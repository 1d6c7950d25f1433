"""Find the turns of a record of any known layout, each still in the dataset's own form."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from itertools import chain
from typing import Any

from data_prep.chats.marks import (
    FINISHES,
    LISTED_FINISHES,
    WEIGHTS,
    excluding_mark,
    media_key,
    unfinished_reason,
    with_names,
)

USER = "user"
ASSISTANT = "assistant"
SYSTEM = "system"
TOOL = "tool"
# Keys of lists of turns: ShareGPT, OpenAI, LMSYS and WildChat.
LISTS = ("conversations", "messages", "conversation")
# Speakers whose text is a call.
CALLS = ("function_call", "tool_call")
ROLES = {
    **dict.fromkeys(("human", "user", "prompter"), USER),
    **dict.fromkeys(("gpt", "assistant", "ai", "model", "chatgpt", "chatbot", "bot"), ASSISTANT),
    **dict.fromkeys(("bard", "bing", "claude", *CALLS), ASSISTANT),
    **dict.fromkeys(("system", "developer"), SYSTEM),
    **dict.fromkeys(
        ("observation", "tool", "function", "tool_response", "tool_result", "ipython"), TOOL
    ),
}
# Where a record of one question has its answer.
ANSWERS = {
    "instruction": ("output", "response", "completion"),
    "prompt": ("completion", "response", "output"),
    "question": ("answer", "response"),
    "query": ("response", "answer"),
}
# Half of a pair, which no valid text contains.
SURROGATE = re.compile("[\ud800-\udfff]")


class Dropped(Exception):
    """The reason for which a record gives no conversation."""


class Damaged(Dropped):
    """Text that cannot be read; where it is more than a line of its own, nobody knows how many records it held."""

    def __init__(self, reason: str, *, of_one_line: bool) -> None:
        super().__init__(reason)
        self.of_one_line = of_one_line


def layout_of(record: Any) -> str | None:
    """Return the key that holds the turns or the question, if the record has one that is known."""
    if not isinstance(record, dict):
        return None
    # The first of these that is there decides.
    is_there = {key: record.get(key) is not None for key in LISTS}
    is_there["turns"] = isinstance(record.get("turns"), list)
    is_there["data"] = _is_list_of(record.get("data"), str)
    is_there |= {key: record.get(key) not in (None, "") for key in ANSWERS}
    is_there["chosen"] = _is_list_of(record.get("chosen"), dict)
    return next((key for key in is_there if is_there[key]), None)


def turns_of(record: dict[str, Any], notes: set[str]) -> list[Any]:
    """Return the turns of a record; a question without an answer is followed by an answer without content."""
    layout = layout_of(record)
    if layout is None:
        raise Dropped(
            "unknown layout: keys "
            + ", ".join(describe(key) for key in sorted(record, key=str)[:6])
        )
    check_media(record)
    turns = _turns_in(layout, record, notes)
    if not turns:
        raise Dropped("no turns")
    turns = _with_chosen_answer(turns, record.get("chosen"), notes)
    for key, marks in with_names(record, WEIGHTS):
        if isinstance(marks, list):
            turns = _with_marks(turns, key, marks)
    # A reason beside the turns is that of the last answer, unless it has one itself.
    finish = unfinished_reason(record)
    if (
        finish is not None
        and isinstance(turns[-1], dict)
        and not any(with_names(turns[-1], FINISHES))
    ):
        turns = [*turns[:-1], {**turns[-1], "finish_reason": finish}]
    system = first_of(record, "system", "system_prompt")
    if system:
        turns = [{"role": SYSTEM, "content": system}, *turns]
    return turns


def with_reasons(turns: list[Any], record: dict[str, Any], notes: set[str]) -> list[Any]:
    """Return the turns with the reasons of a list beside them, which has one for each answer."""
    reasons = next((value for _, value in with_names(record, LISTED_FINISHES)), None)
    if not isinstance(reasons, list):
        return turns
    answers = [i for i, turn in enumerate(turns) if is_spoken_by(ASSISTANT, turn)]
    if len(answers) == len(reasons):
        turns = list(turns)
        for i, reason in zip(answers, reasons, strict=True):
            turns[i] = {"finish_reason": reason, **turns[i]}
        return turns
    if any(unfinished_reason({"finish_reason": reason}) for reason in reasons):
        notes.add("finish reasons that are not one for each answer: not read")
    return turns


def check_wanted(record: dict[str, Any]) -> None:
    """Refuse a record that is marked as not to be learned."""
    key = excluding_mark(record)
    if key:
        raise Dropped(f"marked as not to be learned: {describe(key)}")


def check_media(values: dict[str, Any]) -> None:
    """Refuse a record or a turn that has images, videos or sound beside its text."""
    key = media_key(values)
    if key:
        raise Dropped(f"{describe(key)} beside the text")


def parse_json(value: Any, name: str) -> Any:
    """Return the value of JSON text; anything but text stays as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise Dropped(f"{name} not JSON") from None


def role_of(turn: Any) -> tuple[str, str]:
    """Return a turn's role, and the dataset's own word for who speaks."""
    if not isinstance(turn, dict):
        raise Dropped("a turn that is not an object")
    speaker = first_of(turn, "from", "role")
    if speaker is None:
        raise Dropped("a turn without a role")
    role = None
    if isinstance(speaker, str):
        speaker = speaker.strip().lower()
        role = ROLES.get(speaker)
    if role is None:
        raise Dropped(f"unknown role {describe(speaker)!r}")
    return role, speaker


def is_spoken_by(role: str, turn: Any) -> bool:
    """Return whether a turn has this role; one that has none is cut away, and no error."""
    try:
        return role_of(turn)[0] == role
    except Dropped:
        return False


def first_of(values: dict[str, Any], *keys: str) -> Any:
    """Return the value of the first key that has one; a table from Arrow holds None for keys that a record lacks."""
    return next((values[key] for key in keys if values.get(key) is not None), None)


def describe(value: Any) -> str:
    """Return a text of the data on one short printable line, or the type of anything else."""
    if isinstance(value, str):
        return repr(value)[1:-1][:40]
    return type(value).__name__


def _turns_in(layout: str, record: dict[str, Any], notes: set[str]) -> list[Any]:
    """Return the turns that the layout's key holds, in whichever form."""
    value = record[layout]
    if layout in LISTS:
        value = parse_json(value, f"{layout}: text that is")
        if not isinstance(value, list):
            raise Dropped(f"{layout}: not a list")
        return value
    if layout == "chosen":
        # A whole conversation, which `_with_chosen_answer` takes.
        return value
    if layout == "data":
        # UltraChat: user and assistant in turn.
        return _alternate(value)
    if layout == "turns":
        return _questions(value)
    if isinstance(value, dict):
        return _best_path(value, notes)
    return _question_and_answer(layout, record)


def _questions(values: list[Any]) -> list[Any]:
    """Return texts or turns without roles as questions, an empty answer after each; turns with roles as they are."""
    if any(
        isinstance(value, dict) and first_of(value, "role", "from") is not None for value in values
    ):
        return values
    contents: list[Any] = []
    for value in values:
        text = value
        if isinstance(value, dict):
            text = first_of(value, "content", "value")
        if not isinstance(text, str) or not text.strip():
            raise Dropped("turns that are no texts")
        contents += [text, None]
    return _alternate(contents)


def _alternate(contents: Iterable[Any]) -> list[Any]:
    """Return turns with these contents, the first of the user, the second of the assistant, and so on."""
    return [
        {"role": (USER, ASSISTANT)[i % 2], "content": content} for i, content in enumerate(contents)
    ]


def _question_and_answer(layout: str, record: dict[str, Any]) -> list[Any]:
    """Return the history of a record of one question, the question with its input or context, and the answer."""
    question = record[layout]
    answer = first_of(record, *ANSWERS[layout])
    history = record.get("history") or []
    if first_of(record, "choices", "options") is not None:
        raise Dropped("a question with choices")
    context = None
    if layout in ("instruction", "question"):
        context = first_of(record, "input", "context")
    if context:
        if not isinstance(question, str) or not isinstance(context, str):
            raise Dropped(f"{layout} or input: not text")
        question = f"{question}\n\n{context}"
    if not isinstance(history, list) or not all(
        isinstance(pair, list) and len(pair) == 2 for pair in history
    ):
        raise Dropped("history: not a list of pairs")
    # A preference record may have its answers as texts.
    if answer is None and "rejected" in record and isinstance(record.get("chosen"), str):
        answer = record["chosen"]
    turns = [{"role": USER, "content": question}]
    if isinstance(question, list):
        turns = _questions(question)
        if turns is not question:
            # The answer takes the place of the empty one after the last question.
            turns = turns[:-1]
    answers = answer
    if not _is_list_of(answer, dict):
        answers = [{"role": ASSISTANT, "content": answer}]
    return [*_alternate(chain.from_iterable(history)), *turns, *answers]


def _best_path(node: Any, notes: set[str]) -> list[Any]:
    """Return the turns from the root of a message tree, following the reply of the best rank."""
    notes.add("message tree: the best-ranked reply each time")
    turns: list[Any] = []
    while isinstance(node, dict):
        turns.append({key: node.get(key) for key in ("role", "text")})
        replies = node.get("replies")
        if not isinstance(replies, list):
            break
        # Replies without a rank come last; of equal ranks the first is taken.
        node = min((reply for reply in replies if isinstance(reply, dict)), key=_rank, default=None)
    return turns


def _rank(reply: dict[str, Any]) -> float:
    rank = reply.get("rank")
    if isinstance(rank, int | float):
        return rank
    return float("inf")


def _with_chosen_answer(turns: list[Any], chosen: Any, notes: set[str]) -> list[Any]:
    """Return the turns with the preferred answer; `chosen` replaces them if it holds a question too."""
    if isinstance(chosen, dict):
        chosen = [chosen]
    if not _is_list_of(chosen, dict):
        return turns
    notes.add("preference record: the chosen answer is taken")
    if any(first_of(turn, "role", "from") in (USER, "human") for turn in chosen):
        return chosen
    last = turns[-1]
    # The chosen answer takes the place of an empty one.
    if isinstance(last, dict) and "content" in last and last["content"] is None:
        turns = turns[:-1]
    return [*turns, *chosen]


def _with_marks(turns: list[Any], key: str, marks: list[Any]) -> list[Any]:
    """Return the turns, each with its mark of a list that stands beside them."""
    if len(marks) != len(turns) or not all(isinstance(turn, dict) for turn in turns):
        raise Dropped(f"{describe(key)} that is not one mark for each turn")
    return [{key: mark, **turn} for turn, mark in zip(turns, marks, strict=True)]


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, kind) for item in value)
