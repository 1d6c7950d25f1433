"""Reading in half precision whose bits do not depend on what is read beside a token.

A kernel chooses the order of its sums by the number of rows, by padding, and by where a key lies in the cache. With 8
or 11 bits of mantissa another order is often another number, so that a tree would give other tokens than steps by one
token. Three measures make the order irrelevant:

- attention sums in fp64: bf16 and fp16 numbers have products of at most 22 bits, so sums of thousands of them are
  exact to far more bits than the result is rounded to;
- where a model's layers call kernels of attention by themselves, all sums of products are in fp64 (`SumsInFp64`);
- linear layers read fixed numbers of rows. On a CPU one row is read as two, because a product of a matrix and a vector
  has another kernel than one of two matrices. On other devices 64 rows are read at a time.

Whether that is enough for a model is tried, by `find_variance` of `eagle.target.bits.variance`.
"""

# B sequences, N new tokens, S cached and new keys, H heads, K key/value heads, G = H / K groups, D head width

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import AttentionInterface

HALF = (torch.bfloat16, torch.float16)
INVARIANT = "eagle_invariant"
MAX_SCORES = 2**22  # fp64 scores that are held at once: 32 MB
TILE = 64  # rows of every product on devices that are no CPU, where as many cost what one costs
# arguments that choose keys by their own indices, which no mask tells of
CHOOSING = ("indices", "block_indices", "cache")


