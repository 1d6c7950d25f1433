"""Logits processors of transformers at the nodes of draft trees: which can be served, and how."""

# K nodes, T tokens, V vocabulary

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from eagle.core.sampling import Sampling, in_fp32
from eagle.core.tree import TargetOutput
from eagle.device import pick_rows, upload

# these give the same scores for the same tokens, whatever they were called with before
STATELESS = (
    *(
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "TemperatureLogitsWarper",
    ),
    *(
        "RepetitionPenaltyLogitsProcessor",
        "EncoderRepetitionPenaltyLogitsProcessor",
        "TopPLogitsWarper",
    ),
    *(
        "TopKLogitsWarper",
        "TopHLogitsWarper",
        "MinPLogitsWarper",
        "TypicalLogitsWarper",
        "EpsilonLogitsWarper",
    ),
    *(
        "EtaLogitsWarper",
        "NoRepeatNGramLogitsProcessor",
        "EncoderNoRepeatNGramLogitsProcessor",
    ),
    *(
        "SequenceBiasLogitsProcessor",
        "NoBadWordsLogitsProcessor",
        "ForcedBOSTokenLogitsProcessor",
    ),
    *(
        "ForcedEOSTokenLogitsProcessor",
        "InfNanRemoveLogitsProcessor",
        "ExponentialDecayLengthPenalty",
    ),
    *(
        "LogitNormalization",
        "SuppressTokensAtBeginLogitsProcessor",
        "SuppressTokensLogitsProcessor",
    ),
    "WatermarkLogitsProcessor",  # whose generator is seeded anew in every call
)
# fields of a sampling that tell drafters what the processors do
DRAFTER_HINTS = {
    "TemperatureLogitsWarper": "temperature",
    "TopKLogitsWarper": "top_k",
    "TopPLogitsWarper": "top_p",
    "MinPLogitsWarper": "min_p",
}


def check_processors(processors: Iterable[Any], stateless: Sequence[type]) -> None:
    """Refuse processors by name that might depend on more than the tokens and scores that they are called with."""
    allowed = {getattr(transformers, name, None) for name in STATELESS} | set(stateless)
    unknown = sorted(
        {_name(processor) for processor in processors if type(processor) not in allowed}
    )
    if unknown:
        raise ValueError(
            f"the logits processors {', '.join(unknown)} cannot be served with drafts: they are called for drafted "
            "tokens, too, so they must depend on nothing but the tokens and scores of a call; if they do, say so with "
            f"generate_with(.., stateless=[{unknown[0]}]), else leave them out"
        )


def _name(processor: Any) -> str:
    """Return a processor's name: its class, or the function that it is."""
    return getattr(processor, "__name__", type(processor).__name__)


def processors_of_row(processors: Iterable[Any], row: int, prompt: int, padding: int) -> list[Any]:
    """Return the processors for one row.

    Args:
        processors: Of the whole call. Those that hold something for each row or prompt hold that of this one alone.
        row: Its index.
        prompt: The index of the prompt that it answers.
        padding: The number of padding tokens before its text.
    """
    return [_processor_of_row(processor, row, prompt, padding) for processor in processors]


def _processor_of_row(processor: Any, row: int, prompt: int, padding: int) -> Any:
    # by attributes, as those of a call with many rows are transformers' own, private ones included
    changed: dict[str, Any] = {}
    if isinstance(getattr(processor, "prompt_ignore_length", None), Tensor):
        changed["prompt_ignore_length"] = padding
    tokens = getattr(processor, "encoder_input_ids", None)
    if isinstance(tokens, Tensor):
        changed["encoder_input_ids"] = tokens[prompt : prompt + 1]
    ngrams = getattr(processor, "generated_ngrams", None)
    if ngrams is not None:
        changed["generated_ngrams"] = ngrams[prompt : prompt + 1]
        changed["batch_size"] = 1
    allowed = getattr(processor, "_prefix_allowed_tokens_fn", None)
    if allowed is not None:
        changed["_prefix_allowed_tokens_fn"] = lambda _, text: allowed(row, text)
        changed["_num_beams"] = 1
    if not changed:
        return processor
    bound = copy.copy(processor)
    vars(bound).update(changed)
    return bound


def sampling_of(
    processors: Iterable[Any], *, do_sample: bool, padding: int, **fields: Any
) -> tuple[Sampling, bool]:
    """Return the sampling of a row's processors, and whether it is all that they do.

    Else it tells drafters the most of it.
    """
    if not do_sample:
        fields["temperature"] = 0.0
    plain = []
    for processor in processors:
        if getattr(processor, "prompt_ignore_length", None) == padding:  # which is not read
            processor = copy.copy(processor)
            processor.prompt_ignore_length = None
        plain.append(processor)
    try:
        return Sampling.from_processors(plain, **fields), True
    except ValueError:
        pass
    hints: dict[str, Any] = {"temperature": 1.0}
    for processor in plain:
        field = DRAFTER_HINTS.get(type(processor).__name__)
        if field is not None:
            hints[field] = getattr(processor, field)
    try:
        return Sampling(**{**hints, **fields}), False
    except ValueError:  # a filter that no sampling has, as a top-p of 0
        return Sampling(**{"temperature": 1.0, **fields}), False


class NodeProcessors:
    """A row's processors, called with the tokens up to each node: padding, prompt and answer as `generate` has them."""

    def __init__(self, processors: Sequence[Any], padding: list[int], device: torch.device) -> None:
        self.processors = processors
        self.padding = padding
        self.device = device  # of the call's tokens, where the processors hold theirs

    def __call__(self, output: TargetOutput, nodes: Sequence[int]) -> Tensor:
        """Return the processed logits [K, V] after the nodes; nodes of one level share a call of each processor."""
        # a copy, as processors may write to it
        logits = in_fp32(pick_rows(output.logits, nodes)).to(self.device, copy=True)
        depths = output.tree.depths()
        # texts of one length make one tensor
        rows_by_depth: dict[int, list[int]] = {}
        for row, node in enumerate(nodes):
            rows_by_depth.setdefault(depths[node], []).append(row)
        processed = torch.empty_like(logits)
        for _, rows in sorted(rows_by_depth.items()):
            texts = torch.tensor([self.padding + output.prefix(nodes[row]) for row in rows])
            processed[rows] = self.process(upload(texts, self.device), logits[rows])
        return processed

    def process(self, texts: Tensor, scores: Tensor) -> Tensor:
        """Return scores [K, V] after texts [K, T] that hold the padding, by all processors in their order."""
        for processor in self.processors:
            scores = processor(texts, scores)
        return scores

    def after_beams(self, texts: Tensor, scores: Tensor) -> Tensor:
        """Process texts without their padding, as a beam search calls its processors."""
        padding = torch.tensor(self.padding, dtype=texts.dtype, device=texts.device)
        return self.process(torch.cat([padding.expand(len(texts), -1), texts], dim=1), scores)
