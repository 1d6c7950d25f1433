"""What a benchmark's figures belong to."""

from __future__ import annotations

import platform
from datetime import date
from typing import Any

import torch
import transformers

from eval.results import commit


def made_on(**about: Any) -> dict[str, Any]:
    """What was measured, and the machine, packages, day and commit that it was measured with."""
    return {
        **about,
        "cpu": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": str(date.today()),
        "commit": commit(),
    }
