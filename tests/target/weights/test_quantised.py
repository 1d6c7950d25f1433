"""Quantised checkpoints without any format's package: refusals from the config alone, and plain copies of layers."""

from __future__ import annotations

import copy
import inspect
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from eagle import Target
from eagle.target.borrowed import load_borrowed, save_borrowed
from eagle.target.loading import check_loadable
from eagle.target.weights.dense import keep_layout
from eagle.target.weights.quantised import (
    GUIDE,
    METHODS,
    device_map_of,
    warnings_of,
    weight_bits,
    why_not_here,
    why_rows_mix,
)
from tests.families import build, own_answer, random_tokens
from tests.quantised import answers, learn
from tests.target.decoded import is_close

PROMPT = random_tokens(9, seed=5)
PAGE = Path(__file__).parents[3] / GUIDE

# a method transformers does not know, kernels of one device, no checkpoints, and packages that are not here
REFUSED = [
    ({"quant_method": "modelopt"}, "'modelopt', which transformers does not read"),
    ({"quant_method": "eetq"}, "kernels run on cuda alone: got the device cpu"),
    ({"quant_method": "quanto", "weights": "int8"}, "transformers reads no checkpoints"),
    ({"quant_method": "aqlm"}, "`pip install aqlm`, or take"),
    ({"quant_method": "awq", "bits": 4, "group_size": 128}, "`pip install gptqmodel`"),
]


@pytest.mark.parametrize(("quantization", "message"), REFUSED)
def test_what_cannot_be_loaded_is_refused_before_weights_are_read(
    quantization: dict[str, Any],
    message: str,
    tmp_path: Path,
) -> None:
    """From a folder without any weights: with the package or the device that it needs, and what to do instead."""
    config = {**build("llama").config.to_dict(), "quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(config))

    # before a run begins, the same check is made without loading
    for load in (Target.load, check_loadable):
        with pytest.raises(ValueError, match=message) as refusal:
            load(tmp_path, device="cpu")
        assert "docs/quantised.md" in str(refusal.value)


def test_transformers_own_reason_is_passed_on() -> None:
    """What its quantizer finds wrong with a config, in its words."""
    reason = why_not_here({"quant_method": "mxfp8", "weight_block_size": [0]}, "cpu")
    assert "is quantised by mxfp8 and cannot be loaded here" in reason
    assert "Mend that" in reason


# what a quantizer names besides the packages of its format
GENERAL = {"accelerate", "torch", "kernels", "triton", "fouroversix"}


@pytest.mark.parametrize("method", METHODS)
def test_the_table_names_what_transformers_asks_for(method: str) -> None:
    """The packages that its quantizer says to install are in the table, and the method is in the docs."""
    quantizer = AUTO_QUANTIZER_MAPPING[method]
    # the sentences of transformers' own errors
    source = inspect.getsource(quantizer.validate_environment)
    source += inspect.getsource(quantizer.__init__)
    named = re.findall(r"pip install (?:-U |--upgrade )?['\"]?([A-Za-z_][\w-]*)", source)

    assert {*named} <= {*METHODS[method].packages} | GENERAL

    name = method.removesuffix("_4bit").removesuffix("_8bit")

    assert f"| `{name}`" in PAGE.read_text()


def test_rows_that_round_together_are_told_of() -> None:
    """Of bitsandbytes' 8 bits alone, and not where no outliers are looked for."""
    eight = {"quant_method": "bitsandbytes", "load_in_8bit": True}

    assert "llm_int8_threshold 6.0" in why_rows_mix(eight)

    for config in (None, {**eight, "llm_int8_threshold": 0.0}, {**eight, "load_in_8bit": False}):
        assert not why_rows_mix(config)

    (warning,) = warnings_of({"quant_method": "compressed-tensors"}, "cpu", torch.bfloat16)

    assert warning.endswith("take 2 B each")


TORCHAO_INT8 = {"default": {"_type": "Int8WeightOnlyConfig"}}
HQQ = {"weight_quant_params": {"nbits": 2}}
GROUPS = {"a": {"weights": {"num_bits": 4}}}


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        (None, None),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}, 4),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4),
        ({"quant_method": "awq", "w_bits": 3}, 3),
        ({"quant_method": "torchao", "quant_type": TORCHAO_INT8}, 8),
        ({"quant_method": "hqq", "quant_config": HQQ}, 2),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8),
        ({"quant_method": "mxfp4"}, 4),
        # what is unpacked, or not known, counts as plain
        ({"quant_method": "compressed-tensors", "config_groups": GROUPS}, None),
        ({"quant_method": "quark"}, None),
    ],
)
def test_bits_of_weights_in_memory(quantization: dict[str, Any] | None, bits: int | None) -> None:
    """The config tells."""
    assert weight_bits(quantization) == bits


