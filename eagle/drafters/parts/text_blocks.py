"""Blocks over whole sequences in training: keys and values of every slot, and outputs at supervised ones alone."""

# N rows of all sequences, S wanted rows, H width, w width of a head

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
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
    """Run a step of a block's computation uncompiled."""
    return part(*inputs)


@cache
def compile_part(part: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step of a block's computation, compiled."""
    return torch.compile(part, dynamic=True)  # else once for every length of a batch


class CompiledParts:
    """A head that may compile the steps of a block around attention, which itself loops over sequences."""

    is_compiled = False

    def _run(self, part: Callable[..., Any], *inputs: Any) -> Any:
        """Run a step of a block's computation, compiled or not."""
        return run_part(compile_part(part) if self.is_compiled else part, *inputs)

    def compile_parts(self) -> None:
        """Compile them from here on."""
        self.is_compiled = True


def text_slots(
    batch: Batch, device: torch.device, window: Window | None = None
) -> tuple[Tensor, Tensor, Spans]:
    """Return the slots of a batch, which are all tokens but the last two of each sequence.

    A slot reads the state of a token and the next token, and predicts the one after that.

    Returns:
        [N] the slots' indices among all tokens of the batch, [N] their positions in their sequence, and the supervised
        slots, counted among the slots.
    """
    slots = []
    positions = []
    masks = []
    start = 0
    for length, mask in zip(batch.lengths, batch.loss_mask.split(batch.lengths), strict=True):
        position = torch.arange(max(length - 2, 0))
        slots.append(start + position)
        positions.append(position)
        masks.append(mask[2:])
        start += length
    spans = Spans.of(masks, device, window=window)
    return upload(torch.cat(slots), device), upload(torch.cat(positions), device), spans


def position_tables(rotary: Rotary, like: Tensor, length: int) -> Callable[[Tensor], Pair]:
    """Return a function that gives cosines and sines [N, w] at positions [N] below a length."""
    cosine, sine = rotary(like, torch.arange(length, device=like.device)[None])
    cosine = cosine[0]
    sine = sine[0]
    return lambda positions: (cosine[positions], sine[positions])


def read_context(
    layers: Sequence[Block],
    inputs: tuple[Tensor, ...],
    tables: Pair,
    batch: Batch,
    run: Callable[..., Any] = run_part,
    window: Window | None = None,
) -> tuple[list[Pair], tuple[Tensor, ...]]:
    """Return keys and values of every block at all slots of the sequences, and what the last block reads there.

    Args:
        layers: The blocks.
        inputs: What the first block reads.
        tables: Cosines and sines at all slots.
        batch: The sequences.
        run: Runs a step of a block's computation, compiled or not.
        window: What a row sees; without one, all of its sequence so far.
    """
    context: list[Pair] = []
    for index, block in enumerate(layers):
        if index == 1:
            # unlike the last block, those below it are read at every slot
            masks = [torch.ones_like(mask[2:]) for mask in batch.loss_mask.split(batch.lengths)]
            all_slots = Spans.of(masks, tables[0].device, window=window)
        if index > 0:
            hidden = read_rows(
                layers[index - 1], inputs, tables, context[-1], spans=all_slots, run=run
            )
            inputs = block.inputs(hidden)
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
    """Return a block's output [S, H] at the rows of spans, which see the context, and keys and values of their own."""
    query, residual = run(query_and_residual, block, inputs, tables)
    heads = attend(query, *context, spans, own)
    return run(add_rows, block, heads, residual)


def key_value(block: Block, inputs: tuple[Tensor, ...], tables: Pair) -> Pair:
    """Return a block's keys at their positions, and its values, [heads, N, w] each."""
    key, value = block.key_value(inputs)
    attention = block.self_attn
    values = value.unflatten(-1, (-1, attention.width)).transpose(0, 1)
    return rotate(norm_by_head(attention.k_norm, key), tables), values


def query_and_residual(block: Block, inputs: tuple[Tensor, ...], tables: Pair) -> Pair:
    """Return a block's queries [heads, S, w] at their positions, and the residual [S, H]."""
    query, residual = block.query_and_residual(inputs)
    return rotate(norm_by_head(block.self_attn.q_norm, query), tables), residual


def norm_by_head(norm: Norm | None, x: Tensor) -> Tensor:
    """Return [N, heads * w], each head by the norm where there is one."""
    if norm is None:
        return x
    heads = x.unflatten(-1, (-1, len(norm.weight)))
    return norm(heads).flatten(-2)


def add_rows(block: Block, seen: Tensor, residual: Tensor) -> Tensor:
    """Return a block's output [S, H] from the output of its heads [heads, S, w]."""
    return block.add_mlp(residual + block.self_attn.o_proj(seen.transpose(0, 1).flatten(1)))


def probe_read(
    head: TextHead, context: int, rows: int, window: Window | None = None
) -> Callable[[], Tensor]:
    """Return a function to time: a head's blocks over so many rows after `context` tokens, or what a window keeps."""
    (target_head,) = head.frozen
    cache = SlotCache()
    caches = [Cache(cache, block) for block in head.layers]
    if window is not None:
        context = min(context, window.most)
    end = context + rows
    weight = head.layers[0].mlp.up_proj.weight
    device = weight.device
    tokens = torch.ones(1, end, dtype=torch.long, device=device)
    features = weight.new_zeros(1, end, weight.shape[1])
    cosine, sine = rotary_tables(head.rotary, features, torch.arange(end, device=device)[None])
    # the timed rows follow one another as a chain
    tree_mask = torch.ones(1, rows, rows, dtype=torch.bool, device=device).tril()
    mask = level_mask(features.new_zeros(1, context), tree_mask, head.query_groups)

    @torch.inference_mode()
    def read(start: int, end: int, mask: Tensor | None) -> Tensor:
        # what an earlier call wrote after `start` is written over
        cache.length = start
        columns = slice(start, end)
        tables = (cosine[:, columns], sine[:, columns])
        return head.read(
            tokens[:, columns], features[:, columns], tables, mask, caches, target_head
        )

    read(0, context, None)
    return lambda: read(context, end, mask)
