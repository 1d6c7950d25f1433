"""The mixers' states of the texts in a cache's slots: behind each text, and at earlier places of it."""

# B texts, R nodes that are not committed, N of them new

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from eagle.target.trees.mixer_state import count_bytes
from eagle.target.trees.mixers import Mixers
from eagle.target.trees.reading import Reading, States
from eagle.target.trees.tree_plan import Plan, find_parents

SNAPSHOT_TOKENS = 8192  # of a text from one snapshot of its states to the next


@dataclass(slots=True)
class Slot:
    """One text's states by its length, and the forward that read its uncommitted nodes."""

    held: dict[int, States] = field(default_factory=dict)
    snapshots: set[int] = field(default_factory=set)  # lengths that stay when the text grows
    reading: Reading | None = None
    text: int = 0  # its number there


class TextStates:
    """The states of every slot. They are never written to, so that copies and snapshots share them."""

    def __init__(self) -> None:
        self.slots = [Slot()]

    def open(
        self,
        slots: Sequence[int],
        lengths: Sequence[int],
        sizes: Sequence[int],
        seen: Tensor | None,
        new: int,
        *,
        mixers: Mixers,
        commits: bool,
    ) -> Reading:
        """A forward over the last `new` of so many uncommitted nodes of each slot; `seen` as in `find_parents`."""
        states = [self._behind(slot, length) for slot, length in zip(slots, lengths, strict=True)]
        width = max(sizes)
        if width == new:
            plan = Plan(find_parents(seen, sizes, [[]] * len(slots)), width, new)
            levels = mixers.by_levels if commits else mixers.takes_levels(plan)
            return Reading(plan, states, levels=levels, commits=commits)
        earlier = self._narrow(slots, states)
        plan = Plan(find_parents(seen, sizes, earlier.plan.parents), earlier.plan.shape[1] + new, new)
        return earlier.extend(plan, levels=earlier.levels and mixers.takes_levels(plan, grows=True))

    def _behind(self, slot: int, length: int) -> States:
        """The states behind so many tokens of a slot's text."""
        held = self.slots[slot].held
        if length and length not in held:
            raise RuntimeError(
                f"slot {slot} holds states behind {sorted(held)} tokens, not behind {length}: go back by `cut` to "
                "`reusable` tokens, and read on from there"
            )
        return held[length] if length else {}

    def _narrow(self, slots: Sequence[int], states: Sequence[States]) -> Reading:
        """The forward that has read the uncommitted nodes of these slots."""
        texts = [self.slots[slot].text for slot in slots]
        readings = {id(reading): reading for reading in (self.slots[slot].reading for slot in slots)}
        (reading,) = readings.values()
        if reading is None:
            raise RuntimeError(f"slots {list(slots)} hold no uncommitted nodes: read their trees from the root")
        if texts == list(range(len(reading.plan.parents))):
            return reading
        return reading.narrow([(text, list(range(len(reading.plan.parents[text])))) for text in texts], states)

    def close(self, slots: Sequence[int], lengths: Sequence[int], reading: Reading) -> None:
        """Note a forward that ended, so that a path of its nodes can be kept; a text that it read is committed."""
        for text, slot in enumerate(slots):
            self.slots[slot].reading, self.slots[slot].text = reading, text
        if reading.commits:
            for text, (slot, length, parents) in enumerate(zip(slots, lengths, reading.plan.parents, strict=True)):
                states = {mixer: ends[text] for mixer, ends in reading.ends.items()}
                self._advance(slot, length, length + len(parents), states)

    def keep(self, paths: Mapping[int, Sequence[int]], lengths: Sequence[int]) -> None:
        """Commit a path of nodes after each slot's text; `lengths` are those of all slots."""
        groups: dict[int, tuple[Reading, dict[int, int]]] = {}
        for slot, path in paths.items():
            reading = self.slots[slot].reading
            if path and reading is not None:
                groups.setdefault(id(reading), (reading, {}))[1][self.slots[slot].text] = slot
        for reading, texts in groups.values():
            kept = reading.keep({text: paths[slot] for text, slot in texts.items()})
            for text, slot in texts.items():
                self._advance(slot, lengths[slot], lengths[slot] + len(paths[slot]), kept[text])

    def retain(self, slot: int, nodes: Sequence[int], length: int) -> None:
        """Keep only these of a slot's uncommitted nodes, in this order."""
        held = self.slots[slot]
        reading = held.reading if nodes else None
        held.reading = None if reading is None else reading.narrow([(held.text, list(nodes))], [held.held[length]])
        held.text = 0

    def _advance(self, slot: int, start: int, end: int, states: States) -> None:
        """Hold states behind a longer text; those behind the shorter one go, unless they are a snapshot."""
        held = self.slots[slot]
        if start and start // SNAPSHOT_TOKENS != end // SNAPSHOT_TOKENS:
            held.snapshots.add(start)
        states = {**held.held.get(start, {}), **states}
        held.held = {length: old for length, old in held.held.items() if length in held.snapshots and length < end}
        held.held[end] = states

    def snapshot(self, slot: int, length: int) -> None:
        """Keep the states behind a text when it grows."""
        self.slots[slot].snapshots.add(length)

    def cut(self, slot: int, length: int) -> None:
        """Drop the states behind more than so many tokens."""
        held = self.slots[slot]
        held.held = {place: states for place, states in held.held.items() if place <= length}
        held.snapshots = {place for place in held.snapshots if place <= length}
        held.reading = None

    def reusable(self, slot: int, length: int) -> int:
        """The longest part of a slot's first tokens behind which its states are held."""
        return max((place for place in self.slots[slot].held if place <= length), default=0)

    def swap(self, one: int, other: int) -> None:
        """Exchange two slots."""
        self.slots[one], self.slots[other] = self.slots[other], self.slots[one]

    def copy(self, slot: int, other: int) -> None:
        """Let another slot hold what a slot holds of its committed text."""
        held = self.slots[slot]
        self.slots[other] = Slot(dict(held.held), set(held.snapshots))

    def resize(self, count: int) -> None:
        """Have so many slots."""
        self.slots = self.slots[:count] + [Slot() for _ in range(count - len(self.slots))]

    def state_bytes(self, slot: int) -> int:
        """Bytes of the states behind a slot's text."""
        held = self.slots[slot].held
        return sum(count_bytes(state) for state in held[max(held)].values()) if held else 0


def count_states(tokens: int) -> int:
    """How often the states of a text of so many tokens are held at most: behind it, its prompt, and snapshots."""
    return 2 + tokens // SNAPSHOT_TOKENS
