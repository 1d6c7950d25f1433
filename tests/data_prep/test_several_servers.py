"""Several servers share one queue: by their speed, beyond the death of any of them, and with the same answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from data_prep.dialogues import Jobs, Reader, converse, make_names_unique
from data_prep.parts import begin
from data_prep.regenerate import answer_all, check_section, main
from data_prep.servers.pool import Pool, Queue
from data_prep.servers.transport import Failure, Kind
from data_prep.servers.usage import shorten
from eagle import Target
from eagle.recipe import DataSection
from tests.data_prep.fault_proxy import FaultProxy, faults_before
from tests.data_prep.stub_servers import completion, echo, pool_at, section_of, serving, talk
from tests.data_prep.test_server_faults import jobs_of, joined, probed, recipe_of, regenerate

WAIT = 60.0  # seconds after which a test that hangs fails


class Clock:
    """Time that passes only when every place of every server is taken, or when nothing more comes."""

    def __init__(self, places: int) -> None:
        self.places, self.now = places, 0.0
        self.pending: dict[int, float] = {}  # when each request under way is answered
        self.numbers, self.changed = count(), threading.Condition()

    def spend(self, seconds: float) -> None:
        """Return after so many of this clock's seconds."""
        with self.changed:
            number = next(self.numbers)
            self.pending[number] = self.now + seconds
            self.changed.notify_all()
            while True:
                full = len(self.pending) >= self.places
                first = min(self.pending, key=lambda key: (self.pending[key], key))
                if first == number and (full or not self.changed.wait(0.4)):
                    self.now = max(self.now, self.pending.pop(number))
                    self.changed.notify_all()
                    return
                if first != number:
                    self.changed.wait(WAIT)


@pytest.mark.slow
@pytest.mark.parametrize("speeds", [(1, 3), (3, 1)])
def test_servers_share_by_speed(
    speeds: tuple[int, int], tiny_target: Target, tmp_path: Path
) -> None:
    """One that is three times slower gives a fourth of the answers; the file is that of one server."""
    out, jobs, clock = tmp_path / "out.jsonl", jobs_of(32), Clock(4)

    def at_speed(seconds: int) -> Callable[[dict[str, Any]], Any]:
        def reply(request: dict[str, Any]) -> Any:
            clock.spend(seconds)
            return echo(request)

        return reply

    with (
        serving(at_speed(speeds[0])) as (one, asked),
        serving(at_speed(speeds[1])) as (other, others),
    ):
        assert not regenerate(out, jobs, tiny_target, [one, other], in_flight=2)
    assert len(asked) + len(others) == 48
    share = speeds[1] / sum(speeds)
    assert 48 * share - 8 <= len(asked) <= 48 * share + 8
    with serving(echo) as (url, _):
        assert not regenerate(tmp_path / "single.jsonl", jobs, tiny_target, url)
    assert joined(out, jobs) == joined(tmp_path / "single.jsonl", jobs)


def run_in_thread(run: Callable[[], Any]) -> Callable[[], Any]:
    """Start it; the result is waited for by a call."""
    results: list[Any] = []

    def keep() -> None:
        try:
            results.append(run())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=keep, daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(WAIT)
        assert not thread.is_alive()
        if isinstance(results[0], BaseException):
            raise results[0]
        return results[0]

    return result


class Mortal:
    """A pool of two servers, of which one dies with requests under way and comes back."""

    def __init__(
        self, url: str, steady: str, out: Path, target: Target, served_again: str = ""
    ) -> None:
        self.died, self.back, self.answered_again = (
            threading.Event(),
            threading.Event(),
            threading.Event(),
        )
        self.proxy = FaultProxy(url, self.rule)
        self.section = section_of(out, endpoint=[self.proxy.url, steady], in_flight=2, attempts=3)
        self.pool = pool_at(self.section, first=0.01)
        self.out, self.target = out, target
        self.again = served_again or url

    def rule(self, number: int, _: dict[str, Any]) -> str | None:
        """Three answers, then nothing: the requests under way break off."""
        if self.back.is_set():
            self.answered_again.set()
            return None
        if number < 3:
            return None
        self.died.set()
        return "hang up"

    def run(self, jobs: Jobs) -> dict[str, str]:
        """Answer the jobs."""
        begin(self.out, {})
        reader = Reader(self.target.tokenizer, DataSection(train="-"))
        return answer_all(self.out, jobs, self.pool, reader, self.section)

    def die_and_come_back(self) -> None:
        """No connection is taken for a while."""
        assert self.died.wait(WAIT)
        port = self.proxy.server_port
        self.proxy.stop()
        while not self.pool.endpoints[0].health.is_given_up:
            assert not self.answered_again.wait(0.005)
        self.back.set()
        self.proxy = FaultProxy(self.again, self.rule, port)


