"""Plain copies of an embedding or LM head whose weight is no plain matrix, for draft heads that borrow it.

Such layers are quantised, parametrised, pruned or offloaded. Their matrix is computed by running them, so that no
format need be known: a linear layer gives it for unit vectors, and an embedding for all of its tokens.
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
TOLERANCE = 5e-2  # relative error of products; layers that also round their input to 8 bits are a few percent off


class QuantisedHead(nn.Linear):
    """A plain copy of an LM head whose weight is no plain matrix, such as a quantised one.

    Its forward calls the model's own head, so that decoding gives exactly the model's logits. The copy is used where
    gradients are needed, and after this module was moved, cast or copied.
    """

    # the model's own head, or () after a move; in a tuple, so that it is no submodule of this one
    model_head: tuple[nn.Module, ...]

    def forward(self, x: Tensor) -> Tensor:
        """Return [.., V], the logits over V tokens of states [.., D], by the model's own quantised head if possible."""
        # the plain copy serves gradients, and is all that is left after a move, a cast or a copy
        if not self.model_head or (torch.is_grad_enabled() and x.requires_grad):
            return F.linear(x, self.weight, self.bias)
        logits: Tensor = self.model_head[0](x)
        return logits

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move or cast the plain copy of the matrix, which is used alone from then on.

        torch calls this in `to`, `cuda`, `half` and the like. The model's own head stays where it is.
        """
        self.model_head = ()
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy or a pickle, without the model's own LM head.

        A copy uses its plain matrix alone.
        """
        return {**vars(self), "model_head": ()}


@torch.no_grad()
def borrowed_layers(model: Any) -> tuple[nn.Module, nn.Module]:
    """Return the embedding and LM head of a model, each with a plain matrix, which draft heads borrow.

    A layer without a plain matrix is replaced by a copy that has one, in the model's precision. A quantised model may
    unpack its weights here.
    """
    embedding = model.get_input_embeddings()
    output = model.get_output_embeddings()
    is_quantised = bool(getattr(model, "is_quantized", False))
    if is_quantised:
        # in place: changes the model
        unpack_weights(model)
        kind = "is quantised"
        has_embedding = _is_dense(embedding)
        has_output = _is_dense(output, model.config.get_text_config().hidden_size)
    else:
        kind = "holds no plain matrix"
        has_embedding = _has_matrix(embedding)
        has_output = _has_matrix(output)
    # a packed weight's shape is not that of its matrix, so the config tells the sizes of a quantised model
    if not has_embedding:
        rows = (
            model.config.get_text_config().vocab_size if is_quantised else embedding.weight.shape[0]
        )
        matrix = embedding(torch.arange(rows, device=device_of(embedding))).to(model.dtype)
        _print_copied(f"embedding {kind}", embedding, matrix)
        embedding = nn.Embedding.from_pretrained(matrix)
    if not has_output:
        # without quantisation the weight's shape tells the width, as a head may transform states to another one
        width = (
            model.config.get_text_config().hidden_size if is_quantised else output.weight.shape[1]
        )
        matrix, bias = dense_matrix(output, width, model.dtype)
        _print_copied(f"LM head {kind}", output, matrix)
        output = _with_copy(output, matrix, bias)
    return embedding, output


def _has_matrix(layer: nn.Module) -> bool:
    """Return whether a layer's weight is a parameter in memory, not computed from others and not offloaded.

    Only then can a draft head borrow it as it is.
    """
    # a parametrisation or pruning moves it out of the parameters; accelerate's hook loads an offloaded one
    weight = layer._parameters.get("weight")
    return weight is not None and not (weight.is_meta and hasattr(layer, "_hf_hook"))


def unpack_weights(model: Any) -> None:
    """Let a quantised model unpack its weights, as those in compressed-tensors format do before their first forward.

    Such a model then moves weights to the device for each layer's forward, by hooks that a second module tree over the
    weights cannot share. So the hooks are removed, and the weights loaded for good.
    """
    # any token will do: a forward makes the model unpack, and its output is not needed
    tokens = torch.ones(1, 1, dtype=torch.long, device=device_of(model.get_input_embeddings()))
    model(input_ids=tokens, use_cache=False)
    if getattr(model, "quantization_method", None) == "compressed-tensors":
        import_module("compressed_tensors.offload").remove_dispatch(model, onload_tensors=True)


