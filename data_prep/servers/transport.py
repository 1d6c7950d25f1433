"""One request to a server, with its key and its limits of time: what goes wrong is named, and the key never is."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import datetime, timezone
from email.message import Message
from email.utils import parsedate_to_datetime
from enum import Enum
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request

from eagle.recipe import RegenerateSection
from eagle.web import hide_users, make_opener

SHOWN = 300  # characters of a server's own words in a reason
LARGEST = 1 << 28  # bytes of a reply, which is held whole: no answer with its probabilities is that long
SCHEMES = ("", "basic", "bearer")  # of a key, as it may stand before it


class Kind(Enum):
    """What a failure says about asking again."""

    REFUSED = "refused"  # this server will not answer this request
    ODD = "odd"  # an error inside the server, or a reply that is none: perhaps of this request alone
    BUSY = "busy"  # the server asks for a pause
    SILENT = "silent"  # it took the request, and no whole reply came within the timeout
    AWAY = "away"  # no connection: the request has not reached it


class Failure(ConnectionError):
    """A request that brought no answer, and for how many seconds the server asks to be left alone."""

    def __init__(self, reason: str, kind: Kind, pause: float = 0.0) -> None:
        super().__init__(reason)
        self.kind, self.pause = kind, pause


def check_key(key: str, variable: str) -> str:
    """The key as a header may hold it; it is named by its variable alone."""
    key = key.strip()
    scheme = key.rpartition(" ")[0]
    if not (key.isascii() and key.isprintable()) or scheme.lower() not in SCHEMES:
        raise ValueError(
            f"the environment variable {variable} holds characters that no API key has, expected printable ASCII "
            "without spaces: set it to the key alone, or to Basic and the base64 of USER:PASSWORD"
        )
    return key


class Transport:
    """Requests to one address."""

    def __init__(self, url: str, section: RegenerateSection, key: str = "") -> None:
        self.url, self.section = url.rstrip("/"), section
        self.key = check_key(key, section.key_variable)
        self.opener = make_opener(section.connect_timeout)

    def send(self, path: str, payload: dict[str, Any] | None = None, timeout: float | None = None) -> Any:
        """The JSON of the reply to a POST, or to a GET without payload."""
        body = None if payload is None else json.dumps(payload).encode()
        timeout = timeout or self.section.timeout
        try:
            request = Request(self.url + path, body, {"Content-Type": "application/json"})
            if self.key:  # which a redirection must not take to another host
                named = self.key if " " in self.key else f"Bearer {self.key}"
                request.add_unredirected_header("Authorization", named)
            with self.opener.open(request, timeout=timeout) as reply:
                text = reply.read(LARGEST + 1)
            if len(text) > LARGEST:
                raise ValueError(f"a reply of more than {LARGEST:,} bytes")
            return json.loads(text)
        except HTTPError as error:
            with error:
                raise self._failure_of(error, path) from None
        except TimeoutError:
            reason = f"no whole reply in {timeout:g} s: is it stuck? If one may take longer, raise regenerate.timeout"
            raise self.failure(f"{path}: {reason}", Kind.SILENT) from None
        except (OSError, HTTPException, ValueError, RecursionError) as error:
            kind = Kind.AWAY if isinstance(error, URLError) else Kind.ODD
            raise self.failure(f"{path}: {type(error).__name__}: {error}", kind) from None

    def failure(self, reason: str, kind: Kind, pause: float = 0.0) -> Failure:
        """A failure of this address; a server may repeat the key that it was given, and here it ends."""
        reason = hide_users(f"{self.url}{reason}")
        secret = self.key.rpartition(" ")[2]
        reason = reason.replace(secret, "***") if secret else reason
        return Failure(reason if len(reason) <= SHOWN else f"{reason[:SHOWN]} ...", kind, pause)

    def _failure_of(self, error: HTTPError, path: str) -> Failure:
        """The failure that an HTTP status is; one of the key ends the run, as no other request would do better."""
        if error.code in (401, 403):
            state = "which is set: correct it" if self.key else "which is not set: set it"
            raise ValueError(
                f"{self.url}{path}: {error.code}, the server refuses the API key of the environment variable "
                f"{self.section.key_variable}, {state}, or name another variable by regenerate.key_variable; finished "
                "answers are kept, and the same command goes on"
            )
        reason = f"{path}: {error.code} {error.reason}"
        with suppress(OSError, HTTPException):
            reason += f" {error.read(65536).decode(errors='replace')}"
        busy = error.code in (429, 502, 503, 504)
        kind = Kind.BUSY if busy else Kind.ODD if error.code >= 500 or error.code == 408 else Kind.REFUSED
        return self.failure(reason, kind, pause_in(error.headers) if busy else 0.0)


def pause_in(headers: Message) -> float:
    """The seconds that `Retry-After` asks for, as a number or as a date by the server's own clock; 0 without it."""
    asked = str(headers.get("Retry-After") or "").strip()
    with suppress(ValueError, OverflowError):
        return max(0.0, float(asked)) if float(asked) < float("inf") else 0.0
    until, now = parse_date(asked), parse_date(str(headers.get("Date") or ""))
    return max(0.0, (until - (now or datetime.now(timezone.utc))).total_seconds()) if until else 0.0


def parse_date(text: str) -> datetime | None:
    """The time that an HTTP header tells; None where it tells none."""
    try:
        date = parsedate_to_datetime(text)
    except (TypeError, ValueError, IndexError, OverflowError):
        return None
    return date if date.tzinfo else date.replace(tzinfo=timezone.utc)
