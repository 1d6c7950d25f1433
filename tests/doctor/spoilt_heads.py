"""Ways to spoil the files of a head as conversions do: each alone, for every kind of head that has such a part."""

# H width, w of an attention head

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Config, Tensors = dict[str, Any], dict[str, Tensor]
Edit = Callable[[Config, Tensors], None]  # of the config and the tensors in a head's folder
IDS = ("eagle_aux_hidden_state_layer_ids", "target_layer_ids")
EAGLE1, EAGLE3, PEAGLE, BLOCKS, MEDUSA, MTP = (
    "eagle1",
    "eagle3",
    "peagle",
    "dspark",
    "medusa",
    "mtp",
)
WITH_BLOCK, WITH_TAPS = (EAGLE1, EAGLE3, PEAGLE, BLOCKS, MTP), (EAGLE3, PEAGLE, BLOCKS)


@dataclass(frozen=True)
class Break:
    """One way to spoil a head, and some of the words that name it."""

    what: str
    kinds: tuple[str, ...]  # of heads that have such a part
    edit: Edit
    names: tuple[str, ...]  # any of them names the fault


# -- edits ------------------------------------------------------------------------------------------------------------


def sections(config: Config) -> list[Config]:
    """The config and all that is nested in it."""
    return [
        config,
        *(
            inner
            for value in config.values()
            if isinstance(value, dict)
            for inner in sections(value)
        ),
    ]


def change_keys(
    names: tuple[str, ...],
    function: Callable[[Any], Any],
) -> Edit:
    """Put a function of a key's value in its place, wherever the config has it."""

    def edit(config: Config, tensors: Tensors) -> None:
        for section in sections(config):
            section.update(
                {name: function(section[name]) for name in names if section.get(name) is not None}
            )

    return edit


def change(
    pattern: str,
    function: Callable[[Tensor], Tensor],
) -> Edit:
    """Put a function of each tensor whose name has this pattern in its place."""
    return lambda config, tensors: tensors.update(
        {name: function(tensor) for name, tensor in tensors.items() if re.search(pattern, name)}
    )


def swap(first: str, second: str, rows: float = 1.0) -> Edit:
    """Exchange tensors whose names differ by these words, or a share of their rows."""

    def edit(config: Config, tensors: Tensors) -> None:
        for name in [name for name in tensors if re.search(first, name)]:
            other = re.sub(first, second, name)
            if other in tensors and tensors[other].shape == tensors[name].shape:
                count = int(len(tensors[name]) * rows)
                ours, theirs = tensors[name].clone(), tensors[other].clone()
                tensors[name] = torch.cat([theirs[:count], ours[count:]])
                tensors[other] = torch.cat([ours[:count], theirs[count:]])

    return edit


def turn(values: list[int]) -> list[int]:
    """The values, the last one first."""
    return [*values[-1:], *values[:-1]]


def reverse_blocks(config: Config, tensors: Tensors) -> None:
    """Put the columns of `fc` in the reversed order of the layers."""
    count = max(
        len(section[name]) for section in sections(config) for name in IDS if name in section
    )
    change(r"^fc\.weight", lambda matrix: torch.cat(matrix.chunk(count, 1)[::-1], 1))(
        config, tensors
    )


def swap_halves(config: Config, tensors: Tensors) -> None:
    """Exchange the columns for the embedding with those for the state."""
    width = next(
        tensor.shape[0]
        for name, tensor in tensors.items()
        if re.search(r"(^|\.)norm\.weight|fc\.w", name)
    )
    names = [
        name
        for name, tensor in tensors.items()
        if tensor.dim() == 2 and tensor.shape[1] == 2 * width
    ]
    first = [name for name in names if re.search(r"eh_proj|[qkv]_proj|^fc\.", name)]
    tensors.update({name: torch.cat(tensors[name].chunk(2, dim=1)[::-1], dim=1) for name in first})


def randomise(matrix: Tensor) -> Tensor:
    """A normal matrix of the same size and spread."""
    return (
        torch.randn(
            matrix.shape,
            generator=torch.Generator().manual_seed(matrix.shape[0]),
        )
        * matrix.std()
    )


