"""Turns a call of `model.generate` into a request for decoding with drafts, and refuses what drafts cannot serve."""

# B prompts, R rows, T tokens

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import EosTokenCriteria, GenerationConfig
from transformers.generation import GenerationMode

from eagle.core.arguments import IMAGES, PromptTokens
from eagle.transformers.node_processors import processors_of_row

# names of the cache among the inputs of a model's forward, the last since transformers 5.24
CACHES = ("past_key_values", "cache_params", "cache")
# arguments that `generate` prepares for the model's forward, and that say no more than the tokens and their mask
PREPARED = {
    "attention_mask",
    "position_ids",
    "use_cache",
    "logits_to_keep",
    "cache_position",
    *CACHES,
}
PREPARED |= {"mm_encoder_outputs"}  # encoded images; the target encodes them again by itself
STATES = ("output_attentions", "output_hidden_states")
TYPES = "token_type_ids"  # the end of such a name
# the package in which transformers puts the code of a checkpoint
CHECKPOINTS = "transformers_modules"
# arguments of a call that are no inputs of the model
ALONE = {
    "tokenizer",
    "assistant_tokenizer",
    "synced_gpus",
    "assistant_model",
}
# modes of `generate` that are refused -> the arguments that select them
OTHER_MODES = {
    "beam_sample": "num_beams with do_sample",
    "assisted_generation": "prompt_lookup_num_tokens, assistant_early_exit or use_mtp",
    "contrastive_search": "penalty_alpha",
    "group_beam_search": "num_beam_groups",
    "constrained_beam_search": "constraints or force_words_ids",
    "dola_generation": "dola_layers",
}
# the config's field with the context length of pretraining, up to which longrope has other frequencies
ORIGINAL_LENGTH = "original_max_position_embeddings"
SERVED = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.BEAM_SEARCH)


@dataclass(frozen=True)
class Request:
    """A checked call of `generate`: its prompts without padding, and what `generate` has prepared."""

    input_ids: Tensor  # [R, T], with padding
    prompts: list[list[int]]  # of each row, without padding
    # of each row the padding tokens, which logits processors get before the prompt
    paddings: list[list[int]]
    expansion: int  # the number of rows of each prompt: beams, or returned answers
    processors: Sequence[Any]
    criteria: Any  # transformers' list of stopping criteria
    config: GenerationConfig
    # whether `generate` passes position ids to the forward; these begin at 0
    has_positions: bool = False

    @property
    def is_beams(self) -> bool:
        """Whether the call is a beam search."""
        return (self.config.num_beams or 1) > 1

    @property
    def limit(self) -> int:
        """The most new tokens of a row."""
        # transformers writes at least one token
        longest = self.criteria.max_length or self.config.max_length
        return max(longest - self.input_ids.shape[1], 1)

    @property
    def stop_tokens(self) -> list[int]:
        """The tokens that end an answer, as the stopping criteria name them."""
        tokens: set[int] = set()
        for criterion in self.criteria:
            if type(criterion) is EosTokenCriteria:
                tokens.update(criterion.eos_token_id.flatten().tolist())
        return sorted(tokens)

    def processors_of(self, row: int) -> list[Any]:
        """Return the logits processors as they apply to one row: those with data of every row get that row's alone."""
        padding = len(self.paddings[row])
        prompt = row // self.expansion
        # transformers passes processors the index of the prompt for beams, and the index of the row otherwise
        index = prompt if self.is_beams else row
        return processors_of_row(self.processors, index, prompt, padding)


