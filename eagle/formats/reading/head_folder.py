"""A checkpoint of unknown origin: its tensors by our names, its sizes, its own statements and its faults."""

# H width, V vocabulary, D tokens that can be drafted

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle.formats.reading.config_keys import NO_MATTER, Keys, read_rope, short
from eagle.formats.reading.files import FolderTensors, TensorEntry
from eagle.formats.reading.target_files import TargetFiles, count_differing_rows, is_multiple

# layouts of checkpoints, by the project that writes them or by what marks them
OWN = "this project"
SPECULATORS = "speculators"
AUTOMODEL = "Automodel"
REFERENCE = "SafeAILab/EAGLE"
MODELOPT = "ModelOpt"
MIDLAYER = "EAGLE-3, midlayer.*"
LAYERS = "EAGLE-3, layers.0.*"
EAGLE1 = "EAGLE-1"
UNKNOWN = "unknown"
# the target's tensors, by our names
EMBEDDING = "embed_tokens.weight"
OUTPUT = "lm_head.weight"
FOREIGN_TENSORS = {  # what no network here has
    r".*\.attention_sink_bias$": "attention sinks (a learned logit of each head)",
    r"parallel_draft_heads\.": "a Medusa head",
    r".*\.(kv_a_proj_with_mqa|kv_a_layernorm|kv_b_proj|q_a_\w+|q_b_proj)\.": "multi-head latent attention",
    r".*\.mlp\.(experts|gate\.|shared_expert)": "a mixture of experts",
    r"layers\.[1-9]\d*\.": "a second layer",
    r".*\.(q|k)_norm\.": "Qwen3's norm of queries and keys",
    r".*\.self_attn\.\w+_proj\.bias": "a bias in attention (attention_bias, qkv_bias)",
    r".*\.mlp\.\w+_proj\.bias": "a bias in the MLP (mlp_bias)",
    r"input_norm\.|norm_before_fc\.": "one norm over all taps (norm_before_fc)",
    r"(post_embedding|pre_lm_head|embed|lm_head)_?layernorm\.": "HASS's norm around the head (embed_layernorm, ...)",
    r"lm_head\.bias": "a bias in the LM head",
    r".*\.(weight_scale|input_scale|qweight|qzeros|scales|weight_packed)": "quantised weights",
}


@dataclass(frozen=True)
class Finding:
    """A fault of a checkpoint that costs acceptance or prevents loading in some engine."""

    what: str
    engines: tuple[str, ...] = ()  # the engines that it affects; empty for all readers
    fatal: bool = True
    fix: str = ""

    @property
    def sentence(self) -> str:
        """The fault, the engines that it affects and the remedy, as one text."""
        text = self.what
        if self.engines:
            text += f" [{', '.join(self.engines)}]"
        if self.fix:
            text += f". {self.fix}"
        return text

    def __str__(self) -> str:
        """Return the line that `eagle inspect` prints.

        A fatal finding costs acceptance or prevents loading.
        """
        severity = "FATAL" if self.fatal else "note "
        return f"{severity} {self.sentence}"


