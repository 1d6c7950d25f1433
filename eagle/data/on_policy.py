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
        self.together = True  # read within the step, with the weights of the step
        self.student: Target | None = None  # the draft model as what decodes, from the first step on

    def read(self, indices: Sequence[int]) -> list[Example]:
        """The examples with new answers, and the target's features of them."""
        if not self.head.training:
            return super().read(indices)
        step = mix64(torch.initial_seed())  # which the loop sets in every step
        spans = [choose_answer(self.examples[index].loss_mask, mix64(step + index)) for index in indices]
        prompts = [self.examples[index].tokens[:start] for index, (start, _) in zip(indices, spans, strict=True)]
        limits = [end - start for start, end in spans]
        samplings = [Sampling(temperature=1.0, seed=step, request=index) for index in indices]
        self.head.eval()
        self.student = self.student or trained_target(self.head.model)
        answers = sample_answers(self.student, prompts, limits, samplings, self.target.stop_tokens)
        self.head.train()
        texts = [
            Example(torch.cat([prompt, answer]), torch.arange(len(prompt) + len(answer)) >= len(prompt))
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        return LiveFeatures(self.target, texts, self.identity, self.slots).read(range(len(texts)))


def trained_target(model: Any) -> Target:
    """A model as a target in evaluation mode, to decode with while its weights are trained."""
    learning = [weight for weight in model.parameters() if weight.requires_grad]
    target = Target(model)
    for weight in learning:
        weight.requires_grad_(True)
    return target


def sample_answers(
    model: Target, prompts: Sequence[Tensor], limits: Sequence[int], samplings: Sequence[Sampling], stops: Sequence[int]
) -> list[Tensor]:
    """A continuation of each prompt [T], up to a stop token or the prompt's limit."""
    model.forget()  # its weights have changed
    stop_tokens = [token for token in stops if 0 <= token < model.vocab_size]
    options: dict[str, Any] = {"sampling": samplings, "stop": stop_tokens}
    texts = [prompt.tolist() for prompt in prompts]
    limits = [min(limit, model.room(text)) for limit, text in zip(limits, texts, strict=True)]
    traces = generate(model, NoDrafter(), texts, max_new_tokens=limits, batch_size=len(texts), **options)
    return [torch.tensor(trace.checked().tokens) for trace in traces]


def choose_answer(loss_mask: Tensor, draw: int) -> tuple[int, int]:
    """Start (at least 1) and end of one of the answers."""
    edges = F.pad(loss_mask.long(), (1, 1)).diff().nonzero()[:, 0].view(-1, 2).tolist()
    start, end = edges[draw % len(edges)]
    return max(start, 1), end