def test_a_quantised_model_goes_to_its_device() -> None:
    """By a device_map, as not all quantised weights can be moved; a CPU without an accelerator needs none."""
    assert device_map_of("cuda:1") == {"": "cuda:1"}
    assert (device_map_of("cpu") is None) != torch.accelerator.is_available()


class Int8Linear(nn.Module):
    """A linear in a format of its own: bytes and a scale a row, under other names than a linear's."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.in_features = linear.in_features
        # one for each output
        scales = linear.weight.abs().amax(1, keepdim=True) / 127
        codes = (linear.weight / scales).round().to(torch.int8)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.qweight = nn.Parameter(codes, requires_grad=False)
        self.bias = linear.bias

    @property
    def plain(self) -> Tensor:
        """The rounded weights."""
        return self.qweight * self.scales

    def forward(self, x: Tensor) -> Tensor:
        """Return products with the rounded weights."""
        return F.linear(x, self.plain.to(x.dtype), self.bias)


class Int8Embedding(nn.Module):
    """An embedding of bytes."""

    def __init__(self, embedding: Any) -> None:
        super().__init__()
        self.scale = embedding.weight.abs().max().item() / 127
        codes = (embedding.weight / self.scale).round().to(torch.int8)
        self.weight = nn.Parameter(codes, requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return unpacked rows."""
        return self.weight[tokens] * self.scale


def build_quantised() -> Any:
    """Return a llama with scaled logits and bytes in its embedding, its LM head and one linear."""
    model: Any = build("granite")
    model.lm_head = Int8Linear(model.lm_head)
    model.model.embed_tokens = Int8Embedding(model.model.embed_tokens)
    model.model.layers[1].mlp.up_proj = Int8Linear(model.model.layers[1].mlp.up_proj)
    # as transformers marks what it loads
    model.is_quantized = True
    return model


@pytest.mark.slow
def test_heads_borrow_plain_copies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Once, in the model's precision, and that is said; the model itself is decoded as it is."""
    model = build_quantised()
    expected = own_answer(model, PROMPT, 24)
    target = Target(model)
    printed = capsys.readouterr().err
    assert printed.count("LM head is quantised (Int8Linear)") == 1
    assert printed.count("embedding is quantised (Int8Embedding)") == 1

    torch.testing.assert_close(
        target.head.weight,
        model.lm_head.plain,
        rtol=1e-6,
        atol=1e-6,
    )
    assert target.vocab_size == 96

    head, losses = learn(target)
    assert losses[-1] < losses[0]

    drafted, alone = answers(target, head)
    assert drafted == expected
    assert alone == expected
    assert save_borrowed(tmp_path, target.head, target.config)

    hidden = torch.randn(5, 32)
    logits = load_borrowed(tmp_path).head.logits(hidden)
    torch.testing.assert_close(
        logits,
        target.head.logits(hidden),
        rtol=1e-4,
        atol=1e-4,
    )


@torch.no_grad()
def test_decoding_uses_the_models_own_head() -> None:
    """All that learns, is cast or is copied uses the plain copy."""
    target = Target(build_quantised())
    head = target.head
    lm_head: Any = target.model.lm_head
    hidden = torch.randn(3, 32)
    lm_head.qweight.neg_()  # tells the two apart
    scale = head.logit_scale

    assert is_close(head.logits(hidden), lm_head(hidden) * scale)

    plain = hidden @ head.weight.T

    with torch.enable_grad():
        assert is_close(head.logits(hidden.clone().requires_grad_()), plain * scale)

    assert is_close(copy.deepcopy(head.output)(hidden), plain)
    assert is_close(head.cast(torch.float64).logits(hidden).float(), plain * scale)


