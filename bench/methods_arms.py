"""The heads that `bench/methods.py` compares, and the shapes in which they draft."""

from __future__ import annotations

from dataclasses import dataclass

from eagle.core.drafter import Budget
from eagle.core.tree import PUBLISHED_TREE, chain_paths

LONG_CHAIN = "chain of 7"  # of which acceptance is counted by level
SHAPES = {
    "chain of 4": Budget.fixed(chain_paths(4)),
    LONG_CHAIN: Budget.fixed(chain_paths(7)),
    "tree of 25": Budget.fixed(PUBLISHED_TREE),
    "dynamic 25": Budget(25, 6, 6),
}
WHOLE = "drafter.draft_vocab=null"  # small targets spread their words over all of their vocabulary
PLAIN, TERM = "drafter.top=0", "drafter.top=1"  # HASS without its top-10 term, and as published
RANDOM, NORMED = "drafter.queries=random", "drafter.norm_before_residual=true"
FEW, DEEP = ("chain of 4", "tree of 25"), (LONG_CHAIN, "tree of 25")  # where not all shapes are wanted
HALF, TWICE = "EAGLE-1, half the tokens", "EAGLE-1, twice the tokens"


@dataclass(frozen=True)
class Arm:
    """How one head is made."""

    method: str  # whose recipe of recipes/tiny
    overrides: tuple[str, ...] = ()
    share: float = 1.0  # of the tokens
    start: str | None = None  # the arm whose head it goes on from
    as_long_as: str | None = None  # the arm whose time it has, its start's included, instead of a share of the tokens
    store: str = "features"
    shapes: tuple[str, ...] = tuple(SHAPES)


def ablation(*overrides: str, store: str = "features") -> Arm:
    """EAGLE-3 on half of the tokens, but for what is overridden."""
    return Arm("eagle3", (WHOLE, *overrides), share=0.5, store=store, shapes=DEEP)


def part(denominator: int) -> str:
    """The setting for a draft vocabulary of that part of the target's."""
    return f"drafter.draft_vocab={{vocab_{denominator}}}"


METHODS = {
    HALF: Arm("eagle1", share=0.5, shapes=()),  # but a start
    "EAGLE-1": Arm("eagle1"),
    "EAGLE-1, in two halves": Arm("eagle1", share=0.5, start=HALF),  # as HASS is trained, but for what is HASS's
    "HASS": Arm("hass", (TERM,), share=0.5, start=HALF),
    "HASS, from the first step": Arm("hass", (TERM, "train.init=null")),
    "EAGLE-3": Arm("eagle3", (WHOLE,)),
    "EAGLE-3, random queries": Arm("eagle3", (WHOLE, RANDOM)),
    "EAGLE-3, residual normed": Arm("eagle3", (WHOLE, NORMED)),
    "EAGLE-3, residual normed, random queries": Arm("eagle3", (WHOLE, NORMED, RANDOM)),
    "HASS, no top-10 term": Arm("hass", (PLAIN,), share=0.5, start=HALF),
    "EAGLE-3, 1/4 of the vocabulary": Arm("eagle3", (WHOLE, part(4))),
    "EAGLE-1, equal time": Arm("eagle1", as_long_as="EAGLE-3", shapes=FEW),
    "HASS, equal time": Arm("hass", (TERM,), start="EAGLE-1", as_long_as="EAGLE-3", shapes=FEW),
    "EAGLE-3, in EAGLE-1's time": Arm("eagle3", (WHOLE,), as_long_as="EAGLE-1", shapes=FEW),
    "HASS, no top-10 term, in EAGLE-1's time": Arm("hass", (PLAIN,), start=HALF, as_long_as="EAGLE-1", shapes=FEW),
    TWICE: Arm("eagle1", share=2, shapes=FEW),
    "HASS, twice the tokens": Arm("hass", (TERM,), start="EAGLE-1", shapes=FEW),
}
ABLATIONS = {
    "as it is": ablation(),
    "1 step": ablation("drafter.steps=1"),
    "3 steps": ablation("drafter.steps=3"),
    "5 steps": ablation("drafter.steps=5"),
    "1/2 of the vocabulary": ablation(part(2)),
    "1/4 of the vocabulary": ablation(part(4)),
    "1/8 of the vocabulary": ablation(part(8)),
    "1/16 of the vocabulary": ablation(part(16)),
    "LM head frozen": ablation("drafter.train_lm_head=false"),
    "LM head from random": ablation("drafter.lm_head=random"),
    "features in fp8": ablation("features.dtype=float8", store="features-float8"),
    "regenerated answers": ablation("data.train={work}/regenerated.jsonl", store="features-regenerated"),
    "the same conversations": ablation("data.train={work}/few.jsonl", store="features-few"),
    "loss: acceptance": ablation("drafter.loss=acceptance"),
    "loss: hybrid": ablation("drafter.loss=hybrid"),
    "norm on every tap": ablation("drafter.fc_norm=true"),
    "normed output handed on": ablation("drafter.norm_output=true"),
    "both norms (EAGLE-3.1)": ablation("drafter.fc_norm=true", "drafter.norm_output=true"),
    "random queries": ablation(RANDOM),
    "residual normed": ablation(NORMED),
    "residual normed, random queries": ablation(NORMED, RANDOM),
}
ARMS = {**METHODS, **ABLATIONS}
