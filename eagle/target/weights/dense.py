"""Plain copies of layers that drafters read and that hold no plain matrix, found by what they do: no format is named.

Such are quantised, parametrised, pruned and offloaded ones.

A linear's matrix is what it makes of unit vectors, and an embedding's is its rows.
"""

# V vocabulary, D width

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle.target.structure import device_of

PLAIN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ROWS = 1024  # unit vectors that are multiplied at a time
TOLERANCE = 5e-2  # of products; layers that round their input too, to 8 bits, are a few percent off


class QuantisedHead(nn.Linear):
    """The model's LM head that holds no plain matrix, as a quantised one, with a plain copy of its matrix.

    Its forward is the model's own, so that what is decoded is what the model says. Others borrow the copy; gradients go
    through it, and so does everything once it was moved, cast or copied.
    """

    stock: tuple[nn.Module, ...]  # a tuple, so that it is no submodule

    def forward(self, x: Tensor) -> Tensor:
        """Return [.., V], logits."""
        if not self.stock or (torch.is_grad_enabled() and x.requires_grad):
            return F.linear(x, self.weight, self.bias)
        logits: Tensor = self.stock[0](x)
        return logits

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move or cast the plain copy."""
        self.stock = ()
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a plain copy."""
        return {**vars(self), "stock": ()}


@torch.no_grad()
def borrowed_layers(model: Any) -> tuple[nn.Module, nn.Module]:
    """Return the embedding and LM head of a model.

    One without a plain matrix gets a copy in the model's precision, once.
    """
    embedding = model.get_input_embeddings()
    output = model.get_output_embeddings()
    is_quantised = bool(getattr(model, "is_quantized", False))
    if is_quantised:
        unpack_weights(model)
        kind = "is quantised"
        has_embedding = _is_dense(embedding)
        has_output = _is_dense(output, model.config.get_text_config().hidden_size)
    else:
        kind = "holds no plain matrix"
        has_embedding = _has_matrix(embedding)
        has_output = _has_matrix(output)
    # quantised weights may have shapes of their own, so that the config tells the sizes
    if not has_embedding:
        rows = (
            model.config.get_text_config().vocab_size if is_quantised else embedding.weight.shape[0]
        )
        matrix = embedding(torch.arange(rows, device=device_of(embedding))).to(model.dtype)
        _print_copied(f"embedding {kind}", embedding, matrix)
        embedding = nn.Embedding.from_pretrained(matrix)
    if not has_output:
        # the matrix of a head may be of another width than the states are
        width = (
            model.config.get_text_config().hidden_size if is_quantised else output.weight.shape[1]
        )
        matrix, bias = dense_matrix(output, width, model.dtype)
        _print_copied(f"LM head {kind}", output, matrix)
        output = _with_copy(output, matrix, bias)
    return embedding, output


def _has_matrix(layer: nn.Module) -> bool:
    """Return whether a layer holds its weight, rather than makes it of others or reads it from elsewhere."""
    weight = layer._parameters.get("weight")
    return weight is not None and not (weight.is_meta and hasattr(layer, "_hf_hook"))


def unpack_weights(model: Any) -> None:
    """Let a model unpack its weights, which one in compressed-tensors does before its first forward as a whole.

    It then moves them for each layer's forward, by ways that a second tree of modules over them cannot share: the
    weights are put back into their places.
    """
    tokens = torch.ones(1, 1, dtype=torch.long, device=device_of(model.get_input_embeddings()))
    model(input_ids=tokens, use_cache=False)
    if getattr(model, "quantization_method", None) == "compressed-tensors":
        import_module("compressed_tensors.offload").remove_dispatch(model, onload_tensors=True)


def find_tensor(model: Any, name: str) -> Tensor | None:
    """Return a model's tensor by its name, the weight of a quantised linear as a plain matrix; None without one."""
    owner, _, kind = name.rpartition(".")
    module = dict(model.named_modules()).get(owner)
    if kind == "weight" and getattr(model, "is_quantized", False):
        width = getattr(module, "in_features", None)
        if module is not None and width is not None and not _is_dense(module, width):
            return dense_matrix(module, width, model.dtype)[0]
    with keep_layout(model):
        tensor: Tensor | None = model.state_dict(keep_vars=True).get(name)
    if tensor is None:
        # made of other tensors, by a parametrisation or by pruning
        attribute = getattr(module, kind, None)
        tensor = attribute if isinstance(attribute, Tensor) else None
    return tensor


