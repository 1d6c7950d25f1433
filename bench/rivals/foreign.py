"""One side of a comparison of logits: a process that writes a random head as its project does, and what it says.

Any interpreter with torch and safetensors runs it, so that each rival stays in an environment of its own.
"""

# T tokens, H width, D tokens that can be drafted, V vocabulary

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


@dataclass(frozen=True)
class Asked:
    """Which head to make, for which target, and on what it is asked."""

    target: str  # a folder with a Llama
    inputs: str  # a file with tokens [T], features [T, 3 * H], and drafts, the tokens that the head may say
    out: str
    steps: int
    moved: bool = True  # norms away from ones
    switches: dict[str, bool] = field(default_factory=dict)

    @classmethod
    def here(cls) -> Asked:
        """What the command line says; all that is random then is the same in every run."""
        torch.set_num_threads(1)
        torch.manual_seed(0)
        return cls(**json.loads(sys.argv[1]))

    def text(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, features and drafts."""
        held = load_file(self.inputs)
        return held["tokens"], held["features"], held["drafts"]


def scatter(parameters: Iterable[nn.Parameter], moved: bool) -> None:
    """Random weights under which numbers stay about as large as they are."""
    with torch.no_grad():
        for weight in parameters:
            if weight.ndim > 1:
                weight.normal_(std=weight.shape[1] ** -0.5)
            elif moved:
                weight.add_(torch.randn_like(weight), alpha=0.3)


def heard(head: nn.Module, said: list[Tensor]) -> Any:
    """Keep all logits that an LM head says from now on."""
    return head.register_forward_hook(lambda _module, _read, logits: said.append(logits.detach()[0].clone()))


def told(asked: Asked, said: list[Tensor], *packages: str) -> None:
    """Write the logits [T, D] of every step beside the head, and say with what they were made."""
    logits = {str(step): one.float().contiguous() for step, one in enumerate(said)}
    save_file(logits, Path(asked.out).with_name(f"{Path(asked.out).name}.logits"))
    print(json.dumps({name: version(name) for name in (*packages, "torch", "transformers")}))
