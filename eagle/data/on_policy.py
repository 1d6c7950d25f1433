"""Training texts sampled from the draft model itself with its current weights (on-policy distillation)."""

# B texts, T tokens of a text, V vocabulary

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eagle.core.noise import Noise, mix64
from eagle.data.examples import Example
from eagle.data.features import LiveFeatures


class OnPolicyFeatures(LiveFeatures):
    """Conversations cut at one of their answers, which the draft model samples anew at temperature 1.

    A sampled answer is no longer than the one it replaces. The step's seed and the example's index decide which answer
    and which tokens, so that a run can be resumed. In evaluation mode the conversations are those of the data.
    """

    def __init__(self, live: LiveFeatures, head: Any) -> None:
        super().__init__(live.target, live.examples, live.identity, live.slots)
        self.head = head
        self.together = True  # read within the step, with the weights of the step

    def read(self, indices: Sequence[int]) -> list[Example]:
        """The examples with new answers, and the target's features of them."""
        if not self.head.training:
            return super().read(indices)
        step = mix64(torch.initial_seed())  # which the loop sets in every step
        spans = [_choose_answer(self.examples[index].loss_mask, mix64(step + index)) for index in indices]
        prompts = [self.examples[index].tokens[:start] for index, (start, _) in zip(indices, spans, strict=True)]
        limits = [end - start for start, end in spans]
        noises = [Noise(step, index) for index in indices]
        self.head.eval()
        answers = sample_answers(self.head.model, prompts, limits, noises, self.target.stop_tokens)
        self.head.train()
        texts = [
            Example(torch.cat([prompt, answer]), torch.arange(len(prompt) + len(answer)) >= len(prompt))
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        return LiveFeatures(self.target, texts, self.identity, self.slots).read(range(len(texts)))


@torch.no_grad()
def sample_answers(
    model: Any, prompts: Sequence[Tensor], limits: Sequence[int], noises: Sequence[Noise], stops: Sequence[int]
) -> list[Tensor]:
    """Sample a continuation of each prompt from a causal model, up to a stop token or the prompt's limit."""
    device = model.device
    # padded on the left, so that all continue in the same column
    tokens = pad_sequence(list(prompts), batch_first=True, padding_side="left").to(device)
    ones = [torch.ones_like(prompt) for prompt in prompts]
    mask = pad_sequence(ones, batch_first=True, padding_side="left").to(device)
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    stop_tokens, cache, columns = torch.tensor(stops, device=device), None, []
    for step in range(max(limits)):
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        output = model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits, cache = output.logits[:, -1].float(), output.past_key_values
        noise = _noise_rows(noises, [len(prompt) + step for prompt in prompts], logits)
        tokens = (logits + noise).argmax(-1, keepdim=True)
        columns.append(tokens)
        ended |= torch.isin(tokens[:, 0], stop_tokens) | (torch.tensor(limits, device=device) == step + 1)
        if ended.all():
            break
        mask = F.pad(mask, (0, 1), value=1)
    rows = torch.cat(columns, dim=1).cpu()
    return [_cut_at_stop(row[:limit], stop_tokens.cpu()) for row, limit in zip(rows, limits, strict=True)]


def _noise_rows(noises: Sequence[Noise], positions: Sequence[int], logits: Tensor) -> Tensor:
    """[B, V] Gumbel noise: the argmax of logits + noise is a sample from their softmax."""
    rows = []
    for noise, position in zip(noises, positions, strict=True):
        noise.forget(position)
        rows.append(noise([position], logits.shape[1], logits.device))
    return torch.cat(rows)


def _cut_at_stop(tokens: Tensor, stop_tokens: Tensor) -> Tensor:
    """The tokens up to and including the first stop token."""
    stops = torch.isin(tokens, stop_tokens).nonzero()
    return tokens[: int(stops[0]) + 1] if len(stops) else tokens


def _choose_answer(loss_mask: Tensor, draw: int) -> tuple[int, int]:
    """Start (at least 1) and end of one of the answers."""
    edges = F.pad(loss_mask.long(), (1, 1)).diff().nonzero()[:, 0].view(-1, 2).tolist()
    start, end = edges[draw % len(edges)]
    return max(start, 1), end
