"""An exported head: a config and tensors, named as one engine names them."""

# H width, V vocabulary

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from eagle.core.drafter import TrainableDrafter
from eagle.formats.rotary import check_rotary, rotary_of


@dataclass(frozen=True, slots=True)
class Layout:
    """What goes into `config.json` and `model.safetensors`, and how the engine is started (Markdown)."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    serve: str  # where HEAD, TARGET and DEPTH stand for themselves

    def of(self, serve: str, **config: Any) -> Layout:
        """The same for another engine: how that one is started, and what its config says otherwise."""
        return replace(self, serve=serve, config={**self.config, **config})

    def without(self, *names: str) -> Layout:
        """The same without some tensors."""
        return replace(self, tensors={name: tensor for name, tensor in self.tensors.items() if name not in names})


def llama_config(drafter: TrainableDrafter, target_config: Any, engine: str, **more: Any) -> dict[str, Any]:
    """The keys that any engine reads of a Llama block; older readers know the rotary ones by their first two names."""
    shape = drafter.shape
    check_rotary(shape, engine)
    rope = rotary_of(shape)
    scaled = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "model_type": "llama",
        "vocab_size": target_config.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaled,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": target_config.bos_token_id,
        "eos_token_id": target_config.eos_token_id,
        "torch_dtype": str(next(drafter.parameters()).dtype).removeprefix("torch."),
        **more,
    }


def tensors_of(drafter: TrainableDrafter) -> dict[str, Tensor]:
    """The head's own tensors under their own names."""
    return {name: tensor.detach().cpu() for name, tensor in drafter.state_dict().items()}


def embedding_of(drafter: TrainableDrafter, engine: str) -> Tensor:
    """[V, H], the token embeddings that the head was trained on, in the dtype of its weights."""
    frozen = getattr(drafter, "frozen", ())
    if not frozen:
        raise ValueError(
            f"{engine}: a copy of the target's embedding is part of this layout: call bind(target.head) first"
        )
    weight = frozen[0].embedding.get_parameter("weight")
    rows = frozen[0].embed(torch.arange(len(weight), device=weight.device))
    return rows.detach().to("cpu", next(drafter.parameters()).dtype)


def scale_of(drafter: TrainableDrafter) -> float:
    """What the target multiplies its embedding's rows with, of which engines know nothing when they draft."""
    frozen = getattr(drafter, "frozen", ())
    return frozen[0].scale if frozen else 1.0
