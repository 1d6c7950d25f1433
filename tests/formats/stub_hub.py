"""A hub on this machine: as much of its HTTP interface as the real client talks to when it pushes and pulls."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_" + "t" * 34


def git_oid(data: bytes) -> str:
    """Git's checksum of a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Repository:
    """Files by name, the large ones among them, and the commits that made them."""

    private: bool = False
    files: dict[str, bytes] = field(default_factory=dict)
    large: set[str] = field(default_factory=set)
    commits: list[list[str]] = field(default_factory=list)  # the names that each has changed

    @property
    def sha(self) -> str:
        """The newest commit."""
        return f"{len(self.commits):040x}"


@dataclass
class StubHub:
    """The repositories of `owner`, by kind and name; what was asked; faults to answer with."""

    owner: str = "someone"
    repositories: dict[tuple[str, str], Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)  # large files by their sha256
    asked: list[str] = field(default_factory=list)
    faults: list[tuple[str, int]] = field(
        default_factory=list
    )  # a pattern of what is asked, and a status, each once
    spoiled: set[str] = field(default_factory=set)  # names of files that come with another byte
    address: str = ""

    def answer(
        self, method: str, path: str, body: bytes, token: str | None
    ) -> tuple[int, Any, dict[str, str]]:
        """Status, JSON or bytes, and headers."""
        self.asked.append(f"{method} {path}")
        for place, (pattern, status) in enumerate(self.faults):
            if re.search(pattern, f"{method} {path}"):
                del self.faults[place]
                return status, {"error": "planted"}, {}
        if path == "/api/repos/create":
            return self._create(json.loads(body), token)
        if path == "/api/validate-yaml":
            return 200, {"warnings": [], "errors": []}, {}
        if found := re.fullmatch("/objects/([0-9a-f]{64})", path):
            assert hashlib.sha256(body).hexdigest() == found[1]
            self.objects[found[1]] = body
            return 200, b"", {}
        if found := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            return (
                200,
                {
                    "transfer": "basic",
                    "objects": [self._upload(one) for one in json.loads(body)["objects"]],
                },
                {},
            )
        if found := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            return self._resolve("dataset" if found[1] else "model", found[2], found[3])
        if found := re.fullmatch(
            r"/api/(model|dataset)s/([^/]+/[^/]+)(?:/([a-z]+)(?:/[^/]+)?)?", path
        ):
            repository = self.repositories.get((found[1], found[2]))
            if repository is None or (repository.private and token != TOKEN):
                return (
                    404 if token == TOKEN else 401,
                    {"error": "no such repository"},
                    {"X-Error-Code": "RepoNotFound"},
                )
            return self._ask(repository, found[2], found[3], body, token)
        raise AssertionError(f"the client asks for {method} {path}")

    def _create(self, asked: dict[str, Any], token: str | None) -> tuple[int, Any, dict[str, str]]:
        if token != TOKEN:
            return 401, {"error": "Invalid username or password."}, {}
        if asked["organization"] != self.owner:
            return 403, {"error": "You don't have the rights"}, {}
        name = f"{asked['organization']}/{asked['name']}"
        key = (asked.get("type", "model"), name)
        if key in self.repositories:
            return (
                409,
                {"error": "You already created this repo", "url": f"{self.address}/{name}"},
                {},
            )
        # older clients send a flag, newer ones a word
        private = asked.get("private") is True or asked.get("visibility") == "private"
        self.repositories[key] = Repository(private)
        prefix = "datasets/" if key[0] == "dataset" else ""
        return 200, {"url": f"{self.address}/{prefix}{name}"}, {}

    def _upload(self, asked: dict[str, Any]) -> dict[str, Any]:
        upload = {"upload": {"href": f"{self.address}/objects/{asked['oid']}"}}
        return asked if asked["oid"] in self.objects else {**asked, "actions": upload}

    def _ask(
        self, repository: Repository, name: str, what: str | None, body: bytes, token: str | None
    ) -> tuple[int, Any, dict[str, str]]:
        if what in ("preupload", "commit") and (token != TOKEN or name.split("/")[0] != self.owner):
            return 403, {"error": "You are not the owner"}, {}
        if what == "preupload":
            files = [file["path"] for file in json.loads(body)["files"]]
            modes = {
                path: "lfs" if path.endswith((".safetensors", ".png")) else "regular"
                for path in files
            }
            known = {
                path: self._oid(repository, path) for path in files if path in repository.files
            }
            answers = [
                {
                    "path": path,
                    "uploadMode": modes[path],
                    "shouldIgnore": False,
                    "oid": known.get(path),
                }
                for path in files
            ]
            return 200, {"files": answers}, {}
        if what == "commit":
            changed = []
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "header":
                    continue
                path = line["value"]["path"]
                before = repository.files.get(path)
                if line["key"] == "file":
                    repository.files[path] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "lfsFile":
                    repository.files[path] = self.objects[line["value"]["oid"]]
                    repository.large.add(path)
                # an older client sends small files that are the same, which a commit does not change
                changed += [path] if repository.files.get(path) != before else []
            repository.commits.append(changed)
            return (
                200,
                {"commitUrl": f"{self.address}/{name}/commit/x", "commitOid": repository.sha},
                {},
            )
        if what == "tree":
            return 200, [self._entry(repository, path) for path in repository.files], {}
        assert what in (None, "revision"), what
        return (
            200,
            {"id": name, "sha": repository.sha, "private": repository.private, "siblings": []},
            {},
        )

    def _oid(self, repository: Repository, path: str) -> str:
        data = repository.files[path]
        return hashlib.sha256(data).hexdigest() if path in repository.large else git_oid(data)

    def _entry(self, repository: Repository, path: str) -> dict[str, Any]:
        data = repository.files[path]
        entry = {"type": "file", "path": path, "size": len(data), "oid": git_oid(data)}
        if path in repository.large:
            entry["lfs"] = {
                "oid": self._oid(repository, path),
                "size": len(data),
                "pointerSize": 130,
            }
        return entry

    def _resolve(self, kind: str, name: str, path: str) -> tuple[int, Any, dict[str, str]]:
        repository = self.repositories[kind, name]
        if path not in repository.files:
            return 404, {"error": "no such file"}, {"X-Error-Code": "EntryNotFound"}
        data = repository.files[path]
        headers = {"ETag": f'"{self._oid(repository, path)}"', "X-Repo-Commit": repository.sha}
        if path in self.spoiled:
            data = bytes([data[0] ^ 1]) + data[1:]
        return 200, data, headers


@contextmanager
def serving(hub: StubHub) -> Iterator[str]:
    """The address at which the hub answers."""

    class Handler(BaseHTTPRequestHandler):
        def do(self) -> None:
            """Answer whatever is asked."""
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
            path = unquote(urlsplit(self.path).path)
            status, answer, headers = hub.answer(self.command, path, self._body(), token)
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            for name, value in {
                "Content-Length": str(len(data)),
                "Accept-Ranges": "none",
                **headers,
            }.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        do_GET = do_HEAD = do_POST = do_PUT = do

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") == "chunked":
                pieces = []
                while size := int(self.rfile.readline(), 16):
                    pieces.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(pieces)
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        def log_message(self, *args: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub.address
    finally:
        server.shutdown()
        server.server_close()
