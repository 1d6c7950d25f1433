"""A simulated accelerator: its tensors hold real values, and everything that would wait for a device is written down.

`install` registers the device "simgpu" in this process for good, so tests do it in a process of their own. Kernels run
on the CPU, which makes whole decodes and training steps comparable with the CPU's own, bit for bit. As on CUDA,

- tensors of both sides in one operation are refused, but for CPU tensors without dimensions, and CPU indices;
- copies between the sides wait unless they are `non_blocking`; what is made of a list goes through such a copy;
- a value or a shape that is needed on the host waits: `item`, `tolist`, `nonzero`, a mask as an index, ...
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

NAME = "simgpu"
ROOMS = tuple(str(Path(__file__).parent.parent / room) + "/" for room in ("eagle", "data_prep"))
aten = torch.ops.aten
# operations that copy between host and device
COPIES = (aten._to_copy.default, aten.copy_.default)
INDEXED = (
    "aten::index",
    "aten::index_put",
    "aten::index_put_",
    "aten::_unsafe_index",
    "aten::_index_put_impl_",
)
# operations that wait for a value, or for as many entries as the values say
WAITS = (
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::nonzero",
    "aten::masked_select",
    "aten::repeat_interleave",
    "aten::bincount",
    "aten::_unique",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
)
# operations that run undivided, so that the CPU's own kernels give the same bits
WHOLE = ("aten::linear", "aten::matmul", "aten::scaled_dot_product_attention")
# the products that autocast runs in bf16
REDUCED = (
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "linear",
    "matmul",
    "scaled_dot_product_attention",
)


@dataclass(frozen=True, slots=True)
class Crossing:
    """Something that went between host and device."""

    kind: str  # "wait"; "upload" and "download": without waiting, so that what is downloaded is not there yet
    op: str
    callers: tuple[str, ...]  # the package's functions that led there, innermost first
    bytes: int = 0


LOG: list[Crossing] = []
KEPT: list[Any] = []  # registrations, which end with what holds them


class OnDevice(Tensor):
    """A tensor of the device, around the CPU tensor with its values."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> OnDevice:
        strides = {"strides": values.stride(), "storage_offset": values.storage_offset()}
        with torch.inference_mode(values.is_inference()):
            made = torch.Tensor._make_wrapper_subclass(
                cls, values.shape, dtype=values.dtype, device=torch.device(NAME, 0), **strides
            )
        made.values = values
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    @property
    def data(self) -> Any:
        """Its values without their history."""
        return self.detach()

    @data.setter
    def data(self, new: Any) -> None:
        torch.Tensor.data.__set__(self, new)
        self.values = new.values

    def tolist(self) -> Any:
        """On the host."""
        return run(aten._to_copy.default, (self,), {"device": torch.device("cpu")}).tolist()

    def new_tensor(self, data: Any, **kwargs: Any) -> Tensor:
        """Made on the host."""
        return torch.tensor(data, **{"dtype": self.dtype, "device": self.device, **kwargs})

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(_index_of(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_index_of(index), value)

    def numpy(self, **kwargs: Any) -> Any:
        """Refused, as by CUDA."""
        raise TypeError(f"can't convert {NAME} device type tensor to numpy. Use Tensor.cpu() first")

    def __repr__(self, **kwargs: Any) -> str:
        return f"OnDevice({self.values})"


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """An operation on the values; what it does to the device is written down, or refused."""
    name = func._schema.name
    if name not in WHOLE and func._can_decompose():
        return func.decompose(*args, **kwargs)
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    on_side = [tensor for tensor in given if isinstance(tensor, OnDevice)]
    known: dict[int, Any] = {id(tensor.values): tensor for tensor in on_side}
    # a `device` says where the result is, else the arguments do
    device = kwargs.get("device")
    on_device = bool(known) if device is None else torch.device(device).type == NAME
    if func in COPIES:
        on_device = _note_copy(func, args, kwargs, on_device)
    elif known:
        _note(name, args, given)
    if device is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    output = func(*tree_map(_values, args), **tree_map(_values, kwargs))
    if not on_device:
        return output
    # what was changed in place stays the tensor that it is
    return tree_map(lambda leaf: known.get(id(leaf), _on_device(leaf)), output)


def _values(leaf: Any) -> Any:
    return leaf.values if isinstance(leaf, OnDevice) else leaf


def _on_device(leaf: Any) -> Any:
    return OnDevice(leaf) if isinstance(leaf, Tensor) else leaf


def _note_copy(func: Any, args: Any, kwargs: Any, on_device: bool) -> bool:
    """Record a copy between the sides; return whether its result is on the device."""
    source = args[0]
    does_not_wait = kwargs.get("non_blocking", False)
    if func is aten.copy_.default:
        # copy_(destination, source, non_blocking)
        on_device = isinstance(args[0], OnDevice)
        source = args[1]
        does_not_wait = does_not_wait or any(args[2:])
    if isinstance(source, OnDevice) != on_device:
        direction = "upload" if on_device else "download"
        kind = direction if does_not_wait else "wait"
        note(kind, direction, source.numel() * source.element_size())
    return on_device


def _note(name: str, args: Any, given: list[Tensor]) -> None:
    """Record what waits, and refuse tensors of both sides."""
    hosted = [tensor for tensor in given if not isinstance(tensor, OnDevice)]
    if name in INDEXED:
        indices = [index for index in args[1] if index is not None]
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            note("wait", f"{name} by a mask")
        if any(not isinstance(index, OnDevice) for index in indices):
            note("wait", f"{name} by a host's tensor")
        hosted = [tensor for tensor in hosted if not any(tensor is index for index in indices)]
    elif name in WAITS:
        note("wait", name)
    # numbers of the host go along, except where tensors are joined
    joins = name in ("aten::cat", "aten::stack")
    wrong = [tuple(tensor.shape) for tensor in hosted if tensor.dim() or joins]
    if wrong:
        raise RuntimeError(
            f"expected all tensors of {name} to be on {NAME}, got the host's of shapes {wrong}"
        )


def note(kind: str, op: str, size: int = 0) -> None:
    """Record a crossing, with the package's functions that lead to it, innermost first."""
    callers = []
    frame = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(ROOMS) and code.co_name[0] != "<":
            callers.append(f"{Path(code.co_filename).stem}.{code.co_name}")
        frame = frame.f_back
    LOG.append(Crossing(kind, op, tuple(callers), size))


@contextmanager
def crossings() -> Iterator[list[Crossing]]:
    """The crossings of a block of code."""
    start = len(LOG)
    seen: list[Crossing] = []
    yield seen
    seen += LOG[start:]


class _Module(backend_registration._DummyBackendModule):
    """What torch asks of a device's module, beside what it registers itself."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """What autocast may reduce to."""
        return [torch.bfloat16]

    def synchronize(self, device: Any = None) -> None:
        """Waits."""
        note("wait", "synchronize")


def _index_of(index: Any) -> Any:
    """An index whose lists are tensors of the host, as they are on their way."""
    if isinstance(index, tuple):
        return tuple(map(_index_of, index))
    return torch.tensor(index) if isinstance(index, list | range) else index


def _upload_of(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function that makes tensors of what the host holds, such as `torch.tensor`: with a copy that waits."""

    def make_and_copy(data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
        if device is None or torch.device(device).type != NAME:
            return make(data, device=device, **kwargs)
        made = data if isinstance(data, Tensor) else make(data, **kwargs)
        return made.to(device, kwargs.get("dtype"))

    return make_and_copy


class _Generator(torch.Generator):
    """The CPU's random numbers, for either side."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls, "cpu")


def install() -> torch.device:
    """Register the device in this process, and return it."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, _Module())
    # all operations go through `run`, and under autocast through `_reduced` before
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(lambda func, *args, **kwargs: run(func, args, kwargs), "PrivateUse1")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    products = torch.library.Library("aten", "IMPL")
    for name in REDUCED:
        products.impl(name, _reduced(getattr(aten, name).default), "AutocastPrivateUse1")
    KEPT.extend((everything, products))
    torch.tensor = _upload_of(torch.tensor)
    torch.as_tensor = _upload_of(torch.as_tensor)
    torch.Generator = _Generator  # type: ignore[misc]
    return torch.device(NAME, 0)


def _reduced(func: Any) -> Callable[..., Any]:
    """A product as autocast runs it."""
    outside = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def product(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(outside):
            args, kwargs = tree_map(_cast, (args, kwargs))
            return func(*args, **kwargs)

    return product


def _cast(leaf: Any) -> Any:
    if isinstance(leaf, OnDevice) and leaf.dtype == torch.float32:
        return leaf.to(torch.get_autocast_dtype(NAME))
    return leaf
