"""Questions come from any file, with all turns and evenly over tasks; nothing is dropped in silence."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from eagle import Target
from eagle.recipe import Recipe
from eval.prompts import (
    MT_BENCH,
    Question,
    cases,
    encode_prompt,
    question_sets,
    questions,
    tell_shortage,
)
from tests.eval.jsonl_files import read_lines, write_lines

ROOT = Path(__file__).parents[2]
SPEC_BENCH = ROOT.parent / "shared/data/eval/spec_bench/question.jsonl"
OTHERS = ("translation", "summarization", "qa", "math_reasoning", "rag")


def with_eval(recipe: Recipe, **changes: Any) -> Recipe:
    """Return the recipe with some keys of `eval` changed."""
    values = recipe.model_dump()
    values["eval"] |= changes
    return Recipe.parse(values, "r.yaml")


def ask(recipe: Recipe, prompts: Any, count: int = 100) -> list[Question]:
    """Return the questions of a recipe with these prompts."""
    if isinstance(prompts, Path):
        prompts = str(prompts)
    return questions(with_eval(recipe, prompts=prompts, count=count))


def like_spec_bench() -> list[dict[str, Any]]:
    """Return questions in the order and with the categories of Spec-Bench, 20 of each other task."""
    # MT-bench has three questions of each of its categories here, with two turns
    records = []
    for name in sorted(MT_BENCH):
        records += [{"category": name, "turns": ["First?", "Second?"]}] * 3
    for name in OTHERS:
        records += [{"category": name, "turns": ["Only?"]}] * 20
    return [{"question_id": i, **record} for i, record in enumerate(records)]


def test_tasks_come_in_turn_and_mt_bench_is_one_of_spec_benchs(
    recipe: Recipe, tmp_path: Path
) -> None:
    """A small count holds every task; MT-bench's eight categories are one task there, and eight on their own."""
    records = like_spec_bench()
    path = write_lines(tmp_path / "spec/question.jsonl", records)
    few = ask(recipe, path, 12)

    assert Counter(one.task for one in few) == dict.fromkeys(("mt_bench", *OTHERS), 2)
    assert {len(one.turns) for one in few if one.task == "mt_bench"} == {2}

    whole = ask(recipe, path, 1000)
    assert sorted(int(one.id) for one in whole) == list(range(len(records)))
    # a larger count goes on where a smaller one ended
    assert whole[:12] == few

    alone = ask(recipe, write_lines(tmp_path / "mt/question.jsonl", records[:24]), 12)
    assert {one.task for one in alone} == MT_BENCH
    assert {one.set for one in alone} == {"mt"}


@pytest.mark.skipif(
    not SPEC_BENCH.exists(), reason="the real Spec-Bench is not beside the checkout"
)
def test_the_real_spec_bench_has_six_tasks_of_eighty(recipe: Recipe) -> None:
    """The counts are those of its paper."""
    asked = ask(recipe, {"spec": str(SPEC_BENCH)}, 480)
    assert Counter(one.task for one in asked) == dict.fromkeys(("mt_bench", *OTHERS), 80)
    assert len({one.id for one in asked}) == 480
    assert sum(len(one.turns) for one in asked) == 560


MESSAGES = [
    {"role": "user", "content": "K?"},
    {"role": "assistant", "content": "l"},
    {"role": "user", "content": "M?"},
]
# records of well-known sets, and the questions in them
LAYOUTS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"prompt": ["C?", "D?"], "prompt_id": 7}, ("C?", "D?")),
    ({"question": "E?"}, ("E?",)),
    # Arena-hard, TRL, Alpaca without an answer
    ({"question_id": "x", "cluster": "c", "turns": [{"content": "F?"}]}, ("F?",)),
    ({"prompt": [{"role": "user", "content": "G?"}]}, ("G?",)),
    ({"instruction": "H", "input": "I?", "output": ""}, ("H\n\nI?",)),
    # a conversation gives its first question
    ({"messages": MESSAGES, "question_id": 3, "id": "m"}, ("K?",)),
]


def test_questions_are_read_from_each_layout(recipe: Recipe, tmp_path: Path) -> None:
    """Ids come from the record, else from file and line; a prompt that needs an image is no question."""
    records = [record for record, _ in LAYOUTS]
    path = tmp_path / "rows.json"
    write_lines(path, [*records, {"prompt": "N?", "images": ["a.png"]}])
    asked = ask(recipe, path)
    assert [one.turns for one in asked] == [turns for _, turns in LAYOUTS]
    ids = ["7", "rows.json:2", "x", "rows.json:4", "rows.json:5", "m"]
    assert [one.id for one in asked] == ids


def test_sets_have_the_names_that_they_are_given(recipe: Recipe, tmp_path: Path) -> None:
    """A folder gives its own name; a record may name its task."""
    code = {"task_id": "code/0", "prompt": "def f():", "task": "code"}
    path = write_lines(tmp_path / "code/one.jsonl", [code])
    for prompts, name in (({"mine": str(path)}, "mine"), (tmp_path / "code", "code")):
        [one] = ask(recipe, prompts)
        assert (one.set, one.id, one.task) == (name, "code/0", "code")
        assert one.turns == ("def f():",)


