"""The weights of a head of this project, compared with what its config says before any of them is read."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eagle.formats.reading.files import TensorEntry, read_header
from eagle.formats.reading.folder_paths import check_not_hollow, plain_file

WEIGHTS = "model.safetensors"
PLAIN_DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16}


def read_entries(folder: Path) -> dict[str, TensorEntry]:
    """What the header of a head's weights says; ValueError if the file cannot be read."""
    try:
        path = plain_file(folder, WEIGHTS)
        check_not_hollow(path, folder / WEIGHTS)
        return read_header(path, folder / WEIGHTS)
    except ValueError as error:
        raise ValueError(f"{folder / WEIGHTS} cannot be read: {error}; is it cut short? Copy it again") from None


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a head; ValueError if they cannot be read."""
    path = folder / WEIGHTS
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read: {error}; is it cut short? Copy it again") from None


def compare_entries(folder: Path, entries: dict[str, TensorEntry], expected: dict[str, Tensor]) -> None:
    """Refuse tensors in a file that are not those of a head, before one of either is made."""
    missing, unknown = expected.keys() - entries.keys(), entries.keys() - expected.keys()
    if missing or unknown:
        raise ValueError(f"{folder} is not this head: missing tensors {sorted(missing)}, unknown {sorted(unknown)}")
    for name, entry in entries.items():
        shape, dtype = tuple(expected[name].shape), expected[name].dtype
        if entry.shape != shape:
            raise ValueError(
                f"{folder} is not this head: {name} is {list(entry.shape)}, expected {list(shape)} by its config.json: "
                "copy both files again"
            )
        is_plain = entry.dtype in PLAIN_DTYPES if dtype.is_floating_point else entry.dtype == dtype
        if not is_plain:
            raise ValueError(
                f"{folder} is not this head: {name} is in {entry.dtype}, expected "
                f"{'plain floating-point numbers' if dtype.is_floating_point else dtype}: copy the weights again"
            )


def check_finite(folder: Path, weights: dict[str, Tensor]) -> None:
    """Refuse weights that are not numbers: such a head drafts nothing, or anything."""
    for name, tensor in weights.items():
        if tensor.is_floating_point() and tensor.numel():
            least, most = tensor.aminmax()  # both are nan where one value is; no second tensor is made
            if not (least.isfinite() and most.isfinite()):
                raise ValueError(
                    f"{folder}: {name} holds numbers that are not finite: take an earlier checkpoint, as "
                    "`last` beside it may be, or copy the weights again"
                )
