"""Every kind of loss between two laws, against autograd of the formula as a paper writes it."""

# K steps, S slots, D width, V vocabulary

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from eagle.core.drafter import TargetHead
from eagle.drafters.parts import objectives
from eagle.drafters.parts.objectives import Kind, LanguageHead, Objective, OwnHead, distillation_loss

STEPS, SLOTS, WIDTH, VOCABULARY = 2, 41, 6, 37


def kl(p: Tensor, q: Tensor) -> Tensor:
    """The sum of p log p/q."""
    return (p * (p / q).log()).sum(-1)


def overlap(p: Tensor, q: Tensor) -> Tensor:
    """What two laws have in common."""
    return torch.minimum(p, q).sum(-1)


def hybrid(p: Tensor, q: Tensor) -> Tensor:
    """KL where the laws are far apart, their distance where they are not."""
    share = (-3 * overlap(p, q)).exp().detach()
    return share * kl(p, q) + (1 - share) * (1 - overlap(p, q))


FORMULAS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": lambda p, q: -(p * q.log()).sum(-1),
    "reverse_kl": lambda p, q: kl(q, p),
    "jsd": lambda p, q: (kl(p, (p + q) / 2) + kl(q, (p + q) / 2)) / 2,
    "tv": lambda p, q: (p - q).abs().sum(-1) / 2,
    "acceptance": lambda p, q: -overlap(p, q).log(),
    "hybrid": hybrid,
}


def matrix(seed: int) -> Tensor:
    """An LM head."""
    return torch.randn(VOCABULARY, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def head(seed: int, softcap: float | None) -> LanguageHead:
    """Of a model with a softcap, or a plain one that learns."""
    if softcap is None:
        return OwnHead(matrix(seed).requires_grad_())
    output = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=torch.float64)
    output.weight.data.copy_(matrix(seed))
    return TargetHead(nn.Embedding(VOCABULARY, WIDTH), output, softcap=softcap)


def laid_out() -> tuple[Tensor, Tensor, Tensor]:
    """States of a student in several steps, those of a teacher, and what each slot weighs."""
    drawn = torch.Generator().manual_seed(2)
    student, teacher, weights = (
        torch.randn(*shape, dtype=torch.float64, generator=drawn)
        for shape in ((STEPS, SLOTS, WIDTH), (SLOTS, WIDTH), (STEPS, SLOTS))
    )
    return student.requires_grad_(), teacher, weights.abs()


