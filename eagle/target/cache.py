"""A target's cache: keys, values, tapped states and the states of its mixers, for several sequences.

Two more kinds keep nothing: `NoCache`, and `BorrowedCache`, which reads another cache's keys and values.
"""

# B sequences, N new columns, S columns up to the last new one, M moved columns, X heads, D width

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from eagle.target.slots import Rows, SlotCache, copy_columns
from eagle.target.trees.mixers import Mixers
from eagle.target.trees.text_states import TextStates, count_states


class TreeCache(SlotCache, Cache):
    """A target's keys, values and tapped states, and the states of its mixers if it has any."""

    lists: tuple[
        str, ...
    ] = ()  # by layer, that a model's own kind of cache has beside keys and values

    def __init__(
        self,
        num_layers: int,
        stateful: Mapping[int, int] | None = None,
        mixers: Mixers | None = None,
    ) -> None:
        """Make an empty cache.

        Args:
            num_layers: the number of layers that write to it.
            stateful: the number of states of each layer that keeps any.
            mixers: the modules that keep these states.
        """
        SlotCache.__init__(self)
        self.mixers = mixers
        self.states: TextStates | None = None
        if mixers and mixers.mixers:
            self.states = TextStates()
        # every layer could have keys and values: a model's own cache has them where it attends
        layers: list[Any] = [_Layer(self) for _ in range(num_layers)]
        for layer_index, number_of_states in (stateful or {}).items():
            layers[layer_index] = _MixedLayer(self, number_of_states)
        Cache.__init__(self, layers=layers)
        for name in self.lists:
            setattr(self, name, [None] * num_layers)
        # written by the state that taps, as one more layer
        self.tapped = self.add()

    def set_write_offset(
        self,
        slots: Sequence[int],
        starts: Sequence[int] | None = None,
        sizes: Sequence[int] | None = None,
        *,
        commits: bool = False,
    ) -> None:
        """Direct the next writes as before.

        Args:
            slots: the slots that a forward writes to.
            starts: the first column of each; None: after what is committed.
            sizes: the sequences' new tokens without padding.
            commits: whether the forward commits what it reads.
        """
        super().set_write_offset(slots, starts)
        self.new_sizes = sizes
        self.commits = commits

    @property
    def position_ids(self) -> Tensor:
        """[3, B, S], positions of earlier columns, which some models keep here before transformers 5.21.

        They ask by the name whether there are any. Writing them does nothing, or those of rejected drafts would stay.
        """
        if self.token_positions is None or self.token_positions.earlier is None:
            raise AttributeError("the forward that runs has no earlier columns")
        earlier: Tensor = self.token_positions.earlier
        return earlier

    @position_ids.setter
    def position_ids(self, positions: Tensor) -> None:
        pass

    @contextmanager
    def reading(
        self,
        mixers: Mixers,
        tree_mask: Tensor | None,
        new: int,
        width: int,
    ) -> Iterator[None]:
        """A context in which a model's mixers read the last `new` of `width` uncommitted nodes of each slot."""
        if self.states is None:
            yield
            return
        # the write offset is after the nodes that were read before
        lengths = [start - (width - new) for start in self.starts]
        reading = self.states.open(
            self.slots,
            lengths,
            sizes=self.new_sizes or [width] * len(self.slots),
            tree_mask=tree_mask,
            new=new,
            mixers=mixers,
            commits=self.commits,
        )
        with mixers.reporting_to(reading):
            yield
        self.states.close(self.slots, lengths, reading)

    @torch.inference_mode()
    def keep(
        self,
        paths: Mapping[int, Sequence[int]],
        counts: Mapping[int, int] | None = None,
    ) -> None:
        """Commit nodes as before, and the states after them; only the first nodes with `counts`."""
        if self.states is not None:
            if counts is None:
                counts = {slot: len(path) for slot, path in paths.items()}
            committed = {slot: path[: counts[slot]] for slot, path in paths.items()}
            self.states.keep(committed, self.lengths)
            # what moves up may be read on from, as a beam search does
            for slot, path in paths.items():
                count = counts[slot]
                self.states.retain(slot, path[count:], self.lengths[slot] + count)
        super().keep(paths, counts)

    def swap(self, first: int, second: int) -> None:
        super().swap(first, second)
        if self.states is not None:
            self.states.swap(first, second)

    def clear(self, slot: int) -> None:
        super().clear(slot)
        if self.states is not None:
            self.states.cut(slot, 0)

    def copy(self, source: int, target: int) -> None:
        super().copy(source, target)
        if self.states is not None:
            self.states.copy(source, target)

    def reserve(self, slots: int, columns: int, most: int | None = None) -> None:
        super().reserve(slots, columns, most)
        if self.states is not None:
            self.states.resize(len(self.lengths))
            # a sequence that was cut may have no state at its new end
            self.lengths = [
                self.states.reusable(slot, length) for slot, length in enumerate(self.lengths)
            ]

    def reusable(self, slot: int, length: int) -> int:
        """Return how many of a slot's first tokens, at most `length`, reading can go on after."""
        return length if self.states is None else self.states.reusable(slot, length)

    def measure(self) -> None:
        """Note the bytes of the first slot's states and of a column, by which later caches know their room."""
        if self.mixers is not None and self.states is not None:
            self.mixers.state_bytes = self.states.state_bytes(0)
            self.mixers.column_bytes = self.column_bytes

    def state_columns(self, columns: int) -> int:
        """Return the columns that take as many bytes as the states of a sequence with so many columns."""
        if self.mixers is None or not self.mixers.column_bytes:
            return 0
        state_bytes = count_states(columns) * self.mixers.state_bytes
        return -(-state_bytes // self.mixers.column_bytes)

    def snapshot(self, slot: int, length: int) -> None:
        """Let reading go on after these first tokens of a slot even when it holds more."""
        if self.states is not None:
            self.states.snapshot(slot, length)

    def cut(self, slot: int, length: int) -> None:
        """Cut a slot's sequence to this length."""
        self.lengths[slot] = length
        # the next sequence has other images
        if not length:
            self.offsets.pop(slot, None)
        if self.states is not None:
            self.states.cut(slot, length)

    @torch.inference_mode()
    def copy_columns(self, source: TreeCache, origin: Tensor, destination: Tensor) -> None:
        """Copy keys and values (slot, column) [2, M] of another cache of this model to columns of this one."""
        slots, columns = (destination.max(1).values + 1).tolist()
        pairs = []
        layers: Any = zip(self.layers, source.layers, strict=True)
        for layer, source_layer in layers:
            # these are made at the first write
            if source_layer.indexer_rows and not layer.indexer_rows:
                layer.indexer_rows = self.add()
            for target_rows, source_rows in zip(layer.rows, source_layer.rows, strict=True):
                # a layer that keeps neither keys nor values has nothing to copy
                if not source_rows.buffer.shape[2]:
                    continue
                target_rows.make_room(source_rows.buffer, slots, columns)
                pairs.append((source_rows.buffer, target_rows.buffer))
        copy_columns(pairs, origin, destination)


class _Layer(CacheLayerMixin):
    """One layer's keys and values. Sliding layers keep all columns too; their mask applies the window."""

    is_sliding = False
    is_croppable = True

    def __init__(self, owner: SlotCache) -> None:
        super().__init__()
        self.owner = owner
        self.key_rows = owner.add()
        self.value_rows = owner.add()
        self.indexer_rows: Rows | None = None
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: rows allocate themselves."""

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        return self.key_rows.write(key_states), self.value_rows.write(value_states)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Write the keys [B, N, D] by which a sparse attention picks its columns; return all of them, [B, S, D]."""
        if self.indexer_rows is None:
            self.indexer_rows = self.owner.add()
        return self.indexer_rows.write(indexer_key_states[:, None])[:, 0]

    @property
    def rows(self) -> list[Rows]:
        """The buffers of the layer."""
        buffers = [self.key_rows, self.value_rows]
        if self.indexer_rows is not None:
            buffers.append(self.indexer_rows)
        return buffers

    def get_seq_length(self) -> Any:
        """Return the number of columns, or what to add to `arange(N)` for the positions of N new tokens."""
        if self.owner.counts_positions:
            return self.owner.token_positions.query_offsets
        return max(self.owner.starts)

    def get_mask_sizes(self, query_length: int) -> tuple[int, Any]:
        """Return the number of columns, and 0 or what to add to `arange(S)` for their positions."""
        offsets = 0
        if self.owner.counts_positions:
            offsets = self.owner.token_positions.column_offsets
        return max(self.owner.starts) + query_length, offsets

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """[3, B, S], the positions of earlier columns, which some models keep here; writing them does nothing."""
        return None if self.owner.token_positions is None else self.owner.token_positions.earlier

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor) -> None:
        pass

    def get_max_length(self) -> int:
        return -1


