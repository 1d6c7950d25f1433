"""Tree masks and grouped attention for stock transformers models."""

# B sequences, N new tokens, R uncommitted tokens, S columns of a cache, H heads, K key/value heads, G groups,
# D head width

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
    """Scaled dot-product attention for grouped queries that does not repeat keys and values for each query head.

    transformers' sdpa repeats them. Here the G * N queries that share a key/value head are the rows of one product.
    There are B sequences, N new tokens, S cached and new tokens, and H query heads of width D, of which G = H / K share
    each of K key/value heads. Registered as an attention function of transformers: a model whose config names it calls
    it in every layer.

    Returns:
        The output [B, N, H, D], and None for attention weights.
    """
    sequences, heads, count, width = query.shape
    groups = heads // key.shape[1]
    # `Masks` passes a mask of one column where no mask is needed: one new token sees all cached ones, and several new
    # tokens without earlier columns are causal
    unmasked = attention_mask.shape[-1] == 1
    if count > 1 and unmasked:
        output = F.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            scale=scaling,
            enable_gqa=groups > 1,
        )
        return output.transpose(1, 2).contiguous(), None
    rows = query.reshape(sequences, heads // groups, groups * count, width)
    # the mask was made for the config's number of groups, and this layer has another
    if not unmasked and attention_mask.shape[-2] != groups * count:
        attention_mask = attention_mask[:, :, :count].repeat(1, 1, groups, 1)
    mask = None if unmasked else attention_mask
    # on a CPU two plain products are faster than the fused kernel for one token in fp32
    if count == 1 and query.dtype == torch.float32 and query.device.type == "cpu":
        output = _attend_by_products(rows, key, value, mask, scaling or width**-0.5)
    else:
        output = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scaling)
    return output.view(sequences, heads, count, -1).transpose(1, 2).contiguous(), None


def _attend_by_products(
    rows: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
) -> Tensor:
    """Return softmax(q k^T * scale + mask) v by two plain products.

    They take 0.6 to 0.9 ms a token less than the fused kernel at 3,000 tokens and 12 layers.

    Args:
        rows: [B, K, G * N, D], of B sequences the N queries of the G query heads that share each of K key/value heads.
        key: [B, K, S, D], of S cached and new tokens.
        value: [B, K, S, D].
        mask: [B, 1, G * N, S], added to the scores; None for none.
        scale: the factor on q k^T, usually D^-0.5.

    Returns:
        [B * K, G * N, D].
    """
    scores = torch.bmm(rows.flatten(0, 1) * scale, key.flatten(0, 1).transpose(1, 2))
    if mask is not None:
        by_sequence = scores.view(len(rows), -1, *scores.shape[1:])  # [B, K, G * N, S]
        scores = (by_sequence + mask).flatten(0, 1)
    return torch.bmm(scores.softmax(-1), value.flatten(0, 1))


GROUPED = "eagle_grouped"
AttentionInterface.register(GROUPED, grouped_attention)
# attribute of a config that holds the name of its attention
ATTENTION_KEY = "_attn_implementation_internal"

Observe = Callable[[int, Tensor, Tensor, float], None]
"""Gets a layer's index, its rotated queries [B, H, N, D] and keys [B, K, S, D], and the scale of their product."""
OBSERVED = "eagle_observed"
# the observer, and the name of the attention function that runs after it
OBSERVER: ContextVar[tuple[str, Observe]] = ContextVar("observer")


def observed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    *args: Any,
    **options: Any,
) -> Any:
    """Attention function that shows queries and keys to the observer of `observing`, then calls the model's own.

    transformers calls it by its registered name. Drafters that choose keys by their attention weights need it.

    Args:
        module: the attention module of a layer.
        query: [B, H, N, D], rotated, of N new tokens of B sequences, for H heads of width D.
        key: [B, K, S, D], rotated, of S cached and new tokens, for K key/value heads.
        args: passed on.
        options: passed on.
    """
    # the name of the model's own function, and the observer
    name, observe = OBSERVER.get()
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    observe(vars(module)["layer_idx"], query, key, scale)
    return AttentionInterface()[name](module, query, key, *args, **options)


AttentionInterface.register(OBSERVED, observed_attention)


def can_observe(model: Any, settings: dict[str, Any]) -> bool:
    """Return whether a model with these config settings calls attention functions by their registered names.

    Only then can `observing` put another function in their place.
    """
    return model._supports_attention_backend and settings.get(ATTENTION_KEY) in AttentionInterface()


