"""An exported head: a config and tensors, named as one engine names them."""

# H width, V vocabulary

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from eagle.core.drafter import TrainableDrafter
from eagle.target.stock_head import StockHead

Config = dict[str, Any]  # of config.json, whose values are of any kind
# rotary parameters of targets that heads ignore: heads rotate whole vectors, in all layers alike
PER_TARGET = ("partial_rotary_factor", "full_attention", "sliding_attention")


class TargetConfig(Protocol):
    """The parts of a target's config that layouts read."""

    model_type: str
    name_or_path: str
    architectures: list[str] | None
    vocab_size: int
    num_hidden_layers: int
    bos_token_id: int | None  # which some configs leave out
    eos_token_id: int | None

    def to_dict(self) -> Config:
        """All of its values."""


@dataclass(frozen=True, slots=True)
class Layout:
    """An exported head: the contents of `config.json` and of the weight file, and a guide to serving it."""

    config: Config
    tensors: dict[str, Tensor]
    serve: str = ""  # the guide (Markdown), with the placeholders HEAD, TARGET and DEPTH
    # the weight file; torch.save writes it if it does not end in .safetensors
    file: str = "model.safetensors"
    max_depth: int | None = None  # the longest chain that it can draft; None for any
    one_forward: bool = False  # whether one forward drafts the whole chain
    fixed_length: bool = False  # whether its first tokens change if it is asked for fewer


def dtype_of(drafter: TrainableDrafter) -> str:
    """Return the precision of a head's weights, as configs name it."""
    return str(next(drafter.parameters()).dtype).removeprefix("torch.")


def llama_config(drafter: TrainableDrafter, target_config: TargetConfig, **more: Any) -> Config:
    """Return the config.json of a head with Llama blocks, as all engines read it.

    Args:
        drafter: The head.
        target_config: The target's config, from which the vocabulary and the special tokens are taken.
        more: Further keys, or other values of these.
    """
    shape = drafter.shape
    rope = rotary_of(shape)
    # older configs state rope_theta beside the other rotary parameters, which they call rope_scaling
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "model_type": "llama",
        "vocab_size": target_config.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": shape.rms_norm_eps,
        # the older names of the rotary parameters, which newer readers know too
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": getattr(target_config, "bos_token_id", None),
        "eos_token_id": getattr(target_config, "eos_token_id", None),
        "torch_dtype": dtype_of(drafter),
        **more,
    }


def base_config(drafter: TrainableDrafter) -> Config:
    """Return the config keys that all heads without attention share."""
    shape = drafter.shape
    return {
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
        "torch_dtype": dtype_of(drafter),
    }


def check_family(
    drafter: TrainableDrafter, target_config: TargetConfig, families: tuple[str, ...], engine: str
) -> None:
    """Raise ValueError for a target, or a head's attention, that a method's published code cannot load.

    Args:
        drafter: The head.
        target_config: The target's config.
        families: The model types of targets that the code reads.
        engine: The code's name, for messages.
    """
    shape = drafter.shape
    if has_attention(drafter) and shape.head_dim * shape.num_attention_heads != shape.hidden_size:
        raise ValueError(
            f"{engine}: head_dim is {shape.head_dim}, but this code takes hidden_size / num_attention_heads = "
            f"{shape.hidden_size} / {shape.num_attention_heads}, and no exporter has another layout for it"
        )
    if target_config.model_type not in families:
        raise ValueError(
            f"{engine}: the target is a {target_config.model_type}, and this code reads {', '.join(families)}: export "
            "to an engine that serves it"
        )


def tensors_of(drafter: TrainableDrafter) -> dict[str, Tensor]:
    """Return the head's tensors on the CPU, by our names, without the target's embedding and LM head that it uses."""
    return {name: tensor.detach().cpu() for name, tensor in drafter.state_dict().items()}


