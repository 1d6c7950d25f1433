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

# how many of a node's best logits are filtered; sorting a whole vocabulary at all nodes would cost more than a head
MAX_FILTERED = 256
# 2^32 / golden ratio, an odd number: multiplied by it, neighbouring token ids become distant 32-bit words
GOLDEN = 0x9E3779B1
# an upper bound of the noise: that of the smallest uniform number, 2^-32, is 22.18
LARGEST = 22.2
# tokens whose score is at most this far below the best score get their noise first: most often one of them wins
NEAR = 4.0
# how many tokens are hashed at a time, such that their words stay in a CPU core's cache
BLOCK = 1 << 15


class Noise:
    """Gumbel noise by a counter-based hash of (seed, request, position, token), equal on all devices."""

    def __init__(self, seed: int, request: int) -> None:
        """Begin the noise of one sequence; sequences with one seed differ by their request number."""
        self.stream = mix64(mix64(seed) + request)  # 64 bits that differ for each seed and request
        self.rows: dict[int, Tensor] = {}  # position -> its noise [V], cached

    def __call__(self, positions: Sequence[int], vocab_size: int, device: torch.device) -> Tensor:
        """Return the noise at P positions of the sequence, [P, V]; it is cached until `forget`.

        Adding it to log-probabilities and taking the best token is a sample (Gumbel-max).

        Args:
            positions: The positions of the tokens that are chosen with it.
            vocab_size: V, the size of the target's vocabulary.
            device: Where the noise is made.
        """
        fill_rows([(self, positions)], vocab_size, device)
        return torch.stack([self.rows[position] for position in positions])

    def forget(self, position: int) -> None:
        """Drop the cached noise of positions before `position`: their tokens are committed, and not chosen again.

        The cache would otherwise grow with the sequence, by V numbers a token.
        """
        self.rows = {key: row for key, row in self.rows.items() if key >= position}

    def key(self, position: int) -> int:
        """Return the 64-bit number that the noise of all tokens at a position is hashed from.

        It differs for every seed, request and position.
        """
        return mix64(self.stream + position)

    def pick(self, scores: Tensor, position: int) -> int | None:
        """Return argmax(scores + noise), the sampled token, on a CPU; None if a score is nan.

        Noise over the whole vocabulary is slow on a CPU, so it is made only for tokens that can still win, which are a
        few percent.

        Args:
            scores: [V], the log-probability of each token of the vocabulary, up to a constant, on the host.
            position: The position of the token in its sequence.
        """
        top = float(scores.max())
        if math.isnan(top):
            return None
        # the noise of the whole vocabulary is cached already
        if position in self.rows:
            return int((scores + self.rows[position]).argmax())
        values = scores.numpy()
        key = self.key(position)
        # sums are rounded: a token this far below the winner may still equal it
        slack = 1e-3 + 1e-6 * abs(top)

        # the likeliest tokens come first: a token that beats the best of them needs a high score or rare noise
        near = np.flatnonzero(values >= top - NEAR)
        # in a flat distribution most tokens can win, so the shortcut would save nothing
        if len(near) > len(values) // 8:
            return int((scores + gumbel_rows([key], len(values), scores.device)[0]).argmax())
        near_scores = scores[near] + _gumbel(_hash_words(near, key))
        best = float(near_scores.max())
        winner = int(near[int(near_scores.argmax())])

        # a rival has score + noise >= best: it needs a score of at least best - LARGEST,
        possible = np.flatnonzero(values >= best - LARGEST - slack)
        words = _hash_words(possible, key)
        # and, as it is not near, noise of at least `needed`. Noise is -log(-log(1 - u)) of a uniform number u, which
        # must then be at most limit = 1 - exp(-exp(-needed)).
        needed = best - (top - NEAR) - slack
        limit = -math.expm1(-math.exp(-needed))
        # u is a word / 2^32; the limit is raised a little, for rounding
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
    """Make and cache the noise of several sequences at several positions at once, where it is not cached yet.

    On a GPU one kernel for all costs as much as one for a single position.

    Args:
        requests: Pairs of a sequence's noise, whose cache `rows` changes, and the positions that are needed of it.
        vocab_size: The size of the vocabulary: the noise of a position has one number for each token.
        device: Where the noise is made.
    """
    # sorted, so that the order of a set has no influence
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
    """Return the noise of P positions, [P, V]: a row for each of their keys, a number for each of V tokens.

    Args:
        keys: The 64-bit number of each position, of any sequences (`Noise.key`).
        vocab_size: V, the size of the vocabulary.
        device: Where the noise is made.
    """
    # On a device (`must_wait`: any but a CPU) a kernel costs the same for few and many values. On a CPU, blocks of
    # tokens that fit its cache are faster.
    if must_wait(device):
        return _gumbel_at_once(keys, vocab_size, device)
    rows = torch.empty(len(keys), vocab_size)
    for row, key in zip(rows, keys, strict=True):
        for start in range(0, vocab_size, BLOCK):
            tokens = np.arange(start, min(start + BLOCK, vocab_size))
            row[start : start + BLOCK] = _gumbel(_hash_words(tokens, key))
    return rows


