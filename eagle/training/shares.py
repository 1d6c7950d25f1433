"""The figures of a head on held-out conversations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eagle.core.drafter import TargetHead, TrainableDrafter
from eagle.core.tree import PUBLISHED_TREE, chain_paths
from eagle.drafters.parts.validation import add_sums
from eagle.recipe import TrainSection
from eagle.training.dealing import Dealer

TREES = {"chain": chain_paths(4), "tree": PUBLISHED_TREE}  # validation predicts their acceptance lengths


def sum_share(
    accelerator: Any,
    dealer: Dealer,
    head: TrainableDrafter,
    frozen: TargetHead,
    settings: TrainSection,
    indices: Sequence[int],
    *,
    pins: bool,
) -> dict[str, Tensor]:
    """This process's share of the sums over held-out texts; all processes read the same number of batches."""
    device, sums = accelerator.device, dict[str, Tensor]()
    # as many texts as a step's part, so that what trains on a card is validated there
    size = -(-settings.batch_size // dealer.count)
    groups = [indices[start : start + size] for start in range(0, len(indices), size)]
    for first in range(0, len(groups), accelerator.num_processes):
        number = first + accelerator.process_index
        batch = dealer.load(groups[min(number, len(groups) - 1)], pin=pins)
        if number < len(groups):
            with torch.autocast(device.type, torch.bfloat16, enabled=settings.dtype == "bfloat16"):
                batch_sums = head.validate(batch.to(device), frozen, TREES)
            sums = add_sums(sums, {name: value.double().cpu() for name, value in batch_sums.items()})
    return sums
