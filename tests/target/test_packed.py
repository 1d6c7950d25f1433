"""Weights in oneDNN's layout: answers, the model's own weights, and what makes them plain again."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from eagle import Budget, Target, generate
from eagle.drafters.recurrent.eagle3 import Eagle3, Eagle3Settings
from eagle.target.loading import add_adapter
from eagle.target.weights.packed import (
    PackedHead,
    PackedLinear,
    count_packed,
    has_kernels,
    pack_head,
    pack_model,
)
from tests.families import FAMILIES, PlantedTrees, build, own_answer, own_choices, random_tokens

pytestmark = pytest.mark.skipif(
    not has_kernels(torch.float32), reason="this torch packs no weights here"
)
PROMPT = random_tokens(12, seed=3)
STAYS_PLAIN = {
    "gpt2": 1,
    "falcon": 1,
}  # linears of classes of their own; their LM heads are stock ones
READS_WEIGHTS = ("mamba", "jamba")  # by themselves, past the forward of their linears


def packed_pair(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    """A family's model, and an equal one that is packed."""
    model = build(name, dtype)
    packed = copy.deepcopy(model)
    assert pack_model(packed, smallest=0)
    return model, packed


@pytest.mark.quick("starcoder2", "llama", "gpt2")
@pytest.mark.parametrize("name", FAMILIES)
def test_drafted_answers_are_those_of_the_untouched_model(name: str) -> None:
    model, packed = packed_pair(name)
    linears = sum(type(module) is nn.Linear for module in model.modules())
    assert count_packed(packed) == STAYS_PLAIN.get(name, linears)
    target, answer = Target(packed), own_answer(model, PROMPT, 12)
    for taps in ((), (1, -1)):
        trace = generate(
            target, PlantedTrees([*PROMPT, *answer], taps=taps), PROMPT, max_new_tokens=12
        )
        assert trace.tokens == answer
    assert trace.acceptance_length > 1
    assert f"{count_packed(packed)} linears are packed" in target.describe()


@pytest.mark.parametrize("rows", [1, 2, 3, 16, 64])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_plain_weights(rows: int, bias: bool, dtype: torch.dtype) -> None:
    if not has_kernels(dtype):
        pytest.skip("no kernels for this dtype")
    linear = nn.Linear(48, 80, bias=bias, dtype=dtype).requires_grad_(False)
    model = nn.ModuleList([copy.deepcopy(linear)])
    part = pack_head(model[0], smallest=0)
    x = torch.randn(1, rows, 48, dtype=dtype)
    expected = x.double() @ linear.weight.double().T + (linear.bias.double() if bias else 0)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert torch.allclose(part(x).double(), expected, rtol=tolerance, atol=tolerance)


def test_the_weights_are_held_once_but_for_the_lm_head() -> None:
    _, packed = packed_pair("llama")
    layouts = {
        name: weight.is_mkldnn for name, weight in packed.named_parameters() if weight.dim() > 1
    }
    assert [name for name, is_packed in layouts.items() if not is_packed] == [
        "model.embed_tokens.weight",
        "lm_head.weight",
    ]


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2"])
def test_state_dict_tensors_copies_and_files_hold_plain_weights(name: str, tmp_path: Path) -> None:
    model, packed = packed_pair(name)
    target = Target(packed)
    packed.save_pretrained(tmp_path)
    others = [
        packed.state_dict(),
        copy.deepcopy(packed).state_dict(),
        pickle.loads(pickle.dumps(packed)).state_dict(),
    ]
    others += [AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()]
    for key, weight in model.state_dict().items():
        assert all(torch.equal(state[key], weight) for state in others)
        assert torch.equal(target.tensor(key), weight)
    assert count_packed(copy.deepcopy(packed)) == 0
    assert count_packed(packed)


@pytest.mark.quick("write-model.layers.1.mlp.up_proj", "load-model.layers.1.mlp.up_proj")
@pytest.mark.parametrize("part", ["model.layers.1.mlp.up_proj", "lm_head"])
@pytest.mark.parametrize("way", ["write", "replace", "load"])
def test_changed_weights_are_read(part: str, way: str) -> None:
    model, packed = packed_pair("llama")
    target = Target(packed)
    first = generate(target, PlantedTrees(PROMPT), PROMPT, max_new_tokens=12).tokens
    assert first == own_answer(model, PROMPT, 12)
    with torch.no_grad():
        model.get_submodule(part).weight.copy_(
            torch.randn(model.get_submodule(part).weight.shape) * 0.3
        )
    changed, linear = model.get_submodule(part).weight, packed.get_submodule(part)
    if way == "replace":
        linear.weight = nn.Parameter(changed.detach().clone(), requires_grad=False)
    elif way == "load":
        packed.load_state_dict(model.state_dict())
    elif part == "lm_head":
        with torch.no_grad():
            linear.weight.copy_(changed)
    else:
        with pytest.raises(RuntimeError, match="not implemented"), torch.no_grad():
            linear.weight.copy_(changed)
        return
    answer = own_answer(model, PROMPT, 12)
    assert answer != first
    assert (
        generate(target, PlantedTrees([*PROMPT, *answer]), PROMPT, max_new_tokens=12).tokens
        == answer
    )


