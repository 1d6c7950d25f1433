"""Several servers share one queue: by their speed, beyond the death of any of them, with the same answers."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from data_prep.dialogues import Jobs, converse
from data_prep.parts import begin
from data_prep.regenerate import answer_all, main
from data_prep.servers.pool import Queue
from data_prep.servers.transport import Failure, Kind
from data_prep.servers.usage import shorten
from eagle import Target
from tests.data_prep.fault_proxy import FaultProxy, faults_before
from tests.data_prep.stub_servers import (
    Reply,
    command_of,
    completion,
    echo,
    jobs_of,
    join_answers,
    pool_at,
    probed,
    read_records,
    reader_of,
    regenerate,
    run_one,
    section_of,
    serving,
    talk,
)

WAIT = 60.0  # seconds after which a test that hangs fails
ONE_ANSWER = talk("name", "user: a", "assistant: b")


class Mortal:
    """A pool of two servers, of which one dies with requests under way and comes back."""

    def __init__(
        self,
        url: str,
        steady: str,
        out: Path,
        target: Target,
    ) -> None:
        self.died = threading.Event()
        self.is_back = threading.Event()
        self.answered_again = threading.Event()
        self.proxy = FaultProxy(url, self.rule)
        # a first wait of 10 ms, so that the dead server is tried again and again
        self.section = section_of(
            out,
            endpoint=[self.proxy.url, steady],
            in_flight=2,
            attempts=3,
        )
        self.pool = pool_at(self.section, first=0.01)
        self.out = out
        self.target = target

    def rule(self, number: int, _: dict[str, Any]) -> str | None:
        """Let three answers through, then hang up: the requests under way break off."""
        if self.is_back.is_set():
            self.answered_again.set()
            return None
        if number < 3:
            return None
        self.died.set()
        return "hang up"

    def run(self, jobs: Jobs, comes_back_as: str) -> dict[str, str]:
        """Answer the jobs while the server dies, and is served at another address after a while."""
        begin(self.out, {})
        reader = reader_of(self.target)
        with ThreadPoolExecutor(1) as threads:
            arguments = (self.out, jobs, self.pool, reader, self.section)
            answering: Future[dict[str, str]] = threads.submit(answer_all, *arguments)
            assert self.died.wait(WAIT)
            # no connection is taken for a while
            port = self.proxy.server_port
            self.proxy.stop()
            # until the pool stops trying it
            while not self.pool.endpoints[0].health.is_given_up:
                assert not self.answered_again.wait(0.005)
            self.is_back.set()
            self.proxy = FaultProxy(comes_back_as, self.rule, port)
            try:
                return answering.result(WAIT)
            finally:
                self.proxy.stop()


def test_a_server_that_dies_is_replaced_and_comes_back(
    tiny_target: Target,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The other takes over though the dead one is tried again and again; then both answer."""
    out = tmp_path / "out.jsonl"
    jobs = jobs_of(32)

    def reply_steadily(request: dict[str, Any]) -> Any:
        # the last conversations wait until the dead server has answered again
        if len(asked) > 30:
            assert mortal.answered_again.wait(WAIT)
        return echo(request)

    with serving(echo) as (url, _), serving(reply_steadily) as (steady, asked):
        mortal = Mortal(url, steady, out, tiny_target)
        assert mortal.run(jobs, comes_back_as=url) == {}
    # 32 conversations have 48 answers
    first, second = (endpoint.usage for endpoint in mortal.pool.endpoints)
    assert first.answers >= 4
    assert first.answers + second.answers == 48
    assert join_answers(out, jobs)
    summary = mortal.pool.summary()
    assert "answers again" in capsys.readouterr().err
    assert "requests without an answer: " in summary
    tokens = f"{first.answers} answers: 0 tokens in, {3 * first.answers} out"
    assert f"{mortal.proxy.url}: {tokens}" in summary


