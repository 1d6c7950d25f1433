"""Layouts of block drafters and MTP layers, made by hand: names, sizes and keys as those who load them have them."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig

from tests import foreign_heads as made

H = made.H
V = made.V
BLOCKS = 2
# the target that heads are exported for
TARGET = LlamaConfig(**{**made.LLAMA, "num_hidden_layers": made.LAYERS}, name_or_path="some/target")
TARGET.architectures = ["LlamaForCausalLM"]
Shapes = dict[str, tuple[int, ...]]


def block_shapes(layers: int, first: int = H) -> Shapes:
    """Return the shapes of a Llama's blocks with both norms; the first may read more."""
    shapes: Shapes = {}
    for layer in range(layers):
        tensors = made.block(f"layers.{layer}.", H if layer else first)
        shapes |= {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        shapes[f"layers.{layer}.input_layernorm.weight"] = (H,)
    return shapes


def injected_shapes() -> Shapes:
    """Return the shapes of DFlash, whose queries and keys have norms."""
    shapes = block_shapes(BLOCKS)
    for layer in range(BLOCKS):
        for name in ("q_norm", "k_norm"):
            shapes[f"layers.{layer}.self_attn.{name}.weight"] = (made.WIDE,)
    return {
        **shapes,
        "fc.weight": (H, 3 * H),
        "hidden_norm.weight": (H,),
        "norm.weight": (H,),
    }


# exports have neither a cache nor the version of transformers
LLAMA = {**made.LLAMA}
del LLAMA["use_cache"], LLAMA["transformers_version"]
QWEN3 = {
    **LLAMA,
    "model_type": "qwen3",
    "num_hidden_layers": BLOCKS,
    "layer_types": ["full_attention"] * BLOCKS,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": BLOCKS,
    "num_target_layers": made.LAYERS,
    "block_size": 6,
}
NESTED = {"mask_token_id": 5, "target_layer_ids": [1, 3, 6]}
BOTH_COPIES = {"embed_tokens.weight": (V, H), "lm_head.weight": (V, H)}
ZLAB_CONFIG = {
    **QWEN3,
    "architectures": ["DFlashDraftModel"],
    "dflash_config": {**NESTED, "causal": False, "sample_from_anchor": False},
}
# speculators keeps these two keys beside the config of the blocks
BLOCK_CONFIG = {**QWEN3, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
del BLOCK_CONFIG["block_size"], BLOCK_CONFIG["num_target_layers"]
VERIFIER = {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]}


def proposing(algorithm: str, tokens: int) -> dict[str, Any]:
    """Return what speculators is told of how tokens are proposed."""
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    told = {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [method],
    }
    return {**told, "verifier": VERIFIER}


SPECULATORS_DFLASH = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "speculators_version": "0.9.0",
    "draft_vocab_size": V,
    "block_size": 6,
    "mask_token_id": 5,
    "aux_hidden_state_layer_ids": [2, 4, 7],
    "sliding_window_non_causal": True,
    "sample_from_anchor": False,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformer_layer_config": BLOCK_CONFIG,
    "speculators_config": proposing("dflash", 5),
}
SPECULATORS_PEAGLE = {
    "architectures": ["PEagleSpeculator"],
    "speculators_model_type": "peagle",
    "speculators_version": "0.9.0",
    "norm_before_residual": True,
    "fc_norm": False,
    "norm_output": False,
    "draft_vocab_size": V,
    "eagle_aux_hidden_state_layer_ids": [2, 4, 6],
    "mask_token_id": 5,
    "norm_before_fc": False,
    "embed_requires_grad": False,
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformer_layer_config": {
        **LLAMA,
        "num_hidden_layers": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "architectures": ["LlamaForCausalLM"],
    },
    "speculators_config": proposing("peagle", 8),
}
FUSED_SHAPES = {
    **block_shapes(3, 2 * H),
    "layers.0.hidden_norm.weight": (H,),
    "fc.weight": (H, 3 * H),
    "norm.weight": (H,),
    "lm_head.weight": (V, H),
    "mask_hidden": (1, 1, 3 * H),
}
MIMO_SHAPES = {
    **{
        f"model.mtp_layers.0.{name.removeprefix('layers.0.')}": size
        for name, size in block_shapes(1).items()
    },
    **{
        f"model.mtp_layers.0.{name}_layernorm.weight": (H,) for name in ("token", "hidden", "final")
    },
    **{
        f"model.mtp_layers.0.self_attn.{name}_proj.bias": (made.WIDE * (2 if name == "q" else 1),)
        for name in "qkv"
    },
    "model.mtp_layers.0.input_proj.weight": (H, 2 * H),
    "model.embed_tokens.weight": (V, H),
    "lm_head.weight": (V, H),
}
DEEPSEEK_SHAPES = {
    **{
        f"model.layers.9.{name.removeprefix('layers.0.')}": size
        for name, size in block_shapes(1).items()
    },
    **{f"model.layers.9.{name}.weight": (H,) for name in ("enorm", "hnorm", "shared_head.norm")},
    "model.layers.9.eh_proj.weight": (H, 2 * H),
    "model.layers.9.embed_tokens.weight": (V, H),
    "model.layers.9.shared_head.head.weight": (V, H),
}
MTP_CONFIG = {
    **TARGET.to_dict(),
    "num_nextn_predict_layers": 1,
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
}
DEEPSPEC_CONFIG = {
    **QWEN3,
    "architectures": ["Qwen3DSparkModel"],
    **NESTED,
    "num_anchors": 512,
    "markov_rank": 0,
    "markov_head_type": "vanilla",
    "enable_confidence_head": False,
    "confidence_head_with_markov": False,
    "sample_from_anchor": True,
    "dspark_bonus_anchor": False,
}
# DSpark's two embeddings of tokens, and its confidence
MARKOV_SHAPES = {
    "markov_head.markov_w1.weight": (V, 4),
    "markov_head.markov_w2.weight": (V, 4),
    "confidence_head.proj.weight": (1, H + 4),
    "confidence_head.proj.bias": (1,),
}
MARKOV = {
    "markov_rank": 4,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "sample_from_anchor": True,
}
DSPARK_CONFIG = {**DEEPSPEC_CONFIG, **MARKOV}
SPECFORGE_CONFIG = {
    **QWEN3,
    "architectures": ["DSparkDraftModel"],
    "dflash_config": {
        **NESTED,
        "projector_type": "dspark",
        "attention_mode": "gqa",
        "confidence_head_alpha": 1.0,
        **MARKOV,
    },
}
SPECULATORS_DSPARK = {
    **SPECULATORS_DFLASH,
    "architectures": ["DSparkSpeculator"],
    "speculators_model_type": "dspark",
    **MARKOV,
    "speculators_config": proposing("dspark", 6),
}
# a GRU of 8 numbers, with three gates
DOMINO_SHAPES = {
    "prefix_gru.weight_ih_l0": (24, H),
    "prefix_gru.weight_hh_l0": (24, 8),
    "embed_proj.0.weight": (4, H + 8),
    "embed_proj.2.weight": (V, 4),
}
# two convolutions of two taps in each block, with four groups of four channels, and codes of width 3
SELECTOR_SHAPES: Shapes = {
    "candidate_selector.predecessor_codebook": (V, 3),
    "candidate_selector.successor_codebook": (V, 3),
    "candidate_selector.hidden_projection.weight": (3, H),
}
CONVOLUTION_SHAPES: Shapes = {}
for layer in range(BLOCKS):
    for part in ("attention_conv", "mlp_conv"):
        CONVOLUTION_SHAPES[f"layers.{layer}.{part}.base_kernel"] = (2, 2, H)
        CONVOLUTION_SHAPES[f"layers.{layer}.{part}.kernel_projection.weight"] = (H, H)
