"""Folders of random models that see, with the processors that prepare images for them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer, LlavaProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from tests.families import draw_weights
from tests.vision_families import VISION_FAMILIES

TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% for part in m.content %}"
    "{% if part.type == 'image' %}{{ '<image>' }}{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def save_llava(words_from: Path, folder: Path) -> Path:
    """Write a Llava of 16 tokens an image, with the tokenizer of another folder, and return its folder."""
    words = AutoTokenizer.from_pretrained(words_from)
    words.add_special_tokens({"additional_special_tokens": ["<image>"]})
    sizes: dict[str, Any] = copy.deepcopy(VISION_FAMILIES["llava"])
    sizes["text_config"]["vocab_size"] = len(words)
    sizes["image_token_index"] = words.convert_tokens_to_ids("<image>")
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model("llava", **sizes))
    draw_weights(model).save_pretrained(folder)
    pixels = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    given = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    LlavaProcessor(pixels, words, chat_template=TEMPLATE, image_token="<image>", **given).save_pretrained(folder)
    return folder
