"""Checkpoints of every format that loads on a CPU: features, some steps of a head, and answers with its drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from eagle import Target
from eagle.target.borrowed import load_borrowed, save_borrowed
from eagle.target.weights.packed import can_pack
from tests.families import own_answer, random_tokens
from tests.quantised import (
    FORMATS,
    ROUNDS_INPUTS,
    answers,
    learn,
    write_bitsandbytes,
    write_plain,
    write_torchao,
)
from tests.target.decoded import is_close

PROMPT = random_tokens(9, seed=5)


def load(folder: Path, **options: Any) -> Target:
    """Return the target of a folder, in fp32 where its format lets it."""
    return Target.load(folder, dtype="float32", device="cpu", **options)


def draw_hidden(count: int) -> Tensor:
    """Return [count, 128], random states."""
    return torch.randn(count, 128, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantised_target_is_learned_from_and_decoded(
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The head's loss falls, and its drafts change no token; without rounded inputs the answer is the model's own."""
    target = load(FORMATS[name](tmp_path))
    printed = capsys.readouterr().err
    # a CPU has no kernels for these: transformers unpacks them while it loads
    is_unpacked = name.startswith(("fp8", "compressed"))
    assert ("take 4 B each" in printed) == is_unpacked
    assert ("LM head is quantised" in printed) == ("LM head" in name and not is_unpacked)
    assert type(target.head.weight) is torch.nn.Parameter
    assert target.head.weight.shape == (96, 128)

    head, losses = learn(target)
    assert losses[-1] < losses[0]

    drafted, alone = answers(target, head)
    assert drafted == alone
    # a forward of many tokens rounds inputs as one of a single token does
    if name not in ROUNDS_INPUTS:
        assert alone == own_answer(target.model, PROMPT, 24)


@pytest.mark.parametrize("name", [name for name in FORMATS if "LM head" in name])
def test_a_store_keeps_the_plain_copy(name: str, tmp_path: Path) -> None:
    """Training on a store needs no package."""
    target = load(FORMATS[name](tmp_path))
    assert save_borrowed(tmp_path / "store", target.head, target.config)
    hidden = draw_hidden(5)
    logits = load_borrowed(tmp_path / "store").head.logits(hidden)
    assert is_close(logits, target.head.logits(hidden), 1e-2)


def test_outliers_that_rows_decide_together_are_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Features are read, with a warning; decoding is refused with what to change."""
    # the default threshold looks for outliers among all rows of a forward
    target = load(write_bitsandbytes(tmp_path, load_in_8bit=True))
    assert "llm_int8_threshold 6.0" in capsys.readouterr().err
    assert target.features(torch.arange(4)[None], (1, -1)).isfinite().all()
    with pytest.raises(ValueError, match=r"Set llm_int8_threshold to 0.0"):
        target.describe()


def test_quantised_linears_are_not_packed(tmp_path: Path) -> None:
    """Torchao's weights lie in stock linears and say that they are fp32."""
    target = load(write_torchao(tmp_path))
    assert not any(can_pack(layer, 0) for layer in target.layers.modules())
    assert can_pack(target.model.lm_head, 0)


def test_a_head_that_copies_layers_gets_plain_ones(tmp_path: Path) -> None:
    """By the names of weights, whose numbers are packed two to a byte."""
    options = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    target = load(write_bitsandbytes(tmp_path, **options))
    path = "model.layers.1.mlp.up_proj"
    matrix = target.tensor(f"{path}.weight")

    assert matrix.shape == (256, 128)
    assert target.model.get_parameter(f"{path}.weight").shape != matrix.shape

    hidden = draw_hidden(3)

    assert is_close(hidden @ matrix.T, target.model.get_submodule(path)(hidden), 1e-2)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """Return the folder of a random adapter of all linears."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    plain = AutoModelForCausalLM.from_pretrained(write_plain(tmp_path / "plain base"))
    config = peft.LoraConfig(
        r=4,
        target_modules="all-linear",
        init_lora_weights=False,
    )
    torch.manual_seed(0)
    # peft writes it over a plain base, as users train it
    peft.get_peft_model(plain, config).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


@torch.no_grad()
def read(model: Any) -> Tensor:
    """Return a model's logits over the prompt."""
    return model(input_ids=torch.tensor([PROMPT])).logits


@pytest.mark.parametrize("name", ["bitsandbytes, nf4", "torchao, int8 weights"])
def test_an_adapter_reads_over_a_quantised_base(name: str, adapter: Path, tmp_path: Path) -> None:
    """As peft's own model of a base that has read nothing yet; the base, and its tensors, are what they were."""
    import peft

    folder = FORMATS[name](tmp_path)
    base = load(folder)
    before = read(base.model)
    # which unpacks; the packed weights have to outlive it
    base.tensor("model.norm.weight")
    adapted = read(base.with_adapter(adapter).model)

    assert torch.equal(read(base.model), before)

    fresh = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = read(peft.PeftModel.from_pretrained(fresh, adapter).eval())

    assert is_close(adapted, expected, 1e-3)
    assert not is_close(adapted, before, 1e-1)


@pytest.mark.parametrize("name", ["compressed-tensors, W8A16", "compressed-tensors, W4A16"])
def test_an_adapter_is_merged_into_what_was_unpacked(
    name: str,
    adapter: Path,
    tmp_path: Path,
) -> None:
    """Such weights are there only once they are unpacked; the merged target reads as the one over the base does."""
    folder = FORMATS[name](tmp_path)
    base = load(folder)
    tokens = torch.tensor([PROMPT])
    over = base.with_adapter(adapter).features(tokens, (-1,))
    # an adapter that is passed to `load` is merged into the weights
    merged = load(folder, adapter=str(adapter)).features(tokens, (-1,))
    torch.testing.assert_close(merged, over, atol=1e-4, rtol=1e-4)

    assert not is_close(merged, base.features(tokens, (-1,)), 0.1)
