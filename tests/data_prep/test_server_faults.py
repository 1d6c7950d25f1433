"""Whatever a server does wrong, nothing is lost and nothing is doubled: the file is that of a run without faults."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from email.message import Message
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from data_prep.dialogues import Jobs, Reader, make_names_unique
from data_prep.parts import begin, join_parts
from data_prep.regenerate import answer_all, main
from data_prep.servers.health import Backoff, Health
from data_prep.servers.transport import Failure, Kind, Transport, check_key, pause_in
from eagle import Target
from eagle.log import script
from eagle.recipe import DataSection
from tests.data_prep.fault_proxy import FAULTS, faults_before
from tests.data_prep.stub_servers import TINY, completion, echo, pool_at, section_of, serving, talk

KEY = "sk-a/very+secret=key"
TURNS = ("user: question {}", "assistant: old", "user: more {}", "assistant: older")


def jobs_of(count: int) -> Jobs:
    """Conversations of one or two answers."""
    return Jobs(
        make_names_unique(
            talk(f"c{n}", *(turn.format(n) for turn in TURNS[: 2 + 2 * (n % 2)]))
            for n in range(count)
        )
    )


def regenerate(
    out: Path, jobs: Jobs, target: Target, endpoint: Any, **fields: Any
) -> dict[str, str]:
    """Answer the jobs by these servers; why each failed one did."""
    section = section_of(out, endpoint=endpoint, **{"in_flight": 3, "attempts": 8, **fields})
    begin(out, {})
    return answer_all(
        out,
        jobs,
        pool_at(section, key=KEY),
        Reader(target.tokenizer, DataSection(train="-")),
        section,
    )


def lines_of(out: Path) -> list[str]:
    """The ids of all lines of the parts."""
    parts = sorted(Path(f"{out}.parts").glob("*"))
    return [json.loads(line)["id"] for part in parts for line in part.read_text().splitlines()]


def joined(out: Path, jobs: Jobs) -> bytes:
    """The file that the parts make."""
    join_parts(out, [name for name, _ in jobs])
    return out.read_bytes()


@pytest.fixture(scope="module")
def whole(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of sixteen conversations that nothing disturbs."""
    out = tmp_path_factory.mktemp("whole") / "out.jsonl"
    with serving(echo) as (url, _):
        assert not regenerate(out, jobs_of(16), tiny_target, url)
    return joined(out, jobs_of(16))


@pytest.mark.quick("500", "hang")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_changes_nothing(
    fault: str, whole: bytes, tiny_target: Target, tmp_path: Path
) -> None:
    """Planted in every third request, which may be one conversation's each time; a hanging one costs the timeout."""
    out, jobs = tmp_path / "out.jsonl", jobs_of(16)
    every = 9 if fault.startswith("hang") else 3
    with (
        serving(echo) as (url, asked),
        faults_before(url, lambda n, _: fault if n % every == 1 else None) as proxy,
    ):
        timeout = 0.5 if every == 9 else 60
        assert not regenerate(out, jobs, tiny_target, proxy.url, timeout=timeout, attempts=100)
        assert proxy.planted[fault] >= 2
        if every == 3:  # a reply that is cut off was given, and is asked for again
            assert len(asked) == 24 + (proxy.planted[fault] if fault == "cut" else 0)
    assert sorted(lines_of(out)) == sorted(name for name, _ in jobs)
    assert joined(out, jobs) == whole
    assert KEY not in (tmp_path / "out.jsonl.settings").read_text() + out.read_text()


def test_what_fails_too_often_is_counted_with_its_reason(
    tiny_target: Target, tmp_path: Path
) -> None:
    """One conversation always fails; a rerun asks for it alone, and finds it well."""
    out, jobs = tmp_path / "out.jsonl", jobs_of(6)

    def poison(_: int, request: dict[str, Any]) -> str | None:
        return "error" if "question 4" in request["messages"][0]["content"] else None

    with serving(echo) as (url, asked), faults_before(url, poison) as proxy:
        failed = regenerate(out, jobs, tiny_target, proxy.url, attempts=4)
        assert (
            list(failed) == ["c4"]
            and "overloaded" in failed["c4"]
            and "(asked 4 times)" in failed["c4"]
        )
        assert proxy.planted["error"] == 4 and len(lines_of(out)) == 5
        proxy.rule = lambda *_: None
        asked.clear()
        assert not regenerate(out, jobs, tiny_target, proxy.url)
        assert len(asked) == 1 and sorted(lines_of(out)) == [f"c{n}" for n in range(6)]


