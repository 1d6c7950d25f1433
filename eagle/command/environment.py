"""What a bug report needs of a machine: `eagle env`."""

from __future__ import annotations

import argparse
import os
import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from eagle import __version__
from eagle.device import best_device, fastest_dtype
from eagle.log import JSON_HELP, json_alone
from eagle.shipped import commit

PACKAGES = (
    "transformers",
    "accelerate",
    "datasets",
    "deepspeed",
    "safetensors",
    "huggingface-hub",
    "wandb",
    "peft",
    "gguf",
)


def main(argv: list[str]) -> None:
    """Print versions, processor and devices, for a bug report."""
    parser = argparse.ArgumentParser(prog="eagle env", description=main.__doc__)
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    args = parser.parse_args(argv)
    facts = read_environment()
    with json_alone(args.json) as write_json:
        print("\n".join(f"{name}: {fact}" for name, fact in facts.items()))
        write_json(facts)


def read_environment() -> dict[str, str]:
    """Return versions, processor and devices, by the names that `eagle env` prints them with."""
    device = best_device()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    facts = {
        "eagle": f"{__version__}, commit {commit()}",
        "python": f"{platform.python_version()} on {platform.platform()}",
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}, {torch.get_num_threads()} threads",
        "processor": f"{os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}, {memory / 1e9:.0f} GB",
        "device": f"{device}, fastest in {str(fastest_dtype(device)).removeprefix('torch.')}",
    }
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        facts[f"cuda:{index}"] = f"{properties.name}, {properties.total_memory / 1e9:.0f} GB"
    for name in PACKAGES:
        facts[name] = _version_of(name)
    return facts


def _version_of(package: str) -> str:
    """Return the version of a package, or that it is missing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
