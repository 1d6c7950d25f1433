"""What is asked: sets of questions from any file, all turns, evenly over tasks, and nothing dropped in silence."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from eagle import Target
from eagle.recipe import Recipe
from eval.prompts import MT_BENCH, cases, encode_prompt, question_sets, questions

SPEC_BENCH = Path(__file__).parents[3] / "shared/data/eval/spec_bench/question.jsonl"
OTHERS = ("translation", "summarization", "qa", "math_reasoning", "rag")


def write_records(path: Path, records: list[dict[str, Any]], *more: str) -> str:
    """Write records, one a line, and further lines; the path."""
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join([*map(json.dumps, records), *more]))
    return str(path)


def with_prompts(recipe: Recipe, prompts: Any, count: int = 100) -> Recipe:
    """The recipe with other prompts."""
    return Recipe.parse(
        {
            **recipe.model_dump(),
            "eval": {**recipe.eval.model_dump(), "prompts": prompts, "count": count},
        },
        "",
    )


def like_spec_bench() -> list[dict[str, Any]]:
    """Twenty questions of each task, in the order and with the categories of Spec-Bench."""
    names = [name for name in sorted(MT_BENCH) for _ in range(3)] + [
        name for name in OTHERS for _ in range(20)
    ]
    turns = [["First?", "Second?"] if name in MT_BENCH else ["Only?"] for name in names]
    return [
        {"question_id": number, "category": name, "turns": asked}
        for number, (name, asked) in enumerate(zip(names, turns, strict=True))
    ]


def test_tasks_come_in_turn_and_mt_bench_is_one_of_spec_benchs(
    recipe: Recipe, tmp_path: Path
) -> None:
    """A small count holds every task; MT-bench's eight categories are one there, and eight where it stands alone."""
    records = like_spec_bench()
    asked = questions(
        with_prompts(recipe, write_records(tmp_path / "spec/question.jsonl", records), 12)
    )
    assert Counter(question.task for question in asked) == dict.fromkeys(("mt_bench", *OTHERS), 2)
    assert {len(question.turns) for question in asked if question.task == "mt_bench"} == {2}
    alone = questions(
        with_prompts(recipe, write_records(tmp_path / "mt/question.jsonl", records[:24]), 12)
    )
    assert set(Counter(question.task for question in alone)) == MT_BENCH and alone[0].set == "mt"
    whole = questions(with_prompts(recipe, str(tmp_path / "spec/question.jsonl"), 1000))
    assert sorted(int(question.id) for question in whole) == list(range(len(records)))
    assert whole[:12] == asked  # a larger count goes on where a smaller one ended


@pytest.mark.skipif(
    not SPEC_BENCH.exists(), reason="the real Spec-Bench is not beside the checkout"
)
def test_the_real_spec_bench_has_six_tasks_of_eighty(recipe: Recipe) -> None:
    """As its paper counts them."""
    asked = questions(with_prompts(recipe, {"spec": str(SPEC_BENCH)}, 480))
    assert Counter(question.task for question in asked) == dict.fromkeys(("mt_bench", *OTHERS), 80)
    assert len({question.id for question in asked}) == 480
    assert sum(len(question.turns) for question in asked) == 560


def test_one_question_of_each_source_and_layout(recipe: Recipe, tmp_path: Path) -> None:
    """Conversations give their first question, other records all their turns; sets have the names they are given."""
    talk = {
        "id": "t",
        "conversations": [
            {"from": role, "value": text} for role, text in (("human", "A?"), ("gpt", "B."))
        ],
    }
    sets = {
        "talks": write_records(tmp_path / "talks.jsonl", [talk]),
        "rows": write_records(
            tmp_path / "rows.json", [{"prompt": ["C?", "D?"], "prompt_id": 7}, {"question": "E?"}]
        ),
        "code": write_records(
            tmp_path / "code/one.jsonl",
            [{"task_id": "code/0", "prompt": "def f():", "task": "code"}],
        ),
    }
    asked = questions(with_prompts(recipe, sets))
    assert [(question.set, question.id, question.task, question.turns) for question in asked] == [
        ("talks", "t", None, ("A?",)),
        ("rows", "7", None, ("C?", "D?")),
        ("rows", "rows.json:2", None, ("E?",)),
        ("code", "code/0", "code", ("def f():",)),
    ]
    folder = with_prompts(recipe, str(tmp_path / "code"))
    assert list(question_sets(folder)) == ["code"] and questions(folder)[0].turns == ("def f():",)


def test_prompts_of_well_known_sets_are_questions(recipe: Recipe, tmp_path: Path) -> None:
    """Arena-hard's turns, TRL's prompts, alpaca without answers; questions to a conversation with answers are one."""
    turns = [
        {"role": "user", "content": "E?"},
        {"role": "assistant", "content": "f"},
        {"role": "user", "content": "G?"},
    ]
    records: list[dict[str, Any]] = [
        {"question_id": "x", "cluster": "c", "turns": [{"content": "A?"}]},
        {"prompt": [{"role": "user", "content": "B?"}]},
        {"instruction": "C", "input": "D?", "output": ""},
        {"messages": turns, "question_id": 3, "id": "m"},
    ]
    asked = questions(
        with_prompts(
            recipe,
            write_records(tmp_path / "q.jsonl", [*records, {"prompt": "H?", "images": ["a.png"]}]),
        )
    )
    assert [question.turns for question in asked] == [("A?",), ("B?",), ("C\n\nD?",), ("E?",)]
    assert [question.id for question in asked] == ["x", "q.jsonl:2", "q.jsonl:3", "m"]


