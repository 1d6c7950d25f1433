"""Tiny random models with images as input, and prompts for them as their processors would give them."""

# N images

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from tests.families import draw_weights

VOCAB_SIZE = 96
# the tokens that stand for an image, a video, and the start and end of either
IMAGE = 90
VIDEO = 91
BEGIN = 92
END = 93
TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
ROPE = {
    "rope_type": "default",
    "mrope_section": [1, 1, 2],
    "rope_theta": 10_000.0,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SQUARE = {**VISION, "image_size": 16, "patch_size": 4}
QWEN_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 4,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
}
QWEN = {
    "text_config": {**TEXT, "rope_parameters": ROPE},
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": BEGIN,
    "vision_end_token_id": END,
}
VISION_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        **QWEN,
        "vision_config": {**QWEN_VISION, "window_size": 16, "fullatt_block_indexes": [1]},
    },
    "qwen3_vl": {
        **QWEN,
        "vision_config": {
            **QWEN_VISION,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 1],
        },
    },
    "gemma3": {
        "text_config": {**TEXT, "sliding_window": 8, "query_pre_attn_scalar": 8},
        "mm_tokens_per_image": 4,
        "vision_config": {**SQUARE, "model_type": "siglip_vision_model"},
        "image_token_index": IMAGE,
        "boi_token_index": BEGIN,
        "eoi_token_index": END,
    },
    "llava": {
        "text_config": {**TEXT, "model_type": "llama"},
        "image_token_index": IMAGE,
        "vision_feature_layer": -2,
        "vision_config": {**SQUARE, "model_type": "clip_vision_model", "projection_dim": 32},
    },
    "llava_onevision": {
        "text_config": {**TEXT, "model_type": "qwen2"},
        "image_token_index": IMAGE,
        "video_token_index": VIDEO,
        "vision_config": {**SQUARE, "model_type": "siglip_vision_model"},
        "vision_feature_layer": -1,
        "image_grid_pinpoints": [[16, 16], [16, 32], [32, 16], [32, 32]],
    },
    "qwen3_5": {
        **QWEN,
        "vision_config": {**QWEN_VISION, "num_position_embeddings": 16},
        "text_config": {
            **TEXT,
            "rope_parameters": {**ROPE, "partial_rotary_factor": 1.0},
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
        },
    },
    "smolvlm": {
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": SQUARE,
        "image_token_id": IMAGE,
        "scale_factor": 2,
    },
    "mistral3": {
        "text_config": {**TEXT, "model_type": "mistral"},
        "vision_config": {**SQUARE, "model_type": "pixtral"},
        "image_token_index": IMAGE,
        "spatial_merge_size": 2,
        "vision_feature_layer": -1,
    },
    "internvl": {
        "text_config": {**TEXT, "model_type": "qwen2"},
        "image_token_id": IMAGE,
        "downsample_ratio": 0.5,
        "vision_config": {**VISION, "image_size": [16, 16], "patch_size": [4, 4]},
    },
    "lfm2_vl": {
        "text_config": {
            **TEXT,
            "model_type": "lfm2",
            "block_ff_dim": 64,
            "block_auto_adjust_ff_dim": False,
            "conv_L_cache": 3,
            "layer_types": ["conv", "full_attention"] * 2,
        },
        "vision_config": {**VISION, "patch_size": 4, "num_patches": 16},
        "image_token_id": IMAGE,
        "projector_hidden_size": 32,
    },
}
TYPES = {
    "gemma3": "token_type_ids",
    "qwen2_5_vl": "mm_token_type_ids",
    "qwen3_vl": "mm_token_type_ids",
    "qwen3_5": "mm_token_type_ids",
}
GRIDS = ([1, 4, 4], [1, 4, 6], [1, 2, 4])  # of images in patches


def build(name: str) -> PreTrainedModel:
    """Return the family's model with random weights."""
    config = AutoConfig.for_model(name, **VISION_FAMILIES[name])
    # some vectors start from random numbers, which `draw_weights` only adds to
    torch.manual_seed(0)
    return draw_weights(AutoModelForImageTextToText.from_config(config)).eval()


def picture(
    name: str,
    model: PreTrainedModel,
    count: int,
    seed: int,
) -> tuple[dict[str, Tensor], list[int]]:
    """Return so many random images as the family's processor gives them, and how many tokens stand for each.

    Args:
        name: a family.
        model: its model, which one family asks for its features.
        count: how many images.
        seed: draws the pixels.
    """
    generator = torch.Generator().manual_seed(seed)

    def pixels(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    # each family's processor has shapes of its own
    if name.startswith("qwen"):
        grids = torch.tensor(GRIDS[:count])
        patches = grids.prod(-1)
        values = torch.cat([pixels(count, 3 * 2 * 4 * 4) for count in patches.tolist()])
        return {"pixel_values": values, "image_grid_thw": grids}, (patches // 4).tolist()
    if name == "llava_onevision":  # a small whole and two tiles
        sizes = torch.tensor([[16, 32]] * count)
        media = {"pixel_values": pixels(count, 3, 3, 16, 16), "image_sizes": sizes}
        with torch.no_grad():
            features = model.model.get_image_features(**media, return_dict=True)
        return media, [len(rows) for rows in features.pooler_output]
    if name == "lfm2_vl":
        media = {
            "pixel_values": pixels(count, 16, 3 * 4 * 4),
            "spatial_shapes": torch.tensor([[4, 4]] * count),
            "pixel_attention_mask": torch.ones(count, 16, dtype=torch.long),
        }
        return media, [4] * count
    media = {"pixel_values": pixels(count, 3, 16, 16)}
    if name == "mistral3":
        media["image_sizes"] = torch.tensor([[16, 16]] * count)
    if name == "smolvlm":
        media["pixel_values"] = media["pixel_values"][None]
    # 16 patches, which all but Llava merge by four
    return media, [16 if name == "llava" else 4] * count


def ask(name: str, model: PreTrainedModel, count: int, seed: int) -> dict[str, Any]:
    """Return a processor's output: words, so many images with a word after each, and more words.

    Args:
        name: a family.
        model: its model.
        count: how many images.
        seed: draws the pixels.
    """
    media: dict[str, Tensor] = {}
    sizes: list[int] = []
    if count:
        media, sizes = picture(name, model, count, seed)
    tokens = list(range(5, 12))
    for index, size in enumerate(sizes):
        tokens += [BEGIN, *[IMAGE] * size, END, 30 + index]
    tokens += range(20, 26)
    ids = torch.tensor([tokens])
    if count and name in TYPES:
        media[TYPES[name]] = (ids == IMAGE).long()
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        **media,
    }
