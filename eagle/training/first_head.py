"""The head that training starts from."""

from __future__ import annotations

from typing import Any

from eagle.core.drafter import TrainableDrafter
from eagle.core.examples import Features
from eagle.data.identity import differences
from eagle.drafters import DRAFTERS
from eagle.drafters.recurrent.reduced_vocab import load_draft_vocab
from eagle.formats.checkpoint import load_head
from eagle.recipe import Recipe
from eagle.target.borrowed import Borrowed
from eagle.target.target import Target


def first_head(recipe: Recipe, settings: Any, target: Target | Borrowed, features: Features) -> TrainableDrafter:
    """A new head, or the one that `train.init` names, which must be of the same network and sizes.

    Its window may differ, because a window changes no weights.
    """
    named = getattr(settings, "draft_vocab", None)
    if isinstance(named, str):
        load_draft_vocab(named, {"tokenizer": features.identity["tokenizer"]})  # refuses that of another
    method = DRAFTERS[settings.kind]
    weights = {"weights": target.tensor} if method.reads.weights else {}
    supervised = (features.supervised_tokens(place) for place in range(len(features)))
    head: TrainableDrafter = method.for_target(settings, target.config, target.head, supervised, **weights)
    if recipe.train.init is None:
        return head
    initial = load_head(recipe.train.init)
    shapes = [{name: tuple(part.shape) for name, part in made.state_dict().items()} for made in (initial, head)]
    had, needed = (
        {**made.network, "window": None, **made.shape.to_dict(), **shape}
        for made, shape in zip((initial, head), shapes, strict=True)
    )
    if wrong := [f"{name}: {found!r}, needed {new!r}" for name, found, new in differences(had, needed)]:
        raise ValueError(f"the head in {recipe.train.init} does not fit: {'; '.join(wrong)}. Train without train.init")
    head.load_state_dict(initial.state_dict())
    return head
