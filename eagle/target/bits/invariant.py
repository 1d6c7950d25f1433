"""Reading in half precision whose bits do not depend on what is read with a token.

A kernel chooses the order of its sums by the number of rows, by padding, and by where a key lies in the cache. With 8
or 11 bits of mantissa another order is often another number, so that a tree would give other tokens than steps by one
token. Three measures make the order irrelevant:

- attention sums in fp64: bf16 and fp16 numbers have products of at most 22 bits, so sums of thousands of them are
  exact to far more bits than the result is rounded to. On a CPU a fused kernel reads the keys well before a query, in
  blocks at fixed places (`eagle.target.bits.blocks`);
- where a model's layers call kernels of attention by themselves, all sums of products are in fp64 (`SumsInFp64`);
- linear layers read fixed numbers of rows. On a CPU one row is read as two, because a product of a matrix and a vector
  has another kernel than one of two matrices, and at most so many at a time as have the same sums
  (`eagle.target.bits.row_limits`). On other devices 64 rows are read at a time.

Whether that is enough for a model is tried, by `find_variance` of `eagle.target.bits.variance`.
"""

# B sequences, N new tokens, S cached and new keys, H heads, K key/value heads, G = H / K groups, D head width

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import AttentionInterface

from eagle.target.bits.blocks import BLOCKS, QueryChunk, read_blocks
from eagle.target.bits.row_limits import find_row_limit
from eagle.target.weights.packed import PackedLinear

HALF = (torch.bfloat16, torch.float16)
INVARIANT = "eagle_invariant"
MAX_SCORES = 2**22  # fp64 scores in memory at once: 32 MB
TILE = 64  # rows of every product on devices other than a CPU, where they cost as much as one row
# arguments of attention functions that choose keys by indices, which the mask does not contain
CHOOSING = ("indices", "block_indices", "cache")


