"""Compute the target's hidden features of examples, with the same code for stored and live features."""

# N stored rows, M positions of all sequences, B sequences, T tokens of one, L taps, D target width

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
from itertools import accumulate, chain, zip_longest
from time import perf_counter
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eagle.core.drafter import TrainableDrafter
from eagle.core.examples import Example, Shown, lengths_of, run_ahead
from eagle.data.shards import ShardPlan, ShardWriter, group_sequences, make_batches, plan_shards
from eagle.data.store import FeatureStore
from eagle.data.stored_rows import (
    Part,
    SequenceSizes,
    TapRoles,
    check_width,
    mean_bytes,
    pack_features,
    parts_of,
    pick_rows,
    restore_features,
)
from eagle.disk import describe_bytes
from eagle.drafters import DRAFTERS
from eagle.recipe import FeaturesSection
from eagle.target.state import TargetState
from eagle.target.talk import prepare_media
from eagle.target.taps import find_feature_fault
from eagle.target.target import Target

# tokens of one forward on an accelerator; a CPU is fastest with one sequence at a time
BATCH_TOKENS = 8192
SHARDS_EACH = 4  # the fewest for each of several processes, so that they end at about the same time
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors after which room must be made
# a forecast times this many batches, or as many as this many seconds allow
FORECAST_BATCHES = 64
FORECAST_SECONDS = 5.0


def world() -> tuple[int, int, Callable[[], None]]:
    """Return this process's index, the number of processes, and a barrier that waits for all of them.

    Extraction divides its work among the processes.
    """
    # Without cpu=True each process on a CPU takes itself for the only one. The timeout is long, as the others may wait
    # for hours while one process tokenises.
    state = PartialState(cpu=not torch.accelerator.is_available(), timeout=timedelta(days=1))
    return state.process_index, state.num_processes, state.wait_for_everyone


def roles_of(settings: Any, target_config: Any) -> TapRoles:
    """Return the taps that training a head with these settings needs: at every token, and before learned ones.

    Taps are indices of the target's layers whose inputs are read; -1 is the input of its LM head.
    """
    method: type[TrainableDrafter] = DRAFTERS[settings.kind]
    taps = method.taps_for(settings, target_config)
    return TapRoles(method.context_taps(settings, target_config), (*taps, *method.teacher_taps))


def taps_of(settings: Any, target_config: Any) -> tuple[int, ...]:
    """Return the target's layer inputs (by layer index) that a head with these settings needs to draft and to train."""
    return roles_of(settings, target_config).taps


# -- states of sequences ----------------------------------------------------------------------------------------------


def compute_rows(
    target: Target,
    sequences: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    parts: Sequence[Part],
    dtype: str,
    shared: Sequence[int] | None = None,
    shown: Sequence[Shown | None] = (),
) -> list[tuple[Tensor, ...]]:
    """Compute the target's hidden states of sequences, and return of every part the rows that a store keeps, packed.

    A row is the states at one slot (token) of a sequence. The rows of one sequence follow those of the one before it.

    Args:
        target: The model whose states are computed.
        sequences: The tokens [T] of each sequence.
        loss_masks: [T] of each sequence, true at supervised tokens.
        parts: Sets of taps (layer inputs), each kept at the same slots (tokens).
        dtype: The storage dtype, one of `DTYPES`.
        shared: How many of its first tokens each sequence shares with the one before it, which has their rows. None: 0.
        shown: The conversation with images of each sequence, or None; () if no sequence has images.

    Returns:
        For each part, with N rows and L taps, its tensors [N, L, ..]: one for each field of the storage dtype, such as
        numbers and scales.
    """
    taps = _taps_in(parts)
    # cast on the way where storage is bfloat16 anyway; None keeps the model's dtype
    precision = torch.bfloat16 if dtype == "bfloat16" else None
    if shared is None:
        shared = [0] * len(sequences)
    states, starts = _compute_states(target, sequences, taps, precision, shared=shared, shown=shown)
    packed = []
    for part in parts:
        rows = pick_rows(states, starts, taps, part=part, loss_masks=loss_masks, shared=shared)
        packed.append(pack_features(rows, dtype))
    return packed


