"""The networks that draft each level by modules of its own: Medusa, Hydra and the MLP speculator."""

# V vocabulary

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from eagle.core.drafter import TrainableDrafter
from eagle.formats.layout import (
    Config,
    Layout,
    TargetConfig,
    base_config,
    check_family,
    output_of,
    tensors_of,
)
from eagle.formats.networks.network import ROTARY, Network, rename_tensors, usual_shape
from eagle.formats.reading import faults
from eagle.formats.reading.config_keys import USUAL_THETA, short
from eagle.formats.reading.faults import FoundFault, report
from eagle.formats.reading.head_folder import (
    EMBEDDING,
    OUTPUT,
    HeadFolder,
    compare_count,
    compare_size,
    count_indices,
    read_dimensions,
)

# names of networks
MEDUSA = "medusa"
HYDRA = "hydra"
SPECULATOR = "mlp_speculator"


def _count_levels(head: HeadFolder, levels: int | None, layers: int | None) -> Config:
    """Return the settings `levels` and `layers` (residual blocks of each level), counted in the file.

    A level drafts one token of a chain, by modules of its own; Medusa calls it a head. Published configs say two heads
    where the file holds five, so the file decides.

    Args:
        head: The checkpoint.
        levels: The number of levels by the config, if it says one.
        layers: The number of blocks of each level by the config, if it says one.
    """
    return {
        "levels": compare_count(head, levels, count_indices(head, r"blocks\.(\d+)"), "heads"),
        "layers": compare_count(
            head, layers, count_indices(head, r"blocks\.\d+\.(\d+)"), "layers of each"
        ),
    }


def _refuse_blocks_that_differ(tensors: Mapping[str, Tensor], first: int, engine: str) -> None:
    """Raise ValueError for a head whose residual blocks differ within a level.

    The published code runs one block of a level again in place of all later ones.

    Args:
        tensors: The head's tensors, by our names.
        first: The index of the block that is repeated, in each level.
        engine: The engine's name, for the message.
    """
    for name, tensor in tensors.items():
        # groups: the number of the level, of the block in it, and weight or bias
        block = re.fullmatch(r"blocks\.(\d+)\.(\d+)\.(weight|bias)", name)
        if block and int(block[2]) > first:
            shared = tensors[f"blocks.{block[1]}.{first}.{block[3]}"]
            if not torch.equal(tensor, shared):
                raise ValueError(
                    f"{engine}: {name} differs from block {first} of its level, and that code runs one block again and "
                    f"again: train with drafter.layers={first + 1}, or export to an engine that has several"
                )


# -- Medusa: residual blocks and an LM head a level -------------------------------------------------------------------

# the LM head of a level is the last module of its list, after {layers} blocks
MEDUSA_AUTHORS = {
    "blocks.#.#.*": "#.#.linear.*",
    "heads.#.weight": "#.{layers}.weight",
}
MEDUSA_VLLM = {
    "blocks.#.#.*": "blocks.#.layers.#.*",
    "heads.#.weight": "lm_heads.#.weight",
    OUTPUT: OUTPUT,
}
MEDUSA_MODELOPT = (
    {"blocks.#.#.*": "medusa_head.#.#.linear.*", "heads.#.weight": "medusa_head.#.{layers}.weight"},
    {
        "blocks.#.#.*": "medusa_heads.#.#.linear.*",
        "heads.#.weight": "medusa_heads.#.{layers}.weight",
    },
    {
        "blocks.#.#.*": "medusa_heads.#.medusa_layers.#.linear.*",
        "heads.#.weight": "medusa_heads.#.lm_head.weight",
    },
)


