"""Checks of the loss mask that share no rule with the code that made it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, zip_longest
from typing import Any

from data_prep.chats.images import for_template
from data_prep.chats.marks import CUT_OFF
from data_prep.chats.records import Conversation
from data_prep.tokens import stop_texts
from eagle.core.examples import Example
from eagle.recipe import DataSection

PLACEHOLDER = "\ue001answer\ue001"
PLAIN = {"add_special_tokens": False, "verbose": False}
PIECE = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]|\s+|[^\s<\[]+|.")  # special tokens, spaces, words


def faults(conversation: Conversation, examples: Sequence[Example], tokenizer: Any, data: DataSection) -> list[str]:
    """The faults of a mask: every supervised run must be one answer, from its first token to its end mark."""
    runs = runs_of(examples)
    answers = list(expected_answers(conversation, tokenizer, data))
    if missing := max(0, len(answers) - len(runs)):  # of answers that begin behind `max_length`
        prompts = {place: print_prompt(conversation, place, tokenizer, data) for place, _ in answers}
        sizes = {place: len(tokenizer(prompt, **PLAIN)["input_ids"]) for place, prompt in prompts.items()}
        cut = [place for place, size in sizes.items() if size >= data.max_length][-missing:]
        answers = [answer for answer in answers if answer[0] not in cut]
    wrong = []
    for answer, run in zip_longest(answers, runs):
        tokens, span = run or ([], (0, 0))
        got = f"supervised is {shorten(decode_run(tokens, span, tokenizer))}" if run else "nothing is supervised"
        if answer is None:
            wrong.append(f"{got}, which is no answer that is learned")
        elif not run or not any(is_covered(tokens, span, text, tokenizer, data.max_length) for text in answer[1]):
            wrong.append(f"message {answer[0] + 1}: {got}, expected {shorten(answer[1][0])}")
    return [f"{conversation.id}: {reason}" for reason in wrong]


def unlike_served(conversation: Conversation, examples: Sequence[Example], tokenizer: Any, data: DataSection) -> int:
    """How many answers follow a text that differs from the end of the serving prompt."""
    runs = runs_of(examples)
    places = weighted_places(conversation, data)
    if len(places) != len(runs):  # some are printed empty, or cut away
        places = [place for place, _ in expected_answers(conversation, tokenizer, data)]
    unlike = 0
    for place, (tokens, (start, _)) in zip(places, runs, strict=False):
        prompt = normalise(print_prompt(conversation, place, tokenizer, data)[-200:], tokenizer)
        begin = max(0, start - 8)
        before, more = (decode_run(tokens, (begin, end), tokenizer).lstrip("\ufffd") for end in (start, start + 1))
        # a token that straddles the end of the prompt is supervised
        unlike += not any(prompt.endswith(more[:size]) for size in range(len(before), len(more) + 1))
    return unlike


def expected_answers(
    conversation: Conversation, tokenizer: Any, data: DataSection
) -> Iterator[tuple[int, tuple[str, ...]]]:
    """(place, texts that may be supervised, after a question of ours and after its own history) of each answer."""
    for place in weighted_places(conversation, data):
        turn, history = conversation.messages[place], conversation.messages[:place]
        texts = expected_texts([{"role": "user", "content": "Why?"}], turn, conversation.tools, tokenizer, data)
        if "tool_calls" in turn or not history or history[-1]["role"] != "user":
            texts += expected_texts(history, turn, conversation.tools, tokenizer, data)
        if texts:
            yield place, texts


def weighted_places(conversation: Conversation, data: DataSection) -> list[int]:
    """The places of the answers that have a weight: all of them, or the last."""
    places = [place for place, turn in enumerate(conversation.messages) if turn["role"] == "assistant"]
    chosen = places[-1:] if data.turns == "last" else places
    return [place for place in chosen if conversation.messages[place].get("weight", 1) != 0]


def print_messages(messages: list[Any], tools: Any, tokenizer: Any, data: DataSection, *, ask: bool = False) -> str:
    """Print messages by the chat template and, if asked for, the opening of an answer."""
    options = {"tools": tools or None, "tokenize": False, "add_generation_prompt": ask, **data.template_kwargs}
    return tokenizer.apply_chat_template(for_template(messages, data.images), **options)


def print_prompt(conversation: Conversation, place: int, tokenizer: Any, data: DataSection) -> str:
    """The prompt that serving shows for the answer at a place."""
    return print_messages(conversation.messages[:place], conversation.tools, tokenizer, data, ask=True)


def normalise(text: str, tokenizer: Any) -> str:
    """A text as it comes back from its tokens."""
    return tokenizer.decode(tokenizer(text, **PLAIN)["input_ids"])


def expected_texts(
    history: list[dict[str, Any]], turn: dict[str, Any], tools: Any, tokenizer: Any, data: DataSection
) -> tuple[str, ...]:
    """The texts of one answer that may be supervised; none if the template refuses or prints no word of it."""
    placeholder = {"role": "assistant", "content": PLACEHOLDER}
    try:
        prompt = print_messages(history, tools, tokenizer, data, ask=True)
        printed = print_messages([*history, turn], tools, tokenizer, data)
        marked = print_messages([*history, placeholder], tools, tokenizer, data)
    except Exception:  # a template may raise anything
        return ()
    try:
        question = {"role": "user", "content": "And?"}
        following = print_messages([*history, placeholder, question], tools, tokenizer, data)
    except Exception:
        following = marked
    before, _, tail = marked.partition(PLACEHOLDER)
    if printed.startswith(before) and not printed.removeprefix(before).removesuffix(tail).strip():
        return ()
    if CUT_OFF in turn:  # nothing behind the content is the answer's
        return _from_starts(possible_starts(prompt, printed, before), [printed.removesuffix(tail)], tail)
    stops = stop_texts(tokenizer)
    marks = possible_marks(tail, following.partition(PLACEHOLDER)[2], stops)
    ends = [printed.removesuffix(tail[len(mark) :]) for mark in marks]
    if not printed.rstrip().endswith((*stops, *(mark.strip() for mark in marks if mark.strip()))):
        later = mark_of_next_turn(history, turn, tools, tokenizer, data)
        ends = [printed.rstrip() + later] if later else ends
    # before white space alone nothing else ends an answer
    return _from_starts(possible_starts(prompt, printed, before), ends, tail)


def _from_starts(starts: Sequence[int], ends: Sequence[str], tail: str) -> tuple[str, ...]:
    """The texts from each start to each end; white space at the end belongs to none where more is printed there."""
    texts = [end[start:].rstrip() if tail.strip() else end[start:] for start in starts for end in ends]
    return tuple(dict.fromkeys(filter(None, texts)))


def mark_of_next_turn(
    history: list[dict[str, Any]], turn: dict[str, Any], tools: Any, tokenizer: Any, data: DataSection
) -> str:
    """The text behind an answer when another turn follows, up to a stop token, else up to that turn's opening.

    The opening is what the template also prints before a first question.
    """
    call = (turn.get("tool_calls") or [{}])[0]
    reply = {"role": "tool", "content": "And?", "name": call["function"]["name"]} if call else {}
    reply |= {"tool_call_id": call["id"]} if "id" in call else {}
    question = {"role": "user", "content": "And?"}
    for answer in (turn, {"role": "assistant", "content": PLACEHOLDER}):
        try:
            printed = print_messages([*history, answer], tools, tokenizer, data).rstrip()
            longer = print_messages([*history, answer, reply or question], tools, tokenizer, data)
            opening = print_messages([question], tools, tokenizer, data).rpartition("And?")[0]
        except Exception:  # a template may raise anything
            continue
        if longer.startswith(printed):
            behind = longer.removeprefix(printed).rpartition("And?")[0]
            pieces = PIECE.findall(behind)
            first = next((place for place, piece in enumerate(pieces) if piece.strip()), len(pieces))
            for place, piece in enumerate(pieces[first:], start=first):
                if piece in stop_texts(tokenizer):
                    return "".join(pieces[: place + 1])
                if len(piece) < 3 or (piece[0], piece[-1]) not in (("<", ">"), ("[", "]")):
                    break
            shared = next((size for size in range(len(behind), 0, -1) if opening.endswith(behind[-size:])), 0)
            mark = behind[: len(behind) - shared].rstrip()
            return mark if re.fullmatch(r"(\s*(<[^<>\s]+>|\[[^\[\]\s]+\]))+", mark) else ""
    return ""


def possible_starts(prompt: str, printed: str, before: str) -> list[int]:
    """Where an answer may begin: behind the prompt; else where it leaves the prompt, or where its content begins."""
    if printed.startswith(prompt):
        return [len(prompt)]
    beginnings = accumulate(PIECE.findall(prompt))
    shared = [len(text) for text in beginnings if before.startswith(text) and printed.startswith(text)]
    return [max(shared, default=0)] + [len(before)] * printed.startswith(before)


def possible_marks(tail: str, following: str, stops: Sequence[str]) -> list[str]:
    """The end marks that an answer may have, from what is printed behind it at the end and before a question.

    A known stop token leaves one. Without any, it is all that is printed in both, or some of it where more follows.
    """
    pieces = PIECE.findall(tail)
    texts = list(accumulate(pieces))
    stopping = [text for text, piece in zip(texts, pieces, strict=True) if piece in stops]
    shared = [text for text in texts if following.startswith(text)]
    if stopping and stopping[0] in shared:
        return stopping[:1]
    solid = [text for text in shared if text.strip()]
    if solid and solid[-1].rstrip() == tail.rstrip():
        return solid[-1:]
    return solid or stopping[:1] or [text for text in texts if text.strip()][:1] or [tail]


def is_covered(tokens: list[int], run: tuple[int, int], answer: str, tokenizer: Any, max_length: int) -> bool:
    """Whether a run is the fewest tokens that hold the answer; of one that was cut, its beginning."""
    start, end = run
    text, first, last = (decode_run(tokens, part, tokenizer) for part in (run, (start, start + 1), (end - 1, end)))
    answer = normalise(answer, tokenizer)
    if end == max_length:
        whole = text.rstrip("\ufffd")
        return any(answer.startswith(whole[extra:]) for extra in range(max(1, len(first))))
    before = text.find(answer)
    return 0 <= before < max(1, len(first)) and len(text) - before - len(answer) < max(1, len(last))


def runs_of(examples: Sequence[Example]) -> list[tuple[list[int], tuple[int, int]]]:
    """(tokens, (start, end)) of every unbroken supervised run."""
    runs = []
    for example in examples:
        tokens, end = example.tokens.tolist(), 0
        for supervised, group in groupby(example.loss_mask.tolist()):
            start, end = end, end + len(list(group))
            if supervised:
                runs.append((tokens, (start, end)))
    return runs


def decode_run(tokens: list[int], run: tuple[int, int], tokenizer: Any) -> str:
    """The text of a run, decoded in its context, since a decoder may treat a text's first token differently."""
    start, end = run
    before = max(0, start - 8)
    return tokenizer.decode(tokens[before:end])[len(tokenizer.decode(tokens[before:start])) :]


def shorten(text: str) -> str:
    """A text with its middle left out."""
    return repr(text if len(text) <= 90 else f"{text[:50]} ... {text[-35:]}")
