"""Count the memory and FLOPs of training steps on tensors without values, which take no memory.

Torch documents no way to run without values, to see every operation, or to look up the formula of its FLOPs.
Only this module imports what it takes from torch's private modules for that (`INNER`); a test names what torch moves.
"""

# S supervised positions, h query heads, w width of a head

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.nn.attention.flex_attention import AuxOutput
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from eagle.core.drafter import TargetHead, TrainableDrafter
from eagle.core.examples import Batch
from eagle.core.tree import Paths
from eagle.drafters.blocks import block_spans
from eagle.drafters.blocks.block_spans import Pair, attend_block_flex
from eagle.drafters.parts import objectives, spans
from eagle.drafters.parts.spans import Drafted, Spans, StepPairs, attend_flex

INNER = (
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
    TorchDispatchMode,
    tree_leaves,
    flop_registry,
    AuxOutput,
)


class Footprint(TorchDispatchMode):
    """Makes tensors without values, and counts the bytes of those that are alive, their peak, and FLOPs."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.held = 0  # bytes alive now
        self.most = 0  # their peak
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.known = WeakIdKeyDictionary()

    def __enter__(self) -> Footprint:
        self.fake.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.fake.__exit__(*error)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation on fake tensors, and count its FLOPs and the storage that it allocates."""
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if inputs and not any(isinstance(tensor, FakeTensor) for tensor in inputs):
            # Masks on the host need real values, as they decide shapes.
            with unset_fake_temporarily():
                return function(*args, **kwargs)
        if function is torch.ops.aten._local_scalar_dense.default:
            # A fake tensor has no value; transformers asks only whether no sequence is padded, which is true.
            return True
        output = function(*args, **kwargs)
        # Counting here and not by FlopCounterMode includes what autograd functions compute.
        count_flops = flop_registry.get(function.overloadpacket)
        if count_flops:
            self.flops += count_flops(*args, **kwargs, out_val=output)
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                self._watch(tensor.untyped_storage())
        return output

    def _watch(self, storage: torch.UntypedStorage) -> None:
        """Count a storage from now until it is freed; views of one storage count once."""
        if storage in self.known:
            return
        self.known[storage] = True
        self._hold(storage.nbytes())
        weakref.finalize(storage, self._hold, -storage.nbytes())

    def _hold(self, count: int) -> None:
        self.held += count
        self.most = max(self.most, self.held)

    @contextmanager
    def on_accelerator(self) -> Iterator[Footprint]:
        """Compute on the CPU, which autocast supports, in the chunks and with the attention of an accelerator."""
        with (
            large_chunks(),
            changed(spans.ATTEND, cpu=self.attend),
            changed(block_spans.ATTEND, cpu=self.attend_block),
        ):
            with self:
                yield self

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, spans: Spans, step_pairs: StepPairs = ()
    ) -> Tensor:
        """Run the fused attention of accelerators with a kernel that computes sizes only."""
        self._count_pairs(query, spans)
        return attend_flex(query, key, value, spans, step_pairs, kernel=_kernel)

    def attend_block(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        spans: Spans,
        block_pair: Pair,
        *,
        causal: bool,
        drafted: Drafted = 0,
    ) -> Tensor:
        """Run the fused attention of blocks, each token of which is a query, with a kernel that computes sizes only."""
        self._count_pairs(query.flatten(2), spans)
        return attend_block_flex(
            query,
            key,
            value,
            spans,
            block_pair=block_pair,
            causal=causal,
            drafted=drafted,
            kernel=_kernel,
        )

    def _count_pairs(self, query: Tensor, spans: Spans) -> None:
        """Count the FLOPs of queries [h, S, w] that attend to their sequences."""
        window = spans.window
        num_pairs = 0
        for begin, positions in spans.split_runs(max(len(spans.rows), 1)):
            for position in positions:
                num_keys = position - begin + 1
                if window is not None:
                    num_keys = min(num_keys, window.sinks + window.recent)
                num_pairs += num_keys
        # Two products forward; five backward, one of which recomputes the scores.
        num_products = 7 if query.requires_grad else 2
        num_heads = query.shape[0]
        head_dim = query.shape[2]
        self.flops += num_products * 2 * num_heads * head_dim * num_pairs