def embedding_of(drafter: TrainableDrafter, engine: str) -> Tensor:
    """Return a copy of the target's embedding [V, H], as the head reads it, in the dtype of the head's weights.

    V is the vocabulary, H the width. Rows are multiplied already where the target multiplies its embedding by a factor.
    ValueError if the head is not bound to a target; `engine` is named in the message.
    """
    if not drafter.bound_to:
        raise ValueError(
            f"{engine}: a copy of the target's embedding is part of this layout: call bind(target.head) first"
        )
    target_head = drafter.target_head
    weight = target_head.embedding.get_parameter("weight")
    # a lookup and not the weight, since some targets multiply its rows by a factor
    rows = target_head.embed(torch.arange(len(weight), device=weight.device))
    return rows.detach().to("cpu", next(drafter.parameters()).dtype)


def output_of(
    drafter: TrainableDrafter, engine: str, advice: str = "no exporter has a layout for it"
) -> Tensor:
    """Return a copy of the target's LM head, in the dtype of the head's weights; ValueError if no matrix is all of it.

    Args:
        drafter: The head, bound to its target.
        engine: The engine's name, for messages.
        advice: What messages advise if a matrix does not suffice.

    Returns:
        [V, H] with the vocabulary V and the width H; with only the rows of its draft tokens for a head that was bound
        with a draft vocabulary.
    """
    if not drafter.bound_to:
        raise ValueError(
            f"{engine}: the target's LM head is part of this layout: call bind(target.head) first"
        )
    target_head = drafter.target_head
    # a StockHead runs the target's own code on the states, and no matrix stands for that
    if isinstance(target_head, StockHead):
        raise ValueError(
            f"{engine}: the target's LM head transforms states, and engines take a matrix: {advice}"
        )
    if getattr(target_head.output, "bias", None) is not None:
        raise ValueError(
            f"{engine}: the target's LM head has a bias, which would be dropped in silence: {advice}"
        )
    return target_head.weight.detach().to("cpu", next(drafter.parameters()).dtype)


def scale_of(drafter: TrainableDrafter) -> float:
    """Return the factor on the target's embedding rows, which engines do not apply when they draft.

    It is 1 for most targets, and for a head that is not bound to a target.
    """
    return drafter.target_head.scale if drafter.bound_to else 1.0


def has_attention(drafter: TrainableDrafter) -> bool:
    """Return whether the head has attention, so that it uses rotary positions."""
    return any(".self_attn." in name for name in drafter.state_dict())


def rotary_of(shape: Any) -> Config:
    """Return the rotary parameters that a head computes with, by its config of sizes.

    The config may hold others of its target, which the head ignores. `rope_type` is always among the result.
    """
    rope = {
        key: value
        for key, value in shape.rope_parameters.items()
        if value is not None and key not in PER_TARGET
    }
    return {**rope, "rope_type": shape.rope_parameters.get("rope_type", "default")}


def check_fit(head: TrainableDrafter, target: Any, name: str) -> None:
    """Raise ValueError for a head that does not fit a target, by its width, vocabulary or the layers that it reads.

    Args:
        head: The head; its `taps` are the target's layers whose inputs it reads.
        target: The target's config.
        name: What messages call the head.
    """
    # a draft model reads nothing of the target but tokens; a head reads states, or keys and values (`kv_cache`)
    if not (head.taps or head.reads.kv_cache):
        return
    advice = "name the target that its recipe.yaml names"
    shape = head.shape
    if (shape.hidden_size, shape.vocab_size) != (target.hidden_size, target.vocab_size):
        raise ValueError(
            f"{name} was made for a target of width {shape.hidden_size} and {shape.vocab_size} tokens, this one has "
            f"{target.hidden_size} and {target.vocab_size}: {advice}"
        )
    # the state behind the last layer is tap -1
    deepest = max(head.taps, default=-1)
    if deepest >= target.num_hidden_layers:
        raise ValueError(
            f"{name} was made for a deeper target: it reads the input of layer {deepest}, this one has "
            f"{target.num_hidden_layers} layers: {advice}"
        )
