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
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoConfig

from eagle import __version__
from eagle.core.arguments import nearest
from eagle.core.budget import MOST_NODES, Budget
from eagle.core.drafter import Drafter, TrainableDrafter
from eagle.core.sampling import number
from eagle.device import in_dtype
from eagle.disk import write_tensors, write_text, write_whole
from eagle.drafters import DRAFTERS, stored_settings
from eagle.drafters.outside import METHOD_FILE, PLACE_AND_CLASS, code_text, describe_code
from eagle.drafters.parts.reduced_vocab import load_draft_vocab, write_draft_vocab
from eagle.drafters.several import FirstOf
from eagle.formats.layout import check_fit
from eagle.formats.reading.files import (
    CONFIG_BYTES,
    TensorEntry,
    check_links,
    check_not_hollow,
    has,
    plain_file,
    read_header,
    read_text,
)
from eagle.target.target import Target
from eagle.target.weights.packed import narrow_packed

WEIGHTS = "model.safetensors"
TEMPERATURES = "confidence_temperatures.json"  # as SGLang reads them
DRAFT_VOCAB = (
    "draft_vocab.safetensors"  # the tokens that a head drafts, if its loss compared no others
)
ALL_TOKENS = (
    "all"  # the value of the option `draft_vocab` for which a head drafts the whole vocabulary
)
# options of `load_drafter` for a folder: of a head, or of a language model
HEAD_OPTIONS = ["draft_vocab", "translate"]
# the files of a head that are sent to the hub and fetched from it
ON_HUB = (
    "config.json",
    WEIGHTS,
    DRAFT_VOCAB,
    TEMPERATURES,
    "recipe.yaml",
    "provenance.json",
    "README.md",
    METHOD_FILE,
)
MAX_WEIGHTS = 4_000  # weight tensors, more than any head has
# layers in a config, of which classes of transformers make lists
MAX_LAYERS = 1_000_000
PLAIN_DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
Names = str | Path | Sequence[str | Path]  # of one drafter or several


# -- saving -----------------------------------------------------------------------------------------------------------


def save_pretrained(head: TrainableDrafter, folder: str | Path) -> None:
    """Write a head's config.json and model.safetensors into a folder, and the tokens that it drafts if not all.

    If its method is a user's own class, the file of the class is copied too, and the config says which class it is.
    """
    folder = Path(folder)
    # the recipe's section `drafter`, and the sizes as a transformers config
    config = {"settings": head.settings.model_dump(mode="json"), "shape": head.shape.to_dict()}
    # where a user's own class comes from; None for a method of this package
    code = describe_code(type(head))
    if code is not None:
        config["code"] = code
    text = code_text(type(head))
    if text is not None:
        write_whole(folder / METHOD_FILE, [text])
    write_text(folder / "config.json", json.dumps(config, indent=2))
    write_tensors(folder / WEIGHTS, head.state_dict())
    tokens = getattr(head, "loss_tokens", None)
    if tokens is not None:
        write_draft_vocab(folder / DRAFT_VOCAB, tokens.cpu(), head.shape.vocab_size, {})


def save_head(
    folder: str | Path, head: TrainableDrafter, recipe: str, provenance: dict[str, Any]
) -> None:
    """Save a head with recipe and provenance, replacing the folder once everything is written beside it.

    Args:
        folder: The head's folder; whatever it holds is deleted.
        head: The head.
        recipe: The text of recipe.yaml, by which it was trained.
        provenance: The contents of provenance.json, which say what made it.
    """
    folder = Path(folder)
    staging = folder.with_name(folder.name + ".part")
    # a call that was interrupted leaves this folder
    shutil.rmtree(staging, ignore_errors=True)
    save_pretrained(head, staging)
    (staging / "recipe.yaml").write_text(recipe)
    (staging / "provenance.json").write_text(json.dumps(provenance, indent=2))
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(staging, folder)


