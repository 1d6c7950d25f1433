"""How a model reads trees is found out by reading one: a means that would misread it is not taken."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaModel

from eagle import Sampling, Target, generate
from eagle.core.verify import Choose
from eagle.drafters.none import NoDrafter
from eagle.target.structure import cache_name_of
from eagle.target.trees.read_modes import Probe
from tests.families import (
    COMMON,
    FAMILIES,
    PlantedTrees,
    RandomTrees,
    build,
    own_answer,
    random_tokens,
)
from tests.own_answers import answer_naively, cached_steps

GPT_NEO = {
    "num_layers": 4,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 2]],
    "max_position_embeddings": 512,
}


def build_small(
    model_type: str, overrides: dict[str, Any], dtype: torch.dtype = torch.float32
) -> Any:
    """A tiny random model of a type, of weights as large as its own initialisation makes them."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**COMMON, **overrides})
    return AutoModelForCausalLM.from_config(config).to(dtype).eval()


class Renamed(LlamaModel):
    """A model that takes and returns its cache as `cache`, which every model does from transformers 5.24 on."""

    def forward(self, input_ids: Any = None, cache: Any = None, **others: Any) -> Any:
        """The same by another name."""
        name = cache_name_of(LlamaModel.__new__(LlamaModel))
        cache = (
            others.get(name) if cache is None else cache
        )  # by its old name from the untouched part around it
        output = super().forward(input_ids=input_ids, **{**others, name: cache})
        output.cache = getattr(output, name)
        return output


def test_a_cache_may_have_another_name() -> None:
    """The answers are the model's own."""
    model = build_small("llama", {})
    prompt = random_tokens(20, seed=1)
    answer = own_answer(model, prompt, 24)
    model.model.__class__ = Renamed
    drafter = PlantedTrees(prompt + answer)
    assert generate(Target(model), drafter, prompt, max_new_tokens=24, stop=[]).tokens == answer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [8, 256])
def test_windows_that_count_rows_need_more_than_a_mask(window: int, dtype: torch.dtype) -> None:
    """GPT-Neo's local layers mask by places in the cache, of which siblings take one each."""
    target = Target(build_small("gpt_neo", {**GPT_NEO, "window_size": window}, dtype))
    assert re.search(
        "by the order of rows|unlike the texts along its paths",
        Probe(target.reader).find_misreading(),
    )
    target.reader.check()
    assert target.reader.mode.describe() != "mask"
    assert target.features(torch.ones(1, 9, dtype=torch.long), (0, -1)).shape == (
        1,
        9,
        2,
        COMMON["hidden_size"],
    )


def test_layers_that_count_rows_in_an_untold_window_are_the_refused_ones() -> None:
    """Without local layers the same type reads trees, and its answers are its own."""
    model = build_small("gpt_neo", {**GPT_NEO, "attention_types": [[["global"], 4]]})
    prompt = random_tokens(20, seed=1)
    answer = own_answer(model, prompt, 24)
    drafter = PlantedTrees(prompt + answer)
    assert (
        generate(Target(copy.deepcopy(model)), drafter, prompt, max_new_tokens=24, stop=[]).tokens
        == answer
    )


