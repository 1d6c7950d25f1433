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
from transformers.cache_utils import Cache, LinearAttentionLayer

from eagle.target.trees.mixer_state import State, join, row_of
from eagle.target.trees.tree_plan import Paths, Plan

# States as large as the weights that are read in the time of one step of a path. On a CPU, 11.5 suits chains and trees
# of Qwen3.5-like and Bamba-like layers in fp32 and bf16; other devices have kernels that keep a state while they scan,
# so that the traffic of weights decides alone there.
STEP_STATES = {"cpu": 11.5}
WRITERS = {"update_conv_state": 1, "update_recurrent_state": 1, "set_linear_cache": 0}  # and where they take the layer


class Projections:
    """The outputs of a mixer's projections at every node of a tree, in the order of their calls."""

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []
        self.given = 0
        self.is_complete = False

    def compute(self, linear: Callable[[Tensor], Tensor], rows: Tensor, paths: Paths) -> Tensor:
        """The projection of rows [P, D, ..], computed once a node, or as it was computed before."""
        if not self.is_complete:
            nodes = rows.flatten(0, 1)
            self.outputs.append(linear(nodes if paths.is_whole else nodes.index_select(0, paths.places(nodes.device))))
        nodes = self.outputs[self.given]
        self.given += 1
        return (nodes if paths.is_whole else nodes.index_select(0, paths.nodes(nodes.device))).unflatten(
            0, (-1, paths.longest)
        )