def _read_medusa(head: HeadFolder) -> Config:
    """Return a Medusa head's settings: levels and blocks by the file, and whose LM head the levels use.

    Each level drafts one token of a chain. Its width and vocabulary are set in `head.shape`.
    """
    keys = head.keys
    nested = keys.section("medusa")
    # three names of one key: the authors', another project's, ModelOpt's; the first that is given counts
    levels = [
        keys.read("medusa_num_heads"),
        keys.read("num_heads"),
        nested.read("num_medusa_heads"),
    ]
    layers = [keys.read("medusa_num_layers"), nested.read("num_medusa_layers")]
    keys.handled |= {
        "version",
        "base_model_name_or_path",
        "medusa_fc_bias",
        "max_paths",
        "topk",
        "max_seq_len",
    }
    # whether all levels use the target's LM head: by vLLM's key, or as the file has none for them
    shares = bool(keys.read("original_lm_head")) or not any(
        name.startswith("heads.") for name in head.names
    )
    scale = keys.read("logit_scale")
    draft_vocab = keys.read("truncated_vocab_size")
    # a factor on the logits; the target's LM head brings its own
    if scale not in (None, 1.0) and not shares:
        head.problem(
            f"config.json: logit_scale is {scale}, and LM heads here have none", fatal=False
        )
    if draft_vocab not in (None, keys.read("vocab_size")) or "token_map" in head.tensors.stored:
        head.problem(
            "it drafts some tokens of the vocabulary alone (token_map), which no Medusa head here can"
        )
    if shares and "heads.0.weight" in head.names:
        # in vLLM's layout this is a copy of the target's LM head, which all levels use
        head.names[OUTPUT] = head.names.pop("heads.0.weight")
    read_dimensions(head, "blocks.0.0.weight", OUTPUT if shares else "heads.0.weight")
    counts = _count_levels(head, next(filter(None, levels), None), next(filter(None, layers), None))
    return {**counts, "lm_head": "target" if shares else "own"}


def _biases_of_blocks(head: HeadFolder) -> list[str]:
    """Return our names of the biases of residual blocks that the file holds."""
    return [name for name in head.names if name.startswith("blocks.") and name.endswith(".bias")]


def _may_medusa_lack(head: HeadFolder, name: str) -> str:
    """Return why the tensor of our name `name` may be absent, "" if it may not.

    Biases may, if all of them are absent: vLLM's heads have none unless their config says so.
    """
    is_optional = name.endswith(".bias") and not _biases_of_blocks(head)
    return "no biases: zeros, which change nothing" if is_optional else ""


def _find_medusa_faults(head: HeadFolder) -> Iterator[FoundFault]:
    """Yield biases that vLLM would not load, and keys of the config that it would take for numbers of Medusa heads."""
    # vLLM loads no other layout, where a fault would only matter after an export
    is_served = head.layout == "vLLM"
    if _biases_of_blocks(head) and head.config.get("medusa_fc_bias") is not True:
        yield report(faults.MEDUSA_BIAS, fatal=is_served)
    # vLLM takes any key with these words for one of its own
    vllm_keys = {"medusa_num_heads", "medusa_num_layers", "num_heads"}
    taken_for_counts = [
        key for key in head.config if re.search("num.*(heads|layers)", key) and key not in vllm_keys
    ]
    if taken_for_counts:
        yield report(
            faults.MEDUSA_COUNTS,
            fatal=is_served,
            keys=", ".join(map(ascii, taken_for_counts))[:200],
        )


MEDUSA_HEADS = Network(
    name="Medusa heads",
    method=MEDUSA,
    methods=(MEDUSA,),
    tensors=r"(medusa_heads?|lm_heads|blocks\.\d+\.layers)\.|\d+\.\d+\.(linear\.)?(weight|bias)$",
    type_words="medusa",
    config_keys=("medusa_num_heads", "medusa_num_layers"),
    read_settings=_read_medusa,
    spellings=(
        ("FasterDecoding/Medusa", MEDUSA_AUTHORS),
        ("vLLM", MEDUSA_VLLM),
        *(("ModelOpt", names) for names in MEDUSA_MODELOPT),
    ),
    prefixes=(),
    ignored={r"model\..*": "they are the target's own"},
    has_block=False,
    may_lack=_may_medusa_lack,
    find_faults=_find_medusa_faults,
)


