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
        self.policy, self.dtype = policy, dtype

    def __call__(self, head: Any, inputs: tuple[Batch, TargetHead], losses: dict[str, Tensor]) -> dict[str, Tensor]:
        """The losses of the head's forward with those of the drafts."""
        if "total" not in losses:  # a forward that only counts
            return losses
        batch, frozen = inputs
        with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=self.dtype == "bfloat16"):
            terms = losses_of_drafts(head, batch, frozen, self.policy)
        total = losses["total"] + self.policy.weight * (terms["accepted"] + terms["rejected"])
        return {**losses, "total": total, **{f"drafts/{name}": term.detach() for name, term in terms.items()}}


def losses_of_drafts(
    head: TrainableDrafter, batch: Batch, frozen: TargetHead, policy: OnPolicySection
) -> dict[str, Tensor]:
    """How the head's probs diverge from the target's where tokens were accepted, and where not, a supervised token.

    The head drafts each chain again, with gradients: from the slot where it began, reading the tokens that it drafted.
    """
    zero = torch.zeros((), device=batch.tokens.device)
    terms = {"accepted": zero, "rejected": zero}
    drafts = batch.drafts
    if drafts is None:
        return terms
    told, device = batch.on_drafts(), batch.tokens.device
    true, places = told.select_taps((-1,))[:, 0], upload(drafts.slots, device)
    divisor = drafts.divisor or max(batch.slots, 1)
    for level, (states, logits_of) in enumerate(head.draft_levels(told, frozen, drafts.tokens.shape[1])):
        behind = level - drafts.accepted
        inside = level < drafts.drafted
        weights = policy.decay ** behind.clamp(min=0).double() / divisor
        taught = true.index_select(0, told.places_behind(places, 1 + level))
        for name, chosen in (("accepted", inside & (behind < 0)), ("rejected", inside & (behind >= 0))):
            index = upload(chosen.nonzero()[:, 0], device)
            if not len(index):
                continue
            logits = logits_of(states.index_select(0, index)).float()
            with torch.no_grad():
                target_logits = frozen.logits(taught.index_select(0, index)).float()
                probs = (target_logits if head.drafts is None else target_logits[:, head.drafts]).softmax(-1)
            weight = upload(weights[chosen].float(), device)
            terms[name] = terms[name] + diverge(logits, probs, Objective(getattr(policy, name)), weight)
    return terms


def diverge(logits: Tensor, probs: Tensor, objective: Objective, weights: Tensor) -> Tensor:
    """The divergence of logits [A, V] from a teacher's probs [A, V], summed by weights [A]."""
    with torch.no_grad():
        losses, slopes = compare_with(probs, objective)(logits.clone(), logits.softmax(-1))
    slopes = slopes * weights[:, None]
    # the value is that of the losses, the gradient that which they have at the logits
    surrogate = (logits * slopes).sum()
    return surrogate - surrogate.detach() + (losses * weights).sum()
