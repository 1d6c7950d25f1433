"""Random models with images as input, in folders with the processors that prepare images for them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoTokenizer,
    Gemma3Processor,
    Idefics3Processor,
    LlavaNextProcessor,
    LlavaProcessor,
    PreTrainedModel,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.families import draw_weights
from tests.vision_families import VISION_FAMILIES

TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% for part in m.content %}"
    "{% if part.type == 'image' %}{{ '<image>' }}{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SQUARE = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
LLAVA = {
    "patch_size": 4,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
}
PINPOINTS = [[16, 16], [16, 32], [32, 16], [32, 32]]
QWEN_TOKENS = {
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
# what a template prints for an image, its special tokens, and the one that stands for an image's features
SPECIAL = {
    "llava": ("<image>", ["<image>"], "<image>"),
    "llava_next": ("<image>", ["<image>"], "<image>"),
    "gemma3": (
        "<start_of_image>",
        ["<start_of_image>", "<end_of_image>", "<image_soft_token>"],
        "<image_soft_token>",
    ),
    "idefics3": (
        "<image>",
        ["<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"],
        "<image>",
    ),
    "qwen2_5_vl": (
        "<|vision_start|><|image_pad|><|vision_end|>",
        ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"],
        "<|image_pad|>",
    ),
}


class QwenImages:
    """What Qwen's processor does with images, without its part for videos, which needs torchvision."""

    image_token = "<|image_pad|>"

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        self.image_processor = image_processor
        self.tokenizer = tokenizer

    def __call__(self, text: list[str], images: list[Any], **kwargs: Any) -> dict[str, Any]:
        media = self.image_processor(images[0], return_tensors="pt")
        prompt = text[0]
        # each image's one token becomes as many as its merged patches
        for grid in media["image_grid_thw"]:
            count = int(grid.prod()) // self.image_processor.merge_size**2
            prompt = prompt.replace(self.image_token, "\0" * count, 1)
        output = self.tokenizer([prompt.replace("\0", self.image_token)], **kwargs)
        token = self.tokenizer.convert_tokens_to_ids(self.image_token)
        types = (output["input_ids"] == token).long()
        return {**output, **media, "mm_token_type_ids": types}


def read_words(words_from: Path, name: str) -> Any:
    """Return the tokenizer of a folder with a family's special tokens."""
    words = AutoTokenizer.from_pretrained(words_from)
    words.add_special_tokens({"additional_special_tokens": SPECIAL[name][1]})
    if name == "gemma3":
        # which its processor asks the tokenizer for
        names = ("boi_token", "eoi_token", "image_token")
        for key, token in zip(names, SPECIAL[name][1], strict=True):
            setattr(words, key, token)
            setattr(words, f"{key}_id", words.convert_tokens_to_ids(token))
    return words


def make_processor(name: str, words: Any) -> Any:
    """Return a family's processor for images of 16 x 16 and more, with image processors that need only pillow."""
    square: Any
    tiles: Any
    if name == "llava":
        square = CLIPImageProcessorPil(**SQUARE)
        return LlavaProcessor(
            square,
            words,
            chat_template=TEMPLATE,
            image_token="<image>",
            **LLAVA,
        )
    if name == "llava_next":
        tiles = LlavaNextImageProcessorPil(**SQUARE, image_grid_pinpoints=PINPOINTS)
        return LlavaNextProcessor(tiles, words, image_token="<image>", **LLAVA)
    if name == "gemma3":
        square = Gemma3ImageProcessorPil(size={"height": 16, "width": 16}, do_pan_and_scan=False)
        return Gemma3Processor(square, words, image_seq_length=4)
    if name == "idefics3":
        tiles = Idefics3ImageProcessorPil(
            size={"longest_edge": 32}, max_image_size={"longest_edge": 16}
        )
        return Idefics3Processor(tiles, words, image_seq_len=4)
    patches = Qwen2VLImageProcessorPil(
        patch_size=4,
        merge_size=2,
        min_pixels=64,
        max_pixels=1024,
    )
    return QwenImages(patches, words)


def make_model(name: str, words: Any) -> PreTrainedModel:
    """Return a random model of a family with this vocabulary."""
    # families that have the sizes of another
    known = {"idefics3": "smolvlm", "llava_next": "llava"}
    sizes: dict[str, Any] = copy.deepcopy(VISION_FAMILIES[known.get(name, name)])
    sizes["text_config"] |= {"vocab_size": len(words), "max_position_embeddings": 1024}
    token = words.convert_tokens_to_ids(SPECIAL[name][2])
    # families name the key in two ways
    key = "image_token_index" if "image_token_index" in sizes else "image_token_id"
    sizes[key] = token
    for key, text in QWEN_TOKENS.items():
        if key in sizes:
            sizes[key] = words.convert_tokens_to_ids(text)
    if name == "llava_next":
        sizes["image_grid_pinpoints"] = PINPOINTS
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(name, **sizes))
    return draw_weights(model).eval()


def save_llava(words_from: Path, folder: Path) -> Path:
    """Write a Llava of 16 tokens an image, with the tokenizer of another folder, and return its folder."""
    words = read_words(words_from, "llava")
    make_model("llava", words).save_pretrained(folder)
    make_processor("llava", words).save_pretrained(folder)
    return folder
