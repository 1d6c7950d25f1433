"""Input and output of a process that writes a random head as its project does, with the head's logits.

Any interpreter with torch and safetensors runs it, so that each rival stays in an environment of its own.
"""

# T tokens, H width, D draft vocabulary size

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


@dataclass(frozen=True)
class HeadRequest:
    """Which head to make, for which target, and which text it reads."""

    target: str  # a folder with a Llama
    inputs: str  # a file with tokens [T], features [T, 3 * H], and drafts, the target ids of the draft vocabulary
    out: str
    steps: int
    switches: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_command_line(cls) -> HeadRequest:
        """Read the request, and seed torch so that every run makes the same head."""
        torch.set_num_threads(1)
        torch.manual_seed(0)
        return cls(**json.loads(sys.argv[1]))

    def load_inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, features and drafts."""
        inputs = load_file(self.inputs)
        return inputs["tokens"], inputs["features"], inputs["drafts"]


def randomize_(parameters: Iterable[nn.Parameter]) -> None:
    """Random weights that keep the size of activations, and norms away from ones."""
    with torch.no_grad():
        for weight in parameters:
            if weight.ndim > 1:
                weight.normal_(std=weight.shape[1] ** -0.5)
            else:
                weight.add_(torch.randn_like(weight), alpha=0.3)


def record_logits(lm_head: nn.Module, logits: list[Tensor]) -> None:
    """Append the logits [T, D] of every later call of an LM head."""
    lm_head.register_forward_hook(
        lambda _module, _input, output: logits.append(output.detach()[0].clone())
    )


def save_logits(request: HeadRequest, logits: list[Tensor]) -> None:
    """Write the logits [T, D] of every step beside the head."""
    steps = {str(step): rows.float().contiguous() for step, rows in enumerate(logits)}
    save_file(steps, Path(request.out).with_name(f"{Path(request.out).name}.logits"))
