"""Linear layers on a CPU with packed weights: in oneDNN's own layout, in which products of few rows are faster."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle.core.drafter import TargetHead
from eagle.target.borrowed import is_close
from eagle.target.structure import FAILURES, base_of

DTYPES = (torch.float32, torch.bfloat16)
# weights of the smallest matrix to pack: products of smaller ones take less time than calling oneDNN
SMALLEST = 2**15


class PackedLinear(nn.Linear):
    """A linear layer whose only weight is packed. Once it is replaced, moved, cast or copied, the weight is plain.

    A packed weight has a shape and a dtype. `to_dense()` copies it; torch refuses all other reads and writes.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return [.., out_features], x @ weight.T + bias; the weight is unpacked where oneDNN does not take x.

        Packed is oneDNN's own layout of a matrix, in which a CPU multiplies few rows faster.
        """
        weight = self.weight
        # after `unpack` it is plain
        if not weight.is_mkldnn:
            return F.linear(x, weight, self.bias)
        if not can_multiply(x, weight):
            return F.linear(x, weight.to_dense(), self.bias)
        return multiply(x, weight, self.bias)

    def unpack(self) -> None:
        """Replace the packed weight (in oneDNN's layout) by a plain one, also where other module trees share it."""
        if self.weight.is_mkldnn:
            self.weight = nn.Parameter(self.weight.to_dense(), requires_grad=False)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Unpack the weight, then move or cast it, as torch cannot do that with one in oneDNN's layout.

        torch calls this in `to`, `half` and the like.
        """
        self.unpack()
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save a plain copy of the weight; with `keep_vars` the weight itself, in oneDNN's layout or not."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars:
            destination[f"{prefix}weight"] = to_plain(destination[f"{prefix}weight"])

    def _load_from_state_dict(self, *args: Any) -> None:
        """Turn the weight back into torch's own layout, and load into it; torch calls this in `load_state_dict`."""
        self.unpack()
        super()._load_from_state_dict(*args)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy or a pickle, with a weight in torch's own layout."""
        weight = nn.Parameter(to_plain(self.weight), requires_grad=False)
        return {**vars(self), "_parameters": {**self._parameters, "weight": weight}}


class PackedHead(nn.Linear):
    """An LM head with a plain weight, which draft heads borrow or an embedding is tied to, and a packed copy of it.

    The copy is made again when the weight was written to or replaced.
    """

    # the copy under "weight" and the plain weight's mark under "mark"; {}: not packed yet, None: packing is off;
    # module trees that share weights share it
    packed: dict[str, Any] | None

    def forward(self, x: Tensor) -> Tensor:
        """Return [.., out_features], x @ weight.T + bias, by the packed copy of the weight where that is faster.

        Packed is oneDNN's own layout of a matrix, in which a CPU multiplies few rows faster.
        """
        weight = self.weight
        # packing is off
        if self.packed is None:
            return F.linear(x, weight, self.bias)
        # one row in fp32 is faster over plain weights
        is_slower = weight.dtype == torch.float32 and _is_one_row(x)
        if is_slower or not can_pack(self, smallest=0) or not can_multiply(x, weight):
            return F.linear(x, weight, self.bias)
        # pack again if the weight was replaced or written to in place
        mark = (weight.data_ptr(), weight._version)
        if self.packed.get("mark") != mark:
            self.packed.update(mark=mark, weight=pack(weight))
        return multiply(x, self.packed["weight"], self.bias)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy or a pickle, without the copy of the weight in oneDNN's layout."""
        return {**vars(self), "packed": None}


def pack(weight: Tensor) -> Tensor:
    """Return a copy of a weight [V, D] in oneDNN's own layout, in which a CPU multiplies few rows faster."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
    return packed


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return [.., V], x [.., D] @ weight.T + bias, for a weight [V, D] in oneDNN's layout and a bias [V]."""
    # In bf16 one row is read as two, which costs as much as one. Alone it would take another kernel and get other bits.
    is_paired = weight.dtype == torch.bfloat16 and _is_one_row(x)
    rows = x
    if is_paired:
        rows = x.reshape(1, -1).expand(2, -1).contiguous()
    # "none" is the function applied to the product, without arguments or a variant
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(rows, weight, bias, "none", [], "")
    return product[:1].view(*x.shape[:-1], -1) if is_paired else product


def _is_one_row(x: Tensor) -> bool:
    """Return whether a tensor [.., D] holds a single row [D], such as the state of one token."""
    return x.numel() == x.shape[-1]


def can_multiply(x: Tensor, weight: Tensor) -> bool:
    """Return whether oneDNN's product takes this input: without gradients or autocast, and in the weight's dtype."""
    is_learning = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return x.dtype == weight.dtype and not is_learning and not torch.is_autocast_enabled("cpu")


def to_plain(weight: Tensor) -> Tensor:
    """Return a weight itself, or a copy in torch's own layout if it is in oneDNN's ("packed")."""
    return weight.to_dense() if weight.is_mkldnn else weight


def can_pack(module: nn.Module, smallest: int = SMALLEST) -> bool:
    """Return whether a module is a linear layer whose weight can be packed, that is stored in oneDNN's layout.

    It must be a plain one on the CPU, in fp32 or bf16, with at least `smallest` weights.
    """
    # a forward in the instance was put there by accelerate or a user, and would be lost
    if type(module) not in (nn.Linear, PackedHead) or "forward" in vars(module):
        return False
    weight: Any = module.weight
    # quantised weights are of other classes, but claim the dtype of their products
    if type(weight) is not nn.Parameter:
        return False
    is_plain = (
        weight.device.type == "cpu" and weight.layout == torch.strided and weight.dtype in DTYPES
    )
    return is_plain and not weight.is_inference() and weight.numel() >= smallest


def has_kernels(dtype: torch.dtype) -> bool:
    """Return whether this torch can multiply by weights in oneDNN's layout, of this dtype on this CPU, by trying."""
    if not torch.backends.mkldnn.is_available() or dtype not in DTYPES:
        return False
    try:
        # products of ones are exact in any order of sums, so that both ways must be equal
        matrix = torch.ones(16, 16, dtype=dtype)
        return torch.equal(multiply(matrix, pack(matrix), None), matrix @ matrix)
    except (AttributeError, *FAILURES):
        return False


@torch.no_grad()
def pack_model(model: Any, smallest: int = SMALLEST) -> int:
    """Pack the weights of a model's linear layers in place, and give its LM head a packed copy.

    A forward before and after must give the same logits; else all weights are made plain again.

    Returns:
        The number of packed layers; 0 if all weights are plain.
    """
    head = model.get_output_embeddings()
    is_on_cpu = model.get_input_embeddings().weight.device.type == "cpu"
    if head is None or not is_on_cpu or not has_kernels(model.dtype):
        return 0
    # arbitrary tokens, read before and after packing
    tokens = torch.arange(1, 5)[None] % head.weight.shape[0]
    expected = model(input_ids=tokens, use_cache=False).logits
    uses = Counter[int]()  # by the id of a weight, the modules that hold it
    for module in model.modules():
        uses.update(map(id, module._parameters.values()))
    # the linear layers below the LM head. A weight that several modules use stays plain, as others than linear layers
    # may read it
    for linear in list(base_of(model).modules()):
        if can_pack(linear, smallest) and uses[id(linear.weight)] == 1:
            linear.__class__ = PackedLinear
            linear.weight = nn.Parameter(pack(linear.weight), requires_grad=False)
    pack_head(head, smallest)
    try:
        if is_close(model(input_ids=tokens, use_cache=False).logits, expected):
            return count_packed(model)
    # a model that reads a weight otherwise than through the layer's forward fails
    except FAILURES:
        pass
    unpack_model(model)
    return 0


def pack_head(head: Any, smallest: int = SMALLEST) -> Any:
    """Give an LM head a second copy of its weight in oneDNN's layout, in place, if it can have one; return it."""
    if can_pack(head, smallest) and has_kernels(head.weight.dtype):
        head.__class__ = PackedHead
        head.packed = {}  # filled by its first forward
    return head


def narrow_packed(target_head: TargetHead, tokens: Tensor) -> TargetHead:
    """Return a target's head with only the rows of these tokens, packed (in oneDNN's layout) if its LM head is.

    A draft head with a smaller vocabulary reads it.
    """
    narrowed = target_head.narrow(tokens)
    if isinstance(target_head.output, PackedHead):
        pack_head(narrowed.output)
    return narrowed


def unpack_model(model: nn.Module) -> None:
    """Bring all weights of a model back from oneDNN's to torch's own layout, also in module trees that share them."""
    for module in model.modules():
        if isinstance(module, PackedLinear):
            module.unpack()
        # its weight is plain: the copy is dropped, and packing is off
        if isinstance(module, PackedHead) and module.packed is not None:
            module.packed = None


def count_packed(model: nn.Module) -> int:
    """Return the number of linear layers that multiply by weights in oneDNN's layout, the LM head included."""
    count = 0
    for module in model.modules():
        is_packed = isinstance(module, PackedLinear) and module.weight.is_mkldnn
        # an LM head with a plain weight and a packed copy
        has_copy = isinstance(module, PackedHead) and module.packed is not None
        count += is_packed or has_copy
    return count
