"""Tree masks and grouped attention for stock transformers models."""

# B texts, N new tokens, R rows behind S columns of a cache, H heads, K key/value heads, G groups, D head width

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from eagle.device import upload
from eagle.target.structure import device_of, typical_config


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
    """Whether a model can run `grouped_attention`: it takes any registered attention and plain causal masks."""
    return (
        model._supports_attention_backend
        and vars(config).get(SWITCH) == "sdpa"
        and not any(layer_windows(config).values())
        and not any(map(SPARSE.search, layer_kinds(config)))
    )


STATEFUL = re.compile("linear|mamba|conv|recurrent|^(moe|mlp)$")  # layers of these types attend to nothing
WINDOWED = re.compile("sliding|compressed|^any$")
SPARSE = re.compile("chunk|index|sparse|compressed")  # their attention looks at the mask, so it must be there
PLAIN = {"any", "full_attention", "sliding_attention"}


def layer_kinds(config: Any) -> list[str]:
    """The types of a model's layers; "any" where its config names none."""
    return sorted(set(getattr(config, "layer_types", None) or ["any"]))


def window_of(config: Any) -> int | None:
    """A config's sliding window, the commonest where layers differ in theirs; None for none."""
    config = typical_config(config, ("sliding_window",))
    return getattr(config, "sliding_window", None)


def layer_windows(config: Any) -> dict[str, int | None]:
    """The sliding window of each layer type that attends, None for an unlimited one."""
    window = window_of(config)
    return {
        kind: window if WINDOWED.search(kind) else None for kind in layer_kinds(config) if not STATEFUL.search(kind)
    }


# config keys that may bound attention; max_window_layers is a number of layers
LIMIT_NAMES = re.compile(r"window(?!_layers)|chunk|block_size|local_attention|index\w*_(topk|budget)|compress_rates")
BLOCK_NAMES = re.compile("index_block_size|compress_rates")  # tokens for each of the entries that "topk" counts


def attention_limits(config: Any) -> set[int]:
    """Numbers of tokens beyond which a model's attention may leave tokens out, by names in its config."""
    named = {
        name: [count for count in (value.values() if isinstance(value, dict) else [value]) if type(count) is int]
        for name, value in vars(config).items()
        if LIMIT_NAMES.search(name)
    }
    block = min((count for name, counts in named.items() if BLOCK_NAMES.search(name) for count in counts), default=1)
    return {count * block if "topk" in name else count for name, counts in named.items() for count in counts}


FAR_NAMES = re.compile("^(sliding_window|attention_chunk_size|floor_scale)$")  # numbers of tokens, read in each forward


@contextmanager
def near_limits(model: Any, config: Any, near: int) -> Iterator[bool]:
    """A context in which what a model does beyond so many tokens begins after `near` ones; yields if there is any."""
    numbers = {name: value for name, value in vars(config).items() if FAR_NAMES.search(name) and type(value) is int}
    far = {name: value for name, value in numbers.items() if value > near}
    changed = [
        (owner, name)
        for owner in (vars(config), *map(vars, model.modules()))
        for name, value in far.items()
        if owner.get(name) == value
    ]
    for owner, name in changed:
        owner[name] = near
    try:
        yield bool(far)
    finally:
        for owner, name in changed:
            owner[name] = far[name]


class MasksByKind(dict[str, Any]):
    """Masks by layer type: attending types first, then those without a mask; one for any other type when asked for."""

    def __init__(self, masks: dict[str, Any], rest: list[str], make: Callable[[str], Any]) -> None:
        super().__init__(masks | dict.fromkeys(rest))
        self.make = make

    def __missing__(self, kind: str) -> Any:
        self[kind] = None if STATEFUL.search(kind) else self.make(kind)
        return self[kind]


def query_groups(config: Any) -> int:
    """The number of query heads that share one key-value head."""
    config = typical_config(config, ("num_attention_heads", "num_key_value_heads"))
    heads = config.num_attention_heads
    return heads // (getattr(config, "num_key_value_heads", None) or heads)