def gradients(loss: Tensor, student: Tensor, own: LanguageHead) -> list[Tensor]:
    """At the student's states and at its LM head."""
    return list(torch.autograd.grad(loss, [student, own.weight]))


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("kind", get_args(Kind))
def test_a_kind_is_its_formula(kind: Kind, softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and gradients over several chunks, of which each is gone through in several parts."""
    monkeypatch.setattr(objectives, "ROWS", 32)
    monkeypatch.setattr(objectives, "LOGITS", {"cpu": 8 * 16 * STEPS * VOCABULARY})  # bytes
    monkeypatch.setattr(objectives, "AT_ONCE", {"cpu": 5 * VOCABULARY})
    own, frozen = head(0, softcap), head(1, softcap)
    student, teacher, weights = laid_out()
    loss, parts = distillation_loss(student, teacher, weights, (own, frozen), Objective(kind, weight=0.7))
    p, q = frozen.logits(teacher).softmax(-1).detach(), own.logits(student).softmax(-1)
    apart = 0.7 * weights * FORMULAS[kind](p, q)
    torch.testing.assert_close(loss, apart.sum(), atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(parts, apart.sum(-1), atol=1e-9, rtol=1e-9)
    for found, expected in zip(gradients(loss, student, own), gradients(apart.sum(), student, own), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("steps", [1, 3, 7, 20])
@pytest.mark.parametrize("vocabulary", [97, 32000, 151936])
def test_chunks_hold_enough_rows_for_a_product(vocabulary: int, steps: int) -> None:
    """However large a vocabulary is: one row at a time goes through the whole matrix for every slot."""
    chunks = objectives._chunks(1000, steps, torch.empty(vocabulary, 1))
    assert [row for chunk in chunks for row in range(1000)[chunk]] == [*range(1000)]
    assert all(chunk.stop - chunk.start >= 16 for chunk in chunks[:-1])


@pytest.mark.parametrize("kind", get_args(Kind))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_a_teacher_never_says_has_a_finite_price(kind: Kind, dtype: torch.dtype) -> None:
    """Exact zeros in the teacher's law, and in the student's: no NaN in the loss or in its gradient."""
    states = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=dtype)
    rows = torch.tensor([[0.0, 0.0], [1.0, -2.0], [-2.0, 1.0]], dtype=dtype)
    impossible = torch.tensor([[-1e6, -1e6]], dtype=dtype)
    student, own = states[None].clone().requires_grad_(), OwnHead(torch.cat([rows, impossible, impossible]))
    frozen = OwnHead(torch.cat([rows[:2], impossible, rows[2:] * 1.5, impossible]))
    p, q = frozen.logits(states).softmax(-1), own.logits(states).softmax(-1)
    assert ((p == 0) & (q > 0)).any() and ((p > 0) & (q == 0)).any() and ((p == 0) & (q == 0)).any()
    loss, _ = distillation_loss(student, states, torch.ones(1, 3, dtype=dtype), (own, frozen), Objective(kind))
    (gradient,) = torch.autograd.grad(loss, student)
    assert loss.isfinite() and gradient.isfinite().all() and loss > 0
    if kind == "reverse_kl":
        expected = (torch.xlogy(q, q) - q * p.clamp(min=1e-20).log()).sum()
        torch.testing.assert_close(loss.detach(), expected)


@pytest.mark.parametrize("kind", get_args(Kind))
def test_equal_laws_leave_nothing_to_learn(kind: Kind) -> None:
    """The divergences are zero where the student says what the teacher does, and flat there if they have no kink."""
    own = head(0, None)
    _, teacher, weights = laid_out()
    student = teacher.expand(STEPS, -1, -1).clone().requires_grad_()
    loss, _ = distillation_loss(student, teacher, weights, (own, own), Objective(kind))
    (gradient,) = torch.autograd.grad(loss, student)
    assert kind == "cross_entropy" or abs(loss) < 1e-12
    assert kind in ("tv", "acceptance", "hybrid") or gradient.abs().max() < 1e-12


@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.5, 1.5)])
def test_logits_in_lent_memory_are_those_of_the_module(scale: float, softcap: float | None) -> None:
    """With a bias, a scale and a softcap; what stood in the memory is gone."""
    output = nn.Linear(WIDTH, VOCABULARY, dtype=torch.float64).requires_grad_(False)
    frozen = TargetHead(nn.Embedding(VOCABULARY, WIDTH), output, logit_scale=scale, softcap=softcap)
    hidden = torch.randn(SLOTS, WIDTH, dtype=torch.float64)
    lent = torch.full((SLOTS, VOCABULARY), torch.nan, dtype=torch.float64)
    torch.testing.assert_close(frozen.logits(hidden, out=lent), frozen.logits(hidden), atol=1e-12, rtol=1e-12)


class _LargeStorages(TorchDispatchMode):
    """Every storage of at least so many bytes that an operation makes; kept, so that no address comes twice."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.kept: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.untyped_storage().nbytes() >= self.size:
            self.kept[result.untyped_storage().data_ptr()] = result
        return result


def test_all_chunks_share_the_memory_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The teacher's logits of a chunk and the student's: two large tensors however many chunks there are."""
    monkeypatch.setattr(objectives, "ROWS", 32)
    monkeypatch.setattr(objectives, "LOGITS", {"cpu": 1})
    monkeypatch.setattr(objectives, "AT_ONCE", {"cpu": VOCABULARY})
    own, frozen = head(0, None), head(1, None)
    student, teacher, weights = torch.randn(1, 96, WIDTH), torch.randn(96, WIDTH), torch.ones(1, 96)
    with torch.no_grad(), _LargeStorages(8 * 32 * VOCABULARY) as large:
        distillation_loss(student.double(), teacher.double(), weights, (own, frozen))
    assert len(large.kept) == 2
