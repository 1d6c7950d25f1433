"""Beam search of `model.generate` with a drafter."""

# B prompts, T tokens

from __future__ import annotations

from typing import Any

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria
from transformers.generation import GenerateBeamDecoderOnlyOutput

from eagle.core.drafter import Drafter
from eagle.decoding.beam import beam_search
from eagle.decoding.stops import Stops
from eagle.target.target import Target
from eagle.transformers.node_processors import NodeProcessors
from eagle.transformers.request import Request

CRITERIA = (MaxLengthCriteria, EosTokenCriteria, StopStringCriteria)


class StringStops(Stops):
    """The stop tokens of a call, and its criteria for stop strings, which see the whole text of a beam."""

    def __init__(self, tokens: list[int], criteria: list[Any], start: list[int], vocab_size: int) -> None:
        super().__init__(tokens, None, vocab_size)
        self.criteria, self.start = criteria, start

    def first_end(self, before: list[int], new: list[int]) -> tuple[int | None, str | None]:
        """How many of the new tokens belong to the answer; None if it goes on."""
        for count in range(1, len(new) + 1):
            text = torch.tensor([[*self.start, *before, *new[:count]]])
            if new[count - 1] in self.tokens or any(bool(stops(text, None).any()) for stops in self.criteria):
                return count, None
        return None, None


def search_beams(target: Target, drafter: Drafter, request: Request, budget: Any) -> Any:
    """What `model.generate` gives for beams: tokens [B * returned, T + new], or an output that holds them."""
    config = request.config
    if wrong := [type(criterion).__name__ for criterion in request.criteria if type(criterion) not in CRITERIA]:
        raise ValueError(
            f"the stopping criteria {', '.join(wrong)} cannot be followed by beams with drafts: expected max_length, "
            "stop tokens and stop strings"
        )
    criteria = [criterion for criterion in request.criteria if type(criterion) is StopStringCriteria]
    stop = [token for token in request.stop_tokens if 0 <= token < target.vocab_size]
    returned = config.num_return_sequences or 1
    prompts, answers = [], list[list[int]]()
    for row in range(0, len(request.prompts), request.expansion):
        processors, padding = request.processors_of(row), request.paddings[row]
        changed = NodeProcessors(processors, padding, target.device)
        result = beam_search(
            target,
            drafter,
            request.prompts[row],
            beams=config.num_beams,
            length_penalty=config.length_penalty,
            early_stopping=config.early_stopping,
            num_return_sequences=returned,
            max_new_tokens=request.limit,
            stop=StringStops(stop, criteria, [*padding, *request.prompts[row]], target.vocab_size),
            processors=[changed.after_beams] if processors else [],
            budget=budget,
        )
        prompts += [request.input_ids[row]] * returned
        answers += result.tokens
    new = torch.full((len(answers), max(map(len, answers))), _filling(config))
    for number, answer in enumerate(answers):
        new[number, : len(answer)] = torch.tensor(answer, dtype=torch.long)
    tokens = torch.cat([torch.stack(prompts), new.to(request.input_ids.device)], dim=1)
    output: Any = GenerateBeamDecoderOnlyOutput
    return output(sequences=tokens) if config.return_dict_in_generate else tokens


def _filling(config: Any) -> int:
    """What transformers' own search fills shorter answers with: a padding token of 0 counts as none there."""
    padding, ends = getattr(config, "_pad_token_tensor", None), getattr(config, "_eos_token_tensor", None)
    if ends is None:
        return -1
    return int(padding) if padding is not None and int(padding) else int(ends.flatten()[0])
