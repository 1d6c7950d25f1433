"""A record of any shape is a conversation in shape, or a named reason."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_prep.chats.records import Conversation, conversation_of
from data_prep.chats.turns import ROLES, Dropped

TOOL = {"name": "add", "description": "a sum", "parameters": {}}


def turns(*texts: str) -> list[dict[str, str]]:
    """`human: text` -> a ShareGPT turn."""
    return [dict(zip(("from", "value"), text.split(": ", 1), strict=True)) for text in texts]


def record(name: str, text: str = "fine") -> dict[str, Any]:
    """A record with nothing wrong."""
    return {"id": name, "conversations": turns("human: how?", f"gpt: {text}")}


def contents_of(values: dict[str, Any]) -> list[str]:
    """A record's conversation as `role: content`."""
    return [
        f"{message['role']}: {message['content']}"
        for message in conversation_of(values, "x:1")[0].messages
    ]


def wrong_with(conversation: Conversation) -> list[str]:
    """What a reader of the conversation could stumble over."""
    messages, tools = conversation.messages, conversation.tools or []
    roles = [message["role"] for message in messages]
    sound = {
        "begins with a question": next((role for role in roles if role != "system"), None)
        == "user",
        "ends with an answer": roles[-1:] == ["assistant"],
        "known roles": set(roles) <= {"system", "user", "assistant", "tool"},
        "content is text": all(isinstance(message["content"], str) for message in messages),
        "says something": all(
            message["content"].strip() or message.get("tool_calls") for message in messages
        ),
        "can be tokenised": not re.search(
            "[\ud800-\udfff]", "".join(str(m["content"]) for m in messages)
        ),
        "weights are 0 or 1": all(message.get("weight", 0) in (0, 1) for message in messages),
        "tools have names": all(isinstance(tool["function"]["name"], str) for tool in tools),
    }
    return [what for what, holds in sound.items() if not holds]


QUESTION, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
CALLED = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]
AB = ["user: a", "assistant: b"]
OPENAI = {
    "messages": [
        {"role": "developer", "content": "be brief"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "1 + "}, {"type": "text", "value": "1?"}],
        },
        {"role": "assistant", "content": None, "tool_calls": CALLED},
        {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "2"},
        {"role": "assistant", "content": "2", "reasoning_content": "easy", "weight": 0},
    ],
    "tools": json.dumps([TOOL]),
}
# fmt: off
LAYOUTS = [
    ({"conversations": turns(" HUMAN : a", "Chatgpt: b")}, ["user: a", "assistant: b"]),
    ({"conversations": [QUESTION, {"from": "gpt", "value": " b\n"}]}, ["user: a", "assistant:  b\n"]),
    ({"conversations": turns("human: a", "gpt: b"), "system": "s"}, ["system: s", "user: a", "assistant: b"]),
    ({"conversations": json.dumps(turns("user: a", "bot: b"))}, ["user: a", "assistant: b"]),
    ({"conversations": turns("human: a", "human: b", "gpt: c", "gpt: d")},
     ["user: a", "user: b", "assistant: c", "assistant: d"]),
    ({"conversations": None, "messages": OPENAI["messages"]},
     ["system: be brief", "user: 1 + 1?", "assistant: ", "tool: 2", "assistant: 2"]),
    ({"instruction": "a", "input": "", "output": "b"}, ["user: a", "assistant: b"]),
    ({"instruction": "c", "input": "d", "output": "e", "system": "s", "history": [["a", "b"]]},
     ["system: s", "user: a", "assistant: b", "user: c\n\nd", "assistant: e"]),
]
DATASETS = [
    ("LMSYS-Chat-1M", {"conversation_id": "7", "model": "m", "conversation": [QUESTION, ANSWER], "redacted": False},
     AB),
    ("WildChat", {"conversation_hash": "7", "conversation": [{**QUESTION, "toxic": False}, ANSWER], "turn": 1}, AB),
    ("LangChain's roles", {"messages": [{"role": "human", "content": "a"}, {"role": "ai", "content": "b"}]}, AB),
    ("prompt and completion", {"prompt": "a", "completion": "b"}, AB),
    ("TRL, conversational", {"prompt": [QUESTION], "completion": [ANSWER]}, AB),
    ("prompt and response", {"prompt": "a", "response": "b"}, AB),
    ("GSM8K", {"question": "a", "answer": "b"}, AB),
    ("OpenOrca", {"system_prompt": "s", "question": "a", "response": "b"}, ["system: s", *AB]),
    ("Dolly", {"instruction": "a", "context": "c", "response": "b"}, ["user: a\n\nc", "assistant: b"]),
    ("UltraChat", {"id": "7", "data": ["a", "b", "c", "d"]}, [*AB, "user: c", "assistant: d"]),
    ("Tulu, preferences", {"prompt": "a", "chosen": [QUESTION, ANSWER], "rejected": [QUESTION, ANSWER]}, AB),
    ("TRL, preferences", {"chosen": [QUESTION, ANSWER], "rejected": [QUESTION, ANSWER]}, AB),
    ("Orca DPO", {"system": "", "question": "a", "chosen": "b", "rejected": "c"}, AB),
    ("OASST tree", {"message_tree_id": "7", "prompt": {"role": "prompter", "text": "a", "replies": [
        {"role": "assistant", "text": "worse", "rank": 1, "replies": []},
        {"role": "assistant", "text": "b", "rank": 0, "replies": [{"role": "prompter", "text": "c", "replies": []}]}]}},
     AB),
]
# fmt: on


