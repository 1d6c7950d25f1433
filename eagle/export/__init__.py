"""Heads in the layouts of the engines that serve them, one line each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from eagle.export.layout import Layout
from eagle.export.llamacpp import layout as llamacpp
from eagle.export.notes import notes
from eagle.export.openvino import layout as openvino
from eagle.export.portable import layout as portable
from eagle.export.reference import layout as reference
from eagle.export.sglang import layout as sglang
from eagle.export.speculators import layout as speculators
from eagle.export.transformers import layout as transformers
from eagle.export.trtllm import layout as trtllm
from eagle.export.vllm import layout as vllm

EXPORTERS: dict[str, Callable[[Any, Any], Layout]] = {
    "portable": portable,
    "vllm": vllm,
    "sglang": sglang,
    "trtllm": trtllm,
    "openvino": openvino,
    "llamacpp": llamacpp,
    "speculators": speculators,
    "eagle": reference,
    "transformers": transformers,
}


def export(drafter: Any, target_config: Any, engine: str, out: str | Path, head: str | Path | None = None) -> None:
    """Write the head as that engine reads it; `head` is the folder that it came from, for what stands beside it."""
    if engine not in EXPORTERS:
        raise ValueError(f"no exporter for {engine!r}: expected one of {', '.join(EXPORTERS)}")
    layout, out = EXPORTERS[engine](drafter, target_config), Path(out)
    if (out / "recipe.yaml").exists():
        raise ValueError(f"{out} holds a head of this project, which an export would overwrite: name another folder")
    target = getattr(target_config, "name_or_path", "")
    texts = notes(layout, drafter, engine, out, Path(head) if head else None, target)
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(layout.config, indent=2) + "\n")
    save_file({name: tensor.contiguous() for name, tensor in layout.tensors.items()}, out / "model.safetensors")
    for name, text in texts.items():
        (out / name).write_text(text)
