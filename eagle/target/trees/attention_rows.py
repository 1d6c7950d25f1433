"""Attention that orders, pools or compresses its columns by itself, run over paths with a copy of its own cache."""

# P paths, D nodes of the longest path, S columns

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache

from eagle.target.trees.mixer_state import State
from eagle.target.trees.mixers import Mixer, Projections, watch_writes
from eagle.target.trees.tree_plan import Paths

WRITERS = {"update": 2, "update_indexer": 1}  # by which attention writes to a cache, and where they take the layer


class AttentionRows(Mixer):
    """An attention module whose state is a layer of its model's own cache."""

    def __init__(self, name: str, module: nn.Module, layer: int, new_layer: Callable[[], Any]) -> None:
        super().__init__(name, module, layer, set(), [])
        self.new_layer = new_layer

    def kind_of(self, state: State) -> Any:
        """The length of a text, whose columns are as many."""
        return state["layer", 0].get_seq_length() if state else -1

    def run(
        self, inputs: Mapping[str, Any], state: State, paths: Paths, projections: Projections | None
    ) -> tuple[Any, State]:
        """The output for rows of these inputs, from a layer that may be written to, and the layer behind each row."""
        layer = state.get(("layer", 0)) or self.new_layer()
        arguments: dict[str, Any] = {}
        for name, value in inputs.items():
            if isinstance(value, Cache):
                arguments[name] = forked = copy.copy(value)
                forked.layers = [layer if place == self.layer else held for place, held in enumerate(value.layers)]
            elif "mask" in name and isinstance(value, Tensor) and value.dim() == 4:
                arguments[name] = mask_paths(layer, len(paths.paths), paths.longest, value)
            else:
                arguments[name] = paths.gather(value)
        if projections is not None:
            projections.given, self.running = 0, (projections, paths)
        try:
            return keep_rows(self.stock(**arguments), paths), {("layer", 0): layer}
        finally:
            self.running = None


def keep_rows(output: Any, paths: Paths) -> Any:
    """A module's output with None for all but its tensors [P, D, width]: nobody reads weights of attention."""
    if isinstance(output, tuple):
        return tuple(keep_rows(part, paths) for part in output)
    is_rows = isinstance(output, Tensor) and output.dim() == 3
    return output if is_rows and output.shape[:2] == (len(paths.paths), paths.longest) else None


def mask_paths(layer: Any, paths: int, count: int, like: Tensor) -> Tensor:
    """[P, 1, D, S], the mask of D new tokens of each path over a layer's columns, in the type of the model's own."""
    columns = torch.arange(layer.get_mask_sizes(count)[0], device=like.device)
    distance = columns[-count:, None] - columns
    seen = (distance >= 0) & (distance < (getattr(layer, "sliding_window", None) or len(columns)))
    if like.dtype != torch.bool:
        seen = torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(
            ~seen, torch.finfo(like.dtype).min
        )
    return seen.expand(paths, 1, -1, -1)


def find_attention(base: nn.Module, config: Any, read: Callable[[Any], Any]) -> list[Mixer]:
    """The outermost modules that write keys and values while `read(cache)` runs the model with its own cache."""

    def make(place: int) -> Callable[[], Any]:
        return lambda: DynamicCache(config=config).layers[place]

    names, cache = {module: name for name, module in base.named_modules()}, DynamicCache(config=config)
    with watch_writes(names, cache, WRITERS) as writes:
        read(cache)
    inside = [one for one in writes for other in writes if names[one].startswith(names[other] + ".")]
    return [
        AttentionRows(names[module], module, layer, make(layer))
        for module, (layer, *_) in writes.items()
        if module not in inside and layer is not None
    ]
