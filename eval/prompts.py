"""Prompts that a drafter is measured on: sets of questions, some of several turns."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from data_prep.chats.images import Source
from data_prep.chats.records import conversation_of, says_something
from data_prep.chats.turns import Dropped
from data_prep.conversations import read_records
from data_prep.image_texts import as_text, with_images
from eagle.core.verify import Sampling
from eagle.recipe import Recipe
from eagle.target.target import Target

NAMES = ("question_id", "prompt_id", "task_id", "id")
TASKS = ("category", "task")
MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
Key = tuple[str, str, int, float, int]  # set, conversation, turn, temperature, seed
KEY_NAMES = ("set", "conversation", "turn", "temperature", "seed")


@dataclass(frozen=True, slots=True)
class Question:
    """The user's turns of a conversation, and where they come from."""

    set: str
    id: str  # within its set
    task: str | None
    turns: tuple[str, ...]  # with a mark for each image
    images: tuple[Source, ...] = ()


class Case(NamedTuple):
    """A question at one temperature with one seed."""

    temperature: float
    seed: int
    question: Question

    def key(self, turn: int) -> Key:
        """The key of the answer to a turn."""
        return self.question.set, self.question.id, turn, self.temperature, self.seed

    def sampling(self, turn: int) -> Sampling:
        """Temperature and noise of a turn; the noise of a question does not depend on the other questions."""
        name = f"{self.question.set}\n{self.question.id}\n{turn}"
        request = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")
        return Sampling(self.temperature, seed=self.seed, request=request)


def question_sets(recipe: Recipe) -> dict[str, str]:
    """The recipe's prompt sources by the names of their sets."""
    prompts = recipe.eval.prompts or recipe.data.heldout
    if prompts is None:
        raise ValueError(
            "the recipe names no prompts to measure on: set eval.prompts to a file, a folder or a hub dataset of "
            "questions or conversations, or data.heldout, which it is by default"
        )
    if isinstance(prompts, dict):
        return prompts
    path = Path(prompts)
    return {path.parent.name if path.stem == "question" and path.parent.name else path.stem: prompts}


def questions(recipe: Recipe) -> list[Question]:
    """At most `eval.count` questions of each of the recipe's sets."""
    sets = question_sets(recipe).items()
    seeing = recipe.data.images is not None
    return [
        question
        for name, source in sets
        for question in _read_questions(name, source, recipe.eval.split, recipe.eval.count, seeing)
    ]


def cases(recipe: Recipe, asked: list[Question], temperatures: Iterable[float]) -> list[Case]:
    """Every question at every temperature with every seed; at temperature 0 with one seed alone."""
    seeds = recipe.eval.seeds
    kinds = [(temperature, seed) for temperature in temperatures for seed in (seeds if temperature > 0 else seeds[:1])]
    return [Case(temperature, seed, question) for temperature, seed in kinds for question in asked]


def chat_prompt(recipe: Recipe, target: Target, turns: Sequence[str], images: Sequence[Source]) -> list[int]:
    """Token ids of alternating user and assistant turns; the first images stand where the turns have marks."""
    messages = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(turns)]
    shown = with_images(messages, (as_text(image, recipe.data.images) for image in images))
    return target.chat(shown, **recipe.data.template_kwargs)


def encode_prompt(
    recipe: Recipe, target: Target, turns: Sequence[str], images: Sequence[Source] = ()
) -> list[int] | None:
    """The prompt of these turns and images; None where an answer would exceed the model's positions."""
    prompt, most = chat_prompt(recipe, target, turns, images), target.max_positions
    return None if most is not None and len(prompt) + recipe.eval.max_new_tokens > most else prompt


def _read_questions(name: str, source: str, split: str, count: int, seeing: bool) -> list[Question]:
    """The first `count` questions; where questions have tasks, the tasks take turns."""
    dropped: Counter[str] = Counter()
    stream = _parse_questions(name, source, split, dropped, seeing)
    first = next(stream, None)
    if first is not None and first.task is not None:
        chosen = _alternate_tasks(chain([first], stream))[:count]
    else:
        chosen = [] if first is None else [first, *islice(stream, count - 1)]
    if dropped:
        reasons = ", ".join(f"{reason} ({times})" for reason, times in dropped.most_common())
        print(f"{name}: {dropped.total()} records of {source} are no questions: {reasons}")
    if not chosen:
        raise ValueError(f"no question in {source}: expected conversations, or records with turns, prompt, question")
    return _number_duplicates(chosen)


def _parse_questions(name: str, source: str, split: str, dropped: Counter[str], seeing: bool) -> Iterator[Question]:
    for file, records in read_records(source, split, None):
        for number, record in records:
            try:
                yield _parse_question(name, record, f"{Path(file).name}:{number}", seeing)
            except Dropped as reason:
                dropped[str(reason)] += 1


def _parse_question(name: str, record: Any, place: str, seeing: bool) -> Question:
    """All user turns of a record without answers, the first one of a conversation with answers."""
    if isinstance(record, Dropped):
        raise record
    conversation, _ = conversation_of(record, place, answered=False, images=seeing)
    turns = [turn["content"] for turn in conversation.messages if turn["role"] == "user"]
    task, record_id = _first_value(record, TASKS), _first_value(record, NAMES)
    task = task if isinstance(task, str) else None
    if any(says_something(turn) for turn in conversation.messages if turn["role"] == "assistant"):
        return Question(name, conversation.id, task, (turns[0],), conversation.images)
    record_name = conversation.id if record_id is None else str(record_id)
    return Question(name, record_name, task, tuple(turns), conversation.images)


def _first_value(record: dict[str, Any], keys: tuple[str, ...]) -> Any:
    """The first value under these keys that is not empty."""
    return next((record[key] for key in keys if record.get(key) not in (None, "", [])), None)


def _alternate_tasks(stream: Iterator[Question]) -> list[Question]:
    """The first question of every task, then the second of every task, and so on."""
    tasks: dict[str | None, list[Question]] = {}
    for question in stream:
        tasks.setdefault(question.task, []).append(question)
    if tasks.keys() > MT_BENCH:  # Spec-Bench, where MT-bench is one task among six
        names = [name for name in tasks if name in MT_BENCH]
        whole = [replace(question, task="mt_bench") for name in names for question in tasks.pop(name)]
        tasks = {"mt_bench": whole, **tasks}
    return [question for rank in zip_longest(*tasks.values()) for question in rank if question is not None]


def _number_duplicates(questions: list[Question]) -> list[Question]:
    """The questions with a number appended to ids that occur again."""
    counts: Counter[str] = Counter()
    numbered = []
    for question in questions:
        counts[question.id] += 1
        times = counts[question.id]
        numbered.append(question if times == 1 else replace(question, id=f"{question.id}#{times}"))
    return numbered
