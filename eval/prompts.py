"""Read the prompts that a drafter is measured on: sets of questions, some of several turns."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, product, zip_longest
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
from eval.benchmark_records import PLACEHOLDER, UNFILLED, Replay, convert_record, replay_of

NAMES = ("question_id", "prompt_id", "task_id", "id", "_id", "session_id")
TASKS = ("category", "task")
# the tasks of MT-bench, which Spec-Bench holds too
MT_BENCH = {
    "writing",
    "roleplay",
    "reasoning",
    "math",
    "coding",
    "extraction",
    "stem",
    "humanities",
}
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
    replay: Replay | None = None  # where turns follow the data's own answers, not the target's

    def messages(self, answers: Sequence[str]) -> list[dict[str, Any]]:
        """Return the messages of a prompt: all before the turn that comes after so many answers, and its own."""
        turn = len(answers)
        if self.replay is not None:
            return self.replay.messages[: self.replay.answers[turn]]
        contents = chain.from_iterable(zip_longest(self.turns[: turn + 1], answers))
        return [
            {"role": ("user", "assistant")[i % 2], "content": text}
            for i, text in enumerate(islice(contents, 2 * turn + 1))
        ]


class Case(NamedTuple):
    """A question at one temperature with one seed."""

    temperature: float
    seed: int
    question: Question

    def key(self, turn: int) -> Key:
        """Return the key of the answer to a turn."""
        return self.question.set, self.question.id, turn, self.temperature, self.seed

    def sampling(self, turn: int) -> Sampling:
        """Return temperature and noise of a turn."""
        # by name, so that the noise of a question does not depend on the other questions
        name = f"{self.question.set}\n{self.question.id}\n{turn}"
        request = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")
        return Sampling(self.temperature, seed=self.seed, request=request)


def question_sets(recipe: Recipe) -> dict[str, str]:
    """Return the recipe's prompt sources by the names of their sets.

    Raises:
        ValueError: The recipe names no prompts.
    """
    prompts = recipe.eval.prompts or recipe.data.heldout
    if prompts is None:
        raise ValueError(
            "the recipe names no prompts to measure on: set eval.prompts to a file, a folder or a hub dataset of "
            "questions or conversations, or data.heldout, which it is by default"
        )
    if isinstance(prompts, dict):
        return prompts
    path = Path(prompts)
    name = path.stem
    # Spec-Bench and SPEED-Bench name the folder, and every file alike
    if name in ("question", "test") and path.parent.name:
        name = path.parent.name
    return {name: prompts}


def questions(recipe: Recipe) -> list[Question]:
    """Read at most `eval.count` questions of each of the recipe's sets.

    Raises:
        ValueError: A set has no question.
    """
    asked = []
    for name, source in question_sets(recipe).items():
        asked += _read_questions(name, source, recipe)
    return asked


def tell_shortage(recipe: Recipe, asked: Sequence[Question]) -> None:
    """Print a line for each set that has fewer prompts than the recipe asks for."""
    count = recipe.eval.count
    sizes = Counter(question.set for question in asked)
    for name, source in question_sets(recipe).items():
        if sizes[name] < count:
            print(
                f"{name}: eval.count is {count}, and {source} has {sizes[name]} prompts: all are taken"
            )


def cases(recipe: Recipe, asked: list[Question], temperatures: Iterable[float]) -> list[Case]:
    """Return every question at every temperature with every seed."""
    every = []
    for temperature in temperatures:
        # at temperature 0 the seed changes nothing
        seeds = recipe.eval.seeds if temperature > 0 else recipe.eval.seeds[:1]
        for seed, question in product(seeds, asked):
            every.append(Case(temperature, seed, question))
    return every


def chat_prompt(
    recipe: Recipe, target: Target, question: Question, answers: Sequence[str] = ()
) -> list[int]:
    """Return the token ids of a question's turn; images stand where the turns have marks.

    Args:
        recipe: Says how the chat template is filled, and where images are.
        target: Whose chat template and tokenizer are taken.
        question: Any of its turns.
        answers: To the turns before, of which a replay needs only the number.

    Raises:
        ValueError: The template refuses stored messages.
    """
    images = (as_text(image, recipe.data.images) for image in question.images)
    messages = with_images(question.messages(answers), images)
    options = dict(recipe.data.template_kwargs)
    if question.replay is None:
        return target.chat(messages, **options)
    if question.replay.tools:
        options["tools"] = question.replay.tools
    try:
        return target.chat(messages, **options)
    except Exception as error:
        # a template is a program, and may raise anything
        raise ValueError(
            f"{question.set}, {question.id}, turn {len(answers) + 1}: the chat template refuses the stored messages: "
            f"{' '.join(str(error).split())[:200]}; remove the record, or name another template in data.template"
        ) from error


def encode_prompt(
    recipe: Recipe, target: Target, question: Question, answers: Sequence[str] = ()
) -> list[int] | None:
    """Encode a question's turn as a prompt.

    Args:
        recipe: Says how long an answer may be, and how the chat template is filled.
        target: Whose tokenizer and positions count.
        question: Any of its turns.
        answers: To the turns before.

    Returns:
        Token ids, or None where an answer would exceed the model's positions.
    """
    prompt = chat_prompt(recipe, target, question, answers)
    end = len(prompt) + recipe.eval.max_new_tokens
    if target.max_positions is not None and end > target.max_positions:
        return None
    return prompt


def _read_questions(name: str, source: str, recipe: Recipe) -> list[Question]:
    """Read the first questions of a source; where questions have tasks, the tasks take turns."""
    count = recipe.eval.count
    seeing = recipe.data.images is not None
    dropped: Counter[str] = Counter()
    stream = _parse_questions(name, source, recipe.eval.split, dropped, seeing=seeing)
    chosen = list(islice(stream, 1))
    if chosen and chosen[0].task is not None:
        # the whole source is read, since tasks may follow one another
        chosen = _alternate_tasks(chain(chosen, stream))[:count]
    elif chosen:
        chosen += islice(stream, count - 1)

    reasons = ", ".join(f"{reason} ({times})" for reason, times in dropped.most_common())
    # a set without these would be another benchmark
    if dropped[UNFILLED]:
        raise ValueError(
            f"{dropped[UNFILLED]} records of {source} have {UNFILLED}: SPEED-Bench is filled by ModelOpt's `python "
            "examples/specdec_bench/prepare_data.py --dataset speed --config all`; set eval.prompts to a file that "
            "it writes, data/speed/CONFIG/test.parquet"
        )
    if not chosen:
        raise ValueError(
            f"no question in {source}: expected conversations, or records with turns, prompt, question; got "
            f"{reasons or 'no records'}"
        )
    if dropped:
        print(f"{name}: {dropped.total()} records of {source} are no questions: {reasons}")
    return _number_duplicates(chosen)


def _parse_questions(
    name: str, source: str, split: str, dropped: Counter[str], *, seeing: bool
) -> Iterator[Question]:
    """Yield the questions of a source, and count the records that are none."""
    for file, records in read_records(source, split, None):
        for record_number, record in records:
            try:
                yield _parse_question(name, record, f"{Path(file).name}:{record_number}", seeing)
            except Dropped as reason:
                dropped[str(reason)] += 1


def _parse_question(name: str, record: Any, place: str, seeing: bool) -> Question:
    """Return all user turns of a record without answers, or the first one of a conversation with answers.

    What the target answers, though answers are stored, is a replay: sessions of agents, and histories of MRCR.
    """
    if isinstance(record, Dropped):
        raise record
    record, replayed = convert_record(record)
    conversation, _ = conversation_of(record, place, answered=False, images=seeing)
    turns = []
    is_answered = False
    for message in conversation.messages:
        if message["role"] == "user":
            turns.append(message["content"])
        elif message["role"] == "assistant" and says_something(message):
            is_answered = True
    if any(text.startswith(PLACEHOLDER) for text in turns):
        raise Dropped(UNFILLED)

    task = _first_value(record, TASKS)
    record_id = _first_value(record, NAMES)
    question = Question(
        set=name,
        id=conversation.id,
        task=task if isinstance(task, str) else None,
        turns=tuple(turns),
        images=conversation.images,
    )
    replay = replay_of(conversation, replayed)
    if replay is not None:
        turns = [replay.messages[i - 1]["content"] for i in replay.answers]
        question = replace(question, turns=tuple(turns), replay=replay)
    elif is_answered:
        # the drafted conversation would leave the stored one after the first answer
        return replace(question, turns=(turns[0],))
    if record_id is not None:
        return replace(question, id=str(record_id))
    return question


def _first_value(record: dict[str, Any], keys: tuple[str, ...]) -> Any:
    """Return the first value under these keys that is not empty."""
    return next((record[key] for key in keys if record.get(key) not in (None, "", [])), None)


def _alternate_tasks(stream: Iterator[Question]) -> list[Question]:
    """Return the first question of every task, then the second of every task, and so on."""
    tasks: dict[str | None, list[Question]] = {}
    for question in stream:
        tasks.setdefault(question.task, []).append(question)
    # Spec-Bench, where MT-bench is one task among six
    if tasks.keys() > MT_BENCH:
        mt_bench = []
        for name in [name for name in tasks if name in MT_BENCH]:
            mt_bench += [replace(question, task="mt_bench") for question in tasks.pop(name)]
        tasks = {"mt_bench": mt_bench, **tasks}
    alternated = []
    for rank in zip_longest(*tasks.values()):
        alternated += [question for question in rank if question is not None]
    return alternated


def _number_duplicates(questions: list[Question]) -> list[Question]:
    """Return the questions, with a number appended to ids that occur again."""
    counts: Counter[str] = Counter()
    numbered = []
    for question in questions:
        counts[question.id] += 1
        times = counts[question.id]
        if times > 1:
            question = replace(question, id=f"{question.id}#{times}")
        numbered.append(question)
    return numbered
