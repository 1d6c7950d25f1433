"""Conversation -> the text that its chat template prints, and where in it the assistant speaks."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from data_prep.records import Conversation
from eagle.recipe import DataSection

Message = dict[str, Any]
Render = Callable[[list[Message], bool], str]
ANYTHING = "\ue000anything\ue000"  # an answer that no template prints by itself
SPECIAL = re.compile(r"<[^<>\s]{1,60}>|\[[^\[\]\s]{1,60}\]")  # text that is a special token, or looks like one
END = re.compile(r"(?i)end|eo[stm]\b|</s>|return|stop|sep")  # how special tokens that end a turn are named
OPENING = re.compile(r"start|begin|end|[^a-z]")  # what distinguishes the two tokens around a thought

REWRITES = "history rewritten by the template: several examples"
HISTORY_DIFFERS = "the turns before an answer are printed otherwise once it is given"
PROMPT_HOLDS = "the generation prompt ends with {!r}, which the template prints before no answer"
NO_MARK = "the template prints no end-of-turn mark"
EMPTY = "an answer of which the template prints nothing: not learned"
ALL_EMPTY = "the template prints nothing of any answer"
LEFT_OUT = "the template leaves out {}"


class Refused(Exception):
    """The reason for which a conversation gives no example."""


@dataclass(slots=True)
class Printed:
    """A text as the template prints it, and where in it the assistant speaks."""

    text: str
    answers: list[tuple[int, int]]


def render_answers(
    conversation: Conversation, tokenizer: Any, data: DataSection, stops: Sequence[str], notes: set[str]
) -> list[Printed]:
    """What is read: each answer after the prompt that serving shows, answers with the same history in one text."""
    messages = [{key: value for key, value in turn.items() if key != "weight"} for turn in conversation.messages]
    render, around = renderer(conversation, tokenizer, data), None
    parts: list[Printed] = []
    for place in learned(conversation, data.turns):
        text, start = render_answer(messages[: place + 1], render, notes)
        around = around or mark_and_trailer(messages[: place + 1], render, stops)
        text, end = without_trailer(text, start, *around)
        missing = set(missing_of_answer(messages[place], text[start:end]))
        if end <= start or is_empty(messages[: place + 1], missing, render):
            notes.add(EMPTY)
            continue
        notes.update(LEFT_OUT.format(what) for what in missing)
        notes.update([NO_MARK] * (not around[0]))
        if parts and text.startswith(parts[-1].text):
            parts[-1] = Printed(text, [*parts[-1].answers, (start, end)])
        else:
            parts.append(Printed(text, [(start, end)]))
        last = place
    if not parts:
        raise Refused(ALL_EMPTY)
    notes.update([REWRITES] * (len(parts) > 1))
    missing = missing_of_history(messages[:last], conversation.tools, parts[-1].text)
    notes.update(LEFT_OUT.format(what) for what in missing)
    return parts


def render_answer(messages: list[Message], render: Render, notes: set[str]) -> tuple[str, int]:
    """The text up to an answer, and where in it the answer begins."""
    history, turn = messages[:-1], messages[-1]
    prompt, text = render(history, True), render(messages, False)
    if text.startswith(prompt):
        return text, len(prompt)
    if prompt.startswith(text):
        return text, len(text)
    standing, before = render([*history, stand_in(turn)], False), render(history, False)
    start = before_special(standing, before_special(prompt, common_start(prompt, standing)))
    known, content = common_start(prompt, before), standing.find(ANYTHING)
    if text.startswith(prompt[:start]) and start >= len(prompt[:known].rstrip()):
        return served(prompt, text, start, standing[start:content], notes)
    # the turns before are printed otherwise once they are answered: take them as they were when it was asked for
    opening = prompt[known:]
    start = standing.rfind(opening, 0, content) + len(opening)
    retold = str(history[-1]["content"]) in standing[start:content]
    if not opening.strip() or not text.startswith(standing[:start]) or retold:
        raise Refused(f"the template prints the turns before message {len(messages)} otherwise once it is answered")
    notes.add(HISTORY_DIFFERS)
    return prompt + text[start:], len(prompt)


def served(prompt: str, text: str, start: int, header: str, notes: set[str]) -> tuple[str, int]:
    """An answer under a prompt that ends otherwise than the answer is introduced, by `header`, in a text of the past.

    Where the prompt's end leaves no thought open, the answer is what the model says next. Where it does, no answer
    without that thought follows: it is learned as printed, and the note names the template's prompt.
    """
    extra = prompt[start:]
    says_header = bool(header.strip()) and not prompt.endswith(header)
    if text.startswith(header, start) and closes(extra + header * says_header):
        return prompt + text[start if says_header else start + len(header) :], len(prompt)
    notes.add(PROMPT_HOLDS.format(extra))
    return text, start


def closes(text: str) -> bool:
    """Whether nothing but pairs of special tokens, as an empty thought, or white space stands there."""
    names = Counter(OPENING.sub("", special.lower()) for special in SPECIAL.findall(text))
    return not text.strip() or (bool(names) and not any(count % 2 for count in names.values()))


def mark_and_trailer(messages: list[Message], render: Render, stops: Sequence[str]) -> tuple[str, str]:
    """The model's own end mark, and what the template prints behind it at the end of a conversation."""
    answered = [*messages[:-1], stand_in(messages[-1])]
    _, answer, tail = render(answered, False).rpartition(ANYTHING)
    try:
        following = render([*answered, {"role": "user", "content": "?"}], False).rpartition(ANYTHING)[2]
    except Refused:  # of two questions, for one
        following = tail
    mark = end_mark(tail, following, stops) if answer else ""
    return mark, tail[len(mark) :] if answer else ""


