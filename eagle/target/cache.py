"""A target's cache: keys, values, tapped states and the states of its mixers, for several texts."""

# N new columns, S columns up to the last new one, M moved columns

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

    lists: tuple[str, ...] = ()  # by layer, that a model's own kind of cache has beside keys and values

    def __init__(
        self, num_layers: int, stateful: Mapping[int, int] | None = None, mixers: Mixers | None = None
    ) -> None:
        SlotCache.__init__(self)
        self.mixers = mixers
        self.states = TextStates() if mixers and mixers.mixers else None
        numbers = stateful or {}  # of states, by layer
        layers: list[Any] = [
            _MixedLayer(self, numbers[layer]) if layer in numbers else _Layer(self) for layer in range(num_layers)
        ]
        Cache.__init__(self, layers=layers)
        for name in self.lists:
            setattr(self, name, [None] * num_layers)
        self.tapped = self.add()

    def aim(
        self,
        slots: Sequence[int],
        starts: Sequence[int] | None = None,
        sizes: Sequence[int] | None = None,
        *,
        commits: bool = False,
    ) -> None:
        """Direct the next writes as before; `sizes` are those of texts without padding, which a forward may commit."""
        super().aim(slots, starts)
        self.new_sizes, self.commits = sizes, commits

    @property
    def position_ids(self) -> Tensor:
        """[3, B, S], positions of earlier columns, which some models keep here before transformers 5.21.

        They ask by the name whether there are any. Writing them does nothing, or those of rejected
        drafts would stay.
        """
        if self.places is None or self.places.earlier is None:
            raise AttributeError("the forward that runs has no earlier columns")
        earlier: Tensor = self.places.earlier
        return earlier

    @position_ids.setter
    def position_ids(self, positions: Tensor) -> None:
        pass

    @contextmanager
    def reading(self, mixers: Mixers, seen: Tensor | None, new: int, width: int) -> Iterator[None]:
        """A context in which a model's mixers read `new` of `width` uncommitted nodes of each slot at the aim."""
        if self.states is None:
            yield
            return
        lengths = [start - (width - new) for start in self.starts]
        sizes = self.new_sizes or [width] * len(self.slots)
        reading = self.states.open(self.slots, lengths, sizes, seen, new, mixers=mixers, commits=self.commits)
        with mixers.reporting_to(reading):
            yield
        self.states.close(self.slots, lengths, reading)

    def keep(self, paths: Mapping[int, Sequence[int]], counts: Mapping[int, int] | None = None) -> None:
        """Commit nodes as before, and the states behind them; of only the first of them with `counts`."""
        if self.states is not None:
            self._keep_states(self.states, paths, counts or {slot: len(path) for slot, path in paths.items()})
        super().keep(paths, counts)

    @torch.inference_mode()
    def _keep_states(self, states: TextStates, paths: Mapping[int, Sequence[int]], counts: Mapping[int, int]) -> None:
        """Commit the states behind the first nodes of each slot's path, and go on holding those of the others."""
        states.keep({slot: path[: counts[slot]] for slot, path in paths.items()}, self.lengths)
        for slot, path in paths.items():
            states.retain(slot, path[counts[slot] :], self.lengths[slot] + counts[slot])

    def swap(self, one: int, other: int) -> None:
        super().swap(one, other)
        if self.states is not None:
            self.states.swap(one, other)

    def clear(self, slot: int) -> None:
        super().clear(slot)
        if self.states is not None:
            self.states.cut(slot, 0)

    def copy(self, slot: int, other: int) -> None:
        super().copy(slot, other)
        if self.states is not None:
            self.states.copy(slot, other)

    def reserve(self, slots: int, columns: int, most: int | None = None) -> None:
        super().reserve(slots, columns, most)
        if self.states is not None:
            self.states.resize(len(self.lengths))
            self.lengths = [self.states.reusable(slot, length) for slot, length in enumerate(self.lengths)]

    def reusable(self, slot: int, length: int) -> int:
        """The longest part of a slot's first tokens after which reading can go on."""
        return length if self.states is None else self.states.reusable(slot, length)

    def measure(self) -> None:
        """Note the bytes of the first slot's states and of a column, by which later caches know their room."""
        if self.mixers is not None and self.states is not None:
            self.mixers.state_bytes, self.mixers.column_bytes = self.states.state_bytes(0), self.column_bytes

    def state_columns(self, columns: int) -> int:
        """The columns that take as many bytes as the states of a text with so many columns."""
        if self.mixers is None or not self.mixers.column_bytes:
            return 0
        return -(-count_states(columns) * self.mixers.state_bytes // self.mixers.column_bytes)

    def snapshot(self, slot: int, length: int) -> None:
        """Let reading go on after these first tokens of a slot even when it holds more."""
        if self.states is not None:
            self.states.snapshot(slot, length)

    def cut(self, slot: int, length: int) -> None:
        """Cut a slot's text to this length."""
        self.lengths[slot] = length
        if not length:
            self.offsets.pop(slot, None)
        if self.states is not None:
            self.states.cut(slot, length)

    @torch.inference_mode()
    def copy_columns(self, source: TreeCache, origin: Tensor, place: Tensor) -> None:
        """Copy keys and values (slot, column) [2, M] of another cache of this model to places of this one."""
        slots, columns = (place.max(1).values + 1).tolist()
        pairs = []
        layers: Any = zip(self.layers, source.layers, strict=True)
        for layer, read in layers:
            if read.indexer_rows and not layer.indexer_rows:
                layer.indexer_rows = self.add()
            for written, held in zip(layer.rows, read.rows, strict=True):
                if not held.buffer.shape[2]:  # a layer that keeps neither keys nor values
                    continue
                written.make_room(held.buffer, slots, columns)
                pairs.append((held.buffer, written.buffer))
        copy_columns(pairs, origin, place)


class _Layer(CacheLayerMixin):
    """One layer's keys and values. Sliding layers keep all columns too; their mask applies the window."""

    is_sliding = False
    is_croppable = True

    def __init__(self, owner: SlotCache) -> None:
        super().__init__()
        self.owner = owner
        self.key_rows, self.value_rows = owner.add(), owner.add()
        self.indexer_rows: Rows | None = None
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: rows allocate themselves."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.key_rows.write(key_states), self.value_rows.write(value_states)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Write the keys [B, N, D] by which a sparse attention picks its columns; return all of them, [B, S, D]."""
        self.indexer_rows = self.indexer_rows or self.owner.add()
        return self.indexer_rows.write(indexer_key_states[:, None])[:, 0]

    @property
    def rows(self) -> list[Rows]:
        """The buffers of the layer."""
        return [self.key_rows, self.value_rows, *([self.indexer_rows] if self.indexer_rows else [])]

    def get_seq_length(self) -> Any:
        """The number of columns, or what to add to `arange(N)` for the positions of N new tokens."""
        return self.owner.places.query_offsets if self.owner.counts_positions else max(self.owner.starts)

    def get_mask_sizes(self, query_length: int) -> tuple[int, Any]:
        """The number of columns, and 0 or what to add to `arange(S)` for their positions."""
        offsets = self.owner.places.column_offsets if self.owner.counts_positions else 0
        return max(self.owner.starts) + query_length, offsets

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """[3, B, S], the positions of earlier columns, which some models keep here; writing them does nothing."""
        return None if self.owner.places is None else self.owner.places.earlier

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

    lazy_initialization = LinearAttentionLayer.lazy_initialization  # type: ignore[assignment]


def stateful_layers(config: Any) -> dict[int, int]:
    """The number of states that a model's own cache keeps in each layer that has any."""
    layers = enumerate(DynamicCache(config=config).layers)
    return {
        place: layer.number_of_states for place, layer in layers if isinstance(layer, LinearAttentionCacheLayerMixin)
    }


def cache_kind(model_cache: Any) -> type[TreeCache]:
    """A kind of `TreeCache` that can stand in for a model's own cache."""
    attributes = vars(model_cache).items() if isinstance(model_cache, Cache) else ()
    lists = tuple(name for name, value in attributes if isinstance(value, list) and name != "layers")
    return type("TreeCache", (TreeCache, type(model_cache)), {"lists": lists}) if lists else TreeCache