def _compute_states(
    target: Target,
    sequences: Sequence[Tensor],
    taps: tuple[int, ...],
    precision: torch.dtype | None,
    *,
    shared: Sequence[int],
    shown: Sequence[Shown | None],
) -> tuple[Tensor, list[int]]:
    """Return the states [M, L, D] of all sequences, one after the other, and the index at which each begins.

    They are those of M tokens at L taps, of width D. There may be padding between the sequences. Sequences with shared
    prefixes are read with a KV cache, those with images one by one, and others in one padded forward.

    Args:
        target: The model whose states are computed.
        sequences: The tokens [T] of each sequence.
        taps: The layer inputs that are returned.
        precision: The dtype of the states; None for the model's own.
        shared: How many of its first tokens each sequence shares with the one before it.
        shown: The conversation with images of each sequence, or None; () if no sequence has images.
    """
    if any(shared) and can_reuse_prefixes(target):
        states_by_sequence = read_reusing_prefixes(
            target, [tokens.tolist() for tokens in sequences], shared, taps
        )
    elif any(shown):
        states_by_sequence = []
        for tokens, conversation in zip(sequences, shown, strict=True):
            media = (
                None
                if conversation is None
                else prepare_media(target.processor, conversation, tokens)
            )
            # a batch of one sequence
            states_by_sequence.append(target.features(tokens[None], taps, precision, media)[0])
    else:
        # [B, T of the longest, L, D], padding included
        features = target.features(pad_sequence(list(sequences), batch_first=True), taps, precision)
        return features.flatten(0, 1), [i * features.shape[1] for i in range(len(sequences))]
    # without padding: each sequence begins where the one before it ends
    starts = list(accumulate(map(len, sequences[:-1]), initial=0))
    return torch.cat(states_by_sequence).to(precision), starts


def can_reuse_prefixes(target: Target) -> bool:
    """Return whether `read_reusing_prefixes` gives the states of plain forwards, up to rounding, and saves time.

    It saves nothing with recurrent layers: their state can be taken up only where an earlier sequence ended. A sharded
    target, whose weights no process holds whole, is read without it, too.
    """
    try:
        with target.lock:
            target.reader.check(rows=2)
    except ValueError:
        # the check refuses models that cannot read several rows with a cache and masks
        return False
    return not (target.sharded or target.reader.mixers.mixers or target.reader.follows_steps)


def read_reusing_prefixes(
    target: Target, sequences: Sequence[list[int]], shared: Sequence[int], taps: tuple[int, ...]
) -> list[Tensor]:
    """Return the states [T, L, D] of each sequence, reading a prefix that it shares with the one before only once.

    They are those of its T tokens at L taps, of width D.

    Args:
        target: The model whose states are computed.
        sequences: The tokens of each sequence.
        shared: How many of its first tokens each sequence shares with the one before it.
        taps: The layer inputs that are returned.
    """
    state = TargetState(target, taps)
    groups = group_sequences(shared)  # of indices of sequences
    states: dict[int, Tensor] = {}  # by the index of a sequence
    # A group of sequences with a common prefix has one row. First the first sequence of every group is read, then the
    # second ones, and so on: a released row keeps its keys and values, and the next sequence reuses their prefix.
    # In each turn every group has the index of one sequence; None if it has no more.
    for turn in zip_longest(*groups):
        index_of_row = {}
        for i, group in zip(turn, groups, strict=True):
            row = group[0]
            if row in state.rows:
                state.release(row)
            if i is not None:
                state.admit(row, sequences[i])
                index_of_row[row] = i
        while state.prompts:
            for row, output in state.read_prompts().items():
                assert output.features is not None
                states[index_of_row[row]] = output.features
    return [states[i] for i in range(len(sequences))]


