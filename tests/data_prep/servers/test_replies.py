"""No odd reply of a server ends a regeneration in a traceback, and Ctrl-C ends it at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.dialogues import converse
from data_prep.regenerate import main
from data_prep.servers.answers import Answer
from data_prep.servers.replies import OddReply, models_in, whole_number
from data_prep.servers.sampler_check import SamplerCheck
from eagle import Target
from tests.data_prep.stub_servers import (
    command_of,
    completion,
    pool_at,
    probed,
    reader_of,
    run_one,
    section_of,
    serving,
    talk,
)

TEXT_PARTS = [{"type": "text", "text": "fi"}, {"type": "text", "text": "ne"}]


def answer_from(url: str, target: Target) -> dict[str, Any] | str:
    """Return the line of a conversation of one answer from this server, or why it failed."""
    pool = pool_at(section_of(endpoint=url, in_flight=1, attempts=1))
    # with a check of the sampler, which reads the logprobs of a reply, too
    pool.endpoints[0].sampler = SamplerCheck(96, 1.0)
    return run_one(
        pool,
        target,
        talk("name", "user: a", "assistant: b"),
    )


@pytest.fixture
def read_reply(tiny_target: Target) -> Iterator[Any]:
    """A function that returns what becomes of a reply."""
    current: list[Any] = []
    with serving(lambda _: json.dumps(current[-1])) as (url, _):

        def read(reply: Any) -> dict[str, Any] | str:
            current.append(reply)
            return answer_from(url, tiny_target)

        yield read


@pytest.mark.parametrize(
    ("reply", "tokens"),
    [
        ({**completion("fine"), "usage": {"completion_tokens": None}}, 0),
        ({**completion("fine"), "usage": {"completion_tokens": "7"}}, 7),
        ({**completion("fine"), "usage": {"completion_tokens": [7]}}, 0),
        ({**completion("fine"), "usage": "many"}, 0),
        (completion(TEXT_PARTS), 3),
        (completion("fine", None), 3),
        (completion("fine", logprobs=7), 3),
    ],
)
def test_an_answer_is_taken_from_an_odd_reply(
    reply: Any,
    tokens: int,
    read_reply: Any,
) -> None:
    """What says the same in another form, or is not needed, is no failure."""
    line = read_reply(reply)
    assert line["record"]["messages"][-1]["content"] == "fine"
    assert line["tokens"] == tokens


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (completion(7), "content that is not text: int"),
        (completion([7]), "content that is not text: int"),
        (completion("a", reasoning_content=[1]), "reasoning that is a list"),
        (completion("a", tool_calls="look"), "tool_calls that is not JSON"),
        (completion("a", tool_calls=[{"function": None}]), "a tool call without a name"),
        (completion("a\ud83d"), "cannot be learned from: text with lone surrogates"),
        (completion("a", reasoning_content="\ud83d"), "text with lone surrogates"),
        (completion("<|image|>"), "a placeholder in the text: <|image|>"),
        (completion("a", "model_crashed"), "broke an answer off: finish_reason model_crashed"),
        (completion("a", "abort"), "broke an answer off: finish_reason abort"),
        ([], "sent no answer: []"),
        ({"choices": {"0": 1}}, "sent no answer: {'choices': {'0': 1}}"),
        ({"error": "busy"}, "sent no answer: {'error': 'busy'}"),
    ],
)
def test_a_reply_without_an_answer_fails_alone(
    reply: Any,
    reason: str,
    read_reply: Any,
) -> None:
    """The conversation fails with this reason, so that the same command asks again."""
    assert read_reply(reply).endswith(reason)


@pytest.mark.parametrize(
    ("finish_reason", "note"),
    [
        ("model_length", "its later turns are left out, as an answer reached max_new_tokens"),
        ("MAX_TOKENS", "its later turns are left out, as an answer reached max_new_tokens"),
        ("SAFETY", "cut at an answer that the server filtered"),
        ("refusal", "cut at an answer that the server filtered"),
    ],
)
def test_finish_reasons_of_other_servers_count(
    finish_reason: str,
    note: str,
    read_reply: Any,
) -> None:
    """An answer is truncated or filtered in any server's words."""
    assert note in read_reply(completion("half", finish_reason))["notes"]


SCALAR = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
JSON = st.recursive(
    SCALAR | st.sampled_from(["stop", "7"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(max_size=3),
            inner,
            max_size=3,
        )
    ),
    max_leaves=4,
)


