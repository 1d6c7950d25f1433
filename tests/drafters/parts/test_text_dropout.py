"""Dropout by words of random bits drops the share that is asked for, by each text's seed alone."""

from __future__ import annotations

import pytest
import torch

from eagle.drafters.parts.text_dropout import TextDropout

CPU = torch.device("cpu")


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5, 0.9])
def test_the_share_that_is_asked_for_is_dropped(share: float) -> None:
    """Of a million numbers, it is off by four standard deviations at most, and the mean stays 1."""
    rows = TextDropout(share, [3], [1000], CPU)(torch.ones(1000, 1000))
    # of the mean of a million coins
    deviation = (share * (1 - share)) ** 0.5 / 1000
    assert abs((rows == 0).double().mean() - share) < 4 * deviation
    assert torch.equal(rows[rows != 0].unique(), torch.tensor([1 / (1 - share)]))


def test_a_text_drops_the_same_whatever_stands_beside_it() -> None:
    """Alone, packed or padded; each call draws again. 7 numbers a row fill no whole word."""
    counts = [3, 1, 5]
    packed = TextDropout(
        0.3,
        [0, 1, 2],
        counts,
        CPU,
    )(torch.ones(sum(counts), 7)).split(counts)
    padded = TextDropout(
        0.3,
        [0, 1, 2],
        counts,
        CPU,
    ).drop_padded(torch.ones(3, 5, 7))
    for text, count in enumerate(counts):
        drop = TextDropout(0.3, [text], [count], CPU)
        rows = torch.ones(count, 7)
        alone = drop(rows)
        assert torch.equal(packed[text], alone)
        assert torch.equal(padded[text, :count], alone)
        assert not torch.equal(drop(rows), alone)
