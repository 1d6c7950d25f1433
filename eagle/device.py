"""The best device, its fastest dtype and number of threads, casting modules, and what crosses to a device and back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from statistics import median
from time import perf_counter
from timeit import repeat
from typing import Any

import torch
from torch import Tensor

PINNED = {"cuda"}  # devices that copy from page-locked memory while they compute


def best_device() -> str:
    """An accelerator where there is one, else the CPU."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator.type if accelerator else "cpu"


def check_device(name: Any) -> str:
    """The name of a device that is there; "auto" is the best one."""
    if isinstance(name, torch.device):
        name = str(name)
    try:
        device = torch.device(best_device() if name == "auto" else name)
    except (RuntimeError, TypeError, ValueError):
        raise ValueError(f"device is {name!r}, expected 'auto', 'cpu', 'cuda' or another of torch's") from None
    backends = {"cuda": torch.cuda, "xpu": torch.xpu, "mps": torch.mps}
    if device.type in backends and (device.index or 0) >= (count := backends[device.type].device_count()):
        raise ValueError(
            f"device is {name!r}, and torch {torch.__version__} sees {count} of its kind: use 'auto' or 'cpu'"
        )
    return str(device)


@cache
def fastest_dtype(device: str) -> torch.dtype:
    """bf16 where a matrix product in it is clearly faster than in fp32, timed once per process."""

    def seconds(dtype: torch.dtype) -> float:
        left = torch.ones(64, 1024, dtype=dtype, device=device)
        right = torch.ones(1024, 1024, dtype=dtype, device=device)
        return min(repeat(lambda: (left @ right).sum().item(), number=1, repeat=5))  # `item` waits for the device

    try:
        return torch.bfloat16 if seconds(torch.bfloat16) < 0.8 * seconds(torch.float32) else torch.float32
    except (RuntimeError, TypeError):  # a device without bf16
        return torch.float32


def choose_threads(forward: Callable[[], Any], seconds: float = 1.0) -> int:
    """Set torch's number of threads to that which makes a forward fastest; tells and returns that number.

    Tries 1, 2, 4, ... up to torch's present number, in turns, for about `seconds`. More threads must be clearly
    faster: on a busy machine they wait for one another.
    """
    most = torch.get_num_threads()
    counts = [count for count in (2**power for power in range(most.bit_length())) if count < most] + [most]
    times: dict[int, list[float]] = {count: [] for count in counts}
    begin = perf_counter()
    while len(counts) > 1 and (len(times[most]) < 2 or perf_counter() - begin < seconds):  # the first warms up
        for count in counts:
            torch.set_num_threads(count)
            start = perf_counter()
            forward()
            times[count].append(perf_counter() - start)
    best = 1
    for count in counts[1:]:
        if median(times[count][1:]) < 0.9 * median(times[best][1:]):
            best = count
    torch.set_num_threads(best)
    if most > 1:
        hint = "OMP_NUM_THREADS sets the most that are tried"
        print(f"threads: {best} of {most}, by timing; {hint}", file=sys.stderr)
    return best


def in_dtype(module: Any, dtype: torch.dtype) -> Any:
    """Cast a module's weights in place; buffers that are not saved, such as rotary frequencies, stay fp32."""
    for tensor in module.state_dict(keep_vars=True).values():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    return module


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device, for which the host does not wait."""
    return tensor.to(device, non_blocking=True)


def to_host(parts: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of one dtype in host memory, by one transfer, for which the host waits: decoding waits here alone."""
    if len(parts) == 1:
        return [parts[0].cpu()]
    flat = torch.cat([part.flatten() for part in parts]).cpu() if parts else torch.empty(0)
    pieces = flat.split([part.numel() for part in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


def pick_rows(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """These rows of [B, ..], without waiting; all of them, in their order, without a copy."""
    if len(rows) == len(tensor) and list(rows) == list(range(len(rows))):
        return tensor
    return tensor[upload(torch.tensor(rows), tensor.device)]
