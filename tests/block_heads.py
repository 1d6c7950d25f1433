"""Random block drafters and MTP layers in the layouts of other projects, made by hand: their names, sizes and keys."""

from __future__ import annotations

from typing import Any

import torch

from tests import foreign_heads as made
from tests.block_layouts import DOMINO_SHAPES, MARKOV_SHAPES, block_shapes, injected_shapes

H, V = made.H, made.V


def fill(shapes: dict[str, tuple[int, ...]], prefix: str = "") -> dict[str, torch.Tensor]:
    """Random tensors of these sizes."""
    return {prefix + name: made.drawn(*size, seed=len(name)) for name, size in shapes.items()}


QWEN3 = {
    **made.LLAMA,
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "layer_types": ["full_attention"] * 2,
}
QWEN3 |= {
    "num_target_layers": made.LAYERS,
    "block_size": 4,
    "use_sliding_window": False,
    "max_window_layers": 2,
}


def zlab(**changed: Any) -> made.Head:
    """As z-lab publishes it, with the code of its own that it names."""
    nested = {"mask_token_id": 3, "target_layer_ids": [1, 3, 5], **changed.pop("dflash_config", {})}
    config = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        **QWEN3,
    }
    return {**config, "dflash_config": nested, **changed}, fill(injected_shapes())


def deepspec(**changed: Any) -> made.Head:
    """DeepSpec's DFlash: DSpark without a Markov head, with copies of the target's two matrices."""
    told = {
        "mask_token_id": 3,
        "target_layer_ids": [1, 3, 5],
        "num_anchors": 512,
        "enable_confidence_head": False,
    }
    config = {"architectures": ["Qwen3DSparkModel"], **QWEN3, **told, "markov_rank": 0, **changed}
    return config, {
        **fill(injected_shapes()),
        "embed_tokens.weight": made.embedding(),
        "lm_head.weight": lm_head(),
    }


def speculators(kind: str = "dflash", **changed: Any) -> made.Head:
    """That of speculators, which leaves a switch out where it is the default."""
    block = {
        key: value
        for key, value in QWEN3.items()
        if key not in ("rope_theta", "rope_scaling", "block_size")
    }
    config = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "aux_hidden_state_layer_ids": [2, 4, 6],
        "mask_token_id": 3,
        "block_size": 4,
        "draft_vocab_size": V,
        "sliding_window_non_causal": False,
        "transformer_layer_config": {
            **block,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        "speculators_config": {"algorithm": kind, "verifier": {"name_or_path": "some/target"}},
    }
    return {**config, **changed}, fill(injected_shapes())


def peagle(**changed: Any) -> made.Head:
    """P-EAGLE of speculators, with a draft vocabulary and two blocks."""
    config, held = made.speculators(
        architecture="PEagleSpeculator", speculators_model_type="peagle", mask_token_id=3
    )
    held |= fill(
        {name: size for name, size in block_shapes(2).items() if name.startswith("layers.1.")}
    )
    config["transformer_layer_config"] = {
        **config["transformer_layer_config"],
        "num_hidden_layers": 2,
    }
    return {**config, **changed}, {**held, "mask_hidden": made.drawn(1, 1, 3 * H)}


def mimo(whole: bool = False) -> made.Head:
    """The layer that MiMo ships with, whose attention has biases; alone, or in the files of the whole model."""
    held = fill({name.removeprefix("layers.0."): size for name, size in block_shapes(1).items()})
    held |= fill({f"{name}_layernorm.weight": (H,) for name in ("token", "hidden", "final")})
    held |= {"input_proj.weight": made.drawn(H, 2 * H)}
    biases = {"q": made.HEADS * made.WIDE, "k": made.KEYS * made.WIDE, "v": made.KEYS * made.WIDE}
    held |= {f"self_attn.{name}_proj.bias": made.drawn(size) for name, size in biases.items()}
    held = {f"model.mtp_layers.0.{name}": tensor for name, tensor in held.items()}
    if whole:
        held |= fill(block_shapes(3), "model.") | {"model.norm.weight": made.drawn(H)}
        held |= {"model.embed_tokens.weight": made.embedding(), "lm_head.weight": lm_head()}
    told = {"model_type": "mimo", "num_nextn_predict_layers": 1, "num_hidden_layers": 3}
    return {"architectures": ["MiMoForCausalLM"], **made.LLAMA, **told}, held