def write_budget(folder: str | Path, budget: Budget) -> None:
    """Write a tuned budget, the size and shape of a draft tree, into a head's config.json; `load_head` reads it."""
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text()) | {"budget": asdict(budget)}
    write_text(path, json.dumps(config, indent=2))


# -- loading a head ---------------------------------------------------------------------------------------------------


def load_head(folder: str | Path, *, trust_code: bool = False) -> TrainableDrafter:
    """Load a trained head; ValueError for damaged files, and for missing, unknown or misshapen tensors.

    The head is not bound to a target yet: `bind` gives it the target's embedding and LM head.

    Args:
        folder: The head's folder, as training leaves it.
        trust_code: Whether the method of a head may be a file in its folder, which runs then. Without it the method
            must be loaded already.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"no head at {folder}: expected the folder that training leaves in train.out, head or last"
        )
    config = _read_config(folder)
    if not isinstance(config.get("settings"), dict) or not isinstance(config.get("shape"), dict):
        raise ValueError(
            f"the config.json in {folder} is none of this project's: expected the keys settings and shape; "
            f"`eagle import {folder} OUT` makes a head of one that another tool or an export wrote"
        )
    # the file may be run: refuse a link that leads out of the folder
    if has(folder, METHOD_FILE):
        plain_file(folder, METHOD_FILE)
    # registers the head's method, which may run the file; refuses code that is not trusted
    DRAFTERS.admit(folder, config, trust_code=trust_code)
    source = str(folder / "config.json")
    # compare the sizes in the file with those that the config asks for, before memory is taken for either
    entries = _read_entries(folder)
    with torch.device("meta"):  # which takes no memory, whatever sizes the config names
        expected = build_head(config, source).state_dict()
    _compare_entries(folder, entries, expected)
    head = build_head(config, source)
    weights = _read_weights(folder)
    _check_finite(folder, weights)
    head.load_state_dict(weights)
    if has(folder, DRAFT_VOCAB):
        head.loss_tokens = _read_draft_tokens(folder, head)
    head.budget = _read_budget(config.get("budget"), source)
    if has(folder, TEMPERATURES):
        head.confidence_temperatures = _read_temperatures(folder, head)
    return head


def from_pretrained(
    path: str | Path, revision: str | None = None, *, trust_code: bool = False
) -> TrainableDrafter:
    """Load a trained head from a folder or the hub; it is not bound to a target yet.

    Args:
        path: The head's folder or its hub id.
        revision: The branch, tag or commit on the hub; None for the newest.
        trust_code: As in `load_head`.
    """
    folder = Path(path)
    if not folder.is_dir():
        folder = _download(str(path), revision)
    missing = [name for name in ("config.json", WEIGHTS) if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"no head in {path}: {', '.join(missing)} missing; expected the folder `head` of a run, as RUN/head, one "
            "that `eagle import` wrote, or a hub id"
        )
    return load_head(folder, trust_code=trust_code)


def _download(name: str, revision: str | None) -> Path:
    """Return the cache folder of a head from the hub; only the files in `ON_HUB` are downloaded."""
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(ON_HUB)))
    except Exception as error:  # of many kinds: not an id, no such repository, no network
        raise ValueError(
            f"no head at {name}: expected a folder, or a hub id as owner/name: {error}"
        ) from error


def _read_config(folder: Path) -> dict[str, Any]:
    """Return the mapping in a folder's config.json, an empty one for other JSON; ValueError if it cannot be read."""
    text = read_text(folder, "config.json", CONFIG_BYTES)
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:  # no JSON, or brackets in brackets without end
        path = folder / "config.json"
        raise ValueError(
            f"{path} cannot be read: {error}; is it cut short? Copy it again"
        ) from None
    return config if isinstance(config, dict) else {}


