"""Models whose modules or weights are wrapped decode as they do by themselves, or are refused with a sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from transformers import AutoConfig, AutoModelForCausalLM

from eagle import Target, generate
from eagle.drafters import DRAFTERS, settings_of
from eagle.target.stock_head import stock_head
from tests.every_type import SPECIAL, shrunk
from tests.families import build, draw_weights

PROMPT = [5, 6, 7, 8, 9, 10, 11]
NEW_TOKENS = 12
SOFT_PROMPTS: dict[str, dict[str, Any]] = {
    "PromptTuningConfig": {},
    "PrefixTuningConfig": {},
    "PromptEncoderConfig": {"encoder_hidden_size": 16},
}


class Scaled(nn.Module):
    """A parametrisation."""

    def forward(self, weight: Tensor) -> Tensor:
        """A weight."""
        return weight * 1.5


WRAPS: dict[str, Callable[[Any], Any]] = {
    "parametrised": lambda layer: parametrize.register_parametrization(layer, "weight", Scaled()),
    "weight norm": parametrizations.weight_norm,
    "pruned": lambda layer: prune.random_unstructured(layer, "weight", 0.3),
}
PLACES: dict[str, Callable[[Any], Any]] = {
    "layer": lambda model: model.model.layers[0].self_attn.q_proj,
    "embedding": lambda model: model.model.embed_tokens,
    "LM head": lambda model: model.lm_head,
}


def stock_answer(model: Any) -> list[int]:
    """What a model answers by itself."""
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    answer = model.generate(input_ids=torch.tensor([PROMPT]), max_new_tokens=NEW_TOKENS, **options)
    return answer[0, len(PROMPT) :].tolist()


def head_of(target: Target, kind: str) -> Any:
    """A head of fresh weights."""
    torch.manual_seed(0)
    frequent = [torch.arange(48)] if kind == "eagle3" else []
    head = DRAFTERS[kind].for_target(
        settings_of({"kind": kind}, "test"), target.config, target.head, frequent
    )
    return head.bind(target.head).eval()


def check_answers(
    model: Any, expected: list[int], kinds: tuple[str, ...] = ("eagle1", "eagle3")
) -> Target:
    """A target over the model, which answers as expected with each kind of head."""
    target = Target(model)
    for kind in kinds:
        assert (
            generate(
                target, head_of(target, kind), PROMPT, max_new_tokens=NEW_TOKENS, stop=[]
            ).tokens
            == expected
        )
    return target


@pytest.mark.quick("pruned-layer", "pruned-embedding")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("wrap", WRAPS)
def test_a_weight_that_is_made_of_others_is_read(wrap: str, place: str) -> None:
    """A head that borrows it gets a copy; and `tensor` gives what the module has."""
    model = build("llama")
    torch.manual_seed(0)
    WRAPS[wrap](PLACES[place](model))
    target = check_answers(model, stock_answer(model))
    layer = PLACES[place](model)
    name = next(name for name, module in model.named_modules() if module is layer)
    assert torch.equal(target.tensor(f"{name}.weight"), layer.weight)


@pytest.mark.parametrize("where", ["everything", "the LM head", "an LM head with a bias"])
def test_offloaded_weights_are_read(where: str, tmp_path: Path) -> None:
    """By a copy where heads borrow them."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    phi = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("phi", **sizes, intermediate_size=64)
    )
    model: Any = draw_weights(phi).eval() if where.endswith("bias") else build("llama")
    expected = stock_answer(model)
    if where == "everything":
        accelerate.cpu_offload(model, torch.device("cpu"))
    else:
        places = {"model": "cpu", "lm_head": "disk"}
        accelerate.dispatch_model(
            model, places, main_device="cpu", offload_dir=tmp_path, force_hooks=True
        )
    target = check_answers(model, expected)
    assert not target.head.weight.is_meta and target.device.type == "cpu"


@pytest.mark.quick("tuner-IA3Config", "tuner-AdaptionPromptConfig")
@pytest.mark.parametrize("kind", ["LoraConfig", "IA3Config", "AdaptionPromptConfig"])
@pytest.mark.parametrize("wrapper", ["model", "tuner"])
def test_a_peft_model_is_unwrapped(kind: str, wrapper: str) -> None:
    """Its adapters change layers of the model in place."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    settings = {
        "LoraConfig": {"r": 4, "target_modules": "all-linear", "init_lora_weights": False},
        "IA3Config": {"init_ia3_weights": False},
        "AdaptionPromptConfig": {"adapter_len": 4, "adapter_layers": 2},
    }[kind]
    plain = build("llama")
    before = stock_answer(plain)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(
        plain, getattr(peft, kind)(task_type="CAUSAL_LM", **settings)
    ).eval()
    for name, weight in adapted.named_parameters():
        if "adaption" in name:  # a gate of 0 lets nothing pass
            weight.data.normal_()
    expected = stock_answer(adapted)
    assert expected != before
    target = check_answers(adapted if wrapper == "model" else adapted.base_model, expected)
    assert target.model is plain


@pytest.mark.parametrize("kind", SOFT_PROMPTS)
def test_a_soft_prompt_is_refused(kind: str) -> None:
    """It is no layer's."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = getattr(peft, kind)(num_virtual_tokens=3, task_type="CAUSAL_LM", **SOFT_PROMPTS[kind])
    tuned = peft.get_peft_model(build("llama"), config)
    with pytest.raises(ValueError, match="adds to the prompt or waits for a token in it: got P"):
        Target(tuned)


GEMMA4 = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 96, "sliding_window": 8, "num_kv_shared_layers": 0, "max_position_embeddings": 256,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
}  # fmt: skip


@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "medusa", "dflash"])
def test_layers_of_several_shapes_lend_a_head_the_commonest(kind: str) -> None:
    """Gemma 4's global layers have wider heads, and its config names no one width."""
    config = AutoConfig.for_model("gemma4_text", **GEMMA4)
    model = draw_weights(AutoModelForCausalLM.from_config(config)).eval()
    target = check_answers(model, stock_answer(model), (kind,))
    shape = getattr(head_of(target, kind), "shape", None)
    assert shape is None or shape.head_dim == 8


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_falcon_h1_multiplies_its_logits(factor: float) -> None:
    """By a number that its forward asks the base for."""
    sizes = {
        **shrunk(AutoConfig.for_model("falcon_h1")),
        **SPECIAL["falcon_h1"],
        "lm_head_multiplier": factor,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("falcon_h1", **sizes))
    target = check_answers(draw_weights(model).eval(), stock_answer(model), ("eagle1",))
    assert target.head.logit_scale == factor and target.head.is_linear
    stock = stock_head(model, target.config, target.head, model.model(torch.tensor([PROMPT])))
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
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    forget_precision = (
        accelerate.state.AcceleratorState._reset_state
    )  # it holds for every accelerator of a process
    forget_precision(reset_partial_state=True)
    try:
        prepare = accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare_model
        with pytest.raises(
            ValueError, match="put in the place of its class's, as by accelerate's mixed precision"
        ):
            Target(prepare(build("llama"), evaluation_mode=True))
    finally:
        forget_precision(reset_partial_state=True)
