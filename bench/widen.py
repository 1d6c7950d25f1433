"""A small model widened to the cost of a large one: the same text, token by token, at the price of so many weights.

Every MLP gets neurons whose inputs are random and whose outputs are zero.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


def find_mlps(model: nn.Module) -> list[tuple[list[nn.Linear], nn.Linear]]:
    """The linears into and out of the neurons of every MLP, found by their shapes."""
    mlps = []
    for module in model.modules():
        linears = [child for child in module.children() if isinstance(child, nn.Linear)]
        for down in [linear for linear in linears if linear.in_features > linear.out_features]:
            ups = [up for up in linears if (up.in_features, up.out_features) == (down.out_features, down.in_features)]
            if ups and len(ups) + 1 == len(linears):
                mlps.append((ups, down))
    return mlps


@torch.no_grad()
def widen(model: nn.Module, weights: float) -> int:
    """Give every MLP as many neurons as bring a model to so many weights; the neurons that each has then.

    The new neurons read random weights, of the spread that the old ones have, and what they write is zero.
    """
    mlps = find_mlps(model)
    if not mlps:
        raise ValueError("no MLP was found to widen: expected linears into and out of more neurons than the width")
    if len({down.in_features for _, down in mlps}) > 1:
        raise ValueError(f"MLPs have {sorted({down.in_features for _, down in mlps})} neurons, expected one number")
    each = sum((len(ups) + 1) * down.out_features for ups, down in mlps)
    more = round((weights - sum(parameter.numel() for parameter in model.parameters())) / each)
    if more <= 0:
        raise ValueError(f"the model has more than {weights:.3g} weights already: ask for more")
    for ups, down in mlps:
        for linear in ups:
            spread = linear.weight.new_empty(more, linear.in_features).normal_() * linear.weight.std()
            linear.weight = nn.Parameter(torch.cat([linear.weight, spread]), requires_grad=False)
            if linear.bias is not None:
                linear.bias = nn.Parameter(torch.cat([linear.bias, linear.bias.new_zeros(more)]), requires_grad=False)
            linear.out_features += more
        silent = down.weight.new_zeros(down.out_features, more)
        down.weight = nn.Parameter(torch.cat([down.weight, silent], dim=1), requires_grad=False)
        down.in_features += more
    return mlps[0][1].in_features


def widened_model(model: Any, weights: float) -> Any:
    """A copy of a model that costs so many weights and can be saved and loaded like any other."""
    wide = copy.deepcopy(model)
    wide.config.intermediate_size = widen(wide, weights)
    return wide
