"""Checks of the loss mask that share no rule with the code that made it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, zip_longest
from typing import Any

from data_prep.records import Conversation
from data_prep.tokens import stop_texts
from eagle.data.examples import Example
from eagle.recipe import DataSection

PLACEHOLDER = "\ue001answer\ue001"
PIECE = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]|\s+|[^\s<\[]+|.")  # special tokens, spaces, words


def faults(conversation: Conversation, examples: Sequence[Example], tokenizer: Any, data: DataSection) -> list[str]:
    """What is wrong with the mask: every supervised run must be one answer, from its first token to its end mark."""
    found = [(example.tokens.tolist(), run) for example in examples for run in runs(example.loss_mask.tolist())]
    answers = list(answers_expected(conversation, tokenizer, data))
    if missing := max(0, len(answers) - len(found)):
        gone = [place for place, _ in answers if beyond(conversation, place, tokenizer, data)][-missing:]
        answers = [answer for answer in answers if answer[0] not in gone]
    wrong = []
    for answer, run in zip_longest(answers, found):
        got = f"supervised is {short(text_of(run[0], run[1], tokenizer))}" if run else "nothing is supervised"
        if answer is None:
            wrong.append(f"{got}, which is no answer that is learned")
        elif not run or not any(covers(run[0], run[1], text, tokenizer, data.max_length) for text in answer[1]):
            wrong.append(f"message {answer[0] + 1}: {got}, expected {short(answer[1][0])}")
    return [f"{conversation.id}: {reason}" for reason in wrong]


def unlike_served(conversation: Conversation, examples: Sequence[Example], tokenizer: Any, data: DataSection) -> int:
    """How many answers follow another text than the end of the prompt that serving shows."""
    found = [(example.tokens.tolist(), run) for example in examples for run in runs(example.loss_mask.tolist())]
    places, unlike = learned_places(conversation, data), 0
    if len(places) != len(found):  # some are printed empty, or cut away
        places = [place for place, _ in answers_expected(conversation, tokenizer, data)]
    for place, (tokens, (start, _)) in zip(places, found, strict=False):
        options = {"tools": conversation.tools or None, "tokenize": False, **data.template_kwargs}
        prompt = tokenizer.apply_chat_template(conversation.messages[:place], add_generation_prompt=True, **options)
        # as it comes back: tokenizers may normalise
        prompt = tokenizer.decode(tokenizer(prompt[-200:], add_special_tokens=False)["input_ids"])
        begin = max(0, start - 8)
        before, more = (text_of(tokens, (begin, end), tokenizer).lstrip("\ufffd") for end in (start, start + 1))
        # a token that straddles the end of the prompt is supervised
        unlike += not any(prompt.endswith(more[:size]) for size in range(len(before), len(more) + 1))
    return unlike


def answers_expected(
    conversation: Conversation, tokenizer: Any, data: DataSection
) -> Iterator[tuple[int, tuple[str, ...]]]:
    """(place, texts that may be supervised, after a question of ours and after its own history) of each answer."""
    for place in learned_places(conversation, data):
        turn, history = conversation.messages[place], conversation.messages[:place]
        ours = expected([{"role": "user", "content": "Why?"}], turn, conversation.tools, tokenizer, data)
        plain = "tool_calls" not in turn and history and history[-1]["role"] == "user"
        texts = ours + (() if plain else expected(history, turn, conversation.tools, tokenizer, data))
        if texts:
            yield place, texts


def learned_places(conversation: Conversation, data: DataSection) -> list[int]:
    """The places of the answers that have a weight: all of them, or the last."""
    places = [place for place, turn in enumerate(conversation.messages) if turn["role"] == "assistant"]
    chosen = places[-1:] if data.turns == "last" else places
    return [place for place in chosen if conversation.messages[place].get("weight", 1) != 0]


def expected(
    history: list[dict[str, Any]], turn: dict[str, Any], tools: Any, tokenizer: Any, data: DataSection
) -> tuple[str, ...]:
    """What may be supervised of one answer; nothing if the template refuses or prints no word of it."""

    def render(messages: list[dict[str, Any]], ask: bool = False) -> str:
        options = {"tools": tools or None, "tokenize": False, **data.template_kwargs}
        return tokenizer.apply_chat_template([*history, *messages], add_generation_prompt=ask, **options)

    given = {"role": "assistant", "content": PLACEHOLDER}
    try:
        prompt, finished, standing = render([], True), render([turn]), render([given])
    except Exception:  # a template may raise anything
        return ()
    try:
        following = render([given, {"role": "user", "content": "And?"}])
    except Exception:
        following = standing
    before, _, tail = standing.partition(PLACEHOLDER)
    if finished.startswith(before) and not finished.removeprefix(before).removesuffix(tail).strip():
        return ()
    starts = answer_starts(prompt, finished, before)
    marks = end_marks(tail, following.partition(PLACEHOLDER)[2], stop_texts(tokenizer))
    ends = [finished.removesuffix(tail[len(mark) :]) for mark in marks]
    # before white space alone nothing else ends an answer
    texts = [end[start:].rstrip() if tail.strip() else end[start:] for start in starts for end in ends]
    return tuple(dict.fromkeys(filter(None, texts)))


def answer_starts(prompt: str, finished: str, before: str) -> list[int]:
    """Where an answer may begin: behind the prompt; else where it leaves the prompt, or where its content begins."""
    if finished.startswith(prompt):
        return [len(prompt)]
    both = [text for text in accumulate(PIECE.findall(prompt)) if before.startswith(text) and finished.startswith(text)]
    return [len(both[-1]) if both else 0] + [len(before)] * finished.startswith(before)


def end_marks(tail: str, following: str, stops: Sequence[str]) -> list[str]:
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
    own = [text for text in texts if text.strip()]
    return solid or stopping[:1] or own[:1] or [tail]


def covers(tokens: list[int], run: tuple[int, int], answer: str, tokenizer: Any, max_length: int) -> bool:
    """Whether a run is the fewest tokens that hold the answer; of one that was cut, its beginning."""
    start, end = run
    text, first, last = (text_of(tokens, part, tokenizer) for part in (run, (start, start + 1), (end - 1, end)))
    answer = tokenizer.decode(
        tokenizer(answer, add_special_tokens=False, verbose=False)["input_ids"]
    )  # as it comes back, normalised
    if end == max_length:
        whole = text.rstrip("\ufffd")
        return any(answer.startswith(whole[extra:]) for extra in range(max(1, len(first))))
    before = text.find(answer)
    return 0 <= before < max(1, len(first)) and len(text) - before - len(answer) < max(1, len(last))


def beyond(conversation: Conversation, place: int, tokenizer: Any, data: DataSection) -> bool:
    """Whether an answer begins only where `max_length` has cut."""
    options = {"tools": conversation.tools or None, "tokenize": False, **data.template_kwargs}
    asked = tokenizer.apply_chat_template(conversation.messages[:place], add_generation_prompt=True, **options)
    return len(tokenizer(asked, add_special_tokens=False, verbose=False)["input_ids"]) >= data.max_length


def runs(mask: Sequence[bool]) -> list[tuple[int, int]]:
    """Where every unbroken supervised run begins and ends."""
    found, place = [], 0
    for supervised, group in groupby(mask):
        length = len(list(group))
        found += [(place, place + length)] * supervised
        place += length
    return found


def text_of(tokens: list[int], run: tuple[int, int], tokenizer: Any) -> str:
    """What a run of tokens says where it stands: a decoder may treat the first token of all otherwise."""
    start, end = run
    before = max(0, start - 8)
    return tokenizer.decode(tokens[before:end])[len(tokenizer.decode(tokens[before:start])) :]


def short(text: str) -> str:
    """A text with its middle left out."""
    return repr(text if len(text) <= 90 else f"{text[:50]} ... {text[-35:]}")