def find_tensor(model: Any, name: str) -> Tensor | None:
    """Return a model's tensor by its name; None if there is no such tensor.

    The weight of a quantised linear layer is returned as a plain matrix. Heads that copy some of the target's weights
    ask for them.
    """
    owner, _, kind = name.rpartition(".")  # the module's name, and the tensor's in it
    module = dict(model.named_modules()).get(owner)
    if kind == "weight" and getattr(model, "is_quantized", False):
        width = getattr(module, "in_features", None)
        if module is not None and width is not None and not _is_dense(module, width):
            return dense_matrix(module, width, model.dtype)[0]  # without the bias
    # a state_dict may change the layout of weights in memory
    with keep_layout(model):
        tensor: Tensor | None = model.state_dict(keep_vars=True).get(name)
    if tensor is None:
        # a parametrisation or pruning computes the tensor from others, which alone are in the state_dict
        attribute = getattr(module, kind, None)
        tensor = attribute if isinstance(attribute, Tensor) else None
    return tensor


@contextmanager
def keep_layout(model: Any) -> Iterator[None]:
    """A context at whose end weights with a quantisation state have the memory layout that they had before.

    On a CPU with AVX512-BF16, bitsandbytes changes the layout of 4-bit weights at their first forward, and changes it
    back for a state_dict. It does not change their scales back, so all later products would be wrong.
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
    """Return the matrix [V, D] and bias [V] of a linear layer of any format, from its products with unit vectors.

    Args:
        linear: the layer, with V outputs.
        width: D, the number of its inputs.
        dtype: of the matrix.

    Raises:
        ValueError: if the layer's products are not those of this matrix.
    """
    device = device_of(linear)
    bias: Tensor | None = getattr(linear, "bias", None)
    # an offloaded bias is not in memory, but is the layer's output for zeros
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
    # the layer may do more than multiply by this matrix
    if not _computes_product(linear, matrix, bias):
        raise ValueError(
            f"{type(linear).__name__} is quantised, and its products are no matrix's: a head that borrows it learns "
            "nothing true. Take a checkpoint whose LM head is plain, as most are"
        )
    return matrix, bias


def _is_dense(layer: nn.Module, width: int | None = None) -> bool:
    """Return whether a layer's weight is a plain matrix, and its forward multiplies by it alone.

    A quantised layer has a packed weight or further tensors. `width` is the number of inputs of a linear layer; None
    for an embedding, whose forward is not tried.
    """
    weight: Any = getattr(layer, "weight", None)
    if type(weight) not in (Tensor, nn.Parameter) or weight.dtype not in PLAIN:
        return False
    if width is None or weight.is_meta or weight.is_mkldnn:
        return True
    # the forward may transform its input, or read further tensors
    return weight.shape[1:] == (width,) and _computes_product(
        layer,
        weight,
        getattr(layer, "bias", None),
        tolerance=1e-2,
    )


@torch.no_grad()
def _computes_product(
    linear: nn.Module,
    matrix: Tensor,
    bias: Tensor | None,
    tolerance: float = TOLERANCE,
) -> bool:
    """Return whether a linear layer multiplies as this matrix and bias do, by a trial on four random states.

    It confirms a matrix that was unpacked, and that a weight which looks plain is all that the forward uses.

    Args:
        linear: the layer.
        matrix: [V, D], of V outputs and D inputs.
        bias: [V], or None for none.
        tolerance: the relative difference of products that is allowed.
    """
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(4, matrix.shape[1], generator=generator).to(matrix.device, matrix.dtype)
    expected = F.linear(states, matrix, bias)
    got = linear(states)
    return got.shape == expected.shape and bool(
        (got - expected).norm() <= tolerance * expected.norm()
    )


def _with_copy(output: nn.Module, matrix: Tensor, bias: Tensor | None) -> QuantisedHead:
    """Return a `QuantisedHead` that runs the model's LM head `output`, with this plain copy of its matrix and bias.

    The matrix is [V, D] for V tokens and states of width D, and the bias [V].
    """
    # made on the meta device, without memory, as its parameters are replaced
    head = QuantisedHead(matrix.shape[1], matrix.shape[0], bias=bias is not None, device="meta")
    head.weight = nn.Parameter(matrix, requires_grad=False)
    if bias is not None:
        head.bias = nn.Parameter(bias, requires_grad=False)
    head.model_head = (output,)
    return head.eval()


def _print_copied(fact: str, layer: nn.Module, matrix: Tensor) -> None:
    """Print to stderr that a copy of a layer's matrix takes memory; `fact` names the layer and the reason."""
    dtype = str(matrix.dtype).removeprefix("torch.")
    size = matrix.nbytes / 1e9
    print(
        f"the target's {fact} ({type(layer).__name__}): heads borrow a copy of it in {dtype}, {size:,.2f} GB",
        file=sys.stderr,
    )
