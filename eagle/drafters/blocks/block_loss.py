"""The loss of blocks: how each level's probs differ from the target's, or from the sequence's own tokens."""

# A anchors, K levels, H hidden

from __future__ import annotations

import torch
from torch import Tensor

from eagle.core.drafter import TargetHead
from eagle.core.examples import Batch
from eagle.drafters.blocks.anchors import Anchors
from eagle.drafters.blocks.injected_head import InjectedHead, InjectedSettings
from eagle.drafters.parts.objectives import (
    ROWS,
    LanguageHead,
    Loss,
    Objective,
    distillation_loss,
)


class ComparedSettings(InjectedSettings):
    """Settings of such a head in a recipe."""

    # `tokens`: cross-entropy with the tokens of the data; otherwise a divergence from the target's probabilities
    # (the published loss is `tokens`)
    loss: Loss = "cross_entropy"
    d_pace: bool = False  # weight levels by how likely a draft is to reach them, instead of `decay`


class ComparedBlocks(InjectedHead):
    """A head whose levels learn the target's probs, or the sequence's tokens, after sampled anchors."""

    settings: ComparedSettings

    @property
    def level_weights(self) -> list[float]:
        """The weight of each level in the loss; with `d_pace` all are 1, as `pace_levels` gives the weights then."""
        return [1.0] * self.levels if self.settings.d_pace else super().level_weights

    @property
    def counts_by_forward(self) -> bool:  # type: ignore[override]
        """Whether the divisor of the loss depends on the head's states, so that only a forward can compute it."""
        return bool(self.settings.d_pace and self.settings.divisor == "weights")

    def forward(
        self, batch: Batch, target_head: TargetHead, count: bool = False
    ) -> dict[str, Tensor]:
        """Return the loss over all levels of the blocks after sampled anchors, as "total", and terms that are logged.

        There are A anchors, the slots after which blocks are drafted, and K levels.

        Args:
            batch: The sequences, with the target's states.
            target_head: The target's embedding and LM head.
            count: Whether to return the loss's divisor, as "divisor", in place of the loss; see `counts_by_forward`.
        """
        settings = self.settings
        anchors, states = self.read_anchors(batch, target_head)  # states [A, K, H]
        # tokens are counted as rows of the draft vocabulary; those outside of it are no labels: their loss is 0, and
        # they count in the mean all the same
        tokens, in_vocab = self.find_drafts(anchors.tokens_of(batch))  # [A, K]
        head = self.output_head(target_head)
        # [A, K] bool: whether a level has a loss, as all tokens up to the one that it predicts are supervised
        reached = anchors.reached
        # both need the label: the loss as what it learns, the paces for the head's prob of it
        if settings.loss == "tokens" or settings.d_pace:
            reached = reached & in_vocab
        # L = sum_ak w_k * CE(q_ak) / divisor, with w_k = e^(-k / decay), or D-PACE's weights
        weights = reached * self.level_shares(batch)
        if settings.d_pace:
            # with `d_pace` every w_k was 1, so that `weights` are 1 / divisor where a level is reached
            paces = pace_levels(states, tokens, reached, head)  # [A, K]
            # With the divisor "weights" the loss is divided by the sum of the paces of all batches of a step. Training
            # first calls this with `count` for each batch, and sums the results to `batch.divisors`. 1e-9 avoids a
            # division by zero.
            if count:
                return {"divisor": paces.sum()}
            if settings.divisor != "weights":
                weights = paces * weights
            elif batch.divisors:
                weights = paces / max(batch.divisors[0], 1e-9)
            else:
                weights = paces / paces.sum().clamp(min=1e-9)
        return self.losses(batch, anchors, states, weights, target_head=head)

    def losses(
        self,
        batch: Batch,
        anchors: Anchors,
        states: Tensor,
        weights: Tensor,
        target_head: TargetHead,
    ) -> dict[str, Tensor]:
        """Return the loss of blocks as "total"; subclasses add terms of their own.

        Args:
            batch: The sequences, with the target's states.
            anchors: The A slots after which the blocks are drafted.
            states: The states [A, K, H] of the blocks' K levels.
            weights: The weight of each level in the loss [A, K], divided already.
            target_head: The target's LM head, with the rows of the draft vocabulary alone.
        """
        return {"total": self.compare(batch, anchors, states, weights, (target_head, target_head))}

    def compare(
        self,
        batch: Batch,
        anchors: Anchors,
        states: Tensor,
        weights: Tensor,
        heads: tuple[LanguageHead, TargetHead],
    ) -> Tensor:
        """Return how the probs of all levels differ from the target's, or from the sequence's tokens, as one number.

        Args:
            batch: As in `losses`, like the next three.
            anchors: The A slots after which the blocks are drafted.
            states: The states [A, K, H] of the blocks' K levels.
            weights: The weight of each level in the loss [A, K].
            heads: The LM heads of the student and of the target.
        """
        settings = self.settings
        student, teacher_head = heads
        # the cross-entropy of the sequence's tokens; for all other losses, a divergence from the target's probs
        objective = Objective() if settings.loss == "tokens" else Objective(settings.loss)
        if settings.loss == "tokens":
            teacher, _ = self.find_drafts(anchors.tokens_of(batch))
        else:
            teacher = anchors.states_before(batch)
        # every level of every anchor is a row of one step: [1, A * K, ..]; the second result is the loss by step
        total, _ = distillation_loss(
            states.flatten(0, 1)[None],
            teacher.flatten(0, 1),
            weights.flatten()[None],
            (student, None if settings.loss == "tokens" else teacher_head),
            objective=objective,
            dtype=teacher_head.weight.dtype,
        )
        return total


@torch.no_grad()
def pace_levels(states: Tensor, tokens: Tensor, reached: Tensor, target_head: TargetHead) -> Tensor:
    """Return D-PACE's loss weights [A, K]: how much of a draft's expected length depends on each level.

    There are drafts after A anchors, each of K levels. The weights have no gradient.

    A level is accepted with probability s = (1 + p) / 2 by assumption, where p is the head's prob of the sequence's
    token. The expected length is the sum over k of s_1 ... s_k. The weight of level k is the sum of the terms that
    contain s_k: those from k on.

    Args:
        states: The head's states [A, K, H].
        tokens: The sequences' tokens that they predict [A, K], as rows of the draft vocabulary.
        reached: [A, K] bool; a level that is not reached has the weight 0.
        target_head: The target's LM head, with the rows of the draft vocabulary alone.
    """
    wide = torch.promote_types(states.dtype, torch.float32)
    # ROWS rows at a time, as logits of all rows may not fit in memory
    probs = []
    for chunk, chunk_tokens in zip(
        states.flatten(0, 1).split(ROWS), tokens.flatten().split(ROWS), strict=True
    ):
        chunk_probs = target_head.logits(chunk).softmax(-1, dtype=wide)
        probs.append(chunk_probs.gather(1, chunk_tokens[:, None])[:, 0])
    # s_k, and 0 at levels that are not reached, so that the products below end there
    accepted = (0.5 + 0.5 * torch.cat(probs).view(tokens.shape)) * reached
    # sum over j >= k of s_1 ... s_j: a reversed cumulative sum
    lengths = accepted.cumprod(1)
    return lengths.flip(1).cumsum(1).flip(1) * reached
