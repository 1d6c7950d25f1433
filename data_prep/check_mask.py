"""Check the loss mask by rules that share nothing with the code that made it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, zip_longest
from typing import Any

from data_prep.chats.images import apply_template
from data_prep.chats.marks import CUT_OFF
from data_prep.chats.records import Conversation
from data_prep.tokens import stop_texts
from eagle.core.examples import Example
from eagle.recipe import DataSection

PLACEHOLDER = "\ue001answer\ue001"
PLAIN = {"add_special_tokens": False, "verbose": False}
PIECE = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]|\s+|[^\s<\[]+|.")  # special tokens, spaces, words


def faults(
    conversation: Conversation, examples: Sequence[Example], tokenizer: Any, data: DataSection
) -> list[str]:
    """Return the faults of a mask: each supervised run must be one answer, from its first token to its end mark.

    The mask of a record of token ids is another program's, and its messages are not known.
    """
    if conversation.row is not None:
        return []
    runs = runs_of(examples)
    answers = list(expected_answers(conversation, tokenizer, data))
    num_missing = max(0, len(answers) - len(runs))
    if num_missing:
        # Answers that start after `max_length` are not expected.
        cut = []
        for i, _ in answers:
            prompt = print_prompt(conversation, i, tokenizer, data)
            if len(tokenizer(prompt, **PLAIN)["input_ids"]) >= data.max_length:
                cut.append(i)
        answers = [answer for answer in answers if answer[0] not in cut[-num_missing:]]
    wrong = []
    for answer, run in zip_longest(answers, runs):
        got = "nothing is supervised"
        if run:
            tokens, span = run
            got = f"supervised is {shorten(decode_run(tokens, span, tokenizer))}"
        if answer is None:
            wrong.append(f"{got}, which is no answer that is learned")
            continue
        i, texts = answer
        if not run or not any(
            is_covered(tokens, span, text, tokenizer, max_length=data.max_length) for text in texts
        ):
            wrong.append(f"message {i + 1}: {got}, expected {shorten(texts[0])}")
    return [f"{conversation.id}: {reason}" for reason in wrong]


def unlike_served(
    conversation: Conversation, examples: Sequence[Example], tokenizer: Any, data: DataSection
) -> int:
    """Return how many answers follow a text that differs from the end of the serving prompt."""
    if conversation.row is not None:
        return 0
    runs = runs_of(examples)
    places = weighted_places(conversation, data)
    if len(places) != len(runs):
        # Some are printed as nothing, or cut at `max_length`.
        places = [i for i, _ in expected_answers(conversation, tokenizer, data)]
    num_unlike = 0
    for i, (tokens, (start, _)) in zip(places, runs, strict=False):
        prompt = normalise(print_prompt(conversation, i, tokenizer, data)[-200:], tokenizer)
        begin = max(0, start - 8)
        before = decode_run(tokens, (begin, start), tokenizer).lstrip("\ufffd")
        # The first supervised token may straddle the end of the prompt.
        with_first = decode_run(tokens, (begin, start + 1), tokenizer).lstrip("\ufffd")
        sizes = range(len(before), len(with_first) + 1)
        num_unlike += not any(prompt.endswith(with_first[:size]) for size in sizes)
    return num_unlike


def expected_answers(
    conversation: Conversation, tokenizer: Any, data: DataSection
) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield each answer's index and the texts that may be supervised, after a fixed question and its own history."""
    question = {"role": "user", "content": "Why?"}
    for i in weighted_places(conversation, data):
        turn = conversation.messages[i]
        history = conversation.messages[:i]
        texts = expected_texts([question], turn, conversation.tools, tokenizer, data=data)
        # After a tool's result, templates may print answers otherwise.
        if "tool_calls" in turn or not history or history[-1]["role"] != "user":
            texts += expected_texts(history, turn, conversation.tools, tokenizer, data=data)
        if texts:
            yield i, texts


