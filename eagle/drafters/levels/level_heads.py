"""Heads that predict several tokens from one state of the target: each level has its own network."""

# B sequences, K nodes of one level, S supervised slots, H hidden, D what an LM head reads, V vocabulary

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from eagle.core.budget import Budget
from eagle.core.drafter import Committed, Parts, TargetHead
from eagle.core.examples import Batch
from eagle.core.tree import DraftTree
from eagle.device import upload
from eagle.drafters.parts.decoder_block import head_shape
from eagle.drafters.parts.divisors import (
    Divisor,
    level_shares,
    reached_levels,
    sum_divisors,
)
from eagle.drafters.parts.growth import FollowsRows, grow_rows, level_rows
from eagle.drafters.parts.objectives import (
    LanguageHead,
    Loss,
    align_steps,
    choose_teacher,
    distillation_loss,
    reached_steps,
)
from eagle.drafters.parts.scoring import DraftRequest
from eagle.drafters.parts.sequence_state import SequenceLengths
from eagle.drafters.parts.validation import ValidatedHead
from eagle.recipe import Section


class LevelSettings(Section):
    """Settings of all such heads in a recipe."""

    # `tokens`: cross-entropy with the tokens of the data; otherwise a divergence from the target's probabilities
    loss: Loss = "cross_entropy"
    # divisor of the loss: the number of supervised slots, or "levels": for each level the number of slots that it
    # reaches
    divisor: Divisor = "slots"


