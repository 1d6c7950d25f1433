"""HASS: EAGLE-1's network and drafting, its loss before anything is drafted, and heads that start from one another."""

# T tokens of a text, H hidden

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle import Budget
from eagle.core.drafter import Committed, TargetHead
from eagle.core.examples import Batch, collate
from eagle.drafters.recurrent.eagle1 import Eagle1
from eagle.drafters.recurrent.eagle3 import Eagle3
from eagle.drafters.recurrent.hass import Hass
from eagle.formats.checkpoint import load_head, save_head
from eagle.recipe import Recipe
from eagle.training.start import first_head
from tests.naive_unroll import hass_loss
from tests.unrolled_heads import (
    SHAPE,
    TAPS,
    apart,
    computed,
    frozen_head,
    gradients_of,
    texts_of,
)

SAID = {
    17: [(3, 5), (6, 7), (8, 17)],
    9: [(2, 4), (8, 9)],
    12: [(2, 12)],
}
FROZEN = frozen_head(torch.float32)


def new_pair(
    steps: int = 1,
    top: float = 0.0,
    **settings: Any,
) -> tuple[Eagle1, Hass]:
    """Return an EAGLE-1 head and a HASS head of the same weights; `top` weighs the likeliest tokens' loss."""
    torch.manual_seed(2)
    eagle1 = Eagle1.for_target(Eagle1.Settings(**settings), SHAPE)
    hass = Hass.for_target(Hass.Settings(**settings, steps=steps, top=top), SHAPE)
    # both have EAGLE-1's tensors, by the same names
    hass.load_state_dict(eagle1.state_dict())
    return eagle1.train(), hass.train()


@pytest.fixture(scope="module")
def batch() -> Batch:
    """Return several texts, each with a seed of its own."""
    return collate(texts_of(SAID, torch.float32), TAPS, seeds=[5, 6, 7])


@pytest.mark.parametrize("as_published", [False, True])
def test_one_step_is_eagle1(batch: Batch, as_published: bool) -> None:
    """Loss and gradients are equal, with the same noise for the same text."""
    eagle1, hass = new_pair(
        noise=0.1,
        noise_as_published=as_published,
        regression=0.5,
        cross_entropy=0.3,
    )
    assert (
        apart(
            hass,
            computed(hass, batch, FROZEN),
            computed(eagle1, batch, FROZEN),
        )
        < 1e-6
    )


@pytest.mark.parametrize(
    "changes",
    [{"steps": 2}, {"top": 1.0}],
    ids=["steps", "top"],
)
def test_more_steps_are_not(batch: Batch, changes: dict[str, Any]) -> None:
    """A second step, or a loss of the likeliest tokens, makes another loss."""
    eagle1, hass = new_pair(noise=0.0, **changes)
    assert (
        apart(
            hass,
            computed(hass, batch, FROZEN),
            computed(eagle1, batch, FROZEN),
        )
        > 1e-2
    )


def draw_noise(length: int, seed: int) -> Tensor:
    """Return [T - 2, H] from U(-0.1, 0.1), the noise of texts of up to 512 tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(length - 2, SHAPE.hidden_size, generator=generator) * 0.2 - 0.1


def test_noise_is_on_what_the_first_step_reads_alone(batch: Batch) -> None:
    """Later steps meet it in the text's keys; the states to learn, and evaluation, have none."""
    head = Hass.for_target(Hass.Settings(noise=0.1), SHAPE).train()
    noise = [draw_noise(*pair) for pair in zip(batch.lengths, batch.seeds, strict=True)]

    def compute_loss(weights: dict[str, Tensor]) -> Tensor:
        texts = texts_of(SAID, torch.float32)
        return hass_loss(
            weights,
            settings=head.settings,
            shape=head.shape,
            texts=texts,
            target_head=FROZEN,
            noise=noise,
        )

    # in evaluation there is no noise, which shows that it is compared at all
    expected = gradients_of(head, compute_loss)
    assert apart(head, computed(head, batch, FROZEN), expected) < 1e-5
    assert apart(head.eval(), computed(head, batch, FROZEN), expected) > 1e-3


# -- `loss_vocab` -----------------------------------------------------------------------------------------------------

SUPERVISED = [torch.tensor([3, 3, 3, 9]), torch.tensor([7, 9, 9, 1, 1, 12])]
FREQUENT = torch.tensor([1, 3, 7, 9])


