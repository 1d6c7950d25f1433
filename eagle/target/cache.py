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

from eagle.target.slots import CacheBuffer, RowCache, copy_columns
from eagle.target.trees.mixers import Mixers
from eagle.target.trees.sequence_states import SequenceStates, count_states


class TreeCache(RowCache, Cache):
    """A target's keys, values and tapped states, and the states of its mixers if it has any."""

    # names of lists with an entry for each layer that the model's own kind of cache has beside keys and values
    lists: tuple[str, ...] = ()

    def __init__(
        self,
        num_layers: int,
        stateful: Mapping[int, int] | None = None,
        mixers: Mixers | None = None,
    ) -> None:
        """Make an empty cache of keys, values, tapped hidden states and recurrent states.

        Args:
            num_layers: the number of layers that write to it.
            stateful: by layer index the number of recurrent states that it keeps, for layers that keep any.
            mixers: the modules that read and write these recurrent states; None for a model of attention alone.
        """
        RowCache.__init__(self)
        self.mixers = mixers
        self.states: SequenceStates | None = None
        if mixers and mixers.mixers:
            self.states = SequenceStates()
        # every layer could have keys and values: a model's own cache has them where it attends. Buffers without writes
        # take no memory
        layers: list[Any] = [_Layer(self) for _ in range(num_layers)]
        for layer_index, number_of_states in (stateful or {}).items():
            layers[layer_index] = _MixedLayer(self, number_of_states)
        Cache.__init__(self, layers=layers)
        for name in self.lists:
            setattr(self, name, [None] * num_layers)
        # the tapped hidden states, written by `TargetState` with a tap in the place of a head
        self.tapped = self.add()

    def set_write_offset(
        self,
        cache_rows: Sequence[int],
        starts: Sequence[int] | None = None,
        sizes: Sequence[int] | None = None,
        *,
        commits: bool = False,
    ) -> None:
        """Tell the cache where the next forward writes its keys and values, before the model calls it.

        Args:
            cache_rows: the cache rows (one for each sequence) that the forward writes to.
            starts: the first column (one for each token) of each; None: after the committed ones.
            sizes: the number of new tokens of each without padding; None: there is no padding. Recurrent states need
                it, for padding would enter them.
            commits: whether the tokens are committed as they are read, as those of a prompt.
        """
        super().set_write_offset(cache_rows, starts)
        self.new_sizes = sizes
        self.commits = commits

    @property
    def position_ids(self) -> Tensor:
        """[3, B, earlier columns], positions of the columns before the new ones, which some models read from a cache.

        There are three for each token of the B sequences, in time, height and width, and they are equal for text.

        Those models store positions here before transformers 5.21. Assignments are ignored, as the positions of
        rejected drafts would stay.
        """
        # models test with hasattr whether there are earlier columns
        if self.token_positions is None or self.token_positions.earlier is None:
            raise AttributeError("the forward that runs has no earlier columns")
        earlier: Tensor = self.token_positions.earlier
        return earlier

    @position_ids.setter
    def position_ids(self, positions: Tensor) -> None:
        """Ignore what the model stores, as `position_ids` says."""

    @contextmanager
    def reading(
        self,
        mixers: Mixers,
        tree_mask: Tensor | None,
        new: int,
        width: int,
    ) -> Iterator[None]:
        """A context in which a forward reads trees from the recurrent states of each sequence, and leaves new ones.

        Mixers are the model's modules with such states, as Mamba's. A mask cannot steer them, so they run over paths.

        Args:
            mixers: the model's modules that keep recurrent states.
            tree_mask: [B, new, width], of B sequences the nodes that each new node attends to; None for a chain.
            new: the number of nodes that the forward reads.
            width: the number of all uncommitted nodes; the first `width - new` were read by earlier forwards.
        """
        # a model of attention alone keeps no states
        if self.states is None:
            yield
            return
        # the write offset lies after the uncommitted nodes of earlier forwards
        lengths = [start - (width - new) for start in self.starts]
        reading = self.states.open(
            self.active_rows,
            lengths,
            sizes=self.new_sizes or [width] * len(self.active_rows),
            tree_mask=tree_mask,
            new=new,
            mixers=mixers,
            commits=self.commits,
        )
        with mixers.reporting_to(reading):
            yield
        self.states.close(self.active_rows, lengths, reading)

    @torch.inference_mode()
    def keep(
        self,
        paths: Mapping[int, Sequence[int]],
        counts: Mapping[int, int] | None = None,
    ) -> None:
        """Commit the accepted columns (tokens) of the last forward, and the recurrent states after them.

        Args:
            paths: by cache row the columns to keep, in their new order, counted from its first uncommitted column.
            counts: by cache row how many of them are committed; the rest move up after those. None: all.
        """
        if self.states is not None:
            if counts is None:
                counts = {cache_row: len(path) for cache_row, path in paths.items()}
            committed = {cache_row: path[: counts[cache_row]] for cache_row, path in paths.items()}
            self.states.keep(committed, self.lengths)
            # later forwards may go on from nodes that move up without being committed, as in a beam search
            for cache_row, path in paths.items():
                count = counts[cache_row]
                self.states.retain(cache_row, path[count:], self.lengths[cache_row] + count)
        super().keep(paths, counts)

    def swap(self, first: int, second: int) -> None:
        """Exchange the contents of two cache rows, with their recurrent states.

        A cache row holds one sequence. Rows that are decoded must lie next to each other.
        """
        super().swap(first, second)
        if self.states is not None:
            self.states.swap(first, second)

    def clear(self, cache_row: int) -> None:
        """Empty a cache row (one sequence's place), fill it with zeros, and drop its recurrent states."""
        super().clear(cache_row)
        if self.states is not None:
            self.states.cut(cache_row, 0)

    def copy(self, source: int, target: int) -> None:
        """Copy the committed columns (tokens) of a cache row and its recurrent states into another cache row."""
        super().copy(source, target)
        if self.states is not None:
            self.states.copy(source, target)

    def reserve(self, cache_rows: int, columns: int, most: int | None = None) -> None:
        """Reserve cache rows (sequences) and columns (tokens of each), and make the recurrent states fit.

        Args:
            cache_rows: the number of cache rows.
            columns: the number of columns of each.
            most: how many cache rows times columns may stay allocated; None: twice those that are reserved.
        """
        super().reserve(cache_rows, columns, most)
        if self.states is not None:
            self.states.resize(len(self.lengths))
            # a sequence that was cut may have no state at its new end: cut it to the longest prefix that has one
            self.lengths = [
                self.states.reusable(cache_row, length)
                for cache_row, length in enumerate(self.lengths)
            ]

    def reusable(self, cache_row: int, length: int) -> int:
        """Return how many of a cache row's first `length` tokens a new prompt that shares them need not read again.

        Keys and values serve any prefix. Recurrent states are held after some tokens alone. A cache row is one
        sequence's place in the cache, whose tokens stay after the sequence has ended.
        """
        return length if self.states is None else self.states.reusable(cache_row, length)

    def measure(self) -> None:
        """Store the bytes of the first sequence's recurrent states and of a column on the mixers, for later caches.

        A column is what is cached for one token; mixers are the modules that keep recurrent states.
        """
        if self.mixers is not None and self.states is not None:
            self.mixers.state_bytes = self.states.state_bytes(0)
            self.mixers.column_bytes = self.column_bytes

    def state_columns(self, columns: int) -> int:
        """Return how many columns take as much memory as the recurrent states of a sequence with `columns` columns.

        The cache's limit is in columns (one for each token), so states must be counted as columns.
        """
        # 0: a model without states, or one whose states and columns have not been measured
        if self.mixers is None or not self.mixers.column_bytes:
            return 0
        # states are held at the end, after the prompt and at some lengths between
        state_bytes = count_states(columns) * self.mixers.state_bytes
        # rounded up
        return -(-state_bytes // self.mixers.column_bytes)

    def snapshot(self, cache_row: int, length: int) -> None:
        """Keep the recurrent states after the first `length` tokens of a cache row when its sequence grows past them.

        A later prompt with the same beginning can go on from them.
        """
        if self.states is not None:
            self.states.snapshot(cache_row, length)

    def cut(self, cache_row: int, length: int) -> None:
        """Cut a cache row's sequence to its first `length` tokens.

        A new prompt that begins with these tokens goes on from them.
        """
        self.lengths[cache_row] = length
        # an empty cache row has no images: the next sequence may have none, or others
        if not length:
            self.offsets.pop(cache_row, None)
        if self.states is not None:
            self.states.cut(cache_row, length)

    @torch.inference_mode()
    def copy_columns(self, source: TreeCache, origin: Tensor, destination: Tensor) -> None:
        """Copy the keys and values of M tokens (columns) from another cache of this model, such as the target's own.

        Args:
            source: the other cache.
            origin: [2, M], cache row and column of each in `source`.
            destination: [2, M], cache row and column of each in this cache.
        """
        # the numbers of cache rows and columns that this cache must have
        cache_rows, columns = (destination.max(1).values + 1).tolist()
        pairs = []
        layers: Any = zip(self.layers, source.layers, strict=True)
        for layer, source_layer in layers:
            # a layer's buffer of indexer keys is made at its first write
            if source_layer.indexer_buffer and not layer.indexer_buffer:
                layer.indexer_buffer = self.add()
            for target_buffer, source_buffer in zip(
                layer.buffers, source_layer.buffers, strict=True
            ):
                # a layer that keeps neither keys nor values has nothing to copy
                if not source_buffer.tensor.shape[2]:
                    continue
                target_buffer.make_room(source_buffer.tensor, cache_rows, columns)
                pairs.append((source_buffer.tensor, target_buffer.tensor))
        copy_columns(pairs, origin, destination)


class _Layer(CacheLayerMixin):
    """One layer's keys and values, with the methods that the models of transformers call.

    Sliding layers keep all columns too; their mask applies the window.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, owner: RowCache) -> None:
        """Make a layer without keys and values; `owner` is the cache that it belongs to, which tells where to write."""
        super().__init__()
        self.owner = owner
        self.key_buffer = owner.add()
        self.value_buffer = owner.add()
        self.indexer_buffer: CacheBuffer | None = None
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing, where transformers' layers allocate: buffers here allocate themselves at their first write."""

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Write new keys and values; return those of all tokens, which the new tokens attend to.

        Args:
            key_states: [B, X, N, D], of N new tokens of B sequences, for X heads of width D.
            value_states: [B, X, N, D].
            args: unused.
            kwargs: unused.

        Returns:
            Keys and values [B, X, S, D], of S tokens up to the last new one of the longest sequence.
        """
        return self.key_buffer.write(key_states), self.value_buffer.write(value_states)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Write the indexer keys [B, N, D] of new tokens, and return those of all tokens, [B, S, D].

        By them a sparse attention picks the cached tokens that it attends to. B are sequences, N new tokens, and S all
        tokens up to the last new one.
        """
        if self.indexer_buffer is None:
            self.indexer_buffer = self.owner.add()
        # a buffer has an axis of heads, here of one
        return self.indexer_buffer.write(indexer_key_states[:, None])[:, 0]

    @property
    def buffers(self) -> list[CacheBuffer]:
        """The buffers of the layer: keys, values, and the keys of a sparse attention's indexer once there are any."""
        buffers = [self.key_buffer, self.value_buffer]
        if self.indexer_buffer is not None:
            buffers.append(self.indexer_buffer)
        return buffers

    def get_seq_length(self) -> Any:
        """Return the number of cached tokens (columns) that precede the new ones; models of transformers ask for it.

        A model that computes positions as this length + `arange(N)` gets instead the offsets that make them right for
        the nodes of a tree, in which siblings share a position.
        """
        if self.owner.counts_positions:
            return self.owner.token_positions.query_offsets
        return max(self.owner.starts)

    def get_mask_sizes(self, query_length: int) -> tuple[int, Any]:
        """Return the number S of cached tokens with the new ones, and the offset of their positions, for masks.

        The offset is 0, or for a model that computes positions from it, what to add to `arange(S)`.
        """
        offsets = 0
        if self.owner.counts_positions:
            offsets = self.owner.token_positions.column_offsets
        return max(self.owner.starts) + query_length, offsets

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """[3, B, earlier columns], positions in time, height and width, which some models read here; None without any.

        Assignments are ignored, as the positions of rejected drafts would stay.
        """
        return None if self.owner.token_positions is None else self.owner.token_positions.earlier

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor) -> None:
        """Ignore what the model stores, as `indexer_position_ids` says."""

    def get_max_length(self) -> int:
        """Return -1, which tells transformers that the cache has no limit."""
        return -1


