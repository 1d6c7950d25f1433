"""Whatever a server does wrong, nothing is lost or doubled: the file is that of a run without faults."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from email.message import Message
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from data_prep.parts import begin
from data_prep.regenerate import answer_all, main
from data_prep.servers.answers import Prompt
from data_prep.servers.health import Backoff, Health
from data_prep.servers.transport import Failure, Kind, Transport, check_key, pause_in
from eagle import Target
from eagle.log import script
from tests.data_prep.fault_proxy import FAULTS, Handler, faults_before
from tests.data_prep.stub_servers import (
    RUN_REGENERATE,
    TINY,
    command_of,
    echo,
    jobs_of,
    join_answers,
    names_in_parts,
    pool_at,
    probed,
    read_records,
    reader_of,
    regenerate,
    section_of,
    serving,
)

KEY = "sk-a/very+secret=key"
QUESTION = Prompt([{"role": "user", "content": "a"}], None, [1], 4, 7)


@pytest.fixture(scope="module")
def undisturbed(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of sixteen conversations that nothing disturbs."""
    out = tmp_path_factory.mktemp("whole") / "out.jsonl"
    with serving(echo) as (url, _):
        assert not regenerate(out, jobs_of(16), tiny_target, url)
    return join_answers(out, jobs_of(16))


@pytest.mark.quick("500", "html", "hang")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_changes_nothing(
    fault: str,
    undisturbed: bytes,
    tiny_target: Target,
    tmp_path: Path,
) -> None:
    """A fault in every third request changes neither the answers nor how often the server is asked."""
    out = tmp_path / "out.jsonl"
    jobs = jobs_of(16)
    # a request that hangs costs the timeout, so fewer do
    is_hanging = fault.startswith("hang") and fault != "hang up"
    every = 9 if is_hanging else 3
    timeout = 0.5 if is_hanging else 60
    with (
        serving(echo) as (url, asked),
        faults_before(url, lambda n, _: fault if n % every == 1 else None) as proxy,
    ):
        options = {"timeout": timeout, "attempts": 100, "key": KEY}
        assert not regenerate(
            out,
            jobs,
            tiny_target,
            proxy.url,
            **options,
        )
        assert proxy.planted[fault] >= 2
        if not is_hanging:
            # a reply that is cut off was given, and is asked for again
            repeated = proxy.planted[fault] if fault == "cut" else 0
            assert len(asked) == 24 + repeated
    # nothing is lost and nothing is doubled
    assert sorted(names_in_parts(out)) == sorted(jobs.names)
    assert join_answers(out, jobs) == undisturbed
    assert KEY not in (tmp_path / "out.jsonl.settings").read_text() + out.read_text()


def test_what_fails_too_often_is_counted_with_its_reason(
    tiny_target: Target, tmp_path: Path
) -> None:
    """A conversation that always fails leaves the others alone; a rerun asks for it alone."""
    out = tmp_path / "out.jsonl"
    jobs = jobs_of(6)

    def poison(_: int, request: dict[str, Any]) -> str | None:
        return "error" if "question 4" in request["messages"][0]["content"] else None

    with serving(echo) as (url, asked), faults_before(url, poison) as proxy:
        failed = regenerate(
            out,
            jobs,
            tiny_target,
            proxy.url,
            attempts=4,
        )
        assert list(failed) == ["c4"]
        assert "overloaded" in failed["c4"]
        assert "(asked 4 times)" in failed["c4"]
        assert proxy.planted["error"] == 4
        proxy.rule = lambda *_: None
        asked.clear()
        assert not regenerate(out, jobs, tiny_target, proxy.url)
    assert len(asked) == 1
    assert sorted(names_in_parts(out)) == jobs.names


