"""What every head must hold on disk: it comes back as it was, and each exporter writes it whole or refuses it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from eagle.conformance.trial import Fault, begin_text, make_head
from eagle.core.budget import Budget
from eagle.core.verify import Choose, Sampling
from eagle.formats.checkpoint import load_drafter, save_head
from eagle.formats.export import EXPORTERS, export
from eagle.formats.reading.foreign import read_head
from eagle.target.target import Target


def check_saved(head: Any, target: Target, prompt: list[int], folder: Path) -> None:
    """A head from disk drafts what it drafted before it was saved."""
    save_head(folder, head, "recipe", {})
    loaded = load_drafter(folder, target)
    drafts = []
    for drafter in (head.bind(target.head), loaded):
        text, update = begin_text(drafter, target, prompt, Choose(Sampling()))
        drafts.append(text.propose(update, Budget(12, 4, 3)))
    before, after = (list(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)) for tree in drafts)
    if before != after:
        raise Fault(
            f"a head that was saved and loaded drafts {after}, expected {before} (token, parent) as before: all that "
            "it needs must be in its weights, registered buffers, settings or shape"
        )


def check_export(
    name: str, make: Callable[[], Any], engine: str, target: Target, folder: Path, out: Path
) -> str | None:
    """Nothing that was learned is lost on the way into an engine's layout; the refusal of one that cannot serve it.

    `folder` holds the target's files.
    """
    head = make().bind(target.head)
    if hasattr(head.settings, "fc_bias"):  # which some have no place for
        head = make_head(name, target, fc_bias=False).bind(target.head)
    try:
        layout = EXPORTERS[engine](head, target.config)
    except ValueError as error:
        if f"{engine}: " not in str(error):
            raise Fault(f"the exporter to {engine} refuses the head without its own name: {error}") from None
        return str(error)
    held = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in layout.tensors.items()}
    held |= {f"model.{name}": tensor for name, tensor in held.items()}  # a draft model is one part of its drafter
    weights = head.state_dict()
    if not weights.keys() <= held.keys():  # by names of its own: an import of the files must find all again
        export(head, target.config, engine, out)
        try:
            held = read_head(out, str(folder)).state_dict()
        except ValueError as error:
            lost = sorted(weights.keys() - held.keys())
            raise Fault(
                f"the export to {engine} loses the weights {', '.join(lost)}, and cannot be read back: {error!s:.300}; "
                "a layout holds every tensor by its own name, or by those of a network in eagle/formats/networks"
            ) from None
    for key, tensor in weights.items():
        if key not in held or not torch.equal(held[key].to(tensor.device), tensor):
            raise Fault(
                f"the export to {engine} {'changes' if key in held else 'loses'} the weight {key}: a head whose "
                f"network is {head.network['network']!r} has that network's tensors; name another network, else "
                "exporters and engines take it for one"
            )
    return None