def test_a_text_is_kept_while_the_weights_stay() -> None:
    _, packed = packed_pair("llama")
    target = Target(packed)
    generate(target, PlantedTrees(PROMPT), PROMPT, max_new_tokens=4)
    assert target.spare is not None
    assert target.spare.mark == target.weight_mark.read()
    packed.model.layers[0].mlp.up_proj.weight = nn.Parameter(
        torch.zeros(64, 32), requires_grad=False
    )
    assert target.spare.mark != target.weight_mark.read()


@pytest.mark.parametrize("name", READS_WEIGHTS)
def test_models_that_read_weights_by_themselves_stay_plain(name: str) -> None:
    model = build(name)
    packed = copy.deepcopy(model)
    assert pack_model(packed, smallest=0) == 0
    assert count_packed(packed) == 0
    text = [*PROMPT, *own_answer(model, PROMPT, 6)]
    assert own_choices(packed, PROMPT, text[len(PROMPT) :]) == text[len(PROMPT) :]


def test_casting_and_adapters_make_weights_plain() -> None:
    model, packed = packed_pair("llama")
    packed.double()
    assert packed.model.layers[0].mlp.up_proj.weight.dtype == torch.float64
    pytest.importorskip("peft")
    pack_model(model, smallest=0)
    adapted = add_adapter(model, rank=2, alpha=4, dropout=0.0)
    assert count_packed(model) == 0
    adapted(input_ids=torch.tensor([PROMPT])).logits.sum().backward()
    assert any(weight.grad is not None for weight in adapted.parameters())


def test_gradients_and_autocast_pass_by_the_packed_weights() -> None:
    model, packed = packed_pair("llama")
    x = torch.randn(3, 32)
    for path in ("model.layers.0.mlp.up_proj", "lm_head"):
        linear, plain = packed.get_submodule(path), model.get_submodule(path)
        given = x.clone().requires_grad_()
        linear(given).sum().backward()
        assert torch.allclose(given.grad, plain.weight.sum(0).expand(3, -1), atol=1e-5)
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            assert linear(x).dtype == torch.bfloat16


def test_load_packs_where_it_is_asked_to_and_says_why_not(tmp_path: Path) -> None:
    model = build("llama")
    model.save_pretrained(tmp_path)
    assert count_packed(Target.load(tmp_path, dtype="float32").model) == 0
    assert count_packed(Target.load(tmp_path, dtype="bfloat16", packed=False).model) == 0
    with pytest.raises(ValueError, match="packed is True, and none of LlamaForCausalLM's weights"):
        Target.load(tmp_path, dtype="float64", packed=True)


@pytest.mark.slow
def test_a_head_packs_its_own_lm_head_where_the_targets_is() -> None:
    """Its drafts stay, also once its LM head was written to."""
    model, packed = packed_pair("llama")
    settings = Eagle3Settings(taps=(0, 1, 2), lm_head="random")
    torch.manual_seed(0)
    heads = [Eagle3.for_target(settings, model.config, Target(model).head)]
    heads.append(copy.deepcopy(heads[0]))
    for head, target in zip(heads, (Target(model), Target(packed)), strict=True):
        head.bind(target.head)
    assert not isinstance(heads[0].lm_head, PackedHead)
    pack_head(heads[1].lm_head, smallest=0)
    for _ in range(2):
        traces = [
            generate(
                target, head, PROMPT, budget=Budget(nodes=6, depth=3, top_k=3), max_new_tokens=12
            )
            for head, target in zip(heads, (Target(model), Target(packed)), strict=True)
        ]
        assert traces[0].tokens == traces[1].tokens == own_answer(model, PROMPT, 12)
        with torch.no_grad():
            changed = torch.randn_like(heads[0].lm_head.weight)
            for head in heads:
                head.lm_head.weight.copy_(changed)
        x = torch.randn(1, 3, changed.shape[1])
        with torch.no_grad():
            assert torch.allclose(heads[1].lm_head(x), x @ changed.T, atol=1e-4)


def test_hooks_and_types_stay() -> None:
    model, seen = build("llama"), []
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: seen.append(1))
    pack_model(model, smallest=0)
    Target(model)
    assert seen
    assert isinstance(model.model.layers[0].mlp.up_proj, PackedLinear)
    assert isinstance(model.lm_head, PackedHead)
