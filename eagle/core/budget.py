"""Limits on what a drafter proposes in one cycle, fixed or chosen again in every cycle."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, get_args

from eagle.core.sampling import number, whole
from eagle.core.tree import Paths

# the most draft levels of any drafter, and positions of a drafted block: memory grows with both
MOST_LEVELS = 1_024
MOST_NODES = 4_096  # the most nodes of a stored budget, which a head was tuned to

Draw = Literal["noise", "likeliest", "sampled"]
"""When the target samples, children are ranked with its noise, ranked by the head's probs, or sampled from them."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The limits of a draft: nodes, levels, and children per node."""

    nodes: int = 10  # maximum number of draft tokens, without the root
    depth: int = 10  # maximum number of levels
    top_k: int = 10  # maximum number of children of a node, and of parents in a level
    paths: Paths | None = None  # a fixed tree, see `fixed`; None: a dynamic tree
    draw: Draw = "noise"  # how draft tokens are chosen if the target samples
    # factor for the drafter's logits when a dynamic tree is built; 1 is EAGLE-2's rule, None the drafter's default
    sharpness: float | None = None
    # a node gets no children if their predicted acceptance rate is lower; None: no threshold
    confidence: float | None = None

    def __post_init__(self) -> None:
        """Check the fields; ValueError names the field, what it holds and what is expected.

        Users make budgets, so that a mistake is named here and not in the middle of a forward.
        """
        # object.__setattr__, because a frozen dataclass refuses to set its fields in any other way
        for name in ("nodes", "depth", "top_k"):
            value = whole(f"Budget.{name}", getattr(self, name))
            object.__setattr__(self, name, value)
            if value < 0:
                raise ValueError(f"Budget.{name} is {value}, expected 0 or more")
        for name in ("sharpness", "confidence"):
            if getattr(self, name) is not None:
                number(f"Budget.{name}", getattr(self, name))
        if self.sharpness is not None and not self.sharpness > 0:
            raise ValueError(
                f"Budget.sharpness is {self.sharpness!r}, expected a number above 0; 1 is EAGLE-2's rule"
            )
        if self.confidence is not None and not 0 <= self.confidence <= 1:
            raise ValueError(
                f"Budget.confidence is {self.confidence!r}, expected a probability, or None for all nodes"
            )
        if self.draw not in get_args(Draw):
            raise ValueError(
                f"Budget.draw is {self.draw!r}, expected one of {', '.join(get_args(Draw))}"
            )
        if self.paths is not None:
            object.__setattr__(self, "paths", _as_paths(self.paths))
            self._check_paths()
        elif self.draw == "sampled":
            raise ValueError(
                "Budget.draw is 'sampled', which needs a fixed shape: children kept for being likely do not follow the "
                "probs that they were drawn from; use Budget.fixed(paths, 'sampled'), for a chain with chain_paths"
            )

    def _check_paths(self) -> None:
        """Refuse paths that form no tree, or exceed the budget's `nodes` or `top_k`.

        A path names a draft node by the rank, among its siblings, of each node on the way from the root to it: (0, 1)
        is the second child of the root's first child.
        """
        # the empty path is the root, which need not be named
        paths = {path for path in self.paths or () if path}
        for path in paths:
            parent = path[:-1]
            rank = path[-1]
            if (parent and parent not in paths) or rank not in range(self.top_k):
                raise ValueError(
                    f"Budget.paths holds {path}, expected {parent} too and ranks below top_k = {self.top_k}: "
                    "name every node by the ranks on its way; Budget.fixed(paths) sets the rest"
                )
            # sampled siblings are verified in the order in which they were sampled, so no rank may be missing
            if self.draw == "sampled" and rank > 0 and (*parent, rank - 1) not in paths:
                raise ValueError(
                    f"Budget.paths holds {path}, expected all siblings drawn before it: give them ranks 0, 1, 2, ..."
                )
        if len(paths) > self.nodes:
            raise ValueError(
                f"Budget.paths holds {len(paths)} nodes, expected {self.nodes}: use Budget.fixed(paths)"
            )

    @classmethod
    def fixed(cls, paths: Paths, draw: Draw = "noise", confidence: float | None = None) -> Budget:
        """Return a budget with a fixed tree shape, such as EAGLE-1's (`eagle.core.tree.PUBLISHED_TREE`).

        Args:
            paths: For each draft token, the ranks among siblings on the path to it: ((0,), (1,), (0, 0)) is a tree with
                two children of the root, and one child of the first. Every token on a path must have its own entry.
            draw: How children are chosen where the target samples (`Draw`).
            confidence: The least predicted probability of acceptance at which a node gets children; None: no threshold.
        """
        paths = _as_paths(paths)
        # the limits that just admit these paths; a node of rank r needs r + 1 candidates
        return cls(
            nodes=len(set(paths)),
            depth=max(map(len, paths), default=0),
            top_k=1 + max((max(path, default=-1) for path in paths), default=-1),
            paths=paths,
            draw=draw,
            confidence=confidence,
        )

    @property
    def is_empty(self) -> bool:
        """Whether it allows no draft tokens, so that the target decodes one token at a time."""
        return min(self.nodes, self.depth, self.top_k) == 0

    def within(self, levels: int) -> Budget:
        """Return this budget with a depth of at most `levels`; it allows no drafts if these are 0 or fewer.

        The decoding loop calls it in each cycle, because an answer may end before a full draft would.
        """
        if self.depth <= levels:
            return self
        return replace(self, depth=max(levels, 0))


