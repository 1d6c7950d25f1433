"""Texts with images as tensors, beside the tokens of all texts in a cache or a store."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import accumulate

import torch
from torch import Tensor

from eagle.core.examples import Shown

ENTRY = 8  # bytes of an entry, by which tensors of a file are aligned


def pack_shown(texts: Iterable[Shown | None]) -> dict[str, Tensor]:
    """The texts with images among some texts, one behind the other, and where each ends; {} where none has any."""
    lines = [json.dumps([text.text, text.images]).encode() if text else b"" for text in texts]
    if not any(lines):
        return {}
    packed = b"".join(lines)
    packed += b" " * (-len(packed) % ENTRY)
    ends = torch.tensor(list(accumulate(map(len, lines))), dtype=torch.long)
    return {"shown": torch.frombuffer(bytearray(packed), dtype=torch.long), "shown_ends": ends}


def unpack_shown(tensors: Mapping[str, Tensor], number: int) -> Shown | None:
    """One of the texts that `pack_shown` packed; None where it has no image."""
    if "shown" not in tensors:
        return None
    start, end = (int(tensors["shown_ends"][place]) if place >= 0 else 0 for place in (number - 1, number))
    if start == end:
        return None
    text, images = json.loads(tensors["shown"].view(torch.uint8)[start:end].numpy().tobytes())
    return Shown(text, tuple((path, checksum) for path, checksum in images))
