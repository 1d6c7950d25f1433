"""Quantised checkpoints without any format's package: refusals from the config alone, and plain copies of layers."""

from __future__ import annotations

import copy
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from eagle import Target
from eagle.target.borrowed import load_borrowed, save_borrowed
from eagle.target.loading import check_loadable, load_model
from eagle.target.weights.quantised import (
    GUIDE,
    METHODS,
    place,
    warnings_of,
    weight_bits,
    why_not_here,
    why_rows_mix,
)
from tests.families import build, own_answer, random_tokens
from tests.quantised import answers, learn, write_fp8


def config_only(folder: Path, quantization: dict[str, Any]) -> Path:
    """A folder with a config.json and no weights at all."""
    config = build("llama").config.to_dict()
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return folder


REFUSED = [
    (
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        r"quantised by 'modelopt', which transformers does not read",
    ),
    (
        {"quant_method": "eetq"},
        r"by eetq, whose kernels run on cuda alone: got the device cpu\. Load it on one of",
    ),
    (
        {"quant_method": "fbgemm_fp8"},
        r"by fbgemm_fp8, whose kernels run on cuda and xpu alone: got the device cpu",
    ),
    (
        {"quant_method": "quanto", "weights": "int8"},
        r"by quanto, of which transformers reads no checkpoints",
    ),
    (
        {"quant_method": "aqlm"},
        r"by aqlm, which needs aqlm: got a Python without aqlm\. `pip install aqlm`, or take",
    ),
    (
        {"quant_method": "auto-round", "bits": 4, "group_size": 128},
        r"without auto-round\. `pip install auto-round`",
    ),
    ({"quant_method": "sinq"}, r"by sinq, which needs sinq: got a Python without sinq"),
    (
        {"quant_method": "awq", "bits": 4, "group_size": 128},
        r"without gptqmodel\. `pip install gptqmodel`, or take",
    ),
]


@pytest.mark.parametrize(("quantization", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_loaded_is_refused_before_weights_are_read(
    quantization: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """With the package or the device that it needs, and what to do instead."""
    folder = config_only(tmp_path / "quantised", quantization)
    for load in (lambda: Target.load(folder, device="cpu"), lambda: check_loadable(folder, "cpu")):
        with pytest.raises(ValueError, match=message) as refusal:
            load()
        assert "docs/quantised.md" in str(refusal.value)


def test_transformers_own_reason_is_passed_on() -> None:
    """What its quantizer finds wrong with a config, in its words."""
    reason = why_not_here({"quant_method": "mxfp8", "weight_block_size": [0]}, "cpu")
    assert re.search(
        r"is quantised by mxfp8 and cannot be loaded here: .*\. Mend that, or take the plain weights",
        reason,
    )


def test_the_table_names_what_transformers_asks_for() -> None:
    """Every method is one of transformers', and the packages that its quantizer says to install are in the table."""
    assert set(METHODS) <= set(AUTO_QUANTIZER_MAPPING)
    for method, needs in METHODS.items():
        quantizer = AUTO_QUANTIZER_MAPPING[method]
        source = inspect.getsource(quantizer.validate_environment) + inspect.getsource(
            quantizer.__init__
        )
        named = re.findall(r"pip install (?:-U |--upgrade )?['\"]?([A-Za-z_][\w-]*)", source)
        assert set(named) <= {
            *needs.packages,
            "accelerate",
            "torch",
            "kernels",
            "triton",
            "fouroversix",
        }, method


def test_every_method_has_a_row_in_the_docs() -> None:
    """By its name in config.json."""
    page = (Path(__file__).parents[2] / GUIDE).read_text()
    names = {method.partition("_4bit")[0].partition("_8bit")[0] for method in METHODS}
    assert {name for name in names if f"| `{name}`" not in page} == set()


@pytest.mark.slow
def test_unpacked_weights_are_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On stderr, with their size; and a plain target says nothing."""
    target = Target.load(write_fp8(tmp_path / "fp8"), dtype="float32", device="cpu")
    assert re.search(
        r"is quantised by fp8, .* unpacked to float32 and take 4 B each", capsys.readouterr().err
    )
    head, losses = learn(target)
    drafted, alone = answers(target, head)
    assert losses[-1] < losses[0]
    assert drafted == alone == own_answer(target.model, random_tokens(9, seed=5), 24)
    build("llama").save_pretrained(tmp_path / "plain")
    Target.load(tmp_path / "plain", device="cpu")
    assert "quantised" not in capsys.readouterr().err


def test_rows_that_round_together_are_told_of() -> None:
    """Of bitsandbytes' 8 bits alone, and not where no outliers are looked for."""
    eight = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    assert "llm_int8_threshold 6.0" in why_rows_mix(eight)
    assert not why_rows_mix({**eight, "llm_int8_threshold": 0.0})
    assert not why_rows_mix(
        {"quant_method": "bitsandbytes", "load_in_4bit": True}
    ) and not why_rows_mix(None)
    assert warnings_of({"quant_method": "compressed-tensors"}, "cpu", torch.bfloat16)[0].endswith(
        "take 2 B each"
    )


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        (None, None),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}, 4),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4),
        ({"quant_method": "awq", "w_bits": 3}, 3),
        (
            {
                "quant_method": "torchao",
                "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}},
            },
            8,
        ),
        (
            {
                "quant_method": "torchao",
                "quant_type": {"default": {"_type": "Float8WeightOnlyConfig"}},
            },
            8,
        ),
        ({"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 2}}}, 2),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8),
        ({"quant_method": "mxfp4"}, 4),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"weights": {"num_bits": 4}}},
            },
            None,
        ),
        ({"quant_method": "quark"}, None),
    ],
    ids=str,
)
def test_bits_of_weights_in_memory(quantization: dict[str, Any] | None, bits: int | None) -> None:
    """By the config; what is unpacked, or not known, counts as plain."""
    assert weight_bits(quantization) == bits


