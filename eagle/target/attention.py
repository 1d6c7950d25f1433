"""Tree cache (drops rejected nodes in place), tree masks and grouped attention for stock transformers models."""

# N new tokens, R rows behind S committed tokens, H heads, K key/value heads, D head width

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin


class Rows:
    """A buffer [1, X, S, D] that is written in place along S and reallocated only to grow."""

    def __init__(self) -> None:
        self.buffer = torch.empty(1, 0, 0, 0)  # replaced by the first rows, in their shape, dtype and device
        self.room = 0

    def write(self, start: int, new: Tensor) -> Tensor:
        """Put [1, X, N, D] at row `start` and return all rows up to the last new one, a view."""
        end = start + new.shape[2]
        if self.buffer.shape[2] < end:
            old, size = self.buffer, max(self.room, end + end // 2, 64)
            self.buffer = new.new_empty((1, new.shape[1], size, new.shape[3]))
            if start:
                self.buffer[:, :, :start] = old[:, :, :start]
        self.buffer.narrow(2, start, new.shape[2]).copy_(new)  # half the time of the same by slices
        return self.buffer.narrow(2, 0, end)


class _Layer(CacheLayerMixin):
    """One layer's keys and values. Sliding layers keep everything too: their mask holds the window."""

    is_sliding = False
    is_croppable = True

    def __init__(self, owner: TreeCache) -> None:
        super().__init__()
        self.owner = owner
        self.key_rows, self.value_rows = Rows(), Rows()
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: rows allocate themselves."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        start = self.owner.length
        return self.key_rows.write(start, key_states), self.value_rows.write(start, value_states)

    def get_seq_length(self) -> int:
        return self.owner.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.length + query_length, 0

    def get_max_length(self) -> int:
        return -1


class TreeCache(Cache):
    """Keys, values and tapped states of the committed text, followed by the rows of the last forward until `keep`."""

    def __init__(self, num_layers: int) -> None:
        self.length = 0  # of the committed text, the same for all layers
        layers: list[Any] = [_Layer(self) for _ in range(num_layers)]
        super().__init__(layers=layers)
        self.tapped = Rows()
        self.buffers = [rows for layer in layers for rows in (layer.key_rows, layer.value_rows)] + [self.tapped]

    def reserve(self, room: int) -> None:
        """Make the next allocation hold at least `room` rows."""
        for rows in self.buffers:
            rows.room = room

    @torch.inference_mode()
    def keep(self, path: list[int]) -> None:
        """Commit these of the rows added last, in this order; the rows before stay where they are."""
        start, end = self.length, self.length + len(path)
        if path != list(range(len(path))):
            rows_kept = [start + node for node in path]
            for rows in self.buffers:
                if rows.buffer.shape[2]:
                    rows.buffer[:, :, start:end] = rows.buffer[:, :, rows_kept]
        self.length = end


def grouped_attention(
    module: nn.Module,
    query: Tensor,  # [1, H, N, D]
    key: Tensor,  # [1, K, S + N, D]
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention without repeating keys and values: a group's queries become rows of one head."""
    _, heads, count, width = query.shape
    groups = heads // key.shape[1]
    unmasked = attention_mask.shape[-1] == 1  # the sign for "all that was before", or "causal, and nothing before"
    if count > 1 and unmasked:
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=groups > 1)
        return output.transpose(1, 2).contiguous(), None
    rows = query.reshape(1, heads // groups, groups * count, width)
    if count == 1 and query.dtype == torch.float32 and query.device.type == "cpu":
        # two plain products: 0.6 to 0.9 ms a token less than the fused kernel at 3,000 tokens and 12 layers
        scores = torch.bmm(rows[0] * (scaling or width**-0.5), key[0].transpose(1, 2))
        scores = scores if unmasked else scores + attention_mask[0]
        output = torch.bmm(scores.softmax(-1), value[0])
    else:
        mask = None if unmasked else attention_mask.repeat(1, 1, groups, 1)
        output = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scaling)
    return output.view(1, heads, count, -1).transpose(1, 2).contiguous(), None


GROUPED = "eagle_grouped"
AttentionInterface.register(GROUPED, grouped_attention)
SWITCH = "_attn_implementation_internal"  # where a config holds the name of its attention


def can_group(model: Any, config: Any) -> bool:
    """Whether a model can run `grouped_attention`: it takes any registered attention and has no sliding windows."""
    return (
        model._supports_attention_backend
        and vars(config).get(SWITCH) == "sdpa"
        and not any(layer_windows(config).values())
    )


def layer_windows(config: Any) -> dict[str, int | None]:
    """The sliding window of each layer type, None for full attention."""
    window = getattr(config, "sliding_window", None)
    kinds = sorted(set(getattr(config, "layer_types", None) or ["any"]))
    return {kind: None if kind == "full_attention" else window for kind in kinds}


class Masks:
    """Additive attention masks for eager and sdpa: one, or a dict by layer type where some windows slide."""

    def __init__(self, model: Any, config: Any, grouped: bool) -> None:
        self.dtype = model.dtype
        self.device = model.get_input_embeddings().weight.device
        self.windows = layer_windows(config)
        self.grouped = grouped
        self.unmasked = torch.zeros(1, 1, 1, 1, dtype=self.dtype, device=self.device)

    def __call__(self, start: int, positions: list[int], seen: Tensor | None) -> Tensor | dict[str, Tensor]:
        """The mask of new tokens over `start` committed ones and the R rows at these positions behind them.

        `seen` [N, R] says which rows each of the last N rows attends to; None means that all R are new, and a chain.
        """
        count = len(positions)
        if self.grouped and (count == 1 or (seen is None and start == 0)):
            return self.unmasked
        seen = torch.ones(count, count, dtype=torch.bool).tril() if seen is None else seen
        masks = {kind: self._additive(start, positions, seen, window) for kind, window in self.windows.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _additive(self, start: int, positions: list[int], seen: Tensor, window: int | None) -> Tensor:
        """[1, 1, N, S + R]: 0 where a key is seen, the lowest number where it is not."""
        lowest = torch.finfo(self.dtype).min
        mask = torch.zeros(len(seen), start + len(positions), dtype=self.dtype, device=seen.device)
        mask[:, start:].masked_fill_(~seen, lowest)
        if window is not None:  # distance counts positions: siblings share one
            key_positions = torch.tensor([*range(start), *positions], device=seen.device)
            mask.masked_fill_(key_positions[-len(seen) :, None] - key_positions >= window, lowest)
        return mask[None, None].to(self.device)


def why_no_trees(model: Any, config: Any) -> str | None:
    """The reason why this model cannot read a tree, or None."""
    kinds = set(getattr(config, "layer_types", None) or [])
    arguments = inspect.signature(type(model.base_model).forward).parameters
    if model._is_stateful or "linear_attention" in kinds:
        return "keeps recurrent state, which cannot branch"
    if "past_key_values" not in arguments:
        return "keeps no keys and values"
    if config._attn_implementation not in ("eager", "sdpa"):
        return f"attends by {config._attn_implementation}, which takes no tree mask; load it with 'sdpa' or 'eager'"
    if "position_ids" not in arguments or getattr(config, "alibi", False):
        return "takes positions from a 2-D mask or their order, and so cannot place siblings side by side"
    if unknown := kinds - {"full_attention", "sliding_attention"}:
        return f"has layers of type {sorted(unknown)}, for which no tree mask is known"
    return None


def rope_border(config: Any) -> float:
    """The length beyond which a longrope model reads the whole text with other frequencies, else infinity."""
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *rope.values()):  # one set, or one per layer type
        if isinstance(parameters, dict) and parameters.get("rope_type") == "longrope":
            return parameters["original_max_position_embeddings"]
    return math.inf
