"""Compute the target's hidden features of examples, with the same code for stored and live features."""

# N rows, T tokens of a text, L taps, D target width

from __future__ import annotations

import errno
import math
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from itertools import accumulate
from time import perf_counter
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eagle.core.drafter import TrainableDrafter
from eagle.core.examples import Example, Shown, lengths_of, run_ahead
from eagle.data.packing import check_width, pack_features
from eagle.data.shard_plan import Plan, make_batches, plan_shards
from eagle.data.shards import ShardWriter
from eagle.data.shared_prefixes import can_read_on, read_on
from eagle.data.store import FeatureStore
from eagle.data.stored_rows import Part, TapRoles, TextSizes, mean_bytes, parts_of, pick_rows, restore_features
from eagle.drafters import DRAFTERS
from eagle.recipe import FeaturesSection
from eagle.target.talk import prepare_media
from eagle.target.taps import find_feature_fault
from eagle.target.target import Target

BATCH_TOKENS = 8192  # tokens of one forward on an accelerator; a CPU is fastest with one text at a time
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
CALIBRATION = 5.0  # seconds


def world() -> tuple[int, int, Callable[[], None]]:
    """This process's index, the number of processes, and a barrier."""
    # without cpu=True each process on a CPU takes itself for the only one; tokenising alone may take hours
    state = PartialState(cpu=not torch.accelerator.is_available(), timeout=timedelta(days=1))
    return state.process_index, state.num_processes, state.wait_for_everyone


def roles_of(settings: Any, target_config: Any) -> TapRoles:
    """The target's layer inputs that a head with these settings reads, by the slots where training needs them."""
    method: type[TrainableDrafter] = DRAFTERS[settings.kind]
    taps = method.taps_for(settings, target_config)
    return TapRoles(method.context_taps(settings, target_config), (*taps, *method.teacher_taps))


def taps_of(settings: Any, target_config: Any) -> tuple[int, ...]:
    """The target's layer inputs that a head with these settings needs to draft and to train."""
    return roles_of(settings, target_config).taps


def compute_rows(
    target: Target,
    texts: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    parts: Sequence[Part],
    dtype: str,
    shared: Sequence[int] | None = None,
    shown: Sequence[Shown | None] = (),
) -> list[tuple[Tensor, ...]]:
    """The packed rows [N, L, ..] of every part, those of one text behind those of another.

    Of the first `shared` tokens of each text, which the text before it has too, no rows are kept at every slot. What is
    `shown` in texts with images is read by forwards of their own.
    """
    taps = tuple(tap for part in parts for tap in part.taps)
    precision = torch.bfloat16 if dtype == "bfloat16" else None
    shared = [0] * len(texts) if shared is None else shared
    if any(shared) and can_read_on(target):
        states = torch.cat(read_on(target, [text.tolist() for text in texts], shared, taps)).to(precision)
        starts = list(accumulate(map(len, texts[:-1]), initial=0))
    elif any(shown):
        pairs = zip(shown, texts, strict=True)
        media = [None if text is None else prepare_media(target.processor, text, tokens) for text, tokens in pairs]
        each = [target.features(one[None], taps, precision, seen)[0] for one, seen in zip(texts, media, strict=True)]
        states, starts = torch.cat(each), list(accumulate(map(len, texts[:-1]), initial=0))
    else:
        features = target.features(pad_sequence(list(texts), batch_first=True), taps, precision)
        states, starts = features.flatten(0, 1), [row * features.shape[1] for row in range(len(texts))]
    return [pack_features(pick_rows(states, starts, taps, part, loss_masks, shared), dtype) for part in parts]


