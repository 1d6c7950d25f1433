"""Conversation -> tokens and loss mask, by asking the chat template what it prints for the assistant."""

from __future__ import annotations

from typing import Any

import torch

from data_prep.conversations import Conversation
from eagle.examples import Example


def example_of(conversation: Conversation, tokenizer: Any, max_length: int, **template_kwargs: Any) -> Example | str:
    """The example, cut at `max_length`; or the reason for which there is none."""
    spans, text = [], ""
    for place, turn in enumerate(conversation):
        if turn["role"] != "assistant":
            continue
        options = {"tokenize": False, **template_kwargs}
        asked = tokenizer.apply_chat_template(conversation[:place], add_generation_prompt=True, **options)
        text = tokenizer.apply_chat_template(conversation[: place + 1], **options)
        if not text.startswith(asked):
            return "the template rewrites history"
        spans.append((len(asked), len(text)))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    supervised = [
        any(first < end and last > start for start, end in spans) for first, last in encoded["offset_mapping"]
    ]
    mask = torch.tensor(supervised[:max_length])
    if not mask.any():
        return "nothing supervised within max_length"
    return Example(torch.tensor(encoded["input_ids"][:max_length]), mask)
