"""Share heads, features and answers on a hub, and bring them from there."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

from data_prep.dataset_card import dataset_card
from eagle.data.store import FeatureStore
from eagle.formats.custom_generate import CODE, CUSTOM_GENERATE
from eagle.formats.hub import LOG_IN, check_name, fetch, has_token, send
from eagle.formats.parcel import UploadFile, UploadPlan, is_export, pack_export, pack_head
from eagle.formats.reading.files import CONFIG_BYTES, read_text
from eagle.log import progress
from eagle.recipe.command_lines import ProgramOption
from eagle.recipe.plain_yaml import parse_yaml


def run_push(argv: list[str]) -> None:
    """Show what would be uploaded to the hub. With --yes, upload it."""
    parser = argparse.ArgumentParser(prog="eagle push", description=run_push.__doc__)
    parser.add_argument(
        "path", type=Path, help="a head, an export, a feature store, or answers of `eagle prepare`"
    )
    parser.add_argument(
        "name", metavar="OWNER/NAME", help="the repository; created if it does not exist"
    )
    parser.add_argument("--private", action="store_true", help="create a private repository")
    parser.add_argument(
        "--also",
        type=Path,
        action="append",
        default=[],
        metavar="FOLDER",
        help="an export to upload in a subfolder",
    )
    parser.add_argument("--yes", action="store_true", help="upload the files")
    # only for the help: with --card `eagle` runs the program that writes the card
    parser.add_argument(
        "--card",
        action=ProgramOption,
        nargs=0,
        help="only write the card (README.md): see `eagle help push --card`",
    )
    args = parser.parse_args(argv)
    check_name(args.name)
    upload = pack(args.path, args.name, args.also)
    for line in describe(upload, args.name, args.private):
        print(line)
    if not args.yes:
        token = "" if has_token() else f" There is no token here yet: {LOG_IN}."
        print(f"\nNothing was sent: --yes sends it.{token}")
        return
    if not has_token():
        raise ValueError(
            f"there is no token of the hub here: {LOG_IN}; a page of its settings makes tokens that may write"
        )
    print(f"\n{send(upload, args.name, private=args.private)}")


def pack(path: Path, name: str, also: list[Path]) -> UploadPlan:
    """Return the files to upload of a head, an export, a feature store or answers, cleaned of what names this machine.

    Args:
        path: The folder, or the file of answers.
        name: The repository, which a written card names.
        also: Exports to upload beside a head.
    """
    if path.is_file():
        upload = pack_answers(path, name)
    elif (path / "index.json").is_file():
        upload = pack_store(path, name)
    elif (path / "config.json").is_file():
        upload = pack_export(path) if is_export(path) else pack_head(path, name)
    else:
        # the run's folder is named where its head is meant
        near = f"; did you mean {path / 'head'}?" if (path / "head").is_dir() else ""
        raise ValueError(
            f"nothing to push at {path}: expected a head, an export, a feature store or answers{near}"
        )
    if also and "recipe.yaml" not in upload.files:
        raise ValueError(f"--also {also[0]}: exports go beside a head, and {path} is none")
    # exports in a head's folder are not uploaded unless `also` names them
    for folder in also:
        if not is_export(folder):
            raise ValueError(
                f"--also {folder} holds no export: expected a folder that `eagle export` wrote"
            )
        upload.left_out.pop(str(folder.absolute()), None)
        upload.add_folder(
            folder, f"{folder.resolve().name}/", "an export of it, as `eagle export` wrote it"
        )
    if "recipe.yaml" in upload.files:
        # a head, which `model.generate(custom_generate="OWNER/NAME")` drafts with
        written = path / CUSTOM_GENERATE
        upload.left_out.pop(str(written.parent.absolute()), None)
        code = written if written.is_file() else CODE.encode()
        upload.add(CUSTOM_GENERATE, code, "drafts in transformers' own generate", path)
    upload.clean()
    # the index of a store has the checksum of the target's config, which cleaning may have changed
    if upload.replaced.keys() >= {"config.json"} and "index.json" in upload.files:
        _note_checksum(upload)
    return upload


def pack_store(folder: Path, name: str) -> UploadPlan:
    """Return a whole feature store, after verifying it: its shards with their checksums, its index, its README."""
    store = FeatureStore(folder)  # which refuses a store that is not complete
    # called for its check of the files that were copied from the target
    store.borrowed_folder()
    # a damaged shard must be found here, and not by those who fetch the store
    count = len(store.plan)
    # each step of the generator verifies one shard
    for _ in progress(store.verify(range(count)), "verify", count, unit="shards"):
        pass
    upload = UploadPlan("dataset", Path.home())
    upload.add_folder(folder, "", "a part of the store")
    # data and checksums are uploaded unchanged
    upload.verbatim = upload.files.keys() - {"README.md", "index.json", "config.json"}
    if "README.md" not in upload.files:
        upload.add("README.md", dataset_card(folder, name).encode(), "its card")
    return upload


def pack_answers(path: Path, name: str) -> UploadPlan:
    """Return conversations that `eagle prepare` wrote, with the settings that made them, and their README."""
    note = Path(f"{path}.settings")
    card = dataset_card(path, name)  # refuses conversations without that note
    upload = UploadPlan("dataset", Path.home())
    upload.add(path.name, path, "the conversations, as they are")
    upload.verbatim = {path.name}
    upload.add(note.name, note, "what made them")
    readme = path.with_name("README.md")
    upload.add("README.md", readme if readme.is_file() else card.encode(), "their card")
    if json.loads(note.read_text()).get("data", {}).get("images"):
        upload.left_out["images"] = (
            "are named by the conversations, and are not yours to give by this command"
        )
    return upload


def _note_checksum(upload: UploadPlan) -> None:
    """Update the checksum of the target's config in a store's index, in place, after words in the config were hidden.

    The index lists the checksums of the files that the store has copied from its target (`borrowed`).
    """
    index = json.loads(upload.files["index.json"].read())
    digest = hashlib.sha256(upload.files["config.json"].read()).hexdigest()
    index["made"]["borrowed"]["config.json"] = digest
    upload.files["index.json"] = UploadFile(
        json.dumps(index, indent=1).encode(), upload.files["index.json"].why
    )


def describe(upload: UploadPlan, name: str, private: bool) -> Iterator[str]:
    """Yield the lines that `eagle push` shows: where the files go, each file, what was hidden, and what stays here."""
    visibility = "private" if private else "public"
    yield f"to {name}, a {visibility} {upload.repo_type} repository; one that is there stays as visible as it is"
    # by the name that a line shows: the files of that line
    lines: dict[str, list[UploadFile]] = {}
    for file, item in upload.files.items():
        # the shards of a store are one line
        lines.setdefault(re.sub(r"\d{5}", "*", file), []).append(item)
    width = max(map(len, lines))
    for file, items in lines.items():
        size = _size(sum(item.size for item in items))
        count = f" ({len(items)} files)" if len(items) > 1 else ""
        yield f"  {file:<{width}}  {size:>9}  {items[0].why}{count}"
    yield f"  {len(upload.files)} files, {_size(sum(item.size for item in upload.files.values()))}"
    for file, words in upload.replaced.items():
        changes = ", ".join(f"{word} is now {upload.replacements[word]}" for word in words)
        yield f"hidden in {file}: {changes}"
    for file, paths in upload.remaining_paths.items():
        yield f"still named in {file}: {', '.join(paths[:5])}; edit it if others should not read that"
    for path, why in upload.left_out.items():
        yield f"stays here: {path} {why}"


def _size(count: float) -> str:
    """Return a number of bytes in words."""
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB"):
        count /= 1000
        if count < 1000:
            return f"{count:.1f} {unit}"
    return f"{count / 1000:,.2f} GB"


def run_pull(argv: list[str]) -> None:
    """Download a head, features or answers from the hub, and verify every file."""
    parser = argparse.ArgumentParser(prog="eagle pull", description=run_pull.__doc__)
    parser.add_argument(
        "name",
        metavar="OWNER/NAME",
        help="the repository; datasets/OWNER/NAME if a head has the same name as a dataset",
    )
    parser.add_argument(
        "out", type=Path, metavar="OUT", help="a new folder, or one with a part of the files"
    )
    parser.add_argument("--revision", help="a branch, a tag or a commit")
    args = parser.parse_args(argv)
    fetched = fetch(args.name, args.out, args.revision)
    count = len(fetched.files)
    if not fetched.new:
        print(f"{args.out} holds all {count} files of {args.name} already, with the same bytes")
    else:
        missing = f"{len(fetched.new)} of " if len(fetched.new) < count else ""
        what = f"{missing}{count} files of {args.name} at {fetched.commit[:12]}"
        print(f"{what} in {args.out}, each with the checksum that the hub lists")
    print(next_step(args.out))


def next_step(folder: Path) -> str:
    """Return a sentence on how to use what was fetched: features, conversations, a head or another checkpoint."""
    if (folder / "index.json").is_file():
        return f"train on these features with features.store={folder}"
    answers = sorted(folder.glob("*.settings"))
    if answers:
        return f"train on these conversations with data.train={answers[0].with_suffix('')}"
    if (folder / "recipe.yaml").is_file():
        # a recipe from elsewhere may hold anything: it is read as plain YAML, up to a limit, and nothing is trusted
        recipe = parse_yaml(
            read_text(folder, "recipe.yaml", CONFIG_BYTES), str(folder / "recipe.yaml")
        )
        target = recipe.get("target", {}).get("path") if isinstance(recipe, dict) else None
        return f'decode with it: eagle generate {folder} "What is a draft head?" --target {target or "TARGET"}'
    return f"look at it: eagle inspect {folder}"
