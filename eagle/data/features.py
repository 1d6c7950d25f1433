"""Examples -> hidden states of the target: one code for stored and for live features."""

# B batch, T tokens, L taps, D target width

from __future__ import annotations

import errno
import math
import shutil
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from time import perf_counter
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eagle.core.drafter import TrainableDrafter
from eagle.data.examples import Example
from eagle.data.shards import ShardWriter, packed, token_bytes, unpacked
from eagle.data.store import FeatureStore, Plan, batches_of, plan_of
from eagle.drafters import DRAFTERS
from eagle.recipe import FeaturesSection
from eagle.target.target import Target

BATCH_TOKENS = 8192  # slots of one forward on an accelerator; a CPU is fastest with one text at a time
AHEAD = 2  # batches that may wait for the disk
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
CALIBRATION = 5.0  # seconds of computing behind a forecast


def world() -> tuple[int, int, Callable[[], None]]:
    """Which of the launched processes this is, how many there are, and how to wait for all."""
    # without cpu=True processes on a CPU take themselves for one each; tokenising alone may take hours
    state = PartialState(cpu=not torch.accelerator.is_available(), timeout=timedelta(days=1))
    return state.process_index, state.num_processes, state.wait_for_everyone


def taps_of(settings: Any, target_config: Any) -> tuple[int, ...]:
    """All that a head with these settings reads of a target: when drafting, and in its loss."""
    method: type[TrainableDrafter] = DRAFTERS[settings.kind]
    taps = {*method.taps_for(settings, target_config), *method.teacher_taps}
    return tuple(sorted(taps, key=lambda tap: (tap == -1, tap)))


def features_of(target: Target, texts: Sequence[Tensor], taps: tuple[int, ...], dtype: str) -> tuple[Tensor, ...]:
    """The packed features [B, T, L, D] of texts side by side, padded on the right, where no token looks."""
    slots = pad_sequence(list(texts), batch_first=True)
    return packed(target.features(slots, taps, torch.bfloat16 if dtype == "bfloat16" else None), dtype)


class LiveFeatures:
    """A feature store without a disk: what is read is computed then, by the code that fills a store."""

    def __init__(
        self, target: Target, examples: Sequence[Example], identity: dict[str, Any], batch_tokens: int | None = None
    ) -> None:
        self.target, self.examples, self.identity = target, examples, identity
        self.taps, self.dtype = tuple(identity["taps"]), identity["dtype"]
        self.together = target.sharded
        # together, processes must compute equally often: one forward for whatever is read at once
        self.slots = sys.maxsize if self.together else batch_slots(target, batch_tokens)
        check_lengths(target, examples)

    def __len__(self) -> int:
        return len(self.examples)

    def mask(self, place: int) -> Tensor:
        """The loss mask of an example."""
        return self.examples[place].loss_mask

    def said(self, place: int) -> Tensor:
        """The supervised tokens of an example."""
        return self.examples[place].tokens[self.examples[place].loss_mask]

    def read(self, places: Sequence[int]) -> list[Example]:
        """Those examples with their features."""
        found = [self.examples[place] for place in places]
        ready: dict[int, Example] = {}
        for batch in batches_of([len(example.tokens) for example in found], self.slots):
            values, *scales = features_of(self.target, [found[i].tokens for i in batch], self.taps, self.dtype)
            for row, i in enumerate(batch):
                end = len(found[i].tokens)
                features = unpacked(values[row, :end], *(scale[row, :end] for scale in scales))
                ready[i] = Example(found[i].tokens, found[i].loss_mask, features)
        return [ready[i] for i in range(len(found))]


def extract(target: Target, store: FeatureStore, shards: Sequence[int]) -> Iterator[int]:
    """Compute and write those shards, and tell the tokens of each batch; writing runs beside computing."""
    waiting: deque[Future[None]] = deque()
    writers: list[ShardWriter] = []

    def hand_over(room: int, task: Callable[..., None], *work: Any) -> None:
        waiting.append(disk.submit(task, *work))
        while len(waiting) > room:
            waiting.popleft().result()

    try:
        with ThreadPoolExecutor(1) as disk:
            for shard in shards:
                writers.append(writer := store.writer(shard))
                for batch in store.plan[shard]:
                    texts = [store.text(number)[0] for number in batch]
                    lengths = [len(text) for text in texts]
                    host, done = _on_host(features_of(target, texts, store.taps, store.dtype))
                    hand_over(AHEAD, _append, writer, host, done, lengths)
                    yield sum(lengths)
                hand_over(AHEAD if shard != shards[-1] else 0, writer.close)
    except OSError as error:
        advice = f"{_needed(store)}: make room and" if error.errno in NO_ROOM else "mend that and"
        raise ValueError(
            f"the disk refused a shard in {store.folder}: {error}. What is written stays; {advice} give the same "
            "command again"
        ) from error
    finally:
        for writer in writers:
            writer.discard()


