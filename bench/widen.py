"""Widen a small model to the cost of a large one: it writes the same tokens at the price of more weights.

Every MLP gets neurons that read random weights and write zeros.
"""

# N neurons of an MLP, D width of the model

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


def find_mlps(model: nn.Module) -> list[tuple[list[nn.Linear], nn.Linear]]:
    """Return the linears into and out of the neurons of every MLP, found by their shapes."""
    mlps = []
    for module in model.modules():
        linears = [child for child in module.children() if isinstance(child, nn.Linear)]
        for down in linears:
            shape = (down.out_features, down.in_features)
            ups = [up for up in linears if (up.in_features, up.out_features) == shape]
            has_more_neurons = down.in_features > down.out_features
            # every other linear of the module must lead into these neurons
            if has_more_neurons and ups and len(ups) + 1 == len(linears):
                mlps.append((ups, down))
    return mlps


def count_weights(module: nn.Module) -> int:
    """Return the number of values in all parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


@torch.no_grad()
def widen(model: nn.Module, weights: float) -> int:
    """Widen every MLP equally until the model has so many weights; return the neurons of an MLP.

    The new input weights are random with the spread of the old ones. The new output weights are zero.

    Args:
        model: Is changed in place.
        weights: The number of weights that it has in the end, but for rounding to whole neurons.

    Raises:
        ValueError: It has no MLP, MLPs of different sizes, or so many weights already.
    """
    mlps = find_mlps(model)
    if not mlps:
        raise ValueError(
            "no MLP was found to widen: expected linears into and out of more neurons than the width"
        )
    sizes = {down.in_features for _, down in mlps}
    if len(sizes) > 1:
        raise ValueError(f"MLPs have {sorted(sizes)} neurons, expected one number")
    weights_of_neuron = sum((len(ups) + 1) * down.out_features for ups, down in mlps)
    added = round((weights - count_weights(model)) / weights_of_neuron)
    if added <= 0:
        raise ValueError(f"the model has more than {weights:.3g} weights already: ask for more")
    for ups, down in mlps:
        # inputs are random, so that no kernel can skip them, and outputs are zero, so that no token changes
        for up in ups:
            noise = up.weight.new_empty(added, up.in_features).normal_()  # [N, D]
            up.weight = _extended(up.weight, noise * up.weight.std(), dim=0)
            if up.bias is not None:
                up.bias = _extended(up.bias, up.bias.new_zeros(added), dim=0)
            up.out_features += added
        down.weight = _extended(down.weight, down.weight.new_zeros(down.out_features, added), dim=1)
        down.in_features += added
    return sizes.pop() + added


def _extended(weight: Tensor, values: Tensor, dim: int) -> nn.Parameter:
    return nn.Parameter(torch.cat([weight, values], dim=dim), requires_grad=False)


def widened_model(model: Any, weights: float) -> Any:
    """Return a copy of a model with so many weights, which can be saved and loaded like any other."""
    wide = copy.deepcopy(model)
    wide.config.intermediate_size = widen(wide, weights)
    return wide
