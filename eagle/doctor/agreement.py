"""Agreement of a head's guesses with the target, slot by slot, so that two wirings of one head can be paired."""

# S slots (supervised positions that a head drafts from), K levels, V vocabulary
# M sequences, T slots of the longest sequence

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from eagle.core.drafter import TargetHead
from eagle.core.examples import Batch
from eagle.doctor.wiring import Wiring, draft_ids

ROWS = 128  # slots whose logits are in memory at a time
# numbers: the target's probs are kept in memory up to this size, half a gigabyte
MAX_BUFFER = 2**27


@dataclass(frozen=True)
class Agreement:
    """How a head's drafts agree with the target at S slots in K levels of a chain.

    Level 1 reads the target's states, later levels those that the head makes itself.
    """

    overlap: Tensor  # [K, S], of its probs with the target's: how often a draft sampled from them is accepted
    hits: Tensor  # [K, S], whether its likeliest token is the target's
    in_seq: Tensor  # [K, S], whether the sequence goes on that far
    is_greedy: Tensor  # [S], whether the sequence goes on as the greedy target would
    seq_ids: Tensor  # [S], the sequence of each slot
    # [K, S], how often a sampled draft is accepted where the target chose this token
    sampled_accepted: Tensor
    recurrent: bool = True  # whether later levels read what the head has drafted

    @cached_property
    def reached(self) -> Tensor:
        """[K, S] bool, for K levels and S slots: whether a greedy chain from the slot is compared at that level.

        It is if the head's drafts of the levels before were right, and the sequence shows the greedy target's token.
        """
        reached = [self.in_seq[0]]
        for level in range(1, len(self.hits)):
            # the sequence shows the greedy target's token at this level only if it took the greedy one up to here
            is_known = _look_ahead(self.is_greedy, level - 1) & self.in_seq[level]
            reached.append(reached[-1] & self.hits[level - 1] & is_known)
        return torch.stack(reached)

    def rates(self) -> list[float]:
        """Return [K], the rate at which each level's likeliest token is right after those of the levels before were."""
        return self._rates(self.hits)

    @property
    def teacher_forced_rates(self) -> list[float]:
        """[K], the rate at which a level would be right if it read the target's states and not the head's own.

        Level 1 always reads those, so level k from a slot is taken from level 1 of the slot k - 1 places later.
        """
        levels = range(len(self.hits))
        return self._rates(torch.stack([_look_ahead(self.hits[0], level) for level in levels]))

    def _rates(self, hits: Tensor) -> list[float]:
        """Return [K], the share of the chains that reach a level whose token there is right by `hits` [K, S].

        K are the levels of a chain, S the slots from which chains begin.
        """
        accepted = (hits & self.reached).sum(1)
        # a level that no chain reaches has the rate 0
        return (accepted.double() / self.reached.sum(1).clamp(min=1)).tolist()

    @property
    def own_state_ratio(self) -> float:
        """Tokens that later levels add from the head's own states, as a share of those from the target's states."""
        # levels that read no drafted token have no states of the head's making
        if not self.recurrent:
            return 1.0
        # level 1 reads the target's states in both, so it is left out; 1 is the token that the target adds itself
        forced = chain_length(self.teacher_forced_rates[1:]) - 1
        return (chain_length(self.rates()[1:]) - 1) / max(forced, 1e-9)

    @cached_property
    def sampled_cycles(self) -> tuple[Tensor, Tensor]:
        """[M] tokens and [M] cycles of decoding each of M sequences with chains of K drafts sampled from the head.

        Both are expected values, computed from the probs without decoding.
        """
        return self._count_cycles(self.sampled_accepted, self.overlap)

    @cached_property
    def greedy_cycles(self) -> tuple[Tensor, Tensor]:
        """[M] tokens and [M] cycles of each of M sequences with chains of K likeliest tokens.

        A token is accepted where the greedy target agrees. On a greedy answer this is decoding itself; on a sampled one
        it goes on along the sequence.
        """
        return self._count_cycles(self.hits.double(), self.hits.double())

    def _count_cycles(self, accepted: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
        """Return the expected tokens [M] and cycles [M] of decoding each of M sequences with chains of K drafts.

        A cycle is one draft and the target's forward that verifies it; S are the slots of all sequences.

        Args:
            accepted: [K, S], the chance that a level's draft is accepted where the sequence goes on as it does.
            expected: [K, S], the mean of that chance over the target's possible tokens.
        """
        # [S], the chance that a cycle begins at a slot
        cycles = visit_slots(accepted, self.in_seq, self.seq_ids)
        # a cycle adds its accepted drafts and one token that the target chooses itself
        tokens = cycles * (1 + expect_accepted(accepted, expected, self.in_seq))
        return self._sum_by_seq(tokens), self._sum_by_seq(cycles)

    @property
    def greedy_tau(self) -> float:
        """The acceptance length (tokens per target forward) of greedy decoding with chains of K drafts."""
        tokens, cycles = self.greedy_cycles
        return float(tokens.sum() / cycles.sum())

    @property
    def sampled_tau(self) -> float:
        """The acceptance length (tokens per target forward) of decoding with chains of K sampled drafts."""
        tokens, cycles = self.sampled_cycles
        return float(tokens.sum() / cycles.sum())

    def _sum_by_seq(self, values: Tensor) -> Tensor:
        """Return [.., M], the sum over the slots of each of M sequences of values [.., S] at all S slots."""
        count = int(self.seq_ids.max()) + 1
        sums = values.new_zeros(*values.shape[:-1], count)
        return sums.index_add_(-1, self.seq_ids, values)


def chain_length(rates: list[float]) -> float:
    """Return the acceptance length of a chain with these acceptance rates by level."""
    # tau = 1 + r1 + r1 r2 + r1 r2 r3 + ...
    tau = 1.0
    path_prob = 1.0
    for rate in rates:
        path_prob *= rate
        tau += path_prob
    return tau


def _look_ahead(values: Tensor, count: int) -> Tensor:
    """Return [S], at each of S slots the bool value `count` slots later; False for the last `count` slots.

    Near the end of a sequence that value belongs to the next sequence.
    """
    return torch.cat([values[count:], torch.zeros_like(values[:count])])


def visit_slots(accepted: Tensor, in_seq: Tensor, seq_ids: Tensor) -> Tensor:
    """Return [S], the probability that a cycle (one chain of drafts and its verification) begins at a slot.

    The next draft begins where the last one was rejected, not at every slot alike. A sequence's first token comes with
    the prompt, so that its first cycle begins at its second slot, as in decoding.

    Args:
        accepted: [K, S], for K levels and S slots, the probability that a level's draft is accepted after those before
            it were.
        in_seq: [K, S], whether the sequence goes on that far.
        seq_ids: [S], the sequence of each slot.
    """
    levels = len(accepted)
    counts = torch.bincount(seq_ids)
    # the index of each slot within its sequence
    columns = torch.arange(len(seq_ids)) - (counts.cumsum(0) - counts)[seq_ids]
    # [K, M, T + K + 1]: one row for each of M sequences, of at most T slots, with room for chains that end after the
    # last one
    padded = accepted.new_zeros(levels, len(counts), int(counts.max()) + levels + 1)
    padded[:, seq_ids, columns] = accepted * in_seq
    # [K + 1, M, ..], the chance that at least this many drafts are accepted
    at_least = torch.cat([torch.ones_like(padded[:1]), padded.cumprod(0)])
    # [K + 1, M, ..], the chance that exactly this many are: 0 to K
    exactly = torch.cat([at_least[:-1] - at_least[1:], at_least[-1:]])
    begins = torch.zeros_like(padded[0])
    begins[:, 1] = 1.0
    # a sequence with one slot has no second one
    begins[counts == 1, 0] = 1.0
    # a cycle of n accepted drafts is followed by one that begins n + 1 slots later
    for column in range(int(counts.max())):
        for length in range(levels + 1):
            begins[:, column + length + 1] += begins[:, column] * exactly[length, :, column]
    return begins[seq_ids, columns]


def expect_accepted(accepted: Tensor, expected: Tensor, in_seq: Tensor) -> Tensor:
    """Return [S], the expected number of accepted tokens of a chain of K levels that begins at one of S slots.

    `accepted` [K, S] is the chance that a level's draft is accepted given the sequence's token. `expected` [K, S] is
    the mean of that chance over the tokens that the target might have chosen there: the estimate is the same on
    average, and varies less. `in_seq` [K, S] says whether the sequence goes on that far.
    """
    accepted = accepted * in_seq
    # [K, S], the chance that a chain reaches a level
    path_probs = torch.cat([torch.ones_like(accepted[:1]), accepted[:-1]]).cumprod(0)
    return (path_probs * expected * in_seq).sum(0)


class TargetProbs:
    """The target's probs after the tokens of a batch, computed once for all changes where they fit in memory."""

    @torch.no_grad()
    def __init__(self, batch: Batch, target_head: TargetHead) -> None:
        """Compute the probs of all tokens now if they fit in memory, else only when `after` is asked for them."""
        self.target_head = target_head
        # [N, D], the inputs of the target's LM head (tap -1)
        self.hidden = batch.select_taps((-1,))[:, 0]
        self.buffer: Tensor | None = None
        if len(self.hidden) * len(target_head.weight) <= MAX_BUFFER:
            self.buffer = torch.cat([self._compute(rows) for rows in self.hidden.split(ROWS)])

    def after(self, positions: Tensor) -> Tensor:
        """Return [n, V], the probs over the vocabulary V of the token after each of n positions in the batch."""
        return (
            self._compute(self.hidden[positions]) if self.buffer is None else self.buffer[positions]
        )

    def _compute(self, hidden: Tensor) -> Tensor:
        """Return the target's probs [n, V] from inputs of its LM head [n, D]."""
        return self.target_head.logits(hidden).float().softmax(-1)


@torch.no_grad()
def measure(
    wiring: Wiring, batch: Batch, target_head: TargetHead, reference: TargetProbs | None = None
) -> Agreement:
    """Compare the head's drafts with the target at every supervised slot, each level on the states that it drafts from.

    Args:
        wiring: The head, what it borrows from the target, and how many levels are drafted.
        batch: The target's answers with its states.
        target_head: The target's own LM head, which says what the target would choose.
        reference: The target's probs after this batch's tokens, if another head was measured on them.
    """
    reference = reference or TargetProbs(batch, target_head)
    tokens = batch.tokens
    last = len(tokens) - 1
    lengths = torch.tensor(batch.lengths)
    seq_of_token = torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(tokens.device)
    # a slot is the position of the last state that a draft reads: two before the token that it names first
    slots = batch.loss_mask.nonzero()[:, 0].to(tokens.device) - 2
    seq_ids = seq_of_token[slots]
    draft_tokens = draft_ids(wiring.head)
    # of each level: [S, 4], what `_compare_probs` returns for S slots; and [S], whether the sequence goes on that far
    figures = []
    in_seq = []
    for level, (states, logits) in enumerate(wiring.draft_levels(batch, wiring.levels)):
        # a draft is compared with the target's choice after the token at `position`; `following` is the index of the
        # sequence's own next token, unless the sequence ends before it
        position = slots + 1 + level
        following = (position + 1).clamp(max=last)
        in_seq.append((position < last) & (seq_of_token[following] == seq_ids))
        chunks = []
        # a few slots at a time, because logits of all may not fit in memory
        for start in range(0, len(slots), ROWS):
            rows = slice(start, start + ROWS)
            target_probs = reference.after(position[rows].clamp(max=last))
            chunks.append(
                _compare_probs(
                    logits(states[rows]), target_probs, tokens[following[rows]], draft_tokens
                )
            )
        figures.append(torch.cat(chunks))
    overlap, sampled_accepted, hits, choices = torch.stack(figures).cpu().unbind(-1)  # each [K, S]
    return Agreement(
        overlap=overlap,
        hits=hits.bool(),
        in_seq=torch.stack(in_seq).cpu(),
        is_greedy=choices[0].long() == tokens[slots + 2].cpu(),
        seq_ids=seq_ids.cpu(),
        sampled_accepted=sampled_accepted,
        recurrent=wiring.recurrent,
    )


def _compare_probs(
    logits: Tensor, target_probs: Tensor, tokens: Tensor, draft_tokens: Tensor | None
) -> Tensor:
    """Return [n, 4] in float64 for n slots: overlap, acceptance of a sampled draft, agreement, the target's token.

    Overlap is the chance that a draft sampled from the head is accepted. The second is that chance where the target
    has chosen the sequence's token. Agreement is 1 where both have the same likeliest token.

    Args:
        logits: [n, D], the head's, over the D tokens that it can draft.
        target_probs: [n, V], over the target's vocabulary.
        tokens: [n], the sequence's next token.
        draft_tokens: [D], the token of each row of the head's logits; None for the whole vocabulary.
    """
    probs = logits.float().softmax(-1)
    guess = probs.argmax(-1)
    if draft_tokens is not None:
        # a wrong table d2t, from rows to tokens, may name no token, or one twice
        draft_tokens = draft_tokens.clamp(0, target_probs.shape[-1] - 1)
        guess = draft_tokens[guess]
        probs = torch.zeros_like(target_probs).index_add_(1, draft_tokens, probs)
    choice = target_probs.argmax(-1)
    # a draft x from q is accepted with probability min(1, p(x) / q(x)): on average over x, sum of min(p, q)
    overlap = torch.minimum(probs, target_probs).sum(-1)
    # given that the target has chosen x, the draft was x and accepted with probability min(p, q) / p
    p = target_probs.gather(1, tokens[:, None])[:, 0]
    q = probs.gather(1, tokens[:, None])[:, 0]
    accepted = (q / p.clamp(min=1e-30)).clamp(max=1.0)
    columns = [overlap, accepted, guess == choice, choice]
    return torch.stack([column.double() for column in columns], dim=1)
