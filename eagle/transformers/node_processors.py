"""transformers' logits processors at the nodes of draft trees: which can be used, and how they are called."""

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

# processors whose scores depend only on the tokens and scores of the call, and on no earlier call
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
    "WatermarkLogitsProcessor",  # its random generator is seeded again in every call
)
# processor -> the field of `Sampling` by which drafters learn what it does
DRAFTER_HINTS = {
    "TemperatureLogitsWarper": "temperature",
    "TopKLogitsWarper": "top_k",
    "TopPLogitsWarper": "top_p",
    "MinPLogitsWarper": "min_p",
}


def check_processors(processors: Iterable[Any], stateless: Sequence[type]) -> None:
    """Refuse logits processors that may keep a state between calls.

    They are also called for drafted tokens that are rejected later, so a state would be wrong.

    Args:
        processors: Of the call of `generate`.
        stateless: Further classes that the caller knows to keep no state.
    """
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
    """Return the name of a processor: that of its class, or of a plain function."""
    return getattr(processor, "__name__", type(processor).__name__)


def processors_of_row(processors: Iterable[Any], row: int, prompt: int, padding: int) -> list[Any]:
    """Return the processors as they apply to a single row.

    A processor of a batch may hold data for each row or prompt. It is called for one row at a time here, so each row
    gets a copy of the processor with its data alone.

    Args:
        processors: Of the whole call.
        row: The index of the row in the call.
        prompt: The index of its prompt; several rows may answer one prompt.
        padding: The number of padding tokens before its prompt.
    """
    return [_processor_of_row(processor, row, prompt, padding) for processor in processors]


def _processor_of_row(processor: Any, row: int, prompt: int, padding: int) -> Any:
    """Return one processor as it applies to a single row: see `processors_of_row`."""
    # by the names of attributes, private ones too, because transformers has no interface for this
    changed: dict[str, Any] = {}
    # a repetition penalty that ignores the padding, whose length differs by row
    if isinstance(getattr(processor, "prompt_ignore_length", None), Tensor):
        changed["prompt_ignore_length"] = padding
    # penalties on the tokens of the prompt hold all prompts
    tokens = getattr(processor, "encoder_input_ids", None)
    if isinstance(tokens, Tensor):
        changed["encoder_input_ids"] = tokens[prompt : prompt + 1]
    # the ban on n-grams of the prompt holds those of all prompts
    ngrams = getattr(processor, "generated_ngrams", None)
    if ngrams is not None:
        changed["generated_ngrams"] = ngrams[prompt : prompt + 1]
        changed["batch_size"] = 1
    # a caller's function that restricts the next tokens
    allowed = getattr(processor, "_prefix_allowed_tokens_fn", None)
    if allowed is not None:
        # the function expects the row's index in the batch, which would always be 0
        changed["_prefix_allowed_tokens_fn"] = lambda _, tokens: allowed(row, tokens)
        changed["_num_beams"] = 1
    if not changed:
        return processor
    bound = copy.copy(processor)
    vars(bound).update(changed)
    return bound


def sampling_of(
    processors: Iterable[Any], *, do_sample: bool, padding: int, **fields: Any
) -> tuple[Sampling, bool]:
    """Return a `Sampling` that does what a row's processors do, and True if it does all of it.

    If it does not (False), the processors must be called themselves, and the sampling only tells drafters roughly what
    they do.

    Args:
        processors: Of the row.
        do_sample: Whether the call samples, or takes the best token.
        padding: The number of padding tokens before the prompt.
        fields: Further fields of the sampling, such as the seed.
    """
    # a temperature of 0 takes the best token
    if not do_sample:
        fields["temperature"] = 0.0
    plain = []
    for processor in processors:
        # a repetition penalty that ignores just the padding is a plain one here, where padding is never read
        if getattr(processor, "prompt_ignore_length", None) == padding:
            processor = copy.copy(processor)
            processor.prompt_ignore_length = None
        plain.append(processor)
    try:
        return Sampling.from_processors(plain, **fields), True
    except ValueError:
        # there is a processor that no sampling expresses: take over the fields that drafters can use
        pass
    hints: dict[str, Any] = {"temperature": 1.0}
    for processor in plain:
        field = DRAFTER_HINTS.get(type(processor).__name__)
        if field is not None:
            hints[field] = getattr(processor, field)
    try:
        return Sampling(**{**hints, **fields}), False
    except ValueError:
        # a value that a sampling refuses, such as a top-p of 0
        return Sampling(**{"temperature": 1.0, **fields}), False


class NodeProcessors:
    """Calls a row's processors at nodes of draft trees, with the same tokens as `generate`: padding, prompt, answer."""

    def __init__(self, processors: Sequence[Any], padding: list[int], device: torch.device) -> None:
        self.processors = processors
        self.padding = padding  # the padding tokens before the row's prompt
        self.device = device  # of the tokens of the call, where processors hold their tensors

    def __call__(self, output: TargetOutput, nodes: Sequence[int]) -> Tensor:
        """Return the processed logits [K, V] after K nodes of the tree that the target has read.

        Args:
            output: The tree, with the target's logits at all of its nodes.
            nodes: The numbers of the nodes in the tree; 0 is the root, the last committed token.
        """
        # a copy, because processors may write to it
        logits = in_fp32(pick_rows(output.logits, nodes)).to(self.device, copy=True)
        depths = output.tree.depths()
        # processors take one tensor of sequences, so nodes of one depth, whose sequences are equally long, share a call
        rows_by_depth: dict[int, list[int]] = {}
        for row, node in enumerate(nodes):
            rows_by_depth.setdefault(depths[node], []).append(row)
        processed = torch.empty_like(logits)
        for _, rows in sorted(rows_by_depth.items()):
            # [rows, T], all tokens up to each node, as `generate` passes them
            sequences = torch.tensor([self.padding + output.prefix(nodes[row]) for row in rows])
            processed[rows] = self.process(upload(sequences, self.device), logits[rows])
        return processed

    def process(self, sequences: Tensor, scores: Tensor) -> Tensor:
        """Return the scores [K, V] after K sequences [K, T] with padding, as all processors change them in turn."""
        for processor in self.processors:
            scores = processor(sequences, scores)
        return scores

    def after_beams(self, sequences: Tensor, scores: Tensor) -> Tensor:
        """Return the processed scores [K, V] of beams, whose sequences [K, T] lack the padding, which is added here."""
        padding = torch.tensor(self.padding, dtype=sequences.dtype, device=sequences.device)
        padded = torch.cat([padding.expand(len(sequences), -1), sequences], dim=1)
        return self.process(padded, scores)