def _gumbel_at_once(keys: Sequence[int], vocab_size: int, device: torch.device) -> Tensor:
    """Return the noise [P, V] of P keys over V tokens on a GPU, by a number of kernels that does not depend on P.

    A key is the 64-bit number of a position. The noise is made on `device`.
    """
    # a key has 64 bits, and is mixed in as two words of 32
    halves = torch.tensor([[_to_int32(key), _to_int32(key >> 32)] for key in keys])
    low, high = upload(halves.int(), device).unsqueeze(-1).unbind(1)  # each [P, 1]
    # int32 products wrap alike on all devices
    # the same two rounds of hashing as in `_hash_words`, so that all devices make equal noise
    words = _mix32(_token_words(vocab_size, device) ^ low)
    words = _mix32(words ^ high)
    return _to_gumbel(((words >> 1) & 0x7FFFFFFF).float())


@lru_cache(8)
def _token_words(vocab_size: int, device: torch.device) -> Tensor:
    """Return the number that the hash of each of V tokens starts from, [V] int32.

    It is cached, because it is the same at all positions: a position's key is mixed in later.
    """
    # GOLDEN is odd, so the product is a bijection, and it makes neighbouring ids distant
    return torch.arange(vocab_size, dtype=torch.int32, device=device) * _to_int32(GOLDEN)


def _hash_words(tokens: np.ndarray[Any, Any], key: int) -> np.ndarray[Any, Any]:
    """Return the 32-bit hash of each of N tokens under a key, [N], on a CPU; `_gumbel_at_once` makes the same numbers.

    Args:
        tokens: [N], token ids.
        key: The 64-bit number of the position (`Noise.key`).
    """
    # products of uint32 wrap around, as the hash needs
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
    """Return the Gumbel noise of N tokens, [N], from the upper 31 bits of their 32-bit hashes, on a CPU.

    The lowest bit is dropped, because torch has no unsigned 32-bit integers.
    """
    return _to_gumbel(torch.from_numpy((words >> np.uint32(1)).view(np.int32)).float())


def _to_gumbel(values: Tensor) -> Tensor:
    """Turn uniform 31-bit whole numbers, held as fp32, into Gumbel noise in place, and return it."""
    # -u, where u is the middle of one of 2^31 equal intervals of (0, 1); the clamp keeps 1 - u above 0 after rounding
    # the 31-bit number k stands for u = (k + 0.5) / 2^31
    negated = values.add_(0.5).mul_(-(2.0**-31)).clamp_(min=2.0**-24 - 1)
    # Gumbel: -log(-log(1 - u)). log1p keeps full precision where it matters: large noise comes from small u
    return negated.log1p_().neg_().log_().neg_()