def build_head(config: dict[str, Any], source: str) -> TrainableDrafter:
    """Return a head with the settings and sizes of a config.json, and fresh weights.

    ValueError if no head has such settings or sizes.

    Args:
        config: The contents of config.json of a head of this project, with "settings" and "shape".
        source: Its path, for messages.
    """
    try:
        settings = stored_settings(config["settings"], source)
    except ValueError as error:
        raise ValueError(
            f"{error}; was the head made by a newer release, or by a method that this process was not told of "
            f"(--plugin PATH.py)? This one is {__version__}"
        ) from None
    try:
        # a config of unknown origin may ask for any number of tensors
        with bounded_weights():
            head = DRAFTERS[settings.kind](settings, _read_shape(config["shape"]))
    except Exception as error:  # of many kinds: transformers and torch check the sizes
        raise ValueError(f"{source}: no head of these sizes can be made: {error!r:.300}") from None
    mask_token = getattr(settings, "mask_token", None)
    size = head.shape.vocab_size
    if mask_token is not None and not 0 <= mask_token < size:
        raise ValueError(
            f"{source}: mask_token is {mask_token}, expected a token of the vocabulary, 0 to {size - 1}"
        )
    return head


def _read_shape(shape: dict[str, Any]) -> Any:
    """Return a head's sizes as a config of transformers; ValueError if they name code or an absurd number of layers.

    Args:
        shape: The section "shape" of config.json, of unknown origin.
    """
    layers = shape.get("num_hidden_layers", 1)
    # transformers runs code that a config names by this key
    if "auto_map" in shape:
        raise ValueError("the shape has auto_map, which names code to run: take it out")
    # transformers fetches a kernel from the hub by such a name
    for name in ("attn_implementation", "_attn_implementation"):
        if "/" in str(shape.get(name)):
            raise ValueError(
                f"{name} is {shape[name]!r:.200}, which names code to fetch and run: take it out"
            )
    # classes of transformers make lists of so many items, before any weight is made
    if not isinstance(layers, int) or layers > MAX_LAYERS:
        raise ValueError(f"num_hidden_layers is {layers!r:.30}, expected at most {MAX_LAYERS:,}")
    return AutoConfig.for_model(**shape)


@contextmanager
def bounded_weights() -> Iterator[None]:
    """Raise ValueError inside the `with` block once this thread has made more than MAX_WEIGHTS weight tensors.

    No head has so many, but a config of unknown origin may ask for any number of layers.
    """
    # torch calls the hook for every module of the process, so weights that other threads make are not counted
    thread = get_ident()
    numbers = count(1)

    # torch calls it with the module, the parameter's name and the parameter
    def check_count(module: Module, name: str, weight: Any) -> None:
        if get_ident() == thread and next(numbers) > MAX_WEIGHTS:
            raise ValueError(f"it would have more than {MAX_WEIGHTS:,} weight tensors")

    hook = register_module_parameter_registration_hook(check_count)
    try:
        yield
    finally:
        hook.remove()


def _read_budget(values: dict[str, Any] | None, source: str) -> Budget | None:
    """Return the tuned budget in a head's config: the size and shape of its draft tree; None if it has none.

    Args:
        values: The fields of a `Budget` under the key "budget", of unknown origin.
        source: The path of config.json, for messages.
    """
    if values is None:
        return None
    try:
        # the fixed tree: for each node the ranks of the children on the way to it. JSON has no tuples; a budget without
        # a fixed tree has None or an empty list.
        paths = values["paths"] and tuple(map(tuple, values["paths"]))
        # memory grows with these, so that a file of unknown origin must not choose them freely
        for name in ("nodes", "depth", "top_k"):
            limit = values.get(name, 0)
            if limit > MOST_NODES:
                raise ValueError(
                    f"{name} is {limit}, expected at most {MOST_NODES:,}, as in any tree that was tuned"
                )
        return Budget(**{**values, "paths": paths})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{source}: budget cannot be read: {error!r}; tune it again, or take the key out"
        ) from None


