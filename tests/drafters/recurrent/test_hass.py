"""HASS: EAGLE-1's network and drafting, its loss where nothing is drafted, and heads that start from one another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle import Budget
from eagle.core.drafter import Committed
from eagle.core.examples import Batch, collate
from eagle.drafters.recurrent.eagle1 import Eagle1
from eagle.drafters.recurrent.eagle3 import Eagle3
from eagle.drafters.recurrent.hass import Hass
from eagle.formats.checkpoint import load_head, save_head
from eagle.recipe import Recipe
from eagle.training.first_head import first_head
from tests.naive_unroll import hass_loss
from tests.unrolled_heads import SHAPE, TAPS, apart, computed, frozen_head, texts_of

SAID = {17: [(3, 5), (6, 7), (8, 17)], 9: [(2, 4), (8, 9)], 12: [(2, 12)]}


def heads(**settings: Any) -> tuple[Eagle1, Hass]:
    """An EAGLE-1 head and a HASS head of one step without the likeliest tokens' part, with the same weights."""
    torch.manual_seed(2)
    first = Eagle1.for_target(Eagle1.Settings(**settings), SHAPE)
    second = Hass.for_target(Hass.Settings(**settings, steps=1, top=0.0), SHAPE)
    second.load_state_dict(first.state_dict())
    return first.train(), second.train()


@pytest.fixture(scope="module")
def batch() -> Batch:
    """Several texts, each with a seed of its own."""
    return collate(texts_of(SAID, torch.float32), TAPS, seeds=[5, 6, 7])


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("as_published", [False, True])
def test_one_step_is_eagle1(batch: Batch, noise: float, as_published: bool) -> None:
    """The same loss and gradients, to rounding, with the same noise for the same text."""
    first, second = heads(
        noise=noise, noise_as_published=as_published, regression=0.5, cross_entropy=0.3
    )
    frozen = frozen_head(torch.float32)
    assert apart(second, computed(second, batch, frozen), computed(first, batch, frozen)) < 1e-6


def test_more_steps_are_not(batch: Batch) -> None:
    """The comparison above can fail, and so it does where the likeliest tokens count once more."""
    first, frozen = heads(noise=0.0)[0], frozen_head(torch.float32)
    for changes in ({"steps": 2, "top": 0.0}, {"steps": 1, "top": 1.0}):
        other = Hass.for_target(Hass.Settings(noise=0.0, **changes), SHAPE)
        other.load_state_dict(first.state_dict())
        assert apart(other, computed(other, batch, frozen), computed(first, batch, frozen)) > 1e-2


def noise_of(length: int, seed: int) -> Tensor:
    """[T - 2, H] from U(-0.1, 0.1), as texts of up to 512 tokens have it."""
    drawn = torch.rand(length - 2, SHAPE.hidden_size, generator=torch.Generator().manual_seed(seed))
    return drawn * 0.2 - 0.1


def test_noise_is_on_what_the_first_step_reads_alone(batch: Batch) -> None:
    """Later steps read it in the text's keys; what is taught has none."""
    head, frozen = (
        Hass.for_target(Hass.Settings(noise=0.1), SHAPE).train(),
        frozen_head(torch.float32),
    )
    noise = [
        noise_of(length, seed) for length, seed in zip(batch.lengths, batch.seeds, strict=True)
    ]
    weights = {
        name: tensor.detach().clone().requires_grad_() for name, tensor in head.state_dict().items()
    }
    loss = hass_loss(
        weights, head.settings, head.shape, texts_of(SAID, torch.float32), frozen, noise
    )
    gradients = torch.autograd.grad(loss, list(weights.values()))
    true = {"total": loss.detach(), **dict(zip(weights, gradients, strict=True))}
    assert apart(head, computed(head, batch, frozen), true) < 1e-5
    assert apart(head.eval(), computed(head, batch, frozen), true) > 1e-3


def test_it_drafts_as_eagle1_does(batch: Batch) -> None:
    """The same tree from the same weights."""
    news = Committed(batch.tokens[:9], batch.select_taps((-1,))[:9], 7)
    trees = [
        head.bind(frozen_head(torch.float32)).begin().propose(news, Budget(12, 4, 3))
        for head in heads()
    ]
    assert trees[0].tokens.equal(trees[1].tokens) and trees[0].parents.equal(trees[1].parents)


class Given:
    """A target's config and head, and texts of which nothing is read."""

    config, head = SHAPE, frozen_head(torch.float32)

    def __len__(self) -> int:
        return 0


def started(recipe: Recipe, settings: Any, init: Path) -> Any:
    """What a training run with `train.init` begins with."""
    asked = recipe.model_copy(update={"train": recipe.train.model_copy(update={"init": str(init)})})
    return first_head(asked, settings, Given(), Given())  # type: ignore[arg-type]


@pytest.mark.parametrize(("one", "other"), [(Eagle1, Hass), (Hass, Eagle1)], ids=["hass", "eagle1"])
def test_one_starts_from_the_other(recipe: Recipe, tmp_path: Path, one: Any, other: Any) -> None:
    """Every weight is that of the head on disk, which is EAGLE-1's or HASS's."""
    torch.manual_seed(3)
    given = one.for_target(one.Settings(fc_bias=False), SHAPE)
    save_head(tmp_path / "head", given, "", {})
    head = started(recipe, other.Settings(fc_bias=False), tmp_path / "head")
    assert type(head) is other and isinstance(load_head(tmp_path / "head"), one)
    found = head.state_dict()
    assert all(found[name].equal(tensor) for name, tensor in given.state_dict().items())


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        (Eagle3.Settings(), Hass.Settings()),
        (Eagle1.Settings(), Eagle3.Settings()),
        (Eagle1.Settings(), Hass.Settings(fc_bias=False)),
        (Eagle1.Settings(fc_bias=False), Hass.Settings()),
        (Eagle1.Settings(intermediate_size=32), Hass.Settings()),
        (Eagle3.Settings(), Eagle3.Settings(fc_norm=True)),
        (Eagle3.Settings(), Eagle3.Settings(norm_output=True)),
        (Eagle3.Settings(taps=(1, 2, 3)), Eagle3.Settings()),
    ],
    ids=["eagle3", "eagle1", "bias", "no bias", "width", "norm of taps", "norm of outputs", "taps"],
)
def test_another_network_is_refused(
    recipe: Recipe, tmp_path: Path, given: Any, settings: Any
) -> None:
    """Whatever its weights would mean something else in, before training begins."""
    methods = {"eagle1": Eagle1, "hass": Hass, "eagle3": Eagle3}
    head = methods[given.kind].for_target(given, SHAPE, frozen_head(torch.float32))
    save_head(tmp_path / "head", head, "", {})
    with pytest.raises(ValueError, match="does not fit"):
        started(recipe, settings, tmp_path / "head")
