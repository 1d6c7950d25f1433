"""Conversation -> the texts that its chat template prints, and where the answers are in them."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from data_prep.chats.images import MARK, for_template
from data_prep.chats.marks import CUT_OFF
from data_prep.chats.records import Conversation
from data_prep.chats.turns import Dropped
from eagle.recipe import DataSection

Message = dict[str, Any]
Render = Callable[[list[Message], bool], str]
ANYTHING = "\ue000anything\ue000"  # an answer that no template prints by itself
SPECIAL = re.compile(r"<[^<>\s]{1,60}>|\[[^\[\]\s]{1,60}\]")  # text that is a special token, or looks like one
END = re.compile(r"(?i)end|eo[stm]\b|</s>|return|stop|sep")  # how special tokens that end a turn are named
OPENING = re.compile(r"start|begin|end|[^a-z]")  # what distinguishes the two tokens around a thought

LEFT_OUT = "the template leaves out {}"


@dataclass(frozen=True, slots=True)
class RenderedText:
    """A text as the template prints it, and the (start, end) of each answer in it."""

    text: str
    spans: list[tuple[int, int]]
    images: int = 0  # of the conversation, from its first on


def render_answers(
    conversation: Conversation, tokenizer: Any, data: DataSection, stops: Sequence[str], notes: set[str]
) -> list[RenderedText]:
    """Texts with each learned answer behind the prompt that serving shows; answers with one history share a text."""
    messages = [without_marks(turn) for turn in conversation.messages]
    render = make_renderer(conversation, tokenizer, data)
    mark_and_trailer = None
    texts: list[RenderedText] = []
    for place in places_to_learn(conversation, data.turns):
        text, start = render_answer(messages[: place + 1], render, notes)
        mark_and_trailer = mark_and_trailer or find_mark_and_trailer(messages[: place + 1], render, stops)
        text, end = cut_trailer(text, start, *mark_and_trailer)
        is_cut_off = CUT_OFF in conversation.messages[place]
        if is_cut_off:
            text = without_end_mark(text[:end], mark_and_trailer[0], stops)
            end = len(text)
        missing = missing_from_answer(messages[place], text[start:end])
        if end <= start or is_printed_empty(messages[: place + 1], missing, render):
            notes.add("an answer of which the template prints nothing: not learned")
            continue
        notes.update(LEFT_OUT.format(part) for part in missing)
        mark = mark_and_trailer[0].strip()
        if not is_cut_off and not text[:end].endswith((mark,) if mark else tuple(stops)):
            if stop := stop_of_next_turn(messages[: place + 1], render, stops):
                text = text[:end].rstrip() + stop
                end = len(text)
            elif mark or not mark_and_trailer[0]:
                notes.add("the template prints no end-of-turn mark")
        spans = texts.pop().spans if texts and text.startswith(texts[-1].text) else []
        shown = sum(turn["content"].count(MARK) for turn in messages[: place + 1])
        texts.append(RenderedText(text, [*spans, (start, end)], shown))
        last = place
    if not texts:
        raise Dropped("the template prints nothing of any answer")
    if len(texts) > 1:
        notes.add("history rewritten by the template: several examples")
    missing = missing_from_history(messages[:last], conversation.tools, texts[-1].text)
    notes.update(LEFT_OUT.format(part) for part in missing)
    return texts


def without_marks(turn: Message) -> Message:
    """A message as the template gets it, without what only tells how it is learned."""
    return {key: value for key, value in turn.items() if key not in ("weight", CUT_OFF)}


def without_end_mark(text: str, mark: str, stops: Sequence[str]) -> str:
    """The text up to where an answer was cut off: the target has not said the mark that the template prints there."""
    if mark and text.endswith(mark):
        return text.removesuffix(mark)
    printed = next((stop for stop in (mark.strip(), *stops) if stop and text.endswith(stop)), "")
    return text.removesuffix(printed).rstrip() if printed else text


def render_answer(messages: list[Message], render: Render, notes: set[str]) -> tuple[str, int]:
    """The text up to the end of the last message, an answer, and where that answer begins."""
    history = messages[:-1]
    prompt, text = render(history, True), render(messages, False)
    if text.startswith(prompt):
        return text, len(prompt)
    if prompt.startswith(text):
        return text, len(text)
    marked, before = render([*history, placeholder_answer(messages[-1])], False), render(history, False)
    shared, content = common_length(prompt, before), marked.find(ANYTHING)
    start = min(common_length(prompt, marked), common_length(prompt, text))
    start = before_special(text, before_special(marked, before_special(prompt, start)))
    # a template that opens answers unasked does not show where the turns end: special tokens in pairs belong to none
    opens_unasked = before == prompt and is_closed(prompt[start:]) and not SPECIAL.sub("", prompt[start:]).strip()
    if opens_unasked or start >= len(prompt[:shared].rstrip()):
        return move_behind_prompt(prompt, text, start, marked[start:content], notes)
    specials = [SPECIAL.match(printed, start) for printed in (prompt, text)]
    differing = ": " + " becomes ".join(repr(special[0]) for special in specials if special) if all(specials) else ""
    # the turns before are printed otherwise once they are answered: take them as they were when it was asked for
    opening = prompt[shared:]
    start = marked.rfind(opening, 0, content) + len(opening)
    repeats_question = str(history[-1]["content"]) in marked[start:content]
    if not opening.strip() or not text.startswith(marked[:start]) or repeats_question:
        raise Dropped(
            f"the template prints the turns before message {len(messages)} otherwise once it is answered{differing}"
        )
    notes.add("the turns before an answer are printed otherwise once it is given")
    return prompt + text[start:], len(prompt)


def move_behind_prompt(prompt: str, text: str, start: int, header: str, notes: set[str]) -> tuple[str, int]:
    """The prompt of serving with the answer behind it, where `text` introduces that answer by another `header`.

    Where the prompt's end leaves no thought open, the answer is what the model says next. Where it does, no answer
    without that thought follows: it is learned as printed, and the note names the template's prompt.
    """
    extra = prompt[start:]
    says_header = bool(header.strip()) and not prompt.endswith(header)
    closed = is_closed(extra + header * says_header) or (extra.strip() and is_closed(extra))
    if text.startswith(header, start) and closed:
        return prompt + text[start if says_header else start + len(header) :], len(prompt)
    notes.add(f"the generation prompt ends with {extra!r}, which the template prints before no answer")
    return text, start


def is_closed(text: str) -> bool:
    """Whether a text is white space, or has special tokens in pairs alone, such as those of an empty thought."""
    names = Counter(OPENING.sub("", special.lower()) for special in SPECIAL.findall(text))
    return not text.strip() or (bool(names) and not any(count % 2 for count in names.values()))


def find_mark_and_trailer(messages: list[Message], render: Render, stops: Sequence[str]) -> tuple[str, str]:
    """The model's own end mark, and what the template prints behind it at the end of a conversation."""
    answered = [*messages[:-1], placeholder_answer(messages[-1])]
    _, answer, tail = render(answered, False).rpartition(ANYTHING)
    if not answer:
        return "", ""
    try:
        following = render([*answered, {"role": "user", "content": "?"}], False).rpartition(ANYTHING)[2]
    except Dropped:  # of two questions, for one
        following = tail
    mark = find_end_mark(tail, following, stops)
    return mark, tail[len(mark) :]