def write_vllm_medusa(
    drafter: TrainableDrafter, target_config: TargetConfig, engine: str
) -> Layout:
    """Return Medusa's heads for vLLM.

    It drafts the likeliest token of each level, so a scale or a cap of the target's logits makes no difference.

    Args:
        drafter: The head, bound to its target if its levels use the target's LM head, which is then copied.
        target_config: Not read: the config has no more than the head's own sizes.
        engine: The engine's name, for messages.
    """
    settings = drafter.settings
    shares = settings.lm_head == "target"
    tensors = rename_tensors(tensors_of(drafter), MEDUSA_VLLM)
    # with `original_lm_head` vLLM uses the first LM head for all levels
    if shares:
        tensors["lm_heads.0.weight"] = output_of(drafter, engine, "train with drafter.lm_head=own")
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        **base_config(drafter),
        # no other key may have "num" and "heads" or "layers" in it: vLLM would take it for one of these two
        "medusa_num_heads": settings.levels,
        "medusa_num_layers": settings.layers,
        "medusa_fc_bias": True,
        "original_lm_head": shares,
    }
    return Layout(config, tensors, max_depth=settings.levels)


def write_medusa(drafter: TrainableDrafter, target_config: TargetConfig, engine: str) -> Layout:
    """Return Medusa's heads as their authors' code (FasterDecoding/Medusa) reads them.

    ValueError for a target or a head that this code cannot load; `engine` is its name in the messages.
    """
    settings = drafter.settings
    tensors = tensors_of(drafter)
    check_family(drafter, target_config, ("llama", "mistral"), engine)
    # that code runs the first block of a level in place of all
    _refuse_blocks_that_differ(tensors, first=0, engine=engine)
    config = {
        "model_type": "medusa",  # without one the loader takes the family from words in the folder's path
        **base_config(drafter),
        "medusa_num_heads": settings.levels,
        "medusa_num_layers": settings.layers,
        "base_model_name_or_path": getattr(target_config, "name_or_path", "") or None,
    }
    # to that code version 2 means that all levels use the target's LM head
    if settings.lm_head == "target":
        config["version"] = "2"
    tensors = rename_tensors(tensors, MEDUSA_AUTHORS, layers=settings.layers)
    return Layout(config, tensors, file="medusa_lm_head.pt", max_depth=settings.levels)


# -- Hydra: heads that read the drafted tokens, after a prefix layer or without one -----------------------------------

PREFIX = "prefix_embeding_layer."  # as they spell it
HYDRA_PLAIN = {
    "blocks.#.#.residual.*": "hydra_mlp.#.#.res_connection.*",
    "blocks.#.#.*": "hydra_mlp.#.#.linear.*",
    "heads.#.*": "hydra_lm_head.#.*",
    EMBEDDING: "input_embed_fn.weight",
}
HYDRA_PREFIXED = {
    **HYDRA_PLAIN,
    "heads.#.*": "hydra_lm_head.#.1.*",
    "layers.0.*": f"{PREFIX}layers.0.*",
    "norm.weight": f"{PREFIX}norm.weight",
}


def _has_prefix(head: HeadFolder) -> bool:
    """Return whether a Hydra checkpoint has a prefix layer: a Llama block that the target's states pass first."""
    return any(name.startswith(f"{PREFIX}layers.") for name in head.tensors.stored)


def _renumber_blocks(name: str, renumber: Callable[[int], int]) -> str:
    """Return a tensor's name with another number of its residual block: `blocks.LEVEL.BLOCK.*`.

    Args:
        name: Our name of the tensor; a tensor of no residual block keeps it.
        renumber: A function of the block's number that returns the new one.
    """
    return re.sub(
        r"^(blocks\.\d+\.)(\d+)", lambda match: f"{match[1]}{renumber(int(match[2]))}", name
    )


