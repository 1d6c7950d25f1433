"""A target reads by its model as it is at each call: adapters, hooks, modules and configs may change in between."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import RwkvConfig, RwkvForCausalLM

from eagle import Budget, Target, stream
from eagle.drafters.lookup.ngram import NgramDrafter
from tests.families import build, own_answer, random_tokens
from tests.target.decoded import decode

PROMPT = random_tokens(9, seed=5) * 2
LINEAR = {"target_modules": ["q_proj", "v_proj", "up_proj"]}
# adapters that add to a linear, read its weights, scale its output, rotate it, and stand outside of linears
ADAPTERS: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.LoraConfig(r=4, **LINEAR),
    "dora": lambda: peft.LoraConfig(r=4, use_dora=True, **LINEAR),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
    "oft": lambda: peft.OFTConfig(r=0, oft_block_size=4, **LINEAR),
    "layernorm": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"]),
}


def draw_adapter(model: Any, name: str, seed: int) -> None:
    """Give an adapter random weights, as if it had been trained."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if f".{name}" in key:
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.3)


def check(target: Target, model: Any) -> list[int]:
    """Check that the answer with drafts is the model's own; return it."""
    expected = own_answer(model, PROMPT, 8)
    assert decode(target, NgramDrafter(), PROMPT, 8, budget=Budget(5, 5, 1)) == expected
    return expected


@pytest.mark.quick("adapter first-lora", "call first-ia3")
@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("first", ["adapter first", "call first"])
def test_adapters_that_change_between_calls_are_followed(first: str, kind: str) -> None:
    """Put on, switched, disabled, scaled and merged: each time as the model itself answers."""
    model: Any = build("llama")
    target = Target(model)
    answers = [check(target, model)] if first == "call first" else []
    wrapped = peft.get_peft_model(model, ADAPTERS[kind](), adapter_name="one")
    draw_adapter(model, "one", seed=1)
    wrapped.eval()
    if first == "adapter first":
        target = Target(model)
    answers.append(check(target, model))
    if kind != "layernorm":  # which has room for one
        wrapped.add_adapter("two", ADAPTERS[kind]())
        draw_adapter(model, "two", seed=2)
        for name in ("two", "one"):
            wrapped.set_adapter(name)
            wrapped.eval()
            answers.append(check(target, model))

    with wrapped.disable_adapter():
        answers.append(check(target, model))

    # a scale is an attribute of peft's layers
    if kind == "lora":
        for module in model.modules():
            if hasattr(module, "scale_layer"):
                module.scale_layer(0.25)
        answers.append(check(target, model))
    # merged weights say the same up to rounding, so that only equality with the model counts
    wrapped.merge_adapter()
    check(target, model)
    wrapped.unmerge_adapter()
    check(target, model)

    # the adapters do something
    assert len({tuple(answer) for answer in answers}) > 1


def put_hook(model: Any) -> None:
    """Let a layer hand on something else."""
    model.model.layers[1].register_forward_hook(lambda _, __, output: output.roll(1, -1))


def put_embedding_hook(model: Any) -> None:
    """Let the embedding hand on something else."""
    model.get_input_embeddings().register_forward_hook(lambda _, __, output: output.roll(1, -1))


def replace_forward(model: Any) -> None:
    """Put another forward in the place of an MLP's own."""
    mlp = model.model.layers[2].mlp
    forward = type(mlp).forward
    mlp.forward = MethodType(lambda self, hidden: -forward(self, hidden), mlp)


def wrap_module(model: Any) -> None:
    """Put a module around a projection."""
    attention = model.model.layers[0].self_attn
    attention.o_proj = nn.Sequential(attention.o_proj, nn.Tanh())


def change_epsilon(model: Any) -> None:
    """Change an attribute of norms."""
    for layer in model.model.layers:
        layer.input_layernorm.variance_epsilon = 1000.0


def put_frequencies(model: Any) -> None:
    """Put other rotary frequencies in the place of the model's."""
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq * 3


def write_frequencies(model: Any) -> None:
    """Write other rotary frequencies in place."""
    model.model.rotary_emb.inv_freq.mul_(3)


def exchange_layers(model: Any) -> None:
    """Exchange two layers."""
    layers = [*model.model.layers]
    model.model.layers[0] = layers[3]
    model.model.layers[3] = layers[0]


def narrow_window(model: Any) -> None:
    """Change a value of the config."""
    model.config.sliding_window = 2


CHANGES = [
    put_hook,
    put_embedding_hook,
    replace_forward,
    wrap_module,
    change_epsilon,
    put_frequencies,
    write_frequencies,
    exchange_layers,
    narrow_window,
]


@pytest.mark.quick("put_hook", "put_embedding_hook", "narrow_window")
@pytest.mark.parametrize("change", CHANGES)
def test_other_changes_between_calls_are_followed(change: Callable[[Any], None]) -> None:
    """Hooks, forwards, modules, attributes, buffers, and the config."""
    model = build("mistral-sliding")
    target = Target(model)
    before = check(target, model)
    change(model)
    assert check(target, model) != before


def test_a_change_that_nothing_shows_has_to_be_told() -> None:
    """An object that an attribute holds may change inside; `refresh(force=True)` then looks again."""

    class Factor:
        value = 1.0

    model: Any = build("llama")
    mlp = model.model.layers[2].mlp
    forward = type(mlp).forward
    mlp.factor = Factor()
    # the forward is replaced before the target is made; only the number inside changes
    mlp.forward = MethodType(lambda self, hidden: self.factor.value * forward(self, hidden), mlp)
    target = Target(model)
    check(target, model)
    mlp.factor.value = -1.0
    target.forget()  # what was read before is not wanted
    # the search finds new modules while the first answer is half written
    target.refresh(force=True)
    check(target, model)


def test_nothing_is_found_out_again_where_nothing_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward of the model, another mode and calls of this package change nothing."""
    model = build("llama")
    target = Target(model)
    check(target, model)
    monkeypatch.setattr(Target, "_find_out", lambda self: pytest.fail("the model did not change"))
    # none of these may cost a new search
    model(torch.tensor([PROMPT]))
    model.train()
    model.eval()
    check(target, model)


@pytest.mark.slow
def test_an_open_state_reads_on_by_the_model_that_it_began_with() -> None:
    """Its cache belongs to it: modules that another call has found do not read it."""
    model = build("qwen3_next")
    target = Target(model)
    pieces: Any = stream(target, NgramDrafter(), PROMPT, max_new_tokens=8, stop=[])
    tokens = [*next(pieces)]
    target.refresh(force=True)
    check(target, model)

    for piece in pieces:
        tokens += piece

    assert tokens == own_answer(model, PROMPT, 8)


def test_weights_that_a_first_forward_rewrites_are_rewritten_once() -> None:
    """RWKV divides weights of later layers in its first forward, in place, and remembers that it has."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": 5,
        "context_length": 64,
    }
    model: Any = RwkvForCausalLM(RwkvConfig(rescale_every=2, **sizes)).eval()
    untouched = copy.deepcopy(model)
    expected = own_answer(untouched, PROMPT, 8)
    assert check(Target(model), model) == expected

    # divided once, not once by the target and once by the model
    for weight, other in zip(model.parameters(), untouched.parameters(), strict=True):
        assert torch.equal(weight, other)