class _MixedLayer(_Layer, LinearAttentionLayer):
    """A layer with keys and values and with recurrent states; the states lie in copies of it, one for each run."""

    def __init__(self, owner: TreeCache, number_of_states: int) -> None:
        """Make an empty layer of the cache `owner`, in which a module keeps `number_of_states` recurrent states."""
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)
        _Layer.__init__(self, owner)

    # the method of `_Layer` does nothing, and would hide that which initialises states
    lazy_initialization = LinearAttentionLayer.lazy_initialization  # type: ignore[assignment]


def stateful_layers(config: Any) -> dict[int, int]:
    """Return by layer index the number of recurrent states that a model's own cache keeps, for layers that keep any."""
    counts = {}
    # transformers makes the layers that the config needs
    for layer_index, layer in enumerate(DynamicCache(config=config).layers):
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            counts[layer_index] = layer.number_of_states
    return counts


def cache_kind(model_cache: Any) -> type[TreeCache]:
    """Return `TreeCache`, or a subclass of it and of the model's own cache where the model looks up lists in its cache.

    A model may read and write such lists by name, so that they must be attributes of our cache too.

    Args:
        model_cache: the cache that a forward of the model returned.
    """
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
    """A cache that keeps nothing, for forwards over whole sequences.

    Without a cache, transformers checks whether sequences are packed, and the host waits for the device.
    """

    def __init__(self, num_layers: int) -> None:
        """Make a cache that keeps nothing, for a model of this number of layers."""
        super().__init__(layers=[_EmptyLayer() for _ in range(num_layers)])