@pytest.mark.parametrize(("values", "expected"), LAYOUTS)
def test_a_layout_is_read(values: dict[str, Any], expected: list[str]) -> None:
    """ShareGPT, OpenAI and alpaca, mixed or not, with the content as it was."""
    assert contents_of(values) == expected


@pytest.mark.parametrize(
    ("values", "expected"), [row[1:] for row in DATASETS], ids=[row[0] for row in DATASETS]
)
def test_a_datasets_layout_is_read(values: dict[str, Any], expected: list[str]) -> None:
    """The records of well-known datasets, by the keys that they have."""
    assert contents_of(values) == expected
    if "7" in values.values():
        assert conversation_of(values, "x:1")[0].id == "7"


def test_openai_calls_and_tools_are_kept() -> None:
    """Arguments become an object, bare tools are wrapped, and ids, reasoning and weights stay."""
    conversation, notes = conversation_of(OPENAI, "x:1")
    function = {"name": "add", "arguments": {"a": 1}}
    assert conversation.messages[2:] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "2", "name": "add", "tool_call_id": "c1"},
        {"role": "assistant", "content": "2", "reasoning_content": "easy", "weight": 0},
    ]
    assert conversation.tools == [{"type": "function", "function": TOOL}]
    assert notes == {"an answer is marked as not to be learned"}


@pytest.mark.parametrize(
    "turn",
    [
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
        {"from": "function_call", "value": '[{"name": "add", "arguments": "{\\"a\\": 1}"}]'},
        {
            "role": "assistant",
            "content": None,
            "function_call": {"name": "add", "arguments": '{"a": 1}'},
        },
        {
            "role": "assistant",
            "content": [{"type": "tool_call", "value": '{"name": "add", "arguments": {"a": 1}}'}],
        },
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"name": "add", "parameters": {"a": 1}}],
        },
    ],
)
def test_a_call_is_a_call_in_every_spelling(turn: dict[str, Any]) -> None:
    """Calls from roles, parts and keys are one and the same."""
    conversation, _ = conversation_of({"conversations": [QUESTION, turn], "tools": "[]"}, "x:1")
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert conversation.messages[1] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert conversation.tools is None


def test_reasoning_parts_are_no_content() -> None:
    """What was thought is kept apart from what was said."""
    parts = [
        {"type": "reasoning", "value": "hm"},
        {"type": "thinking", "thinking": "!"},
        {"type": "text", "text": "b"},
    ]
    conversation, _ = conversation_of({"messages": [QUESTION, {**ANSWER, "content": parts}]}, "x:1")
    assert conversation.messages[1] == {**ANSWER, "reasoning_content": "hm!"}


