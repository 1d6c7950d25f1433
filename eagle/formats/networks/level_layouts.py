"""Layouts of heads that guess several tokens from one state, for engines and for their authors' code."""

# H width, I inner width, V vocabulary

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle.core.drafter import TrainableDrafter
from eagle.formats.layout import Layout, embedding_of, has_attention, llama_config, output_of, tensors_of
from eagle.formats.networks.networks import EMBEDDING, NetworkLayout

MEDUSA, HYDRA, SPECULATOR, FALCON = "medusa", "hydra", "mlp_speculator", "falcon"
USUAL_THETA = 10000.0  # of Llama when that code was written
TOP_TOKENS = (5, 4, 3, 2)  # of each level of their trees, and one of any later level


def rename(tensors: Mapping[str, Tensor], spelling: Mapping[str, str]) -> dict[str, Tensor]:
    """Rename tensors by patterns, each of which must match a whole name."""
    for pattern, theirs in spelling.items():
        tensors = {re.sub(f"^{pattern}$", theirs, name): tensor for name, tensor in tensors.items()}
    return dict(tensors)


def check_shared(tensors: Mapping[str, Tensor], first: int, engine: str) -> None:
    """Refuse different residual blocks if the published code runs one block repeatedly."""
    for name, tensor in tensors.items():
        block = re.fullmatch(r"blocks\.(\d+)\.(\d+)\.(weight|bias)", name)
        if not block or int(block[2]) <= first:
            continue
        if not torch.equal(tensor, tensors[f"blocks.{block[1]}.{first}.{block[3]}"]):
            raise ValueError(
                f"{engine}: {name} differs from block {first} of its level, and that code runs one block again and "
                f"again: train with drafter.layers={first + 1}, or export to an engine that has several"
            )


def check_family(drafter: TrainableDrafter, target_config: Any, families: tuple[str, ...], engine: str) -> None:
    """Refuse a target that the published code cannot load, and an attention whose sizes it cannot have."""
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


def base_config(drafter: TrainableDrafter, target_config: Any) -> dict[str, Any]:
    """The config keys for any reader."""
    dtype = str(next(drafter.parameters()).dtype).removeprefix("torch.")
    return {"hidden_size": drafter.shape.hidden_size, "vocab_size": drafter.shape.vocab_size, "torch_dtype": dtype}


@dataclass(frozen=True)
class ServedMedusa(NetworkLayout):
    """Medusa's network for vLLM, which drafts the likeliest token of each head, whatever scales or caps the logits."""

    def write(self, drafter: TrainableDrafter, target_config: Any, engine: str) -> Layout:
        """No key beside the two has "num" with "heads" or "layers" in it, which would be taken for one of them."""
        settings, shares = drafter.settings, drafter.settings.lm_head == "target"
        tensors = rename(
            tensors_of(drafter),
            {r"blocks\.(\d+)\.(\d+)\.(\w+)": r"blocks.\1.layers.\2.\3", r"heads\.(\d+)\.weight": r"lm_heads.\1.weight"},
        )
        if shares:
            tensors["lm_heads.0.weight"] = output_of(drafter, engine, "train with drafter.lm_head=own")
        config = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            **base_config(drafter, target_config),
            "medusa_num_heads": settings.levels,
            "medusa_num_layers": settings.layers,
            "medusa_fc_bias": True,
            "original_lm_head": shares,
        }
        return Layout(config, tensors, self.serve, deepest=settings.levels)


@dataclass(frozen=True)
class PublishedMedusa(NetworkLayout):
    """Medusa's network as its authors' code names it, with LM heads of its own or with the target's (version 2)."""

    def write(self, drafter: TrainableDrafter, target_config: Any, engine: str) -> Layout:
        """The blocks and the LM head of a level are numbered in one row."""
        settings, tensors = drafter.settings, tensors_of(drafter)
        check_family(drafter, target_config, ("llama", "mistral"), engine)
        check_shared(tensors, 0, engine)
        spelling = {
            r"blocks\.(\d+)\.(\d+)\.(\w+)": r"\1.\2.linear.\3",
            r"heads\.(\d+)\.weight": rf"\1.{settings.layers}.weight",
        }
        config = {
            "model_type": "medusa",  # without one the loader takes the family from words in the folder's path
            **base_config(drafter, target_config),
            "medusa_num_heads": settings.levels,
            "medusa_num_layers": settings.layers,
            "base_model_name_or_path": getattr(target_config, "name_or_path", "") or None,
            **({"version": "2"} if settings.lm_head == "target" else {}),
        }
        return Layout(config, rename(tensors, spelling), self.serve, "medusa_lm_head.pt", settings.levels)