@contextmanager
def large_chunks() -> Iterator[None]:
    """Let losses on the CPU compute logits in the chunks of an accelerator."""
    with changed(objectives.LOGITS, cpu=None), changed(objectives.AT_ONCE, cpu=None):
        yield


@contextmanager
def changed(table: dict[str, Any], **entries: Any) -> Iterator[None]:
    """Replace entries of a table by type of device for a while; None removes one."""
    original = dict(table)
    try:
        for device, entry in entries.items():
            table.pop(device)
            if entry is not None:
                table[device] = entry
        yield
    finally:
        table.clear()
        table.update(original)


def _kernel(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> tuple[Tensor, Any]:
    output, lse = _Sizes.apply(query, key, value)
    return output, AuxOutput(lse=lse)


class _Sizes(torch.autograd.Function):
    """Allocate the tensors that the kernel of fused attention makes and keeps."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        output = torch.empty_like(query)
        lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, lse)
        return output, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        query, key, value, _, lse = ctx.saved_tensors
        # The kernel also keeps the dot product of output and gradient for each query.
        torch.empty_like(lse)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class EmptyRun:
    """Trains a head as `eagle.training.train` does, with fake tensors of the active footprint."""

    def __init__(self, head: TrainableDrafter, config: Any, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.target_head = empty_target_head(config, dtype)
        self.head = type(head)(head.settings, head.shape).train()
        for copied, weight in zip(self.head.parameters(), head.parameters(), strict=True):
            copied.requires_grad_(weight.requires_grad)
        self.learned = [weight for weight in self.head.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(self.learned, fused=True)

    def batch(self, lengths: Sequence[int], supervised: float) -> Batch:
        """Return sequences of these lengths; the last tokens of each, a share `supervised`, are supervised."""
        num_tokens = sum(lengths)
        taps = tuple(dict.fromkeys((*self.head.taps, *self.head.teacher_taps)))
        tokens = torch.zeros(num_tokens, dtype=torch.long)
        features = torch.zeros(
            num_tokens, len(taps), self.target_head.weight.shape[1], dtype=self.dtype
        )
        masks = []
        # Masks decide shapes, so that they need real values.
        with unset_fake_temporarily():
            for length in lengths:
                # The first token that a head can predict is the third.
                first = 2 + round((length - 2) * (1 - supervised))
                masks.append(torch.arange(length) >= first)
            mask = torch.cat(masks)
        sequence_ids = tuple(range(len(lengths)))
        return Batch(tokens, mask, features, tuple(lengths), taps, sequence_ids)

    def step(self, lengths: Sequence[int], supervised: float, parts: int = 1) -> None:
        """Accumulate the gradients of `parts` micro-batches, clip them by norm, and update the weights."""
        for _ in range(parts):
            self.losses(self.batch(lengths, supervised))["total"].backward()
        norm = nn.utils.clip_grad_norm_(self.learned, 1.0)
        # The fused AdamW reads this attribute to skip a step without waiting for the device.
        self.optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
        self.optimizer.step()
        self.optimizer.zero_grad()

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Return the losses of a batch, computed in the precision of the run."""
        with self._autocast():
            return self.head(batch, self.target_head)

    @torch.no_grad()
    def validate(self, lengths: Sequence[int], supervised: float, trees: dict[str, Paths]) -> None:
        """Validate on held-out sequences between two steps."""
        batch = self.batch(lengths, supervised)
        with self._autocast():
            self.head.validate(batch, self.target_head, trees)

    def _autocast(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == torch.bfloat16)


def empty_target_head(config: Any, dtype: torch.dtype) -> TargetHead:
    """Return the embedding and LM head that a head shares with its target, without values."""
    embedding = nn.Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
    lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype)
    if config.tie_word_embeddings:
        lm_head.weight = embedding.weight
    return TargetHead(embedding.requires_grad_(False), lm_head.requires_grad_(False))