# -- its weights, compared with what its config says before any of them is read ---------------------------------------


def _read_entries(folder: Path) -> dict[str, TensorEntry]:
    """Return the names, sizes and dtypes of a head's tensors by the file's header; ValueError if it cannot be read."""
    display_path = folder / WEIGHTS
    try:
        path = plain_file(folder, WEIGHTS)
        check_not_hollow(path, display_path)
        return read_header(path, display_path)
    except ValueError as error:
        raise ValueError(
            f"{display_path} cannot be read: {error}; is it cut short? Copy it again"
        ) from None


def _read_draft_tokens(folder: Path, head: TrainableDrafter) -> Tensor:
    """Return the tokens [D] that a head's folder says it drafts, of unknown origin."""
    path = folder / DRAFT_VOCAB
    try:
        _, t2d = load_draft_vocab(plain_file(folder, DRAFT_VOCAB))
        if not hasattr(head, "loss_tokens") or t2d.shape != (head.shape.vocab_size,):
            raise ValueError(f"it has {len(t2d)} tokens, and is of no {head.settings.kind} head")
    except (ValueError, OSError, SafetensorError) as error:
        raise ValueError(
            f"{path} cannot be read: {error}; copy it again, or delete it: the head then drafts all tokens"
        ) from None
    return t2d.nonzero()[:, 0]


def _read_temperatures(folder: Path, head: TrainableDrafter) -> tuple[float, ...]:
    """Return the temperature of each level's confidence that a head's folder holds, a file of unknown origin."""
    try:
        temperatures = json.loads(read_text(folder, TEMPERATURES, CONFIG_BYTES))["temperatures"]
        values = tuple(number("a temperature", value) for value in temperatures)
        if not head.rates_nodes or len(values) != head.levels or not min(values) > 0:
            raise ValueError(
                f"it holds {values}, expected a number above 0 for each level of a head with a confidence"
            )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{folder / TEMPERATURES} cannot be read: {error}; tune the head again, or delete the file"
        ) from None
    return values


def _compare_entries(
    folder: Path, entries: dict[str, TensorEntry], expected: dict[str, Tensor]
) -> None:
    """Raise ValueError for a weight file whose tensors are not those of the head, by names, sizes and dtypes alone.

    Args:
        folder: The head's folder, for messages.
        entries: The tensors in the file, by its header.
        expected: The tensors of a head that is built from the config, on the meta device.
    """
    missing = expected.keys() - entries.keys()
    unknown = entries.keys() - expected.keys()
    if missing or unknown:
        raise ValueError(
            f"{folder} is not this head: missing tensors {sorted(missing)}, unknown {sorted(unknown)}"
        )
    for name, entry in entries.items():
        shape = tuple(expected[name].shape)
        dtype = expected[name].dtype
        if entry.shape != shape:
            raise ValueError(
                f"{folder} is not this head: {name} is {list(entry.shape)}, expected {list(shape)} by its config.json: "
                "copy both files again"
            )
        # weights are converted from any precision; indices, such as d2t, need their own dtype
        if dtype.is_floating_point:
            is_readable = entry.dtype in PLAIN_DTYPES
            wanted: Any = "plain floating-point numbers"
        else:
            is_readable = entry.dtype == dtype
            wanted = dtype
        if not is_readable:
            raise ValueError(
                f"{folder} is not this head: {name} is in {entry.dtype}, expected {wanted}: copy the weights again"
            )


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a head's weight file by name; ValueError if they cannot be read."""
    path = folder / WEIGHTS
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{path} cannot be read: {error}; is it cut short? Copy it again"
        ) from None


