"""Forwards of a model over draft trees."""

# B sequences, T tokens, N new tokens, R not committed, D width, V vocabulary

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from eagle.core.arguments import is_setting
from eagle.core.drafter import TargetHead
from eagle.device import upload
from eagle.target.attention import GROUPED, STATEFUL, SWITCH, Masks, can_group, why_no_trees
from eagle.target.bits.blocks import reading_blocks
from eagle.target.bits.invariant import (
    INVARIANT,
    SumsInFp64,
    can_be_invariant,
    fix_rows,
    in_fixed_rows,
    limit_rows,
)
from eagle.target.cache import TreeCache, cache_kind, stateful_layers
from eagle.target.structure import (
    base_of,
    cache_name_of,
    count_cache_layers,
    decoder_layers,
    holder_of,
)
from eagle.target.taps import PLAIN, Layout, find_layout, tell_what_works
from eagle.target.trees.attention_rows import find_attention
from eagle.target.trees.mixers import Mixers, WholeModel, find_mixers
from eagle.target.trees.positions import TokenPositions, first_position, place_tables
from eagle.target.trees.read_modes import (
    OFFSETS,
    ORIGIN,
    ROWS,
    TABLES,
    UNLIMITED,
    Probe,
    TreeReadMode,
    choose_mode,
)
from eagle.target.twin import share_weights, with_own_hooks
from eagle.target.weights.quantised import quantization_of, why_rows_mix

LEAST_BYTES = 2**30  # of states that a tree's nodes may take by levels; else as many as the weights
# beyond it layers run on pieces of a prompt, which taps would miss
WHOLE_PROMPTS = "max_inference_chunksize"
# of a prompt that take as long as one token by itself: 4 in fp32 and 12 in bf16 on a CPU
STEP_TOKENS = 16


