"""Modules of a model that keep a state from token to token, run over paths of a tree from copies of that state."""

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

# States as large as the weights that are read in the time of one step of a path. On a CPU, 11.5 suits chains and trees
# of Qwen3.5-like and Bamba-like layers in fp32 and bf16; other devices have kernels that keep a state while they scan,
# so that the traffic of weights decides alone there.
STEP_STATES = {"cpu": 11.5}
# methods of a cache that write a state, and the position of the layer's index among their arguments
WRITERS = {"update_conv_state": 1, "update_recurrent_state": 1, "set_linear_cache": 0}

State = dict[tuple[str, Any], Any]
"""A state [P, ..] by kind and key: tensors, or a model's own cache; {} before the first token."""


def split_state(state: State, count: int) -> list[State]:
    """Return each row as a state of its own."""
    return [row_of(state, row) for row in range(count)]


def join(values: Sequence[Any]) -> Any:
    """Return rows of one value each as one copy: of tensors, and of states, caches and containers that hold them."""
    # a tensor without rows, as a counter, is the same for all
    if isinstance(values[0], Tensor):
        return torch.cat(list(values)) if values[0].dim() > 1 else values[0]
    return _rebuild(values[0], lambda *items: join(items), values)


def row_of(value: Any, row: int) -> Any:
    """Return one row of a value, and of all tensors that it holds."""
    if isinstance(value, Tensor):
        return value[row : row + 1] if value.dim() > 1 else value
    return _rebuild(value, lambda item: row_of(item, row), [value])


def count_bytes(value: Any) -> int:
    """Return the bytes of all tensors that a value holds."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(count_bytes, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(count_bytes, value))
    return count_bytes(vars(value)) if is_cache(value) else 0


def is_cache(value: Any) -> bool:
    """Return whether a value is a cache or a component of one."""
    return isinstance(value, Cache) or type(value).__module__.startswith("transformers.")


def _rebuild(value: Any, change: Callable[..., Any], values: Sequence[Any]) -> Any:
    """Return a copy of containers, caches and their layers.

    Each item is `change` of the corresponding items of `values`.
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
    """The outputs of a mixer's projections at every node of a tree, in the order of their calls."""

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []
        self.calls = 0  # of the run at hand
        self.is_complete = False

    def compute(self, linear: Callable[[Tensor], Tensor], rows: Tensor, paths: Paths) -> Tensor:
        """Return the projection of rows [P, D, ..], computed once per node, or as it was computed before."""
        device = rows.device
        if not self.is_complete:
            nodes = rows.flatten(0, 1)
            # a node lies on several paths, and is projected once
            if not paths.is_whole:
                nodes = nodes.index_select(0, paths.steps(device))
            self.outputs.append(linear(nodes))
        output = self.outputs[self.calls]
        self.calls += 1
        if not paths.is_whole:
            output = output.index_select(0, paths.nodes(output.device))
        return output.unflatten(0, (-1, paths.longest))