def find_end_mark(tail: str, following: str, stops: Sequence[str]) -> str:
    """The model's own part of `tail`, printed behind the last answer; behind one before a question is `following`.

    Up to a stop token that is in both; else all of `tail`, where `following` has it; else its tokens named as ends.
    """
    ends = [tail.index(stop) + len(stop) for stop in stops if stop in tail]
    if ends and following.startswith(tail[: min(ends)]):
        return tail[: min(ends)]
    whole = tail.rstrip()
    if following.startswith(whole):
        return whole or tail
    return leading_ends(tail, stops) or tail[: before_special(tail, common_length(tail, following))].rstrip() or whole


def leading_ends(text: str, stops: Sequence[str]) -> str:
    """The special tokens at the beginning of a text that are named as ends, up to the first that is a stop token."""
    end = len(text) - len(text.lstrip())
    while (special := SPECIAL.match(text, end)) and (special[0] in stops or END.search(special[0])):
        end = special.end()
        if special[0] in stops:
            break
    return text[:end] if text[:end].strip() else ""


def stop_of_next_turn(messages: list[Message], render: Render, stops: Sequence[str]) -> str:
    """The end mark that the template prints behind the last message only where another turn follows, or nothing."""
    calls = messages[-1].get("tool_calls")
    following = {"role": "user", "content": "?"}
    if calls:
        following = {"role": "tool", "content": "?", "name": calls[0]["function"]["name"]}
        following |= {"tool_call_id": calls[0]["id"]} if "id" in calls[0] else {}
    for answer in (messages[-1], {"role": "assistant", "content": ANYTHING}):  # a thought may be left out later
        with suppress(Dropped):
            printed = render([*messages[:-1], answer], False).rstrip()
            continued = render([*messages[:-1], answer, following], False)
            if continued.startswith(printed):
                return leading_ends(continued[len(printed) :], stops)
    return ""


def cut_trailer(text: str, start: int, mark: str, trailer: str) -> tuple[str, int]:
    """The text without words that are printed only at the end of a conversation, and where its last answer ends."""
    if not mark.strip():
        return text, len(text)  # white space is the mark
    if trailer.strip() and not text.endswith(trailer):
        raise Dropped(f"the template prints {trailer[:40]!r} behind some answers and not behind others")
    end = max(start, len(text.removesuffix(trailer).rstrip()))
    return (text[:end] if trailer.strip() else text), end


