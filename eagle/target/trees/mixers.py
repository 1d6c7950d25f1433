"""Modules of a model that keep a state from token to token, run over paths of a tree from copies of that state.

A recurrent state, as Mamba's or a linear attention's, cannot be masked. So a tree is read path by path: every path from
the root to a leaf is a row of a batch, and begins with a copy of the sequence's state.
"""

# P paths, D nodes of the longest path

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import LinearAttentionLayer

from eagle.target.trees.tree_plan import Paths, Plan

# The time of one step of a path, in times that it takes to read as many bytes of weights as a state has. On a CPU, 11.5
# suits chains and trees of Qwen3.5-like and Bamba-like layers in fp32 and bf16. Other devices have kernels that keep a
# state while they scan, so that only the reading of weights takes time there.
STEP_STATES = {"cpu": 11.5}
# methods of a cache that write a state, and which of their arguments is the layer's index
WRITERS = {"update_conv_state": 1, "update_recurrent_state": 1, "set_linear_cache": 0}

State = dict[tuple[str, Any], Any]
"""The states of P rows by kind and key: tensors [P, ..], or a model's own cache; {} before the first token.

Kinds are "conv" and "recurrent" with the state's number in the cache's layer, "list" with the name of a cache's list,
"attribute" with an index of `Mixer.attributes`, and "cache" or "layer" for a whole cache or a layer of one.
"""


def split_state(state: State, count: int) -> list[State]:
    """Split the joined states of `count` rows of a batch into a state for each row; the reverse of `join_rows`."""
    return [row_of(state, row) for row in range(count)]


def join_rows(values: Sequence[Any]) -> Any:
    """Join values of one row each into one value with all rows; the reverse of `row_of`.

    A value is a tensor, a cache, or a container of such, as a `State` is. Their tensors are concatenated. Each path
    through a tree becomes a row of a batch, and begins with a state of its own.
    """
    # a tensor of one dimension or none, such as a counter, has no rows: it is the same for all values
    if isinstance(values[0], Tensor):
        return torch.cat(list(values)) if values[0].dim() > 1 else values[0]
    return _rebuild(values[0], lambda *items: join_rows(items), values)


def row_of(value: Any, row: int) -> Any:
    """Return a copy of a tensor, cache or container with only one row of each tensor that it holds.

    A path through a tree was one row of a batch, and this is the state after it.
    """
    if isinstance(value, Tensor):
        return value[row : row + 1] if value.dim() > 1 else value
    return _rebuild(value, lambda item: row_of(item, row), [value])


def count_bytes(value: Any) -> int:
    """Return the bytes of all tensors that a value holds: a tensor, a cache, or a container of such.

    The recurrent states of a sequence are such values, and count toward the cache's limit.
    """
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(count_bytes, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(count_bytes, value))
    return count_bytes(vars(value)) if is_cache(value) else 0


def is_cache(value: Any) -> bool:
    """Return whether a value is a cache of transformers or a component of one, whose tensors lie in its attributes.

    Then the tensors of a state are found in its attributes.
    """
    return isinstance(value, Cache) or type(value).__module__.startswith("transformers.")


def _rebuild(value: Any, change: Callable[..., Any], values: Sequence[Any]) -> Any:
    """Return a copy of a container or a cache, with each item made by `change`.

    Args:
        value: a dict, list, tuple, cache or cache layer; anything else is returned unchanged.
        change: gets the items at the same key or index of all `values`, and returns the item of the copy.
        values: containers or caches of the same structure as `value`.
    """
    if isinstance(value, dict):
        items = {}
        for key in value:
            items[key] = change(*[container[key] for container in values])
        return items
    if isinstance(value, (list, tuple)):
        return type(value)(change(*items) for items in zip(*values, strict=True))
    if not is_cache(value):
        return value
    rebuilt = copy.copy(value)
    vars(rebuilt).update(_rebuild(vars(value), change, [vars(owner) for owner in values]))
    return rebuilt


