"""The memory that one text takes beside a target's weights, counted on tensors without numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

NOT_KEPT = ("loss", "aux_loss", "logits", "router_logits", "hidden_states", "attentions")


class TextMemory(NamedTuple):
    """Bytes of one text."""

    states: int  # recurrent and convolution states, as large for every text
    token: int  # keys and values that each token adds


def text_memory(model: Any) -> TextMemory | None:
    """What a model on the device `meta` keeps of a text, None where that is keys and values alone."""
    layers = DynamicCache(config=model.config).layers
    if not model._is_stateful and all(isinstance(layer, DynamicLayer) for layer in layers):
        return None
    model.set_experts_implementation("batched_mm")  # the loop over experts asks which tokens they have
    one, two = (kept_bytes(model, length) for length in (1, 2))
    return TextMemory(2 * one - two, two - one) if 2 * one > two else None


@torch.no_grad()
def kept_bytes(model: Any, length: int) -> int:
    """The bytes of floating-point tensors that a model keeps of a text of zeros, for the next token to read."""
    output = model(torch.zeros(1, length, dtype=torch.long, device=model.device), use_cache=True)
    seen: set[int] = set()
    tensors = [part for name in output if name not in NOT_KEPT for part in find_tensors(output[name], seen)]
    tensors += [part for module in model.modules() for part in vars(module).values() if isinstance(part, Tensor)]
    return sum(part.numel() * part.element_size() for part in tensors if part.is_floating_point())


def find_tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """All tensors in lists, dictionaries and attributes below a value, each once."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
        return
    parts = value if isinstance(value, list | tuple) else getattr(value, "__dict__", {}).values()
    for part in value.values() if isinstance(value, dict) else parts:
        yield from find_tensors(part, seen)


def table_of_states(texts: Mapping[str, TextMemory]) -> str:
    """The states of a text of some targets, as Markdown."""
    lines = [
        "| target | states of a text | keys and values of a token | tokens with as many bytes |",
        "|---|---:|---:|---:|",
    ]
    for name, text in texts.items():
        tokens = f"{text.states / text.token:,.0f}" if text.token else "no keys and values"
        lines.append(f"| {name} | {text.states / 2**20:.1f} MiB | {text.token / 2**10:.0f} KiB | {tokens} |")
    return "\n".join(lines)


def count_in_words(number: int, digits: int = 0) -> str:
    """A number in B with `digits`, or in M without; one that would be written as 0 in full."""
    in_full = number < (10**6 if digits else 500_000)
    if in_full:
        return f"{number:,}"
    return f"{number / 1e9:.{digits}f} B" if digits else f"{number / 1e6:.0f} M"
