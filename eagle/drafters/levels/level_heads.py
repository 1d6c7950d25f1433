"""Heads that guess several tokens from one state of the target: each level has a network and an LM head of its own."""

# B rows of text, K nodes of one level, S supervised slots, L taps, H width, D what an LM head reads, V vocabulary

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from eagle.core.budget import Budget
from eagle.core.drafter import Committed, Noise, Parts, TargetHead, TrainableDrafter
from eagle.core.examples import Batch
from eagle.core.tree import DraftTree, Paths
from eagle.device import upload
from eagle.drafters.parts.divisors import Divisor, level_shares, reached_levels, sum_divisors
from eagle.drafters.parts.growth import FollowsRows, grow_rows, level_rows
from eagle.drafters.parts.objectives import (
    LanguageHead,
    Loss,
    Objective,
    align_steps,
    choose_teacher,
    distillation_loss,
    reached_steps,
)
from eagle.drafters.parts.scoring import Seed
from eagle.drafters.parts.validation import validate_batch
from eagle.recipe import Section


class LevelSettings(Section):
    """Settings of all such heads in a recipe."""

    loss: Loss = "cross_entropy"  # towards the target's probs, or "tokens": towards the text's own tokens
    divisor: Divisor = "slots"  # of the loss: all supervised slots, or "levels": for each level what it reaches


