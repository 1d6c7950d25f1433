"""A target's layers, for drafters that run some of them with their own cache."""

# B sequences, N new tokens, R not committed, T committed, K drafted, S columns in the cache, M moved columns, D width,
# V vocabulary, X heads of keys, H of queries

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
from eagle.target.cache import BorrowedCache, TreeCache
from eagle.target.reader import TreeReader
from eagle.target.structure import FAILURES, describe_failure
from eagle.target.trees.positions import TokenPositions


class TargetView:
    """Embedding, layers and head over the target's weights; the target's own sequences and cache stay untouched."""

    def __init__(self, target: Any) -> None:
        """Take a target's layers for a drafter that runs some of them itself, as early exit does.

        Raises:
            ValueError: if the target's layers cannot be run one by one.
        """
        self.head = target.head
        self.device = target.device
        self.lock = target.lock  # held while layers are switched off
        # runs the model through a second set of modules, as the target's may run in another thread
        self.reader = TreeReader(target.model, target.config)
        # trials must first find how layers that keep a state read trees; attention needs none of them
        if target.reader.stateful:
            target.reader.check()
        if target.reader.mode.whole:
            raise ValueError(
                f"{target.config.model_type} reads trees as a whole ({target.reader.mode.describe()}), and its layers "
                "cannot be run one by one: use a drafter with layers of its own"
            )
        self.reader.set_mode(target.reader.mode)
        self.decoder_layers = list(self.reader.layers)
        self.returns_tuples = False  # whether a layer's output is a tuple: `_check` sees it
        self._check(target)

    def __deepcopy__(self, memo: dict[int, Any]) -> TargetView:
        """Return itself, so that a copied drafter shares the target."""
        return self

    def __len__(self) -> int:
        """Return the number of decoder layers."""
        return len(self.decoder_layers)

    @property
    def has_windows(self) -> bool:
        """Whether some layers attend only to a sliding window of the last positions."""
        return any(self.reader.masks.windows.values())

    @property
    def keeps_states(self) -> bool:
        """Whether some layers keep a recurrent state, in which single tokens cannot be masked or left out."""
        return bool(self.reader.mixers.mixers)

    @property
    def shows_attention(self) -> bool:
        """Whether a drafter can see the model's queries and keys: it must use registered attention functions."""
        return can_observe(self.reader.original, self.reader.settings)

    def new_cache(self) -> TreeCache:
        """Return an empty KV cache for these layers.

        Forwards write after its `length`; the caller then raises `length`, or calls `keep` with the accepted columns
        (tokens).
        """
        return self.reader.new_cache()

    @torch.inference_mode()
    def embed(self, tokens: Tensor) -> Tensor:
        """Return [.., D], the embeddings of tokens, as the first layer reads them.

        D is the target's width.
        """
        return self.head.embed(upload(tokens, self.device))

    @torch.inference_mode()
    def read(
        self,
        hidden: Tensor,
        positions: Tensor,
        tree_mask: Tensor | None,
        cache: TreeCache,
        start: int = 0,
        end: int | None = None,
    ) -> Tensor:
        """Run layers `start` to `end` (exclusive); keys and values are written at the cache's write offset.

        Args:
            hidden: [B, N, D], of B sequences the input of width D at the last N of R uncommitted tokens, which attend
                to all committed columns (the tokens in the cache).
            positions: [B, R], of all uncommitted tokens, on the host.
            tree_mask: [B, N, R], which of the R each of the last N attends to; None: the earlier ones and itself.
            cache: the cache of these layers; its `starts` are where the N tokens are written, one start for each
                sequence.
            start: the first layer.
            end: the layer after the last; None: all.

        Returns:
            [B, N, D], the output of the last layer.
        """
        count = hidden.shape[1]
        width = positions.shape[1]
        mask = None
        # attention that is run over paths makes its masks by itself
        if not self.reader.has_rows:
            # the committed columns: earlier forwards have written the other `width - count` uncommitted tokens
            starts = [first - (width - count) for first in cache.starts]
            mask = self.reader.masks(starts, positions, tree_mask)
        end = len(self) if end is None else end
        with self.lock, self.reader.reading(cache, tree_mask, count, width):
            return self._run(hidden, positions, mask, cache, layers=range(start, end))

    @torch.inference_mode()
    def run_layers(
        self,
        hidden: Tensor,
        positions: list[int],
        start: int,
        end: int,
        cache: TreeCache,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Run layers `start` to `end` (exclusive) on N new tokens of one sequence, after the S committed ones.

        Keys and values are written after those of the committed tokens.

        Args:
            hidden: [N, D], the input at these positions, of width D.
            positions: N positions.
            start: the first layer.
            end: the layer after the last.
            cache: the cache of these layers.
            mask: [N, S + N], the cached and new columns that each new token attends to; None: all cached ones, and new
                ones up to itself.

        Returns:
            [N, D], the output of the last layer.
        """
        cache.set_write_offset([0])
        batch_positions = torch.tensor([positions])
        if mask is None:
            return self.read(hidden[None], batch_positions, None, cache, start, end)[0]
        if self.keeps_states:
            raise ValueError(
                "layers that keep a state have no rows that a mask could hide: pass no mask"
            )
        masks = self.reader.masks
        additive = torch.zeros(mask.shape, dtype=masks.dtype, device=masks.device)
        additive.masked_fill_(~upload(mask, masks.device), torch.finfo(masks.dtype).min)
        by_kind: Any = additive[None, None]
        # models with several types of layers take a mask for each
        if len(masks.windows) > 1:
            by_kind = dict.fromkeys(masks.windows, by_kind)
        return self._run(hidden[None], batch_positions, by_kind, cache, layers=range(start, end))[0]

    @torch.inference_mode()
    def next_logits(
        self,
        tokens: Tensor,
        positions: Tensor,
        tree_mask: Tensor | None,
        cache: TreeCache,
        columns: Tensor | None = None,
        scored: int | None = None,
    ) -> Tensor:
        """Run the whole model, and return the target's logits after uncommitted tokens.

        A drafter that is the target itself with a sparse KV cache drafts this way.

        Args:
            tokens: [B, N], of B sequences, the last N of R uncommitted tokens.
            positions: [B, R], of all uncommitted tokens, on the host.
            tree_mask: [B, N, R], which of the R each of the last N attends to; None: the earlier ones and itself.
            cache: the cache of all layers, where the tokens are written at its write offset.
            columns: [B, S], the positions of the S committed columns (the tokens in the cache); None: in order.
            scored: the number of last tokens whose logits are returned; None: all N.

        Returns:
            [B, N or `scored`, V], over the V tokens of the vocabulary.
        """
        with self.lock:
            hidden = self.reader(tokens, positions, tree_mask, cache, columns)
        return self.head.logits(hidden if scored is None else hidden[:, -scored:])

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return [.., V], the logits over V tokens of a layer's output [.., D], by the final norm and the LM head."""
        rows = hidden.reshape(1, -1, hidden.shape[-1])
        positions = torch.zeros(1, rows.shape[1], dtype=torch.long)
        # a range without layers switches all of them off: only the final norm is left of the model's forward. Positions
        # and mask do not matter then
        with self.lock, self._only(rows, range(len(self), len(self))):
            mask = self.reader.masks([0], positions, None)
            normed = self._forward(rows, positions, mask, self.new_cache())
        return self.head.logits(normed.view(hidden.shape))

    def _run(
        self,
        hidden: Tensor,
        positions: Tensor,
        mask: Any,
        cache: TreeCache,
        *,
        layers: range,
    ) -> Tensor:
        """Return [B, N, D], the output of the last of these layers.

        Args:
            hidden: [B, N, D], of B sequences the first layer's input of width D at the last N of R uncommitted tokens.
            positions: [B, R], of all uncommitted tokens.
            mask: an additive attention mask, or masks by layer type, as `Masks` makes them.
            cache: the cache, where keys and values are written at its write offset.
            layers: the indices of the layers.
        """
        if not 0 <= layers.start <= layers.stop <= len(self):
            raise ValueError(
                f"layers {layers.start}..{layers.stop} are none of this target: expected "
                f"0 <= start <= end <= {len(self)}"
            )
        with self.lock, self._only(hidden, layers) as output:
            self._forward(hidden, positions, mask, cache)
        return output[0]  # the list holds the last layer's output alone

    def _forward(self, hidden: Tensor, positions: Tensor, mask: Any, cache: TreeCache) -> Tensor:
        """Run the model's forward with only some layers on (by `_only`), and return [B, N, D], the LM head's input.

        Args:
            hidden: [B, N, D], passed in place of the embeddings of the last N of R uncommitted tokens of B sequences.
            positions: [B, R], of all uncommitted tokens.
            mask: an additive attention mask, or masks by layer type, as `Masks` makes them.
            cache: the cache.
        """
        count = hidden.shape[1]
        # the committed columns: the write offset lies after the uncommitted tokens of earlier forwards
        starts = [first - (positions.shape[1] - count) for first in cache.starts]
        with self.reader.placing(
            TokenPositions(starts, positions, count, committed=None, masks=self.reader.masks), cache
        ):
            output = self.reader.run({"inputs_embeds": hidden}, positions[:, -count:], mask, cache)
        return output.last_hidden_state

    @contextmanager
    def _only(self, hidden: Tensor, layers: range) -> Iterator[list[Tensor]]:
        """A context in which the model's forward runs only these layers, the first of them on `hidden`.

        Each layer is replaced in the model by one that can be skipped, and put back at the end. The context yields a
        list that gets the output of the last layer.
        """
        stack = self.reader.layers
        output: list[Tensor] = []  # one item, which every layer overwrites
        # the layer that gets `hidden`: with no layer to run, the last one passes it on to the final norm
        first = min(layers.start, len(self) - 1)
        try:
            for index, layer in enumerate(self.decoder_layers):
                stack[index] = _Layer(
                    layer,
                    hidden if index == first else None,
                    output,
                    runs=index in layers,
                    returns_tuple=self.returns_tuples,
                )
            yield output
        finally:
            for index, layer in enumerate(self.decoder_layers):
                stack[index] = layer

    def _check(self, target: Any) -> None:
        """Refuse a model whose forward is not simply its layers one after another, by a trial on four tokens.

        The trial also sets `returns_tuples`.
        """
        tokens = torch.arange(1, 5) % target.vocab_size
        expected = target.model(input_ids=tokens[None].to(self.device), use_cache=False).logits[0]

        def run_first(count: int) -> Tensor:
            """Return [4, D], the output of the first `count` layers for the four tokens, with an empty cache."""
            return self.run_layers(
                self.embed(tokens),
                positions=[0, 1, 2, 3],
                start=0,
                end=count,
                cache=self.new_cache(),
            )

        # a hook on a layer, which torch calls after the layer's forward
        def see_output(layer: nn.Module, args: Any, output: Any) -> None:
            # torch calls this after a decoder layer's forward: some models' layers return a tuple
            self.returns_tuples = isinstance(output, tuple)

        fault = ""
        try:
            # the first run, with all layers, only sets `returns_tuples`: a layer that is skipped must return a tuple if
            # the others do
            with self.decoder_layers[0].register_forward_hook(see_output):
                run_first(len(self))
            if not is_close(self.logits(run_first(len(self))), expected):
                fault = "give other logits than the model"
            # with layers left out a forward must not fail; its logits are no longer the model's
            self.logits(run_first(1))
        except FAILURES as error:
            fault = f"fail ({describe_failure(error)})"
        if fault:
            raise ValueError(
                f"the layers of {target.config.model_type}, run one by one, {fault}: it cannot be viewed"
            )


class _Layer(nn.Module):
    """A layer that can be skipped or given other hidden states in a forward.

    `TargetView._only` puts one in the place of every layer, so that the model's own forward, with its positions and
    masks, runs just a range of layers.
    """

    def __init__(
        self,
        layer: nn.Module,
        hidden: Tensor | None,
        output: list[Tensor],
        *,
        runs: bool,
        returns_tuple: bool,
    ) -> None:
        """Wrap a decoder layer, so that a forward of the whole model can skip it or give it other hidden states.

        Args:
            layer: the layer.
            hidden: the states that it gets, for the first layer of the range; None: those that the model passes to it.
            output: a list that all layers share, and that gets the output of each.
            runs: whether it runs; else it returns its input.
            returns_tuple: whether a layer that does not run returns a tuple, as the model's own layers do.
        """
        super().__init__()
        self.layer = layer
        self.hidden = hidden
        self.output = output
        self.runs = runs
        self.returns_tuple = returns_tuple

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped layer, for models that look one up, such as a layer's attention type."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            # `layer` is a submodule, which nn.Module finds by its own __getattr__
            return getattr(super().__getattr__("layer"), name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the layer, or skip it and pass the states on; return [B, N, D], or a tuple that begins with it.

        The states are `hidden_states`, [B, N, D] from the layer before, unless this layer was given others.
        """
        hidden = hidden_states if self.hidden is None else self.hidden
        result: Any = hidden
        if self.runs:
            result = self.layer(hidden, *args, **kwargs)
        elif self.returns_tuple:
            result = (hidden,)
        output = result if isinstance(result, Tensor) else result[0]
        # all layers overwrite the list that they share, so after a forward it holds the last one's output
        self.output[:] = [output]
        return result


class TargetSequences:
    """The rows of a target's state, for a drafter that reads their keys and values and drafts after them.

    Drafted columns are not committed; the target's next forward overwrites them.
    """

    def __init__(self, view: TargetView, state: Any) -> None:
        """Take the target's layers (`view`), and the `TargetState` that holds the sequences."""
        self.view = view
        self.state = state

    def _cache_rows(self, rows: Sequence[int]) -> list[int]:
        """Return the index in the cache's batch dimension of each row, a sequence by its caller's number."""
        return [self.state.rows.index(row) for row in rows]

    def length(self, row: int) -> int:
        """Return the number of committed tokens of a row (sequence), all of which the target has read."""
        return self.state.length(row)

    def room(self, row: int) -> float:
        """Return the number of cache columns (one for each token) that a draft may use after a row's sequence.

        It is infinite without a limit of the cache, which then grows. With one, it is what is left of the columns that
        were reserved for the row.
        """
        return (
            math.inf
            if self.state.max_tokens is None
            else self.state.columns_by_row[row] - self.length(row)
        )

    def keys_values(self, row: int, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer's rotated keys and values of a row's (sequence's) T committed tokens, [X, T, D] each.

        There are X heads of width D. The tensors are views of the target's cache, which must not be written to.
        """
        (cache_row,) = self._cache_rows([row])
        cache_layer = self.state.cache.layers[layer]
        end = self.state.cache.lengths[cache_row]
        keys = cache_layer.key_buffer.tensor[cache_row, :, :end]
        values = cache_layer.value_buffer.tensor[cache_row, :, :end]
        return keys, values

    def groups(self, rows: Sequence[int]) -> list[list[int]]:
        """Return groups of rows (sequences) that may share a forward, each in the order of the rows in the cache."""
        return self.state.groups(sorted(rows, key=self.state.rows.index))

    def copy_columns(
        self,
        cache: TreeCache,
        moves: Mapping[int, tuple[int, Tensor, Tensor]],
    ) -> None:
        """Copy committed keys and values of some rows (sequences) to a drafter's cache.

        Args:
            cache: the drafter's cache.
            moves: by row, the row's index in the drafter's cache, the columns [M] (tokens) of the target's cache to
                copy, and their columns [M] in the drafter's cache.
        """
        if not moves:
            return
        origin = []
        destination = []
        # gathered first, so that all rows are copied in one operation
        for row, (drafter_row, columns, new_columns) in moves.items():
            (target_row,) = self._cache_rows([row])
            origin.append(torch.stack([torch.full_like(columns, target_row), columns]))
            destination.append(torch.stack([torch.full_like(columns, drafter_row), new_columns]))
        cache.copy_columns(
            self.state.cache,
            torch.cat(origin, dim=1),
            torch.cat(destination, dim=1),
        )

    @torch.inference_mode()
    def observe_attention(self, row: int, count: int, observe: Observe) -> None:
        """Read a row's last `count` tokens again to show their attention to a drafter; the cache stays unchanged.

        Args:
            row: the sequence, by its caller's number.
            count: N, the number of tokens that are read.
            observe: called for each layer with its index, queries [1, H, N, D] of H heads of width D, keys
                [1, X, T, D] of all T tokens of the row for X heads, and the scale of their product.
        """
        sequence = self.state.sequence(row)
        start = len(sequence) - count
        # keys and values of the tokens before: those of the last `count` are computed again
        lent = []
        for layer in range(len(self.state.cache.layers)):
            keys, values = self.keys_values(row, layer)
            lent.append((keys[None, :, :start], values[None, :, :start]))
        # after images a token's position is its column plus an offset
        (cache_row,) = self._cache_rows([row])
        cache = BorrowedCache(lent, self.state.cache.offsets.get(cache_row, 0))
        tokens = torch.tensor([sequence[start:]])
        positions = torch.arange(start, len(sequence))[None]
        reader = self.view.reader
        with self.view.lock, observing(reader.settings, observe):
            reader(tokens, positions, None, cache)

    @torch.inference_mode()
    def ahead(
        self,
        rows: Sequence[int],
        tokens: Tensor,
        depths: list[int],
        tree_mask: Tensor | None,
        layers: int | None = None,
    ) -> Tensor:
        """Run the first layers on the last K draft tokens of some rows (sequences), which see all committed tokens.

        Nothing is committed: the target's own forward overwrites these keys and values. Drafters that exit early draft
        so.

        Args:
            rows: the sequences, by their caller's numbers.
            tokens: [B, K], of B rows; earlier calls have read those before.
            depths: of each of all R draft tokens, in all rows alike, how many draft tokens precede it on its path.
                Depth 0 is the first position after the committed sequence.
            tree_mask: [B, K, R], the draft tokens that each of the K attends to; None: a chain of new tokens.
            layers: the number of layers, from the first one; None: all.

        Returns:
            [B, K, D], the output of the last layer, of width D.
        """
        cache = self.state.cache
        cache_rows = self._cache_rows(rows)
        starts = [cache.lengths[cache_row] for cache_row in cache_rows]
        read_before = len(depths) - tokens.shape[1]  # draft tokens that earlier calls have written
        positions = torch.tensor(starts)[:, None] + torch.tensor(depths)
        cache.set_write_offset(cache_rows, [start + read_before for start in starts])
        return self.view.read(
            self.view.embed(tokens),
            positions,
            tree_mask,
            cache,
            start=0,
            end=layers,
        )