def test_what_is_no_question_is_counted(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Damaged, empty and unknown records are counted; equal ids are told apart; nothing at all is refused."""
    good = [{"turns": ["A?"], "question_id": 1}, {"turns": ["B?"], "question_id": 1}]
    path = write_records(
        tmp_path / "q.jsonl", [*good, {"turns": ["", "x"]}, {"other": 1}], '{"turns": ["cut'
    )
    assert [question.id for question in questions(with_prompts(recipe, path))] == ["1", "1#2"]
    printed = capsys.readouterr().out
    assert (
        "q: 3 records of" in printed
        and "turns that are no texts (1)" in printed
        and "unknown layout: keys other (1)" in printed
    )
    with pytest.raises(
        ValueError,
        match=r"no question in .*none\.jsonl: expected conversations, or records with turns",
    ):
        questions(with_prompts(recipe, write_records(tmp_path / "none.jsonl", [{"other": 1}])))


def test_first_turns_are_what_the_template_asks(
    recipe: Recipe, tiny_target: Target, tiny_target_dir: Path
) -> None:
    """Of the first conversations, in their order, as one user message each."""
    heldout = tiny_target_dir / "data/heldout.jsonl"
    texts = [
        json.loads(line)["conversations"][0]["value"]
        for line in heldout.read_text().splitlines()[:3]
    ]
    expected = [tiny_target.chat([{"role": "user", "content": text}]) for text in texts]
    asked = questions(with_prompts(recipe, str(heldout), 3))
    assert [
        encode_prompt(recipe, tiny_target, question.turns[:1]) for question in asked
    ] == expected


def test_greedy_has_one_seed_and_each_question_its_own_noise(
    recipe: Recipe, tmp_path: Path
) -> None:
    """Noise belongs to set, question and turn, not to the company; seeds change it."""
    path = write_records(
        tmp_path / "q.jsonl", [{"turns": ["A?"], "question_id": number} for number in range(3)]
    )
    seeded = with_prompts(recipe, path)
    seeded = seeded.model_copy(update={"eval": seeded.eval.model_copy(update={"seeds": (4, 5)})})
    every = cases(seeded, questions(seeded), (0.0, 1.0))
    assert [(temperature, seed, question.id) for temperature, seed, question in every] == [
        *((0.0, 4, str(number)) for number in range(3)),
        *((1.0, seed, str(number)) for seed in (4, 5) for number in range(3)),
    ]
    samplings = {case.sampling(turn) for case in every for turn in (0, 1)}
    assert len(samplings) == 2 * len(every)
    assert len({sampling.request for sampling in samplings}) == 6
    fewer = with_prompts(seeded, path, 1)
    assert cases(fewer, questions(fewer), (1.0,))[0].sampling(0) == every[3].sampling(0)


def test_turns_alternate_and_what_has_no_room_is_none(recipe: Recipe, tiny_target: Target) -> None:
    """User, assistant, user; a prompt that leaves no room for the answer is not asked."""
    turns = ["A?", "B.", "C?"]
    messages = [
        {"role": role, "content": text}
        for role, text in zip(("user", "assistant", "user"), turns, strict=True)
    ]
    assert encode_prompt(recipe, tiny_target, turns) == tiny_target.chat(messages)
    most = tiny_target.max_positions
    assert most is not None
    bare = len(tiny_target.chat("word"))
    fits, longer = (["word" + " word" * count] for count in (1, most))
    assert encode_prompt(recipe, tiny_target, fits) is not None and bare < most
    assert encode_prompt(recipe, tiny_target, longer) is None


@pytest.mark.parametrize(
    ("eval_", "message"),
    [
        (
            {"drafters": {"wide": {"hea": "x"}}},
            r"unknown key eval\.drafters\.wide\.hea: did you mean head\?",
        ),
        (
            {"drafters": {"wide": {"budget": {"node": 3}}}},
            r"unknown key eval\.drafters\.wide\.budget\.node: did you mean nodes",
        ),
        ({"seeds": []}, r"eval\.seeds: got \[\]"),
    ],
)
def test_a_wrong_key_below_a_mapping_is_named(
    recipe: Recipe, eval_: dict[str, Any], message: str
) -> None:
    """As everywhere in a recipe: with the nearest key that is known."""
    values = recipe.model_dump()
    with pytest.raises(ValueError, match=message):
        Recipe.parse({**values, "eval": {**values["eval"], **eval_}}, "r.yaml")


def test_the_documents_recipe_is_one(recipe: Recipe) -> None:
    """The example of docs/evaluate.md parses, and its prompts and drafters have the names that it gives them."""
    page = (Path(__file__).parents[2] / "docs/evaluate.md").read_text()
    shown = yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0])
    read = Recipe.parse({**recipe.model_dump(), **shown}, "evaluate.md")
    assert list(question_sets(read)) == ["mt_bench", "mine"] and len(read.eval.drafters) == 5