class LevelHeads(TrainableDrafter):
    """A head whose level d predicts the token d + 2 places after a state of the target.

    The state of a level is computed from that of the level before and the token between them; independent levels do
    not read the token. Level 0 reads the root, a token chosen by the target.
    """

    taps = (-1,)
    teacher_taps = (-1,)
    reads_tokens = True  # whether what a level guesses depends on the tokens drafted before it
    # 25 nodes of Medusa with 0.5 / 1 / 2 / 3 keep on the tiny target 1.90 / 1.94 / 1.78 / 1.73 tokens per step at T = 1
    sharpness = 1.0

    @classmethod
    def context_taps(cls, settings: Any, target_config: Any) -> tuple[int, ...]:
        """None: all levels are made from one state."""
        return ()

    @property
    def levels(self) -> int:
        """The number of tokens that it guesses."""
        return int(self.settings.levels)

    @property
    def parts(self) -> Parts:
        """Its levels alone."""
        return Parts(levels=self.levels)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its weights."""
        return next(self.parameters()).dtype

    def read_token(self, level: int, state: Tensor, tokens: Tensor, frozen: TargetHead) -> Tensor:
        """[.., D'], the state of a level, from that of the level before [.., D] and the tokens [..] that follow it."""
        return state

    @abstractmethod
    def hidden(self, level: int, state: Tensor) -> Tensor:
        """[.., D], what a level's LM head reads of its state."""

    @abstractmethod
    def lm_heads(self, frozen: TargetHead) -> Sequence[LanguageHead]:
        """One LM head for all levels, or one for each."""

    def level_logits(self, level: int, state: Tensor, frozen: TargetHead) -> Tensor:
        """[.., V], a level's logits of its state."""
        return self.head_of(level, frozen).logits(self.hidden(level, state))

    def head_of(self, level: int, frozen: TargetHead) -> LanguageHead:
        """The LM head of a level."""
        heads = self.lm_heads(frozen)
        return heads[level if len(heads) > 1 else 0]

    # -- training -----------------------------------------------------------------------------------------------------

    @property
    def level_weights(self) -> Sequence[float]:
        """The weight of each level in the loss."""
        return [1.0] * self.levels

    def forward(self, batch: Batch, frozen: TargetHead) -> dict[str, Tensor]:
        """The loss of every level, at the slots that a draft can reach."""
        return self.distill(batch, frozen, *self.level_states(batch, frozen))

    def distill(self, batch: Batch, frozen: TargetHead, places: Tensor, hidden: Sequence[Tensor]) -> dict[str, Tensor]:
        """The loss of every level, of what its LM head reads at these slots [S, D]."""
        teacher, teacher_head, objective = self.teacher(batch, places, frozen)
        heads, dtype = (self.lm_heads(frozen), teacher_head), frozen.weight.dtype
        student, weights = align_steps(hidden), self.slot_weights(batch, places)
        total, each = distillation_loss(student, teacher, weights, heads, objective, dtype)
        return {"total": total, **{f"draft_probs/{level}": value for level, value in enumerate(each)}}

    def divisors(self, masks: Sequence[Tensor], seeds: Sequence[int]) -> tuple[float, ...]:
        """The divisor of all levels, or of each, by how far drafts from the supervised slots of these texts reach."""
        slots = [mask[2:] for mask in masks]
        reached = [reached_levels(mask, mask.nonzero()[:, 0], self.levels) for mask in slots]
        return sum_divisors(self.settings.divisor, torch.cat(reached), self.level_weights)

    def slot_weights(self, batch: Batch, places: Tensor) -> Tensor:
        """[K, S], what each level counts at each slot, in the rows of `align_steps`."""
        divisors = batch.divisors or self.divisors(batch.masks, batch.seeds)
        shares = level_shares(self.level_weights, divisors, self.dtype, places.device)
        return reached_steps(places, self.levels) * shares[:, None]

    def teacher(
        self, batch: Batch, places: Tensor, frozen: TargetHead
    ) -> tuple[Tensor, LanguageHead | None, Objective]:
        """The teacher for the token two places after each slot, and the divergence from it."""
        return choose_teacher(self.settings.loss, batch, places, frozen)

    def level_states(self, batch: Batch, frozen: TargetHead) -> tuple[Tensor, list[Tensor]]:
        """The supervised slots [S], and of each level what its LM head reads there [S, D]."""
        places, states = self.read_levels(batch, frozen)
        return places, [self.hidden(level, state) for level, state in enumerate(states)]

    def read_levels(self, batch: Batch, frozen: TargetHead) -> tuple[Tensor, list[Tensor]]:
        """The supervised slots [S], and each level's states there.

        Slot i reads state i of the target; level 0 also reads token i + 1, and names token i + 2.
        """
        places = upload(batch.loss_mask.nonzero()[:, 0] - 2, batch.tokens.device)
        state, states = self.start_states(batch, places), list[Tensor]()
        for level in range(self.levels):
            following = batch.places_behind(places, 1 + level)
            state = self.read_token(level, state, batch.tokens.index_select(0, following), frozen)
            states.append(state)
        return places, states

    def start_states(self, batch: Batch, places: Tensor) -> Tensor:
        """[S, H], what level 0 begins from: the target's states at these slots."""
        return batch.select_taps(self.taps)[:, 0].index_select(0, places).to(self.dtype)

    @torch.no_grad()
    def validate(self, batch: Batch, frozen: TargetHead, trees: dict[str, Paths]) -> dict[str, Tensor]:
        """Validation sums over the trained slots: loss terms, and tokens that each tree would have kept."""
        levels = self.draft_levels(batch, frozen, self.levels)
        return validate_batch(
            batch, [state for state, _ in levels], ([logits for _, logits in levels], frozen.logits), trees
        )

    def draft_levels(
        self, batch: Batch, frozen: TargetHead, levels: int
    ) -> list[tuple[Tensor, Callable[[Tensor], Tensor]]]:
        """Each level's states [S, D], and its LM head."""
        states = self.level_states(batch, frozen)[1][:levels]
        return [(state, self.head_of(level, frozen).logits) for level, state in enumerate(states)]

    # -- drafting -----------------------------------------------------------------------------------------------------

    def open(self) -> Any:
        """The state for several texts drafted together."""
        return LevelState(self)

    def forwards(self, budget: Budget) -> tuple[int, ...]:
        """The rows of each level after the first; none where the first forward makes all levels."""
        return level_rows(budget.within(self.levels)) if self.reads_tokens else ()

    def probe(self, context: int, rows: int, scored: int) -> Callable[[], Any]:
        """A level at so many nodes, behind the first one in the middle; all of one state where none reads tokens."""
        (frozen,), count = self.frozen, scored if self.reads_tokens else 1
        tokens = torch.zeros(1, count, dtype=torch.long, device=frozen.weight.device)
        state = torch.zeros(1, count, self.shape.hidden_size, dtype=self.dtype, device=tokens.device)
        levels = range(1 if self.reads_tokens else self.levels)
        if self.reads_tokens and scored == rows:
            levels = range(self.levels // 2, self.levels // 2 + 1)
        with torch.inference_mode():
            for level in range(levels[0]):
                state = self.read_token(level, state, tokens, frozen)

        @torch.inference_mode()
        def run() -> list[Tensor]:
            last, logits = state, list[Tensor]()
            for level in levels:
                last = self.read_token(level, last, tokens, frozen)
                logits.append(self.level_logits(level, last, frozen))
            return logits

        return run


class LevelState:
    """Length and noise of the texts; nothing else is needed, because heads read only the last state."""

    def __init__(self, head: LevelHeads) -> None:
        self.head = head
        self.noises: dict[int, Noise | None] = {}
        self.lengths: dict[int, int] = {}

    def admit(self, row: int, noise: Noise | None = None) -> None:
        """Begin a row."""
        self.noises[row], self.lengths[row] = noise, 0

    def fork(self, row: int, other: int) -> None:
        """Copy a row to a new one."""
        self.noises[other], self.lengths[other] = self.noises[row], self.lengths[row]

    def release(self, row: int) -> None:
        """Release a row."""
        del self.noises[row], self.lengths[row]

    @torch.inference_mode()
    def propose(self, updates: Mapping[int, Committed], budgets: Mapping[int, Budget]) -> dict[int, DraftTree]:
        """Trees grown from the target's state behind the last committed token of each row."""
        last, seeds = list[Tensor](), list[Seed]()
        for row, update in updates.items():
            assert update.features is not None
            self.lengths[row] += len(update.tokens)
            last.append(update.features[-1:, 0])
            seeds.append(Seed(update.root, self.lengths[row] + 1, budgets[row], self.noises[row]))
        states = torch.cat(last).to(self.head.frozen[0].weight.device, self.head.dtype)
        return dict(zip(updates, grow_levels(self.head, seeds, states), strict=True))


def grow_levels(head: LevelHeads, seeds: Sequence[Seed], states: Tensor) -> list[DraftTree]:
    """The tree of each seed, from the states [B, H] that level 0 begins from."""
    seeds = [Seed(seed.root, seed.place, seed.budget.within(head.levels), seed.noise) for seed in seeds]
    (frozen,) = head.frozen
    roots = upload(torch.tensor([[seed.root] for seed in seeds]), states.device)
    levels = _Levels(head, head.read_token(0, states[:, None], roots, frozen))
    first = head.level_logits(0, levels.first, frozen)[:, 0]
    return grow_rows(seeds, first, levels, sharpness=head.sharpness)


class _Levels(FollowsRows):
    """The states of one level of all trees after the other."""

    def __init__(self, head: LevelHeads, first: Tensor) -> None:
        self.head, self.first = head, first  # [B, 1, D]
        self.rows, self.state = list(range(len(first))), first  # of the level before

    def __call__(self, depth: int, rows: list[int], tokens: Tensor, before: Tensor, seen: Tensor) -> Tensor:
        """[B, K, V], the logits after the nodes of one level; [B, 1, V] if they are the same for all nodes."""
        head, (frozen,) = self.head, self.head.frozen
        if depth == 1:
            self.rows, self.state = list(range(len(self.first))), self.first
        (self.state,) = self.keep_rows(rows, self.state)
        if head.reads_tokens:
            above = self.state.gather(1, before[..., None].expand(-1, -1, self.state.shape[2]))
            self.state = head.read_token(depth, above, tokens, frozen)
        return head.level_logits(depth, self.state, frozen)
