"""Sending to a hub and fetching from it, with every file verified; what goes wrong is told in a sentence."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import HfApi, get_token, snapshot_download
from huggingface_hub.hf_api import RepoFile

from eagle.disk import lock_path, sha256
from eagle.formats.parcel import UploadPlan, pack_head
from eagle.log import first_line

NAME = re.compile(r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?/[A-Za-z0-9](?:[\w.-]{0,94}[A-Za-z0-9_])?")
DATASETS = "datasets/"
LOG_IN = "`hf auth login`, or set HF_TOKEN"
STATUS = {
    401: f"it does not know you, or there is no such repository: {LOG_IN}, and check the name",
    403: "your token may not do that there: check the owner's name, and that the token may write",
    404: "there is no such repository, or none that you may see: check the name",
    409: "somebody else changed it meanwhile: give the same command again",
    429: "it was asked too often: wait some minutes, and give the same command again",
}
AGAIN = "give the same command again: what has arrived is not sent twice"
# packages whose errors mean that the hub was not reached
OFFLINE = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3")


def check_name(name: str) -> str:
    """Return a repository's name unchanged; ValueError unless it is one that the hub allows, as OWNER/NAME."""
    if not NAME.fullmatch(name) or "--" in name or ".." in name:
        raise ValueError(
            f"{name!r} is no name on a hub: expected OWNER/NAME, of letters, digits, '-', '_' and '.'"
        )
    return name


def has_token() -> bool:
    """Return whether this machine has a token of the hub."""
    return get_token() is not None


def push_to_hub(folder: str | Path, repo_id: str, private: bool = False) -> str:
    """Upload a head that `save_head` wrote, with a model card and what its run tells of it.

    Args:
        folder: The head's folder.
        repo_id: The repository, as OWNER/NAME, made if it is not there.
        private: Whether a new repository is a private one.

    Returns:
        The URL of the repository.
    """
    return send(pack_head(Path(folder), repo_id).clean(), check_name(repo_id), private=private)


