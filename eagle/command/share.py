"""Share heads, features and answers on a hub, and bring them from there."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from eagle.formats.custom_generate import CODE, CUSTOM_GENERATE
from eagle.formats.hub import LOG_IN, check_name, fetch, has_token, send
from eagle.formats.parcel import Parcel, Sent, is_export, pack_export, pack_head
from eagle.formats.reading.files import CONFIG_BYTES, read_text
from eagle.recipe.plain_yaml import parse_yaml


def run_push(argv: list[str]) -> None:
    """Show what would go to a hub, and where; with --yes, send it."""
    parser = argparse.ArgumentParser(prog="eagle push", description=run_push.__doc__)
    parser.add_argument("path", type=Path, help="a head, an export, a feature store, or answers of `eagle prepare`")
    parser.add_argument("name", metavar="OWNER/NAME", help="the repository, made if it is not there")
    parser.add_argument("--private", action="store_true", help="make it a private one")
    parser.add_argument(
        "--also", type=Path, action="append", default=[], metavar="FOLDER", help="an export, sent beside"
    )
    parser.add_argument("--yes", action="store_true", help="send it")
    args = parser.parse_args(argv)
    check_name(args.name)
    parcel = pack(args.path, args.name, args.also)
    for line in describe(parcel, args.name, args.private):
        print(line)
    if not args.yes:
        token = "" if has_token() else f" There is no token here yet: {LOG_IN}."
        print(f"\nNothing was sent: --yes sends it.{token}")
        return
    if not has_token():
        raise ValueError(
            f"there is no token of the hub here: {LOG_IN}; a page of its settings makes tokens that may write"
        )
    print(f"\n{send(parcel, args.name, private=args.private)}")


def pack(path: Path, name: str, also: list[Path]) -> Parcel:
    """All that goes of a head, an export, a feature store or answers, without what names this machine."""
    if path.is_file():
        parcel = pack_answers(path, name)
    elif (path / "index.json").is_file():
        parcel = pack_store(path, name)
    elif (path / "config.json").is_file():
        parcel = pack_export(path) if is_export(path) else pack_head(path, name)
    else:
        near = f"; did you mean {path / 'head'}?" if (path / "head").is_dir() else ""
        raise ValueError(f"nothing to push at {path}: expected a head, an export, a feature store or answers{near}")
    if also and "recipe.yaml" not in parcel.files:
        raise ValueError(f"--also {also[0]}: exports go beside a head, and {path} is none")
    for folder in also:
        if not is_export(folder):
            raise ValueError(f"--also {folder} holds no export: expected a folder that `eagle export` wrote")
        parcel.stays.pop(str(folder.absolute()), None)
        parcel.add_folder(folder, f"{folder.resolve().name}/", "an export of it, as `eagle export` wrote it")
    if "recipe.yaml" in parcel.files:  # a head, which `model.generate(custom_generate="OWNER/NAME")` drafts with
        own = path / CUSTOM_GENERATE
        parcel.stays.pop(str(own.parent.absolute()), None)
        code = own if own.is_file() else CODE.encode()
        parcel.add(CUSTOM_GENERATE, code, "drafts in transformers' own generate", path)
    parcel.clean()
    if parcel.changed.keys() >= {"config.json"} and "index.json" in parcel.files:
        _note_checksum(parcel)
    return parcel


def pack_store(folder: Path, name: str) -> Parcel:
    """A feature store whole: its shards with their checksums, its index, its card."""
    FeatureStore = import_module("eagle.data.store").FeatureStore
    store = FeatureStore(folder)  # which refuses a store that is not complete
    store.borrowed_folder()
    progress = import_module("eagle.log").progress
    count = len(store.plan)
    for _ in progress(store.verify(range(count)), "verify", count, unit="shards"):
        pass  # whoever fetches the store would be told of a damaged shard
    parcel = Parcel("dataset", Path.home())
    parcel.add_folder(folder, "", "a part of the store")
    parcel.frozen = parcel.files.keys() - {"README.md", "index.json", "config.json"}
    if "README.md" not in parcel.files:
        card = import_module("data_prep.dataset_card").dataset_card(folder, name)
        parcel.add("README.md", card.encode(), "its card")
    return parcel


def pack_answers(path: Path, name: str) -> Parcel:
    """Conversations that `eagle prepare` wrote, with the settings that made them, and their card."""
    note = Path(f"{path}.settings")
    card = import_module("data_prep.dataset_card").dataset_card(path, name)  # which needs that note
    parcel = Parcel("dataset", Path.home())
    parcel.add(path.name, path, "the conversations, as they are")
    parcel.frozen = {path.name}
    parcel.add(note.name, note, "what made them")
    own = path.with_name("README.md")
    parcel.add("README.md", own if own.is_file() else card.encode(), "their card")
    if json.loads(note.read_text()).get("data", {}).get("images"):
        parcel.stays["images"] = "are named by the conversations, and are not yours to give by this command"
    return parcel


def _note_checksum(parcel: Parcel) -> None:
    """Note in a store's index the checksum of the target's config, in which something was hidden."""
    index = json.loads(parcel.files["index.json"].read())
    digest = hashlib.sha256(parcel.files["config.json"].read()).hexdigest()
    index["made"]["borrowed"]["config.json"] = digest
    parcel.files["index.json"] = Sent(json.dumps(index, indent=1).encode(), parcel.files["index.json"].why)


def describe(parcel: Parcel, name: str, private: bool) -> Iterator[str]:
    """Where a parcel goes, each of its files, what was hidden, and what stays."""
    seen = "private" if private else "public"
    yield f"to {name}, a {seen} {parcel.kind} repository; one that is there stays as visible as it is"
    lines: dict[str, list[Sent]] = {}
    for file, item in parcel.files.items():
        lines.setdefault(re.sub(r"\d{5}", "*", file), []).append(item)  # the shards of a store are one line
    width = max(map(len, lines))
    for file, items in lines.items():
        count = f" ({len(items)} files)" if len(items) > 1 else ""
        yield f"  {file:<{width}}  {_size(sum(item.size for item in items)):>9}  {items[0].why}{count}"
    yield f"  {len(parcel.files)} files, {_size(sum(item.size for item in parcel.files.values()))}"
    for file, words in parcel.changed.items():
        listed = ", ".join(f"{old} is now {parcel.hidden[old]}" for old in words)
        yield f"hidden in {file}: {listed}"
    for file, paths in parcel.named.items():
        yield f"still named in {file}: {', '.join(paths[:5])}; edit it if others should not read that"
    for path, why in parcel.stays.items():
        yield f"stays here: {path} {why}"


def _size(number: int) -> str:
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000  # type: ignore[assignment]
    return f"{number:,.2f} GB"


def run_pull(argv: list[str]) -> None:
    """Bring a head, features or answers from a hub, with every file verified."""
    parser = argparse.ArgumentParser(prog="eagle pull", description=run_pull.__doc__)
    parser.add_argument(
        "name", metavar="OWNER/NAME", help="the repository; datasets/OWNER/NAME where a head has the name, too"
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="a new folder, or one that holds a part of it")
    parser.add_argument("--revision", help="a branch, a tag or a commit")
    args = parser.parse_args(argv)
    fetched = fetch(args.name, args.out, args.revision)
    if not fetched.new:
        print(f"{args.out} holds all {len(fetched.files)} files of {args.name} already, with the same bytes")
    else:
        count = (
            f"{len(fetched.new)} of {len(fetched.files)} files"
            if len(fetched.new) < len(fetched.files)
            else f"{len(fetched.files)} files"
        )
        print(
            f"{count} of {args.name} at {fetched.commit[:12]} in {args.out}, each with the checksum that the hub lists"
        )
    print(next_step(args.out))


def next_step(folder: Path) -> str:
    """What to do with what was fetched."""
    if (folder / "index.json").is_file():
        return f"train on these features with features.store={folder}"
    if answers := sorted(folder.glob("*.settings")):
        return f"train on these conversations with data.train={answers[0].with_suffix('')}"
    if (folder / "recipe.yaml").is_file():
        recipe = parse_yaml(read_text(folder, "recipe.yaml", CONFIG_BYTES), str(folder / "recipe.yaml"))
        target = recipe.get("target", {}).get("path") if isinstance(recipe, dict) else None
        return f'decode with it: eagle generate {folder} "What is a draft head?" --target {target or "TARGET"}'
    return f"look at it: eagle inspect {folder}"
