"""Conversation -> tokens and loss mask, by asking the chat template what it prints for the assistant."""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from data_prep.conversations import Conversation, Tally, read_conversations
from eagle.examples import Example
from eagle.log import progress
from eagle.recipe import DataSection, Recipe

Render = Callable[[list[dict[str, Any]], bool], str]
ANYTHING = "\ue000anything\ue000"  # an answer that no template prints by itself

REWRITES = "history rewritten by the template: several examples"
HISTORY_DIFFERS = "the turns before an answer are printed otherwise once it is given"
PROMPT_DIFFERS = "the generation prompt ends otherwise than the turn is printed"
NO_MARK = "the template prints no end-of-turn mark"
SILENT = "the template prints nothing for an answer"
STRADDLES = "a token straddles the start of an answer"
MARK_IN_CONTENT = "special-token text inside content"
CUT = "cut at max_length"
CUT_AWAY = "nothing supervised within max_length"
ALL_ONES = "everything is supervised"


class Refused(Exception):
    """The reason for which a conversation gives no example."""


@dataclass(slots=True)
class Printed:
    """A text as the template prints it, and where in it the assistant speaks."""

    text: str
    answers: list[tuple[int, int]]


def load_tokenizer(recipe: Recipe) -> Any:
    """The target's tokenizer, with the recipe's chat template where it names one."""
    target, template = recipe.target, recipe.data.template
    tokenizer = AutoTokenizer.from_pretrained(
        target.path, revision=target.revision, trust_remote_code=target.trust_remote_code
    )
    if template:
        if not Path(template).is_file():
            raise ValueError(f"no chat template at data.template = {template}: expected a Jinja file")
        tokenizer.chat_template = Path(template).read_text(encoding="utf-8")
    if not tokenizer.chat_template:
        raise ValueError(f"the tokenizer of {target.path} has no chat template: name a Jinja file in data.template")
    return tokenizer


def tokenized(recipe: Recipe, tokenizer: Any, *, strict: bool = False) -> tuple[list[Example], Tally]:
    """The recipe's training examples, and what was kept, dropped and noted."""
    data, tally = recipe.data, Tally()
    examples = [example for _, found in each(recipe, tokenizer, tally, strict=strict) for example in found]
    if not any(example.loss_mask.any() for example in examples):
        raise ValueError(
            f"no example of {data.train} has a supervised token; what became of its records:\n{tally.table()}"
        )
    if all(example.loss_mask.all() for example in examples):
        print("warning: every token is supervised; look at `python -m data_prep.inspect_mask RECIPE`")
    return examples, tally


def each(
    recipe: Recipe, tokenizer: Any, tally: Tally, *, strict: bool = False
) -> Iterator[tuple[Conversation, list[Example]]]:
    """Every conversation of the recipe with its examples; one that gives none is counted as dropped, not as kept."""
    data, regenerated = recipe.data, recipe.regenerate
    if regenerated and data.train == regenerated.out and not Path(data.train).exists():
        raise ValueError(
            f"{data.train} is not there: run `python -m data_prep.regenerate RECIPE` first, which makes it"
        )
    read = list(
        read_conversations(data.train, tally, limit=data.limit, strict=strict, split=data.split, revision=data.revision)
    )
    for conversation in progress(read, "tokenise", len(read)):
        before = tally.dropped.copy()
        examples = examples_of(conversation, tokenizer, data, tally)
        tally.kept -= not examples
        if strict and not examples:
            raise ValueError(f"{conversation.id}: {next(iter(tally.dropped - before))}")
        yield conversation, examples


def examples_of(conversation: Conversation, tokenizer: Any, data: DataSection, tally: Tally) -> list[Example]:
    """One, or several where the template rewrites history; none if it is dropped. Both are counted in `tally`."""
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} says no offsets: expected a fast tokenizer (a tokenizer.json)")
    notes: set[str] = set()
    try:
        parts = printed(conversation, tokenizer, data, notes)
        found = [example_of(part, tokenizer, data.max_length, notes) for part in parts]
        if not any(found):
            raise Refused(CUT_AWAY)
    except Refused as refused:
        tally.dropped[str(refused)] += 1
        return []
    examples = [example for example in found if example]
    if all(example.loss_mask.all() for example in examples):
        notes.add(ALL_ONES)
    if mentions_special_tokens(conversation, tokenizer):
        notes.add(MARK_IN_CONTENT)
    tally.noted.update(notes)
    return examples