class Masks:
    """Additive attention masks for eager and sdpa: one mask, or a dict by layer type."""

    def __init__(self, model: Any, config: Any, grouped: bool, *, as_rows: bool = True) -> None:
        """Make masks for a model; with `as_rows` a group's queries are rows of one key/value head."""
        self.dtype = model.dtype
        self.device = device_of(model.get_input_embeddings())
        self.windows = layer_windows(config)
        self.window = window_of(config)
        self.chunk = getattr(config, "attention_chunk_size", None)
        self.maskless = [kind for kind in layer_kinds(config) if kind not in self.windows]
        self.is_plain = not self.maskless and PLAIN.issuperset(self.windows)
        self.grouped = grouped
        self.groups = query_groups(config) if grouped and as_rows else 1
        self.unmasked = torch.zeros(1, 1, 1, 1, dtype=self.dtype, device=self.device)

    def __call__(
        self, starts: Sequence[int], positions: Tensor, seen: Tensor | None, columns: Tensor | None = None
    ) -> Any:
        """The mask of new tokens of B texts, over `starts` committed columns each and R new ones at positions [B, R].

        `seen` [B, N, R] marks which of the R each of the last N attends to; None for a chain of R new tokens.
        `columns` [B, max(starts) or more] are the positions of the committed columns; None if they are in order.
        """
        count, level = positions.shape[1], min(starts) == max(starts)
        if self.grouped and level and (count == 1 or (seen is None and starts[0] == 0)):
            return self.unmasked if self.is_plain else self._by_kind(lambda *reach: self.unmasked)
        seen = torch.ones(1, count, count, dtype=torch.bool).tril() if seen is None else seen
        make = partial(self._additive, starts, positions, seen, columns)
        if not self.is_plain:
            return self._by_kind(make)
        masks = {kind: make(window, None) for kind, window in self.windows.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _by_kind(self, make: Callable[[int | None, int | None], Tensor]) -> MasksByKind | None:
        """Masks by layer type, one for all types of one window and chunk; None where no layer attends."""
        make = cache(make)

        def mask_of(kind: str) -> Tensor:
            window = self.windows.get(kind, self.window if WINDOWED.search(kind) else None)
            return make(window, self.chunk if "chunk" in kind else None)

        masks = {kind: mask_of(kind) for kind in self.windows}
        return MasksByKind(masks, self.maskless, mask_of) if masks else None

    def _additive(
        self,
        starts: Sequence[int],
        positions: Tensor,
        seen: Tensor,
        held: Tensor | None,
        window: int | None,
        chunk: int | None,
    ) -> Tensor:
        """[B, 1, G * N, S]: 0 where a column is seen, the lowest number where it is not."""
        lowest, (_, count, new), device = torch.finfo(self.dtype).min, seen.shape, self.device
        seen = upload(seen, device)
        mask = torch.zeros(len(starts), count, max(starts) + new, dtype=self.dtype, device=device)
        if min(starts) == max(starts):
            mask[:, :, starts[0] :].masked_fill_(~seen, lowest)
        else:  # behind its own columns a text has none, and other texts have
            for row, unseen, start in zip(mask, (~seen).expand(len(starts), -1, -1), starts, strict=True):
                row[:, start : start + new].masked_fill_(unseen, lowest)
                row[:, start + new :] = lowest
        if window is not None or chunk is not None:  # distance counts positions: siblings share one
            positions = upload(positions, device)
            columns = place_columns(starts, positions, held)[:, None]
            queries = positions[:, -count:, None]
            if window is not None:
                mask.masked_fill_(queries - columns >= window, lowest)
            if chunk is not None:
                mask.masked_fill_(queries // chunk != columns // chunk, lowest)
        mask = mask if self.groups == 1 else mask.repeat(1, self.groups, 1)
        return mask[:, None]


def place_columns(starts: Sequence[int], positions: Tensor, held: Tensor | None = None) -> Tensor:
    """[B, S], the position of every column: committed ones at `held`, else in order, then R new ones at [B, R]."""
    new, device = positions.shape[1], positions.device
    columns = torch.arange(max(starts) + new, device=device).repeat(len(starts), 1)
    if held is not None:
        held = upload(held[:, : columns.shape[1]], device)
        columns[:, : held.shape[1]] = held
    for row, start in enumerate(starts):
        columns[row, start : start + new] = positions[row]
    return columns


def why_no_trees(config: Any, cache_name: str) -> str | None:
    """The reason why a model cannot even be tried on a tree, or None."""
    if not cache_name:
        return "keeps nothing between its forwards"
    if config._attn_implementation not in ("eager", "sdpa"):
        return f"attends by {config._attn_implementation}, which takes no tree mask; load it with 'sdpa' or 'eager'"
    return None


def rope_border(config: Any) -> float:
    """The length beyond which a longrope model uses other frequencies for the whole text; infinity for others."""
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *rope.values()):  # one set, or one per layer type
        if isinstance(parameters, dict) and parameters.get("rope_type") == "longrope":
            return parameters["original_max_position_embeddings"]
    return math.inf
