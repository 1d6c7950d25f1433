"""Runs of tokens that texts share: which prompts stand in the training data, word for word."""

# T tokens of a text, G tokens of a run

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from data_prep.token_cache import TokenCache

LENGTH = 13  # tokens in a row, as the field counts contamination
FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd: no multiplication loses a bit
LOW_BITS = np.uint64((1 << 22) - 1)  # by which nearly all runs are told to be of no prompt


def hash_runs(tokens: np.ndarray) -> np.ndarray:
    """[T - G + 1] uint64, a number for every run of so many tokens in a row."""
    count = max(len(tokens) - LENGTH + 1, 0)
    hashes = np.zeros(count, dtype=np.uint64)
    for place in range(LENGTH):
        hashes *= FACTOR
        hashes += tokens[place : place + count].astype(np.uint64) + np.uint64(1)
    return hashes ^ (hashes >> np.uint64(31))


def find_overlap(cache: TokenCache, prompts: Mapping[str, np.ndarray], keys: Mapping[str, int]) -> dict[str, int]:
    """How many examples of a cache share a run of tokens with each prompt, or are asked it as a whole; the most first.

    `prompts` are tokens by name; `keys` are those of the whole texts. Prompts that share nothing are left out.
    """
    named = [(run, name) for name, tokens in prompts.items() for run in set(hash_runs(tokens).tolist())]
    named.sort()
    runs, names = np.array([run for run, _ in named], dtype=np.uint64), [name for _, name in named]
    is_low = np.zeros(int(LOW_BITS) + 1, dtype=bool)
    is_low[runs & LOW_BITS] = True
    sharing: dict[str, set[tuple[int, int]]] = {}
    for shard, (tokens, ends) in enumerate(cache.texts()):
        hashes = hash_runs(tokens.numpy())
        places = np.flatnonzero(is_low[hashes & LOW_BITS])
        texts = np.searchsorted(ends, places, side="right")
        within = places + LENGTH <= np.asarray(ends)[texts]  # a run from one text into the next is none
        first, last = (np.searchsorted(runs, hashes[places[within]], side=side) for side in ("left", "right"))
        for text, start, stop in zip(texts[within].tolist(), first.tolist(), last.tolist(), strict=True):
            for name in names[start:stop]:
                sharing.setdefault(name, set()).add((shard, text))
    asked = {name: int((cache.prompts == key).sum()) for name, key in keys.items()}
    counts = {name: max(len(sharing.get(name, ())), asked[name]) for name in prompts}
    return dict(
        sorted(((name, count) for name, count in counts.items() if count), key=lambda item: (-item[1], item[0]))
    )