# fmt: off
SHAPES = [
    (turns("gpt: z", "tool: y", "human: a", "gpt: b"), ["user: a", "assistant: b"], "leading assistant turns cut"),
    (turns("system: s", "gpt: z", "human: a", "gpt: b"), ["system: s", "user: a", "assistant: b"],
     "leading assistant turns cut"),
    (turns("system:  ", "human: a", "gpt: b"), ["user: a", "assistant: b"], "empty system turn removed"),
    (turns("human: a", "gpt: b", "human: c", "gpt:  \n", "human: d", "gpt: e"),
     ["user: a", "assistant: b", "user: d", "assistant: e"], "a question with an empty answer is left out"),
    (turns("human: a", "gpt: ", "human: b", "gpt: c"), ["user: b", "assistant: c"],
     "a question with an empty answer is left out"),
    (turns("human: a", "gpt: b", "human: ", "gpt: c", "human: d", "gpt: e"), ["user: a", "assistant: b"],
     "cut at an empty turn of the user, on which later answers depend"),
    (turns("human: a", "gpt: b", "gpt: ", "human: d", "gpt: e"), ["user: a", "assistant: b"],
     "cut at an empty turn of the assistant, on which later answers depend"),
    (turns("human: a", "gpt: b", "human: c", "gpt: \u200b"), ["user: a", "assistant: b"], "cut at an empty turn"),
    (turns("human: a", "gpt: b", "human: c"), ["user: a", "assistant: b"], "turns after the last answer cut"),
    (turns("human: a", "gpt: b", "system: s", "human: c", "gpt: d"),
     ["user: a", "assistant: b", "system: s", "user: c", "assistant: d"], None),
    (turns("gpt: ", "human: a", "gpt: b"), ["user: a", "assistant: b"], "leading assistant turns cut"),
    (turns("human: ", "gpt: z", "human: a", "gpt: b"), ["user: a", "assistant: b"], "leading user turns cut"),
]
# fmt: on


@pytest.mark.parametrize(("values", "expected", "note"), SHAPES)
def test_the_shape_is_cut_and_noted(
    values: list[Any], expected: list[str], note: str | None
) -> None:
    """A kept conversation goes from a question to an answer; what was cut is said."""
    assert contents_of({"conversations": values}) == expected
    notes = conversation_of({"conversations": values}, "x:1")[1]
    assert note in notes if note else not notes


def test_a_preference_record_gives_its_chosen_answer() -> None:
    """The rejected answer is not learned."""
    values = {
        "conversations": turns("human: a"),
        "chosen": turns("gpt: b")[0],
        "rejected": turns("gpt: c")[0],
    }
    assert contents_of(values) == ["user: a", "assistant: b"]
    assert conversation_of(values, "x:1")[1] == {"preference record: the chosen answer is taken"}


def with_turn(**turn: Any) -> dict[str, Any]:
    """A good record in which one more turn stands before the answer."""
    return {"conversations": [*turns("human: a"), turn, *turns("gpt: b")]}


