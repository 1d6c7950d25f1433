"""What a run of training steps holds and computes, counted on tensors without numbers: it takes no memory.

Torch documents no way to run without numbers, to see every operation or to look up its formula of an operation's FLOPs.
What is taken from its inner modules for that is imported here alone (`INNER`), and a test tells what torch has moved.
"""

# N tokens of all texts, S supervised slots, h heads of queries, k of keys, w width of a head

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
from eagle.drafters.parts.spans import Own, Spans, attend_flex

INNER = (FakeTensor, FakeTensorMode, unset_fake_temporarily, TorchDispatchMode, tree_leaves, flop_registry, AuxOutput)


class Footprint(TorchDispatchMode):
    """Tensors made under it have no numbers. Counts their bytes as long as anything holds them, and FLOPs."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.held = self.most = 0
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.known = WeakIdKeyDictionary()

    def __enter__(self) -> Footprint:
        self.fake.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.fake.__exit__(*error)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Computes sizes alone, and counts by torch's own formulas, which see what autograd functions compute too."""
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if given and not any(isinstance(tensor, FakeTensor) for tensor in given):
            with unset_fake_temporarily():  # masks on the host, which decide shapes
                return function(*args, **(kwargs or {}))
        if function is torch.ops.aten._local_scalar_dense.default:
            return True  # there is no number to ask; transformers asks whether all texts are whole, which they are
        output = function(*args, **(kwargs or {}))
        if formula := flop_registry.get(function.overloadpacket):
            self.flops += formula(*args, **(kwargs or {}), out_val=output)
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage()) not in self.known:
                self.known[storage] = True
                self._hold(storage.nbytes())
                weakref.finalize(storage, self._hold, -storage.nbytes())
        return output

    def _hold(self, count: int) -> None:
        self.held += count
        self.most = max(self.most, self.held)

    @contextmanager
    def on_accelerator(self) -> Iterator[Footprint]:
        """Tensors on the CPU, which autocast knows, are worked on in an accelerator's chunks, by its attention."""
        with large_chunks(), changed(spans.ATTEND, cpu=self.attend), changed(block_spans.ATTEND, cpu=self.attend_block):
            with self:
                yield self

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spans: Spans, own: Own = ()) -> Tensor:
        """The fused attention of accelerators, of whose kernel only the sizes are known."""
        self._count_pairs(query, spans)
        return attend_flex(query, key, value, spans, own, _kernel)

    def attend_block(
        self, query: Tensor, key: Tensor, value: Tensor, spans: Spans, own: Pair, *, causal: bool
    ) -> Tensor:
        """That of blocks, each token of which is a query of its own."""
        self._count_pairs(query.flatten(2), spans)
        return attend_block_flex(query, key, value, spans, own, causal=causal, kernel=_kernel)

    def _count_pairs(self, query: Tensor, spans: Spans) -> None:
        """The products of queries [h, S, w] with all that they see of their texts."""
        most = None if spans.window is None else spans.window.sinks + spans.window.recent
        runs = spans.split_runs(max(len(spans.rows), 1))
        seen = [row - begin + 1 for begin, rows in runs for row in rows]
        pairs = sum(seen) if most is None else sum(min(count, most) for count in seen)
        products = 7 if query.requires_grad else 2  # the backward pass makes five, one of them for the second time
        self.flops += products * 2 * query.shape[0] * query.shape[2] * pairs


@contextmanager
def large_chunks() -> Iterator[None]:
    """The chunks of logits that accelerators work on, for tensors on the CPU too."""
    with changed(objectives.LOGITS, cpu=None), changed(objectives.AT_ONCE, cpu=None):
        yield


@contextmanager
def changed(table: dict[str, Any], **entries: Any) -> Iterator[None]:
    """A table of this project's, by type of device, with other entries while this lasts; None takes one out."""
    before = dict(table)
    try:
        for device, entry in entries.items():
            table.pop(device)
            table.update({} if entry is None else {device: entry})
        yield
    finally:
        table.clear()
        table.update(before)


def _kernel(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> tuple[Tensor, Any]:
    output, lse = _Sizes.apply(query, key, value)
    return output, AuxOutput(lse=lse)


class _Sizes(torch.autograd.Function):
    """The tensors that the kernel of fused attention makes and keeps."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        output, lse = torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, lse)
        return output, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        query, key, value, _, lse = ctx.saved_tensors
        torch.empty_like(lse)  # of each row, how far its output follows its gradient
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class EmptyRun:
    """A head in training as `eagle.training.train` does it, all of it made under the footprint that is active."""

    def __init__(self, head: TrainableDrafter, config: Any, dtype: torch.dtype) -> None:
        self.dtype, self.frozen = dtype, empty_target_head(config, dtype)
        self.head = type(head)(head.settings, head.shape).train()
        for part, weight in zip(self.head.parameters(), head.parameters(), strict=True):
            part.requires_grad_(weight.requires_grad)
        self.learned = [weight for weight in self.head.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(self.learned, fused=True)

    def batch(self, lengths: Sequence[int], supervised: float) -> Batch:
        """Texts of these lengths, so much of each supervised, at its end."""
        taps = tuple(dict.fromkeys((*self.head.taps, *self.head.teacher_taps)))
        tokens = torch.zeros(sum(lengths), dtype=torch.long)
        features = torch.zeros(sum(lengths), len(taps), self.frozen.weight.shape[1], dtype=self.dtype)
        with unset_fake_temporarily():
            masks = [torch.arange(length) >= 2 + round((length - 2) * (1 - supervised)) for length in lengths]
            mask = torch.cat(masks)
        return Batch(tokens, mask, features, tuple(lengths), taps, tuple(range(len(lengths))))

    def step(self, lengths: Sequence[int], supervised: float, parts: int = 1) -> None:
        """Forward and backward of each part, clip by norm, update."""
        for _ in range(parts):
            self.losses(self.batch(lengths, supervised))["total"].backward()
        norm = nn.utils.clip_grad_norm_(self.learned, 1.0)
        self.optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
        self.optimizer.step()
        self.optimizer.zero_grad()

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """One forward, in the precision of the run."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            return self.head(batch, self.frozen)

    @torch.no_grad()
    def validate(self, lengths: Sequence[int], supervised: float, trees: dict[str, Paths]) -> None:
        """Held-out texts between two steps."""
        batch = self.batch(lengths, supervised)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            self.head.validate(batch, self.frozen, trees)


def empty_target_head(config: Any, dtype: torch.dtype) -> TargetHead:
    """The tensors that a head borrows."""
    embedding = nn.Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
    output = nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype)
    if config.tie_word_embeddings:
        output.weight = embedding.weight
    return TargetHead(embedding.requires_grad_(False), output.requires_grad_(False))
