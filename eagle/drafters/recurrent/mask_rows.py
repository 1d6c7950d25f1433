"""Masks behind slots of texts in training: each sees the text up to its slot and the masks before it, and no token."""

# A anchors, E masks of all of them, n anchors with as many masks m, T tokens of a text, h heads, w width of a head

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle.core.examples import Batch
from eagle.device import upload
from eagle.drafters.blocks.block_spans import ATTEND, add_blocks, attend_block, read_texts
from eagle.drafters.parts.spans import Spans
from eagle.drafters.parts.text_blocks import Pair


@dataclass(frozen=True, slots=True)
class MaskRows:
    """Masks in groups of anchors that have equally many, those of an anchor one after the other."""

    groups: list[tuple[Spans, int]]  # the anchors among all slots, and how many masks each has
    spans: Spans  # [E], the anchor of each mask
    depths: Tensor  # [E], from 1 on
    texts: list[tuple[int, int]]  # which text the next so many masks are of

    @classmethod
    def of(cls, masks: Sequence[Tensor], device: torch.device) -> MaskRows:
        """Those behind each text's slots [T - 2], so many behind each."""
        groups, texts, lengths = [], list[tuple[int, int]](), [len(counts) for counts in masks]
        depths, runs, rows = [torch.empty(0, dtype=torch.long)], list[tuple[int, int, int]](), list[list[int]]()
        for size in range(1, max((int(counts.max()) for counts in masks if len(counts)), default=0) + 1):
            places = [(counts == size).nonzero()[:, 0] for counts in masks]
            if any(map(len, places)):
                groups.append((Spans.at(places, lengths, device), size))
            for text, (slots, begin) in enumerate(zip(places, accumulate(lengths, initial=0), strict=False)):
                if len(slots):
                    rows.append((begin + slots).repeat_interleave(size).tolist())
                    runs.append((begin, rows[-1][0], rows[-1][-1] + 1))
                    depths.append(torch.arange(1, size + 1).repeat(len(slots)))
                    texts.append((text, size * len(slots)))
        every = torch.tensor([row for run in rows for row in run], dtype=torch.long)
        spans = Spans(upload(every, device), runs, sum(lengths), scattered=tuple(rows))
        return cls(groups, spans, upload(torch.cat(depths), device), texts)

    def attend(self, query: Tensor, context: Pair, own: Pair, kernel: Any = None) -> Tensor:
        """[h, E, w] from query [h, E, w], the keys and values of all slots, and the masks' own."""
        seen, done, fused = list[Tensor](), 0, list[Tensor]()
        if not self.groups:
            return query
        if kernel or query.device.type not in ATTEND:  # one kernel for all: each number of masks would make another
            output, weight = read_texts(query, *context, self.spans, kernel)
            fused = [output, weight[..., None]]
        for spans, size in self.groups:
            rows = slice(done, done + len(spans.rows) * size)
            asked, key, value, *read = (part[:, rows].unflatten(1, (-1, size)) for part in (query, *own, *fused))
            if fused:
                seen.append(add_blocks(read[0], read[1], asked, (key, value), causal=True))
            else:
                seen.append(attend_block(asked, *context, spans, (key, value), causal=True))
            done = rows.stop
        return torch.cat([part.flatten(1, 2) for part in seen], dim=1)


def supervised_slots(batch: Batch) -> list[Tensor]:
    """[T - 2] of each text, whether the token that a slot names is supervised."""
    return [mask[2:] for mask in batch.masks]


def draw_masks(batch: Batch, most: int, keep: float, least: float) -> list[Tensor]:
    """[T - 2] of each text, how many masks stand behind each slot."""
    texts = zip(supervised_slots(batch), batch.seeds, strict=True)
    return [draw_text_masks(supervised, seed, most, keep, least) for supervised, seed in texts]


def draw_text_masks(supervised: Tensor, seed: int, most: int, keep: float, least: float) -> Tensor:
    """[T - 2], how many masks stand behind each slot of a text: fewer by depth, as its seed decides.

    Of n supervised slots n - d would have d masks behind them in one answer; max(keep^d, least) of so many do, drawn
    from those that have d - 1 and whose answer goes on. (COD: conditional drop of tokens.)
    """
    draw, inside = torch.Generator().manual_seed(seed), F.pad(supervised, (0, most))
    drawn = supervised.nonzero()[:, 0]
    count, slots = torch.zeros_like(supervised, dtype=torch.long), len(drawn)
    for depth in range(1, most + 1):
        candidates = drawn[inside[drawn + depth]]
        wanted = max(int((slots - depth) * max(keep**depth, least)), 0)
        order = torch.empty_like(candidates).random_(generator=draw).argsort()
        drawn = candidates[order[:wanted]]
        count[drawn] = depth
    return count


def weigh_texts(batch: Batch, masks: MaskRows) -> Tensor:
    """[S + E], what supervised slots and masks weigh: a text as many as it has slots, each of its rows the same."""
    slots = [int(part.sum()) for part in supervised_slots(batch)]
    rows = list(slots)
    for text, count in masks.texts:
        rows[text] += count
    shares = [count / max(total, 1) for count, total in zip(slots, rows, strict=True)]
    parts = [*enumerate(slots), *masks.texts]
    return torch.cat([torch.full((count,), shares[text], dtype=torch.float64) for text, count in parts])