SELECTOR_SHAPES |= CONVOLUTION_SHAPES
DFLASH2_SHAPES = {**injected_shapes(), **SELECTOR_SHAPES}
SELECTOR = {
    "conv_kernel_size": 2,
    "conv_group_size": 4,
    "selector_rank": 3,
    "selector_top_k": 5,
}
DFLASH2_CONFIG = {
    **ZLAB_CONFIG,
    "architectures": ["DFlash2DraftModel"],
    "dflash_config": {**ZLAB_CONFIG["dflash_config"], "block_size": 6, **SELECTOR},
}
# the lattice of 5 slots: 4 candidates of a slot, width 8, two heads, one layer with an MLP of 12, factors of 6
LATTICE_SHAPES: Shapes = {
    "slot_embedding": (1, 1, 5, 1, 8),
    "rank_embedding": (1, 1, 1, 4, 8),
    "relative_slot_bias": (2, 11),
    "same_slot_bias": (2,),
    "feature_norm.weight": (5,),
    "feature_norm.bias": (5,),
    "layers.0.attn.in_proj_weight": (24, 8),
    "layers.0.attn.in_proj_bias": (24,),
}
for name, outputs, inputs in (
    ("token_proj", 8, H),
    ("pass_hidden_proj", 8, H),
    ("context_proj", 8, H),
    ("feature_mlp.up_proj", 8, 5),
    ("feature_mlp.down_proj", 8, 8),
    ("layers.0.attn.out_proj", 8, 8),
    ("layers.0.mlp.up_proj", 12, 8),
    ("layers.0.mlp.down_proj", 8, 12),
    ("factor_input_proj", 8, 24),
    ("out_head", 6, 8),
    ("in_head", 6, 8),
    ("anchor_out_head", 6, 8),
):
    LATTICE_SHAPES[f"{name}.weight"] = (outputs, inputs)
    LATTICE_SHAPES[f"{name}.bias"] = (outputs,)
