"""The embedding that a head's folder brings, which engines read in place of the target's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from eagle.core.drafter import TargetHead
from eagle.formats.reading.files import folder_at
from eagle.formats.reading.head_folder import EMBEDDING
from eagle.formats.reading.recognise import read_folder
from eagle.formats.reading.target_files import count_differing_rows
from eagle.target.target import Target


def borrow_embedding(folder: str | Path, target: Target) -> TargetHead:
    """The target's head, with the folder's own embedding where that has another one of this size."""
    stored, _ = read_folder(folder_at(folder))
    weight = target.head.embedding.get_parameter("weight")
    entry = stored.entry(EMBEDDING)
    if entry is None or entry.shape != tuple(weight.shape) or not entry.dtype.is_floating_point:
        return target.head
    rows = stored.load(EMBEDDING)
    theirs = target.head.embed(torch.arange(len(weight), device=weight.device)).detach().cpu()
    if not count_differing_rows(rows, theirs):
        return target.head
    embedding = nn.Embedding.from_pretrained(rows.to(weight))
    return replace(target.head, embedding=embedding, embed_scale=1.0)  # engines multiply only the target's own
