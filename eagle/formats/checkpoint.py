"""Heads on disk and from the hub: save, load, and `load_drafter` for every kind of drafter."""

from __future__ import annotations

import inspect
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import count
from pathlib import Path
from threading import get_ident
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch.nn import Module
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoConfig

from eagle import __version__
from eagle.core.arguments import nearest
from eagle.core.budget import MOST_NODES, Budget
from eagle.core.drafter import Drafter, TrainableDrafter
from eagle.device import in_dtype
from eagle.disk import write_tensors, write_text, write_whole
from eagle.drafters import DRAFTERS, stored_settings
from eagle.drafters.outside import METHOD_FILE, SPELLED, code_text, describe_code
from eagle.drafters.several import FirstOf
from eagle.formats.layout import check_fit
from eagle.formats.reading.folder_paths import CONFIG_BYTES, check_links, has, plain_file, read_text
from eagle.formats.reading.head_weights import check_finite, compare_entries, read_entries, read_weights
from eagle.target.target import Target

ON_HUB = ("config.json", "model.safetensors", "recipe.yaml", "provenance.json", "README.md", METHOD_FILE)
MOST_WEIGHTS = 4_000  # tensors of any head
MOST_LAYERS = 1_000_000  # that a config may name: some configs make a list of them


def save_pretrained(head: TrainableDrafter, folder: str | Path) -> None:
    """Write a head's config.json and model.safetensors into a folder, and the file of a method that is not our own."""
    folder = Path(folder)
    config = {"settings": head.settings.model_dump(mode="json"), "shape": head.shape.to_dict()}
    if (code := describe_code(type(head))) is not None:
        config["code"] = code
    if (text := code_text(type(head))) is not None:
        write_whole(folder / METHOD_FILE, [text])
    write_text(folder / "config.json", json.dumps(config, indent=2))
    write_tensors(folder / "model.safetensors", head.state_dict())


def save_head(folder: str | Path, head: TrainableDrafter, recipe: str, provenance: dict[str, Any]) -> None:
    """Save a head with recipe and provenance, replacing the folder once everything is written beside it."""
    folder = Path(folder)
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    save_pretrained(head, part)
    (part / "recipe.yaml").write_text(recipe)
    (part / "provenance.json").write_text(json.dumps(provenance, indent=2))
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(part, folder)


def load_head(folder: str | Path, *, trust_code: bool = False) -> TrainableDrafter:
    """A trained head; ValueError for damaged files, and for missing, unknown or misshapen tensors.

    The method of a head may be a file in its folder, which runs with `trust_code` alone, unless it is loaded already.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(f"no head at {folder}: expected the folder that training leaves in train.out, head or last")
    config = _read_config(folder)
    if not isinstance(config.get("settings"), dict) or not isinstance(config.get("shape"), dict):
        raise ValueError(
            f"the config.json in {folder} is none of this project's: expected the keys settings and shape; "
            f"`eagle import {folder} OUT` makes a head of one that another tool or an export wrote"
        )
    if has(folder, METHOD_FILE):
        plain_file(folder, METHOD_FILE)
    DRAFTERS.admit(folder, config, trust_code=trust_code)
    source, entries = str(folder / "config.json"), read_entries(folder)
    with torch.device("meta"):  # which takes no memory, whatever sizes the config names
        expected = build_head(config, source).state_dict()
    compare_entries(folder, entries, expected)
    head, weights = build_head(config, source), read_weights(folder)
    check_finite(folder, weights)
    head.load_state_dict(weights)
    head.budget = _read_budget(config.get("budget"), source)
    return head


def _read_config(folder: Path) -> dict[str, Any]:
    """The mapping in a folder's config.json; ValueError if it cannot be read."""
    path = folder / "config.json"
    text = read_text(folder, "config.json", CONFIG_BYTES)
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:  # no JSON, or brackets in brackets without end
        raise ValueError(f"{path} cannot be read: {error}; is it cut short? Copy it again") from None
    return config if isinstance(config, dict) else {}


