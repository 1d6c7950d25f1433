"""Count the memory that one sequence takes beside a target's weights, on tensors without values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

NOT_KEPT = ("loss", "aux_loss", "logits", "router_logits", "hidden_states", "attentions")


class TextMemory(NamedTuple):
    """Bytes that a target keeps for one sequence."""

    states: int  # recurrent and convolution states, whatever the length
    token: int  # keys and values of each token


def text_memory(model: Any) -> TextMemory | None:
    """Return what a model on the device `meta` keeps for a sequence, None if that is keys and values alone."""
    layers = DynamicCache(config=model.config).layers
    if not model._is_stateful and all(isinstance(layer, DynamicLayer) for layer in layers):
        return None
    # The default loop over experts needs the values of tensors.
    model.set_experts_implementation("batched_mm")
    one = kept_bytes(model, 1)
    two = kept_bytes(model, 2)
    per_token = two - one
    states = one - per_token
    return TextMemory(states, per_token) if states > 0 else None


@torch.no_grad()
def kept_bytes(model: Any, length: int) -> int:
    """Return the bytes of floating-point tensors that a model keeps of a sequence for the next token."""
    output = model(torch.zeros(1, length, dtype=torch.long, device=model.device), use_cache=True)
    visited: set[int] = set()
    tensors: list[Tensor] = []
    for name in output:
        if name not in NOT_KEPT:
            tensors += find_tensors(output[name], visited)
    # Some models keep states as plain attributes of their modules.
    for module in model.modules():
        tensors += [value for value in vars(module).values() if isinstance(value, Tensor)]
    return sum(
        tensor.numel() * tensor.element_size() for tensor in tensors if tensor.is_floating_point()
    )


def find_tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yield every tensor in nested lists, dictionaries and attributes once; `seen` collects visited objects."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, dict):
        children: Iterable[Any] = value.values()
    elif isinstance(value, list | tuple):
        children = value
    else:
        children = getattr(value, "__dict__", {}).values()
    for child in children:
        yield from find_tensors(child, seen)


def table_of_states(memories: Mapping[str, TextMemory]) -> str:
    """Return the recurrent states of targets as a Markdown table."""
    lines = [
        "| target | states of a sequence | keys and values of a token | tokens with as many bytes |",
        "|---|---:|---:|---:|",
    ]
    for name, memory in memories.items():
        tokens = f"{memory.states / memory.token:,.0f}" if memory.token else "no keys and values"
        lines.append(
            f"| {name} | {memory.states / 2**20:.1f} MiB | {memory.token / 2**10:.0f} KiB | {tokens} |"
        )
    return "\n".join(lines)


def count_in_words(number: int, digits: int = 0) -> str:
    """Return a number in billions with `digits`, or in millions without; in full if it would round to zero."""
    if number < (10**6 if digits else 500_000):
        return f"{number:,}"
    return f"{number / 1e9:.{digits}f} B" if digits else f"{number / 1e6:.0f} M"
