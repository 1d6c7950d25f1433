"""The small Llava of make_seeing_target, untrained, with its tokenizer and its processor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    CLIPVisionConfig,
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from recipes.tiny.scene_chats import IMAGE
from recipes.tiny.scenes import PATCH, SIDE

VOCABULARY = 700
MAX_LENGTH = 1024
END = "<|end|>"
PAD = "<pad>"
MARKS = ["<|system|>", "<|user|>", "<|assistant|>", IMAGE]
PROMPT = "<|user|>\n{}<|end|>\n<|assistant|>\n"  # a question, as the chat template prints it
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}{{ '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
TEXT: dict[str, Any] = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 5,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": MAX_LENGTH,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
VISION: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "projection_dim": 128,
    "image_size": PATCH * SIDE,
    "patch_size": PATCH,
}


def train_words(texts: Iterable[str]) -> Any:
    """Train a byte-level BPE tokenizer on texts; it gets the chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[*MARKS, END, PAD],
        # All bytes, so that no text has an unknown token.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    words = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=MARKS,
        model_max_length=MAX_LENGTH,
        padding_side="left",
    )
    words.chat_template = TEMPLATE
    return words


def new_processor(words: Any) -> Any:
    """Return the processor of texts and pictures; it resizes and crops pictures to the model's size."""
    side = PATCH * SIDE
    pixels = CLIPImageProcessorPil(
        size={"shortest_edge": side}, crop_size={"height": side, "width": side}
    )
    return LlavaProcessor(
        pixels,
        words,
        chat_template=TEMPLATE,
        image_token=IMAGE,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        # The class token of the vision tower, which the model drops.
        num_additional_image_tokens=1,
    )


def new_model(words: Any) -> Any:
    """Return an untrained Llava whose words and pictures enter the layers at about the same scale."""
    ids = {
        "bos_token_id": None,
        "eos_token_id": words.eos_token_id,
        "pad_token_id": words.pad_token_id,
    }
    config = LlavaConfig(
        text_config=LlamaConfig(vocab_size=len(words), **ids, **TEXT),
        vision_config=CLIPVisionConfig(**VISION),
        image_token_index=words.convert_tokens_to_ids(IMAGE),
        image_seq_length=SIDE**2,
        vision_feature_layer=-1,
        tie_word_embeddings=False,
        **ids,
    )
    # At this size eager attention is faster on a CPU than the fused kernel; the choice is not saved.
    model = LlavaForConditionalGeneration._from_config(config, attn_implementation="eager")
    for name, weight in model.named_parameters():
        if "projector" in name and weight.ndim == 2:
            # With the default, pictures would be much weaker than words.
            torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
        elif "embed_tokens" in name or "position_embedding" in name:
            torch.nn.init.normal_(weight, std=0.3)
    model.generation_config = GenerationConfig(**ids)
    return model
