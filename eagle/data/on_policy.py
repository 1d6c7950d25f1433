"""Training texts sampled from the draft model itself with its current weights (on-policy distillation)."""

# T tokens of a sequence

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
    """Conversations cut at one of their answers, which the draft model in training answers itself, at temperature 1.

    A sampled answer is at most as long as the one it replaces. The step's seed and the example's index decide which
    answer it is and its tokens, so that a resumed run samples the same. With the head in evaluation mode the
    conversations are those of the data.
    """

    sampled = True

    def __init__(self, live: LiveFeatures, head: Any) -> None:
        """Take the conversations and the target from `live`, and the draft model from `head`, which is trained."""
        super().__init__(live.target, live.examples, live.identity, live.batch_tokens)
        self.head = head
        # no thread may load ahead: an answer is sampled with the weights of the step that it is read in
        self.together = True
        # the draft model as a target to decode with, made when the first answers are sampled
        self.student: Target | None = None

    def read(self, indices: Sequence[int]) -> list[Example]:
        """Return the examples with newly sampled answers, and the target's features of them."""
        if not self.head.training:
            return super().read(indices)
        # the training loop seeds torch in every step, so that the seed identifies the step
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
        # without dropout while it decodes
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
        answered = LiveFeatures(self.target, examples, self.identity, self.batch_tokens)
        return answered.read(range(len(examples)))


def trained_target(model: Any) -> Target:
    """Return a model as a target, to decode with it while its weights are trained."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    target = Target(model)
    # Target freezes its model: let the weights learn again
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
    """Sample a continuation of each prompt, without drafts, up to a stop token or the prompt's limit.

    Args:
        model: The model that answers.
        prompts: The tokens [T] of each prompt.
        limits: The most tokens of each answer.
        samplings: The temperature and the seed of each answer.
        stops: The stop tokens of the training target, of which the model may have fewer.
    """
    # the weights have changed since the last call, so what the target caches of them is wrong
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
    """Choose one of the answers of a conversation, and return the indices of its first token and of the one after it.

    Args:
        loss_mask: [T], true at the tokens of the answers, of which there is at least one.
        draw: A random number that decides which answer it is.
    """
    # +1 where an answer begins and -1 where it has ended
    changes = F.pad(loss_mask.long(), (1, 1)).diff()
    # [answers, 2], start and end
    answers = changes.nonzero()[:, 0].view(-1, 2).tolist()
    start, end = answers[draw % len(answers)]
    # the prompt before it needs at least one token
    return max(start, 1), end
