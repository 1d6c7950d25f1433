"""Print a conversation by its chat template, and find the answers in the text."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from data_prep.chats.images import MARK, apply_template
from data_prep.chats.marks import CUT_OFF
from data_prep.chats.records import Conversation
from data_prep.chats.turns import Dropped
from eagle.recipe import DataSection

Message = dict[str, Any]
Render = Callable[[list[Message], bool], str]
# An answer that no template prints by itself.
ANYTHING = "\ue000anything\ue000"
# Text that is a special token, or looks like one.
SPECIAL = re.compile(r"<[^<>\s]{1,60}>|\[[^\[\]\s]{1,60}\]")
# In the names of special tokens that end a turn.
END = re.compile(r"(?i)end|eo[stm]\b|</s>|return|stop|sep")
# What distinguishes the names of the two tokens around a thought.
OPENING = re.compile(r"start|begin|end|[^a-z]")
LEFT_OUT = "the template leaves out {}"


@dataclass(frozen=True, slots=True)
class RenderedText:
    """A text as the template prints it, and the (start, end) of each answer in it."""

    text: str
    spans: list[tuple[int, int]]
    images: int = 0  # of the conversation, from its first on


def render_answers(
    conversation: Conversation,
    tokenizer: Any,
    data: DataSection,
    stops: Sequence[str],
    notes: set[str],
) -> list[RenderedText]:
    """Return texts with each learned answer after its serving prompt; answers with the same history share a text."""
    messages = [without_marks(turn) for turn in conversation.messages]
    render = make_renderer(conversation, tokenizer, data)
    mark_and_trailer = None
    texts: list[RenderedText] = []
    for i in places_to_learn(conversation, data.turns):
        turns = messages[: i + 1]
        text, start = render_answer(turns, render, notes)
        if mark_and_trailer is None:
            mark_and_trailer = find_mark_and_trailer(turns, render, stops)
        mark, trailer = mark_and_trailer
        text, end = cut_trailer(text, start, mark, trailer)
        is_cut_off = CUT_OFF in conversation.messages[i]
        if is_cut_off:
            text = without_end_mark(text[:end], mark, stops)
            end = len(text)
        missing = missing_from_answer(turns[-1], text[start:end])
        if end <= start or is_printed_empty(turns, missing, render):
            notes.add("an answer of which the template prints nothing: not learned")
            continue
        notes.update(LEFT_OUT.format(name) for name in missing)
        if not is_cut_off:
            text, end = ensure_end_mark(
                text, end, turns, render, mark=mark, stops=stops, notes=notes
            )
        spans: list[tuple[int, int]] = []
        if texts and text.startswith(texts[-1].text):
            # The earlier answers are read as history here, exactly as they were learned.
            spans = texts.pop().spans
        num_images = sum(turn["content"].count(MARK) for turn in turns)
        texts.append(RenderedText(text, [*spans, (start, end)], num_images))
        last = i
    if not texts:
        raise Dropped("the template prints nothing of any answer")
    if len(texts) > 1:
        notes.add("history rewritten by the template: several examples")
    missing = missing_from_history(messages[:last], conversation.tools, texts[-1].text)
    notes.update(LEFT_OUT.format(name) for name in missing)
    return texts


def ensure_end_mark(
    text: str,
    end: int,
    messages: list[Message],
    render: Render,
    *,
    mark: str,
    stops: Sequence[str],
    notes: set[str],
) -> tuple[str, int]:
    """Return the text and the end of its last answer, with the end mark that is printed only before another turn."""
    solid_mark = mark.strip()
    marks = tuple(stops)
    if solid_mark:
        marks = (solid_mark,)
    if text[:end].endswith(marks):
        return text, end
    stop = stop_of_next_turn(messages, render, stops)
    if stop:
        text = text[:end].rstrip() + stop
        return text, len(text)
    # A mark of white space alone is not looked for.
    if solid_mark or not mark:
        notes.add("the template prints no end-of-turn mark")
    return text, end


def without_marks(turn: Message) -> Message:
    """Return a message for the template, without the keys that only say how it is learned."""
    return {key: value for key, value in turn.items() if key not in ("weight", CUT_OFF)}


def without_end_mark(text: str, mark: str, stops: Sequence[str]) -> str:
    """Return the text without the end mark after a truncated answer: the template prints it, the target did not."""
    if mark and text.endswith(mark):
        return text.removesuffix(mark)
    for stop in (mark.strip(), *stops):
        if stop and text.endswith(stop):
            return text.removesuffix(stop).rstrip()
    return text


def render_answer(messages: list[Message], render: Render, notes: set[str]) -> tuple[str, int]:
    """Return the text up to the end of the last message, an answer, and where that answer starts."""
    history = messages[:-1]
    prompt = render(history, True)
    text = render(messages, False)
    if text.startswith(prompt):
        return text, len(prompt)
    if prompt.startswith(text):
        return text, len(text)
    # The template prints something else in place of the prompt's end: compare with an answer that is known.
    marked = render([*history, placeholder_answer(messages[-1])], False)
    before = render(history, False)
    shared = common_length(prompt, before)
    content = marked.find(ANYTHING)
    start = min(common_length(prompt, marked), common_length(prompt, text))
    for printed in (prompt, marked, text):
        start = before_special(printed, start)
    # A template that opens answers unasked does not show where turns end; special tokens in pairs belong to none.
    extra = prompt[start:]
    opens_unasked = before == prompt and is_closed(extra) and not SPECIAL.sub("", extra).strip()
    if opens_unasked or start >= len(prompt[:shared].rstrip()):
        return move_behind_prompt(prompt, text, start, marked[start:content], notes=notes)
    prompt_special = SPECIAL.match(prompt, start)
    text_special = SPECIAL.match(text, start)
    differing = ""
    if prompt_special and text_special:
        differing = f": {prompt_special[0]!r} becomes {text_special[0]!r}"
    # The earlier turns are printed otherwise once they are answered: take them as in the serving prompt.
    opening = prompt[shared:]
    start = marked.rfind(opening, 0, content) + len(opening)
    repeats_question = str(history[-1]["content"]) in marked[start:content]
    if not opening.strip() or not text.startswith(marked[:start]) or repeats_question:
        raise Dropped(
            f"the template prints the turns before message {len(messages)} otherwise once it is answered{differing}"
        )
    notes.add("the turns before an answer are printed otherwise once it is given")
    return prompt + text[start:], len(prompt)


def move_behind_prompt(
    prompt: str, text: str, start: int, header: str, notes: set[str]
) -> tuple[str, int]:
    """Return the serving prompt followed by the answer, where `text` introduces that answer by another `header`.

    If the prompt's end leaves no thought open, the answer is what the model says next. If it does, no answer
    without that thought follows: it is learned as printed, and the note names the template's prompt.
    """
    extra = prompt[start:]
    says_header = bool(header.strip()) and not prompt.endswith(header)
    opened = extra
    answer_start = start + len(header)
    # The model itself says the header if the prompt does not end with it.
    if says_header:
        opened += header
        answer_start = start
    is_all_closed = is_closed(opened) or (extra.strip() and is_closed(extra))
    if text.startswith(header, start) and is_all_closed:
        return prompt + text[answer_start:], len(prompt)
    notes.add(
        f"the generation prompt ends with {extra!r}, which the template prints before no answer"
    )
    return text, start


def is_closed(text: str) -> bool:
    """Return whether a text is white space, or has special tokens in pairs only, as those of an empty thought."""
    if not text.strip():
        return True
    names = Counter(OPENING.sub("", special.lower()) for special in SPECIAL.findall(text))
    return bool(names) and all(count % 2 == 0 for count in names.values())


def find_mark_and_trailer(
    messages: list[Message], render: Render, stops: Sequence[str]
) -> tuple[str, str]:
    """Return the model's own end mark, and what the template prints after it at the end of a conversation."""
    answered = [*messages[:-1], placeholder_answer(messages[-1])]
    _, answer, tail = render(answered, False).rpartition(ANYTHING)
    if not answer:
        return "", ""
    try:
        following = render([*answered, {"role": "user", "content": "?"}], False).rpartition(
            ANYTHING
        )[2]
    except Dropped:
        # For example a template that refuses a second question.
        following = tail
    mark = find_end_mark(tail, following, stops)
    return mark, tail[len(mark) :]


