"""Tiny random models of all causal types that transformers knows: each config's sizes are shrunk by their names."""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
LAYERS = 4
LARGEST = 8_000_000  # parameters
VOCAB = 96

# the first name that matches gives the size; None leaves it as it is
SIZES: list[tuple[str, int | None]] = [
    (r"^(eos|bos|pad)_token_id$", None),
    (r"(token_id|token_index|_index)$", VOCAB - 1),
    (r"^(vocab|decoder_vocab)_size|unpadded_vocab_size|vocab_size_per_layer", VOCAB),
    (r"vocab_size|ngram_vocab_size_base", 32),
    (
        r"^max_(position|target|seq|source)|^n_positions$|^n_ctx$|^model_max_length$|^context_length$",
        256,
    ),
    (r"window_pattern|max_window_layers|every_n|period|offset|interval|^layer_group_size$", None),
    (r"window|attention_chunk_size|^local_attention$", 8),
    (r"^index_topk$", 8),
    (
        r"^(num_hidden_layers|n_layers?|num_layers|(num_)?(en|de)coder_layers|num_layers_per_stack)$",
        LAYERS,
    ),
    (r"key_value_heads$|^num_kv_heads$|linear_num_key_heads$", 2),
    (
        r"(attention_heads|^n_heads?|num_heads|linear_num_value_heads|index_n_heads|linear_num_heads)$",
        4,
    ),
    (r"qk_rope_head_dim|^rotary_dim$", 4),
    (r"^qk_head_dim$", 12),
    (r"^attention_hidden_size$", 32),
    (
        r"head_dim$|^kv_channels$|^dim_head$|^d_head$|^attention_head_size$|mamba_d_head|headdim$|_head_dim$",
        8,
    ),
    (r"intermediate_size|ffn|^dff$|^d_inner$|^dim_ff$|feed_forward_size|prompt_mid_dim", 64),
    (r"(experts|expert_num)$|n_routed_experts|moe_num_experts", 4),
    (r"experts_per_tok|experts_per_token|moe_k$|moe_topk$|^top_k_experts$", 2),
    (r"^(n_group|num_expert_group)$", 2),
    (r"^topk_group$", 1),
    (r"shared_experts|num_dense_layers|first_k_dense", 1),
    (r"rank$|dt_rank|time_step_rank", 16),
    (
        r"hidden_size$|^d_model$|^n_embd$|^emb_dim$|embedding_dim$|embedding_size$|_embed_dim$|^lru_width$|proj_dim$",
        32,
    ),
]


def shrunk(config: Any) -> dict[str, Any]:
    """Return the same config with small sizes, as arguments for its class."""
    own = vars(config)
    values: dict[str, Any] = {}
    # how many layers there are, by which lists with an entry for each layer are recognised
    depths = {value for name, value in own.items() if isinstance(value, int) and is_depth(name)}
    for name, value in own.items():
        if name in config.sub_configs and value is not None:
            special = SPECIAL.get(value.model_type, {})
            values[name] = {
                **shrunk(value),
                **special,
                "model_type": value.model_type,
            }
        elif isinstance(value, bool) or name.startswith("_"):
            continue
        elif isinstance(value, int):
            size = size_of(name)
            if size is None and value > 64 and not name.endswith("token_id"):
                size = 16
            if size is not None and value > 0:
                values[name] = min(size, value)
        elif isinstance(value, list) and value and len(value) in depths:
            # every kind of layer stays, in the order in which they come
            kinds: dict[str, Any] = {}
            for entry in value:
                kinds.setdefault(str(entry), entry)
            values[name] = [list(kinds.values())[layer % len(kinds)] for layer in range(LAYERS)]
    heads = own.get("num_attention_heads") or getattr(config, "num_attention_heads", None)
    if "num_key_value_heads" in values and own["num_key_value_heads"] == heads:
        values["num_key_value_heads"] = values["num_attention_heads"]
    if "qk_rope_head_dim" in values and "head_dim" in values:
        values["head_dim"] = values["qk_rope_head_dim"]  # what is rotated
    values |= {name: value for name, value in NEEDED.items() if own.get(name, value) is None}
    tokens = {
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "is_decoder": True,
    }
    return values | {name: value for name, value in tokens.items() if hasattr(config, name)}


