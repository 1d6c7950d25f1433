"""A server is checked before it is asked, and a request holds all that decides the answer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from data_prep.dialogues import Reader, converse
from data_prep.regenerate import main
from eagle import Target
from eagle.recipe import DataSection
from tests.data_prep.stub_servers import (
    command_of,
    completion,
    echo,
    jobs_of,
    pool_at,
    probe_length,
    regenerate,
    section_of,
    serving,
    talk,
)

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]


def test_a_server_that_is_gone_is_given_up(tiny_target: Target, tmp_path: Path) -> None:
    """After twenty failures in a row no more is tried."""
    # 400 is no busy server: each of these requests is at fault itself
    with serving(lambda _: 400) as (url, asked):
        failed = regenerate(
            tmp_path / "out",
            jobs_of(40),
            tiny_target,
            url,
            in_flight=2,
        )
    assert len(failed) == 40
    # a request that was under way at the twentieth failure may be one more
    assert 20 <= len(asked) <= 22
    pattern = re.compile(r"not tried, after 2[0-2] failures in a row")
    untried = [reason for reason in failed.values() if pattern.match(reason)]
    assert len(untried) == 40 - len(asked)


def test_a_server_that_is_not_there_is_named() -> None:
    """The error says what to do."""
    section = section_of(endpoint="http://127.0.0.1:9/v1", attempts=1)
    message = r"no answer from http://127\.0\.0\.1:9/v1/models: .*refused.*endpoint=null"
    with pytest.raises(ValueError, match=message):
        pool_at(section, "a/b")


def test_another_model_is_refused() -> None:
    """A folder's or hub id's last part, its full path and the server's `root` are the same model."""
    with serving(
        echo,
        model="Llama-3.2-1B",
        root="/models/llama",
    ) as (url, _):
        section = section_of(endpoint=url)
        message = r"serves \['another', 'Llama-3.2-1B'\], expected a/other or other"
        with pytest.raises(ValueError, match=message):
            pool_at(section, "a/other")
        for path in ("meta-llama/Llama-3.2-1B", "Llama-3.2-1B", "/models/llama"):
            assert pool_at(section, path).endpoints[0].model == "Llama-3.2-1B"


@pytest.mark.parametrize("is_counting", [True, False])
def test_another_tokenizer_is_refused(
    is_counting: bool,
    tiny_target: Target,
    tiny_target_dir: Path,
    tmp_path: Path,
) -> None:
    """A probe of many scripts must have as many tokens there as here, and nothing else is asked."""
    # a server that counts no tokens cannot be checked, and is refused too
    length = probe_length(tiny_target)
    counted = length + 1 if is_counting else None
    message = f"as {counted} tokens, the recipe's tokenizer and template as {length}"
    with serving(lambda _: completion("x", prompt_tokens=counted)) as (url, asked):
        with pytest.raises(ValueError, match=message):
            main(command_of(tiny_target_dir, tmp_path, url, 2))
    assert [request["max_tokens"] for request in asked] == [1]


def test_a_request_holds_all_that_decides_the_answer(tiny_target: Target) -> None:
    """It holds tools, sampling, a seed of its own, the template's arguments and what the context leaves."""
    turns = ("user: a", "assistant: b", "user: c", "assistant: d")
    conversation = talk("name", *turns, tools=TOOLS)
    sampling = {"temperature": 0.5, "top_p": 0.9}
    with serving(echo, max_model_len=60) as (url, asked):
        section = section_of(
            endpoint=url,
            seed=7,
            max_new_tokens=50,
            **sampling,
        )
        pool = pool_at(section, enable_thinking=False)
        reader = Reader(
            tiny_target.tokenizer,
            DataSection(train="-"),
            pool.positions,
        )
        list(
            pool.run(
                iter(
                    [
                        (
                            "name",
                            converse(
                                "name",
                                conversation,
                                reader,
                                section,
                            ),
                        )
                    ]
                )
            )
        )
    # the second request has the first answer as its history
    first, second = asked
    expected = {
        **sampling,
        "messages": [{"role": "user", "content": "a"}],
        "tools": TOOLS,
        "chat_template_kwargs": {"enable_thinking": False},
        "max_tokens": min(50, 60 - len(tiny_target.chat("a"))),
    }
    assert {**first, **expected} == first
    assert first["seed"] != second["seed"]
    assert len(second["messages"]) == 3
    assert second["max_tokens"] < first["max_tokens"]
