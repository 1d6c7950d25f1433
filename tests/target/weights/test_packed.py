"""Weights in oneDNN's layout: answers, the model's own weights, and what makes them plain again."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from eagle import Target
from eagle.target.loading import add_adapter
from eagle.target.weights.packed import (
    PackedHead,
    PackedLinear,
    count_packed,
    has_kernels,
    pack_head,
    pack_model,
)
from tests.families import FAMILIES, PlantedTrees, build, own_answer, random_tokens
from tests.target.decoded import decode, is_close

NO_KERNELS = "this torch packs no weights here"
pytestmark = pytest.mark.skipif(not has_kernels(torch.float32), reason=NO_KERNELS)
PROMPT = random_tokens(12, seed=3)
# linears of classes of their own; their LM heads are stock ones
STAYS_PLAIN = {"gpt2": 1, "falcon": 1}


def build_pair(name: str) -> tuple[Any, Any]:
    """Return a family's model, and an equal one that is packed."""
    model = build(name)
    packed = copy.deepcopy(model)
    assert pack_model(packed, smallest=0)
    return model, packed


@pytest.mark.quick("starcoder2", "llama", "gpt2")
@pytest.mark.parametrize("name", FAMILIES)
def test_drafted_answers_are_those_of_the_untouched_model(name: str) -> None:
    """Every stock linear is packed, and trees with and without taps change no token."""
    model, packed = build_pair(name)
    linears = sum(type(module) is nn.Linear for module in model.modules())

    # else the comparison would be of plain weights
    assert count_packed(packed) == STAYS_PLAIN.get(name, linears)

    target = Target(packed)
    answer = own_answer(model, PROMPT, 12)

    for taps in ((), (1, -1)):
        drafter = PlantedTrees([*PROMPT, *answer], taps=taps)
        assert decode(target, drafter, PROMPT, 12) == answer

    assert f"{count_packed(packed)} linears are packed" in target.describe()


@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_plain_weights(rows: int, bias: bool, dtype: torch.dtype) -> None:
    """In fp64 products of the plain weights tell."""
    if not has_kernels(dtype):
        pytest.skip("no kernels for this dtype")
    linear = nn.Linear(48, 80, bias=bias, dtype=dtype).requires_grad_(False)
    # a packed head keeps its plain weights, which a packed linear does not
    packed = pack_head(copy.deepcopy(linear), smallest=0)
    x = torch.randn(1, rows, 48, dtype=dtype)
    expected = copy.deepcopy(linear).double()(x.double())
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2

    assert torch.allclose(packed(x).double(), expected, rtol=tolerance, atol=tolerance)


def test_the_weights_are_held_once_but_for_the_lm_head() -> None:
    """The LM head is held twice, since heads borrow its plain weights."""
    _, packed = build_pair("llama")
    plain = [
        name
        for name, weight in packed.named_parameters()
        if weight.dim() > 1 and not weight.is_mkldnn
    ]

    assert plain == ["model.embed_tokens.weight", "lm_head.weight"]


@pytest.mark.parametrize("name", ["llama-tied", "qwen2"])
def test_state_dict_tensors_copies_and_files_hold_plain_weights(name: str, tmp_path: Path) -> None:
    """With tied weights and with biases."""
    model, packed = build_pair(name)
    target = Target(packed)
    packed.save_pretrained(tmp_path)
    copies = [
        packed,
        copy.deepcopy(packed),
        pickle.loads(pickle.dumps(packed)),
        AutoModelForCausalLM.from_pretrained(tmp_path),
    ]
    states = [each.state_dict() for each in copies]

    for key, weight in model.state_dict().items():
        for state in states:
            assert torch.equal(state[key], weight)
        assert torch.equal(target.tensor(key), weight)

    # oneDNN's layout cannot be copied
    assert count_packed(copy.deepcopy(packed)) == 0
    assert count_packed(packed)


def replace(packed: nn.Module, changed: nn.Module, path: str) -> None:
    """Put another parameter in the place of the old one."""
    weight = changed.get_submodule(path).weight.detach().clone()
    packed.get_submodule(path).weight = nn.Parameter(weight, requires_grad=False)


def load(packed: nn.Module, changed: nn.Module, path: str) -> None:
    """Load a state dict."""
    packed.load_state_dict(changed.state_dict())


@torch.no_grad()
def write(packed: nn.Module, changed: nn.Module, path: str) -> None:
    """Write in place."""
    packed.get_submodule(path).weight.copy_(changed.get_submodule(path).weight)


