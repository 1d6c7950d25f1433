"""Plain copies of quantised layers that drafters read, found by what the layers do: no format is named.

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

PLAIN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ROWS = 1024  # unit vectors that are multiplied at a time
TOLERANCE = 5e-2  # of products; layers that round their input too, to 8 bits, are a few percent off


class QuantisedHead(nn.Linear):
    """The model's own quantised LM head, with a plain copy of its matrix.

    Its forward is the model's own, so that what is decoded is what the model says. Others borrow the copy; gradients go
    through it, and so does everything once it was moved, cast or copied.
    """

    own: tuple[nn.Module, ...]  # a tuple, so that it is no submodule

    def forward(self, x: Tensor) -> Tensor:
        """[.., V], logits."""
        if not self.own or (torch.is_grad_enabled() and x.requires_grad):
            return F.linear(x, self.weight, self.bias)
        logits: Tensor = self.own[0](x)
        return logits

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move or cast the plain copy."""
        self.own = ()
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        """The state of a plain copy."""
        return {**vars(self), "own": ()}


@torch.no_grad()
def borrowed_layers(model: Any) -> tuple[nn.Module, nn.Module]:
    """The embedding and LM head of a model; a quantised one gets a plain copy in the model's precision, once."""
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    if not getattr(model, "is_quantized", False):
        return embedding, output
    unpack_weights(model)
    config = model.config.get_text_config()
    if not _is_plain(embedding):
        rows = embedding(torch.arange(config.vocab_size, device=_device(embedding))).to(model.dtype)
        _say("embedding", embedding, rows)
        embedding = nn.Embedding.from_pretrained(rows)
    if not _is_plain(output, config.hidden_size):
        matrix, bias = dense_matrix(output, config.hidden_size, model.dtype)
        _say("LM head", output, matrix)
        output = _with_copy(output, matrix, bias)
    return embedding, output


def unpack_weights(model: Any) -> None:
    """Let a model unpack its weights, which one in compressed-tensors does before its first forward as a whole.

    It then moves them for each layer's forward, by ways that a second tree of modules over them cannot share: the
    weights are put back into their places.
    """
    tokens = torch.ones(1, 1, dtype=torch.long, device=_device(model.get_input_embeddings()))
    model(input_ids=tokens, use_cache=False)
    if getattr(model, "quantization_method", None) == "compressed-tensors":
        import_module("compressed_tensors.offload").remove_dispatch(model, onload_tensors=True)


def find_tensor(model: Any, name: str) -> Tensor | None:
    """A model's tensor by its name, the weight of a quantised linear as a plain matrix; None without one."""
    owner, _, kind = name.rpartition(".")
    if kind == "weight" and getattr(model, "is_quantized", False):
        module = dict(model.named_modules()).get(owner)
        width = getattr(module, "in_features", None)
        if module is not None and width is not None and not _is_plain(module, width):
            return dense_matrix(module, width, model.dtype)[0]
    with keep_layout(model):
        tensor: Tensor | None = model.state_dict(keep_vars=True).get(name)
    return tensor


@contextmanager
def keep_layout(model: Any) -> Iterator[None]:
    """Leave weights that carry a quantisation state as they lie, whatever happens within.

    On a CPU with AVX512-BF16, bitsandbytes lays 4-bit weights out for its products at their first forward, and back for
    a state_dict, yet not their scales: all later products would be wrong.
    """
    weights = [weight for weight in model.parameters() if getattr(weight, "quant_state", None) is not None]
    kept = [(weight, weight.data, weight.quant_state, vars(weight.quant_state).copy()) for weight in weights]
    try:
        yield
    finally:
        for weight, data, state, fields in kept:
            weight.data, weight.quant_state = data, state
            vars(state).clear()
            vars(state).update(fields)


@torch.no_grad()
def dense_matrix(linear: nn.Module, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The matrix [V, D] and bias [V] of a linear of any kind; ValueError if they do not give what it gives."""
    device = _device(linear)
    bias: Tensor | None = getattr(linear, "bias", None)
    parts = []
    for start in range(0, width, ROWS):
        end = min(start + ROWS, width)
        rows = linear(torch.eye(width, dtype=dtype, device=device)[start:end]).to(dtype)
        parts.append(rows if bias is None else rows - bias)
    matrix = torch.cat(parts).T.contiguous()
    bias = None if bias is None else bias.detach().to(dtype)
    if not _gives(linear, matrix, bias):
        raise ValueError(
            f"{type(linear).__name__} is quantised, and its products are no matrix's: a head that borrows it learns "
            "nothing true. Take a checkpoint whose LM head is plain, as most are"
        )
    return matrix, bias


def _is_plain(layer: nn.Module, width: int | None = None) -> bool:
    """Whether a layer's weight is a plain matrix and, of a linear with `width` inputs, all that its forward uses."""
    weight: Any = getattr(layer, "weight", None)
    if type(weight) not in (Tensor, nn.Parameter) or weight.dtype not in PLAIN:
        return False
    if width is None or weight.is_meta or weight.is_mkldnn:
        return True
    return weight.shape[1:] == (width,) and _gives(layer, weight, getattr(layer, "bias", None), 1e-2)


@torch.no_grad()
def _gives(linear: nn.Module, matrix: Tensor, bias: Tensor | None, tolerance: float = TOLERANCE) -> bool:
    """Whether a linear's products of a few states are those of this matrix."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(4, matrix.shape[1], generator=generator).to(matrix.device, matrix.dtype)
    expected = F.linear(states, matrix, bias)
    got = linear(states)
    return got.shape == expected.shape and bool((got - expected).norm() <= tolerance * expected.norm())


def _with_copy(output: nn.Module, matrix: Tensor, bias: Tensor | None) -> QuantisedHead:
    head = QuantisedHead(matrix.shape[1], matrix.shape[0], bias=bias is not None, device="meta")
    head.weight = nn.Parameter(matrix, requires_grad=False)
    if bias is not None:
        head.bias = nn.Parameter(bias, requires_grad=False)
    head.own = (output,)
    return head.eval()


def _device(layer: nn.Module) -> torch.device:
    """The device of a layer's weights, under whatever names they go."""
    tensors = [*layer.parameters(), *layer.buffers()]
    return tensors[0].device if tensors else torch.device("cpu")


def _say(name: str, layer: nn.Module, matrix: Tensor) -> None:
    """Tell that a copy is held."""
    dtype = str(matrix.dtype).removeprefix("torch.")
    size = matrix.nbytes / 1e9
    print(
        f"the target's {name} is quantised ({type(layer).__name__}): heads borrow a plain copy of it in {dtype}, "
        f"{size:,.2f} GB",
        file=sys.stderr,
    )