class _MixedLayer(_Layer, LinearAttentionLayer):
    """A layer with keys and values whose mixers keep states too; those lie in forks of it."""

    def __init__(self, owner: TreeCache, number_of_states: int) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)
        _Layer.__init__(self, owner)

    # else that of `_Layer`, which does nothing, would hide the states'
    lazy_initialization = LinearAttentionLayer.lazy_initialization  # type: ignore[assignment]


def stateful_layers(config: Any) -> dict[int, int]:
    """Return the number of states that a model's own cache keeps in each layer that has any."""
    counts = {}
    for layer_index, layer in enumerate(DynamicCache(config=config).layers):
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            counts[layer_index] = layer.number_of_states
    return counts


def cache_kind(model_cache: Any) -> type[TreeCache]:
    """Return a kind of `TreeCache` that can stand in for a model's own cache."""
    if not isinstance(model_cache, Cache):
        return TreeCache
    # caches of some recurrent models keep lists by layer, which the models look up by name
    attributes = vars(model_cache).items()
    lists = tuple(
        name for name, value in attributes if isinstance(value, list) and name != "layers"
    )
    if not lists:
        return TreeCache
    return type("TreeCache", (TreeCache, type(model_cache)), {"lists": lists})


class NoCache(Cache):
    """A cache that keeps nothing. Without a cache, transformers checks for packed sequences, and the host waits."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[_EmptyLayer() for _ in range(num_layers)])


class _EmptyLayer(CacheLayerMixin):
    """A layer that returns only the new keys and values."""

    is_sliding = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: there is nothing to allocate."""

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


class BorrowedCache(Cache):
    """Read-only keys and values [1, X, S, D] of committed tokens by layer; new tokens attend to them."""

    def __init__(self, borrowed: Sequence[tuple[Tensor, Tensor]], offset: int = 0) -> None:
        super().__init__(layers=[_BorrowedLayer(keys, values) for keys, values in borrowed])
        self.starts = [borrowed[0][0].shape[2]]
        self.offset = offset

    def from_columns(self, positions: Tensor) -> Tensor:
        """Convert positions that count columns to those that the model counts."""
        return positions + self.offset


class _BorrowedLayer(_EmptyLayer):
    """One layer's read-only keys and values, followed by the new ones."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.borrowed = (keys, values)

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return the borrowed keys and values with the new ones behind them, and keep nothing."""
        keys, values = self.borrowed
        return torch.cat([keys, key_states], 2), torch.cat([values, value_states], 2)

    def get_seq_length(self) -> int:
        return self.borrowed[0].shape[2]