def read_request(
    model: Any,
    input_ids: Tensor,
    processors: Sequence[Any],
    criteria: Any,
    config: GenerationConfig,
    kwargs: Mapping[str, Any],
    caller_kwargs: Mapping[str, Any],
) -> Request:
    """Return the request of a call of `generate`; ValueError for anything that drafts cannot serve.

    Args:
        model: A model of transformers.
        input_ids: [R, T], R rows of T tokens with padding; a prompt has a row for each of its beams or answers.
        processors: transformers' logits processors.
        criteria: transformers' stopping criteria.
        config: The generation config of the call.
        kwargs: The inputs that `generate` has prepared for the model's forward.
        caller_kwargs: The arguments that the caller passed to `generate`.
    """
    # Whatever would make the answer differ from that of the model without drafts must be refused, and nothing else:
    # each of the checks raises ValueError.
    _check_mode(model, config, kwargs, caller_kwargs)
    _check_outputs(config)
    _check_preparation(model, input_ids, kwargs)
    _check_switch(model, input_ids, criteria.max_length or config.max_length)
    mask = kwargs.get("attention_mask")
    prompts, paddings = _split_padding(input_ids, mask)
    _check_positions(kwargs.get("position_ids"), mask, input_ids)
    # rows of each prompt: its beams, or its answers
    expansion = max(config.num_beams or 1, config.num_return_sequences or 1)
    # arguments of images, by name
    media = find_media(model, caller_kwargs)
    _check_inputs(model, kwargs, media)
    if media:
        prompts = [_join_media(prompts, paddings, media)]
    return Request(
        input_ids=input_ids,
        prompts=prompts,
        paddings=paddings,
        expansion=expansion,
        processors=processors,
        criteria=criteria,
        config=config,
        has_positions=kwargs.get("position_ids") is not None,
    )


def _check_mode(
    model: Any,
    config: GenerationConfig,
    kwargs: Mapping[str, Any],
    caller_kwargs: Mapping[str, Any],
) -> None:
    """Refuse models, decoding modes and caches with which drafts cannot be verified."""
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{type(model).__name__} is an encoder-decoder, expected a causal model: leave the drafter out"
        )
    if kwargs.get("assistant_model") is not None:
        raise ValueError(
            "assistant_model drafts, too: expected one drafter, so leave it or custom_generate out"
        )
    mode = config.get_generation_mode()
    if mode not in SERVED:
        asked = OTHER_MODES.get(mode.value, "this generation config")
        raise ValueError(
            f"{asked} asks for {mode.value.replace('_', ' ')}, which is not served with drafts: expected greedy "
            "decoding, sampling or beam search"
        )
    if kwargs.get("synced_gpus"):
        raise ValueError(
            "synced_gpus is True, and processes that draft take different numbers of forwards: leave it out"
        )
    if kwargs.get("inputs_embeds") is not None:
        raise ValueError("inputs_embeds has no tokens that a drafter could read: pass input_ids")
    for name in CACHES:
        if caller_kwargs.get(name) is not None:
            raise ValueError(
                f"{name} was passed, and a decoder with drafts keeps its own cache: leave it out; a prompt that goes "
                "on from the last call's only sequence is not read again"
            )
    if config.cache_implementation == "quantized":
        raise ValueError(
            "cache_implementation is 'quantized', which changes logits: drafts are read with a plain cache"
        )


def _check_outputs(config: GenerationConfig) -> None:
    """Refuse requested outputs that decoding with drafts does not keep."""
    # without a dict nothing but tokens is returned
    if not config.return_dict_in_generate:
        return
    for name in STATES:
        if getattr(config, name):
            raise ValueError(
                f"{name} is True, and forwards over drafts keep none: leave it out, or the drafter"
            )
    if (config.num_beams or 1) == 1:
        return
    for name in ("output_scores", "output_logits"):
        if getattr(config, name):
            raise ValueError(
                f"{name} is not kept of beams: leave it out, or call eagle.beam_search for the scores"
            )


