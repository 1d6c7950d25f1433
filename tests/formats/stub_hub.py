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
LARGE = (".safetensors", ".png")
# status, JSON or bytes, and headers
Answer = tuple[int, Any, dict[str, str]]


def git_oid(data: bytes) -> str:
    """Return git's checksum of a file."""
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

    def oid(self, path: str) -> str:
        """Return a file's checksum: git's, or sha256 of a large one."""
        data = self.files[path]
        return hashlib.sha256(data).hexdigest() if path in self.large else git_oid(data)

    def entry(self, path: str) -> dict[str, Any]:
        """Return what a list of files says of one."""
        data = self.files[path]
        entry = {
            "type": "file",
            "path": path,
            "size": len(data),
            "oid": git_oid(data),
        }
        if path in self.large:
            entry["lfs"] = {
                "oid": self.oid(path),
                "size": len(data),
                "pointerSize": 130,
            }
        return entry


@dataclass
class StubHub:
    """The repositories of `owner`, by type and name; what was asked; faults to answer with."""

    owner: str = "someone"
    repositories: dict[tuple[str, str], Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)  # large files by their sha256
    asked: list[str] = field(default_factory=list)
    # a pattern of what is asked, and a status, each once
    faults: list[tuple[str, int]] = field(default_factory=list)
    spoiled: set[str] = field(default_factory=set)  # names of files that come with another byte
    address: str = ""

    def answer(
        self,
        method: str,
        path: str,
        body: bytes,
        token: str | None,
    ) -> Answer:
        """Answer one request."""
        # each fault answers one request, so that a client that asks again goes on
        request = f"{method} {path}"
        self.asked.append(request)
        for i, (pattern, status) in enumerate(self.faults):
            if re.search(pattern, request):
                del self.faults[i]
                return status, {"error": "planted"}, {}
        if path == "/api/repos/create":
            return self._create(json.loads(body), token)
        if path == "/api/validate-yaml":
            return 200, {"warnings": [], "errors": []}, {}
        # a large file goes to an address that the batch request named
        found = re.fullmatch("/objects/([0-9a-f]{64})", path)
        if found:
            assert hashlib.sha256(body).hexdigest() == found[1]
            self.objects[found[1]] = body
            return 200, b"", {}
        # git LFS: the client names large files, and learns which of them to send
        if path.endswith(".git/info/lfs/objects/batch"):
            uploads = [self._upload(one) for one in json.loads(body)["objects"]]
            return 200, {"transfer": "basic", "objects": uploads}, {}
        found = re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/[^/]+/(.+)", path)
        if found:
            return self._resolve("dataset" if found[1] else "model", found[2], found[3])
        # the repository itself, its tree, a revision, or a commit
        pattern = r"/api/(model|dataset)s/([^/]+/[^/]+)(?:/([a-z]+)(?:/[^/]+)?)?"
        found = re.fullmatch(pattern, path)
        assert found, f"the client asks for {request}"
        return self._ask(found[1], found[2], found[3], body=body, token=token)

    def _create(
        self,
        asked: dict[str, Any],
        token: str | None,
    ) -> Answer:
        if token != TOKEN:
            return 401, {"error": "Invalid username or password."}, {}
        if asked["organization"] != self.owner:
            return 403, {"error": "You don't have the rights"}, {}
        name = f"{asked['organization']}/{asked['name']}"
        repo_type = asked.get("type", "model")
        prefix = "datasets/" if repo_type == "dataset" else ""
        # data sets have addresses of their own
        url = f"{self.address}/{prefix}{name}"
        if (repo_type, name) in self.repositories:
            return 409, {"error": "You already created this repo", "url": url}, {}
        # older clients send a flag, newer ones a word
        private = asked.get("private") is True or asked.get("visibility") == "private"
        self.repositories[repo_type, name] = Repository(private)
        return 200, {"url": url}, {}

    def _upload(self, asked: dict[str, Any]) -> dict[str, Any]:
        if asked["oid"] in self.objects:
            return asked
        address = f"{self.address}/objects/{asked['oid']}"
        return {**asked, "actions": {"upload": {"href": address}}}

    def _ask(
        self,
        repo_type: str,
        name: str,
        what: str | None,
        *,
        body: bytes,
        token: str | None,
    ) -> Answer:
        repository = self.repositories.get((repo_type, name))
        if repository is None or (repository.private and token != TOKEN):
            # a hub hides from strangers whether a private repository exists
            status = 404 if token == TOKEN else 401
            return status, {"error": "no such repository"}, {"X-Error-Code": "RepoNotFound"}
        # everybody may read, the owner alone writes
        is_owner = token == TOKEN and name.split("/")[0] == self.owner
        if what in ("preupload", "commit") and not is_owner:
            return 403, {"error": "You are not the owner"}, {}
        if what == "preupload":
            return self._preupload(repository, json.loads(body)["files"])
        if what == "commit":
            self._commit(repository, body)
            address = f"{self.address}/{name}/commit/x"
            return 200, {"commitUrl": address, "commitOid": repository.sha}, {}
        if what == "tree":
            return 200, [repository.entry(path) for path in repository.files], {}
        assert what in (None, "revision"), what
        info = {
            "id": name,
            "sha": repository.sha,
            "private": repository.private,
            # which a snapshot downloads
            "siblings": [{"rfilename": path} for path in repository.files],
        }
        return 200, info, {}

    def _preupload(
        self,
        repository: Repository,
        files: list[dict[str, Any]],
    ) -> Answer:
        answers = []
        for file in files:
            path = file["path"]
            answer = {
                "path": path,
                "uploadMode": "lfs" if path.endswith(LARGE) else "regular",
                "shouldIgnore": False,
                "oid": repository.oid(path) if path in repository.files else None,
            }
            answers.append(answer)
        return 200, {"files": answers}, {}

    def _commit(
        self,
        repository: Repository,
        body: bytes,
    ) -> None:
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
            if repository.files.get(path) != before:
                changed.append(path)
        repository.commits.append(changed)

    def _resolve(
        self,
        repo_type: str,
        name: str,
        path: str,
    ) -> Answer:
        repository = self.repositories[repo_type, name]
        if path not in repository.files:
            return 404, {"error": "no such file"}, {"X-Error-Code": "EntryNotFound"}
        data = repository.files[path]
        # a client compares the ETag with what it has, and the body with neither
        headers = {"ETag": f'"{repository.oid(path)}"', "X-Repo-Commit": repository.sha}
        if path in self.spoiled:
            # of the same size, so that only a checksum tells
            data = bytes([data[0] ^ 1]) + data[1:]
        return 200, data, headers


def read_chunks(file: Any) -> bytes:
    """Return a body that came in chunks, each after its size."""
    chunks = []
    while size := int(file.readline(), 16):
        chunks.append(file.read(size))
        file.readline()
    file.readline()
    return b"".join(chunks)


@contextmanager
def serving(hub: StubHub) -> Iterator[str]:
    """Yield the address at which the hub answers."""

    # the standard library dispatches by the name of the method
    class Handler(BaseHTTPRequestHandler):
        def do(self) -> None:
            """Answer whatever is asked."""
            if self.headers.get("Transfer-Encoding") == "chunked":
                body = read_chunks(self.rfile)
            else:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
            path = unquote(urlsplit(self.path).path)
            status, answer, headers = hub.answer(self.command, path, body, token)
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            headers = {
                "Content-Length": str(len(data)),
                "Accept-Ranges": "none",
                **headers,
            }
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            # a HEAD request asks for size and ETag alone
            if self.command != "HEAD":
                self.wfile.write(data)

        do_GET = do_HEAD = do_POST = do_PUT = do

        def log_message(self, *args: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub.address
    finally:
        server.shutdown()
        server.server_close()
