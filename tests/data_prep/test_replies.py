"""No odd reply of a server ends a regeneration in a traceback, and Ctrl-C ends it at once."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.dialogues import Reader, converse
from data_prep.regenerate import main
from data_prep.servers.answers import Answer
from data_prep.servers.replies import OddReply, models_in, whole_number
from data_prep.servers.sampler_check import SamplerCheck
from eagle import Target
from eagle.recipe import DataSection
from tests.data_prep.stub_servers import TINY, completion, echo, pool_at, section_of, serving, talk

TALK = talk("name", "user: a", "assistant: b")


def answer_from(reply: Any, target: Target) -> dict[str, Any] | str:
    """The line of a conversation of one answer, or why it failed."""
    with serving(lambda _: reply) as (url, _):
        return ask_one(url, target)


def ask_one(url: str, target: Target) -> dict[str, Any] | str:
    """What becomes of one conversation at this address."""
    section = section_of(Path("-"), endpoint=url, in_flight=1, attempts=1)
    pool = pool_at(section)
    pool.endpoints[0].sampler = SamplerCheck(96, 1.0)
    reader = Reader(target.tokenizer, DataSection(train="-"))
    ((_, outcome),) = pool.run(iter([("name", converse("name", TALK, reader, section))]))
    return outcome


def with_usage(**usage: Any) -> dict[str, Any]:
    """A good reply with another usage."""
    return {**completion("fine"), "usage": usage}


PARTS = [{"type": "text", "text": "fi"}, {"type": "text", "text": "ne"}]


@pytest.mark.parametrize(
    ("reply", "tokens"),
    [
        (with_usage(completion_tokens=None), 0),
        (with_usage(completion_tokens="7"), 7),
        (with_usage(completion_tokens=[7]), 0),
        ({**completion("fine"), "usage": "many"}, 0),
        (completion(PARTS), 3),  # type: ignore[arg-type]
        (completion("fine", None), 3),  # type: ignore[arg-type]
        (completion("fine", logprobs=7), 3),
    ],
)
def test_an_answer_is_taken_from_an_odd_reply(reply: Any, tokens: int, tiny_target: Target) -> None:
    """What says the same in another form, or is not needed, costs nothing."""
    line = answer_from(reply, tiny_target)
    assert isinstance(line, dict) and line["record"]["messages"][-1]["content"] == "fine"
    assert line["tokens"] == tokens


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (completion(7), "sent an answer with content that is not text: int"),  # type: ignore[arg-type]
        (completion([7]), "sent an answer with content that is not text: int"),  # type: ignore[arg-type]
        (completion("a", reasoning_content=[1]), "sent an answer with reasoning that is a list"),
        (completion("a", tool_calls="look"), "sent an answer with tool_calls that is not JSON"),
        (
            completion("a", tool_calls=[{"function": None}]),
            "sent an answer with a tool call without a name",
        ),
        (
            completion("a\ud83d"),
            "sent an answer that cannot be learned from: text with lone surrogates",
        ),
        (completion("a", reasoning_content="\ud83d"), "text with lone surrogates"),
        (
            completion("<|image|>"),
            "sent an answer that cannot be learned from: a placeholder in the text: <|image|>",
        ),
        (completion("a", "model_crashed"), "broke an answer off: finish_reason model_crashed"),
        ([], "sent no answer: []"),
        ({"choices": {"0": 1}}, "sent no answer: {'choices': {'0': 1}}"),
        ({"error": "busy"}, "sent no answer: {'error': 'busy'}"),
    ],
)
def test_an_answer_that_is_none_fails_alone(reply: Any, reason: str, tiny_target: Target) -> None:
    """By name, so that the same command asks again."""
    assert str(answer_from(reply, tiny_target)).endswith(reason)


@pytest.mark.parametrize(
    ("reason", "note"),
    [
        ("model_length", "cut at a truncated answer"),
        ("MAX_TOKENS", "cut at a truncated answer"),
        ("SAFETY", "cut at an answer that the server filtered"),
        ("refusal", "cut at an answer that the server filtered"),
    ],
)
def test_reasons_of_other_servers_count(reason: str, note: str, tiny_target: Target) -> None:
    """Cut at a limit or filtered, in any server's words."""
    line = answer_from(completion("half", reason), tiny_target)
    assert isinstance(line, dict) and note in line["notes"]


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from(["stop", "7"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=4,
)
KEYS = ("content", "reasoning", "reasoning_content", "tool_calls", "role", "refusal")
MESSAGE = JSON | st.dictionaries(
    st.sampled_from(KEYS), JSON | st.just("fine") | st.just(PARTS), max_size=4
)
TOKEN = JSON | st.fixed_dictionaries(
    {"logprob": JSON, "top_logprobs": JSON | st.just([{"logprob": -1.0}])}
)
LOGPROBS = JSON | st.fixed_dictionaries({"content": JSON | st.lists(TOKEN, max_size=3)})
CHOICE = JSON | st.fixed_dictionaries(
    {"message": MESSAGE},
    optional={"finish_reason": JSON, "stop_reason": JSON, "logprobs": LOGPROBS},
)
USAGE = JSON | st.fixed_dictionaries({"completion_tokens": JSON})
REPLY = JSON | st.fixed_dictionaries(
    {"choices": JSON | st.lists(CHOICE, max_size=2)}, optional={"usage": USAGE}
)
ENTRY = JSON | st.fixed_dictionaries(
    {"id": JSON | st.just("target")}, optional={"root": JSON, "max_model_len": JSON}
)
MODELS = (
    JSON
    | st.lists(ENTRY, max_size=3)
    | st.fixed_dictionaries({"data": JSON | st.lists(ENTRY, max_size=3)})
)


@pytest.mark.slow
def test_any_reply_is_an_answer_or_a_reason(tiny_target: Target) -> None:
    """Over a real connection: no value of JSON at any place is more than one conversation's failure."""
    current: list[Any] = [None]
    lines: list[bool] = []
    with serving(lambda _: json.dumps(current[0])) as (url, _):

        @settings(max_examples=60, deadline=None, derandomize=True)
        @given(REPLY)
        def check(reply: Any) -> None:
            current[0] = reply
            outcome = ask_one(url, tiny_target)
            lines.append(isinstance(outcome, dict))
            json.dumps(outcome)

        check()
    assert any(lines) and not all(lines)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(MODELS)
def test_any_list_of_models_is_one_or_a_reason(reply: Any) -> None:
    """What is listed has a name, and its length is a number."""
    try:
        models = models_in(reply)
    except OddReply:
        return
    assert all(isinstance(model["id"], str) for model in models)
    assert all((whole_number(model.get("max_model_len")) or 1) > 0 for model in models)


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
    """A bare list, one object, names alone; a length may be text."""
    (served,) = (model for model in models_in(models) if model["id"] == "target")
    assert whole_number(served.get("max_model_len")) == positions


def recipe_of(target_dir: Path, folder: Path, url: str, count: int) -> list[str]:
    """The command line of a regeneration of short conversations."""
    source = folder / "source.jsonl"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    source.write_text(
        "".join(json.dumps({"id": str(n), "messages": turns}) + "\n" for n in range(count))
    )
    fields = {
        "source": str(source),
        "out": str(folder / "out.jsonl"),
        "endpoint": url,
        "in_flight": 2,
    }
    return [str(TINY), f"target.path={target_dir}/target", f"regenerate={json.dumps(fields)}"]


@pytest.mark.parametrize("count", [5, 60])
def test_a_server_that_says_nothing_is_an_error(
    count: int, tiny_target_dir: Path, tmp_path: Path
) -> None:
    """At the end of few conversations, at the first twenty of many; no empty file is written."""

    def reply(request: dict[str, Any]) -> dict[str, Any]:
        asked = tokens if len(request["messages"]) > 1 else 0
        return completion("", prompt_tokens=asked)

    tokens = 0
    with serving(reply, model="target") as (url, asked):
        command = recipe_of(tiny_target_dir, tmp_path, url, count)
        tokens = probe_tokens(tiny_target_dir)
        with pytest.raises(
            (SystemExit, ValueError), match=r"no conversation has an answer|answers, all empty"
        ) as ended:
            main(command)
        assert not isinstance(ended.value, SystemExit) or ended.value.code not in (0, None)
        assert not (tmp_path / "out.jsonl").exists() and len(asked) < 40


def probe_tokens(target_dir: Path) -> int:
    """How many tokens the probe conversation has."""
    from transformers import AutoTokenizer

    from data_prep.servers.endpoint import PROBE

    tokenizer = AutoTokenizer.from_pretrained(target_dir / "target")
    return len(tokenizer.apply_chat_template(PROBE, add_generation_prompt=True, return_dict=False))


@pytest.mark.slow
def test_ctrl_c_ends_at_once_and_keeps_what_is_answered(
    tiny_target_dir: Path, tmp_path: Path
) -> None:
    """While a server holds its answers back: a word, status 130, and the finished lines; the command goes on later."""
    hold, held = threading.Event(), threading.Semaphore(0)
    tokens, count = probe_tokens(tiny_target_dir), 8

    def reply(request: dict[str, Any]) -> dict[str, Any]:
        if len(request["messages"]) > 1:
            return completion("probe", prompt_tokens=tokens)
        if len(asked) > 4 and not hold.is_set():
            held.release()
            hold.wait(60)
        return echo(request)

    with serving(reply, model="target") as (url, asked):
        command = recipe_of(tiny_target_dir, tmp_path, url, count)
        run = [
            sys.executable,
            "-c",
            "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); ",
        ]
        run[-1] += (
            "from eagle.log import script; from data_prep.regenerate import main; script(main)"
        )
        process = subprocess.Popen(
            [*run, *command], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        try:
            assert held.acquire(timeout=120) and held.acquire(timeout=120)
            process.send_signal(signal.SIGINT)
            begun = time.monotonic()
            _, errors = process.communicate(timeout=60)  # the server holds its answers longer
            assert time.monotonic() - begun < 45 and not hold.is_set()
        finally:
            process.kill()
            hold.set()
        assert process.returncode == 130 and "stopped; finished answers are kept" in errors, errors
        assert "Traceback" not in errors
        finished = (tmp_path / "out.jsonl.parts/part-00000.jsonl").read_text().splitlines()
        assert 1 <= len(finished) < count
        before = len(asked)
        main(command)
        assert len(asked) - before == 1 + count - len(finished)
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == count


def test_a_conversation_ends_before_an_answer_of_the_target_that_no_stage_reads(
    tiny_target: Target,
) -> None:
    """It would say the same again; the answers before it are kept."""
    reader, section = Reader(tiny_target.tokenizer, DataSection(train="-")), section_of(Path("-"))
    dialogue = converse(
        "name", talk("name", "user: a", "assistant: b", "user: c", "assistant: d"), reader, section
    )
    next(dialogue)
    dialogue.send(Answer({"role": "assistant", "content": "fine"}, "stop", 1))
    with pytest.raises(StopIteration) as ended:
        dialogue.send(Answer({"role": "assistant", "content": "<image>"}, "stop", 1))
    line = ended.value.value
    assert [turn["content"] for turn in line["record"]["messages"]] == ["a", "fine"]
    assert any(
        note.startswith("cut at an answer that cannot be learned from: a placeholder")
        for note in line["notes"]
    )
