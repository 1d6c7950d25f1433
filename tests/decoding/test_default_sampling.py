"""Every field of a generation config: `default_sampling` follows it as `model.generate` does, or refuses it by name."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from transformers import (
    CompileConfig,
    ContinuousBatchingConfig,
    GenerationConfig,
    WatermarkingConfig,
)

from eagle import Target, generate
from eagle.core.sampling import WARPED, WITHOUT_EFFECT
from eagle.drafters.none import NoDrafter
from tests.families import build, own_answer, random_tokens

PROMPT = random_tokens(12, seed=3)
NEW_TOKENS = 12
PLAIN = own_answer(build("llama"), PROMPT, NEW_TOKENS)
# a token that the plain answer says
OFTEN = PLAIN[1]
# a value for every field that is not the default; where nothing shows whether it is followed, the field is refused
VALUES: dict[str, Any] = {
    "max_length": 300,
    "max_new_tokens": 5,
    "min_length": 30,
    "min_new_tokens": 9,
    "early_stopping": True,
    "max_time": 0.001,
    "stop_strings": ["a"],
    "do_sample": False,
    "num_beams": 3,
    "use_mtp": True,
    "use_cache": False,
    "cache_implementation": "quantized",
    "cache_config": {},
    "max_cache_len": 300,
    "temperature": 0.3,
    "top_k": 4,
    "top_p": 0.5,
    "min_p": 0.3,
    "top_h": 0.4,
    "typical_p": 0.5,
    "epsilon_cutoff": 0.02,
    "eta_cutoff": 0.02,
    "repetition_penalty": 1.5,
    "encoder_repetition_penalty": 3.0,
    "length_penalty": 3.0,
    "no_repeat_ngram_size": 1,
    "bad_words_ids": [[OFTEN]],
    "renormalize_logits": True,
    "forced_bos_token_id": 7,
    "forced_eos_token_id": 7,
    "remove_invalid_values": True,
    "exponential_decay_length_penalty": (2, 3.0),
    "suppress_tokens": [OFTEN],
    "token_healing": True,
    "begin_suppress_tokens": [OFTEN],
    "sequence_bias": [[[OFTEN], -9.0]],
    "guidance_scale": 3.0,
    "watermarking_config": WatermarkingConfig(bias=9.0),
    "num_return_sequences": 2,
    "output_attentions": False,
    "output_hidden_states": True,
    "output_scores": True,
    "output_logits": True,
    "return_dict_in_generate": True,
    "pad_token_id": 3,
    "bos_token_id": 4,
    "eos_token_id": PLAIN[5],
    "encoder_no_repeat_ngram_size": 1,
    "decoder_start_token_id": 5,
    "is_assistant": True,
    "num_assistant_tokens": 3,
    "num_assistant_tokens_schedule": "heuristic",
    "assistant_confidence_threshold": 0.9,
    "prompt_lookup_num_tokens": 4,
    "max_matching_ngram_size": 3,
    "assistant_early_exit": 2,
    "assistant_lookbehind": 3,
    "target_lookbehind": 3,
    "assistant_ensemble_weight": 0.5,
    "speculation_type": "dflash",
    "compile_config": CompileConfig(),
    "disable_compile": True,
    "low_memory": True,
    "penalty_alpha": 0.6,
    "continuous_batching_config": ContinuousBatchingConfig(),
    "dola_layers": "high",
    "diversity_penalty": 0.5,
    "num_beam_groups": 2,
    "constraints": ["x"],
    "force_words_ids": [[3]],
    "prefill_chunk_size": 4,
    "_from_model_config": True,
    "transformers_version": "1.0",
    "_commit_hash": "0" * 40,
}
# by transformers 5.18; before, it is noted of every model from a hub
DROPPED = {"_commit_hash"}
# filters of samples alone: greedy answers do not depend on them
SAMPLE_FILTERS = {
    "top_h": "TopH",
    "typical_p": "Typical",
    "epsilon_cutoff": "Epsilon",
    "eta_cutoff": "Eta",
}
# refused by the names of transformers' classes for them
PROCESSORS = {
    "no_repeat_ngram_size": "NoRepeatNGram",
    "suppress_tokens": "SuppressTokens",
    "begin_suppress_tokens": "SuppressTokensAtBegin",
    "forced_bos_token_id": "ForcedBOSToken",
    "forced_eos_token_id": "ForcedEOSToken",
    "sequence_bias": "SequenceBias",
    "guidance_scale": "UnbatchedClassifierFreeGuidance",
    "watermarking_config": "Watermark",
    "renormalize_logits": "LogitNormalization",
    "remove_invalid_values": "InfNanRemove",
    **SAMPLE_FILTERS,
}


@pytest.fixture(scope="module")
def target() -> Target:
    """Return a llama of random weights, which varies its answers."""
    return Target(build("llama"))


@pytest.fixture
def config(target: Target) -> Iterator[GenerationConfig]:
    """Give it a generation config with an end token alone, and put its own back."""
    original = target.model.generation_config
    target.model.generation_config = GenerationConfig(eos_token_id=95)
    yield target.model.generation_config
    target.model.generation_config = original


def generate_with_transformers(target: Target) -> list[int]:
    """Return what `model.generate` answers under its generation config."""
    tokens = torch.tensor([PROMPT])
    mask = torch.ones_like(tokens)
    output = target.model.generate(tokens, attention_mask=mask, max_new_tokens=NEW_TOKENS)
    # a config may ask for more than the tokens
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    answer: list[int] = sequences[0, len(PROMPT) :].tolist()
    return answer


def generate_with_eagle(target: Target) -> list[int]:
    """Return what decoding answers under the same config."""
    options: dict[str, Any] = {
        "sampling": target.default_sampling(),
        "max_new_tokens": NEW_TOKENS,
        "stop": [target.model.generation_config.eos_token_id],
    }
    return generate(target, NoDrafter(), PROMPT, **options).tokens


@cache
def is_plain_answer(target: Target) -> bool:
    """Return whether both give the plain answer where the config has nothing but an end token."""
    return generate_with_eagle(target) == generate_with_transformers(target) == PLAIN


def test_every_field_has_a_value() -> None:
    """A field that transformers adds must come into the table above."""
    fields = vars(GenerationConfig()).keys()
    assert fields | DROPPED == VALUES.keys()


def test_a_model_from_a_hub_has_a_default_sampling(
    target: Target, config: GenerationConfig
) -> None:
    """Transformers 5.17 notes the commit that it came from in its generation config."""
    plain = target.default_sampling()
    target.model.generation_config = GenerationConfig(
        **config.to_dict(),
        _commit_hash="0" * 40,
    )
    assert target.default_sampling() == plain


# answers under these are compared, which takes time
COMPARED = WARPED | WITHOUT_EFFECT


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in COMPARED)) for name in VALUES],
)
def test_a_field_is_followed_or_refused_by_name(
    name: str,
    target: Target,
    config: GenerationConfig,
) -> None:
    """The answer is that of `model.generate`, or there is none."""
    assert is_plain_answer(target)
    setattr(config, name, VALUES[name])
    try:
        answer = generate_with_eagle(target)
    except ValueError as error:
        field = f"generation_config.{name} is "
        processor = PROCESSORS.get(name, field)
        assert field in str(error) or processor in str(error)
    else:
        assert answer == generate_with_transformers(target)


@pytest.mark.parametrize("name", SAMPLE_FILTERS)
def test_filters_of_samples_are_refused_where_it_samples(
    name: str,
    target: Target,
    config: GenerationConfig,
) -> None:
    """By the names of their processors."""
    config.do_sample = True
    target.default_sampling()
    setattr(config, name, VALUES[name])
    with pytest.raises(ValueError, match=f"{SAMPLE_FILTERS[name]}LogitsWarper"):
        target.default_sampling()


@pytest.mark.parametrize(
    "name",
    ["min_length", "min_new_tokens", "bad_words_ids", "num_beams", "stop_strings"],
)
def test_fields_are_refused_without_an_end_token(
    name: str,
    target: Target,
    config: GenerationConfig,
) -> None:
    """Transformers makes no processor for some of them then; they are neither dropped nor do they crash."""
    config.eos_token_id = None
    setattr(config, name, VALUES[name])
    with pytest.raises(ValueError, match=rf"generation_config\.{name} is .*: set it to None"):
        target.default_sampling()
