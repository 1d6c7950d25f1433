"""A proxy that stands before a server and plants faults by rule; it knows nothing of the client under test."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

Rule = Callable[
    [int, dict[str, Any]], str | None
]  # the number of a POST and its request -> the name of a fault
HANGING = ("hang", "hang mid-body", "hang dripping", "hang in the head")
FAULTS = (
    "429",
    "500",
    "503",
    *HANGING,
    "hang up",
    "reset",
    "cut",
    "empty",
    "error",
    "utf8",
    "html",
)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


class Handler(BaseHTTPRequestHandler):
    """Forward a request, or do what the rule says."""

    server: FaultProxy

    def do_GET(self) -> None:
        """What is asked before work is forwarded."""
        self.server.heard.append(dict(self.headers))
        self.reply(*self.forward(None))

    def do_POST(self) -> None:
        """Forward, or plant a fault; some let the server answer first, as a line that breaks does."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.heard.append(dict(self.headers))
        with self.server.lock:
            number = self.server.posts
            self.server.posts += 1
        fault = self.server.rule(number, json.loads(body))
        if fault is None:
            return self.reply(*self.forward(body))
        self.server.planted[fault] += 1
        if fault.isdigit():
            return self.reply(
                int(fault),
                json.dumps({"error": f"refused {self.headers.get('Authorization')}"}).encode(),
            )
        if fault in HANGING:
            if fault == "hang mid-body":
                self.wfile.write(HEAD + b'Content-Length: 999\r\n\r\n{"choices": [')
            drop = {"hang dripping": b" ", "hang in the head": b"X"}.get(fault)
            if fault == "hang dripping":
                self.wfile.write(HEAD + b"\r\n")
            while drop is not None and not self.server.released.wait(0.05):
                self.wfile.write(drop)
            self.server.released.wait(60)
        elif fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        elif fault == "cut":
            _, whole = self.forward(body)
            self.wfile.write(
                HEAD + f"Content-Length: {len(whole)}\r\n\r\n".encode() + whole[: len(whole) // 2]
            )
        elif fault != "hang up":
            texts = {
                "empty": b'{"choices": []}',
                "error": b'{"error": {"message": "overloaded", "code": 500}}',
            }
            self.reply(
                200,
                texts.get(
                    fault, b'{"choices": "\xff\xfe"}' if fault == "utf8" else b"<html>busy</html>"
                ),
            )

    def forward(self, body: bytes | None) -> tuple[int, bytes]:
        """The status and body of the server behind."""
        behind = HTTPConnection(self.server.behind, timeout=60)
        try:
            key = self.headers["Authorization"]
            headers = {
                "Content-Type": "application/json",
                **({"Authorization": key} if key else {}),
            }
            behind.request("POST" if body else "GET", self.path, body, headers)
            reply = behind.getresponse()
            return reply.status, reply.read()
        finally:
            behind.close()

    def reply(self, status: int, body: bytes) -> None:
        """Send a reply."""
        with suppress(OSError):
            self.send_response(status)
            if status in (429, 503) and self.server.retry_after is not None:
                self.send_header("Retry-After", self.server.retry_after)
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


class FaultProxy(ThreadingHTTPServer):
    """A server whose rule may change, and that may be stopped and started again at its port."""

    daemon_threads, allow_reuse_address, request_queue_size = True, True, 64

    def __init__(self, url: str, rule: Rule, port: int = 0) -> None:
        self.behind, self.rule = urlsplit(url).netloc, rule
        self.posts, self.retry_after = 0, "0"
        self.planted: Counter[str] = Counter()
        self.heard: list[dict[str, str]] = []
        self.lock, self.released = threading.Lock(), threading.Event()
        super().__init__(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.thread = threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )
        self.thread.start()

    def stop(self) -> None:
        """Take no more connections; what hangs is let go."""
        self.released.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, *_: Any) -> None:
        """A client that hung up is no error here."""


@contextmanager
def faults_before(url: str, rule: Rule = lambda *_: None) -> Iterator[FaultProxy]:
    """A proxy before the server at this address."""
    proxy = FaultProxy(url, rule)
    try:
        yield proxy
    finally:
        proxy.stop()
