"""EAGLE-3: which layers it reads, what it may say, and that it can learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from eagle import Budget, Target, generate
from eagle.core.examples import Example, collate
from eagle.data.features import LiveFeatures, taps_of
from eagle.drafters.none import NoDrafter
from eagle.drafters.recurrent.eagle3 import Eagle3
from eagle.drafters.recurrent.reduced_vocab import load_draft_vocab
from tests.families import build, random_tokens
from tests.naive_unroll import sayable_ids
from tests.trained import fixture_seed
from tests.unrolled_heads import draft_vocab

SAYABLE = 300


@pytest.fixture(scope="module")
def vocab_file(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens from all over the target's vocabulary."""
    return draft_vocab(
        tmp_path_factory.mktemp("vocab") / "draft_vocab.safetensors",
        tiny_target.vocab_size,
        SAYABLE,
    )


# -- taps -------------------------------------------------------------------------------------------------------------


def shape_of(layers: int) -> LlamaConfig:
    """A target with so many layers."""
    return LlamaConfig(
        vocab_size=16, hidden_size=8, num_attention_heads=2, num_hidden_layers=layers
    )


@pytest.mark.parametrize(
    ("layers", "taps"),
    [(32, (2, 16, 29)), (36, (2, 18, 33)), (48, (2, 24, 45)), (24, (2, 12, 21)), (8, (2, 4, 5))],
)
def test_the_published_layers_are_read(layers: int, taps: tuple[int, ...]) -> None:
    """The inputs of layers 2, L // 2 and L - 3; its loss reads the LM head's input too."""
    head = Eagle3.for_target(Eagle3.Settings(lm_head="random"), shape_of(layers))
    assert head.taps == taps
    assert taps_of(head.settings, shape_of(layers)) == (*taps, -1)


@pytest.mark.parametrize("layers", range(1, 12))
def test_shallow_targets_have_three_distinct_layers_or_none(layers: int) -> None:
    """No layer is read twice; where there are too few, the refusal says how many there are."""
    try:
        taps = Eagle3.for_target(Eagle3.Settings(lm_head="random"), shape_of(layers)).taps
    except ValueError as error:
        assert layers < 4
        assert str(layers) in str(error)
    else:
        assert len(set(taps)) == 3
        assert all(0 < tap < layers for tap in taps)
        assert list(taps) == sorted(taps)


@pytest.mark.parametrize("taps", [(2, 2, 5), (1, 2, 8), (1, -2, 3)])
def test_layers_that_a_target_does_not_have_are_refused(taps: tuple[int, ...]) -> None:
    """None is read twice; of eight layers the last is number 7."""
    with pytest.raises(ValueError, match="taps"):
        Eagle3.for_target(Eagle3.Settings(lm_head="random", taps=taps), shape_of(8))


# -- the draft vocabulary ---------------------------------------------------------------------------------------------


def test_tensors_are_named_as_published(tiny_target: Target, vocab_file: Path) -> None:
    """Offsets and marks where a vocabulary is drafted from, neither where it is the target's."""
    published = {
        "fc.weight": (128, 384),
        "layers.0.input_layernorm.weight": (128,),
        "layers.0.hidden_norm.weight": (128,),
        "layers.0.post_attention_layernorm.weight": (128,),
        "layers.0.self_attn.q_proj.weight": (128, 256),
        "layers.0.self_attn.k_proj.weight": (128, 256),
        "layers.0.self_attn.v_proj.weight": (128, 256),
        "layers.0.self_attn.o_proj.weight": (128, 128),
        "layers.0.mlp.gate_proj.weight": (384, 128),
        "layers.0.mlp.up_proj.weight": (384, 128),
        "layers.0.mlp.down_proj.weight": (128, 384),
        "norm.weight": (128,),
        "lm_head.weight": (2048, 128),
    }
    tensors = Eagle3.for_target(
        Eagle3.Settings(), tiny_target.config, tiny_target.head
    ).state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == published
    settings = Eagle3.Settings(draft_vocab=str(vocab_file), fc_norm=True)
    tensors = Eagle3.for_target(settings, tiny_target.config, tiny_target.head).state_dict()
    published |= {"lm_head.weight": (SAYABLE, 128), "d2t": (SAYABLE,), "t2d": (2048,)}
    published |= {f"fc_norm.{number}.weight": (128,) for number in range(3)}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == published
    offsets, marks = load_draft_vocab(vocab_file)
    assert tensors["d2t"].equal(offsets) and tensors["t2d"].equal(marks)


