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
    """Return [T] tokens in which low ids are frequent, and most are followed by few."""
    generator = torch.Generator().manual_seed(seed)
    tokens = (torch.rand(length, generator=generator) ** 3 * vocab_size).long()
    # every other token follows from the one before
    before = tokens[::2][: length // 2]
    tokens[1::2] = (before * 7 + tokens[1::2] % 3) % vocab_size
    return tokens


def some_tables(vocab_size: int) -> Tables:
    """Return tables of that text."""
    text = some_text(vocab_size)
    return count_texts([(text, torch.ones_like(text, dtype=torch.bool))], vocab_size)


def naive(texts: list[Text], fault: str = "") -> Naive:
    """Count tokens and pairs in plain Python; the planted faults count what is not marked, or pairs across texts."""
    singles: Counter[int] = Counter()
    pairs: Counter[tuple[int, int]] = Counter()
    if fault == "across texts":
        columns = zip(*texts, strict=True)
        texts = [tuple(torch.cat(column) for column in columns)]
    for tokens, mask in texts:
        marks = [fault == "not said" or mark for mark in mask.tolist()]
        for (before, token), mark in zip(pairwise(tokens.tolist()), marks[1:], strict=True):
            pairs[before, token] += mark
        for token, mark in zip(tokens.tolist(), marks, strict=True):
            singles[token] += mark
    return +singles, +pairs  # without zeros


def held(tables: Tables) -> Naive:
    """Return what tables hold, in plain Python."""
    pairs: Counter[tuple[int, int]] = Counter()
    # the successors of a token stand between its start and the next token's
    for before, (start, end) in enumerate(pairwise(tables.starts.tolist())):
        for index in range(start, end):
            pairs[before, int(tables.successors[index])] = int(tables.counts[index])
    return +Counter(dict(enumerate(tables.singles.tolist()))), pairs