class LiveFeatures:
    """Features that are computed when they are read, as a source of training examples without a store.

    They are equal to those that `extract` stores, and NaN where it stores none. Each example is read from its start:
    where `extract` reuses a shared prefix, they are equal up to rounding.
    """

    sampled = False  # loss masks are those of the examples, known before these are read

    def __init__(
        self,
        target: Target,
        examples: Sequence[Example],
        identity: dict[str, Any],
        batch_tokens: int | None = None,
    ) -> None:
        """Check the target and the examples; features are computed only when `read` asks for them.

        Args:
            target: The model whose states are computed.
            examples: The conversations, without features.
            identity: What decides the features, among it their taps (target layers) and dtype.
            batch_tokens: The most tokens of one forward, padding included; None for a default of the device.
        """
        self.target = target
        self.examples = examples
        self.identity = identity
        self.taps: tuple[int, ...] = tuple(identity["taps"])
        self.dtype: str = identity["dtype"]
        self.parts = parts_of(identity)
        check_width(self.dtype, target.width_of(self.taps))
        # With a sharded target all processes must run equally many forwards: all read at once, and each `read` is one
        # forward, of any size.
        self.together = target.sharded
        self.batch_tokens = resolve_batch_tokens(target, batch_tokens)
        if self.together:
            self.batch_tokens = sys.maxsize
        # both refuse
        check_lengths(target, max(lengths_of(examples)))
        check_causal(target)

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.examples)

    def mask(self, index: int) -> Tensor:
        """Return [T], the loss mask of an example of T tokens: true at supervised ones."""
        return self.examples[index].loss_mask

    def tokens_and_mask(self, index: int) -> tuple[Tensor, Tensor]:
        """Return tokens [T] and loss mask [T] of an example, which need no forward of the target."""
        example = self.examples[index]
        return example.tokens, example.loss_mask

    def read(self, indices: Sequence[int]) -> list[Example]:
        """Return the examples at these indices, with features [T, L, D]: the target's states of T tokens at L layers.

        They are packed and unpacked as in a store, so that they have its rounding, and are NaN where it keeps none.
        """
        examples = [self.examples[index] for index in indices]
        lengths = [len(example.tokens) for example in examples]
        for batch in make_batches(lengths, self.batch_tokens):
            sequences = [examples[i].tokens for i in batch]
            masks = [examples[i].loss_mask for i in batch]
            shown = [examples[i].shown for i in batch]
            # every example from its start: no prefixes are shared
            packed = compute_rows(
                self.target, sequences, masks, self.parts, dtype=self.dtype, shown=shown
            )
            restored = restore_features(self.parts, packed, self.taps, masks)
            for i, features in zip(batch, restored, strict=True):
                examples[i] = replace(examples[i], features=features)
        return examples


# -- extraction -------------------------------------------------------------------------------------------------------


def extract(target: Target, store: FeatureStore, shards: Sequence[int]) -> Iterator[int]:
    """Compute and write these shards of a store. Yield the number of tokens of each batch, for a progress bar.

    A thread writes a batch to the disk while the next one is computed.

    Args:
        target: The model whose states are stored.
        store: The store, which has the examples and the batches of each shard.
        shards: The indices of the shards to write.
    """
    writers: list[ShardWriter] = []  # of all shards that were begun

    # this generator computes, and the jobs that it yields write: `run_ahead` runs them in the thread
    def write_jobs() -> Iterator[Callable[[], int]]:
        """Compute batch by batch, and yield functions that write; each returns the number of tokens that it wrote."""
        for shard in shards:
            # refuses if the disk is too full by now
            check_room(store, [shard])
            writer = store.writer(shard)
            writers.append(writer)
            for batch in store.plan[shard]:
                sequences, masks = zip(*map(store.stored_tokens, batch), strict=True)
                shared = store.shared[batch].tolist()
                shown = [store.shown(number) for number in batch]
                rows = compute_rows(
                    target,
                    sequences,
                    masks,
                    store.parts,
                    dtype=store.dtype,
                    shared=shared,
                    shown=shown,
                )
                # the copy to the host goes on while the next batch is computed
                host_rows, copied = _copy_to_host(rows)
                token_count = sum(map(len, sequences))
                yield partial(_append, writer, host_rows, copied, token_count)
            yield writer.close

    try:
        # closed, so that the thread ends before the files of unfinished shards are removed
        with closing(run_ahead(write_jobs())) as written:
            yield from written
    except OSError as error:
        advice = (
            f"{_describe_room(store)}: make room and" if error.errno in NO_ROOM else "mend that and"
        )
        raise ValueError(
            f"the disk refused a shard in {store.folder}: {error}. What is written stays; {advice} give the same "
            "command again"
        ) from error
    finally:
        # this does nothing to shards that are complete
        for writer in writers:
            writer.discard()