def test_a_quantised_model_goes_to_its_device() -> None:
    """By a device_map, as not all quantised weights can be moved; a CPU without company needs none."""
    assert place("cuda:1") == {"": "cuda:1"}
    assert (place("cpu") is None) != torch.accelerator.is_available()


class Int8Linear(nn.Module):
    """A linear in a format of nobody's: bytes and a scale a row, under other names than a linear's."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.scales = nn.Parameter(
            linear.weight.abs().amax(1, keepdim=True) / 127, requires_grad=False
        )
        self.qweight = nn.Parameter(
            (linear.weight / self.scales).round().to(torch.int8), requires_grad=False
        )
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Products with the rounded rows."""
        return F.linear(x, self.qweight.to(x.dtype) * self.scales.to(x.dtype), self.bias)


class Int8Embedding(nn.Module):
    """Rows of bytes."""

    def __init__(self, embedding: Any) -> None:
        super().__init__()
        self.scale = embedding.weight.abs().max().item() / 127
        self.weight = nn.Parameter(
            (embedding.weight / self.scale).round().to(torch.int8), requires_grad=False
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Rows, unpacked."""
        return self.weight[tokens] * self.scale


def quantise(model: Any) -> Any:
    """The model with bytes in its embedding, its LM head and one linear."""
    model.lm_head = Int8Linear(model.lm_head)
    model.model.embed_tokens = Int8Embedding(model.model.embed_tokens)
    model.model.layers[1].mlp.up_proj = Int8Linear(model.model.layers[1].mlp.up_proj)
    model.is_quantized = True
    return model


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "granite", "gpt_neox"])
def test_heads_borrow_plain_copies(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once, in the model's precision, and that is said; the model itself is decoded as it is."""
    model = build(name)
    if name == "gpt_neox":
        model.set_output_embeddings(Int8Linear(model.get_output_embeddings()))
        model.is_quantized = True
    else:
        quantise(model)
    own = own_answer(model, random_tokens(9, seed=5), 24)
    target = Target(model)
    told = capsys.readouterr().err
    assert told.count("LM head is quantised (Int8Linear)") == 1
    assert told.count("embedding is quantised (Int8Embedding)") == (name != "gpt_neox")
    quantised = model.get_output_embeddings()
    expected = quantised.qweight * quantised.scales
    torch.testing.assert_close(target.head.weight, expected, rtol=1e-6, atol=1e-6)
    assert target.vocab_size == 96
    head, losses = learn(target)
    assert losses[-1] < losses[0]
    drafted, alone = answers(target, head)
    assert drafted == alone == own
    assert save_borrowed(tmp_path, target.head, target.config)
    states = torch.randn(5, expected.shape[1], generator=torch.Generator().manual_seed(0))
    got = load_borrowed(tmp_path).head.logits(states)
    torch.testing.assert_close(got, target.head.logits(states), rtol=1e-4, atol=1e-4)


def test_decoding_uses_the_models_own_head() -> None:
    """And all that learns, is cast or is copied uses the plain copy."""
    target = Target(quantise(build("llama")))
    own, states = (
        target.model.lm_head,
        torch.randn(3, 32, generator=torch.Generator().manual_seed(0)),
    )
    with torch.no_grad():
        own.qweight.neg_()  # tells the two apart
        assert torch.equal(target.head.logits(states), own(states))
    plain = states @ target.head.weight.T
    assert torch.allclose(target.head.logits(states.clone().requires_grad_()), plain, atol=1e-5)
    assert torch.allclose(copy.deepcopy(target.head.output)(states), plain, atol=1e-5)
    assert torch.allclose(target.head.cast(torch.float64).logits(states), plain.double(), atol=1e-5)


def test_a_linear_that_is_no_matrix_is_not_borrowed() -> None:
    """A copy is compared with what it was made from."""

    class Bent(Int8Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).relu()

    model = build("llama")
    model.lm_head, model.is_quantized = Bent(model.lm_head), True
    with pytest.raises(ValueError, match=r"Bent is quantised, and its products are no matrix's"):
        Target(model)


def test_weights_of_layers_are_unpacked_by_their_names() -> None:
    """For heads that copy layers; plain ones are the model's own."""
    target = Target(quantise(build("llama")))
    layer = target.model.model.layers[1].mlp
    expected = layer.up_proj.qweight * layer.up_proj.scales
    torch.testing.assert_close(target.tensor("model.layers.1.mlp.up_proj.weight"), expected)
    plain = target.tensor("model.layers.1.mlp.down_proj.weight")
    assert plain.data_ptr() == layer.down_proj.weight.data_ptr()


def test_weights_that_a_first_forward_unpacks_are_unpacked() -> None:
    """By a hook of the whole model, which forwards of its base do not run."""
    model = build("llama")
    linear = model.model.layers[0].mlp.up_proj
    packed = linear.weight
    own = own_answer(model, random_tokens(9, seed=5), 8)
    del linear.weight

    def unpack(*_: Any) -> None:
        linear.weight = packed
        handle.remove()

    handle = model.register_forward_pre_hook(unpack)
    model.is_quantized = True
    head, _ = learn(target := Target(model))
    assert answers(target, head, 8)[0] == own


def test_plain_models_get_no_copy(tmp_path: Path) -> None:
    """Nor another LM head than their own."""
    build("llama").save_pretrained(tmp_path)
    model = load_model(tmp_path, torch.float32)
    target = Target(model)
    assert target.head.output is model.lm_head and target.head.embedding is model.model.embed_tokens


class ByRows(nn.Linear):
    """Products in bf16 that round the weights for a few rows and not for many, as bitsandbytes' on AVX512-BF16."""

    def forward(self, x: Tensor) -> Tensor:
        """[.., out] in the precision of the states."""
        rounded = x.to(torch.bfloat16)
        if x.shape[:-1].numel() <= 4:
            return F.linear(rounded, self.weight.to(torch.bfloat16)).to(x.dtype)
        return F.linear(rounded.float(), self.weight.float()).to(torch.bfloat16).to(x.dtype)


@pytest.mark.quick("dtype1-True")
@pytest.mark.parametrize(("dtype", "plain"), [(torch.float32, False), (torch.bfloat16, True)])
def test_products_that_depend_on_rows_are_read_by_steps_in_float32(
    dtype: torch.dtype, plain: bool
) -> None:
    """As the guide says of 4 bits on such a CPU: drafts change no token there, and bf16 is read like a plain target."""
    model = build("llama")
    for layer in model.model.layers.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = ByRows
    target = Target(model.to(dtype))
    described = target.describe()
    assert (described.split("; ")[0] == "mask") == plain
    if not plain:
        page = Path(__file__).parents[2] / GUIDE
        assert "one text at a time" in described and "levels" in described
        assert "; ".join(described.split("; ")[:2]) in " ".join(page.read_text().split())
        head, _ = learn(target)
        drafted, alone = answers(target, head)
        assert drafted == alone == own_answer(model, random_tokens(9, seed=5), 24)
