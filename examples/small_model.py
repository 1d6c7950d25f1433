"""The model that the examples use: that of `eagle demo`, or a random one where nothing is trained yet."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eagle import Target

TARGET, HEAD = "runs/demo/target", "runs/demo/eagle1/head"


def load_target(path: str = TARGET) -> Target:
    """The model at `path`; a random one of two layers if it is the demo's and is not there."""
    if Path(path).is_dir() or path != TARGET:
        return Target.load(path, dtype="float32")  # float32 is exact; bfloat16 may round two close tokens differently
    print(f"no model in {path} (`eagle demo` makes one): a random one stands in")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2
    )
    return Target(LlamaForCausalLM(config))  # without a tokenizer: prompts are token ids


def encode(target: Target, question: str) -> list[int]:
    """The prompt as token ids: by the model's chat template, or some ids where there is no tokenizer."""
    if target.tokenizer is not None:
        return target.chat(question)
    return [1, *(ord(letter) % target.vocab_size for letter in question)]