def interleave(matrix: Tensor, width: int = 64) -> Tensor:
    """The matrix with the rows of each attention head, which stood in halves, in turns."""
    return matrix.unflatten(0, (-1, 2, width // 2)).transpose(1, 2).flatten(0, 2)


def shuffle(matrix: Tensor) -> Tensor:
    """The matrix with its rows in another order."""
    return matrix[torch.randperm(len(matrix), generator=torch.Generator().manual_seed(0))]


def swap_levels(pattern: str) -> Edit:
    """Exchange what belongs to the first level and to the second."""
    return swap(rf"^({pattern})\.0\.", r"\1.1.")


def set_theta(function: Callable[[float], float]) -> Edit:
    """Another theta of the rotary embedding."""
    return change_keys(("rope_theta",), function)


def set_rows(config: Config, tensors: Tensors) -> None:
    """Put the embedding of a target that was trained on into the folder."""
    rows = tensors["embed_tokens.weight"]
    noise = torch.randn(
        rows.shape,
        generator=torch.Generator().manual_seed(0),
    )
    tensors["embed_tokens.weight"] = rows + rows.std() * noise


# -- breaks -----------------------------------------------------------------------------------------------------------

TAP_WORDS, HALF_WORDS = (
    ("blocks of fc", "out of order", "not in order", "disagree"),
    ("takes [", "take ["),
)
ROPE_WORDS, LAYER_WORDS = ("rope",), ("layer id",)
GATE, UP = r"mlp\.gate_proj", "mlp.up_proj"
FIRST = r"(?:layers\.0|midlayer)\.mlp\."
BREAKS = (
    Break("the columns of fc in reversed order", WITH_TAPS, reverse_blocks, TAP_WORDS),
    Break("layer ids in another order", WITH_TAPS, change_keys(IDS, turn), TAP_WORDS),
    Break(
        "layer ids one too high",
        WITH_TAPS,
        change_keys(IDS, lambda ids: [layer + 1 for layer in ids]),
        LAYER_WORDS,
    ),
    Break(
        "layer ids one too low",
        WITH_TAPS,
        change_keys(IDS, lambda ids: [layer - 1 for layer in ids]),
        LAYER_WORDS,
    ),
    Break(
        "halves for embedding and state swapped",
        (EAGLE1, EAGLE3, PEAGLE, MTP),
        swap_halves,
        HALF_WORDS,
    ),
    Break(
        "half of q swapped with k",
        WITH_BLOCK,
        swap("q_proj", "k_proj", 0.5),
        ("q_proj",),
    ),
    Break("k and v swapped", WITH_BLOCK, swap("k_proj", "v_proj"), ("k_proj and",)),
    Break("gate and up swapped", WITH_BLOCK, swap(GATE, UP), ("mlp.gate_proj and",)),
    Break("an MLP of random weights", WITH_BLOCK, change(FIRST, randomise), ("the MLP",)),
    Break("rope theta 100", WITH_BLOCK, set_theta(lambda theta: 100.0), ROPE_WORDS),
    Break(
        "rope theta ten times higher", WITH_BLOCK, set_theta(lambda theta: theta * 10), ROPE_WORDS
    ),
    Break(
        "rows of queries interleaved",
        WITH_BLOCK,
        change("q_proj", interleave),
        ("interleaved", "in halves"),
    ),
    Break(
        "two norms of the block swapped",
        WITH_BLOCK[1:],
        swap("post_attention_layernorm", "input_layernorm"),
        ("norm",),
    ),
    Break(
        "gains of norms less 1",
        WITH_BLOCK,
        change("norm", lambda gain: gain - 1),
        ("offsets from 1",),
    ),
    Break(
        "o_proj transposed",
        WITH_BLOCK,
        change("o_proj", lambda matrix: matrix.T),
        ("o_proj is transposed",),
    ),
    Break(
        "norm_before_residual negated",
        (EAGLE3, PEAGLE),
        change_keys(("norm_before_residual",), lambda on: not on),
        ("norm_before_residual",),
    ),
    Break(
        "d2t one too high",
        (EAGLE3,),
        change("^d2t$", lambda offsets: offsets + 1),
        ("d2t",),
    ),
    Break(
        "rows of the LM head shuffled",
        (EAGLE3, PEAGLE, MEDUSA),
        change("lm_head", shuffle),
        ("LM head",),
    ),
    Break(
        "another mask token",
        (PEAGLE, BLOCKS),
        change_keys(("mask_token_id",), lambda _: 17),
        ("mask_token",),
    ),
    Break(
        "Markov tables swapped",
        (BLOCKS,),
        swap("markov_w1", "markov_w2"),
        ("markov_w1 and",),
    ),
    Break(
        "sample_from_anchor negated",
        (BLOCKS,),
        change_keys(("sample_from_anchor", "dspark_bonus_anchor"), lambda on: not on),
        ("sample_from_anchor",),
    ),
    Break(
        "two levels swapped", (MEDUSA,), swap_levels("blocks|lm_heads"), ("0 and 1 are swapped",)
    ),
    Break(
        "blocks of two levels swapped", (MEDUSA,), swap_levels("blocks"), ("blocks.0 and blocks.1",)
    ),
    Break(
        "the embedding of another target", (EAGLE3,), set_rows, ("embed_tokens", "another target")
    ),
)
