"""The best device, its fastest dtype and number of threads, and transfers between it and the host."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

RETIMED_AFTER = 60.0  # seconds for which a chosen number of threads stays
# change of the load average, in processes, from which on the number of threads is timed again
LOAD_CHANGE = 0.5
PINNED = {"cuda"}  # devices that copy from page-locked memory while they compute


def best_device() -> str:
    """Return an accelerator where there is one, else the CPU."""
    if not torch.accelerator.is_available():
        return "cpu"
    accelerator = torch.accelerator.current_accelerator()
    return accelerator.type if accelerator else "cpu"


def check_device(name: Any) -> str:
    """Return the name of a device; refuse one that torch does not have here. "auto" becomes the best one."""
    if isinstance(name, torch.device):
        name = str(name)
    try:
        device = torch.device(best_device() if name == "auto" else name)
    except (RuntimeError, TypeError, ValueError):
        raise ValueError(
            f"device is {name!r}, expected 'auto', 'cpu', 'cuda' or another of torch's"
        ) from None
    backends = {"cuda": torch.cuda, "xpu": torch.xpu, "mps": torch.mps}
    if device.type in backends:
        count = backends[device.type].device_count()
        if (device.index or 0) >= count:
            raise ValueError(
                f"device is {name!r}, and torch {torch.__version__} sees {count} of its kind: use 'auto' or 'cpu'"
            )
    return str(device)


def fastest_dtype(device: str) -> torch.dtype:
    """Return bf16 where the device has instructions that multiply it, else fp32.

    It is read off the device and not timed, so that all processes of a run decide alike.
    """
    if device == "cpu":
        return torch.bfloat16 if multiplies_bf16(cpu_capabilities()) else torch.float32
    if device == "cuda":
        return (
            torch.bfloat16
            if torch.cuda.is_bf16_supported(including_emulation=False)
            else torch.float32
        )
    # other devices do not tell: a small product shows it
    try:
        matrix = torch.ones(2, 2, dtype=torch.bfloat16, device=device)
        matrix @ matrix
    except (RuntimeError, TypeError):  # a device without bf16
        return torch.float32
    return torch.bfloat16


def multiplies_bf16(capabilities: Mapping[str, Any]) -> bool:
    """Whether a processor of these capabilities multiplies in bf16; what only converts it is slower than fp32."""
    return any(capabilities.get(name) for name in ("amx_bf16", "avx512_bf16", "bf16", "sve_bf16"))


def cpu_capabilities() -> Mapping[str, Any]:
    """Return the instructions of this processor that torch's kernels may use; {} from a torch that does not tell."""
    if not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return {}
    return getattr(torch.cpu, "get_capabilities", dict)()


def choose_threads(
    forward: Callable[[], Any], seconds: float = 1.0, clock: Callable[[], float] = perf_counter
) -> int:
    """Set torch's number of threads to that which makes a forward fastest; print and return that number."""
    max_threads = torch.get_num_threads()
    best = set_fastest_threads(forward, max_threads, seconds, clock)
    if max_threads > 1:
        hint = "OMP_NUM_THREADS sets the most that are tried"
        print(f"threads: {best} of {max_threads}, by timing; {hint}", file=sys.stderr)
    return best


def set_fastest_threads(
    forward: Callable[[], Any],
    max_threads: int,
    seconds: float = 1.0,
    clock: Callable[[], float] = perf_counter,
) -> int:
    """Set torch's number of threads to that which makes a forward fastest, and return it.

    Tries 1, 2, 4, ... up to `max_threads`, in turns, for about `seconds`. More threads must be clearly faster: on a
    busy machine they wait for one another.
    """
    # 1, 2, 4, ... and `max_threads`, which need not be a power of two
    times: dict[int, list[float]] = {2**power: [] for power in range(max_threads.bit_length())}
    times[max_threads] = []
    begin = clock()
    # two rounds at least, as the first forward of each number only warms up; a single number needs no timing
    while len(times) > 1 and (len(times[max_threads]) < 2 or clock() - begin < seconds):
        for count, seconds_of_count in times.items():
            torch.set_num_threads(count)
            start = clock()
            forward()
            seconds_of_count.append(clock() - start)
    # medians, as another job may have slowed down one of the forwards
    best = 1
    for count in times:
        # clearly faster: by a tenth of the time
        if count > 1 and median(times[count][1:]) < 0.9 * median(times[best][1:]):
            best = count
    torch.set_num_threads(best)
    return best


