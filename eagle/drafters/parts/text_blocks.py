"""Blocks over whole texts in training: keys and values of every slot, and outputs at the supervised ones alone."""

# B batch, N rows of all texts, S wanted rows, H width, w width of a head

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from eagle.core.examples import Batch
from eagle.device import upload
from eagle.drafters.parts.decoder_block import Block, Cache, Norm, Rotary, rotary_tables
from eagle.drafters.parts.growth import level_mask
from eagle.drafters.parts.operations import rotate
from eagle.drafters.parts.spans import Spans, attend
from eagle.drafters.parts.text_state import TextHead
from eagle.drafters.parts.window import Window
from eagle.target.slots import SlotCache

Pair = tuple[Tensor, Tensor]
"""Cosines and sines at some rows, or keys and values of some."""


def run_part(part: Callable[..., Any], *inputs: Any) -> Any:
    """Run a part of a block's computation uncompiled."""
    return part(*inputs)


@cache
def compile_part(part: Callable[..., Any]) -> Callable[..., Any]:
    """Run a part of a block's computation compiled."""
    return torch.compile(part, dynamic=True)  # else once for every length of a batch


class CompiledParts:
    """A head that may compile the parts of a block around attention, which itself loops over texts."""

    is_compiled = False

    def _run(self, part: Callable[..., Any], *inputs: Any) -> Any:
        """Run a part of a block's computation, compiled or not."""
        return run_part(compile_part(part) if self.is_compiled else part, *inputs)

    def compile_parts(self) -> None:
        """Compile them from here on."""
        self.is_compiled = True


def text_slots(batch: Batch, device: torch.device, window: Window | None = None) -> tuple[Tensor, Tensor, Spans]:
    """The places of all tokens but each text's last two, their positions in it, and those that are supervised."""
    spans = [torch.arange(max(length - 2, 0)) for length in batch.lengths]
    starts = accumulate(batch.lengths, initial=0)
    slots = torch.cat([span + start for span, start in zip(spans, starts, strict=False)])
    masks = [mask[2:] for mask in batch.loss_mask.split(batch.lengths)]
    slots, positions = (upload(places, device) for places in (slots, torch.cat(spans)))
    return slots, positions, Spans.of(masks, device, window=window)


def position_tables(rotary: Rotary, like: Tensor, length: int) -> Callable[[Tensor], Pair]:
    """A function that gives cosines and sines [N, w] at positions [N] below a length."""
    cosine, sine = (table[0] for table in rotary(like, torch.arange(length, device=like.device)[None]))
    return lambda positions: (cosine[positions], sine[positions])


def read_context(
    layers: Sequence[Block],
    inputs: tuple[Tensor, ...],
    tables: Pair,
    batch: Batch,
    run: Callable[..., Any] = run_part,
    window: Window | None = None,
) -> tuple[list[Pair], tuple[Tensor, ...]]:
    """Keys and values of every block at all slots of the texts, and what the last block reads there.

    `inputs` are what the first block reads.
    """
    context: list[Pair] = []
    if len(layers) > 1:
        every = [torch.ones_like(mask[2:]) for mask in batch.loss_mask.split(batch.lengths)]
        everywhere = Spans.of(every, tables[0].device, window=window)
    for number, block in enumerate(layers):
        if number:
            below = layers[number - 1]
            inputs = block.inputs(read_rows(below, inputs, tables, context[-1], everywhere, (), run))
        key, value = run(key_value, block, inputs, tables)
        context.append((key.contiguous(), value.contiguous()))
    return context, inputs


def read_rows(
    block: Block,
    inputs: tuple[Tensor, ...],
    tables: Pair,
    context: Pair,
    spans: Spans,
    own: Sequence[Pair] = (),
    run: Callable[..., Any] = run_part,
) -> Tensor:
    """[S, H], a block's output at the rows of spans, which see the context, and keys and values of their own."""
    query, residual = run(query_and_residual, block, inputs, tables)
    return run(add_rows, block, attend(query, *context, spans, own), residual)


def key_value(block: Block, inputs: tuple[Tensor, ...], tables: Pair) -> Pair:
    """[heads, N, w] each, a block's keys at their positions, and its values."""
    key, value = block.key_value(inputs)
    return rotate(norm_by_head(block.self_attn.k_norm, key), tables), value.unflatten(
        -1, (-1, block.self_attn.width)
    ).transpose(0, 1)


def query_and_residual(block: Block, inputs: tuple[Tensor, ...], tables: Pair) -> Pair:
    """[heads, S, w], a block's queries at their positions, and [S, H] what attention's output is added to."""
    query, residual = block.query_and_residual(inputs)
    return rotate(norm_by_head(block.self_attn.q_norm, query), tables), residual


def norm_by_head(norm: Norm | None, x: Tensor) -> Tensor:
    """[N, heads * w], each head by the norm where there is one."""
    return x if norm is None else norm(x.unflatten(-1, (-1, len(norm.weight)))).flatten(-2)


def add_rows(block: Block, seen: Tensor, residual: Tensor) -> Tensor:
    """[S, H], a block's output, by what its heads saw [heads, S, w]."""
    return block.add_mlp(residual + block.self_attn.o_proj(seen.transpose(0, 1).flatten(1)))


def probe_read(head: TextHead, context: int, rows: int, window: Window | None = None) -> Callable[[], Tensor]:
    """The forward of a head's blocks over so many rows behind so much text, or what a window keeps, to be timed."""
    (frozen,), owner = head.frozen, SlotCache()
    context = context if window is None else min(context, window.most)
    caches = [Cache(owner, block) for block in head.layers]
    weight, end = head.layers[0].mlp.up_proj.weight, context + rows
    tokens = torch.ones(1, end, dtype=torch.long, device=weight.device)
    features = weight.new_zeros(1, end, weight.shape[1])
    cosine, sine = rotary_tables(head.rotary, features, torch.arange(end, device=weight.device)[None])
    chain = torch.ones(rows, rows, dtype=torch.bool, device=weight.device).tril()
    mask = level_mask(features.new_zeros(1, context), chain[None], head.query_groups)

    @torch.inference_mode()
    def read(start: int, end: int, mask: Tensor | None) -> Tensor:
        owner.length = start
        part = slice(start, end)
        tables = cosine[:, part], sine[:, part]
        return head.read(tokens[:, part], features[:, part], tables, mask, caches, frozen)

    read(0, context, None)
    return lambda: read(context, end, mask)