@pytest.mark.parametrize("sayable", [True, False])
def test_the_lm_head_starts_as_the_targets_rows(
    tiny_target: Target, vocab_file: Path, sayable: bool
) -> None:
    """Of the tokens that it may say, in their order; a random one has no such rows."""
    given = {"draft_vocab": str(vocab_file)} if sayable else {}
    started = Eagle3.for_target(Eagle3.Settings(**given), tiny_target.config, tiny_target.head)
    ids = sayable_ids(started.state_dict(), tiny_target.vocab_size)
    assert started.lm_head.weight.equal(tiny_target.head.weight[ids])
    assert started.lm_head.weight.data_ptr() != tiny_target.head.weight.data_ptr()
    settings = Eagle3.Settings(**given, lm_head="random")
    other = Eagle3.for_target(settings, tiny_target.config, tiny_target.head).lm_head.weight
    assert other.shape == started.lm_head.weight.shape
    assert not other.equal(started.lm_head.weight)


@pytest.mark.parametrize(("queries", "groups"), [("keys", 1), ("keys", 2), ("random", 2)])
def test_every_other_head_starts_by_finding_its_own_row(
    queries: Literal["keys", "random"], groups: int
) -> None:
    """Of 64 rows before it and itself, by stock attention."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=16,
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=4 // groups,
        num_hidden_layers=8,
    )
    head = Eagle3.for_target(Eagle3.Settings(lm_head="random", queries=queries), shape)
    read, part = torch.randn(1, 64, 512), head.layers[0].self_attn
    query, key = (
        one(read).unflatten(-1, (-1, 64)).transpose(1, 2) for one in (part.q_proj, part.k_proj)
    )
    query, key = apply_rotary_pos_emb(query, key, *head.rotary(read, torch.arange(64)[None]))
    scores = query @ key.repeat_interleave(groups, dim=1).transpose(-1, -2) / 8
    itself = scores[0, :, -1].softmax(-1)[:, -1]
    assert (itself > 0.5).tolist() == [queries == "keys", False] * 2


def vocabulary_of(asked: Any, said: list[Tensor] | None = None, layers: int = 8) -> Eagle3:
    """A new head of a target of 16 tokens."""
    return Eagle3.for_target(
        Eagle3.Settings(lm_head="random", draft_vocab=asked), shape_of(layers), None, said
    )


def test_a_vocabulary_can_be_asked_for_by_its_size() -> None:
    """It is then what the texts say most; of all 16 tokens it is no vocabulary of its own."""
    head = vocabulary_of(3, [torch.tensor([9, 4, 4, 11]), torch.tensor([11, 2, 9, 9])])
    assert sayable_ids(head.state_dict(), 16).tolist() == [4, 9, 11]
    assert head.t2d.nonzero().flatten().tolist() == [4, 9, 11]
    assert not {"d2t", "t2d"} & vocabulary_of(16, [torch.tensor([9])]).state_dict().keys()


def test_a_vocabulary_that_cannot_be_is_refused(vocab_file: Path, tmp_path: Path) -> None:
    """One of another target's tokens, one of a size without texts or beyond the target's, and one that is not there."""
    for asked, said, complaint in (
        (str(vocab_file), None, "2048.*16"),
        (3, None, "draft_vocab is 3"),
        (17, [torch.tensor([9])], "17.*16"),
        (str(tmp_path / "nowhere"), None, "no draft vocabulary at"),
    ):
        with pytest.raises(ValueError, match=complaint):
            vocabulary_of(asked, said)


# -- learning ---------------------------------------------------------------------------------------------------------


def learned(updates: int, **settings: Any) -> float:
    """The acceptance length of a chain of five on a random model's answer, which is no loop, after training on it."""
    target, prompt = Target(build("llama")), random_tokens(12, seed=1)
    answer = generate(target, NoDrafter(), prompt, max_new_tokens=49, stop=[]).tokens
    text = torch.tensor(prompt + answer)
    torch.manual_seed(fixture_seed())
    head = Eagle3.for_target(Eagle3.Settings(**settings), target.config, target.head).train()
    live = LiveFeatures(target, [Example(text, torch.arange(len(text)) >= len(prompt))], {
        "taps": list(taps_of(head.settings, target.config)), "dtype": "float32"
    })  # fmt: skip
    batch = collate(live.read([0]), live.taps)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2, betas=(0.9, 0.95))
    for update in range(updates):
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - update / updates)
        optimizer.zero_grad()
        head(batch, target.head)["total"].backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 0.5)
        optimizer.step()
    trace = generate(
        target, head.bind(target.head), prompt, budget=Budget(5, 5, 1), max_new_tokens=49, stop=[]
    )
    assert trace.tokens == answer
    return trace.acceptance_length


@pytest.mark.slow
def test_one_conversation_is_learned_by_heart() -> None:
    """More than four tokens a step where six are the most there can be; nothing is right that was not learned."""
    assert learned(150, steps=5) > 4
    assert learned(1, steps=5) < 2


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["acceptance", "hybrid"])
def test_one_conversation_is_learned_by_losses_that_aim_at_acceptance(loss: str) -> None:
    """With the norms of 3.1."""
    assert learned(150, steps=5, loss=loss, fc_norm=True, norm_output=True) > 4
