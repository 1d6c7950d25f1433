"""Ways to spoil an exported head: those known to be silent in some engine, and random ones."""

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
    named: tuple[str, ...]  # all of them must appear in the finding


# -- edits ------------------------------------------------------------------------------------------------------------


def keep_all(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Leave the export as it is."""


def remove(*names: str) -> Edit:
    """Leave tensors out."""

    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name in names:
            tensors.pop(name)

    return edit


def add(name: str, make: Callable[[dict[str, Any], dict[str, Tensor]], Tensor]) -> Edit:
    """Put a tensor in, or another in its place."""
    return lambda config, tensors: tensors.update({name: make(config, tensors)})


def change_key(name: str, make: Callable[[Any], Any]) -> Edit:
    """Write another value into the config."""
    return lambda config, tensors: config.update({name: make(config.get(name))})


def change(pattern: str, function: Callable[[Tensor], Tensor]) -> Edit:
    """Put a function of each tensor whose name has this pattern in its place."""
    return lambda config, tensors: tensors.update(
        {name: function(tensor) for name, tensor in tensors.items() if re.search(pattern, name)}
    )


def rename(pattern: str, by: str) -> Edit:
    """Write all tensors under other names."""

    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[re.sub(pattern, by, name)] = tensors.pop(name)

    return edit


def swap(*names: str) -> Edit:
    """Put two tensors in each other's place."""
    first, second = (f"{name}.weight" for name in names)
    return lambda config, tensors: tensors.update({first: tensors[second], second: tensors[first]})


def order_blocks(order: tuple[int, ...]) -> Edit:
    """Put the blocks of `fc` into another order."""
    return change(r"^fc\.weight", lambda matrix: torch.cat([matrix.chunk(len(order), 1)[place] for place in order], 1))


def interleave_queries(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Put the rows of queries that stood in halves in turns."""
    split = (-1, 2, config["head_dim"] // 2)  # [heads, half, w / 2, H]
    change(r"q_proj", lambda matrix: matrix.unflatten(0, split).transpose(1, 2).flatten(0, 2))(config, tensors)


def move_layers(shift: int, place: int | None = None) -> Edit:
    """Move the layer ids, or one of them, in both places of the config."""

    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for section in (config, config["eagle_config"]):
            ids = [layer + shift * (place in (None, number)) for number, layer in enumerate(section.pop(IDS))]
            section.update({IDS: ids} if min(ids) >= 0 else {})  # no output stands in front of the first layer's

    return edit


def shuffle(matrix: Tensor) -> Tensor:
    """The matrix with its rows in another order."""
    return matrix[torch.randperm(len(matrix), generator=torch.Generator().manual_seed(0))]


HALVES = change(r"self_attn\.[qkv]_proj", lambda matrix: torch.cat(matrix.chunk(2, dim=1)[::-1], dim=1))


# -- cases ------------------------------------------------------------------------------------------------------------


def known_cases() -> list[Case]:
    """Faults that some engine is known to accept without an error."""
    ids = add("d2t", lambda config, tensors: tensors["d2t"] + torch.arange(len(tensors["d2t"])))
    zeros = add("d2t", lambda config, tensors: torch.zeros(config["vocab_size"], dtype=torch.long))
    bias = add("fc.bias", lambda config, tensors: torch.full((config["hidden_size"],), 0.1))
    norm = add("layers.0.input_layernorm.weight", lambda config, tensors: torch.ones(config["hidden_size"]))
    prefix, plain = rename("^(?=fc|midlayer|norm|lm_head)", "model."), rename("^midlayer", "layers.0")
    residual, full, halves = "norm_before_residual", "eagle3-full", "[state; embedding]"
    rows: list[tuple[str, str, Edit, str]] = [
        ("`model.` in front of the names", "eagle3", prefix, "`model.`"),
        ("fc.weight missing", "eagle3", remove("fc.weight"), "fc.weight is missing"),
        ("fc's blocks in wrong layer order", "eagle3", order_blocks((2, 1, 0)), "blocks of fc"),
        ("[state; embedding] in attention", full, HALVES, f"take {halves}"),
        ("d2t holds ids, not offsets", "eagle3", ids, "d2t holds"),
        ("d2t missing with a draft vocabulary", "eagle3", remove("d2t", "t2d"), "d2t is missing"),
        ("d2t present with the full vocabulary", full, zeros, "d2t is there although"),
        ("norm_before_residual wrong", "eagle3", change_key(residual, lambda on: not on), residual),
        ("layer ids one too high", full, move_layers(1), "are 1 too high"),
        ("layer ids one too low", "eagle3", move_layers(-1), "are 1 too low"),
        ("layers.0 for OpenVINO", "eagle3", plain, "layers.0: OpenVINO"),
        ("lm_head missing", full, remove("lm_head.weight"), "lm_head.weight is missing"),
        ("fc.bias in EAGLE-3", "eagle3", bias, "fc.bias"),
        ("fc.bias in EAGLE-1", "eagle1", bias, "fc.bias"),
        ("EAGLE-1 with an input norm", "eagle1", norm, "input_layernorm"),
        ("EAGLE-1, fc's halves swapped", "eagle1", order_blocks((1, 0)), f"takes {halves}"),
        ("HASS, fc's halves swapped", "hass", order_blocks((1, 0)), f"takes {halves}"),
    ]
    return [Case(fault, kind, edit, (words,)) for fault, kind, edit, words in rows]


def draw_cases(seed: int) -> list[Case]:
    """Six faults with random details."""
    chance = random.Random(seed)
    orders, fused = [*permutations(range(3))][1:], ["eagle3", "eagle3-full", "eagle3.1"]
    order, shift, (first, second) = chance.choice(orders), chance.choice((2, -2)), chance.sample(NORMS, 2)
    singles = {
        "blocks of fc": order_blocks(chance.choice(orders)),
        "take [state; embedding]": HALVES,
        "2 too low": move_layers(-2),
        "norm_before_residual": change_key("norm_before_residual", lambda on: not on),
    }
    both = tuple(chance.sample(list(singles), 2))

    def spoil_twice(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name in both:
            singles[name](config, tensors)

    amount = f"are 2 too {'high' if shift > 0 else 'low'}"
    theta = change_key("rope_theta", lambda value: value * 10)
    return [
        Case(f"fc's blocks as {order}", chance.choice(fused), order_blocks(order), ("blocks of fc",)),
        Case(f"layer ids {amount[4:]}", chance.choice(fused), move_layers(shift), (amount,)),
        Case("rope theta × 10", chance.choice(["eagle1", *fused]), theta, ("rope",)),
        Case(f"{first} and {second} swapped", chance.choice(fused), swap(first, second), ("are swapped",)),
        Case(f"two faults: {both[0]}, {both[1]}", chance.choice(fused), spoil_twice, both),
        Case(SIBLING, chance.choice(["eagle1", *fused]), keep_all, ("another target",)),
    ]


def later_cases() -> list[Case]:
    """Faults that the doctor's first probes did not know, and two known ones, on heads that other losses trained."""
    gate, up, interleaved = "mlp.gate_proj", "mlp.up_proj", "rows of q are not interleaved"
    gate_up = f"{gate} and {up} are swapped"
    one_high = add("d2t", lambda config, tensors: tensors["d2t"] + 1)
    transposed = change(r"o_proj\.weight", lambda matrix: matrix.T)
    rows: list[tuple[str, str, Edit, str]] = [
        ("d2t one too high", "eagle3-speculators-2", one_high, "d2t"),
        ("queries alone interleaved", "eagle1-hard-2", interleave_queries, interleaved),
        ("first layer id 2 too high", "eagle3", move_layers(2, place=0), "layer id "),
        ("norms' gains less 1", "eagle3.1-hard-2", change("norm", lambda gain: gain - 1), "offsets from 1"),
        ("LM head's rows in another order", "eagle3-reverse", change(r"lm_head\.weight", shuffle), "LM head"),
        ("o_proj transposed", "eagle3-hard-2", transposed, "o_proj is transposed"),
        ("queries alone interleaved", "eagle3-hard-2", interleave_queries, interleaved),
        ("gate_proj and up_proj swapped", "eagle3-focal", swap(f"midlayer.{gate}", f"midlayer.{up}"), gate_up),
    ]
    return [Case(fault, head, edit, (words,)) for fault, head, edit, words in rows]