def _append(writer: ShardWriter, rows: Sequence[Sequence[Tensor]], copied: Any, tokens: int) -> int:
    """Append a batch's packed rows (states by token) to a shard's file, once they are on the host.

    Args:
        writer: The shard.
        rows: The tensors of each part of the store.
        copied: The CUDA event after which they are on the host; None if they are.
        tokens: The batch's number of tokens.

    Returns:
        `tokens`, for the progress bar.
    """
    if copied is not None:
        copied.synchronize()
    writer.append(rows)
    return tokens


def _copy_to_host(packed: Sequence[Sequence[Tensor]]) -> tuple[Sequence[Sequence[Tensor]], Any]:
    """Return copies of tensors in host memory, and the CUDA event (None on a CPU) after which they hold their values.

    `packed` are the tensors of each part of a store, all on the same device.
    """
    if not packed[0][0].is_cuda:
        return [list(map(Tensor.cpu, tensors)) for tensors in packed], None
    host_rows = []
    for tensors in packed:
        copies = []
        for tensor in tensors:
            # only a copy to pinned memory runs beside the computation
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            copies.append(copy.copy_(tensor, non_blocking=True))
        host_rows.append(copies)
    copied = torch.cuda.Event()
    copied.record()
    return host_rows, copied


def resolve_batch_tokens(target: Target, batch_tokens: int | None) -> int:
    """Return the most tokens (padding included) of one forward: `batch_tokens`, else a default for the device.

    1 stands for batches of one sequence, which are fastest on a CPU.
    """
    # with such a border, a longer sequence in the batch could change the rotary frequencies of a shorter one
    has_length_border = target.border < math.inf
    if has_length_border or (target.device.type == "cpu" and batch_tokens is None):
        return 1
    return batch_tokens or BATCH_TOKENS


