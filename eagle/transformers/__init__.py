"""Decode with a draft head in `model.generate`: `custom_generate=generate_with(head)`."""

from eagle.formats.custom_generate import write_custom_generate
from eagle.transformers.held_targets import last_traces
from eagle.transformers.with_drafter import WithDrafter, generate_from_folder, generate_with

__all__ = [
    "WithDrafter",
    "generate_from_folder",
    "generate_with",
    "last_traces",
    "write_custom_generate",
]
