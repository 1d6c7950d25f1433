"""Positions for models that count their tokens by themselves, where siblings of a tree share one."""

# B texts, N new tokens, R not committed, S columns, H heads

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
from eagle.target.trees.means import FAILURES

TABLE_NAMES = re.compile("build.*alibi")
COUNTERS = ("get_seq_length", "get_mask_sizes")  # by which a model counts columns of its cache


class Places:
    """Where the tokens of one forward and the columns that they may see stand in their texts."""

    def __init__(self, starts: Sequence[int], positions: Tensor, count: int, held: Tensor | None, masks: Masks) -> None:
        """`starts`, `positions` [B, R] and `held` are as in `Masks`; the last `count` of R tokens are read."""
        self.starts, self.positions, self.count, self.held, self.device = starts, positions, count, held, masks.device

    @cached_property
    def columns(self) -> Tensor:
        """[B, S], the position of every column, on the host."""
        return place_columns(self.starts, self.positions, self.held)

    @cached_property
    def earlier(self) -> Tensor | None:
        """[3, B, S - N], positions of the columns before the last N, in three dimensions; None where there are none."""
        before = self.columns[:, : -self.count]
        return upload(before, self.device).expand(3, -1, -1) if before.numel() else None

    @cached_property
    def length(self) -> int:
        """The tokens of the longest text, with the longest path of a tree."""
        return int(self.positions.max()) + 1

    @cached_property
    def query_offsets(self) -> Any:
        """Each new token's position less its place in `arange(N)`: a number, or a tensor [N]."""
        return self._offsets(self.positions[:, -self.count :])

    @cached_property
    def column_offsets(self) -> Any:
        """Each column's position less its place in `arange(S)`: 0, or a tensor [S]."""
        return self._offsets(self.columns)

    def _offsets(self, places: Tensor) -> Any:
        offsets = places - torch.arange(places.shape[1])
        if (offsets != offsets[:1]).any():
            raise ValueError("texts of other lengths have their tokens at other places: they are read one by one")
        same = bool((offsets == offsets[0, 0]).all())
        return int(offsets[0, 0]) if same else upload(offsets[0], self.device)


def counts_columns(reader: Any) -> bool:
    """Whether a model asks its cache for lengths although it is given masks and positions."""
    cache, calls = reader.new_cache(), []

    def ask(count: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        calls.append(count)
        return count(*args, **kwargs)

    for name in COUNTERS:
        setattr(cache, name, partial(ask, getattr(cache, name)))
    try:
        reader.read_text(torch.arange(3), 0, cache)
    except FAILURES:
        return False
    return bool(calls)


@torch.inference_mode()
def first_position(reader: Any) -> int:
    """The position of a text's first token, counted by the model itself, less the one that it makes of a given 0."""
    embeddings = [part for part in reader.base.modules() if isinstance(part, nn.Embedding)]
    if "position_ids" not in reader.arguments or len(embeddings) == 1:
        return 0
    tokens = torch.tensor([[token for token in range(3, 7) if token != reader.config.pad_token_id][:3]])
    tokens = upload(tokens, reader.masks.device)

    def read_indices(**given: Tensor) -> list[int]:
        indices: list[int] = []
        handles = [
            part.register_forward_pre_hook(lambda _, args: indices.append(int(args[0].flatten()[0])))
            for part in embeddings
        ]
        try:
            reader.base(input_ids=tokens, use_cache=False, **given)
        finally:
            for handle in handles:
                handle.remove()
        return indices

    try:
        own, given = read_indices(), read_indices(position_ids=torch.arange(3, device=tokens.device)[None])
    except FAILURES:
        return 0
    return max(one - other for one, other in zip(own, given, strict=True))


def table_builders(base: Any) -> list[str]:
    """Names of the methods or functions by which a base model makes a table of biases by position."""
    return [name for name in inspect.unwrap(type(base).forward).__code__.co_names if TABLE_NAMES.search(name)]


def place_tables(reader: Any) -> None:
    """Let a reader's model index its tables of biases by each column's position instead of its place."""
    base = reader.base
    for name in table_builders(base):
        if hasattr(base, name):
            setattr(base, name, partial(_build_table, reader, getattr(base, name)))
        else:  # a function of its module, which other models share: this one alone gets another
            stock: Any = inspect.unwrap(type(base).forward)
            names = stock.__globals__ | {name: partial(_build_table, reader, stock.__globals__[name])}
            forward = FunctionType(stock.__code__, names, stock.__name__, stock.__defaults__, stock.__closure__)
            forward.__kwdefaults__ = stock.__kwdefaults__
            base.forward = MethodType(forward, base)


def _build_table(reader: Any, build: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """The stock table of one text of the length at hand, with the entry of each column's position in its place."""
    places: Places | None = reader.places
    if places is None:
        return build(*args, **kwargs)
    texts, length = len(places.starts), places.length
    by_mask = False

    def shorten(value: Any) -> Any:  # a mask tells the stock function the length, and the number of texts
        nonlocal by_mask
        if not isinstance(value, Tensor):
            return value
        by_mask = True
        return torch.ones(1, length, dtype=torch.long, device=value.device)

    table = build(*map(shorten, args), **{name: shorten(value) for name, value in kwargs.items()})  # [H, 1, length]
    if table.shape[-1] < length:
        raise ValueError(f"texts of {length} tokens are longer than the {table.shape[-1]} that this model counts")
    columns = places.columns
    if not by_mask and (columns != columns[:1]).any():
        raise ValueError("one table serves all texts, whose columns stand at other places: they are read one by one")
    columns = (columns if by_mask else columns[:1]).clamp(max=length - 1) + (table.shape[-1] - length)
    picked = table[..., upload(columns, table.device)]  # [H, 1, B, S]
    return picked.permute(2, 0, 1, 3).reshape((texts if by_mask else 1) * len(table), 1, -1)
