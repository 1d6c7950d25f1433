"""GGUF files of small random models, as llama.cpp's converter would write them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

gguf = pytest.importorskip("gguf", reason="pip install gguf")

WIDTH = 64
LAYERS = 2
HEADS = 4
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# ggml's names of weights, by their shapes [out, in]
LAYER_WEIGHTS = {
    "attn_q": (WIDTH, WIDTH),
    "attn_k": (WIDTH // 2, WIDTH),
    "attn_v": (WIDTH // 2, WIDTH),
    "attn_output": (WIDTH, WIDTH),
    "ffn_gate": (128, WIDTH),
    "ffn_up": (128, WIDTH),
    "ffn_down": (WIDTH, 128),
}


def byte_tokens() -> list[str]:
    """Return a token for each byte, as GPT-2 spells bytes, two merges, and two special tokens."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return [*bytes_to_unicode().values(), "th", "the", "<|end|>", "<|start|>"]


def write_gguf(path: Path, kind: str = "F32", leave_out: str = "", seed: int = 0) -> Path:
    """Write a random llama of two layers, as llama.cpp's converter would.

    Args:
        path: The file to write.
        kind: How weights are quantised, in ggml's words.
        leave_out: A tensor that is not written.
        seed: Of the weights; files of other weights are unpacked into folders of their own.
    """
    tokens = byte_tokens()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(128)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS // 2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    # 1 is an ordinary token, 3 a control token
    writer.add_token_types([1] * 258 + [3, 3])
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(259)
    writer.add_eos_token_id(258)
    writer.add_chat_template(TEMPLATE)

    generator = torch.Generator().manual_seed(seed)

    def add(name: str, shape: tuple[int, ...]) -> None:
        weight = torch.randn(shape, generator=generator).numpy()
        if name == leave_out:
            return
        # norms are vectors, which are never quantised
        if kind == "F32" or len(shape) == 1:
            writer.add_tensor(name, weight)
            return
        quant = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quants.quantize(weight, quant), raw_dtype=quant)

    add("token_embd.weight", (len(tokens), WIDTH))
    add("output_norm.weight", (WIDTH,))
    add("output.weight", (len(tokens), WIDTH))
    for layer in range(LAYERS):
        add(f"blk.{layer}.attn_norm.weight", (WIDTH,))
        add(f"blk.{layer}.ffn_norm.weight", (WIDTH,))
        for name, shape in LAYER_WEIGHTS.items():
            add(f"blk.{layer}.{name}.weight", shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
