"""A record of any known layout -> its turns, as the dataset writes them."""

from __future__ import annotations

import json
from typing import Any

USER, ASSISTANT, SYSTEM, TOOL = "user", "assistant", "system", "tool"
LISTS = ("conversations", "messages", "conversation")  # lists of turns: ShareGPT, OpenAI, LMSYS and WildChat
ANSWERS = {  # where a record of one question has its answer
    "instruction": ("output", "response", "completion"),
    "prompt": ("completion", "response", "output"),
    "question": ("answer", "response"),
    "query": ("response", "answer"),
}
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
MARKS = ("weight", "loss_weight", "loss_scale", "train", "training", "loss", "label")  # 0 or false: not learned
NUMBERS = ("weight", "loss_weight", "loss_scale")  # of which anything but 0 and 1 cannot be followed


class Dropped(Exception):
    """The reason for which a record gives no conversation."""


def layout_of(record: Any) -> str | None:
    """The key that holds the turns or the question, if the record has one that is known."""
    if not isinstance(record, dict):
        return None
    layout = next((key for key in LISTS if record.get(key) is not None), None)
    if layout is None and isinstance(record.get("turns"), list):
        layout = "turns"
    if layout is None and _all_of(record.get("data"), str):
        layout = "data"
    layout = layout or next((key for key in ANSWERS if record.get(key) not in (None, "")), None)
    return "chosen" if layout is None and _all_of(record.get("chosen"), dict) else layout


def turns_of(record: dict[str, Any], notes: set[str]) -> list[Any]:
    """The record's turns, questions without an answer followed by an empty one."""
    layout = layout_of(record)
    if layout is None:
        raise Dropped("unknown layout: keys " + ", ".join(shown(key) for key in sorted(record, key=str)[:6]))
    check_media(record)
    turns = _turns_at(layout, record, notes)
    if not turns:
        raise Dropped("no turns")
    turns = _with_chosen(turns, record.get("chosen"), notes)
    finish = record.get("finish_reason")
    if finish is not None and isinstance(turns[-1], dict):
        turns = [*turns[:-1], {"finish_reason": finish, **turns[-1]}]
    system = first_of(record, "system", "system_prompt")
    return [{"role": SYSTEM, "content": system}, *turns] if system else turns


def check_wanted(record: dict[str, Any]) -> None:
    """Refuse a record that is marked as a whole as not to be learned; a label of 0 may be a class of anything."""
    for key in MARKS:
        if record.get(key) is False or (key in NUMBERS and record.get(key) == 0):
            raise Dropped(f"marked as not to be learned: {key}")


def check_media(values: dict[str, Any]) -> None:
    """Refuse a record or a turn that has images, videos or sound beside its text."""
    for key in MEDIA:
        media = values.get(key)
        if any(media) if isinstance(media, list) else media:
            raise Dropped(f"{key} beside the text")


def parsed(value: Any, what: str) -> Any:
    """JSON text as what it says, anything else as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        raise Dropped(f"{what} not JSON") from None


def first_of(values: dict[str, Any], *keys: str) -> Any:
    """The first of these that is there; a table from Arrow holds None for keys that a record lacks."""
    return next((values[key] for key in keys if values.get(key) is not None), None)


def shown(value: Any) -> str:
    """A word of the data on one short printable line."""
    return repr(value)[1:-1][:40] if isinstance(value, str) else type(value).__name__


def _turns_at(layout: str, record: dict[str, Any], notes: set[str]) -> list[Any]:
    """The turns that one key holds, in whichever form."""
    value = record[layout]
    if layout in LISTS:
        value = parsed(value, f"{layout}: text that is")
        if not isinstance(value, list):
            raise Dropped(f"{layout}: not a list")
        return value
    if layout == "chosen":  # what stands there is a whole conversation, and is taken below
        return value
    if layout == "data":  # UltraChat: user and assistant in turn
        return [{"role": (USER, ASSISTANT)[place % 2], "content": text} for place, text in enumerate(value)]
    if layout == "turns":
        return _asked(value)
    if isinstance(value, dict):
        return _best_path(value, notes)
    return _pair(layout, record)


def _asked(values: list[Any]) -> list[Any]:
    """Questions, as text or as turns without a role, each with room for its answer; turns with roles as they are."""
    if any(isinstance(value, dict) and first_of(value, "role", "from") is not None for value in values):
        return values
    texts = [first_of(value, "content", "value") if isinstance(value, dict) else value for value in values]
    if not all(isinstance(text, str) and text.strip() for text in texts):
        raise Dropped("turns that are no texts")
    return [{"role": role, "content": content} for text in texts for role, content in ((USER, text), (ASSISTANT, None))]


def _pair(layout: str, record: dict[str, Any]) -> list[Any]:
    """A question and what is added to it, its answer, and the history of both before it."""
    question, answer, history = record[layout], first_of(record, *ANSWERS[layout]), record.get("history") or []
    if first_of(record, "choices", "options") is not None:
        raise Dropped("a question with choices")
    if added := first_of(record, "input", "context") if layout in ("instruction", "question") else None:
        if not isinstance(question, str) or not isinstance(added, str):
            raise Dropped(f"{layout} or input: not text")
        question = f"{question}\n\n{added}"
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise Dropped("history: not a list of pairs")
    if answer is None and "rejected" in record and isinstance(record.get("chosen"), str):
        answer = record["chosen"]
    before = [
        {"role": role, "content": text} for pair in history for role, text in zip((USER, ASSISTANT), pair, strict=True)
    ]
    asked = [{"role": USER, "content": question}]
    if isinstance(question, list):
        asked = _asked(question)
        asked = asked if asked is question else asked[:-1]  # the place of the answer that follows
    return [*before, *asked, *(answer if _all_of(answer, dict) else [{"role": ASSISTANT, "content": answer}])]


def _best_path(node: Any, notes: set[str]) -> list[Any]:
    """From the root of a tree of messages, the reply of the best rank each time."""
    notes.add("message tree: the best-ranked reply each time")
    turns: list[Any] = []
    while isinstance(node, dict):
        turns.append({key: node.get(key) for key in ("role", "text")})
        replies = [reply for reply in node.get("replies") or [] if isinstance(reply, dict)]
        node = min(replies, key=_rank, default=None)
    return turns


def _rank(reply: dict[str, Any]) -> float:
    rank = reply.get("rank")
    return rank if isinstance(rank, int | float) else float("inf")


def _with_chosen(turns: list[Any], chosen: Any, notes: set[str]) -> list[Any]:
    """The turns with the answer that was preferred; one with its question in it is the whole conversation."""
    chosen = [chosen] if isinstance(chosen, dict) else chosen
    if not _all_of(chosen, dict):
        return turns
    notes.add("preference record: the chosen answer is taken")
    if any(first_of(turn, "role", "from") in (USER, "human") for turn in chosen):
        return chosen
    answered = isinstance(turns[-1], dict) and "content" in turns[-1] and turns[-1]["content"] is None
    return [*(turns[:-1] if answered else turns), *chosen]


def _all_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, kind) for item in value)