def _as_paths(paths: Any) -> Paths:
    """Return a tree's paths as tuples of ints, from any nested sequence of ints; ValueError for anything else.

    A path names a node by the rank, among its siblings, of each node on the way from the root to it.
    """
    try:
        # the items of a string are no ranks, although those of bytes would pass as ints
        if isinstance(paths, (str, bytes)):
            raise TypeError
        return tuple(tuple(map(operator.index, path)) for path in paths)
    except TypeError:
        raise ValueError(
            f"Budget.paths is {paths!r}, expected the ranks on the way to every node, as ((0,), (1,), (0, 0))"
        ) from None


class Policy(Protocol):
    """A replacement for a `Budget` that chooses a new one in every cycle, from the outcomes of earlier cycles.

    A policy for several sequences also has `share(levels, contexts) -> {row: Budget}`, called once a cycle with each
    row's maximum depth and length, and `learn_rows({row: Cycle})`; these replace the two methods below.
    """

    nodes: int  # the most nodes of any budget that it returns: the cache has space for them
    # A policy that samples drafts also has an attribute `draw`, the same as that of all its budgets, because the noise
    # of a request is chosen before its first budget.

    def within(self, levels: int) -> Budget:
        """Return the next cycle's budget, at most `levels` deep; one that allows no drafts if drafting does not pay.

        A cycle is one draft, one forward of the target, and the tokens on which both agree.
        """

    def learn(self, cycle: Any) -> None:
        """Learn from the outcome of a cycle (`eagle.core.trace.Cycle`): its tree, accepted nodes and seconds."""


def describe_budget(budget: Mapping[str, Any]) -> str:
    """Return in words the shape of the tree that a budget allows, for reports; "" if it allows none.

    Args:
        budget: The fields of a `Budget` by name.
    """
    nodes = budget["nodes"]
    depth = budget["depth"]
    if not nodes:
        return ""
    # the acceptance above temperature 0 depends on `draw`; reports of early releases lack the field. "noise", the
    # default, is not mentioned.
    draw = budget.get("draw", "noise")
    how = "" if draw == "noise" else f", draw {draw}"
    if budget.get("confidence") is not None:
        how += f", confidence from {budget['confidence']:g}"
    if budget.get("paths"):
        is_chain = nodes == depth
        tree = f"fixed tree of {nodes} nodes, depth {depth}"
    else:
        # one child for each node, or a single node: a chain, which ends at the smaller of both limits
        is_chain = budget["top_k"] == 1 or nodes == depth == 1
        tree = f"tree of {nodes} nodes, depth {depth}, top-k {budget['top_k']}"
    length = min(nodes, depth)
    if is_chain:
        tree = f"chain of {length} token{'' if length == 1 else 's'}"
    return tree + how