def printed(conversation: Conversation, tokenizer: Any, data: DataSection, notes: set[str]) -> list[Printed]:
    """What is read: each answer after the history that serving shows, answers with the same history in one text."""
    messages = [{key: value for key, value in turn.items() if key != "weight"} for turn in conversation.messages]
    render, mark = renderer(conversation, tokenizer, data), None
    parts: list[Printed] = []
    for place in learned(conversation, data.turns):
        text, start = answered(messages[: place + 1], render, notes)
        if start >= len(text):
            notes.add(SILENT)
            continue
        if mark is None:
            mark = render([*messages[:place], stand_in(messages[place])], False).rpartition(ANYTHING)[2]
            notes.update([NO_MARK] * (not mark))
        # what stands after an end-of-turn mark belongs to the template; without a mark, white space is the mark
        end = max(start, len(text.rstrip())) if mark.strip() else len(text)
        if parts and text.startswith(parts[-1].text):
            parts[-1] = Printed(text, [*parts[-1].answers, (start, end)])
        else:
            parts.append(Printed(text, [(start, end)]))
    if len(parts) > 1:
        notes.add(REWRITES)
    if not parts:
        raise Refused(SILENT)
    return parts


def answered(messages: list[dict[str, Any]], render: Render, notes: set[str]) -> tuple[str, int]:
    """The text up to an answer, and where in it the answer begins."""
    history, turn = messages[:-1], messages[-1]
    asked, text = render(history, True), render(messages, False)
    if text.startswith(asked):
        return text, len(asked)
    if asked.startswith(text):
        return text, len(text)
    alike, before = render([*history, stand_in(turn)], False), render(history, False)
    start, known = shared(asked, alike), shared(asked, before)
    if text.startswith(asked[:start]) and start >= len(asked[:known].rstrip()):
        notes.add(PROMPT_DIFFERS)
        return text, start
    # the turns before are printed otherwise once they are answered: take them as they were when it was asked for
    prompt, said = asked[known:], alike.find(ANYTHING)
    start = alike.rfind(prompt, 0, said) + len(prompt)
    if not prompt.strip() or not text.startswith(alike[:start]) or str(history[-1]["content"]) in alike[start:said]:
        raise Refused(f"the template prints the turns before message {len(messages)} otherwise once it is answered")
    notes.add(HISTORY_DIFFERS)
    return asked + text[start:], len(asked)


def stand_in(turn: dict[str, Any]) -> dict[str, Any]:
    """A turn that answers anything, with thoughts where the given one has some."""
    thinks = turn.get("reasoning_content") or "</think>" in str(turn.get("content"))
    thought = {"reasoning_content": ANYTHING} if thinks else {}
    return {"role": "assistant", "content": ANYTHING, **thought}


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

    def render(messages: list[dict[str, Any]], ask: bool) -> str:
        options = {"tools": conversation.tools or None, "add_generation_prompt": ask, "tokenize": False}
        try:
            return tokenizer.apply_chat_template(messages, **options, **data.template_kwargs)
        except Exception as error:  # a template may raise anything
            raise Refused(f"the template refuses: {' '.join(str(error).split())[:100]}") from error

    return render


def shared(one: str, other: str) -> int:
    """How many characters two texts share from their beginning."""
    sizes = range(1, min(len(one), len(other)) + 1)
    return bisect_left(sizes, True, key=lambda size: one[:size] != other[:size])


def example_of(part: Printed, tokenizer: Any, max_length: int, notes: set[str]) -> Example | None:
    """The text as tokens, those of the answers supervised; None if none of them comes before `max_length`."""
    tokens, offsets = encoded(part.text, tokenizer)
    first, last = offsets[:max_length].unbind(1)
    mask = torch.zeros(len(first), dtype=torch.bool)
    for start, end in part.answers:
        mask |= (first < end) & (last > start)
        if ((first < start) & (last > start)).any():
            notes.add(STRADDLES)
    if len(tokens) > max_length:
        notes.add(CUT)
    return Example(tokens[:max_length], mask) if mask.any() else None


def encoded(text: str, tokenizer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """[T] tokens and [T, 2] the characters of each. Nothing is added: templates print their own special tokens."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Refused("half a surrogate pair: no valid text") from None
    encoding = encoder_of(tokenizer, len(tokenizer)).encode(text, add_special_tokens=False)
    return torch.tensor(encoding.ids), torch.tensor(encoding.offsets).view(-1, 2)


@lru_cache(maxsize=4)
def encoder_of(tokenizer: Any, size: int) -> Any:
    """What makes its tokens, without the step that adds special ones and, in some families, trims offsets."""
    encoder = copy.deepcopy(tokenizer.backend_tokenizer)
    encoder.post_processor = None
    encoder.no_truncation()
    encoder.no_padding()
    return encoder


@lru_cache(maxsize=4)
def special_texts(tokenizer: Any, size: int) -> tuple[str, ...]:
    """The texts that this tokenizer reads as one special token."""
    return tuple(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)


def mentions_special_tokens(conversation: Conversation, tokenizer: Any) -> bool:
    """Whether something said would be read as a special token."""
    said = "\0".join(str(turn.get("content") or "") for turn in conversation.messages)
    return any(text in said for text in special_texts(tokenizer, len(tokenizer)))