UP_PROJ = "model.layers.1.mlp.up_proj"


# an LM head's plain weights can be written in place, since heads borrow them; packed ones cannot
@pytest.mark.parametrize(
    ("change", "path"), [(replace, UP_PROJ), (load, UP_PROJ), (write, "lm_head")]
)
def test_changed_weights_are_read(change: Any, path: str) -> None:
    """However they are changed."""
    model, packed = build_pair("llama")
    target = Target(packed)
    first = own_answer(model, PROMPT, 12)

    assert decode(target, PlantedTrees(PROMPT), PROMPT, 12) == first

    nn.init.normal_(model.get_submodule(path).weight, std=0.3)
    change(packed, model, path)
    answer = own_answer(model, PROMPT, 12)

    assert answer != first
    assert decode(target, PlantedTrees([*PROMPT, *answer]), PROMPT, 12) == answer


def test_packed_weights_cannot_be_written_in_place() -> None:
    """torch refuses, where a silent write would be lost."""
    _, packed = build_pair("llama")
    weight = packed.model.layers[1].mlp.up_proj.weight
    with pytest.raises(RuntimeError, match="not implemented"), torch.no_grad():
        weight.copy_(torch.zeros(64, 32))


def test_a_sequence_is_kept_while_the_weights_stay() -> None:
    """The mark of packed weights changes with them, and only then."""
    _, packed = build_pair("llama")
    target = Target(packed)
    decode(target, PlantedTrees(PROMPT), PROMPT, 4)

    assert target.spare is not None
    assert target.spare.mark == target.weight_mark.read()

    # another parameter, since packed ones cannot be written to
    zeros = nn.Parameter(torch.zeros(64, 32), requires_grad=False)
    packed.model.layers[0].mlp.up_proj.weight = zeros

    assert target.spare.mark != target.weight_mark.read()


@pytest.mark.parametrize("name", ["mamba", "jamba"])
def test_models_that_read_weights_by_themselves_stay_plain(name: str) -> None:
    """They compute with weights past the forward of their linears."""
    model = build(name)
    packed = copy.deepcopy(model)

    assert pack_model(packed, smallest=0) == 0
    assert count_packed(packed) == 0

    tokens = torch.tensor([PROMPT])

    assert torch.equal(packed(input_ids=tokens).logits, model(input_ids=tokens).logits)


def test_casting_and_adapters_make_weights_plain() -> None:
    """What needs plain weights gets them."""
    model, packed = build_pair("llama")
    packed.double()

    assert packed.model.layers[0].mlp.up_proj.weight.dtype == torch.float64

    pytest.importorskip("peft")
    pack_model(model, smallest=0)
    adapted = add_adapter(model, rank=2, alpha=4, dropout=0.0)

    assert count_packed(model) == 0

    # an adapter learns through the layers below
    adapted(input_ids=torch.tensor([PROMPT])).logits.sum().backward()

    assert any(weight.grad is not None for weight in adapted.parameters())


def test_gradients_and_autocast_pass_by_the_packed_weights() -> None:
    """The gradient at the input is that of the plain weights."""
    model, packed = build_pair("llama")

    for path in ("model.layers.0.mlp.up_proj", "lm_head"):
        linear = packed.get_submodule(path)
        x = torch.randn(3, 32, requires_grad=True)
        (gradient,) = torch.autograd.grad(linear(x).sum(), x)
        expected = model.get_submodule(path).weight.sum(0).expand(3, -1)
        assert is_close(gradient, expected)
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            assert linear(x).dtype == torch.bfloat16


def test_load_packs_where_it_is_asked_to_and_says_why_not(tmp_path: Path) -> None:
    """These weights are too small to gain, and no kernel takes fp64."""
    build("llama").save_pretrained(tmp_path)
    assert count_packed(Target.load(tmp_path, dtype="float32").model) == 0
    assert count_packed(Target.load(tmp_path, dtype="bfloat16", packed=False).model) == 0
    with pytest.raises(ValueError, match="packed is True, and none"):
        Target.load(tmp_path, dtype="float64", packed=True)


def test_hooks_and_types_stay() -> None:
    """What a user put on a linear still runs."""
    model = build("llama")
    up_proj = model.model.layers[0].mlp.up_proj
    calls: list[Any] = []
    # put on before packing
    up_proj.register_forward_hook(lambda *_: calls.append(1))
    pack_model(model, smallest=0)
    Target(model)

    assert calls
    assert isinstance(up_proj, PackedLinear)
    assert isinstance(model.lm_head, PackedHead)
