"""A target's layers, for drafters that run some of them with their own cache."""

# B texts, N new tokens, R not committed, T committed, K drafted, S rows in the cache, D width, V vocabulary
# X heads of keys, H of queries

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from eagle.device import upload
from eagle.target.attention import Observe, can_observe, observing
from eagle.target.borrowed import is_close
from eagle.target.cache import TreeCache
from eagle.target.lent_cache import LentCache
from eagle.target.reader import TreeReader
from eagle.target.trees.means import FAILURES
from eagle.target.trees.positions import Places


class TargetView:
    """Embedding, layers and head over the target's weights; the target's own text and cache stay untouched."""

    def __init__(self, target: Any) -> None:
        self.head, self.device = target.head, target.device
        self.lock = target.lock  # layers are switched off while they run
        self.reader = TreeReader(target.model, target.config)
        if target.reader.stateful:
            target.reader.check()
        if target.reader.means.whole:
            raise ValueError(
                f"{target.config.model_type} reads trees as a whole ({target.reader.means.describe()}), and its layers "
                "cannot be run one by one: use a drafter with layers of its own"
            )
        self.reader.take(target.reader.means)
        self.decoder_layers = list(self.reader.layers)
        self.returns_tuples = False  # as layers of some models do
        self._check(target)

    def __deepcopy__(self, memo: dict[int, Any]) -> TargetView:
        """Return itself, so that a copied drafter shares the target."""
        return self

    def __len__(self) -> int:
        """The number of layers."""
        return len(self.decoder_layers)

    @property
    def has_windows(self) -> bool:
        """Whether some layers see a sliding window of positions."""
        return any(self.reader.masks.windows.values())

    @property
    def keeps_states(self) -> bool:
        """Whether some layers keep a state, which holds all tokens of a text and cannot do without some of them."""
        return bool(self.reader.mixers.mixers)

    @property
    def shows_attention(self) -> bool:
        """Whether the model's attention can be observed (it uses registered attention functions)."""
        return can_observe(self.reader.original, self.reader.settings)

    def new_cache(self) -> TreeCache:
        """An empty cache; forwards write after its `length`, which the owner advances or commits by `keep`."""
        return self.reader.new_cache()

    @torch.inference_mode()
    def embed(self, tokens: Tensor) -> Tensor:
        """[.., D], the first layer's input at tokens."""
        return self.head.embed(upload(tokens, self.device))

    @torch.inference_mode()
    def read(
        self,
        hidden: Tensor,
        positions: Tensor,
        seen: Tensor | None,
        cache: TreeCache,
        start: int = 0,
        end: int | None = None,
    ) -> Tensor:
        """[B, N, D], the output of layers `start` to `end` (exclusive; None: all) for hidden states [B, N, D].

        Keys and values are written at the cache's aim. The states are the last N of R uncommitted ones at positions
        [B, R] on the host, and see all committed columns; `seen` [B, N, R] marks those of the R, None: earlier ones.
        """
        starts = [place - (positions.shape[1] - hidden.shape[1]) for place in cache.starts]
        mask = None if self.reader.has_rows else self.reader.masks(starts, positions, seen)
        end = len(self) if end is None else end
        count, width = hidden.shape[1], positions.shape[1]
        with self.lock, self.reader.reading(cache, seen, count, width):
            return self._run(hidden, positions, mask, cache, start, end)

    @torch.inference_mode()
    def run_layers(
        self, hidden: Tensor, positions: list[int], start: int, end: int, cache: TreeCache, mask: Tensor | None = None
    ) -> Tensor:
        """[N, D], the output of layers `start` to `end` (exclusive) for hidden states [N, D] at these positions.

        `mask` [N, S + N] marks the cached and new rows that each new row sees; None: all cached rows, and new rows
        up to itself.
        """
        cache.aim([0])
        places, masks = torch.tensor([positions]), self.reader.masks
        if mask is None:
            return self.read(hidden[None], places, None, cache, start, end)[0]
        if self.keeps_states:
            raise ValueError("layers that keep a state have no rows that a mask could hide: pass no mask")
        additive: Any = torch.zeros(mask.shape, dtype=masks.dtype, device=masks.device)
        additive = additive.masked_fill_(~upload(mask, masks.device), torch.finfo(masks.dtype).min)[None, None]
        additive = additive if len(masks.windows) == 1 else dict.fromkeys(masks.windows, additive)
        return self._run(hidden[None], places, additive, cache, start, end)[0]

    @torch.inference_mode()
    def next_logits(
        self,
        tokens: Tensor,
        positions: Tensor,
        seen: Tensor | None,
        cache: TreeCache,
        columns: Tensor | None = None,
        scored: int | None = None,
    ) -> Tensor:
        """[B, N, V], the target's logits after tokens [B, N], or the last `scored` of them; the rest as in `read`.

        `columns` [B, S] are the positions that the cache's columns hold, where these are not in order.
        """
        with self.lock:
            hidden = self.reader(tokens, positions, seen, cache, columns)
        return self.head.logits(hidden if scored is None else hidden[:, -scored:])

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[.., V], logits of a layer's output [.., D] by the target's final norm and LM head."""
        rows = hidden.reshape(1, -1, hidden.shape[-1])
        with self.lock, self._only(rows, len(self), len(self)):
            cache = self.new_cache()
            positions = torch.zeros(1, rows.shape[1], dtype=torch.long)
            normed = self._forward(rows, positions, self.reader.masks([0], positions, None), cache)
        return self.head.logits(normed.view(hidden.shape))

    def _run(self, hidden: Tensor, positions: Tensor, mask: Any, cache: TreeCache, start: int, end: int) -> Tensor:
        """[B, N, D], the output of the last of these layers."""
        if not 0 <= start <= end <= len(self):
            raise ValueError(
                f"layers {start}..{end} are none of this target: expected 0 <= start <= end <= {len(self)}"
            )
        with self.lock, self._only(hidden, start, end) as output:
            self._forward(hidden, positions, mask, cache)
        return output[0]

    def _forward(self, hidden: Tensor, positions: Tensor, mask: Any, cache: TreeCache) -> Tensor:
        """[B, N, D], the LM head's input, computed by the layers that are switched on; positions [B, R]."""
        count = hidden.shape[1]
        starts = [place - (positions.shape[1] - count) for place in cache.starts]
        reader = self.reader
        inputs = {
            "position_ids": upload(reader.from_origin(cache.from_columns(positions[:, -count:])), self.device),
            "attention_mask": mask,
            reader.cache_name: cache,
        }
        taken = {name: value for name, value in inputs.items() if name in reader.arguments}
        reader.place(Places(starts, positions, count, None, reader.masks), cache)
        try:
            return reader.base(inputs_embeds=hidden, use_cache=True, **taken).last_hidden_state
        finally:
            reader.place(None, cache)

    @contextmanager
    def _only(self, hidden: Tensor, start: int, end: int) -> Iterator[list[Tensor]]:
        """A context in which only layers `start` to `end` run, from `hidden` on; the list gets the last output."""
        layers, output = self.reader.layers, list[Tensor]()
        try:
            for place, layer in enumerate(self.decoder_layers):
                first_input = hidden if place == min(start, len(self) - 1) else None
                layers[place] = _Layer(layer, first_input, output, runs=start <= place < end, wraps=self.returns_tuples)
            yield output
        finally:
            for place, layer in enumerate(self.decoder_layers):
                layers[place] = layer

    def _check(self, target: Any) -> None:
        """Refuse a model whose forward is not simply its layers in sequence."""
        tokens = torch.arange(1, 5) % target.vocab_size
        expected = target.model(input_ids=tokens[None].to(self.device), use_cache=False).logits[0]

        def run(layers: int) -> Tensor:
            hidden = self.run_layers(self.embed(tokens), [0, 1, 2, 3], 0, layers, self.new_cache())
            return self.logits(hidden)

        def note(layer: nn.Module, args: Any, output: Any) -> None:
            self.returns_tuples = isinstance(output, tuple)

        try:
            with self.decoder_layers[0].register_forward_hook(note):
                self.run_layers(self.embed(tokens), [0, 1, 2, 3], 0, len(self), self.new_cache())
            fault = "" if is_close(run(len(self)), expected) else "give other logits than the model"
            run(1)  # the others are left out
        except FAILURES as error:
            fault = f"fail ({type(error).__name__}: {str(error)[:200]})"
        if fault:
            raise ValueError(f"the layers of {target.config.model_type}, run one by one, {fault}: it cannot be viewed")


