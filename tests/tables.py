"""Tables of counts for tests, of a text that is the same every time."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import torch
from torch import Tensor

from data_prep.count_tokens import Text, count_texts
from eagle.drafters.lookup.counts import Tables

Naive = tuple[Counter[int], Counter[tuple[int, int]]]
"""How often each token and each pair was said."""


def some_text(vocab_size: int, length: int = 400, seed: int = 0) -> Tensor:
    """[T] tokens in which low ids are frequent, and most are followed by few."""
    generator = torch.Generator().manual_seed(seed)
    tokens = (torch.rand(length, generator=generator) ** 3 * vocab_size).long()
    tokens[1::2] = (tokens[::2][: length // 2] * 7 + tokens[1::2] % 3) % vocab_size
    return tokens


def some_tables(vocab_size: int) -> Tables:
    """Tables of that text."""
    text = some_text(vocab_size)
    return count_texts([(text, torch.ones_like(text, dtype=torch.bool))], vocab_size)


def naive(texts: list[Text], fault: str = "") -> Naive:
    """Tokens and pairs by counting in plain Python; the planted faults count what is not said, or across texts."""
    singles: Counter[int] = Counter()
    pairs: Counter[tuple[int, int]] = Counter()
    if fault == "across texts":
        texts = [
            (torch.cat([tokens for tokens, _ in texts]), torch.cat([said for _, said in texts]))
        ]
    for tokens, said in texts:
        marked = [
            (token, fault == "not said" or mark)
            for token, mark in zip(tokens.tolist(), said.tolist(), strict=True)
        ]
        singles.update(token for token, mark in marked if mark)
        pairs.update((before, token) for (before, _), (token, mark) in pairwise(marked) if mark)
    return singles, pairs


def held(tables: Tables) -> Naive:
    """What tables hold, in plain Python."""
    starts, places = tables.starts.tolist(), range(len(tables.counts))
    before = [
        next(y for y in range(tables.vocab_size) if starts[y] <= place < starts[y + 1])
        for place in places
    ]
    pairs = zip(before, tables.successors.tolist(), strict=True)
    singles = {token: count for token, count in enumerate(tables.singles.tolist()) if count}
    return Counter(singles), Counter(dict(zip(pairs, tables.counts.tolist(), strict=True)))