class LevelHeads(ValidatedHead):
    """A head whose level d predicts the token d + 2 positions after a state of the target.

    The state of a level is computed from that of the level before and the token between them; independent levels do
    not read the token. Level 0 reads the root, a token chosen by the target.
    """

    taps = (-1,)
    teacher_taps = (-1,)
    reads_tokens = True  # whether a level's logits depend on the tokens drafted before it
    # the factor on logits in trees: with Medusa on the tiny target, 25 nodes and T = 1, the acceptance length is
    # 1.90 / 1.94 / 1.78 / 1.73 with the factors 0.5 / 1 / 2 / 3
    sharpness = 1.0
    network_keys: tuple[str, ...]  # the settings that decide what its weights mean

    @classmethod
    def context_taps(cls, settings: Any, target_config: Any) -> tuple[int, ...]:
        """Return no taps, as training reads the target's states at no other positions than supervised slots.

        Taps, the target's layers whose inputs are stored, would be stored for every position if they were named here.
        """
        return ()

    @classmethod
    def for_target(
        cls,
        settings: Any,
        target_config: Any,
        target_head: TargetHead | None = None,
        supervised: Iterable[Tensor] | None = None,
    ) -> Any:
        """Return new heads with the target's width, as `start` initialises them; `supervised` is not used."""
        head = cls(settings, head_shape(target_config))
        head.start(target_head)
        return head

    @abstractmethod
    def start(self, target_head: TargetHead | None) -> None:
        """Initialise the weights of new heads, from the target's LM head where it is given."""

    @property
    def network(self) -> dict[str, Any]:
        """The network's name and the settings that decide what its weights mean."""
        return {
            "network": self.settings.kind,
            **{key: getattr(self.settings, key) for key in self.network_keys},
        }

    @property
    def levels(self) -> int:
        """The number of levels that it drafts, one token each."""
        return int(self.settings.levels)

    @property
    def parts(self) -> Parts:
        """What `eagle doctor` checks of the weights after a conversion: only the number of levels."""
        return Parts(levels=self.levels)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its weights."""
        return next(self.parameters()).dtype

    def read_token(
        self, level: int, state: Tensor, tokens: Tensor, target_head: TargetHead
    ) -> Tensor:
        """Return the state of a level from that of the level before and the next token.

        Independent levels ignore the tokens; by default the state that they get is returned.

        Args:
            level: The level, counted from 0.
            state: The state [.., width] of the level before, for level 0 the one from `start_states`.
            tokens: [..], the tokens after these states; level 0 reads the root.
            target_head: The target's embedding.
        """
        return state

    @abstractmethod
    def hidden(self, level: int, state: Tensor) -> Tensor:
        """Return the input [.., width] of a level's LM head from the level's state, which `read_token` returned."""

    @abstractmethod
    def lm_heads(self, target_head: TargetHead) -> Sequence[LanguageHead]:
        """Return one LM head for all levels, or one for each."""

    def level_logits(self, level: int, state: Tensor, target_head: TargetHead) -> Tensor:
        """Return a level's logits [.., V] over all tokens from the level's state, which `read_token` returned."""
        return self.head_of(level, target_head).logits(self.hidden(level, state))

    def head_of(self, level: int, target_head: TargetHead) -> LanguageHead:
        """Return the LM head of a level; it may be shared by all levels."""
        heads = self.lm_heads(target_head)
        return heads[level if len(heads) > 1 else 0]

    # -- training -----------------------------------------------------------------------------------------------------

    @property
    def level_weights(self) -> Sequence[float]:
        """The weight of each level in the loss."""
        return [1.0] * self.levels

    def forward(self, batch: Batch, target_head: TargetHead) -> dict[str, Tensor]:
        """Return the distillation loss over all levels.

        A slot i has the target's state of token i; level 0 predicts token i + 2 there. It counts in level d if a draft
        that began d slots earlier reaches it. "total" is minimised, the losses of the levels are logged.
        """
        # slot indices and the levels' LM head inputs
        return self.distill(batch, target_head, *self.level_states(batch, target_head))

    def distill(
        self,
        batch: Batch,
        target_head: TargetHead,
        slot_indices: Tensor,
        hidden: Sequence[Tensor],
    ) -> dict[str, Tensor]:
        """Return the distillation loss over all levels and that of each level.

        Args:
            batch: The sequences, with the target's states.
            target_head: The target's LM head.
            slot_indices: [S], the index of each of S supervised slots among all tokens.
            hidden: For each level the inputs of its LM head at the slots [S, width].
        """
        # L = sum_k w_k sum_r D(p_r, q_kr) / divisor, with the weight w_k of level k, the teacher's probs p_r at slot r
        # and the level's q_kr
        teacher, teacher_head, objective = choose_teacher(
            self.settings.loss, batch, slot_indices, target_head
        )
        total, level_losses = distillation_loss(
            align_steps(hidden),
            teacher,
            self.slot_weights(batch, slot_indices),
            (self.lm_heads(target_head), teacher_head),
            objective=objective,
            dtype=target_head.weight.dtype,
        )
        return {
            "total": total,
            **{f"draft_probs/{level}": loss for level, loss in enumerate(level_losses)},
        }

    def divisors(self, masks: Sequence[Tensor], seeds: Sequence[int]) -> tuple[float, ...]:
        """Return the divisor of the loss: one for all levels, or one for each level; see `divisors.Divisor`.

        Args:
            masks: The loss mask of each sequence.
            seeds: Not used, as drafts begin at all supervised slots.
        """
        reached = []
        for mask in masks:
            # slot i predicts token i + 2 at level 0
            supervised = mask[2:]
            reached.append(reached_levels(supervised, supervised.nonzero()[:, 0], self.levels))
        return sum_divisors(self.settings.divisor, torch.cat(reached), self.level_weights)

    def slot_weights(self, batch: Batch, slot_indices: Tensor) -> Tensor:
        """Return the loss weight [K, S] of each of K levels at each of S supervised slots.

        It is for states that `align_steps` has shifted: level d of a slot is from the draft that began d slots earlier.
        It is 0 if there is no such draft, or if it does not reach the slot. `slot_indices` [S] are among all tokens.
        """
        # those of the whole training step, of which the batch may be a part, or of the batch alone
        divisors = batch.divisors or self.divisors(batch.masks, batch.seeds)
        shares = level_shares(self.level_weights, divisors, self.dtype, slot_indices.device)
        return reached_steps(slot_indices, self.levels) * shares[:, None]

    def level_states(self, batch: Batch, target_head: TargetHead) -> tuple[Tensor, list[Tensor]]:
        """Return the token index of each of S supervised slots [S], and each level's LM head inputs [S, width]."""
        slot_indices, states = self.read_levels(batch, target_head)
        return slot_indices, [self.hidden(level, state) for level, state in enumerate(states)]

    def read_levels(self, batch: Batch, target_head: TargetHead) -> tuple[Tensor, list[Tensor]]:
        """Return the token index of each of S supervised slots [S], and each level's states there [S, width].

        Slot i reads the target's state of token i. Level 0 also reads token i + 1 and predicts token i + 2.
        """
        # slot i is supervised if token i + 2 is
        slot_indices = upload(batch.loss_mask.nonzero()[:, 0] - 2, batch.tokens.device)
        state = self.start_states(batch, slot_indices)
        states = []
        for level in range(self.levels):
            # level d reads token i + 1 + d, the sequence's token in place of a drafted one
            following = batch.places_behind(slot_indices, 1 + level)
            state = self.read_token(
                level, state, batch.tokens.index_select(0, following), target_head
            )
            states.append(state)
        return slot_indices, states

    def start_states(self, batch: Batch, slot_indices: Tensor) -> Tensor:
        """Return the states [S, H] that level 0 reads at S slots: the target's (H: the hidden size).

        `slot_indices` [S] are the slots' indices among all tokens.
        """
        return batch.select_taps(self.taps)[:, 0].index_select(0, slot_indices).to(self.dtype)

    def draft_levels(
        self,
        batch: Batch,
        target_head: TargetHead,
        levels: int,
    ) -> list[tuple[Tensor, Callable[[Tensor], Tensor]]]:
        """Return for each level its LM head's inputs [S, width] at S supervised slots, and that LM head's `logits`.

        There are at most `levels` of them. A draft begins at every supervised slot, with the sequence's tokens as draft
        tokens.
        """
        _, states = self.level_states(batch, target_head)
        return [
            (state, self.head_of(level, target_head).logits)
            for level, state in enumerate(states[:levels])
        ]

    # -- drafting -----------------------------------------------------------------------------------------------------

    def open(self) -> Any:
        """Return the state for several sequences drafted in a batch; it has no KV cache."""
        return LevelState(self)

    def forwards(self, budget: Budget) -> tuple[int, ...]:
        """Return how many nodes each forward after the first reads; empty if one forward makes all levels' logits.

        The cost of a draft within this budget is forecast from it.
        """
        return level_rows(budget.within(self.levels)) if self.reads_tokens else ()

    def probe(self, context: int, rows: int, scored: int) -> Callable[[], Any]:
        """Return a function whose seconds are measured: one level at `scored` nodes, whose logits it returns.

        If levels do not read tokens it is all levels of one state. Decoding forecasts the cost of drafts from such
        seconds.

        Args:
            context: Not used, as the heads have no cache.
            rows: How many tokens the forward would read. As many as `scored` stand for a later level, more for the
                first one.
            scored: How many nodes get logits.
        """
        target_head = self.target_head
        count = 1
        first = 0
        last = self.levels
        if self.reads_tokens:
            count = scored
            # a forward with all rows scored is a later level; the middle level represents all of them
            first = self.levels // 2 if scored == rows else 0
            last = first + 1
        tokens = torch.zeros(1, count, dtype=torch.long, device=target_head.weight.device)
        start = torch.zeros(
            1, count, self.shape.hidden_size, dtype=self.dtype, device=tokens.device
        )
        # the state that the first measured level gets, made now so that it is not measured
        with torch.inference_mode():
            for level in range(first):
                start = self.read_token(level, start, tokens, target_head)

        @torch.inference_mode()
        def run() -> list[Tensor]:
            """Run the measured levels, and return the logits of each."""
            state = start
            logits = []
            for level in range(first, last):
                state = self.read_token(level, state, tokens, target_head)
                logits.append(self.level_logits(level, state, target_head))
            return logits

        return run