for name in ("layers.0.attn_norm", "layers.0.mlp_norm", "output_norm", "anchor_norm"):
    LATTICE_SHAPES[f"{name}.weight"] = (8,)
LATTICE_SHAPES = {f"lilicorr.{name}": shape for name, shape in LATTICE_SHAPES.items()}
LATTICE = {
    "candidate_topk": 4,
    "hidden_size": 8,
    "factor_dim": 6,
    "num_layers": 1,
    "num_heads": 2,
    "mlp_ratio": 1.5,
    "logit_scale": 6.0,
    "vector_eps": 0.001,
}
LATTICE_KEYS = {"lilicorr_enabled": True, **{f"lilicorr_{key}": LATTICE[key] for key in LATTICE}}
LILICORR_CONFIG = {
    **ZLAB_CONFIG,
    "architectures": ["LiLiCorrDraftModel"],
    "dflash_config": {**ZLAB_CONFIG["dflash_config"], "block_size": 6, **LATTICE_KEYS},
}
SPECULATORS_DFLASH2 = {
    **SPECULATORS_DFLASH,
    "architectures": ["DFlash2DraftModel"],
    "speculators_model_type": "dflash2",
    **SELECTOR,
    "speculators_config": proposing("dflash2", 5),
}
DOMINO_CONFIG = {
    **QWEN3,
    "architectures": ["DominoDraftModel"],
    "dflash_config": {
        **NESTED,
        "projector_type": "domino",
        "emb_dim": 4,
        "gru_hidden_dim": 8,
        "pure_draft_prefix_len": 1,
        "shift_label": True,
    },
}
# a refiner of rank 4, whose MLP is twice as wide
REFINER_SHAPES = {
    "token_embed.weight": (V, 4),
    "readout.weight": (V, 4),
    "down_h.weight": (4, H),
    "down_g.weight": (4, H),
    "in_proj.weight": (4, 12),
    "mix_l": (4, 6, 6),
    "mlp_gate.weight": (8, 4),
    "mlp_up.weight": (8, 4),
    "mlp_down.weight": (4, 8),
}
# what vLLM calls those that it names otherwise
REFINER_IN_VLLM = {
    "token_embed.weight": "w1.weight",
    "readout.weight": "w2.weight",
    "mix_l": "mix.L",
    "mlp_gate.weight": "mlp.gate_proj.weight",
    "mlp_up.weight": "mlp.up_proj.weight",
    "mlp_down.weight": "mlp.down_proj.weight",
}


