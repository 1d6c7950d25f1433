"""How much memory a step needs."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path


def beyond(step: Callable[[], object]) -> float:
    """Megabytes that a step needs at its peak, beyond what this process held before it."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    held = _resident("VmRSS")
    step()
    return (_resident("VmHWM") - held) / 1e3


def _resident(line: str) -> int:
    found = re.search(rf"{line}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1])