def send(upload: UploadPlan, repo_id: str, *, private: bool = False) -> str:
    """Upload the files of a plan, creating the repository; what is there already is not sent again.

    Args:
        upload: The files, by their names in the repository.
        repo_id: The repository, as OWNER/NAME, made if it is not there.
        private: Whether a new repository is a private one; if not, the owner's default decides.

    Returns:
        The URL of the repository.
    """
    api = HfApi()
    repo: dict[str, Any] = {"repo_id": repo_id, "repo_type": upload.repo_type}
    # the hub's client uploads one folder, so links to the files, and texts that the plan holds, are gathered in one
    with TemporaryDirectory() as staged, explaining_hub_errors(repo_id):
        for name, item in upload.files.items():
            path = Path(staged, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(item.source, bytes):
                path.write_bytes(item.source)
            else:
                path.symlink_to(item.source.resolve())
        url = api.create_repo(**repo, private=private or None, exist_ok=True)
        # a feature store: its shards go before their index, so that no index on the hub ever names a missing shard
        if "index.json" in upload.files:
            api.upload_folder(
                **repo,
                folder_path=staged,
                allow_patterns=["*.safetensors"],
                commit_message="Shards",
            )
        api.upload_folder(**repo, folder_path=staged, commit_message="Upload by eagle push")
    return str(url)


@dataclass(frozen=True)
class Fetched:
    """A repository that was fetched into a folder."""

    kind: str  # "model" or "dataset"
    commit: str
    files: list[str]  # all of its files
    new: list[str]  # those of them that the folder lacked and that were fetched now


def fetch(name: str, out: Path, revision: str | None = None) -> Fetched:
    """Bring a repository into a folder, every file verified; a folder with anything else in it is refused.

    Args:
        name: The repository as OWNER/NAME, or as datasets/OWNER/NAME to look for a dataset alone.
        out: The folder.
        revision: A branch, a tag or a commit.
    """
    repo_id = check_name(name.removeprefix(DATASETS))
    with lock_path(out.absolute()):
        return _fetch_missing(repo_id, out, revision, only_data=name.startswith(DATASETS))


def _fetch_missing(repo_id: str, out: Path, revision: str | None, *, only_data: bool) -> Fetched:
    """Fetch what a folder lacks of a repository, and move it there once every file has the checksum that the hub lists.

    Until then it lies in a folder beside, `OUT.part`, where a later call goes on.

    Args:
        repo_id: The repository, as OWNER/NAME.
        out: The folder.
        revision: A branch, a tag or a commit; None for the newest.
        only_data: Whether to look for a dataset alone, and not for a model of that name first.
    """
    kinds = ["dataset"] if only_data else ["model", "dataset"]
    staging = out.absolute().with_name(f"{out.absolute().name}.part")
    with explaining_hub_errors(repo_id):
        kind, commit, files = _list_files(repo_id, revision, kinds)
        missing = _list_missing(out, files, repo_id)
        if missing:
            # the client takes names for glob patterns: escape them
            patterns = [re.sub(r"([*?[])", r"[\1]", path) for path in missing]
            snapshot_download(
                repo_id, repo_type=kind, revision=commit, local_dir=staging, allow_patterns=patterns
            )
    _refuse_differing(
        [path for path in missing if not _is_same(staging / path, files[path])],
        staging,
        out,
        repo_id,
    )
    for path in missing:
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        os.replace(staging / path, out / path)
    shutil.rmtree(staging, ignore_errors=True)
    # the files are as the hub has them now, but a shard may have been damaged before it was pushed
    torn = list(_find_torn_shards(out, files))
    if torn:
        raise ValueError(
            f"{', '.join(torn)} of {repo_id} is not what its .sha256 says: whoever pushed it, push it again"
        )
    return Fetched(kind, commit, sorted(files), missing)


def _refuse_differing(paths: list[str], staging: Path, out: Path, repo_id: str) -> None:
    """Delete fetched files whose bytes are not those that the hub lists, and raise ValueError if there are any.

    The next call fetches them again.

    Args:
        paths: These files, by their names in the repository; empty if all are right.
        staging: The folder that they were fetched into.
        out: The folder that they were meant for.
        repo_id: The repository.
    """
    for path in paths:
        (staging / path).unlink(missing_ok=True)
    if paths:
        them = "them" if len(paths) > 1 else "it"
        raise ValueError(
            f"{', '.join(paths)} of {repo_id} did not come as the hub lists {them}: the bytes have another checksum. "
            f"Nothing was written to {out}: give the same command again"
        )


def _list_files(
    repo_id: str, revision: str | None, kinds: list[str]
) -> tuple[str, str, dict[str, RepoFile]]:
    """Ask the hub for a repository's files.

    Args:
        repo_id: The repository.
        revision: A branch, a tag or a commit.
        kinds: "model" and "dataset", or one of them: the first that exists under this name is taken.

    Returns:
        Its kind, the commit of the revision, and its files: name -> size and checksum.
    """
    api = HfApi()
    for kind in kinds:
        try:
            commit = api.repo_info(repo_id, revision=revision, repo_type=kind).sha
            break
        except Exception as error:
            # the hub answers 401 or 404 if there is no such repository, or only a private one: try the next kind
            if kind == kinds[-1] or _status(error) not in (401, 404):
                raise
    # of this commit, so that a push meanwhile changes nothing
    tree = api.list_repo_tree(repo_id, recursive=True, revision=commit, repo_type=kind)
    files = {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}
    for path in files:
        parts = PurePosixPath(path).parts
        if path.startswith("/") or "\\" in path or ".." in parts or parts[0] == ".cache":
            raise ValueError(
                f"{repo_id} lists a file {path!r}, which would lie outside of a folder: it is not fetched"
            )
    # the hub writes this file itself, for git
    files.pop(".gitattributes", None)
    return kind, str(commit), files


def _list_missing(out: Path, files: dict[str, RepoFile], repo_id: str) -> list[str]:
    """Return the names of a repository's files that a folder lacks.

    ValueError if the folder holds anything else, or one of the files with other bytes.
    """
    if not out.exists():
        return sorted(files)
    if not out.is_dir():
        raise ValueError(f"{out} is a file: name a folder")
    # .lock is held by `fetch` while this runs
    paths = [path for path in out.rglob("*") if path.is_file() and path.name != ".lock"]
    names = {path.relative_to(out).as_posix() for path in paths}
    foreign = sorted(names - files.keys())
    changed = sorted(name for name in names & files.keys() if not _is_same(out / name, files[name]))
    differing = foreign + changed
    if differing:
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        verb = "is" if len(differing) == 1 else "are"
        raise ValueError(
            f"{out} holds {', '.join(differing[:3])}{more}, which {verb} not in {repo_id} with these bytes: name "
            "another folder, or take away what is there"
        )
    return sorted(files.keys() - names)


def _is_same(path: Path, entry: Any) -> bool:
    """Return whether a file has the bytes that the hub lists: by its sha256, or of a small file by git's checksum.

    Args:
        path: The file on this machine; False if it is not there.
        entry: What the hub lists of it, a `RepoFile`.
    """
    if not path.is_file() or path.stat().st_size != entry.size:
        return False
    if entry.lfs is not None:
        return sha256(path) == entry.lfs.sha256
    # small files are stored as git blobs, whose id is a SHA-1 over a header with the size, and the bytes
    data = path.read_bytes()
    return (
        hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
        == entry.blob_id
    )


def _find_torn_shards(out: Path, files: dict[str, RepoFile]) -> Iterator[str]:
    """Yield shards of a fetched feature store that were damaged before they were pushed.

    Their bytes do not have the checksum in the file SHARD.sha256, which was written with them.

    Args:
        out: The folder with all files of the repository.
        files: What the hub lists of them, by name.
    """
    for name in files:
        if not name.endswith(".safetensors.sha256"):
            continue
        shard = name.removesuffix(".sha256")
        words = (out / name).read_text(errors="replace").split()
        entry = files.get(shard)
        # the shard is missing, or its checksum is empty
        if entry is None or not words:
            yield shard
            continue
        # the hub's checksum was compared with the file already, which saves reading it again
        checksum = entry.lfs.sha256 if entry.lfs else sha256(out / shard)
        if checksum != words[0]:
            yield shard


@contextmanager
def explaining_hub_errors(repo_id: str) -> Iterator[None]:
    """Turn errors in the `with` block, of the hub, its client or the network, into a ValueError that says what to do.

    `repo_id` is the repository that the message names.
    """
    try:
        yield
    except Exception as error:
        # a plain ValueError without a cause is one of ours, and says it already
        if type(error) is ValueError and error.__cause__ is None:
            raise
        causes = list(_list_causes(error))
        status = _status(error)
        if status is not None:
            fault = STATUS.get(status, first_line(error))
            if status >= 500:
                fault = f"it has a fault of its own: {AGAIN}"
            raise ValueError(f"{repo_id}: the hub answers {status}: {fault}") from error
        if any(_is_offline(cause) for cause in causes):
            raise ValueError(
                f"{repo_id}: the hub is not reached ({first_line(causes[-1])}) Check the network, and {AGAIN}"
            ) from error
        raise ValueError(f"{repo_id}: {first_line(error)} Mend that, and {AGAIN}") from error


def _list_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what caused it, the innermost last."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _status(error: BaseException) -> int | None:
    """Return the status of the HTTP response in an error or one of its causes; None if there was no response."""
    for cause in _list_causes(error):
        status: int | None = getattr(getattr(cause, "response", None), "status_code", None)
        if status is not None:
            return status
    return None


def _is_offline(error: BaseException) -> bool:
    """Return whether an error means that the hub was not reached, by the package or the name of its class."""
    package = type(error).__module__.split(".")[0]
    is_named = type(error).__name__ in ("OfflineModeIsEnabled", "LocalEntryNotFoundError")
    return package in OFFLINE or isinstance(error, ConnectionError) or is_named