class LevelState(SequenceLengths):
    """The drafting state: each sequence's length and noise. It has no cache, as heads read only the last state."""

    def __init__(self, head: LevelHeads) -> None:
        """Begin without sequences; a row is a sequence of the decoding batch."""
        super().__init__()
        self.head = head

    @torch.inference_mode()
    def propose(
        self,
        updates: Mapping[int, Committed],
        budgets: Mapping[int, Budget],
    ) -> dict[int, DraftTree]:
        """Return a draft tree for each row (sequence), from the target's state at its last committed token.

        Args:
            updates: By row the tokens that were committed since its last draft, the target's features at them, and the
                root, the token that the target chose next.
            budgets: By row the size of its tree.
        """
        features = []
        requests = []
        for row, update in updates.items():
            assert update.features is not None
            self.lengths[row] += len(update.tokens)
            # the features are [new tokens, 1, hidden size], as there is one tap; heads read only the state of the last
            # token: [1, hidden size]
            features.append(update.features[-1:, 0])
            requests.append(self.request(row, update.root, budgets[row]))
        # [rows, hidden size], on the device of the target's LM head
        states = torch.cat(features).to(self.head.target_head.weight.device, self.head.dtype)
        return dict(zip(updates, grow_levels(self.head, requests, states), strict=True))


