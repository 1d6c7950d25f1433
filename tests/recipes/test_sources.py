"""Every recipe states the training of its source, but for what it names as its own."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from eagle.drafters import settings_of
from eagle.recipe import Recipe

ROOT = Path(__file__).parents[2] / "recipes"
STATED = (
    "epochs",
    "batch_size",
    "dtype",
    "lr",
    "betas",
    "weight_decay",
    "clip",
    "schedule",
    "warmup",
)

Values = dict[str, Any]

ADAM: Values = {"betas": (0.9, 0.999)}  # torch's default, which a source leaves
COSINE: Values = {"schedule": "cosine", "final_lr": 0.0}
LINEAR: Values = {"schedule": "linear", "final_lr": 0.0}
FROM_THE_FIRST = {"steps": 3, "top_k": 10, "top": 1.0, "regression": 1.0, "cross_entropy": 0.1}
NOISE = {"noise": 0.1, "noise_as_published": True, "fc_bias": True}

# what the sources train with, read in their code; a key is unlike for no two sections
SOURCES: dict[str, Values] = {
    # SafeAILab/EAGLE eagle/train/main.py, on 8 cards, whose scheduler ticks once for each
    "EAGLE": {
        **{"max_length": 2048, "regression": 1.0, "cross_entropy": 0.1, **NOISE},
        **{
            "epochs": 20,
            "batch_size": 32,
            "dtype": "bfloat16",
            "lr": 3e-5,
            "betas": (0.9, 0.95),
            "weight_decay": 0.01,
        },
        **{"clip": 0.5, "clip_by": "value", **LINEAR, "schedule_steps": 100_000, "warmup": 250},
        **{"gate": "read", "validation": 0.05},
    },
    # SafeAILab/EAGLE eagle/traineagle3: main.py, ds_config.json, cnets.py; the batch of 8 cards
    "EAGLE-3": {
        **{
            "max_length": 2048,
            "steps": 7,
            "decay": 0.8,
            "draft_vocab": 32_000,
            "lm_head": "random",
        },
        **{
            "train_lm_head": True,
            "queries": "random",
            "linears": "uniform",
            "norm_before_residual": False,
        },
        **{
            "epochs": 40,
            "batch_size": 16,
            "dtype": "float16",
            "lr": 5e-5,
            "betas": (0.9, 0.95),
            "weight_decay": 0.0,
        },
        **{
            "clip": 0.5,
            "clip_by": "norm",
            **LINEAR,
            "schedule_steps": 800_000,
            "warmup": 0.015,
            "gate": "read",
        },
    },
    # HArmonizedSS/HASS train.sh and train/main_hass.py, second stage, on 8 cards
    "HASS": {
        **{"max_length": 2048, **FROM_THE_FIRST, **NOISE},
        **{
            "epochs": 10,
            "batch_size": 16,
            "dtype": "bfloat16",
            "lr": 1e-5,
            "betas": (0.9, 0.95),
            "weight_decay": 0.01,
        },
        **{
            "clip": 0.5,
            "clip_by": "value",
            **LINEAR,
            "warmup": 0.01,
            "gate": "read",
            "validation": 0.05,
        },
    },
    # FasterDecoding/Medusa README.md and medusa/train/train_legacy.py, deepspeed.json
    "Medusa": {
        **{
            "max_length": 2048,
            "levels": 3,
            "layers": 1,
            "lm_head": "target",
            "weights": "equal",
            "loss": "tokens",
        },
        **{
            "epochs": 2,
            "batch_size": 128,
            "accumulation": 4,
            "dtype": "bfloat16",
            "lr": 1e-3,
            **ADAM,
        },
        **{"weight_decay": 0.0, "clip": math.inf, **COSINE, "warmup": 0.1, "validation": 0.0},
    },
    # ctlllll/axolotl examples/medusa/vicuna_7b_qlora_stage2.yml; the batch of 8 cards
    "Medusa-2": {
        **{
            "path": "lmsys/vicuna-7b-v1.5",
            "max_length": 4096,
            "levels": 5,
            "layers": 1,
            "lm_head": "own",
        },
        **{
            "weights": "falling",
            "loss": "tokens",
            "epochs": 2,
            "batch_size": 64,
            "accumulation": 4,
        },
        **{
            "dtype": "bfloat16",
            "lr": 5e-4,
            **ADAM,
            "weight_decay": 0.0,
            "clip": 1.0,
            "clip_by": "norm",
            **COSINE,
        },
        **{"warmup": 40, "validation": 0.01},
        **{"joint.loss": "tokens", "joint.heads": 0.2, "joint.rise": False, "joint.head_lr": 4.0},
        **{"joint.rank": 32, "joint.alpha": 16, "joint.dropout": 0.05},
    },
    # zankner/Hydra README.md and hydra/train/train.py, whose weight decay is named twice
    "Hydra": {
        **{
            "max_length": 2048,
            "levels": 4,
            "layers": 4,
            "prefix": True,
            "loss": "cross_entropy",
            "dropout": 0.2,
        },
        **{
            "regression": 0.0,
            "epochs": 10,
            "batch_size": 32,
            "dtype": "bfloat16",
            "lr": 5e-4,
            **ADAM,
        },
        **{
            "weight_decay": 0.1,
            "clip": 1.0,
            "clip_by": "norm",
            **COSINE,
            "final_lr": 0.33,
            "warmup": 100,
        },
    },
    # foundation-model-stack/fms-fsdp scripts/train_speculator.sh, speculator/train_speculator.py
    "MLP speculator": {
        **{
            "max_length": 4096,
            "levels": 4,
            "inner_dim": 3072,
            "tie_weights": False,
            "scale_input": False,
        },
        **{
            "loss": "tokens",
            "batch_size": 64,
            "dtype": "bfloat16",
            "lr": 1e-3,
            "betas": (0.9, 0.95),
        },
        **{
            "weight_decay": 0.1,
            "clip": 1.0,
            "clip_by": "norm",
            **COSINE,
            "final_lr": 0.1,
            "warmup": 0.05,
        },
    },
    # Tencent-BAC/FastMTP sft.sh, model/config.json, and its ms-swift's defaults
    "FastMTP": {
        **{
            "max_length": 4096,
            "steps": 3,
            "decay": 0.6,
            "loss": "tokens",
            "start": "target",
            "hidden_first": True,
        },
        **{
            "epochs": 3,
            "batch_size": 64,
            "dtype": "bfloat16",
            "lr": 5e-5,
            "betas": (0.9, 0.95),
            "weight_decay": 0.1,
        },
        **{"clip": 1.0, "clip_by": "norm", **COSINE, "warmup": 0.05},
    },
    # sgl-project/SpecForge examples/configs/qwen3-8b-dflash-online.yaml, specforge/optimizer.py; z-lab's network
    "SpecForge's DFlash": {
        **{
            "max_length": 3072,
            "blocks": 5,
            "slots": 16,
            "mask_token": 151_669,
            "anchors": 512,
            "loss": "tokens",
        },
        **{
            "decay": 7.0,
            "sample_from_anchor": False,
            "causal": False,
            "d_pace": False,
            "linears": "normal",
        },
        **{
            "epochs": 6,
            "batch_size": 32,
            "dtype": "bfloat16",
            "lr": 6e-4,
            **ADAM,
            "weight_decay": 0.0,
            "clip": 1.0,
        },
        **{"clip_by": "norm", **COSINE, "warmup": 0.04},
    },
    # deepseek-ai/DeepSpec config/dspark/dspark_qwen3_8b.py, deepspec/utils/optim.py
    "DeepSpec": {
        **{
            "max_length": 4096,
            "blocks": 5,
            "slots": 7,
            "mask_token": 151_669,
            "anchors": 512,
            "decay": 4.0,
        },
        **{
            "markov": "vanilla",
            "rank": 256,
            "confidence": True,
            "likelihood": 0.1,
            "distance": 0.9,
        },
        **{"sample_from_anchor": True, "causal": False, "linears": "normal"},
        **{
            "epochs": 10,
            "batch_size": 512,
            "dtype": "bfloat16",
            "lr": 6e-4,
            **ADAM,
            "weight_decay": 0.0,
            "clip": 1.0,
        },
        **{"clip_by": "norm", **COSINE, "warmup": 0.04},
    },
    # vllm-project/speculators src/speculators/models/peagle and model.py; NVIDIA-NeMo/Automodel
    # examples/speculative/p-eagle/qwen_peagle_perfectblend.yaml and recipes/llm/train_eagle3.py
    "P-EAGLE": {
        **{
            "max_length": 4096,
            "blocks": 4,
            "depths": 8,
            "keep": 0.7,
            "keep_least": 0.2,
            "norm_before_residual": False,
        },
        **{"lm_head": "target", "train_lm_head": False, "queries": "random", "linears": "normal"},
        **{"loss": "cross_entropy", "draft_vocab": None, "fc_norm": False},
        **{
            "epochs": 20,
            "dtype": "bfloat16",
            "lr": 1e-4,
            "betas": (0.9, 0.95),
            "weight_decay": 0.0,
            "clip": 1.0,
        },
        **{"clip_by": "norm", **COSINE, "final_lr": 0.1, "warmup": 0.015, "gate": "read"},
    },
}

# from where the first stage ends; 96 answers on each of 8 cards
SOURCES["MLP speculator, stage 2"] = {**SOURCES["MLP speculator"], "lr": 1e-4, "batch_size": 768}

PREDICTED = {"gate": "predicted"}
OURS_1 = {
    **{
        "fc_bias": False,
        "noise_as_published": False,
        "epochs": 10,
        "weight_decay": 0.0,
        "clip_by": "norm",
    },
    **{"schedule": "cosine", "schedule_steps": None, "warmup": 2000, **PREDICTED},
}
OURS_3 = {
    **{
        "lm_head": "target",
        "queries": "keys",
        "epochs": 10,
        "dtype": "bfloat16",
        "schedule_steps": None,
        **PREDICTED,
    },
}
OURS_HASS = {
    **{
        "fc_bias": False,
        "noise_as_published": False,
        "lr": 3e-5,
        "weight_decay": 0.0,
        "clip_by": "norm",
        **PREDICTED,
    },
}

# recipe: its source, and where it goes another way
RECIPES: dict[str, tuple[str, Values]] = {
    "vicuna-7b/eagle1": ("EAGLE", {}),
    "vicuna-7b/hydra": ("Hydra", {}),
    "vicuna-7b/medusa": ("Medusa", {"lm_head": "own", "validation": 0.05}),
    "vicuna-7b/medusa2": ("Medusa-2", {}),
    "llama-3.1-8b/eagle1": ("EAGLE", OURS_1),
    "llama-3.1-8b/eagle3": ("EAGLE-3", OURS_3),
    "llama-3.1-8b/hass": ("HASS", OURS_HASS),
    "llama-3.1-8b/mlp_speculator": ("MLP speculator", {"epochs": 4}),
    "llama-3.1-8b/mlp_speculator.2": ("MLP speculator, stage 2", {"epochs": 2, "batch_size": 64}),
    "llama-3.1-70b/eagle1": ("EAGLE", OURS_1),
    "qwen3-8b/eagle1": ("EAGLE", OURS_1),
    "qwen3-8b/eagle3": ("EAGLE-3", OURS_3),
    "qwen3-8b/hass": ("HASS", OURS_HASS),
    "qwen3-8b/dflash": ("SpecForge's DFlash", {"batch_size": 16, "linears": "uniform"}),
    "qwen3-8b/dspark": ("DeepSpec", {}),
    "qwen3-30b-a3b/eagle1": ("EAGLE", {**OURS_1, "lr": 5e-5, "intermediate_size": 6144}),
    "qwen3-30b-a3b/eagle3": ("EAGLE-3", {**OURS_3, "lr": 1e-4, "intermediate_size": 6144}),
    "qwen3-30b-a3b/eagle3.1": (
        "EAGLE-3",
        {**OURS_3, "lr": 1e-4, "intermediate_size": 12_288, "fc_norm": True, "norm_output": True},
    ),
    "gpt-oss-20b/eagle3": (
        "EAGLE-3",
        {**OURS_3, "lr": 1e-4, "max_length": 4096, "intermediate_size": 17_280},
    ),
    "gpt-oss-20b/peagle": (
        "P-EAGLE",
        {
            **{
                "epochs": 10,
                "batch_size": 16,
                "train_lm_head": True,
                "queries": "keys",
                "linears": "uniform",
            },
            **{"intermediate_size": 17_280, **PREDICTED},
        },
    ),
    "mimo-7b/mtp": ("FastMTP", {}),
    "qwen3-next-80b/eagle3": ("EAGLE-3", {**OURS_3, "lr": 1e-4, "intermediate_size": 5120}),
    "qwen3.5-9b/eagle3": ("EAGLE-3", OURS_3),
    "qwen3.5-9b/mtp": (
        "FastMTP",
        {"max_length": 2048, "start": "random", "hidden_first": False, "epochs": 10, "lr": 1e-4},
    ),
    "nemotron-3-nano/eagle3": ("EAGLE-3", {**OURS_3, "lr": 1e-4, "intermediate_size": 8064}),
    "gemma-3n/eagle3": ("EAGLE-3", {**OURS_3, "lr": 1e-4, "intermediate_size": 16_384}),
    "llama-4-scout/eagle3": ("EAGLE-3", {**OURS_3, "intermediate_size": 32_768}),
}


def values_of(name: str, *overrides: str) -> Values:
    """What a recipe trains with, defaults among them, by key."""
    recipe = Recipe.load(ROOT / f"{name}.yaml", overrides)
    drafter = settings_of(recipe.drafter.model_dump(), name).model_dump()
    joint = {} if recipe.joint is None else recipe.joint.model_dump()
    data = {"path": recipe.target.path, "max_length": recipe.data.max_length}
    train = {
        key: value
        for key, value in recipe.train.model_dump().items()
        if key not in ("out", "init", "keep")
    }
    assert not drafter.keys() & (data.keys() | train.keys())
    return {**data, **drafter, **train, **{f"joint.{key}": value for key, value in joint.items()}}


def test_every_recipe_has_a_source() -> None:
    """Those of the tiny target alone are ours."""
    folders = {path.parent.name for path in ROOT.glob("*/*.yaml")} - {
        "accelerate",
        "compare",
        "tiny",
    }
    found = {
        f"{path.parent.name}/{path.stem}"
        for folder in folders
        for path in (ROOT / folder).glob("*.yaml")
    }
    assert found == RECIPES.keys()


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_as_its_source(name: str) -> None:
    """What it leaves out counts by its default."""
    source, ours = RECIPES[name]
    wanted = {**SOURCES[source], **ours}
    found = values_of(name)
    assert {key: found.get(key) for key in wanted} == wanted
    assert not [key for key, value in ours.items() if SOURCES[source].get(key, "none") == value]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_whose_each_setting_is(name: str) -> None:
    """What decides a training is written down, with where it is from; what differs from the source is ours there."""
    text = (ROOT / f"{name}.yaml").read_text()
    train = yaml.safe_load(text)["train"]
    assert not [key for key in STATED if key not in train]
    section = text.split("\ntrain:\n")[1].split("\neval:")[0].split("\njoint:")[0]
    lines = re.findall(r"^  (\w+): [^#\n]*(?:# (.*))?$", section, flags=re.M)
    assert lines and not [
        key for key, comment in lines if not comment and key not in ("out", "init")
    ]
    source, ours = RECIPES[name]
    unnamed = [
        key
        for key, comment in lines
        if key in ours and not re.search(r"ours|SpecForge|code: float16", comment)
    ]
    assert not unnamed, f"{name} differs from {source} in {unnamed}: name its lines ours"


def test_the_first_stage_of_medusa_2_is_the_published_one() -> None:
    """Its command: matrices at four times the rate; AdamW minds a loss of a fifth only by the limit on gradients."""
    text = (ROOT / "vicuna-7b/medusa2.yaml").read_text()
    (command,) = re.findall(
        r"^#   eagle train vicuna-7b/medusa2 (joint=null .*) --processes 8$", text, flags=re.M
    )
    joint = values_of("vicuna-7b/medusa2")
    found = values_of("vicuna-7b/medusa2", *command.split())
    assert found["lr"] == joint["lr"] * joint["joint.head_lr"] == 2e-3
    assert found["clip"] == pytest.approx(joint["clip"] / joint["joint.heads"])
    assert not [key for key in found if key.startswith("joint.")]
    same = SOURCES["Medusa-2"].items()
    assert {key for key, value in same if found.get(key) != value} == {"lr", "clip"} | {
        key for key in joint if key.startswith("joint.")
    }


@pytest.mark.parametrize("clip_by", ["norm", "value"])
def test_without_a_limit_gradients_stay_as_they_are(clip_by: str) -> None:
    """As a recipe writes it, and torch's own clipping takes it."""
    settings = Recipe.load(
        ROOT / "tiny/eagle1.yaml", ["train.clip=.inf", f"train.clip_by={clip_by}"]
    ).train
    weight = torch.nn.Parameter(torch.zeros(5))
    weight.grad = torch.tensor([1e15, -3.0, 0.0, 1e-30, 7.0])
    before = weight.grad.clone()
    clip = torch.nn.utils.clip_grad_value_ if clip_by == "value" else torch.nn.utils.clip_grad_norm_
    clip([weight], settings.clip)
    assert torch.equal(weight.grad, before)
