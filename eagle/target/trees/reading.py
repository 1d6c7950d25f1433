"""One forward of a model that keeps states: over trees, with all that is needed to commit a path of them."""

# B sequences, R nodes that are not committed, N of them new, P paths, D nodes of the longest path

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle.device import upload
from eagle.target.trees.mixers import Mixer, Projections, State, join, split_state
from eagle.target.trees.tree_plan import Path, Paths, Plan, batch_dimension

States = dict[Mixer, State]
"""The states of one sequence."""


class Reading:
    """A forward in which mixers read trees from the states of committed sequences.

    `keep` gives the states after a path. Mixers read all paths in one call, or by `levels`, one call for each depth.
    A forward that `commits` reads tokens of sequences that are all kept, and no trees.
    """

    def __init__(
        self,
        plan: Plan,
        states: Sequence[States],
        *,
        levels: bool,
        commits: bool = False,
    ) -> None:
        self.plan = plan
        self.states = list(states)
        self.levels = levels
        self.commits = commits
        self.inputs: dict[Mixer, Any] = {}  # at all nodes
        self.projections: dict[Mixer, Projections | None] = {}
        self.ends: dict[Mixer, list[State]] = {}  # after each sequence's last node
        # after nodes (sequence, node), if read by levels
        self.node_states: dict[Mixer, dict[tuple[int, int], State]] = {}

    def read(self, mixer: Mixer, inputs: dict[str, Any]) -> Any:
        """Return a mixer's output at the new nodes, given its inputs there."""
        # {} before the first token
        committed = [states.get(mixer, {}) for states in self.states]
        if self.commits:
            return self._read_texts(mixer, inputs, committed)
        if self.levels:
            return self._read_levels(mixer, inputs, committed)
        return self._read_paths(mixer, inputs, committed)

    def _join_inputs(self, mixer: Mixer, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return a mixer's inputs at all R nodes, given those at the N new ones: a path runs from its first node on."""
        if mixer not in self.inputs:
            return inputs
        seqs = self.plan.shape[0]
        return _join_nodes(
            self.inputs[mixer],
            inputs,
            (seqs, self.plan.first),
            (seqs, self.plan.new),
        )

    def _read_paths(self, mixer: Mixer, inputs: dict[str, Any], committed: list[State]) -> Any:
        """Read all paths to leaves in one call, each from the state of its sequence."""
        plan = self.plan
        paths = plan.to_leaves
        # the run that commits a path reuses what the linears compute here
        projections = Projections()
        inputs = self._join_inputs(mixer, inputs)
        states = [committed[seq] for seq in paths.seqs]
        output, ends = self._run(mixer, inputs, states, paths, projections, splits=paths.is_whole)
        projections.is_complete = True
        self.inputs[mixer] = inputs
        self.projections[mixer] = projections if projections.outputs else None
        if paths.is_whole:
            self.ends[mixer] = ends
        return _map_rows(lambda rows: paths.scatter(rows, plan.new), output, paths)

    def _run(
        self,
        mixer: Mixer,
        inputs: Mapping[str, Any],
        states: Sequence[State],
        paths: Paths,
        projections: Projections | None = None,
        *,
        splits: bool = True,
    ) -> tuple[Any, list[State]]:
        """Run a mixer over rows; those whose states do not join run apart.

        Args:
            mixer: the mixer.
            inputs: its inputs at all nodes.
            states: the state that each row goes on from.
            paths: the rows.
            projections: as in `Mixer.run`.
            splits: whether the states are wanted.

        Returns:
            The output of all rows, and the state after each, or [].
        """
        groups: dict[Any, list[int]] = {}
        for row, state in enumerate(states):
            groups.setdefault(mixer.kind_of(state), []).append(row)
        if len(groups) == 1:
            output, state = mixer.run(inputs, join(states), paths, projections)
            return output, split_state(state, len(states)) if splits else []
        outputs = []
        order: list[int] = []
        ends: list[State] = []
        for rows in groups.values():
            group_paths = self.plan.paths([paths.paths[row] for row in rows])
            output, state = mixer.run(
                inputs,
                join([states[row] for row in rows]),
                group_paths,
                None,
            )
            outputs.append(output)
            order += rows
            ends += split_state(state, len(rows))
        # back to the order of the rows
        index = torch.tensor(order).argsort()
        joined = _join_rows(outputs, paths.longest)
        joined = _map_rows(
            lambda rows: rows.index_select(0, upload(index, rows.device)),
            joined,
            paths,
        )
        return joined, [ends[i] for i in index.tolist()]

    def _read_levels(self, mixer: Mixer, inputs: dict[str, Any], committed: list[State]) -> Any:
        """Make one call for each depth, every node from its parent's state."""
        plan = self.plan
        # filled from the root on, so that each level finds its parents' states
        node_states = self.node_states.setdefault(mixer, {})
        levels, nodes = plan.level_rows
        outputs: list[Any] = []
        for level, rows in zip(plan.levels, levels, strict=True):
            states = []
            for seq, node in level:
                parent = plan.parents[seq][node]
                states.append(committed[seq] if parent == -1 else node_states[seq, parent])
            output, states = self._run(mixer, inputs, states, rows)
            node_states |= dict(zip(level, states, strict=True))
            outputs.append(output)
        # a later forward over more nodes may read by paths, and needs the inputs at these
        self.inputs[mixer] = self._join_inputs(mixer, inputs)
        return _map_rows(lambda rows: nodes.scatter(rows, plan.new), _join_rows(outputs), nodes)

    def _read_texts(self, mixer: Mixer, inputs: dict[str, Any], committed: list[State]) -> Any:
        """Read each sequence without padding, which would enter its state.

        All are read in one call if they have one length and their states one kind, else each in a call of its own.
        """
        plan = self.plan
        # a sequence is one path through all of its tokens
        paths = [(seq, list(range(len(parents)))) for seq, parents in enumerate(plan.parents)]
        rows = plan.paths(paths)
        kinds = {mixer.kind_of(state) for state in committed}
        # whole rows have no padding
        is_batch = rows.is_whole and len(kinds) == 1
        calls = [paths] if is_batch else [[path] for path in paths]
        outputs = []
        self.ends[mixer] = []
        for call in calls:
            states = [committed[seq] for seq, _ in call]
            output, ends = self._read_text(mixer, inputs, states, call)
            outputs.append(output)
            self.ends[mixer] += ends
        if is_batch:
            return outputs[0]
        # back to the forward's own padded layout
        return _map_rows(
            lambda tensor: rows.scatter(tensor, plan.new),
            _join_rows(outputs, rows.longest),
            rows,
        )

    def _read_text(
        self,
        mixer: Mixer,
        inputs: dict[str, Any],
        states: list[State],
        paths: list[Path],
    ) -> Any:
        """Return the output for sequences of one length, and the state at the end of each."""
        steps = [paths]
        # such mixers ignore their state when they get several tokens at once, so that they get one at a time
        if self.levels and states[0]:
            steps = [[(seq, [node]) for seq, _ in paths] for node in paths[0][1]]
        outputs = []
        for step in steps:
            output, state = mixer.run(inputs, join(states), self.plan.paths(step), None)
            outputs.append(output)
            states = split_state(state, len(paths))
        return _join_steps(outputs), states

    def keep(self, paths: Mapping[int, Sequence[int]]) -> dict[int, States]:
        """Return by sequence the mixers' states after a path of its nodes, which is to be committed."""
        kept: dict[int, States] = {seq: {} for seq in paths}
        mixers = self.node_states if self.levels else self.inputs
        # padding would enter the states, so that paths of one length run together
        for length in {len(path) for path in paths.values()}:
            group = [(seq, list(path)) for seq, path in paths.items() if len(path) == length]
            rows = self.plan.paths(group)
            for mixer in mixers:
                for seq, state in zip(rows.seqs, self._states_after(mixer, rows), strict=True):
                    kept[seq][mixer] = state
        return kept

    def _states_after(self, mixer: Mixer, rows: Paths) -> list[State]:
        """Return the mixer's states after paths of one length."""
        if self.levels:
            return [self.node_states[mixer][seq, path[-1]] for seq, path in rows.paths]
        # paths through all nodes have left their states
        if mixer in self.ends and rows.longest == self.plan.shape[1]:
            return [self.ends[mixer][seq] for seq in rows.seqs]
        # else the mixer runs again, over these paths alone and without its projections
        states = [self.states[seq].get(mixer, {}) for seq in rows.seqs]
        _, ends = self._run(mixer, self.inputs[mixer], states, rows, self.projections[mixer])
        return ends

    def narrow(self, kept: Sequence[Path], states: Sequence[States]) -> Reading:
        """Return this forward as if it had read only some of its sequences' nodes, which others may then follow.

        Args:
            kept: The sequences, with their remaining nodes in order.
            states: The states of each after its committed tokens.
        """
        parents = []
        for seq, nodes in kept:
            # a parent that is left out has been committed since: its child follows the sequence itself
            new_index = {node: index for index, node in enumerate(nodes)}
            parents.append([new_index.get(self.plan.parents[seq][node], -1) for node in nodes])
        rows = self.plan.paths(kept)
        narrowed = Reading(Plan(parents, rows.longest, 0), states, levels=self.levels)
        narrowed.inputs = {mixer: rows.gather(inputs) for mixer, inputs in self.inputs.items()}
        for mixer, node_states in self.node_states.items():
            narrowed.node_states[mixer] = {}
            for row, (seq, nodes) in enumerate(kept):
                for index, node in enumerate(nodes):
                    narrowed.node_states[mixer][row, index] = node_states[seq, node]
        return narrowed

    def extend(self, plan: Plan, *, levels: bool) -> Reading:
        """Return a forward over more nodes of the same sequences."""
        extended = Reading(plan, self.states, levels=levels)
        extended.inputs = dict(self.inputs)
        if levels:
            extended.node_states = {
                mixer: dict(node_states) for mixer, node_states in self.node_states.items()
            }
        return extended


def _map_rows(change: Callable[[Tensor], Tensor], output: Any, paths: Paths) -> Any:
    """Return a mixer's output with its tensors [P, D, ..] changed."""
    if isinstance(output, tuple):
        return tuple(_map_rows(change, item, paths) for item in output)
    if isinstance(output, Tensor) and output.shape[:2] == (len(paths.paths), paths.longest):
        return change(output)
    return output


def _join_rows(outputs: Sequence[Any], longest: int = 0) -> Any:
    """Return outputs of several calls as rows of one, padded to the longest."""
    first = outputs[0]
    if isinstance(first, tuple):
        return tuple(map(_join_rows, zip(*outputs, strict=True)))
    if not isinstance(first, Tensor):
        return first
    longest = max(longest, *(rows.shape[1] for rows in outputs))
    unpadded = (0, 0) * (first.dim() - 2)  # the axes after that of the steps
    padded = []
    for rows in outputs:
        missing = longest - rows.shape[1]
        padded.append(F.pad(rows, (*unpadded, 0, missing)))
    return torch.cat(padded)


def _join_steps(outputs: Sequence[Any]) -> Any:
    """Return outputs of several calls, one after the other in each row."""
    if len(outputs) == 1:
        return outputs[0]
    if isinstance(outputs[0], Tensor):
        return torch.cat(list(outputs), dim=1)
    if isinstance(outputs[0], tuple):
        return tuple(map(_join_steps, zip(*outputs, strict=True)))
    return outputs[0]


def _join_nodes(old: Any, new: Any, old_shape: tuple[int, int], new_shape: tuple[int, int]) -> Any:
    """Return a mixer's inputs at nodes that were read before, followed by those at new ones."""
    if isinstance(new, Tensor) and isinstance(old, Tensor):
        batch = batch_dimension(new, new_shape)
        if batch is None or batch_dimension(old, old_shape) != batch:
            return new
        # one of them may have one row for all sequences
        sizes = [-1] * new.dim()
        sizes[batch] = max(old.shape[batch], new.shape[batch])
        return torch.cat([old.expand(sizes), new.expand(sizes)], dim=batch + 1)
    if isinstance(new, (tuple, list)):
        pairs = zip(old, new, strict=True)
        return type(new)(
            _join_nodes(old_item, item, old_shape, new_shape) for old_item, item in pairs
        )
    if isinstance(new, dict):
        joined = dict(new)  # masks are made again for paths
        for name, value in new.items():
            if "mask" not in name:
                joined[name] = _join_nodes(old[name], value, old_shape, new_shape)
        return joined
    return new
