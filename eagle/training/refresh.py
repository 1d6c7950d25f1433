"""Keep a head current while the weights of its target change, in the program that changes them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from eagle.core.drafter import TrainableDrafter
from eagle.core.examples import Example, collate
from eagle.data.features import LiveFeatures, taps_of
from eagle.data.own_drafts import OwnDrafts
from eagle.device import in_dtype
from eagle.recipe import OnPolicySection
from eagle.target.target import Target
from eagle.training.drafts_loss import DraftsLoss


class Refresh:
    """A head and its optimizer; in each `step` the target answers prompts with the head's drafts, to learn from both.

    The head, as `eagle.formats.checkpoint.load_head` gives it, is trained in place. `steps` counts, and with `seed`
    decides what is drawn; with the states of head and optimizer they are all that a continuation needs.
    """

    def __init__(
        self,
        head: TrainableDrafter,
        *,
        lr: float = 1e-4,
        policy: OnPolicySection | None = None,
        seed: int = 0,
    ) -> None:
        self.head = head.train()
        self.seed = seed
        self.steps = 0
        self.policy = policy or OnPolicySection.model_validate({"share": 1.0})
        weights = [weight for weight in head.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(
            weights, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self.clip = 0.5

    def step(
        self,
        target: Target,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int = 128,
        dtype: str = "float32",
    ) -> dict[str, float]:
        """Learn from the target's answers to these prompts, one step.

        Args:
            target: The target as it is now, on the head's device.
            prompts: Token ids of each prompt.
            max_new_tokens: The most tokens of an answer.
            dtype: Of the products, float32 or bfloat16.

        Returns:
            The losses and the acceptance length.
        """
        seed = self.seed + self.steps
        features = self._write(target, prompts, max_new_tokens, seed)
        torch.manual_seed(seed)
        count = len(prompts)
        seeds = [seed * count + i for i in range(count)]
        batch = collate(features.read(range(count)), features.taps, seeds).to(target.device)
        target_head = target.head.cast(getattr(torch, dtype))
        with torch.autocast(target.device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
            losses = self.head(batch, target_head)
        losses = DraftsLoss(self.policy, dtype)(self.head, (batch, target_head), losses)
        losses["total"].backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        # each cycle commits its accepted tokens and one of the target's
        acceptance_length = 1.0
        if batch.drafts is not None:
            acceptance_length += float(batch.drafts.accepted.float().mean())
        figures = {name: float(value.detach()) for name, value in losses.items()}
        return {"acceptance_length": acceptance_length, **figures}

    def drafter(self, target: Target) -> Any:
        """Return a copy of the head that drafts for the target, as it is now."""
        return in_dtype(copy.deepcopy(self.head), target.model.dtype).bind(target.head)

    def _write(
        self, target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int
    ) -> OwnDrafts:
        """Return the target's answers to the prompts, written with drafts of the head."""
        examples = []
        for prompt in prompts:
            # the positions of an answer
            tokens = torch.tensor([*prompt, *[0] * max_new_tokens])
            examples.append(Example(tokens, torch.arange(len(tokens)) >= len(prompt)))
        taps = taps_of(self.head.settings, target.config)
        # states are kept in the target's precision, or without rounding
        dtype = "float32"
        if target.model.dtype == torch.bfloat16:
            dtype = "bfloat16"
        live = LiveFeatures(target, examples, {"taps": list(taps), "dtype": dtype})
        features = OwnDrafts(live, target, self.head, self.policy)
        features.write([(seed, range(len(examples)))])
        return features
