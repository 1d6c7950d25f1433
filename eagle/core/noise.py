"""Gumbel noise as a function of the position in a sequence, so that drafting cannot change what is sampled."""

# P positions, K rows, V vocabulary, N some of its tokens

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle.core.sampling import warp
from eagle.device import must_wait, upload

# logits of a node that are sorted to filter them; sorting a whole vocabulary at all nodes would cost more than a head
MAX_FILTERED = 256
# words of neighbouring tokens are spread by 2^32 / golden ratio, which is odd
GOLDEN = 0x9E3779B1
# no noise is larger: that of the smallest uniform number, 2^-32, is 22.18
LARGEST = 22.2
# tokens so near to the likeliest one get their noise first: one of them most often wins
NEAR = 4.0
# tokens hashed at a time, whose words stay in a core's own cache
BLOCK = 1 << 15


class Noise:
    """Gumbel noise by a counter-based hash of (seed, request, position, token), equal on all devices."""

    def __init__(self, seed: int, request: int) -> None:
        self.stream = mix64(mix64(seed) + request)
        self.rows: dict[int, Tensor] = {}

    def __call__(self, positions: Sequence[int], vocab_size: int, device: torch.device) -> Tensor:
        """Return the noise [P, V] at these positions; rows are cached until `forget`."""
        fill_rows([(self, positions)], vocab_size, device)
        return torch.stack([self.rows[position] for position in positions])

    def forget(self, position: int) -> None:
        """Drop the cached rows before `position`."""
        self.rows = {key: row for key, row in self.rows.items() if key >= position}

    def key(self, position: int) -> int:
        """Return the 64 bits that all noise at a position is hashed from."""
        return mix64(self.stream + position)

    def pick(self, scores: Tensor, position: int) -> int | None:
        """Return the token of the largest of scores [V] plus noise on a CPU; None if a score is nan.

        Noise is made only for tokens that can still win, a few percent of the vocabulary.
        """
        top = float(scores.max())
        if math.isnan(top):
            return None
        if position in self.rows:
            return int((scores + self.rows[position]).argmax())
        values = scores.numpy()
        key = self.key(position)
        # sums are rounded: a token this far below the winner may still equal it
        slack = 1e-3 + 1e-6 * abs(top)

        # the likeliest tokens come first: a token that beats the best of them needs a high score or rare noise
        near = np.flatnonzero(values >= top - NEAR)
        # of a flat distribution most tokens can win
        if len(near) > len(values) // 8:
            return int((scores + gumbel_rows([key], len(values), scores.device)[0]).argmax())
        near_scores = scores[near] + _gumbel(_hash_words(near, key))
        best = float(near_scores.max())
        winner = int(near[int(near_scores.argmax())])

        # score + noise >= best needs a score of at least best - LARGEST,
        possible = np.flatnonzero(values >= best - LARGEST - slack)
        words = _hash_words(possible, key)
        # and for tokens that are not near, noise of at least `needed`: a uniform number of at most `limit`, which is
        # 1 - exp(-exp(-needed))
        needed = best - (top - NEAR) - slack
        limit = -math.expm1(-math.exp(-needed))
        # a little more, for rounding
        is_left = words < min(limit * 1.001 * 2**32 + 4, 2**32 - 1)
        rest = possible[is_left]
        if not len(rest):
            return winner
        rest_scores = scores[rest] + _gumbel(words[is_left])
        rival = int(rest[int(rest_scores.argmax())])
        rival_best = float(rest_scores.max())
        # of equal scores the first token is chosen, as by `argmax`
        if rival_best > best or (rival_best == best and rival < winner):
            return rival
        return winner


def fill_rows(
    requests: Iterable[tuple[Noise, Iterable[int]]], vocab_size: int, device: torch.device
) -> None:
    """Make the noise of several sequences at several positions at once, where it is not cached yet."""
    missing = []
    for noise, positions in requests:
        missing += [(noise, position) for position in sorted(set(positions) - noise.rows.keys())]
    if not missing:
        return
    keys = [noise.key(position) for noise, position in missing]
    rows = gumbel_rows(keys, vocab_size, device)
    for (noise, position), row in zip(missing, rows, strict=True):
        noise.rows[position] = row


def gumbel_rows(keys: Sequence[int], vocab_size: int, device: torch.device) -> Tensor:
    """Return the noise [P, V] of these keys: on a CPU block by block, elsewhere all at once."""
    if must_wait(device):
        return _gumbel_at_once(keys, vocab_size, device)
    rows = torch.empty(len(keys), vocab_size)
    for row, key in zip(rows, keys, strict=True):
        for start in range(0, vocab_size, BLOCK):
            tokens = np.arange(start, min(start + BLOCK, vocab_size))
            row[start : start + BLOCK] = _gumbel(_hash_words(tokens, key))
    return rows


