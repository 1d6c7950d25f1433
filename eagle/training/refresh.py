"""Keep a head current while the weights of its target change, in the program that changes them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from eagle.core.drafter import TrainableDrafter
from eagle.core.examples import Example, collate
from eagle.data.features import LiveFeatures, taps_of
from eagle.data.on_policy import OwnDrafts
from eagle.device import in_dtype
from eagle.recipe import OnPolicySection
from eagle.target.target import Target
from eagle.training.drafts_loss import DraftsLoss


class Refresh:
    """A head and its optimizer; in each `step` the target answers prompts with the head's drafts, to learn from both.

    The head, as `eagle.formats.checkpoint.load_head` returns it, is trained in place. The attribute `steps` counts the
    steps, and with `seed` it decides all that is sampled. To continue later, keep `steps` and the state dicts of the
    head and the optimizer.
    """

    def __init__(
        self,
        head: TrainableDrafter,
        *,
        lr: float = 1e-4,
        policy: OnPolicySection | None = None,
        seed: int = 0,
    ) -> None:
        """Make the optimizer of a head that is kept current with its target.

        Args:
            head: The head to train.
            lr: The learning rate, the same in all steps.
            policy: How answers are written and learned from; by default all of them are written with drafts.
            seed: Of the sampling and the noise.
        """
        self.head = head.train()
        self.seed = seed
        self.steps = 0
        self.policy = policy or OnPolicySection.model_validate({"share": 1.0})
        weights = [weight for weight in head.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(
            weights, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        # limit on the norm of the gradients, the default of `train.clip`
        self.clip = 0.5

    def step(
        self,
        target: Target,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int = 128,
        dtype: str = "float32",
    ) -> dict[str, float]:
        """Take one optimizer step on the target's answers to these prompts.

        Args:
            target: The target as it is now, on the head's device.
            prompts: Token ids of each prompt.
            max_new_tokens: The most tokens of an answer.
            dtype: Of the products, float32 or bfloat16.

        Returns:
            The losses by name, and "acceptance_length", the tokens per target forward of these answers.
        """
        # a seed for this step's sampling, which also names the step
        seed = self.seed + self.steps
        features = self._write_answers(target, prompts, max_new_tokens, seed)
        # `read` finds the answers of a step by torch's seed
        torch.manual_seed(seed)
        count = len(prompts)
        # a seed for each example, unlike all others as long as every step has as many prompts
        seeds = [seed * count + i for i in range(count)]
        batch = collate(features.read(range(count)), features.taps, seeds).to(target.device)
        target_head = target.head.cast(getattr(torch, dtype))
        with torch.autocast(target.device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
            losses = self.head(batch, target_head)
        # adds the loss on the head's own drafts to the total
        losses = DraftsLoss(self.policy, dtype)(self.head, (batch, target_head), losses)
        losses["total"].backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        # each decoding cycle commits its accepted tokens and one token of the target
        acceptance_length = 1.0
        if batch.drafts is not None:
            acceptance_length += float(batch.drafts.accepted.float().mean())
        figures = {name: float(value.detach()) for name, value in losses.items()}
        return {"acceptance_length": acceptance_length, **figures}

    def drafter(self, target: Target) -> Any:
        """Return a copy of the head with its present weights, in the target's dtype, ready to draft for it.

        The head itself goes on training. `target` is the model that the copy drafts for.
        """
        return in_dtype(copy.deepcopy(self.head), target.model.dtype).bind(target.head)

    def _write_answers(
        self, target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int
    ) -> OwnDrafts:
        """Let the target answer the prompts with drafts of the head, and return the answers as features to train on.

        `seed` decides the sampling, and names the step by which the answers are found again.
        """
        # tokens of each prompt and its answer, of which only the answer is learned
        examples = []
        for prompt in prompts:
            # `OwnDrafts` replaces the answer of an example: zeros hold the room for the longest answer
            tokens = torch.tensor([*prompt, *[0] * max_new_tokens])
            examples.append(Example(tokens, torch.arange(len(tokens)) >= len(prompt)))
        # the target's hidden states that this head reads and learns from, by layer
        taps = taps_of(self.head.settings, target.config)
        # a storage dtype that does not round the states of this target
        dtype = "float32"
        if target.model.dtype == torch.bfloat16:
            dtype = "bfloat16"
        live = LiveFeatures(target, examples, {"taps": list(taps), "dtype": dtype})
        features = OwnDrafts(live, target, self.head, self.policy)
        # one step: its seed, and the indices of the examples that it answers
        features.write([(seed, range(len(examples)))])
        return features
