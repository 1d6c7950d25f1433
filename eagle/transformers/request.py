"""A call of `model.generate` as a decoder with drafts takes it; what it cannot serve is refused by name."""

# B prompts, R rows, T tokens

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import EosTokenCriteria, GenerationConfig
from transformers.generation import GenerationMode

from eagle.core.arguments import IMAGES, PromptTokens
from eagle.transformers.node_processors import processors_of_row

CACHES = ("past_key_values", "cache_params")
# arguments of the model's forward that `generate` prepares, and that follow from the tokens and their mask
PREPARED = {"attention_mask", "position_ids", "use_cache", "logits_to_keep", "cache_position", *CACHES}
PREPARED |= {"mm_encoder_outputs"}  # of images, which the target encodes by itself
TYPES = "token_type_ids"
ALONE = {"tokenizer", "assistant_tokenizer", "synced_gpus", "assistant_model"}  # no inputs of the model
SERVED = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.BEAM_SEARCH)


@dataclass(frozen=True)
class Request:
    """What a call asks for: rows of prompts without padding, and what `generate` has prepared."""

    input_ids: Tensor  # [R, T], as they came
    prompts: list[list[int]]  # of every row, without padding
    paddings: list[list[int]]  # the padding of every row, which stands before its text
    expansion: int  # rows of one prompt
    processors: Sequence[Any]
    criteria: Any  # transformers' list of stopping criteria
    config: GenerationConfig

    @property
    def is_beams(self) -> bool:
        """Whether beams are searched for."""
        return (self.config.num_beams or 1) > 1

    @property
    def limit(self) -> int:
        """The number of new tokens that end a text."""
        longest = self.criteria.max_length or self.config.max_length
        return max(longest - self.input_ids.shape[1], 1)

    @property
    def stop_tokens(self) -> list[int]:
        """The tokens that end a text."""
        ends = [criterion.eos_token_id for criterion in self.criteria if type(criterion) is EosTokenCriteria]
        return sorted({token for tokens in ends for token in tokens.flatten().tolist()})

    def processors_of(self, row: int) -> list[Any]:
        """The processors as they are called for one row."""
        rows, padding = len(self.input_ids), len(self.paddings[row])
        if self.is_beams:  # of which all have one prompt's number
            row, rows = row // self.expansion, rows // self.expansion
        prompts = rows if self.is_beams else rows // self.expansion
        return processors_of_row(self.processors, row, prompts, rows, padding)


def read_request(
    model: Any,
    input_ids: Tensor,
    processors: Sequence[Any],
    criteria: Any,
    config: GenerationConfig,
    kwargs: Mapping[str, Any],
    given: Mapping[str, Any],
) -> Request:
    """The request of a call; ValueError for what cannot be served, by its name.

    `kwargs` are the inputs that `generate` has prepared for the model's forward, `given` those of the call itself.
    """
    _check_mode(model, config, kwargs)
    _check_outputs(config)
    mask = kwargs.get("attention_mask")
    prompts, paddings = _split_padding(input_ids, mask)
    _check_positions(kwargs.get("position_ids"), mask, input_ids)
    for name in CACHES:
        _check_cache(name, kwargs.get(name))
    expansion = max(config.num_beams or 1, config.num_return_sequences or 1)
    media = _find_media(given)
    _check_inputs(kwargs, media)
    if media:
        prompts = [_show(prompts, paddings, media)]
    return Request(input_ids, prompts, paddings, expansion, processors, criteria, config)


def _check_mode(model: Any, config: GenerationConfig, kwargs: Mapping[str, Any]) -> None:
    """Refuse models and ways of decoding that no drafts can be verified for."""
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{type(model).__name__} is an encoder-decoder, expected a causal model: leave the drafter out"
        )
    if kwargs.get("assistant_model") is not None:
        raise ValueError("assistant_model drafts, too: expected one drafter, so leave it or custom_generate out")
    mode = config.get_generation_mode()
    if mode not in SERVED:
        asked = {
            GenerationMode.BEAM_SAMPLE: "num_beams with do_sample",
            GenerationMode.ASSISTED_GENERATION: "prompt_lookup_num_tokens, assistant_early_exit or use_mtp",
            GenerationMode.CONTRASTIVE_SEARCH: "penalty_alpha",
            GenerationMode.GROUP_BEAM_SEARCH: "num_beam_groups",
            GenerationMode.CONSTRAINED_BEAM_SEARCH: "constraints or force_words_ids",
            GenerationMode.DOLA_GENERATION: "dola_layers",
        }.get(mode, "this generation config")
        raise ValueError(
            f"{asked} asks for {str(mode.value).replace('_', ' ')}, which is not served with drafts: expected greedy "
            "decoding, sampling or beam search"
        )
    if kwargs.get("synced_gpus"):
        raise ValueError(
            "synced_gpus is True, and processes that draft take different numbers of forwards: leave it out"
        )
    if kwargs.get("inputs_embeds") is not None:
        raise ValueError("inputs_embeds has no tokens that a drafter could read: pass input_ids")
    if config.cache_implementation == "quantized":
        raise ValueError(
            "cache_implementation is 'quantized', which changes logits: drafts are read with a plain cache"
        )