class TreeReader:
    """Runs a model under any mask through a second set of modules over its weights; the model itself is unchanged."""

    def __init__(self, model: Any, config: Any, *, invariant: bool = True) -> None:
        if not hasattr(config, "num_hidden_layers"):
            raise ValueError(
                f"{config.model_type} has no one stack of layers (its config names no num_hidden_layers): it cannot be "
                "a target"
            )
        self.original = model
        self.config = config
        self.checked = False
        self.tolerance = 0.0
        self.refusal: str | None = None  # why no mode was found: it is looked for once
        # whether the truth is the model's own steps by one token, as in `generate`
        self.follows_steps = False
        self.reads_rows: bool | None = None  # None: not tried yet
        self.layouts: dict[int, Layout] = {}  # of the taps that a forward has shown
        self.arguments = inspect.signature(type(base_of(model)).forward).parameters
        self.can_be_invariant = invariant and can_be_invariant(model, vars(config).get(SWITCH))
        self.cache_name = cache_name_of(base_of(model))
        self.stateful = stateful_layers(config)
        self.cache_kind = TreeCache
        self.take(TreeReadMode(grouped=can_group(model, config)))

    def take(self, mode: TreeReadMode) -> None:
        """Read in this mode from now on."""
        self.mode = mode
        layers = decoder_layers(base_of(self.original), self.config.num_hidden_layers)
        self.hooked = with_own_hooks(self.original, layers)  # modules of the original
        self.model, twin_config = share_weights(self.original, self.config, layers)
        self.base = base_of(self.model)
        self.layers = decoder_layers(self.base, len(layers))
        self.masks = Masks(self.original, self.config, mode.grouped, as_rows=not mode.invariant)
        if UNLIMITED in mode.extras:
            self.masks.windows = dict.fromkeys(self.masks.windows)
        # values are set past the properties, of which other configs would hear
        self.settings = vars(twin_config)
        if WHOLE_PROMPTS in self.settings:
            self.settings[WHOLE_PROMPTS] = sys.maxsize
        self.has_rows = ROWS in mode.extras
        # none report while they are looked for
        self.mixers = Mixers()
        self.mixers = self._make_mixers(mode)
        # of the forward that runs, for models that count by themselves
        self.token_positions: TokenPositions | None = None
        # of a sequence's first token
        self.origin = first_position(self) if ORIGIN in mode.extras else 0
        if TABLES in mode.extras:
            place_tables(self)
        if mode.keeps_bits:
            fix_rows(self.model)
        if mode.invariant:
            self.settings[SWITCH] = INVARIANT
        elif mode.grouped:
            self.settings[SWITCH] = GROUPED

    def _make_mixers(self, mode: TreeReadMode) -> Mixers:
        """Wrap the modules that read paths in this mode."""
        if mode.whole:
            return Mixers(
                [WholeModel(self.base, self.cache_name, singly=mode.singly)],
                by_levels=mode.levels,
            )
        mixers = Mixers()
        if self.stateful:
            # the model's own cache tells what its mixers look for in one
            self.cache_kind = cache_kind(self._read_two(None))
            found = find_mixers(self.base, self.new_cache(), self._read_two)
            most_bytes = None
            if mode.cheaper:
                weights = sum(weight.nbytes for weight in self.original.parameters())
                most_bytes = max(weights, LEAST_BYTES)
            mixers = Mixers(found, by_levels=mode.levels, most_bytes=most_bytes)
        if self.has_rows:
            attention = find_attention(self.base, self.config, self._run_two)
            mixers = Mixers([*mixers.mixers, *attention], by_levels=mode.levels)
        return mixers

    def count_attending(self) -> int:
        """Return the number of layers that attend, as far as the config tells."""
        kinds = getattr(self.config, "layer_types", None)
        if not kinds:
            return len(self.layers) - len(self.stateful)
        return sum(STATEFUL.search(kind) is None for kind in kinds)

    def logits(self, head: TargetHead, hidden: Tensor) -> Tensor:
        """Return [.., V], the LM head's logits at states [.., D], with bits as this reader's mode keeps them."""
        if not self.mode.keeps_bits:
            return head.logits(hidden)
        return in_fixed_rows(head.logits, hidden, limit_rows(head.output, head.logits))

    @property
    def reads_on_device(self) -> bool:
        """Whether a tree can be read whose nodes the host does not know."""
        return not self.mixers.mixers and not {OFFSETS, TABLES} & set(self.mode.extras)

    def describe(self) -> str:
        """Return how trees are read, in words; known once a sequence was read."""
        has_mixers = bool(self.mixers.mixers) and not self.mode.whole
        return self.mode.describe(has_mixers=has_mixers and bool(self.stateful))

    def new_cache(self) -> TreeCache:
        """Return an empty cache for sequences of this model."""
        return self.cache_kind(
            count_cache_layers(self.config, self.layers),
            self.stateful,
            self.mixers,
        )

    @torch.inference_mode()
    def _read_two(self, cache: TreeCache | None) -> Any:
        """Return the cache of a forward over two sequences of three tokens."""
        if cache is not None:
            cache.lengths = [0, 0]
            cache.set_write_offset([0, 1])
        return getattr(self._run_two(cache), self.cache_name, None)

    @torch.inference_mode()
    def _run_two(self, cache: Any) -> Any:
        tokens = torch.arange(3, 9, device=self.masks.device).view(2, 3) % self.config.vocab_size
        return self.base(input_ids=tokens, use_cache=True, **{self.cache_name: cache})

    def read_texts(self, tokens: Tensor, media: Mapping[str, Any] | None = None) -> Tensor:
        """Return the LM head's input by the model's own plain forward.

        Args:
            tokens: [B, T], right-padded.
            media: the other inputs of one sequence with images.

        Returns:
            [B, T, D].
        """
        inputs = {"input_ids": upload(tokens, self.masks.device), **self.to_inputs(media or {})}
        with self.attending_as_stock():
            return self.base(**inputs, use_cache=False).last_hidden_state

    @contextmanager
    def attending_as_stock(self) -> Iterator[None]:
        """A context in which the model attends by the function that it was loaded with."""
        attention = self.settings.get(SWITCH)
        self.settings[SWITCH] = vars(self.config).get(SWITCH)
        try:
            yield
        finally:
            self.settings[SWITCH] = attention

    def to_inputs(self, media: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a processor gave for images, as this model's forward takes it."""
        unknown = [name for name in media if name not in self.arguments]
        if unknown:
            raise ValueError(
                f"{self.config.model_type} takes no {', '.join(unknown)}: pass what its own processor gives, to a "
                "target that sees images"
            )
        inputs = dict(media)
        for name, value in media.items():
            if is_setting(name, value):
                continue
            # pixels come in fp32, and indices stay integers
            tensor = torch.as_tensor(value, device=self.masks.device)
            if tensor.is_floating_point():
                tensor = tensor.to(self.masks.dtype)
            inputs[name] = tensor
        return inputs

    def read_images(self, tokens: Tensor, media: Mapping[str, Any], cache: Any) -> Tensor:
        """Return [1, T, D], the LM head's input at a whole prompt [1, T] with images, by the model's own forward.

        Its keys and values lie where the cache aims, and the cache knows from now on how the model counts positions.
        """
        if self.mode.whole or self.has_rows:
            raise ValueError(
                f"{self.config.model_type} reads trees by {self.mode.describe()}, and then no images: expected "
                "a prompt of text alone"
            )
        position_ids: list[Tensor] = []

        def note(_: nn.Module, __: Any, inputs: dict[str, Any]) -> None:
            if inputs.get("position_ids") is not None:
                position_ids[:] = [inputs["position_ids"]]

        count = tokens.shape[1]
        inputs = {
            "input_ids": upload(tokens, self.masks.device),
            **self.to_inputs(media),
            self.cache_name: cache,
        }
        # the positions are made within the model, and its text layers get them
        backbone = holder_of(self.base, self.layers)
        with self.attending_as_stock(), backbone.register_forward_pre_hook(note, with_kwargs=True):
            with self.reading(cache, None, count, count):
                hidden = self.base(**inputs, use_cache=True).last_hidden_state
        last = count - 1
        # of one set for each way in which an image extends, and perhaps one that counts tokens before them
        if position_ids and position_ids[0].ndim == 3:
            last = int(position_ids[0][-3:].max())
        cache.offsets[cache.active_rows[0]] = last + 1 - count
        return hidden

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        tree_mask: Tensor | None,
        cache: Any,
        columns: Tensor | None = None,
    ) -> Any:
        """Read tokens, which the cache appends at the offset set before.

        Args:
            tokens: [B, N], the last N of R uncommitted ones.
            positions: [B, R], of all uncommitted tokens.
            tree_mask: as in `Masks`.
            cache: the cache, whose write offset has been set.
            columns: as in `Masks`.

        Returns:
            [B, N, D], the LM head's input.
        """
        device = self.masks.device
        count = tokens.shape[1]
        width = positions.shape[1]
        # the cache writes after the uncommitted tokens that were read before
        starts = [start - (width - count) for start in cache.starts]
        mask = None if self.has_rows else self.masks(starts, positions, tree_mask, columns)
        # in half precision on a CPU, attention reads earlier keys in blocks of fixed size, so that
        # bits do not depend on what is read together
        blocks: AbstractContextManager[None] = nullcontext()
        if self.mode.invariant and device.type == "cpu":
            blocks = reading_blocks(starts, positions, count, is_chain=tree_mask is None)
        inputs = {"input_ids": upload(tokens, device)}
        with self.placing(TokenPositions(starts, positions, count, columns, self.masks), cache):
            with SumsInFp64() if self.mode.sums else nullcontext(), blocks:
                with self.reading(cache, tree_mask, count, width):
                    output = self.run(inputs, positions[:, -count:], mask, cache)
        return output if isinstance(output, Tensor) else output.last_hidden_state

    def run(self, inputs: dict[str, Tensor], positions: Tensor, mask: Any, cache: Any) -> Any:
        """Run the model on tokens or embeddings at positions [B, N], with those other arguments that it knows."""
        positions = cache.from_columns(positions)
        if self.origin:
            positions = positions + self.origin
        options = {
            "position_ids": upload(positions, self.masks.device),
            "attention_mask": mask,
            self.cache_name: cache,
        }
        known = {name: value for name, value in options.items() if name in self.arguments}
        return self.base(**inputs, **known, use_cache=True)

    @contextmanager
    def placing(self, positions: TokenPositions, cache: Any) -> Iterator[None]:
        """A context in which the model, and its cache, tell positions from these."""
        self.token_positions = positions
        cache.token_positions = positions
        cache.counts_positions = OFFSETS in self.mode.extras
        try:
            yield
        finally:
            self.token_positions = None
            cache.counts_positions = False

    def read_text(
        self,
        tokens: Tensor,
        start: int,
        cache: TreeCache,
        depths: Sequence[int] = (),
        tree_mask: Tensor | None = None,
    ) -> Any:
        """Read tokens of one sequence: a chain, or a tree after `start` committed ones.

        Args:
            tokens: [N].
            start: the number of committed tokens.
            cache: the cache, whose first cache row is read.
            depths: the depth of each token; () for a chain.
            tree_mask: [N, N], the tokens that each of them sees; None for a chain.

        Returns:
            [1, N, D], the LM head's input.
        """
        cache.length = start
        cache.set_write_offset([0], commits=not start)
        positions = start + torch.tensor([depths or range(len(tokens))])
        if tree_mask is not None:
            tree_mask = tree_mask[None]
        hidden = self(tokens[None], positions, tree_mask, cache)
        # a prompt: trees go on from its states, one after another
        if not start:
            cache.snapshot(0, len(tokens))
        return hidden

    def reads_on(self, prefix: int, count: int) -> bool:
        """Return whether a prompt of `count` tokens is read on from its first `prefix` ones, rather than as a whole.

        Mixers that read by levels take the rest token by token, which must be worth it. Where the truth is a model's
        own steps, they are not what its forward over a prompt gives.
        """
        if not self.mixers.by_levels:
            return True
        return not self.follows_steps and prefix >= STEP_TOKENS * (count - prefix)

    def reading(
        self,
        cache: Any,
        tree_mask: Tensor | None,
        new: int,
        width: int,
    ) -> AbstractContextManager[None]:
        """A context in which modules that keep a state read `new` of `width` uncommitted nodes where the cache aims."""
        return (
            cache.reading(self.mixers, tree_mask, new, width)
            if self.mixers.mixers
            else nullcontext()
        )

    def find_layouts(self, tokens: Tensor) -> dict[int, Tensor]:
        """Return the states [1, T, D] of a sequence [1, T] at all taps that can be read; note their layouts."""
        # one layer's input may be laid out otherwise than another's
        with self.tapping(tuple(range(len(self.layers)))) as tapped:
            last = self.read_texts(tokens)
        for tap, states in tapped.items():
            layout = find_layout(states, tokens.shape[1], self.config.hidden_size)
            if layout is not None:
                self.layouts[tap] = layout
        self.layouts[-1] = Layout(PLAIN, last.shape[-1])
        tapped[-1] = last
        return {tap: layout.read(tapped[tap]) for tap, layout in self.layouts.items()}

    @contextmanager
    def tapping(self, taps: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
        """A dict that receives the inputs [B, T, D] of the tapped layers while the block runs."""
        tapped: dict[int, Tensor] = {}

        def record(tap: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states = args[0] if args else kwargs["hidden_states"]
            # several streams become one
            if tap in self.layouts:
                states = self.layouts[tap].read(states)
            tapped[tap] = self.mixers.to_nodes(states, tapped.get(tap))

        handles = []
        for tap in taps:
            # the LM head's input is no layer's
            if tap != -1:
                handles.append(
                    self.layers[tap].register_forward_pre_hook(
                        partial(record, tap), with_kwargs=True
                    )
                )
        try:
            yield tapped
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def _on_a_copy(self) -> Iterator[None]:
        """A context in which a second set of modules stands for the untouched model.

        What is tried lowers windows and makes rotary tables of other lengths. The model itself must not notice: it may
        be writing an answer in another thread.
        """
        model = self.original
        config = self.config
        layers = decoder_layers(base_of(model), config.num_hidden_layers)
        self.original, self.config = share_weights(model, config, layers)
        try:
            yield
        finally:
            self.original = model
            self.config = config

    @torch.inference_mode()
    def check(self, rows: int = 1) -> None:
        """Find the mode by which this model reads trees, once, and refuse it if there is none.

        Args:
            rows: with several, test once whether sequences can be read in a batch; otherwise each is read by itself.
        """
        if not self.checked:
            # a refusal stands: what is tried takes long
            with self._on_a_copy():
                self.refusal = (
                    self.refusal or why_no_trees(self.config, self.cache_name) or choose_mode(self)
                )
            if self.refusal:
                # rows that change each other look like a fault of the mask
                self.refusal = why_rows_mix(quantization_of(self.original.config)) or self.refusal
                raise ValueError(
                    f"{self.config.model_type} cannot read a tree: it {self.refusal}. {tell_what_works(self)}"
                )
            self.checked = True
        if rows > 1 and self.reads_rows is None:
            self.reads_rows = all(Probe(self).compare_rows() for _ in self.mixers.each_way())
