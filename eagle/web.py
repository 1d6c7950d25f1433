"""Requests to servers that end in time, and addresses whose users and keys are shown to nobody."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from io import BufferedReader, RawIOBase
from time import monotonic
from typing import Any
from urllib.request import HTTPHandler, HTTPSHandler, OpenerDirector, Request, build_opener

# a password may hold a slash that was not escaped: what follows a colon and is no port belongs to it
USER = re.compile(r"(?<=://)(?:[^/\s]*@|[^/\s:@\[]+:(?!\d+(?:[/\s]|$))\S*@)")


def hide_users(text: str) -> str:
    """Return the text with asterisks in place of users and passwords in its addresses."""
    return USER.sub("***@", text)


def check_address(address: str, name: str, advice: str) -> str:
    """Return the address of a server; refuse one that holds a user or a key, without showing it.

    Args:
        address: The address.
        name: What messages call it.
        advice: What to do where it holds a user or a key, as a refusal says it.
    """
    if not address.lower().startswith(("http://", "https://")):
        # the part before an @ may be a key, so it is not shown
        shown = "no address" if "@" in address else repr(address)
        raise ValueError(f"{name} is {shown}, expected an address such as http://localhost:8000/v1")
    if USER.search(address):
        raise ValueError(
            f"{name} holds a user or a key before its @, where others would read it: {advice}"
        )
    return address


class ReaderUntil(RawIOBase):
    """The raw stream of a socket, whose reads end at a deadline even if bytes keep coming."""

    def __init__(self, sock: Any, raw: Any, deadline: float) -> None:
        self.sock = sock
        self.raw = raw  # the raw stream that reads from the socket
        self.deadline = deadline  # as `monotonic` tells the time, in seconds

    def readable(self) -> bool:
        """Whether it can be read."""
        return True

    def readinto(self, buffer: Any) -> int | None:
        """Receive some bytes; a TimeoutError at the deadline."""
        left = self.deadline - monotonic()
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        self.sock.settimeout(left)
        return self.raw.readinto(buffer)

    def close(self) -> None:
        """Close the socket's file, too."""
        self.raw.close()
        super().close()


class ResponseUntil(HTTPResponse):
    """A response that must be whole by a deadline (a time of `monotonic`), its head as well as its body."""

    def __init__(self, sock: Any, *args: Any, deadline: float, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        # the file that a response is read from: its raw stream now checks the deadline before each read
        self.fp = BufferedReader(ReaderUntil(sock, self.fp.detach(), deadline))


def make_opener(connect_seconds: float | None = None) -> OpenerDirector:
    """Return an opener for which `timeout` limits a whole request, and `connect_seconds` the time to connect.

    The timeout of Python's own opener limits a silence: a server that sends a byte a second would never end.
    """

    def connect(connection: Any, connect_socket: Callable[[], None]) -> None:
        """Connect within `connect_seconds`, and give the response the deadline of the whole request."""
        seconds = connection.timeout
        # a connection serves one request, whose deadline begins here and holds for the response, too
        connection.response_class = partial(ResponseUntil, deadline=monotonic() + seconds)
        connection.timeout = seconds if connect_seconds is None else connect_seconds
        connect_socket()
        connection.sock.settimeout(seconds)

    class Plain(HTTPConnection):
        def connect(self) -> None:
            connect(self, super().connect)

    class Secure(HTTPSConnection):
        def connect(self) -> None:
            connect(self, super().connect)

    class PlainHandler(HTTPHandler):
        def http_open(self, request: Request) -> Any:
            return self.do_open(Plain, request)

    class SecureHandler(HTTPSHandler):
        def https_open(self, request: Request) -> Any:
            return self.do_open(Secure, request)

    return build_opener(PlainHandler(), SecureHandler())