@contextmanager
def keep_layout(model: Any) -> Iterator[None]:
    """Leave weights that carry a quantisation state as they lie, whatever happens within.

    On a CPU with AVX512-BF16, bitsandbytes lays 4-bit weights out for its products at their first forward, and back for
    a state_dict, yet not their scales: all later products would be wrong.
    """
    saved = []
    for weight in model.parameters():
        state = getattr(weight, "quant_state", None)
        if state is not None:
            saved.append((weight, weight.data, state, vars(state).copy()))
    try:
        yield
    finally:
        for weight, data, state, fields in saved:
            weight.data = data
            weight.quant_state = state
            vars(state).clear()
            vars(state).update(fields)


@torch.no_grad()
def dense_matrix(linear: nn.Module, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return the matrix [V, D] and bias [V] of a linear of any kind.

    Raises:
        ValueError: if they do not give what it gives.
    """
    device = device_of(linear)
    bias: Tensor | None = getattr(linear, "bias", None)
    # an offloaded bias is elsewhere, as the matrix
    if bias is not None and bias.is_meta:
        bias = linear(torch.zeros(width, dtype=dtype, device=device))
    columns = []
    # column i of W is W e_i, and the linear gives W e_i + b
    for units in torch.eye(width, dtype=dtype, device=device).split(ROWS):
        products = linear(units).to(dtype)
        columns.append(products if bias is None else products - bias)
    matrix = torch.cat(columns).T.contiguous()
    if bias is not None:
        bias = bias.detach().to(dtype)
    if not _gives(linear, matrix, bias):
        raise ValueError(
            f"{type(linear).__name__} is quantised, and its products are no matrix's: a head that borrows it learns "
            "nothing true. Take a checkpoint whose LM head is plain, as most are"
        )
    return matrix, bias


def _is_dense(layer: nn.Module, width: int | None = None) -> bool:
    """Return whether a layer's weight is a plain matrix and all that its forward uses, if it has `width` inputs."""
    weight: Any = getattr(layer, "weight", None)
    if type(weight) not in (Tensor, nn.Parameter) or weight.dtype not in PLAIN:
        return False
    if width is None or weight.is_meta or weight.is_mkldnn:
        return True
    return weight.shape[1:] == (width,) and _gives(
        layer,
        weight,
        getattr(layer, "bias", None),
        tolerance=1e-2,
    )


@torch.no_grad()
def _gives(
    linear: nn.Module,
    matrix: Tensor,
    bias: Tensor | None,
    tolerance: float = TOLERANCE,
) -> bool:
    """Return whether a linear's products of a few states are those of this matrix."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(4, matrix.shape[1], generator=generator).to(matrix.device, matrix.dtype)
    expected = F.linear(states, matrix, bias)
    got = linear(states)
    return got.shape == expected.shape and bool(
        (got - expected).norm() <= tolerance * expected.norm()
    )


def _with_copy(output: nn.Module, matrix: Tensor, bias: Tensor | None) -> QuantisedHead:
    head = QuantisedHead(matrix.shape[1], matrix.shape[0], bias=bias is not None, device="meta")
    head.weight = nn.Parameter(matrix, requires_grad=False)
    if bias is not None:
        head.bias = nn.Parameter(bias, requires_grad=False)
    head.stock = (output,)
    return head.eval()


def _print_copied(fact: str, layer: nn.Module, matrix: Tensor) -> None:
    """Tell that a copy is held."""
    dtype = str(matrix.dtype).removeprefix("torch.")
    size = matrix.nbytes / 1e9
    print(
        f"the target's {fact} ({type(layer).__name__}): heads borrow a copy of it in {dtype}, {size:,.2f} GB",
        file=sys.stderr,
    )