class _EmptyLayer(CacheLayerMixin):
    """A layer that returns only the new keys and values."""

    is_sliding = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing, where transformers' layers allocate: this one keeps nothing."""

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return the new keys and values alone, and keep nothing; models of transformers call this in attention."""
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Return 0, the number of cached tokens before the new ones."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys that new tokens attend to, cached ones and themselves, and the first index, 0."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Return -1, which tells transformers that the cache has no limit."""
        return -1


class BorrowedCache(Cache):
    """Read-only keys and values of committed tokens, which new tokens attend to without being written."""

    def __init__(self, borrowed: Sequence[tuple[Tensor, Tensor]], offset: int = 0) -> None:
        """Take the keys and values to read.

        Args:
            borrowed: keys and values [1, X, S, D] of each layer, of S tokens of one sequence, for X heads of width D.
            offset: what to add to a token's index in the cache for its position: an image has fewer positions than
                tokens.
        """
        super().__init__(layers=[_BorrowedLayer(keys, values) for keys, values in borrowed])
        self.starts = [borrowed[0][0].shape[2]]  # where new tokens begin: S, as in `TreeCache`
        self.offset = offset

    def from_columns(self, positions: Tensor) -> Tensor:
        """Convert indices of tokens in the cache, [1, N], to the positions that the model is given."""
        return positions + self.offset


class _BorrowedLayer(_EmptyLayer):
    """One layer's read-only keys and values, followed by the new ones."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        """Take keys and values [1, X, S, D] of S tokens, for X heads of width D, to be read and never written."""
        super().__init__()
        self.borrowed = (keys, values)

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return the borrowed keys and values followed by the new ones, [B, X, S + N, D] each, and keep nothing."""
        keys, values = self.borrowed
        return torch.cat([keys, key_states], 2), torch.cat([values, value_states], 2)

    def get_seq_length(self) -> int:
        """Return the number of borrowed tokens, which come before the new ones."""
        return self.borrowed[0].shape[2]
