"""Targets and drafters that were made for a model, held by the model itself, so that they live as long as it does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

from eagle.core.drafter import Drafter
from eagle.core.trace import Trace
from eagle.target.target import Target

# of a model; anything else that held a target would keep the model's weights
ATTRIBUTE = "_eagle_held"


class Held:
    """What was made for one model, and the record of its last call; a copy of the model begins without it."""

    def __init__(self) -> None:
        self.lock = RLock()
        self.target: Target | None = None
        self.built: Any = None  # the model's build that the target was made for
        # by the callable that loaded them
        self.drafters: WeakKeyDictionary[Any, Drafter] = WeakKeyDictionary()
        self.callables: dict[Any, Any] = {}  # of folders, by folder, revision and state of files
        self.traces: list[Trace] = []

    def __reduce__(self) -> Any:
        return Held, ()

    def target_of(self, model: Any) -> Target:
        """Return the target over the model's weights; made again, with all drafters, where the model was rebuilt."""
        # a model that was moved, cast, or given an adapter needs another target
        weights = list(model.parameters())
        attention = getattr(model.config, "_attn_implementation", None)
        built = (model.device, model.dtype, attention, [id(weight) for weight in weights])
        with self.lock:  # first calls of several threads make one target
            if self.target is None or self.built != built:
                self.drafters.clear()
                # a target freezes its model, which here is the caller's, who may go on training it
                trained = [weight for weight in weights if weight.requires_grad]
                try:
                    self.target = Target(model)
                    self.built = built
                finally:
                    for weight in trained:
                        weight.requires_grad_(True)
            return self.target


def held_by(model: Any) -> Held:
    """Return what is held by a model."""
    held = vars(model).setdefault(ATTRIBUTE, Held())
    assert isinstance(held, Held)
    return held


def count_from_zero(target: Target) -> None:
    """Let a target read texts from position 0 on, as the model's `generate` does, and not from the model's first one.

    The forwards of RoBERTa and its like count from the padding token's id on where nobody gives them positions.
    """
    target.refresh()
    with target.lock:
        target.reader.check()  # by the model's own forward
        target.reader.first_position = 0


def last_traces(model: Any) -> list[Trace]:
    """Return the traces of a model's last call of `generate` with a drafter, one for each row; none after beams."""
    return held_by(model).traces


@contextmanager
def in_evaluation(model: Any) -> Iterator[None]:
    """Return a context in which the model evaluates; modules that were in training are so again afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