@pytest.mark.quick("random-dtype1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("drafter", ["none", "random"])
def test_layers_that_rewrite_masks_get_whole_ones(
    drafter: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Doge adds to every mask, and so cannot be given the sign for none: it is read without grouped attention.

    In transformers 5.17 a prompt gets no mask, and its tokens see later ones: the truth is what the
    model itself generates.
    """
    monkeypatch.setitem(FAMILIES, "doge", ("doge", {}))
    model = build("doge", dtype)
    target, prompt = Target(copy.deepcopy(model)), random_tokens(20, seed=1)
    target.open().begin(prompt, Choose(Sampling()))
    assert not target.masks.grouped
    if dtype == torch.float32:
        answer = answer_naively(cached_steps(model), prompt, 24, Sampling())
        assert target.reader.follows_steps or answer == own_answer(model, prompt, 24)
        trees = NoDrafter() if drafter == "none" else RandomTrees(answer)
        assert generate(target, trees, prompt, max_new_tokens=24, stop=[]).tokens == answer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma3", "gpt_oss", "deepseek_v3", "gpt2"])
@pytest.mark.parametrize("drawn", [True, False])
def test_models_that_read_trees_pass_in_every_precision(
    name: str, dtype: torch.dtype, drawn: bool
) -> None:
    """Neither rounding nor experts that swap places nor weights that do nearly nothing are taken for a fault."""
    model = build(name, dtype) if drawn else build_small(*FAMILIES[name], dtype)
    target = Target(model)
    grouped = target.masks.grouped
    target.reader.check()
    assert target.masks.grouped == grouped


@pytest.mark.quick("2")
@pytest.mark.parametrize("seed", range(4))
def test_deep_models_in_bf16_are_not_refused_for_rounding(seed: int) -> None:
    """A number of layers is no window: a prompt longer than that hides what one token makes out behind rounding."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 128, "num_hidden_layers": 28, "head_dim": 32, "max_window_layers": 28}
    config = AutoConfig.for_model("qwen3", **{**COMMON, **sizes, "tie_word_embeddings": True})
    target = Target(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval())
    target.reader.check()


def siblings_seen(mask: Any, start: int) -> None:
    """Every row sees those before it."""
    mask[..., start:] = torch.full_like(mask[..., start:], torch.finfo(mask.dtype).min).triu(1)


def start_unseen(mask: Any, start: int) -> None:
    """No row sees the first two tokens."""
    mask[..., :2] = torch.finfo(mask.dtype).min


def self_unseen(mask: Any, start: int) -> None:
    """No row sees itself."""
    mask[..., start:].diagonal(dim1=-2, dim2=-1).fill_(torch.finfo(mask.dtype).min)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fault", [siblings_seen, start_unseen, self_unseen])
def test_a_planted_fault_is_seen_in_every_precision(
    fault: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check fails on a reader that is broken on purpose."""
    target = Target(build("llama", dtype))
    masks = type(target.masks)
    additive = masks._additive

    def broken(self: Any, starts: list[int], positions: Any, seen: Any, *more: Any) -> Any:
        mask = additive(self, starts, positions, seen, *more)
        fault(mask.unflatten(-2, (-1, seen.shape[1])), starts[0])  # a part for each head of a group
        return mask

    monkeypatch.setattr(masks, "_additive", broken)
    assert "reads a small tree unlike" in Probe(target.reader).find_misreading()
    target.open().begin([1, 2, 3], Choose(Sampling()))
    assert target.reader.mode.describe() != "mask"


def test_the_check_runs_once_and_leaves_no_text() -> None:
    """Later prompts do not pay for it, and the first is read as if there were none."""
    model, calls = build("llama"), []
    model.get_input_embeddings().register_forward_pre_hook(lambda *_: calls.append(1))
    target = Target(model)
    calls.clear()
    prompt = random_tokens(9, seed=1)
    first = target.open().begin(prompt, Choose(Sampling()))
    paid = len(calls)
    assert target.open().begin(prompt, Choose(Sampling())).root == first.root
    assert paid == 6 and len(calls) == 7


# -- what is no model, and what is no whole one ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Target("runs/tiny/target"),
            r"got the path 'runs/tiny/target': use Target.load\('runs/tiny/target'\)",
        ),
        (lambda: Target(Path("here")), r"got the path 'here': use Target.load\('here'\)"),
        (
            lambda: Target(torch.nn.Linear(2, 2)),
            "takes a model of transformers, got Linear: load one with Target",
        ),
        (lambda: Target({"a": 1}), r"takes a model of transformers, got dict"),
        (
            lambda: Target(build("llama").base_model),
            r"LlamaModel has no LM head: .* expected one of AutoModel",
        ),
        (
            lambda: Target.load("x", dtype="float3"),
            r"dtype is 'float3', expected 'auto', 'float32', 'bfloat16'",
        ),
        (
            lambda: Target.load("x", dtype="int8"),
            r"dtype is 'int8', expected 'auto', 'float32', 'bfloat16'",
        ),
        (lambda: Target.load("x", dtype=3), r"dtype is 3, expected 'auto', 'float32', 'bfloat16'"),
    ],
)
def test_what_is_no_model_is_refused(make: Any, message: str) -> None:
    """Sentences instead of attribute errors."""
    with pytest.raises(ValueError, match=message):
        make()