def deepseek(whole: bool = False) -> made.Head:
    """A layer by DeepSeek's names with a Llama's block, behind three layers of a model."""
    own = {name.replace("layers.0.", "layers.3."): size for name, size in block_shapes(1).items()}
    own |= {f"layers.3.{name}.weight": (H,) for name in ("enorm", "hnorm", "shared_head.norm")}
    held = fill({**own, "layers.3.eh_proj.weight": (H, 2 * H)}, "model.")
    held["model.layers.3.embed_tokens.weight"] = made.embedding()
    held["model.layers.3.shared_head.head.weight"] = lm_head()
    if whole:
        held |= fill(block_shapes(3), "model.") | {"model.norm.weight": made.drawn(H)}
        held |= {"model.embed_tokens.weight": made.embedding(), "lm_head.weight": lm_head()}
    told = {"num_nextn_predict_layers": 1, "num_hidden_layers": 3}
    return {"architectures": ["SomeForCausalLM"], **made.LLAMA, **told}, held


def lm_head() -> torch.Tensor:
    """[V, H], the target's."""
    return made.drawn(V, H, seed=8)


def dspark(markov: str = "vanilla", **changed: Any) -> made.Head:
    """SpecForge's, all of whose keys are nested; early ones stood in a part of their own."""
    told = {
        "mask_token_id": 3,
        "target_layer_ids": [1, 3, 5],
        "projector_type": "dspark",
        "markov_rank": 4,
    }
    told |= {
        "markov_head_type": markov,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    held, further = (
        fill({**injected_shapes(), **MARKOV_SHAPES}),
        {"gated": (4, H + 4), "rnn": (12, H + 8)},
    )
    if size := further.get(markov):
        name = f"markov_head.{'gate' if markov == 'gated' else 'joint'}_proj"
        held |= {f"{name}.weight": made.drawn(*size), f"{name}.bias": made.drawn(size[0])}
    config = {
        "architectures": ["DSparkDraftModel"],
        **QWEN3,
        "dflash_config": {**told, "attention_mode": "gqa"},
    }
    return {**config, **changed}, held


def speculators_dspark(**changed: Any) -> made.Head:
    """Of speculators, which takes another default than vLLM when it is left out what slots name."""
    told = {
        "markov_rank": 4,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        **changed,
    }
    config, held = speculators("dspark", confidence_head_with_markov=True, **told)
    return config, {**held, **fill(MARKOV_SHAPES)}


def domino(**changed: Any) -> made.Head:
    """SpecForge's, whose first level has no bias; by early names."""
    told = {
        "mask_token_id": 3,
        "target_layer_ids": [1, 3, 5],
        "projector_type": "domino",
        "emb_dim": 4,
    }
    told |= {"gru_hidden_dim": 8, "pure_draft_prefix_len": 2, **changed}
    config = {"architectures": ["DominoDraftModel"], "emb_dim": 4, **QWEN3, "dflash_config": told}
    return config, {**fill(injected_shapes()), **fill(DOMINO_SHAPES, "logit_head.")}


LAYOUTS: dict[
    str, tuple[made.Head, str, dict[str, Any]]
] = {  # head, whose it is, settings that it has
    "z-lab": (
        zlab(),
        "z-lab/dflash",
        {"sample_from_anchor": False, "slots": 4, "taps": (2, 4, 6), "mask_token": 3},
    ),
    "JetSpec": (
        zlab(dflash_config={"causal": True}),
        "z-lab/dflash",
        {"sample_from_anchor": False, "causal": True},
    ),
    "DeepSpec": (
        deepspec(),
        "deepseek-ai/DeepSpec",
        {"sample_from_anchor": True, "taps": (2, 4, 6), "mask_token": 3},
    ),
    "speculators": (
        speculators(),
        "speculators",
        {"sample_from_anchor": False, "taps": (2, 4, 6), "slots": 4},
    ),
    "speculators, from the anchor": (
        speculators(sample_from_anchor=True),
        "speculators",
        {"sample_from_anchor": True},
    ),
    "DSpark": (
        dspark(),
        "sgl-project/SpecForge",
        {"sample_from_anchor": True, "markov": "vanilla", "rank": 4},
    ),
    "DSpark, gated": (
        dspark("gated"),
        "sgl-project/SpecForge",
        {"markov": "gated", "confidence": True},
    ),
    "DSpark, recurrent": (
        dspark("rnn"),
        "sgl-project/SpecForge",
        {"markov": "rnn", "confidence": True},
    ),
    "Domino": (
        domino(),
        "sgl-project/SpecForge",
        {"sample_from_anchor": False, "unbiased": 2, "gru_size": 8},
    ),
    "Domino, shifted": (
        domino(shift_label=True),
        "sgl-project/SpecForge",
        {"sample_from_anchor": True},
    ),
    "P-EAGLE": (
        peagle(),
        "P-EAGLE",
        {"blocks": 2, "mask_token": 3, "draft_vocab": made.D, "fc_norm": False},
    ),
    "MiMo": (mimo(), "MiMo", {"hidden_first": True}),
    "MiMo, whole": (mimo(whole=True), "MiMo", {"hidden_first": True}),
    "DeepSeek": (deepseek(), "DeepSeek", {"hidden_first": False}),
    "DeepSeek, whole": (deepseek(whole=True), "DeepSeek", {"hidden_first": False}),
}
