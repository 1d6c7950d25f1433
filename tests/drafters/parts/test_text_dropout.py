"""Dropout by words of random bits: the share that is asked for, by each text's seed alone."""

from __future__ import annotations

import pytest
import torch

from eagle.drafters.parts import text_dropout
from eagle.drafters.parts.text_dropout import TextDropout

CPU = torch.device("cpu")


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5, 0.9])
def test_the_share_that_is_asked_for_is_dropped(share: float) -> None:
    """A million numbers differ from it by four standard deviations at most, and keep their mean."""
    rows = TextDropout(share, [3], [1000], CPU)(torch.ones(1000, 1000))
    spread = (share * (1 - share)) ** 0.5 / 1000
    assert abs((rows == 0).double().mean() - share) < 4 * spread
    assert torch.equal(rows[rows != 0].unique(), torch.tensor([1 / (1 - share)]))


def test_a_text_drops_the_same_whatever_lies_beside_it() -> None:
    """Texts whose numbers do not fill whole words, alone, side by side and padded; each call draws anew."""
    counts, width = [3, 1, 5], 7
    rows = torch.ones(sum(counts), width)
    together = TextDropout(0.3, [0, 1, 2], counts, CPU)(rows).split(counts)
    padded = TextDropout(0.3, [0, 1, 2], counts, CPU).drop_padded(torch.ones(3, 5, width))
    for number, count in enumerate(counts):
        drop = TextDropout(0.3, [number], [count], CPU)
        alone = drop(torch.ones(count, width))
        assert torch.equal(together[number], alone) and torch.equal(padded[number, :count], alone)
        assert not torch.equal(drop(torch.ones(count, width)), alone)


def test_a_wrong_bound_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of all numbers are dropped where the words' parts are compared with 0."""

    def bits(like: torch.Tensor, share: float, generator: torch.Generator) -> torch.Tensor:
        return torch.empty(like.shape).uniform_(-1, 1, generator=generator) >= 0

    monkeypatch.setattr(text_dropout, "draw_kept", bits)
    with pytest.raises(AssertionError):
        test_the_share_that_is_asked_for_is_dropped(0.2)
