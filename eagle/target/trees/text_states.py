"""The mixers' states of the sequences in a cache's slots: at the end of each, and after earlier tokens of it."""

# B sequences, R nodes that are not committed, N of them new

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from eagle.target.trees.mixers import Mixers, count_bytes
from eagle.target.trees.reading import Reading, States
from eagle.target.trees.tree_plan import Plan, find_parents

SNAPSHOT_TOKENS = 8192  # of a sequence from one snapshot of its states to the next


@dataclass(slots=True)
class Slot:
    """One sequence's states by its length, and the forward that read its uncommitted nodes."""

    by_length: dict[int, States] = field(default_factory=dict)
    snapshots: set[int] = field(default_factory=set)  # lengths that stay when the sequence grows
    reading: Reading | None = None
    seq: int = 0  # the index of the sequence in that forward


class TextStates:
    """The states of every slot. They are never written to, so that copies and snapshots share them."""

    def __init__(self) -> None:
        self.slots = [Slot()]

    def open(
        self,
        slots: Sequence[int],
        lengths: Sequence[int],
        sizes: Sequence[int],
        tree_mask: Tensor | None,
        new: int,
        *,
        mixers: Mixers,
        commits: bool,
    ) -> Reading:
        """Return a forward over uncommitted nodes of each slot.

        Args:
            slots: the slots.
            lengths: the committed tokens of each.
            sizes: the uncommitted nodes of each.
            tree_mask: as in `find_parents`.
            new: the number of nodes that are read now; the others have been read before.
            mixers: the modules that read.
            commits: whether the nodes are tokens of the sequences, which are committed when they are read.
        """
        states = [
            self._states_after(slot, length) for slot, length in zip(slots, lengths, strict=True)
        ]
        width = max(sizes)
        # all nodes are new: no forward before this one read any
        if width == new:
            plan = Plan(find_parents(tree_mask, sizes, [[]] * len(slots)), width, new)
            levels = mixers.by_levels if commits else mixers.takes_levels(plan)
            return Reading(plan, states, levels=levels, commits=commits)
        # a draft that grows: the new nodes go on from those of an earlier forward
        earlier = self._find_reading(slots, states)
        parents = find_parents(tree_mask, sizes, earlier.plan.parents)
        plan = Plan(parents, earlier.plan.shape[1] + new, new)
        return earlier.extend(plan, levels=earlier.levels and mixers.takes_levels(plan, grows=True))

    def _states_after(self, slot: int, length: int) -> States:
        """Return the states after so many tokens of a slot's sequence."""
        if not length:
            return {}
        by_length = self.slots[slot].by_length
        if length not in by_length:
            raise RuntimeError(
                f"slot {slot} holds states behind {sorted(by_length)} tokens, not behind {length}: go back by `cut` to "
                "`reusable` tokens, and read on from there"
            )
        return by_length[length]

    def _find_reading(self, slots: Sequence[int], states: Sequence[States]) -> Reading:
        """Return the forward that has read the uncommitted nodes of these slots, without its other sequences."""
        readings = {id(self.slots[slot].reading): self.slots[slot].reading for slot in slots}
        (reading,) = readings.values()
        if reading is None:
            raise RuntimeError(
                f"slots {list(slots)} hold no uncommitted nodes: read their trees from the root"
            )
        seqs = [self.slots[slot].seq for slot in slots]
        parents = reading.plan.parents
        if seqs == list(range(len(parents))):
            return reading
        # some of its sequences have ended since
        kept = [(seq, list(range(len(parents[seq])))) for seq in seqs]
        return reading.narrow(kept, states)

    def close(self, slots: Sequence[int], lengths: Sequence[int], reading: Reading) -> None:
        """Note a forward that ended, so that a path of its nodes can be kept; tokens that it commits are committed."""
        for seq, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
            self.slots[slot].reading = reading
            self.slots[slot].seq = seq
            if reading.commits:
                states = {mixer: ends[seq] for mixer, ends in reading.ends.items()}
                self._advance(slot, length, length + len(reading.plan.parents[seq]), states)

    def keep(self, paths: Mapping[int, Sequence[int]], lengths: Sequence[int]) -> None:
        """Commit a path of nodes after each slot's sequence; `lengths` are those of all slots."""
        # slots by the forward that read them: each computes the states of all its paths at once
        groups: dict[int, list[int]] = {}
        for slot, path in paths.items():
            reading = self.slots[slot].reading
            if path and reading is not None:
                groups.setdefault(id(reading), []).append(slot)
        for slots in groups.values():
            reading = self.slots[slots[0]].reading
            assert reading is not None
            states = reading.keep({self.slots[slot].seq: paths[slot] for slot in slots})
            for slot in slots:
                end = lengths[slot] + len(paths[slot])
                self._advance(slot, lengths[slot], end, states[self.slots[slot].seq])

    def retain(self, slot: int, nodes: Sequence[int], length: int) -> None:
        """Keep only these of a slot's uncommitted nodes, in this order."""
        entry = self.slots[slot]
        reading = entry.reading if nodes else None
        if reading is not None:
            reading = reading.narrow([(entry.seq, list(nodes))], [entry.by_length[length]])
        entry.reading = reading
        entry.seq = 0

    def _advance(self, slot: int, start: int, end: int, states: States) -> None:
        """Hold the states after a sequence that has grown, in place of those after shorter ones that are no snapshot.

        Args:
            slot: The sequence's slot.
            start: Its length before.
            end: Its length now.
            states: The mixers' states after it.
        """
        entry = self.slots[slot]
        # a snapshot where the sequence crosses a multiple of SNAPSHOT_TOKENS
        if start and start // SNAPSHOT_TOKENS != end // SNAPSHOT_TOKENS:
            entry.snapshots.add(start)
        # a mixer that did not run keeps its state
        states = {**entry.by_length.get(start, {}), **states}
        entry.by_length = {
            length: old
            for length, old in entry.by_length.items()
            if length in entry.snapshots and length < end
        }
        entry.by_length[end] = states

    def snapshot(self, slot: int, length: int) -> None:
        """Keep the states after a sequence when it grows."""
        self.slots[slot].snapshots.add(length)

    def cut(self, slot: int, length: int) -> None:
        """Drop the states after more than so many tokens."""
        entry = self.slots[slot]
        entry.by_length = {end: states for end, states in entry.by_length.items() if end <= length}
        entry.snapshots = {end for end in entry.snapshots if end <= length}
        entry.reading = None

    def reusable(self, slot: int, length: int) -> int:
        """Return the most of a slot's first `length` tokens after which its states are held."""
        return max((end for end in self.slots[slot].by_length if end <= length), default=0)

    def swap(self, first: int, second: int) -> None:
        """Exchange two slots."""
        self.slots[first], self.slots[second] = self.slots[second], self.slots[first]

    def copy(self, source: int, target: int) -> None:
        """Let another slot hold what a slot holds of its committed sequence."""
        entry = self.slots[source]
        self.slots[target] = Slot(dict(entry.by_length), set(entry.snapshots))

    def resize(self, count: int) -> None:
        """Have so many slots."""
        added = [Slot() for _ in range(count - len(self.slots))]
        self.slots = self.slots[:count] + added

    def state_bytes(self, slot: int) -> int:
        """Return the bytes of the states at the end of a slot's sequence."""
        by_length = self.slots[slot].by_length
        if not by_length:
            return 0
        return sum(map(count_bytes, by_length[max(by_length)].values()))


def count_states(tokens: int) -> int:
    """Return how often the states of a sequence of so many tokens are held at most.

    They are held at its end, after its prompt, and at snapshots.
    """
    return 2 + tokens // SNAPSHOT_TOKENS
