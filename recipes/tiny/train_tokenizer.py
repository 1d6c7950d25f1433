"""Train the tokenizer of the small chat models of the demo and of `recipes/tiny`, which engines can read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceTrainer
from transformers import LlamaTokenizer

MAX_LENGTH = 2048  # tokens that a target reads
END = "<|end|>"
SPECIAL = ["<|system|>", "<|user|>", "<|assistant|>", END]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
# Without normalisation and added spaces, so that decoding returns the encoded text.
SENTENCEPIECE: dict[str, Any] = {
    "model_type": "bpe",
    "vocab_size": 2048,
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "add_dummy_prefix": False,
    "allow_whitespace_only_pieces": True,
    "pad_id": 3,
    "control_symbols": SPECIAL,
    "minloglevel": 2,
}
TOKENIZER = {
    "tokenizer_class": "LlamaTokenizer",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "additional_special_tokens": SPECIAL,
    "add_bos_token": True,
    "add_prefix_space": False,
    "legacy": False,
    "model_max_length": MAX_LENGTH,
}


def train(records: Sequence[dict[str, Any]], folder: Path) -> Any:
    """Train a SentencePiece BPE tokenizer, and save it as tokenizer.model and, with the same ids, tokenizer.json."""
    folder.mkdir()
    texts = (turn["value"] for record in records for turn in record["conversations"])
    lines = (line for text in texts for line in text.split("\n") if line)
    # Given a path, SentencePiece would write it into the model.
    with (folder / "tokenizer.model").open("wb") as file:
        SentencePieceTrainer.train(sentence_iterator=lines, model_writer=file, **SENTENCEPIECE)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER, indent=2) + "\n")
    tokenizer = LlamaTokenizer.from_pretrained(folder)
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer
