"""Attention that orders, pools or compresses its columns by itself, run over paths with a copy of its own cache."""

# P paths, D nodes of the longest path, S columns

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache

from eagle.target.trees.mixers import Mixer, Projections, State, watch_writes
from eagle.target.trees.tree_plan import Paths

# methods of a cache by which attention writes to it, and the position of the layer's index among their arguments
WRITERS = {"update": 2, "update_indexer": 1}


class AttentionRows(Mixer):
    """An attention module whose state is a layer of its model's own cache."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        layer: int,
        new_layer: Callable[[], Any],
    ) -> None:
        super().__init__(name, module, layer, set(), [])
        self.new_layer = new_layer

    def kind_of(self, state: State) -> Any:
        """Return the length of a sequence, whose columns are as many."""
        return state["layer", 0].get_seq_length() if state else -1

    def run(
        self, inputs: Mapping[str, Any], state: State, paths: Paths, projections: Projections | None
    ) -> tuple[Any, State]:
        """Return the output for rows of these inputs, and the layer after each row; the state's may be written to."""
        layer = state.get(("layer", 0)) or self.new_layer()
        arguments: dict[str, Any] = {}
        for name, value in inputs.items():
            if isinstance(value, Cache):
                # the same cache with this layer in the place of its own
                forked = copy.copy(value)
                forked.layers = list(value.layers)
                forked.layers[self.layer] = layer  # type: ignore[index]
                arguments[name] = forked
            elif "mask" in name and isinstance(value, Tensor) and value.dim() == 4:
                # the model's mask is that of a chain over other columns
                arguments[name] = mask_paths(layer, len(paths.paths), paths.longest, value)
            else:
                arguments[name] = paths.gather(value)
        with self._projecting(projections, paths):
            output = self.stock(**arguments)
        return keep_rows(output, paths), {("layer", 0): layer}


def keep_rows(output: Any, paths: Paths) -> Any:
    """Return a module's output, with None for all but its tensors [P, D, width]: attention's weights are not read."""
    if isinstance(output, tuple):
        return tuple(keep_rows(item, paths) for item in output)
    shape = (len(paths.paths), paths.longest)
    if isinstance(output, Tensor) and output.dim() == 3 and output.shape[:2] == shape:
        return output
    return None


def mask_paths(layer: Any, paths: int, count: int, like: Tensor) -> Tensor:
    """Return [P, 1, D, S], the mask of D new tokens of each path over a layer's columns, typed like the model's own."""
    # a layer with a window holds its last columns alone, so that columns are counted by the layer
    columns = torch.arange(layer.get_mask_sizes(count)[0], device=like.device)
    distance = columns[-count:, None] - columns
    window = getattr(layer, "sliding_window", None) or len(columns)
    visible = (distance >= 0) & (distance < window)
    mask = visible
    if like.dtype != torch.bool:
        mask = torch.zeros(visible.shape, dtype=like.dtype, device=like.device)
        mask.masked_fill_(~visible, torch.finfo(like.dtype).min)
    return mask.expand(paths, 1, -1, -1)


def find_attention(base: nn.Module, config: Any, read: Callable[[Any], Any]) -> list[Mixer]:
    """Return the outermost modules that write keys and values while `read(cache)` runs the model with its own cache."""
    names = {module: name for name, module in base.named_modules()}
    cache = DynamicCache(config=config)
    with watch_writes(names, cache, WRITERS) as writes:
        read(cache)

    def make_layer(index: int) -> Any:
        return DynamicCache(config=config).layers[index]

    prefixes = tuple(names[module] + "." for module in writes)
    found: list[Mixer] = []
    for module, write in writes.items():
        name = names[module]
        # a module inside another is run by that one
        if write.layer is not None and not name.startswith(prefixes):
            found.append(AttentionRows(name, module, write.layer, partial(make_layer, write.layer)))
    return found