class Mixer:
    """A module that reads and writes a state, wrapped so that it runs from any state given to it.

    Mixers of two readers of one model are equal, so that what one has read the other may go on from.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        layer: int | None,
        state_ids: set[int],
        attributes: list[tuple[nn.Module, str]],
    ) -> None:
        """Wrap a module.

        Args:
            name: its name in the model.
            module: the module.
            layer: the index of the cache's layer that it writes to; None for none.
            state_ids: its states in that layer.
            attributes: the attributes, of it or of modules in it, that hold a state.
        """
        self.name = name
        self.module = module
        self.layer = layer
        self.state_ids = state_ids
        self.attributes = attributes
        self.stock = module.forward
        self.names = list(inspect.signature(self.stock).parameters)
        self.running: tuple[Projections, Paths] | None = None
        linears = [submodule for submodule in module.modules() if isinstance(submodule, nn.Linear)]
        for linear in linears:
            linear.forward = partial(self._project, linear.forward)  # type: ignore[method-assign]

    @property
    def device(self) -> torch.device:
        """Where its weights lie."""
        return next(self.module.parameters()).device

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mixer) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def run(
        self, inputs: Mapping[str, Any], state: State, paths: Paths, projections: Projections | None
    ) -> tuple[Any, State]:
        """Run the module over rows.

        Args:
            inputs: its arguments at all nodes.
            state: the state that each row goes on from, which may be overwritten.
            paths: the rows.
            projections: receives or gives the outputs of its linears; None: they are computed per row.

        Returns:
            The output of the rows, and the state after each.
        """
        cache = self._fork(inputs, state)
        arguments: dict[str, Any] = {}
        for name, value in inputs.items():
            if isinstance(value, Cache):
                arguments[name] = cache
            elif "mask" in name:
                # a path is causal by nature, and its padding comes last
                arguments[name] = None
            else:
                arguments[name] = paths.gather(value)
        saved = [getattr(owner, name) for owner, name in self.attributes]
        with self._projecting(projections, paths):
            try:
                self._set_attributes(
                    [state.get(("own", index)) for index in range(len(self.attributes))]
                )
                output = self.stock(**arguments)
                return output, self._read_state(cache)
            finally:
                self._set_attributes(saved)

    @contextmanager
    def _projecting(self, projections: Projections | None, paths: Paths) -> Iterator[None]:
        """A context in which the linears compute once per node, if there are projections."""
        if projections is not None:
            projections.calls = 0
            self.running = (projections, paths)
        try:
            yield
        finally:
            self.running = None

    def kind_of(self, state: State) -> Any:
        """Return a value that is equal for states that can be rows of one."""
        return bool(state)

    def _set_attributes(self, values: Sequence[Any]) -> None:
        for (owner, name), value in zip(self.attributes, values, strict=True):
            setattr(owner, name, value)

    def _fork(self, inputs: Mapping[str, Any], state: State) -> Any:
        """Return the cache among the inputs with this state in it; layers of attention are shared."""
        caches = [value for value in inputs.values() if isinstance(value, Cache)]
        cache: Any = caches[0] if caches else None
        if cache is None or self.layer is None:
            return cache
        # a layer of its own, so that rows of other states do not mix with the cache's
        layer = LinearAttentionLayer(number_of_states=max(self.state_ids, default=0) + 1)
        forked = copy.copy(cache)
        forked.layers = list(cache.layers)
        forked.layers[self.layer] = layer
        for name in forked.lists:
            setattr(forked, name, [None] * len(cache.layers))
        for (kind, key), tensor in state.items():
            if kind == "list":
                getattr(forked, key)[self.layer] = tensor
            elif kind != "own":
                _set_layer_state(layer, kind, key, tensor)
        return forked

    def _read_state(self, cache: Any) -> State:
        """Return the state that a run left in its fork and in the module's attributes."""
        state: State = {}
        for index, (owner, name) in enumerate(self.attributes):
            state["own", index] = getattr(owner, name)
        if cache is not None and self.layer is not None:
            layer = cache.layers[self.layer]
            for state_id in self.state_ids:
                state["conv", state_id] = layer.conv_states[state_id]
                state["recurrent", state_id] = layer.recurrent_states[state_id]
            for name in cache.lists:
                state["list", name] = getattr(cache, name)[self.layer]
        # a layer has no state of kinds that it does not use
        return {key: tensor for key, tensor in state.items() if isinstance(tensor, Tensor)}

    def _project(self, linear: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        if self.running is None or rows.dim() != 3:
            return linear(rows)
        projections, paths = self.running
        # some linears read something else than the rows, as a gate over heads
        if rows.shape[:2] != (len(paths.paths), paths.longest):
            return linear(rows)
        return projections.compute(linear, rows, paths)


def _set_layer_state(layer: Any, kind: str, state_id: int, tensor: Tensor) -> None:
    """Put a "conv" or "recurrent" state into a layer of transformers' cache, as its own update does."""
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
        """Wrap a base model; with `singly` it reads rows of one token one after another."""
        super().__init__("", base, None, set(), [])
        self.cache_name = cache_name
        self.singly = singly
        self.rows: Paths | None = None  # that it is reading

    def run(
        self, inputs: Mapping[str, Any], state: State, paths: Paths, projections: Projections | None
    ) -> tuple[Any, State]:
        """Return the hidden states at rows of tokens, and the model's own cache after each row."""
        arguments = {
            name: paths.gather(value) for name, value in inputs.items() if "mask" not in name
        }
        arguments[self.cache_name] = state.get(("cache", 0))
        self.rows = paths
        try:
            if self.singly and paths.longest == 1:
                return self._step(arguments, paths)
            output = self.stock(**arguments)
        finally:
            self.rows = None
        return output.last_hidden_state, {("cache", 0): getattr(output, self.cache_name)}

    def _step(self, arguments: dict[str, Any], paths: Paths) -> tuple[Tensor, State]:
        """Read one token of each row, row after row."""
        outputs = []
        for row, path in enumerate(paths.paths):
            # `to_nodes` puts the states that taps see at this path's node
            self.rows = Paths([path], paths.shape)
            outputs.append(self.stock(**row_of(arguments, row)))
        hidden = torch.cat([output.last_hidden_state for output in outputs])
        caches = [getattr(output, self.cache_name) for output in outputs]
        return hidden, {("cache", 0): join(caches)}


class Mixers:
    """The mixers of one model, which report to the forward that is being read; without one they run as they are."""

    def __init__(
        self,
        mixers: Sequence[Mixer] = (),
        *,
        by_levels: bool = False,
        most_bytes: int | None = None,
    ) -> None:
        """Put `_report` in the place of each mixer's forward, so that it can read a tree.

        They read a tree by paths, each from the root to a leaf as a row of its own, or by levels, in one call for each
        depth.

        Args:
            mixers: the modules that a mask cannot steer, most of which keep a state; none for plain attention.
            by_levels: whether forwards read by levels, as they must where mixers ignore their state when they are given
                several tokens.
            most_bytes: None if only the way that `by_levels` names is right. Else both are, and a forward may read by
                levels while the states of its nodes take no more than these bytes.
        """
        self.mixers = list(mixers)
        self.by_levels = by_levels
        self.most_bytes = most_bytes
        # the `Reading` of the forward that runs; None outside of one
        self.reading: Any = None
        # of one sequence's states, and of one token's keys and values in all layers; 0 until measured
        self.state_bytes = 0
        self.column_bytes = 0
        for mixer in self.mixers:
            mixer.module.forward = partial(self._report, mixer)

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of the projections, which every call reads."""
        modules = set[nn.Module]().union(*(mixer.module.modules() for mixer in self.mixers))
        return sum(module.weight.nbytes for module in modules if isinstance(module, nn.Linear))

    def each_way(self) -> Iterator[None]:
        """Yield once for each way that a forward may take, in which forwards then take it; restore all at the end."""
        most_bytes = self.most_bytes
        if most_bytes is None:
            yield
            return
        self.most_bytes = None
        try:
            for self.by_levels in (True, False):
                yield
        finally:
            self.most_bytes = most_bytes
            self.by_levels = False

    def chooses_levels(self, plan: Plan, *, grows: bool = False) -> bool:
        """Return whether a forward reads its trees by levels, which is cheaper for many short paths.

        A forward that `grows` another by levels takes fewer steps than all paths.
        """
        if self.most_bytes is None:
            return self.by_levels
        nodes = sum(map(len, plan.parents))
        if nodes * self.state_bytes > self.most_bytes:
            return False
        if grows:
            return True
        # By levels, each level is a call, which reads the projections' weights, and every node takes a step.
        # By paths, there is one call, and all paths, and then the one that is kept, take as many steps as the longest.
        rows = plan.to_leaves
        more_steps = (len(rows.paths) + 1) * rows.longest - nodes
        step_bytes = STEP_STATES.get(self.mixers[0].device.type, 0) * self.state_bytes
        return (len(plan.levels) - 1) * self.weight_bytes <= more_steps * step_bytes

    def _report(self, mixer: Mixer, *args: Any, **kwargs: Any) -> Any:
        if self.reading is None:
            return mixer.stock(*args, **kwargs)
        inputs = dict(zip(mixer.names, args, strict=False)) | kwargs
        return self.reading.read(mixer, inputs)

    def to_nodes(self, rows: Tensor, nodes: Tensor | None) -> Tensor:
        """Return [B, R, D], a layer's input at nodes.

        It is `rows` as they are, or those [P, D, ..] of a whole model, put into the `nodes` that were seen before.
        """
        paths = None
        if self.mixers and isinstance(self.mixers[0], WholeModel):
            paths = self.mixers[0].rows
        if paths is None:
            return rows
        if nodes is None:
            nodes = rows.new_zeros(*paths.shape, *rows.shape[2:])
        flat = nodes.flatten(0, 1).index_copy(0, paths.nodes(rows.device), rows.flatten(0, 1))
        return flat.view_as(nodes)

    @contextmanager
    def reporting_to(self, reading: Any) -> Iterator[None]:
        """A context in which the mixers report to a forward."""
        self.reading = reading
        try:
            yield
        finally:
            self.reading = None


class Writes:
    """What one module writes in a forward: states in a layer of the cache, and attributes that hold a state."""

    def __init__(self, layer: int | None = None) -> None:
        self.layer = layer
        self.state_ids: set[int] = set()
        self.attributes: list[tuple[nn.Module, str]] = []


def find_mixers(model: nn.Module, cache: Any, read: Callable[[Any], Any]) -> list[Mixer]:
    """Return the outermost modules that write a state while `read(cache)` runs the model on two sequences."""
    names = {module: name for name, module in model.named_modules()}
    before = {module: dict(vars(module)) for module in names}
    with watch_writes(names, cache, WRITERS) as writes:
        read(cache)
    for module in names:
        for name, value in vars(module).items():
            # a state has a row for each of the two sequences; other tensors that a forward leaves behind have not
            if (
                isinstance(value, Tensor)
                and value is not before[module].get(name)
                and len(value) == 2
            ):
                writes.setdefault(module, Writes()).attributes.append((module, name))
                setattr(module, name, before[module].get(name))
    # the innermost first: the states of a module inside another count as that one's, which is run as a whole
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
    """A context that records which module was running when one of these methods wrote to the cache, and its layer.

    Args:
        names: the modules that are watched.
        cache: the cache, which a forward in the context gets.
        writers: the methods' names, and the position of the layer's index among the arguments of each.
    """
    # the modules that have begun and not ended, the innermost last
    running: list[nn.Module] = []
    writes: dict[nn.Module, Writes] = {}

    def enter(module: nn.Module, _: Any) -> None:
        running.append(module)

    def leave(*_: Any) -> None:
        running.pop()

    def watch(write: Callable[..., Any], position: int, *args: Any, **kwargs: Any) -> Any:
        layer = kwargs["layer_idx"] if "layer_idx" in kwargs else args[position]
        found = writes.setdefault(running[-1], Writes(layer))
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
