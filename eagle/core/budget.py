"""Limits on what a drafter proposes in one cycle, fixed or chosen anew in every cycle."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, get_args

from eagle.core.sampling import number, whole
from eagle.core.tree import Paths

MOST_LEVELS = 1_024  # that any drafter guesses, and slots of a block: each takes memory
MOST_NODES = 4_096  # of the tree that a head was tuned to

Draw = Literal["noise", "likeliest", "sampled"]
"""When the target samples, children are ranked with its noise, ranked by the head's probs, or drawn from them."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How much a drafter may propose in one cycle: draft nodes, levels, and children per node."""

    nodes: int = 10  # draft tokens, the root not counted
    depth: int = 10  # levels
    top_k: int = 10  # children of a node, and candidates of a level
    paths: Paths | None = None  # a fixed tree: the ranks on the way to each node; see `fixed`
    draw: Draw = "noise"  # how children are chosen where the target samples
    sharpness: float | None = None  # of a tree without paths: 1 is EAGLE-2's rule, None what suits the drafter
    confidence: float | None = None  # no children of nodes whose children are kept less likely, as the drafter says

    def __post_init__(self) -> None:
        for name in ("nodes", "depth", "top_k"):
            object.__setattr__(self, name, whole(f"Budget.{name}", getattr(self, name)))
            if getattr(self, name) < 0:
                raise ValueError(f"Budget.{name} is {getattr(self, name)}, expected 0 or more")
        if self.paths is not None:
            object.__setattr__(self, "paths", _as_paths(self.paths))
        for name in ("sharpness", "confidence"):
            if getattr(self, name) is not None:
                number(f"Budget.{name}", getattr(self, name))
        if self.sharpness is not None and not self.sharpness > 0:
            raise ValueError(f"Budget.sharpness is {self.sharpness!r}, expected a number above 0; 1 is EAGLE-2's rule")
        if self.confidence is not None and not 0 <= self.confidence <= 1:
            raise ValueError(f"Budget.confidence is {self.confidence!r}, expected a probability, or None for all nodes")
        if self.draw not in get_args(Draw):
            raise ValueError(f"Budget.draw is {self.draw!r}, expected one of {', '.join(get_args(Draw))}")
        if self.draw == "sampled" and self.paths is None:
            raise ValueError(
                "Budget.draw is 'sampled', which needs a fixed shape: children kept for being likely do not follow the "
                "probs that they were drawn from; use Budget.fixed(paths, 'sampled'), for a chain with chain_paths"
            )
        prefixes = {(), *(self.paths or ())}
        for path in prefixes - {()}:
            if path[:-1] not in prefixes or path[-1] not in range(self.top_k):
                raise ValueError(
                    f"Budget.paths holds {path}, expected {path[:-1]} too and ranks below top_k = {self.top_k}: "
                    "name every node by the ranks on its way; Budget.fixed(paths) sets the rest"
                )
            if self.draw == "sampled" and path[-1] > 0 and (*path[:-1], path[-1] - 1) not in prefixes:
                raise ValueError(
                    f"Budget.paths holds {path}, expected all siblings drawn before it: give them ranks 0, 1, 2, ..."
                )
        if len(prefixes) - 1 > self.nodes:
            raise ValueError(
                f"Budget.paths holds {len(prefixes) - 1} nodes, expected {self.nodes}: use Budget.fixed(paths)"
            )

    @classmethod
    def fixed(cls, paths: Paths, draw: Draw = "noise", confidence: float | None = None) -> Budget:
        """A budget with a fixed tree shape, such as EAGLE-1's (`eagle.core.tree.PUBLISHED_TREE`)."""
        paths = _as_paths(paths)
        top_k = 1 + max((rank for path in paths for rank in path), default=-1)
        return cls(len(set(paths)), max(map(len, paths), default=0), top_k, paths, draw, confidence=confidence)

    @property
    def is_empty(self) -> bool:
        """Whether it allows no draft tokens."""
        return min(self.nodes, self.depth, self.top_k) == 0

    def within(self, levels: int) -> Budget:
        """This budget, at most `levels` deep."""
        return self if self.depth <= levels else replace(self, depth=max(levels, 0))


def _as_paths(paths: Any) -> Paths:
    """Paths from any nested sequence of ranks."""
    try:
        if isinstance(paths, (str, bytes)):
            raise TypeError
        return tuple(tuple(map(operator.index, path)) for path in paths)
    except TypeError:
        raise ValueError(
            f"Budget.paths is {paths!r}, expected the ranks on the way to every node, as ((0,), (1,), (0, 0))"
        ) from None


class Policy(Protocol):
    """A replacement for a `Budget` that chooses a new one in every cycle, from the outcomes of earlier cycles.

    A policy for several texts also has `share(levels, contexts) -> {row: Budget}`, called once a cycle with each row's
    maximum depth and length, and `learn_rows({row: Cycle})`; these replace the two methods below.
    """

    nodes: int  # the most that it asks for
    # its `draw`, where it has one, is that of all its budgets: one that draws by lot must say so before it begins

    def within(self, levels: int) -> Budget:
        """The next cycle's budget, at most `levels` deep; an empty one if drafting does not pay."""
        ...

    def learn(self, cycle: Any) -> None:
        """Learn from the outcome of a cycle (`eagle.core.trace.Cycle`)."""
        ...
