"""An exported head: a config and tensors, named as one engine names them."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Layout:
    """What goes into `config.json` and `model.safetensors`."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
