"""A conversation goes on with the answers of whatever serves it, and is cut where they do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from data_prep.chats.records import Conversation, conversation_of
from data_prep.conversations import Tally
from data_prep.dialogues import Jobs, make_names_unique
from data_prep.regenerate import table
from data_prep.tokens import examples_of
from eagle import Target
from eagle.recipe import DataSection
from tests.chats import chat
from tests.data_prep.stub_servers import completion, run_talk, talk

TOO_LONG = "cut where the text fills data.max_length or the model"
LONG_QUESTION = "user: " + "long " * 50


def contents_of(line: dict[str, Any]) -> list[str]:
    """Return what a line's record says, turn by turn."""
    return [turn["content"] for turn in line["record"]["messages"]]


def test_a_truncated_answer_is_learned_without_an_end(tiny_target: Target) -> None:
    """It ends the conversation, and its tokens have no end mark; `keep_truncated: false` gives it weight 0."""
    turns = ("user: a", "assistant: b", "user: c", "assistant: d", "user: e", "assistant: f")
    conversation = talk("name", *turns)
    # the third question is never asked
    replies = (completion("fine"), completion("cut o", "length"))
    line = run_talk(tiny_target, conversation, *replies)
    weights = [turn.get("weight") for turn in line["record"]["messages"]]
    assert weights == [None, None, None, 1]
    assert line["record"]["finish_reasons"] == ["stop", "length"]
    assert "its later turns are left out, as an answer reached max_new_tokens" in line["notes"]
    read, _ = conversation_of(line["record"], "x:1")
    tokenizer = tiny_target.tokenizer
    (example,) = examples_of(
        read,
        tokenizer,
        DataSection(train="-"),
        Tally(),
    )
    assert tokenizer.decode(example.tokens).endswith("cut o")
    assert example.loss_mask[-1]
    left_out = run_talk(
        tiny_target,
        conversation,
        *replies,
        keep_truncated=False,
    )
    assert left_out["record"]["messages"][-1]["weight"] == 0


def test_tool_results_do_not_outlive_their_calls(tiny_target: Target) -> None:
    """A conversation ends before the data's first result, and after a call of the target's own."""
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    turns = ["user: a", "assistant: b", "user: c", "assistant: calls", "tool: result"]
    line = run_talk(
        tiny_target,
        talk("name", *turns),
        completion("x"),
        completion("y"),
    )
    assert contents_of(line) == ["a", "x", "c", "y"]
    assert line["notes"] == ["cut at the first tool result, which belongs to another call"]
    # the data's result belongs to the call that the data's model made
    call = [
        {
            "id": "1",
            "type": "function",
            "function": {"name": "look", "arguments": "{}"},
        }
    ]
    reply = completion(None, "tool_calls", tool_calls=call)
    line = run_talk(
        tiny_target,
        talk("name", *turns, tools=tools),
        reply,
    )
    expected = {"role": "assistant", "content": "", "tool_calls": call}
    assert line["record"]["messages"][-1] == expected
    assert "cut at a tool call of the target, which has no result" in line["notes"]
    assert line["record"]["tools"] == tools


def test_two_answers_in_a_row_become_one(tiny_target: Target) -> None:
    """The target is asked once, and a last question without an answer is left out."""
    # merged datasets have such turns
    turns = ("user: a", "assistant: b", "assistant: c", "user: d")
    line = run_talk(
        tiny_target,
        talk("other", *turns),
        completion("x"),
    )
    assert contents_of(line) == ["a", "x"]
    assert line["notes"] == ["two answers in a row: one is given"]
    # the line has the job's name; the source's own id is kept with it
    assert line["record"]["source_id"] == "other"


def test_a_conversation_ends_where_it_is_too_long(tiny_target: Target) -> None:
    """A first question that is too long leaves no record."""
    turns = ("user: a", "assistant: b", LONG_QUESTION, "assistant: c")
    limit = {"max_length": 60}
    line = run_talk(
        tiny_target,
        talk("name", *turns),
        completion("x"),
        data=limit,
    )
    assert contents_of(line) == ["a", "x"]
    assert line["notes"] == [TOO_LONG]
    line = run_talk(
        tiny_target,
        talk("name", LONG_QUESTION, "assistant: c"),
        data=limit,
    )
    assert line["record"] is None
    assert line["notes"] == [TOO_LONG]
    assert "1  without an answer" in table([line], 0)


def test_a_conversation_ends_where_the_template_refuses(tiny_target: Target) -> None:
    """The template's own error is noted."""
    # the tiny template concatenates texts
    messages = [{"role": "user", "content": None}, {"role": "assistant"}]
    line = run_talk(tiny_target, Conversation("name", messages))
    assert line["record"] is None
    assert line["notes"][0].startswith("cut where the template refuses: ")


def test_an_answer_that_is_printed_otherwise_is_noted(tiny_target: Target) -> None:
    """This template prints no reasoning."""
    reply = completion("x", reasoning_content="I think")
    line = run_talk(
        tiny_target,
        talk("name", "user: a", "assistant: b"),
        reply,
    )
    assert line["record"]["messages"][-1]["reasoning_content"] == "I think"
    assert line["notes"] == ["the template prints an answer otherwise than the target wrote it"]


def test_names_are_unique() -> None:
    """A repeated id gets its position, a sample its number, also where the source has such ids itself."""
    # an id that looks like the name of a repeated one
    repeated = (talk(name) for name in ("a", "b", "a", "a", "a#2"))
    assert Jobs(make_names_unique(repeated)).names == ["a", "b", "a#2", "a#3", "a#2#4"]
    sampled = make_names_unique([talk("a"), talk("a#1"), talk("a")], samples=2)
    names = ["a#1", "a#2", "a#1#1", "a#1#2", "a#1#2#2", "a#2#2"]
    assert [name for name, _ in sampled] == names


def test_jobs_are_kept_on_the_disk(tmp_path: Path) -> None:
    """They come back as they were and in their order, twice at once, and their file has no name."""
    expected = []
    for number in range(5):
        conversation = chat(
            f"question {number}",
            "x",
            images=(b"\0", "a.png"),
        )
        expected.append((f"c{number}", conversation))
    jobs = Jobs(iter(expected), tmp_path)
    assert not list(tmp_path.iterdir())
    assert list(
        zip(
            jobs,
            jobs,
            strict=True,
        )
    ) == list(zip(expected, expected, strict=True))
