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


def browser() -> str | None:
    """A Chromium on the path, or one that playwright has installed."""
    cache = Path.home() / ".cache/ms-playwright"
    found = [shutil.which(name) for name in NAMES]
    found += [str(path) for pattern in CACHED for path in sorted(cache.glob(pattern))]
    return next((path for path in found if path), None)


class Tab:
    """A tab of a browser that runs until `close`."""

    def __init__(self, program: str, profile: Path, seconds: float = 60) -> None:
        """Start the browser with an empty tab; `seconds` is how long it may take for any answer."""
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        # the browser reads descriptor 3 and writes descriptor 4
        command = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        log = (profile.parent / f"{profile.name}.log").open("w")
        arguments = [
            "bash",
            "-c",
            command,
            program,
            *OPTIONS,
            f"--user-data-dir={profile}",
            "about:blank",
        ]
        self._process = subprocess.Popen(
            arguments, pass_fds=(to_browser, from_browser), stdout=log, stderr=log
        )
        os.close(to_browser)
        os.close(from_browser)
        self._left, self._count, self._seconds, self._session = b"", 0, seconds, None
        self.events: list[dict[str, Any]] = []
        target = next(
            t for t in self.ask("Target.getTargets")["targetInfos"] if t["type"] == "page"
        )
        self._session = self.ask(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """The browser's answer to one command; events that come before it are kept."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._count:
            self.events.append(answer)
        if "error" in answer:
            raise ValueError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        """The next message."""
        while b"\0" not in self._left:
            if not (piece := os.read(self._in, 1 << 16)):
                raise ValueError("the browser has ended")
            self._left += piece
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
        while not (value := self.evaluate(expression)):
            if time.monotonic() > end:
                raise ValueError(f"{expression} did not come true in {self._seconds} s")
            time.sleep(0.05)
        return value

    def problems(self) -> list[str]:
        """Errors and warnings of the console, requests that failed, and those that left this machine."""
        found = []
        for event in self.events:
            params = event.get("params", {})
            if event["method"] == "Runtime.exceptionThrown":
                found.append(f"exception: {params['exceptionDetails']}")
            elif event["method"] == "Runtime.consoleAPICalled" and params["type"] in (
                "error",
                "warning",
                "assert",
            ):
                found.append(f"console: {params['args']}")
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] in (
                "error",
                "warning",
            ):
                found.append(f"log: {params['entry']['text']} {params['entry'].get('url', '')}")
            elif event["method"] == "Network.loadingFailed":
                found.append(f"failed: {params['errorText']} {params['requestId']}")
            elif event["method"] == "Network.requestWillBeSent":
                url = params["request"]["url"]
                if url.split(":")[0] not in ("file", "data", "about", "blob"):
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
