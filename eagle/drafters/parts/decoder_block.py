"""The building blocks of trained heads: Llama blocks with their own cache, and rotary tables."""

# B batch, T tokens, N rows of all sequences, H width, w width of a head, P width of queries, keys and values together

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from eagle.core.drafter import HeadShape
from eagle.drafters.parts.operations import RMSNorm, SwiGLUResidual, rotate_heads
from eagle.target.slots import RowCache
from eagle.target.structure import typical_config

# the sizes of a head, as keys of a transformers config
SHAPE_KEYS = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
]


def check_taps(taps: tuple[int, ...], layers: int) -> tuple[int, ...]:
    """Return the taps of a head unchanged; ValueError if one is named twice or the target has no such layer.

    A tap is one of the target's hidden states that the head reads.

    Args:
        taps: The target's hidden states that the head reads: i is the input of layer i, -1 the final norm's output.
        layers: The number of the target's layers.
    """
    if len(set(taps)) < len(taps) or not all(-1 <= tap < layers for tap in taps):
        raise ValueError(
            f"drafter.taps is {taps} for a target of {layers} layers, expected different ones of 0 (the embedding) "
            f"to {layers - 1}, or -1 (behind the final norm): name them in the recipe"
        )
    return taps


def head_shape(target_config: Any, **overrides: Any) -> HeadShape:
    """Return the config of a head for a target: a Llama config with the target's sizes and, by default, one layer.

    It is a Llama config for every target, because inference engines load only heads whose config is a Llama's.

    Args:
        target_config: The target's config; sizes that it lacks get usual values.
        overrides: Keys of the config, such as `intermediate_size` or `qk_norm`, whose values replace the target's.
    """
    # for a target whose layers differ, the config of its most common kind of layer
    target_config = typical_config(target_config, SHAPE_KEYS)
    width = target_config.hidden_size
    has_heads = bool(getattr(target_config, "num_attention_heads", None))
    # a target without attention: the head gets attention heads of the largest usual width that divides its own
    head_width = next(size for size in (128, 64, 32, 16, 8, 4, 2, 1) if width % size == 0)
    heads = target_config.num_attention_heads if has_heads else width // head_width
    defaults = {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": width // heads,
        "intermediate_size": 4 * width,
        "max_position_embeddings": 2048,  # the default of a Llama config, in tokens
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    sizes: dict[str, Any] = {}
    for key in SHAPE_KEYS:
        value = getattr(target_config, key, None)
        sizes[key] = defaults.get(key) if value is None else value
    if not isinstance(sizes["intermediate_size"], int):
        # some configs list one for each layer
        sizes["intermediate_size"] = max(sizes["intermediate_size"])
    if not has_heads:
        # a target without attention may have `head_dim` for something else, such as the heads of a state space model
        sizes["head_dim"] = width // heads
    shape: Any = LlamaConfig(
        **{**sizes, "num_hidden_layers": 1, **overrides}, tie_word_embeddings=False
    )
    return shape


class Cache:
    """The KV cache of one block while drafting, and its weight matrices, concatenated for fewer kernel launches.

    The cache has one row for each sequence. The owner, which the caches of all blocks share, decides where the next
    keys and values are written. The matrices are copies that a new drafting state makes again, so they are never stale.
    """

    def __init__(self, owner: RowCache, block: Block) -> None:
        """Add a buffer for keys and one for values to `owner`, in place, and copy the matrices of `block`."""
        self.keys = owner.add()
        self.values = owner.add()
        # one product instead of three: launches cost more than products of few rows
        attention = block.self_attn
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        self.query_key_value = _join_weights(projections)
        biases = [
            projection.bias.detach() for projection in projections if projection.bias is not None
        ]
        self.bias = torch.cat(biases) if biases else None
        self.gate_up = _join_weights([block.mlp.gate_proj, block.mlp.up_proj])

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write new keys and values into the cache, where `RowCache.set_write_offset` has said before; return all.

        Args:
            keys: [B, heads, T, w], of T new tokens of each of B sequences; w is the width of a head.
            values: [B, heads, T, w].

        Returns:
            The keys and values [B, heads, S, w] of these sequences: S columns, from the first to the last new one.
        """
        return self.keys.write(keys), self.values.write(values)


def _join_weights(projections: Sequence[nn.Linear]) -> Tensor:
    """Return one matrix with the rows of all projections' weights, copied and without gradient.

    One product with it gives the outputs of all of them, in one kernel launch.
    """
    return torch.cat([projection.weight.detach() for projection in projections])


class Attention(nn.Module):
    """Llama attention with the mask as an argument. Draft trees differ from chains only by the mask.

    With `qk_norm` in the shape each head's queries and keys are normed. With `qkv_bias` queries, keys and values have a
    bias.
    """

    def __init__(self, shape: HeadShape, width: int | None = None) -> None:
        """Make the projections and, where the shape asks for them, the norms of queries and keys.

        Args:
            shape: The head's sizes. It has the keys `qk_norm` and `qkv_bias` only where they are set.
            width: The width of the input; None for the shape's hidden size.
        """
        super().__init__()
        self.width = shape.head_dim  # of one attention head
        input_width = width or shape.hidden_size
        query_width = shape.num_attention_heads * shape.head_dim
        key_width = shape.num_key_value_heads * shape.head_dim
        bias = getattr(shape, "qkv_bias", False)
        self.q_proj = nn.Linear(input_width, query_width, bias=bias)
        self.k_proj = nn.Linear(input_width, key_width, bias=bias)
        self.v_proj = nn.Linear(input_width, key_width, bias=bias)
        self.o_proj = nn.Linear(query_width, shape.hidden_size, bias=False)
        self.q_norm = None
        self.k_norm = None
        if getattr(shape, "qk_norm", False):
            self.q_norm = Norm(shape.head_dim, shape.rms_norm_eps)
            self.k_norm = Norm(shape.head_dim, shape.rms_norm_eps)

    @torch.no_grad()
    def start_from_keys(self) -> None:
        """Initialise half of the query heads so that a token at first attends mostly to itself.

        Every second query head gets twice the matrix of its key head: a token's query is then most similar to its own
        key. The projection is changed in place, through a view of its weight. Heads that are trained from scratch may
        start so.
        """
        # [query heads or key heads, width of a head, input width]
        queries = self.q_proj.weight.unflatten(0, (-1, self.width))
        keys = self.k_proj.weight.unflatten(0, (-1, self.width))
        key_of_query = keys.repeat_interleave(len(queries) // len(keys), dim=0)
        queries[::2] = 2 * key_of_query[::2]

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, cache: Cache | None
    ) -> Tensor:
        """Return the attention output [B, T, H], H the hidden size, for T tokens of each of B sequences.

        Args:
            x: The input [B, T, input width].
            rotary: Rotary tables, cosines and sines [B, T, w] of the tokens' positions; w is the width of a head.
            mask: The additive mask [B, 1, T, S] over S keys, those in the cache included. With a cache its rows may be
                repeated for each query head of a group, as `level_mask` makes them. None for a causal mask.
            cache: When drafting, the cache to which keys and values are added; None when training.
        """
        if cache is not None:
            return self.o_proj(self._read_cached(x, rotary, mask, cache))
        query = self._split_heads(self.q_proj(x))
        key = self._split_heads(self.k_proj(x))
        value = self._split_heads(self.v_proj(x))
        query, key = apply_rotary_pos_emb(*self.norm_heads(query, key), *rotary)
        output = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return self.o_proj(output.transpose(1, 2).flatten(2))

    def _split_heads(self, x: Tensor) -> Tensor:
        """Return [B, heads, T, w] of [B, T, heads * w]: T tokens of B sequences, w the width of a head."""
        return x.unflatten(-1, (-1, self.width)).transpose(1, 2)

    def norm_heads(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys [.., w], each head's vector of width w normed; unchanged without `qk_norm`."""
        if self.q_norm is None or self.k_norm is None:
            return query, key
        return self.q_norm(query), self.k_norm(key)

    def _read_cached(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, cache: Cache
    ) -> Tensor:
        """Return the output of all heads for new tokens, which attend to the cache and to one another.

        It is made of few kernel launches, which cost most of the time when drafting. The new keys and values are
        written to the cache.

        Args:
            x: The input [B, T, input width] at T new tokens of each of B sequences.
            rotary: Cosines and sines [B, T, w] of the tokens' positions.
            mask: The additive mask [B, 1, T or groups * T, S] over S keys; with None only the new tokens are in the
                cache.
            cache: The block's cache.

        Returns:
            [B, T, query heads * w], w the width of a head, before the output projection.
        """
        batch, count, _ = x.shape
        width = self.width
        keys = self.k_proj.out_features // width  # key heads, as many as value heads
        queries = self.q_proj.out_features // width  # query heads
        # [B, queries + 2 * keys, T, w]
        heads = self._split_heads(F.linear(x, cache.query_key_value, cache.bias))
        # queries and keys are rotated in one call; the heads of values, which come last, are not
        rotated = heads[:, :-keys]
        if self.q_norm is not None:
            normed = self.norm_heads(rotated[:, :queries], rotated[:, queries:])
            rotated = torch.cat(normed, dim=1)
        query, key = rotate_heads(rotated, rotary).tensor_split([queries], dim=1)
        key, value = cache.extend(key, heads[:, -keys:])
        groups = queries // keys
        if mask is None:
            output = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=groups > 1
            )
            return output.transpose(1, 2).flatten(2)
        # query heads that share a key head are stacked as rows of one head, so that no keys are repeated; a mask from
        # `level_mask` has these rows already
        if mask.shape[2] != groups * count:
            mask = mask.repeat(1, 1, groups, 1)
        query = query.reshape(batch, keys, groups * count, width)
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return output.reshape(batch, queries, count, width).transpose(1, 2).flatten(2)