class ThreadsOfLongWork:
    """torch's number of threads for work of hours: timed at its start, and again when other jobs come or go.

    `settle` is for work whose results do not depend on the number of threads, but for rounding; `faster` is for
    measurements, which keep the one that they began with.

    Args:
        forward: The work that is timed with each number of threads.
        clock: Returns seconds.
        load: Returns the load of the machine; by default the system's load average.
        most: The largest number to try, given where a number was chosen just now, so that it is not timed at once.
    """

    def __init__(
        self,
        forward: Callable[[], Any],
        clock: Callable[[], float] = perf_counter,
        load: Callable[[], float] | None = None,
        most: int | None = None,
    ) -> None:
        """Time nothing yet; the arguments are those of the class."""
        self.forward = forward
        self.clock = clock
        self.load = load or load_of_machine
        self.max_threads = most or torch.get_num_threads()
        self.timing_count = 0
        self.timed_at = 0.0
        self.load_when_timed = 0.0
        if most is not None:
            self._record_timing()

    def settle(self) -> int:
        """Time the numbers of threads if that is due, and set the fastest; return the number that is set now."""
        before = torch.get_num_threads()
        if not self._is_due():
            return before
        is_first = self.timing_count == 0
        best = self._time_threads()
        if is_first or best != before:
            print(f"threads: {best} of {self.max_threads}, by timing", file=sys.stderr)
        return best

    def faster(self) -> int | None:
        """Time the numbers of threads if that is due; return one that is faster than the current one, which stays set.

        None says that no other is faster, or that no timing is due.
        """
        if not self._is_due():
            return None
        before = torch.get_num_threads()
        best = self._time_threads()
        torch.set_num_threads(before)
        return None if best == before else best

    def _time_threads(self) -> int:
        """Time the numbers of threads, set the fastest, and return it."""
        best = set_fastest_threads(self.forward, self.max_threads, clock=self.clock)
        self._record_timing()
        return best

    def _record_timing(self) -> None:
        """Record that the numbers of threads were timed now, and at which load."""
        self.timing_count += 1
        self.timed_at = self.clock()
        self.load_when_timed = self.load()

    def _is_due(self) -> bool:
        """Return whether to time the numbers of threads now.

        They are timed at the first call, again a minute later, when the start of the work is over, and from then on
        when the load of the machine has changed, at most once a minute.
        """
        # there is nothing to choose from
        if self.max_threads == 1:
            return False
        if self.timing_count == 0:
            return True
        if self.clock() - self.timed_at < RETIMED_AFTER:
            return False
        # an unknown load is nan, which never counts as the same
        is_same_load = abs(self.load() - self.load_when_timed) < LOAD_CHANGE
        return self.timing_count == 1 or not is_same_load


def load_of_machine() -> float:
    """Return how many processes run or wait to run, over the last minute; nan where the system does not tell."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return float("nan")


def in_dtype(module: Any, dtype: torch.dtype) -> Any:
    """Cast a module's weights in place; buffers that are not saved, such as rotary frequencies, stay fp32."""
    # the state dict has the tensors that a checkpoint holds, without the unsaved buffers
    for tensor in module.state_dict(keep_vars=True).values():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    return module


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on a device, for which the host does not wait."""
    return tensor.to(device, non_blocking=True)


def must_wait(device: torch.device) -> bool:
    """Whether the host waits for values of a device, and cannot simply look at them."""
    return device.type != "cpu"


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors of one dtype in host memory, by one transfer, for which the host waits.

    This is the only place where decoding waits for the device.
    """
    # one tensor is one transfer already
    if len(tensors) < 2:
        return [tensor.cpu() for tensor in tensors]
    flat = torch.cat([tensor.flatten() for tensor in tensors]).cpu()
    chunks = flat.split([tensor.numel() for tensor in tensors])
    return [chunk.view(tensor.shape) for chunk, tensor in zip(chunks, tensors, strict=True)]


def pick_rows(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """Return these rows (indices of the first dimension) of a tensor without waiting for its device.

    They are a copy, or `tensor` itself if they are all rows in order.
    """
    if len(rows) == len(tensor) and list(rows) == list(range(len(rows))):
        return tensor
    return tensor[upload(torch.tensor(rows), tensor.device)]
