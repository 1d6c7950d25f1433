"""Train a small chat target model on the documentation that this Python installation carries, in about two minutes."""

import argparse
import hashlib
import inspect
import itertools
import json
import math
import os
import platform
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path

import sentencepiece
import torch
import transformers
from torch.nn.functional import cross_entropy
from tqdm.auto import tqdm
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, LlamaTokenizer, PreTrainedTokenizerBase

from data_prep import docstrings

VOCABULARY, POSITIONS, WINDOW, BATCH = 4096, 2048, 384, 6
HIDDEN, LAYERS, HEADS, HEAD_DIM, INNER = 192, 10, 3, 64, 512
STEPS, PEAK_LR, WARMUP, WEIGHT_DECAY = 350, 3e-3, 30, 0.1
PROBES, NEW_TOKENS = 32, 160
SYSTEM_EVERY, SYSTEM = 8, "You answer questions about Python documentation."
ROLES, END = ("<|system|>", "<|user|>", "<|assistant|>"), "<|end|>"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
ROLE_OF = {"human": "user", "gpt": "assistant"}


def loops(tokens: Sequence[int], window: int = 64, period: int = 16) -> bool:
    """Whether the last `window` tokens repeat themselves with some period of at most `period` tokens."""
    tail = list(tokens[-window:])
    return len(tail) == window and any(tail[p:] == tail[:-p] for p in range(1, period + 1))


def train_tokenizer(texts: Sequence[str], folder: Path) -> PreTrainedTokenizerBase:
    """A SentencePiece BPE tokenizer saved as tokenizer.model and, with the same ids, as tokenizer.json."""
    folder.mkdir(parents=True)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in texts for line in text.split("\n") if line),
        model_prefix=str(folder / "tokenizer"), model_type="bpe", vocab_size=VOCABULARY, byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=False,
        allow_whitespace_only_pieces=True, split_digits=True, character_coverage=1.0 - 1e-4, num_threads=2,
        pad_id=3, user_defined_symbols=[*ROLES, END], minloglevel=2)
    (folder / "tokenizer.vocab").unlink()
    tokenizer = LlamaTokenizer.from_pretrained(
        folder, add_prefix_space=False, legacy=False, pad_token="<pad>", chat_template=TEMPLATE,
        extra_special_tokens=[*ROLES, END], model_max_length=POSITIONS, clean_up_tokenization_spaces=False)
    tokenizer.save_pretrained(folder)
    return tokenizer


def encode(tokenizer, conversations, every=SYSTEM_EVERY):
    out=[]
    for n, conversation in enumerate(conversations):
        messages = [{"role": ROLE_OF[turn["from"]], "content": turn["value"]} for turn in conversation["conversations"]]
        if every and n % every == 0:
            messages.insert(0, {"role": "system", "content": SYSTEM})
        out.append(tokenizer.apply_chat_template(messages, tokenize=False) + tokenizer.eos_token)
    return tokenizer(out, add_special_tokens=False)["input_ids"]


def pack(sequences, window):
    stream = torch.tensor([token for sequence in sequences for token in sequence])
    return stream[: len(stream) // window * window].view(-1, window)


def new_model(tokenizer) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, head_dim=HEAD_DIM, max_position_embeddings=POSITIONS,
        rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        attn_implementation="eager")
    return LlamaForCausalLM(config)


def train(model, blocks, steps, seed, amp=True):
    optimizer = make_opt(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP, (steps - step) / max(1, steps - WARMUP)))
    order = torch.Generator().manual_seed(seed)
    rows = torch.cat([torch.randperm(len(blocks), generator=order) for _ in range(1 + steps * BATCH // len(blocks))])
    model.train()
    for step in (bar := tqdm(range(steps), desc="training", unit="step", mininterval=5)):
        batch = blocks[rows[step * BATCH:(step + 1) * BATCH]]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp):
            logits = model(input_ids=batch, use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)

def make_opt(model):
    return torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY, fused=True)

@torch.no_grad()
def perplexity(model, blocks):
    model.eval()
    total = sum(cross_entropy(model(input_ids=b, use_cache=False).logits[:, :-1].flatten(0, 1), b[:, 1:].flatten(), reduction="sum").item() for b in blocks.split(8))
    return math.exp(total / blocks[:, 1:].numel())


def bigram_perplexity(train, heldout, V, D=0.75):
    """Interpolated Kneser-Ney"""
    pairs = torch.bincount(train[:, :-1].flatten() * V + train[:, 1:].flatten(), minlength=V*V).view(V, V)
    followers, preceders, total = (pairs > 0).sum(1), (pairs > 0).sum(0), pairs.sum(1)
    unigram = (preceders + 1) / (preceders.sum() + V)
    a, b = heldout[:, :-1].flatten(), heldout[:, 1:].flatten()
    p = ((pairs[a, b] - D).clamp(min=0) + D * followers[a] * unigram[b]) / total[a].clamp(min=1)
    p = torch.where(total[a] > 0, p, unigram[b])
    return math.exp(-p.double().log().mean().item())


@torch.no_grad()
def greedy(model, tokenizer, prompts):
    tokenizer.padding_side = "left"
    texts = [tokenizer.apply_chat_template([{"role": "user", "content": p}], tokenize=False, add_generation_prompt=True) for p in prompts]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False, return_token_type_ids=False)
    made = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=[tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(END)])
    made = made[:, inputs["input_ids"].shape[1]:].tolist()
    return [list(itertools.takewhile(lambda t: t != tokenizer.pad_token_id, m)) for m in made]
