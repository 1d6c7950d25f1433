"""Files of benchmarks are read as their tools write them; what is wrong in them is named. All texts are our own."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from datasets import Dataset

from eagle import Target
from eagle.recipe import Recipe
from eval.benchmark_records import PLACEHOLDER
from eval.measure import measure
from eval.prompts import Question, encode_prompt, question_sets
from eval.report import figures, markdown, page
from eval.result_files.buckets import TASK, TURN, Split
from eval.result_files.results import ACCEPTANCE_LENGTH, Group, read_results
from tests.eval.jsonl_files import read_lines, write_lines
from tests.eval.test_prompts import ask, with_eval

Record = dict[str, Any]


def write_table(path: Path, records: list[Record]) -> Path:
    """Write a parquet file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Dataset.from_list(records).to_parquet(path)
    return path


def write_array(path: Path, records: list[Record]) -> Path:
    """Write one JSON array."""
    path.write_text(json.dumps(records, indent=1))
    return path


def speed(i: int, category: str, turns: list[str]) -> Record:
    """Return a record with the columns of SPEED-Bench."""
    return {
        "question_id": f"{i:03}",
        "category": category,
        "sub_category": None,
        "turns": turns,
        "source": "ours",
        "src_id": str(i),
        "difficulty": None,
        "multiturn": len(turns) > 1,
    }