def build_head(config: dict[str, Any], source: str) -> TrainableDrafter:
    """A head with a config's settings and sizes, and fresh weights."""
    try:
        settings = stored_settings(config["settings"], source)
    except ValueError as error:
        raise ValueError(
            f"{error}; was the head made by a newer release, or by a method that this process was not told of "
            f"(--plugin PATH.py)? This one is {__version__}"
        ) from None
    try:
        with bounded_weights():
            head = DRAFTERS[settings.kind](settings, _read_shape(config["shape"]))
    except Exception as error:  # of many kinds: transformers and torch check the sizes
        raise ValueError(f"{source}: no head of these sizes can be made: {error!r:.300}") from None
    token, size = getattr(settings, "mask_token", None), head.shape.vocab_size
    if token is not None and not 0 <= token < size:
        raise ValueError(f"{source}: mask_token is {token}, expected a token of the vocabulary, 0 to {size - 1}")
    return head


def _read_shape(shape: dict[str, Any]) -> Any:
    """The config of a head's sizes; refused where it names code, or more layers than memory holds a list of."""
    layers = shape.get("num_hidden_layers", 1)
    if "auto_map" in shape:
        raise ValueError("the shape has auto_map, which names code to run: take it out")
    for name in ("attn_implementation", "_attn_implementation"):
        if "/" in str(shape.get(name)):
            raise ValueError(f"{name} is {shape[name]!r:.200}, which names code to fetch and run: take it out")
    if not isinstance(layers, int) or layers > MOST_LAYERS:
        raise ValueError(f"num_hidden_layers is {layers!r:.30}, expected at most {MOST_LAYERS:,}")
    return AutoConfig.for_model(**shape)


@contextmanager
def bounded_weights() -> Iterator[None]:
    """Refuse to make more weights in here than any head has: a config of unknown origin may ask for any number."""
    thread, numbers = get_ident(), count(1)

    def check_count(module: Module, name: str, weight: Any) -> None:
        if get_ident() == thread and next(numbers) > MOST_WEIGHTS:
            raise ValueError(f"it would have more than {MOST_WEIGHTS:,} weight tensors")

    hook = register_module_parameter_registration_hook(check_count)
    try:
        yield
    finally:
        hook.remove()


def _read_budget(values: dict[str, Any] | None, source: str) -> Budget | None:
    """The tuned budget in a head's config, None if it has none."""
    if values is None:
        return None
    try:
        paths = values["paths"] and tuple(map(tuple, values["paths"]))
        for name in ("nodes", "depth", "top_k"):
            if (limit := values.get(name, 0)) > MOST_NODES:
                raise ValueError(f"{name} is {limit}, expected at most {MOST_NODES:,}, as in any tree that was tuned")
        return Budget(**{**values, "paths": paths})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{source}: budget cannot be read: {error!r}; tune it again, or take the key out") from None


def write_budget(folder: str | Path, budget: Budget) -> None:
    """Write a tuned budget into a head's config.json, from which `load_head` reads it."""
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text()) | {"budget": asdict(budget)}
    write_text(path, json.dumps(config, indent=2))


def from_pretrained(path: str | Path, revision: str | None = None, *, trust_code: bool = False) -> TrainableDrafter:
    """A trained head from a folder or a hub id; `trust_code` as in `load_head`."""
    folder = Path(path)
    if not folder.is_dir():
        folder = _download(str(path), revision)
    if missing := [name for name in ON_HUB[:2] if not (folder / name).is_file()]:
        raise ValueError(f"no head in {path}: {', '.join(missing)} missing; expected a folder that save_head wrote")
    return load_head(folder, trust_code=trust_code)


def _download(name: str, revision: str | None) -> Path:
    """The cache folder of a head from the hub, with only the files in `ON_HUB`."""
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(ON_HUB)))
    except Exception as error:  # of many kinds: not an id, no such repository, no network
        raise ValueError(f"no head at {name}: expected a folder, or a hub id as owner/name: {error}") from error


def _method_for(folder: Path) -> Any:
    """The method that loads a folder of counted tables or a language model; None for a trained head."""
    config = _read_config(folder) if (folder / "config.json").is_file() else {}
    check_links(folder)
    kind = config.get("kind", "draft_model" if "model_type" in config else None)
    if "settings" in config or kind is None:
        return None
    file_methods = [name for name, method in DRAFTERS.items() if method.stored_as == "files"]
    if kind not in file_methods:
        raise ValueError(f"{folder / 'config.json'}: kind is {kind!r}, expected one of {', '.join(file_methods)}")
    return DRAFTERS[kind]