@pytest.mark.slow
def test_a_hung_server_is_noticed_within_its_timeout(
    tiny_target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is said at the first silence; after so many in a row nothing more is asked of it."""
    with serving(echo) as (url, asked), faults_before(url, lambda *_: "hang") as proxy:
        failed = regenerate(
            tmp_path / "out", jobs_of(40), tiny_target, proxy.url, timeout=0.5, attempts=3
        )
        assert len(failed) == 40 and not asked and proxy.posts <= 3 + 2
    printed = capsys.readouterr().err
    assert (
        printed.count("no whole reply in 0.5 s: is it stuck?") == 1
        and "raise regenerate.timeout" in printed
    )
    assert all("no whole reply in 0.5 s" in reason for reason in failed.values())


def test_a_connection_that_never_stands_has_a_limit_of_its_own() -> None:
    """A socket that takes no more connections, though the timeout of answers is long."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        section = section_of(Path("-"), connect_timeout=0.2, timeout=50)
        begun = time.monotonic()
        with pytest.raises(Failure, match="timed out") as raised:
            Transport(f"http://127.0.0.1:{full.getsockname()[1]}/v1", section).send("/models")
        assert raised.value.kind is Kind.AWAY and time.monotonic() - begun < 30
        for one in waiting:
            one.close()


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("http://ann:sk-secret@host:8000/v1", "holds a user or a key"),
        ("http://sk-secret@host/v1", "holds a user or a key"),
        ("http://ann:sk/sk-secret@host/v1", "holds a user or a key"),
        ("ann:sk-secret@host/v1", "expected an address such as"),
        ({"one": "http://ann:sk-secret@host/v1"}, "regenerate.endpoint"),
        (["http://host/v1", "https://ann:sk-secret@host/v1"], "holds a user or a key"),
    ],
)
def test_a_key_in_an_address_is_refused_and_not_shown(
    address: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A recipe goes to runs and cards, and so does what it holds: the key belongs into the environment."""
    with pytest.raises(SystemExit):
        script(main, [*recipe_of(tmp_path, tmp_path, address, 1)])
    printed = "".join(capsys.readouterr())
    assert said in printed and "secret" not in printed
    with pytest.raises(SystemExit):
        script(main, [str(TINY), f"regenerate={{endpoint: {address}, wrong: [}}"])
    assert "secret" not in "".join(capsys.readouterr()) or "://" not in str(address)


def test_a_key_may_be_that_of_a_user() -> None:
    """`Basic` and base64 in the variable, for servers behind such a gate; it is hidden as any key is."""
    with serving(lambda _: {"error": "no, c2VjcmV0"}) as (url, _), faults_before(url) as proxy:
        pool = pool_at(section_of(Path("-"), endpoint=proxy.url, attempts=1), key="Basic c2VjcmV0")
        with pytest.raises(Failure) as raised:
            pool.endpoints[0]._ask(prompt())
        assert proxy.heard[-1]["Authorization"] == "Basic c2VjcmV0" and "c2VjcmV0" not in str(
            raised.value
        )


def recipe_of(target_dir: Path, folder: Path, url: Any, count: int, **fields: Any) -> list[str]:
    """The command line of a regeneration of short conversations."""
    lines = ({"id": name, "messages": job.messages} for name, job in jobs_of(count))
    source = folder / "source.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    section = {
        "source": str(source),
        "out": str(folder / "out.jsonl"),
        "endpoint": url,
        "in_flight": 2,
        **fields,
    }
    return [str(TINY), f"target.path={target_dir}/target", f"regenerate={json.dumps(section)}"]


def probed(target: Target) -> Any:
    """A server's reply that counts the probe conversation as the target's tokenizer does."""
    from data_prep.servers.endpoint import PROBE

    length = len(Reader(target.tokenizer, DataSection(train="-")).ids(PROBE, None))
    return lambda request: (
        completion("x", prompt_tokens=length) if request["max_tokens"] == 1 else echo(request)
    )


@pytest.mark.quick("403-sk-a/very+secret=key")
@pytest.mark.parametrize(("status", "key"), [("401", KEY), ("403", KEY), ("401", "")])
def test_a_key_that_is_refused_ends_the_run_at_once(
    status: str, key: str, tiny_target: Target, tiny_target_dir: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """In a sentence that names the variable and not the key; what is answered is kept, and nothing holds the key."""
    monkeypatch.setenv("MY_KEY", key) if key else monkeypatch.delenv("MY_KEY", raising=False)
    with serving(probed(tiny_target)) as (url, asked):
        with faults_before(url, lambda number, _: status if number >= 5 else None) as proxy:
            command = recipe_of(tiny_target_dir, tmp_path, proxy.url, 16, key_variable="MY_KEY")
            with pytest.raises(
                ValueError,
                match=rf"{status}, .*variable MY_KEY, which is {'' if key else 'not '}set:",
            ):
                main(command)
            assert proxy.posts <= 5 + 2 and 1 <= len(lines_of(tmp_path / "out.jsonl")) < 16
            assert all(
                heads.get("Authorization") == (f"Bearer {key}" if key else None)
                for heads in proxy.heard
            )
            proxy.rule = lambda *_: (
                None if proxy.planted["500"] else "500"
            )  # whose text repeats the key
            main(command)
        assert sorted(turn["max_tokens"] == 1 for turn in asked).count(True) == 2
    assert [json.loads(line)["id"] for line in (tmp_path / "out.jsonl").open()] == [
        f"c{n}" for n in range(16)
    ]
    printed = "".join(capfd.readouterr())
    assert not key or key not in printed + "".join(path.read_text() for path in tmp_path.iterdir())


def test_no_reason_holds_the_key() -> None:
    """Not where a server repeats it, nor where the reason is cut; not in the list of settings either."""
    for text in (f"bad key {KEY}", "x" * 280 + KEY):
        with serving(lambda _, text=text: {"error": text}) as (url, _):
            pool = pool_at(section_of(Path("-"), endpoint=url, attempts=1), key=KEY)
            with pytest.raises(Failure) as raised:
                pool.endpoints[0]._ask(next(iter([prompt()])))
        assert KEY[:4] not in str(raised.value) and "sent no answer" in str(raised.value)
    for wrong in ("a\nb", "a b", "ключ"):
        with pytest.raises(ValueError, match=r"variable MY_KEY holds characters") as refused:
            check_key(wrong, "MY_KEY")
        assert wrong not in str(refused.value)
    assert check_key(f"{KEY}\n", "MY_KEY") == KEY


def prompt() -> Any:
    """A question."""
    from data_prep.servers.answers import Prompt

    return Prompt([{"role": "user", "content": "a"}], None, [1], 4, 7)


def test_a_redirection_does_not_take_the_key_along() -> None:
    """To a host that nobody named."""
    with serving(echo) as (url, _), faults_before(url) as other, faults_before(url) as proxy:
        proxy.RequestHandlerClass = redirecting(proxy.RequestHandlerClass, f"{other.url}/models")
        pool_at(section_of(Path("-"), endpoint=proxy.url), key=KEY)
        assert "Authorization" in proxy.heard[0] and "Authorization" not in other.heard[0]


def redirecting(handler: Any, where: str) -> Any:
    """A handler whose GETs are redirected."""

    class Redirecting(handler):  # type: ignore[misc]
        def do_GET(self) -> None:
            self.server.heard.append(dict(self.headers))
            self.send_response(302)
            self.send_header("Location", where)
            self.end_headers()

    return Redirecting


@pytest.mark.parametrize(
    ("asked", "seconds"),
    [
        ("7", 7.0), ("0.5", 0.5), ("-3", 0.0), ("nan", 0.0), ("inf", 0.0), ("soon", 0.0), ("", 0.0),
        ("Thu, 01 Jan 2026 00:01:30 GMT", 90.0), ("Thu, 01 Jan 2026 00:01:30 -0000", 90.0),
        ("Wed, 31 Dec 2025 23:00:00 GMT", 0.0),
    ],
)  # fmt: skip
def test_retry_after_has_two_forms(asked: str, seconds: float) -> None:
    """Seconds, or a date, which is read by the server's own clock; what is neither is no pause."""
    headers = Message()
    headers["Retry-After"], headers["Date"] = asked, "Thu, 01 Jan 2026 00:00:00 GMT"
    assert pause_in(headers) == seconds
    without = Message()
    without["Retry-After"] = formatdate(time.time() + 100, usegmt=True)
    assert 50 < pause_in(without) <= 100


@pytest.mark.slow
def test_a_server_is_left_alone_for_as_long_as_it_asks(tiny_target: Target, tmp_path: Path) -> None:
    """No request comes within the pause, though other conversations wait."""
    times: list[float] = []

    def rule(number: int, _: dict[str, Any]) -> str | None:
        times.append(time.monotonic())
        return "429" if number == 4 else None

    with serving(echo) as (url, _), faults_before(url, rule) as proxy:
        proxy.retry_after = "1"
        assert not regenerate(tmp_path / "out", jobs_of(16), tiny_target, proxy.url, in_flight=1)
    assert times[5] - times[4] >= 1.0


@pytest.mark.slow
def test_a_conversation_that_failed_waits_before_it_is_asked_again(
    tiny_target: Target, tmp_path: Path
) -> None:
    """At least half of the wait that is due, and twice that the next time; others go on meanwhile."""
    times: list[float] = []
    between: list[int] = []

    def rule(number: int, request: dict[str, Any]) -> str | None:
        if "question 0" not in request["messages"][0]["content"]:
            return None
        times.append(time.monotonic())
        between.append(number)
        return "error" if len(times) <= 2 else None

    with serving(echo) as (url, _), faults_before(url, rule) as proxy:
        section = section_of(tmp_path / "out", endpoint=proxy.url, in_flight=1)
        begin(tmp_path / "out", {})
        reader = Reader(tiny_target.tokenizer, DataSection(train="-"))
        assert not answer_all(
            tmp_path / "out", jobs_of(16), pool_at(section, first=1.5), reader, section
        )
    assert (
        times[1] - times[0] >= 0.75 and times[2] - times[1] >= 1.5 and between[1] - between[0] > 1
    )


def test_waits_grow_and_differ_by_the_seed() -> None:
    """Doubled each time up to a minute, less up to half; the same seed waits as long again."""
    waits = [
        [Backoff(seed).seconds(key, n) for n in range(1, 12)] for seed in (0, 1) for key in (0, 1)
    ]
    for one in waits:
        assert all(min(60, 2.0**n) / 2 <= wait <= min(60, 2.0**n) for n, wait in enumerate(one))
    assert len({tuple(one) for one in waits}) == 4
    assert waits[0] == [Backoff(0).seconds(0, n) for n in range(1, 12)]


def test_failures_together_are_one_rest() -> None:
    """Thirty requests that a dying server drops count once; each failed trial doubles the rest; an answer ends it."""
    health, away = Health(3, 20, Backoff(0)), Failure("away", Kind.AWAY)
    news = [health.failed(away, began=1.0, now=2.0) for _ in range(30)]
    assert news == ["away. The server is asked again in 1 s"] + [None] * 29
    assert health.rests == 1 and 0.5 <= health.ready_in(2.0) <= 1.0
    assert health.begin() and health.ready_in(9.0) == float("inf")  # one trial at a time
    health.on_trial = False
    health.failed(away, began=9.0, now=9.0)
    assert health.rests == 2 and 1.0 <= health.ready_in(9.0) <= 2.0 and not health.is_given_up
    health.failed(away, began=12.0, now=12.0)
    assert health.is_given_up
    assert health.answered() and health.ready_in(20.0) == 0 and not health.is_given_up


def test_a_pause_that_a_server_asks_for_outlasts_an_answer() -> None:
    """One that was on its way; a long pause is told, once."""
    health, busy = Health(3, 20, Backoff(0)), Failure("busy", Kind.BUSY, 90.0)
    assert health.failed(busy, began=1.0, now=2.0) == "busy. The server is asked again in 90 s"
    assert health.failed(busy, began=1.0, now=3.0) is None
    assert not health.answered() and health.ready_in(3.0) == 90.0
    assert (
        health.failed(Failure("busy", Kind.BUSY, 1e9), began=100.0, now=100.0)
        and health.ready_in(100.0) == 3600.0
    )


@pytest.mark.slow
def test_kills_among_faults_change_nothing(
    tiny_target: Target, tiny_target_dir: Path, tmp_path: Path
) -> None:
    """Two faulty servers, and a client that SIGKILL and SIGINT end in turn: the file of a run without any of that."""
    heard: Counter[str] = Counter()
    faults = [None, None, "cut", None, "500", "hang up", None, "empty"]
    gate, reply = threading.Semaphore(0), probed(tiny_target)

    def answer(request: dict[str, Any]) -> Any:
        if request["max_tokens"] > 1:
            heard[json.dumps(request["messages"])] += 1
            gate.release()
            time.sleep(0.05)
        return reply(request)

    def rule(number: int, request: dict[str, Any]) -> str | None:
        return None if request["max_tokens"] == 1 else faults[number % len(faults)]

    with (
        serving(answer) as (url, _),
        faults_before(url, rule) as one,
        faults_before(url, rule) as other,
    ):
        command = [
            *recipe_of(tiny_target_dir, tmp_path, [one.url, other.url], 24),
            "regenerate.attempts=100",
        ]
        run = [
            sys.executable,
            "-c",
            "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); ",
        ]
        run[-1] += (
            "from eagle.log import script; from data_prep.regenerate import main; script(main)"
        )
        for number in (signal.SIGKILL, signal.SIGINT):
            process = subprocess.Popen([*run, *command], env={**os.environ, "EAGLE_API_KEY": KEY})
            for _ in range(8):
                assert gate.acquire(timeout=120)
            process.send_signal(number)
            assert process.wait(60) == (130 if number == signal.SIGINT else -signal.SIGKILL)
            while gate.acquire(timeout=1):
                pass
        assert 1 <= len(lines_of(tmp_path / "out.jsonl")) < 24
        subprocess.run([*run, *command], check=True)
        assert one.planted and other.planted
    quiet = tmp_path / "quiet"
    quiet.mkdir()
    with serving(reply) as (url, _):
        main(recipe_of(tiny_target_dir, quiet, url, 24))
    assert (tmp_path / "out.jsonl").read_bytes() == (quiet / "out.jsonl").read_bytes()