SPEED = [
    speed(1, "coding", ["What does copy do?", "How do I call it?"]),
    speed(2, "coding", ["What does chain do?"]),
    speed(3, "qa", ["What does accumulate do?"]),
]
# an agent's session, whose last message is the user's
SESSION = [
    {"role": "system", "content": "You fix code."},
    {"role": "user", "content": "What does copy do?"},
    {"role": "assistant", "content": "I read the file first."},
    {"role": "user", "content": "def copy(x): ..."},
    {"role": "assistant", "content": "It copies."},
    {"role": "user", "content": "Is that all?"},
]
CALL = {"type": "function", "function": {"name": "read", "arguments": '{"path": "a.py"}'}}
TOOL_SESSION = [
    {"role": "user", "content": "What does copy do?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "def copy(x): ..."},
    {"role": "assistant", "content": "It copies."},
]
NEEDLES = [
    {"role": "user", "content": "Write a line about cats."},
    {"role": "assistant", "content": "Cats sleep."},
    {"role": "user", "content": "Repeat the first line about cats."},
]
MRCR = {
    "prompt": json.dumps(NEEDLES),
    "answer": "Cats sleep.",
    "random_string_to_prepend": "x1",
    "n_needles": 2,
    "desired_msg_index": 1,
    "total_messages": 3,
    "n_chars": 30_000,
}
LONG = {
    "_id": "l1",
    "domain": "Notes",
    "sub_domain": "ours",
    "difficulty": "easy",
    "length": "short",
    "question": "What sleeps?",
    "choice_A": "cats",
    "choice_B": "stones",
    "choice_C": "words",
    "choice_D": "none",
    "answer": "A",
    "context": "Cats sleep.",
}
LONG_PROMPT = (
    "Cats sleep.\n\nWhat sleeps?\nA. cats\nB. stones\nC. words\nD. none\n\n"
    "Which choice is right? Give your reasons, then its letter."
)
# of each shape: how it is written, its name, its records, and the id, task and turns of each question
Shape = tuple[Callable[[Path, list[Record]], Path], str, list[Record], list[tuple[str, Any, Any]]]
FIRST = ("001", "coding", ("What does copy do?", "How do I call it?"))
SHAPES: dict[str, Shape] = {
    "SPEED-Bench, parquet": (
        write_table,
        "speed/qualitative/test.parquet",
        SPEED,
        # tasks take turns
        [
            FIRST,
            ("003", "qa", tuple(SPEED[2]["turns"])),
            ("002", "coding", tuple(SPEED[1]["turns"])),
        ],
    ),
    "SPEED-Bench, messages": (
        write_lines,
        "qualitative.jsonl",
        [
            {
                "question_id": "001",
                "category": "coding",
                "messages": [{"role": "user", "content": text} for text in FIRST[2]],
            }
        ],
        [FIRST],
    ),
    "SPEED-Bench, a text": (
        write_lines,
        "qualitative_coding.jsonl",
        [{"turns": "What does copy do?"}],
        [("qualitative_coding.jsonl:1", None, ("What does copy do?",))],
    ),
    "MRCR": (
        write_table,
        "mrcr.parquet",
        [MRCR],
        # 30,000 / 4.9 is 6,122 tokens
        [("mrcr.parquet:1", "4k to 8k", ("Repeat the first line about cats.",))],
    ),
    "LongBench-v2": (write_array, "data.json", [LONG], [("l1", "Notes", (LONG_PROMPT,))]),
    "session of an agent": (
        write_table,
        "sessions.parquet",
        [{"session_id": "s", "messages_json": json.dumps(SESSION)}],
        [("s", None, ("What does copy do?", "def copy(x): ...", "Is that all?"))],
    ),
    "session with a tool": (
        write_lines,
        "tools.jsonl",
        [{"id": "t", "messages": TOOL_SESSION}],
        [("t", None, ("What does copy do?", "def copy(x): ..."))],
    ),
}


def read_shape(name: str, recipe: Recipe, folder: Path) -> list[Question]:
    """Write the records of a shape and read its questions."""
    write, file, records, _ = SHAPES[name]
    return ask(recipe, write(folder / file, records))


@pytest.mark.parametrize("name", SHAPES)
def test_each_shape_is_read_by_path(name: str, recipe: Recipe, tmp_path: Path) -> None:
    """With its ids, its tasks and the turns that the target answers."""
    asked = read_shape(name, recipe, tmp_path)
    assert [(one.id, one.task, one.turns) for one in asked] == SHAPES[name][3]


def test_speed_bench_is_named_by_its_configuration(recipe: Recipe) -> None:
    """As its preparation names every file alike."""
    asking = with_eval(recipe, prompts="data/speed/throughput_1k/test.parquet")
    assert list(question_sets(asking)) == ["throughput_1k"]


@pytest.mark.parametrize(
    ("name", "stored", "ends"),
    [
        ("MRCR", NEEDLES, [3]),
        ("session of an agent", SESSION, [2, 4, 6]),
        ("session with a tool", TOOL_SESSION, [1, 3]),
    ],
)
def test_a_replay_asks_with_the_stored_messages(
    name: str,
    stored: list[Record],
    ends: list[int],
    recipe: Recipe,
    tmp_path: Path,
    tiny_target: Target,
) -> None:
    """The prompt of an answer is what the template makes of the messages before it, whatever the target wrote."""
    [one] = read_shape(name, recipe, tmp_path)
    for turn, end in enumerate(ends):
        expected = tiny_target.chat(stored[:end])
        assert encode_prompt(recipe, tiny_target, one, ["Other."] * turn) == expected


def test_tools_reach_the_template(recipe: Recipe, tmp_path: Path, tiny_target: Target) -> None:
    """A session's list of tools is printed by a template that prints tools; a refusal names record and turn."""
    tool = {"type": "function", "function": {"name": "read", "parameters": {}}}
    path = write_lines(
        tmp_path / "t.jsonl", [{"id": "t", "messages": TOOL_SESSION, "tools": [tool]}]
    )
    [one] = ask(recipe, path)
    before = tiny_target.tokenizer.chat_template
    try:
        tiny_target.tokenizer.chat_template = "{{ tools[0].function.name }}" + before
        prompt = encode_prompt(recipe, tiny_target, one)
        assert "read<|user|>" in tiny_target.tokenizer.decode(prompt or []).replace("<s>", "")
        tiny_target.tokenizer.chat_template = "{{ raise_exception('no tools here') }}"
        with pytest.raises(
            ValueError, match=r"t, t, turn 2: .* refuses .*no tools here.*data\.template"
        ):
            encode_prompt(recipe, tiny_target, one, ["x"])
    finally:
        tiny_target.tokenizer.chat_template = before


def without(record: Record, *keys: str) -> Record:
    """Return a record that lacks columns."""
    return {key: value for key, value in record.items() if key not in keys}


UNFILLED = f"{PLACEHOLDER} USING A TOOL"
# records of which none is a question, and words of the refusal
WRONG: dict[str, tuple[list[Any], str]] = {
    "placeholders": (
        [speed(1, "qa", [UNFILLED]), SPEED[1], speed(3, "rag", ["Who?", UNFILLED])],
        r"2 records of .* a placeholder .*prepare_data\.py --dataset speed --config all",
    ),
    "a placeholder alone": ([{"turns": UNFILLED}], r"1 records of .* a placeholder"),
    "a placeholder in messages": (
        [{"messages": [{"role": "user", "content": UNFILLED}]}],
        r"1 records of .* a placeholder",
    ),
    "no turns": ([speed(1, "qa", [])], r"no question in .*no turns \(1\)"),
    "an empty turn": ([speed(1, "qa", ["Who?", " "])], r"turns that are no texts \(1\)"),
    "an empty text": ([{"turns": ""}], r"turns that are no texts"),
    "turns of mixed types": ([{"turns": ["Who?", 3]}], r"turns that are no texts"),
    "no column of turns": ([without(SPEED[0], "turns")], r"unknown layout: keys category"),
    "not an object": (['"Who?"', 3], r"not an object \(2\)"),
    "no records": ([], r"no question in .*got no records"),
    "a content of another type": (
        [{"messages": [{"role": "user", "content": 3}]}],
        r"content that is not text: int",
    ),
    "a role of another kind": (
        [{"messages_json": json.dumps([{"role": "critic", "content": "x"}])}],
        r"unknown role 'critic'",
    ),
    "a session that is cut off": (
        [{"messages_json": '[{"role": "us'}],
        r"messages: text that is not JSON",
    ),
    "a session of no list": ([{"messages_json": "{}"}], r"messages: not a list"),
    "MRCR without its prompt": ([without(MRCR, "prompt")], r"unknown layout: keys answer"),
    "MRCR of another type": ([{**MRCR, "prompt": 3}], r"messages: not a list"),
    "MRCR with a text": ([{**MRCR, "prompt": "Who?"}], r"messages: text that is not JSON"),
    "MRCR without letters": ([{**MRCR, "n_chars": "many"}], r"n_chars that is no number: many"),
    "LongBench without a choice": ([without(LONG, "choice_C")], r"LongBench-v2 without choice_C"),
    "LongBench without its text": ([without(LONG, "context")], r"LongBench-v2 without context"),
    "LongBench with a number": (
        [{**LONG, "choice_B": 3}],
        r"LongBench-v2 with choice_B that is not text: int",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name: str, recipe: Recipe, tmp_path: Path) -> None:
    """In words that name the file, the reason and how often it occurs."""
    records, words = WRONG[name]
    path = write_lines(tmp_path / "wrong.jsonl", records)
    with pytest.raises(ValueError, match=words) as refused:
        ask(recipe, path)
    assert str(path) in str(refused.value)


@pytest.fixture
def measured(recipe: Recipe, tmp_path: Path, tiny_target: Target) -> Path:
    """Results of `ngram` on SPEED-Bench's shape and on a session of an agent."""
    sets = {}
    for name in ("SPEED-Bench, parquet", "session of an agent"):
        write, file, records, _ = SHAPES[name]
        sets[name.split(",")[0]] = str(write(tmp_path / file, records))
    asking = with_eval(
        recipe,
        prompts=sets,
        max_new_tokens=24,
        temperatures=[0.0],
        drafters={"ngram": {"head": "ngram"}},
    )
    values = asking.model_dump()
    values["train"]["out"] = str(tmp_path / "run")
    return measure(Recipe.parse(values, "r.yaml"), "r.yaml")


def lengths_by(rows: list[Record], kind: Callable[[Record], Any]) -> dict[Any, float]:
    """Return tokens per cycle by kind, in a plain loop."""
    steps: dict[Any, list[int]] = {}
    for row in rows:
        steps.setdefault(kind(row), []).extend(cycle["committed"] for cycle in row["cycles"])
    return {name: mean(lengths) for name, lengths in steps.items()}


def group_of(path: Path) -> Group:
    """Return the answers of `ngram`."""
    return next(group for group in read_results(path).groups() if group.drafter == "ngram")


def test_tau_is_told_by_task_and_by_turn(measured: Path, tiny_target: Target) -> None:
    """Equal to a plain loop over the rows, in the table, the page and the figures."""
    rows = [row for row in read_lines(measured) if row.get("drafter") == "ngram"]
    # a session is replayed: prompts do not follow what was written
    sessions = [row for row in rows if row["set"] == "session of an agent"]
    expected = [len(tiny_target.chat(SESSION[:end])) for end in (2, 4, 6)]
    assert [row["prompt_tokens"] for row in sessions] == expected

    group = group_of(measured)
    tasks = {"SPEED-Bench · coding", "SPEED-Bench · qa", "session of an agent"}
    splits: list[tuple[Split, Callable[[Record], Any]]] = [
        (TASK, lambda row: f"{row['set']} · {row['task']}" if row["task"] else row["set"]),
        # the third turn, 2 from 0, is the first of "3 to 4"
        (TURN, lambda row: {0: "1", 1: "2", 2: "3 to 4"}[row["turn"]]),
    ]
    for split, kind in splits:
        lengths = split.acceptance_lengths(group)
        named = {split.name(name): length.value for name, length in lengths.items()}
        assert named == pytest.approx(lengths_by(rows, kind))
        told = figures(measured)["groups"][1]["acceptance_length_by"][split.title]
        assert {name: length.value for name, length in told.items()} == pytest.approx(named)

    table = markdown(measured)
    for words in (*tasks, "τ by task", "τ by turn", "| 3 to 4 |"):
        assert words in table
    shown = page([measured])
    assert "τ by turn" in shown and "Average_AL" in shown


def test_average_al_counts_every_request_alike(measured: Path) -> None:
    """The mean over requests of the mean over all steps of their turns, as SPEED-Bench's tool computes it."""
    group = group_of(measured)
    requests: dict[Any, list[list[int]]] = {}
    for row in group.answers:
        steps = [cycle["committed"] for cycle in row["cycles"]]
        requests.setdefault((row["set"], row["conversation"]), []).append(steps)
    expected = mean(mean(chain(*turns)) for turns in requests.values())

    assert group.average_length().value == pytest.approx(expected)
    assert figures(measured)["groups"][1]["average_al"].value == pytest.approx(expected)
    # two that it is not: weighted by tokens, and a mean over turns
    by_turn = mean(mean(turn) for turns in requests.values() for turn in turns)
    for other in (group.estimate(ACCEPTANCE_LENGTH).value, by_turn):
        assert other != pytest.approx(expected)
    assert "Average_AL, every request alike" in markdown(measured)
