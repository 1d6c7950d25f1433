"""Servers that answer by a function, and the sections, jobs and command lines that tests send there."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from data_prep.chats.records import Conversation
from data_prep.dialogues import Jobs, Reader, converse, make_names_unique
from data_prep.parts import begin, join_parts
from data_prep.regenerate import answer_all
from data_prep.servers.endpoint import PROBE, Endpoint
from data_prep.servers.health import Backoff
from data_prep.servers.pool import Pool
from eagle import Target
from eagle.recipe import DataSection, RegenerateSection, TargetSection

TINY = Path(__file__).parents[2] / "recipes/tiny/eagle1.yaml"
NEW_TOKENS = 16
Reply = Callable[[dict[str, Any]], Any]
# a shell's background children ignore SIGINT, so Python's own handler is set again
RUN_REGENERATE = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from eagle.log import script
from data_prep.regenerate import main
script(main)
"""


@contextmanager
def serving(
    reply: Reply,
    model: str = "target",
    **facts: Any,
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the address of a server and the requests it gets.

    A reply is JSON, text, an HTTP status, or None to hang up.
    """
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def send(self, body: Any) -> None:
            if body is None:
                return
            # a number is the status of an error
            status = 200
            if isinstance(body, int):
                status = body
                body = "busy"
            elif not isinstance(body, str):
                body = json.dumps(body)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def do_GET(self) -> None:
            assert self.path == "/v1/models"
            self.send({"data": [{"id": "another"}, {"id": model, **facts}]})

        def do_POST(self) -> None:
            assert self.path == "/v1/chat/completions"
            length = int(self.headers["Content-Length"])
            request = json.loads(self.rfile.read(length))
            asked.append(request)
            self.send(reply(request))

        def log_message(self, *_: Any) -> None:
            pass

    # port 0 lets the system choose a free one
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def completion(
    text: Any,
    finish: Any = "stop",
    prompt_tokens: int | None = 0,
    **message: Any,
) -> dict[str, Any]:
    """Return what an OpenAI-compatible server replies."""
    choice = {
        "message": {
            "role": "assistant",
            "content": text,
            **message,
        },
        "finish_reason": finish,
    }
    return {"choices": [choice], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": 3}}


def echo(request: dict[str, Any]) -> dict[str, Any]:
    """Reply with an answer that depends on all that was said before."""
    return completion(f"heard {[turn['content'] for turn in request['messages']]}")


def probe_length(target: Target) -> int:
    """Return the number of tokens of the probe conversation, by which a server's tokenizer is checked."""
    return len(reader_of(target).ids(PROBE, None))


def probed(target: Target, reply: Reply = echo) -> Reply:
    """Return a server's reply that counts the probe conversation as the target's tokenizer does."""
    length = probe_length(target)

    def answer(request: dict[str, Any]) -> Any:
        if request["max_tokens"] == 1:
            return completion("x", prompt_tokens=length)
        return reply(request)

    return answer


def section_of(out: Path = Path("-"), **fields: Any) -> RegenerateSection:
    """Return the recipe's section."""
    defaults = {
        "source": "-",
        "out": str(out),
        "max_new_tokens": NEW_TOKENS,
    }
    return RegenerateSection(**{**defaults, **fields})


def reader_of(target: Target, **data: Any) -> Reader:
    """Return what reads conversations as the target does."""
    return Reader(
        target.tokenizer,
        DataSection(train="-", **data),
        target.max_positions,
    )


def talk(name: str, *turns: str, **fields: Any) -> Conversation:
    """Return a conversation of `role: text`."""
    # "user: a" is a turn of the user
    split = (turn.partition(": ") for turn in turns)
    messages = [{"role": role, "content": text} for role, _, text in split]
    return Conversation(name, messages, **fields)


def jobs_of(count: int) -> Jobs:
    """Return conversations of one answer and two answers in turn."""
    turns = ("user: question {}", "assistant: old", "user: more {}", "assistant: older")
    talks = []
    for number in range(count):
        spoken = [turn.format(number) for turn in turns[: 2 + 2 * (number % 2)]]
        talks.append(talk(f"c{number}", *spoken))
    return Jobs(make_names_unique(talks))


def pool_at(
    section: RegenerateSection,
    path: str = "some/target",
    key: str = "",
    first: float = 0.0,
    **kwargs: Any,
) -> Pool:
    """Return the servers of a section, asked again without a wait, with these arguments of the template."""
    assert section.endpoint
    addresses = section.endpoint
    if isinstance(addresses, str):
        addresses = (addresses,)
    # a first wait of 0 s makes all waits 0
    backoff = Backoff(section.seed, first)
    endpoints = []
    for address in addresses:
        target = TargetSection(path=path)
        endpoint = Endpoint(
            address,
            target,
            section,
            kwargs,
            backoff=backoff,
            key=key,
        )
        endpoints.append(endpoint)
    return Pool(endpoints)


def regenerate(
    out: Path,
    jobs: Jobs,
    target: Target,
    endpoint: Any,
    share: tuple[int, ...] = (),
    **fields: Any,
) -> dict[str, str]:
    """Answer the jobs, or one process's share of them, by these servers; return why each failed job did."""
    key = fields.pop("key", "")
    section = section_of(
        out,
        endpoint=endpoint,
        **{"in_flight": 3, "attempts": 8, **fields},
    )
    # the parts need a note of the settings that they were made with
    begin(out, {})
    return answer_all(
        out,
        jobs,
        pool_at(section, key=key),
        reader_of(target),
        section,
        *share,  # type: ignore[arg-type]  # index and count, at most
    )


def run_one(
    pool: Any,
    target: Target,
    conversation: Conversation,
    data: Any = None,
    **fields: Any,
) -> dict[str, Any] | str:
    """Return the line of a conversation that a pool answers, or why it failed."""
    reader = reader_of(target, **(data or {}))
    jobs = [
        (
            "name",
            converse(
                "name",
                conversation,
                reader,
                section_of(**fields),
            ),
        )
    ]
    ((name, outcome),) = pool.run(iter(jobs))
    assert name == "name"
    return outcome


def run_talk(
    target: Target,
    conversation: Conversation,
    *replies: Any,
    data: Any = None,
    **fields: Any,
) -> dict[str, Any]:
    """Return the line of a conversation to which a server answers with these replies."""
    # one reply for each question, in order
    queue = list(replies)
    with serving(lambda _: queue.pop(0)) as (url, _):
        pool = pool_at(
            section_of(
                endpoint=url,
                in_flight=1,
                attempts=1,
            )
        )
        line = run_one(pool, target, conversation, data, **fields)
    assert isinstance(line, dict), line
    assert not queue
    return line


def names_in_parts(out: Path) -> list[str]:
    """Return the ids of all lines of the parts."""
    # parts may belong to several processes
    lines = []
    for part in sorted(Path(f"{out}.parts").glob("*")):
        lines += part.read_text().splitlines()
    return [json.loads(line)["id"] for line in lines]


def join_answers(out: Path, jobs: Jobs) -> bytes:
    """Return the file that the parts make."""
    join_parts(out, jobs.names)
    return out.read_bytes()


def write_records(path: Path, records: Iterable[Any]) -> Path:
    """Write records as JSON lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read_records(path: Path) -> list[Any]:
    """Return the records of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def command_of(
    target_dir: Path,
    folder: Path,
    endpoint: Any,
    count: int,
    **fields: Any,
) -> list[str]:
    """Return the command line that regenerates so many short conversations."""
    # the jobs above as a source
    records = [{"id": name, "messages": job.messages} for name, job in jobs_of(count)]
    source = write_records(folder / "source.jsonl", records)
    section = {
        "source": str(source),
        "out": str(folder / "out.jsonl"),
        "endpoint": endpoint,
    }
    section |= {"in_flight": 2, **fields}
    return [str(TINY), f"target.path={target_dir}/target", f"regenerate={json.dumps(section)}"]
