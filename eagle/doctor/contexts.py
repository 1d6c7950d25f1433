"""Whether a head gets worse in long texts: its guesses with the whole text, and with only the latest tokens."""

# S slots, K levels, M texts, N resamplings

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eagle.core.examples import Batch
from eagle.doctor.agreement import Agreement, chain_lengths, measure
from eagle.doctor.texts import every_tap, read_states
from eagle.doctor.wiring import Wiring
from eagle.target.target import Target

TEXTS = 8  # at least, that the answers are joined to: over them an effect has its standard error
WINDOWS = tuple(128 * 2**power for power in range(10))  # tokens that a head may read instead of all
FAR = 200  # slots behind a window, at least
FADING = 0.1  # of what drafts add: so much more of it with the window
SURE = 4.0  # standard errors over texts
RESAMPLED = 1000  # times, for an interval


@dataclass(frozen=True)
class Fading:
    """A head's agreement after many tokens, with the whole text and with only the latest tokens."""

    window: int
    before: Agreement
    after: Agreement

    @property
    def gain(self) -> float:
        """The smaller of the gains of drawn and greedy drafts, as a share of the drafted tokens with the window."""
        return min(float((after - before).mean() / (after - 1).mean().clamp(min=1e-9)) for before, after in self._pairs)

    @property
    def errors(self) -> float:
        """How many standard errors the lesser of these gains is above zero."""
        gains = [after - before for before, after in self._pairs]
        return min(float(gain.mean() / (gain.std() / len(gain) ** 0.5).clamp(min=1e-12)) for gain in gains)

    @property
    def is_sure(self) -> bool:
        """Whether the loss is significant: a head equally good everywhere would hardly show it."""
        return len(self._pairs[0][0]) >= TEXTS and self.gain >= FADING and self.errors >= SURE

    @property
    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Per text, before and after: acceptance lengths of drawn and of greedy drafts."""
        lengths = (Agreement.drawn_lengths, Agreement.greedy_lengths)
        return [(length(self.before), length(self.after)) for length in lengths]

    def __str__(self) -> str:
        return (
            f"fades behind {self.window} tokens of text: there τ {self.before.tau:.2f}, and {self.after.tau:.2f} where "
            f"it reads the last {self.window} alone ({self.errors:.1f} standard errors): train it on longer texts, or "
            "with drafter.window, which docs/training.md describes"
        )


def examine_contexts(wiring: Wiring, target: Target, texts: Batch, levels: int) -> tuple[Fading | None, list[str]]:
    """The head's loss in long texts (None if not significant), and τ by length of text in words."""
    texts = join_texts(target, texts, (*wiring.head.taps, *wiring.head.teacher_taps))
    figures, longest = measure(wiring, texts, target.head, levels), max(texts.lengths)
    tried = []
    for window in WINDOWS:
        near = figures.between(window)
        if int(near.in_text[0].sum()) < FAR:
            break
        after = measure(replace(wiring, window=window), texts, target.head, levels).between(window)
        tried.append(Fading(window, near, after))
    sure = [fading for fading in tried if fading.is_sure]
    lengths = describe_contexts(figures, [fading.window for fading in tried])
    note = f"{lengths}; nothing is known beyond {longest} tokens of text: --prompts takes longer ones"
    return max(sure, key=lambda fading: fading.gain, default=None), [note]


def describe_contexts(figures: Agreement, edges: Sequence[int]) -> str:
    """τ for each range of lengths, with 95 % intervals over resampled texts."""
    parts = []
    for start, end in zip((0, *edges), (*edges, None), strict=True):
        part = figures.between(start, end)
        counts = part.counts()
        again = torch.randint(len(counts), (RESAMPLED, len(counts)), generator=torch.Generator().manual_seed(0))
        lengths = chain_lengths(counts[again].sum(1))
        low, high = lengths.quantile(0.025), lengths.quantile(0.975)
        where = f"after {start} to {end} tokens of context" if end else f"after {start} and more"
        parts.append(f"{where} τ {part.tau:.2f} ({low:.2f} to {high:.2f})")
    return ", ".join(parts)


def join_texts(target: Target, texts: Batch, taps: Sequence[int]) -> Batch:
    """The texts end to end in `TEXTS` or a few more, with the states that a head reads; no longer than positions go."""
    tokens, masks = (column.cpu().split(texts.lengths) for column in (texts.tokens, texts.loss_mask))
    most = min(max(sum(texts.lengths) // TEXTS, *texts.lengths), target.max_positions or sum(texts.lengths))
    groups: list[list[int]] = [[]]
    for text, length in enumerate(texts.lengths):
        if sum(texts.lengths[other] for other in groups[-1]) + length > most and groups[-1]:
            groups.append([])
        groups[-1].append(text)
    every = tuple(dict.fromkeys((*taps, -1)))
    joined = [torch.cat([tokens[text] for text in group]) for group in groups]
    read = [every_tap(target).index(tap) for tap in every]
    features = torch.cat([read_states(target, text)[:, read] for text in joined])
    masks = [torch.cat([masks[text] for text in group]) for group in groups]
    for mask in masks:
        mask[:2] = False
    lengths = tuple(map(len, joined))
    batch = Batch(torch.cat(joined), torch.cat(masks), features, lengths, every, tuple(range(len(groups))))
    return batch.to(texts.tokens.device)