def test_a_linear_that_is_no_matrix_is_not_borrowed() -> None:
    """A copy is compared with what it was made from."""

    class Bent(Int8Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).relu()

    model: Any = build("llama")
    model.lm_head = Bent(model.lm_head)
    model.is_quantized = True

    with pytest.raises(ValueError, match="its products are no matrix's"):
        Target(model)


def test_weights_of_layers_are_unpacked_by_their_names() -> None:
    """For heads that copy layers; plain ones are the model's own."""
    target = Target(build_quantised())
    mlp: Any = target.model.get_submodule("model.layers.1.mlp")
    unpacked = target.tensor("model.layers.1.mlp.up_proj.weight")
    torch.testing.assert_close(unpacked, mlp.up_proj.plain)
    plain = target.tensor("model.layers.1.mlp.down_proj.weight")

    assert plain.data_ptr() == mlp.down_proj.weight.data_ptr()


def test_weights_that_a_first_forward_unpacks_are_unpacked() -> None:
    """By a hook of the whole model, which forwards of its base do not run."""
    model: Any = build("llama")
    expected = own_answer(model, PROMPT, 8)
    linear = model.model.layers[0].mlp.up_proj
    packed = linear.weight
    # there is no weight before the first forward
    del linear.weight

    def unpack(*_: Any) -> None:
        linear.weight = packed
        handle.remove()

    handle = model.register_forward_pre_hook(unpack)
    model.is_quantized = True
    target = Target(model)
    head, _ = learn(target)

    assert answers(target, head, 8)[0] == expected


def test_plain_models_get_no_copy(capsys: pytest.CaptureFixture[str]) -> None:
    """Their heads borrow the model's own modules, and nothing is said."""
    model: Any = build("llama")
    target = Target(model)
    # the same modules, no copies of them
    assert target.head.output is model.lm_head
    assert target.head.embedding is model.model.embed_tokens
    assert "quantised" not in capsys.readouterr().err


class ByRows(nn.Linear):
    """Products in bf16 that round the weights for a few rows and not for many, as bitsandbytes' on AVX512-BF16."""

    def forward(self, x: Tensor) -> Tensor:
        """Return [.., out] in the precision of the states."""
        rounded = x.to(torch.bfloat16)
        # a draft of few nodes takes the kernel of single tokens
        if x.shape[:-1].numel() <= 4:
            return F.linear(rounded, self.weight.to(torch.bfloat16)).to(x.dtype)
        return F.linear(rounded.float(), self.weight.float()).to(torch.bfloat16).to(x.dtype)


@pytest.mark.quick("bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_that_depend_on_rows_are_read_by_steps_in_float32(dtype: str) -> None:
    """As the guide says of 4 bits on such a CPU: drafts change no token there, and bf16 is read like a plain target."""
    model: Any = build("llama")

    for module in model.model.layers.modules():
        if type(module) is nn.Linear:
            module.__class__ = ByRows

    target = Target(model.to(getattr(torch, dtype)))
    described = target.describe().split("; ")
    if dtype == "bfloat16":
        assert described[0] == "mask"
        return
    mode = "; ".join(described[:2])
    assert "levels" in mode
    assert "one sequence at a time" in mode
    assert mode in " ".join(PAGE.read_text().split())

    head, _ = learn(target)
    expected = own_answer(model, PROMPT, 24)

    for tokens in answers(target, head):
        assert tokens == expected


def test_a_layout_that_a_forward_changes_is_put_back() -> None:
    """The weight, its quantisation state and what that holds, as bitsandbytes changes them."""
    linear = nn.Linear(2, 2)
    weight: Any = linear.weight
    data = weight.data
    state = SimpleNamespace(absmax=1)
    weight.quant_state = state

    with keep_layout(linear):
        weight.data = data.clone()
        weight.quant_state = None
        state.absmax = 2

    assert weight.data_ptr() == data.data_ptr()
    assert weight.quant_state is state
    assert state.absmax == 1
