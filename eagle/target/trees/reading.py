"""One forward of a model that keeps states: over trees, with all that is needed to commit a path of them."""

# B texts, R nodes that are not committed, N of them new, P paths, D nodes of the longest path

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle.device import upload
from eagle.target.trees.mixer_state import State, pick_states, split_state
from eagle.target.trees.mixers import Mixer, Projections
from eagle.target.trees.tree_plan import Path, Paths, Plan, batch_dimension

States = dict[Mixer, State]
"""The states of one text."""


class Reading:
    """A forward in which mixers read trees from the states of committed texts; `keep` gives those behind a path.

    Mixers read all paths in one call, or by `levels`, one call for each depth. A forward that `commits` reads texts.
    """

    def __init__(self, plan: Plan, states: Sequence[States], *, levels: bool, commits: bool = False) -> None:
        self.plan, self.states, self.levels, self.commits = plan, list(states), levels, commits
        self.inputs: dict[Mixer, Any] = {}  # at all nodes
        self.projections: dict[Mixer, Projections | None] = {}
        self.ends: dict[Mixer, list[State]] = {}  # behind each text's last node
        self.behind: dict[Mixer, dict[tuple[int, int], State]] = {}  # nodes (text, node), where read by levels

    def read(self, mixer: Mixer, inputs: dict[str, Any]) -> Any:
        """A mixer's output at the new nodes, given its inputs there."""
        before = [states.get(mixer, {}) for states in self.states]
        if self.commits:
            return self._read_texts(mixer, inputs, before)
        return (self._read_levels if self.levels else self._read_paths)(mixer, inputs, before)

    def _join_inputs(self, mixer: Mixer, inputs: dict[str, Any]) -> dict[str, Any]:
        """A mixer's inputs at all nodes, given those at the new ones."""
        if mixer not in self.inputs:
            return inputs
        (texts, _), first, new = self.plan.shape, self.plan.first, self.plan.new
        return _join_nodes(self.inputs[mixer], inputs, (texts, first), (texts, new))

    def _read_paths(self, mixer: Mixer, inputs: dict[str, Any], before: list[State]) -> Any:
        plan, inputs = self.plan, self._join_inputs(mixer, inputs)
        paths, projections = plan.to_leaves, Projections()
        states = [before[text] for text in paths.texts]
        output, ends = self._run(mixer, inputs, states, paths, projections, splits=paths.is_whole)
        projections.is_complete = True
        self.inputs[mixer], self.projections[mixer] = inputs, projections if projections.outputs else None
        if paths.is_whole:
            self.ends[mixer] = ends
        return _map_rows(lambda rows: paths.scatter(rows, plan.new), output, paths)

    def _run(
        self,
        mixer: Mixer,
        inputs: Mapping[str, Any],
        states: Sequence[State],
        paths: Paths,
        projections: Projections | None,
        *,
        splits: bool = True,
    ) -> tuple[Any, list[State]]:
        """The output for rows from a state each, and the states behind; rows run apart whose states do not join."""
        groups: dict[Any, list[int]] = {}
        for row, state in enumerate(states):
            groups.setdefault(mixer.kind_of(state), []).append(row)
        if len(groups) == 1:
            output, state = mixer.run(inputs, pick_states(states, range(len(states))), paths, projections)
            return output, split_state(state, len(states)) if splits else []
        outputs, behind = [], dict[int, State]()
        for rows in groups.values():
            part = self.plan.paths([paths.paths[row] for row in rows])
            output, state = mixer.run(inputs, pick_states(states, rows), part, None)
            outputs.append(output)
            behind |= dict(zip(rows, split_state(state, len(rows)), strict=True))
        order = torch.tensor([row for rows in groups.values() for row in rows]).argsort()
        joined = _join_rows(outputs, paths.longest)
        joined = _map_rows(lambda rows: rows.index_select(0, upload(order, rows.device)), joined, paths)
        return joined, [behind[row] for row in range(len(states))]

    def _read_levels(self, mixer: Mixer, inputs: dict[str, Any], before: list[State]) -> Any:
        """One call for each depth, every node from its parent's state."""
        plan, behind = self.plan, self.behind.setdefault(mixer, {})
        levels, nodes = plan.level_rows
        outputs: list[Any] = []
        for level, rows in zip(plan.levels, levels, strict=True):
            parents = [(text, plan.parents[text][node]) for text, node in level]
            states = [before[text] if parent == -1 else behind[text, parent] for text, parent in parents]
            output, states = self._run(mixer, inputs, states, rows, None)
            behind |= dict(zip(level, states, strict=True))
            outputs.append(output)
        self.inputs[mixer] = self._join_inputs(mixer, inputs)  # for more nodes than can be read by levels
        return _map_rows(lambda rows: nodes.scatter(rows, plan.new), _join_rows(outputs), nodes)

    def _read_texts(self, mixer: Mixer, inputs: dict[str, Any], before: list[State]) -> Any:
        """Each text by itself and as long as it is, so that padding enters no state; equal ones side by side."""
        plan, outputs = self.plan, []
        texts = [(text, list(range(len(row_parents)))) for text, row_parents in enumerate(plan.parents)]
        whole = plan.paths(texts)
        alike = whole.is_whole and len({mixer.kind_of(state) for state in before}) == 1
        self.ends[mixer] = []
        for paths in [texts] if alike else [[text] for text in texts]:
            output, states = self._read_text(mixer, inputs, [before[text] for text, _ in paths], paths)
            outputs.append(output)
            self.ends[mixer] += states
        if alike:
            return outputs[0]
        return _map_rows(lambda rows: whole.scatter(rows, plan.new), _join_rows(outputs, whole.longest), whole)

    def _read_text(self, mixer: Mixer, inputs: dict[str, Any], before: list[State], paths: list[Path]) -> Any:
        """The output for texts of one length, and the state of each behind it."""
        count, steps = len(paths), [paths]
        if self.levels and before[0]:  # several tokens at once would begin a new text
            steps = [[(text, [node]) for text, _ in paths] for node in paths[0][1]]
        outputs, states = [], before
        for step in steps:
            state = pick_states(states, range(count))
            output, state = mixer.run(inputs, state, self.plan.paths(step), None)
            outputs.append(output)
            states = split_state(state, count)
        return _join_steps(outputs), states

    def keep(self, paths: Mapping[int, Sequence[int]]) -> dict[int, States]:
        """The states of texts behind these paths of theirs."""
        kept: dict[int, States] = {text: {} for text in paths}
        for length in {len(path) for path in paths.values()}:
            texts = [text for text, path in paths.items() if len(path) == length]
            rows = self.plan.paths([(text, list(paths[text])) for text in texts])
            for mixer in self.behind if self.levels else self.inputs:
                for text, state in zip(texts, self._state_behind(mixer, rows), strict=True):
                    kept[text][mixer] = state
        return kept

    def _state_behind(self, mixer: Mixer, rows: Paths) -> list[State]:
        """The mixer's states behind paths of one length."""
        if self.levels:
            return [self.behind[mixer][text, path[-1]] for text, path in rows.paths]
        if mixer in self.ends and rows.longest == self.plan.shape[1]:
            return [self.ends[mixer][text] for text in rows.texts]
        states = [self.states[text].get(mixer, {}) for text in rows.texts]
        return self._run(mixer, self.inputs[mixer], states, rows, self.projections[mixer])[1]

    def narrow(self, kept: Sequence[Path], states: Sequence[States]) -> Reading:
        """The reading of these texts' nodes alone, in this order, as after texts with these states."""
        parents = []
        for text, nodes in kept:
            number = {node: place for place, node in enumerate(nodes)}
            parents.append([number.get(self.plan.parents[text][node], -1) for node in nodes])
        rows = self.plan.paths(kept)
        other = Reading(Plan(parents, rows.longest, 0), states, levels=self.levels)
        other.inputs = {mixer: rows.gather(inputs) for mixer, inputs in self.inputs.items()}
        for mixer, behind in self.behind.items():
            other.behind[mixer] = {
                (row, place): behind[text, node]
                for row, (text, nodes) in enumerate(kept)
                for place, node in enumerate(nodes)
            }
        return other

    def extend(self, plan: Plan, *, levels: bool) -> Reading:
        """A forward over more nodes of the same texts."""
        other = Reading(plan, self.states, levels=levels)
        other.inputs = dict(self.inputs)
        if levels:
            other.behind = {mixer: dict(behind) for mixer, behind in self.behind.items()}
        return other