class Norm(LlamaRMSNorm):
    """RMSNorm that saves only its input and one number for each row for the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x [.., width] with each vector divided by its root mean square and multiplied by the weight."""
        # without gradients torch's kernel is one launch; it does not support an input and a weight of two dtypes
        if not torch.is_grad_enabled() and x.dtype == self.weight.dtype:
            return F.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)
        return RMSNorm.apply(x, self.weight, self.variance_epsilon)


class Block(nn.Module):
    """A Llama decoder block without input norm, as EAGLE-1 has it.

    Drafting calls the block. Training calls its steps, `key_value`, `query_and_residual` and `add_mlp`, one by one
    (`eagle.drafters.parts.sequence_blocks`), because it needs keys at all slots, but queries only at supervised ones.
    """

    def __init__(self, shape: HeadShape, width: int | None = None) -> None:
        """Make attention, norm and MLP; `width` is that of attention's input, None for the shape's hidden size."""
        super().__init__()
        self.self_attn = Attention(shape, width)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = LlamaMLP(shape)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, cache: Cache | None
    ) -> Tensor:
        """Return the block's output [B, T, H] at T tokens of B sequences (H: the hidden size).

        `x` is its input, `rotary` cosines and sines at the tokens' positions, `mask` the additive attention mask (None:
        causal), and `cache` the KV cache when drafting.
        """
        hidden, residual = self.inputs(x)
        return self.add_attention(self.self_attn(hidden, rotary, mask, cache), residual, cache)

    def inputs(self, x: Tensor) -> tuple[Any, ...]:
        """Return attention's input, and the residual to which attention's output is added.

        Both are x here, as this block has no input norm. Subclasses return other tensors. `x` [.., width] is the
        block's input.
        """
        return x, x

    def key_value(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return keys, not yet rotated, and values, [N, key heads * width of a head] each, at N tokens in training.

        `inputs` are what the method of that name returned: attention's input and the residual. Training needs them at
        every token, and queries only at supervised ones.
        """
        return self.self_attn.k_proj(inputs[0]), self.self_attn.v_proj(inputs[0])

    def query_and_residual(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return queries [N, query heads * width of a head], not yet rotated, and the residual [N, hidden size].

        They are those of N tokens in training.
        `inputs` are what the method of that name returned: attention's input and the residual.
        """
        return self.self_attn.q_proj(inputs[0]), inputs[1]

    def add_attention(self, attended: Tensor, residual: Any, cache: Cache | None = None) -> Tensor:
        """Return the block's output: attention's output plus the residual, and the MLP with its own.

        Args:
            attended: The output of attention, projected, [.., hidden size].
            residual: What `inputs` returned beside attention's input: here a tensor [.., hidden size].
            cache: As in `add_mlp`.
        """
        return self.add_mlp(residual + attended, cache)

    def add_mlp(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """Return x + MLP(norm(x)), the second half of the block.

        Args:
            x: The residual plus attention's output: [B, T, hidden size] at T tokens of B sequences, or in training
                [N, hidden size] at N tokens of concatenated sequences.
            cache: When drafting, the block's cache: it holds the gate and up matrices joined, for one product.
        """
        norm = self.post_attention_layernorm
        mlp = self.mlp
        if cache is not None:
            gate, up = F.linear(norm(x), cache.gate_up).chunk(2, dim=-1)
            return x + mlp.down_proj(F.silu(gate).mul_(up))
        if x.dim() > 2 or not torch.is_grad_enabled():
            return x + mlp(norm(x))
        # this takes only [N, hidden size], and saves fewer tensors for the backward pass than autograd
        matrices = [mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight]
        return SwiGLUResidual.apply(x, norm.weight, norm.variance_epsilon, *matrices)


class NormedBlock(Block):
    """A Llama decoder block, used for all blocks of a head after the first."""

    def __init__(self, shape: HeadShape) -> None:
        """Make a `Block`, and the norm before its attention, which a Llama's decoder layer has."""
        super().__init__(shape)
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)

    def inputs(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return attention's input, the normed state, and the residual: the state x [.., hidden size] itself."""
        return self.input_layernorm(x), x


class TwoNormBlock(Block):
    """EAGLE-3's block: its attention reads a token's embedding and a state, normed separately and concatenated."""

    def __init__(self, shape: HeadShape, norm_before_residual: bool) -> None:
        """Make a `Block` whose attention reads two states, and a norm for each of them.

        Args:
            shape: The head's sizes.
            norm_before_residual: Whether attention's output is added to the normed state and not to the state itself.
        """
        super().__init__(shape, 2 * shape.hidden_size)
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.hidden_norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.norm_before_residual = norm_before_residual

    def read_pair(
        self,
        embedded: Tensor,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None,
        cache: Cache | None,
    ) -> Tensor:
        """Return the block's output [B, T, hidden size] at T tokens of B sequences; drafting calls it.

        `rotary` are cosines and sines at the tokens' positions, `mask` is the additive attention mask (None: causal),
        and `cache` the KV cache when drafting.

        Args:
            embedded: The embeddings of the tokens [B, T, hidden size].
            hidden: The states that the tokens are read with [B, T, hidden size], which are also the residual.
        """
        normed, residual = self.norm_hidden(hidden)
        pair = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        return self.add_mlp(residual + self.self_attn(pair, rotary, mask, cache), cache)

    def norm_hidden(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normed states that attention reads, and the residual, [.., hidden size] each.

        The residual, to which attention's output is added, is `hidden` itself, or with `norm_before_residual` the
        normed states.
        """
        normed = self.hidden_norm(hidden)
        return normed, normed if self.norm_before_residual else hidden

    # The product of a matrix with [token, state] is the sum of two products, one with the token and one with the state.
    # In training the first serves all steps of an unroll: `project_tokens` makes it once. So the inputs of the methods
    # below are (projected tokens [N, P], normed states [N, H], residual [N, H]).

    def project_tokens(self, embedded: Tensor) -> Tensor:
        """Return the tokens' part of queries, keys and values, concatenated in this order to [N, P]; training calls it.

        It is the product of the matrices' first halves with the normed embeddings of N tokens [N, hidden size]. P is
        the width of queries, keys and values together.
        """
        attention = self.self_attn
        width = embedded.shape[-1]
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        matrix = torch.cat([projection.weight[:, :width] for projection in projections])
        return F.linear(self.input_layernorm(embedded), matrix)

    def key_value(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return keys, not yet rotated, and values, [N, key heads * width of a head] each, at N tokens in training.

        Args:
            inputs: What `project_tokens` and `norm_hidden` returned: the projected tokens [N, ..], to which the states'
                part is added here, the normed states [N, hidden size] and the residual.
        """
        tokens, normed, _ = inputs
        attention = self.self_attn
        # the matrices' columns for states come after those for tokens, which are as many
        width = normed.shape[-1]
        matrix = torch.cat([attention.k_proj.weight[:, width:], attention.v_proj.weight[:, width:]])
        # the tokens' part has the queries first
        both = tokens[:, attention.q_proj.out_features :] + F.linear(normed, matrix)
        key_width = attention.k_proj.out_features
        return both[:, :key_width], both[:, key_width:]

    def query_and_residual(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return queries [N, query heads * width of a head], not yet rotated, and the residual [N, hidden size].

        Args:
            inputs: As in `key_value`: the projected tokens, whose first columns are the queries', the normed states and
                the residual, at N tokens.
        """
        tokens, normed, residual = inputs
        projection = self.self_attn.q_proj
        state_query = F.linear(normed, projection.weight[:, normed.shape[-1] :])
        return tokens[:, : projection.out_features] + state_query, residual


# types of rotary embedding whose frequencies depend on the longest position of a forward
FOLLOW_LENGTH = ("dynamic", "longrope")


class Rotary(LlamaRotaryEmbedding):
    """Makes the rotary tables of a head; it has no weights."""

    def __init__(self, shape: Any) -> None:
        """Make the frequencies from the shape's `rope_parameters`, for all elements of a head's vectors."""
        # a Llama block rotates whole vectors, even if the target rotates only a part of them
        whole = copy.copy(shape)
        whole.rope_parameters = dict(shape.rope_parameters)
        whole.rope_parameters.pop("partial_rotary_factor", None)
        super().__init__(whole)


def rotary_tables(rotary: Rotary, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rotary tables (cosines and sines) of positions, the same for a sequence in whatever batch it is.

    Args:
        rotary: The head's rotary embedding.
        like: A tensor with the dtype and the device of the tables.
        positions: [B, T], of T tokens of each of B sequences.

    Returns:
        Cosines and sines [B, T, w] each; w is the width of an attention head.
    """
    # all other types have fixed frequencies, and a single sequence has the longest position itself
    if len(positions) == 1 or rotary.rope_type not in FOLLOW_LENGTH:
        return rotary(like, positions)
    # with several sequences in one call, all would get the frequencies of the longest one, so each is done alone
    tables = [rotary(like[:1], row[None]) for row in positions]
    cosine, sine = zip(*tables, strict=True)
    return torch.cat(cosine), torch.cat(sine)


Linears = Literal["uniform", "normal"]
"""How linear layers start: as torch initialises them, uniform within +-1 / sqrt(width), or as transformers does, with
weights from N(0, 0.02) and biases of 0."""

STD = 0.02  # transformers' default `initializer_range`, which the configs of published trainers do not change


@torch.no_grad()
def draw_linears(head: nn.Module, drawn: Linears) -> None:
    """Initialise the linear layers of a new head in place: `drawn` is the recipe's key `drafter.linears`.

    "uniform" is torch's own way, within +-1 / sqrt(width), and "normal" transformers', from N(0, 0.02).
    """
    # torch has drawn uniform weights when the layers were made
    if drawn == "uniform":
        return
    for module in head.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=STD)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