def refiner_shapes(vllm: bool = False) -> Shapes:
    """Return the shapes of XPress's refiner, by the names of speculators or of vLLM."""
    if not vllm:
        return {f"refiner_head.{name}": size for name, size in REFINER_SHAPES.items()}
    return {
        f"xpress_head.{REFINER_IN_VLLM.get(name, name)}": size
        for name, size in REFINER_SHAPES.items()
    }


VLLM_XPRESS = {
    **ZLAB_CONFIG,
    "architectures": ["Qwen3XPressModel"],
    "xpress_block_size": 6,
    "xpress_rank": 4,
    "xpress_mlp_hidden": 8,
    "xpress_num_passes": 6,
}
SPECULATORS_XPRESS = {
    **SPECULATORS_DFLASH,
    "architectures": ["XPressSpeculator"],
    "speculators_model_type": "xpress",
    "xpress_rank": 4,
    "xpress_mlp_ratio": 2,
    "num_jacobi_passes": 6,
    "speculators_config": proposing("xpress", 5),
}
# engine and head: the tensors and the config of an export
GOLDEN: dict[tuple[str, str], tuple[Shapes, dict[str, Any]]] = {
    ("zlab", "dflash"): (injected_shapes(), ZLAB_CONFIG),
    ("vllm", "dflash"): (injected_shapes(), ZLAB_CONFIG),
    ("specforge", "dflash"): (injected_shapes(), ZLAB_CONFIG),
    ("trtllm", "dflash"): (injected_shapes(), ZLAB_CONFIG),
    ("speculators", "dflash"): (injected_shapes(), SPECULATORS_DFLASH),
    ("zlab", "dflash2"): (DFLASH2_SHAPES, DFLASH2_CONFIG),
    ("vllm", "dflash2"): (DFLASH2_SHAPES, DFLASH2_CONFIG),
    ("sglang", "dflash2"): (DFLASH2_SHAPES, DFLASH2_CONFIG),
    ("llamacpp", "dflash2"): (DFLASH2_SHAPES, DFLASH2_CONFIG),
    ("vllm", "lilicorr"): ({**injected_shapes(), **LATTICE_SHAPES}, LILICORR_CONFIG),
    ("sglang", "lilicorr"): ({**injected_shapes(), **LATTICE_SHAPES}, LILICORR_CONFIG),
    ("speculators", "dflash2"): (DFLASH2_SHAPES, SPECULATORS_DFLASH2),
    ("deepspec", "dflash from the anchor"): ({**injected_shapes(), **BOTH_COPIES}, DEEPSPEC_CONFIG),
    ("speculators", "peagle"): (
        {**FUSED_SHAPES, "embed_tokens.weight": (V, H)},
        SPECULATORS_PEAGLE,
    ),
    ("deepspec", "dspark"): ({**injected_shapes(), **MARKOV_SHAPES, **BOTH_COPIES}, DSPARK_CONFIG),
    ("vllm", "dspark"): ({**injected_shapes(), **MARKOV_SHAPES}, DSPARK_CONFIG),
    ("sglang", "dspark"): ({**injected_shapes(), **MARKOV_SHAPES}, DSPARK_CONFIG),
    ("specforge", "dspark"): ({**injected_shapes(), **MARKOV_SHAPES}, SPECFORGE_CONFIG),
    ("trtllm", "dspark"): ({**injected_shapes(), **MARKOV_SHAPES}, SPECFORGE_CONFIG),
    ("speculators", "dspark"): ({**injected_shapes(), **MARKOV_SHAPES}, SPECULATORS_DSPARK),
    ("vllm", "xpress"): ({**injected_shapes(), **refiner_shapes(vllm=True)}, VLLM_XPRESS),
    ("speculators", "xpress"): ({**injected_shapes(), **refiner_shapes()}, SPECULATORS_XPRESS),
    ("specforge", "domino"): ({**injected_shapes(), **DOMINO_SHAPES}, DOMINO_CONFIG),
    ("sglang", "domino"): ({**injected_shapes(), **DOMINO_SHAPES}, DOMINO_CONFIG),
    ("mimo", "mtp, state first"): (MIMO_SHAPES, MTP_CONFIG),
    ("deepseek", "mtp"): (DEEPSEEK_SHAPES, MTP_CONFIG),
}
