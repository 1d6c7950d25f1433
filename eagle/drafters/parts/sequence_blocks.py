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
from eagle.drafters.parts.sequence_state import SequenceHead
from eagle.drafters.parts.spans import Spans, attend
from eagle.drafters.parts.window import Window
from eagle.target.slots import RowCache

Pair = tuple[Tensor, Tensor]
"""Rotary tables (cosines and sines [N, w]) at some rows, or the keys and values [heads, N, w] of some rows."""


def run_part(part: Callable[..., Any], *inputs: Any) -> Any:
    """Return the result of `part`, a function of a block's computation: the default of arguments named `run`.

    A head that compiles passes another function in its place.
    """
    return part(*inputs)


@cache
def compile_part(part: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of a block's computation, compiled once for batches of all lengths and cached.

    Such functions are parts of a block around attention.
    """
    return torch.compile(part, dynamic=True)


class CompiledParts:
    """A head that may compile the functions of a block around attention.

    Attention itself is not compiled with them, as it loops over sequences.
    """

    is_compiled = False

    def _run(self, part: Callable[..., Any], *inputs: Any) -> Any:
        """Return the result of `part`, a function of a block's computation, compiled if `compile_parts` was called."""
        return run_part(compile_part(part) if self.is_compiled else part, *inputs)

    def compile_parts(self) -> None:
        """Compile the functions of a block around attention with `torch.compile` from now on."""
        self.is_compiled = True


def sequence_positions(
    batch: Batch, device: torch.device, window: Window | None = None
) -> tuple[Tensor, Tensor, Spans]:
    """Return the slots of a batch: every token of a sequence but the last two has a slot.

    Slot i reads the target's state of token i and token i + 1, and predicts token i + 2.

    Args:
        batch: The sequences.
        device: Where the results are used.
        window: Which earlier slots a supervised slot attends to; None: all of its sequence.

    Returns:
        The indices [N] of all N slots among all tokens of the batch, their positions [N] in their sequence, and the
        supervised slots as `Spans`, whose indices are among the N slots and not among all tokens.
    """
    slots = []
    positions = []
    masks = []
    start = 0
    for length, mask in zip(batch.lengths, batch.loss_mask.split(batch.lengths), strict=True):
        # a sequence of fewer than three tokens has no slot
        position = torch.arange(max(length - 2, 0))
        slots.append(start + position)
        positions.append(position)
        # slot i is supervised if token i + 2 is
        masks.append(mask[2:])
        start += length
    spans = Spans.of(masks, device, window=window)
    return upload(torch.cat(slots), device), upload(torch.cat(positions), device), spans


def position_tables(rotary: Rotary, like: Tensor, length: int) -> Callable[[Tensor], Pair]:
    """Return a function that looks up rotary tables, made once here for all positions below `length`.

    It maps N positions [N] to their cosines and sines, [N, w] each; w is the width of a head. `like` has the dtype and
    the device of the tables. Training looks up the same positions in several steps.
    """
    cosine, sine = rotary(like, torch.arange(length, device=like.device)[None])
    # without the batch dimension: [length, w]
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
    """Run all blocks but the last at every slot of a batch, and return the keys and values of every block.

    A slot is a position at which training reads a token: every token of a sequence but the last two has one. Supervised
    slots attend to these keys and values. The last block's output is needed only at supervised slots, so it is left to
    the caller.

    Args:
        layers: The blocks.
        inputs: The inputs of the first block at all N slots, as `Block.inputs` returns them.
        tables: Rotary tables at all slots.
        batch: The sequences.
        run: Calls a function of a block's computation, compiled or not.
        window: Which earlier slots a slot attends to; None: all of its sequence.

    Returns:
        Keys and values, [heads, N, w of a head] each, of each block at all slots; and the inputs of the last block at
        all slots.
    """
    context: list[Pair] = []
    for index, block in enumerate(layers):
        if index == 1:
            # the output of the blocks before the last is needed at every slot
            # cut to one entry for each slot, as a sequence has two slots fewer than tokens
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
    step_pairs: Sequence[Pair] = (),
    run: Callable[..., Any] = run_part,
) -> Tensor:
    """Return a block's output [S, H] (H: the hidden size) at S wanted rows: tokens such as the supervised ones.

    Args:
        block: The block.
        inputs: Its inputs at the wanted rows, as `Block.inputs` returns them.
        tables: Rotary tables at the wanted rows.
        context: Keys and values [heads, N, w] of the block at all N rows; w is the width of a head.
        spans: The wanted rows among all rows, and which earlier ones each attends to.
        step_pairs: Keys and values [heads, S, w] of each draft step so far. Row i attends to entry i of each of them,
            besides the context.
        run: Calls a function of a block's computation, compiled or not.
    """
    query, residual = run(query_and_residual, block, inputs, tables)
    heads = attend(query, *context, spans, step_pairs)
    return run(add_rows, block, heads, residual)


