"""What every head must hold on disk: it comes back as it was, and each exporter writes it whole or refuses it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from eagle.conformance.trial import Fault, begin_sequence, make_head
from eagle.core.budget import Budget
from eagle.core.verify import Choose, Sampling
from eagle.formats.checkpoint import load_drafter, save_head
from eagle.formats.export import EXPORTERS, export
from eagle.formats.reading.foreign import read_head
from eagle.target.target import Target


def check_saved(head: Any, target: Target, prompt: list[int], folder: Path) -> None:
    """Check that a head drafts the same tree for a prompt after it was saved to `folder` and loaded."""
    # any recipe and provenance do, as neither is read for a draft
    save_head(folder, head, "recipe", {})
    loaded = load_drafter(folder, target)
    before = _draft(head.bind(target.head), target, prompt)
    after = _draft(loaded, target, prompt)
    if before != after:
        raise Fault(
            f"a head that was saved and loaded drafts {after}, expected {before} (token, parent) as before: all that "
            "it needs must be in its weights, registered buffers, settings or shape"
        )


def _draft(drafter: Any, target: Target, prompt: list[int]) -> list[tuple[int, int]]:
    """Return token and parent of each node of the draft tree that follows a prompt."""
    sequence, update = begin_sequence(drafter, target, prompt, Choose(Sampling()))
    tree = sequence.propose(update, Budget(nodes=12, depth=4, top_k=3))
    return list(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True))


def check_export(
    method: str, make: Callable[[], Any], engine: str, target: Target, folder: Path, out: Path
) -> str | None:
    """Check that an export to an engine holds all weights of the head, or that the exporter refuses it by name.

    Args:
        method: The name of the head's method.
        make: Makes the head.
        engine: The name of an exporter.
        target: The head's target.
        folder: The target's files.
        out: A folder to export to.

    Returns:
        The refusal of an exporter that cannot serve the head, else None.
    """
    head = make().bind(target.head)
    # some layouts have no tensor for the bias of fc, and would refuse the head only for that
    if hasattr(head.settings, "fc_bias"):
        head = make_head(method, target, fc_bias=False).bind(target.head)
    # a refusal names its exporter, so that a user knows whom to ask
    try:
        layout = EXPORTERS[engine](head, target.config)
    except ValueError as error:
        if f"{engine}: " not in str(error):
            raise Fault(
                f"the exporter to {engine} refuses the head without its own name: {error}"
            ) from None
        return str(error)
    # some layouts call the one layer `midlayer`
    exported = {
        name.replace("midlayer.", "layers.0."): tensor for name, tensor in layout.tensors.items()
    }
    # a draft model's weights are in the module `model` of its drafter
    exported |= {f"model.{name}": tensor for name, tensor in exported.items()}
    weights = head.state_dict()
    if not weights.keys() <= exported.keys():
        # a layout with other names of tensors: importing its files must find all weights again
        export(head, target.config, engine, out)
        try:
            exported = read_head(out, str(folder)).state_dict()
        except ValueError as error:
            lost = sorted(weights.keys() - exported.keys())
            raise Fault(
                f"the export to {engine} loses the weights {', '.join(lost)}, and cannot be read back: {error!s:.300}; "
                "a layout holds every tensor by its own name, or by those of a network in eagle/formats/networks"
            ) from None
    for name, tensor in weights.items():
        if name not in exported or not torch.equal(exported[name].to(tensor.device), tensor):
            raise Fault(
                f"the export to {engine} {'changes' if name in exported else 'loses'} the weight {name}: a head whose "
                f"network is {head.network['network']!r} has that network's tensors; name another network, else "
                "exporters and engines take it for one"
            )
    return None