# fmt: off
REASONS = [
    (["a list"], "not an object"),
    ({"q": 1, "a": 2, "m\n": 3}, "unknown layout: keys a, m\\n, q"),
    ({"conversations": {"a": 1}}, "conversations: not a list"),
    ({"conversations": "a chat"}, "conversations: text that is not JSON"),
    ({"conversations": []}, "no turns"),
    ({"conversations": turns("human: a")}, "no answer"),
    ({"conversations": turns("gpt: a", "human: b")}, "no answer"),
    ({"conversations": turns("human: a", "gpt: ")}, "no answer"),
    ({"conversations": turns("gpt: a")}, "no user turn"),
    ({"conversations": turns("gpt: a", "human: ", "gpt: b", "human: \u200b")}, "every user turn is empty"),
    ({"conversations": turns("human: a", "human: ", "gpt: c")}, "an empty turn before the first answer"),
    ({**record("a"), "images": ["a.png"]}, "images beside the text"),
    ({**record("a"), "image": "a.png"}, "image beside the text"),
    ({**record("a"), "videos": [{"path": "a.mp4"}]}, "videos beside the text"),
    (with_turn(role="user", content="a", images=["a.png"]), "images beside the text"),
    (with_turn(role="user", content="<image>\nWhat is it?"), "a placeholder in the text: <image>"),
    ({"prompt": "a", "completion": "b", "label": False}, "marked as not to be learned: label"),
    ({**record("a"), "train": False}, "marked as not to be learned: train"),
    ({"question": "a", "choices": ["b", "c"], "answer": "B"}, "a question with choices"),
    ({"data": ["a"]}, "no answer"),
    ({"prompt": {"role": "prompter", "text": "a", "replies": 1}}, "no answer"),
    ({"prompt": "a"}, "no answer"),
    ({"prompt": 3, "completion": "b"}, "content that is not text: int"),
    ({"chosen": "Human: a", "rejected": "Human: b"}, "unknown layout: keys chosen, rejected"),
    ({"conversations": ["a"]}, "a turn that is not an object"),
    ({"conversations": [{"value": "a"}]}, "a turn without a role"),
    ({"conversations": turns("narrator: a")}, "unknown role 'narrator'"),
    ({"instruction": "a", "input": 3, "output": "b"}, "instruction or input: not text"),
    ({"instruction": "a", "output": ["b", "c"]}, "content that is not text: str"),
    ({"instruction": "a", "output": "b", "history": [["a"]]}, "history: not a list of pairs"),
    (with_turn(role="user", content=3.5), "content that is not text: float"),
    (with_turn(role="user", content=[{"type": "image_url"}]), "content that is not text: image_url"),
    (with_turn(role="user", content="a\ud800"), "text with lone surrogates"),
    (with_turn(role="function_call", value="add 1"), "function_call that is not JSON"),
    (with_turn(role="gpt", tool_calls=[{"function": {}}]), "a tool call without a name"),
    (with_turn(role="gpt", tool_calls=[{"name": "a", "arguments": "{"}]), "tool call arguments that are not JSON"),
    (with_turn(role="gpt", tool_calls=[{"name": "a", "arguments": [1]}]),
     "tool call arguments that are not an object"),
    (with_turn(role="user", content="a", tool_calls=CALLED), "reasoning or tool calls in a turn of the user"),
    (with_turn(role="gpt", value="a", weight=0.5), "weight that is neither 0 nor 1"),
    (with_turn(role="tool", value="a", tool_call_id=7), "tool_call_id that is not text: int"),
    ({**record("a"), "tools": "add"}, "tools that are not JSON"),
    ({**record("a"), "tools": {"add": 1}}, "tools that are not a list"),
    ({**record("a"), "tools": [{"description": "x"}]}, "a tool without a name"),
]
# fmt: on


@pytest.mark.parametrize(("values", "reason"), REASONS)
def test_a_record_is_dropped_by_name(values: Any, reason: str) -> None:
    """Each kind of mess has its words."""
    with pytest.raises(Dropped) as dropped:
        conversation_of(values, "x:1")
    assert str(dropped.value) == reason


@pytest.mark.parametrize(
    "mark",
    [
        {"weight": 0.0},
        {"label": False},
        {"loss_weight": 0},
        {"train": False},
        {"loss": False},
        {"training": 0},
    ],
)
def test_an_answer_that_is_marked_is_read_but_not_learned(mark: dict[str, Any]) -> None:
    """In the words of OpenAI, Axolotl, ms-swift and others; the history keeps it."""
    marked = {"messages": [QUESTION, {**ANSWER, **mark}, QUESTION, ANSWER]}
    conversation, notes = conversation_of(marked, "x:1")
    assert [turn.get("weight") for turn in conversation.messages] == [None, 0, None, None]
    assert notes == {"an answer is marked as not to be learned"}
    unmarked = {key: True for key in mark} | {"label": "good", "loss": 1.5}
    kept, notes = conversation_of({"messages": [QUESTION, {**ANSWER, **unmarked}]}, "x:1")
    assert kept.messages[1].get("weight", 1) == 1 and not notes