def test_a_loss_of_the_frequent_tokens_is_that_of_a_smaller_matrix(batch: Batch) -> None:
    """Also of the likeliest tokens; the features' regression is as before."""
    settings = Hass.Settings(noise=0.0, steps=2, top=1.0, loss_vocab=4)
    head = Hass.for_target(settings, SHAPE, supervised=SUPERVISED)
    assert head.loss_tokens is not None
    # ties go to the lower token: 7 and 12 are counted once each
    assert head.loss_tokens.equal(FREQUENT)

    def compute_loss(weights: dict[str, Tensor], target_head: TargetHead) -> Tensor:
        texts = texts_of(SAID, torch.float32)
        return hass_loss(
            weights,
            settings=settings,
            shape=head.shape,
            texts=texts,
            target_head=target_head,
            noise=[torch.zeros(length - 2, SHAPE.hidden_size) for length in batch.lengths],
        )

    found = computed(head.eval(), batch, FROZEN)
    narrow = gradients_of(head, partial(compute_loss, target_head=FROZEN.narrow(FREQUENT)))
    whole = gradients_of(head, partial(compute_loss, target_head=FROZEN))
    assert apart(head, found, narrow) < 1e-5
    # the loss of the whole vocabulary is another
    assert apart(head, found, whole) > 1e-3


def test_a_head_of_such_a_loss_is_saved_as_any_other(tmp_path: Path) -> None:
    """Its weights are those of any other head, and a file beside them holds the tokens."""
    head = Eagle1.for_target(Eagle1.Settings(loss_vocab=4), SHAPE, supervised=SUPERVISED)
    assert (
        head.state_dict().keys() == Eagle1.for_target(Eagle1.Settings(), SHAPE).state_dict().keys()
    )
    save_head(tmp_path, head, "target: {path: x}\n", {})
    loaded = load_head(tmp_path)
    assert isinstance(loaded, Eagle1)
    assert loaded.loss_tokens is not None
    assert loaded.loss_tokens.equal(FREQUENT)


def test_a_loss_vocabulary_without_texts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"drafter\.loss_vocab is 4, but no sequences were given"):
        Eagle1.for_target(Eagle1.Settings(loss_vocab=4), SHAPE)
    too_many = SHAPE.vocab_size + 1
    with pytest.raises(ValueError, match=f"{too_many} was asked for"):
        Eagle1.for_target(Eagle1.Settings(loss_vocab=too_many), SHAPE, supervised=SUPERVISED)


def test_it_drafts_as_eagle1_does(batch: Batch) -> None:
    """The same weights draft the same tree."""
    update = Committed(batch.tokens[:9], batch.select_taps((-1,))[:9], 7)
    budget = Budget(12, 4, 3)
    first, second = (head.bind(FROZEN).begin().propose(update, budget) for head in new_pair())
    assert first.tokens.equal(second.tokens)
    assert first.parents.equal(second.parents)


# -- `train.init` -----------------------------------------------------------------------------------------------------


class EmptyData:
    """A target's config and head, and a data set without texts."""

    # all that a first head asks of a target
    config = SHAPE
    head = FROZEN

    def __len__(self) -> int:
        return 0


def started(
    recipe: Recipe,
    settings: Any,
    init: Path,
) -> Any:
    """Return the head that a training run with `train.init` starts from."""
    train = recipe.train.model_copy(update={"init": str(init)})
    asked = recipe.model_copy(update={"train": train})
    return first_head(
        asked,
        settings,
        EmptyData(),
        EmptyData(),
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("saved", "method"),
    [(Eagle1, Hass), (Hass, Eagle1)],
    ids=["hass", "eagle1"],
)
def test_one_starts_from_the_other(
    recipe: Recipe,
    tmp_path: Path,
    saved: Any,
    method: Any,
) -> None:
    """Every weight of the new head is that of the head on disk."""
    torch.manual_seed(3)
    other = saved.for_target(saved.Settings(fc_bias=False), SHAPE)
    save_head(tmp_path / "head", other, "", {})
    head = started(
        recipe,
        method.Settings(fc_bias=False),
        tmp_path / "head",
    )
    assert type(head) is method
    for name, tensor in other.state_dict().items():
        assert head.state_dict()[name].equal(tensor)


# a head on disk and settings in which its weights would mean something else
UNLIKE: dict[str, tuple[Any, Any]] = {
    "method": (Eagle3.Settings(), Hass.Settings()),
    "bias": (Eagle1.Settings(), Hass.Settings(fc_bias=False)),
    "width": (Eagle1.Settings(intermediate_size=32), Hass.Settings()),
    "norm of outputs": (Eagle3.Settings(), Eagle3.Settings(norm_output=True)),
    "taps": (Eagle3.Settings(taps=(1, 2, 3)), Eagle3.Settings()),
}


@pytest.mark.parametrize("case", UNLIKE)
def test_another_network_is_refused(
    recipe: Recipe,
    tmp_path: Path,
    case: str,
) -> None:
    """Training does not begin."""
    saved, settings = UNLIKE[case]
    methods = {"eagle1": Eagle1, "eagle3": Eagle3}
    head = methods[saved.kind].for_target(saved, SHAPE, FROZEN)
    save_head(tmp_path / "head", head, "", {})
    with pytest.raises(ValueError, match="does not fit"):
        started(recipe, settings, tmp_path / "head")
