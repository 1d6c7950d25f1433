"""Random models that see, a few tokens wide, and prompts for them as their processors would give them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from tests.families import draw_weights

VOCAB_SIZE, IMAGE, VIDEO, BEGIN, END = 96, 90, 91, 92, 93
TEXT = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
}  # fmt: skip
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10_000.0}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SQUARE = {**VISION, "image_size": 16, "patch_size": 4}
QWEN_VISION = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "out_hidden_size": 32,
}  # fmt: skip
QWEN = {
    "text_config": {**TEXT, "rope_parameters": ROPE}, "image_token_id": IMAGE, "video_token_id": VIDEO,
    "vision_start_token_id": BEGIN, "vision_end_token_id": END,
}  # fmt: skip
VISION_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {**QWEN, "vision_config": {**QWEN_VISION, "window_size": 16, "fullatt_block_indexes": [1]}},
    "qwen3_vl": {
        **QWEN,
        "vision_config": {**QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
    },
    "gemma3": {
        "text_config": {**TEXT, "sliding_window": 8, "query_pre_attn_scalar": 8}, "mm_tokens_per_image": 4,
        "vision_config": {**SQUARE, "model_type": "siglip_vision_model"}, "image_token_index": IMAGE,
        "boi_token_index": BEGIN, "eoi_token_index": END,
    },
    "llava": {
        "text_config": {**TEXT, "model_type": "llama"}, "image_token_index": IMAGE, "vision_feature_layer": -2,
        "vision_config": {**SQUARE, "model_type": "clip_vision_model", "projection_dim": 32},
    },
    "llava_onevision": {
        "text_config": {**TEXT, "model_type": "qwen2"}, "image_token_index": IMAGE, "video_token_index": VIDEO,
        "vision_config": {**SQUARE, "model_type": "siglip_vision_model"}, "vision_feature_layer": -1,
        "image_grid_pinpoints": [[16, 16], [16, 32], [32, 16], [32, 32]],
    },
    "qwen3_5": {
        **QWEN, "vision_config": {**QWEN_VISION, "num_position_embeddings": 16},
        "text_config": {
            **TEXT, "rope_parameters": {**ROPE, "partial_rotary_factor": 1.0}, "linear_key_head_dim": 8,
            "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
        },
    },
    "smolvlm": {
        "text_config": {**TEXT, "model_type": "llama"}, "vision_config": SQUARE, "image_token_id": IMAGE,
        "scale_factor": 2,
    },
    "mistral3": {
        "text_config": {**TEXT, "model_type": "mistral"}, "vision_config": {**SQUARE, "model_type": "pixtral"},
        "image_token_index": IMAGE, "spatial_merge_size": 2, "vision_feature_layer": -1,
    },
    "internvl": {
        "text_config": {**TEXT, "model_type": "qwen2"}, "image_token_id": IMAGE, "downsample_ratio": 0.5,
        "vision_config": {**VISION, "image_size": [16, 16], "patch_size": [4, 4]},
    },
    "lfm2_vl": {
        "text_config": {
            **TEXT, "model_type": "lfm2", "block_ff_dim": 64, "block_auto_adjust_ff_dim": False, "conv_L_cache": 3,
            "layer_types": ["conv", "full_attention"] * 2,
        },
        "vision_config": {**VISION, "patch_size": 4, "num_patches": 16}, "image_token_id": IMAGE,
        "projector_hidden_size": 32,
    },
}  # fmt: skip
TYPES = {
    "gemma3": "token_type_ids",
    "qwen2_5_vl": "mm_token_type_ids",
    "qwen3_vl": "mm_token_type_ids",
    "qwen3_5": "mm_token_type_ids",
}
GRIDS = ([1, 4, 4], [1, 4, 6], [1, 2, 4])  # of images in patches


def build(name: str) -> PreTrainedModel:
    """The family's model with every weight drawn afresh."""
    model = AutoModelForImageTextToText.from_config(
        AutoConfig.for_model(name, **VISION_FAMILIES[name])
    )
    return draw_weights(model).eval()


def picture(
    name: str, model: PreTrainedModel, count: int, seed: int
) -> tuple[dict[str, Tensor], list[int]]:
    """So many random images as the family's processor gives them, and the tokens that stand for each."""
    drawn = torch.Generator().manual_seed(seed)
    if name.startswith("qwen"):
        grids = GRIDS[:count]
        pixels = torch.cat(
            [torch.randn(t * h * w, 3 * 2 * 4 * 4, generator=drawn) for t, h, w in grids]
        )
        media = {"pixel_values": pixels, "image_grid_thw": torch.tensor(grids)}
        return media, [t * h * w // 4 for t, h, w in grids]
    if name == "llava_onevision":  # a small whole and two tiles
        media = {
            "pixel_values": torch.randn(count, 3, 3, 16, 16, generator=drawn),
            "image_sizes": torch.tensor([[16, 32]] * count),
        }
        with torch.no_grad():
            seen = model.model.get_image_features(**media, return_dict=True).pooler_output
        return media, list(map(len, seen))
    if name == "lfm2_vl":
        media = {
            "pixel_values": torch.randn(count, 16, 3 * 4 * 4, generator=drawn),
            "spatial_shapes": torch.tensor([[4, 4]] * count),
            "pixel_attention_mask": torch.ones(count, 16, dtype=torch.long),
        }
        return media, [4] * count
    pixels = torch.randn(count, 3, 16, 16, generator=drawn)
    if name == "mistral3":
        return {"pixel_values": pixels, "image_sizes": torch.tensor([[16, 16]] * count)}, [
            4
        ] * count
    return {"pixel_values": pixels[None] if name == "smolvlm" else pixels}, [
        16 if name == "llava" else 4
    ] * count


def ask(name: str, model: PreTrainedModel, count: int, seed: int) -> dict[str, Any]:
    """A processor's output: words, so many images with a word behind each, and more words."""
    tokens, kinds = list(range(5, 12)), [0] * 7
    media, sizes = picture(name, model, count, seed) if count else ({}, [])
    for number, size in enumerate(sizes):
        tokens += [BEGIN, *[IMAGE] * size, END, 30 + number]
        kinds += [0, *[1] * size, 0, 0]
    tokens, kinds = [*tokens, *range(20, 26)], [*kinds, *[0] * 6]
    if count and name in TYPES:
        media[TYPES[name]] = torch.tensor([kinds])
    ids = torch.tensor([tokens])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **media}