def objects(optional: dict[str, Any] | None = None, **required: Any) -> Any:
    """Return a strategy of any JSON, and of objects whose values are any JSON or as given."""
    # nothing in a reply can be relied on
    required = {key: JSON | value for key, value in required.items()}
    optional = {key: JSON | value for key, value in (optional or {}).items()}
    return JSON | st.fixed_dictionaries(required, optional=optional)


KEYS = ("content", "reasoning", "reasoning_content", "tool_calls", "role", "refusal")
MESSAGE = JSON | st.dictionaries(
    st.sampled_from(KEYS), JSON | st.just("fine") | st.just(TEXT_PARTS), max_size=4
)
TOKEN = objects(logprob=JSON, top_logprobs=st.just([{"logprob": -1.0}]))
LOGPROBS = objects(content=st.lists(TOKEN, max_size=3))
CHOICE = objects(
    {
        "finish_reason": JSON,
        "stop_reason": JSON,
        "logprobs": LOGPROBS,
    },
    message=MESSAGE,
)
REPLY = objects(
    {"usage": objects(completion_tokens=JSON)},
    choices=st.lists(
        CHOICE,
        min_size=1,
        max_size=2,
    ),
)
MODEL = objects({"root": JSON, "max_model_len": JSON}, id=st.just("target"))
MODELS = st.lists(MODEL, max_size=3)


@pytest.mark.slow
def test_any_reply_is_an_answer_or_a_reason(read_reply: Any) -> None:
    """No value of JSON at any position is more than one conversation's failure."""
    is_answer: list[bool] = []

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(REPLY)
    def check(reply: Any) -> None:
        outcome = read_reply(reply)
        is_answer.append(isinstance(outcome, dict))
        json.dumps(outcome)

    check()
    # else the strategy says little
    assert any(is_answer)
    assert not all(is_answer)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(MODELS | objects(data=MODELS))
def test_any_list_of_models_is_one_or_a_reason(reply: Any) -> None:
    """What is listed has a name, and its length is a number."""
    try:
        models = models_in(reply)
    except OddReply:
        return
    for model in models:
        assert isinstance(model["id"], str)
        # None stands for any value that is no number
        length = whole_number(model.get("max_model_len"))
        assert length is None or length >= 0


@pytest.mark.parametrize(
    ("models", "positions"),
    [
        ([{"id": "target"}], None),
        ({"data": {"id": "target", "max_model_len": "64"}}, 64),
        ({"data": ["another", "target"]}, None),
        ({"models": [{"id": "target", "max_model_len": "many"}]}, None),
    ],
)
def test_a_list_of_models_has_many_forms(models: Any, positions: int | None) -> None:
    """It is a bare list, one object or names alone, and a length may be text."""
    # names alone and objects are read alike
    (served,) = (model for model in models_in(models) if model["id"] == "target")
    assert whole_number(served.get("max_model_len")) == positions


@pytest.mark.parametrize("count", [5, 60])
def test_a_server_that_says_nothing_is_an_error(
    count: int,
    tiny_target: Target,
    tiny_target_dir: Path,
    tmp_path: Path,
) -> None:
    """The run fails at the end of few conversations, or after twenty of many, and writes no file."""
    # either the run ends, or it stops after twenty empty answers
    message = r"no conversation has an answer|answers, all empty"
    # such as a server whose template stops at once
    with serving(probed(tiny_target, lambda _: completion(""))) as (url, asked):
        command = command_of(tiny_target_dir, tmp_path, url, count)
        with pytest.raises((SystemExit, ValueError), match=message):
            main(command)
    assert not (tmp_path / "out.jsonl").exists()
    assert len(asked) < 40


def test_a_conversation_ends_before_an_answer_that_no_stage_reads(tiny_target: Target) -> None:
    """The target itself would say it again, so it is cut there; the answers before it are kept."""
    conversation = talk("name", "user: a", "assistant: b", "user: c", "assistant: d")
    # a server would be asked again; the target itself says it again
    dialogue = converse(
        "name",
        conversation,
        reader_of(tiny_target),
        section_of(),
    )
    next(dialogue)
    dialogue.send(
        Answer(
            {"role": "assistant", "content": "fine"},
            "stop",
            1,
        )
    )
    with pytest.raises(StopIteration) as ended:
        dialogue.send(
            Answer(
                {"role": "assistant", "content": "<image>"},
                "stop",
                1,
            )
        )
    line = ended.value.value
    assert [turn["content"] for turn in line["record"]["messages"]] == ["a", "fine"]
    assert "cannot be learned from: a placeholder" in " ".join(line["notes"])