def test_what_is_no_question_is_counted(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Damaged, empty and unknown records are counted; equal ids are numbered; a file of nothing else is refused."""
    path = tmp_path / "q.jsonl"
    unknown = {"other": 1}
    records = [
        {"turns": ["A?"], "question_id": 1},
        {"turns": ["B?"], "question_id": 1},
        {"turns": ["", "x"]},
        unknown,
    ]
    write_lines(path, records)
    with path.open("a") as file:
        file.write('{"turns": ["cut')

    assert [one.id for one in ask(recipe, path)] == ["1", "1#2"]

    printed = capsys.readouterr().out
    for words in (
        "q: 3 records of",
        "turns that are no texts (1)",
        "unknown layout: keys other (1)",
    ):
        assert words in printed

    with pytest.raises(ValueError, match=r"no question in .*: expected conversations, or records"):
        ask(recipe, write_lines(path, [unknown]))


@pytest.mark.parametrize(("count", "is_short"), [(40, True), (7, False)])
def test_fewer_prompts_than_asked_for_are_told(
    count: int, is_short: bool, recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, with both numbers."""
    records = [{"prompt": f"What is {number}?"} for number in range(7)]
    path = write_lines(tmp_path / "q.jsonl", records)
    asking = with_eval(recipe, prompts=str(path), count=count)
    asked = questions(asking)
    assert len(asked) == 7
    tell_shortage(asking, asked)
    told = f"q: eval.count is {count}, and {path} has 7 prompts: all are taken\n"
    assert capsys.readouterr().out == (told if is_short else "")


def test_first_turns_are_what_the_template_asks(
    recipe: Recipe, tiny_target: Target, tiny_target_dir: Path
) -> None:
    """Each prompt is the first question of a conversation, as one user message."""
    heldout = tiny_target_dir / "data/heldout.jsonl"
    asked = ask(recipe, heldout, 3)
    for one, record in zip(asked, read_lines(heldout)[:3], strict=True):
        message = {"role": "user", "content": record["conversations"][0]["value"]}
        assert encode_prompt(recipe, tiny_target, one) == tiny_target.chat([message])


def test_greedy_has_one_seed_and_each_question_its_own_noise(
    recipe: Recipe, tmp_path: Path
) -> None:
    """Noise depends on set, question, turn and seed, not on which other questions are asked."""
    records = [{"turns": ["A?"], "question_id": i} for i in range(3)]
    prompts = str(write_lines(tmp_path / "q.jsonl", records))
    seeded = with_eval(recipe, prompts=prompts, seeds=(4, 5), count=100)
    every = cases(seeded, questions(seeded), (0.0, 1.0))
    # greedy decoding needs one seed
    runs = [(0.0, 4), (1.0, 4), (1.0, 5)]
    expected = [(*run, str(i)) for run in runs for i in range(3)]

    assert [(case.temperature, case.seed, case.question.id) for case in every] == expected

    samplings = {case.sampling(turn) for case in every for turn in (0, 1)}
    assert len(samplings) == 2 * len(every)
    # three questions of two turns
    assert len({sampling.request for sampling in samplings}) == 3 * 2

    fewer = with_eval(seeded, count=1)
    assert cases(fewer, questions(fewer), (1.0,))[0].sampling(0) == every[3].sampling(0)


def test_turns_alternate_and_a_prompt_without_room_is_none(
    recipe: Recipe, tiny_target: Target
) -> None:
    """Turns are those of user, assistant, user; a prompt that leaves no room for the answer is not asked."""
    messages = [
        {"role": "user", "content": "A?"},
        {"role": "assistant", "content": "B."},
        {"role": "user", "content": "C?"},
    ]
    two = Question("q", "1", None, ("A?", "C?"))

    assert encode_prompt(recipe, tiny_target, two, ["B."]) == tiny_target.chat(messages)
    for times, fits in ((2, True), (tiny_target.max_positions, False)):
        one = Question("q", "1", None, ("word " * times,))
        assert (encode_prompt(recipe, tiny_target, one) is not None) == fits


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"drafters": {"wide": {"hea": "x"}}}, r"eval\.drafters\.wide\.hea: did you mean head"),
        ({"drafters": {"wide": {"budget": {"node": 3}}}}, r"wide\.budget\.node: did you mean node"),
        ({"seeds": []}, r"eval\.seeds: got \[\]"),
    ],
)
def test_a_wrong_key_below_a_mapping_is_named(
    recipe: Recipe, changes: dict[str, Any], words: str
) -> None:
    """The error names the whole path of the key, and the nearest valid one."""
    with pytest.raises(ValueError, match=words):
        with_eval(recipe, **changes)


def test_the_documents_recipe_is_one(recipe: Recipe) -> None:
    """The example of docs/evaluate.md parses, with the names that it gives to prompts and drafters."""
    page = (ROOT / "docs/evaluate.md").read_text()
    shown = yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0])
    read = Recipe.parse({**recipe.model_dump(), **shown}, "evaluate.md")
    assert list(question_sets(read)) == ["mt_bench", "mine"]
    assert len(read.eval.drafters) == 5