@dataclass
class HeadFolder:
    """A checkpoint while it is read; `read_folder`, `match` and `convert` fill in its fields one after the other.

    Whatever prevents an import is collected in `problems`, so that `inspect` can show all of it.
    """

    path: Path
    config: dict[str, Any]
    tensors: FolderTensors  # by their names in the file
    # sections of the config; without nested sections they are the same
    keys: Keys  # the whole config
    block: Keys  # the sizes of the head's Llama block
    nested: Keys  # eagle_config, dflash_config, or this project's settings
    target: TargetFiles | None = None  # the target with which it is compared
    layout: str = UNKNOWN  # who wrote it
    kind: str = ""  # what it is, in words: the name of a network, or something else
    method: str = ""  # the method of this project that it becomes
    # our name of a tensor -> its name in the file
    names: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)  # as a recipe would state them
    shape: dict[str, Any] = field(default_factory=dict)  # sizes, by the names of a Llama's config
    overrides: dict[str, Any] = field(default_factory=dict)  # sizes that the tensors decide
    draft_vocab_size: int = 0  # D
    tap_count: int = 1  # layers that the head reads
    inputs: tuple[int, ...] | None = None  # layers that the config names by their inputs
    outputs: tuple[int, ...] | None = None  # layers that the config names by their outputs
    target_layers: int | None = None  # the target's number of layers, if the config tells
    layer_number: str = ""  # the number of an MTP layer in its model
    differing_rows: int = 0  # rows of its embedding that are not the target's
    problems: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what an import assumed or left out

    @property
    def sections(self) -> tuple[Keys, Keys, Keys]:
        """The config's sections: the whole, that of its Llama block and the nested one; some may be the same."""
        return self.keys, self.block, self.nested

    @property
    def inputs_by_outputs(self) -> tuple[int, ...] | None:
        """The layers that the config names by their outputs, counted by their inputs; None if it names none so.

        The output of layer 1 is the input of layer 2.
        """
        return None if self.outputs is None else tuple(layer + 1 for layer in self.outputs)

    @property
    def is_of_speculators(self) -> bool:
        """Whether the config is one of the project `speculators`, which nests sizes and settings."""
        return "speculators_model_type" in self.config or "transformer_layer_config" in self.config

    @property
    def architectures(self) -> list[str]:
        """The config's architectures, by which engines choose what to load; empty if it names none."""
        names = self.config.get("architectures")
        if not isinstance(names, list):
            return []
        # cut, as a file of unknown origin may hold texts of any length, and they are shown
        return [name[:80] for name in names if isinstance(name, str)][:8]

    def unknown_keys(self) -> str:
        """Return, as text for the user, the keys of the config that nothing here reads though they may matter.

        Keys without a value are not listed.
        """
        shown = []
        # two sections may be one mapping, which is listed once
        for section in {id(section): section for section in self.sections}.values():
            with_value = {name for name, value in section.values.items() if value is not None}
            for name in sorted(with_value - section.handled - NO_MATTER):
                # the file may hold any text, such as control characters of a terminal
                printable = name if name.isprintable() else ascii(name)
                shown.append(f"{section.prefix}{printable}"[:100])
        return ", ".join(shown)

    def has_block(self, prefix: str) -> bool:
        """Return whether some tensor's name in the file begins with this prefix.

        It tells which decoder block a head has.
        """
        return any(name.startswith(prefix) for name in self.names.values())

    def entry(self, name: str) -> TensorEntry | None:
        """Return a tensor's dtype, shape and file by this project's name of it; None if the checkpoint lacks it."""
        return self.tensors.stored.get(self.names.get(name, ""))

    def side(self, name: str, dim: int) -> int | None:
        """Return the size of one dimension of a matrix by this project's name; None if it is no matrix, or absent.

        Tensors tell the sizes of a head that its config leaves out.
        """
        entry = self.entry(name)
        if entry is None or len(entry.shape) != 2:
            return None
        return entry.shape[dim]

    def load(self, name: str) -> Tensor:
        """Return a tensor's values as the file has them, by this project's name of it; the file must hold it."""
        return self.tensors.load(self.names[name])

    def problem(self, what: str, fix: str = "", fatal: bool = True) -> None:
        """Add a problem that prevents an import to `problems`.

        Args:
            what: What is wrong.
            fix: The remedy.
            fatal: Whether it costs acceptance or prevents loading in engines too, and not in this project alone.
        """
        self.problems.append(Finding(what, (), fatal, fix))

    def note_once(self, note: str) -> None:
        """Add a note for the user to `notes`, once even if several tensors give reason to it.

        Notes say what an import assumed or left out.
        """
        if note not in self.notes:
            self.notes.append(note)

    def refuse(self, settings: Mapping[str, bool], what: str = "head") -> None:
        """Add a problem for each setting that no head of this project has, with its value; not a fault of the file.

        Args:
            settings: Each setting, by its key in the config, and whether the config has it.
            what: What it is a setting of, for the message.
        """
        for name, is_refused in settings.items():
            if is_refused:
                values = [
                    section.values[name] for section in self.sections if name in section.values
                ]
                value = next(iter(values), None)
                self.problem(
                    f"config.json: {name} is {short(value)}, which no {what} here can be",
                    fatal=False,
                )

    def mark_handled(self, *names: str) -> None:
        """Mark keys that do not matter as handled in every section of the config, so that none counts as unknown."""
        for section in self.sections:
            section.handled |= set(names)


