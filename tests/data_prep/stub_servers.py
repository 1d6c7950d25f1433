"""OpenAI-compatible servers that answer by a function, and the sections and conversations that tests send there."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from data_prep.chats.records import Conversation
from data_prep.servers.endpoint import Endpoint
from data_prep.servers.health import Backoff
from data_prep.servers.pool import Pool
from eagle.recipe import RegenerateSection, TargetSection

TINY = Path(__file__).parents[2] / "recipes/tiny/eagle1.yaml"
NEW_TOKENS = 16
Reply = Callable[[dict[str, Any]], Any]


@contextmanager
def serving(
    reply: Reply, model: str = "target", **facts: Any
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The address of a server, and what it was asked; a reply is JSON, text, an HTTP status, or None to hang up."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def send(self, body: Any) -> None:
            if body is None:
                return
            self.send_response(body if isinstance(body, int) else 200)
            self.end_headers()
            text = (
                body
                if isinstance(body, str)
                else "busy"
                if isinstance(body, int)
                else json.dumps(body)
            )
            self.wfile.write(text.encode())

        def do_GET(self) -> None:
            assert self.path == "/v1/models"
            self.send({"data": [{"id": "another"}, {"id": model, **facts}]})

        def do_POST(self) -> None:
            assert self.path == "/v1/chat/completions"
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(request)
            self.send(reply(request))

        def log_message(self, *_: Any) -> None:
            pass

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
    text: str | None, finish: str = "stop", prompt_tokens: int = 0, **message: Any
) -> dict[str, Any]:
    """What an OpenAI-compatible server replies."""
    choice = {"message": {"role": "assistant", "content": text, **message}, "finish_reason": finish}
    return {"choices": [choice], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": 3}}


def echo(request: dict[str, Any]) -> dict[str, Any]:
    """An answer that depends on all that was said before."""
    return completion(f"heard {[turn['content'] for turn in request['messages']]}")


def section_of(out: Path, **fields: Any) -> RegenerateSection:
    """The recipe's section."""
    return RegenerateSection(
        **{"source": "-", "out": str(out), "max_new_tokens": NEW_TOKENS, **fields}
    )


def talk(name: str, *turns: str, **fields: Any) -> Conversation:
    """A conversation of `role: text`."""
    split = (turn.partition(": ") for turn in turns)
    return Conversation(
        name, [{"role": role, "content": text} for role, _, text in split], **fields
    )


def pool_at(
    section: RegenerateSection,
    path: str = "some/target",
    key: str = "",
    first: float = 0.0,
    **kwargs: Any,
) -> Pool:
    """The servers of a section, asked again without a wait, and with these arguments of the template."""
    assert section.endpoint
    addresses = [section.endpoint] if isinstance(section.endpoint, str) else section.endpoint
    target, backoff = TargetSection(path=path), Backoff(section.seed, first)
    return Pool([Endpoint(address, target, section, kwargs, backoff, key) for address in addresses])
