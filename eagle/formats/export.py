"""Heads in the layouts of the engines that serve them, one line each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle.disk import lock_folder, write_tensors, write_text
from eagle.formats.layout import Layout
from eagle.formats.llamacpp import layout as llamacpp
from eagle.formats.notes import notes
from eagle.formats.openvino import layout as openvino
from eagle.formats.portable import layout as portable
from eagle.formats.reference import layout as reference
from eagle.formats.sglang import layout as sglang
from eagle.formats.speculators import layout as speculators
from eagle.formats.transformers import layout as transformers
from eagle.formats.trtllm import layout as trtllm
from eagle.formats.vllm import layout as vllm

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
    with lock_folder(out):
        write_text(out / "config.json", json.dumps(layout.config, indent=2) + "\n")
        write_tensors(out / "model.safetensors", layout.tensors)
        for name, text in texts.items():
            write_text(out / name, text)