def _append(writer: ShardWriter, host: Sequence[Tensor], done: Any, lengths: Sequence[int]) -> None:
    if done is not None:
        done.synchronize()
    for row, length in enumerate(lengths):
        writer.append(*(tensor[row, :length] for tensor in host))


def _on_host(tensors: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
    """Copies in host memory, and the event after which they hold their values: computing does not wait for it."""
    if not tensors[0].is_cuda:
        return [tensor.cpu() for tensor in tensors], None
    host = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
    for to, source in zip(host, tensors, strict=True):
        to.copy_(source, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    return host, done


def batch_slots(target: Target, asked: int | None) -> int:
    """How many slots of one forward suit the target and its device."""
    if (target.device.type == "cpu" and asked is None) or target.border < math.inf:
        return 1  # a text beside one beyond the border would be read with the frequencies of that one
    return asked or BATCH_TOKENS


def planned(examples: Sequence[Example], target: Target, taps: tuple[int, ...], features: FeaturesSection) -> Plan:
    """The batches and shards that a recipe asks for."""
    size = token_bytes(features.dtype, len(taps), target.config.hidden_size)
    check_lengths(target, examples)
    slots, lengths = batch_slots(target, features.batch_tokens), [len(example.tokens) for example in examples]
    return plan_of(lengths, slots, max(features.shard_bytes // size, 1))


def check_lengths(target: Target, examples: Sequence[Example]) -> None:
    """Refuses texts longer than the target was built for: its states there are of no use, or depend on other texts."""
    longest = max(len(example.tokens) for example in examples)
    if target.max_positions is not None and longest > target.max_positions:
        raise ValueError(
            f"the longest text has {longest} tokens, this target has {target.max_positions} positions: "
            f"set data.max_length to at most {target.max_positions}"
        )


def check_room(store: FeatureStore) -> None:
    """Refuses, before any work, an extraction that the disk has no room for."""
    if _missing_bytes(store) > shutil.disk_usage(store.folder).free:
        raise ValueError(
            f"too little room in {store.folder}: {_needed(store)}. Use features.dtype=float8, a data.limit, another "
            "features.store, or features.store=null, which computes features while training"
        )


def forecast(target: Target, examples: Sequence[Example], plan: Plan, taps: tuple[int, ...], dtype: str) -> str:
    """Tokens, bytes and time of an extraction, from a few seconds of it."""
    batches = [batch for shard in plan for batch in shard]
    sample = [batches[i * len(batches) // 64] for i in range(64)]  # from the longest to the shortest
    done, begun = 0, 0.0
    for batch in [sample[-1], *sample]:
        texts = [examples[number].tokens for number in batch]
        features_of(target, texts, taps, dtype)[0].flatten()[-1].item()  # waits for the device
        if not begun:  # the first forward only warms up
            begun = perf_counter()
            continue
        done += sum(map(len, texts))
        if perf_counter() - begun > CALIBRATION:
            break
    rate, tokens = done / (perf_counter() - begun), sum(len(example.tokens) for example in examples)
    size = _size(tokens * token_bytes(dtype, len(taps), target.config.hidden_size))
    return (
        f"forecast: {tokens:,} tokens, {len(taps)} taps in {dtype}: {size} in {len(plan)} shards; one process computes "
        f"{rate:,.0f} tokens/s here: {tokens / rate / 60:.1f} min, divided by the number of processes"
    )


def _missing_bytes(store: FeatureStore) -> int:
    return sum(store.index["shard_tokens"][shard] for shard in store.absent) * store.bytes_per_token


def _needed(store: FeatureStore) -> str:
    store.look()
    return (
        f"{_size(_missing_bytes(store))} are still to come and {_size(shutil.disk_usage(store.folder).free)} are free"
    )


def _size(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            break
        count, unit = count / 1000, {"bytes": "kB", "kB": "MB", "MB": "GB", "GB": "TB"}[unit]
    return f"{count:.3g} {unit}"
