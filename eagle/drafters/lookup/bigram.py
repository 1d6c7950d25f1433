"""A bigram table: the cheapest probs that depend on the text (Leviathan et al. 2023)."""

# V vocabulary, M pairs that occur, K rows

from __future__ import annotations

import torch
from torch import Tensor

from eagle.drafters.lookup.counts import CountDrafter, Tables


class BigramDrafter(CountDrafter):
    """Drafts by bigram counts, interpolated with unigram probs for tokens with many different successors.

    As Witten and Bell (1991) interpolate: (count(y, x) + distinct(y) unigram(x)) / (count(y) + distinct(y)).
    """

    kind = "bigram"

    def __init__(self, tables: Tables, device: torch.device | str = "cpu") -> None:
        super().__init__(tables, device)
        unigram, distinct = tables.unigram(), tables.starts.diff()
        after = torch.cat([torch.zeros(1, dtype=torch.int64), tables.counts.cumsum(0)])[tables.starts].diff()
        before = torch.arange(tables.vocab_size).repeat_interleave(distinct)
        pairs = (tables.counts + distinct[before] * unigram[tables.successors]) / (after + distinct)[before]
        weights = torch.where(distinct > 0, distinct.double() / (after + distinct), 1)
        # one column and one pair more than there are, for rows that are shorter than the longest
        self.unigram, self.weights, self.pairs = (
            part.log().float().to(device) for part in (_pad_row(unigram, 1), weights, _pad_row(pairs, 1))
        )
        self.starts = tables.starts.to(device)
        self.successors = _pad_row(tables.successors, tables.vocab_size).to(device)
        self.widest = int(distinct.max())

    def logits(self, tokens: Tensor) -> Tensor:
        """[K, V]: unigram log-probs, replaced for counted pairs; never waits for a device."""
        first, last = self.starts[tokens, None], self.starts[tokens + 1, None]
        width = int((last - first).max()) if tokens.device.type == "cpu" else self.widest
        places = first + torch.arange(width, device=tokens.device)
        places = torch.where(places < last, places, len(self.pairs) - 1)
        rows = self.unigram + self.weights[tokens, None]
        return rows.scatter_(1, self.successors[places], self.pairs[places])[:, :-1]


def _pad_row(row: Tensor, value: int) -> Tensor:
    return torch.cat([row, row.new_full((1,), value)])