@pytest.mark.slow
def test_a_hung_server_is_noticed_within_its_timeout(
    tiny_target: Target,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The first silence is printed; after a few in a row nothing more is asked of that server."""
    with serving(echo) as (url, asked), faults_before(url, lambda *_: "hang") as proxy:
        options = {"timeout": 0.5, "attempts": 3}
        failed = regenerate(
            tmp_path / "out",
            jobs_of(40),
            tiny_target,
            proxy.url,
            **options,
        )
        assert len(failed) == 40
        assert not asked
        assert proxy.posts <= 3 + 2
    printed = capsys.readouterr().err
    assert printed.count("no whole reply in 0.5 s: is it stuck?") == 1
    assert "raise regenerate.timeout" in printed
    assert all("no whole reply in 0.5 s" in reason for reason in failed.values())


def test_a_connection_that_never_stands_has_a_limit_of_its_own() -> None:
    """A socket that takes no more connections fails soon, though the timeout of answers is long."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        # four connections fill the queue of pending ones
        pending = [socket.socket() for _ in range(4)]
        for connection in pending:
            connection.setblocking(False)
            connection.connect_ex(full.getsockname())
        section = section_of(connect_timeout=0.2, timeout=50)
        transport = Transport(f"http://127.0.0.1:{full.getsockname()[1]}/v1", section)
        started = time.monotonic()
        with pytest.raises(Failure, match="timed out") as raised:
            transport.send("/models")
        assert raised.value.kind is Kind.AWAY
        assert time.monotonic() - started < 30
        for connection in pending:
            connection.close()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("http://ann:sk-secret@host:8000/v1", "holds a user or a key"),
        ("http://sk-secret@host/v1", "holds a user or a key"),
        ("ann:sk-secret@host/v1", "expected an address such as"),
        ({"one": "http://ann:sk-secret@host/v1"}, "regenerate.endpoint"),
        (["http://host/v1", "https://ann:sk-secret@host/v1"], "holds a user or a key"),
    ],
)
def test_a_key_in_an_address_is_refused_and_not_shown(
    address: Any,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A recipe is copied into runs and model cards: the key belongs into the environment."""
    with pytest.raises(SystemExit):
        script(main, command_of(tmp_path, tmp_path, address, 1))
    printed = "".join(capsys.readouterr())
    assert message in printed
    assert "secret" not in printed
    # a recipe that is no YAML is quoted in the error, with its addresses hidden
    with pytest.raises(SystemExit):
        script(main, [str(TINY), f"regenerate={{endpoint: {address}, wrong: [}}"])
    printed = "".join(capsys.readouterr())
    assert "secret" not in printed or "://" not in str(address)


def test_a_key_may_be_that_of_a_user() -> None:
    """`Basic` and base64 in the variable are sent as they are, and hidden as any key is."""
    with serving(lambda _: {"error": "no, c2VjcmV0"}) as (url, _), faults_before(url) as proxy:
        pool = pool_at(section_of(endpoint=proxy.url, attempts=1), key="Basic c2VjcmV0")
        with pytest.raises(Failure) as raised:
            pool.endpoints[0]._ask(QUESTION)
    assert proxy.heard[-1]["Authorization"] == "Basic c2VjcmV0"
    assert "c2VjcmV0" not in str(raised.value)


@pytest.mark.quick("403-sk-a/very+secret=key")
@pytest.mark.parametrize(("status", "key"), [("403", KEY), ("401", "")])
def test_a_key_that_is_refused_ends_the_run_at_once(
    status: str,
    key: str,
    tiny_target: Target,
    tiny_target_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The error names the variable and not the key; finished answers stay, and no file holds the key."""
    monkeypatch.delenv("MY_KEY", raising=False)
    if key:
        monkeypatch.setenv("MY_KEY", key)
    header = f"Bearer {key}" if key else None
    state = "" if key else "not "
    with (
        serving(probed(tiny_target)) as (url, asked),
        faults_before(url, lambda number, _: status if number >= 5 else None) as proxy,
    ):
        command = command_of(
            tiny_target_dir,
            tmp_path,
            proxy.url,
            16,
            key_variable="MY_KEY",
        )
        message = rf"{status}, .*variable MY_KEY, which is {state}set:"
        with pytest.raises(ValueError, match=message):
            main(command)
        assert proxy.posts <= 5 + 2
        assert 1 <= len(names_in_parts(tmp_path / "out.jsonl")) < 16
        assert {headers.get("Authorization") for headers in proxy.heard} == {header}
        # the next run meets one error 500, whose text repeats the key
        proxy.rule = lambda *_: None if proxy.planted["500"] else "500"
        main(command)
    # each of the two runs probes the server once
    assert [request["max_tokens"] for request in asked].count(1) == 2
    records = read_records(tmp_path / "out.jsonl")
    assert [record["id"] for record in records] == [f"c{n}" for n in range(16)]
    written = "".join(path.read_text() for path in tmp_path.iterdir())
    assert not key or key not in written + "".join(capfd.readouterr())


@pytest.mark.parametrize(
    "text",
    [f"bad key {KEY}", "x" * 280 + KEY],
    ids=["repeated", "cut"],
)
def test_no_reason_holds_the_key(text: str) -> None:
    """The key is hidden where a server repeats it, and where the reason is cut in its middle."""
    with serving(lambda _: {"error": text}) as (url, _):
        pool = pool_at(section_of(endpoint=url, attempts=1), key=KEY)
        with pytest.raises(Failure, match="sent no answer") as raised:
            pool.endpoints[0]._ask(QUESTION)
    assert KEY[:4] not in str(raised.value)


@pytest.mark.parametrize("wrong", ["a\nb", "a b", "ключ"])
def test_a_key_that_no_header_can_hold_is_refused(wrong: str) -> None:
    """The variable is named and the key is not; a line break at its end is no part of a key."""
    with pytest.raises(ValueError, match=r"variable MY_KEY holds characters") as refused:
        check_key(wrong, "MY_KEY")
    assert wrong not in str(refused.value)
    assert check_key(f"{KEY}\n", "MY_KEY") == KEY


def test_a_redirection_does_not_take_the_key_along() -> None:
    """A host that nobody named does not get the key."""

    class Redirecting(Handler):
        def do_GET(self) -> None:
            self.server.heard.append(dict(self.headers))
            self.send_response(302)
            self.send_header("Location", f"{other.url}/models")
            self.end_headers()

    with serving(echo) as (url, _), faults_before(url) as other, faults_before(url) as proxy:
        proxy.RequestHandlerClass = Redirecting
        # the client asks for the models before it asks for answers
        pool_at(section_of(endpoint=proxy.url), key=KEY)
    assert "Authorization" in proxy.heard[0]
    assert "Authorization" not in other.heard[0]


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("7", 7.0),
        ("0.5", 0.5),
        ("-3", 0.0),
        ("nan", 0.0),
        ("inf", 0.0),
        ("soon", 0.0),
        ("Thu, 01 Jan 2026 00:01:30 GMT", 90.0),
        ("Thu, 01 Jan 2026 00:01:30 -0000", 90.0),
        ("Wed, 31 Dec 2025 23:00:00 GMT", 0.0),
    ],
)
def test_retry_after_has_two_forms(value: str, seconds: float) -> None:
    """It holds seconds, or a date by the server's own clock; anything else is no pause."""
    headers = Message()
    headers["Retry-After"] = value
    headers["Date"] = "Thu, 01 Jan 2026 00:00:00 GMT"
    assert pause_in(headers) == seconds


