"""Quantised checkpoints: the packages, the device and the memory that they need, known from their config alone."""

from __future__ import annotations

import copy
import json
import re
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, AutoHfQuantizer

from eagle.target.gguf import is_gguf

GUIDE = "docs/quantised.md"
INSTEAD = f"take the plain weights, or a format of {GUIDE} that loads here"
# what transformers raises for a checkpoint that it cannot load here
LOAD_ERRORS = (
    ImportError,
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    NameError,
)
# the largest llm_int8_threshold with which rows are rounded independently; above it, all rows of a forward decide
# together which columns are not rounded
MAX_THRESHOLD = 0.0
# the keys of configs that hold the bits of a weight, as "bits": 4 or "_type": "Int4WeightOnly"
BITS = re.compile(r'"(?:bits|num_bits|nbits|w_bits)": (\d+)|"_type": "[A-Za-z]+?(\d)')


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a quantisation method needs beside torch and transformers, and how its weights lie in memory."""

    packages: tuple[str, ...] = ()  # by the names that pip knows
    devices: tuple[str, ...] = ()  # types of devices that have its kernels; () for all
    bits: int | None = None  # of a weight, where the method alone decides them
    unpacks: bool = False  # whether a forward leaves weights of the model's precision


METHODS = {
    "aqlm": Requirements(("aqlm",), bits=2),
    "auto-round": Requirements(("auto-round",)),
    "awq": Requirements(("gptqmodel",)),
    "bitnet": Requirements(bits=2),
    "bitsandbytes_4bit": Requirements(("bitsandbytes",), bits=4),
    "bitsandbytes_8bit": Requirements(("bitsandbytes",), bits=8),
    "compressed-tensors": Requirements(("compressed-tensors",), unpacks=True),
    "eetq": Requirements(("kernels",), ("cuda",), bits=8),
    "fbgemm_fp8": Requirements(("fbgemm-gpu",), ("cuda", "xpu"), bits=8),
    "fouroversix": Requirements(("fouroversix",), bits=4),
    "fp8": Requirements(bits=8),
    "fp_quant": Requirements(("fp_quant", "qutlass"), ("cuda", "xpu"), bits=4),
    "gptq": Requirements(("gptqmodel", "optimum")),
    "higgs": Requirements(("flute-kernel", "fast_hadamard_transform"), ("cuda",)),
    "hqq": Requirements(("hqq",)),
    "metal": Requirements(("kernels",)),
    "mxfp4": Requirements(("kernels", "triton"), bits=4),
    "mxfp8": Requirements(bits=8),
    "nvfp4": Requirements(("kernels",), ("cuda",), bits=4),
    "quanto": Requirements(("optimum-quanto",)),
    "quark": Requirements(("amd-quark",)),
    "sinq": Requirements(("sinq",)),
    "spqr": Requirements(("spqr_quant",), ("cuda",), bits=3),
    "torchao": Requirements(("torchao",)),
    "vptq": Requirements(("vptq",), ("cuda",)),
}


def read_quantization(path: Any, **source: Any) -> dict[str, Any] | None:
    """Return the quantization_config of a folder's or a hub id's config.json; None without one, or without a config.

    `source` may hold the `revision` of a hub id. It says how the checkpoint's weights were quantised. The weights are
    not loaded for it.
    """
    # a GGUF file's weights are dequantised; and here the whole file would be read as a config
    if is_gguf(path):
        return None
    try:
        # the second item is arguments that are no part of the config
        config, _ = PreTrainedConfig.get_config_dict(path, revision=source.get("revision"))
    # the model's loader then says what is wrong
    except (OSError, ValueError):
        return None
    # a model that sees may have it in its text part
    return config.get("quantization_config") or (config.get("text_config") or {}).get(
        "quantization_config"
    )


def quantization_of(config: Any) -> dict[str, Any] | None:
    """Return how a model's weights are quantised: its config's quantization_config as a dict; None for plain ones."""
    quantization = getattr(config, "quantization_config", None)
    if quantization is None or isinstance(quantization, dict):
        return quantization
    return quantization.to_dict()


def method_of(quantization: dict[str, Any]) -> str:
    """Return the name of a quantization_config's method as transformers lists it.

    Configs call bitsandbytes by one name; transformers lists its 8-bit and its 4-bit method apart.
    """
    # older checkpoints of bitsandbytes do not name their method
    method = str(quantization.get("quant_method") or "bitsandbytes")
    if (
        method == "bitsandbytes"
        or quantization.get("load_in_8bit")
        or quantization.get("load_in_4bit")
    ):
        return "bitsandbytes_8bit" if quantization.get("load_in_8bit") else "bitsandbytes_4bit"
    return method


def check_quantised(
    path: Any,
    quantization: dict[str, Any],
    device: str,
    dtype: torch.dtype,
) -> None:
    """Refuse a checkpoint that cannot be loaded here, and print warnings about it to stderr.

    Args:
        path: the checkpoint's, for messages.
        quantization: its quantization_config.
        device: where it is to be loaded.
        dtype: of weights that are unpacked.
    """
    reason = why_not_here(quantization, device)
    if reason:
        raise ValueError(f"{path} {reason}")
    for line in warnings_of(quantization, device, dtype):
        print(f"{path} {line}", file=sys.stderr)


def why_not_here(quantization: dict[str, Any], device: str) -> str:
    """Return why a checkpoint with this quantization_config cannot be loaded on a device and what to do, or "".

    The reason goes on after the checkpoint's path.
    """
    method = method_of(quantization)
    if method not in AUTO_QUANTIZER_MAPPING:
        return (
            f"is quantised by {method!r}, which transformers does not read: got weights that would be taken for plain "
            f"ones, expected one of {', '.join(sorted(AUTO_QUANTIZER_MAPPING))}: {INSTEAD}"
        )
    # a method that is not listed needs nothing that is known here
    needs = METHODS.get(method, Requirements())
    if needs.devices and torch.device(device).type not in needs.devices:
        return (
            f"is quantised by {method}, whose kernels run on {' and '.join(needs.devices)} alone: got the device "
            f"{device}. Load it on one of these, or {INSTEAD}"
        )
    # transformers quantises with quanto, but can neither write nor read its checkpoints
    if method == "quanto":
        return f"is quantised by quanto, of which transformers reads no checkpoints: got one, {INSTEAD}"
    # a missing package is named here, as the errors of transformers are less clear about it
    missing = [name for name in needs.packages if not _is_installed(name)]
    fault = ""
    unpacks = False
    try:
        unpacks = _dequantizes(quantization, device)
    except LOAD_ERRORS as error:
        fault = _describe_error(method, error)
    # checked even without a fault: transformers takes some missing packages for installed. Unpacking needs none of them
    if missing and not unpacks:
        return (
            f"is quantised by {method}, which needs {' and '.join(needs.packages)}: got a Python without "
            f"{' and '.join(missing)}. `pip install {' '.join(missing)}`, or {INSTEAD}"
        )
    return fault


def warnings_of(quantization: dict[str, Any], device: str, dtype: torch.dtype) -> list[str]:
    """Return what the user of a checkpoint that can be loaded should know, as sentences that go on after its path.

    Args:
        quantization: its quantization_config.
        device: where it is loaded.
        dtype: of weights that are unpacked.
    """
    method = method_of(quantization)
    lines = []
    name = str(dtype).removeprefix("torch.")
    unpacked = f"its weights are unpacked to {name} and take {dtype.itemsize} B each"
    if METHODS.get(method, Requirements()).unpacks:
        lines.append(f"is quantised by {method}: {unpacked}")
    elif _dequantizes(quantization, device):
        lines.append(f"is quantised by {method}, for which there are no kernels here: {unpacked}")
    reason = why_rows_mix(quantization)
    if reason:
        lines.append(reason)
    return lines


def why_rows_mix(quantization: dict[str, Any] | None) -> str:
    """Return why a quantisation makes a sequence's states depend on the others of its batch, or "".

    The reason goes on after the name of a checkpoint. `quantization` is a quantization_config, None for plain weights.
    """
    if quantization is None or method_of(quantization) != "bitsandbytes_8bit":
        return ""
    threshold = quantization.get("llm_int8_threshold", 6.0)
    if threshold <= MAX_THRESHOLD:
        return ""
    return (
        f"is quantised by bitsandbytes with llm_int8_threshold {threshold}: a column is left out of the rounding where "
        "any row of a forward is beyond it, so that states depend on the sequences read with them, and decoding on "
        "the draft. Set llm_int8_threshold to 0.0 in its config.json, which needs no new weights, or take 4 bits"
    )


def weight_bits(quantization: dict[str, Any] | None) -> int | None:
    """Return the bits that a quantised weight takes in memory, on a device that has the method's kernels.

    None if weights are not quantised, are unpacked to the model's dtype on loading, or have an unknown number of bits.

    Args:
        quantization: a quantization_config; None for a model that is not quantised.
    """
    if quantization is None:
        return None
    method = METHODS.get(method_of(quantization), Requirements())
    # a method that unpacks has no bits of its own: `bits` is None then
    if method.bits or method.unpacks:
        return method.bits
    # The method alone does not decide the bits, and the config names them under one of several keys. The pattern has a
    # group for each form: a number such as "bits": 4, or a digit in a type's name such as Int4WeightOnly.
    match = BITS.search(json.dumps(quantization, default=str))
    return None if match is None else int(match[1] or match[2])


def device_map_of(device: str) -> dict[str, str] | None:
    """Return the device_map by which transformers loads a quantised model onto a device; None without any GPU.

    Quantised weights are packed for the device that they are loaded to, and some cannot be moved later.
    """
    return {"": device} if device != "cpu" or torch.accelerator.is_available() else None


def _dequantizes(quantization: dict[str, Any], device: str) -> bool:
    """Return whether transformers unpacks quantised weights on loading, as it does without kernels for the device.

    Raises:
        Exception: what its quantizer raises where the checkpoint cannot be loaded.
    """
    # a copy, as transformers may change the dict
    quantizer = AutoHfQuantizer.from_config(copy.deepcopy(quantization), pre_quantized=True)
    quantizer.validate_environment(device_map=device_map_of(device), weights_only=True)
    return bool(getattr(quantizer.quantization_config, "dequantize", False))


def _describe_error(method: str, error: Exception) -> str:
    """Return an error of transformers about a quantised checkpoint as a reason that goes on after its path.

    `method` is the name of the quantisation.
    """
    message = " ".join(str(error).split()) or type(error).__name__
    # the message of a KeyError is only the missing key
    if isinstance(error, KeyError):
        message = f"no {message}"
    return f"is quantised by {method} and cannot be loaded here: {message.rstrip('.')}. Mend that, or {INSTEAD}"


def _is_installed(package: str) -> bool:
    """Return whether a package is installed by pip, or can be imported by its name."""
    try:
        version(package)
    except PackageNotFoundError:
        return find_spec(package.replace("-", "_")) is not None
    return True