def find_end_mark(tail: str, following: str, stops: Sequence[str]) -> str:
    """Return the model's own part of `tail`, printed after the last answer; `following` is printed before a question.

    It ends with a stop token that is in both; else it is all of `tail`, if `following` starts with it; else the
    special tokens of `tail` that are named as ends.
    """
    ends = [tail.index(stop) + len(stop) for stop in stops if stop in tail]
    if ends and following.startswith(tail[: min(ends)]):
        return tail[: min(ends)]
    whole = tail.rstrip()
    if following.startswith(whole):
        return whole or tail
    named = leading_ends(tail, stops)
    if named:
        return named
    shared = before_special(tail, common_length(tail, following))
    return tail[:shared].rstrip() or whole


def leading_ends(text: str, stops: Sequence[str]) -> str:
    """Return the special tokens at the start of a text that are named as ends, up to the first stop token."""
    start = len(text) - len(text.lstrip())
    end = start
    special = SPECIAL.match(text, end)
    while special and (special[0] in stops or END.search(special[0])):
        end = special.end()
        if special[0] in stops:
            break
        special = SPECIAL.match(text, end)
    if end == start:
        return ""
    return text[:end]


def stop_of_next_turn(messages: list[Message], render: Render, stops: Sequence[str]) -> str:
    """Return the end mark that the template prints after the last message only if another turn follows, or ""."""
    following = {"role": "user", "content": "?"}
    calls = messages[-1].get("tool_calls")
    if calls:
        following = {"role": "tool", "content": "?", "name": calls[0]["function"]["name"]}
        if "id" in calls[0]:
            following["tool_call_id"] = calls[0]["id"]
    # With its own thought, which may be left out later, an answer may not be found again.
    for answer in (messages[-1], {"role": "assistant", "content": ANYTHING}):
        with suppress(Dropped):
            printed = render([*messages[:-1], answer], False).rstrip()
            continued = render([*messages[:-1], answer, following], False)
            if continued.startswith(printed):
                return leading_ends(continued[len(printed) :], stops)
    return ""


