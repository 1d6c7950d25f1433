"""The head that training starts from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from eagle.core.drafter import TrainableDrafter
from eagle.core.examples import Features
from eagle.data.identity import differences
from eagle.drafters import DRAFTERS
from eagle.drafters.recurrent.reduced_vocab import load_draft_vocab
from eagle.formats.checkpoint import load_head
from eagle.recipe import Recipe
from eagle.target.borrowed import Borrowed
from eagle.target.target import Target


def first_head(
    recipe: Recipe, settings: Any, target: Target | Borrowed, features: Features
) -> TrainableDrafter:
    """Return a new head, or the one that `train.init` names, which must be of the same network and sizes.

    Its window may differ, because a window changes no weights.
    """
    draft_vocab = getattr(settings, "draft_vocab", None)
    if isinstance(draft_vocab, str):
        # refuses the vocabulary of another tokenizer
        load_draft_vocab(draft_vocab, {"tokenizer": features.identity["tokenizer"]})
    method = DRAFTERS[settings.kind]
    weights = {"weights": target.tensor} if method.reads.weights else {}
    head: TrainableDrafter = method.for_target(
        settings, target.config, target.head, _supervised_tokens(features), **weights
    )
    if recipe.train.init is None:
        return head
    initial = load_head(recipe.train.init)
    wrong = []
    for name, found, needed in differences(_describe_network(initial), _describe_network(head)):
        wrong.append(f"{name}: {found!r}, needed {needed!r}")
    if wrong:
        raise ValueError(
            f"the head in {recipe.train.init} does not fit: {'; '.join(wrong)}. Train without train.init"
        )
    head.load_state_dict(initial.state_dict())
    return head


def _supervised_tokens(features: Features) -> Iterator[Tensor]:
    """Yield the supervised tokens of every example, of which a draft vocabulary is counted."""
    for index in range(len(features)):
        tokens, loss_mask = features.text(index)
        yield tokens[loss_mask]


def _describe_network(head: TrainableDrafter) -> dict[str, Any]:
    """Return the network, the sizes and the shape of every weight of a head."""
    shapes = {name: tuple(weight.shape) for name, weight in head.state_dict().items()}
    return {**head.network, "window": None, **head.shape.to_dict(), **shapes}
