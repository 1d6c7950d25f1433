"""How DDP and DeepSpeed are asked to run, in words of which the installed torch does not warn."""

from __future__ import annotations

import os
import warnings
from inspect import signature
from typing import Any

from accelerate import DistributedDataParallelKwargs
from torch.nn.parallel import DistributedDataParallel


class DataParallel(DistributedDataParallelKwargs):
    """How DDP runs: without sending buffers, which are constants, and with gradients as views of what is sent."""

    def to_kwargs(self) -> dict[str, Any]:
        """The arguments by the names that this torch has: of the old one newer versions warn."""
        known = signature(DistributedDataParallel).parameters
        name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        return {name: False, "gradient_as_bucket_view": True}


def quiet_deepspeed(cpu: bool) -> None:
    """Spare the user warnings that DeepSpeed causes: of a CPU that is meant, and of names that torch has replaced."""
    if cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
