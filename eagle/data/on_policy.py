"""Training texts that a draft model says itself, by the weights that it has at that step (on-policy distillation)."""

# B texts, T tokens of a text, P slots read at once

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


class OwnSamples(LiveFeatures):
    """Conversations cut at one of their answers, which the draft model says anew at temperature 1.

    What it says is no longer than the answer was. Which answer and which words follow from the step's seed and the
    place, so that a run can be gone on with. While a head is judged, the conversations are those of the data.
    """

    def __init__(self, live: LiveFeatures, head: Any) -> None:
        super().__init__(live.target, live.examples, live.identity, live.slots)
        self.head, self.together = head, True  # read within the step, when the weights are those of the step

    def read(self, places: Sequence[int]) -> list[Example]:
        """Those examples anew, with the target's features of them."""
        if not self.head.training:
            return super().read(places)
        step = mix64(torch.initial_seed())  # which the loop sets in every step
        cuts = [_answer(self.examples[place].loss_mask, mix64(step + place)) for place in places]
        prompts = [self.examples[place].tokens[:start] for place, (start, _) in zip(places, cuts, strict=True)]
        noises = [Noise(step, place) for place in places]
        self.head.eval()
        said = continued(
            self.head.model, prompts, [end - start for start, end in cuts], noises, self.target.stop_tokens
        )
        self.head.train()
        texts = [
            Example(torch.cat([prompt, new]), torch.arange(len(prompt) + len(new)) >= len(prompt))
            for prompt, new in zip(prompts, said, strict=True)
        ]
        return LiveFeatures(self.target, texts, self.identity, self.slots).read(range(len(texts)))


@torch.no_grad()
def continued(
    model: Any, prompts: Sequence[Tensor], limits: Sequence[int], noises: Sequence[Noise], stops: Sequence[int]
) -> list[Tensor]:
    """What a causal model says after each prompt by its plain law, up to a stop token or the prompt's limit."""
    lengths, device = [len(prompt) for prompt in prompts], model.device
    # on the left, so that all go on in the same column
    tokens = pad_sequence(list(prompts), batch_first=True, padding_side="left").to(device)
    seen = pad_sequence([torch.ones_like(prompt) for prompt in prompts], batch_first=True, padding_side="left").to(
        device
    )
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    ends, cache, said = torch.tensor(stops, device=device), None, []
    for step in range(max(limits)):
        positions = (seen.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        read = model(
            input_ids=tokens,
            attention_mask=seen,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits, cache = read.logits[:, -1].float(), read.past_key_values
        tokens = (logits + _drawn(noises, [length + step for length in lengths], logits)).argmax(-1, keepdim=True)
        said.append(tokens)
        ended |= torch.isin(tokens[:, 0], ends) | (torch.tensor(limits, device=device) == step + 1)
        if ended.all():
            break
        seen = F.pad(seen, (0, 1), value=1)
    rows = torch.cat(said, dim=1).cpu()
    return [_until(row[:limit], ends.cpu()) for row, limit in zip(rows, limits, strict=True)]


def _drawn(noises: Sequence[Noise], positions: Sequence[int], like: Tensor) -> Tensor:
    """[B, V], what makes the largest sum a draw from the law."""
    rows = []
    for noise, position in zip(noises, positions, strict=True):
        noise.forget(position)
        rows.append(noise([position], like.shape[1], like.device))
    return torch.cat(rows)


def _until(tokens: Tensor, ends: Tensor) -> Tensor:
    """The tokens up to the first of `ends`, which still belongs to what was said."""
    found = torch.isin(tokens, ends).nonzero()
    return tokens[: int(found[0]) + 1] if len(found) else tokens


def _answer(loss_mask: Tensor, draw: int) -> tuple[int, int]:
    """One of the answers: where it begins, at least behind one token, and where it ends."""
    edges = F.pad(loss_mask.long(), (1, 1)).diff().nonzero()[:, 0].view(-1, 2).tolist()
    start, end = edges[draw % len(edges)]
    return max(start, 1), end
