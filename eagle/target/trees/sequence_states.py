"""The recurrent states of a cache's sequences: at the end of each, and after some of its earlier tokens.

Mixers are a model's modules that keep a state from token to token, such as Mamba's.
"""

# B sequences, R nodes that are not committed, N of them new

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from eagle.target.trees.mixers import Mixers, count_bytes
from eagle.target.trees.reading import Reading, States
from eagle.target.trees.tree_plan import Plan, find_parents

SNAPSHOT_TOKENS = 8192  # tokens of a sequence between two snapshots of its states


@dataclass(slots=True)
class RowStates:
    """The states of one cache row (one sequence), and the forward that read its uncommitted nodes."""

    # by a number of tokens, each mixer's state after that many first tokens of the sequence
    by_length: dict[int, States] = field(default_factory=dict)
    # the lengths whose states are kept when the sequence grows past them
    snapshots: set[int] = field(default_factory=set)
    reading: Reading | None = None  # None: there are no uncommitted nodes
    seq: int = 0  # the index of the cache row's sequence in that forward


class SequenceStates:
    """The states of every cache row. Their tensors are never written to, so that copies and snapshots share them."""

    def __init__(self) -> None:
        """Hold no recurrent states, for a cache of one row (sequence)."""
        self.entries = [RowStates()]  # by cache row

    def open(
        self,
        cache_rows: Sequence[int],
        lengths: Sequence[int],
        sizes: Sequence[int],
        tree_mask: Tensor | None,
        new: int,
        *,
        mixers: Mixers,
        commits: bool,
    ) -> Reading:
        """Return a `Reading`, a forward in which mixers read uncommitted nodes from the states of their sequences.

        Args:
            cache_rows: the cache rows, one for each sequence of the forward.
            lengths: the number of committed tokens of each.
            sizes: the number of uncommitted nodes of each, those of earlier forwards included.
            tree_mask: [1 or B, N, R], for B sequences which of R nodes each of N new ones attends to; None: each
                sequence is a chain of new nodes.
            new: N, the number of nodes that are read now; earlier forwards have read the others.
            mixers: the modules that keep a state and read.
            commits: whether the nodes are tokens that are committed as they are read, as those of a prompt.
        """
        states = [
            self._states_after(cache_row, length)
            for cache_row, length in zip(cache_rows, lengths, strict=True)
        ]
        width = max(sizes)
        # all nodes are new: no forward before this one read any, and so there are no earlier parents
        if width == new:
            plan = Plan(find_parents(tree_mask, sizes, [[]] * len(cache_rows)), width, new)
            # by levels: one call of a mixer for each depth of the trees, and not one for all paths
            levels = mixers.by_levels if commits else mixers.chooses_levels(plan)
            return Reading(plan, states, levels=levels, commits=commits)
        # a draft tree that grows level by level: the new nodes are children of an earlier forward's
        earlier = self._find_reading(cache_rows, states)
        parents = find_parents(tree_mask, sizes, earlier.plan.parents)
        plan = Plan(parents, earlier.plan.shape[1] + new, new)
        # only a forward by levels has the states after its nodes, from which further levels go on
        return earlier.extend(
            plan, levels=earlier.levels and mixers.chooses_levels(plan, grows=True)
        )

    def _states_after(self, cache_row: int, length: int) -> States:
        """Return the recurrent states after the first `length` tokens of a cache row's sequence, by mixer (module).

        Raises:
            RuntimeError: if they are not held, for a state cannot be cut back to fewer tokens.
        """
        # before the first token mixers have no state
        if not length:
            return {}
        by_length = self.entries[cache_row].by_length
        if length not in by_length:
            raise RuntimeError(
                f"cache row {cache_row} holds states behind {sorted(by_length)} tokens, not behind {length}: go back "
                "by `cut` to `reusable` tokens, and read on from there"
            )
        return by_length[length]

    def _find_reading(self, cache_rows: Sequence[int], states: Sequence[States]) -> Reading:
        """Return the forward that has read the uncommitted nodes of these cache rows, narrowed to their sequences.

        It has the inputs and states at these nodes, from which a tree grows by another level.

        Args:
            cache_rows: the cache rows, all of which the same forward has read.
            states: the states after the committed tokens of each.
        """
        entries = [self.entries[cache_row] for cache_row in cache_rows]
        readings = {id(entry.reading): entry.reading for entry in entries}
        # one and the same forward
        (reading,) = readings.values()
        if reading is None:
            raise RuntimeError(
                f"cache rows {list(cache_rows)} hold no uncommitted nodes: read their trees from the root"
            )
        seqs = [entry.seq for entry in entries]
        parents = reading.plan.parents  # by the forward's sequences, the parent of each node
        if seqs == list(range(len(parents))):
            return reading
        # some of the forward's sequences have ended since, or their order is another
        # with all of their nodes
        paths = [(seq, list(range(len(parents[seq])))) for seq in seqs]
        return reading.narrow(paths, states)

    def close(self, cache_rows: Sequence[int], lengths: Sequence[int], reading: Reading) -> None:
        """Store a forward over trees that has ended, so that `keep` can commit a path of its nodes.

        If the forward commits its tokens, the states after them are those of the sequences from now on.

        Args:
            cache_rows: the cache rows, one for each sequence of the forward.
            lengths: the number of tokens that each had committed before.
            reading: the forward.
        """
        for seq, (cache_row, length) in enumerate(zip(cache_rows, lengths, strict=True)):
            self.entries[cache_row].reading = reading
            self.entries[cache_row].seq = seq
            if reading.commits:
                # each mixer's state at the end of this sequence
                states = {mixer: ends[seq] for mixer, ends in reading.end_states.items()}
                self._advance(cache_row, length, length + len(reading.plan.parents[seq]), states)

    def keep(self, paths: Mapping[int, Sequence[int]], lengths: Sequence[int]) -> None:
        """Make the recurrent states after an accepted path of a draft those at the end of its sequence.

        Args:
            paths: by cache row the nodes of the path, as indices into its uncommitted ones.
            lengths: by cache row the number of tokens committed before.
        """
        # cache rows by the forward that read them, which computes the states of all its paths in one call
        groups: dict[int, list[int]] = {}
        for cache_row, path in paths.items():
            reading = self.entries[cache_row].reading
            # an empty path leaves the states as they are
            if path and reading is not None:
                groups.setdefault(id(reading), []).append(cache_row)
        for cache_rows in groups.values():
            reading = self.entries[cache_rows[0]].reading
            assert reading is not None
            # by the forward's sequences
            states = reading.keep(
                {self.entries[cache_row].seq: paths[cache_row] for cache_row in cache_rows}
            )
            for cache_row in cache_rows:
                end = lengths[cache_row] + len(paths[cache_row])
                self._advance(
                    cache_row, lengths[cache_row], end, states[self.entries[cache_row].seq]
                )

    def retain(self, cache_row: int, nodes: Sequence[int], length: int) -> None:
        """Keep only these of a cache row's uncommitted nodes, in this order, for later forwards to go on from.

        Beam search keeps the nodes of its running beams in this way.

        Args:
            cache_row: the cache row.
            nodes: indices into its uncommitted nodes; () drops all of them.
            length: the number of committed tokens, after which the states are held.
        """
        entry = self.entries[cache_row]
        reading = entry.reading if nodes else None
        if reading is not None:
            reading = reading.narrow([(entry.seq, list(nodes))], [entry.by_length[length]])
        entry.reading = reading
        entry.seq = 0  # the narrowed forward has this sequence alone

    def _advance(self, cache_row: int, start: int, end: int, states: States) -> None:
        """Store the recurrent states at a sequence's new end; drop those after fewer tokens except snapshots.

        Args:
            cache_row: the sequence's cache row.
            start: its length before.
            end: its length now.
            states: the state of each mixer (module that keeps one) after `end` tokens.
        """
        entry = self.entries[cache_row]
        # a snapshot where the sequence crosses a multiple of SNAPSHOT_TOKENS: a later prompt that shares the
        # tokens up to there can go on from it
        if start and start // SNAPSHOT_TOKENS != end // SNAPSHOT_TOKENS:
            entry.snapshots.add(start)
        # a mixer that did not run in this forward keeps its state
        states = {**entry.by_length.get(start, {}), **states}
        entry.by_length = {
            length: old
            for length, old in entry.by_length.items()
            if length in entry.snapshots and length < end
        }
        entry.by_length[end] = states

    def snapshot(self, cache_row: int, length: int) -> None:
        """Keep the recurrent states after the first `length` tokens when the sequence grows past them.

        A later prompt that begins with these tokens can then go on from them.
        """
        self.entries[cache_row].snapshots.add(length)

    def cut(self, cache_row: int, length: int) -> None:
        """Cut a sequence to its first `length` tokens: drop the states after more, and the uncommitted nodes."""
        entry = self.entries[cache_row]
        entry.by_length = {end: states for end, states in entry.by_length.items() if end <= length}
        entry.snapshots = {end for end in entry.snapshots if end <= length}
        entry.reading = None

    def reusable(self, cache_row: int, length: int) -> int:
        """Return how many of a cache row's first `length` tokens a prompt that shares them need not read again.

        It is the largest number after which recurrent states are held, as states cannot be cut back; 0 for none.
        """
        return max((end for end in self.entries[cache_row].by_length if end <= length), default=0)

    def swap(self, first: int, second: int) -> None:
        """Exchange the recurrent states of two cache rows, whose sequences change places."""
        self.entries[first], self.entries[second] = self.entries[second], self.entries[first]

    def copy(self, source: int, target: int) -> None:
        """Copy the recurrent states of a cache row (sequence) to another one, without its uncommitted nodes.

        Beam search does so for a new beam.
        """
        entry = self.entries[source]
        self.entries[target] = RowStates(dict(entry.by_length), set(entry.snapshots))

    def resize(self, count: int) -> None:
        """Change the number of cache rows (sequences); new ones are empty, and the last ones are dropped."""
        added = [RowStates() for _ in range(count - len(self.entries))]
        self.entries = self.entries[:count] + added

    def state_bytes(self, cache_row: int) -> int:
        """Return the bytes of the states at the end of a cache row's sequence; 0 before its first token.

        The bytes count toward the cache's limit.
        """
        by_length = self.entries[cache_row].by_length
        if not by_length:
            return 0
        return sum(map(count_bytes, by_length[max(by_length)].values()))


def count_states(tokens: int) -> int:
    """Return how many copies of the recurrent states are held at most for a sequence of this many tokens.

    There is one at its end, one after its prompt, and one at every SNAPSHOT_TOKENS tokens.
    """
    return 2 + tokens // SNAPSHOT_TOKENS
