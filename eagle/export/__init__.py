"""Heads in the layouts of the engines that serve them, one line each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from eagle.export.layout import Layout
from eagle.export.vllm import layout as vllm

EXPORTERS: dict[str, Callable[[Any, Any], Layout]] = {
    "vllm": vllm,
}


def export(drafter: Any, target_config: Any, engine: str, out: str | Path) -> None:
    """Write the head as that engine reads it."""
    if engine not in EXPORTERS:
        raise ValueError(f"no exporter for {engine!r}: expected one of {', '.join(EXPORTERS)}")
    layout, out = EXPORTERS[engine](drafter, target_config), Path(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(layout.config, indent=2) + "\n")
    save_file({name: tensor.contiguous() for name, tensor in layout.tensors.items()}, out / "model.safetensors")