class Projections:
    """The outputs of a mixer's linear layers at every node of a tree, in the order of their calls.

    A node lies on several paths, but is projected only once. The run that commits a path then uses the outputs again.
    """

    def __init__(self) -> None:
        """Begin without outputs; the first run over the tree fills them."""
        self.outputs: list[Tensor] = []
        self.calls = 0  # calls of linear layers in the current run of the mixer
        self.is_complete = False  # whether a first run has filled `outputs`

    def compute(self, linear: Callable[[Tensor], Tensor], rows: Tensor, paths: Paths) -> Tensor:
        """Return [P, D, ..], a linear layer's output at the nodes of P paths, computed at most once per node.

        The first run over the tree computes and keeps it; the run that commits a path picks its nodes from what was
        kept.

        Args:
            linear: the layer's own forward.
            rows: [P, D, ..], its input at the nodes of P paths, padded to the D nodes of the longest.
            paths: the paths.
        """
        device = rows.device
        if not self.is_complete:
            nodes = rows.flatten(0, 1)  # [P * D, ..]
            # pick each node from one of the paths that it lies on
            if not paths.is_whole:
                nodes = nodes.index_select(0, paths.steps(device))
            self.outputs.append(linear(nodes))
        # [nodes, ..]: a mixer calls its linear layers in the same order in every run
        output = self.outputs[self.calls]
        self.calls += 1
        if not paths.is_whole:
            output = output.index_select(0, paths.nodes(output.device))
        return output.unflatten(0, (-1, paths.longest))


