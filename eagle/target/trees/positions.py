"""Positions for models that count their tokens by themselves, where siblings of a tree share one."""

# B sequences, N new tokens, R not committed, S columns, H heads

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from eagle.device import upload
from eagle.target.attention import Masks, place_columns
from eagle.target.structure import FAILURES

TABLE_NAMES = re.compile("build.*alibi")
COUNTERS = ("get_seq_length", "get_mask_sizes")  # by which a model counts columns of its cache


class TokenPositions:
    """The positions of one forward's tokens and of the columns that they may see."""

    def __init__(
        self,
        starts: Sequence[int],
        positions: Tensor,
        count: int,
        committed: Tensor | None,
        masks: Masks,
    ) -> None:
        """Take `starts`, `positions` [B, R] and `committed` as in `Masks`; the last `count` of R tokens are read."""
        self.starts = starts
        self.positions = positions
        self.count = count
        self.committed = committed
        self.device = masks.device

    @cached_property
    def columns(self) -> Tensor:
        """[B, S], the position of every column, on the host."""
        return place_columns(self.starts, self.positions, self.committed)

    @cached_property
    def earlier(self) -> Tensor | None:
        """[3, B, S - N], positions of the columns before the last N, along three axes; None where there are none."""
        earlier = self.columns[:, : -self.count]
        if not earlier.numel():
            return None
        return upload(earlier, self.device).expand(3, -1, -1)

    @cached_property
    def length(self) -> int:
        """The tokens of the longest sequence, with the longest path of a tree."""
        return int(self.positions.max()) + 1

    @cached_property
    def query_offsets(self) -> Any:
        """Each new token's position less its index in `arange(N)`: a number, or a tensor [N]."""
        return self._offsets(self.positions[:, -self.count :])

    @cached_property
    def column_offsets(self) -> Any:
        """Each column's position less its index in `arange(S)`: 0, or a tensor [S]."""
        return self._offsets(self.columns)

    def _offsets(self, positions: Tensor) -> Any:
        offsets = positions - torch.arange(positions.shape[1])
        # the model adds one length for all sequences, so that they must have the same offsets
        if (offsets != offsets[:1]).any():
            raise ValueError(
                "texts of other lengths have their tokens at other places: they are read one by one"
            )
        first = offsets[0]
        if bool((first == first[0]).all()):
            return int(first[0])
        return upload(first, self.device)


def counts_columns(reader: Any) -> bool:
    """Return whether a model asks its cache for lengths although it is given masks and positions.

    It may then place tokens by these lengths, which in a tree are not those of any path.
    """
    cache = reader.new_cache()
    calls = []

    def ask(count: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        calls.append(count)
        return count(*args, **kwargs)

    # it may ask for a length and not use it: trying a mode shows that
    for name in COUNTERS:
        setattr(cache, name, partial(ask, getattr(cache, name)))
    try:
        reader.read_text(torch.arange(3), 0, cache)
    except FAILURES:
        return False
    return bool(calls)


@torch.inference_mode()
def first_position(reader: Any) -> int:
    """Return by how much the model's own position of a first token exceeds the position 0 that trees are read with.

    Some models count from 2, say. Positions are seen as indices into the model's embeddings: once as it makes them by
    itself, and once from positions that begin with 0.
    """
    embeddings = [module for module in reader.base.modules() if isinstance(module, nn.Embedding)]
    if "position_ids" not in reader.arguments or len(embeddings) == 1:
        return 0
    # some models count from their padding token's id on, and leave padding out
    tokens = [token for token in range(3, 7) if token != reader.config.pad_token_id][:3]
    input_ids = upload(torch.tensor([tokens]), reader.masks.device)

    def read_indices(**inputs: Tensor) -> list[int]:
        indices: list[int] = []

        def note(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            indices.append(int(args[0].flatten()[0]))

        handles = [embedding.register_forward_pre_hook(note) for embedding in embeddings]
        try:
            reader.base(input_ids=input_ids, use_cache=False, **inputs)
        finally:
            for handle in handles:
                handle.remove()
        return indices

    try:
        counted = read_indices()
        explicit = read_indices(position_ids=torch.arange(3, device=input_ids.device)[None])
    except FAILURES:
        return 0
    return max(by_model - from_zero for by_model, from_zero in zip(counted, explicit, strict=True))


def table_builders(base: Any) -> list[str]:
    """Return the names of the methods or functions by which a base model makes a table of biases (ALiBi)."""
    return [
        name
        for name in inspect.unwrap(type(base).forward).__code__.co_names
        if TABLE_NAMES.search(name)
    ]


def place_tables(reader: Any) -> None:
    """Let a reader's model index its tables of biases by each column's position instead of its index."""
    base = reader.base
    for name in table_builders(base):
        if hasattr(base, name):
            setattr(base, name, partial(_build_table, reader, getattr(base, name)))
            continue
        # a function of its module, which other models share: only this model's forward is made to call another
        stock: Any = inspect.unwrap(type(base).forward)
        build = partial(_build_table, reader, stock.__globals__[name])
        forward = FunctionType(
            stock.__code__,
            stock.__globals__ | {name: build},
            name=stock.__name__,
            argdefs=stock.__defaults__,
            closure=stock.__closure__,
        )
        forward.__kwdefaults__ = stock.__kwdefaults__
        base.forward = MethodType(forward, base)


def _build_table(reader: Any, build: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Call the stock function for one sequence of the longest length, and pick the entry of each column's position.

    Args:
        reader: Whose model runs.
        build: The stock function, which gives each column the entry of its index.
        args: Of the model's call.
        kwargs: Of the model's call.

    Returns:
        [B * H or H, 1, S].
    """
    positions: TokenPositions | None = reader.token_positions
    if positions is None:
        return build(*args, **kwargs)
    length = positions.length
    # a mask tells the stock function the length, and the number of sequences
    masks = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]

    def shorten(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return torch.ones(1, length, dtype=torch.long, device=value.device)

    short_kwargs = {name: shorten(value) for name, value in kwargs.items()}
    table = build(*map(shorten, args), **short_kwargs)  # [H, 1, length]
    if table.shape[-1] < length:
        raise ValueError(
            f"texts of {length} tokens are longer than the {table.shape[-1]} that this model counts"
        )
    columns = positions.columns
    if not masks:
        if (columns != columns[:1]).any():
            raise ValueError(
                "one table serves all texts, whose columns stand at other places: they are read one by one"
            )
        columns = columns[:1]
    # a table may end with the last position
    columns = columns.clamp(max=length - 1) + (table.shape[-1] - length)
    picked = table[..., upload(columns, table.device)]  # [H, 1, B or 1, S]
    return picked.permute(2, 0, 1, 3).reshape(len(columns) * len(table), 1, -1)
