"""A mark of a model's weights that tells whether they have changed, without reading them."""

from __future__ import annotations

from typing import Any


class WeightMark:
    """The place and the version of every weight: writing to one in place, or putting another there, changes the mark.

    Writing through `weight.data` leaves no trace. Weights made in inference mode have no versions, and no mark.
    """

    def __init__(self, model: Any) -> None:
        self.owners = [module._parameters for module in model.modules() if module._parameters]

    def read(self) -> list[Any] | None:
        """The mark; None if there is none."""
        try:
            return [
                (id(weight) if weight.is_mkldnn else weight.data_ptr(), weight._version)
                for owner in self.owners
                for weight in owner.values()
                if weight is not None
            ]
        except RuntimeError:  # made in inference mode, or without memory of its own
            return None
