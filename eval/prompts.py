"""What the target is asked when a drafter is measured: sets of questions, some of several turns."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

from data_prep.conversations import read_records
from data_prep.records import conversation_of, says_something
from data_prep.turns import Dropped
from eagle.core.verify import Sampling
from eagle.recipe import Recipe
from eagle.target.target import Target

NAMES = ("question_id", "prompt_id", "task_id", "id")
TASKS = ("category", "task")
MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, turn after turn, and where it comes from."""

    set: str
    id: str  # within its set
    task: str | None
    turns: tuple[str, ...]


Case = tuple[float, int, Question]  # temperature, seed, what is asked
Key = tuple[str, str, int, float, int]  # set, conversation, turn, temperature, seed


def question_sets(recipe: Recipe) -> dict[str, str]:
    """The sources of the recipe's prompts by the names of the sets."""
    prompts = recipe.eval.prompts
    if isinstance(prompts, dict):
        return prompts
    path = Path(prompts)
    return {path.parent.name if path.stem == "question" and path.parent.name else path.stem: prompts}


def questions(recipe: Recipe) -> list[Question]:
    """Of each of the recipe's sets so many questions as `eval.count` says."""
    sets = question_sets(recipe).items()
    return [one for name, source in sets for one in _of_set(name, source, recipe.eval.split, recipe.eval.count)]


def first_turns(recipe: Recipe, target: Target) -> list[list[int]]:
    """Token ids of the first user turn of the recipe's prompts, as the chat template asks them."""
    return [target.chat(question.turns[0], **recipe.data.template_kwargs) for question in questions(recipe)]


def _of_set(name: str, source: str, split: str, count: int) -> list[Question]:
    """The first `count` questions, or where there are tasks so many from all of them in turn."""
    dropped: Counter[str] = Counter()
    found = _read(name, source, split, dropped)
    first = next(found, None)
    if first is not None and first.task is not None:
        chosen = _in_turn(chain([first], found))[:count]
    else:
        chosen = [] if first is None else [first, *islice(found, count - 1)]
    if dropped:
        reasons = ", ".join(f"{reason} ({times})" for reason, times in dropped.most_common())
        print(f"{name}: {dropped.total()} records of {source} are no questions: {reasons}")
    if not chosen:
        raise ValueError(f"no question in {source}: expected conversations, or records with turns, prompt, question")
    return _told_apart(chosen)


def _read(name: str, source: str, split: str, dropped: Counter[str]) -> Iterator[Question]:
    for file, records in read_records(source, split, None):
        for number, record in records:
            try:
                yield _question(name, record, f"{Path(file).name}:{number}")
            except Dropped as reason:
                dropped[str(reason)] += 1


def _question(name: str, record: Any, place: str) -> Question:
    """What a record asks: all of its turns where none is answered, the first one of a conversation."""
    if isinstance(record, Dropped):
        raise record
    conversation, _ = conversation_of(record, place, answered=False)
    asked = [turn["content"] for turn in conversation.messages if turn["role"] == "user"]
    task, named = _first(record, TASKS), _first(record, NAMES)
    task = task if isinstance(task, str) else None
    if any(says_something(turn) for turn in conversation.messages if turn["role"] == "assistant"):
        return Question(name, conversation.id, task, (asked[0],))
    return Question(name, conversation.id if named is None else str(named), task, tuple(asked))


def _first(record: dict[str, Any], keys: tuple[str, ...]) -> Any:
    """The first of these that says something."""
    return next((record[key] for key in keys if record.get(key) not in (None, "", [])), None)


def _in_turn(found: Iterator[Question]) -> list[Question]:
    """The first of every task, then the second of every task, and so on."""
    tasks: dict[str | None, list[Question]] = {}
    for question in found:
        tasks.setdefault(question.task, []).append(question)
    if tasks.keys() > MT_BENCH:  # Spec-Bench, where MT-bench is one task among six
        whole = [replace(one, task="mt_bench") for name in list(tasks) if name in MT_BENCH for one in tasks.pop(name)]
        tasks = {"mt_bench": whole, **tasks}
    return [one for rank in zip_longest(*tasks.values()) for one in rank if one is not None]


def _told_apart(questions: list[Question]) -> list[Question]:
    """The same, where an id stands twice with a number behind it."""
    seen: Counter[str] = Counter()
    apart = []
    for question in questions:
        seen[question.id] += 1
        times = seen[question.id]
        apart.append(question if times == 1 else replace(question, id=f"{question.id}#{times}"))
    return apart


def cases(recipe: Recipe, asked: list[Question], temperatures: Iterable[float]) -> list[Case]:
    """Every question at every temperature with every seed; a greedy target has no use for several."""
    seeds = recipe.eval.seeds
    kinds = [(temperature, seed) for temperature in temperatures for seed in (seeds if temperature > 0 else seeds[:1])]
    return [(temperature, seed, question) for temperature, seed in kinds for question in asked]


def key_of(case: Case, turn: int) -> Key:
    """What names an answer."""
    temperature, seed, question = case
    return question.set, question.id, turn, temperature, seed


def sampling_of(case: Case, turn: int) -> Sampling:
    """How the target speaks; a question has the same noise in whatever company it is asked."""
    temperature, seed, question = case
    name = f"{question.set}\n{question.id}\n{turn}"
    return Sampling(temperature, seed=seed, request=int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big"))


def prompt_of(recipe: Recipe, target: Target, said: Sequence[str]) -> list[int] | None:
    """Token ids of what user and assistant said in turn; None where an answer to it exceeds the model's positions."""
    messages = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(said)]
    prompt, most = target.chat(messages, **recipe.data.template_kwargs), target.max_positions
    return None if most is not None and len(prompt) + recipe.eval.max_new_tokens > most else prompt