def test_a_server_that_comes_back_with_another_model_is_refused(
    tiny_target: Target, tmp_path: Path
) -> None:
    """The run ends at once, and that server is asked for no answer."""

    def reply_steadily(request: dict[str, Any]) -> Any:
        if request["messages"][-1]["content"].endswith("9"):
            assert mortal.is_back.wait(WAIT)
        return echo(request)

    message = r"serves \['another', 'someone-else'\], expected some/target"
    with (
        serving(echo) as (url, _),
        serving(echo, model="someone-else") as (changed, asked),
        serving(reply_steadily) as (steady, _),
    ):
        mortal = Mortal(url, steady, tmp_path / "out.jsonl", tiny_target)
        with pytest.raises(ValueError, match=message):
            mortal.run(jobs_of(400), comes_back_as=changed)
    assert not asked


@pytest.mark.parametrize(
    ("kind", "was_asked", "cost"),
    [
        (Kind.AWAY, True, 0),  # a connection that never stood
        (Kind.BUSY, False, 0),  # the check of a server that may be back
        (Kind.ODD, True, 1),
    ],
)
def test_only_what_was_asked_costs_an_attempt(
    kind: Kind,
    was_asked: bool,
    cost: int,
    tiny_target: Target,
) -> None:
    """A conversation fails once it has cost its two attempts."""
    with serving(echo) as (url, _):
        section = section_of(endpoint=url)
        (endpoint,) = pool_at(section).endpoints
    dialogue = converse(
        "a",
        ONE_ANSWER,
        reader_of(tiny_target),
        section,
    )
    queue = Queue(iter([("a", dialogue)]), [endpoint], 2)
    # an attempt is paid when the queue takes the job back
    failure = Failure("gone", kind)
    job = queue.take(endpoint)
    assert job is not None
    assert (
        queue.failed(
            endpoint,
            job,
            failure,
            monotonic(),
            was_asked,
        )
        is None
    )
    assert queue.take(endpoint) is job
    outcome = queue.failed(
        endpoint,
        job,
        failure,
        monotonic(),
        was_asked,
    )
    assert outcome == ("gone (asked 2 times)" if cost else None)
    assert job.attempts == 2 * cost


def test_what_one_server_refuses_another_may_answer(tiny_target: Target, tmp_path: Path) -> None:
    """A request that both refuse has failed, and is sent once to each."""

    # a request that one server cannot read may fit into the other's context
    def refusing(*questions: str) -> Reply:
        def reply(request: dict[str, Any]) -> Any:
            is_refused = request["messages"][0]["content"] in questions
            return 400 if is_refused else echo(request)

        return reply

    with (
        serving(refusing("question 3", "question 5")) as (first, first_asked),
        serving(refusing("question 5")) as (second, second_asked),
    ):
        urls = [first, second]
        failed = regenerate(
            tmp_path / "out",
            jobs_of(8),
            tiny_target,
            urls,
            in_flight=1,
        )
    assert list(failed) == ["c5"]
    assert "400" in failed["c5"]
    questions = [request["messages"][0]["content"] for request in first_asked + second_asked]
    assert questions.count("question 5") == 2


def test_positions_are_those_of_the_smallest_context() -> None:
    """No answer depends on which server gives it."""
    with serving(echo, max_model_len=90) as (one, _), serving(echo, max_model_len=60) as (other, _):
        assert pool_at(section_of(endpoint=[one, other])).positions == 60
        assert pool_at(section_of(endpoint=[one, one])).positions == 90


def test_reasoning_is_kept_or_dropped_by_name(tiny_target: Target) -> None:
    """Dropped reasoning is noted; tool calls stay."""
    calls = [
        {
            "id": "1",
            "type": "function",
            "function": {"name": "look", "arguments": "{}"},
        }
    ]
    reply = completion("x", reasoning_content="I think", tool_calls=calls)
    # what the records say depends on the recipe, not on the server
    with serving(lambda _: reply) as (url, _):
        pool = pool_at(section_of(endpoint=url))
        kept: Any = run_one(pool, tiny_target, ONE_ANSWER)
        dropped: Any = run_one(
            pool,
            tiny_target,
            ONE_ANSWER,
            reasoning="drop",
        )
    expected = {
        "role": "assistant",
        "content": "x",
        "tool_calls": calls,
    }
    assert dropped["record"]["messages"][-1] == expected
    assert kept["record"]["messages"][-1] == {**expected, "reasoning_content": "I think"}
    assert "reasoning before an answer is dropped" in dropped["notes"]