def test_a_server_that_dies_is_replaced_and_comes_back(
    tiny_target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other takes over, though the dead one is tried again and again; then both answer, and nothing is lost."""
    out, jobs = tmp_path / "out.jsonl", jobs_of(32)

    def steady(
        request: dict[str, Any],
    ) -> Any:  # the last conversations wait until the dead one has answered again
        if len(asked) > 30:
            assert mortal.answered_again.wait(WAIT)
        return echo(request)

    with serving(echo) as (url, _), serving(steady) as (other, asked):
        mortal = Mortal(url, other, out, tiny_target)
        result = run_in_thread(lambda: mortal.run(jobs))
        mortal.die_and_come_back()
        assert result() == {}
        mortal.proxy.stop()
        first, second = (endpoint.usage for endpoint in mortal.pool.endpoints)
        assert first.answers >= 4 and first.answers + second.answers == 48
        assert joined(out, jobs)
        summary = mortal.pool.summary()
    assert "answers again" in capsys.readouterr().err and "requests without an answer: " in summary
    assert (
        f"{mortal.proxy.url}: {first.answers} answers: 0 tokens in, {3 * first.answers} out"
        in summary
    )


@pytest.mark.parametrize(
    ("kind", "asked", "costs"), [(Kind.AWAY, True, 0), (Kind.BUSY, False, 0), (Kind.ODD, True, 1)]
)
def test_only_what_was_asked_costs_an_attempt(
    kind: Kind, asked: bool, costs: int, tiny_target: Target
) -> None:
    """Not a connection that never stood, nor the check of a server that may be back."""
    with serving(echo) as (url, _):
        section = section_of(Path("-"), endpoint=url)
        (endpoint,) = pool_at(section).endpoints
    reader = Reader(tiny_target.tokenizer, DataSection(train="-"))
    queue = Queue(
        iter([("a", converse("a", talk("a", "user: a", "assistant: b"), reader, section))]),
        [endpoint],
        2,
    )
    job = queue.take(endpoint)
    assert job is not None
    outcomes = []
    for _ in range(2):
        outcomes.append(queue.failed(endpoint, job, Failure("gone", kind), monotonic(), asked))
        assert outcomes[-1] is not None or queue.take(endpoint) is job
    assert (
        outcomes == [None, "gone (asked 2 times)" if costs else None] and job.attempts == 2 * costs
    )


def test_a_server_that_comes_back_with_another_model_is_refused(
    tiny_target: Target, tmp_path: Path
) -> None:
    """In words, at once; what is answered stays."""
    with serving(echo) as (url, _), serving(echo, model="someone-else") as (changed, asked):
        mortal: Mortal

        def steady(request: dict[str, Any]) -> Any:
            assert not request["messages"][-1]["content"].endswith("9") or mortal.back.wait(WAIT)
            return echo(request)

        with serving(steady) as (other, _):
            mortal = Mortal(url, other, tmp_path / "out.jsonl", tiny_target, served_again=changed)
            result = run_in_thread(lambda: mortal.run(jobs_of(400)))
            mortal.die_and_come_back()
            with pytest.raises(
                ValueError, match=r"serves \['another', 'someone-else'\], expected some/target"
            ):
                result()
            mortal.proxy.stop()
        assert not asked


def test_what_one_server_refuses_another_may_answer(tiny_target: Target, tmp_path: Path) -> None:
    """As by a shorter context; what both refuse has failed, and is asked once of each."""

    def refuse(request: dict[str, Any]) -> Any:
        asked_for = request["messages"][0]["content"]
        return 400 if asked_for.startswith(("question 3", "question 5")) else echo(request)

    def refuse_one(request: dict[str, Any]) -> Any:
        return 400 if request["messages"][0]["content"].startswith("question 5") else echo(request)

    with serving(refuse) as (one, asked), serving(refuse_one) as (other, others):
        failed = regenerate(tmp_path / "out", jobs_of(8), tiny_target, [one, other], in_flight=1)
    assert list(failed) == ["c5"] and "400" in failed["c5"]
    refused = [
        request for request in asked + others if request["messages"][0]["content"] == "question 5"
    ]
    assert len(refused) == 2


def test_rooms_are_those_of_the_smallest_context() -> None:
    """So that no answer depends on who gives it."""
    with serving(echo, max_model_len=90) as (one, _), serving(echo, max_model_len=60) as (other, _):
        assert pool_at(section_of(Path("-"), endpoint=[one, other])).positions == 60
        assert pool_at(section_of(Path("-"), endpoint=[one, one])).positions == 90


def answer(pool: Pool, target: Target, **fields: Any) -> dict[str, Any]:
    """The line of a conversation of one answer."""
    section = section_of(Path("-"), **fields)
    reader = Reader(target.tokenizer, DataSection(train="-"))
    jobs = iter(
        [("name", converse("name", talk("name", "user: a", "assistant: b"), reader, section))]
    )
    ((_, line),) = pool.run(jobs)
    assert isinstance(line, dict)
    return line


def test_reasoning_is_kept_or_dropped_by_name(tiny_target: Target) -> None:
    """Dropped, it is counted; tool calls stay."""
    calls = [{"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
    reply = completion("x", reasoning_content="I think", tool_calls=calls)
    with serving(lambda _: reply) as (url, _):
        pool = pool_at(section_of(Path("-"), endpoint=url))
        kept, dropped = answer(pool, tiny_target), answer(pool, tiny_target, reasoning="drop")
    assert kept["record"]["messages"][-1]["reasoning_content"] == "I think"
    assert dropped["record"]["messages"][-1] == {
        "role": "assistant",
        "content": "x",
        "tool_calls": calls,
    }
    assert "reasoning before an answer is dropped" in dropped["notes"]
    assert "reasoning before an answer is dropped" not in kept["notes"]


def test_a_model_may_be_named(tiny_target: Target) -> None:
    """By the name that the server knows, listed or not; its context counts where it is listed."""
    with serving(echo, model="alias", max_model_len=70) as (url, asked):
        for name, positions in (("alias", 70), ("unlisted", None)):
            pool = pool_at(section_of(Path("-"), endpoint=url, model=name))
            answer(pool, tiny_target)
            assert (asked[-1]["model"], pool.positions) == (name, positions)


def test_samples_are_conversations_of_their_own(
    tiny_target: Target, tiny_target_dir: Path, tmp_path: Path
) -> None:
    """`id#k`, side by side, each with a seed of its own; the same again at another run, and more are not the same."""
    reply = probed(tiny_target)

    def draw(request: dict[str, Any]) -> Any:
        return completion(f"by {request['seed']}") if request["max_tokens"] > 1 else reply(request)

    files = []
    for number, fields in enumerate(({"samples": 3}, {"samples": 3, "in_flight": 1})):
        folder = tmp_path / str(number)
        folder.mkdir()
        with serving(draw) as (url, asked):
            main(recipe_of(tiny_target_dir, folder, url, 4, temperature=0.7, **fields))
            seeds = [
                request["seed"] for request in asked if request["max_tokens"] == 1024
            ]  # the probes are shorter
        files.append((folder / "out.jsonl").read_bytes())
        assert len(seeds) == len(set(seeds)) == 3 * 6
    records = [json.loads(line) for line in files[0].splitlines()]
    assert [record["id"] for record in records] == [
        f"c{n}#{k}" for n in range(4) for k in (1, 2, 3)
    ]
    assert [record["source_id"] for record in records] == [
        f"c{n}" for n in range(4) for k in (1, 2, 3)
    ]
    assert len({record["messages"][1]["content"] for record in records}) == 12
    assert files[0] == files[1]
    with pytest.raises(ValueError, match=r"sampling\.samples was 3, is None"):
        main(
            recipe_of(tiny_target_dir, tmp_path / "0", "http://127.0.0.1:9/v1", 4, temperature=0.7)
        )


def test_names_of_samples_are_unique() -> None:
    """Also where the source has such ids itself."""
    names = [name for name, _ in make_names_unique([talk("a"), talk("a#1"), talk("a")], samples=2)]
    assert names == ["a#1", "a#2", "a#1#1", "a#1#2", "a#1#2#2", "a#2#2"]


def test_settings_that_cannot_be_meant_together_are_refused() -> None:
    """With what to do."""
    with pytest.raises(
        ValueError, match=r"samples is 2 at temperature 0, .*set regenerate\.samples=1"
    ):
        check_section(section_of(Path("out"), samples=2))
    with pytest.raises(
        ValueError, match=r"reasoning is drop without a server: .*set regenerate\.reasoning=keep"
    ):
        check_section(section_of(Path("out"), reasoning="drop"))
    check_section(
        section_of(Path("out"), reasoning="drop", endpoint="http://a", samples=2, temperature=1.0)
    )


def test_costs_are_told(tiny_target: Target) -> None:
    """Tokens read and written, in all and by each server, and the answers of which a server tells none."""
    counts = iter([(7, 3), (9, None), (1, 2)])

    def reply(_: dict[str, Any]) -> dict[str, Any]:
        read, written = next(counts)
        return {
            **completion("fine"),
            "usage": {"prompt_tokens": read, "completion_tokens": written},
        }

    with serving(reply) as (one, _), faults_before(one) as proxy:
        pool = pool_at(section_of(Path("-"), endpoint=[one, proxy.url], in_flight=1))
        section = section_of(Path("-"))
        reader = Reader(tiny_target.tokenizer, DataSection(train="-"))
        list(
            pool.run(
                (name, converse(name, talk(name, "user: a", "assistant: b"), reader, section))
                for name in "abc"
            )
        )
    first, *each = pool.summary().splitlines()
    assert first.startswith("3 answers: 17 tokens in, 5 out, ") and first.endswith(
        "; 1 without a count of tokens"
    )
    assert len(each) == 2 and sum(endpoint.usage.tokens_read for endpoint in pool.endpoints) == 17
    assert pool.note().startswith("17 tokens in, 5 out, ")
    shortened = {
        0: "0",
        0.25: "0.25",
        7: "7",
        999: "999",
        1000: "1.0k",
        12_345: "12.3k",
        1_234_567: "1.2M",
    }
    assert {count: shorten(count) for count in shortened} == shortened
