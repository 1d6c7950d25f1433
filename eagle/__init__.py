"""Train, measure and ship EAGLE-style draft heads: decoding gets faster, and its output stays the same.

Target.load(path)                 the model: a folder, a hub id, a GGUF file; Target(model, tokenizer) for one in memory
load_drafter(name, target)        a trained head, a smaller model, or a method without weights such as "ngram"
generate(target, drafter, prompt) the model's answer, drafted; stream(...) yields it as it comes
beam_search(...)                  the best of several answers
train(model, tokenizer, data)     train a head; measure(...) its acceptance length and speed
Sampling, Budget                  how the model samples; how much is drafted
Trace, DraftTree                  what `generate` returns; what a drafter proposes
eagle.transformers.generate_with  the same inside transformers' `model.generate`
`eagle --help`                    the same and more on the command line
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle.api import generate, measure, stream, train
    from eagle.core.budget import Budget
    from eagle.core.trace import Trace
    from eagle.core.tree import DraftTree
    from eagle.core.verify import Sampling
    from eagle.decoding.beam import beam_search
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
    "measure",
    "stream",
    "train",
]

# from a public name to the module that defines it
_HOMES = {
    **dict.fromkeys(("generate", "measure", "stream", "train"), "eagle.api"),
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
    """Return a public name, whose module is imported only now.

    The modules import transformers' modeling code, which takes seconds: `import eagle` alone stays fast.
    """
    if name == "transformers":  # not in __all__: a star import would hide the package of that name
        return import_module("eagle.transformers")
    if name not in _HOMES:
        raise AttributeError(f"eagle has no {name!r}: its public names are {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)