def cut_trailer(text: str, start: int, mark: str, trailer: str) -> tuple[str, int]:
    """Return the text without what is printed only at the end of a conversation, and where its last answer ends."""
    if not mark.strip():
        # White space is the mark, and must stay.
        return text, len(text)
    if trailer.strip() and not text.endswith(trailer):
        raise Dropped(
            f"the template prints {trailer[:40]!r} behind some answers and not behind others"
        )
    end = max(start, len(text.removesuffix(trailer).rstrip()))
    if trailer.strip():
        text = text[:end]
    return text, end


def placeholder_answer(turn: Message) -> Message:
    """Return an answer with a placeholder as its content, and as its reasoning if the given answer has some."""
    answer = {"role": "assistant", "content": ANYTHING}
    # Templates print an empty thought only before answers without one.
    if turn.get("reasoning_content") or "</think>" in str(turn.get("content")):
        answer["reasoning_content"] = ANYTHING
    return answer


def is_printed_empty(messages: list[Message], missing: set[str], render: Render) -> bool:
    """Return whether the last answer is empty, or lacks parts and is printed as an empty one is."""
    turn = messages[-1]
    if (
        not (turn.get("content") or "").strip()
        and not turn.get("tool_calls")
        and not turn.get("reasoning_content")
    ):
        return True
    if not missing:
        return False
    empty = {"role": "assistant", "content": ""}
    try:
        return render(messages, False) == render([*messages[:-1], empty], False)
    except Dropped:
        # The template refuses an empty answer, and has printed this one.
        return False