class DrafterNoise:
    """The noise and filters that a drafter may use (`eagle.core.drafter.Noise`), in units of plain logits."""

    def __init__(self, choose: Any, vocab_size: int, device: torch.device) -> None:
        """Make the noise that the drafter of one request may use.

        Args:
            choose: How the target chooses (`eagle.core.verify.Choose`).
            vocab_size: V, the number of tokens that have noise at a position.
            device: Where the noise is made.
        """
        self.choose = choose
        self.temperature = choose.sampling.temperature
        self.vocab_size = vocab_size
        self.device = device
        self.used_rows = 0  # rows of `private` noise that `draft_noise` has returned

    @cached_property
    def private(self) -> Noise:
        """Noise for drafting only, made when first needed.

        It has another seed than the target's noise: sampled drafts that shared the target's would bias the output.
        """
        return Noise(mix64(self.choose.private_seed), self.choose.sampling.request)

    def __call__(self, positions: list[int]) -> Tensor:
        """Return the noise that the target adds to its logits when it chooses the tokens at P positions, [P, V].

        V is the size of the vocabulary. The noise is in units of plain logits, before the temperature.
        """
        # the target adds noise to logits / temperature, and plain logits are `temperature` times as large
        assert self.choose.noise is not None
        return self.choose.noise(positions, self.vocab_size, self.device) * self.temperature

    def draft_noise(self, rows: int) -> Tensor:
        """Return noise for the drafter's own sampling: new in every call, and never used by the target.

        It is [rows, V]: `rows` distributions are sampled from, over V tokens.
        """
        # Rows are counted and do not follow positions: a rejection may have depended on the noise at its position, so
        # drafting there again with the same noise would bias the output.
        first = self.used_rows
        self.used_rows += rows
        # earlier rows are never asked for again
        self.private.forget(first)
        return (
            self.private(range(first, self.used_rows), self.vocab_size, self.device)
            * self.temperature
        )

    def filter_logits(self, logits: Tensor) -> Tensor:
        """Return the logits, lowered by 1000 for tokens that the target's top-k, top-p or min-p would remove.

        Args:
            logits: [K, V], K distributions over V tokens, as the drafter predicts them.
        """
        sampling = self.choose.sampling
        # all filters are off
        if sampling.top_k == 0 and sampling.top_p == 1 and sampling.min_p == 0:
            return logits
        # all but the best tokens count as removed: the target rarely samples one of them, and a draft may be wrong
        best = logits.topk(min(MAX_FILTERED, logits.shape[-1]))
        is_removed = torch.ones_like(logits, dtype=torch.bool)
        is_removed.scatter_(1, best.indices, warp(best.values, sampling).isinf())
        return torch.where(is_removed, logits - 1000, logits)


def mix64(word: int) -> int:
    """Return a bijection of 64-bit words in which every output bit depends on every input bit (splitmix64).

    The additive constant is 2^64 / golden ratio; the factors are Stafford's (Mix13).
    """
    word = (word + 0x9E3779B97F4A7C15) % 2**64
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
    return word ^ (word >> 31)


def _to_int32(word: int) -> int:
    """Return the low 32 bits of a word as a signed int, because torch has no unsigned 32-bit arithmetic."""
    return (word + 2**31) % 2**32 - 2**31


def _mix32(words: Tensor) -> Tensor:
    """Return a bijective hash of int32 words.

    The shifts and factors are those of lowbias32 (Wellons 2018), found by a search for little bias. Products wrap, and
    the masks clear the sign bits that shifts of signed numbers copy.
    """
    words = words ^ ((words >> 16) & 0xFFFF)
    words = words * 0x7FEB352D
    words = words ^ ((words >> 15) & 0x1FFFF)
    words = words * _to_int32(0x846CA68B)
    return words ^ ((words >> 16) & 0xFFFF)