@dataclass(frozen=True)
class PublishedHydra(NetworkLayout):
    """Hydra's network as its authors' code names it; in front of each part of heads with a prefix stands a dropout."""

    def write(self, drafter: TrainableDrafter, target_config: Any, engine: str) -> Layout:
        """The code takes the embedding from the target, and the sizes of the prefix layer too."""
        settings, tensors = drafter.settings, tensors_of(drafter)
        check_family(drafter, target_config, ("llama",), engine)
        check_shared(tensors, 1, engine)
        theta = drafter.shape.rope_parameters["rope_theta"]
        if settings.prefix and theta != USUAL_THETA:
            raise ValueError(
                f"{engine}: the prefix layer has rope_theta {theta:g}, and that code {USUAL_THETA:g} for any "
                "target: train with drafter.prefix=false"
            )
        behind = (lambda place: 2 * int(place) + 1) if settings.prefix else int
        spelled = {
            re.sub(r"^(blocks\.\d+\.)(\d+)", lambda found: f"{found[1]}{behind(found[2])}", name): tensor
            for name, tensor in tensors.items()
        }
        spelling = {
            r"blocks\.(\d+)\.(\d+)\.(weight|bias)": r"hydra_mlp.\1.\2.linear.\3",
            r"blocks\.(\d+)\.(\d+)\.residual\.(\w+)": r"hydra_mlp.\1.\2.res_connection.\3",
            r"heads\.(\d+)\.(\w+)": r"hydra_lm_head.\1.1.\2" if settings.prefix else r"hydra_lm_head.\1.\2",
            r"(layers\.0\..*|norm\.weight)": r"prefix_embeding_layer.\1",  # as they spell it
        }
        config = {
            **base_config(drafter, target_config),
            "hydra_num_heads": settings.levels,
            "hydra_num_layers": settings.layers,
            "hydra_head_arch": "prefix-mlp" if settings.prefix else "mlp",
            "grounded_heads": True,
            "hidden_state_offset": 0,
            "base_model_name_or_path": getattr(target_config, "name_or_path", "") or None,
        }
        return Layout(config, rename(spelled, spelling), self.serve, "hydra_lm_head.pt", settings.levels)


@dataclass(frozen=True)
class PublishedSpeculator(NetworkLayout):
    """An MLP speculator as fms-extras names it; what levels share is written for each, as some readers ask for all."""

    def write(self, drafter: TrainableDrafter, target_config: Any, engine: str) -> Layout:
        """The layout of its wrapper for transformers."""
        settings, tensors = drafter.settings, tensors_of(drafter)
        levels, tensors_out = range(settings.levels), dict[str, Tensor]()
        for part, kind in (name.split(".")[::2] for name in tensors if name.split(".")[1] == "0"):
            for level in levels:
                nearest = next(at for at in range(level, -1, -1) if f"{part}.{at}.{kind}" in tensors)
                tensors_out[f"speculator.{part}.{level}.{kind}"] = tensors[f"{part}.{nearest}.{kind}"].clone()
        top = [TOP_TOKENS[level] if level < len(TOP_TOKENS) else 1 for level in levels]
        config = {
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "model_type": "mlp_speculator",
            "emb_dim": drafter.shape.hidden_size,
            "inner_dim": len(tensors["ln.0.weight"]),
            "vocab_size": drafter.shape.vocab_size,
            "n_predict": settings.levels,
            "top_k_tokens_per_head": top,
            "n_candidates": TOP_TOKENS[0],
            "tie_weights": bool(settings.tie_weights) and settings.levels > 1,  # of one level there is nothing to tie
            "scale_input": bool(settings.scale_input),
            "torch_dtype": str(tensors["ln.0.weight"].dtype).removeprefix("torch."),
        }
        return Layout(config, tensors_out, self.serve, deepest=settings.levels)


@dataclass(frozen=True)
class PublishedFalcon(NetworkLayout):
    """Falcon's network as its authors' code names it: EAGLE-1's, and an LSTM that begins anew at every place."""

    def write(self, drafter: TrainableDrafter, target_config: Any, engine: str) -> Layout:
        """From a state of zeros neither the forget gate nor the recurrent weights matter: both are zeros."""
        check_family(drafter, target_config, ("llama", "qwen2"), engine)
        tensors = {EMBEDDING: embedding_of(drafter, engine)}
        for name, tensor in tensors_of(drafter).items():
            if gate := re.fullmatch(r"gates\.(\d)\.(weight|bias)", name):
                entry, cell, output = tensor.chunk(3)
                read = torch.cat([entry, torch.zeros_like(entry), cell, output])  # in the order of torch
                recurrent = read.new_zeros(len(read), *[len(entry)] * (gate[2] == "weight"))
                tensors |= {f"lstm.{gate[2]}_ih_l{gate[1]}": read, f"lstm.{gate[2]}_hh_l{gate[1]}": recurrent}
            else:
                tensors[name] = tensor
        more = {"architectures": ["LlamaForCausalLM"], "bias": True, "k_mask": drafter.settings.k}
        config = llama_config(drafter, target_config, **more)
        return Layout(config, tensors, self.serve, "pytorch_model.bin")
