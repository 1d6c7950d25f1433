"""Marks of a model that tell whether it has changed: of its weights, without reading them, and of all the rest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

# what a module keeps that is no attribute of its own; parameters are marked by `WeightMark`
HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
)


class WeightMark:
    """The address and the version of every weight: writing to one in place, or putting another there, changes the mark.

    So does a hook that is added or removed, as it may change what a text is read as.
    Writing through `weight.data` leaves no trace. Weights made in inference mode have no versions, and no mark.
    """

    def __init__(self, model: Any) -> None:
        self.owners = [module._parameters for module in model.modules() if module._parameters]
        self.hooks = [vars(module)[kind] for module in model.modules() for kind in HOOKS[:2]]

    def read(self) -> list[Any] | None:
        """Return the mark; None if there is none."""
        # by the numbers of their handles
        mark: list[Any] = [tuple(hooks) for hooks in self.hooks if hooks]
        try:
            for owner in self.owners:
                for weight in owner.values():
                    if weight is not None:
                        # a packed weight has no address
                        address = id(weight) if weight.is_mkldnn else weight.data_ptr()
                        mark.append((address, weight._version))
        except RuntimeError:  # made in inference mode, or without memory of its own
            return None
        return mark


# what every module has, the mode of training and parameters among it, and what this package holds of a model
IGNORED = {*vars(nn.Module()), "_eagle_held"}
ATTENTION_KEY = "_attn_implementation_internal"  # of a config, which is asked for its attention at every forward
PLAIN = (int, float, str, bool, bytes, type(None))
DEEPEST = 3  # of containers within an attribute, as an adapter's factors by name
Entry = tuple[int, str]  # the index of a module in the model, or a config's below 0, and a name


class ModelMark:
    """A mark of a model's modules, their buffers, attributes and hooks, and of its config's values.

    An adapter that is added, switched or scaled changes it; so does a module, a hook or a `forward` that replaces
    another. `volatile` are the entries that a forward of the model sets by itself, which are left out. Hooks
    are compared of the modules `hooked`, in a second set of which they are copies; others are shared.
    """

    def __init__(
        self,
        model: Any,
        config: Any,
        hooked: set[int],
        volatile: frozenset[Entry] = frozenset(),
    ) -> None:
        self.model = model
        self.config = config
        self.hooked = hooked
        self.volatile = volatile
        self.alive: list[
            Any
        ] = []  # what is known by its id stays alive, so that nothing else gets that id
        self.marked = self._read(self.alive)

    def differences(self) -> frozenset[Entry]:
        """Return the entries that are others than when the model was marked."""
        now = self._read([])
        keys = self.marked.keys() | now.keys()
        changed = (key for key in keys if self.marked.get(key) != now.get(key))
        return frozenset(changed) - self.volatile

    def _read(self, alive: list[Any]) -> dict[Entry, Any]:
        """Return what is compared, by the index of a module in the model and a name; `alive` gets what has an id."""
        mark: dict[Entry, Any] = {}
        for index, module in enumerate(self.model.modules()):
            alive.append(module)
            mark[index, "module"] = id(module)
            for name, value in _entries(module, id(module) in self.hooked):
                mark[index, name] = _freeze(value, alive)
        for index, config in enumerate((self.model.config, self.config)):
            for name, value in vars(config).items():
                if name != ATTENTION_KEY:
                    mark[-1 - index, name] = _freeze(value, alive)
        return mark


def _freeze(value: Any, alive: list[Any], depth: int = 0) -> Any:
    """Return plain values and containers of them as they are now, and other objects' ids."""
    if isinstance(value, PLAIN):
        return value
    if depth < DEEPEST and isinstance(value, (list, tuple, set, frozenset)):
        return [_freeze(item, alive, depth + 1) for item in value]
    if depth < DEEPEST and isinstance(value, dict):
        return {
            key: _freeze(item, alive, depth + 1)
            for key, item in value.items()
            if isinstance(key, PLAIN)
        }
    alive.append(value)
    return id(value)


def _entries(module: Any, with_hooks: bool) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of a module that are compared."""
    for name, value in vars(module).items():
        if name not in IGNORED:
            yield name, value
    for kind in ("_modules", "_buffers", *HOOKS) if with_hooks else ("_modules", "_buffers"):
        yield kind, list(vars(module)[kind].items())
    for name, buffer in module._buffers.items():
        # one made in inference mode counts no versions
        if buffer is not None and not buffer.is_inference():
            yield f"{name}'s version", buffer._version
