"""A head under examination with its inputs, and the operations that the doctor needs."""

# N tokens of all texts, D tokens that can be drafted

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from eagle.core.drafter import TargetHead
from eagle.core.examples import Batch

Logits = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Wiring:
    """A head, the target's embedding and LM head, and the shifts of its inputs."""

    head: Any
    frozen: TargetHead
    token_back: int = 0  # how many places before its due the token stands
    state_back: int = 0  # and the state
    window: int | None = None  # the latest tokens of a text, if the head is to see no others
    recurrent: bool = True  # whether a level reads the token that the level before has drafted
    levels: int = 3  # of the chain that is examined

    def draft_levels(self, batch: Batch, count: int) -> list[tuple[Tensor, Logits]]:
        """For each level, the states [S, ..] at all supervised slots and the head that gives logits."""
        tokens, features = batch.tokens, batch.features
        if self.token_back:
            tokens = _shift_back(tokens, batch.lengths, self.token_back)
        if self.state_back:
            features = _shift_back(features, batch.lengths, self.state_back)
        batch = replace(batch, tokens=tokens, features=features)
        batch = batch if self.window is None else cut_texts(batch, self.window, count)
        return list(self.head.draft_levels(batch, self.frozen, count))

    @torch.no_grad()
    def reads_drafts(self, batch: Batch) -> bool:
        """Whether level 2 reads the token drafted by level 1; heads that guess all levels at once do not."""
        tokens = batch.tokens.clone()
        first_draft = batch.loss_mask.nonzero()[0, 0]
        tokens[first_draft] = 1 - tokens[first_draft].clamp(max=1)
        usual, changed = (self.draft_levels(other, 2) for other in (batch, replace(batch, tokens=tokens)))
        return len(usual) > 1 and not torch.equal(usual[1][0][0], changed[1][0][0])


def cut_texts(batch: Batch, window: int, levels: int) -> Batch:
    """The texts in pieces, so that each supervised slot, in the same order, has half to all of a window before it.

    After its last supervised token a piece continues as far as `levels` levels read.
    """
    half, pieces, masks, lengths, first = window // 2, list[Tensor](), list[Tensor](), list[int](), 0
    for length in batch.lengths:
        for start in range(0, length, half):
            begin, end = max(start - half, 0), min(start + half + levels + 1, length)
            rows = torch.arange(first + begin, first + end)
            inside = (rows >= first + start) & (rows < first + start + half)
            mask = batch.loss_mask[rows] & inside
            if mask.any():
                pieces.append(rows)
                masks.append(mask)
                lengths.append(len(rows))
        first += length
    rows = torch.cat(pieces).to(batch.tokens.device)
    columns = batch.tokens[rows], torch.cat(masks), batch.features[rows]
    return Batch(*columns, tuple(lengths), batch.taps, tuple(range(len(lengths))))


def _shift_back(rows: Tensor, lengths: tuple[int, ...], places: int) -> Tensor:
    """[N, ..], in each text the rows `places` earlier; its first rows stay."""
    return torch.cat([torch.cat([part[:places], part[:-places]]) for part in rows.split(lengths)])


def draft_ids(head: Any) -> Tensor | None:
    """[D], the tokens of the rows of a head's logits; None for all tokens."""
    d2t = dict(head.named_buffers()).get("d2t")
    return None if d2t is None else d2t + torch.arange(len(d2t), device=d2t.device)


def find_tensors(head: Any, ending: str) -> list[str]:
    """Names of the parameters and buffers that end so, in any block."""
    names = [name for tensors in (head.named_parameters(), head.named_buffers()) for name, _ in tensors]
    return [name for name in names if f".{name}".endswith(f".{ending}")]