def is_depth(name: str) -> bool:
    """Return whether an attribute of this name is a number of layers."""
    return size_of(name) == LAYERS


def size_of(name: str) -> int | None:
    """The small size that an attribute of this name gets."""
    return next((size for pattern, size in SIZES if re.search(pattern, name)), None)


# what some types leave open and others ask for
NEEDED = {
    "head_dim": 8,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
}
# what no name tells: sizes that must fit each other
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_ssm": 64,
    "mamba_n_groups": 1,
}
# with few index heads, scores tie at ReLU's zero, and which columns are the best is then left to rounding
INDEXED = {"index_n_heads": 32}
QWEN4 = {
    "ple_layer_ids": [3],
    "ple_embed_dim": 32,
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "hc_lowrank": 8,
    "indexer_compress_ratio": 4,
    "ngram_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 4,
    "split_ngram_parts": 1,
}
SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": MAMBA | {"attn_layer_indices": [1, 3]},
    "falcon_h1": MAMBA,
    "granitemoehybrid": MAMBA
    | {"layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 64},
    **dict.fromkeys(["deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4", "deepseek_v4"], INDEXED),
    "qwen4_exp_text": QWEN4,
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "zamba": {"attention_hidden_size": 64, "attention_head_dim": 16},
    "zamba2": {
        "hybrid_layer_ids": [1, 3],
        "num_mem_blocks": 1,
        "hidden_size": 64,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_attention_heads": 4,
        "n_mamba_heads": 8,
        "mamba_ngroups": 1,
        "mamba_d_state": 16,
        "mamba_headdim": 16,
        "use_mem_rope": True,
        "intermediate_size": 96,
    },
    # heads must divide the width by its factors
    "xlstm": {
        "hidden_size": 64,
        "embedding_dim": 64,
        "num_heads": 4,
        "num_blocks": 4,
        "num_hidden_layers": 4,
        "chunk_size": 16,
        "qk_dim_factor": 1.0,
        "v_dim_factor": 1.0,
    },
    "dots1": {"n_shared_experts": 1},
    # two stacks of two layers, run in cycles
    "hrm_text": {"num_layers_per_stack": 2, "H_cycles": 2, "L_cycles": 2, "num_hidden_layers": 12},
    # its axial positions must multiply to the number of positions
    "reformer": {"axial_pos_shape": (16, 16), "axial_pos_embds_dim": (8, 24), "num_buckets": 4},
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "nemotron_h": {"mamba_num_heads": 4, "n_groups": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "opt": {"word_embed_proj_dim": 16},
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "intermediate_size": 64,
    },  # the last layers read keys of those before
    "gemma4_unified_assistant": {"num_kv_shared_layers": 0},
    "xmod": {"default_language": "en_XX"},
    "dots3_note_text": {
        **INDEXED,
        "layer_types": ["indexed_attention", "sliding_attention"] * 2,
        "mlp_layer_types": ["dense", "sparse"] * 2,
        "per_layer_config": {
            layer: {"num_attention_heads": 2, "num_key_value_heads": 2} for layer in ("01", "03")
        },
        "head_dim": 12,
    },
}


def build(model_type: str) -> PreTrainedModel:
    """Return a model of this type with every weight random."""
    sizes = {**shrunk(AutoConfig.for_model(model_type)), **SPECIAL.get(model_type, {})}
    small = AutoConfig.for_model(model_type, **sizes)
    # counted without memory, as a size that was not shrunk may take all of it
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(small)
    count = sum(weight.numel() for weight in empty.parameters())
    if count > LARGEST:
        raise ValueError(f"{count:,} parameters")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.is_floating_point():
                noise = torch.randn(weight.shape)
                weight.copy_(noise * 0.3 if weight.dim() > 1 else weight + noise * 0.1)
        model.get_input_embeddings().weight *= 0.3
        bias = getattr(model.get_output_embeddings(), "bias", None)
        # never the padding token, which some models leave out when they count positions
        if bias is not None:
            bias[0] = -100
    return model.float().eval()