def _gumbel_at_once(keys: Sequence[int], vocab_size: int, device: torch.device) -> Tensor:
    """Return the noise [P, V] by as many kernels for many keys as for one."""
    halves = torch.tensor([[_to_int32(key), _to_int32(key >> 32)] for key in keys])
    low, high = upload(halves.int(), device).unsqueeze(-1).unbind(1)  # each [P, 1]
    # int32 products wrap alike on all devices
    words = _mix32(_token_words(vocab_size, device) ^ low)
    words = _mix32(words ^ high)
    return _to_gumbel(((words >> 1) & 0x7FFFFFFF).float())


@lru_cache(8)
def _token_words(vocab_size: int, device: torch.device) -> Tensor:
    """Return the first word [V] of every token, which does not depend on a key."""
    return torch.arange(vocab_size, dtype=torch.int32, device=device) * _to_int32(GOLDEN)


def _hash_words(tokens: np.ndarray[Any, Any], key: int) -> np.ndarray[Any, Any]:
    """Return the words [N] of some tokens on a CPU, as `_gumbel_at_once` hashes them elsewhere."""
    words = tokens.astype(np.uint32)
    words *= np.uint32(GOLDEN)
    for half in (key & 0xFFFFFFFF, key >> 32):
        words ^= np.uint32(half)
        # a bijection of 32-bit words, as in `_mix32`; unsigned shifts need no masks
        words ^= words >> np.uint32(16)
        words *= np.uint32(0x7FEB352D)
        words ^= words >> np.uint32(15)
        words *= np.uint32(0x846CA68B)
        words ^= words >> np.uint32(16)
    return words


def _gumbel(words: np.ndarray[Any, Any]) -> Tensor:
    """Return the noise [N] of hashed words on a CPU."""
    return _to_gumbel(torch.from_numpy((words >> np.uint32(1)).view(np.int32)).float())


def _to_gumbel(values: Tensor) -> Tensor:
    """Return the noise of 31-bit numbers in fp32, in place."""
    # to the middle of 2^31 equal intervals of (0, 1)
    negated = values.add_(0.5).mul_(-(2.0**-31)).clamp_(min=2.0**-24 - 1)
    # Gumbel: -log(-log(1 - u)). log1p keeps full precision where it matters: large noise comes from small u
    return negated.log1p_().neg_().log_().neg_()


class DrafterNoise:
    """The noise and filters that a drafter may use (`eagle.core.drafter.Noise`), in units of plain logits."""

    def __init__(self, choose: Any, vocab_size: int, device: torch.device) -> None:
        self.choose = choose
        self.temperature = choose.sampling.temperature
        self.vocab_size = vocab_size
        self.device = device
        self.used_rows = 0  # of private noise

    @cached_property
    def private(self) -> Noise:
        """Noise for drafting only: drafts that shared verification's coins would bias the output."""
        return Noise(mix64(self.choose.private_seed), self.choose.sampling.request)

    def __call__(self, positions: list[int]) -> Tensor:
        """Return the noise [P, V] that the target adds to its logits when it chooses the tokens at these positions."""
        assert self.choose.noise is not None
        return self.choose.noise(positions, self.vocab_size, self.device) * self.temperature

    def own(self, rows: int) -> Tensor:
        """Return noise [rows, V] that is new in every call and that the target never uses."""
        # Counted, not by position: a rejection may have depended on the noise of its position, so that drafting there
        # again with the same noise would bias what is sampled.
        first = self.used_rows
        self.used_rows += rows
        self.private.forget(first)
        return (
            self.private(range(first, self.used_rows), self.vocab_size, self.device)
            * self.temperature
        )

    def filter_logits(self, logits: Tensor) -> Tensor:
        """Return the logits [K, V], minus 1000 for tokens that the target's top-k, top-p or min-p removes."""
        sampling = self.choose.sampling
        if sampling.top_k == 0 and sampling.top_p == 1 and sampling.min_p == 0:
            return logits
        # what the target would not sample is far outside its likeliest tokens: looking at those is enough for a draft
        best = logits.topk(min(MAX_FILTERED, logits.shape[-1]))
        is_removed = torch.ones_like(logits, dtype=torch.bool)
        is_removed.scatter_(1, best.indices, warp(best.values, sampling).isinf())
        return torch.where(is_removed, logits - 1000, logits)


def mix64(word: int) -> int:
    """Return a bijection of 64-bit words in which every output bit depends on every input bit (splitmix64)."""
    word = (word + 0x9E3779B97F4A7C15) % 2**64
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
    return word ^ (word >> 31)


def _to_int32(word: int) -> int:
    """Return the low 32 bits as a signed int."""
    return (word + 2**31) % 2**32 - 2**31


def _mix32(words: Tensor) -> Tensor:
    """Return a bijective hash of 32-bit words; products wrap, and masks make shifts logical."""
    words = words ^ ((words >> 16) & 0xFFFF)
    words = words * 0x7FEB352D
    words = words ^ ((words >> 15) & 0x1FFFF)
    words = words * _to_int32(0x846CA68B)
    return words ^ ((words >> 16) & 0xFFFF)