def weighted_places(conversation: Conversation, data: DataSection) -> list[int]:
    """Return the indices of the answers to learn: of all answers or the last, those that have a weight."""
    answers = [i for i, turn in enumerate(conversation.messages) if turn["role"] == "assistant"]
    if data.turns == "last":
        answers = answers[-1:]
    return [i for i in answers if conversation.messages[i].get("weight", 1) != 0]


def print_messages(
    messages: list[Any], tools: Any, tokenizer: Any, data: DataSection, *, ask: bool = False
) -> str:
    """Return messages as the chat template prints them, with a generation prompt if asked for."""
    return apply_template(
        messages, tools or None, tokenizer, data, tokenize=False, add_generation_prompt=ask
    )


def print_prompt(conversation: Conversation, place: int, tokenizer: Any, data: DataSection) -> str:
    """Return the serving prompt of the answer at an index."""
    return print_messages(
        conversation.messages[:place], conversation.tools, tokenizer, data, ask=True
    )


def normalise(text: str, tokenizer: Any) -> str:
    """Return a text as it is decoded from its tokens."""
    return tokenizer.decode(tokenizer(text, **PLAIN)["input_ids"])


def expected_texts(
    history: list[dict[str, Any]],
    turn: dict[str, Any],
    tools: Any,
    tokenizer: Any,
    data: DataSection,
) -> tuple[str, ...]:
    """Return the texts of one answer that may be supervised; none if the template refuses or prints no word of it."""
    placeholder = {"role": "assistant", "content": PLACEHOLDER}
    try:
        prompt = print_messages(history, tools, tokenizer, data, ask=True)
        printed = print_messages([*history, turn], tools, tokenizer, data)
        marked = print_messages([*history, placeholder], tools, tokenizer, data)
    except Exception:
        # A template is a program, and may raise anything.
        return ()
    try:
        question = {"role": "user", "content": "And?"}
        following = print_messages([*history, placeholder, question], tools, tokenizer, data)
    except Exception:
        following = marked
    before, _, tail = marked.partition(PLACEHOLDER)
    if printed.startswith(before) and not printed.removeprefix(before).removesuffix(tail).strip():
        return ()
    starts = possible_starts(prompt, printed, before)
    if CUT_OFF in turn:
        # A truncated answer has no end mark. White space at its end is learned or not: both are right.
        ends = [printed.removesuffix(tail)]
        return (*_from_starts(starts, ends, tail), *_from_starts(starts, ends, ""))
    stops = stop_texts(tokenizer)
    marks = possible_marks(tail, following.partition(PLACEHOLDER)[2], stops)
    ends = [printed.removesuffix(tail[len(mark) :]) for mark in marks]
    solid_marks = [mark.strip() for mark in marks if mark.strip()]
    if not printed.rstrip().endswith((*stops, *solid_marks)):
        # Some templates print an end mark only before another turn.
        later = mark_of_next_turn(history, turn, tools, tokenizer, data=data)
        if later:
            ends = [printed.rstrip() + later]
    return _from_starts(starts, ends, tail)


def _from_starts(starts: Sequence[int], ends: Sequence[str], tail: str) -> tuple[str, ...]:
    """Return the different texts from each start to each end."""
    texts = []
    for start in starts:
        for end in ends:
            text = end[start:]
            # White space ends an answer only if nothing else does.
            if tail.strip():
                text = text.rstrip()
            texts.append(text)
    return tuple(dict.fromkeys(filter(None, texts)))


