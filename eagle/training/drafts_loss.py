"""The loss on a head's own drafts: what it learns from the target's probs after every token that it drafted."""

# A drafts, H hidden size, V vocabulary (of the draft, where it has a smaller one)

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
    """A forward hook that adds the loss on a batch's drafts to the losses of a head's forward.

    It is a hook and no second call, because data-parallel wrappers synchronise the gradients of one forward alone.
    """

    def __init__(self, policy: OnPolicySection, dtype: str) -> None:
        """Make the hook, which torch calls after each forward of the head.

        Args:
            policy: The section `train.on_policy` of the recipe: weights and kinds of the loss on drafts.
            dtype: That of the matrix products: "bfloat16" turns autocast on.
        """
        self.policy = policy
        self.dtype = dtype

    def __call__(
        self, head: Any, inputs: tuple[Batch, TargetHead], losses: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the losses of the head's forward with those of the drafts added; torch calls it after each forward.

        Args:
            head: The module whose forward has run.
            inputs: The arguments of that forward.
            losses: What it returned: "total" is minimised, the rest is logged.
        """
        # a forward with `count=True` returns its divisor and no loss
        if "total" not in losses:
            return losses
        batch, target_head = inputs
        with torch.autocast(
            batch.tokens.device.type, torch.bfloat16, enabled=self.dtype == "bfloat16"
        ):
            terms = losses_of_drafts(head, batch, target_head, self.policy)
        total = losses["total"] + self.policy.weight * (terms["accepted"] + terms["rejected"])
        logged = {f"drafts/{name}": term.detach() for name, term in terms.items()}
        return {**losses, "total": total, **logged}


def losses_of_drafts(
    head: TrainableDrafter, batch: Batch, target_head: TargetHead, policy: OnPolicySection
) -> dict[str, Tensor]:
    """Return two losses on the chains that the head drafted: of its accepted tokens, and of its rejected ones.

    The head drafts each chain of `batch.drafts` again, now with gradients: it starts from the same slot and reads the
    tokens that it drafted then. Each level's probs are compared with the target's after the same tokens. A slot is the
    position of the last target state that a draft reads; level 0 is the first drafted token.

    Args:
        head: The head that trains.
        batch: N tokens of whole sequences, with A drafts of at most K tokens each.
        target_head: The target's embedding and LM head, whose probs teach.
        policy: The section `train.on_policy`: the divergence for each kind of token, and the decay of weights.

    Returns:
        "accepted" and "rejected", divergences summed over drafted tokens and divided by the number of supervised
        tokens.
    """
    device = batch.tokens.device
    terms = {name: torch.zeros((), device=device) for name in ("accepted", "rejected")}
    drafts = batch.drafts
    if drafts is None:
        return terms
    # the drafts' tokens and states are appended to the batch, and only their slots are supervised
    draft_batch = batch.on_drafts()
    # [N + A K, H], the target's input to its LM head (tap -1) at the sequences' tokens, then at the drafted ones
    target_hidden = draft_batch.select_taps((-1,))[:, 0]
    slots = upload(drafts.slots, device)
    # the supervised tokens of the whole step, or of this batch if it is the whole step
    divisor = drafts.divisor or max(batch.slots, 1)
    # for each of K levels: the head's states [A, ..] at all drafts, and the LM head that reads them
    levels = head.draft_levels(draft_batch, target_head, drafts.tokens.shape[1])
    for level, (states, logits_of) in enumerate(levels):
        # The next three are [A] and on the host. A draft may have no token at this level. `accepted` counts the
        # accepted tokens, so level `accepted` holds the first rejected one, and weights decay with the distance behind
        # it.
        is_drafted = level < drafts.drafted
        distance = level - drafts.accepted
        weights = policy.decay ** distance.clamp(min=0).double() / divisor
        # [A, H], the target's states at the tokens before those of this level, which predict them
        level_hidden = target_hidden.index_select(0, draft_batch.places_behind(slots, 1 + level))
        chosen = {
            "accepted": is_drafted & (distance < 0),
            "rejected": is_drafted & (distance >= 0),
        }
        for name, is_chosen in chosen.items():
            index = upload(is_chosen.nonzero()[:, 0], device)
            # no draft has a token of this kind at this level
            if not len(index):
                continue
            # [A', V] at the A' chosen drafts
            logits = logits_of(states.index_select(0, index)).float()
            with torch.no_grad():
                target_logits = target_head.logits(level_hidden.index_select(0, index)).float()
                # a head with a draft vocabulary has logits of its tokens alone
                if head.drafts is not None:
                    target_logits = target_logits[:, head.drafts]
                target_probs = target_logits.softmax(-1)
            # the kind of divergence that the recipe names for accepted, or for rejected tokens
            objective = Objective(kind=getattr(policy, name))
            level_weights = upload(weights[is_chosen].float(), device)
            terms[name] = terms[name] + weighted_divergence(
                logits, target_probs, objective, level_weights
            )
    return terms


def weighted_divergence(
    logits: Tensor, probs: Tensor, objective: Objective, weights: Tensor
) -> Tensor:
    """Return the divergence of the student's logits [A, V] from the teacher's probs [A, V], summed by weights [A].

    A are drafted tokens, V the vocabulary. The gradient by the logits comes from a formula and not from autograd.
    """
    # the function that `compare_with` makes returns losses [A] and their gradients by the logits [A, V]; it may
    # overwrite its arguments
    with torch.no_grad():
        losses, slopes = compare_with(probs, objective)(logits.clone(), logits.softmax(-1))
    slopes = slopes * weights[:, None]
    # d(surrogate)/d(logits) = slopes; subtracting its detached value leaves the gradient, and adds the losses' value
    surrogate = (logits * slopes).sum()
    return surrogate - surrogate.detach() + (losses * weights).sum()
