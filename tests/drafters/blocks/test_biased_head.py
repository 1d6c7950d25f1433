"""An LM head with a low-rank bias: its loss, overlaps and gradients, against plain autograd."""

# K steps, S slots, D width, V vocabulary

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eagle.drafters.parts import objectives
from eagle.drafters.parts.objectives import (
    BiasedHead,
    Kind,
    Objective,
    SequenceTokens,
    distillation_loss,
)
from tests.drafters.parts.test_objectives_kinds import (
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


def assert_near(got: Tensor, expected: Tensor) -> None:
    """Compare up to the rounding of sums over chunks in fp64."""
    torch.testing.assert_close(
        got,
        expected,
        atol=1e-9,
        rtol=1e-9,
    )


def compare_with_autograd(kind: Kind, softcap: float | None) -> None:
    """Compare a head that learns from the target's probs and from tokens at once."""
    target_head = plain_head(1, softcap)
    code_matrix = matrix(0).requires_grad_()
    student, teacher, weights = laid_out()
    # the bias is made of codes, which stand beside the states; any numbers do
    codes = student.detach().flip(1).cos().requires_grad_()
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(
        VOCABULARY,
        (SLOTS,),
        generator=generator,
    )
    sequence_tokens = SequenceTokens(tokens, torch.zeros(STEPS, SLOTS, dtype=torch.float64))
    loss, _ = distillation_loss(
        torch.cat([student, codes], dim=-1),
        teacher,
        weights,
        (BiasedHead(target_head, code_matrix), target_head),
        objective=Objective(kind, 0.7, tokens=0.2),
        sequence_tokens=sequence_tokens,
    )

    # the same in one piece; a softcap bends the target's logits, not the bias
    logits = target_head.logits(student) + codes @ code_matrix.T
    q = logits.softmax(-1)
    p = target_head.logits(teacher).softmax(-1).detach()
    index = tokens.expand(STEPS, -1)[..., None]
    token_probs = q.gather(-1, index)[..., 0]
    terms = 0.7 * FORMULAS[kind](p, q) - 0.2 * token_probs.log()
    expected = (weights * terms).sum()
    assert_near(loss, expected)
    assert_near(sequence_tokens.overlaps, overlap(p, q.detach()))
    learned = [student, codes, code_matrix]
    gradients = torch.autograd.grad(loss, learned)
    expected_gradients = torch.autograd.grad(expected, learned)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert_near(gradient, expected_gradient)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("kind", ["tv", "cross_entropy", "hybrid"])
def test_a_bias_learns_from_probs_and_tokens_at_once(
    kind: Kind,
    softcap: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Loss, overlaps and gradients are those of the formula, over several chunks."""
    in_chunks(monkeypatch)
    compare_with_autograd(kind, softcap)


def test_gradients_of_the_last_chunk_alone_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison fails if each chunk overwrites the sum of those before it."""
    in_chunks(monkeypatch)
    add_product = objectives._add_product_

    def overwrite(total: Tensor, *factors: Tensor) -> Tensor:
        return add_product(total.zero_(), *factors)

    monkeypatch.setattr(
        objectives,
        "_add_product_",
        overwrite,
    )
    with pytest.raises(AssertionError):
        compare_with_autograd("tv", None)
