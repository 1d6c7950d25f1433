"""What a running `model.generate` was called with and does not hand on."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import GenerationMixin

GENERATE = inspect.unwrap(GenerationMixin.generate).__code__


def arguments_of_generate() -> dict[str, Any]:
    """The variables of the nearest `model.generate` that called this, by name; none if nothing did.

    transformers hands a callable neither its streamer nor its assistant, and the file of a folder not the folder's
    name: without a look at its frame a streamer would wait for ever.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not GENERATE:
        frame = frame.f_back
    return {} if frame is None else dict(frame.f_locals)
