"""Any frozen causal language model of transformers, able to read a draft tree in one forward."""

# B batch, T tokens, L taps, D target width

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from threading import RLock
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from eagle.core.arguments import positive_int
from eagle.core.drafter import ColumnBytes, Drafter
from eagle.core.verify import Choose, Sampling
from eagle.device import best_device, check_device, fastest_dtype, in_dtype
from eagle.target.attention import Masks, rope_border
from eagle.target.bits.invariant import HALF, sums_rows_alike
from eagle.target.bits.variance import find_variance
from eagle.target.borrowed import borrow_head
from eagle.target.loading import (
    adapt_model,
    check_model,
    load_model,
    parse_dtype,
    processor_of,
    read_spare_tensor,
    settle_weights,
    tokenizer_of,
)
from eagle.target.reader import TreeReader
from eagle.target.state import TargetState
from eagle.target.structure import device_of
from eagle.target.talk import ChatMixin
from eagle.target.taps import refuse_taps
from eagle.target.trees.text_states import count_states
from eagle.target.view import TargetView
from eagle.target.weights.dense import borrowed_layers, find_tensor
from eagle.target.weights.packed import count_packed, pack_model, to_plain, unpack_model
from eagle.target.weights.weight_mark import ModelMark, WeightMark


class Target(ChatMixin):
    """A causal language model that can read draft trees; `open` gives a state for the sequences decoded with it."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        processor: Any = None,
        invariant: bool | None = None,
    ) -> None:
        """Take a loaded model.

        Args:
            model: a causal language model of transformers.
            tokenizer: its tokenizer; only `chat`, stop strings and text output need one.
            processor: what prepares images for it.
            invariant: as in `load`.
        """
        self.model = check_model(model).eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.processor = processor
        self.invariant = invariant
        self.config = self.model.config.get_text_config()
        self.lock = RLock()  # of forwards: hooks and buffers are the layers' own
        self.sharded = False
        # that it reads with, over weights that it shares with another target
        self.adapter: str | None = None
        self.draws = Counter[
            tuple[int, int]
        ]()  # uses of private random numbers, by seed and request
        self._find_out()

    def _find_out(self) -> None:
        """Make the modules that read for this target, and find out what they need to know of the model."""
        model = self.model
        # both with plain matrices, which heads borrow
        embedding, output = borrowed_layers(model)
        self.device = device_of(embedding)
        settle_weights(model, self.device)
        wants_invariant = self.invariant
        if wants_invariant is None:
            wants_invariant = self.device.type == "cpu"
        self.reader = TreeReader(model, self.config, invariant=wants_invariant)
        # may be more than the tokenizer knows
        self.vocab_size = output.get_parameter("weight").shape[0]
        # a first forward tells the layers' inputs, and what it sets in the model by itself
        tokens = torch.arange(1, 5, device=self.device)[None] % self.vocab_size
        reader_mark = ModelMark(self.reader.model, self.config, set())
        with torch.no_grad():
            states = {tap: rows[0] for tap, rows in self.reader.find_layouts(tokens).items()}
        volatile = reader_mark.differences()
        self.head = borrow_head(
            model,
            (embedding, output),
            tokens,
            first=states.get(0),
            last=states[-1],
        )
        self.border = rope_border(self.config)  # no text may grow across it
        self.viewed: TargetView | None = None
        self.found_variance: str | None = None  # None: not looked for yet, "": none
        self.spare: TargetState | None = None
        # drafters that calls have named: the LM head they borrow, when their weights were written, and themselves
        self.named_drafters: dict[str, tuple[Any, int | None, Any]] = {}
        self.weight_mark = WeightMark(model)
        self.model_mark = ModelMark(model, self.config, self.reader.hooked, volatile)

    def refresh(self, *, force: bool = False) -> None:
        """Read by the model as it is now, if it was changed: by an adapter, a hook, a module, its config.

        Every call that opens or reads a text does so first. States that are open read on by the model as it was.
        With `force` also if nothing tells a change, as in an object that an attribute holds.
        """
        with self.lock:
            # shards hold no whole weights to look at
            if (force or self.model_mark.differences()) and not self.sharded:
                self._find_out()

    def __repr__(self) -> str:
        dtype = str(self.model.dtype).removeprefix("torch.")
        return (
            f"Target({type(self.model).__name__}, {len(self.reader.layers)} layers of width {self.config.hidden_size}, "
            f"{self.vocab_size} tokens, {dtype} on {self.device}{self._name_adapter()})"
        )

    def describe(self) -> str:
        """Return how this target reads trees, as logs and result files name it; find that out if it is not known."""
        self.refresh()
        with self.lock:
            self.reader.check(rows=2)
        facts = [self.reader.describe()]
        if self.reader.reads_rows is False:
            facts.append("one text at a time")
        packed = count_packed(self.model)
        if packed:
            facts.append(f"{packed} linears are packed")
        if self.reader.follows_steps:
            facts.append("the truth is its own steps by one token")
        if self.model.dtype in HALF:
            facts.append(self.variance() or "the same bits in steps, chunks, trees and batches")
        return "; ".join(facts) + self._name_adapter()

    def variance(self) -> str | None:
        """Return what changes the bits of a token's logits, so that a near-tie may flip; None if nothing is known.

        In half precision it is tried once: the same tokens are read step by step, in chunks, in a tree and in a batch.
        """
        self.refresh()
        # fp32 rounds too little to flip more than exact ties
        if self.model.dtype not in HALF:
            return None
        with self.lock:
            if self.found_variance is None:
                self.reader.check(rows=2)
                # a short trial may not meet kernels that choose the order of their sums
                keeps_bits = self.reader.mode.keeps_bits
                # the trial passes, and longer texts were seen to differ
                if self.device.type == "cpu" and self.model.dtype == torch.float16:
                    keeps_bits = keeps_bits and sums_rows_alike(torch.float16)
                if self.reader.count_attending() and not keeps_bits:
                    self.found_variance = "its kernels sum in an order of their own"
                else:
                    self.found_variance = find_variance(self) or ""
            return self.found_variance or None

    def _name_adapter(self) -> str:
        return "" if self.adapter is None else f"; with the adapter {self.adapter}"

    def __reduce__(self) -> Any:
        """Copy without locks and open texts, which cannot be copied."""
        return (
            Target,
            (self.model, self.tokenizer, self.processor, self.invariant),
            {"adapter": self.adapter},
        )

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        dtype: str | torch.dtype = "auto",
        device: str = "auto",
        device_map: str | dict[str, Any] | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        adapter: str | None = None,
        packed: bool | None = None,
        images: bool = False,
        invariant: bool | None = None,
    ) -> Target:
        """Load a target from a folder or a hub id.

        Args:
            path: the folder, the id, or a GGUF file: one on disk, or `owner/name:file.gguf` of the hub.
            dtype: of the weights; "auto" is bf16 where the device multiplies in it.
            device: where it runs.
            device_map: as in transformers' `from_pretrained`.
            revision: of a hub id.
            trust_remote_code: whether code of the model's repository may run.
            adapter: a folder or a hub id of an adapter, which is merged.
            packed: hold the weights of linears on a CPU in a layout that is faster to read; by default in bf16 alone,
                as in fp32 forwards of one token are then slower.
            images: load the class that sees where the model's type has one for text alone, too.
            invariant: read in bf16 and fp16 so that the bits of a token's logits depend on neither the number of tokens
                in a forward nor the others of a batch; only then drafted output equals plain decoding token by token.
                By default on a CPU. It costs most after long contexts (docs/lossless.md); fp32 needs none of it.

        Returns:
            The target, with its tokenizer and its image processor if there are any.
        """
        if not isinstance(path, (str, Path)) or not str(path):
            raise ValueError(
                f"Target.load got the path {path!r:.60}, expected a folder of save_pretrained or a hub id"
            )
        device = check_device(device)
        dtype = fastest_dtype(device) if dtype == "auto" else parse_dtype(dtype)
        source = {"revision": revision, "trust_remote_code": trust_remote_code}
        model = load_model(
            path,
            dtype,
            adapter,
            device=device,
            images=images,
            device_map=device_map,
            **source,
        )
        # quantised weights are where and what the loader made them
        if device_map is None and not getattr(model, "is_quantized", False):
            # some models keep modules in fp32 on purpose
            if not (model._keep_in_fp32_modules or model._keep_in_fp32_modules_strict):
                model = in_dtype(model, dtype)
            model = model.to(device)
        _pack_weights(model, packed)
        tokenizer = tokenizer_of(path, **source)
        processor = processor_of(path, model, **source)
        return cls(model, tokenizer, processor, invariant)

    # the name that users of transformers look for
    from_pretrained = load

    def with_adapter(self, path: str | Path) -> Target:
        """Return a target that reads with a LoRA or DoRA adapter over this target's weights, which stay as they are.

        Any number of them share the weights. Each keeps its own sequences, so they decode in any order, also this one.
        """
        if self.sharded:
            raise ValueError(
                f"the target is sharded: got the adapter {path} for weights that no process holds whole, expected it "
                "before that: Target.load(.., adapter=..) merges it"
            )
        adapted_model = adapt_model(self.model, self.config, path)
        adapted = Target(adapted_model, self.tokenizer, self.processor, self.invariant)
        adapted.adapter = str(path) if self.adapter is None else f"{path} over {self.adapter}"
        return adapted

    def shard(self) -> Target:
        """Shard this target's layers over the devices of all processes, which must then run its forwards together."""
        if not dist.is_initialized():  # one process
            return self
        # packed weights have no plain memory to split
        unpack_model(self.model)
        self.device = torch.device(best_device())
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        for layer in self.layers:  # one at a time moves to the device, where only its shard stays
            fully_shard(layer, mesh=mesh)
        for model in (self.reader.model, self.model):  # they share weights, but not buffers
            model.to(self.device)
        self.sharded = True
        return self

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers as this target runs them, with the model's weights and their own hooks."""
        self.refresh()  # else a hook on them would be lost with them
        return self.reader.layers

    def view(self) -> TargetView:
        """Return the target's layers, for a drafter that runs them."""
        self.refresh()
        if self.viewed is None:
            self.viewed = TargetView(self)
        return self.viewed

    def tensor(self, name: str) -> Tensor:
        """Return one of the model's tensors by its name, for heads that copy target weights.

        Tensors of a multi-token prediction layer, which transformers does not load, are read from the model's files.
        """
        tensor = find_tensor(self.model, name)
        if tensor is None:
            tensor = read_spare_tensor(self.model, name)
        if tensor is None:
            known = ", ".join([parameter for parameter, _ in self.model.named_parameters()][:3])
            raise ValueError(
                f"{self.config.model_type} has no tensor {name}: expected one as {known}"
            )
        return to_plain(tensor.detach())

    @property
    def masks(self) -> Masks:
        """The attention masks of tree forwards."""
        return self.reader.masks

    @property
    def max_positions(self) -> int | None:
        """The model's number of positions, None if its config names none."""
        return getattr(self.config, "max_position_embeddings", None)

    def open(self, taps: tuple[int, ...] = (), max_tokens: int | None = None) -> TargetState:
        """Return a state for any number of sequences to decode, independent of other open states.

        It may reuse the sequence that was `close`d last, so that a shared prefix is not read again.

        Args:
            taps: the layer inputs that it hands out.
            max_tokens: the most that its cache may hold, in columns times rows; None: no limit.
        """
        self.refresh()
        # taken under the lock, for another thread may open one too
        with self.lock:
            spare = self.spare
            self.spare = None
        mark = self.weight_mark.read()
        if spare is not None and spare.taps == taps and max_tokens is None and spare.mark == mark:
            return spare
        return TargetState(self, taps, max_tokens, mark)

    def close(self, state: TargetState) -> None:
        """Close a state; the sequence of one with a single row is kept for the next one, while the weights stay."""
        state.clear()
        is_current = state.reader is self.reader
        # without a mark nobody can tell whether the weights have changed since
        if (
            is_current
            and len(state.sequences) == 1
            and state.max_tokens is None
            and state.mark is not None
        ):
            self.spare = state

    def forget(self) -> None:
        """Drop the sequence kept from the last closed state.

        Changed weights drop it by themselves, except changes through `weight.data`, which leave no trace.
        """
        self.spare = None

    def cache_bytes(
        self,
        tokens: int,
        taps: tuple[int, ...] = (),
        drafter: Drafter | None = None,
        texts: int = 1,
    ) -> int:
        """Return the bytes of a cache with this many tokens, and of what a drafter keeps of them.

        Args:
            tokens: as `max_tokens_in_cache`.
            taps: the tapped layer inputs; without them they are the drafter's.
            drafter: the drafter; None for none.
            texts: the number of sequences that share the tokens; a drafter may keep only the end of a long one.
        """
        texts = positive_int("texts", texts)
        if drafter is not None:
            taps = taps or drafter.taps
        # one token allocates the buffers, whose columns are counted
        state = TargetState(self, taps)
        state.begin([0], Choose(Sampling()))
        column = state.cache.column_bytes
        tapped = state.cache.tapped.tensor
        length = -(-tokens // texts)
        total = tokens * column + texts * self._state_bytes(state, length)
        if drafter is not None:
            tap_bytes = tapped.shape[3] * tapped.element_size()
            keys_values = column - tapped.shape[1] * tap_bytes
            total += texts * drafter.kept_bytes(length, ColumnBytes(keys_values, tap_bytes))
        return total

    def _state_bytes(self, state: TargetState, tokens: int) -> int:
        """Return the bytes of the states that are held of a sequence.

        A model that reads as a whole keeps its own cache as a state, which grows.
        """
        if state.cache.states is None:
            return 0
        # a state that grows by the token shows in two lengths
        sizes = []
        for length in (1, 5):
            state.begin([0] * length, Choose(Sampling()))
            sizes.append(state.cache.states.state_bytes(0))
        by_token = (sizes[1] - sizes[0]) // 4
        return count_states(tokens) * (sizes[0] + by_token * (tokens - 1))

    def is_alone(self, length: int) -> bool:
        """Return whether a sequence of this length must be read alone, or its positions or masks would be wrong."""
        return length > self.border or self.reader.reads_rows is False

    def room(self, prompt: list[int]) -> int:
        """Return how many tokens may follow a prompt before the last position or a switch of rotary frequencies."""
        end = self.max_positions or sys.maxsize
        # the last token is not read
        if len(prompt) <= self.border < sys.maxsize:
            end = min(end, int(self.border) + 1)
        return max(end - len(prompt), 0)

    def check_growth(self, start: int, end: int) -> None:
        """Refuse a sequence that grows from `start` tokens to `end` across a switch of rotary frequencies."""
        # one set of frequencies must read the whole sequence
        if 0 < start <= self.border < end:
            raise ValueError(
                f"{self.config.model_type} reads texts of more than {self.border} tokens with other rotary frequencies "
                f"throughout, and so cannot grow from {start} tokens to {end}: keep prompt and max_new_tokens within "
                f"{self.border} together, or begin with a prompt that is longer than that"
            )

    @torch.no_grad()
    def features(
        self,
        tokens: Tensor,
        taps: tuple[int, ...],
        dtype: torch.dtype | None = None,
        media: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """Read sequences by one plain forward without a cache.

        Args:
            tokens: [B, T], right-padded.
            taps: L layer inputs.
            dtype: of the states; None: the model's.
            media: what a processor gave except the tokens of a single sequence with images.

        Returns:
            [B, T, L, D], the tapped states.
        """
        self.refresh()
        self.check_taps(taps)
        self.check_images(tokens, media)
        with self.lock, self.reader.tapping(taps) as tapped:
            tapped[-1] = self.reader.read_texts(tokens, media)
        return torch.stack([tapped[tap].to(self.device, dtype) for tap in taps], dim=2)

    def width_of(self, taps: tuple[int, ...]) -> int:
        """Return the width of the states at these taps."""
        self.check_taps(taps)
        return self.reader.layouts[taps[0]].width

    def check_taps(self, taps: tuple[int, ...]) -> None:
        """Refuse taps that are not layer inputs of this target."""
        refuse_taps(taps, len(self.reader.layers), self.reader.layouts, self.config.model_type)


def _pack_weights(model: Any, packed: bool | None) -> None:
    """Pack a model's weights if `packed` is True, or if it is None and they are faster so.

    Raises:
        ValueError: if it is True, and none can be packed.
    """
    packs = packed
    if packs is None:
        packs = model.dtype == fastest_dtype("cpu") == torch.bfloat16
    if packs and not pack_model(model) and packed:
        raise ValueError(
            f"packed is True, and none of {type(model).__name__}'s weights can be packed: got {model.dtype} on "
            f"{model.device}, expected large linear layers in float32 or bfloat16 on a CPU for which torch has "
            "oneDNN, read through their forward alone: leave packed out"
        )