def describe_tensor(name: str) -> str:
    """Return in words what a tensor is that no network here has; "" if unknown.

    Args:
        name: Its name as most trainers have it.
    """
    return next(
        (meaning for pattern, meaning in FOREIGN_TENSORS.items() if re.match(pattern, name)), ""
    )


def usual_name(name: str) -> str:
    """Return a tensor's name as most trainers have it: without `model.`, and EAGLE-3's block as `layers.0`.

    Trainers name the same tensors in different ways.
    """
    return re.sub(r"^midlayer\.", "layers.0.", name.removeprefix("model."))


def list_some(names: Iterable[str]) -> str:
    """Return the first four names of a list, and the number of the others, as text for a message."""
    listed = list(names)
    text = f"{', '.join(listed[:4]):.300}"
    if len(listed) > 4:
        text += f" and {len(listed) - 4} more"
    return text


def refuse_tensors(head: HeadFolder, names: Iterable[str]) -> None:
    """Add a problem to the checkpoint for tensors that no network here has, with what they are where that is known.

    Args:
        head: The checkpoint.
        names: The tensors' names in the file.
    """
    # what such tensors are, "" if unknown -> names in the file
    by_meaning: dict[str, list[str]] = {}
    for name in names:
        by_meaning.setdefault(describe_tensor(usual_name(name)), []).append(name)
    # one line for each kind of tensor, not for each tensor
    for meaning, stored in by_meaning.items():
        if meaning:
            head.problem(f"{meaning}: {list_some(stored)}; no head here has that", fatal=False)
        else:
            fix = "Take them out if they do not matter: nothing is left out here"
            head.problem(f"unknown tensors: {list_some(stored)}", fix)


# -- copies, by tensors and target ------------------------------------------------------------------------------------


def compare_copies(head: HeadFolder, copies: dict[str, str]) -> None:
    """Add a problem to the checkpoint for duplicates of a tensor that differ; equal ones are noted as left out.

    Args:
        head: The checkpoint.
        copies: The name of each duplicate in the file, and our name, which another tensor has.
    """
    for theirs, ours in copies.items():
        # as float32, since torch cannot compare float8
        if not torch.equal(head.tensors.load(theirs).float(), head.load(ours).float()):
            head.problem(
                f"{theirs} differs from {head.names[ours]}, and both are {ours} here",
                "Keep the right one",
            )
    if copies:
        head.notes.append(f"{list_some(copies)} are left out: each equals another tensor")


