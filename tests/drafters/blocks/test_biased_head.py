"""An LM head with a bias of codes: what it learns from the target's probs and from tokens at once, against autograd."""

# K steps, S slots, D width, V vocabulary

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from eagle.drafters.parts.objectives import BiasedHead, Kind, Named, Objective, distillation_loss
from tests.drafters.parts.test_objectives_kinds import (
    FAULTS,
    FORMULAS,
    SLOTS,
    STEPS,
    VOCABULARY,
    in_chunks,
    laid_out,
    matrix,
    overlap,
    plain_head,
)


def compare_biased(kind: Kind, softcap: float | None) -> None:
    """Loss, overlaps and gradients of a head with a bias, from probs and tokens at once, against plain torch."""
    frozen, matrix_of_codes = plain_head(1, softcap), matrix(0).requires_grad_()
    own = BiasedHead(frozen, matrix_of_codes)
    student, teacher, weights = laid_out()
    codes = student.detach().flip(1).cos().requires_grad_()
    hidden = torch.cat([student, codes], dim=-1)
    tokens = torch.randint(VOCABULARY, (SLOTS,), generator=torch.Generator().manual_seed(3))
    named = Named(tokens, torch.zeros(STEPS, SLOTS, dtype=torch.float64))
    loss, _ = distillation_loss(
        hidden, teacher, weights, (own, frozen), Objective(kind, 0.7, tokens=0.2), named=named
    )
    q = (frozen.logits(student) + codes @ matrix_of_codes.T).softmax(-1)
    p, picked = frozen.logits(teacher).softmax(-1).detach(), tokens.expand(STEPS, -1)[..., None]
    expected = (
        weights * (0.7 * FORMULAS[kind](p, q) - 0.2 * q.gather(-1, picked)[..., 0].log())
    ).sum()
    close = partial(torch.testing.assert_close, atol=1e-9, rtol=1e-9)
    close(loss, expected)
    close(named.overlaps, overlap(p, q.detach()))
    learned = [student, codes, matrix_of_codes]
    for found, wanted in zip(
        torch.autograd.grad(loss, learned), torch.autograd.grad(expected, learned), strict=True
    ):
        close(found, wanted)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("kind", ["tv", "cross_entropy", "hybrid"])
def test_a_bias_learns_from_probs_and_tokens_at_once(
    kind: Kind, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over several chunks; a softcap bends the target's logits alone."""
    in_chunks(monkeypatch)
    compare_biased(kind, softcap)


@pytest.mark.parametrize(
    ("module", "name", "fault"), FAULTS[::2], ids=[name for _, name, _ in FAULTS[::2]]
)
def test_a_fault_in_what_a_bias_learns_is_seen(
    module: Any, name: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other tokens, or gradients of the last chunk alone."""
    in_chunks(monkeypatch)
    monkeypatch.setattr(module, name, fault)
    with pytest.raises(AssertionError):
        compare_biased("tv", None)
