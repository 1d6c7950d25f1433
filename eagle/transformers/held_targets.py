"""Targets and drafters that were made for a model. The model holds them, so that they live as long as it does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

from eagle.core.drafter import Drafter
from eagle.core.trace import Trace
from eagle.target.target import Target

# the attribute of a model that holds them; a table elsewhere would keep the weights of a model that is no longer used
ATTRIBUTE = "_eagle_held"


class Held:
    """The target, the drafters and the last call's traces of one model; a copy of the model begins without them."""

    def __init__(self) -> None:
        """Hold nothing yet for a model of transformers that is called with a drafter."""
        self.lock = RLock()
        self.target: Target | None = None
        # what `target_of` compares to tell whether the target still fits the model
        self.target_key: Any = None
        # the callable of `generate_with` -> the drafter that it loaded
        self.drafters: WeakKeyDictionary[Any, Drafter] = WeakKeyDictionary()
        # (folder, revision, times of its files) -> the callable that `generate_from_folder` made
        self.callables: dict[Any, Any] = {}
        self.traces: list[Trace] = []  # of the last call, one for each row

    def __reduce__(self) -> Any:
        """Return how copies and pickles are made: by `Held()`, without arguments."""
        # copies and pickles of a model hold nothing: the target belongs to the original's weights
        return Held, ()

    def target_of(self, model: Any) -> Target:
        """Return the target over the model's weights, that of the last call if the model has not changed since.

        A new target drops the drafters, which were bound to the old one.
        """
        # a model that was moved, cast, or given an adapter needs another target; the ids show weights that were
        # replaced by others, not weights that were trained on
        weights = list(model.parameters())
        attention = getattr(model.config, "_attn_implementation", None)
        key = (model.device, model.dtype, attention, [id(weight) for weight in weights])
        # several threads that call for the first time share one target
        with self.lock:
            if self.target is None or self.target_key != key:
                self.drafters.clear()
                # a target freezes its model, but this one is the caller's, who may go on training it
                trained = [weight for weight in weights if weight.requires_grad]
                try:
                    self.target = Target(model)
                    self.target_key = key
                finally:
                    for weight in trained:
                        weight.requires_grad_(True)
            return self.target


def held_by(model: Any) -> Held:
    """Return what a model holds for its calls with a drafter (target, drafters, traces), made at the first call."""
    held = vars(model).setdefault(ATTRIBUTE, Held())
    assert isinstance(held, Held)
    return held


def count_from_zero(target: Target) -> None:
    """Let a target count positions from 0, as `model.generate` does for a model whose forward takes positions.

    RoBERTa and similar models count from the padding token's id + 1 if their forward is given no positions. A target
    follows the forward, so it would differ from `generate` there.
    """
    # take up changes of the model first
    target.refresh()
    with target.lock:
        # the check compares with the model's own forward, and so must run before the positions are changed
        target.reader.check()
        target.reader.first_position = 0


def last_traces(model: Any) -> list[Trace]:
    """Return the traces of a model's last `generate` with a drafter, one per row; empty after beam search."""
    return held_by(model).traces


@contextmanager
def in_evaluation(model: Any) -> Iterator[None]:
    """Return a context in which the model is in evaluation mode; modules in training mode return to it afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