def missing_from_answer(turn: Message, printed: str) -> set[str]:
    """Return the names of the parts of an answer that are not printed."""
    thought, _, content = (turn.get("content") or "").rpartition("</think>")
    thought = (turn.get("reasoning_content") or "") + thought.removeprefix("<think>")
    squeezed = remove_spaces(printed)
    missing = set()
    if not contains(squeezed, thought):
        missing.add("reasoning of an answer")
    if not contains(squeezed, content):
        missing.add("text of an answer")
    # Arguments may be printed in any form, names only as they are.
    if not all(call["function"]["name"] in printed for call in turn.get("tool_calls") or []):
        missing.add("a tool call of an answer")
    return missing


def missing_from_history(
    messages: list[Message], tools: list[dict[str, Any]] | None, printed: str
) -> set[str]:
    """Return the kinds of turns before an answer that are not printed, and the tools if they are not."""
    squeezed = remove_spaces(printed)
    missing = set()
    for turn in messages:
        # Images are printed in the place of marks.
        pieces = (turn.get("content") or "").split(MARK)
        if turn["role"] != "assistant" and not all(contains(squeezed, piece) for piece in pieces):
            missing.add(f"a {turn['role']} turn")
    if not all(tool["function"]["name"] in printed for tool in tools or []):
        missing.add("the list of tools")
    return missing


def contains(squeezed: str, text: str) -> bool:
    """Return whether a print without white space contains a text, as it is or as JSON."""
    if remove_spaces(text) in squeezed:
        return True
    return remove_spaces(json.dumps(text.strip(), ensure_ascii=False)[1:-1]) in squeezed


def remove_spaces(text: str) -> str:
    """Return the text without white space."""
    return "".join(text.split())


def places_to_learn(conversation: Conversation, turns: str) -> list[int]:
    """Return the indices of the answers to learn: of all answers or the last, those that have a weight."""
    answers = [i for i, turn in enumerate(conversation.messages) if turn["role"] == "assistant"]
    if not answers:
        raise Dropped("no assistant turn")
    if turns == "last":
        answers = answers[-1:]
    weighted = [i for i in answers if conversation.messages[i].get("weight", 1) != 0]
    if weighted:
        return weighted
    if turns == "all":
        raise Dropped("every answer has weight 0")
    raise Dropped("the last answer has weight 0")


def make_renderer(conversation: Conversation, tokenizer: Any, data: DataSection) -> Render:
    """Return a function that prints messages by the chat template, with a generation prompt if asked for."""

    def render(messages: list[Message], ask: bool) -> str:
        options = {"add_generation_prompt": ask, "tokenize": False}
        try:
            return apply_template(messages, conversation.tools or None, tokenizer, data, **options)
        except Exception as error:
            # A template is a program, and may raise anything.
            reason = " ".join(str(error).split())[:100]
            with suppress(Exception):
                if not conversation.tools and apply_template(
                    messages, [], tokenizer, data, **options
                ):
                    reason = "it needs tools, and the conversation has none"
            raise Dropped(f"the template refuses: {reason}") from error

    return render


def common_length(text: str, other: str) -> int:
    """Return how many characters two texts share from their beginning."""
    for i, (left, right) in enumerate(zip(text, other, strict=False)):
        if left != right:
            return i
    return min(len(text), len(other))


def before_special(text: str, place: int) -> int:
    """Return the position, or the start of the special token that it is inside."""
    for special in SPECIAL.finditer(text, max(0, place - 60), place + 60):
        if special.start() < place < special.end():
            return special.start()
    return place
