"""Random heads of every kind in every layout that is read here, by name; those of levels are made here."""

# H hidden, V vocabulary

from __future__ import annotations

from typing import Any

from torch import Tensor

from tests import block_heads
from tests import foreign_heads as made

H = made.H
V = made.V
INNER = 8  # the width inside of an MLP speculator
LEVELS = 3
MEDUSA_BLOCKS = 2
# names of a block's linear layer and of an LM head: I level, J block, N blocks, PART weight or bias
SPELLINGS = {
    "FasterDecoding/Medusa": ("I.J.linear.PART", "I.N.weight"),
    "vLLM": ("blocks.I.layers.J.PART", "lm_heads.I.weight"),
    "ModelOpt": ("medusa_heads.I.J.linear.PART", "medusa_heads.I.N.weight"),
    "ModelOpt, Megatron": (
        "medusa_heads.I.medusa_layers.J.linear.PART",
        "medusa_heads.I.lm_head.weight",
    ),
}
MODELOPT = {"medusa": {"num_medusa_heads": LEVELS, "num_medusa_layers": MEDUSA_BLOCKS}}
MEDUSA_CONFIGS: dict[str, dict[str, Any]] = {
    "FasterDecoding/Medusa": {
        # published configs say 2 whatever the file holds
        "medusa_num_heads": 2,
        "medusa_num_layers": MEDUSA_BLOCKS,
        "base_model_name_or_path": "a/b",
    },
    "vLLM": {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": H,
        "vocab_size": V,
        "medusa_num_heads": LEVELS,
        "medusa_num_layers": MEDUSA_BLOCKS,
        "medusa_fc_bias": True,
    },
    "ModelOpt": MODELOPT,
    "ModelOpt, Megatron": MODELOPT,
}


def medusa_names(spelling: str, own: bool = True) -> dict[str, str]:
    """Return a writer's name of each tensor that Medusa heads have here, with LM heads of their own or without."""
    linear, output = SPELLINGS[spelling]
    names = {}
    for level in range(LEVELS):
        theirs = output.replace("I", str(level)).replace("N", str(MEDUSA_BLOCKS))
        if own:
            names[f"heads.{level}.weight"] = theirs
        for block in range(MEDUSA_BLOCKS):
            theirs = linear.replace("I", str(level)).replace("J", str(block))
            for part in ("weight", "bias"):
                names[f"blocks.{level}.{block}.{part}"] = theirs.replace("PART", part)
    return names


def medusa_weights(names: dict[str, str]) -> dict[str, Tensor]:
    """Return random weights, each different, by the names of heads here."""
    weights = {}
    for seed, name in enumerate(names):
        size: tuple[int, ...] = (H, H)
        if name.startswith("heads"):
            size = (V, H)
        elif name.endswith("bias"):
            size = (H,)
        weights[name] = made.drawn(*size, seed=seed)
    return weights


def medusa(spelling: str) -> made.Head:
    """Return Medusa heads as one of their writers names them."""
    names = medusa_names(spelling)
    weights = medusa_weights(names)
    return MEDUSA_CONFIGS[spelling], {names[name]: weights[name] for name in names}


def speculator(prefix: str = "", tied: bool = False) -> made.Head:
    """Return an MLP speculator of fms-extras, which writes what levels share once for each of them."""
    held: dict[str, Tensor] = {}
    for level in range(LEVELS):
        seed = 0 if tied else level
        # the first level reads the target's state, later ones the level before
        reads = INNER if level else H
        projection_seed = min(level, 1) if tied else level
        held |= {
            f"emb.{level}.weight": made.drawn(V, INNER, seed=seed),
            f"proj.{level}.weight": made.drawn(INNER, reads, seed=projection_seed),
            f"ln.{level}.weight": made.drawn(INNER, seed=seed),
            f"ln.{level}.bias": made.drawn(INNER, seed=10 + seed),
            f"head.{level}.weight": made.drawn(V, INNER, seed=20 + seed),
        }
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "emb_dim": H,
        "inner_dim": INNER,
        "vocab_size": V,
        "n_predict": LEVELS,
        "n_candidates": 5,
        "top_k_tokens_per_head": [5, 4, 3],
        "tie_weights": tied,
        "scale_input": tied,
    }
    return config, {prefix + name: tensor for name, tensor in held.items()}


def hydra(prefix: bool = True, layers: int = 3) -> made.Head:
    """Return Hydra heads of their authors, whose blocks after the first are one block by several names."""
    held: dict[str, Tensor] = {}
    for level in range(LEVELS):
        for block in range(layers):
            # a dropout stands before each block of heads with a prefix layer
            index = 2 * block + 1 if prefix else block
            name = f"hydra_mlp.{level}.{index}"
            seed = 10 * level + min(block, 1)
            width = H if block else (level + 2) * H
            held[f"{name}.linear.weight"] = made.drawn(H, width, seed=seed)
            held[f"{name}.linear.bias"] = made.drawn(H, seed=seed)
            if block == 0:
                held[f"{name}.res_connection.weight"] = made.drawn(H, width, seed=seed + 5)
                held[f"{name}.res_connection.bias"] = made.drawn(H, seed=seed + 5)
        name = f"hydra_lm_head.{level}.1" if prefix else f"hydra_lm_head.{level}"
        held[f"{name}.weight"] = made.drawn(V, H, seed=level)
        held[f"{name}.bias"] = made.drawn(V, seed=level)
    if prefix:
        layer = "prefix_embeding_layer."
        held |= made.block(f"{layer}layers.0.", H)
        held[f"{layer}layers.0.input_layernorm.weight"] = made.drawn(H)
        held[f"{layer}norm.weight"] = made.drawn(H, seed=1)
        held[f"{layer}layers.0.self_attn.rotary_emb.inv_freq"] = made.drawn(4)
        held[f"{layer}embed_tokens.weight"] = made.drawn(V, H)
        held["input_embed_fn.weight"] = made.embedding()
    config = {
        "hydra_num_heads": LEVELS,
        "hydra_num_layers": layers,
        "hydra_head_arch": "prefix-mlp" if prefix else "mlp",
        "grounded_heads": True,
        "hidden_state_offset": 0,
        "base_model_name_or_path": "some/target",
        "transformers_version": "4.31.0",
    }
    return config, held


def falcon() -> made.Head:
    """Return a Falcon head of its authors: EAGLE-1's block, and an LSTM of two layers in place of `fc`."""
    held = made.block("layers.0.", H)
    held["embed_tokens.weight"] = made.embedding()
    for layer, reads in enumerate((2 * H, H)):
        held[f"lstm.weight_ih_l{layer}"] = made.drawn(4 * H, reads)
        held[f"lstm.weight_hh_l{layer}"] = made.drawn(4 * H, H)
        for side in ("ih", "hh"):
            held[f"lstm.bias_{side}_l{layer}"] = made.drawn(4 * H, seed=layer + len(side))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "bias": True,
        "k_mask": 3,
    }
    return {**made.LLAMA, **config}, held


EVERY: dict[str, made.Head] = {
    **made.LAYOUTS,
    **{f"block: {name}": head for name, (head, *_) in block_heads.LAYOUTS.items()},
    **{f"Medusa: {spelling}": medusa(spelling) for spelling in SPELLINGS},
    "Hydra": hydra(prefix=False),
    "Hydra with a prefix": hydra(),
    "fms-extras": speculator("speculator."),
    "Falcon": falcon(),
}
