"""One forward over draft trees of a model that keeps recurrent states, with what is needed to commit a path later."""

# B sequences, R nodes that are not committed, N of them new, P paths, D nodes of the longest path

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle.device import upload
from eagle.target.trees.mixers import Mixer, Projections, State, join_rows, split_state
from eagle.target.trees.tree_plan import Path, Paths, Plan, batch_dimension

States = dict[Mixer, State]
"""The states of one sequence, one for each mixer."""


class Reading:
    """One forward in which mixers read trees, each from the states of its committed sequence.

    Mixers are the modules that keep a state. `keep` returns the states after a path, which is then committed.
    """

    def __init__(
        self,
        plan: Plan,
        states: Sequence[States],
        *,
        levels: bool,
        commits: bool = False,
    ) -> None:
        """Prepare a forward in which modules with a recurrent state (mixers) read trees.

        Args:
            plan: the trees of its sequences, by the parent of each node.
            states: the states of all mixers after the committed tokens of each sequence.
            levels: whether each mixer is called once for each depth of the trees, rather than once for all paths.
            commits: whether it reads tokens that are all committed, as those of prompts, and no trees.
        """
        self.plan = plan
        self.states = list(states)
        self.levels = levels
        self.commits = commits
        self.inputs: dict[Mixer, Any] = {}  # each mixer's arguments by name, at all nodes
        # the outputs of each mixer's linear layers by node, which the run that commits a path reuses; None for none
        self.projections: dict[Mixer, Projections | None] = {}
        self.end_states: dict[Mixer, list[State]] = {}  # after each sequence's last node
        # by (sequence, node), the state after it, if nodes are read by levels
        self.node_states: dict[Mixer, dict[tuple[int, int], State]] = {}

    def read(self, mixer: Mixer, inputs: dict[str, Any]) -> Any:
        """Run a mixer in place of its own forward: return its output at the new nodes, given its arguments there.

        The module's forward was replaced by a call of this method, because a mask cannot steer it.

        Args:
            mixer: the module that keeps a state, and that the model calls.
            inputs: its arguments by name, of which tensors with an entry for each new node are [B, N, ..].
        """
        # the state of each sequence. A mixer has the state {} before the first token
        committed = [states.get(mixer, {}) for states in self.states]
        if self.commits:
            return self._read_sequences(mixer, inputs, committed)
        if self.levels:
            return self._read_levels(mixer, inputs, committed)
        return self._read_paths(mixer, inputs, committed)

    def _join_inputs(self, mixer: Mixer, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return a module's arguments by name at all R uncommitted nodes, given those at the N new ones.

        Paths are run from their first node on, so inputs of nodes that earlier forwards read are needed again.
        """
        if mixer not in self.inputs:
            return inputs
        seqs = self.plan.shape[0]
        return _join_nodes(
            self.inputs[mixer],
            inputs,
            (seqs, self.plan.first_new),
            (seqs, self.plan.new),
        )

    def _read_paths(self, mixer: Mixer, inputs: dict[str, Any], committed: list[State]) -> Any:
        """Run a mixer over all paths from the root to a leaf in one call; return its output at the new nodes.

        Args:
            mixer: the module that keeps a state.
            inputs: its arguments by name, at the new nodes.
            committed: its state after the committed tokens of each sequence, where its paths begin.
        """
        plan = self.plan
        paths = plan.to_leaves
        # the run that commits a path reuses what the linears compute here
        projections = Projections()
        inputs = self._join_inputs(mixer, inputs)
        states = [committed[seq] for seq in paths.seqs]
        # the states at the ends of paths are needed only where each is a whole sequence
        output, ends = self._run(mixer, inputs, states, paths, projections, splits=paths.is_whole)
        projections.is_complete = True
        self.inputs[mixer] = inputs
        self.projections[mixer] = projections if projections.outputs else None
        # each sequence is one path through all of its nodes: its state need not be computed again to commit them
        if paths.is_whole:
            self.end_states[mixer] = ends
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
        """Run a mixer over paths, in one call for all paths whose states can be joined as rows of a batch.

        Args:
            mixer: the module that keeps a state.
            inputs: its arguments by name, at all nodes that the paths count.
            states: the state that each path goes on from.
            paths: the paths, which are the rows.
            projections: where linear layers find or leave their outputs by node; None: they compute every row.
            splits: whether to return the states too.

        Returns:
            The output of all paths, and the state after each; [] without `splits`.
        """
        # rows by the kind of their state: a sequence without tokens has none
        groups: dict[Any, list[int]] = {}
        for row, state in enumerate(states):
            groups.setdefault(mixer.kind_of(state), []).append(row)
        if len(groups) == 1:
            output, state = mixer.run(inputs, join_rows(states), paths, projections)
            return output, split_state(state, len(states)) if splits else []
        outputs = []
        order: list[int] = []  # the row of each output
        ends: list[State] = []
        # a call for each kind; outputs of linear layers are not shared between calls
        for rows in groups.values():
            group_paths = self.plan.paths([paths.paths[row] for row in rows])
            output, state = mixer.run(
                inputs,
                join_rows([states[row] for row in rows]),
                group_paths,
                projections=None,
            )
            outputs.append(output)
            order += rows
            ends += split_state(state, len(rows))
        # back to the order of the rows
        index = torch.tensor(order).argsort()
        joined = _join_outputs(outputs, paths.longest)
        joined = _map_rows(
            lambda rows: rows.index_select(0, upload(index, rows.device)),
            joined,
            paths,
        )
        return joined, [ends[i] for i in index.tolist()]

    def _read_levels(self, mixer: Mixer, inputs: dict[str, Any], committed: list[State]) -> Any:
        """Run a mixer over the new nodes in one call for each depth, every node from its parent's state.

        Args:
            mixer: the module that keeps a state.
            inputs: its arguments by name, at the new nodes.
            committed: its state after the committed tokens of each sequence.

        Returns:
            Its output at the new nodes.
        """
        plan = self.plan
        # filled from the root on, so that each level finds its parents' states
        node_states = self.node_states.setdefault(mixer, {})
        # the new nodes as rows of one node: by depth, and all of them in the order of depths
        levels, nodes = plan.level_rows
        outputs: list[Any] = []
        for level, rows in zip(plan.levels, levels, strict=True):
            states = []
            for seq, node in level:
                parent = plan.parents[seq][node]  # -1: the committed sequence
                states.append(committed[seq] if parent == -1 else node_states[seq, parent])
            output, states = self._run(mixer, inputs, states, rows)
            node_states |= dict(zip(level, states, strict=True))
            outputs.append(output)
        # a later forward over more nodes may read by paths, and needs the inputs at these
        self.inputs[mixer] = self._join_inputs(mixer, inputs)
        return _map_rows(lambda rows: nodes.scatter(rows, plan.new), _join_outputs(outputs), nodes)

    def _read_sequences(self, mixer: Mixer, inputs: dict[str, Any], committed: list[State]) -> Any:
        """Run a mixer over tokens that are all committed, as those of prompts, without padding.

        Padding would enter a state. So sequences share a call only if they have the same length and kind of state.

        Args:
            mixer: the module that keeps a state.
            inputs: its arguments by name, at all tokens of the forward.
            committed: its state after the tokens of each sequence that earlier forwards have read.

        Returns:
            Its output, padded as the forward's tokens are.
        """
        plan = self.plan
        # a sequence is one path through all of its tokens
        paths = [(seq, list(range(len(parents)))) for seq, parents in enumerate(plan.parents)]
        rows = plan.paths(paths)
        kinds = {mixer.kind_of(state) for state in committed}
        # `is_whole`: all sequences have the length of the longest
        is_batch = rows.is_whole and len(kinds) == 1
        calls = [paths] if is_batch else [[path] for path in paths]
        outputs = []
        self.end_states[mixer] = []
        for call in calls:
            states = [committed[seq] for seq, _ in call]
            output, ends = self._read_sequence(mixer, inputs, states, call)
            outputs.append(output)
            self.end_states[mixer] += ends
        if is_batch:
            return outputs[0]
        # pad the outputs as the forward's tokens are padded
        return _map_rows(
            lambda tensor: rows.scatter(tensor, plan.new),
            _join_outputs(outputs, rows.longest),
            rows,
        )

    def _read_sequence(
        self,
        mixer: Mixer,
        inputs: dict[str, Any],
        states: list[State],
        paths: list[Path],
    ) -> Any:
        """Run a mixer over sequences of the same length; return its output and the state at the end of each.

        Args:
            mixer: the module that keeps a state.
            inputs: its arguments by name, at all tokens of the forward.
            states: its state before each sequence.
            paths: each sequence as one path through all of its tokens.
        """
        steps = [paths]
        # mixers that must read by levels ignore their state when they get several tokens, so they get one at a time;
        # without a state ({}) there is nothing to ignore
        if self.levels and states[0]:
            steps = [[(seq, [node]) for seq, _ in paths] for node in paths[0][1]]
        outputs = []
        for step in steps:
            output, state = mixer.run(
                inputs, join_rows(states), self.plan.paths(step), projections=None
            )
            outputs.append(output)
            states = split_state(state, len(paths))
        return _chain_outputs(outputs), states

    def keep(self, paths: Mapping[int, Sequence[int]]) -> dict[int, States]:
        """Return by sequence the recurrent states after an accepted path of its nodes, which the caller commits.

        `paths` holds the nodes of a path by the index of its sequence in this forward.
        """
        states: dict[int, States] = {seq: {} for seq in paths}
        # both are by mixer, and name those that this forward has run
        mixers = self.node_states if self.levels else self.inputs
        # padding would enter the states, so only paths of the same length run together
        for length in {len(path) for path in paths.values()}:
            group = [(seq, list(path)) for seq, path in paths.items() if len(path) == length]
            rows = self.plan.paths(group)
            for mixer in mixers:
                for seq, state in zip(rows.seqs, self._states_after(mixer, rows), strict=True):
                    states[seq][mixer] = state
        return states

    def _states_after(self, mixer: Mixer, paths: Paths) -> list[State]:
        """Return a module's recurrent state after each of these paths, which are equally long and begin at the root."""
        # a forward by levels has kept the state after every node
        if self.levels:
            return [self.node_states[mixer][seq, path[-1]] for seq, path in paths.paths]
        # Where each sequence was one path, as a chain or a prompt, the forward has kept the states at its end. A path
        # as long as the longest sequence (`shape` is sequences and nodes) passes through all nodes of its own.
        if mixer in self.end_states and paths.longest == self.plan.shape[1]:
            return [self.end_states[mixer][seq] for seq in paths.seqs]
        # else the mixer runs again over these paths alone, with the outputs of its linear layers from the forward
        states = [self.states[seq].get(mixer, {}) for seq in paths.seqs]
        _, ends = self._run(mixer, self.inputs[mixer], states, paths, self.projections[mixer])
        return ends

    def narrow(self, paths: Sequence[Path], states: Sequence[States]) -> Reading:
        """Return this forward as if it had read only some of its sequences and nodes; later forwards may extend it.

        Beam search keeps some nodes in this way.

        Args:
            paths: the indices of the sequences, with their remaining nodes in order.
            states: the states of each after its committed tokens.
        """
        parents = []
        for seq, nodes in paths:
            # a parent that is left out has been committed since, so its child now follows the committed sequence (-1)
            new_index = {node: index for index, node in enumerate(nodes)}
            parents.append([new_index.get(self.plan.parents[seq][node], -1) for node in nodes])
        rows = self.plan.paths(paths)
        # its nodes have all been read: none is new
        narrowed = Reading(Plan(parents, rows.longest, new=0), states, levels=self.levels)
        narrowed.inputs = {mixer: rows.gather(inputs) for mixer, inputs in self.inputs.items()}
        for mixer, node_states in self.node_states.items():
            narrowed.node_states[mixer] = {}
            for row, (seq, nodes) in enumerate(paths):
                for index, node in enumerate(nodes):
                    narrowed.node_states[mixer][row, index] = node_states[seq, node]
        return narrowed

    def extend(self, plan: Plan, *, levels: bool) -> Reading:
        """Return a new forward that adds nodes to the trees of this one, with the inputs and states that it has left.

        Args:
            plan: the trees with the new nodes.
            levels: whether the new forward reads by levels; this one must have done so too.
        """
        extended = Reading(plan, self.states, levels=levels)
        # dicts are copied, as the new forward changes them
        extended.inputs = dict(self.inputs)
        if levels:
            extended.node_states = {
                mixer: dict(node_states) for mixer, node_states in self.node_states.items()
            }
        return extended


def _map_rows(change: Callable[[Tensor], Tensor], output: Any, paths: Paths) -> Any:
    """Apply `change` to the tensors [P, D, ..] of a mixer's output, a tensor or a tuple; leave the rest unchanged.

    `paths` are the P paths of D nodes that were the rows of the run. A mixer is a module with a recurrent state, which
    has run over paths of a tree.
    """
    if isinstance(output, tuple):
        return tuple(_map_rows(change, item, paths) for item in output)
    if isinstance(output, Tensor) and output.shape[:2] == (len(paths.paths), paths.longest):
        return change(output)
    return output


def _join_outputs(outputs: Sequence[Any], longest: int = 0) -> Any:
    """Join the outputs of several calls along the batch, as if one call had read all rows, padded to the longest.

    A step is one token of a row.

    Args:
        outputs: of each call a tensor [rows, steps, ..], or a tuple of such; of other values the first is returned.
        longest: the least number of steps to pad to.
    """
    first = outputs[0]
    if isinstance(first, tuple):
        return tuple(map(_join_outputs, zip(*outputs, strict=True)))
    if not isinstance(first, Tensor):
        return first
    longest = max(longest, *(rows.shape[1] for rows in outputs))
    # F.pad takes pairs from the last axis on: none is added to the axes after that of the steps
    unpadded = (0, 0) * (first.dim() - 2)
    padded = []
    for rows in outputs:
        missing = longest - rows.shape[1]
        padded.append(F.pad(rows, (*unpadded, 0, missing)))
    return torch.cat(padded)


def _chain_outputs(outputs: Sequence[Any]) -> Any:
    """Join the outputs of several calls along their steps, as if one call had read all tokens of each row.

    They are tensors [rows, steps, ..] or tuples of such; of other values the first is returned. A step is one token.
    """
    if len(outputs) == 1:
        return outputs[0]
    if isinstance(outputs[0], Tensor):
        return torch.cat(list(outputs), dim=1)
    if isinstance(outputs[0], tuple):
        return tuple(map(_chain_outputs, zip(*outputs, strict=True)))
    return outputs[0]


def _join_nodes(old: Any, new: Any, old_shape: tuple[int, int], new_shape: tuple[int, int]) -> Any:
    """Join a mixer's inputs at the nodes of earlier forwards with those at new nodes.

    A module that runs over whole paths needs its inputs at all of their nodes.

    Args:
        old: an argument at the earlier nodes: a tensor, or a container of arguments.
        new: the same argument at the new nodes.
        old_shape: [B, earlier nodes], the numbers of sequences and nodes.
        new_shape: [B, N], the same with new nodes.
    """
    if isinstance(new, Tensor) and isinstance(old, Tensor):
        batch = batch_dimension(new, new_shape)
        # a tensor without an axis of nodes is the same for all of them
        if batch is None or batch_dimension(old, old_shape) != batch:
            return new
        # a tensor may have one row that serves all sequences, as positions do
        sizes = [-1] * new.dim()
        sizes[batch] = max(old.shape[batch], new.shape[batch])
        return torch.cat([old.expand(sizes), new.expand(sizes)], dim=batch + 1)
    if isinstance(new, (tuple, list)):
        pairs = zip(old, new, strict=True)
        return type(new)(
            _join_nodes(old_item, item, old_shape, new_shape) for old_item, item in pairs
        )
    if isinstance(new, dict):
        # masks are not joined: each run makes its own for paths
        joined = dict(new)
        for name, value in new.items():
            if "mask" not in name:
                joined[name] = _join_nodes(old[name], value, old_shape, new_shape)
        return joined
    return new