def key_value(block: Block, inputs: tuple[Tensor, ...], tables: Pair) -> Pair:
    """Return a block's keys, rotated by their positions, and its values, [heads, N, w] each, at N slots (tokens).

    Args:
        block: The block.
        inputs: What its `inputs` returned at the slots.
        tables: Rotary tables [N, w] at the slots' positions; w is the width of a head.
    """
    key, value = block.key_value(inputs)
    attention = block.self_attn
    values = value.unflatten(-1, (-1, attention.width)).transpose(0, 1)
    return rotate(norm_by_head(attention.k_norm, key), tables), values


def query_and_residual(block: Block, inputs: tuple[Tensor, ...], tables: Pair) -> Pair:
    """Return a block's queries [heads, S, w], rotated, and the residual [S, hidden size], at S slots (tokens).

    Args:
        block: The block.
        inputs: What its `inputs` returned at the slots.
        tables: Rotary tables [S, w] at the slots' positions; w is the width of a head.
    """
    query, residual = block.query_and_residual(inputs)
    return rotate(norm_by_head(block.self_attn.q_norm, query), tables), residual


def norm_by_head(norm: Norm | None, x: Tensor) -> Tensor:
    """Return x [rows, heads * w] with each head's w numbers normed separately (qk-norm); unchanged without a norm."""
    if norm is None:
        return x
    heads = x.unflatten(-1, (-1, len(norm.weight)))
    return norm(heads).flatten(-2)


def add_rows(block: Block, heads: Tensor, residual: Tensor) -> Tensor:
    """Return a block's output [S, hidden size] at S slots (tokens), from its attention heads' output and the residual.

    It is the output projection, the residual, and the MLP with its own.

    Args:
        block: The block.
        heads: The output of its attention heads [heads, S, width of a head].
        residual: [S, hidden size], to which the projected output is added.
    """
    attended = heads.transpose(0, 1).flatten(1)
    return block.add_attention(block.self_attn.o_proj(attended), residual)


def probe_read(
    head: SequenceHead, context: int, rows: int, window: Window | None = None
) -> Callable[[], Tensor]:
    """Return a function whose seconds are measured: one forward of a head's blocks over tokens of one sequence.

    Decoding forecasts the cost of drafts from such seconds. A call overwrites the cache columns of the call before, and
    returns the tokens' states [1, rows, H] (H: the hidden size).

    Args:
        head: The head, bound to a target's embedding and LM head.
        context: The number of cached tokens before those that are read.
        rows: The number of tokens that a call reads.
        window: The head's sliding window of attention, which keeps fewer of the cached tokens; None for none.
    """
    # the target's embedding and LM head
    target_head = head.target_head
    # the columns of all blocks move together in one cache; each block has its own keys and values in it
    cache = RowCache()
    caches = [Cache(cache, block) for block in head.layers]
    if window is not None:
        context = min(context, window.most)
    end = context + rows
    weight = head.layers[0].mlp.up_proj.weight
    device = weight.device
    tokens = torch.ones(1, end, dtype=torch.long, device=device)
    features = weight.new_zeros(1, end, weight.shape[1])
    cosine, sine = rotary_tables(head.rotary, features, torch.arange(end, device=device)[None])
    # the timed tokens follow one another as a chain
    tree_mask = torch.ones(1, rows, rows, dtype=torch.bool, device=device).tril()
    # the mask is added to the scores: zeros let all of them see the whole context
    mask = level_mask(features.new_zeros(1, context), tree_mask, head.query_groups)

    @torch.inference_mode()
    def read(first: int, stop: int, read_mask: Tensor | None) -> Tensor:
        """Read the tokens from `first` to before `stop`; return their states [1, tokens, hidden size].

        It is the forward that is timed.
        """
        # the columns that an earlier call wrote from `first` on are overwritten
        cache.length = first
        columns = slice(first, stop)
        tables = (cosine[:, columns], sine[:, columns])
        return head.read(
            tokens[:, columns], features[:, columns], tables, read_mask, caches, target_head
        )

    # fills the cache; without a mask a token sees those up to itself
    read(first=0, stop=context, read_mask=None)
    return lambda: read(context, end, mask)