def test_a_retry_date_without_the_servers_clock_is_read_by_ours() -> None:
    """A reply without `Date` is compared with the time here."""
    headers = Message()
    headers["Retry-After"] = formatdate(time.time() + 100, usegmt=True)
    assert 50 < pause_in(headers) <= 100


@pytest.mark.slow
def test_a_server_is_left_alone_for_as_long_as_it_asks(tiny_target: Target, tmp_path: Path) -> None:
    """No request comes within the pause, though other conversations wait."""
    times: list[float] = []

    def refuse_fifth(number: int, _: dict[str, Any]) -> str | None:
        times.append(time.monotonic())
        return "429" if number == 4 else None

    with serving(echo) as (url, _), faults_before(url, refuse_fifth) as proxy:
        proxy.retry_after = "1"
        assert not regenerate(
            tmp_path / "out",
            jobs_of(16),
            tiny_target,
            proxy.url,
            in_flight=1,
        )
    assert times[5] - times[4] >= 1.0


@pytest.mark.slow
def test_a_conversation_that_failed_waits_before_it_is_asked_again(
    tiny_target: Target, tmp_path: Path
) -> None:
    """The second wait is twice the first, of which at least half is kept; others go on meanwhile."""
    times: list[float] = []
    numbers: list[int] = []
    out = tmp_path / "out"

    def fail_twice(number: int, request: dict[str, Any]) -> str | None:
        if "question 0" not in request["messages"][0]["content"]:
            return None
        times.append(time.monotonic())
        numbers.append(number)
        return "error" if len(times) <= 2 else None

    with serving(echo) as (url, _), faults_before(url, fail_twice) as proxy:
        # the first wait is 1.5 s, and jitter takes off at most half of it
        section = section_of(out, endpoint=proxy.url, in_flight=1)
        begin(out, {})
        pool = pool_at(section, first=1.5)
        assert not answer_all(
            out,
            jobs_of(16),
            pool,
            reader_of(tiny_target),
            section,
        )
    assert times[1] - times[0] >= 0.75
    assert times[2] - times[1] >= 1.5
    assert numbers[1] - numbers[0] > 1


