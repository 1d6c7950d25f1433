"""Whether a head gets worse in long sequences: its guesses with the whole context, and with only the latest tokens."""

# S slots, K levels, M sequences

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from eagle.core.examples import Batch, Example, collate
from eagle.doctor.agreement import Agreement, chain_lengths, measure
from eagle.doctor.texts import every_tap, read_states
from eagle.doctor.wiring import Wiring
from eagle.target.target import Target

TEXTS = 8  # at least, that the answers are joined to: over them an effect has its standard error
WINDOWS = tuple(128 * 2**power for power in range(10))  # tokens that a head may read instead of all
FAR = 200  # slots after a window, at least
FADING = 0.1  # of what drafts add: so much more of it with the window
SURE = 4.0  # standard errors over sequences
RESAMPLES = 1000  # for an interval


@dataclass(frozen=True)
class Fading:
    """A head's agreement after many tokens, with the whole context and with only the latest tokens."""

    window: int
    before: Agreement
    after: Agreement

    @cached_property
    def lengths(self) -> list[tuple[Tensor, Tensor]]:
        """Acceptance lengths [M] before and after, of sampled and of greedy drafts."""
        before = self.before
        after = self.after
        return [
            (before.mean_lengths(before.overlap), after.mean_lengths(after.overlap)),
            (before.mean_lengths(before.hits), after.mean_lengths(after.hits)),
        ]

    @property
    def share(self) -> float:
        """The smaller of the gains of sampled and greedy drafts, as a share of the drafted tokens with the window."""
        shares = [(after - before).mean() / (after - 1).mean().clamp(min=1e-9) for before, after in self.lengths]
        return float(min(shares))

    @property
    def errors(self) -> float:
        """How many standard errors the lesser of these gains is above zero."""
        gains = [after - before for before, after in self.lengths]
        return min(float(gain.mean() / (gain.std() / len(gain) ** 0.5).clamp(min=1e-12)) for gain in gains)

    @property
    def is_sure(self) -> bool:
        """Whether the loss is significant: a head equally good everywhere would hardly show it."""
        sampled_lengths, _ = self.lengths[0]
        return len(sampled_lengths) >= TEXTS and self.share >= FADING and self.errors >= SURE

    def __str__(self) -> str:
        return (
            f"fades behind {self.window} tokens of text: there τ {self.before.tau:.2f}, and {self.after.tau:.2f} where "
            f"it reads the last {self.window} alone ({self.errors:.1f} standard errors): train it on longer texts, or "
            "with drafter.window, which docs/training.md describes"
        )


def examine_contexts(wiring: Wiring, target: Target, texts: Batch, levels: int) -> tuple[Fading | None, str]:
    """Return the head's loss in long sequences (None if not significant), and τ by context in words."""
    texts = join_texts(target, texts, (*wiring.head.taps, *wiring.head.teacher_taps))
    figures = measure(wiring, texts, target.head, levels)
    tried = []
    for window in WINDOWS:
        before = figures.between(window)
        if int(before.in_seq[0].sum()) < FAR:
            break
        after = measure(replace(wiring, window=window), texts, target.head, levels)
        tried.append(Fading(window, before, after.between(window)))
    worst = max((fading for fading in tried if fading.is_sure), key=lambda fading: fading.share, default=None)
    lengths = describe_contexts(figures, [fading.window for fading in tried])
    longest = max(texts.lengths)
    return worst, f"{lengths}; nothing is known beyond {longest} tokens of text: --prompts takes longer ones"


def describe_contexts(figures: Agreement, edges: Sequence[int]) -> str:
    """Return τ for each range of context lengths, with 95 % intervals over resampled sequences (bootstrap)."""
    ranges = []
    for start, end in zip((0, *edges), (*edges, None), strict=True):
        inside = figures.between(start, end)
        counts = inside.counts()
        generator = torch.Generator().manual_seed(0)
        resamples = torch.randint(len(counts), (RESAMPLES, len(counts)), generator=generator)
        lengths = chain_lengths(counts[resamples].sum(1))
        interval = f"({lengths.quantile(0.025):.2f} to {lengths.quantile(0.975):.2f})"
        where = f"after {start} to {end} tokens of context" if end else f"after {start} and more"
        ranges.append(f"{where} τ {inside.tau:.2f} {interval}")
    return ", ".join(ranges)


def join_texts(target: Target, texts: Batch, taps: Sequence[int]) -> Batch:
    """Join answers end to end to `TEXTS` sequences or a few more, with the states that a head reads.

    None is longer than the target has positions for.
    """
    total = sum(texts.lengths)
    max_length = min(max(total // TEXTS, *texts.lengths), target.max_positions or total)
    groups: list[list[int]] = [[]]
    length = 0
    for text, text_length in enumerate(texts.lengths):
        length += text_length
        if length > max_length and groups[-1]:
            groups.append([])
            length = text_length
        groups[-1].append(text)
    all_tokens = texts.tokens.cpu().split(texts.lengths)
    all_masks = texts.loss_mask.split(texts.lengths)
    taps = tuple(dict.fromkeys((*taps, -1)))
    columns = [every_tap(target).index(tap) for tap in taps]
    examples = []
    for group in groups:
        tokens = torch.cat([all_tokens[text] for text in group])
        mask = torch.cat([all_masks[text] for text in group])
        # the target reads all that lies before an answer in the joined sequence
        examples.append(Example(tokens, mask, read_states(target, tokens)[:, columns]))
    return collate(examples, taps).to(texts.tokens.device)
