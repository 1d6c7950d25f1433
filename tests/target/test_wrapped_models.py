"""Models whose modules or weights are wrapped decode as they do by themselves, or are refused with a sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from transformers import AutoConfig, AutoModelForCausalLM

from eagle import Target
from eagle.drafters import DRAFTERS, settings_of
from eagle.target.stock_head import stock_head
from tests.every_type import SPECIAL, shrunk
from tests.families import build, draw_weights, own_answer
from tests.target.decoded import decode

PROMPT = [5, 6, 7, 8, 9, 10, 11]
COUNT = 12


class Scaled(nn.Module):
    """A parametrisation."""

    def forward(self, weight: Tensor) -> Tensor:
        """Return a weight."""
        return weight * 1.5


WRAPS: dict[str, Callable[[Any], Any]] = {
    "parametrised": lambda layer: parametrize.register_parametrization(layer, "weight", Scaled()),
    "pruned": lambda layer: prune.random_unstructured(layer, "weight", 0.3),
}
PATHS = ["model.layers.0.self_attn.q_proj", "model.embed_tokens", "lm_head"]


def new_head(target: Target, kind: str) -> Any:
    """Return a head of new weights."""
    torch.manual_seed(0)
    # EAGLE-3 counts which tokens its own LM head should keep
    frequent = [torch.arange(48)] if kind == "eagle3" else []
    settings = settings_of({"kind": kind}, "test")
    head = DRAFTERS[kind].for_target(
        settings,
        target.config,
        target.head,
        frequent,
    )
    return head.bind(target.head).eval()


def check_answers(model: Any, expected: list[int], *kinds: str) -> Target:
    """Check that a target over the model answers as expected with each kind of head; return it."""
    target = Target(model)
    for kind in kinds or ("eagle1", "eagle3"):
        assert decode(target, new_head(target, kind), PROMPT, COUNT) == expected
    return target


@pytest.mark.quick("pruned-model.*")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("wrap", WRAPS)
def test_a_weight_that_is_made_of_others_is_read(wrap: str, path: str) -> None:
    """A head that borrows it gets a copy; and `tensor` gives what the module has."""
    model = build("llama")
    torch.manual_seed(0)
    # the weight becomes a property that is computed at each access
    WRAPS[wrap](model.get_submodule(path))
    target = check_answers(model, own_answer(model, PROMPT, COUNT))
    assert torch.equal(target.tensor(f"{path}.weight"), model.get_submodule(path).weight)


@pytest.mark.parametrize("where", ["everything", "an LM head with a bias"])
def test_offloaded_weights_are_read(where: str, tmp_path: Path) -> None:
    """Heads that borrow them get a copy."""
    if where == "everything":
        model: Any = build("llama")
        expected = own_answer(model, PROMPT, COUNT)
        accelerate.cpu_offload(model, torch.device("cpu"))
    else:
        sizes = {
            "vocab_size": 96,
            "hidden_size": 32,
            "intermediate_size": 64,
        }
        config = AutoConfig.for_model(
            "phi",
            num_hidden_layers=4,
            num_attention_heads=4,
            **sizes,
        )
        model = draw_weights(AutoModelForCausalLM.from_config(config)).eval()
        expected = own_answer(model, PROMPT, COUNT)
        places: Any = {"model": "cpu", "lm_head": "disk"}
        accelerate.dispatch_model(
            model, places, main_device="cpu", offload_dir=tmp_path, force_hooks=True
        )
    target = check_answers(model, expected)

    # offloaded weights are on the meta device between forwards
    assert not target.head.weight.is_meta
    assert target.device.type == "cpu"


PEFT_SETTINGS: dict[str, dict[str, Any]] = {
    "LoraConfig": {"r": 4, "target_modules": "all-linear", "init_lora_weights": False},
    "AdaptionPromptConfig": {"adapter_len": 4, "adapter_layers": 2},
}


@pytest.mark.quick("tuner-AdaptionPromptConfig")
@pytest.mark.parametrize("kind", PEFT_SETTINGS)
@pytest.mark.parametrize("wrapper", ["model", "tuner"])
def test_a_peft_model_is_unwrapped(kind: str, wrapper: str) -> None:
    """Its adapters change layers of the model in place."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    plain = build("llama")
    before = own_answer(plain, PROMPT, COUNT)
    torch.manual_seed(0)
    config = getattr(peft, kind)(task_type="CAUSAL_LM", **PEFT_SETTINGS[kind])
    adapted = peft.get_peft_model(plain, config).eval()

    for name, weight in adapted.named_parameters():
        if "adaption" in name:  # a gate of 0 lets nothing pass
            weight.data.normal_()

    # peft's model is the oracle
    expected = own_answer(adapted, PROMPT, COUNT)

    assert expected != before

    target = check_answers(adapted if wrapper == "model" else adapted.base_model, expected)

    assert target.model is plain


def test_a_soft_prompt_is_refused() -> None:
    """It belongs to no layer."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    tuned = peft.get_peft_model(build("llama"), config)
    with pytest.raises(ValueError, match="got PREFIX_TUNING"):
        Target(tuned)


@pytest.mark.parametrize("kind", ["eagle1", "dflash"])
def test_layers_of_several_shapes_lend_a_head_the_commonest(kind: str) -> None:
    """Gemma 4's global layers have wider heads, and its config names no one width."""
    changes = {
        "head_dim": 8,
        "global_head_dim": 16,
        "num_kv_shared_layers": 0,
    }
    sizes = {**shrunk(AutoConfig.for_model("gemma4_text")), **changes}
    sizes["layer_types"] = [*["sliding_attention"] * 3, "full_attention"]
    config = AutoConfig.for_model("gemma4_text", **sizes)
    model = draw_weights(AutoModelForCausalLM.from_config(config)).eval()
    target = check_answers(model, own_answer(model, PROMPT, COUNT), kind)

    assert new_head(target, kind).shape.head_dim == 8


def test_falcon_h1_multiplies_its_logits() -> None:
    """By a number that its forward asks the base for."""
    sizes = {**shrunk(AutoConfig.for_model("falcon_h1")), **SPECIAL["falcon_h1"]}
    config = AutoConfig.for_model("falcon_h1", **sizes, lm_head_multiplier=0.5)
    model = draw_weights(AutoModelForCausalLM.from_config(config)).eval()
    target = check_answers(model, own_answer(model, PROMPT, COUNT), "eagle1")
    assert target.head.logit_scale == 0.5
    assert target.head.is_linear

    output = model.model(torch.tensor([PROMPT]))
    # the model's own forward from hidden states to logits
    stock = stock_head(model, target.config, target.head, output)
    hidden = torch.randn(3, model.config.hidden_size)
    torch.testing.assert_close(stock.logits(hidden), target.head.logits(hidden))


def test_a_forward_under_autocast_is_refused() -> None:
    """Trees are read by the model's modules, which it would leave out."""
    model = build("llama")
    model.forward = torch.autocast("cpu", dtype=torch.bfloat16)(model.forward)
    with pytest.raises(ValueError, match="LlamaForCausalLM is wrapped: got logits in torch"):
        Target(model)


def test_accelerates_mixed_precision_is_refused() -> None:
    """It hands out fp32, of products in bf16."""
    # the precision holds for every accelerator of a process, so that it has to be forgotten afterwards
    forget_precision = accelerate.state.AcceleratorState._reset_state
    forget_precision(reset_partial_state=True)

    try:
        prepare = accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare_model
        with pytest.raises(ValueError, match="accelerate's mixed precision"):
            Target(prepare(build("llama"), evaluation_mode=True))
    finally:
        forget_precision(reset_partial_state=True)
