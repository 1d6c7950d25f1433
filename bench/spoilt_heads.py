"""Ways to spoil an exported head: those known to be silent in some engine, and such as chance decides."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

SIBLING = "the head of a sibling target"
IDS = "eagle_aux_hidden_state_layer_ids"
NORMS = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
Edit = Callable[[dict[str, Any], dict[str, Tensor]], None]  # of an exported head's config and tensors


@dataclass(frozen=True)
class Case:
    """A head to spoil, how, and by which words the fault is named."""

    fault: str
    kind: str
    edit: Edit
    named: tuple[str, ...]  # every one of them must be said


# -- edits ------------------------------------------------------------------------------------------------------------


def nothing(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """The export as it is."""


def without(*names: str) -> Edit:
    """Tensors left out."""

    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name in names:
            tensors.pop(name)

    return edit


def with_tensor(name: str, made: Callable[[dict[str, Any], dict[str, Tensor]], Tensor]) -> Edit:
    """A tensor put in, or another in its place."""
    return lambda config, tensors: tensors.update({name: made(config, tensors)})


def with_key(name: str, made: Callable[[Any], Any]) -> Edit:
    """Another value in the config."""
    return lambda config, tensors: config.update({name: made(config.get(name))})


def opposite(name: str) -> Edit:
    """A switch turned."""
    return with_key(name, lambda on: not on)


def blocks(order: tuple[int, ...]) -> Edit:
    """The blocks of `fc` in another order."""

    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        parts = tensors["fc.weight"].chunk(len(order), dim=1)
        tensors["fc.weight"] = torch.cat([parts[place] for place in order], dim=1)

    return edit


def halves(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Queries, keys and values of EAGLE-3 with their halves swapped."""
    for part in "qkv":
        name = f"midlayer.self_attn.{part}_proj.weight"
        tensors[name] = torch.cat(tensors[name].chunk(2, dim=1)[::-1], dim=1)


def layers(shift: int) -> Edit:
    """Layer ids moved, in both places."""

    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for section in (config, config["eagle_config"]):
            moved = [layer + shift for layer in section.pop(IDS)]
            section.update({IDS: moved} if min(moved) >= 0 else {})  # no output stands in front of the first layer's

    return edit


def swapped(one: str, other: str) -> Edit:
    """Two tensors in each other's place."""

    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        first, second = f"{one}.weight", f"{other}.weight"
        tensors[first], tensors[second] = tensors[second], tensors[first]

    return edit


def renamed(pattern: str, by: str) -> Edit:
    """Tensors under other names."""

    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[re.sub(pattern, by, name)] = tensors.pop(name)

    return edit