@pytest.mark.parametrize(
    ("reason", "expected", "note"),
    [
        ("stop", [None, None], None),
        ("length", [0, None], "a truncated answer is not learned"),
        ("max_tokens", [0, None], "a truncated answer is not learned"),
        ("abort", None, "cut at an answer that was broken off: abort"),
        ("content_filter", None, "cut at an answer that was broken off: content_filter"),
    ],
)
def test_an_answer_that_did_not_end_is_not_learned(
    reason: str, expected: Any, note: str | None
) -> None:
    """One cut at its limit stays in the history; one that was aborted or filtered ends the conversation before it."""
    turns = [QUESTION, {**ANSWER, "finish_reason": reason}, QUESTION, ANSWER]
    before = [QUESTION, {"role": "assistant", "content": "first"}]
    conversation, notes = conversation_of({"messages": [*before, *turns]}, "x:1")
    weights = [turn.get("weight") for turn in conversation.messages if turn["role"] == "assistant"]
    assert weights == [None, *(expected or [])] and (note in notes if note else not notes)
    if expected is None:
        with pytest.raises(Dropped, match=f"^the first answer was broken off: {reason}$"):
            conversation_of({"messages": turns}, "x:1")
    alone = {"prompt": "a", "completion": "b", "finish_reason": reason}
    if expected is not None:
        assert conversation_of(alone, "x:1")[0].messages[1].get("weight") == expected[0]


@pytest.mark.parametrize("reason", ["length", "max_tokens"])
def test_a_truncated_answer_with_a_weight_is_learned_without_an_end(reason: str) -> None:
    """The mark of its reason stays with it."""
    answer = {**ANSWER, "finish_reason": reason, "weight": 1}
    conversation, notes = conversation_of({"messages": [QUESTION, answer]}, "x:1")
    assert conversation.messages[1] == {
        "role": "assistant",
        "content": ANSWER["content"],
        "weight": 1,
    } | {"finish_reason": reason}
    assert notes == {"a truncated answer is learned without an end mark"}


def test_kept_answers_of_earlier_versions_have_no_end() -> None:
    """They have the reasons beside the messages alone; one that was not kept has weight 0."""
    beside = {"sampling": {"seed": 0}, "finish_reasons": ["stop", "length"]}
    turns = [QUESTION, ANSWER, QUESTION, ANSWER]
    kept, notes = conversation_of({"messages": turns, **beside}, "x:1")
    assert [turn.get("finish_reason") for turn in kept.messages] == [None, None, None, "length"]
    assert notes == {"a truncated answer is learned without an end mark"}
    left, _ = conversation_of({"messages": [*turns[:3], {**ANSWER, "weight": 0}], **beside}, "x:1")
    assert [turn.get("weight") for turn in left.messages] == [None, None, None, 0]


def test_placeholders_are_told_from_markup() -> None:
    """An XML element named image, closed again, is text."""
    for text in ("<image><url>a</url></image>", "`<imagen>`", "<image href='a'/>"):
        assert contents_of({"prompt": text, "completion": "b", "images": []})[0] == f"user: {text}"


# fmt: off
QUESTIONS = [
    ({"turns": [{"content": "a"}], "question_id": "1", "cluster": "x"}, ["user: a", "assistant: "]),  # arena-hard
    ({"turns": ["a", "b"]}, ["user: a", "assistant: ", "user: b", "assistant: "]),  # MT-bench
    ({"prompt": "a", "prompt_id": "1"}, ["user: a", "assistant: "]),
    ({"prompt": [QUESTION]}, ["user: a", "assistant: "]),
    ({"instruction": "a", "input": "b"}, ["user: a\n\nb", "assistant: "]),
    ({"conversations": turns("system: s", "human: a")}, ["system: s", "user: a", "assistant: "]),
    ({"conversations": turns("human: a", "gpt: ", "human: c", "gpt: d")},
     ["user: a", "assistant: ", "user: c", "assistant: d"]),
    ({"conversations": turns("human: a", "gpt: b", "human: c")}, ["user: a", "assistant: b", "user: c", "assistant: "]),
    ({"messages": [QUESTION, {**ANSWER, "finish_reason": "abort"}], "label": False}, ["user: a", "assistant: b"]),
]
# fmt: on


