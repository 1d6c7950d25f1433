"""Find prompts that occur word for word in the training data, by the runs of tokens that they share."""

# T tokens of a text, G tokens of a run

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from data_prep.read_once import TokenCache

# Tokens of a run; contamination is usually counted by 13-grams.
LENGTH = 13
# An odd factor, so that no multiplication loses a bit.
FACTOR = np.uint64(0x9E3779B97F4A7C15)
LOW_BITS = np.uint64((1 << 22) - 1)


def hash_runs(tokens: np.ndarray) -> np.ndarray:
    """Return a hash of each run of `LENGTH` tokens, [T - G + 1] uint64."""
    count = max(len(tokens) - LENGTH + 1, 0)
    hashes = np.zeros(count, dtype=np.uint64)
    for offset in range(LENGTH):
        hashes *= FACTOR
        hashes += tokens[offset : offset + count].astype(np.uint64) + np.uint64(1)
    # The low bits of a product depend on the low bits of its factors alone.
    return hashes ^ (hashes >> np.uint64(31))


def list_runs(prompts: Mapping[str, np.ndarray]) -> list[tuple[int, str]]:
    """Return the hash of each run of each prompt with the prompt's name, in the order of hashes."""
    runs: list[tuple[int, str]] = []
    for name, tokens in prompts.items():
        runs += [(run, name) for run in set(hash_runs(tokens).tolist())]
    return sorted(runs)


def find_overlap(
    cache: TokenCache, prompts: Mapping[str, np.ndarray], keys: Mapping[str, int]
) -> dict[str, int]:
    """Return how many examples share a run of tokens with each prompt, or ask it as a whole, most first.

    Args:
        cache: The training data.
        prompts: Tokens by name.
        keys: The hash of each whole prompt (`text_key`), by the same names.

    Returns:
        The number of examples by name, without prompts that share nothing.
    """
    prompt_runs = list_runs(prompts)
    runs = np.array([run for run, _ in prompt_runs], dtype=np.uint64)
    # A table of low bits rules out nearly all runs of the data before the search.
    is_candidate = np.zeros(int(LOW_BITS) + 1, dtype=bool)
    is_candidate[runs & LOW_BITS] = True
    sharing: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for shard, (shard_tokens, ends) in enumerate(cache.texts()):
        hashes = hash_runs(shard_tokens.numpy())
        starts = np.flatnonzero(is_candidate[hashes & LOW_BITS])
        examples = np.searchsorted(ends, starts, side="right")
        # A run that reaches into the next example does not count.
        is_inside = starts + LENGTH <= np.asarray(ends)[examples]
        found = hashes[starts[is_inside]]
        first = np.searchsorted(runs, found, side="left").tolist()
        last = np.searchsorted(runs, found, side="right").tolist()
        for example, begin, end in zip(examples[is_inside].tolist(), first, last, strict=True):
            for _, name in prompt_runs[begin:end]:
                sharing[name].add((shard, example))
    counts = {}
    for name in prompts:
        num_asked = int((cache.prompts == keys[name]).sum())
        counts[name] = max(len(sharing[name]), num_asked)
    shared = [(name, count) for name, count in counts.items() if count]
    return dict(sorted(shared, key=lambda item: (-item[1], item[0])))