def end_mark(tail: str, following: str, stops: Sequence[str]) -> str:
    """The model's own part of `tail`, printed behind the last answer; behind one before a question stands `following`.

    Up to a stop token that stands there in both; else the whole, where it does; else a run of tokens named as ends.
    """
    ends = [tail.index(stop) + len(stop) for stop in stops if stop in tail]
    if ends and following.startswith(tail[: min(ends)]):
        return tail[: min(ends)]
    whole = tail.rstrip()
    if following.startswith(whole):
        return whole or tail
    end = len(tail) - len(tail.lstrip())
    while (special := SPECIAL.match(tail, end)) and (special[0] in stops or END.search(special[0])):
        end = special.end()
        if special[0] in stops:
            break
    if tail[:end].strip():
        return tail[:end]
    both = tail[: before_special(tail, common_start(tail, following))].rstrip()
    return both or whole


def without_trailer(text: str, start: int, mark: str, trailer: str) -> tuple[str, int]:
    """The text without words that are printed only at the end of a conversation, and where its last answer ends."""
    if not mark.strip():
        return text, len(text)  # white space is the mark
    if trailer.strip() and not text.endswith(trailer):
        raise Refused(f"the template prints {trailer[:40]!r} behind some answers and not behind others")
    end = max(start, len(text.removesuffix(trailer).rstrip()))
    return (text[:end] if trailer.strip() else text), end


def stand_in(turn: Message) -> Message:
    """A turn that answers anything, with thoughts where the given one has some."""
    thinks = turn.get("reasoning_content") or "</think>" in str(turn.get("content"))
    thought = {"reasoning_content": ANYTHING} if thinks else {}
    return {"role": "assistant", "content": ANYTHING, **thought}


def is_empty(messages: list[Message], missing: set[str], render: Render) -> bool:
    """Whether an answer of which something is missing is printed as one that says nothing."""
    turn = messages[-1]
    if not (turn.get("content") or "").strip() and not turn.get("tool_calls") and not turn.get("reasoning_content"):
        return True
    if not missing:
        return False
    try:
        return render(messages, False) == render([*messages[:-1], {"role": "assistant", "content": ""}], False)
    except Refused:  # of an empty answer, which this one is not
        return False


def missing_of_answer(turn: Message, printed: str) -> Iterator[str]:
    """The parts of an answer that its text lacks, by name."""
    thought, _, content = (turn.get("content") or "").rpartition("</think>")
    thought = (turn.get("reasoning_content") or "") + thought.removeprefix("<think>")
    squeezed = squeeze(printed)
    if not shows(squeezed, thought):
        yield "reasoning of an answer"
    if not shows(squeezed, content):
        yield "text of an answer"
    if not all(call["function"]["name"] in printed for call in turn.get("tool_calls") or []):
        yield "a tool call of an answer"


def missing_of_history(messages: list[Message], tools: list[dict[str, Any]] | None, printed: str) -> set[str]:
    """The kinds of turns before an answer, and tools, that the text lacks."""
    others = [turn for turn in messages if turn["role"] != "assistant"]
    squeezed = squeeze(printed)
    missing = {f"a {turn['role']} turn" for turn in others if not shows(squeezed, turn.get("content") or "")}
    named = all(tool["function"]["name"] in printed for tool in tools or [])
    return missing if named else missing | {"the list of tools"}


def shows(squeezed: str, given: str) -> bool:
    """Whether a text without white space holds what was given, as it is or as JSON."""
    return squeeze(given) in squeezed or squeeze(json.dumps(given.strip(), ensure_ascii=False)[1:-1]) in squeezed


def squeeze(text: str) -> str:
    """A text without white space."""
    return "".join(text.split())


def learned(conversation: Conversation, turns: str) -> list[int]:
    """The places of the answers that are learned."""
    answers = [place for place, turn in enumerate(conversation.messages) if turn["role"] == "assistant"]
    if not answers:
        raise Refused("no assistant turn")
    chosen = [place for place in answers[-1:] if turns == "last"] or answers
    weighted = [place for place in chosen if conversation.messages[place].get("weight", 1) != 0]
    if not weighted:
        raise Refused("every answer has weight 0" if turns == "all" else "the last answer has weight 0")
    return weighted


def renderer(conversation: Conversation, tokenizer: Any, data: DataSection) -> Render:
    """The chat template with everything but the messages, and whether an answer is asked for, filled in."""

    def printed(messages: list[Message], ask: bool, tools: list[dict[str, Any]] | None) -> str:
        options = {"tools": tools, "add_generation_prompt": ask, "tokenize": False}
        return tokenizer.apply_chat_template(messages, **options, **data.template_kwargs)

    def render(messages: list[Message], ask: bool) -> str:
        try:
            return printed(messages, ask, conversation.tools or None)
        except Exception as error:  # a template may raise anything
            reason = " ".join(str(error).split())[:100]
            with suppress(Exception):
                if not conversation.tools and printed(messages, ask, []):
                    reason = "it needs tools, and the conversation has none"
            raise Refused(f"the template refuses: {reason}") from error

    return render


def common_start(text: str, other: str) -> int:
    """How many characters two texts share from their beginning."""
    sizes = range(1, min(len(text), len(other)) + 1)
    return bisect_left(sizes, True, key=lambda size: text[:size] != other[:size])


def before_special(text: str, place: int) -> int:
    """The place, or the start of the special token inside which it lies."""
    window = max(0, place - 60)
    inside = (
        match.start() for match in SPECIAL.finditer(text, window, place + 60) if match.start() < place < match.end()
    )
    return next(inside, place)
