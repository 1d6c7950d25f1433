"""The head that training starts from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from eagle.core.drafter import TrainableDrafter
from eagle.core.examples import Features
from eagle.data.identity import differences
from eagle.drafters import DRAFTERS
from eagle.drafters.parts.reduced_vocab import load_draft_vocab
from eagle.formats.checkpoint import load_head
from eagle.recipe import Recipe
from eagle.target.borrowed import Borrowed
from eagle.target.target import Target


def first_head(
    recipe: Recipe, settings: Any, target: Target | Borrowed, features: Features
) -> TrainableDrafter:
    """Return the head that training starts from: a new one, or one with the weights of `train.init`.

    The head of `train.init` must have the same network and sizes. Its attention window may differ, because a window
    changes no weights.

    Args:
        recipe: The recipe of the run.
        settings: The settings of the drafting method, checked by it.
        target: Its config, embedding and LM head fix the head's sizes.
        features: Its supervised tokens are counted for a draft vocabulary.
    """
    draft_vocab = getattr(settings, "draft_vocab", None)
    if isinstance(draft_vocab, str):
        # the result is not used here: the call refuses a vocabulary file that was made with another tokenizer
        load_draft_vocab(draft_vocab, {"tokenizer": features.identity["tokenizer"]})
    method = DRAFTERS[settings.kind]
    # only methods that read the target's weights take this argument
    weights = {"weights": target.tensor} if method.reads.weights else {}
    head: TrainableDrafter = method.for_target(
        settings, target.config, target.head, _supervised_tokens(features), **weights
    )
    if recipe.train.init is None:
        return head
    initial = load_head(recipe.train.init)
    wrong = []
    differing = differences(_describe_network(initial), _describe_network(head))
    for name, found, needed in differing:
        wrong.append(f"{name}: {found!r}, needed {needed!r}")
    if wrong:
        raise ValueError(
            f"the head in {recipe.train.init} does not fit: {'; '.join(wrong)}. Train without train.init"
        )
    head.load_state_dict(initial.state_dict())
    return head


def _supervised_tokens(features: Features) -> Iterator[Tensor]:
    """Yield the supervised tokens of every example; the most frequent ones become a draft vocabulary."""
    for index in range(len(features)):
        tokens, loss_mask = features.text(index)
        yield tokens[loss_mask]


def _describe_network(head: TrainableDrafter) -> dict[str, Any]:
    """Return what two heads must have in common to exchange weights: network, sizes, and shapes of all weights."""
    shapes = {name: tuple(weight.shape) for name, weight in head.state_dict().items()}
    # the window may differ, so all windows compare as None
    return {**head.network, "window": None, **head.shape.to_dict(), **shapes}
