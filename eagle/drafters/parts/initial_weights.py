"""What the linear layers of a new head start from."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

Linears = Literal["uniform", "normal"]
"""Linear layers as torch draws them, uniform to 1 / sqrt(width), or as transformers does: N(0, 0.02), biases 0."""

STD = 0.02  # transformers' `initializer_range`, which the configs of published trainers leave as it is


@torch.no_grad()
def draw_linears(head: nn.Module, drawn: Linears) -> None:
    """Draw the linear layers of a new head anew if `drawn` is "normal"; torch drew them as they were made."""
    if drawn == "uniform":
        return
    for part in head.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=STD)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
