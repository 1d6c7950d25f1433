"""How a model reads trees is found out by reading one: a mode that would misread it is not taken."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaModel

from eagle import Sampling, Target
from eagle.core.verify import Choose
from eagle.target.structure import cache_name_of
from eagle.target.trees.read_modes import Probe
from tests.families import (
    COMMON,
    FAMILIES,
    PlantedTrees,
    build,
    own_answer,
    random_tokens,
)
from tests.target.decoded import decode

DTYPES = [torch.float32, torch.bfloat16]
PROMPT = random_tokens(20, seed=1)
GREEDY = Choose(Sampling())


def build_small(model_type: str, overrides: dict[str, Any], dtype: torch.dtype) -> Any:
    """Return a tiny random model of a type, of weights as large as its own initialisation makes them."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**COMMON, **overrides})
    return AutoModelForCausalLM.from_config(config).to(dtype).eval()


class Renamed(LlamaModel):
    """A model that takes and returns its cache as `cache`, which every model does from transformers 5.24 on."""

    def forward(self, input_ids: Any = None, cache: Any = None, **others: Any) -> Any:
        """Do the same by another name."""
        name = cache_name_of(LlamaModel.__new__(LlamaModel))
        # the untouched part around this one passes it by its old name
        cache = others.get(name) if cache is None else cache
        output = super().forward(input_ids=input_ids, **{**others, name: cache})
        # new releases return it by the new name
        output.cache = getattr(output, name)
        return output


def test_a_cache_may_have_another_name() -> None:
    """The answers are the model's own."""
    model: Any = build("llama")
    answer = own_answer(model, PROMPT, 24)
    model.model.__class__ = Renamed
    assert decode(Target(model), PlantedTrees(PROMPT + answer), PROMPT, 24) == answer


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma3", "gpt_oss", "deepseek_v3", "gpt2"])
@pytest.mark.parametrize("large", [True, False])
def test_models_that_read_trees_pass_in_every_precision(
    name: str,
    dtype: torch.dtype,
    large: bool,
) -> None:
    """Neither rounding nor experts that swap nor weights that do nearly nothing are taken for a fault."""
    # weights of the tests' scale, and of a new model's, which hardly change their input
    target = Target(build(name, dtype) if large else build_small(*FAMILIES[name], dtype))
    grouped = target.masks.grouped
    target.reader.check()
    assert target.masks.grouped == grouped


@pytest.mark.quick("2")
@pytest.mark.parametrize("seed", [1, 2])
def test_deep_models_in_bf16_are_not_refused_for_rounding(seed: int) -> None:
    """A number of layers is no window: a prompt longer than that hides what one token makes out behind rounding."""
    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 128,
        "num_hidden_layers": 28,
        "head_dim": 32,
        "max_window_layers": 28,
    }
    config = AutoConfig.for_model("qwen3", **{**COMMON, **sizes, "tie_word_embeddings": True})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    Target(model.eval()).reader.check()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_planted_fault_is_seen_in_every_precision(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check fails on a reader whose nodes all see those before them."""
    target = Target(build("llama", dtype))
    masks = type(target.masks)
    make_mask = masks._additive

    def show_siblings(self: Any, starts: list[int], *rest: Any, **named: Any) -> Any:
        mask = make_mask(self, starts, *rest, **named)
        # a group's heads have their rows one after the other
        rows = mask.unflatten(-2, (-1, rest[1].shape[1]))
        # only columns of the tree itself change: each node sees all before it
        hidden = torch.full_like(rows[..., starts[0] :], torch.finfo(mask.dtype).min)
        rows[..., starts[0] :] = hidden.triu(1)
        return mask

    monkeypatch.setattr(masks, "_additive", show_siblings)

    assert "reads a small tree unlike" in Probe(target.reader).find_misreading()

    target.open().begin([1, 2, 3], GREEDY)

    assert target.reader.mode.describe() != "mask"


def test_the_check_runs_once_and_leaves_no_sequence() -> None:
    """Later prompts do not pay for it, and the first is read as if there were none."""
    model = build("llama")
    calls: list[Any] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda *_: calls.append(1))
    target = Target(model)
    calls.clear()
    first = target.open().begin(PROMPT, GREEDY)

    # five forwards of the check and one of the prompt
    assert len(calls) == 6
    assert target.open().begin(PROMPT, GREEDY).root == first.root
    assert len(calls) == 7


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Target(Path("here")), r"use Target.load\('here'\)"),
        (lambda: Target(torch.nn.Linear(2, 2)), "takes a model of transformers, got Linear"),
        (lambda: Target(SimpleNamespace(base_model=None)), "got SimpleNamespace"),
        (lambda: Target(build("llama").base_model), "LlamaModel has no LM head"),
        (lambda: Target.load("x", dtype="int8"), "dtype is 'int8', expected 'auto'"),
        (lambda: Target.load("x", dtype=3), "dtype is 3, expected 'auto'"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_model_is_refused(make: Any, message: str) -> None:
    """Sentences instead of attribute errors."""
    with pytest.raises(ValueError, match=message):
        make()
