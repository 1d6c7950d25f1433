"""EAGLE-3: which layers it reads, which tokens it may say, and where its weights start."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from eagle import Target
from eagle.data.features import taps_of
from eagle.drafters.recurrent.eagle3 import Eagle3
from tests.naive_unroll import sayable_ids
from tests.unrolled_heads import draft_vocab


def shape_of(layers: int) -> LlamaConfig:
    """Return the config of a target of 16 tokens."""
    return LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        num_attention_heads=2,
        num_hidden_layers=layers,
    )


def new_head(
    layers: int = 8,
    said: list[Tensor] | None = None,
    **settings: Any,
) -> Eagle3:
    """Return a head for a target with so many layers; `said` are texts to count tokens in."""
    asked = Eagle3.Settings(lm_head="random", **settings)
    return Eagle3.for_target(asked, shape_of(layers), None, said)


# -- taps -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "taps"),
    # layers 2, L // 2 and L - 3 as published; shallow targets need three distinct ones
    [
        (32, (2, 16, 29)),
        (36, (2, 18, 33)),
        (24, (2, 12, 21)),
        (8, (2, 4, 5)),
    ],
)
def test_the_published_layers_are_read(layers: int, taps: tuple[int, ...]) -> None:
    """The head reads the inputs of three layers, and its loss the LM head's input too."""
    head = new_head(layers)
    assert head.taps == taps
    assert taps_of(head.settings, shape_of(layers)) == (*taps, -1)


@pytest.mark.parametrize("layers", range(4, 8))
def test_shallow_targets_have_three_distinct_layers(layers: int) -> None:
    """Where the published rule names a layer twice, another one is read."""
    taps = new_head(layers).taps
    assert len(set(taps)) == 3
    assert list(taps) == sorted(taps)
    assert taps[0] > 0
    assert taps[-1] < layers


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "three layers": ({"layers": 3}, "3"),
    "a layer twice": ({"taps": (2, 2, 5)}, "taps"),
    "beyond the last": ({"taps": (1, 2, 8)}, "taps"),
    "negative": ({"taps": (1, -2, 3)}, "taps"),
    "a size without texts": ({"draft_vocab": 3}, "draft_vocab is 3"),
    "a size beyond the target's": ({"draft_vocab": 17, "said": [torch.tensor([9])]}, "17.*16"),
    "no such file": ({"draft_vocab": "/nowhere/at/all"}, "no draft vocabulary at"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_target_does_not_have_is_refused(case: str) -> None:
    """The message names the setting."""
    arguments, keyword = REFUSED[case]
    with pytest.raises(ValueError, match=keyword):
        new_head(**arguments)


def test_only_one_norm_before_fc_is_possible() -> None:
    with pytest.raises(ValueError, match="norm_before_fc and fc_norm are true"):
        Eagle3.Settings(norm_before_fc=True, fc_norm=True)


# -- the draft vocabulary ---------------------------------------------------------------------------------------------


def test_a_vocabulary_of_another_target_is_refused(tmp_path: Path) -> None:
    """Both sizes are named."""
    file = draft_vocab(tmp_path / "draft_vocab.safetensors", 2048, 300)
    with pytest.raises(ValueError, match=r"2048.*16"):
        new_head(draft_vocab=str(file))


def test_a_vocabulary_can_be_asked_for_by_its_size() -> None:
    """It holds what the texts say most; if it would hold every token, there is none."""
    said = [
        torch.tensor([9, 4, 4, 11]),
        torch.tensor([11, 2, 9, 9]),
    ]
    head = new_head(draft_vocab=3, said=said)
    assert sayable_ids(head.state_dict(), 16).tolist() == [4, 9, 11]
    assert head.t2d.nonzero().flatten().tolist() == [4, 9, 11]
    whole = new_head(draft_vocab=16, said=said)
    assert not {"d2t", "t2d"} & whole.state_dict().keys()


@pytest.mark.parametrize("has_vocab", [True, False])
def test_the_lm_head_starts_as_the_targets_rows(
    tiny_target: Target,
    tmp_path: Path,
    has_vocab: bool,
) -> None:
    """It is a copy of the rows that it may say, in their order."""
    file = draft_vocab(
        tmp_path / "draft_vocab.safetensors",
        tiny_target.vocab_size,
        300,
    )
    settings = Eagle3.Settings(draft_vocab=str(file) if has_vocab else None)
    head = Eagle3.for_target(
        settings,
        tiny_target.config,
        tiny_target.head,
    )
    ids = sayable_ids(head.state_dict(), tiny_target.vocab_size)
    assert len(ids) == (300 if has_vocab else 2048)
    assert head.lm_head.weight.equal(tiny_target.head.weight[ids])
    assert head.lm_head.weight.data_ptr() != tiny_target.head.weight.data_ptr()


@pytest.mark.parametrize(("queries", "groups"), [("keys", 1), ("keys", 2), ("random", 2)])
def test_every_other_head_starts_by_finding_its_own_row(
    queries: Literal["keys", "random"],
    groups: int,
) -> None:
    """By transformers' rotary positions and plain attention over 64 rows, the last one mostly sees itself."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=4 // groups,
        num_hidden_layers=8,
    )
    head = Eagle3.for_target(Eagle3.Settings(lm_head="random", queries=queries), config)
    attention = head.layers[0].self_attn
    read = torch.randn(1, 64, 512)
    query = attention.q_proj(read).unflatten(-1, (-1, 64)).transpose(1, 2)
    key = attention.k_proj(read).unflatten(-1, (-1, 64)).transpose(1, 2)
    cos, sin = head.rotary(read, torch.arange(64)[None])
    query, key = apply_rotary_pos_emb(query, key, cos, sin)
    # 8 is the root of a head's width
    scores = query @ key.repeat_interleave(groups, dim=1).transpose(-1, -2) / 8
    own_probs = scores[0, :, -1].softmax(-1)[:, -1]
    assert (own_probs > 0.5).tolist() == [queries == "keys", False] * 2