@pytest.mark.parametrize(("name", "positions"), [("alias", 70), ("unlisted", None)])
def test_a_model_may_be_named(
    name: str,
    positions: int | None,
    tiny_target: Target,
) -> None:
    """The server is asked for that name, listed or not; its context counts where it is listed."""
    with serving(
        echo,
        model="alias",
        max_model_len=70,
    ) as (url, asked):
        pool = pool_at(section_of(endpoint=url, model=name))
        run_one(pool, tiny_target, ONE_ANSWER)
    assert asked[-1]["model"] == name
    assert pool.positions == positions


def test_samples_are_conversations_of_their_own(
    tiny_target: Target,
    tiny_target_dir: Path,
    tmp_path: Path,
) -> None:
    """Each sample `id#k` has a seed of its own, which is the same at another run."""
    # an answer that shows its seed
    reply = probed(tiny_target, lambda request: completion(f"by {request['seed']}"))
    files = []
    for in_flight in (2, 1):
        folder = tmp_path / str(in_flight)
        folder.mkdir()
        sampling = {
            "samples": 3,
            "temperature": 0.7,
            "in_flight": in_flight,
        }
        with serving(reply) as (url, asked):
            main(
                command_of(
                    tiny_target_dir,
                    folder,
                    url,
                    4,
                    **sampling,
                )
            )
        # the probes ask for fewer tokens than the default of 1024
        seeds = [request["seed"] for request in asked if request["max_tokens"] == 1024]
        assert len(seeds) == len(set(seeds)) == 3 * 6
        files.append((folder / "out.jsonl").read_bytes())
    assert files[0] == files[1]
    records = read_records(folder / "out.jsonl")
    assert [record["id"] for record in records[:4]] == ["c0#1", "c0#2", "c0#3", "c1#1"]
    assert [record["source_id"] for record in records[:4]] == ["c0", "c0", "c0", "c1"]
    assert len({record["messages"][1]["content"] for record in records}) == 12
    single = command_of(
        tiny_target_dir,
        folder,
        url,
        4,
        temperature=0.7,
    )
    with pytest.raises(ValueError, match=r"sampling\.samples was 3, is None"):
        main(single)


def test_costs_are_printed(tiny_target: Target) -> None:
    """Tokens are counted in all and by server, with the answers of which a server counts none."""
    # the usage of three answers, of which one is incomplete
    counts = iter([(7, 3), (9, None), (1, 2)])

    def reply(_: dict[str, Any]) -> dict[str, Any]:
        read, written = next(counts)
        usage = {"prompt_tokens": read, "completion_tokens": written}
        return {**completion("fine"), "usage": usage}

    with serving(reply) as (one, _), faults_before(one) as proxy:
        pool = pool_at(section_of(endpoint=[one, proxy.url], in_flight=1))
        reader = reader_of(tiny_target)
        jobs = [
            (
                name,
                converse(
                    name,
                    ONE_ANSWER,
                    reader,
                    section_of(),
                ),
            )
            for name in "abc"
        ]
        assert len(list(pool.run(iter(jobs)))) == 3
    first, *each = pool.summary().splitlines()
    assert first.startswith("3 answers: 17 tokens in, 5 out, ")
    assert first.endswith("; 1 without a count of tokens")
    assert len(each) == 2
    assert sum(endpoint.usage.tokens_read for endpoint in pool.endpoints) == 17
    assert pool.note().startswith("17 tokens in, 5 out, ")


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (0.25, "0.25"),
        (999, "999"),
        (1000, "1.0k"),
        (12_345, "12.3k"),
        (1_234_567, "1.2M"),
    ],
)
def test_counts_are_shortened(number: float, text: str) -> None:
    """Thousands and millions are printed with one decimal."""
    assert shorten(number) == text