def _map_rows(change: Callable[[Tensor], Tensor], output: Any, paths: Paths) -> Any:
    """A mixer's output with its tensors [P, D, ..] changed."""
    if isinstance(output, Tensor):
        return change(output) if output.shape[:2] == (len(paths.paths), paths.longest) else output
    return tuple(_map_rows(change, part, paths) for part in output) if isinstance(output, tuple) else output


def _join_rows(outputs: Sequence[Any], longest: int = 0) -> Any:
    """Outputs of several calls, one below the other, padded to the longest."""
    first = outputs[0]
    if isinstance(first, Tensor):
        longest = max(longest, *(len(rows[0]) for rows in outputs))
        padded = [F.pad(rows, (0, 0) * (rows.dim() - 2) + (0, longest - rows.shape[1])) for rows in outputs]
        return torch.cat(padded)
    return tuple(map(_join_rows, zip(*outputs, strict=True))) if isinstance(first, tuple) else first


def _join_steps(outputs: Sequence[Any]) -> Any:
    """Outputs of several calls, one behind the other."""
    if len(outputs) == 1:
        return outputs[0]
    if isinstance(outputs[0], Tensor):
        return torch.cat(list(outputs), dim=1)
    return tuple(map(_join_steps, zip(*outputs, strict=True))) if isinstance(outputs[0], tuple) else outputs[0]


def _join_nodes(old: Any, new: Any, before: tuple[int, int], shape: tuple[int, int]) -> Any:
    """A mixer's inputs at nodes that were read before, and at new ones."""
    if isinstance(new, Tensor) and isinstance(old, Tensor):
        batch = batch_dimension(new, shape)
        if batch is None or batch_dimension(old, before) != batch:
            return new
        sizes = [
            max(a, b) if axis == batch else -1 for axis, (a, b) in enumerate(zip(old.shape, new.shape, strict=True))
        ]
        return torch.cat([old.expand(sizes), new.expand(sizes)], dim=batch + 1)
    if isinstance(new, (tuple, list)):
        return type(new)(_join_nodes(a, b, before, shape) for a, b in zip(old, new, strict=True))
    if isinstance(new, dict):  # masks are made anew for paths
        return {
            name: value if "mask" in name else _join_nodes(old[name], value, before, shape)
            for name, value in new.items()
        }
    return new
