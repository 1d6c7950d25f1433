"""A head learns from states that know nothing of later tokens: other targets are refused in words."""

from __future__ import annotations

import pytest
import torch

from eagle import Target
from eagle.data.features import check_causal
from tests.every_type import build
from tests.families import build as build_family


@pytest.mark.parametrize("model_type", ["xlnet", "xlm"])
def test_a_target_that_sees_ahead_is_refused(model_type: str) -> None:
    """Both read a whole text at once, each token with those behind it."""
    target = Target(build(model_type))
    with pytest.raises(
        ValueError, match=f"{model_type} reads each token .* expected a causal model"
    ):
        check_causal(target)


@pytest.mark.parametrize("model_type", ["xlnet", "xlm", "cpmant", "openai-gpt"])
def test_a_refusal_says_whether_extraction_works(model_type: str) -> None:
    """Not where a head could learn nothing from such states."""
    target = Target(build(model_type))
    if model_type == "openai-gpt":
        with pytest.raises(
            ValueError, match="Taps, extraction and training work; decoding does not"
        ):
            target.describe()
        return
    with pytest.raises(
        ValueError, match="Nor are there features for a head: it reads each token of a text with"
    ):
        target.describe()
    with pytest.raises(
        ValueError, match=f"{model_type} reads each token .* expected a causal model"
    ):
        check_causal(target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3", "gpt2"])
def test_a_causal_one_is_taken_in_every_precision(family: str, dtype: torch.dtype) -> None:
    """Rounding is not taken for a view of later tokens."""
    check_causal(Target(build_family(family, dtype)))


@pytest.mark.parametrize("model_type", ["doge", "megatron-bert", "rembert"])
def test_a_type_is_taken_if_its_states_stay(model_type: str) -> None:
    """Transformers 5.17 forgets the mask of these types, and newer versions do not."""
    target, text = Target(build(model_type)), torch.arange(4, 20)[None]
    longer = target.model(input_ids=torch.cat([text, text], dim=1), use_cache=False).logits[:, :16]
    alone = target.model(input_ids=text, use_cache=False).logits
    if torch.allclose(longer, alone, atol=1e-4):
        check_causal(target)
        return
    with pytest.raises(ValueError, match="old versions forget the mask of some types"):
        check_causal(target)