@contextmanager
def observing(settings: dict[str, Any], observe: Observe) -> Iterator[None]:
    """A context in which `observe` receives the queries and keys of a model's attention, which runs as usual.

    Drafters that choose keys by the target's attention use it.

    Args:
        settings: the attributes of the config that the model reads, which are changed in the context.
        observe: called with a layer's index, its queries, its keys and the scale of their product.
    """
    name = settings[ATTENTION_KEY]
    token = OBSERVER.set((name, observe))
    # transformers looks the function up by this name in every forward
    settings[ATTENTION_KEY] = OBSERVED
    try:
        yield
    finally:
        settings[ATTENTION_KEY] = name
        OBSERVER.reset(token)


def can_group(model: Any, config: Any) -> bool:
    """Return whether a model can run `grouped_attention` in place of its own.

    It must take any registered attention function, run sdpa now, and have causal masks alone: no windows and no sparse
    layers. The attention function is named in its config.
    """
    # vars rather than getattr, as the attribute has a property and a default on some config classes
    return (
        model._supports_attention_backend
        and vars(config).get(ATTENTION_KEY) == "sdpa"
        and not any(layer_windows(config).values())
        and not any(map(SPARSE_KINDS.search, layer_kinds(config)))
    )


# types of layers without attention
STATEFUL_KINDS = re.compile("linear|mamba|conv|recurrent|^(moe|mlp)$")
WINDOWED_KINDS = re.compile("sliding|compressed|^any$")
# types of layers that read the mask to choose columns, so that it must not be left out
SPARSE_KINDS = re.compile("chunk|index|sparse|compressed")
PLAIN_KINDS = {"any", "full_attention", "sliding_attention"}


def layer_kinds(config: Any) -> list[str]:
    """Return the distinct types of a model's layers, such as "full_attention"; "any" where its config names none.

    Layers of different types need different attention masks.
    """
    return sorted(set(getattr(config, "layer_types", None) or ["any"]))


def window_of(config: Any) -> int | None:
    """Return a config's sliding window in tokens, the commonest where layers differ in theirs; None for none."""
    config = typical_config(config, ("sliding_window",))
    return getattr(config, "sliding_window", None)


def layer_windows(config: Any) -> dict[str, int | None]:
    """Return the sliding window in tokens of each layer type with attention, None for one without a limit.

    A token attends only to the last so many tokens. Layer types without attention are left out.
    """
    windows: dict[str, int | None] = {}
    for kind in layer_kinds(config):
        # layers with a recurrent state or without any mixing of tokens do not attend
        if not STATEFUL_KINDS.search(kind):
            windows[kind] = window_of(config) if WINDOWED_KINDS.search(kind) else None
    return windows


# config keys that may limit how far attention reaches; max_window_layers is a number of layers, and no limit
LIMIT_NAMES = re.compile(
    r"window(?!_layers)|chunk|block_size|local_attention|index\w*_(topk|budget)|compress_rates"
)
# config keys of the number of tokens in a block, where a "topk" key counts blocks
BLOCK_NAMES = re.compile("index_block_size|compress_rates")


def attention_limits(config: Any) -> set[int]:
    """Return numbers of tokens beyond which a model's attention may leave tokens out, by names in its config.

    A trial prompt must be longer than these to show whether a reader does the same. Such limits are windows, chunks and
    budgets of sparse attention.
    """
    limits: list[int] = []
    blocks: list[int] = []
    budgets: list[int] = []  # numbers of blocks that a query attends to
    for name, value in vars(config).items():
        if not LIMIT_NAMES.search(name):
            continue
        values = value.values() if isinstance(value, dict) else [value]
        counts = [count for count in values if type(count) is int]  # without bools
        if BLOCK_NAMES.search(name):
            blocks += counts
        if "topk" in name:
            budgets += counts
        else:
            limits += counts
    # a budget may count blocks, whose sizes differ by layer, or tokens if no key names a size
    block = min(blocks, default=1)
    return {*limits, *(budget * block for budget in budgets)}


# config keys and module attributes of numbers of tokens that a model reads in each forward, so that they can be changed
FAR_NAMES = re.compile("^(sliding_window|attention_chunk_size|floor_scale)$")


@contextmanager
def near_limits(model: Any, config: Any, near: int) -> Iterator[bool]:
    """A context in which a model's attention windows and chunks of more than `near` tokens have `near` tokens.

    A short trial then shows how the model reads beyond them. It yields whether the model has any.
    """
    far = {}  # by name, the limits to lower
    for name, value in vars(config).items():
        if FAR_NAMES.search(name) and type(value) is int and value > near:
            far[name] = value
    # modules copy such numbers from the config when they are made
    changed = []
    for owner in (vars(config), *map(vars, model.modules())):
        changed += [(owner, name) for name, value in far.items() if owner.get(name) == value]
    for owner, name in changed:
        owner[name] = near
    try:
        yield bool(far)
    finally:
        for owner, name in changed:
            owner[name] = far[name]