def invariant_attention(
    module: nn.Module,
    query: Tensor,  # [B, H, N, D]
    key: Tensor,  # [B, K, S, D]
    value: Tensor,  # [B, K, S, D']
    attention_mask: Tensor | None,  # [B, 1 or H, N, S]; [B, 1, G * N, S] where groups are rows; [1, 1, 1, 1]: causal
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention summed in fp64: softmax(q k^T * scaling + mask) v."""
    chosen = [name for name in CHOOSING if options.get(name) is not None]
    if chosen:
        raise ValueError(f"attention got {', '.join(chosen)}, which choose keys beside the mask; expected none")
    sequences, heads, count, width = query.shape
    kv_heads, length = key.shape[1], key.shape[2]
    groups = heads // kv_heads
    # one product for each key/value head, whose rows are the queries of its group: [B * K, G * N, D] @ [B * K, D, S]
    rows = (query.double() * (scaling or width**-0.5)).reshape(-1, groups, count, width)
    keys = key.double().flatten(0, 1).transpose(1, 2)
    values = value.double().flatten(0, 1)
    is_causal = attention_mask is not None and attention_mask.shape[-1] == 1 and length > 1
    mask = None if attention_mask is None or is_causal else _by_groups(attention_mask, count, groups)
    bias = None if position_bias is None else position_bias.view(-1, kv_heads, groups, count, length)
    sinks = None if s_aux is None else s_aux.double().view(1, kv_heads, groups, 1, 1)
    pieces = []
    step = max(1, MAX_SCORES // (sequences * heads * length))
    for start in range(0, count, step):
        end = min(start + step, count)
        # of a causal prompt later keys are hidden from these queries
        visible = length - count + end if is_causal else length
        products = torch.bmm(rows[:, :, start:end].flatten(1, 2), keys[..., :visible])
        scores = products.view(sequences, kv_heads, groups, end - start, visible)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if bias is not None:
            scores += bias[..., start:end, :visible]
        if mask is not None:
            scores += mask[..., start:end, :]
        if is_causal and end - start > 1:
            hidden = torch.ones(end - start, visible, dtype=torch.bool, device=scores.device)
            scores.masked_fill_(hidden.triu_(visible - (end - start) + 1), float("-inf"))
        weights = _softmax(scores, sinks).view(products.shape)
        summed = torch.bmm(weights, values[:, :visible]).to(query.dtype)
        pieces.append(summed.view(sequences, heads, end - start, -1))
    output = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(INVARIANT, invariant_attention)


def _by_groups(mask: Tensor, count: int, groups: int) -> Tensor:
    """[B, 1 or K, 1 or G, N, S], an additive mask over scores [B, K, G, N, S]."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, float("-inf"))
    if mask.shape[1] > 1:  # a mask for each head
        return mask.unflatten(1, (-1, groups))
    return mask[:, :, None, :count]  # where groups are rows, all of them have the same mask


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over keys, with a sink as one key more that has no value."""
    if sinks is None:
        return scores.softmax(-1)
    highest = torch.maximum(scores.amax(-1, keepdim=True), sinks)
    weights = (scores - highest).exp_()
    return weights / (weights.sum(-1, keepdim=True) + (sinks - highest).exp())


SUMS = {
    F.scaled_dot_product_attention,
    *(torch.matmul, torch.bmm, torch.baddbmm, torch.einsum, torch.softmax, F.softmax),
    *(Tensor.matmul, Tensor.__matmul__, Tensor.bmm, Tensor.baddbmm, Tensor.softmax),
}


class SumsInFp64(TorchFunctionMode):
    """A context in which products of several matrices, attention and softmax are computed in fp64, then rounded."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch with its tensors in fp64, if it is one of `SUMS`."""
        options = dict(kwargs or {})
        if func not in SUMS or options.get("out") is not None:
            return func(*args, **options)
        tensors = [value for value in tree_leaves((args, options)) if _is_narrow(value)]
        dtype = options.pop("dtype", None) or (tensors[0].dtype if tensors else None)
        wide_args, wide_options = tree_map_only(Tensor, lambda x: x.double() if _is_narrow(x) else x, (args, options))
        output = func(*wide_args, **wide_options)
        return output if dtype is None else output.to(dtype)


def _is_narrow(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


@cache
def sums_rows_alike(dtype: torch.dtype) -> bool:
    """Whether a CPU's kernels for one row and for several sum in the same order in this dtype.

    Torch's own loops of x86 do, and there a second row costs as much as the first. oneDNN's kernels do not.
    """
    if platform.machine() not in ("x86_64", "AMD64") or dtype not in HALF:
        return False
    name = "bf16" if dtype == torch.bfloat16 else "fp16"
    supports = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)
    return supports is not None and not supports()


def in_fixed_rows(read: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """[.., V], what `read` gives for x [.., D], called with numbers of rows for which it takes the same kernel.

    On a CPU these are all but one row, if one row has a kernel of its own. Elsewhere kernels choose tiles by the number
    of rows, so it is always the same.
    """
    rows = x.reshape(-1, x.shape[-1])
    count = len(rows)
    if x.device.type == "cpu":
        if count != 1 or sums_rows_alike(x.dtype):
            return read(x)
        output = read(rows.expand(2, -1).contiguous())
    else:
        padded = F.pad(rows, (0, 0, 0, -count % TILE))
        output = torch.cat([read(tile) for tile in padded.split(TILE)])
    return output[:count].view(*x.shape[:-1], -1)


class FixedRowsLinear(nn.Linear):
    """A linear layer that is read in fixed numbers of rows."""

    def forward(self, x: Tensor) -> Tensor:
        """[.., out_features], x @ weight.T + bias."""
        return in_fixed_rows(super().forward, x)


def can_be_invariant(model: Any, attention: str | None) -> bool:
    """Whether a model reads in half precision, and by an attention function that may be replaced.

    Whether it then still reads right is tried by the reader.
    """
    has_fp64 = model.get_input_embeddings().weight.device.type != "mps"
    return model.dtype in HALF and has_fp64 and attention in ("sdpa", "eager", None)


def fix_rows(model: nn.Module) -> None:
    """Let the plain linear layers of a module tree read fixed numbers of rows, in place; their weights stay shared."""
    for module in model.modules():
        if type(module) is nn.Linear and "forward" not in vars(module) and module.weight.dtype in HALF:
            module.__class__ = FixedRowsLinear
