"""Forwards of a model over draft trees."""

# B texts, N new tokens, R not committed, D width

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
from eagle.target.bits.invariant import INVARIANT, SumsInFp64, can_be_invariant, fix_rows, in_fixed_rows
from eagle.target.cache import TreeCache, cache_kind, stateful_layers
from eagle.target.structure import base_of, cache_name_of, count_cache_layers, decoder_layers, holder_of
from eagle.target.taps import PLAIN, Layout, find_layout, tell_what_works
from eagle.target.trees.attention_rows import find_attention
from eagle.target.trees.ladder import Probe, climb
from eagle.target.trees.means import OFFSETS, ORIGIN, ROWS, TABLES, UNLIMITED, Means
from eagle.target.trees.mixers import Mixers, WholeModel, find_mixers
from eagle.target.trees.positions import Places, first_position, place_tables
from eagle.target.twin import share_weights, with_own_hooks
from eagle.target.weights.quantised import quantization_of, why_rows_mix

LEAST_BYTES = 2**30  # of states that a tree's nodes may take by levels; else as many as the weights
WHOLE_PROMPTS = "max_inference_chunksize"  # beyond it layers run on pieces of a prompt, which taps would miss
STEP_TOKENS = 16  # of a prompt that take as long as one token by itself: 4 in fp32 and 12 in bf16 on a CPU


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
        self.checked, self.tolerance = False, 0.0
        self.refusal: str | None = None  # why no means were found: they are looked for once
        self.follows_steps = False  # whether the truth is the model's own steps by one token, as in `generate`
        self.reads_rows: bool | None = None  # None: not tried yet
        self.layouts: dict[int, Layout] = {}  # of the taps that a text has shown
        self.arguments = inspect.signature(type(base_of(model)).forward).parameters
        self.can_be_invariant = invariant and can_be_invariant(model, vars(config).get(SWITCH))
        self.cache_name = cache_name_of(base_of(model))
        self.stateful = stateful_layers(config)
        self.cache_kind = TreeCache
        self.take(Means(grouped=can_group(model, config)))

    def take(self, means: Means) -> None:
        """Read by these means from now on."""
        self.means = means
        layers = decoder_layers(base_of(self.original), self.config.num_hidden_layers)
        self.hooked = with_own_hooks(self.original, layers)  # modules of the original
        self.model, twin_config = share_weights(self.original, self.config, layers)
        self.base = base_of(self.model)
        self.layers = decoder_layers(self.base, len(layers))
        self.masks = Masks(self.original, self.config, means.grouped, as_rows=not means.invariant)
        if UNLIMITED in means.extras:
            self.masks.windows = dict.fromkeys(self.masks.windows)
        self.settings = vars(twin_config)
        if WHOLE_PROMPTS in self.settings:
            self.settings[WHOLE_PROMPTS] = sys.maxsize
        self.mixers = Mixers()
        self.has_rows = ROWS in means.extras
        if means.whole:
            self.mixers = Mixers([WholeModel(self.base, self.cache_name, singly=means.singly)], by_levels=means.levels)
        elif self.stateful:
            self.cache_kind = cache_kind(self._read_two(None))
            found = find_mixers(self.base, self.new_cache(), self._read_two)
            weights = sum(weight.nbytes for weight in self.original.parameters())
            most = max(weights, LEAST_BYTES) if means.cheaper else None
            self.mixers = Mixers(found, by_levels=means.levels, most_bytes=most)
        if self.has_rows:
            attention = find_attention(self.base, self.config, self._run_two)
            self.mixers = Mixers([*self.mixers.mixers, *attention], by_levels=means.levels)
        self.places: Places | None = None  # of the forward that runs, for models that count by themselves
        self.origin = first_position(self) if ORIGIN in means.extras else 0  # of a text's first token
        if TABLES in means.extras:
            place_tables(self)
        # past the property, of which other configs would hear
        if means.keeps_bits:
            fix_rows(self.model)
        if means.invariant:
            self.settings[SWITCH] = INVARIANT
        elif means.grouped:
            self.settings[SWITCH] = GROUPED

    def count_attending(self) -> int:
        """Return the number of layers that attend, as far as the config tells."""
        kinds = getattr(self.config, "layer_types", None)
        if kinds:
            return sum(STATEFUL.search(kind) is None for kind in kinds)
        return len(self.layers) - len(self.stateful)

    def logits(self, head: TargetHead, hidden: Tensor) -> Tensor:
        """[.., V], the LM head's logits at states [.., D], by the means of this reader."""
        return in_fixed_rows(head.logits, hidden) if self.means.keeps_bits else head.logits(hidden)

    @property
    def reads_on_device(self) -> bool:
        """Whether a tree can be read whose nodes the host does not know."""
        return not self.mixers.mixers and not {OFFSETS, TABLES} & set(self.means.extras)

    def describe(self) -> str:
        """The means by which trees are read, in words; known once a text was read."""
        has_mixers = bool(self.mixers.mixers) and not self.means.whole
        return self.means.describe(has_mixers=has_mixers and bool(self.stateful))

    def new_cache(self) -> TreeCache:
        """An empty cache for texts of this model."""
        return self.cache_kind(count_cache_layers(self.config, self.layers), self.stateful, self.mixers)

    @torch.inference_mode()
    def _read_two(self, cache: TreeCache | None) -> Any:
        """The cache of a forward over two texts of three tokens."""
        if cache is not None:
            cache.lengths = [0, 0]
            cache.aim([0, 1])
        return getattr(self._run_two(cache), self.cache_name, None)

    @torch.inference_mode()
    def _run_two(self, cache: Any) -> Any:
        tokens = torch.arange(3, 9, device=self.masks.device).view(2, 3) % self.config.vocab_size
        return self.base(input_ids=tokens, use_cache=True, **{self.cache_name: cache})

    def read_texts(self, tokens: Tensor, media: Mapping[str, Any] | None = None) -> Tensor:
        """[B, T, D], the LM head's input at right-padded tokens [B, T], by the model's own plain forward.

        `media` are the other inputs of one text with images.
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
        """What a processor gave for images, as this model's forward takes it."""
        if unknown := [name for name in media if name not in self.arguments]:
            raise ValueError(
                f"{self.config.model_type} takes no {', '.join(unknown)}: pass what its own processor gives, to a "
                "target that sees images"
            )
        inputs = dict(media)
        for name, value in media.items():
            if not is_setting(name, value):
                tensor = torch.as_tensor(value, device=self.masks.device)
                inputs[name] = tensor.to(self.masks.dtype) if tensor.is_floating_point() else tensor
        return inputs

    def read_images(self, tokens: Tensor, media: Mapping[str, Any], cache: Any) -> Tensor:
        """[1, T, D], the LM head's input at a whole prompt [1, T] with images, by the model's own forward.

        Its keys and values lie where the cache aims, and the cache knows from now on how the model counts positions.
        """
        placed: list[Tensor] = []

        def note(_: nn.Module, __: Any, inputs: dict[str, Any]) -> None:
            if inputs.get("position_ids") is not None:
                placed[:] = [inputs["position_ids"]]

        if self.means.whole or self.has_rows:
            raise ValueError(
                f"{self.config.model_type} reads trees by {self.means.describe()}, and then no images: expected "
                "a prompt of text alone"
            )
        inputs = {"input_ids": upload(tokens, self.masks.device), **self.to_inputs(media), self.cache_name: cache}
        backbone, count = holder_of(self.base, self.layers), tokens.shape[1]
        with self.attending_as_stock(), backbone.register_forward_pre_hook(note, with_kwargs=True):
            with self.reading(cache, None, count, count):
                hidden = self.base(**inputs, use_cache=True).last_hidden_state
        # of one set for each way in which an image extends, and perhaps one that counts tokens before them
        last = int(placed[0][-3:].max()) if placed and placed[0].ndim == 3 else count - 1
        cache.offsets[cache.slots[0]] = last + 1 - count
        return hidden

    def __call__(
        self, tokens: Tensor, positions: Tensor, seen: Tensor | None, cache: Any, columns: Tensor | None = None
    ) -> Any:
        """[B, N, D], the LM head's input at tokens [B, N], where the cache aims.

        The tokens are the last N of R uncommitted ones at positions [B, R]; `seen` and `columns` are as in `Masks`.
        """
        device, count = self.masks.device, tokens.shape[1]
        starts = [start - (positions.shape[1] - count) for start in cache.starts]
        inputs = {
            "input_ids": upload(tokens, device),
            "position_ids": upload(self.from_origin(cache.from_columns(positions[:, -count:])), device),
            "attention_mask": None if self.has_rows else self.masks(starts, positions, seen, columns),
            self.cache_name: cache,
        }
        taken = {name: value for name, value in inputs.items() if name in self.arguments}
        self.place(Places(starts, positions, count, columns, self.masks), cache)
        try:
            with (
                SumsInFp64() if self.means.sums else nullcontext(),
                self._reading_blocks(starts, positions, count, is_chain=seen is None),
                self.reading(cache, seen, count, positions.shape[1]),
            ):
                output = self.base(**taken, use_cache=True)
        finally:
            self.place(None, cache)
        return output if isinstance(output, Tensor) else output.last_hidden_state

    def _reading_blocks(
        self, starts: Sequence[int], positions: Tensor, count: int, *, is_chain: bool
    ) -> AbstractContextManager[None]:
        """A context in which attention may read earlier keys in blocks, on a CPU whose bits must not change."""
        if not self.means.invariant or self.masks.device.type != "cpu":
            return nullcontext()
        return reading_blocks(starts, positions, count, is_chain=is_chain)

    def from_origin(self, positions: Tensor) -> Tensor:
        """Positions as the model counts them, from its own first one."""
        return positions + self.origin if self.origin else positions

    def place(self, places: Places | None, cache: Any) -> None:
        """Let the model, and its cache, tell positions from these places in the forward that comes; None: no more."""
        self.places = places
        if places is not None:
            cache.places = places
        cache.counts_positions = places is not None and OFFSETS in self.means.extras

    def read_text(
        self, tokens: Tensor, start: int, cache: TreeCache, depths: Sequence[int] = (), seen: Tensor | None = None
    ) -> Any:
        """[1, N, D], the LM head's input at tokens [N] of one text, a chain or a tree after `start` committed ones."""
        cache.length = start
        cache.aim([0], commits=not start)
        positions = start + torch.tensor([depths or range(len(tokens))])
        hidden = self(tokens[None], positions, None if seen is None else seen[None], cache)
        if not start:
            cache.snapshot(0, len(tokens))
        return hidden

    def reads_on(self, held: int, count: int) -> bool:
        """Whether a prompt of so many tokens is read on from its first `held` ones, rather than as a whole.

        Mixers that read by levels take the rest token by token, which must be worth it. Where the truth is a model's
        own steps, they are not what its forward over a prompt gives.
        """
        if not self.mixers.by_levels:
            return True
        return not self.follows_steps and held >= STEP_TOKENS * (count - held)

    def reading(self, cache: Any, seen: Tensor | None, new: int, width: int) -> AbstractContextManager[None]:
        """A context in which modules that keep a state read `new` of `width` uncommitted nodes where the cache aims."""
        return cache.reading(self.mixers, seen, new, width) if self.mixers.mixers else nullcontext()

    def find_layouts(self, tokens: Tensor) -> dict[int, Tensor]:
        """The states [1, T, D] of a text [1, T] at all taps that can be read, whose layouts are known from here on."""
        with self.tapping(tuple(range(len(self.layers)))) as tapped:
            last = self.read_texts(tokens)
        layouts = {tap: find_layout(states, tokens.shape[1], self.config.hidden_size) for tap, states in tapped.items()}
        self.layouts = {tap: layout for tap, layout in layouts.items() if layout} | {-1: Layout(PLAIN, last.shape[-1])}
        tapped[-1] = last
        return {tap: layout.read(tapped[tap]) for tap, layout in self.layouts.items()}

    @contextmanager
    def tapping(self, taps: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
        """A dict that receives the inputs [B, T, D] of the tapped layers while the block runs."""
        tapped: dict[int, Tensor] = {}

        def record(tap: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states = args[0] if args else kwargs["hidden_states"]
            states = self.layouts[tap].read(states) if tap in self.layouts else states
            tapped[tap] = self.mixers.to_nodes(states, tapped.get(tap))

        handles = [
            self.layers[tap].register_forward_pre_hook(partial(record, tap), with_kwargs=True)
            for tap in taps
            if tap != -1
        ]
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
        model, config = self.original, self.config
        layers = decoder_layers(base_of(model), config.num_hidden_layers)
        self.original, self.config = share_weights(model, config, layers)
        try:
            yield
        finally:
            self.original, self.config = model, config

    @torch.inference_mode()
    def check(self, rows: int = 1) -> None:
        """Find means by which this model reads trees, once, and refuse it if there are none.

        With several `rows`, test once whether texts can be read side by side; otherwise each is read by itself.
        """
        if not self.checked:
            with self._on_a_copy():
                self.refusal = self.refusal or why_no_trees(self.config, self.cache_name) or climb(self)
            if self.refusal:
                self.refusal = why_rows_mix(quantization_of(self.original.config)) or self.refusal
                raise ValueError(
                    f"{self.config.model_type} cannot read a tree: it {self.refusal}. {tell_what_works(self)}"
                )
            self.checked = True
        if rows > 1 and self.reads_rows is None:
            self.reads_rows = all(Probe(self).compare_rows() for _ in self.mixers.each_way())
