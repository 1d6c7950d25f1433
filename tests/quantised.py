"""Tiny checkpoints in the formats that a CPU can load, and a head that learns from one and drafts for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
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
    """Write a random llama whose layers divide into every format's groups."""
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**COMMON, **sizes, "tie_word_embeddings": False}))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=0.2, generator=generator)
    model.save_pretrained(folder)
    return folder


def add_config(folder: Path, quantization: dict[str, Any]) -> Path:
    """Write into a folder's config.json how it is quantised."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "quantization_config": quantization}))
    return folder


def write_fp8(folder: Path) -> Path:
    """Write blocks of E4M3 with a scale each, as DeepSeek publishes."""
    write_plain(folder)
    tensors = load_file(folder / "model.safetensors")
    for name, weight in list(tensors.items()):
        if name.endswith("proj.weight"):
            # [rows, 64, columns, 64], and a scale for each 64 x 64
            blocks = weight.unflatten(0, (-1, 64)).unflatten(2, (-1, 64))
            scales = blocks.abs().amax((1, 3), keepdim=True) / 448
            tensors[name] = (blocks / scales).to(torch.float8_e4m3fn).flatten(2).flatten(0, 1)
            tensors[f"{name}_scale_inv"] = scales[:, 0, :, 0].contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return add_config(folder, {"quant_method": "fp8", "weight_block_size": [64, 64]})


def _quantise(folder: Path, config: Any) -> Path:
    plain = write_plain(folder / "plain")
    model = AutoModelForCausalLM.from_pretrained(
        plain, quantization_config=config, dtype=torch.float32
    )
    model.save_pretrained(folder)
    return folder


def write_bitsandbytes(folder: Path, **options: Any) -> Path:
    """Quantise by transformers, which calls bitsandbytes while it loads."""
    pytest.importorskip("bitsandbytes")
    return _quantise(folder, BitsAndBytesConfig(**options))


def write_torchao(folder: Path, kind: str = "Int8WeightOnlyConfig", **options: Any) -> Path:
    """Quantise by transformers with one of torchao's configs."""
    torchao = pytest.importorskip("torchao.quantization")
    return _quantise(folder, TorchAoConfig(getattr(torchao, kind)(), **options))


def write_hqq(folder: Path) -> Path:
    """Write plain weights and the config by which transformers quantises them while it loads: it saves no others."""
    pytest.importorskip("hqq")
    weights = {
        "nbits": 4,
        "group_size": 64,
        "channel_wise": True,
        "axis": 1,
        "round_zero": False,
        "optimize": True,
        "view_as_float": False,
    }
    config = {
        "quant_method": "hqq",
        "quant_config": {"weight_quant_params": weights},
        "skip_modules": ["lm_head"],
    }
    return add_config(write_plain(folder), config)


def write_compressed(folder: Path, scheme: str, ignore: tuple[str, ...] = ("lm_head",)) -> Path:
    """Write one of compressed-tensors' schemes, with the ranges of the weights themselves.

    Args:
        folder: where it is written.
        scheme: the name of a preset.
        ignore: layers that stay as they are.
    """
    quantization = pytest.importorskip("compressed_tensors.quantization")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    helpers = pytest.importorskip("compressed_tensors.quantization.utils")
    model = LlamaForCausalLM.from_pretrained(write_plain(folder), dtype=torch.float32)
    # all linear layers by one scheme, but for those that are ignored
    groups = {"all": quantization.preset_name_to_scheme(scheme, ["Linear"])}
    config = quantization.QuantizationConfig(config_groups=groups, ignore=list(ignore))
    quantization.apply_quantization_config(model, config)
    for module in model.modules():
        module_scheme = getattr(module, "quantization_scheme", None)
        if module_scheme is None:
            continue
        # a scale for each group of a row, or for each row
        rules = module_scheme.weights
        is_grouped = rules.strategy == "group"
        rows = module.weight.data
        if is_grouped:
            rows = rows.unflatten(-1, (-1, rules.group_size))
        smallest = rows.amin(-1, keepdim=not is_grouped)
        largest = rows.amax(-1, keepdim=not is_grouped)
        scale, zero = helpers.calculate_qparams(smallest, largest, rules)
        module.weight_scale.data.copy_(scale.view_as(module.weight_scale))
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.data.copy_(zero.view_as(module.weight_zero_point))
    compressor = compressors.ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    return folder


INT8 = {"load_in_8bit": True, "llm_int8_threshold": 0.0}
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
INT8_INPUTS = "Int8DynamicActivationInt8WeightConfig"
FORMATS: dict[str, Callable[[Path], Path]] = {
    "fp8, blocks": write_fp8,
    "bitsandbytes, int8": partial(write_bitsandbytes, **INT8),
    "bitsandbytes, nf4": partial(write_bitsandbytes, **NF4),
    "bitsandbytes, nf4, LM head too": partial(
        write_bitsandbytes, **NF4, llm_int8_skip_modules=["none"]
    ),
    "torchao, int8 weights": write_torchao,
    "torchao, int8 weights, LM head too": partial(write_torchao, modules_to_not_convert=["none"]),
    "torchao, fp8 weights": partial(write_torchao, kind="Float8WeightOnlyConfig"),
    "torchao, int8 weights and inputs": partial(write_torchao, kind=INT8_INPUTS),
    "hqq, 4 bits": write_hqq,
    "compressed-tensors, W8A16": partial(write_compressed, scheme="W8A16"),
    "compressed-tensors, W8A16, LM head too": partial(write_compressed, scheme="W8A16", ignore=()),
    "compressed-tensors, W4A16": partial(write_compressed, scheme="W4A16"),
    "compressed-tensors, W8A8": partial(write_compressed, scheme="W8A8"),
    "compressed-tensors, FP8 dynamic": partial(write_compressed, scheme="FP8_DYNAMIC"),
}
# an input at the edge of a step may be rounded either way, by the order of a forward's sums
ROUNDS_INPUTS = {
    "torchao, int8 weights and inputs",
    "compressed-tensors, W8A8",
    "compressed-tensors, FP8 dynamic",
    "bitsandbytes, int8",
}


def learn(target: Target) -> tuple[Any, list[float]]:
    """Return a head after some steps on the target's features, and its losses."""
    settings = settings_of({"kind": "eagle1"}, "test")
    # the smallest head that reads features and the LM head
    head: Any = DRAFTERS["eagle1"].for_target(settings, target.config, target.head)
    taps = tuple(dict.fromkeys((*head.taps, *head.teacher_taps)))
    examples = []
    for seed in range(3):
        tokens = torch.tensor(random_tokens(24, seed=seed))
        features = target.features(tokens[None], taps, torch.float32)[0].clone()
        examples.append(Example(tokens, torch.ones_like(tokens, dtype=torch.bool), features))
    batch = collate(examples, taps)
    optimizer = torch.optim.AdamW(head.train().parameters(), lr=3e-3)
    losses = []
    for _ in range(STEPS):
        loss = head(batch, target.head)["total"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return head.eval().bind(target.head), losses


def answers(target: Target, head: Any, count: int = 24) -> tuple[list[int], list[int]]:
    """Return what a target answers with a head's drafts, and without."""
    prompt = random_tokens(9, seed=5)
    drafted = generate(target, head, prompt, max_new_tokens=count, stop=[])
    alone = generate(target, NoDrafter(), prompt, max_new_tokens=count, stop=[])
    return list(drafted.tokens), list(alone.tokens)
