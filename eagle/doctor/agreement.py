"""Agreement of a head's guesses with the target, slot by slot, so that two wirings of one head can be paired."""

# S slots, K levels, V vocabulary, M texts

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from eagle.core.drafter import TargetHead
from eagle.core.examples import Batch
from eagle.doctor.cycles import expect_accepted, visit_slots
from eagle.doctor.wiring import Wiring, draft_ids

ROWS = 128  # of logits held at once
MOST_KEPT = 2**27  # probs of the target, half a gigabyte


@dataclass(frozen=True)
class Agreement:
    """A head's results at every slot [S] in K levels; level 1 reads the target's states, later levels its own."""

    overlap: Tensor  # [K, S], of its probs with the target's: how often a draft drawn from them is accepted
    hits: Tensor  # [K, S], whether its likeliest token is the target's
    in_text: Tensor  # [K, S], whether the text goes on that far
    is_greedy: Tensor  # [S], whether the text goes on as the greedy target would
    text_ids: Tensor  # [S], the text of each slot
    places: Tensor  # [S], tokens of its text before the one that a slot names first
    drawn_kept: Tensor  # [K, S], how often a drawn draft is accepted where the target chose the text's token
    recurrent: bool = True  # whether later levels read what the head has drafted

    def between(self, start: int, end: int | None = None) -> Agreement:
        """The results at slots with `start` to `end` tokens before them."""
        inside = (self.places >= start) & (self.places < (2**62 if end is None else end))
        return replace(self, in_text=self.in_text & inside)

    @cached_property
    def reached(self) -> Tensor:
        """[K, S], whether a greedy chain reaches that level and the text contains the right token."""
        hits, rows = self.hits & self.in_text, [self.in_text[0]]
        for level in range(1, len(hits)):
            known = _look_ahead(self.is_greedy, level - 1) & self.in_text[level]
            rows.append(rows[-1] & hits[level - 1] & known)
        return torch.stack(rows)

    def rates(self, hits: Tensor | None = None) -> list[float]:
        """The rate at which each level is right after the levels before it were."""
        hits = self.hits if hits is None else hits
        accepted = zip(hits, self.reached, strict=True)
        return [float((hit & reached).sum() / reached.sum().clamp(min=1)) for hit, reached in accepted]

    @property
    def teacher_forced_rates(self) -> list[float]:
        """[K], the rate at which each level is right on the target's states (level 1 of a later slot)."""
        return self.rates(torch.stack([_look_ahead(self.hits[0], level) for level in range(len(self.hits))]))

    @property
    def own_state_ratio(self) -> float:
        """Tokens that later levels add from the head's own states, as a share of those from the target's states."""
        if not self.recurrent:
            return 1.0
        forced = chain_length(self.teacher_forced_rates[1:]) - 1
        return (chain_length(self.rates()[1:]) - 1) / max(forced, 1e-9)

    @property
    def tau(self) -> float:
        """The acceptance length of a greedy chain of K drafts."""
        return chain_length(self.rates())

    def counts(self) -> Tensor:
        """[M, 2, K], for each text the number of slots that reach a level and that pass it."""
        both = torch.stack([self.reached, self.reached & self.hits]).double()  # [2, K, S]
        return self._sum_by_text(both).movedim(-1, 0)

    @cached_property
    def drawn_cycles(self) -> tuple[Tensor, Tensor]:
        """[M] tokens and [M] cycles of each text when it is decoded with chains of K drafts drawn from the probs."""
        return self._count_cycles(self.drawn_kept, self.overlap)

    @cached_property
    def greedy_cycles(self) -> tuple[Tensor, Tensor]:
        """[M] tokens and [M] cycles with chains of K likeliest tokens, kept where the greedy target agrees.

        On a greedy answer this is decoding itself; on a drawn one it goes on along the text.
        """
        return self._count_cycles(self.hits.double(), self.hits.double())

    def _count_cycles(self, kept: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
        cycles = visit_slots(kept, self.in_text, self.text_ids)
        tokens = cycles * (1 + expect_accepted(kept, expected, self.in_text))
        return self._sum_by_text(tokens), self._sum_by_text(cycles)

    @property
    def decoded_tau(self) -> float:
        """The acceptance length of greedy decoding with chains of K drafts."""
        tokens, cycles = self.greedy_cycles
        return float(tokens.sum() / cycles.sum())

    @property
    def drawn_tau(self) -> float:
        """The acceptance length of decoding with drawn drafts."""
        tokens, cycles = self.drawn_cycles
        return float(tokens.sum() / cycles.sum())

    def drawn_lengths(self) -> Tensor:
        """[M], each text's mean acceptance length of chains drawn from the head's probs."""
        return self._mean_lengths(self.overlap)

    def greedy_lengths(self) -> Tensor:
        """[M], each text's mean length of chains that match the target's likeliest token along the text."""
        return self._mean_lengths(self.hits.double())

    def _mean_lengths(self, accepted: Tensor) -> Tensor:
        """[M], 1 + the mean over slots of the number of consecutive accepted levels [K, S]."""
        chains = (accepted * self.in_text).cumprod(0).sum(0)
        return 1 + self._sum_by_text(chains) / self._sum_by_text(torch.ones_like(chains)).clamp(min=1)

    def _sum_by_text(self, values: Tensor) -> Tensor:
        """[.., M], sums of [.., S]."""
        sums = values.new_zeros(*values.shape[:-1], int(self.text_ids.max()) + 1)
        return sums.index_add_(-1, self.text_ids, values)


def chain_length(rates: list[float]) -> float:
    """The acceptance length of a chain with these acceptance rates by level."""
    total = reach = 1.0
    for rate in rates:
        reach *= rate
        total += reach
    return total


def chain_lengths(counts: Tensor) -> Tensor:
    """[N], acceptance lengths from counts [N, 2, K] of slots that reach and pass each level."""
    return 1 + (counts[:, 1] / counts[:, 0].clamp(min=1)).cumprod(-1).sum(-1)


def _look_ahead(values: Tensor, places: int) -> Tensor:
    """[S], the value `places` slots later; False after the last."""
    later = torch.zeros_like(values)
    later[: len(values) - places or None] = values[places:] if places else values
    return later


class Reference:
    """The target's probs after the tokens of some texts, computed once for all changes where they fit in memory."""

    @torch.no_grad()
    def __init__(self, batch: Batch, target: TargetHead) -> None:
        self.target, self.true = target, batch.select_taps((-1,))[:, 0]
        fits = len(self.true) * len(target.weight) <= MOST_KEPT
        self.kept = torch.cat([self._compute(part) for part in self.true.split(ROWS)]) if fits else None

    def probs(self, places: Tensor) -> Tensor:
        """[n, V], the probs of the token after each place [n]."""
        return self._compute(self.true[places]) if self.kept is None else self.kept[places]

    def _compute(self, hidden: Tensor) -> Tensor:
        return self.target.logits(hidden).float().softmax(-1)


@torch.no_grad()
def measure(
    wiring: Wiring, batch: Batch, target: TargetHead, levels: int, reference: Reference | None = None
) -> Agreement:
    """Run the head at every supervised slot of the texts, each level on the states that it drafts from."""
    reference = reference or Reference(batch, target)
    device, count, tokens = batch.tokens.device, len(batch.tokens), batch.tokens
    slots = batch.loss_mask.nonzero()[:, 0].to(device) - 2
    owner = torch.repeat_interleave(torch.arange(len(batch.lengths)), torch.tensor(batch.lengths)).to(device)
    text_ids, drafts = owner[slots], draft_ids(wiring.head)
    columns: list[list[Tensor]] = []
    for level, (states, logits) in enumerate(wiring.draft_levels(batch, levels)):
        place = slots + 1 + level
        following = (place + 1).clamp(max=count - 1)
        in_text = (place + 1 < count) & (owner[following] == text_ids)
        parts = zip(*(part.split(ROWS) for part in (states, place.clamp(max=count - 1), following)), strict=True)
        rows = [_compare_probs(logits(part), reference.probs(at), tokens[after], drafts) for part, at, after in parts]
        columns.append([*torch.cat(rows).unbind(1), in_text])
    overlap, kept, hits, choices, in_text = (torch.stack(column).cpu() for column in zip(*columns, strict=True))
    is_greedy = choices[0].long() == tokens[(slots + 2).clamp(max=count - 1)].cpu()
    starts = torch.tensor([0, *accumulate(batch.lengths)])[text_ids.cpu()]
    places = is_greedy, text_ids.cpu(), slots.cpu() + 2 - starts
    return Agreement(overlap, hits.bool(), in_text.bool(), *places, kept, wiring.recurrent)


def _compare_probs(logits: Tensor, target_probs: Tensor, tokens: Tensor, drafts: Tensor | None) -> Tensor:
    """[n, 4]: overlap, min(1, q / p) of the text's token, whether the likeliest tokens agree, and the target's."""
    probs = logits.float().softmax(-1)
    choice, guess = target_probs.argmax(-1), probs.argmax(-1)
    p, common = target_probs.gather(1, tokens[:, None])[:, 0], target_probs
    if drafts is None:
        q = probs.gather(1, tokens[:, None])[:, 0]
    else:
        drafts = drafts.clamp(0, target_probs.shape[-1] - 1)
        row = torch.full((target_probs.shape[-1],), -1, device=drafts.device)
        row[drafts] = torch.arange(len(drafts), device=drafts.device)
        row = row[tokens]
        q = torch.where(row >= 0, probs.gather(1, row.clamp(min=0)[:, None])[:, 0], 0.0)
        common, guess = target_probs[:, drafts], drafts[guess]
    overlap = torch.minimum(probs, common).sum(-1)
    kept = (q / p.clamp(min=1e-30)).clamp(max=1.0)
    return torch.stack([part.double() for part in (overlap, kept, guess == choice, choice)], dim=1)
