"""Tree masks and grouped attention for stock transformers models."""

# B texts, N new tokens, R rows behind S columns of a cache, H heads, K key/value heads, G groups, D head width

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from eagle.device import upload
from eagle.target.structure import base_of


def grouped_attention(
    module: nn.Module,
    query: Tensor,  # [B, H, N, D]
    key: Tensor,  # [B, K, S, D]
    value: Tensor,
    attention_mask: Tensor,  # [B, 1, G * N, S]
    scaling: float | None = None,
    dropout: float = 0.0,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention without repeating keys and values: a group's queries become rows of one head."""
    texts, heads, count, width = query.shape
    groups = heads // key.shape[1]
    unmasked = attention_mask.shape[-1] == 1  # the sign for "all that was before", or "causal, and nothing before"
    if count > 1 and unmasked:
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=groups > 1)
        return output.transpose(1, 2).contiguous(), None
    rows = query.reshape(texts, heads // groups, groups * count, width)
    if not unmasked and attention_mask.shape[-2] != groups * count:  # a layer with other heads than the config says
        attention_mask = attention_mask[:, :, :count].repeat(1, 1, groups, 1)
    if count == 1 and query.dtype == torch.float32 and query.device.type == "cpu":
        # two plain products: 0.6 to 0.9 ms a token less than the fused kernel at 3,000 tokens and 12 layers
        scores = torch.bmm(rows.flatten(0, 1) * (scaling or width**-0.5), key.flatten(0, 1).transpose(1, 2))
        if not unmasked:
            scores = (scores.view(texts, -1, *scores.shape[1:]) + attention_mask).flatten(0, 1)
        output = torch.bmm(scores.softmax(-1), value.flatten(0, 1))
    else:
        mask = None if unmasked else attention_mask
        output = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scaling)
    return output.view(texts, heads, count, -1).transpose(1, 2).contiguous(), None


GROUPED = "eagle_grouped"
AttentionInterface.register(GROUPED, grouped_attention)
SWITCH = "_attn_implementation_internal"  # where a config holds the name of its attention

Observe = Callable[[int, Tensor, Tensor, float], None]
"""Gets a layer's number, its rotated queries [B, H, N, D] and keys [B, K, S, D], and the scale of their product."""
OBSERVED = "eagle_observed"
OBSERVER: ContextVar[tuple[str, Observe]] = ContextVar("observer")  # with the name of the attention that it looks at


def observed_attention(module: nn.Module, query: Tensor, key: Tensor, *args: Any, **options: Any) -> Any:
    """Call the observer with queries and keys, then another registered attention."""
    name, observe = OBSERVER.get()
    observe(vars(module)["layer_idx"], query, key, options.get("scaling") or query.shape[-1] ** -0.5)
    return AttentionInterface()[name](module, query, key, *args, **options)


AttentionInterface.register(OBSERVED, observed_attention)


def can_observe(model: Any, settings: dict[str, Any]) -> bool:
    """Whether a model with these config settings uses the registered attention functions."""
    return model._supports_attention_backend and settings.get(SWITCH) in AttentionInterface()


@contextmanager
def observing(settings: dict[str, Any], observe: Observe) -> Iterator[None]:
    """A context in which `observe` receives the queries and keys of a model's attention, which runs as usual."""
    name = settings[SWITCH]
    token = OBSERVER.set((name, observe))
    settings[SWITCH] = OBSERVED
    try:
        yield
    finally:
        settings[SWITCH] = name
        OBSERVER.reset(token)


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


def query_groups(config: Any) -> int:
    """The number of query heads that share one key-value head."""
    heads = config.num_attention_heads
    return heads // (getattr(config, "num_key_value_heads", None) or heads)


class Masks:
    """Additive attention masks for eager and sdpa: one mask, or a dict by layer type for sliding windows."""

    def __init__(self, model: Any, config: Any, grouped: bool) -> None:
        self.dtype = model.dtype
        self.device = model.get_input_embeddings().weight.device
        self.windows = layer_windows(config)
        self.grouped = grouped
        self.groups = query_groups(config) if grouped else 1
        self.unmasked = torch.zeros(1, 1, 1, 1, dtype=self.dtype, device=self.device)

    def __call__(
        self, starts: Sequence[int], positions: Tensor, seen: Tensor | None, columns: Tensor | None = None
    ) -> Tensor | dict[str, Tensor]:
        """The mask of new tokens of B texts, over `starts` committed columns each and R new ones at positions [B, R].

        `seen` [B, N, R] marks which of the R each of the last N attends to; None for a chain of R new tokens.
        `columns` [B, max(starts) or more] are the positions of the committed columns; None if they are in order.
        """
        count, level = positions.shape[1], min(starts) == max(starts)
        if self.grouped and level and (count == 1 or (seen is None and starts[0] == 0)):
            return self.unmasked
        seen = torch.ones(1, count, count, dtype=torch.bool).tril() if seen is None else seen
        masks = {
            kind: self._additive(starts, positions, seen, window, columns) for kind, window in self.windows.items()
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _additive(
        self, starts: Sequence[int], positions: Tensor, seen: Tensor, window: int | None, held: Tensor | None
    ) -> Tensor:
        """[B, 1, G * N, S]: 0 where a column is seen, the lowest number where it is not."""
        lowest, (_, count, new), device = torch.finfo(self.dtype).min, seen.shape, self.device
        seen = upload(seen, device)
        mask = torch.zeros(len(starts), count, max(starts) + new, dtype=self.dtype, device=device)
        if min(starts) == max(starts):
            mask[:, :, starts[0] :].masked_fill_(~seen, lowest)
        else:  # behind its own columns a text has none, and other texts have
            for row, own, start in zip(mask, (~seen).expand(len(starts), -1, -1), starts, strict=True):
                row[:, start : start + new].masked_fill_(own, lowest)
                row[:, start + new :] = lowest
        if window is not None:  # distance counts positions: siblings share one
            positions = upload(positions, device)
            columns = torch.arange(mask.shape[2], device=device).repeat(len(starts), 1)
            if held is not None:
                columns[:, : held.shape[1]] = upload(held[:, : mask.shape[2]], device)
            for row, start in enumerate(starts):
                columns[row, start : start + new] = positions[row]
            mask.masked_fill_(positions[:, -count:, None] - columns[:, None] >= window, lowest)
        mask = mask if self.groups == 1 else mask.repeat(1, self.groups, 1)
        return mask[:, None]


def why_no_trees(model: Any, config: Any) -> str | None:
    """The reason why this model cannot read a tree, or None."""
    kinds = set(getattr(config, "layer_types", None) or [])
    arguments = inspect.signature(type(base_of(model)).forward).parameters
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
    """The length beyond which a longrope model uses other frequencies for the whole text; infinity for others."""
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *rope.values()):  # one set, or one per layer type
        if isinstance(parameters, dict) and parameters.get("rope_type") == "longrope":
            return parameters["original_max_position_embeddings"]
    return math.inf