def _split_padding(
    input_ids: Tensor, mask: Tensor | None
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the prompt tokens of each row, and its padding tokens, from both ends.

    Args:
        input_ids: [R, T], R rows of T tokens.
        mask: [R, T], the attention mask; its zeros are padding, at either end of a row. None: there is no padding.
    """
    rows = input_ids.tolist()
    if mask is None:
        return rows, [[] for _ in rows]
    if mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask is {list(mask.shape)}, expected {list(input_ids.shape)} as input_ids"
        )
    prompts, paddings = [], []
    for i, (tokens, marks) in enumerate(zip(rows, mask.bool().tolist(), strict=True)):
        if True not in marks:
            raise ValueError(
                f"attention_mask hides all of row {i}: expected at least one token to answer"
            )
        start = marks.index(True)
        end = len(marks) - marks[::-1].index(True)
        if False in marks[start:end]:
            # without a mask, transformers guesses one from pad_token_id, which may also occur within a prompt
            raise ValueError(
                f"attention_mask hides tokens within row {i}, expected padding on the sides of a sequence alone: "
                "where no mask was given, transformers hides every pad_token_id, so pass a mask of ones"
            )
        prompts.append(tokens[start:end])
        paddings.append(tokens[:start] + tokens[end:])
    return prompts, paddings


def _check_positions(positions: Tensor | None, mask: Tensor | None, input_ids: Tensor) -> None:
    """Refuse position ids [R, T] other than those that count the tokens that the attention mask [R, T] shows.

    `input_ids` give the shape where there is no mask.
    """
    # some vision models have positions of three dimensions, which follow from the images
    if positions is None or positions.ndim != 2:
        return
    marks = input_ids.new_ones(input_ids.shape) if mask is None else mask.long()
    expected = marks.cumsum(-1) - 1
    # positions of padding do not matter
    is_wrong = positions.shape != expected.shape or bool(
        ((positions != expected) & marks.bool()).any()
    )
    if is_wrong:
        raise ValueError(
            "position_ids differ from those of the tokens in their order, expected none: leave them out"
        )


def _check_preparation(model: Any, input_ids: Tensor, kwargs: Mapping[str, Any]) -> None:
    """Refuse a model that changes the inputs of each step by its own `prepare_inputs_for_generation`.

    Decoding with drafts makes the inputs itself and does not call that method, so a soft prompt, for example, would be
    lost. The code of many checkpoints overrides the method without a change of inputs: it is called for the prompt, and
    accepted if it returns the same inputs.
    """
    prepare = model.prepare_inputs_for_generation
    # an adapter of PEFT replaces the method of the model that it wraps
    owner = getattr(prepare, "__self__", None)
    adapter: Any = getattr(owner, "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False):
        raise ValueError(
            f"the adapter is {adapter.peft_type.value}, which puts learned states before the prompt: expected one that "
            "changes layers, as LoRA does. Leave the drafter out, or the adapter"
        )
    # the package that defines the method, below its decorators
    package = str(getattr(inspect.unwrap(prepare), "__module__", None)).partition(".")[0]
    if package == "transformers":
        return
    name = type(model).__name__
    if package != CHECKPOINTS:
        raise ValueError(
            f"{name} has a prepare_inputs_for_generation of its own ({package}), which a decoder with drafts does not "
            "call: expected that of transformers. Leave the drafter out, or call eagle.generate(Target(model), "
            "drafter, prompt), which reads by the model's forward alone"
        )
    # a copy of the cache, because the method may write to it
    caches = {key: copy.deepcopy(kwargs[key]) for key in CACHES if kwargs.get(key) is not None}
    made = prepare(input_ids, **{**kwargs, **caches}, is_first_iteration=True)
    mask = kwargs.get("attention_mask")
    wrong = []
    if _differs(made.get("input_ids"), input_ids):
        wrong.append("input_ids")
    if _differs(made.get("attention_mask"), mask):
        wrong.append("attention_mask")
    added = made.keys() - kwargs.keys() - PREPARED - {"input_ids"}
    wrong += sorted(key for key in added if made[key] is not None)
    if wrong:
        raise ValueError(
            f"the code of {name}'s checkpoint gives other {', '.join(wrong)} to its forward than those of the prompt, "
            "and a decoder with drafts reads tokens alone: leave the drafter out"
        )
    _check_positions(made.get("position_ids"), mask, input_ids)


def _check_switch(model: Any, input_ids: Tensor, longest: int) -> None:
    """Refuse an answer during which the model would drop its cache and continue from the last token alone.

    Phi-4 multimodal does so at the length where its rotary frequencies change. (Phi-3 reads the whole sequence again
    there, which a target follows.)

    Args:
        model: The model.
        input_ids: [R, T], R prompts of T tokens.
        longest: The most tokens of a row, prompt and answer.
    """
    # Only the code of prepare_inputs_for_generation shows it: such code names the length, and unlike that of Phi-3 does
    # not set `next_sequence_length`, by which the whole sequence is read again.
    length = getattr(model.config, ORIGINAL_LENGTH, None)
    code = getattr(inspect.unwrap(model.prepare_inputs_for_generation), "__code__", None)
    if length is None or code is None or ORIGINAL_LENGTH not in code.co_names:
        return
    if "next_sequence_length" in code.co_consts:
        return
    # the answer's last token is never read, so a forward reads at most `longest` - 1 tokens
    crosses = input_ids.shape[1] <= length < longest - 1
    if not crosses:
        return
    raise ValueError(
        f"{type(model).__name__} drops its cache behind {length} tokens and reads on from the last one alone: got "
        f"{input_ids.shape[1]} tokens of prompt and an answer up to {longest}, expected at most {length + 1} together, "
        "or a prompt that is longer: lower max_new_tokens"
    )


def _differs(made: Any, expected: Tensor | None) -> bool:
    """Return whether `made` is a tensor of two dimensions that differs from the expected one.

    Masks with more dimensions are not compared, because they are computed from the mask of two.
    """
    if not isinstance(made, Tensor) or made.ndim != 2 or expected is None:
        return False
    return made.shape != expected.shape or bool((made != expected).any())


def find_media(model: Any, caller_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the caller's arguments that belong to images, by name; an empty dict without images.

    Args:
        model: The model.
        caller_kwargs: The arguments that the caller passed to `generate`.
    """
    encoded = _encoder_inputs(model)
    media = {}
    for name, value in caller_kwargs.items():
        # token types tell image tokens from text
        belongs = IMAGES.search(name) or name.endswith(TYPES) or name in encoded
        if value is not None and belongs:
            media[name] = value
    return media if any(IMAGES.search(name) for name in media) else {}


def _encoder_inputs(model: Any) -> set[str]:
    """Return the names of the inputs of a model's image and video encoder, such as LFM2-VL's `spatial_shapes`.

    `generate` encodes images itself and does not pass these inputs on, so they are taken from the caller's arguments.
    """
    names: set[str] = set()
    # transformers names these methods get_image_features and get_video_features
    for kind in ("image", "video"):
        encode = getattr(model.base_model, f"get_{kind}_features", None)
        if encode is not None:
            names.update(inspect.signature(encode).parameters)
    # a signature has its `**kwargs` under this name
    return names - {"kwargs"}


def _check_inputs(model: Any, kwargs: Mapping[str, Any], media: Mapping[str, Any]) -> None:
    """Refuse inputs of the model's forward that are neither tokens nor images.

    Args:
        model: The model.
        kwargs: The inputs that `generate` has prepared for the forward.
        media: Those that belong to images (`find_media`).
    """
    # an unknown input may change the model's output, and the target would not get it
    unknown = kwargs.keys() - PREPARED - ALONE - media.keys() - {*STATES}
    wrong = []
    for name in sorted(unknown):
        value = kwargs[name]
        is_harmless = value is None or (name.endswith(TYPES) and _is_default_type(model, value))
        if not is_harmless:
            wrong.append(name)
    if wrong:
        raise ValueError(
            f"{', '.join(wrong)} is passed to the model's forward, and a decoder with drafts reads tokens and images "
            "alone: leave it out, or the drafter"
        )


def _is_default_type(model: Any, types: Tensor) -> bool:
    """Return whether token types are all 0 and mean the same as no token types: text, or tokens of the first type.

    GPT-2 and similar models embed any type as if it were a token, so for them no types are harmless.
    """
    # vision models tell text from images by types; models with an embedding of types take type 0 by default
    sees = any(hasattr(model.config, name) for name in ("image_token_id", "image_token_index"))
    has_types = any(name.endswith("token_type_embeddings") for name, _ in model.named_modules())
    return (sees or has_types) and not bool(types.any())


def _join_media(
    prompts: list[list[int]], paddings: list[list[int]], media: Mapping[str, Any]
) -> list[int]:
    """Return the prompt of a call with images as `PromptTokens`, its tokens with the processor's tensors beside them.

    ValueError for several rows or padding, which images are not served with.

    Args:
        prompts: The tokens of each row.
        paddings: The padding tokens of each row.
        media: The arguments that belong to images, by name.
    """
    if len(prompts) > 1 or paddings[0]:
        raise ValueError(
            f"{', '.join(sorted(media))} belongs to {len(prompts)} rows with {sum(map(len, paddings))} tokens of "
            "padding, and images are served for one without: pass one prompt with num_return_sequences=1 and "
            "num_beams=1"
        )
    return PromptTokens(prompts[0], media)
