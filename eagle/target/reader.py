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
from eagle.target.attention import (
    ATTENTION_KEY,
    GROUPED,
    STATEFUL_KINDS,
    Masks,
    can_group,
    why_no_trees,
)
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

# bytes that the states of a tree's nodes may take when they are read by levels, or as many as the weights if those are
# larger
MIN_STATE_BYTES = 2**30
# config key of a number of tokens: layers run on pieces of longer prompts, which taps would miss
WHOLE_PROMPTS = "max_inference_chunksize"
# tokens of a prompt in one forward that take as long as one token in its own forward: measured were 4 in fp32 and 12 in
# bf16 on a CPU
STEP_TOKENS = 16


class TreeReader:
    """Runs a model under any mask through a second set of modules over its weights; the model itself is unchanged."""

    def __init__(self, model: Any, config: Any, *, invariant: bool = True) -> None:
        """Take a model; `check` then finds the mode (the way) in which it reads draft trees.

        Args:
            model: a causal language model of transformers.
            config: its text config.
            invariant: in half precision, let a token's bits not depend on what is read with it, where that is possible.
        """
        if not hasattr(config, "num_hidden_layers"):
            raise ValueError(
                f"{config.model_type} has no one stack of layers (its config names no num_hidden_layers): it cannot be "
                "a target"
            )
        self.original = model
        self.config = config
        self.checked = False  # whether `check` has found a mode that reads trees right
        self.tolerance = 0.0  # relative difference of states that the check takes for rounding
        self.refusal: str | None = None  # why no mode was found: modes are tried once
        # whether the reference is the model's steps by one token, as in `generate`, not its forward over a sequence
        self.follows_steps = False
        # whether several sequences may share a forward; None: not tried yet
        self.reads_rows: bool | None = None
        self.layouts: dict[int, Layout] = {}  # by tap, of the states that a forward has shown there
        # of the forward of the model below its LM head, by name
        self.arguments = inspect.signature(type(base_of(model)).forward).parameters
        self.can_be_invariant = invariant and can_be_invariant(
            model, vars(config).get(ATTENTION_KEY)
        )
        # of the forward's argument that takes a cache; "" for none
        self.cache_name = cache_name_of(base_of(model))
        # by layer index the number of recurrent states of the layer, for layers that keep any
        self.stateful = stateful_layers(config)
        self.cache_kind = TreeCache  # the class of caches that the model accepts
        # the cheapest mode, which `check` may replace
        self.set_mode(TreeReadMode(grouped=can_group(model, config)))

    def set_mode(self, mode: TreeReadMode) -> None:
        """Read in this mode from now on, through a new set of modules that the mode's changes are made to.

        A mode (`TreeReadMode`) says how the model reads trees: by a mask, by paths as rows of a batch, and the like.
        """
        self.mode = mode
        layers = decoder_layers(base_of(self.original), self.config.num_hidden_layers)
        # ids of the original's modules whose hooks the second set copies; a later change of them makes it outdated
        self.hooked = with_own_hooks(self.original, layers)
        self.model, twin_config = share_weights(self.original, self.config, layers)
        self.base = base_of(self.model)
        self.layers = decoder_layers(self.base, len(layers))
        self.masks = Masks(self.original, self.config, mode.grouped, as_rows=not mode.invariant)
        # the model does not apply the sliding windows that its config names: None for each layer type is no window
        if UNLIMITED in mode.extras:
            self.masks.windows = dict.fromkeys(self.masks.windows)
        # changed through vars, as the setters of some config properties change sub-configs too
        self.settings = vars(twin_config)
        # no prompt is longer than this number: a longer one would run in pieces, which taps would miss
        if WHOLE_PROMPTS in self.settings:
            self.settings[WHOLE_PROMPTS] = sys.maxsize
        # whether attention runs over root-to-leaf paths as rows of a batch, as no mask steers it
        self.has_rows = ROWS in mode.extras
        # `_make_mixers` runs forwards, in which no module may be wrapped yet
        self.mixers = Mixers()
        self.mixers = self._make_mixers(mode)
        # of the forward that runs, for models that compute positions by themselves
        self.token_positions: TokenPositions | None = None
        # the position of a sequence's first token, which is not 0 in some models
        self.first_position = first_position(self) if ORIGIN in mode.extras else 0
        # ALiBi biases are made by a column's position, not by its index; changes `self.base`
        if TABLES in mode.extras:
            place_tables(self)
        # linear layers multiply fixed numbers of rows, so that a row's bits do not depend on the others; in place
        if mode.keeps_bits:
            fix_rows(self.model)
        if mode.invariant:
            self.settings[ATTENTION_KEY] = INVARIANT
        elif mode.grouped:
            self.settings[ATTENTION_KEY] = GROUPED

    def _make_mixers(self, mode: TreeReadMode) -> Mixers:
        """Wrap the modules that run over root-to-leaf paths of a tree in this mode, because no mask can steer them.

        These mixers are modules that keep a recurrent state, attention that orders its keys by itself, or the whole
        model. A model that a mask steers has none.
        """
        if mode.whole:
            return Mixers(
                [WholeModel(self.base, self.cache_name, singly=mode.singly)],
                by_levels=mode.levels,
            )
        mixers = Mixers()
        if self.stateful:
            # a forward with the model's own cache (None) shows which attributes its mixers look up in a cache
            self.cache_kind = cache_kind(self._read_two_sequences(None))
            found = find_mixers(self.base, self.new_cache(), self._read_two_sequences)
            most_bytes = None
            # each forward chooses between paths and levels (one call for each depth). By levels every node has a state,
            # so that large trees would need much memory
            if mode.cheaper:
                weights = sum(weight.nbytes for weight in self.original.parameters())
                most_bytes = max(weights, MIN_STATE_BYTES)
            mixers = Mixers(found, by_levels=mode.levels, most_bytes=most_bytes)
        if self.has_rows:
            attention = find_attention(self.base, self.config, self._run_two_sequences)
            mixers = Mixers([*mixers.mixers, *attention], by_levels=mode.levels)
        return mixers

    def count_attending(self) -> int:
        """Return the number of layers with attention, by the config's layer types, or as those without a state.

        Their attention is replaced if bits must not depend on what is read together.
        """
        kinds = getattr(self.config, "layer_types", None)
        if not kinds:
            return len(self.layers) - len(self.stateful)
        return sum(STATEFUL_KINDS.search(kind) is None for kind in kinds)

    def logits(self, head: TargetHead, hidden: Tensor) -> Tensor:
        """Return [.., V], the LM head's logits at states [.., D].

        In a mode (a way to read trees) that keeps bits, a token's logits do not depend on the number of states that are
        read with it.
        """
        if not self.mode.keeps_bits:
            return head.logits(hidden)
        # a matrix product takes another kernel, and another order of sums, for other numbers of rows
        return in_fixed_rows(head.logits, hidden, limit_rows(head.output, head.logits))

    @property
    def reads_on_device(self) -> bool:
        """Whether a tree can be read that lies on the device alone, so that the host need not wait for its nodes.

        Modules that run over paths, and models that compute positions themselves, need the tree's shape on the host.
        """
        return not self.mixers.mixers and not {OFFSETS, TABLES} & set(self.mode.extras)

    def describe(self) -> str:
        """Return how trees are read, in words, as "mask + mixers over paths", for logs; `check` must have found it.

        A mixer is a module that no mask can steer, such as Mamba's.
        """
        has_mixers = bool(self.mixers.mixers) and not self.mode.whole
        return self.mode.describe(has_mixers=has_mixers and bool(self.stateful))

    def new_cache(self) -> TreeCache:
        """Return an empty cache for sequences of this model, of the class that the model accepts."""
        return self.cache_kind(
            count_cache_layers(self.config, self.layers),
            self.stateful,
            self.mixers,
        )

    @torch.inference_mode()
    def _read_two_sequences(self, cache: TreeCache | None) -> Any:
        """Run the model over two sequences of three tokens, and return its cache.

        With None the model makes its own kind of cache. Trials do so with a new cache, to see what the model writes to
        it. The tokens are arbitrary.
        """
        # a row for each sequence, both empty
        if cache is not None:
            cache.lengths = [0, 0]
            cache.set_write_offset([0, 1])
        return getattr(self._run_two_sequences(cache), self.cache_name, None)

    @torch.inference_mode()
    def _run_two_sequences(self, cache: Any) -> Any:
        """Return the model's output for two sequences of three arbitrary tokens; with None it makes its own cache.

        It is a trial of what the model writes to its cache; two sequences show which axis is the batch.
        """
        tokens = torch.arange(3, 9, device=self.masks.device).view(2, 3) % self.config.vocab_size
        return self.base(input_ids=tokens, use_cache=True, **{self.cache_name: cache})

    def read_sequences(self, tokens: Tensor, media: Mapping[str, Any] | None = None) -> Tensor:
        """Return [B, T, D], the LM head's input at whole sequences, by one forward without a cache or a tree.

        Features for training are made this way.

        Args:
            tokens: [B, T], B sequences of up to T tokens, right-padded; D is the width of the states.
            media: for one sequence with images, what its processor gave except the tokens.
        """
        inputs = {"input_ids": upload(tokens, self.masks.device), **self.to_inputs(media or {})}
        with self.attending_as_stock():
            return self.base(**inputs, use_cache=False).last_hidden_state

    @contextmanager
    def attending_as_stock(self) -> Iterator[None]:
        """A context in which the model attends by its own function instead of the mode's, as no tree is read.

        The mode is how this reader reads trees, which may need another attention function.
        """
        attention = self.settings.get(ATTENTION_KEY)
        self.settings[ATTENTION_KEY] = vars(self.config).get(ATTENTION_KEY)
        try:
            yield
        finally:
            self.settings[ATTENTION_KEY] = attention

    def to_inputs(self, media: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a processor gave for images as arguments of this model's forward, on its device and in its dtype.

        Raises:
            ValueError: if the forward has no argument of such a name.
        """
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
            # pixels come in fp32, and take the model's dtype; indices stay integers
            tensor = torch.as_tensor(value, device=self.masks.device)
            if tensor.is_floating_point():
                tensor = tensor.to(self.masks.dtype)
            inputs[name] = tensor
        return inputs

    def read_images(self, tokens: Tensor, media: Mapping[str, Any], cache: Any) -> Tensor:
        """Return [1, T, D], the LM head's input at a whole prompt of T tokens and images, by the model's own forward.

        Its keys and values are written to the cache at its write offset. The cache's `offsets` are changed, too: they
        get what to add to the columns of later tokens for their positions, for many tokens of an image share one.

        Args:
            tokens: [1, T].
            media: what the processor gave for the images.
            cache: a `TreeCache`.
        """
        if self.mode.whole or self.has_rows:
            raise ValueError(
                f"{self.config.model_type} reads trees by {self.mode.describe()}, and then no images: expected "
                "a prompt of text alone"
            )
        position_ids: list[Tensor] = []

        # a hook on the text layers: module, positional and keyword arguments
        def note(_: nn.Module, __: Any, inputs: dict[str, Any]) -> None:
            # torch calls this before the forward of the text layers, with their positional and keyword arguments
            if inputs.get("position_ids") is not None:
                position_ids[:] = [inputs["position_ids"]]

        count = tokens.shape[1]
        inputs = {
            "input_ids": upload(tokens, self.masks.device),
            **self.to_inputs(media),
            self.cache_name: cache,
        }
        # the model computes positions, and passes them to its text layers, where a hook sees them
        backbone = holder_of(self.base, self.layers)
        with self.attending_as_stock(), backbone.register_forward_pre_hook(note, with_kwargs=True):
            with self.reading(cache, None, count, count):
                hidden = self.base(**inputs, use_cache=True).last_hidden_state
        last = count - 1  # the last token's position where a position is a column
        # [3 or 4, 1, T]: the last three are positions in time, height and width; a first one may count tokens
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
        """Run the model over uncommitted tokens, a chain or a tree, and write their keys and values to the cache.

        Args:
            tokens: [B, N], of B sequences, the last N of R uncommitted ones; earlier forwards have read the others.
            positions: [B, R], of all uncommitted tokens.
            tree_mask: [B, N, R], the uncommitted tokens that each new one attends to; None for a chain.
            cache: the cache, whose `set_write_offset` was called for this forward.
            columns: [B, S], the positions of the S committed tokens, by their columns in the cache; None if they are in
                order.

        Returns:
            [B, N, D], the LM head's input.
        """
        device = self.masks.device
        count = tokens.shape[1]
        width = positions.shape[1]
        # the committed columns of each row: the write offset lies after the uncommitted tokens of earlier forwards
        starts = [start - (width - count) for start in cache.starts]
        # attention that is run over paths makes its own masks
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
        """Run the model, with position ids, mask and cache passed only where its forward takes them.

        Args:
            inputs: `input_ids` [B, N] or `inputs_embeds` [B, N, D] of N tokens of B sequences.
            positions: [B, N], which count from 0, one for each token in the cache.
            mask: an additive attention mask, or masks by layer type, as `Masks` makes them.
            cache: the cache.

        Returns:
            The output of the model below its LM head.
        """
        # after images a token's position is not its column
        positions = cache.from_columns(positions)
        # some models number their positions from another number than 0
        if self.first_position:
            positions = positions + self.first_position
        options = {
            "position_ids": upload(positions, self.masks.device),
            "attention_mask": mask,
            self.cache_name: cache,
        }
        known = {name: value for name, value in options.items() if name in self.arguments}
        return self.base(**inputs, **known, use_cache=True)

    @contextmanager
    def placing(self, positions: TokenPositions, cache: Any) -> Iterator[None]:
        """A context in which a model that computes positions itself, or by its cache's length, gets these instead.

        They are set on the reader, for tables of biases by position, and on the cache, which answers the model.
        """
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
        """Read tokens of one sequence: a chain, or a tree after `start` committed ones; for trials.

        Trials compare what a mode, a way to read trees, gives with the model's own states.

        Args:
            tokens: [N].
            start: the number of committed tokens; with 0 the tokens are a prompt and are committed.
            cache: the cache, whose first row is used.
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
        # a prompt's recurrent states are held, for several trees are read from them one after another
        if not start:
            cache.snapshot(0, len(tokens))
        return hidden

    def reads_on(self, prefix: int, count: int) -> bool:
        """Return whether a prompt of `count` tokens should reuse a cache of its first `prefix` ones.

        Modules that read trees by levels (one call for each depth) read the rest token by token, which pays only after
        a long prefix. Where a model's steps by one token differ from its forward over a sequence, a prompt must be read
        as a whole. Modules are those with a recurrent state, as Mamba's, and modes are ways in which a model reads
        trees.
        """
        # attention, and modules that read by paths, go on from any prefix in one forward
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
        """A context in which modules with a recurrent state read the last `new` of `width` uncommitted tree nodes.

        They go on from the states of the cache's active rows. Without such modules the context does nothing.
        """
        return (
            cache.reading(self.mixers, tree_mask, new, width)
            if self.mixers.mixers
            else nullcontext()
        )

    def find_layouts(self, tokens: Tensor) -> dict[int, Tensor]:
        """Read a sequence [1, T]; return its states [1, T, D] by tap, and store the layouts (shapes) of all taps.

        A tap is the index of a layer whose input is read, or -1 for the LM head's input. A layer whose input has
        an unknown layout cannot be tapped, and is left out.
        """
        # the inputs of two layers may have different layouts, so each is looked at
        with self.tapping(tuple(range(len(self.layers)))) as tapped:
            last = self.read_sequences(tokens)
        for tap, states in tapped.items():
            layout = find_layout(states, tokens.shape[1], self.config.hidden_size)
            if layout is not None:
                self.layouts[tap] = layout
        self.layouts[-1] = Layout(PLAIN, last.shape[-1])
        tapped[-1] = last
        return {tap: layout.read(tapped[tap]) for tap, layout in self.layouts.items()}

    @contextmanager
    def tapping(self, taps: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
        """A context that yields a dict, which forwards in it fill by tap with the input [B, T, D] of each tapped layer.

        Taps are layer indices. Tap -1, the LM head's input, is left to the caller.
        """
        tapped: dict[int, Tensor] = {}

        # a hook on each tapped layer: tap, module, positional and keyword arguments
        def record(tap: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # torch calls this before the forward of layer `tap`, whose input is recorded
            states = args[0] if args else kwargs["hidden_states"]
            # a model may have several streams of states, of which a tap gives the mean. Before `find_layouts` has seen
            # a layer, its raw input is recorded
            if tap in self.layouts:
                states = self.layouts[tap].read(states)
            # where the whole model runs over paths, from rows of paths to nodes
            tapped[tap] = self.mixers.to_nodes(states, tapped.get(tap))

        handles = []
        for tap in taps:
            # tap -1 is no layer's input
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
    def _trying_on_a_copy(self) -> Iterator[None]:
        """A context in which modes (ways to read trees) are tried on a second set of modules over the model's weights.

        The trials lower windows and make rotary tables of other lengths. The model itself must stay unchanged, as it
        may be generating in another thread.
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
        """Find a mode (a way) in which this model reads draft trees right, by trials that run once per model.

        Args:
            rows: the number of sequences in the batch; with several, also test once whether sequences may share a
                forward. If they may not, each row is read alone.

        Raises:
            ValueError: if no mode reads trees right.
        """
        if not self.checked:
            # a refusal is kept for later calls, as the trials take long
            with self._trying_on_a_copy():
                self.refusal = (
                    self.refusal or why_no_trees(self.config, self.cache_name) or choose_mode(self)
                )
            if self.refusal:
                # some quantisations let the rows of a forward change each other, which the trials report as a fault of
                # the mask: name that cause instead
                self.refusal = why_rows_mix(quantization_of(self.original.config)) or self.refusal
                raise ValueError(
                    f"{self.config.model_type} cannot read a tree: it {self.refusal}. {tell_what_works(self)}"
                )
            self.checked = True
        if rows > 1 and self.reads_rows is None:
            # mixers that may read trees by paths and by levels must be right by both
            self.reads_rows = all(Probe(self).compare_rows() for _ in self.mixers.each_way())
