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
from eagle.target.trees.sequence_states import count_states
from eagle.target.view import TargetView
from eagle.target.weights.dense import borrowed_layers, find_tensor
from eagle.target.weights.packed import count_packed, pack_model, to_plain, unpack_model
from eagle.target.weights.weight_mark import ModelMark, WeightMark


class Target(ChatMixin):
    """A causal language model that can verify draft trees."""

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
            processor: its processor for images.
            invariant: in bf16 and fp16, read so that a token's bits do not depend on what is read with it; None: if it
                runs on a CPU.
        """
        self.model = check_model(model).eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.processor = processor
        self.invariant = invariant
        self.config = self.model.config.get_text_config()
        self.lock = RLock()  # held during forwards, which change hooks and buffers of the layers
        self.sharded = False
        # the adapter of `with_adapter`, whose target shares its weights with another one
        self.adapter: str | None = None
        # how often private random numbers were used, by seed and request
        self.draws = Counter[tuple[int, int]]()
        self._find_out()

    def _find_out(self) -> None:
        """Make the reader and the head for the model as it is now, and mark the model to notice later changes.

        The reader runs the model over draft trees. The head is the target's embedding and LM head, as drafters borrow
        them.
        """
        model = self.model
        # both with plain matrices, as draft heads borrow them: copies where the model's own are quantised, say
        embedding, output = borrowed_layers(model)
        self.device = device_of(embedding)
        settle_weights(model, self.device)
        # whether bits must not depend on what is read together, as in `load`; by default on a CPU
        wants_invariant = self.invariant
        if wants_invariant is None:
            wants_invariant = self.device.type == "cpu"
        # runs the model under tree masks, through a second set of modules over the same weights
        self.reader = TreeReader(model, self.config, invariant=wants_invariant)
        # the LM head's rows, which may be more than the tokenizer's entries
        self.vocab_size = output.get_parameter("weight").shape[0]
        # a first forward shows the shapes of the layers' inputs, and which attributes the model sets by itself: those
        # are no changes by the user
        tokens = torch.arange(1, 5, device=self.device)[None] % self.vocab_size
        reader_mark = ModelMark(self.reader.model, self.config, hooked=set())
        with torch.no_grad():
            # by tap, a layer's index or -1 for the LM head's input: the states [T, D] of the only sequence
            states = {tap: rows[0] for tap, rows in self.reader.find_layouts(tokens).items()}
        volatile = reader_mark.differences()
        self.head = borrow_head(
            model,
            (embedding, output),
            tokens,
            first=states.get(0),
            last=states[-1],
        )
        # a length in tokens that no sequence may grow across, as beyond it a longrope model reads all of its tokens
        # with other rotary frequencies; infinite for other models
        self.border = rope_border(self.config)
        self.viewed: TargetView | None = None  # made at the first call of `view`
        self.found_variance: str | None = None  # of `variance`; None: not tried yet, "": none found
        # the last closed state, whose cache the next one may reuse
        self.spare: TargetState | None = None
        # drafters that calls gave by name: the LM head they borrow, when their weights were written, and themselves
        self.named_drafters: dict[str, tuple[Any, int | None, Any]] = {}
        self.weight_mark = WeightMark(model)
        self.model_mark = ModelMark(model, self.config, self.reader.hooked, volatile)

    def refresh(self, *, force: bool = False) -> None:
        """Make the reader again if the model was changed: by an adapter, a hook, a module or a value of its config.

        The reader runs the model over draft trees. Every call that opens or reads a sequence does so first. Open states
        keep the reader that they began with.

        Args:
            force: make it again even if no change is seen, as of a change within an object that an attribute holds.
        """
        with self.lock:
            # a sharded model cannot be read again: no process holds its weights whole
            if (force or self.model_mark.differences()) and not self.sharded:
                self._find_out()

    def __repr__(self) -> str:
        # for example "Target(LlamaForCausalLM, 16 layers of width 2048, 128256 tokens, bfloat16 on cuda:0)"
        dtype = str(self.model.dtype).removeprefix("torch.")
        return (
            f"Target({type(self.model).__name__}, {len(self.reader.layers)} layers of width {self.config.hidden_size}, "
            f"{self.vocab_size} tokens, {dtype} on {self.device}{self._name_adapter()})"
        )

    def describe(self) -> str:
        """Return in words how this target reads draft trees, for logs and result files.

        The first call finds out by trials, which later calls do not repeat.
        """
        self.refresh()
        with self.lock:
            # two rows, so that batches are tried too
            self.reader.check(rows=2)
        facts = [self.reader.describe()]
        # a batch changed the states of its sequences in the trial
        if self.reader.reads_rows is False:
            facts.append("one sequence at a time")
        packed = count_packed(self.model)
        if packed:
            facts.append(f"{packed} linears are packed")
        # the model's steps by one token differ from its forward over a sequence, and trees were compared with the steps
        if self.reader.follows_steps:
            facts.append("the truth is its own steps by one token")
        if self.model.dtype in HALF:
            facts.append(self.variance() or "the same bits in steps, chunks, trees and batches")
        return "; ".join(facts) + self._name_adapter()

    def variance(self) -> str | None:
        """Return in words what changes the bits of a token's logits; None if nothing is known to change them.

        If they change, drafted output may differ from plain decoding where two tokens are nearly tied. In half
        precision the first call finds out by a trial, and later calls return the same: the same tokens are read step by
        step, in chunks, in a tree and in a batch.
        """
        self.refresh()
        # fp32 rounds too little to flip more than exact ties
        if self.model.dtype not in HALF:
            return None
        with self.lock:
            if self.found_variance is None:
                # chooses the reader's mode, if that was not done, and tries batches too
                self.reader.check(rows=2)
                # only a mode that keeps bits fixes the order of the sums in attention; in all others the kernels choose
                # it, which the short trial may not show
                keeps_bits = self.reader.mode.keeps_bits
                # in fp16 on a CPU the trial passes, but longer sequences were seen to differ
                if self.device.type == "cpu" and self.model.dtype == torch.float16:
                    keeps_bits = keeps_bits and sums_rows_alike(torch.float16)
                if self.reader.count_attending() and not keeps_bits:
                    self.found_variance = "its kernels sum in an order of their own"
                else:
                    # "" keeps the result that nothing was found, so that the trial is not repeated
                    self.found_variance = find_variance(self) or ""
            return self.found_variance or None

    def _name_adapter(self) -> str:
        """Return the name of this target's LoRA adapter as the end of a sentence about it; "" without one."""
        return "" if self.adapter is None else f"; with the adapter {self.adapter}"

    def __reduce__(self) -> Any:
        """Copy or pickle the model and its settings alone: locks and open states cannot be copied."""
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
            path: the folder, the id, or a GGUF file (a path, or `owner/name:file.gguf` for one on the hub).
            dtype: dtype of the weights; "auto" is bf16 if the device supports it.
            device: device of the model.
            device_map: as in transformers' `from_pretrained`.
            revision: branch, tag or commit of a hub id.
            trust_remote_code: whether code from the model's repository may run.
            adapter: a folder or a hub id of a LoRA adapter, which is merged into the model.
            packed: store the weights on a CPU in a layout for faster verification. By default only in bf16, because
                in fp32, forward passes over one token get slower.
            images: load the class with vision, for models that also have a text-only class.
            invariant: in bf16 and fp16, use batch-invariant kernels, with which the output is exactly that of plain
                decoding. This is the default on a CPU. It makes forward passes slower (docs/lossless.md). In fp32, it
                is not needed.

        Returns:
            The target, with its tokenizer and its image processor, if it has one.
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
        # quantised weights stay on the device and in the dtype that the loader gave them
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
        """Return a target that shares this target's weights and applies a LoRA or DoRA adapter to them.

        Any number of such targets can share the weights. They and this target may decode in turns.

        Args:
            path: a folder or a hub id of the adapter.
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
        # with one process there is nothing to shard
        if not dist.is_initialized():
            return self
        # a packed weight cannot be split, as its memory is in another library's layout
        unpack_model(self.model)
        self.device = torch.device(best_device())
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        # one layer at a time moves to the device, where only its shard stays
        for layer in self.layers:
            fully_shard(layer, mesh=mesh)
        # both module trees share weights, but not buffers
        for model in (self.reader.model, self.model):
            model.to(self.device)
        self.sharded = True
        return self

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers as this target runs them, with the model's weights and their own hooks.

        A hook is a function that torch calls around a layer's forward.
        """
        self.refresh()  # the layers of an outdated reader would be dropped, and hooks on them lost
        return self.reader.layers

    def view(self) -> TargetView:
        """Return the target's layers, for a drafter that runs some of them with a cache of its own; made once."""
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
            # three names, as an example of how they look
            known = ", ".join([parameter for parameter, _ in self.model.named_parameters()][:3])
            raise ValueError(
                f"{self.config.model_type} has no tensor {name}: expected one as {known}"
            )
        return to_plain(tensor.detach())

    @property
    def masks(self) -> Masks:
        """What makes the attention masks of forwards over trees."""
        return self.reader.masks

    @property
    def max_positions(self) -> int | None:
        """The greatest length of a sequence in tokens, None if the model's config names none."""
        return getattr(self.config, "max_position_embeddings", None)

    def open(self, taps: tuple[int, ...] = (), max_tokens: int | None = None) -> TargetState:
        """Return a state (tokens and KV cache) for any number of sequences to decode, independent of other open states.

        It may reuse the sequence that was `close`d last, so that a shared prefix is not read again.

        Args:
            taps: indices of the layers whose inputs it returns with the logits; -1 is the LM head's input.
            max_tokens: the most that its cache may hold, in columns (one token each) times rows (one sequence each);
                None: no limit.
        """
        self.refresh()
        # the spare state is taken under the lock, as another thread may open one too
        with self.lock:
            spare = self.spare
            self.spare = None
        # differs once weights have changed, and then the cached states are wrong
        mark = self.weight_mark.read()
        if spare is not None and spare.taps == taps and max_tokens is None and spare.mark == mark:
            return spare
        return TargetState(self, taps, max_tokens, mark)

    def close(self, state: TargetState) -> None:
        """Release a state's rows (sequences), and keep the state as the spare that the next `open` may return.

        The next prompt then reuses the cache of the prefix that it shares with the state's last sequence. That is so
        for a state of a single row without a limit, as long as the weights do not change.
        """
        # the tokens and the cache of the last sequence stay: `clear` only gives up the rows
        state.clear()
        # a change of the model may have given the target another reader since the state was opened
        is_current = state.reader is self.reader
        # the mark (`WeightMark`) tells whether weights have changed since; it is None where that cannot be seen
        if (
            is_current
            and len(state.sequences) == 1
            and state.max_tokens is None
            and state.mark is not None
        ):
            self.spare = state

    def forget(self) -> None:
        """Drop the KV cache that the target keeps for the next prompt.

        Call this after you change weights through `weight.data`. Other changes of weights are detected.
        """
        self.spare = None

    def cache_bytes(
        self,
        tokens: int,
        taps: tuple[int, ...] = (),
        drafter: Drafter | None = None,
        sequences: int = 1,
    ) -> int:
        """Return the bytes of a KV cache with this many tokens, and of a drafter's own state for them, as a forecast.

        Args:
            tokens: as `max_tokens_in_cache`.
            taps: indices of the layers whose inputs are kept for each token; (): those that the drafter reads.
            drafter: the drafter; None for none.
            sequences: the number of sequences that share the tokens; a drafter may keep only the end of a long one.
        """
        sequences = positive_int("sequences", sequences)
        if drafter is not None:
            taps = taps or drafter.taps
        # reading one token allocates the buffers, which show the bytes of a column (all that is cached for one token)
        state = TargetState(self, taps)
        state.begin([0], Choose(Sampling()))
        column = state.cache.column_bytes
        tapped = state.cache.tapped.tensor  # [rows, taps, columns, D], the tapped states
        # tokens of each sequence, rounded up
        length = -(-tokens // sequences)
        total = tokens * column + sequences * self._state_bytes(state, length)
        if drafter is not None:
            # of one tap at one token; the rest of a column is keys and values
            tap_bytes = tapped.shape[3] * tapped.element_size()
            keys_values = column - tapped.shape[1] * tap_bytes
            total += sequences * drafter.kept_bytes(length, ColumnBytes(keys_values, tap_bytes))
        return total

    def _state_bytes(self, state: TargetState, tokens: int) -> int:
        """Return the bytes of the recurrent states that are held for a sequence of this many tokens, 0 without states.

        States of most layers have a fixed size. A model that is run as a whole has its own cache as its state, which
        grows with the sequence.

        Args:
            state: one to measure with; its sequence is overwritten.
            tokens: the length of the sequence.
        """
        if state.cache.states is None:
            return 0
        # measured after 1 and after 5 arbitrary tokens, to see by how much a state grows with each token
        sizes = []
        for length in (1, 5):
            state.begin([0] * length, Choose(Sampling()))
            # of the only sequence, which lies in cache row 0
            sizes.append(state.cache.states.state_bytes(0))
        by_token = (sizes[1] - sizes[0]) // 4
        # states are kept at several lengths of the sequence; all are counted with the size of the last, the largest
        return count_states(tokens) * (sizes[0] + by_token * (tokens - 1))

    def is_alone(self, length: int) -> bool:
        """Return whether a sequence of this length must be read alone, as a batch would make its states wrong.

        A longrope model reads sequences of more than `border` tokens with other rotary frequencies, and the longest
        sequence of a batch decides those of all. For other models a trial has told whether batches are right.
        """
        # `reads_rows` is None before the trial, which runs when a second row is admitted
        return length > self.border or self.reader.reads_rows is False

    def room(self, prompt: list[int]) -> int:
        """Return how many tokens may follow a prompt before the model's last position or its border.

        The border is the length beyond which a longrope model changes its rotary frequencies. A prompt that is longer
        than the border is not limited by it.
        """
        end = self.max_positions or sys.maxsize
        # one more than the border, as the last token is not read
        if len(prompt) <= self.border < sys.maxsize:
            end = min(end, int(self.border) + 1)
        return max(end - len(prompt), 0)

    def check_growth(self, start: int, end: int) -> None:
        """Refuse a sequence that grows from `start` tokens to `end` across longrope's border.

        Beyond it a model reads the whole sequence with other rotary frequencies, so that cached keys would be wrong.
        """
        # a sequence that starts at 0 has no cached keys, and one that starts beyond the border has the right ones
        if 0 < start <= self.border < end:
            raise ValueError(
                f"{self.config.model_type} reads sequences of more than {self.border} tokens with other rotary "
                f"frequencies throughout, and so cannot grow from {start} tokens to {end}: keep prompt and "
                f"max_new_tokens within {self.border} together, or begin with a prompt that is longer than that"
            )

    @torch.no_grad()
    def features(
        self,
        tokens: Tensor,
        taps: tuple[int, ...],
        dtype: torch.dtype | None = None,
        media: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """Return the hidden states from which a head learns, in one forward pass over whole sequences.

        Args:
            tokens: [B, T], B sequences of up to T tokens, right-padded.
            taps: indices of L layers whose inputs are returned; -1 is the LM head's input.
            dtype: dtype of the states; by default the model's.
            media: for a single sequence with images, the processor's output without the tokens.

        Returns:
            [B, T, L, D], the tapped states.
        """
        self.refresh()
        self.check_taps(taps)
        self.check_images(tokens, media)
        # the context fills the dict for layers; the output is the LM head's input
        with self.lock, self.reader.tapping(taps) as tapped:
            tapped[-1] = self.reader.read_sequences(tokens, media)
        return torch.stack([tapped[tap].to(self.device, dtype) for tap in taps], dim=2)

    def width_of(self, taps: tuple[int, ...]) -> int:
        """Return the width of the states at these taps (layer indices, or -1 for the LM head's input).

        All must have the same width: taps of different widths are refused.
        """
        self.check_taps(taps)
        return self.reader.layouts[taps[0]].width

    def check_taps(self, taps: tuple[int, ...]) -> None:
        """Refuse taps that are neither layer indices nor -1 (the LM head's input), or whose states differ in width."""
        refuse_taps(taps, len(self.reader.layers), self.reader.layouts, self.config.model_type)


def _pack_weights(model: Any, packed: bool | None) -> None:
    """Store a model's weights in oneDNN's layout, in which a CPU multiplies faster.

    Args:
        model: the model, which is changed in place.
        packed: True: pack. False: do not. None: pack a model in bf16 on a CPU that multiplies in bf16.

    Raises:
        ValueError: if `packed` is True, and no weight can be packed.
    """
    packs = packed
    # fp32 forwards of one token are slower over packed weights, so only bf16 is packed by default
    if packs is None:
        packs = model.dtype == fastest_dtype("cpu") == torch.bfloat16
    if packs and not pack_model(model) and packed:
        raise ValueError(
            f"packed is True, and none of {type(model).__name__}'s weights can be packed: got {model.dtype} on "
            f"{model.device}, expected large linear layers in float32 or bfloat16 on a CPU for which torch has "
            "oneDNN, read through their forward alone: leave packed out"
        )