def invariant_attention(
    module: nn.Module,
    query: Tensor,  # [B, H, N, D]
    key: Tensor,  # [B, K, S, D]
    value: Tensor,  # [B, K, S, D']
    # [B, 1 or H, N, S]; [B, 1, G * N, S] where groups are rows; [1, 1, 1, 1]: causal
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention, softmax(q k^T * scaling + mask) v, whose bits do not depend on the order of sums.

    Sums are in fp64, or on a CPU for earlier keys in blocks of fixed size, which cost less. There are B sequences, N
    new tokens, S cached and new keys, H query heads, K key/value heads, and G = H / K query heads for each of these.

    Returns:
        The output [B, N, H, D'], and None for attention weights.
    """
    # indices choose keys that the mask does not hide
    chosen = [name for name in CHOOSING if options.get(name) is not None]
    if chosen:
        raise ValueError(
            f"attention got {', '.join(chosen)}, which choose keys beside the mask; expected none"
        )
    sequences, heads, count, width = query.shape
    _, key_heads, length, _ = key.shape
    groups = heads // key_heads
    # `Masks` passes a mask of one column for one new token or a causal prompt; a single key needs none
    is_causal = attention_mask is not None and attention_mask.shape[-1] == 1 and length > 1
    # added to the scores [B, K, G, N, S]: mask and bias
    terms = []
    if attention_mask is not None and not is_causal:
        terms.append(_expand_mask(attention_mask, count, groups))
    if position_bias is not None:
        terms.append(position_bias.view(-1, key_heads, groups, count, length))
    call = _AttentionCall(
        query=query,
        key=key,
        value=value,
        terms=terms,
        is_causal=is_causal,
        scale=scaling or width**-0.5,
        softcap=softcap,
        sinks=s_aux,
    )
    chunks = None  # of queries, which are read one chunk after another
    # the kernel that reads blocks takes neither a cap nor a bias
    if softcap is None and position_bias is None and attention_mask is not None:
        chunks = _block_chunks(query, key, value, attention_mask)
    # without blocks all scores are in fp64, and chunks limit their memory
    if chunks is None:
        at_once = max(1, MAX_SCORES // (sequences * heads * length))
        chunks = _chunk_queries(sequences, count, at_once)
    output = query.new_empty(sequences, count, heads, value.shape[-1])
    for chunk in chunks:
        output[chunk.sequences, chunk.queries] = call.read(chunk)
    return output, None


AttentionInterface.register(INVARIANT, invariant_attention)


class _AttentionCall(NamedTuple):
    """The arguments of one layer's attention, which is computed chunk by chunk of its queries.

    There are B sequences, N new tokens, S cached and new keys, H query heads, and K key/value heads, each of G = H / K
    query heads.
    """

    query: Tensor  # [B, H, N, D]
    key: Tensor  # [B, K, S, D]
    value: Tensor  # [B, K, S, D']
    terms: list[Tensor]  # added to scores: [1 or B, 1 or K, 1 or G, N, S]
    is_causal: bool  # whether keys after a query are hidden from it, beside the terms
    scale: float  # of the products
    softcap: float | None  # c in score = c tanh(score / c); None for none
    # [H], a learned score of each head that takes a share of the softmax and has no value; None for none
    sinks: Tensor | None

    def read(self, chunk: QueryChunk) -> Tensor:
        """Return [B, N, H, D'], the attention output of a chunk's N queries of B sequences, for H heads.

        Keys from the chunk's `start` on are summed in fp64, and those before `stop` also in blocks, by a fused kernel.
        Where both read a key, one of them is hidden from each query.
        """
        b = chunk.sequences  # a slice, as `n`
        n = chunk.queries
        size = n.stop - n.start
        key_heads, end = self.key.shape[1:3]  # K, and the number of keys
        # keys after the last query of the chunk are hidden from all of its queries
        if self.is_causal:
            end += n.stop - self.query.shape[2]
        keys = slice(chunk.start, end)
        # the queries of a group are rows of one product: [B * K, G * N, D]
        rows = self.query[b, :, n].unflatten(1, (key_heads, -1)).flatten(2, 3).flatten(0, 1)
        scores = self._score(rows, self.key[b, :, keys].flatten(0, 1))  # [B * K, G * N, T]
        # a view [B, K, G, N, T] of the scores, to which terms are added in place
        by_group = scores.view(-1, key_heads, rows.shape[1] // size, size, scores.shape[-1])
        for term in self.terms:
            # a term of one sequence serves all
            sequences = b if len(term) > 1 else slice(None)
            by_group += term[sequences, ..., n, keys]
        if self.is_causal and size > 1:
            by_group.masked_fill_(_future_mask(by_group), float("-inf"))
        blocks = None
        # with 0 no query reads a block
        if chunk.stop:
            blocks = read_blocks(rows, self.key[b], self.value[b], chunk.stop, scale=self.scale)
            # changes `scores`, of which `by_group` is a view, and the blocks' logarithms in place
            chunk.hide_duplicates(by_group, blocks[1].view(*by_group.shape[:-1], -1))
        attended = _attend(
            scores,
            self.value[b, :, keys].flatten(0, 1),
            blocks,
            self._sinks(by_group),
        )
        # [B, K, G, N, D'] to [B, H, N, D'] to [B, N, H, D']
        return attended.view(*by_group.shape[:-1], -1).flatten(1, 2).transpose(1, 2)

    def _sinks(self, scores: Tensor) -> Tensor | None:
        """Return [B * K, G * N, 1], the attention sink of each query's scores; None without sinks.

        `scores` are [B, K, G, N, T], of N queries of G heads for each of K key/value heads, and T keys.

        A sink is a learned score of each head that takes a share of the softmax and has no value.
        """
        if self.sinks is None:
            return None
        by_head = self.sinks.view(1, *scores.shape[1:3], 1, 1)
        return by_head.expand(*scores.shape[:4], 1).flatten(0, 1).flatten(1, 2)

    def _score(self, rows: Tensor, keys: Tensor) -> Tensor:
        """Return scores [B * K, R, T] in fp64: scaled products of queries and keys, with the softcap if there is one.

        fp64 makes the order of the sums irrelevant.

        Args:
            rows: [B * K, R, D], R queries for each of K key/value heads of B sequences.
            keys: [B * K, T, D], of T tokens.
        """
        # with beta 0 the first argument is not read; the product is scaled while it is written
        unused = rows.new_empty(1, dtype=torch.float64)
        products = torch.baddbmm(
            unused,
            rows.double(),
            keys.double().transpose(1, 2),
            beta=0,
            alpha=self.scale,
        )
        if self.softcap is None:
            return products
        return self.softcap * torch.tanh(products / self.softcap)


def _block_chunks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor
) -> list[QueryChunk] | None:
    """Return a layer's queries in chunks that read earlier keys in blocks; None if the layer cannot read any.

    A fused kernel reads a block of fixed size with the same bits, whatever is read together.

    Args:
        query: [B, H, N, D], of N new tokens of B sequences, for H heads of width D.
        key: [B, K, S, D], of S cached and new tokens, for K key/value heads.
        value: [B, K, S, D'].
        mask: bool or additive, [B, 1 or H, N, S] or with the queries of a group as rows; [1, 1, 1, 1]: causal.
    """
    # the context of the running forward has set it; a mask for each head may hide other keys from each
    blocks = BLOCKS.get()
    if blocks is None or mask.shape[1] > 1 or not blocks.fit(query, key, value):
        return None
    return blocks.cut(query.shape[1] // key.shape[1], mask)


def _chunk_queries(sequences: int, count: int, at_once: int) -> list[QueryChunk]:
    """Return chunks of at most `at_once` of `count` queries, in all sequences, that read all keys in fp64.

    Chunks limit the memory of the scores. `sequences` is the number of sequences.
    """
    chunks = []
    for start in range(0, count, at_once):
        queries = slice(start, min(start + at_once, count))
        chunks.append(
            QueryChunk(
                slice(0, sequences), queries, start=0, stop=0, in_blocks=None, is_unread=None
            )
        )
    return chunks


def _expand_mask(mask: Tensor, count: int, groups: int) -> Tensor:
    """Return a mask as an additive one that fits scores [B, K, G, N, S].

    There are B sequences, N queries, S keys, and H query heads, of which G share each of K key/value heads.

    Args:
        mask: bool or additive, [B, 1 or H, N, S], or [B, 1, G * N, S] where the queries of a group are rows.
        count: N.
        groups: G.

    Returns:
        [B, 1 or K, 1 or G, N, S].
    """
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, float("-inf"))
    # a mask for each head
    if mask.shape[1] > 1:
        return mask.unflatten(1, (-1, groups))
    # where the queries of a group are rows, the mask repeats for each of its heads
    return mask[:, :, None, :count]


def _future_mask(scores: Tensor) -> Tensor:
    """Return [N, T], whether each of T keys comes after each of N queries; the last key is the last query's own.

    `scores` are [.., N, T]. It is the causal mask of a prompt, whose queries are the last N of T tokens.
    """
    count, keys = scores.shape[-2:]
    return torch.ones(count, keys, dtype=torch.bool, device=scores.device).triu_(keys - count + 1)


def _attend(
    scores: Tensor,
    values: Tensor,
    blocks: tuple[Tensor, Tensor] | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return [X, R, D'] in fp64, softmax(scores) @ values over the last keys together with blocks and sinks.

    Args:
        scores: [X, R, T], of the keys that are read in fp64; X is B * K, and R are its queries.
        values: [X, T, D'], of the same keys.
        blocks: outputs [X, R, J, D'] of J blocks of earlier keys, and the logarithms [X, R, J] of their sums of
            exp(score); None for none.
        sinks: [X, R, 1], scores that take a share of the softmax and have no value; None for none.
    """
    if blocks is None and sinks is None:
        return scores.softmax(-1) @ values.double()
    # Each group of keys, the last ones and every block, has an output and the logarithm of its sum of exp(score).
    # The softmax of these logarithms is the share of each group in the output. The highest score is subtracted first,
    # so that exp does not overflow.
    highest = scores.amax(-1, keepdim=True)
    weights = (scores - highest).exp_()
    total = weights.sum(-1, keepdim=True)
    logs = [highest + total.log()]
    if sinks is not None:
        logs.append(sinks.double())
    if blocks is not None:
        logs.append(blocks[1].double())
    shares = torch.cat(logs, -1).softmax(-1)  # of the last keys, the sink and each block
    output = (weights @ values.double()) * (shares[..., :1] / total)
    if blocks is not None:
        outputs = blocks[0].double()  # [X, R, J, D]
        output += (shares[..., None, -outputs.shape[2] :] @ outputs).squeeze(-2)
    return output


# functions of torch that sum products
SUMS = {
    F.scaled_dot_product_attention,
    *(torch.matmul, torch.bmm, torch.baddbmm, torch.einsum, torch.softmax, F.softmax),
    *(Tensor.matmul, Tensor.__matmul__, Tensor.bmm, Tensor.baddbmm, Tensor.softmax),
}


class SumsInFp64(TorchFunctionMode):
    """A context in which products of several matrices, attention and softmax are computed in fp64, then rounded."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, with its tensors in fp64 and its output rounded back if it is one of `SUMS`.

        torch calls it for each of its functions while the context is entered.
        """
        options = dict(kwargs or {})
        # an output in a given tensor has that tensor's dtype
        if func not in SUMS or options.get("out") is not None:
            return func(*args, **options)
        narrow = [value for value in tree_leaves((args, options)) if _is_narrow(value)]
        # the output's dtype: the one that was asked for, or that of the tensors
        dtype = options.pop("dtype", None)
        if dtype is None and narrow:
            dtype = narrow[0].dtype
        wide_args, wide_options = tree_map_only(Tensor, _widen, (args, options))
        output = func(*wide_args, **wide_options)
        return output if dtype is None else output.to(dtype)


def _is_narrow(value: Any) -> bool:
    """Return whether a value is a floating-point tensor of less than fp64, such as bf16, fp16 or fp32."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _widen(tensor: Tensor) -> Tensor:
    """Return a floating-point tensor in fp64; others, as masks and indices, unchanged.

    It makes the arguments of a function that is to be computed in fp64.
    """
    return tensor.double() if _is_narrow(tensor) else tensor


@cache
def sums_rows_alike(dtype: torch.dtype) -> bool:
    """Return whether a CPU's matrix products of one row (token) and of several sum in the same order in this dtype.

    Torch's own loops on x86 do, so one row need not be read as two there. oneDNN's kernels do not, and are used where
    the processor multiplies in this dtype. One row is a product of a vector, for which a library may have another
    kernel.
    """
    if platform.machine() not in ("x86_64", "AMD64") or dtype not in HALF:
        return False
    name = "bf16" if dtype == torch.bfloat16 else "fp16"
    supports = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)
    return supports is not None and not supports()


def in_fixed_rows(read: Callable[[Tensor], Tensor], x: Tensor, most: int | None = None) -> Tensor:
    """Return [.., V], the product `read` of x [.., D], with the same bits for a token [D] whatever is read with it.

    A kernel may sum in another order for another number of rows, so `read` is called only with numbers of rows that
    give the same order. On a CPU one row is read as two, and more than `most` in pieces. On other devices TILE rows are
    read at a time.

    Args:
        read: multiplies rows [rows, D] with a matrix, and returns [rows, V].
        x: [.., D].
        most: the most rows of one call on a CPU, as `limit_rows` returns it; None: any number.
    """
    rows = x.reshape(-1, x.shape[-1])
    count = len(rows)
    if x.device.type == "cpu":
        # each piece is read without a limit, as it is no larger
        if most is not None and count > most:
            output = torch.cat([in_fixed_rows(read, tile) for tile in rows.split(most)])
        elif count != 1 or sums_rows_alike(x.dtype):
            return read(x)
        else:
            output = read(rows.expand(2, -1).contiguous())
    else:
        # zeros up to a multiple of TILE rows
        padded = F.pad(rows, (0, 0, 0, -count % TILE))
        output = torch.cat([read(tile) for tile in padded.split(TILE)])
    # without the rows that were added
    return output[:count].view(*x.shape[:-1], -1)


class FixedRowsLinear(nn.Linear):
    """A linear layer that is read in fixed numbers of rows, so that a row's bits do not depend on the others."""

    most_rows: int | None = None  # of one product on a CPU; None for any number

    def forward(self, x: Tensor) -> Tensor:
        """Return [.., out_features], x @ weight.T + bias.

        A row's bits do not depend on the other rows: the product is computed in fixed numbers of rows.
        """
        return in_fixed_rows(super().forward, x, self.most_rows)


class FixedRowsPackedLinear(PackedLinear):
    """A packed linear layer that is read in fixed numbers of rows, so that a row's bits do not depend on the others."""

    most_rows: int | None = None  # of one product on a CPU; None for any number

    def forward(self, x: Tensor) -> Tensor:
        """Return [.., out_features], x @ weight.T + bias.

        A row's bits do not depend on the other rows: the product is computed in fixed numbers of rows.
        """
        return in_fixed_rows(super().forward, x, self.most_rows)


def can_be_invariant(model: Any, attention: str | None) -> bool:
    """Return whether a model's bits may be made independent of what is read together; a trial must confirm it.

    It must be in half precision, on a device with fp64, and attend by a function that may be replaced. In fp32 rounding
    is too small to matter.

    Args:
        model: the model.
        attention: the name of the function, as its config holds it; None: unknown.
    """
    # Apple's GPUs have no fp64
    has_fp64 = model.get_input_embeddings().weight.device.type != "mps"
    return model.dtype in HALF and has_fp64 and attention in ("sdpa", "eager", None)


FIXED: dict[Any, Any] = {nn.Linear: FixedRowsLinear, PackedLinear: FixedRowsPackedLinear}


def fix_rows(model: nn.Module) -> None:
    """Let a module tree's linear layers compute a token's bits alike, however many tokens (rows) are read with it.

    A kernel may sum in another order for another number of rows. The layers' classes are changed in place to ones that
    use only numbers with the same order. The weights stay shared with other module trees.
    """
    linears = []
    for module in model.modules():
        # a layer whose forward was replaced, as by accelerate, is left unchanged
        if type(module) in FIXED and "forward" not in vars(module) and module.weight.dtype in HALF:
            linears.append(module)
    limits = [limit_rows(linear, type(linear).forward.__get__(linear)) for linear in linears]
    # a layer's trial may miss that a few sums are split, so all layers get the lowest limit
    most = min((limit for limit in limits if limit is not None), default=None)
    for linear in linears:
        linear.__class__ = FIXED[type(linear)]
        vars(linear)["most_rows"] = most


def limit_rows(linear: Any, read: Callable[[Tensor], Tensor]) -> int | None:
    """Return how many rows (tokens) a linear layer may read at once without other bits; None for any number.

    Args:
        linear: the layer, with a weight [V, D] for rows of width D.
        read: multiplies rows [rows, D] with the weight, and returns [rows, V].
    """
    weight = linear.weight
    # on other devices the number of rows is fixed, and torch's own loops sum all numbers of rows alike
    if weight.device.type != "cpu" or weight.dtype not in HALF or sums_rows_alike(weight.dtype):
        return None
    # layers with the same kernel need one trial
    key = (type(linear), weight.is_mkldnn, tuple(weight.shape), weight.dtype)
    return find_row_limit(key, read, weight.shape[-1], weight.dtype)
