"""Quantised checkpoints: the package, the device and the memory that one needs, told from its config alone."""

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
UNFIT = (ImportError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, NameError)
# of llm_int8_threshold: above it the rows of one forward decide together what is rounded
MIXING = 0.0
BITS = re.compile(r'"(?:bits|num_bits|nbits|w_bits)": (\d+)|"_type": "[A-Za-z]+?(\d)')


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a method needs except torch and transformers, and what its weights are in memory."""

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
    """Return the quantization_config of a folder's or a hub id's config.json; None without one, or without a config."""
    # whose weights are unpacked, and which would be read whole as a config
    if is_gguf(path):
        return None
    try:
        config, _ = PreTrainedConfig.get_config_dict(path, revision=source.get("revision"))
    except (OSError, ValueError):  # the loader tells what is wrong
        return None
    return config.get("quantization_config") or (config.get("text_config") or {}).get(
        "quantization_config"
    )


def quantization_of(config: Any) -> dict[str, Any] | None:
    """Return the quantization_config of a config object, as its config.json holds it; None without one."""
    quantization = getattr(config, "quantization_config", None)
    if quantization is None or isinstance(quantization, dict):
        return quantization
    return quantization.to_dict()


def method_of(quantization: dict[str, Any]) -> str:
    """Return the name of a method as transformers lists it; bitsandbytes has one for 8 bits and one for 4."""
    # checkpoints of bitsandbytes did not always name it
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
    """Refuse a checkpoint that cannot be loaded here, and say on stderr what else its user should know."""
    reason = why_not_here(quantization, device)
    if reason:
        raise ValueError(f"{path} {reason}")
    for line in warnings_of(quantization, device, dtype):
        print(f"{path} {line}", file=sys.stderr)


def why_not_here(quantization: dict[str, Any], device: str) -> str:
    """Return why a checkpoint with this quantization_config cannot be loaded on a device and what to do, or ""."""
    method = method_of(quantization)
    if method not in AUTO_QUANTIZER_MAPPING:
        return (
            f"is quantised by {method!r}, which transformers does not read: got weights that would be taken for plain "
            f"ones, expected one of {', '.join(sorted(AUTO_QUANTIZER_MAPPING))}: {INSTEAD}"
        )
    needs = METHODS.get(method, Requirements())
    if needs.devices and torch.device(device).type not in needs.devices:
        return (
            f"is quantised by {method}, whose kernels run on {' and '.join(needs.devices)} alone: got the device "
            f"{device}. Load it on one of these, or {INSTEAD}"
        )
    # transformers quantises by it, yet has no way to write what it made
    if method == "quanto":
        return f"is quantised by quanto, of which transformers reads no checkpoints: got one, {INSTEAD}"
    # what transformers says of a missing package is less plain than its name
    missing = [name for name in needs.packages if not _is_installed(name)]
    fault = ""
    unpacks = False
    try:
        unpacks = _dequantizes(quantization, device)
    except UNFIT as error:
        fault = _describe_error(method, error)
    # transformers takes some packages for installed that are not; unpacking needs none
    if missing and not unpacks:
        return (
            f"is quantised by {method}, which needs {' and '.join(needs.packages)}: got a Python without "
            f"{' and '.join(missing)}. `pip install {' '.join(missing)}`, or {INSTEAD}"
        )
    return fault


def warnings_of(quantization: dict[str, Any], device: str, dtype: torch.dtype) -> list[str]:
    """Return sentences, that go on after a path, on a checkpoint that can be loaded on this device."""
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
    """Return why the states of a sequence depend on the others of its batch, and what to do; "" if they do not."""
    if quantization is None or method_of(quantization) != "bitsandbytes_8bit":
        return ""
    threshold = quantization.get("llm_int8_threshold", 6.0)
    if threshold <= MIXING:
        return ""
    return (
        f"is quantised by bitsandbytes with llm_int8_threshold {threshold}: a column is left out of the rounding where "
        "any row of a forward is beyond it, so that states depend on the texts read with them, and what decoding says "
        "on the draft. Set llm_int8_threshold to 0.0 in its config.json, which needs no new weights, or take 4 bits"
    )


def weight_bits(quantization: dict[str, Any] | None) -> int | None:
    """Return the bits of a layer's weight in memory, with the method's kernels; None if they are plain or not known."""
    if quantization is None:
        return None
    needs = METHODS.get(method_of(quantization), Requirements())
    # else the config names them, in one of several keys
    if needs.bits or needs.unpacks:
        return needs.bits
    match = BITS.search(json.dumps(quantization, default=str))
    return None if match is None else int(match[1] or match[2])


def place(device: str) -> dict[str, str] | None:
    """Return the device_map that brings a quantised model to a device; None leaves it on a machine's CPU.

    Quantised weights are packed for the device that they are loaded to, and not all of them can be moved.
    """
    return {"": device} if device != "cpu" or torch.accelerator.is_available() else None


def _dequantizes(quantization: dict[str, Any], device: str) -> bool:
    """Return whether transformers unpacks the weights while it loads them here; raise what its quantizer raises."""
    quantizer = AutoHfQuantizer.from_config(copy.deepcopy(quantization), pre_quantized=True)
    quantizer.validate_environment(device_map=place(device), weights_only=True)
    return bool(getattr(quantizer.quantization_config, "dequantize", False))


def _describe_error(method: str, error: Exception) -> str:
    """Return what transformers says against a checkpoint."""
    message = " ".join(str(error).split()) or type(error).__name__
    # whose message is the missing key alone
    if isinstance(error, KeyError):
        message = f"no {message}"
    return f"is quantised by {method} and cannot be loaded here: {message.rstrip('.')}. Mend that, or {INSTEAD}"


def _is_installed(package: str) -> bool:
    """Return whether pip knows a package, or a module has its name."""
    try:
        version(package)
    except PackageNotFoundError:
        return find_spec(package.replace("-", "_")) is not None
    return True