class _Layer(nn.Module):
    """A layer that can be skipped or given other hidden states in a forward."""

    def __init__(
        self, layer: nn.Module, hidden: Tensor | None, output: list[Tensor], *, runs: bool, wraps: bool
    ) -> None:
        super().__init__()
        self.layer, self.hidden, self.output, self.runs, self.wraps = layer, hidden, output, runs, wraps

    def __getattr__(self, name: str) -> Any:
        """An attribute of the layer that the model looks up, such as its kind."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """[B, N, D]; layers that return a tuple return the states first, as do those that are left out."""
        hidden = hidden_states if self.hidden is None else self.hidden
        left_out = (hidden,) if self.wraps else hidden
        result = self.layer(hidden, *args, **kwargs) if self.runs else left_out
        self.output[:] = [result if isinstance(result, Tensor) else result[0]]
        return result


class TargetTexts:
    """The rows of a target's state, for a drafter that reads their keys and values and drafts after them.

    Drafted columns are not committed; the target's next forward overwrites them.
    """

    def __init__(self, view: TargetView, state: Any) -> None:
        self.view, self.state = view, state

    def length(self, row: int) -> int:
        """The committed tokens of a row, all of which the target has read."""
        return self.state.length(row)

    def room(self, row: int) -> float:
        """The number of columns that a draft may use after a row's text without growing the cache."""
        return math.inf if self.state.max_tokens is None else self.state.needs[row] - self.length(row)

    def keys_values(self, row: int, layer: int) -> tuple[Tensor, Tensor]:
        """[X, T, D] each, a layer's rotated keys and values of a row's committed tokens (read-only)."""
        slot, held = self.state.rows.index(row), self.state.cache.layers[layer]
        end = self.state.cache.lengths[slot]
        return held.key_rows.buffer[slot, :, :end], held.value_rows.buffer[slot, :, :end]

    def groups(self, rows: Sequence[int]) -> list[list[int]]:
        """Groups of rows that may share a forward, in the order of their slots."""
        return self.state.groups(sorted(rows, key=self.state.rows.index))

    def copy_columns(self, cache: TreeCache, moves: Mapping[int, tuple[int, Tensor, Tensor]]) -> None:
        """Copy committed keys and values to a drafter's cache; `moves`: row -> (slot, columns [M] here, and there)."""
        if moves:
            slots = [torch.full_like(here, self.state.rows.index(row)) for row, (_, here, _) in moves.items()]
            others = [torch.full_like(here, slot) for slot, here, _ in moves.values()]
            _, here, there = zip(*moves.values(), strict=True)
            origin, place = (torch.stack([torch.cat(a), torch.cat(b)]) for a, b in ((slots, here), (others, there)))
            cache.copy_columns(self.state.cache, origin, place)

    @torch.inference_mode()
    def observe_attention(self, row: int, count: int, observe: Observe) -> None:
        """Read a row's last `count` tokens again to observe their queries and all keys; nothing is written.

        `observe` gets a layer's number, queries [1, H, N, D], keys [1, X, T, D] and the scale of their product.
        """
        text = self.state.text(row)
        before = len(text) - count
        kept = [self.keys_values(row, layer) for layer in range(len(self.state.cache.layers))]
        offset = self.state.cache.offsets.get(self.state.rows.index(row), 0)
        cache = LentCache([(keys[None, :, :before], values[None, :, :before]) for keys, values in kept], offset)
        reader = self.view.reader
        with self.view.lock, observing(reader.settings, observe):
            reader(torch.tensor([text[before:]]), torch.arange(before, len(text))[None], None, cache)

    @torch.inference_mode()
    def ahead(
        self, rows: Sequence[int], tokens: Tensor, depths: list[int], seen: Tensor | None, layers: int | None = None
    ) -> Tensor:
        """[B, K, D], the output of the first `layers` layers (None: all) for the last K draft tokens [B, K].

        They see all committed tokens, and `seen` [B, K, R] of R drafted ones (None: a chain of new tokens). Token i of
        a draft stands `depths[i]` positions after the text; earlier calls have read those before the last K.
        """
        cache = self.state.cache
        slots = [self.state.rows.index(row) for row in rows]
        starts = [cache.lengths[slot] for slot in slots]
        positions = torch.tensor(starts)[:, None] + torch.tensor(depths)
        cache.aim(slots, [start + len(depths) - tokens.shape[1] for start in starts])
        return self.view.read(self.view.embed(tokens), positions, seen, cache, 0, layers)
