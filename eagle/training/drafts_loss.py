"""The loss on a head's own drafts: what it learns from the target's probs after every token that it drafted."""

# A drafts, V vocabulary

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eagle.core.drafter import TargetHead, TrainableDrafter
from eagle.core.examples import Batch
from eagle.device import upload
from eagle.drafters.parts.divergences import Objective, compare_with
from eagle.recipe import OnPolicySection


class DraftsLoss:
    """A forward hook of a head, which adds the loss on the drafts of a batch: so every data-parallel wrapper sees it.

    `dtype` is that of the products.
    """

    def __init__(self, policy: OnPolicySection, dtype: str) -> None:
        self.policy = policy
        self.dtype = dtype

    def __call__(
        self, head: Any, inputs: tuple[Batch, TargetHead], losses: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the losses of the head's forward with those of the drafts."""
        if "total" not in losses:
            # a forward that only counts
            return losses
        batch, target_head = inputs
        with torch.autocast(
            batch.tokens.device.type, torch.bfloat16, enabled=self.dtype == "bfloat16"
        ):
            terms = losses_of_drafts(head, batch, target_head, self.policy)
        total = losses["total"] + self.policy.weight * (terms["accepted"] + terms["rejected"])
        return {
            **losses,
            "total": total,
            **{f"drafts/{name}": term.detach() for name, term in terms.items()},
        }


def losses_of_drafts(
    head: TrainableDrafter, batch: Batch, target_head: TargetHead, policy: OnPolicySection
) -> dict[str, Tensor]:
    """Return how the head's probs diverge from the target's where tokens were accepted, and where not.

    Both are per supervised token. The head drafts each chain again, with gradients: from the slot where it began,
    reading the tokens that it drafted.
    """
    device = batch.tokens.device
    terms = {name: torch.zeros((), device=device) for name in ("accepted", "rejected")}
    drafts = batch.drafts
    if drafts is None:
        return terms
    draft_batch = batch.on_drafts()
    target_hidden = draft_batch.select_taps((-1,))[:, 0]
    slots = upload(drafts.slots, device)
    divisor = drafts.divisor or max(batch.slots, 1)
    levels = head.draft_levels(draft_batch, target_head, drafts.tokens.shape[1])
    for level, (states, logits_of) in enumerate(levels):
        # [A], all on the host: which drafts reach this level, and how far it is behind the accepted tokens
        is_drafted = level < drafts.drafted
        rejected_by = level - drafts.accepted
        weights = policy.decay ** rejected_by.clamp(min=0).double() / divisor
        level_hidden = target_hidden.index_select(0, draft_batch.places_behind(slots, 1 + level))
        chosen = {
            "accepted": is_drafted & (rejected_by < 0),
            "rejected": is_drafted & (rejected_by >= 0),
        }
        for name, is_chosen in chosen.items():
            index = upload(is_chosen.nonzero()[:, 0], device)
            if not len(index):
                continue
            logits = logits_of(states.index_select(0, index)).float()
            with torch.no_grad():
                target_logits = target_head.logits(level_hidden.index_select(0, index)).float()
                if head.drafts is not None:
                    target_logits = target_logits[:, head.drafts]
                target_probs = target_logits.softmax(-1)
            objective = Objective(getattr(policy, name))
            level_weights = upload(weights[is_chosen].float(), device)
            terms[name] = terms[name] + diverge(logits, target_probs, objective, level_weights)
    return terms


def diverge(logits: Tensor, probs: Tensor, objective: Objective, weights: Tensor) -> Tensor:
    """Return the divergence of logits [A, V] from a teacher's probs [A, V], summed by weights [A]."""
    with torch.no_grad():
        losses, slopes = compare_with(probs, objective)(logits.clone(), logits.softmax(-1))
    slopes = slopes * weights[:, None]
    # the value is that of the losses, the gradient that which they have at the logits
    surrogate = (logits * slopes).sum()
    return surrogate - surrogate.detach() + (losses * weights).sum()