def test_waits_grow_and_differ_by_the_seed() -> None:
    """They double up to a minute, less up to half of it; the same seed waits as long again."""

    def waits_of(seed: int, key: int) -> tuple[float, ...]:
        return tuple(Backoff(seed).seconds(key, n) for n in range(1, 12))

    waits = {waits_of(seed, key) for seed in (0, 1) for key in (0, 1)}
    assert len(waits) == 4
    assert waits_of(0, 0) in waits
    for row in waits:
        for n, wait in enumerate(row):
            longest = min(60, 2.0**n)
            assert longest / 2 <= wait <= longest


def test_failures_together_are_one_rest() -> None:
    """Thirty requests that a dying server drops count once; each failed trial doubles the rest."""
    health = Health(3, 20, Backoff(0))
    away = Failure("away", Kind.AWAY)
    news = [health.failed(away, began=1.0, now=2.0) for _ in range(30)]
    assert news == ["away. The server is asked again in 1 s"] + [None] * 29
    assert health.rests == 1
    assert 0.5 <= health.ready_in(2.0) <= 1.0
    # while one request tries the server, no other does
    assert health.begin()
    assert health.ready_in(9.0) == float("inf")
    health.on_trial = False
    health.failed(away, began=9.0, now=9.0)
    assert health.rests == 2
    assert 1.0 <= health.ready_in(9.0) <= 2.0
    assert not health.is_given_up
    health.failed(away, began=12.0, now=12.0)
    assert health.is_given_up
    # an answer ends the rest
    assert health.answered()
    assert health.ready_in(20.0) == 0
    assert not health.is_given_up


def test_a_pause_that_a_server_asks_for_outlasts_an_answer() -> None:
    """An answer that was on its way does not end it; a pause is printed once, and is an hour at most."""
    health = Health(3, 20, Backoff(0))
    busy = Failure("busy", Kind.BUSY, 90.0)
    assert (
        health.failed(
            busy,
            began=1.0,
            now=2.0,
        )
        == "busy. The server is asked again in 90 s"
    )
    assert health.failed(busy, began=1.0, now=3.0) is None
    assert not health.answered()
    assert health.ready_in(3.0) == 90.0
    assert health.failed(
        Failure("busy", Kind.BUSY, 1e9),
        began=100.0,
        now=100.0,
    )
    assert health.ready_in(100.0) == 3600.0


def plant_some(number: int, request: dict[str, Any]) -> str | None:
    """Plant a fault in half of the requests, and none in the probe."""
    faults = (None, None, "cut", None, "500", "hang up", None, "empty")
    return None if request["max_tokens"] == 1 else faults[number % len(faults)]


@pytest.mark.slow
def test_kills_among_faults_change_nothing(
    tiny_target: Target,
    tiny_target_dir: Path,
    tmp_path: Path,
) -> None:
    """Two faulty servers and a client that is killed, then interrupted, give the file of a quiet run."""
    gate = threading.Semaphore(0)
    is_answering = threading.Event()
    quick_reply = probed(tiny_target)

    def reply(request: dict[str, Any]) -> Any:
        if request["max_tokens"] > 1:
            gate.release()
            time.sleep(0.05)
            is_answering.wait(60)
        return quick_reply(request)

    out = tmp_path / "out.jsonl"
    with (
        serving(reply) as (url, _),
        faults_before(url, plant_some) as first,
        faults_before(url, plant_some) as second,
    ):
        urls = [first.url, second.url]
        command = command_of(tiny_target_dir, tmp_path, urls, 24, attempts=100)
        run = [sys.executable, "-c", RUN_REGENERATE, *command]
        for number, status in ((signal.SIGKILL, -9), (signal.SIGINT, 130)):
            is_answering.set()
            process = subprocess.Popen(run, env={**os.environ, "EAGLE_API_KEY": KEY})
            for _ in range(8):
                assert gate.acquire(timeout=120)
            # the servers hold their answers back for longer than the client may take to end
            is_answering.clear()
            process.send_signal(number)
            assert process.wait(45) == status
            # requests of the dead client that still arrive do not count for the next one
            while gate.acquire(timeout=1):
                pass
        assert 1 <= len(names_in_parts(out)) < 24
        is_answering.set()
        subprocess.run(run, check=True)
        assert first.planted and second.planted
    # the truth: one run without faults and kills
    quiet = tmp_path / "quiet"
    quiet.mkdir()
    with serving(quick_reply) as (url, _):
        main(command_of(tiny_target_dir, quiet, url, 24))
    assert out.read_bytes() == (quiet / "out.jsonl").read_bytes()
