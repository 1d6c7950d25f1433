"""A checkpoint of unknown origin: its tensors by our names, its sizes, its own statements and its faults."""

# H width, V vocabulary, D tokens that can be drafted

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle.formats.reading.config_keys import NO_MATTER, Keys, read_rope, short
from eagle.formats.reading.files import FolderTensors, TensorEntry
from eagle.formats.reading.target_files import TargetFiles, count_differing_rows, is_multiple

OWN, SPECULATORS, AUTOMODEL, REFERENCE = "this project", "speculators", "Automodel", "SafeAILab/EAGLE"
MODELOPT, MIDLAYER, LAYERS, UNKNOWN = "ModelOpt", "EAGLE-3, midlayer.*", "EAGLE-3, layers.0.*", "unknown"
EAGLE1 = "EAGLE-1"
FOREIGN_PARTS = {  # tensors that no network here has
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
EMBEDDING, OUTPUT = "embed_tokens.weight", "lm_head.weight"  # the target's, by our names


@dataclass(frozen=True)
class Finding:
    """A fault of a checkpoint that costs acceptance or prevents loading in some engine."""

    what: str
    engines: tuple[str, ...] = ()  # where it strikes; all readers where none is named
    fatal: bool = True
    fix: str = ""

    def __str__(self) -> str:
        where = f" [{', '.join(self.engines)}]" if self.engines else ""
        return f"{'FATAL' if self.fatal else 'note '} {self.what}{where}{f'. {self.fix}' if self.fix else ''}"


@dataclass
class HeadFolder:
    """A checkpoint with tensors by this project's names, and the problems that prevent an import."""

    path: Path
    config: dict[str, Any]
    tensors: FolderTensors
    keys: Keys  # of the whole config
    block: Keys  # of its Llama block
    nested: Keys  # of its eagle_config, or of this project's settings
    layout: str = UNKNOWN
    method: str = ""  # of this project
    kind: str = ""  # what it is, by the registry of networks or beside it
    settings: dict[str, Any] = field(default_factory=dict)  # as a recipe would state them
    layer: str = ""  # that it is, by its number in a whole model
    names: dict[str, str] = field(default_factory=dict)  # ours: theirs
    shape: dict[str, Any] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)  # of the shape, by the tensors
    target_layers: int | None = None  # where the config tells
    draft_vocab_size: int = 0  # D
    tap_count: int = 1
    embed_scale: float = 1.0  # of the target, which the head was trained without
    differing: dict[str, tuple[int, int]] = field(default_factory=dict)  # rows of copies that are not the target's
    inputs: tuple[int, ...] | None = None  # layer ids that count inputs
    outputs: tuple[int, ...] | None = None  # layer ids that count outputs
    inputs_by_outputs: tuple[int, ...] | None = None  # the same layers, by their inputs
    problems: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unknown_keys: list[str] = field(default_factory=list)

    def list_unknown_keys(self) -> None:
        """List the keys of its config with a value that nothing here reads, and that may matter."""
        for section in {id(section): section for section in (self.keys, self.block, self.nested)}.values():
            held = {name for name, value in section.values.items() if value is not None}
            left = sorted(held - section.taken - NO_MATTER)
            self.unknown_keys += [
                f"{section.where}{name if name.isprintable() else ascii(name)}"[:100] for name in left
            ]

    @property
    def architectures(self) -> list[str]:
        """The config's architectures, by which engines choose what to load."""
        named = self.config.get("architectures")
        return [name[:80] for name in named if isinstance(name, str)][:8] if isinstance(named, list) else []

    def has_block(self, prefix: str) -> bool:
        """Whether some tensor's name begins with this prefix."""
        return any(name.startswith(prefix) for name in self.names.values())

    def entry(self, name: str) -> TensorEntry | None:
        """A tensor's entry by this project's name, if present."""
        return self.tensors.stored.get(self.names.get(name, ""))

    def load(self, name: str) -> Tensor:
        """A tensor's values by this project's name."""
        return self.tensors.load(self.names[name])

    def problem(self, what: str, fix: str = "", fatal: bool = True) -> None:
        """Record a problem that prevents an import."""
        self.problems.append(Finding(what, (), fatal, fix))

    def refuse(self, settings: Mapping[str, bool], part: str = "head") -> None:
        """Record the settings that no head of this project has, with their values."""
        for name in (name for name, is_refused in settings.items() if is_refused):
            sections = (self.keys, self.block, self.nested)
            value = next((section.values[name] for section in sections if name in section.values), None)
            self.problem(f"config.json: {name} is {short(value)}, which no {part} here can be", fatal=False)

    def take(self, *names: str) -> None:
        """Mark keys that do not matter as used, wherever they stand."""
        for section in (self.keys, self.block, self.nested):
            section.taken |= set(names)


def name_part(name: str) -> str:
    """The meaning of a tensor that no network here has; "" if unknown."""
    return next((part for pattern, part in FOREIGN_PARTS.items() if re.match(pattern, name)), "")


def list_some(names: list[str]) -> str:
    """The first names of a list, and the number of the others."""
    return f"{', '.join(names[:4]):.300}" + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def refuse_tensors(head: HeadFolder, names: list[str]) -> None:
    """Record tensors that no network here has, by what they are."""
    parts: dict[str, list[str]] = {}
    for name in names:
        bare = re.sub(r"^midlayer\.", "layers.0.", name.removeprefix("model."))
        parts.setdefault(name_part(bare), []).append(name)
    for part, stored in parts.items():
        if part:
            head.problem(f"{part}: {list_some(stored)}; no head here has that", fatal=False)
        else:
            fix = "Take them out if they do not matter: nothing is left out here"
            head.problem(f"unknown tensors: {list_some(stored)}", fix)


