"""Train, measure and ship EAGLE-style draft heads."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle.core.budget import Budget
    from eagle.core.trace import Trace
    from eagle.core.tree import DraftTree
    from eagle.core.verify import Sampling
    from eagle.decoding.beam import beam_search
    from eagle.decoding.decode import generate, stream
    from eagle.formats.checkpoint import load_drafter
    from eagle.target.target import Target

__version__ = "0.1.0.dev0"

__all__ = [
    "Budget",
    "DraftTree",
    "Sampling",
    "Target",
    "Trace",
    "beam_search",
    "generate",
    "load_drafter",
    "stream",
]

_HOMES = {
    **dict.fromkeys(("generate", "stream"), "eagle.decoding.decode"),
    "beam_search": "eagle.decoding.beam",
    "Budget": "eagle.core.budget",
    "DraftTree": "eagle.core.tree",
    "Sampling": "eagle.core.verify",
    "Target": "eagle.target.target",
    "Trace": "eagle.core.trace",
    "load_drafter": "eagle.formats.checkpoint",
}


def __dir__() -> list[str]:
    """The public names, and what every module has."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """A public name from its home, on first use: transformers' modeling code takes seconds to import."""
    if name == "transformers":  # not in __all__: a star import would hide the package of that name
        return import_module("eagle.transformers")
    if name not in _HOMES:
        raise AttributeError(f"eagle has no {name!r}: its public names are {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)