class Mixer:
    """A module that reads and writes a state, wrapped so that it runs from any state given to it.

    Mixers of two readers of one model are equal, so that what one has read the other may go on from.
    """

    def __init__(
        self, name: str, module: nn.Module, layer: int | None, numbers: set[int], own: list[tuple[nn.Module, str]]
    ) -> None:
        self.name, self.module, self.layer = name, module, layer
        self.numbers, self.own = numbers, own  # of its states in the cache's layer; attributes that hold a state
        self.stock = module.forward
        self.names = list(inspect.signature(self.stock).parameters)
        self.running: tuple[Projections, Paths] | None = None
        for linear in [part for part in module.modules() if isinstance(part, nn.Linear)]:
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
        """The output for rows of these inputs, from a state that may be overwritten, and the state behind each row."""
        cache = self._fork(inputs, state)
        arguments: dict[str, Any] = {}
        for name, value in inputs.items():
            # a path is causal by nature, and its padding stands behind it
            arguments[name] = cache if isinstance(value, Cache) else None if "mask" in name else paths.gather(value)
        held = [getattr(owner, name) for owner, name in self.own]
        if projections is not None:
            projections.given, self.running = 0, (projections, paths)
        try:
            self._set_own([state.get(("own", place)) for place in range(len(self.own))])
            output = self.stock(**arguments)
            return output, self._read_state(cache)
        finally:
            self.running = None
            self._set_own(held)

    def kind_of(self, state: State) -> Any:
        """Equal for states that can be rows of one."""
        return bool(state)

    def _set_own(self, values: Sequence[Any]) -> None:
        for (owner, name), value in zip(self.own, values, strict=True):
            setattr(owner, name, value)

    def _fork(self, inputs: Mapping[str, Any], state: State) -> Any:
        """The cache among the inputs with this state in it; layers of attention are shared."""
        cache: Any = next((value for value in inputs.values() if isinstance(value, Cache)), None)
        if cache is None or self.layer is None:
            return cache
        forked, layer = copy.copy(cache), LinearAttentionLayer(number_of_states=max(self.numbers, default=0) + 1)
        forked.layers = list(cache.layers)
        forked.layers[self.layer] = layer
        for name in forked.lists:
            setattr(forked, name, [None] * len(cache.layers))
        for (kind, number), tensor in state.items():
            if kind == "list":
                getattr(forked, number)[self.layer] = tensor
            elif kind != "own":
                getattr(layer, f"{kind}_states")[number] = tensor
                getattr(layer, f"is_{kind}_states_initialized")[number] = True
                layer.has_previous_state[number] = True
                layer.device, layer.dtype = tensor.device, tensor.dtype
                if kind == "conv":
                    layer.conv_kernel_size[number] = tensor.shape[-1]
        return forked

    def _read_state(self, cache: Any) -> State:
        """The state that a run left in its fork and in the module's attributes."""
        state: State = {("own", place): getattr(owner, name) for place, (owner, name) in enumerate(self.own)}
        if cache is not None and self.layer is not None:
            layer = cache.layers[self.layer]
            state |= {("conv", number): layer.conv_states[number] for number in self.numbers}
            state |= {("recurrent", number): layer.recurrent_states[number] for number in self.numbers}
            state |= {("list", name): getattr(cache, name)[self.layer] for name in cache.lists}
        return {key: tensor for key, tensor in state.items() if isinstance(tensor, Tensor)}

    def _project(self, linear: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        if self.running is None or rows.dim() != 3:
            return linear(rows)
        projections, paths = self.running
        if rows.shape[:2] != (len(paths.paths), paths.longest):
            return linear(rows)
        return projections.compute(linear, rows, paths)


class WholeModel(Mixer):
    """A whole model with its own kind of cache: any that can go on from a copy of it."""

    def __init__(self, base: nn.Module, cache_name: str, *, singly: bool) -> None:
        super().__init__("", base, None, set(), [])
        self.cache_name, self.singly = cache_name, singly
        self.rows: Paths | None = None  # that it is reading

    def run(
        self, inputs: Mapping[str, Any], state: State, paths: Paths, projections: Projections | None
    ) -> tuple[Any, State]:
        """The hidden states at rows of tokens, and the model's own cache behind each row."""
        arguments = {name: paths.gather(value) for name, value in inputs.items() if "mask" not in name}
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
        """A token of each row after the other."""
        outputs = []
        for row, path in enumerate(paths.paths):
            self.rows = Paths([path], paths.shape)
            outputs.append(self.stock(**row_of(arguments, row)))
        hidden = torch.cat([output.last_hidden_state for output in outputs])
        return hidden, {("cache", 0): join([getattr(output, self.cache_name) for output in outputs])}


class Mixers:
    """The mixers of one model, which report to the forward that is being read; without one they run as they are."""

    def __init__(self, mixers: Sequence[Mixer] = (), *, by_levels: bool = False, most_bytes: int | None = None) -> None:
        self.mixers = list(mixers)
        self.by_levels = by_levels  # whether they ignore their state when they are given several tokens
        self.most_bytes = most_bytes  # of states in one forward by levels, where both ways are right; None: one is
        self.reading: Any = None
        self.state_bytes = self.column_bytes = 0  # of a text's states and of a token's keys and values, once measured
        for mixer in self.mixers:
            mixer.module.forward = partial(self._report, mixer)

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of the projections, which every call reads."""
        modules = {part for mixer in self.mixers for part in mixer.module.modules() if isinstance(part, nn.Linear)}
        return sum(part.weight.nbytes for part in modules)

    def each_way(self) -> Iterator[None]:
        """Both ways in turn where a forward may take either, else the one there is; then all is as it was."""
        most = self.most_bytes
        if most is None:
            yield
            return
        self.most_bytes = None
        try:
            for self.by_levels in (True, False):
                yield
        finally:
            self.most_bytes, self.by_levels = most, False

    def takes_levels(self, plan: Plan, *, grows: bool = False) -> bool:
        """Whether a forward reads its trees by levels, which is cheaper for many short paths.

        A call for each of D levels reads the projections' weights, and each of N nodes its state. R paths, and the one
        that is kept, take D steps each. A forward that `grows` another by levels takes fewer steps than all paths.
        """
        if self.most_bytes is None:
            return self.by_levels
        nodes = sum(map(len, plan.parents))
        if nodes * self.state_bytes > self.most_bytes:
            return False
        rows = plan.to_leaves
        steps = (len(rows.paths) + 1) * rows.longest - nodes
        step = STEP_STATES.get(self.mixers[0].device.type, 0) * self.state_bytes
        return grows or (len(plan.levels) - 1) * self.weight_bytes <= steps * step

    def _report(self, mixer: Mixer, *args: Any, **kwargs: Any) -> Any:
        if self.reading is None:
            return mixer.stock(*args, **kwargs)
        return self.reading.read(mixer, dict(zip(mixer.names, args, strict=False)) | kwargs)

    def to_nodes(self, rows: Tensor, held: Tensor | None) -> Tensor:
        """[B, R, D], a layer's input at nodes: as it is, or put there from rows [P, D, ..] of a whole model."""
        paths = self.mixers[0].rows if self.mixers and isinstance(self.mixers[0], WholeModel) else None
        if paths is None:
            return rows
        if held is None:
            held = rows.new_zeros(*paths.shape, *rows.shape[2:])
        return held.flatten(0, 1).index_copy(0, paths.nodes(rows.device), rows.flatten(0, 1)).view_as(held)

    @contextmanager
    def reporting_to(self, reading: Any) -> Iterator[None]:
        """A context in which the mixers report to a forward."""
        self.reading = reading
        try:
            yield
        finally:
            self.reading = None


def find_mixers(model: nn.Module, cache: Any, read: Callable[[Any], Any]) -> list[Mixer]:
    """The outermost modules that write a state while `read(cache)` runs the model on two texts."""
    names = {module: name for name, module in model.named_modules()}
    before = {module: dict(vars(module)) for module in names}
    with watch_writes(names, cache, WRITERS) as writes:
        read(cache)
    for module in names:
        for name, value in vars(module).items():
            # a state has a row for each text, which other tensors that a forward leaves behind do not
            if isinstance(value, Tensor) and value is not before[module].get(name) and len(value) == 2:
                writes.setdefault(module, (None, set(), []))[2].append((module, name))
                setattr(module, name, before[module].get(name))
    for module in sorted(writes, key=lambda module: len(names[module]), reverse=True):
        outer = [other for other in writes if other is not module and names[module].startswith(names[other] + ".")]
        if outer:  # it runs inside, and its states are the outer one's
            _, numbers, attributes = writes.pop(module)
            writes[outer[0]][1].update(numbers)
            writes[outer[0]][2].extend(attributes)
    return [Mixer(names[module], module, *place) for module, place in writes.items()]


@contextmanager
def watch_writes(
    names: Mapping[nn.Module, str], cache: Any, writers: Mapping[str, int]
) -> Iterator[dict[nn.Module, Any]]:
    """A context that records which module was running when one of these methods wrote to the cache, and its layer.

    `writers` tell the place of the layer's number among a method's arguments.
    """
    running: list[nn.Module] = []
    writes: dict[nn.Module, tuple[int | None, set[int], list[tuple[nn.Module, str]]]] = {}
    handles = [module.register_forward_pre_hook(lambda module, _: running.append(module)) for module in names]
    handles += [module.register_forward_hook(lambda *_: running.pop() and None) for module in names]

    def watch(write: Callable[..., Any], place: int, *args: Any, **kwargs: Any) -> Any:
        layer = kwargs["layer_idx"] if "layer_idx" in kwargs else args[place]
        writes.setdefault(running[-1], (layer, set(), []))[1].add(kwargs.get("state_idx", 0))
        return write(*args, **kwargs)

    for writer, place in writers.items():
        if hasattr(cache, writer):
            setattr(cache, writer, partial(watch, getattr(cache, writer), place))
    try:
        yield writes
    finally:
        for handle in handles:
            handle.remove()
