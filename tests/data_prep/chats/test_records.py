"""A record of any shape becomes a conversation in shape, or is dropped for a named reason."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_prep.chats.records import Conversation, conversation_of
from data_prep.chats.turns import ROLES, Dropped

OPENAI = """{
 "messages": [
  {"role": "developer", "content": "be brief"},
  {"role": "user", "content": [{"type": "text", "text": "1 + "}, {"type": "text", "value": "1?"}]},
  {"role": "assistant", "content": null, "tool_calls": [
   {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{\\"a\\": 1}"}}]},
  {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "2"},
  {"role": "assistant", "content": "2", "reasoning_content": "easy", "weight": 0}],
 "tools": "[{\\"name\\": \\"add\\", \\"description\\": \\"a sum\\", \\"parameters\\": {}}]"
}"""
QUESTION = '{"role": "user", "content": "a"}'
ANSWER = '{"role": "assistant", "content": "b"}'
PAIR = f"[{QUESTION}, {ANSWER}]"
TREE = """{"message_tree_id": "7", "prompt": {"role": "prompter", "text": "a", "replies": [
 {"role": "assistant", "text": "worse", "rank": 1, "replies": []},
 {"role": "assistant", "text": "b", "rank": 0, "replies": [
  {"role": "prompter", "text": "c", "replies": []}]}]}}"""


def turns_of(text: str) -> list[dict[str, str]]:
    """Return ShareGPT's turns of `human: a / gpt: b`."""
    turns = []
    for turn in text.split(" / "):
        speaker, _, value = turn.partition(": ")
        turns.append({"from": speaker, "value": value})
    return turns


def describe(record: dict[str, Any], answered: bool = True) -> str:
    """Return a record's conversation as `user: a / assistant: b`."""
    conversation, _ = conversation_of(record, "x:1", answered=answered)
    return " / ".join(f"{turn['role']}: {turn['content']}" for turn in conversation.messages)


def find_faults(conversation: Conversation) -> list[str]:
    """Return what a reader of the conversation could stumble over."""
    # the promises that every later stage relies on
    messages = conversation.messages
    roles = [message["role"] for message in messages]
    contents = [message["content"] for message in messages]
    is_said = [message["content"].strip() or message.get("tool_calls") for message in messages]
    tools = conversation.tools or []
    holds = {
        "begins with a question": [role for role in roles if role != "system"][:1] == ["user"],
        "ends with an answer": roles[-1:] == ["assistant"],
        "known roles": set(roles) <= {"system", "user", "assistant", "tool"},
        "content is text": all(isinstance(content, str) for content in contents),
        "says something": all(is_said),
        "can be tokenised": not re.search("[\ud800-\udfff]", "".join(map(str, contents))),
        "weights are 0 or 1": all(message.get("weight", 0) in (0, 1) for message in messages),
        "tools have names": all(isinstance(tool["function"]["name"], str) for tool in tools),
    }
    return [what for what, is_so in holds.items() if not is_so]


# the layouts of well-known datasets, each as one of its lines
# fmt: off
LAYOUTS = [
    # ShareGPT, with odd spellings of its roles, mixed with OpenAI's keys, or as JSON in JSON
    ('{"conversations": [{"from": " HUMAN ", "value": "a"}, {"from": "Chatgpt", "value": "b"}]}',
     "user: a / assistant: b"),
    (f'{{"conversations": [{QUESTION}, {{"from": "gpt", "value": " b\\n"}}]}}', "user: a / assistant:  b\n"),
    (f'{{"conversations": {PAIR}, "system": "s"}}', "system: s / user: a / assistant: b"),
    (f'{{"conversations": {json.dumps(PAIR)}}}', "user: a / assistant: b"),
    # OpenAI, beside an empty key of ShareGPT
    (f'{{"conversations": null, {OPENAI[1:]}',
     "system: be brief / user: 1 + 1? / assistant:  / tool: 2 / assistant: 2"),
    # alpaca, with a history
    ('{"instruction": "a", "input": "", "output": "b"}', "user: a / assistant: b"),
    ('{"instruction": "c", "input": "d", "output": "e", "system": "s", "history": [["a", "b"]]}',
     "system: s / user: a / assistant: b / user: c\n\nd / assistant: e"),
    # LMSYS-Chat-1M and WildChat
    (f'{{"conversation_id": "7", "model": "m", "conversation": {PAIR}, "redacted": false}}', "user: a / assistant: b"),
    (f'{{"conversation_hash": "7", "conversation": {PAIR}, "turn": 1}}', "user: a / assistant: b"),
    # LangChain's roles
    ('{"messages": [{"role": "human", "content": "a"}, {"role": "ai", "content": "b"}]}', "user: a / assistant: b"),
    # TRL, as text and conversational
    ('{"prompt": "a", "completion": "b"}', "user: a / assistant: b"),
    (f'{{"prompt": [{QUESTION}], "completion": [{ANSWER}]}}', "user: a / assistant: b"),
    # GSM8K, OpenOrca, Dolly, UltraChat
    ('{"question": "a", "answer": "b"}', "user: a / assistant: b"),
    ('{"system_prompt": "s", "question": "a", "response": "b"}', "system: s / user: a / assistant: b"),
    ('{"instruction": "a", "context": "c", "response": "b"}', "user: a\n\nc / assistant: b"),
    ('{"id": "7", "data": ["a", "b", "c", "d"]}', "user: a / assistant: b / user: c / assistant: d"),
    # preferences of Tulu, TRL and Orca DPO: the rejected answer is not learned
    (f'{{"prompt": "a", "chosen": {PAIR}, "rejected": {PAIR}}}', "user: a / assistant: b"),
    (f'{{"chosen": {PAIR}, "rejected": {PAIR}}}', "user: a / assistant: b"),
    ('{"system": "", "question": "a", "chosen": "b", "rejected": "c"}', "user: a / assistant: b"),
    (f'{{"messages": [{QUESTION}], "chosen": {ANSWER}, "rejected": {QUESTION}}}', "user: a / assistant: b"),
    # OASST's tree: the best reply of each
    (TREE, "user: a / assistant: b"),
]
# fmt: on


@pytest.mark.parametrize(("line", "expected"), LAYOUTS)
def test_a_layout_is_read(line: str, expected: str) -> None:
    """The content stays as it was, and an id of any name is kept."""
    record = json.loads(line)
    assert describe(record) == expected
    if "7" in record.values():
        assert conversation_of(record, "x:1")[0].id == "7"


def test_openai_calls_and_tools_are_kept() -> None:
    """Arguments become an object, bare tools are wrapped, and ids, reasoning and weights stay."""
    conversation, notes = conversation_of(json.loads(OPENAI), "x:1")
    # templates print arguments as JSON themselves, so they are objects
    function = {"name": "add", "arguments": {"a": 1}}
    calls = [{"id": "c1", "type": "function", "function": function}]
    assert conversation.messages[2:] == [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {
            "role": "tool",
            "content": "2",
            "name": "add",
            "tool_call_id": "c1",
        },
        {
            "role": "assistant",
            "content": "2",
            "reasoning_content": "easy",
            "weight": 0,
        },
    ]
    tool = {"name": "add", "description": "a sum", "parameters": {}}
    assert conversation.tools == [{"type": "function", "function": tool}]
    assert notes == {"an answer is marked as not to be learned"}


# fmt: off
CALL = r'{"name": "add", "arguments": {"a": 1}}'
CALLS = [
    r'{"from": "function_call", "value": "{\"name\": \"add\", \"arguments\": {\"a\": 1}}"}',
    r'{"from": "function_call", "value": "[{\"name\": \"add\", \"arguments\": \"{\\\"a\\\": 1}\"}]"}',
    r'{"role": "assistant", "function_call": {"name": "add", "arguments": "{\"a\": 1}"}}',
    r'{"role": "assistant", "content": [{"type": "tool_call", "value": {"name": "add", "arguments": {"a": 1}}}]}',
    r'{"role": "assistant", "content": "", "tool_calls": [{"name": "add", "parameters": {"a": 1}}]}',
]
# fmt: on


@pytest.mark.parametrize("turn", CALLS)
def test_a_call_is_a_call_in_every_spelling(turn: str) -> None:
    """Calls from roles, content parts and keys are the same."""
    record = {"conversations": [json.loads(QUESTION), json.loads(turn)], "tools": "[]"}
    conversation, _ = conversation_of(record, "x:1")
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert conversation.messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [call],
    }
    assert conversation.tools is None


def test_reasoning_parts_are_no_content() -> None:
    """What was thought is kept apart from what was said."""
    content = [
        {"type": "reasoning", "value": "hm"},
        {"type": "thinking", "thinking": "!"},
        {"type": "text", "text": "b"},
    ]
    record = {"messages": [json.loads(QUESTION), {"role": "assistant", "content": content}]}
    answer = conversation_of(record, "x:1")[0].messages[1]
    assert answer == {
        "role": "assistant",
        "content": "b",
        "reasoning_content": "hm!",
    }


# fmt: off
SHAPES = [
    ("gpt: z / tool: y / human: a / gpt: b", "user: a / assistant: b", "leading assistant turns cut"),
    ("system: s / gpt: z / human: a / gpt: b", "system: s / user: a / assistant: b", "leading assistant turns cut"),
    ("system:   / human: a / gpt: b", "user: a / assistant: b", "empty system turn removed"),
    ("human: a / gpt: b / human: c / gpt:  \n / human: d / gpt: e", "user: a / assistant: b / user: d / assistant: e",
     "a question with an empty answer is left out"),
    ("human: a / gpt:  / human: b / gpt: c", "user: b / assistant: c", "a question with an empty answer is left out"),
    ("human: a / gpt: b / human:  / gpt: c / human: d / gpt: e", "user: a / assistant: b",
     "cut at an empty turn of the user, on which later answers depend"),
    ("human: a / gpt: b / gpt:  / human: d / gpt: e", "user: a / assistant: b",
     "cut at an empty turn of the assistant, on which later answers depend"),
    ("human: a / gpt: b / human: c / gpt: \u200b", "user: a / assistant: b", "cut at an empty turn"),
    ("human: a / gpt: b / human: c", "user: a / assistant: b", "turns after the last answer cut"),
    ("gpt:  / human: a / gpt: b", "user: a / assistant: b", "leading assistant turns cut"),
    ("human:  / gpt: z / human: a / gpt: b", "user: a / assistant: b", "leading user turns cut"),
    ("human: a / human: b / gpt: c / gpt: d", "user: a / user: b / assistant: c / assistant: d", None),
    ("human: a / gpt: b / system: s / human: c / gpt: d",
     "user: a / assistant: b / system: s / user: c / assistant: d", None),
]
# fmt: on


@pytest.mark.parametrize(("turns", "expected", "note"), SHAPES)
def test_the_shape_is_cut_and_noted(
    turns: str,
    expected: str,
    note: str | None,
) -> None:
    """A kept conversation goes from a question to an answer; what was cut is noted."""
    record = {"conversations": turns_of(turns)}
    assert describe(record) == expected
    notes = conversation_of(record, "x:1")[1]
    assert note in notes if note else not notes


# fmt: off
REASONS = [
    ('["a list"]', "not an object"),
    ('{"q": 1, "a": 2, "m\\n": 3}', "unknown layout: keys a, m\\n, q"),
    ('{"conversations": {"a": 1}}', "conversations: not a list"),
    ('{"conversations": "a chat"}', "conversations: text that is not JSON"),
    ('{"conversations": []}', "no turns"),
    ('{"data": ["a"]}', "no answer"),
    ('{"prompt": {"role": "prompter", "text": "a", "replies": 1}}', "no answer"),
    ('{"prompt": "a"}', "no answer"),
    ('{"prompt": 3, "completion": "b"}', "content that is not text: int"),
    ('{"prompt": "a", "completion": "b", "label": false}', "marked as not to be learned: label"),
    ('{"question": "a", "choices": ["b", "c"], "answer": "B"}', "a question with choices"),
    ('{"chosen": "Human: a", "rejected": "Human: b"}', "unknown layout: keys chosen, rejected"),
    ('{"conversations": ["a"]}', "a turn that is not an object"),
    ('{"conversations": [{"value": "a"}]}', "a turn without a role"),
    ('{"conversations": [{"from": "narrator", "value": "a"}]}', "unknown role 'narrator'"),
    ('{"instruction": "a", "input": 3, "output": "b"}', "instruction or input: not text"),
    ('{"instruction": "a", "output": ["b", "c"]}', "content that is not text: str"),
    ('{"instruction": "a", "output": "b", "history": [["a"]]}', "history: not a list of pairs"),
]
REASONS_BESIDE = [  # of a good record that has this key too
    ('"images": ["a.png"]', "images beside the text"),
    ('"videos": [{"path": "a.mp4"}]', "videos beside the text"),
    ('"train": false', "marked as not to be learned: train"),
    ('"tools": "add"', "tools that are not JSON"),
    ('"tools": {"add": 1}', "tools that are not a list"),
    ('"tools": [{"description": "x"}]', "a tool without a name"),
]
REASONS_OF_A_TURN = [  # of a good record with this turn before the answer
    ('{"role": "user", "content": "a", "images": ["a.png"]}', "images beside the text"),
    ('{"role": "user", "content": "<image>\\nWhat is it?"}', "a placeholder in the text: <image>"),
    ('{"role": "user", "content": 3.5}', "content that is not text: float"),
    ('{"role": "user", "content": [{"type": "image_url"}]}', "content that is not text: image_url"),
    ('{"role": "user", "content": "a\\ud800"}', "text with lone surrogates"),
    ('{"role": "function_call", "value": "add 1"}', "function_call that is not JSON"),
    ('{"role": "gpt", "tool_calls": [{"function": {}}]}', "a tool call without a name"),
    ('{"role": "gpt", "tool_calls": [{"name": "a", "arguments": "{"}]}', "tool call arguments that are not JSON"),
    ('{"role": "gpt", "tool_calls": [{"name": "a", "arguments": [1]}]}', "tool call arguments that are not an object"),
    ('{"role": "user", "content": "a", "tool_calls": [{"name": "a"}]}',
     "reasoning or tool calls in a turn of the user"),
    ('{"role": "gpt", "value": "a", "weight": 0.5}', "weight that is neither 0 nor 1"),
    ('{"role": "tool", "value": "a", "tool_call_id": 7}', "tool_call_id that is not text: int"),
]
REASONS_OF_A_SHAPE = [
    ("human: a", "no answer"),
    ("gpt: a / human: b", "no answer"),
    ("human: a / gpt: ", "no answer"),
    ("gpt: a", "no user turn"),
    ("gpt: a / human:  / gpt: b / human: \u200b", "every user turn is empty"),
    ("human: a / human:  / gpt: c", "an empty turn before the first answer"),
]
# fmt: on
ALL_REASONS = [
    *REASONS,
    *((f'{{"messages": {PAIR}, {text}}}', reason) for text, reason in REASONS_BESIDE),
    *(
        (f'{{"messages": [{QUESTION}, {text}, {ANSWER}]}}', reason)
        for text, reason in REASONS_OF_A_TURN
    ),
    *(
        (json.dumps({"conversations": turns_of(text)}), reason)
        for text, reason in REASONS_OF_A_SHAPE
    ),
]


@pytest.mark.parametrize(("line", "reason"), ALL_REASONS)
def test_a_record_is_dropped_by_name(line: str, reason: str) -> None:
    """Each kind of damage has its own reason, which users count."""
    with pytest.raises(Dropped) as dropped:
        conversation_of(json.loads(line), "x:1")
    assert str(dropped.value) == reason


# fmt: off
QUESTIONS = [
    # arena-hard, MT-bench
    ('{"turns": [{"content": "a"}], "question_id": "1", "cluster": "x"}', "user: a / assistant: "),
    ('{"turns": ["a", "b"]}', "user: a / assistant:  / user: b / assistant: "),
    ('{"prompt": "a", "prompt_id": "1"}', "user: a / assistant: "),
    (f'{{"prompt": [{QUESTION}]}}', "user: a / assistant: "),
    ('{"instruction": "a", "input": "b"}', "user: a\n\nb / assistant: "),
    (f'{{"messages": [{QUESTION}], "system": "s"}}', "system: s / user: a / assistant: "),
    (f'{{"messages": [{QUESTION}, {{"role": "assistant"}}, {QUESTION}, {ANSWER}]}}',
     "user: a / assistant:  / user: a / assistant: b"),
    (f'{{"messages": [{QUESTION}, {ANSWER}, {QUESTION}]}}', "user: a / assistant: b / user: a / assistant: "),
    ('{"prompt": "a", "completion": "b", "finish_reason": "abort", "label": false}', "user: a / assistant: b"),
]
# fmt: on


@pytest.mark.parametrize(("line", "expected"), QUESTIONS)
def test_regeneration_needs_questions_alone(line: str, expected: str) -> None:
    """Whether and how a question was answered is no reason to drop it."""
    assert describe(json.loads(line), answered=False) == expected
    with pytest.raises(Dropped, match=r"^no user turn$"):
        conversation_of(
            {"conversations": turns_of("system: s / gpt: b")},
            "x:1",
            answered=False,
        )


TEXT = st.text(st.characters(exclude_categories=()), max_size=8)  # lone surrogates, too
PART_KINDS = "text reasoning tool_call image_url []"
TURN_KEYS = "from value role content type text name arguments function id"
OPTIONAL_KEYS = "tool_calls weight name reasoning_content tool_call_id train finish_reason images"
RECORD_KEYS = (
    "conversations messages conversation prompt question data turns chosen instruction input output "
    "completion answer history tools id finish_reason"
)
WORDS = st.sampled_from([*ROLES, *PART_KINDS.split(), CALL])
KEYS = st.sampled_from(TURN_KEYS.split())
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT | WORDS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            KEYS | TEXT,
            inner,
            max_size=4,
        )
    ),
)
TURN = st.fixed_dictionaries(
    {"role": st.sampled_from([*ROLES]), "content": st.sampled_from(["b", "c"]) | WORDS | ANY},
    optional=dict.fromkeys(OPTIONAL_KEYS.split(), st.sampled_from([None, [], ""]) | ANY),
)
GOOD_TURNS = st.lists(
    st.sampled_from([*json.loads(OPENAI)["messages"], *json.loads(PAIR)]), max_size=4
)
FIELDS = st.sampled_from(RECORD_KEYS.split())