def _check_finite(folder: Path, weights: dict[str, Tensor]) -> None:
    """Raise ValueError for weights that are nan or infinite: such a head drafts nothing, or anything.

    Args:
        folder: The head's folder, for the message.
        weights: Its tensors by name.
    """
    for name, tensor in weights.items():
        # indices are always finite, and an empty tensor has no minimum
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        # a single nan makes both nan; unlike isfinite() this makes no second tensor
        minimum, maximum = tensor.aminmax()
        if not (minimum.isfinite() and maximum.isfinite()):
            raise ValueError(
                f"{folder}: {name} holds numbers that are not finite: take an earlier checkpoint, as "
                "`last` beside it may be, or copy the weights again"
            )


# -- drafters of any kind ---------------------------------------------------------------------------------------------


def load_drafter(
    name: str | Path | Sequence[str | Path],
    target: Target,
    revision: str | None = None,
    *,
    trust_code: bool = False,
    **options: Any,
) -> Drafter:
    """Load a drafter for a target.

    Args:
        name: A folder or hub id (trained head, table of counts, language model) or a method's name. For each draft,
            several drafters, in a list or separated by commas, are tried in order until one proposes tokens.
        target: The model that the drafter drafts for.
        revision: Branch, tag or commit of a head on the hub.
        trust_code: Whether the file `method.py` in a head's folder may run.
        options: What methods without weights take. A head that borrows the target's LM head takes `draft_vocab`, a
            file of `eagle prepare --only draft-vocab`: it then drafts these tokens alone, without logits of others. A
            head trained with `drafter.loss_vocab` drafts the tokens that it was trained on, or with "all" all tokens.
            A language model takes `translate`, which says how it drafts if it has another tokenizer than the target:
            "tokens" drafts those that both have, "text" any, whose text the target's tokenizer splits again.
    """
    if not isinstance(target, Target):
        raise ValueError(
            f"the target is a {type(target).__name__}, expected a Target: load_drafter(name, target)"
        )
    # of several drafters, each gets the options that it takes: a drafter's name -> names of options
    accepted = check_options(name, options)
    drafters = []
    for drafter_name in _split_names(name):
        own_options = {
            key: value for key, value in options.items() if key in accepted[drafter_name]
        }
        drafter = _load_one(
            drafter_name, target, own_options, revision=revision, trust_code=trust_code
        )
        # it runs the target's own layers when it drafts
        if drafter.reads.view:
            drafter.bind_target(target.view())
        # it reads states of the target at these layers: the target must have them
        if drafter.taps:
            target.check_taps(drafter.taps)
        drafters.append(drafter)
    return drafters[0] if len(drafters) == 1 else FirstOf(drafters)


def check_drafter(name: Names, options: Iterable[str] = ()) -> None:
    """Raise ValueError for names and options that `load_drafter` would refuse; no files are read.

    Programs call it first, so that a typing error does not wait for a target to be loaded.

    Args:
        name: As in `load_drafter`.
        options: The names of its options.
    """
    for drafter_name in check_options(name, options):
        if method_without_files(drafter_name) is None:
            _check_name(drafter_name)


