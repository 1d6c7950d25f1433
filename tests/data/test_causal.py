"""A head learns from states that know nothing of later tokens: other targets are refused."""

from __future__ import annotations

import pytest
import torch

from eagle import Target
from eagle.data.features import check_causal
from tests.every_type import build
from tests.families import build as build_family


@pytest.mark.parametrize("model_type", ["xlnet", "xlm", "cpmant"])
def test_a_target_that_sees_ahead_is_refused(model_type: str) -> None:
    """It reads each token with later ones, so a head could learn nothing from its states."""
    target = Target(build(model_type))
    with pytest.raises(ValueError, match="Nor are there features for a head"):
        target.describe()
    with pytest.raises(ValueError, match=f"{model_type} reads each token .* expected a causal"):
        check_causal(target)


def test_a_target_that_sees_one_token_ahead_is_refused() -> None:
    """Only the state just before a changed token tells it."""
    model = build_family("llama")
    embedding = model.get_input_embeddings()
    embedding.register_forward_hook(lambda module, args, output: output + output.roll(-1, 1))
    with pytest.raises(ValueError, match=r"reads each token .* expected a causal"):
        check_causal(Target(model))


def test_a_causal_target_without_trees_can_be_learned_from() -> None:
    """The refusal to decode says that extraction and training work."""
    target = Target(build("openai-gpt"))
    check_causal(target)
    with pytest.raises(ValueError, match="extraction and training work; decoding does not"):
        target.describe()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3", "gpt2"])
def test_a_causal_target_is_taken_in_every_precision(family: str, dtype: torch.dtype) -> None:
    """Rounding is not taken for a view of later tokens."""
    check_causal(Target(build_family(family, dtype)))


@pytest.mark.parametrize("model_type", ["doge", "megatron-bert", "rembert"])
def test_a_type_is_taken_if_its_states_stay(model_type: str) -> None:
    """Transformers 5.17 forgets the mask of these types, and newer versions do not."""
    target = Target(build(model_type))
    tokens = torch.arange(4, 20)[None]
    twice = torch.cat([tokens, tokens], dim=1)
    # a causal model gives the first tokens the same logits with more after them
    longer = target.model(input_ids=twice, use_cache=False).logits[:, :16]
    alone = target.model(input_ids=tokens, use_cache=False).logits
    # the truth is asked of the installed version
    if torch.allclose(longer, alone, atol=1e-4):
        check_causal(target)
    else:
        with pytest.raises(ValueError, match="old versions forget the mask of some types"):
            check_causal(target)
