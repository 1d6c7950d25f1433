"""Training texts sampled from the draft model itself with its current weights (on-policy distillation)."""

# T tokens of a text

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle.core.examples import Example
from eagle.core.noise import mix64
from eagle.core.verify import Sampling
from eagle.data.features import LiveFeatures
from eagle.decoding.decode import generate
from eagle.drafters.none import NoDrafter
from eagle.target.target import Target


class OnPolicyFeatures(LiveFeatures):
    """Conversations cut at one of their answers, which the draft model replaces by a sample at temperature 1.

    A sampled answer is at most as long as the one it replaces. The step's seed and the example's index decide the
    answer and its tokens, so a run can be resumed. In evaluation mode the conversations are those of the data.
    """

    sampled = True

    def __init__(self, live: LiveFeatures, head: Any) -> None:
        super().__init__(live.target, live.examples, live.identity, live.slots)
        self.head = head
        # read within the step, with the weights of the step
        self.together = True
        # the draft model as what decodes, from the first step on
        self.student: Target | None = None

    def read(self, indices: Sequence[int]) -> list[Example]:
        """Return the examples with new answers, and the target's features of them."""
        if not self.head.training:
            return super().read(indices)
        # the loop sets it in every step
        step_seed = mix64(torch.initial_seed())
        prompts = []
        limits = []
        samplings = []
        for index in indices:
            example = self.examples[index]
            start, end = choose_answer(example.loss_mask, mix64(step_seed + index))
            prompts.append(example.tokens[:start])
            limits.append(end - start)
            samplings.append(Sampling(temperature=1.0, seed=step_seed, request=index))
        self.head.eval()
        self.student = self.student or trained_target(self.head.model)
        answers = sample_answers(
            self.student, prompts, limits, samplings, stops=self.target.stop_tokens
        )
        self.head.train()
        examples = []
        for prompt, answer in zip(prompts, answers, strict=True):
            tokens = torch.cat([prompt, answer])
            examples.append(Example(tokens, torch.arange(len(tokens)) >= len(prompt)))
        return LiveFeatures(self.target, examples, self.identity, self.slots).read(
            range(len(examples))
        )


def trained_target(model: Any) -> Target:
    """Return a model as a target in evaluation mode, to decode with while its weights are trained."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    target = Target(model)
    # a target freezes its model
    for weight in trained:
        weight.requires_grad_(True)
    return target


def sample_answers(
    model: Target,
    prompts: Sequence[Tensor],
    limits: Sequence[int],
    samplings: Sequence[Sampling],
    stops: Sequence[int],
) -> list[Tensor]:
    """Return a continuation of each prompt [T], up to a stop token or the prompt's limit."""
    # its weights have changed
    model.forget()
    prompt_tokens = [prompt.tolist() for prompt in prompts]
    traces = generate(
        model,
        NoDrafter(),
        prompt_tokens,
        sampling=samplings,
        stop=[token for token in stops if 0 <= token < model.vocab_size],
        max_new_tokens=[
            min(limit, model.room(tokens))
            for limit, tokens in zip(limits, prompt_tokens, strict=True)
        ],
        batch_size=len(prompts),
    )
    return [torch.tensor(trace.checked().tokens) for trace in traces]


def choose_answer(loss_mask: Tensor, draw: int) -> tuple[int, int]:
    """Return start (at least 1) and end of one of the answers; `draw` is a random number."""
    # +1 where an answer begins and -1 where it has ended
    changes = F.pad(loss_mask.long(), (1, 1)).diff()
    answers = changes.nonzero()[:, 0].view(-1, 2).tolist()
    start, end = answers[draw % len(answers)]
    return max(start, 1), end
