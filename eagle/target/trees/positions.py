"""Positions for models that compute them from columns of the cache; in a tree siblings share a position."""

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
COUNTERS = (
    "get_seq_length",
    "get_mask_sizes",
)  # methods by which a model asks its cache for numbers of columns


class TokenPositions:
    """The positions of one forward's tokens, and of the cache columns that they may attend to."""

    def __init__(
        self,
        starts: Sequence[int],
        positions: Tensor,
        count: int,
        committed: Tensor | None,
        masks: Masks,
    ) -> None:
        """Take the positions of a forward's tokens, for a model that would compute them by the length of its cache.

        Args:
            starts: the number of committed columns of each sequence.
            positions: [B, R], of the R uncommitted tokens of B sequences, on the host.
            count: N, the number of the last of them, which the forward reads.
            committed: [B, ..], positions of the committed columns (the tokens in the cache); None: in order.
            masks: the reader's masks, which give the device.
        """
        self.starts = starts
        self.positions = positions
        self.count = count
        self.committed = committed
        self.device = masks.device

    @cached_property
    def columns(self) -> Tensor:
        """[B, S], the position of every token in the cache (a column) of B sequences, with new ones, on the host."""
        return place_columns(self.starts, self.positions, self.committed)

    @cached_property
    def earlier(self) -> Tensor | None:
        """[3, B, S - N], the positions of the cached tokens before the N new ones, S in all; None without any.

        Models with images have positions in time, height and width, which are equal for text.
        """
        earlier = self.columns[:, : -self.count]
        if not earlier.numel():
            return None
        return upload(earlier, self.device).expand(3, -1, -1)

    @cached_property
    def length(self) -> int:
        """The number of tokens of the longest sequence together with the deepest path of its tree.

        Tables of biases by position are made for so many.
        """
        return int(self.positions.max()) + 1

    @cached_property
    def query_offsets(self) -> Any:
        """What a model must add to `arange(N)` for the N new tokens' positions: a number, or a tensor [N].

        Some models compute positions as `arange(N)` plus the number of cached tokens, which is wrong in a tree.
        """
        return self._offsets(self.positions[:, -self.count :])

    @cached_property
    def column_offsets(self) -> Any:
        """What a model must add to `arange(S)` for the positions of all S tokens in the cache: 0, or a tensor [S]."""
        return self._offsets(self.columns)

    def _offsets(self, positions: Tensor) -> Any:
        """Return positions [B, n] minus `arange(n)`: a number if all are equal, as in a chain, else a tensor [n].

        The difference must be the same in all B sequences.
        """
        offsets = positions - torch.arange(positions.shape[1])
        # the model adds the same offsets in all sequences
        if (offsets != offsets[:1]).any():
            raise ValueError(
                "sequences of other lengths have their tokens at other places: they are read one by one"
            )
        first = offsets[0]
        if bool((first == first[0]).all()):
            return int(first[0])
        return upload(first, self.device)


def counts_columns(reader: Any) -> bool:
    """Return whether a model asks its cache for its length although it is given masks and positions.

    It may compute positions from the length. That counts all nodes of a tree, and a node's position only those of its
    path.
    """
    cache = reader.new_cache()
    calls = []

    # stands in for a method of the cache
    def ask(count: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # stands in for a method of the cache that returns its length: notes the call, and makes it
        calls.append(count)
        return count(*args, **kwargs)

    # a model may ask for the length and not use it: the trial of a mode shows that
    for name in COUNTERS:
        setattr(cache, name, partial(ask, getattr(cache, name)))
    try:
        reader.read_text(torch.arange(3), 0, cache)
    except FAILURES:
        return False
    return bool(calls)


@torch.inference_mode()
def first_position(reader: Any) -> int:
    """Return the position that a model gives to the first token of a sequence; 0 for most, 2 for some.

    It shows in the indices that the model's position embedding gets. These are recorded in a forward without
    positions, and in one with positions from 0 on, as trees are read with.
    """
    embeddings = [module for module in reader.base.modules() if isinstance(module, nn.Embedding)]
    # the model takes no positions, or has no embedding beside that of tokens
    if "position_ids" not in reader.arguments or len(embeddings) == 1:
        return 0
    # some models number positions from their padding token's id on, and skip padding: the tokens must not be padding
    tokens = [token for token in range(3, 7) if token != reader.config.pad_token_id][:3]
    input_ids = upload(torch.tensor([tokens]), reader.masks.device)

    def read_indices(**inputs: Tensor) -> list[int]:
        """Return the first index that each embedding gets in a forward."""
        indices: list[int] = []

        # a hook on each embedding: module and positional arguments
        def note(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            # torch calls this before an embedding's forward: note the first index that it looks up
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
    # the difference is 0 for the tokens' embedding
    return max(by_model - from_zero for by_model, from_zero in zip(counted, explicit, strict=True))


def table_builders(base: Any) -> list[str]:
    """Return the names of the methods or functions by which a base model makes a table of biases (ALiBi); [] for most.

    They are looked up among the names that the forward's code uses. A table has a bias for each index in the cache,
    which is not the position of a tree's node.
    """
    return [
        name
        for name in inspect.unwrap(type(base).forward).__code__.co_names
        if TABLE_NAMES.search(name)
    ]


def place_tables(reader: Any) -> None:
    """Let a reader's model make its ALiBi biases by each token's position, not by its column (index) in the cache.

    Siblings of a tree share a position, so that their columns must have the same bias.
    """
    base = reader.base
    for name in table_builders(base):
        # the builder is a method of the model
        if hasattr(base, name):
            setattr(base, name, partial(_build_table, reader, getattr(base, name)))
            continue
        # the builder is a function of a Python module, which other models share: only this model gets a copy of its
        # forward that calls another function by that name
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
    """Return a table of biases with an entry for each column's position, in place of the model's own function.

    That function is called for one sequence of the longest length, and the entry of each column's position is picked.

    Args:
        reader: the reader whose model runs.
        build: the model's own function, which gives each column the entry of its index.
        args: of the model's call.
        kwargs: of the model's call.

    Returns:
        [B * H or H, 1, S], for B sequences, H heads and S columns of the cache.
    """
    positions: TokenPositions | None = reader.token_positions
    # a forward that reads no tree
    if positions is None:
        return build(*args, **kwargs)
    length = positions.length
    # a tensor among the arguments is a mask [B, S], by which the function knows length and number of sequences
    masks = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]

    def shorten(value: Any) -> Any:
        """Replace a mask by one of a single sequence of `length` tokens."""
        if not isinstance(value, Tensor):
            return value
        return torch.ones(1, length, dtype=torch.long, device=value.device)

    short_kwargs = {name: shorten(value) for name, value in kwargs.items()}
    table = build(*map(shorten, args), **short_kwargs)  # [H, 1, length]
    if table.shape[-1] < length:
        raise ValueError(
            f"sequences of {length} tokens are longer than the {table.shape[-1]} that this model counts"
        )
    columns = positions.columns
    # without a mask the function makes one table for all sequences
    if not masks:
        if (columns != columns[:1]).any():
            raise ValueError(
                "one table serves all sequences, whose columns stand at other places: they are read one by one"
            )
        columns = columns[:1]
    # a table may be longer than asked for: then its last `length` entries are those of the positions
    columns = columns.clamp(max=length - 1) + (table.shape[-1] - length)
    picked = table[..., upload(columns, table.device)]  # [H, 1, B or 1, S]
    return picked.permute(2, 0, 1, 3).reshape(len(columns) * len(table), 1, -1)