class LiveFeatures:
    """Features computed when they are read, equal to those that `extract` stores; what it leaves out is NaN.

    Each example is read from its beginning: where `extract` reads on from an earlier one, they are equal to rounding.
    """

    sampled = False

    def __init__(
        self, target: Target, examples: Sequence[Example], identity: dict[str, Any], batch_tokens: int | None = None
    ) -> None:
        self.target = target
        self.examples = examples
        self.identity = identity
        self.taps: tuple[int, ...] = tuple(identity["taps"])
        self.dtype: str = identity["dtype"]
        self.parts = parts_of(identity)
        check_width(self.dtype, target.width_of(self.taps))
        self.together = target.sharded
        # with a sharded target all processes must compute equally often: one forward for whatever is read at once
        self.slots = sys.maxsize if self.together else batch_slots(target, batch_tokens)
        check_lengths(target, max(lengths_of(examples)))
        check_causal(target)

    def __len__(self) -> int:
        return len(self.examples)

    def mask(self, index: int) -> Tensor:
        """[T], the loss mask of an example."""
        return self.examples[index].loss_mask

    def text(self, index: int) -> tuple[Tensor, Tensor]:
        """Tokens and loss mask of an example."""
        return self.examples[index].tokens, self.examples[index].loss_mask

    def supervised_tokens(self, index: int) -> Tensor:
        """The supervised tokens of an example."""
        return self.examples[index].tokens[self.examples[index].loss_mask]

    def read(self, indices: Sequence[int]) -> list[Example]:
        """The examples at these indices, with their features."""
        examples = [self.examples[index] for index in indices]
        for batch in make_batches([len(example.tokens) for example in examples], self.slots):
            texts, masks = zip(*((examples[i].tokens, examples[i].loss_mask) for i in batch), strict=True)
            shown = [examples[i].shown for i in batch]
            packed = compute_rows(self.target, texts, masks, self.parts, self.dtype, shown=shown)
            for i, features in zip(batch, restore_features(self.parts, packed, self.taps, masks), strict=True):
                examples[i] = replace(examples[i], features=features)
        return examples


def extract(target: Target, store: FeatureStore, shards: Sequence[int]) -> Iterator[int]:
    """Compute and write these shards, yielding the tokens of each batch; a thread writes while the next is computed."""
    writers: list[ShardWriter] = []

    def write_jobs() -> Iterator[Callable[[], int]]:
        for shard in shards:
            check_room(store, [shard])
            writers.append(writer := store.writer(shard))
            for batch in store.plan[shard]:
                texts, masks = zip(*map(store.text, batch), strict=True)
                shared, shown = store.shared[batch].tolist(), [store.shown(number) for number in batch]
                rows = compute_rows(target, texts, masks, store.parts, store.dtype, shared, shown)
                host, copied = _copy_to_host(rows)
                yield partial(_append, writer, host, copied, sum(map(len, texts)))
            yield writer.close

    try:
        with closing(run_ahead(write_jobs())) as written:
            yield from written
    except OSError as error:
        advice = f"{_describe_room(store)}: make room and" if error.errno in NO_ROOM else "mend that and"
        raise ValueError(
            f"the disk refused a shard in {store.folder}: {error}. What is written stays; {advice} give the same "
            "command again"
        ) from error
    finally:
        for writer in writers:
            writer.discard()


def _append(writer: ShardWriter, host: Sequence[Sequence[Tensor]], copied: Any, tokens: int) -> int:
    """Append a batch's packed rows to a shard; returns its number of tokens."""
    if copied is not None:
        copied.synchronize()
    writer.append(host)
    return tokens