def grow_levels(
    head: LevelHeads, requests: Sequence[DraftRequest], states: Tensor
) -> list[DraftTree]:
    """Return the draft tree of each request, in the same order.

    Args:
        head: The head that drafts.
        requests: The root, position, budget and noise of each of B rows, the sequences of the batch.
        states: The states [B, H] that level 0 reads besides the roots, H the hidden size.
    """
    # a tree has at most as many levels as the head
    requests = [replace(request, budget=request.budget.within(head.levels)) for request in requests]
    target_head = head.target_head
    # level 0 reads the root, the same token for all nodes of a tree
    roots = upload(torch.tensor([[request.root] for request in requests]), states.device)
    # [:, None]: the root is the only node of its level; the logits [B, V] are those of the roots' children
    levels = _Levels(head, head.read_token(0, states[:, None], roots, target_head))
    first = head.level_logits(0, levels.first, target_head)[:, 0]
    return grow_rows(requests, first, levels, sharpness=head.sharpness)


class _Levels(FollowsRows):
    """Computes the levels of all trees, one after the other; see `RowsLevel`."""

    def __init__(self, head: LevelHeads, first: Tensor) -> None:
        """Begin the drafts of B rows (sequences) with the states `first` [B, 1, width] of level 0, one for a root."""
        self.head = head
        self.first = first  # the states of level 0, [B, 1, width]
        self._begin()

    def _begin(self) -> None:
        """Reset to level 0 of all rows, for a new draft."""
        self.rows = list(range(len(self.first)))
        self.state = self.first  # of the level before

    def __call__(
        self,
        depth: int,
        rows: list[int],
        tokens: Tensor,
        parents: Tensor,
        tree_mask: Tensor,
    ) -> Tensor:
        """Return the logits after the nodes of one level: [B, K, V], or [B, 1, V] if they are the same for all nodes.

        Args:
            depth: Of the nodes; the root has depth 0. It is also the head's level that reads them.
            rows: The B rows whose trees still grow, as indices among those that the drafts began with.
            tokens: [B, K], of the K nodes of the level in each tree.
            parents: [B, K], the index of each node's parent in the level above.
            tree_mask: Not used, as levels have no attention.
        """
        target_head = self.head.target_head
        if depth == 1:
            self._begin()
        (self.state,) = self.keep_rows(rows, self.state)
        # independent levels have one state for all nodes
        if self.head.reads_tokens:
            parent_states = self.state.take_along_dim(parents[..., None], 1)
            self.state = self.head.read_token(depth, parent_states, tokens, target_head)
        return self.head.level_logits(depth, self.state, target_head)