class MasksByKind(dict[str, Any]):
    """Masks by layer type. A type that the config does not list gets its mask when the model asks for it."""

    def __init__(self, masks: dict[str, Any], rest: list[str], make: Callable[[str], Any]) -> None:
        """Take the known masks.

        Args:
            masks: the known masks, by layer type; these come first in the dict.
            rest: layer types without attention, which have no mask.
            make: returns the mask of any other layer type.
        """
        super().__init__(masks | dict.fromkeys(rest))
        self.make = make

    def __missing__(self, kind: str) -> Any:
        """Return the mask of a layer type that the config does not list, and store it; None if it has no attention."""
        mask = None if STATEFUL_KINDS.search(kind) else self.make(kind)
        self[kind] = mask
        return mask


def query_groups(config: Any) -> int:
    """Return the number of query heads that share one key/value head, as grouped-query attention has them."""
    config = typical_config(config, ("num_attention_heads", "num_key_value_heads"))
    heads = config.num_attention_heads
    # without a number of key/value heads, each query head has its own
    return heads // (getattr(config, "num_key_value_heads", None) or heads)


class Masks:
    """Makes additive attention masks for eager and sdpa attention: one mask, or a dict by layer type."""

    def __init__(self, model: Any, config: Any, grouped: bool, *, as_rows: bool = True) -> None:
        """Find out what attention masks a model needs when it reads draft trees.

        Args:
            model: the model, which gives dtype and device.
            config: its text config.
            grouped: whether the model runs `grouped_attention`, which needs no mask for one token or a causal prompt.
            as_rows: whether a grouped mask is repeated for the query heads that share a key/value head, as their
                queries are rows of one product.
        """
        self.dtype = model.dtype
        self.device = device_of(model.get_input_embeddings())
        self.windows = layer_windows(config)  # by layer type, in tokens; None for none
        # of layer types that the config does not list
        self.window = window_of(config)
        self.chunk = getattr(config, "attention_chunk_size", None)
        # layer types without attention
        self.maskless = [kind for kind in layer_kinds(config) if kind not in self.windows]
        # whether all layer types attend, and their masks have no more than a window
        self.is_plain = not self.maskless and PLAIN_KINDS.issuperset(self.windows)
        self.grouped = grouped
        self.groups = query_groups(config) if grouped and as_rows else 1
        # one column tells `grouped_attention` that no mask is needed
        self.unmasked = torch.zeros(1, 1, 1, 1, dtype=self.dtype, device=self.device)

    def __call__(
        self,
        starts: Sequence[int],
        positions: Tensor,
        tree_mask: Tensor | None,
        columns: Tensor | None = None,
    ) -> Any:
        """Make the attention mask of a forward over the last N of R uncommitted tokens of B sequences.

        Args:
            starts: the committed columns of each sequence; a column is the place of one token in the KV cache.
            positions: [B, R], of the uncommitted tokens.
            tree_mask: [B, N, R], which of the R each of the last N attends to; None for a chain of R new tokens.
            columns: [B, max(starts) or more], the positions of the committed columns; None if they are in order.

        Returns:
            [B, 1, G * N, S], 0 or the lowest number, for S = max(starts) + R columns, or such masks by layer type. G is
            the number of query heads that share a key/value head where their queries are rows of one product, else 1.
            [1, 1, 1, 1] if the kernel needs no mask; None if no layer attends.
        """
        count = positions.shape[1]
        is_level = min(starts) == max(starts)
        # the kernel needs no mask for one new token in each row, or for causal prompts without earlier columns
        if self.grouped and is_level and (count == 1 or (tree_mask is None and starts[0] == 0)):
            # `reach` is a layer type's window and chunk, which hide nothing here
            return self.unmasked if self.is_plain else self._by_kind(lambda *reach: self.unmasked)
        if tree_mask is None:
            tree_mask = torch.ones(1, count, count, dtype=torch.bool).tril()
        make = partial(self._additive, starts, positions, tree_mask, columns)
        if not self.is_plain:
            return self._by_kind(make)
        # a model with one type of layers takes a mask, and others take a dict by type
        masks = {kind: make(window, chunk=None) for kind, window in self.windows.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _by_kind(self, make: Callable[[int | None, int | None], Tensor]) -> MasksByKind | None:
        """Return masks by layer type; None where no layer type attends.

        Models with several layer types, such as full and sliding attention, take a dict of masks.

        Args:
            make: returns the mask for a window and a chunk, each a number of tokens or None.
        """
        # layer types with the same window and chunk share a mask
        make = cache(make)

        def mask_of(kind: str) -> Tensor:
            """Return the attention mask of a layer type.

            Whether a type that the config does not list has a sliding window is seen by its name, and so are chunks.
            """
            window = self.windows.get(kind, self.window if WINDOWED_KINDS.search(kind) else None)
            return make(window, self.chunk if "chunk" in kind else None)

        masks = {kind: mask_of(kind) for kind in self.windows}
        return MasksByKind(masks, self.maskless, mask_of) if masks else None

    def _additive(
        self,
        starts: Sequence[int],
        positions: Tensor,
        tree_mask: Tensor,
        committed: Tensor | None,
        window: int | None,
        chunk: int | None,
    ) -> Tensor:
        """Return [B, 1, G * N, S]: 0 where a new token attends to a column, the lowest number where it does not.

        There are B sequences, N new tokens, S = max(starts) + R columns, and G copies for the query heads that share a
        key/value head (1 if their queries are not rows of one product).

        Args:
            starts: the committed columns of each sequence; a column is the place of one token in the KV cache.
            positions: [B, R], of the uncommitted tokens.
            tree_mask: [1 or B, N, R], which of the R uncommitted tokens each of the last N attends to.
            committed: [B, ..], positions of the committed columns; None: in order.
            window: the sliding window in positions; None for none.
            chunk: the number of positions of a chunk, beyond which nothing is attended to; None for none.
        """
        lowest = torch.finfo(self.dtype).min
        _, count, new = tree_mask.shape  # N and R
        hidden = ~upload(tree_mask, self.device)
        mask = torch.zeros(
            len(starts),
            count,
            max(starts) + new,
            dtype=self.dtype,
            device=self.device,
        )
        # committed columns are visible to all new tokens
        if min(starts) == max(starts):
            mask[:, :, starts[0] :].masked_fill_(hidden, lowest)
        else:
            # a shorter sequence's new columns begin earlier, and all columns after them are hidden
            for row, row_hidden, start in zip(
                mask, hidden.expand(len(starts), -1, -1), starts, strict=True
            ):
                row[:, start : start + new].masked_fill_(row_hidden, lowest)
                row[:, start + new :] = lowest
        if window is not None or chunk is not None:
            # windows and chunks count positions rather than columns, as siblings share a position
            positions = upload(positions, self.device)
            columns = place_columns(starts, positions, committed)[:, None]  # [B, 1, S]
            queries = positions[:, -count:, None]  # [B, N, 1]
            if window is not None:
                mask.masked_fill_(queries - columns >= window, lowest)
            if chunk is not None:
                mask.masked_fill_(queries // chunk != columns // chunk, lowest)
        if self.groups > 1:
            mask = mask.repeat(1, self.groups, 1)
        return mask[:, None]


def place_columns(
    starts: Sequence[int],
    positions: Tensor,
    committed: Tensor | None = None,
) -> Tensor:
    """Return [B, S], the position in its sequence of the token in every column of the KV cache.

    There are B sequences, and a column holds one token of each: first the committed ones, then the new ones. The nodes
    of a tree share positions, so a column's index does not tell it.

    Args:
        starts: the number of committed columns of each sequence.
        positions: [B, R], of the R new columns, which come right after them; S is max(starts) + R.
        committed: [B, ..], positions of the committed columns; None: in order.
    """
    new = positions.shape[1]
    # columns after a shorter sequence's end keep their index, whatever it is: the mask hides them
    columns = torch.arange(max(starts) + new, device=positions.device).repeat(len(starts), 1)
    if committed is not None:
        committed = upload(committed[:, : columns.shape[1]], positions.device)
        columns[:, : committed.shape[1]] = committed
    for row, start in enumerate(starts):
        columns[row, start : start + new] = positions[row]
    return columns


def why_no_trees(config: Any, cache_name: str) -> str | None:
    """Return why a model cannot read draft trees, by its cache and attention alone, or None if only a trial can tell.

    Args:
        config: the model's text config.
        cache_name: the argument of its forward that takes a cache; "" for none.
    """
    if not cache_name:
        return "keeps nothing between its forwards"
    if config._attn_implementation not in ("eager", "sdpa"):
        return f"attends by {config._attn_implementation}, which takes no tree mask; load it with 'sdpa' or 'eager'"
    return None


def rope_border(config: Any) -> float:
    """Return the length in tokens beyond which a longrope model reads a sequence with other rotary frequencies.

    It then reads the whole sequence with them, so that keys cached before are wrong. Infinity for other models. So no
    sequence may grow across it.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    # a config has one set of parameters, or a set for each layer type
    for parameters in (rope, *rope.values()):
        if isinstance(parameters, dict) and parameters.get("rope_type") == "longrope":
            return parameters["original_max_position_embeddings"]
    return math.inf
