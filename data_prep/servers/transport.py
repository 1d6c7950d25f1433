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

SHOWN = 300  # characters of a reason, which may quote the server
# Bytes of a reply, which is held in memory: no answer with its probabilities is that long.
LARGEST = 1 << 28
# The schemes that may be written before a key.
SCHEMES = ("", "basic", "bearer")


class Kind(Enum):
    """What a failure says about asking again."""

    REFUSED = "refused"  # this server will not answer this request
    # An error inside the server, or a reply that is none: perhaps of this request alone.
    ODD = "odd"
    BUSY = "busy"  # the server asks for a pause
    SILENT = "silent"  # it took the request, and no whole reply came within the timeout
    AWAY = "away"  # no connection: the request has not reached it


class Failure(ConnectionError):
    """A request that brought no answer, and for how many seconds the server asks to be left alone."""

    def __init__(self, reason: str, kind: Kind, pause: float = 0.0) -> None:
        super().__init__(reason)
        self.kind = kind
        self.pause = pause


def check_key(key: str, variable: str) -> str:
    """Return the key as a header may hold it; it is named by its variable alone."""
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
        self.url = url.rstrip("/")
        self.section = section
        self.key = check_key(key, section.key_variable)
        self.opener = make_opener(section.connect_timeout)

    def send(
        self, path: str, payload: dict[str, Any] | None = None, timeout: float | None = None
    ) -> Any:
        """Return the JSON of the reply to a POST, or to a GET without payload."""
        body = None if payload is None else json.dumps(payload).encode()
        timeout = timeout or self.section.timeout
        try:
            request = Request(self.url + path, body, {"Content-Type": "application/json"})
            if self.key:
                # A redirection must not take the key to another host.
                credentials = self.key
                if " " not in credentials:
                    credentials = f"Bearer {credentials}"
                request.add_unredirected_header("Authorization", credentials)
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
        """Return a failure of this address, without its key."""
        reason = hide_users(f"{self.url}{reason}")
        secret = self.key.rpartition(" ")[2]
        if secret:
            # A server may repeat the key in its reply.
            reason = reason.replace(secret, "***")
        if len(reason) > SHOWN:
            reason = f"{reason[:SHOWN]} ..."
        return Failure(reason, kind, pause)

    def _failure_of(self, error: HTTPError, path: str) -> Failure:
        """Return the failure of an HTTP status; a refused key ends the run, as no other request would succeed."""
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
        if error.code in (429, 502, 503, 504):
            return self.failure(reason, Kind.BUSY, pause_in(error.headers))
        # 408: the server has waited too long for the request.
        is_odd = error.code >= 500 or error.code == 408
        return self.failure(reason, Kind.ODD if is_odd else Kind.REFUSED)


def pause_in(headers: Message) -> float:
    """Return the seconds that `Retry-After` asks for, as a number or a date by the server's clock; 0 without it."""
    value = str(headers.get("Retry-After") or "").strip()
    with suppress(ValueError, OverflowError):
        seconds = float(value)
        return max(0.0, seconds) if seconds < float("inf") else 0.0
    until = parse_date(value)
    if until is None:
        return 0.0
    now = parse_date(str(headers.get("Date") or "")) or datetime.now(timezone.utc)
    return max(0.0, (until - now).total_seconds())


def parse_date(text: str) -> datetime | None:
    """Return the time that an HTTP header tells; None where it tells none."""
    try:
        date = parsedate_to_datetime(text)
    except (TypeError, ValueError, IndexError, OverflowError):
        return None
    if not date.tzinfo:
        date = date.replace(tzinfo=timezone.utc)
    return date
