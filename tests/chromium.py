"""A headless Chromium, spoken to by its debugging pipe: what a page logs, requests, measures and looks like."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome-headless-shell",
    "chrome",
)
CACHED = ("chromium*/*/chrome", "chromium*/*/headless_shell", "chromium*/*/chrome-headless-shell")
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
# what a quiet page does not log, and where it may read from
LOUD = ("error", "warning", "assert")
LOCAL = ("file", "data", "about", "blob")


def browser() -> str | None:
    """A Chromium on the path, or one that playwright has installed."""
    cache = Path.home() / ".cache/ms-playwright"
    found = [shutil.which(name) for name in NAMES]
    for pattern in CACHED:
        found += map(str, sorted(cache.glob(pattern)))
    return next(filter(None, found), None)


class Tab:
    """A tab of a browser that runs until `close`."""

    def __init__(self, program: str, profile: Path, seconds: float = 60) -> None:
        """Start the browser with an empty tab; `seconds` is how long it may take for any answer."""
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        # the browser reads descriptor 3 and writes descriptor 4
        redirect = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        command = ["bash", "-c", redirect, program, *OPTIONS]
        command += [f"--user-data-dir={profile}", "about:blank"]
        log = profile.with_suffix(".log").open("w")
        pipes = (to_browser, from_browser)
        self._process = subprocess.Popen(
            command,
            pass_fds=pipes,
            stdout=log,
            stderr=log,
        )
        for pipe in pipes:
            os.close(pipe)
        self._left = b""
        self._count = 0
        self._seconds = seconds
        self._session = None
        self.events: list[dict[str, Any]] = []
        # commands go to the page, once its session is known
        targets = self.ask("Target.getTargets")["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")
        attached = self.ask("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """The browser's answer to one command; events that come before it are kept."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        answer = self._read()
        while answer.get("id") != self._count:
            self.events.append(answer)
            answer = self._read()
        if "error" in answer:
            raise ValueError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        """The next message."""
        while b"\0" not in self._left:
            received = os.read(self._in, 1 << 16)
            if not received:
                raise ValueError("the browser has ended")
            self._left += received
        message, _, self._left = self._left.partition(b"\0")
        return json.loads(message)

    def open(self, url: str, width: int, height: int = 900, dark: bool = False) -> None:
        """Load a page at a width, and wait until it is whole; events are those of this page."""
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        # by what the system prefers, as a page asks for it
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.events = []
        self.ask("Page.navigate", url=url)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript."""
        result = self.ask(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in result:
            raise ValueError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """The value of an expression, once it is true."""
        end = time.monotonic() + self._seconds
        while time.monotonic() < end:
            value = self.evaluate(expression)
            if value:
                return value
            time.sleep(0.05)
        raise ValueError(f"{expression} did not come true in {self._seconds} s")

    def problems(self) -> list[str]:
        """Errors and warnings of the console, requests that failed, and those that left this machine."""
        found = []
        for event in self.events:
            method = event["method"]
            params = event.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append(f"exception: {params['exceptionDetails']}")
            elif method == "Runtime.consoleAPICalled" and params["type"] in LOUD:
                found.append(f"console: {params['args']}")
            elif method == "Log.entryAdded" and params["entry"]["level"] in LOUD:
                entry = params["entry"]
                found.append(f"log: {entry['text']} {entry.get('url', '')}")
            elif method == "Network.loadingFailed":
                found.append(f"failed: {params['errorText']} {params['requestId']}")
            elif method == "Network.requestWillBeSent":
                # a page from disk needs no other machine
                url = params["request"]["url"]
                if url.split(":")[0] not in LOCAL:
                    found.append(f"request: {url}")
        return found

    def screenshot(self, path: Path) -> None:
        """Write what the window shows as a PNG."""
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        """End the browser."""
        self._session = None
        self.ask("Browser.close")
        self._process.wait(timeout=self._seconds)
        os.close(self._out)
        os.close(self._in)