def interleaved(*parts: str) -> Edit:
    """Rows of queries or keys that stood in halves, in turns."""

    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for part in parts:
            name = next(name for name in tensors if name.endswith(f"self_attn.{part}_proj.weight"))
            rows = tensors[name].unflatten(0, (-1, 2, config["head_dim"] // 2))  # [heads, half, w / 2, H]
            tensors[name] = rows.transpose(1, 2).flatten(0, 2)

    return edit


def as_offsets(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Norms' gains less 1, as Gemma has them."""
    for name in tensors:
        if "norm" in name:
            tensors[name] = tensors[name] - 1


def reordered(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """The LM head's rows in another order than the tokens that they stand for."""
    order = torch.randperm(len(tensors["lm_head.weight"]), generator=torch.Generator().manual_seed(0))
    tensors["lm_head.weight"] = tensors["lm_head.weight"][order]


def transposed(part: str) -> Edit:
    """A square matrix that another framework keeps the other way round."""

    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        name = next(name for name in tensors if name.endswith(f"{part}.weight"))
        tensors[name] = tensors[name].T

    return edit


def one_layer(place: int, shift: int) -> Edit:
    """One layer id moved, in both places."""

    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for section in (config, config["eagle_config"]):
            section[IDS] = [layer + shift * (number == place) for number, layer in enumerate(section[IDS])]

    return edit


# -- cases ------------------------------------------------------------------------------------------------------------


def catalogue() -> list[Case]:
    """What is known to be wrong and silent in some engine."""
    ids = with_tensor("d2t", lambda config, tensors: tensors["d2t"] + torch.arange(len(tensors["d2t"])))
    zeros = with_tensor("d2t", lambda config, tensors: torch.zeros(config["vocab_size"], dtype=torch.long))
    bias = with_tensor("fc.bias", lambda config, tensors: torch.full((config["hidden_size"],), 0.1))
    norm = with_tensor("layers.0.input_layernorm.weight", lambda config, tensors: torch.ones(config["hidden_size"]))
    prefix, plain = renamed("^(?=fc|midlayer|norm|lm_head)", "model."), renamed("^midlayer", "layers.0")
    residual, full, taken = "norm_before_residual", "eagle3-full", "[state; embedding]"
    rows: list[tuple[str, str, Edit, str]] = [
        ("`model.` in front of the names", "eagle3", prefix, "`model.`"),
        ("fc.weight missing", "eagle3", without("fc.weight"), "fc.weight is missing"),
        ("fc's blocks in wrong layer order", "eagle3", blocks((2, 1, 0)), "blocks of fc"),
        ("[state; embedding] in attention", full, halves, f"take {taken}"),
        ("d2t holds ids, not offsets", "eagle3", ids, "d2t holds"),
        ("d2t missing with a draft vocabulary", "eagle3", without("d2t", "t2d"), "d2t is missing"),
        ("d2t present with the full vocabulary", full, zeros, "d2t is there although"),
        ("norm_before_residual wrong", "eagle3", opposite(residual), residual),
        ("layer ids one too high", full, layers(1), "are 1 too high"),
        ("layer ids one too low", "eagle3", layers(-1), "are 1 too low"),
        ("layers.0 for OpenVINO", "eagle3", plain, "layers.0: OpenVINO"),
        ("lm_head missing", full, without("lm_head.weight"), "lm_head.weight is missing"),
        ("fc.bias in EAGLE-3", "eagle3", bias, "fc.bias"),
        ("fc.bias in EAGLE-1", "eagle1", bias, "fc.bias"),
        ("EAGLE-1 with an input norm", "eagle1", norm, "input_layernorm"),
        ("EAGLE-1, fc's halves swapped", "eagle1", blocks((1, 0)), f"takes {taken}"),
        ("HASS, fc's halves swapped", "hass", blocks((1, 0)), f"takes {taken}"),
    ]
    return [Case(fault, kind, edit, (words,)) for fault, kind, edit, words in rows]


def drawn(seed: int) -> list[Case]:
    """Six faults, of which chance decides the details."""
    chance = random.Random(seed)
    orders, fused = [*permutations(range(3))][1:], ["eagle3", "eagle3-full", "eagle3.1"]
    order, shift, (one, other) = chance.choice(orders), chance.choice((2, -2)), chance.sample(NORMS, 2)
    theta = with_key("rope_theta", lambda value: value * 10)
    singles = {
        "blocks of fc": blocks(chance.choice(orders)),
        "take [state; embedding]": halves,
        "2 too low": layers(-2),
        "norm_before_residual": opposite("norm_before_residual"),
    }
    both = tuple(chance.sample(list(singles), 2))

    def two(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name in both:
            singles[name](config, tensors)

    amount = f"are 2 too {'high' if shift > 0 else 'low'}"
    return [
        Case(f"fc's blocks as {order}", chance.choice(fused), blocks(order), ("blocks of fc",)),
        Case(f"layer ids {amount[4:]}", chance.choice(fused), layers(shift), (amount,)),
        Case("rope theta × 10", chance.choice(["eagle1", *fused]), theta, ("rope",)),
        Case(f"{one} and {other} swapped", chance.choice(fused), swapped(one, other), ("are swapped",)),
        Case(f"two faults: {both[0]}, {both[1]}", chance.choice(fused), two, both),
        Case(SIBLING, chance.choice(["eagle1", *fused]), nothing, ("another target",)),
    ]


def further() -> list[Case]:
    """Faults that the doctor's first probes did not know, and two known ones, on heads that other losses trained."""
    mlp, gate_up = "midlayer.mlp", "mlp.gate_proj and mlp.up_proj are swapped"
    one_high = with_tensor("d2t", lambda config, tensors: tensors["d2t"] + 1)
    rows: list[tuple[str, str, Edit, str]] = [
        ("d2t one too high", "eagle3-speculators-2", one_high, "d2t"),
        ("queries alone interleaved", "eagle1-hard-2", interleaved("q"), "rows of q are not interleaved"),
        ("first layer id 2 too high", "eagle3", one_layer(0, 2), "layer id "),
        ("norms' gains less 1", "eagle3.1-hard-2", as_offsets, "offsets from 1"),
        ("LM head's rows in another order", "eagle3-reverse", reordered, "LM head"),
        ("o_proj transposed", "eagle3-hard-2", transposed("o_proj"), "o_proj is transposed"),
        ("queries alone interleaved", "eagle3-hard-2", interleaved("q"), "rows of q are not interleaved"),
        ("gate_proj and up_proj swapped", "eagle3-focal", swapped(f"{mlp}.gate_proj", f"{mlp}.up_proj"), gate_up),
    ]
    return [Case(fault, head, edit, (words,)) for fault, head, edit, words in rows]
