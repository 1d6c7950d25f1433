"""Attention that orders, pools or compresses its columns by itself, so that no mask can steer it.

It reads a tree as recurrent layers do: path by path, each with a copy of its layer of the model's own cache.
"""

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

# methods of a cache by which attention writes to it, and which of their arguments is the layer's index
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
        """Wrap an attention module that no mask can steer, so that it reads the paths of a tree as rows of a batch.

        Args:
            name: its name in the model.
            module: the module.
            layer: the index of its layer in the cache.
            new_layer: makes an empty layer of the model's own kind of cache.
        """
        # its state is a whole layer of a cache, not numbered states in one or attributes
        super().__init__(name, module, layer, state_ids=set(), attributes=[])
        self.new_layer = new_layer

    def kind_of(self, state: State) -> Any:
        """Return a number that is equal for states that can be joined as rows: their length in tokens, -1 for none.

        A state is a layer of a cache, with keys and values of its tokens.
        """
        return state["layer", 0].get_seq_length() if state else -1

    def run(
        self, inputs: Mapping[str, Any], state: State, paths: Paths, projections: Projections | None
    ) -> tuple[Any, State]:
        """Run the module over P paths of a tree, each from a given layer of a cache.

        Args:
            inputs: the arguments of its forward by name, at all R nodes of B sequences [B, R, ..].
            state: the cache layers that the paths go on from, joined as rows of a batch; written to. {} for none.
            paths: the paths from the root to a leaf, padded to the D nodes of the longest.
            projections: where linear layers find or leave their outputs by node; None: they compute every row.

        Returns:
            The output [P, D, width], and the joined cache layers after the paths.
        """
        layer = state.get(("layer", 0)) or self.new_layer()
        arguments: dict[str, Any] = {}
        for name, value in inputs.items():
            if isinstance(value, Cache):
                # the module must write to the paths' layer, and not to that of the forward's cache
                copied = copy.copy(value)
                copied.layers = list(value.layers)
                copied.layers[self.layer] = layer  # type: ignore[index]
                arguments[name] = copied
            elif "mask" in name and isinstance(value, Tensor) and value.dim() == 4:
                # the model's mask is over the columns of its own cache, and not over those of this layer
                arguments[name] = mask_paths(layer, len(paths.paths), paths.longest, value)
            else:
                arguments[name] = paths.gather(value)
        with self._projecting(projections, paths):
            output = self.original_forward(**arguments)
        return keep_rows(output, paths), {("layer", 0): layer}


def keep_rows(output: Any, paths: Paths) -> Any:
    """Return a module's output with only its tensors [P, D, width] at P paths of D nodes; others become None.

    Others are attention weights, say. A path leads from the root of a draft tree to a leaf.
    """
    if isinstance(output, tuple):
        return tuple(keep_rows(item, paths) for item in output)
    shape = (len(paths.paths), paths.longest)
    if isinstance(output, Tensor) and output.dim() == 3 and output.shape[:2] == shape:
        return output
    return None


def mask_paths(layer: Any, paths: int, count: int, like: Tensor) -> Tensor:
    """Return the causal mask [P, 1, D, S] of new tokens over the S columns of a cache layer, new ones included.

    Args:
        layer: the layer, whose window is applied if it has one.
        paths: P, the number of paths from a tree's root to a leaf, which are rows of a batch.
        count: D, the number of new tokens of each path.
        like: a mask of the model, whose dtype and device the mask gets; bool, or additive.
    """
    # the layer knows its number of columns: one with a window holds only the last ones
    columns = torch.arange(layer.get_mask_sizes(count)[0], device=like.device)
    distance = columns[-count:, None] - columns  # [D, S], in tokens; negative for later ones
    window = getattr(layer, "sliding_window", None) or len(columns)
    visible = (distance >= 0) & (distance < window)
    mask = visible
    if like.dtype != torch.bool:
        mask = torch.zeros(visible.shape, dtype=like.dtype, device=like.device)
        mask.masked_fill_(~visible, torch.finfo(like.dtype).min)
    return mask.expand(paths, 1, -1, -1)


def find_attention(base: nn.Module, config: Any, read: Callable[[Any], Any]) -> list[Mixer]:
    """Return the model's attention modules, wrapped: the outermost ones that write keys and values to its own cache.

    Args:
        base: the base model.
        config: its config, from which its own cache is made.
        read: runs the model with a cache, for a trial that shows what each module writes.
    """
    names = {module: name for name, module in base.named_modules()}
    cache = DynamicCache(config=config)
    # by module, the layer of the cache that it writes to in this forward
    with watch_writes(names, cache, WRITERS) as writes:
        read(cache)

    def make_layer(index: int) -> Any:
        """Return an empty layer of the kind that the model's own cache has at this index."""
        return DynamicCache(config=config).layers[index]

    # of modules inside one of those
    prefixes = tuple(names[module] + "." for module in writes)
    found: list[Mixer] = []
    for module, write in writes.items():
        name = names[module]
        # a module inside another is run by that one
        if write.layer is not None and not name.startswith(prefixes):
            found.append(AttentionRows(name, module, write.layer, partial(make_layer, write.layer)))
    return found
