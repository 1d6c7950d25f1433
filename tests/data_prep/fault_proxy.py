"""A proxy in front of a server that plants faults by rule; it knows nothing of the client under test."""

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

# the number of a POST and its request -> the name of a fault
Rule = Callable[[int, dict[str, Any]], str | None]
HANGING = ("hang", "hang mid-body", "hang dripping", "hang in the head")
BODIES = {  # of replies with status 200
    "empty": b'{"choices": []}',
    "error": b'{"error": {"message": "overloaded", "code": 500}}',
    "utf8": b'{"choices": "\xff\xfe"}',
    "html": b"<html>busy</html>",
}
FAULTS = ("429", "500", "503", *HANGING, "hang up", "reset", "cut", *BODIES)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


class Handler(BaseHTTPRequestHandler):
    """Forward a request, or do what the rule says."""

    server: FaultProxy

    def do_GET(self) -> None:
        """Forward what is asked before work."""
        self.server.heard.append(dict(self.headers))
        self.reply(*self.forward(None))

    def do_POST(self) -> None:
        """Forward, or plant a fault."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.heard.append(dict(self.headers))
        # POSTs come from several threads
        with self.server.lock:
            number = self.server.posts
            self.server.posts += 1
        fault = self.server.rule(number, json.loads(body))
        # some faults let the server answer first, as a line that breaks does
        if fault is None:
            self.reply(*self.forward(body))
            return
        self.server.planted[fault] += 1
        if fault.isdigit():
            error = {"error": f"refused {self.headers.get('Authorization')}"}
            self.reply(int(fault), json.dumps(error).encode())
        elif fault in HANGING:
            self.hang(fault)
        elif fault in BODIES:
            self.reply(200, BODIES[fault])
        elif fault != "hang up":
            self.break_off(fault, body)

    def hang(self, fault: str) -> None:
        """Send no whole reply until the proxy stops."""
        drop = None
        if fault == "hang mid-body":
            self.wfile.write(HEAD + b'Content-Length: 999\r\n\r\n{"choices": [')
        elif fault == "hang dripping":
            self.wfile.write(HEAD + b"\r\n")
            drop = b" "
        elif fault == "hang in the head":
            drop = b"X"
        while drop is not None and not self.server.released.wait(0.05):
            self.wfile.write(drop)
        self.server.released.wait(60)

    def break_off(self, fault: str, body: bytes) -> None:
        """Reset the connection, or let the server answer and send half of its answer."""
        if fault == "reset":
            # with a linger of 0 seconds, closing sends RST
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(
                socket.SOL_SOCKET,
                socket.SO_LINGER,
                linger,
            )
            self.connection.close()
            return
        assert fault == "cut"
        _, whole = self.forward(body)
        self.wfile.write(HEAD + f"Content-Length: {len(whole)}\r\n\r\n".encode())
        self.wfile.write(whole[: len(whole) // 2])

    def forward(self, body: bytes | None) -> tuple[int, bytes]:
        """Return the status and body of the server behind."""
        behind = HTTPConnection(self.server.behind, timeout=60)
        headers = {"Content-Type": "application/json"}
        if "Authorization" in self.headers:
            headers["Authorization"] = self.headers["Authorization"]
        try:
            behind.request(
                "POST" if body else "GET",
                self.path,
                body,
                headers,
            )
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

    # a thread that hangs does not keep a test from ending
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, url: str, rule: Rule, port: int = 0) -> None:
        self.behind = urlsplit(url).netloc
        self.rule = rule
        self.posts = 0
        self.retry_after: str | None = "0"
        self.planted: Counter[str] = Counter()
        self.heard: list[dict[str, str]] = []
        self.lock = threading.Lock()
        self.released = threading.Event()
        super().__init__(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.thread = threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )
        self.thread.start()

    def stop(self) -> None:
        """Take no more connections, and let go what hangs."""
        self.released.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, *_: Any) -> None:
        """Ignore clients that hung up."""


@contextmanager
def faults_before(url: str, rule: Rule = lambda *_: None) -> Iterator[FaultProxy]:
    """Yield a proxy in front of the server at this address."""
    proxy = FaultProxy(url, rule)
    try:
        yield proxy
    finally:
        proxy.stop()