def check_options(name: Names, options: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of the options that each drafter takes, by its name.

    ValueError for an option that none of them takes.

    Args:
        name: One drafter or several, as in `load_drafter`.
        options: The names of the options that are given.
    """
    names = _split_names(name)
    accepted: dict[str, list[str]] = {}
    for drafter_name in names:
        method = method_without_files(drafter_name)
        accepted[drafter_name] = HEAD_OPTIONS
        # a method without files takes the arguments of its class
        if method:
            accepted[drafter_name] = [*inspect.signature(method).parameters]
    valid = sorted({option for of_one in accepted.values() for option in of_one})
    for option in options:
        if option not in valid:
            usual = ", ".join(valid) or "none"
            # only heads were named: say which drafters take other options
            if valid == HEAD_OPTIONS:
                usual += "; other options belong to " + ", ".join(_names_stored_as("nothing"))
            raise ValueError(
                f"{', '.join(names)} has no option {option}{nearest(option, valid)}: expected one of {usual}"
            )
    return accepted


def method_without_files(name: str) -> Any:
    """Return the method of this name if it needs no files, as n-grams; None for a folder or a hub id.

    Args:
        name: A method's name, a folder, a hub id, or `PATH.py:CLASS` for a user's own class, whose file is then run.
    """
    is_class = PLACE_AND_CLASS.fullmatch(name) is not None
    # a registered name comes first, even if a folder has the same name
    if name not in DRAFTERS and (Path(name).is_dir() or ("/" in name and not is_class)):
        return None
    method = DRAFTERS.find(name)
    if method is not None and method.stored_as == "head" and is_class:
        raise ValueError(
            f"{name} has weights, expected the folder of a trained head: train it with drafter.kind={name}"
        )
    if method is not None and method.stored_as == "nothing":
        return method
    return None


def _load_one(
    name: str, target: Target, options: dict[str, Any], *, revision: str | None, trust_code: bool
) -> Drafter:
    """Load one drafter: a method without files by its name, or tables, a language model or a head from their folder.

    Args:
        name: A method's name, a folder or a hub id.
        target: The target, which a head is bound to.
        options: Those of `load_drafter` that this drafter takes.
        revision: The revision of a head on the hub.
        trust_code: Whether a head may bring the file of its method, which is run.
    """
    method = method_without_files(name)
    if method is not None:
        try:
            made: Drafter = method(**options)  # an instance of the method's class
            return made
        except TypeError as error:
            raise ValueError(
                f"{name}: an option of {options} is of a wrong type: {error}"
            ) from None
    folder = Path(name)
    _check_name(name)
    # the method that loads tables or a language model; None for a trained head
    method = _method_of_files(folder)
    # a head takes a draft vocabulary alone
    accepted = {"draft_vocab"} if method is None else inspect.signature(method.load).parameters
    wrong = [option for option in options if option not in accepted]
    if wrong:
        kind = "trained head" if method is None else method.__name__
        raise ValueError(
            f"{name} is a {kind}: got the option {wrong[0]}, expected draft_vocab for a trained head and translate "
            "for a language model"
        )
    if method is not None:
        return method.load(folder, target, **options)
    draft_vocab = options.get("draft_vocab")
    head = from_pretrained(folder, revision, trust_code=trust_code)
    head = in_dtype(head.to(target.device), target.model.dtype)
    check_fit(head, target.config, str(folder))
    # from here on the head uses the target's embedding and LM head
    bound = head.bind(target.head)
    own_tokens = getattr(head, "loss_tokens", None)
    if draft_vocab is None and own_tokens is not None:
        draft_only(bound, own_tokens)
    elif draft_vocab == ALL_TOKENS:
        _check_unrestricted(bound, draft_vocab)
    elif draft_vocab is not None:
        restrict_drafts(bound, draft_vocab)
    return bound


def _check_unrestricted(head: TrainableDrafter, draft_vocab: str) -> None:
    """Raise ValueError if a head was trained with a draft vocabulary of its own, which no option changes.

    Args:
        head: The head, bound to its target.
        draft_vocab: The option's value, for the message.
    """
    if head.drafts is not None:
        raise ValueError(
            f"draft_vocab is {draft_vocab}, and this {head.settings.kind} was trained with a draft vocabulary of "
            f"{len(head.drafts)} tokens: leave the option out"
        )


def restrict_drafts(head: TrainableDrafter, draft_vocab: str) -> None:
    """Let a bound head draft only the tokens of a draft vocabulary, as FR-Spec does (Zhao et al. 2025); it is changed.

    The target's LM head costs a small head most of the time of a level; now only its rows for these tokens are read.
    Output stays lossless: tokens that cannot be drafted have a draft probability of 0.

    Args:
        head: The head, bound to its target. From now on it is bound to the narrowed LM head.
        draft_vocab: A file that `eagle prepare --only draft-vocab` wrote.

    Raises:
        ValueError: if the head's logits are not the target's, or the file belongs to another vocabulary.
    """
    kind = head.settings.kind
    if not head.borrows_logits:
        raise ValueError(
            f"draft_vocab is {draft_vocab}, and {kind} does not draft by the target's LM head alone: expected one of "
            f"{', '.join(_names_that_borrow())}; others choose their draft vocabulary before they are trained"
        )
    _check_unrestricted(head, draft_vocab)
    # a mask of the tokens to draft, over the vocabulary; the offsets d2t say the same and are not needed
    _, t2d = load_draft_vocab(draft_vocab)
    target_head = head.target_head
    vocab_size = len(target_head.weight)
    if len(t2d) != vocab_size:
        raise ValueError(
            f"the draft vocabulary {draft_vocab} is of {len(t2d)} tokens, and the target's LM head has {vocab_size}: "
            "make one with this target's recipe by `eagle prepare --only draft-vocab`"
        )
    draft_only(head, t2d.nonzero()[:, 0])


def draft_only(head: TrainableDrafter, tokens: Tensor) -> None:
    """Let a bound head draft only these tokens [D] of the target, in ascending order; it is changed."""
    target_head = head.target_head
    tokens = tokens.to(target_head.weight.device)
    head.bound_to = (narrow_packed(target_head, tokens),)
    head.drafts = tokens


def _names_that_borrow() -> list[str]:
    """Return the names of the registered methods whose drafts have the logits of the target's LM head alone."""
    return [kind for kind, method in DRAFTERS.items() if getattr(method, "borrows_logits", False)]


def _method_of_files(folder: Path) -> Any:
    """Return the method that loads a folder of n-gram tables or a language model; None for a trained head.

    ValueError for a kind that is unknown, and for links out of the folder. None also if the folder is not there.
    """
    config: dict[str, Any] = {}
    if (folder / "config.json").is_file():
        config = _read_config(folder)
    check_links(folder)
    # the config of tables has a kind, that of a language model a model_type, and that of a head settings
    kind = config.get("kind")
    if "kind" not in config and "model_type" in config:
        kind = "draft_model"
    if "settings" in config or kind is None:
        return None
    file_methods = _names_stored_as("files")
    if kind not in file_methods:
        raise ValueError(
            f"{folder / 'config.json'}: kind is {kind!r}, expected one of {', '.join(file_methods)}"
        )
    return DRAFTERS[kind]


def _names_stored_as(what: str) -> list[str]:
    """Return the names of the methods that are stored in one way: as a trained "head", other "files", or "nothing"."""
    return [kind for kind, method in DRAFTERS.items() if method.stored_as == what]


def _check_name(name: str) -> None:
    """Raise ValueError for a drafter's name that is neither a folder nor of the form of a hub id, with one slash."""
    if not Path(name).is_dir() and name.count("/") != 1:
        without_files = _names_stored_as("nothing")
        raise ValueError(
            f"no drafter {name}{nearest(name, without_files)}: expected a folder with a trained head, counted tables "
            f"or a language model, or one of {', '.join([*without_files, *DRAFTERS.offered()])}, or PATH.py:CLASS"
        )


def _split_names(name: Any) -> list[str]:
    """Return the names of drafters in a list or in a string with commas; a Path is one name and may hold commas.

    ValueError for an empty name, and for what is no name.
    """
    items = name
    if isinstance(name, str):
        items = name.split(",")
    elif isinstance(name, Path):
        items = [name]
    if not isinstance(items, (list, tuple)) or not all(
        isinstance(item, (str, Path)) for item in items
    ):
        raise ValueError(
            f"got {type(name).__name__} for a drafter's name, expected a string, a path or a list of them"
        )
    names = [str(item).strip() for item in items]
    if not names or not all(names):
        without_files = _names_stored_as("nothing")
        raise ValueError(
            f"got {name!r} for a drafter, expected a folder, a hub id or one of {', '.join(without_files)}"
        )
    return names