def load_drafter(
    name: str | Path | Sequence[str | Path],
    target: Target,
    revision: str | None = None,
    *,
    trust_code: bool = False,
    **options: Any,
) -> Drafter:
    """A drafter for a target: a folder or hub id (trained head, table of counts, language model) or a method's name.

    Options go to the methods without weights that take them. Several names, in a list or separated by commas, are
    tried in order until one proposes a draft. `trust_code` lets a head bring the file of its method, which is run.
    """
    if not isinstance(target, Target):
        raise ValueError(f"the target is a {type(target).__name__}, expected a Target: load_drafter(name, target)")
    names, accepted = _split_names(name), check_options(name, options)
    drafters = []
    for name in names:
        name_options = {key: value for key, value in options.items() if key in accepted[name]}
        drafter = _load_one(name, target, revision, name_options, trust_code)
        if drafter.reads.view:
            drafter.bind_target(target.view())
        if drafter.taps:
            target.check_taps(drafter.taps)
        drafters.append(drafter)
    return drafters[0] if len(drafters) == 1 else FirstOf(drafters)


def check_options(name: str | Path | Sequence[str | Path], options: Iterable[str]) -> dict[str, list[str]]:
    """The options of each drafter, by its name; options that no drafter takes are refused."""
    names = _split_names(name)
    methods = {name: method_without_files(name) for name in names}
    accepted = {name: [*inspect.signature(made).parameters] if made else [] for name, made in methods.items()}
    all_options = sorted({option for name in names for option in accepted[name]})
    if unknown := [option for option in options if option not in all_options]:
        raise ValueError(
            f"{', '.join(names)} has no option {unknown[0]}{nearest(unknown[0], all_options)}: expected one of "
            f"{', '.join(all_options) or 'none: options belong to ' + ', '.join(_names_without_files())}"
        )
    return accepted


def check_drafter(name: str | Path | Sequence[str | Path], options: Iterable[str] = ()) -> None:
    """Refuse what `load_drafter` would refuse without a look into files, before a target is loaded for it."""
    for one in check_options(name, options):
        if method_without_files(one) is None:
            _check_name(one)


def _check_name(name: str) -> None:
    """Refuse a name that is neither a folder nor may be a hub id."""
    free = _names_without_files()
    if not Path(name).is_dir() and name.count("/") != 1:
        raise ValueError(
            f"no drafter {name}{nearest(name, free)}: expected a folder with a trained head, counted tables or a "
            f"language model, or one of {', '.join([*free, *DRAFTERS.offered()])}, or PATH.py:CLASS"
        )


def method_without_files(name: str) -> Any:
    """The method of this name, or of `PATH.py:CLASS`, if it needs no files; else None."""
    is_class = SPELLED.fullmatch(name) is not None
    if name not in DRAFTERS and (Path(name).is_dir() or ("/" in name and not is_class)):
        return None
    method = DRAFTERS.find(name)
    if method is not None and method.stored_as == "head" and is_class:
        raise ValueError(
            f"{name} has weights, expected the folder of a trained head: train it with drafter.kind={name}"
        )
    return method if method is not None and method.stored_as == "nothing" else None


def _names_without_files() -> list[str]:
    """The registered methods that need no files."""
    return [kind for kind, method in DRAFTERS.items() if method.stored_as == "nothing"]


def _split_names(name: Any) -> list[str]:
    """The names in a string with commas or in a list; a path is one name."""
    items = name.split(",") if isinstance(name, str) else [name] if isinstance(name, Path) else name
    if not isinstance(items, (list, tuple)) or not all(isinstance(item, (str, Path)) for item in items):
        raise ValueError(f"got {type(name).__name__} for a drafter's name, expected a string, a path or a list of them")
    names = [str(item).strip() for item in items]
    if not names or not all(names):
        raise ValueError(
            f"got {name!r} for a drafter, expected a folder, a hub id or one of {', '.join(_names_without_files())}"
        )
    return names


def _load_one(name: str, target: Target, revision: str | None, options: dict[str, Any], trust_code: bool) -> Drafter:
    """One drafter by its name, folder or hub id."""
    if (method := method_without_files(name)) is not None:
        try:
            made: Drafter = method(**options)
            return made
        except TypeError as error:
            raise ValueError(f"{name}: an option of {options} is of a wrong type: {error}") from None
    folder = Path(name)
    _check_name(name)
    if (method := _method_for(folder)) is not None:
        return method.load(folder, target)
    head = in_dtype(from_pretrained(folder, revision, trust_code=trust_code).to(target.device), target.model.dtype)
    check_fit(head, target.config, str(folder))
    return head.bind(target.head)