def compare_borrowed(
    head: HeadFolder,
    name: str,
    known_as: tuple[str, ...],
    may_differ: bool,
    rows: Tensor | None = None,
) -> None:
    """Compare the checkpoint's copy of a target's tensor with the target's own, which a head here uses in its place.

    The result becomes a note or a problem of the head; nothing is returned.

    Args:
        head: The checkpoint.
        name: Our name of the tensor.
        known_as: The endings of the names that targets of all families have for it.
        may_differ: Whether such heads may train their copy: a difference is then noted, and no problem.
        rows: The indices of the target's rows that the copy has, which are token ids; None for all rows.
    """
    stored = head.names[name]
    target = head.target
    left_out = f"{stored} is left out, heads here use the target's"
    if target is None:
        head.notes.append(f"{left_out}; not compared: no --target")
        return
    ours = head.load(name)
    theirs = target.matrix(known_as)
    # with a token that the target lacks the shapes differ, which is reported below
    if theirs is not None and rows is not None and int(rows.max()) < len(theirs):
        theirs = theirs[rows]
    if theirs is None:
        head.notes.append(f"{left_out}; not compared: the target has none by that name")
    elif not ours.is_floating_point():
        head.problem(f"{stored} is in {ours.dtype}, expected plain weights", "Copy it again")
    elif ours.shape != theirs.shape:
        head.problem(
            f"{stored} is {list(ours.shape)}, the target's is {list(theirs.shape)}",
            "Another target?",
        )
    elif name == EMBEDDING and is_multiple(ours, theirs, target.embed_scale):
        # engines do not multiply by the target's factor, so the copy in an export is multiplied already
        head.notes.append(
            f"{left_out}; they are equal but for the target's own factor, {target.embed_scale:g}"
        )
    else:
        _compare_rows(head, stored, count_differing_rows(ours, theirs), may_differ)


def _compare_rows(head: HeadFolder, stored: str, differing: int, may_differ: bool) -> None:
    """Record on the head, as a note or a problem, how many rows of its copy differ from the target's tensor.

    Args:
        head: The checkpoint.
        stored: The copy's name in the file.
        differing: The number of rows that differ.
        may_differ: Whether such heads may train their copy: a difference is then noted, and no problem.
    """
    total = head.tensors.stored[stored].shape[0]
    left_out = f"{stored} is left out, heads here use the target's"
    if not differing:
        head.notes.append(f"{left_out}; they are equal")
    elif may_differ:
        head.differing_rows = differing
        head.notes.append(f"{left_out}; {differing} of {total} rows DIFFER from it")
    else:
        what = f"{stored} differs from the target's in {differing} of {total} rows"
        head.problem(what, "Another target, or trained?")


# -- counts and sizes, by tensors, config and target ------------------------------------------------------------------


def count_indices(head: HeadFolder, pattern: str) -> int:
    """Return how many different numbers the pattern's group matches in our names of tensors: how many layers there are.

    For example, `layers\\.(\\d+)\\.` counts layers. `head` is the checkpoint while it is read.
    """
    matches = (re.match(pattern, name) for name in head.names)
    return len({match[1] for match in matches if match})


def compare_count(head: HeadFolder, expected: int | None, count: int, what: str) -> int:
    """Return `count`, that of the file; add a problem to the head if the config says more, a note if it says fewer.

    Args:
        head: The checkpoint.
        expected: The count by the config, if it says one.
        count: The count in the file.
        what: What is counted, for the message.
    """
    if expected is not None and expected > count:
        head.problem(f"config.json says {expected} {what}, the file holds {count}", "Copy it again")
    elif expected not in (None, count):
        head.notes.append(
            f"config.json says {expected} {what}, the file holds {count}, which are read"
        )
    return count


def compare_size(head: HeadFolder, key: str, expected: Any, size: int | None) -> None:
    """Add a problem to the head if the config states another size than the tensors have.

    Args:
        head: The checkpoint.
        key: The config's key.
        expected: The size by the config; None if it does not tell.
        size: The size by the tensors; None if they do not tell.
    """
    if None not in (expected, size) and expected != size:
        head.problem(
            f"config.json: {key} is {short(expected)}, the tensors have {size}",
            "Copy both files again",
        )


def read_dimensions(head: HeadFolder, width_of: str, rows_of: str) -> None:
    """Set width and vocabulary in `head.shape` for a head without a Llama block: by its tensors, config or target.

    Args:
        head: The checkpoint.
        width_of: Our name of a matrix with the width as its second dimension.
        rows_of: Our name of a matrix with a row for each token.
    """
    # the tensors come first: a config may be copied from another head
    by_tensors = {"hidden_size": head.side(width_of, 1), "vocab_size": head.side(rows_of, 0)}
    by_target = {}
    if head.target:
        by_target = {"hidden_size": head.target.width, "vocab_size": head.target.vocab_size}
    for key, size in by_tensors.items():
        expected = head.keys.read(key)
        compare_size(head, key, expected, size)
        size = size or expected or by_target.get(key)
        if not size:
            what = f"no {key} in config.json, and no tensor tells it"
            head.problem(what, "Name the target with --target", fatal=False)
        # any valid size, as the problem prevents an import
        head.shape[key] = size or 1