# -- copies and sizes, by tensors, config and target -----------------------------------------------------------------


def compare_copies(head: HeadFolder, copies: dict[str, str]) -> None:
    """Record tensors that stand twice and differ."""
    for theirs, ours in copies.items():
        if not torch.equal(head.tensors.load(theirs).float(), head.load(ours).float()):  # float8 is compared by nobody
            head.problem(f"{theirs} differs from {head.names[ours]}, and both are {ours} here", "Keep the right one")
    if copies:
        head.notes.append(f"{list_some(list(copies))} are left out: they are what other levels have too")


def compare_borrowed(
    head: HeadFolder, name: str, known_as: tuple[str, ...], may_differ: bool, target: TargetFiles | None
) -> None:
    """Compare the checkpoint's copy of a target's tensor with the target's, which a head here borrows."""
    stored = head.names[name]
    left_out = f"{stored} is left out, heads here use the target's"
    if target is None:
        head.notes.append(f"{left_out}; not compared: no --target")
        return
    ours, theirs = head.load(name), target.matrix(known_as)
    if theirs is None:
        head.notes.append(f"{left_out}; not compared: the target has none by that name")
        return
    if not ours.is_floating_point():
        head.problem(f"{stored} is in {ours.dtype}, expected plain weights", "Copy it again")
    elif ours.shape != theirs.shape:
        head.problem(f"{stored} is {list(ours.shape)}, the target's is {list(theirs.shape)}", "Another target?")
    elif name == EMBEDDING and is_multiple(ours, theirs, target.embed_scale):
        head.notes.append(f"{left_out}; they are equal but for the target's own factor, {target.embed_scale:g}")
    elif differing := count_differing_rows(ours, theirs):
        if may_differ:
            head.differing[name] = (differing, len(ours))
            head.notes.append(f"{left_out}; {differing} of {len(ours)} rows DIFFER from it")
        else:
            what = f"{stored} differs from the target's in {differing} of {len(ours)} rows"
            head.problem(what, "Another target, or trained?")
    else:
        head.notes.append(f"{left_out}; they are equal")


def count_parts(head: HeadFolder, pattern: str) -> int:
    """The number of different indices at one place of our names."""
    return len({found[1] for name in head.names if (found := re.match(pattern, name))})


def compare_count(head: HeadFolder, stated: int | None, count: int, what: str) -> int:
    """The count found in the file; a note if the config states another one."""
    if stated is not None and stated > count:
        head.problem(f"config.json says {stated} {what}, the file holds {count}", "Copy it again")
    elif stated not in (None, count):
        head.notes.append(f"config.json says {stated} {what}, the file holds {count}, which are read")
    return count


def compare_size(head: HeadFolder, key: str, stated: Any, size: int | None) -> None:
    """Note a size in the config that differs from the tensors'."""
    if None not in (stated, size) and stated != size:
        head.problem(f"config.json: {key} is {short(stated)}, the tensors have {size}", "Copy both files again")


def read_sides(head: HeadFolder, target: TargetFiles | None, width: str, rows: str) -> None:
    """Width and vocabulary, by the tensors that have them, else as the config or the target says."""
    for key, name, side in (("hidden_size", width, 1), ("vocab_size", rows, 0)):
        stated, entry = head.keys.read(key), head.entry(name)
        found = entry.shape[side] if entry and len(entry.shape) == 2 else None
        compare_size(head, key, stated, found)
        size = found or stated or (target and (target.width if key == "hidden_size" else target.vocab_size))
        if not size:
            head.problem(
                f"no {key} in config.json, and no tensor tells it", "Name the target with --target", fatal=False
            )
        head.shape[key] = size or 1


def read_sizes(head: HeadFolder) -> None:
    """The block's sizes from the config, else from its tensors, else Llama's defaults."""
    block = head.block
    width = _read_size(head, "hidden_size", "fc.weight")
    heads = block.read("num_attention_heads")
    if heads is None:
        head.problem("config.json: no num_attention_heads", "Take it from the config of the training run")
    head.shape = {
        "hidden_size": width,
        "intermediate_size": _read_size(head, "intermediate_size", "layers.0.mlp.gate_proj.weight"),
        "num_attention_heads": heads or 1,
        "vocab_size": _read_size(head, "vocab_size", EMBEDDING if EMBEDDING in head.names else "t2d"),
        "rope_parameters": read_rope(block, head.notes),
    }
    interleaved = {}
    for name in ("is_neox_style", "rope_is_neox_style"):  # false turns neighbours, and heads here turn halves
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
        head.problem(f"config.json: {heads} heads cannot share {shared} key-value heads", "Correct one of them")


def _read_size(head: HeadFolder, name: str, tensor: str) -> int:
    """A size by the config, else the rows of a tensor."""
    size, entry = head.block.read(name), head.entry(tensor)
    if size is None and entry is not None and len(entry.shape) > 0:
        size = entry.shape[0]
        head.notes.append(f"no {name}: {size}, the rows of {tensor}")
    if not size:
        head.problem(f"config.json: no {name}", "Take it from the config of the target or of the training run")
    return size or 1


def read_own(head: HeadFolder) -> None:
    """The settings and sizes of a head of this project, under its own names."""
    head.names = {name: name for name in head.tensors.stored}
    read_sizes(head)
    head.settings = dict(head.config["settings"])
    head.draft_vocab_size = head.block.read("draft_vocab_size") or head.shape["vocab_size"]
    taps = head.settings.get("taps")
    head.inputs = tuple(taps) if isinstance(taps, list) and all(type(tap) is int for tap in taps) else None
    head.tap_count = len(head.inputs or (1,))
    head.nested.taken |= head.nested.values.keys()
    head.block.taken |= head.block.values.keys()