def _copy_to_host(packed: Sequence[Sequence[Tensor]]) -> tuple[Sequence[Sequence[Tensor]], Any]:
    """Copies in host memory, and the CUDA event (None on a CPU) after which they hold their values."""
    if not packed[0][0].is_cuda:
        return [[tensor.cpu() for tensor in tensors] for tensors in packed], None
    host = [[torch.empty(part.shape, dtype=part.dtype, pin_memory=True) for part in tensors] for tensors in packed]
    for copies, sources in zip(host, packed, strict=True):
        for copy, source in zip(copies, sources, strict=True):
            copy.copy_(source, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return host, copied


def batch_slots(target: Target, batch_tokens: int | None) -> int:
    """The number of tokens (padding included) of one forward: the given one, else a default for the device."""
    if (target.device.type == "cpu" and batch_tokens is None) or target.border < math.inf:
        return 1  # a longer text in the batch could change the rotary frequencies of a shorter one
    return batch_tokens or BATCH_TOKENS


def plan_extraction(sizes: TextSizes, target: Target, parts: Sequence[Part], features: FeaturesSection) -> Plan:
    """The batches and shards of a feature store for texts of these sizes."""
    lengths = sizes.tokens.tolist()
    check_lengths(target, max(lengths))
    check_causal(target)
    size = mean_bytes(parts, features.dtype, _width(target, parts), sizes)
    slots, shard_tokens = batch_slots(target, features.batch_tokens), max(int(features.shard_bytes / size), 1)
    return plan_shards(lengths, slots, shard_tokens, sizes.shared.tolist())


def check_lengths(target: Target, longest: int) -> None:
    """Refuse texts longer than the target's number of positions."""
    if target.max_positions is not None and longest > target.max_positions:
        raise ValueError(
            f"the longest text has {longest} tokens, this target has {target.max_positions} positions: "
            f"set data.max_length to at most {target.max_positions}"
        )


def check_causal(target: Target) -> None:
    """Refuse a target whose states at a token depend on later ones.

    A head would learn from the tokens that it is to draft.
    """
    with target.lock:
        fault = find_feature_fault(target.reader)
    if fault:
        raise ValueError(
            f"{target.config.model_type} {fault}: expected a causal model. If this one was trained as one, take a "
            f"newer transformers than {version('transformers')}: old versions forget the mask of some types"
        )


def check_room(store: FeatureStore, shards: Iterable[int] | None = None) -> None:
    """Refuse to write shards, by default all that are absent, that do not fit on the disk."""
    if sum(map(store.shard_bytes, store.absent if shards is None else shards)) > shutil.disk_usage(store.folder).free:
        raise ValueError(
            f"too little room in {store.folder}: {_describe_room(store)}. Use features.dtype=float6, a data.limit, "
            "another features.store, or features.store=null, which computes features while training. Or make room and "
            "give the same command again: whole shards are kept"
        )


def forecast(
    target: Target, examples: Sequence[Example], sizes: TextSizes, plan: Plan, parts: Sequence[Part], dtype: str
) -> str:
    """A line with the tokens, bytes and time of an extraction, measured on a few seconds of it."""
    batches = [batch for shard in plan for batch in shard]
    sample = [batches[i * len(batches) // 64] for i in range(64)]  # from the longest to the shortest
    measured_tokens, start = 0, 0.0
    for batch in [sample[-1], *sample]:
        texts, masks = zip(*((examples[number].tokens, examples[number].loss_mask) for number in batch), strict=True)
        shown = [examples[number].shown for number in batch]
        rows = compute_rows(target, texts, masks, parts, dtype, sizes.shared[batch].tolist(), shown)
        rows[0][0].flatten()[-1:].sum().item()  # waits for the device
        if not start:  # the first forward only warms up
            start = perf_counter()
            continue
        measured_tokens += sum(map(len, texts))
        if perf_counter() - start > CALIBRATION:
            break
    rate = measured_tokens / (perf_counter() - start)
    tokens, shared = int(sizes.tokens.sum()), int(sizes.shared.sum())
    size = mean_bytes(parts, dtype, _width(target, parts), sizes)
    rewritten = f" ({shared:,} of them shared with another example of their conversation)" if shared else ""
    return (
        f"forecast: {tokens:,} tokens{rewritten}, {sum(len(part.taps) for part in parts)} taps in {dtype}: "
        f"{_format_bytes(tokens * size)}, {size:,.0f} bytes a token, in {len(plan)} shards; one process computes "
        f"{rate:,.0f} tokens/s here: {tokens / rate / 60:.1f} min, divided by the number of processes"
    )


def _width(target: Target, parts: Sequence[Part]) -> int:
    return target.width_of(tuple(tap for part in parts for tap in part.taps))


def _describe_room(store: FeatureStore) -> str:
    store.refresh()
    free = shutil.disk_usage(store.folder).free
    missing = sum(map(store.shard_bytes, store.absent))
    return f"{_format_bytes(missing)} are still to come and {_format_bytes(free)} are free"


def _format_bytes(count: float) -> str:
    units = ["bytes", "kB", "MB", "GB", "TB"]
    while count >= 1000 and len(units) > 1:
        count /= 1000
        units.pop(0)
    return f"{count:.3g} {units[0]}"