def read_sizes(head: HeadFolder) -> None:
    """Set `head.shape`, the sizes of a head with a Llama block, by its config, its tensors or Llama's defaults.

    Defaults are noted, and sizes that nothing tells become problems.
    """
    block = head.block  # the section of the config with the block's sizes
    width = _read_size(head, "hidden_size", "fc.weight")
    heads = block.read("num_attention_heads")
    if heads is None:
        head.problem(
            "config.json: no num_attention_heads", "Take it from the config of the training run"
        )
    head.shape = {
        "hidden_size": width,
        "intermediate_size": _read_size(head, "intermediate_size", "layers.0.mlp.gate_proj.weight"),
        # 1 is any valid number, as the problem prevents an import
        "num_attention_heads": heads or 1,
        # the embedding and the mask t2d have a row for each token
        "vocab_size": _read_size(
            head, "vocab_size", EMBEDDING if EMBEDDING in head.names else "t2d"
        ),
        "rope_parameters": read_rope(block, head.notes),
    }
    # rotary positions: with false, pairs of neighbouring elements are rotated; heads here rotate the first half of a
    # vector with the second
    interleaved = {}
    for name in ("is_neox_style", "rope_is_neox_style"):
        interleaved[name] = False in (head.keys.read(name), block.read(name))
    head.refuse(interleaved)
    defaults = {
        "num_key_value_heads": heads or 1,
        "head_dim": max(width // (heads or 1), 1),
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
    }
    for name, default in defaults.items():
        value = block.read(name)
        if not value:
            head.notes.append(f"no {name}: {default}, as in a Llama config without one")
        head.shape[name] = value or default
    head.shape["rms_norm_eps"] = float(head.shape["rms_norm_eps"])
    shared = head.shape["num_key_value_heads"]
    if heads and heads % shared:
        head.problem(
            f"config.json: {heads} heads cannot share {shared} key-value heads",
            "Correct one of them",
        )


def _read_size(head: HeadFolder, name: str, tensor: str) -> int:
    """Return a size of the head by the config, else by the rows of a tensor; 1 and a problem if neither tells.

    Args:
        head: The checkpoint.
        name: The config's key.
        tensor: Our name of a tensor whose number of rows is this size.
    """
    # some trainers leave out of the config what the tensors tell
    size: int | None = head.block.read(name)
    entry = head.entry(tensor)
    if size is None and entry is not None and entry.shape:
        size = entry.shape[0]
        head.notes.append(f"no {name}: {size}, the rows of {tensor}")
    if not size:
        head.problem(
            f"config.json: no {name}",
            "Take it from the config of the target or of the training run",
        )
    return size or 1


def read_own(head: HeadFolder) -> None:
    """Set `names`, `shape`, `settings` and taps of a head of this project, whose config has them by our names.

    Taps are the target's layers whose inputs it reads.
    """
    head.names = {name: name for name in head.tensors.stored}
    read_sizes(head)
    head.settings = dict(head.config["settings"])
    head.draft_vocab_size = head.block.read("draft_vocab_size") or head.shape["vocab_size"]
    taps = head.settings.get("taps")
    if isinstance(taps, list) and all(type(tap) is int for tap in taps):
        head.inputs = tuple(taps)
    # a head without the setting reads one state of the target
    head.tap_count = len(head.inputs or (1,))
    # `load_head` checks every key of these sections: none counts as unknown here
    for section in (head.nested, head.block):
        section.handled |= section.values.keys()
