"""What every drafting method agrees on: what it reads, what it answers, and what it may borrow."""

# A committed tokens, L taps, D target width, V vocabulary

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor, nn

from eagle.examples import Batch
from eagle.tree import DraftTree

Noise = Callable[[list[int]], Tensor]
"""Positions -> [P, V], what the target will add to its warped logits when it chooses the tokens standing there."""


@dataclass(frozen=True, slots=True)
class Committed:
    """What the target has confirmed since the drafter last spoke."""

    tokens: Tensor  # [A]
    features: Tensor | None  # [A, L, D], the taps that the drafter asked for
    root: int  # chosen by the target, not yet read by it


@dataclass(frozen=True, slots=True)
class Budget:
    """How much a drafter may propose in one cycle: draft nodes, levels, and children per node."""

    nodes: int = 10
    depth: int = 10
    top_k: int = 10

    def __post_init__(self) -> None:
        for name in ("nodes", "depth", "top_k"):
            if getattr(self, name) < 0:
                raise ValueError(f"Budget.{name} is {getattr(self, name)}, expected 0 or more")

    def within(self, levels: int) -> Budget:
        """The same budget, at most `levels` deep."""
        return self if self.depth <= levels else replace(self, depth=max(levels, 0))


class Drafter(Protocol):
    """Guesses a tree after every committed token; `taps` are the target's layer inputs that it reads to do so."""

    taps: tuple[int, ...]

    def begin(self, noise: Noise | None = None) -> None:
        """Forget the previous sequence; `noise` is what the target will choose with (None when it is greedy)."""

    def propose(self, news: Committed, budget: Budget) -> DraftTree:
        """A tree rooted at `news.root`, of at most `budget.nodes` further nodes."""
        ...


class TrainableDrafter(nn.Module):
    """A drafter with weights; its forward is the loss, because data-parallel wrappers synchronise `forward` alone."""

    taps: tuple[int, ...] = ()
    teacher_taps: tuple[int, ...] = (-1,)
    Settings: type  # what a recipe may say about it
    settings: Any
    shape: Any  # a LlamaConfig: the sizes of its block

    @classmethod
    def for_target(cls, settings: Any, target_config: Any) -> TrainableDrafter:
        """A new head of the right sizes."""
        raise NotImplementedError(f"{cls.__name__} cannot be made for a target: write for_target")

    def bind(self, frozen: TargetHead) -> TrainableDrafter:
        """Lend the head what it needs to draft."""
        raise NotImplementedError(f"{type(self).__name__} cannot draft: write bind, begin and propose")

    def forward(self, batch: Batch, frozen: TargetHead) -> dict[str, Tensor]:
        """Loss terms: "total" is minimised, the rest is logged."""
        raise NotImplementedError(f"{type(self).__name__} does not define its loss: write forward(batch, frozen)")


@dataclass(frozen=True, slots=True)
class TargetHead:
    """The target's frozen embedding, and hidden -> logits: all that a drafter may borrow."""

    embedding: nn.Module
    output: nn.Module
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None

    def embed(self, tokens: Tensor) -> Tensor:
        """Token embeddings as the target's first layer sees them, without learned positions."""
        embedded = self.embedding(tokens)
        return embedded if self.embed_scale == 1.0 else embedded * self.embed_scale

    def logits(self, hidden: Tensor) -> Tensor:
        """The target's logits from the input of its LM head, in the weights' own dtype."""
        logits = self.output(hidden)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.softcap is not None:
            logits = (logits / self.softcap).tanh() * self.softcap
        return logits

    @property
    def weight(self) -> Tensor:
        """[V, D], the LM head's matrix."""
        return self.output.get_parameter("weight")
