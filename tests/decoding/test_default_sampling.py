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
from tests.families import build, random_tokens

PROMPT, NEW_TOKENS = random_tokens(12, seed=3), 12
# a value for every field that is not the default; where nothing shows whether it is followed, the field is refused
VALUES: dict[str, Any] = {
    **{
        "max_length": 300,
        "max_new_tokens": 5,
        "min_length": 30,
        "min_new_tokens": 9,
        "early_stopping": True,
    },
    **{
        "max_time": 0.001,
        "stop_strings": ["a"],
        "do_sample": False,
        "num_beams": 3,
        "use_mtp": True,
    },
    **{
        "use_cache": False,
        "cache_implementation": "quantized",
        "cache_config": {},
        "max_cache_len": 300,
    },
    **{"temperature": 0.3, "top_k": 4, "top_p": 0.5, "min_p": 0.3, "top_h": 0.4, "typical_p": 0.5},
    **{
        "epsilon_cutoff": 0.02,
        "eta_cutoff": 0.02,
        "repetition_penalty": 1.5,
        "encoder_repetition_penalty": 3.0,
    },
    **{
        "length_penalty": 3.0,
        "no_repeat_ngram_size": 1,
        "bad_words_ids": "often",
        "renormalize_logits": True,
    },
    **{"forced_bos_token_id": 7, "forced_eos_token_id": 7, "remove_invalid_values": True},
    **{
        "exponential_decay_length_penalty": (2, 3.0),
        "suppress_tokens": "often flat",
        "token_healing": True,
    },
    **{"begin_suppress_tokens": "often flat", "sequence_bias": "bias", "guidance_scale": 3.0},
    **{"watermarking_config": WatermarkingConfig(bias=9.0), "num_return_sequences": 2},
    **{
        "output_attentions": False,
        "output_hidden_states": True,
        "output_scores": True,
        "output_logits": True,
    },
    **{
        "return_dict_in_generate": True,
        "pad_token_id": 3,
        "bos_token_id": 4,
        "eos_token_id": "early",
    },
    **{"encoder_no_repeat_ngram_size": 1, "decoder_start_token_id": 5, "is_assistant": True},
    **{
        "num_assistant_tokens": 3,
        "num_assistant_tokens_schedule": "heuristic",
        "assistant_confidence_threshold": 0.9,
    },
    **{"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 3, "assistant_early_exit": 2},
    **{
        "assistant_lookbehind": 3,
        "target_lookbehind": 3,
        "assistant_ensemble_weight": 0.5,
        "speculation_type": "dflash",
    },
    **{
        "compile_config": CompileConfig(),
        "disable_compile": True,
        "low_memory": True,
        "penalty_alpha": 0.6,
    },
    **{
        "continuous_batching_config": ContinuousBatchingConfig(),
        "dola_layers": "high",
        "diversity_penalty": 0.5,
    },
    **{
        "num_beam_groups": 2,
        "constraints": ["x"],
        "force_words_ids": [[3]],
        "prefill_chunk_size": 4,
    },
    **{"_from_model_config": True, "transformers_version": "1.0", "_commit_hash": "0" * 40},
}
# by transformers 5.18; before, it is noted of every model from a hub
DROPPED = {"_commit_hash"}
PROCESSORS = {  # refused by the names of transformers' classes for them
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
    **{"top_h": "TopH", "typical_p": "Typical", "epsilon_cutoff": "Epsilon", "eta_cutoff": "Eta"},
}


@pytest.fixture(scope="module")
def target() -> Target:
    """A llama of random weights, which varies its answers."""
    return Target(build("llama"))


@pytest.fixture
def config(target: Target) -> Iterator[GenerationConfig]:
    """Its generation config, as it was again afterwards."""
    kept = target.model.generation_config
    target.model.generation_config = GenerationConfig(eos_token_id=95)
    yield target.model.generation_config
    target.model.generation_config = kept


def models_own(target: Target) -> list[int]:
    """What `model.generate` says by itself."""
    text = torch.tensor([PROMPT])
    output = target.model.generate(
        text, attention_mask=torch.ones_like(text), max_new_tokens=NEW_TOKENS
    )
    return (output if isinstance(output, torch.Tensor) else output.sequences)[
        0, len(PROMPT) :
    ].tolist()


@cache
def answer_without(target: Target) -> list[int]:
    """What both say where the config holds nothing but a stop token."""
    plain = models_own(target)
    assert ours(target) == plain
    return plain


def ours(target: Target) -> list[int]:
    """What decoding says under the same config."""
    stop = [target.model.generation_config.eos_token_id]
    options: dict[str, Any] = {
        "sampling": target.default_sampling(),
        "max_new_tokens": NEW_TOKENS,
        "stop": stop,
    }
    return generate(target, NoDrafter(), PROMPT, **options).tokens


def value_of(name: str, answer: list[int]) -> Any:
    """The field's value, where it is about tokens about those of the answer."""
    token = answer[1]
    special = {
        "often": [[token]],
        "often flat": [token],
        "bias": [[[token], -9.0]],
        "early": answer[5],
    }
    value = VALUES[name]
    return special.get(value, value) if isinstance(value, str) else value


def test_every_field_has_a_value() -> None:
    """A field that transformers adds must come into the table above."""
    fields = vars(GenerationConfig()).keys()
    assert fields | DROPPED == VALUES.keys()


def test_a_model_from_a_hub_has_a_default_sampling(
    target: Target, config: GenerationConfig
) -> None:
    """Transformers 5.17 notes the commit that it came from in its generation config."""
    plain = target.default_sampling()
    target.model.generation_config = GenerationConfig(**config.to_dict(), _commit_hash="0" * 40)
    assert target.default_sampling() == plain


COMPARED = WARPED | WITHOUT_EFFECT  # answers are, and take time


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in COMPARED)) for name in VALUES]
)
def test_a_field_is_followed_or_refused_by_name(
    name: str, target: Target, config: GenerationConfig
) -> None:
    """The answer is that of `model.generate`, or there is none."""
    plain = answer_without(target)
    setattr(config, name, value_of(name, plain))
    try:
        answer = ours(target)
    except ValueError as error:
        assert f"generation_config.{name} is " in str(error) or PROCESSORS.get(name, "?") in str(
            error
        )
        return
    assert answer == models_own(target)


@pytest.mark.parametrize("name", [*PROCESSORS][-4:])
def test_filters_that_only_samples_pass_are_refused_there(
    name: str, target: Target, config: GenerationConfig
) -> None:
    """Greedy answers do not feel them."""
    config.do_sample = True
    target.default_sampling()
    setattr(config, name, VALUES[name])
    with pytest.raises(ValueError, match=f"{PROCESSORS[name]}LogitsWarper"):
        target.default_sampling()


@pytest.mark.parametrize(
    "name", ["min_length", "min_new_tokens", "bad_words_ids", "num_beams", "stop_strings"]
)
def test_what_is_often_set_is_refused(name: str, target: Target, config: GenerationConfig) -> None:
    """None of these may be dropped or crash, with an end token or without one."""
    for eos in (95, None):
        config.eos_token_id = eos
        setattr(config, name, value_of(name, PROMPT))
        with pytest.raises(ValueError, match=rf"generation_config\.{name} is .*: set it to None"):
            target.default_sampling()