def _check_outputs(config: GenerationConfig) -> None:
    """Refuse outputs that are not kept."""
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name):
            raise ValueError(f"{name} is True, and forwards over drafts keep none: leave it out, or the drafter")
    if (config.num_beams or 1) > 1 and config.return_dict_in_generate:
        for name in ("output_scores", "output_logits"):
            if getattr(config, name):
                raise ValueError(f"{name} is not kept of beams: leave it out, or call eagle.beam_search for the scores")


def _check_cache(name: str, cache: Any) -> None:
    """Refuse a cache that the call brought along."""
    if cache is None:
        return
    length: Callable[[], int] = getattr(cache, "get_seq_length", lambda: 0)
    if getattr(cache, "_is_user_defined", False) or length() > 0:
        raise ValueError(
            f"{name} was passed, and a decoder with drafts keeps its own cache: leave it out; the text of the last "
            "call is kept, so a prompt that goes on from it is not read again"
        )


def _split_padding(input_ids: Tensor, mask: Tensor | None) -> tuple[list[list[int]], list[list[int]]]:
    """The texts of the rows and their padding, which may lie on either side of a text."""
    rows = input_ids.tolist()
    if mask is None:
        return rows, [[] for _ in rows]
    if mask.shape != input_ids.shape:
        raise ValueError(f"attention_mask is {list(mask.shape)}, expected {list(input_ids.shape)} as input_ids")
    prompts, paddings = [], []
    for number, (row, marks) in enumerate(zip(rows, mask.bool().tolist(), strict=True)):
        if True not in marks:
            raise ValueError(f"attention_mask hides all of row {number}: expected at least one token to answer")
        start, end = marks.index(True), len(marks) - marks[::-1].index(True)
        if False in marks[start:end]:
            raise ValueError(
                f"attention_mask hides tokens within row {number}, expected padding on the sides of a text alone: "
                "where no mask was given, transformers hides every pad_token_id, so pass a mask of ones"
            )
        prompts.append(row[start:end])
        paddings.append(row[:start] + row[end:])
    return prompts, paddings


def _check_positions(positions: Tensor | None, mask: Tensor | None, input_ids: Tensor) -> None:
    """Refuse positions other than those that follow from the mask."""
    if positions is None or positions.ndim != 2:  # a model that sees counts by its images
        return
    marks = input_ids.new_ones(input_ids.shape) if mask is None else mask.long()
    expected = marks.cumsum(-1) - 1
    if positions.shape != expected.shape or bool(((positions != expected) & marks.bool()).any()):
        raise ValueError("position_ids differ from those of the tokens in their order, expected none: leave them out")


def _find_media(given: Mapping[str, Any]) -> dict[str, Any]:
    """What a processor gave beside the tokens, where images are among it."""
    media = {
        name: value
        for name, value in given.items()
        if value is not None and (IMAGES.search(name) or name.endswith(TYPES))
    }
    return media if any(IMAGES.search(name) for name in media) else {}


def _check_inputs(kwargs: Mapping[str, Any], media: Mapping[str, Any]) -> None:
    """Refuse inputs of the model's forward that are neither tokens nor images."""
    unknown = kwargs.keys() - PREPARED - ALONE - media.keys()
    # a tokenizer says of plain texts that all their tokens are of the first type
    passed = [name for name in sorted(unknown) if kwargs[name] is not None]
    left = [name for name in passed if name != TYPES or bool(kwargs[name].any())]
    if left:
        raise ValueError(
            f"{', '.join(left)} is passed to the model's forward, and a decoder with drafts reads tokens and images "
            "alone: leave it out, or the drafter"
        )


def _show(prompts: list[list[int]], paddings: list[list[int]], media: Mapping[str, Any]) -> list[int]:
    """The only prompt of a call, with its images."""
    if len(prompts) > 1 or paddings[0]:
        raise ValueError(
            f"{', '.join(sorted(media))} belongs to {len(prompts)} rows with {sum(map(len, paddings))} tokens of "
            "padding, and images are served for one without: pass one prompt with num_return_sequences=1 and "
            "num_beams=1"
        )
    return PromptTokens(prompts[0], media)