@st.composite
def nearly_good_records(draw: Any) -> dict[str, Any]:
    """Draw a record of good turns, with at most one odd turn and one odd key."""
    # records of anything at all hardly ever get past the first check
    turns = draw(GOOD_TURNS) + draw(st.lists(TURN | ANY, max_size=1)) + draw(GOOD_TURNS)
    extras = st.dictionaries(
        st.sampled_from(["tools", "system", "id", "chosen"]),
        ANY,
        max_size=1,
    )
    key = draw(st.sampled_from(["conversations", "messages"]))
    return {**draw(extras), key: [*turns, *json.loads(PAIR)]}


def test_any_value_is_a_conversation_or_a_reason() -> None:
    """No value makes it raise anything else, and what is kept is in shape."""
    kept = []

    @given(nearly_good_records() | nearly_good_records() | ANY | st.dictionaries(FIELDS, ANY))
    @settings(
        max_examples=200,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    def check(record: Any) -> None:
        for answered in (True, False):
            try:
                conversation, _ = conversation_of(record, "x:1", answered=answered)
            except Dropped as reason:
                assert str(reason).isprintable()
                assert len(str(reason)) < 400
                continue
            kept.append(conversation)
            # an answer that is yet to be written says nothing
            allowed = [] if answered else ["says something"]
            assert find_faults(conversation) in ([], allowed)

    check()
    # else the strategy says little
    assert len(kept) > 40


def test_the_check_of_shape_can_fail() -> None:
    """Each planted fault is found."""
    good = conversation_of(json.loads(OPENAI), "x:1")[0].messages
    # without an answer, without a question, without turns, with an unknown role
    assert not find_faults(Conversation("x", good))
    odd_role = [*good, {"role": "gpt", "content": ""}]
    for messages in (good[:-1], good[2:], [], odd_role):
        assert find_faults(Conversation("x", messages))
