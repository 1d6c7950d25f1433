"""Tiny checkpoints in the formats that a CPU can load, and a head that learns from one and drafts for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    TorchAoConfig,
)

from eagle import Target, generate
from eagle.core.examples import Example, collate
from eagle.drafters import DRAFTERS, settings_of
from eagle.drafters.none import NoDrafter
from tests.families import COMMON, random_tokens

STEPS = 8


def write_plain(folder: Path) -> Path:
    """A random llama whose layers divide into every format's groups."""
    config = LlamaConfig(
        **{**COMMON, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
    )
    config.tie_word_embeddings = False
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=0.2, generator=generator)
    model.save_pretrained(folder)
    return folder


def add_config(folder: Path, quantization: dict[str, Any]) -> Path:
    """Say in a folder's config.json that it is quantised."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_fp8(folder: Path) -> Path:
    """Blocks of E4M3 with a scale each, as DeepSeek publishes."""
    write_plain(folder)
    tensors = load_file(folder / "model.safetensors")
    for name, weight in list(tensors.items()):
        if name.endswith("proj.weight"):
            blocks = weight.unflatten(0, (-1, 64)).unflatten(2, (-1, 64))
            scales = blocks.abs().amax((1, 3), keepdim=True) / 448
            tensors[name] = (blocks / scales).to(torch.float8_e4m3fn).flatten(2).flatten(0, 1)
            tensors[f"{name}_scale_inv"] = scales[:, 0, :, 0].contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return add_config(folder, {"quant_method": "fp8", "weight_block_size": [64, 64]})


def write_bitsandbytes(folder: Path, **options: Any) -> Path:
    """By transformers, which quantises while it loads."""
    pytest.importorskip("bitsandbytes")
    return _quantise(folder, BitsAndBytesConfig(**options))


def write_torchao(folder: Path, kind: str = "Int8WeightOnlyConfig", **options: Any) -> Path:
    """One of torchao's configs, by transformers."""
    torchao = pytest.importorskip("torchao.quantization")
    return _quantise(folder, TorchAoConfig(getattr(torchao, kind)(), **options))


def write_hqq(folder: Path) -> Path:
    """Plain weights and the config by which transformers quantises them while it loads: it writes no others."""
    pytest.importorskip("hqq")
    weights = {"nbits": 4, "group_size": 64, "channel_wise": True, "axis": 1}
    options = {"round_zero": False, "optimize": True, "view_as_float": False}
    config = {"weight_quant_params": {**weights, **options}}
    return add_config(
        write_plain(folder),
        {"quant_method": "hqq", "quant_config": config, "skip_modules": ["lm_head"]},
    )


def write_compressed(folder: Path, scheme: str, ignore: tuple[str, ...] = ("lm_head",)) -> Path:
    """One of compressed-tensors' schemes, by the ranges of the weights themselves."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    helpers = pytest.importorskip("compressed_tensors.quantization.utils")
    model = LlamaForCausalLM.from_pretrained(write_plain(folder), dtype=torch.float32)
    groups = {"all": quantization.preset_name_to_scheme(scheme, ["Linear"])}
    quantization.apply_quantization_config(
        model, quantization.QuantizationConfig(config_groups=groups, ignore=list(ignore))
    )
    for module in model.modules():
        if scheme_of := getattr(module, "quantization_scheme", None):
            rules = scheme_of.weights
            rows = module.weight.data
            grouped = (
                rows.unflatten(-1, (-1, rules.group_size)) if rules.strategy == "group" else rows
            )
            keep = rules.strategy != "group"
            least, most = grouped.amin(-1, keepdim=keep), grouped.amax(-1, keepdim=keep)
            scale, zero = helpers.calculate_qparams(least, most, rules)
            module.weight_scale.data.copy_(scale.view_as(module.weight_scale))
            if hasattr(module, "weight_zero_point"):
                module.weight_zero_point.data.copy_(zero.view_as(module.weight_zero_point))
    compressor = compressors.ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    return folder


def _quantise(folder: Path, config: Any) -> Path:
    plain = write_plain(folder / "plain")
    AutoModelForCausalLM.from_pretrained(
        plain, quantization_config=config, dtype=torch.float32
    ).save_pretrained(folder)
    return folder


FORMATS: dict[str, Callable[[Path], Path]] = {
    "fp8, blocks": write_fp8,
    "bitsandbytes, int8": lambda folder: write_bitsandbytes(
        folder, load_in_8bit=True, llm_int8_threshold=0.0
    ),
    "bitsandbytes, nf4": lambda folder: write_bitsandbytes(
        folder, load_in_4bit=True, bnb_4bit_quant_type="nf4"
    ),
    "bitsandbytes, nf4, LM head too": lambda folder: write_bitsandbytes(
        folder, load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=["none"]
    ),
    "torchao, int8 weights": write_torchao,
    "torchao, int8 weights, LM head too": lambda folder: write_torchao(
        folder, modules_to_not_convert=["none"]
    ),
    "torchao, fp8 weights": lambda folder: write_torchao(folder, "Float8WeightOnlyConfig"),
    "torchao, int8 weights and inputs": lambda folder: write_torchao(
        folder, "Int8DynamicActivationInt8WeightConfig"
    ),
    "hqq, 4 bits": write_hqq,
    "compressed-tensors, W8A16": lambda folder: write_compressed(folder, "W8A16"),
    "compressed-tensors, W8A16, LM head too": lambda folder: write_compressed(folder, "W8A16", ()),
    "compressed-tensors, W4A16": lambda folder: write_compressed(folder, "W4A16"),
    "compressed-tensors, W8A8": lambda folder: write_compressed(folder, "W8A8"),
    "compressed-tensors, FP8 dynamic": lambda folder: write_compressed(folder, "FP8_DYNAMIC"),
}
ROUNDS_INPUTS = {  # a value at the edge of a step may be rounded either way, by what a forward's order of sums decides
    "torchao, int8 weights and inputs",
    "compressed-tensors, W8A8",
    "compressed-tensors, FP8 dynamic",
    "bitsandbytes, int8",
}


def learn(target: Target) -> tuple[Any, list[float]]:
    """A head after some steps on the target's features, and its losses."""
    head: Any = DRAFTERS["eagle1"].for_target(
        settings_of({"kind": "eagle1"}, "test"), target.config, target.head
    )
    taps = tuple(dict.fromkeys((*head.taps, *head.teacher_taps)))
    examples = []
    for seed in range(3):
        tokens = torch.tensor(random_tokens(24, seed=seed))
        features = target.features(tokens[None], taps, torch.float32)[0].clone()
        examples.append(Example(tokens, torch.ones_like(tokens, dtype=torch.bool), features))
    batch, optimizer, losses = (
        collate(examples, taps),
        torch.optim.AdamW(head.parameters(), lr=3e-3),
        [],
    )
    for _ in range(STEPS):
        loss: Tensor = head.train()(batch, target.head)["total"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return head.eval().bind(target.head), losses


def answers(target: Target, head: Any, count: int = 24) -> tuple[list[int], list[int]]:
    """What a target says with a head's drafts, and without."""
    prompt = random_tokens(9, seed=5)
    drafted, alone = (
        list(generate(target, drafter, prompt, max_new_tokens=count, stop=[]).tokens)
        for drafter in (head, NoDrafter())
    )
    return drafted, alone
