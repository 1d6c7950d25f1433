"""A bigram table: the cheapest probs that depend on the sequence (Leviathan et al. 2023)."""

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
        """Compute the log-probs of all counted pairs, and the unigram's weight after each token.

        Args:
            tables: Counts of tokens, and of M pairs of tokens as a sparse matrix by rows (CSR).
            device: Where `logits` is computed.
        """
        super().__init__(tables, device)
        unigram = tables.unigram()  # [V] smoothed probs
        # [V], the number of different tokens that followed each token
        distinct = tables.starts.diff()
        # [V], how often each token was followed by any other: sums of its row of counts
        sums = torch.cat([torch.zeros(1, dtype=torch.int64), tables.counts.cumsum(0)])
        totals = sums[tables.starts].diff()
        # [M], the first token of each pair
        first_tokens = torch.arange(tables.vocab_size).repeat_interleave(distinct)
        smoothed = tables.counts + distinct[first_tokens] * unigram[tables.successors]
        pairs = smoothed / (totals + distinct)[first_tokens]
        # the unigram's weight after each token; 1 after a token that nothing followed
        weights = torch.where(distinct > 0, distinct.double() / (totals + distinct), 1)
        # one more column (token V) and one more pair, to which `logits` sends what pads shorter rows
        self.unigram = _log_probs(_pad_row(unigram, 1), device)
        self.weights = _log_probs(weights, device)
        self.pairs = _log_probs(_pad_row(pairs, 1), device)
        self.starts = tables.starts.to(device)
        self.successors = _pad_row(tables.successors, tables.vocab_size).to(device)
        self.widest = int(distinct.max())  # pairs of the token with most different successors

    def logits(self, tokens: Tensor) -> Tensor:
        """Return log-probs [K, V] of what follows K tokens: the weighted unigram's, replaced for counted pairs.

        The host never waits for a device here.
        """
        # [K, 1] each: where the pairs that begin with a token start and end
        start = self.starts[tokens, None]
        end = self.starts[tokens + 1, None]
        # a CPU's values can be read at no cost, so that rows are no wider than these tokens need
        width = int((end - start).max()) if tokens.device.type == "cpu" else self.widest
        # [K, width], the indices of each row's pairs; the padding pair where a row is shorter
        indices = start + torch.arange(width, device=tokens.device)
        indices = torch.where(indices < end, indices, len(self.pairs) - 1)
        log_probs = self.unigram + self.weights[tokens, None]
        # the padding pair wrote into the last column, which is dropped
        return log_probs.scatter_(1, self.successors[indices], self.pairs[indices])[:, :-1]


def _log_probs(probs: Tensor, device: torch.device | str) -> Tensor:
    """Return the logarithms of probs in fp32 on a device."""
    return probs.log().float().to(device)


def _pad_row(row: Tensor, value: int) -> Tensor:
    """Return a row [n] with one more entry, `value`."""
    return torch.cat([row, row.new_full((1,), value)])
