"""A random head of every kind in every layout that is read here, by name."""

from __future__ import annotations

from tests import block_heads
from tests import foreign_heads as made
from tests.formats.test_import_levels import falcon, hydra, speculator
from tests.formats.test_import_medusa import CONFIGS, names_of, weights_for


def medusa(spelling: str) -> made.Head:
    """Medusa heads as one of their writers names them."""
    names = names_of(spelling)
    weights = weights_for(names)
    return CONFIGS[spelling], {theirs: weights[ours] for ours, theirs in names.items()}


EVERY: dict[str, made.Head] = {
    **made.LAYOUTS,
    **{f"block: {name}": head for name, (head, *_) in block_heads.LAYOUTS.items()},
    **{f"Medusa: {spelling}": medusa(spelling) for spelling in CONFIGS},
    "Hydra": hydra(prefix=False),
    "Hydra with a prefix": hydra(),
    "fms-extras": speculator("speculator."),
    "Falcon": falcon(),
}
