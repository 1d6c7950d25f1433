"""Linears on a CPU whose weights lie in oneDNN's own layout, in which products of few rows are faster."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle.target.borrowed import is_close
from eagle.target.structure import FAILURES, base_of

DTYPES = (torch.float32, torch.bfloat16)
SMALLEST = 2**15  # weights; the products of smaller matrices take less time than the call of oneDNN


class PackedLinear(nn.Linear):
    """A linear whose weight lies in oneDNN's layout alone, or plainly once it was replaced, moved, cast or copied.

    A packed weight has a shape and a dtype. `to_dense()` copies it, and torch refuses what else would read or write it.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return [.., out_features], x @ weight.T + bias."""
        weight = self.weight
        if not weight.is_mkldnn:
            return F.linear(x, weight, self.bias)
        if not can_multiply(x, weight):
            return F.linear(x, weight.to_dense(), self.bias)
        return multiply(x, weight, self.bias)

    def unpack(self) -> None:
        """Lay the weight out plainly, also in module trees that share it."""
        if self.weight.is_mkldnn:
            self.weight = nn.Parameter(self.weight.to_dense(), requires_grad=False)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move or cast a plain weight."""
        self.unpack()
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save a plain copy, or with `keep_vars` the weight itself."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars:
            destination[f"{prefix}weight"] = to_plain(destination[f"{prefix}weight"])

    def _load_from_state_dict(self, *args: Any) -> None:
        """Load into a plain weight."""
        self.unpack()
        super()._load_from_state_dict(*args)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a plain copy."""
        weight = nn.Parameter(to_plain(self.weight), requires_grad=False)
        return {**vars(self), "_parameters": {**self._parameters, "weight": weight}}


class PackedHead(nn.Linear):
    """An LM head that has its plain weight, which others borrow or are tied to, and a packed copy of it.

    The copy is made again where the weight was written to or replaced.
    """

    packed: dict[str, Any] | None  # shared by module trees that share weights; None: not packed

    def forward(self, x: Tensor) -> Tensor:
        """Return [.., out_features], x @ weight.T + bias."""
        weight = self.weight
        if self.packed is None:
            return F.linear(x, weight, self.bias)
        # one row in fp32 is faster over plain weights
        is_slower = weight.dtype == torch.float32 and _is_one_row(x)
        if is_slower or not can_pack(self, 0) or not can_multiply(x, weight):
            return F.linear(x, weight, self.bias)
        mark = (weight.data_ptr(), weight._version)
        if self.packed.get("mark") != mark:
            self.packed.update(mark=mark, weight=pack(weight))
        return multiply(x, self.packed["weight"], self.bias)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a plain copy."""
        return {**vars(self), "packed": None}


def pack(weight: Tensor) -> Tensor:
    """Return a copy of a weight in the layout in which oneDNN multiplies."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
    return packed


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return [.., V], x @ weight.T + bias with a packed weight."""
    # In bf16 one row is read as two, at the cost of one: by itself it would take another kernel and get other bits.
    is_paired = weight.dtype == torch.bfloat16 and _is_one_row(x)
    rows = x
    if is_paired:
        rows = x.reshape(1, -1).expand(2, -1).contiguous()
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(rows, weight, bias, "none", [], "")
    return product[:1].view(*x.shape[:-1], -1) if is_paired else product


def _is_one_row(x: Tensor) -> bool:
    return x.numel() == x.shape[-1]


def can_multiply(x: Tensor, weight: Tensor) -> bool:
    """Return whether `multiply` takes this input: without gradients, and in the weight's dtype."""
    is_learning = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return x.dtype == weight.dtype and not is_learning and not torch.is_autocast_enabled("cpu")


def to_plain(weight: Tensor) -> Tensor:
    """Return the weight, or a plain copy if it is packed."""
    return weight.to_dense() if weight.is_mkldnn else weight


def can_pack(module: nn.Module, smallest: int = SMALLEST) -> bool:
    """Return whether a module is a stock or packed linear with a plain weight of enough numbers on the CPU."""
    # accelerate puts its own forward there
    if type(module) not in (nn.Linear, PackedHead) or "forward" in vars(module):
        return False
    weight: Any = module.weight
    # as of quantised ones, whose dtype is that of their products
    if type(weight) is not nn.Parameter:
        return False
    is_plain = (
        weight.device.type == "cpu" and weight.layout == torch.strided and weight.dtype in DTYPES
    )
    return is_plain and not weight.is_inference() and weight.numel() >= smallest


def has_kernels(dtype: torch.dtype) -> bool:
    """Return whether this torch packs weights of this dtype on this processor."""
    if not torch.backends.mkldnn.is_available() or dtype not in DTYPES:
        return False
    try:
        # whose products are exact in any order of sums
        matrix = torch.ones(16, 16, dtype=dtype)
        return torch.equal(multiply(matrix, pack(matrix), None), matrix @ matrix)
    except (AttributeError, *FAILURES):
        return False


@torch.no_grad()
def pack_model(model: Any, smallest: int = SMALLEST) -> int:
    """Pack a model's linears in place, and a copy of its LM head.

    Returns:
        The number of packed ones; 0 if a forward then fails or gives other logits, where all stays plain.
    """
    head = model.get_output_embeddings()
    is_on_cpu = model.get_input_embeddings().weight.device.type == "cpu"
    if head is None or not is_on_cpu or not has_kernels(model.dtype):
        return 0
    # what the model says before and after
    tokens = torch.arange(1, 5)[None] % head.weight.shape[0]
    expected = model(input_ids=tokens, use_cache=False).logits
    uses = Counter[int]()
    for module in model.modules():
        uses.update(map(id, module._parameters.values()))
    # a tied weight stays plain, as other modules read it
    for linear in list(base_of(model).modules()):
        if can_pack(linear, smallest) and uses[id(linear.weight)] == 1:
            linear.__class__ = PackedLinear
            linear.weight = nn.Parameter(pack(linear.weight), requires_grad=False)
    pack_head(head, smallest)
    try:
        if is_close(model(input_ids=tokens, use_cache=False).logits, expected):
            return count_packed(model)
    except FAILURES:  # it reads a weight by itself
        pass
    unpack_model(model)
    return 0


def pack_head(head: Any, smallest: int = SMALLEST) -> Any:
    """Give an LM head a packed copy of its plain matrix, if it is one that can be packed."""
    if can_pack(head, smallest) and has_kernels(head.weight.dtype):
        head.__class__ = PackedHead
        head.packed = {}
    return head


def unpack_model(model: nn.Module) -> None:
    """Lay out all weights of a model plainly, also in module trees that share them."""
    for module in model.modules():
        if isinstance(module, PackedLinear):
            module.unpack()
        if isinstance(module, PackedHead) and module.packed is not None:
            module.packed = None


def count_packed(model: nn.Module) -> int:
    """Return the number of linears that are read through packed weights."""
    count = 0
    for module in model.modules():
        is_packed = isinstance(module, PackedLinear) and module.weight.is_mkldnn
        has_copy = isinstance(module, PackedHead) and module.packed is not None
        count += is_packed or has_copy
    return count