def mark_of_next_turn(
    history: list[dict[str, Any]],
    turn: dict[str, Any],
    tools: Any,
    tokenizer: Any,
    data: DataSection,
) -> str:
    """Return what is printed after an answer if another turn follows, up to a stop token or that turn's opening.

    The opening is what the template also prints before a first question.
    """
    question = {"role": "user", "content": "And?"}
    reply = question
    if turn.get("tool_calls"):
        call = turn["tool_calls"][0]
        reply = {"role": "tool", "content": "And?", "name": call["function"]["name"]}
        if "id" in call:
            reply["tool_call_id"] = call["id"]
    for answer in (turn, {"role": "assistant", "content": PLACEHOLDER}):
        try:
            printed = print_messages([*history, answer], tools, tokenizer, data).rstrip()
            longer = print_messages([*history, answer, reply], tools, tokenizer, data)
            opening = print_messages([question], tools, tokenizer, data).rpartition("And?")[0]
        except Exception:
            # A template is a program, and may raise anything.
            continue
        if longer.startswith(printed):
            between = longer.removeprefix(printed).rpartition("And?")[0]
            return split_mark(between, opening, stop_texts(tokenizer))
    return ""


def split_mark(text: str, opening: str, stops: Sequence[str]) -> str:
    """Return the end mark in a text between two turns, of which the second is opened by the end of `opening`."""
    end = len(text) - len(text.lstrip())
    for piece in PIECE.findall(text[end:]):
        end += len(piece)
        if piece in stops:
            return text[:end]
        # Only special tokens can stand before a stop token.
        if len(piece) < 3 or (piece[0], piece[-1]) not in (("<", ">"), ("[", "]")):
            break
    shared = next((size for size in range(len(text), 0, -1) if opening.endswith(text[-size:])), 0)
    mark = text[: len(text) - shared].rstrip()
    if re.fullmatch(r"(\s*(<[^<>\s]+>|\[[^\[\]\s]+\]))+", mark):
        return mark
    return ""


def possible_starts(prompt: str, printed: str, before: str) -> list[int]:
    """Return where an answer may start: after the prompt; else where it leaves the prompt, or where its content is."""
    if printed.startswith(prompt):
        return [len(prompt)]
    starts = [0]
    # Whole tokens of the prompt that are still printed before the answer.
    for text in accumulate(PIECE.findall(prompt)):
        if before.startswith(text) and printed.startswith(text):
            starts = [len(text)]
    if printed.startswith(before):
        starts.append(len(before))
    return starts


def possible_marks(tail: str, following: str, stops: Sequence[str]) -> list[str]:
    """Return the end marks that an answer may have, from what is printed after it at the end and before a question.

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


def is_covered(
    tokens: list[int], run: tuple[int, int], answer: str, tokenizer: Any, max_length: int
) -> bool:
    """Return whether a run is the fewest tokens that contain an answer; of a cut answer, its beginning."""
    start, end = run
    text = decode_run(tokens, run, tokenizer)
    first = decode_run(tokens, (start, start + 1), tokenizer)
    last = decode_run(tokens, (end - 1, end), tokenizer)
    answer = normalise(answer, tokenizer)
    if end == max_length:
        # The cut may be inside a character.
        whole = text.rstrip("\ufffd")
        return any(answer.startswith(whole[extra:]) for extra in range(max(1, len(first))))
    before = text.find(answer)
    after = len(text) - before - len(answer)
    return 0 <= before < max(1, len(first)) and after < max(1, len(last))


def runs_of(examples: Sequence[Example]) -> list[tuple[list[int], tuple[int, int]]]:
    """Return (tokens, (start, end)) of every unbroken supervised run."""
    runs = []
    for example in examples:
        tokens = example.tokens.tolist()
        end = 0
        for supervised, group in groupby(example.loss_mask.tolist()):
            start = end
            end += len(list(group))
            if supervised:
                runs.append((tokens, (start, end)))
    return runs


def decode_run(tokens: list[int], run: tuple[int, int], tokenizer: Any) -> str:
    """Return the text of a run."""
    start, end = run
    # Some decoders treat a text's first token differently, so that a few tokens of context are decoded too.
    before = max(0, start - 8)
    context = tokenizer.decode(tokens[before:start])
    return tokenizer.decode(tokens[before:end])[len(context) :]


def shorten(text: str) -> str:
    """Return the repr of a text with its middle left out."""
    if len(text) > 90:
        text = f"{text[:50]} ... {text[-35:]}"
    return repr(text)
