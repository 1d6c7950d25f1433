"""Checkpoints of every format that loads on a CPU: features, some steps of a head, and answers with its drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
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


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantised_target_is_learned_from_and_decoded(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The head's loss falls, and its drafts change no token; without rounded inputs the answer is the model's own."""
    target = Target.load(FORMATS[name](tmp_path), dtype="float32", device="cpu")
    told = capsys.readouterr().err
    unpacked = name.startswith(("fp8", "compressed"))
    assert ("LM head is quantised" in told) == ("LM head" in name and not unpacked)
    assert ("take 4 B each" in told) == unpacked
    assert type(target.head.weight) is torch.nn.Parameter and target.head.weight.shape == (96, 128)
    head, losses = learn(target)
    assert losses[-1] < losses[0]
    drafted, alone = answers(target, head)
    assert drafted == alone
    if name not in ROUNDS_INPUTS:
        assert alone == own_answer(target.model, random_tokens(9, seed=5), 24)


@pytest.mark.parametrize("name", [name for name in FORMATS if "LM head" in name])
def test_a_store_keeps_the_plain_copy(name: str, tmp_path: Path) -> None:
    """Training on a store needs no package."""
    target = Target.load(FORMATS[name](tmp_path), dtype="float32", device="cpu")
    assert save_borrowed(tmp_path / "store", target.head, target.config)
    states = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    got = load_borrowed(tmp_path / "store").head.logits(states)
    expected = target.head.logits(states)
    assert (got - expected).norm() < 1e-2 * expected.norm()


def test_outliers_that_rows_decide_together_are_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Features are read, with a warning; decoding is refused with what to change."""
    target = Target.load(
        write_bitsandbytes(tmp_path, load_in_8bit=True), dtype="float32", device="cpu"
    )
    assert "llm_int8_threshold 6.0" in capsys.readouterr().err
    assert target.features(torch.arange(4)[None], (1, -1)).isfinite().all()
    with pytest.raises(
        ValueError, match=r"cannot read a tree: it is quantised .* Set llm_int8_threshold to 0.0"
    ):
        target.describe()


def test_quantised_linears_are_not_packed(tmp_path: Path) -> None:
    """Torchao's weights lie in stock linears and say that they are fp32."""
    target = Target.load(write_torchao(tmp_path), dtype="float32", device="cpu")
    assert not any(can_pack(layer, 0) for layer in target.layers.modules())
    assert can_pack(target.model.lm_head, 0)


def test_a_head_that_copies_layers_gets_plain_ones(tmp_path: Path) -> None:
    """By the names of weights, whose numbers are packed two to a byte."""
    target = Target.load(
        write_bitsandbytes(tmp_path, load_in_4bit=True, bnb_4bit_quant_type="nf4"),
        dtype="float32",
        device="cpu",
    )
    name = "model.layers.1.mlp.up_proj.weight"
    matrix = target.tensor(name)
    assert matrix.shape == (256, 128) and target.model.get_parameter(name).shape != matrix.shape
    states = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    expected = target.model.get_submodule(name.removesuffix(".weight"))(states)
    assert (states @ matrix.T - expected).norm() < 1e-2 * expected.norm()


def write_adapter(peft: Any, folder: Path) -> None:
    """Write a random adapter of all linears to `adapter`."""
    plain = AutoModelForCausalLM.from_pretrained(write_plain(folder / "plain"))
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    torch.manual_seed(0)
    peft.get_peft_model(plain, config).save_pretrained(folder / "adapter")


@pytest.mark.parametrize("name", ["bitsandbytes, nf4", "torchao, int8 weights"])
def test_an_adapter_reads_over_a_quantised_base(name: str, tmp_path: Path) -> None:
    """As peft's own model of a base that has read nothing yet; the base, and its tensors, are what they were."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    folder = FORMATS[name](tmp_path)
    write_adapter(peft, tmp_path)
    base = Target.load(folder, dtype="float32", device="cpu")
    tokens = torch.tensor([random_tokens(9, seed=5)])
    before = base.model(input_ids=tokens).logits
    base.tensor("model.norm.weight")
    adapted = base.with_adapter(tmp_path / "adapter").model(input_ids=tokens).logits
    assert torch.equal(base.model(input_ids=tokens).logits, before)
    fresh = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = (
        peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter").eval()(input_ids=tokens).logits
    )
    assert (adapted - expected).norm() < 1e-3 * expected.norm() < (adapted - before).norm()


@pytest.mark.parametrize("name", ["compressed-tensors, W8A16", "compressed-tensors, W4A16"])
def test_an_adapter_is_merged_into_what_was_unpacked(name: str, tmp_path: Path) -> None:
    """Such weights are there only once they are unpacked; the merged target reads as the one over the base does."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    folder = FORMATS[name](tmp_path)
    write_adapter(peft, tmp_path)
    base = Target.load(folder, dtype="float32", device="cpu")
    merged = Target.load(folder, dtype="float32", device="cpu", adapter=str(tmp_path / "adapter"))
    tokens = torch.tensor([random_tokens(9, seed=5)])
    over, into, plain = (
        target.features(tokens, (-1,))
        for target in (base.with_adapter(tmp_path / "adapter"), merged, base)
    )
    torch.testing.assert_close(into, over, atol=1e-4, rtol=1e-4)
    assert (plain - into).norm() > 0.1 * plain.norm()
