"""What a rehearsal does that no command does: a random target, its conversations, and heads compared."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from eagle.decoding.decode import generate
from eagle.formats.checkpoint import load_drafter, load_head
from eagle.target.target import Target
from recipes.tiny.train_tokenizer import END, SPECIAL, TEMPLATE

SIZES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        **{"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
        **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960},
    },
    "small": {
        **{"vocab_size": 8192, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 1024},
    },
}
CONVERSATIONS, PROMPTS, QUESTION = 8, 2, "What is this?"
NAN = torch.tensor(torch.nan)  # equals nothing: where a head has no such tensor


def make_target(folder: str | Path, size: str) -> None:
    """Save a random model in bf16, and a tokenizer whose tokens are single characters, as many as the model has."""
    config = Qwen3Config(**SIZES[size], tie_word_embeddings=True, rope_theta=1e6, eos_token_id=SPECIAL.index(END))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    characters = (chr(code) for code in range(10, 0x110000) if not 0xD800 <= code < 0xE000)
    tokens = [*SPECIAL, *islice(characters, config.vocab_size - len(SPECIAL))]
    backend = Tokenizer(BPE({token: number for number, token in enumerate(tokens)}, merges=[]))
    backend.decoder = decoders.Fuse()
    names: dict[str, Any] = {"eos_token": END, "additional_special_tokens": SPECIAL, "chat_template": TEMPLATE}
    PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(folder)


def write_conversations(folder: Path, conversations: int = CONVERSATIONS) -> None:
    """Write conversations whose answers the target will replace, and questions that it will be asked."""
    for split, count in (("train", conversations), ("heldout", PROMPTS)):
        questions = [f"What is number {number} of the {split} questions?" for number in range(count)]
        turns = [[{"from": "human", "value": text}, {"from": "gpt", "value": "An answer."}] for text in questions]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps({"conversations": turn}) + "\n" for turn in turns))


def compare_heads(target_folder: str, head: str, *others: str) -> None:
    """Print that all weights are bit-equal and all drafts the same, or stop at the first head of which it is not so."""
    target, weights = Target.load(target_folder, dtype="bfloat16"), load_head(head).state_dict()
    expected = draft(target, head)
    for other in others:
        again = read_weights(other)
        names = [
            name for name in weights | again if not torch.equal(*(each.get(name, NAN) for each in (weights, again)))
        ]
        if names:
            raise SystemExit(f"{other} is not {head}: {len(names)} of {len(weights)} tensors differ, as {names[:3]}")
        if draft(target, other) != expected:
            raise SystemExit(f"{other} drafts otherwise than {head}, expected the same from the same weights")
    print(f"{len(weights)} tensors bit-equal, {sum(len(tokens) for tokens, _ in expected)} nodes drafted alike")


def read_weights(head: str) -> dict[str, Tensor]:
    """The tensors of a head of this project, or those of a causal language model as a draft model names them."""
    if (Path(head) / "recipe.yaml").exists():
        return load_head(head).state_dict()
    model = AutoModelForCausalLM.from_pretrained(head)
    return {f"model.{name}": tensor for name, tensor in model.state_dict().items()}


def draft(target: Target, head: str) -> list[tuple[list[int], list[int]]]:
    """The drafted trees of a short generation, as tokens and parents."""
    target.forget()
    trace = generate(target, load_drafter(head, target), target.chat(QUESTION), max_new_tokens=6, stop=[])
    return [(cycle.tree.tokens.tolist(), cycle.tree.parents.tolist()) for cycle in trace.cycles]
