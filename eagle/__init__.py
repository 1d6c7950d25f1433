"""Train, measure and ship EAGLE-style draft heads."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle.checkpoint import load_drafter
    from eagle.decode import Trace, generate, stream
    from eagle.drafter import Budget
    from eagle.target import Target
    from eagle.tree import DraftTree
    from eagle.verify import Sampling

__all__ = ["Budget", "DraftTree", "Sampling", "Target", "Trace", "generate", "load_drafter", "stream"]

_HOMES = {
    **dict.fromkeys(("Trace", "generate", "stream"), "eagle.decode"),
    "Budget": "eagle.drafter",
    "DraftTree": "eagle.tree",
    "Sampling": "eagle.verify",
    "Target": "eagle.target",
    "load_drafter": "eagle.checkpoint",
}


def __getattr__(name: str) -> Any:
    """A public name from its home, on first use: transformers' modeling code takes seconds to import."""
    if name not in _HOMES:
        raise AttributeError(f"eagle has no {name!r}: its public names are {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)
