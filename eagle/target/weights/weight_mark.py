"""Marks of a model that differ once it was changed: one of its weights, which are not read, and one of all the rest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

# attributes in which a module keeps its hooks; its parameters are marked by `WeightMark`
HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
)


class WeightMark:
    """A mark that differs once a weight of a model was written to in place, or replaced by another.

    It also differs once a hook was added or removed, as a hook may change a sequence's states. A cache of states can be
    reused while the mark is the same. Writes through `weight.data` leave no trace.
    """

    def __init__(self, model: Any) -> None:
        """Find the places of a model's weights and hooks, which `read` then looks at."""
        # the dicts of parameters by name, in which a weight may be replaced
        self.owners = [module._parameters for module in model.modules() if module._parameters]
        # the first two kinds hold the hooks; the others only note which of these take keyword arguments
        self.hooks = [vars(module)[kind] for module in model.modules() for kind in HOOKS[:2]]

    def read(self) -> list[Any] | None:
        """Return the mark, to be compared with later ones: the address and version of each weight, and all hooks.

        None if a weight has no version, as those made in inference mode.
        """
        # hooks are told apart by the numbers of their handles
        mark: list[Any] = [tuple(hooks) for hooks in self.hooks if hooks]
        try:
            for owner in self.owners:
                for weight in owner.values():
                    if weight is not None:
                        # a packed weight has no address
                        address = id(weight) if weight.is_mkldnn else weight.data_ptr()
                        mark.append((address, weight._version))
        # a weight made in inference mode has no version, and one without memory has no address
        except RuntimeError:
            return None
        return mark


# attributes that every module has, such as `training` and parameters, and the one by which this package stores targets
IGNORED = {*vars(nn.Module()), "_eagle_held"}
# config attribute with the name of its attention function; left out, as it is looked up in every forward
ATTENTION_KEY = "_attn_implementation_internal"
PLAIN = (int, float, str, bool, bytes, type(None))
# levels of containers in an attribute that are compared, as an adapter's factors by name
DEEPEST = 3
# the index of a module in the model, or a negative one of a config, and an attribute's name
Entry = tuple[int, str]


class ModelMark:
    """A mark of a model's modules, their buffers, attributes and hooks, and of its config's values.

    It differs once an adapter was added, switched or scaled, or once a module, a hook or a `forward` was replaced. A
    reader must then copy the modules again.
    """

    def __init__(
        self,
        model: Any,
        config: Any,
        hooked: set[int],
        volatile: frozenset[Entry] = frozenset(),
    ) -> None:
        """Record a model's modules, attributes, buffers and hooks as they are now, for `differences` to compare with.

        Args:
            model: the model.
            config: its text config.
            hooked: ids of the modules whose hooks are compared: a reader copies these hooks, and shares all others.
            volatile: the attributes (each an `Entry`) to leave out, as a forward of the model sets them by itself.
        """
        self.model = model
        self.config = config
        self.hooked = hooked
        self.volatile = volatile
        # objects that are compared by their id are kept alive, as the id of a freed object may be used again
        self.alive: list[Any] = []
        # entry -> its value, or the id of the object; reading also adds these objects to `alive`
        self.marked = self._read(self.alive)

    def differences(self) -> frozenset[Entry]:
        """Return what has changed since the model was marked, as (module's index, attribute's name); empty for nothing.

        Attributes that a forward sets by itself (`volatile`) do not count.
        """
        # these objects are alive while they are compared, so the list that would keep them is dropped
        now = self._read(alive=[])
        keys = self.marked.keys() | now.keys()
        changed = (key for key in keys if self.marked.get(key) != now.get(key))
        return frozenset(changed) - self.volatile

    def _read(self, alive: list[Any]) -> dict[Entry, Any]:
        """Return the values to compare, by entry (a module's index and an attribute's name).

        The list `alive` gets the objects that are compared by their id, so that no id is used again.
        """
        mark: dict[Entry, Any] = {}
        for index, module in enumerate(self.model.modules()):
            alive.append(module)
            mark[index, "module"] = id(module)
            for name, value in _entries(module, id(module) in self.hooked):
                mark[index, name] = _freeze(value, alive)
        # -1 for the model's config, and -2 for its text config
        for index, config in enumerate((self.model.config, self.config)):
            for name, value in vars(config).items():
                if name != ATTENTION_KEY:
                    mark[-1 - index, name] = _freeze(value, alive)
        return mark


def _freeze(value: Any, alive: list[Any], depth: int = 0) -> Any:
    """Return a copy of a value to compare with later: containers up to DEEPEST levels, and the ids of other objects.

    Two such copies are equal as long as the value is the same.

    Args:
        value: of an attribute.
        alive: gets the objects whose id is returned, so that no new object takes the id.
        depth: how many containers the value is in.
    """
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
    """Yield the names and values of a module to compare: attributes, modules, buffers, and hooks if asked for.

    A buffer's version, which grows with each write to it in place, is an entry of its own. Two marks of a model are
    compared by them.
    """
    for name, value in vars(module).items():
        if name not in IGNORED:
            yield name, value
    for kind in ("_modules", "_buffers", *HOOKS) if with_hooks else ("_modules", "_buffers"):
        yield kind, list(vars(module)[kind].items())
    for name, buffer in module._buffers.items():
        # a buffer made in inference mode has no version
        if buffer is not None and not buffer.is_inference():
            yield f"{name}'s version", buffer._version