def _rename_hydra(head: HeadFolder, name: str, ours: str) -> str:
    """Return our name of a tensor, with the number that its residual block has here: `Network.rename`.

    With a prefix layer Hydra's lists of modules have a dropout before each block, so block i has the number 2 i + 1.

    Args:
        head: The checkpoint.
        name: The tensor's name in the file.
        ours: Our name, with the number that its block has in the file.
    """
    # even numbers are dropouts, which have no tensors
    if _has_prefix(head) and re.match(r"blocks\.\d+\.\d*[13579]\.", ours):
        return _renumber_blocks(ours, lambda number: number // 2)
    return ours


def _read_hydra(head: HeadFolder) -> Config:
    """Return a Hydra head's settings: levels and residual blocks by the file, and whether it has a prefix layer.

    A level drafts one token of a chain from the target's state and the tokens drafted before it. The prefix layer is a
    Llama block that the target's states pass first. Heads of any other kind become problems.
    """
    keys = head.keys
    prefix = _has_prefix(head)
    keys.handled |= {"base_model_name_or_path", "hidden_state_offset"}
    arch = keys.read("hydra_head_arch")
    offset = keys.values.get("hidden_state_offset")
    if arch not in (None, "prefix-mlp" if prefix else "mlp"):
        head.problem(
            f"config.json: hydra_head_arch is {short(arch)}, and the tensors are not such",
            fatal=False,
        )
    if offset not in (None, 0):
        what = (
            f"config.json: hidden_state_offset is {short(offset)}: heads here read the last state"
        )
        head.problem(what, fatal=False)
    # a block that reads drafted tokens is wider than its output, so its residual needs a projection
    if keys.read("grounded_heads") is False or "blocks.0.0.residual.weight" not in head.names:
        what = "heads that do not read the drafted tokens (grounded_heads is false); none here are such"
        head.problem(what, fatal=False)
    read_dimensions(head, "heads.0.weight", "heads.0.weight")
    if prefix and head.target is None:
        head.problem(
            "the sizes of the prefix layer are the target's",
            "Name the target with --target",
            fatal=False,
        )
    # the authors' code runs the second block of a level again for all later ones, which training here would let differ
    layers = count_indices(head, r"blocks\.\d+\.(\d+)")
    if layers > 2:
        head.notes.append(
            f"blocks 1 to {layers - 1} of a level share weights there; here they are copies, equal at first"
        )
    return {
        **_count_levels(head, keys.read("hydra_num_heads"), keys.read("hydra_num_layers")),
        "prefix": prefix,
    }


def _hydra_shape(head: HeadFolder) -> Any:
    """Return the config of sizes that the head is built with, with Llama's usual rope_theta: `Network.read_shape`.

    The sizes are the target's. Hydra's code has this theta in its prefix layer for any target.
    """
    shape = usual_shape(head)
    if head.settings["prefix"] and shape.rope_parameters["rope_theta"] != USUAL_THETA:
        head.note_once(f"rope_theta of the prefix layer: {USUAL_THETA:g} for every target there")
        shape.rope_parameters = {**shape.rope_parameters, "rope_theta": USUAL_THETA}
    return shape


HYDRA_HEADS = Network(
    name="Hydra heads",
    method=HYDRA,
    methods=(HYDRA,),
    tensors=r"(hydra_mlp|hydra_lm_head|prefix_embeding_layer)\.",
    type_words="hydra",
    config_keys=("hydra_num_heads",),
    read_settings=_read_hydra,
    spellings=(("zankner/Hydra", HYDRA_PREFIXED), ("zankner/Hydra", HYDRA_PLAIN)),
    prefixes=(),
    ignored={**ROTARY, r"prefix_embeding_layer\.embed_tokens\.weight": "their code never reads it"},
    has_block=False,
    rotates=False,  # by its config: the prefix layer has one theta for every target
    rename=_rename_hydra,
    read_shape=_hydra_shape,
)


def write_hydra(drafter: TrainableDrafter, target_config: TargetConfig, engine: str) -> Layout:
    """Return Hydra's heads as their authors' code reads them, which takes embedding and sizes from the target.

    ValueError for a target or a head that this code cannot load; `engine` is its name in the messages.
    """
    settings = drafter.settings
    tensors = tensors_of(drafter)
    check_family(drafter, target_config, ("llama",), engine)
    # that code runs the second block of a level in place of all later ones
    _refuse_blocks_that_differ(tensors, first=1, engine=engine)
    # that code has its own Llama, which reads no rope_theta from a config
    theta = drafter.shape.rope_parameters["rope_theta"]
    names = HYDRA_PLAIN
    if settings.prefix:
        if theta != USUAL_THETA:
            raise ValueError(
                f"{engine}: the prefix layer has rope_theta {theta:g}, and that code {USUAL_THETA:g} for any "
                "target: train with drafter.prefix=false"
            )
        names = HYDRA_PREFIXED
        # each block there comes after a dropout, which has a number too
        tensors = {
            _renumber_blocks(name, lambda number: 2 * number + 1): tensor
            for name, tensor in tensors.items()
        }
    config = {
        **base_config(drafter),
        "hydra_num_heads": settings.levels,
        "hydra_num_layers": settings.layers,
        "hydra_head_arch": "prefix-mlp" if settings.prefix else "mlp",
        "grounded_heads": True,
        "hidden_state_offset": 0,
        "base_model_name_or_path": getattr(target_config, "name_or_path", "") or None,
    }
    return Layout(
        config, rename_tensors(tensors, names), file="hydra_lm_head.pt", max_depth=settings.levels
    )


# -- the MLP speculator: embedding, projection, norm and LM head a level ----------------------------------------------

WRAPPER = "speculator."  # of the class for transformers
SPECULATOR_NAMES = {
    f"{module}.#.*": f"{WRAPPER}{module}.#.*" for module in ("emb", "proj", "ln", "head")
}
# tokens that their trees take from the first four levels; from later levels they take one
TOP_TOKENS = (5, 4, 3, 2)
MAX_LEVELS = 64  # more than any head has: a config of unknown origin may name any number


def _is_tied(head: HeadFolder) -> bool:
    """Return whether the levels share tensors, as the config's `tie_weights` says, else by the tensors.

    Without ties each level has an embedding, a projection and an LM head. Tied levels have one embedding and one LM
    head, but two projections.
    """
    tied = head.keys.read("tie_weights")
    if tied is not None:
        return bool(tied)
    # how many tensors of each kind the file holds: without ties the three numbers are equal
    counts = {
        sum(f"{module}." in name for name in head.tensors.stored)
        for module in ("emb", "proj", "head")
    }
    return len(counts) > 1


def _rename_speculator(head: HeadFolder, name: str, ours: str) -> str:
    """Return our name of a tensor: `Network.rename`.

    Levels that share a tensor may each hold a copy of it, and all copies get the name of the first of them.

    Args:
        head: The checkpoint.
        name: The tensor's name in the file.
        ours: Our name as MODULE.LEVEL.KIND, such as `proj.2.weight`.
    """
    if not _is_tied(head):
        return ours
    module, level, kind = ours.split(".", 2)
    # the first projection reads the target's state, which may be of another width, so levels from 1 on share another
    first = 1 if module == "proj" and level != "0" else 0
    return f"{module}.{first}.{kind}"


def _read_speculator(head: HeadFolder) -> Config:
    """Return an MLP speculator's settings: sizes by its tensors, and by its config whether the state is scaled.

    A level drafts one token of a chain. Its inner width is that of its embedding and its norm.
    """
    keys = head.keys
    tied = _is_tied(head)
    keys.handled |= {
        "top_k_tokens_per_head",
        "n_candidates",
        "num_lookahead_tokens",
        "emb_dim",
        "inner_dim",
    }
    read_dimensions(head, "proj.0.weight", "head.0.weight")
    n_predict = keys.read("n_predict")  # levels
    # proj.0.weight is [inner width, width]
    inner_dim = head.side("proj.0.weight", 0)
    width = head.side("proj.0.weight", 1)
    # any valid size, as a missing tensor is a problem later
    if inner_dim is None:
        inner_dim = 1
    compare_size(head, "emb_dim", keys.values.get("emb_dim"), width)
    expected = keys.values.get("inner_dim")
    # to that code 0 means the width
    if expected == 0:
        expected = width
    compare_size(head, "inner_dim", expected, inner_dim)
    if n_predict is not None and n_predict > MAX_LEVELS:
        head.problem(
            f"config.json: n_predict is {n_predict}, expected at most {MAX_LEVELS}", "Correct it"
        )
        n_predict = None
    # count the file's names: only one of several tied tensors has a name of ours
    numbers = (re.search(r"(?:emb|head|ln|proj)\.(\d+)\.", name) for name in head.tensors.stored)
    levels = len({number[1] for number in numbers if number})
    # note the defaults: without the config nothing tells the first, and only the number of tensors the second
    for name, default in {"scale_input": False, "tie_weights": tied}.items():
        if keys.read(name) is None:
            head.notes.append(f"no {name}: {str(default).lower()}")
    if not tied:
        levels = compare_count(head, n_predict, levels, "levels")
    elif n_predict:  # tied levels need no tensors, so that the config may say any number
        levels = n_predict
    return {
        "levels": levels,
        "inner_dim": inner_dim,
        "tie_weights": tied,
        "scale_input": bool(keys.read("scale_input")),
    }


SPECULATOR_HEADS = Network(
    name="an MLP speculator",
    method=SPECULATOR,
    methods=(SPECULATOR,),
    tensors=r"(speculator\.)?(emb|proj|ln|head)\.\d+\.(weight|bias)$",
    type_words="mlp_?speculator",
    config_keys=("top_k_tokens_per_head",),
    ambiguous_keys=("n_predict",),
    read_settings=_read_speculator,
    spellings=(("fms-extras", SPECULATOR_NAMES),),
    prefixes=(WRAPPER,),
    ignored={},
    has_block=False,
    rename=_rename_speculator,
)


def write_speculator(drafter: TrainableDrafter, target_config: TargetConfig, engine: str) -> Layout:
    """Return an MLP speculator for fms-extras, with every tensor for every level, as some readers expect it.

    Levels that share tensors get copies of them. `target_config` and `engine` are not read.
    """
    settings = drafter.settings
    tensors = tensors_of(drafter)
    untied = _untie(tensors, settings.levels)
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "emb_dim": drafter.shape.hidden_size,
        "inner_dim": len(tensors["ln.0.weight"]),
        "vocab_size": drafter.shape.vocab_size,
        "n_predict": settings.levels,
        "top_k_tokens_per_head": [*TOP_TOKENS, *[1] * settings.levels][: settings.levels],
        "n_candidates": TOP_TOKENS[0],
        "tie_weights": bool(settings.tie_weights)
        and settings.levels > 1,  # of one level there is nothing to tie
        "scale_input": bool(settings.scale_input),
        "torch_dtype": str(tensors["ln.0.weight"].dtype).removeprefix("torch."),
    }
    return Layout(config, rename_tensors(untied, SPECULATOR_NAMES), max_depth=settings.levels)


def _untie(tensors: Mapping[str, Tensor], levels: int) -> dict[str, Tensor]:
    """Return the tensors of all levels, with a copy of each tensor that a level shares with an earlier level.

    Args:
        tensors: The head's tensors, by our names as MODULE.LEVEL.KIND, such as `proj.0.weight`.
        levels: The number of levels.
    """
    untied = {}
    for name in tensors:
        module, first, kind = name.split(".")
        # level 0 has every tensor, so each kind is met once
        if first != "0":
            continue
        nearest = tensors[name]
        for level in range(levels):
            # a level without its own tensor shares that of the nearest earlier level
            nearest = tensors.get(f"{module}.{level}.{kind}", nearest)
            untied[f"{module}.{level}.{kind}"] = nearest.clone()
    return untied
