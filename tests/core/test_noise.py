"""Noise made only where a token can still win chooses the same token as noise on the whole vocabulary."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle.core import noise as noise_module
from eagle.core.noise import Noise, _gumbel_at_once, fill_rows, gumbel_rows

CPU = torch.device("cpu")


def draw_scores(kind: str, vocab_size: int, seed: int) -> torch.Tensor:
    """Return scores [V] of one of the shapes that logits take after temperature and filters."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(vocab_size, generator=generator)
    if kind == "flat":
        return torch.zeros(vocab_size)
    if kind == "filtered":
        # as after top-k: most tokens cannot be sampled at all
        return normal.masked_fill(normal < 1.5, -torch.inf)
    if kind == "float64":
        return 4 * normal.double()
    if kind == "tied":
        return (3 * normal).round()
    # of a language model: one or a few tokens far above the others
    return 4 * normal + 12 * (torch.arange(vocab_size) == seed % vocab_size)


KINDS = ("peaked", "flat", "filtered", "float64", "tied")


@given(st.sampled_from(KINDS), st.integers(1, 3000), st.integers(0, 2**40))
def test_a_pruned_choice_equals_the_full_one(kind: str, vocab_size: int, seed: int) -> None:
    """The oracle adds noise to every token and takes the largest sum."""
    scores = draw_scores(kind, vocab_size, seed)
    full = Noise(seed, 1)([7], vocab_size, CPU)[0]
    assert Noise(seed, 1).pick(scores, 7) == int((scores + full).argmax())


def count_differences(rows: int = 400) -> int:
    """Return at how many positions a pruned choice differs from the full one, on a wide and flat law."""
    scores = 4 * torch.randn(2000, generator=torch.Generator().manual_seed(0))
    wrong = 0
    for position in range(rows):
        full = scores + Noise(0, 0)([position], 2000, CPU)[0]
        wrong += Noise(0, 0).pick(scores, position) != int(full.argmax())
    return wrong


def test_a_bound_that_is_too_low_changes_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: noise that is taken to be at most 4 loses tokens that win by more."""
    assert count_differences() == 0
    monkeypatch.setattr(noise_module, "LARGEST", 4.0)
    assert count_differences() > 0


def test_the_largest_noise_is_below_its_bound() -> None:
    """The bound holds for every word, as the smallest of them has the largest noise."""
    smallest = torch.zeros(1)
    assert noise_module._to_gumbel(smallest) < noise_module.LARGEST


def test_nan_and_cached_rows() -> None:
    """A nan chooses no token, and a row that a drafter has asked for is used as it is."""
    scores = torch.randn(500)
    noise = Noise(0, 0)
    expected = noise.pick(scores, 3)
    noise([3], 500, CPU)
    assert noise.pick(scores, 3) == expected
    scores[17] = torch.nan
    assert noise.pick(scores, 3) is None


@pytest.mark.parametrize("vocab_size", (1, 8, 50_000))
def test_both_ways_to_hash_give_the_same_bits(vocab_size: int) -> None:
    """Unsigned words in blocks on a CPU; signed words of all positions at once, as on a device."""
    keys = [Noise(1, 2).key(position) for position in (0, 5, 2**40)]
    assert torch.equal(gumbel_rows(keys, vocab_size, CPU), _gumbel_at_once(keys, vocab_size, CPU))


def test_rows_of_several_sequences_are_made_at_once() -> None:
    """Each gets the rows that it lacks, and keeps those it has."""
    first, second = Noise(0, 0), Noise(0, 1)
    kept = first([4], 30, CPU)
    fill_rows([(first, [4, 5]), (second, [4])], 30, CPU)
    assert torch.equal(first([4], 30, CPU), kept)
    assert torch.equal(first([5], 30, CPU), Noise(0, 0)([5], 30, CPU))
    assert torch.equal(second([4], 30, CPU), Noise(0, 1)([4], 30, CPU))