class Mixer:
    """A module that reads and writes a recurrent state, wrapped so that it can run from any given state.

    Mixers with the same name are equal: a state that one reader of a model has computed also serves its other readers.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        layer: int | None,
        state_ids: set[int],
        attributes: list[tuple[nn.Module, str]],
    ) -> None:
        """Wrap a module that keeps a recurrent state, as Mamba's does, to run it over the paths of a tree.

        Args:
            name: its name in the model.
            module: the module.
            layer: the index of the cache's layer that it writes to; None for none.
            state_ids: the numbers by which that layer counts its states.
            attributes: where it keeps a state without a cache: pairs of a module, itself or one in it, and the name of
                an attribute.
        """
        self.name = name
        self.module = module
        self.layer = layer
        self.state_ids = state_ids
        self.attributes = attributes
        self.original_forward = module.forward
        self.argument_names = list(inspect.signature(self.original_forward).parameters)
        # where the linear layers of the current run find outputs, and its paths; None: they compute every row
        self.running: tuple[Projections, Paths] | None = None
        # replaced in this set of modules for good
        linears = [submodule for submodule in module.modules() if isinstance(submodule, nn.Linear)]
        for linear in linears:
            linear.forward = partial(self._project, linear.forward)  # type: ignore[method-assign]

    @property
    def device(self) -> torch.device:
        """The device of the module's first weight, on which its states are kept."""
        return next(self.module.parameters()).device

    def __eq__(self, other: object) -> bool:
        """Return whether the other is a mixer of this name: a dict of states by mixer serves all readers of a model.

        A mixer is a module with a recurrent state.
        """
        return isinstance(other, Mixer) and other.name == self.name

    def __hash__(self) -> int:
        """Return the name's hash: mixers (modules with a recurrent state) of one name are equal."""
        return hash(self.name)

    def run(
        self, inputs: Mapping[str, Any], state: State, paths: Paths, projections: Projections | None
    ) -> tuple[Any, State]:
        """Run the module over paths of trees, each from a given state, without changing the model's cache.

        Args:
            inputs: the arguments of its forward by name, at all R nodes of B sequences [B, R, ..], from which the paths
                are gathered.
            state: the state that each path goes on from, joined as rows of a batch, which may be overwritten.
            paths: the P paths, which are the rows of the run.
            projections: where linear layers find or leave their outputs by node; None: they compute every row.

        Returns:
            The output of the rows, and the state after each, joined.
        """
        cache = self._copy_cache(inputs, state)
        arguments: dict[str, Any] = {}
        for name, value in inputs.items():
            if isinstance(value, Cache):
                arguments[name] = cache
            elif "mask" in name:
                # a path needs no mask: it is read in order, and its padding comes last
                arguments[name] = None
            else:
                arguments[name] = paths.gather(value)
        # states that the module keeps in attributes are swapped in for the run
        saved = [getattr(owner, name) for owner, name in self.attributes]
        with self._projecting(projections, paths):
            try:
                self._set_attributes(
                    [state.get(("attribute", index)) for index in range(len(self.attributes))]
                )
                output = self.original_forward(**arguments)
                return output, self._read_state(cache)
            finally:
                self._set_attributes(saved)

    @contextmanager
    def _projecting(self, projections: Projections | None, paths: Paths) -> Iterator[None]:
        """A context in which this module's linear layers compute once per node of a tree, unless `projections` is None.

        A node lies on several paths, which are the rows of the run.
        """
        if projections is not None:
            projections.calls = 0  # a new run calls the first linear layer first
            self.running = (projections, paths)
        try:
            yield
        finally:
            self.running = None

    def kind_of(self, state: State) -> Any:
        """Return a value that is equal for states that can be joined as rows; here whether there is a state."""
        return bool(state)

    def _set_attributes(self, values: Sequence[Any]) -> None:
        """Set the attributes in which the module keeps a recurrent state, one value for each.

        Some models keep their state in attributes of a module and not in the cache.
        """
        for (owner, name), value in zip(self.attributes, values, strict=True):
            setattr(owner, name, value)

    def _copy_cache(self, inputs: Mapping[str, Any], state: State) -> Any:
        """Return a copy of the cache among the inputs in which this module's layer holds the given recurrent state.

        The other layers are shared with the cache. None if the inputs hold no cache. A run over paths writes to the
        copy, so that the sequence's own state stays.
        """
        caches = [value for value in inputs.values() if isinstance(value, Cache)]
        cache: Any = caches[0] if caches else None
        if cache is None or self.layer is None:
            return cache
        # a new layer, as the rows of the run are paths and not the cache's sequences
        layer = LinearAttentionLayer(number_of_states=max(self.state_ids, default=0) + 1)
        copied = copy.copy(cache)
        copied.layers = list(cache.layers)
        copied.layers[self.layer] = layer
        # lists with an entry for each layer, which some models look up in their cache: only this layer's is set below
        for name in copied.lists:
            setattr(copied, name, [None] * len(cache.layers))
        for (kind, key), tensor in state.items():
            if kind == "list":
                getattr(copied, key)[self.layer] = tensor
            # states in attributes are set on the module instead
            elif kind != "attribute":
                _set_layer_state(layer, kind, key, tensor)
        return copied

    def _read_state(self, cache: Any) -> State:
        """Return the state that a run left in its copy of the cache and in the module's attributes.

        `cache` is the copy, or None for a module without one.
        """
        state: State = {}
        for index, (owner, name) in enumerate(self.attributes):
            state["attribute", index] = getattr(owner, name)
        if cache is not None and self.layer is not None:
            layer = cache.layers[self.layer]
            for state_id in self.state_ids:
                state["conv", state_id] = layer.conv_states[state_id]
                state["recurrent", state_id] = layer.recurrent_states[state_id]
            for name in cache.lists:
                state["list", name] = getattr(cache, name)[self.layer]
        # entries of kinds that the layer does not use are None
        return {key: tensor for key, tensor in state.items() if isinstance(tensor, Tensor)}

    def _project(self, linear: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        """Stand in for the forward of a linear layer, and compute it once per node where that is possible.

        A node lies on several paths of a tree, and its product is the same on each.

        Args:
            linear: the layer's own forward.
            rows: its input, [P, D, ..] for P paths of up to D nodes in a run over paths.
        """
        # outside of a run over paths
        if self.running is None or rows.dim() != 3:
            return linear(rows)
        projections, paths = self.running
        # some linear layers read something else than the rows of nodes, as a gate over heads does
        if rows.shape[:2] != (len(paths.paths), paths.longest):
            return linear(rows)
        return projections.compute(linear, rows, paths)


def _set_layer_state(layer: Any, kind: str, state_id: int, tensor: Tensor) -> None:
    """Put a "conv" (convolution) or "recurrent" state into a layer of transformers' cache, as its update does.

    The layer is changed in place, and says from then on that it has a state. `state_id` is the state's number in it.
    """
    getattr(layer, f"{kind}_states")[state_id] = tensor
    getattr(layer, f"is_{kind}_states_initialized")[state_id] = True
    layer.has_previous_state[state_id] = True
    layer.device = tensor.device
    layer.dtype = tensor.dtype
    if kind == "conv":
        layer.conv_kernel_size[state_id] = tensor.shape[-1]


class WholeModel(Mixer):
    """A whole model with its own kind of cache, as one mixer: for any model that can go on from a copy of its cache."""

    def __init__(self, base: nn.Module, cache_name: str, *, singly: bool) -> None:
        """Wrap a base model, the model below its LM head, which then runs over the paths of a tree.

        Args:
            base: the model below the LM head.
            cache_name: the argument of its forward that takes a cache.
            singly: read rows of one token one after another, for models that read such batches wrong.
        """
        # it writes to no layer of a cache and no attribute: its state is its own cache
        super().__init__(name="", module=base, layer=None, state_ids=set(), attributes=[])
        self.cache_name = cache_name
        self.singly = singly
        self.rows: Paths | None = None  # the paths of the run that is going on

    def run(
        self, inputs: Mapping[str, Any], state: State, paths: Paths, projections: Projections | None
    ) -> tuple[Any, State]:
        """Return the hidden states [P, D, width] along P paths, and as state the model's own cache after each path.

        Args:
            inputs: the arguments of its forward by name, at all R nodes of B sequences [B, R, ..].
            state: the caches that the paths go on from, joined as rows of a batch; {}: no token was read before.
            paths: the paths, padded to the D nodes of the longest.
            projections: unused, as linear layers are not shared.
        """
        # without masks: a path is read in order, and its padding comes last
        arguments = {
            name: paths.gather(value) for name, value in inputs.items() if "mask" not in name
        }
        arguments[self.cache_name] = state.get(("cache", 0))  # with None the model makes one
        self.rows = paths
        try:
            if self.singly and paths.longest == 1:
                return self._step(arguments, paths)
            output = self.original_forward(**arguments)
        finally:
            self.rows = None
        return output.last_hidden_state, {("cache", 0): getattr(output, self.cache_name)}

    def _step(self, arguments: dict[str, Any], paths: Paths) -> tuple[Tensor, State]:
        """Read the one token of each row in a forward of its own; return states [P, 1, width] and the joined caches.

        For models that give wrong states for a batch of single tokens.

        Args:
            arguments: of the model's forward, with all P rows.
            paths: P paths of one node each.
        """
        outputs = []
        for row, path in enumerate(paths.paths):
            # `Mixers.to_nodes` then knows the node that the tapped states belong to
            self.rows = Paths([path], paths.shape)
            outputs.append(self.original_forward(**row_of(arguments, row)))
        hidden = torch.cat([output.last_hidden_state for output in outputs])
        caches = [getattr(output, self.cache_name) for output in outputs]
        return hidden, {("cache", 0): join_rows(caches)}


class Mixers:
    """The mixers of one model: its modules that a mask cannot steer, most of which keep a recurrent state.

    While a `Reading` (a forward over trees) is set, their forwards go to it; else they run unchanged.
    """

    def __init__(
        self,
        mixers: Sequence[Mixer] = (),
        *,
        by_levels: bool = False,
        most_bytes: int | None = None,
    ) -> None:
        """Replace the forward of each mixer by `_report`, so that it can read a tree.

        A tree is read by paths, in one call with every path from the root to a leaf as a row, or by levels, in one call
        for the nodes of each depth.

        Args:
            mixers: the modules that a mask cannot steer, most of which keep a state; none for plain attention.
            by_levels: whether trees are read by levels, as is needed where mixers ignore their state when they get
                several tokens.
            most_bytes: None if trees must be read as `by_levels` says. Else both ways are right, and a tree may be read
                by levels if the states of its nodes take no more than these bytes.
        """
        self.mixers = list(mixers)
        self.by_levels = by_levels
        self.most_bytes = most_bytes
        # the `Reading` of the forward that runs; None outside of one
        self.reading: Any = None
        # bytes of one sequence's states, and of one token's keys and values in all layers; 0 until measured
        self.state_bytes = 0
        self.column_bytes = 0
        # replaced in the model for good
        for mixer in self.mixers:
            mixer.module.forward = partial(self._report, mixer)

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of the linear layers' weights in the mixers (modules with a state), which every call reads.

        They are a measure of a call's time.
        """
        # a set, as one mixer's modules may lie in another
        modules = set[nn.Module]().union(*(mixer.module.modules() for mixer in self.mixers))
        return sum(module.weight.nbytes for module in modules if isinstance(module, nn.Linear))

    def each_way(self) -> Iterator[None]:
        """Yield once with trees read by levels and once by paths, or just once if only one way is right.

        A check loops over it so that forwards in the loop's body take each way; the settings are restored at the end.
        By levels, a module is called for each depth of a tree; by paths, once for all paths from the root to a leaf.
        """
        most_bytes = self.most_bytes
        if most_bytes is None:
            yield
            return
        self.most_bytes = None
        try:
            # each round sets the attribute
            for self.by_levels in (True, False):
                yield
        finally:
            self.most_bytes = most_bytes
            self.by_levels = False

    def chooses_levels(self, plan: Plan, *, grows: bool = False) -> bool:
        """Return whether a forward should read its trees by levels, which is cheaper for many short paths.

        By levels, a module is called once for each depth of a tree; by paths, once with every path as a row of a batch.

        Args:
            plan: the trees.
            grows: whether the forward adds a level to trees of an earlier forward by levels. It then reads only the new
                nodes, while paths would be read from the root again.
        """
        # only one way is right
        if self.most_bytes is None:
            return self.by_levels
        nodes = sum(map(len, plan.parents))
        # by levels every node has a state in memory
        if nodes * self.state_bytes > self.most_bytes:
            return False
        if grows:
            return True
        # By levels, each level is a call, which reads the weights of the linear layers, and every node takes a step.
        # By paths, there is one call. All paths take the steps of the longest, and so does the run that commits one.
        rows = plan.to_leaves
        more_steps = (len(rows.paths) + 1) * rows.longest - nodes
        # both costs in bytes of weights that could be read in that time
        step_bytes = STEP_STATES.get(self.mixers[0].device.type, 0) * self.state_bytes
        return (len(plan.levels) - 1) * self.weight_bytes <= more_steps * step_bytes

    def _report(self, mixer: Mixer, *args: Any, **kwargs: Any) -> Any:
        """Stand in for a mixer's forward: pass the call to the current `Reading`, or without one run the module.

        `args` and `kwargs` are those of the module's forward, whose output is returned. A `Reading` is a forward over
        draft trees. A mixer is a module that a mask cannot steer.
        """
        if self.reading is None:
            return mixer.original_forward(*args, **kwargs)
        inputs = dict(zip(mixer.argument_names, args, strict=False)) | kwargs
        return self.reading.read(mixer, inputs)

    def to_nodes(self, rows: Tensor, nodes: Tensor | None) -> Tensor:
        """Return a layer's input by node, for a tap that records it.

        A path leads from a tree's root to a leaf.

        Args:
            rows: [B, N, ..], for B sequences by their N new nodes already, or [P, D, ..] by P paths of up to D nodes
                where the whole model runs over paths.
            nodes: [B, R, ..], by all R nodes, what earlier calls of the same forward have returned; None at first.
        """
        # with a whole model there is one mixer
        paths = None
        if self.mixers and isinstance(self.mixers[0], WholeModel):
            paths = self.mixers[0].rows
        if paths is None:
            return rows
        if nodes is None:
            nodes = rows.new_zeros(*paths.shape, *rows.shape[2:])
        # nodes that this call has not read keep their entries
        flat = nodes.flatten(0, 1).index_copy(0, paths.nodes(rows.device), rows.flatten(0, 1))
        return flat.view_as(nodes)

    @contextmanager
    def reporting_to(self, reading: Any) -> Iterator[None]:
        """A context in which modules with a recurrent state are run by `reading`, over the paths of draft trees."""
        self.reading = reading
        try:
            yield
        finally:
            self.reading = None


class Writes:
    """The states that one module writes in a forward: to a layer of the cache, and to attributes."""

    def __init__(self, layer: int | None = None) -> None:
        """Begin without recurrent states that a module was seen to write.

        `layer` is the index of the cache's layer that the module writes to, None for none.
        """
        self.layer = layer
        self.state_ids: set[int] = set()  # the numbers of its states in that layer
        # modules and the names of their attributes
        self.attributes: list[tuple[nn.Module, str]] = []


def find_mixers(model: nn.Module, cache: Any, read: Callable[[Any], Any]) -> list[Mixer]:
    """Return the model's mixers: the outermost modules that write a recurrent state while it runs on two sequences.

    Args:
        model: the model.
        cache: an empty cache.
        read: runs the model with the cache on two sequences.
    """
    names = {module: name for name, module in model.named_modules()}
    # the attributes that a forward replaces are found by comparing with these
    before = {module: dict(vars(module)) for module in names}
    with watch_writes(names, cache, WRITERS) as writes:
        read(cache)
    for module in names:
        for name, value in vars(module).items():
            # a state has a row for each of the two sequences; other tensors that a forward sets have not
            if (
                isinstance(value, Tensor)
                and value is not before[module].get(name)
                and len(value) == 2
            ):
                writes.setdefault(module, Writes()).attributes.append((module, name))
                # the module is left as it was
                setattr(module, name, before[module].get(name))
    # the innermost come first: a module inside another one is run by it, so its states count as the outer one's
    for module in sorted(writes, key=lambda module: len(names[module]), reverse=True):
        for outer in writes:
            if outer is not module and names[module].startswith(names[outer] + "."):
                inner = writes.pop(module)
                writes[outer].state_ids.update(inner.state_ids)
                writes[outer].attributes.extend(inner.attributes)
                break
    return [
        Mixer(names[module], module, found.layer, found.state_ids, found.attributes)
        for module, found in writes.items()
    ]


@contextmanager
def watch_writes(
    names: Mapping[nn.Module, str], cache: Any, writers: Mapping[str, int]
) -> Iterator[dict[nn.Module, Writes]]:
    """A context that yields a dict of what each module writes to a cache by the given methods.

    Args:
        names: the modules that are watched, with their names in the model.
        cache: the cache, which a forward in the context gets; its methods are replaced for good.
        writers: by name of a method of the cache, which of its positional arguments is the layer's index.
    """
    # the modules whose forward is running, the innermost last: it is the one that writes
    running: list[nn.Module] = []
    writes: dict[nn.Module, Writes] = {}

    # hooks before and after the forward of each module
    def enter(module: nn.Module, _: Any) -> None:
        # torch calls this before a module's forward: from here on this module is the innermost that runs
        running.append(module)

    def leave(*_: Any) -> None:
        # torch calls this after a module's forward: the module that called it is the innermost again
        running.pop()

    def watch(write: Callable[..., Any], position: int, *args: Any, **kwargs: Any) -> Any:
        """Note a call of the cache's method `write`, whose argument at `position` is the layer's index, and make it."""
        layer = kwargs["layer_idx"] if "layer_idx" in kwargs else args[position]
        found = writes.setdefault(running[-1], Writes(layer))
        # a layer with a single state does not number it
        found.state_ids.add(kwargs.get("state_idx", 0))
        return write(*args, **kwargs)

    handles = [module.register_forward_pre_hook(enter) for module in names]
    handles += [module.register_forward_hook(leave) for module in names]
    for writer, position in writers.items():
        if hasattr(cache, writer):
            setattr(cache, writer, partial(watch, getattr(cache, writer), position))
    try:
        yield writes
    finally:
        for handle in handles:
            handle.remove()