def placeholder_answer(turn: Message) -> Message:
    """An answer with a placeholder as its content, and as its reasoning where the given answer has some."""
    thinks = turn.get("reasoning_content") or "</think>" in str(turn.get("content"))
    thought = {"reasoning_content": ANYTHING} if thinks else {}
    return {"role": "assistant", "content": ANYTHING, **thought}


def is_printed_empty(messages: list[Message], missing: set[str], render: Render) -> bool:
    """Whether the last answer is empty, or is printed as an empty one is since parts of it are missing."""
    turn = messages[-1]
    if not (turn.get("content") or "").strip() and not turn.get("tool_calls") and not turn.get("reasoning_content"):
        return True
    if not missing:
        return False
    try:
        return render(messages, False) == render([*messages[:-1], {"role": "assistant", "content": ""}], False)
    except Dropped:  # the template refuses an empty answer, which this one is not
        return False


def missing_from_answer(turn: Message, printed: str) -> set[str]:
    """The names of the parts of an answer that are not printed."""
    thought, _, content = (turn.get("content") or "").rpartition("</think>")
    thought = (turn.get("reasoning_content") or "") + thought.removeprefix("<think>")
    squeezed = remove_spaces(printed)
    is_there = {
        "reasoning of an answer": contains(squeezed, thought),
        "text of an answer": contains(squeezed, content),
        "a tool call of an answer": all(call["function"]["name"] in printed for call in turn.get("tool_calls") or []),
    }
    return {part for part in is_there if not is_there[part]}


def missing_from_history(messages: list[Message], tools: list[dict[str, Any]] | None, printed: str) -> set[str]:
    """The kinds of turns before an answer that are not printed, and the tools if they are not."""
    squeezed = remove_spaces(printed)
    others = [turn for turn in messages if turn["role"] != "assistant"]
    texts = [(turn["role"], (turn.get("content") or "").split(MARK)) for turn in others]
    missing = {f"a {role} turn" for role, pieces in texts if not all(contains(squeezed, piece) for piece in pieces)}
    has_tools = all(tool["function"]["name"] in printed for tool in tools or [])
    return missing if has_tools else missing | {"the list of tools"}


def contains(squeezed: str, text: str) -> bool:
    """Whether a print without white space has this text in it, as it is or as JSON."""
    if remove_spaces(text) in squeezed:
        return True
    return remove_spaces(json.dumps(text.strip(), ensure_ascii=False)[1:-1]) in squeezed


def remove_spaces(text: str) -> str:
    """The text without white space."""
    return "".join(text.split())


def places_to_learn(conversation: Conversation, turns: str) -> list[int]:
    """The places of the answers to learn: all that have a weight, or the last."""
    answers = [place for place, turn in enumerate(conversation.messages) if turn["role"] == "assistant"]
    if not answers:
        raise Dropped("no assistant turn")
    chosen = answers[-1:] if turns == "last" else answers
    weighted = [place for place in chosen if conversation.messages[place].get("weight", 1) != 0]
    if not weighted:
        raise Dropped("every answer has weight 0" if turns == "all" else "the last answer has weight 0")
    return weighted


def make_renderer(conversation: Conversation, tokenizer: Any, data: DataSection) -> Render:
    """A function of messages, and of whether an answer is asked for, that prints them by the chat template."""

    def apply_template(messages: list[Message], ask: bool, tools: list[dict[str, Any]] | None) -> str:
        options = {"tools": tools, "add_generation_prompt": ask, "tokenize": False}
        messages = for_template(messages, data.images)
        return tokenizer.apply_chat_template(messages, **options, **data.template_kwargs)

    def render(messages: list[Message], ask: bool) -> str:
        try:
            return apply_template(messages, ask, conversation.tools or None)
        except Exception as error:  # a template may raise anything
            reason = " ".join(str(error).split())[:100]
            with suppress(Exception):
                if not conversation.tools and apply_template(messages, ask, []):
                    reason = "it needs tools, and the conversation has none"
            raise Dropped(f"the template refuses: {reason}") from error

    return render


def common_length(text: str, other: str) -> int:
    """How many characters two texts share from their beginning."""
    differing = (place for place, (left, right) in enumerate(zip(text, other, strict=False)) if left != right)
    return next(differing, min(len(text), len(other)))


def before_special(text: str, place: int) -> int:
    """The place, or the start of the special token inside which it is."""
    specials = SPECIAL.finditer(text, max(0, place - 60), place + 60)
    return next((special.start() for special in specials if special.start() < place < special.end()), place)