@pytest.mark.parametrize(("values", "expected"), QUESTIONS)
def test_questions_alone_do_where_answers_are_to_come(
    values: dict[str, Any], expected: list[str]
) -> None:
    """Regeneration needs what is asked; whether and how it was answered is no reason to drop it."""
    messages = conversation_of(values, "x:1", answered=False)[0].messages
    assert [f"{turn['role']}: {turn['content']}" for turn in messages] == expected
    with pytest.raises(Dropped, match=r"^no user turn$"):
        conversation_of({"conversations": turns("system: s", "gpt: b")}, "x:1", answered=False)


TEXT = st.text(st.characters(exclude_categories=()), max_size=8)  # lone surrogates, too
WORDS = st.sampled_from(
    [*ROLES, "text", "reasoning", "tool_call", "image_url", '{"name": "f", "arguments": {}}', "[]"]
)
KEYS = st.sampled_from(
    ["from", "value", "role", "content", "type", "text", "name", "arguments", "function", "id"]
)
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | TEXT, inner, max_size=4),
)
EXTRAS = (
    "tool_calls",
    "weight",
    "name",
    "reasoning_content",
    "tool_call_id",
    "train",
    "finish_reason",
    "images",
)
TURN = st.fixed_dictionaries(
    {
        "role": st.sampled_from([*ROLES]),
        "content": st.sampled_from(["b", "c"]) | TEXT | WORDS | ANY,
    },
    optional=dict.fromkeys(EXTRAS, st.sampled_from([None, [], ""]) | ANY),
)
GOOD = st.lists(st.sampled_from([*OPENAI["messages"], QUESTION, ANSWER]), max_size=4)
CHAT = st.builds(
    lambda key, turns, rest: {
        **rest,
        key: [turn for part in (*turns, [QUESTION, ANSWER]) for turn in part],
    },
    st.sampled_from(["conversations", "messages"]),
    st.tuples(GOOD, st.lists(TURN | ANY, max_size=1), GOOD),
    st.dictionaries(st.sampled_from(["tools", "system", "id", "chosen"]), ANY, max_size=1),
)
KNOWN = [
    "conversations",
    "messages",
    "conversation",
    "prompt",
    "question",
    "data",
    "turns",
    "chosen",
    "instruction",
]
FIELDS = st.sampled_from(
    [*KNOWN, "input", "output", "completion", "answer", "history", "tools", "id", "finish_reason"]
)


def test_any_value_is_a_conversation_or_a_reason() -> None:
    """No value makes it raise anything else, and what is kept is in shape."""
    kept = []

    @given(
        st.sampled_from([CHAT, CHAT, ANY, st.dictionaries(FIELDS, ANY)]).flatmap(
            lambda values: values
        )
    )
    @settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    def fuzz(values: Any) -> None:
        for answered in (True, False):
            try:
                conversation = conversation_of(values, "x:1", answered=answered)[0]
            except Dropped as reason:
                assert str(reason).isprintable() and len(str(reason)) < 400
            else:
                kept.append(conversation)
                assert not [
                    fault
                    for fault in wrong_with(conversation)
                    if answered or fault != "says something"
                ]

    fuzz()
    assert len(kept) > 40  # else it says little


def test_the_check_of_shape_can_fail() -> None:
    """Each planted fault is seen."""
    good = conversation_of(OPENAI, "x:1")[0]
    assert not wrong_with(good)
    for messages in (
        good.messages[:-1],
        good.messages[2:],
        [],
        [*good.messages, {"role": "gpt", "content": ""}],
    ):
        assert wrong_with(Conversation("x", messages))