def plan_extraction(
    sizes: SequenceSizes,
    target: Target,
    parts: Sequence[Part],
    features: FeaturesSection,
    processes: int = 1,
) -> ShardPlan:
    """Return the batches and shards of a feature store for sequences of these sizes.

    Args:
        sizes: The sizes of all sequences.
        target: The model whose states are stored.
        parts: Which taps (layer inputs) are kept, and at which slots (tokens).
        features: The section of the recipe, with the sizes of batches and shards.
        processes: How many processes extract. Each computes whole shards, so that several processes get smaller ones:
            a few large shards would leave some processes without work.
    """
    lengths = sizes.tokens.tolist()
    # both refuse
    check_lengths(target, max(lengths))
    check_causal(target)
    token_bytes = mean_bytes(parts, features.dtype, target.width_of(_taps_in(parts)), sizes)
    # about how many tokens a shard holds
    shard_tokens = max(int(features.shard_bytes / token_bytes), 1)
    # -(-a // b) is a / b rounded up
    if processes > 1:
        shard_tokens = min(shard_tokens, -(-sum(lengths) // (SHARDS_EACH * processes)))
    return plan_shards(
        lengths,
        resolve_batch_tokens(target, features.batch_tokens),
        shard_tokens,
        sizes.shared.tolist(),
    )


def check_lengths(target: Target, longest: int) -> None:
    """Refuse sequences of up to `longest` tokens if the target has fewer positions."""
    # None: any number of positions
    if target.max_positions is not None and longest > target.max_positions:
        raise ValueError(
            f"the longest sequence has {longest} tokens, this target has {target.max_positions} positions: "
            f"set data.max_length to at most {target.max_positions}"
        )


def check_causal(target: Target) -> None:
    """Refuse a target whose states at a token depend on later tokens.

    A head would learn to draft tokens from states that have seen them.
    """
    with target.lock:
        fault = find_feature_fault(target.reader)
    if fault:
        raise ValueError(
            f"{target.config.model_type} {fault}: expected a causal model. If this one was trained as one, take a "
            f"newer transformers than {version('transformers')}: old versions forget the mask of some types"
        )


def check_room(store: FeatureStore, shards: Iterable[int] | None = None) -> None:
    """Refuse to write shards (files of a feature store) for which the disk has no space.

    Args:
        store: The feature store.
        shards: The shards that are to be written; None for all that are absent.
    """
    if shards is None:
        shards = store.absent
    if sum(map(store.shard_bytes, shards)) > shutil.disk_usage(store.folder).free:
        raise ValueError(
            f"too little room in {store.folder}: {_describe_room(store)}. Use features.dtype=float6, a data.limit, "
            "another features.store, or features.store=null, which computes features while training. Or make room and "
            "give the same command again: whole shards are kept"
        )


def forecast(
    target: Target,
    examples: Sequence[Example],
    sizes: SequenceSizes,
    plan: ShardPlan,
    parts: Sequence[Part],
    dtype: str,
) -> str:
    """Return a line with the tokens, bytes and time of an extraction. The speed is measured on a few seconds of it.

    Args:
        target: The model whose states are to be stored.
        examples: The sequences.
        sizes: Their sizes.
        plan: The batches of each shard, as indices of sequences.
        parts: Sets of taps (layer inputs), each kept at the same slots.
        dtype: The storage dtype, one of `DTYPES`.
    """
    batches = list(chain.from_iterable(plan))
    # batches come from the longest sequences to the shortest: an even sample of them has the mean speed
    sample = [batches[i * len(batches) // FORECAST_BATCHES] for i in range(FORECAST_BATCHES)]
    measured_tokens = 0
    start = 0.0  # when the measurement began; 0 before
    # the first forward only warms up: time starts after it
    for batch in [sample[-1], *sample]:
        sequences = [examples[i].tokens for i in batch]
        masks = [examples[i].loss_mask for i in batch]
        shown = [examples[i].shown for i in batch]
        shared = sizes.shared[batch].tolist()
        rows = compute_rows(
            target, sequences, masks, parts, dtype=dtype, shared=shared, shown=shown
        )
        # reading a number waits for the device
        rows[0][0].flatten()[-1:].sum().item()
        if not start:
            start = perf_counter()
            continue
        measured_tokens += sum(map(len, sequences))
        if perf_counter() - start > FORECAST_SECONDS:
            break
    tokens_per_second = measured_tokens / (perf_counter() - start)
    tokens = int(sizes.tokens.sum())
    shared_tokens = int(sizes.shared.sum())
    token_bytes = mean_bytes(parts, dtype, target.width_of(_taps_in(parts)), sizes)
    rewritten = f" ({shared_tokens:,} of them shared with another example of their conversation)"
    return (
        f"forecast: {tokens:,} tokens{rewritten if shared_tokens else ''}, {len(_taps_in(parts))} taps in {dtype}: "
        f"{describe_bytes(tokens * token_bytes)}, {token_bytes:,.0f} bytes a token, in {len(plan)} shards; one process "
        f"computes {tokens_per_second:,.0f} tokens/s here: {tokens / tokens_per_second / 60:.1f} min, divided by the "
        "number of processes"
    )


def _taps_in(parts: Sequence[Part]) -> tuple[int, ...]:
    """Return the taps (layer inputs) of all parts, in the order of the parts.

    A part is a set of taps that a store keeps at the same tokens.
    """
    return tuple(chain.from_iterable(part.taps for part in parts))


def _describe_room(store: FeatureStore) -> str:
    """Return a phrase with the bytes of the shards (files) that a store lacks, and the free bytes of the disk."""
    # other processes may have completed shards
    store.refresh()
    free = shutil.disk_usage(store.folder).free
    missing = sum(map(store.shard_bytes, store.absent))
    return f"{describe_bytes(missing)} are still to come and {describe_bytes(free)} are free"
