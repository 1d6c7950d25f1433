"""Every kind of loss between two laws, against autograd of the formula as a paper writes it."""

# K steps, S slots, D width, V vocabulary

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from eagle.core.drafter import TargetHead
from eagle.drafters.parts import divergences, objectives
from eagle.drafters.parts.objectives import (
    Kind,
    LanguageHead,
    Objective,
    OwnHead,
    distillation_loss,
)

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
    "likeliest": lambda p, q: (
        -q.gather(-1, p.argmax(-1, keepdim=True).expand(*q.shape[:-1], 1))[..., 0].log()
    ),
}


def matrix(seed: int) -> Tensor:
    """An LM head."""
    return torch.randn(
        VOCABULARY, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


def head(seed: int, softcap: float | None) -> LanguageHead:
    """Of a model with a softcap, or a plain one that learns."""
    return OwnHead(matrix(seed).requires_grad_()) if softcap is None else plain_head(seed, softcap)


def plain_head(seed: int, softcap: float | None) -> TargetHead:
    """Of a model, with or without a softcap."""
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


def in_chunks(patch: pytest.MonkeyPatch) -> None:
    """Several chunks of 16 rows, of which each is gone through in several parts."""
    patch.setattr(objectives, "ROWS", 4)
    patch.setattr(objectives, "LOGITS", {"cpu": 8 * 16 * STEPS * VOCABULARY})  # bytes
    patch.setattr(objectives, "AT_ONCE", {"cpu": 5 * VOCABULARY})


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("kind", get_args(Kind))
def test_a_kind_is_its_formula(
    kind: Kind, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss and gradients over several chunks, of which each is gone through in several parts."""
    in_chunks(monkeypatch)
    own, frozen = head(0, softcap), head(1, softcap)
    student, teacher, weights = laid_out()
    loss, parts = distillation_loss(
        student, teacher, weights, (own, frozen), Objective(kind, weight=0.7)
    )
    p, q = frozen.logits(teacher).softmax(-1).detach(), own.logits(student).softmax(-1)
    apart = 0.7 * weights * FORMULAS[kind](p, q)
    torch.testing.assert_close(loss, apart.sum(), atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(parts, apart.sum(-1), atol=1e-9, rtol=1e-9)
    for found, expected in zip(
        gradients(loss, student, own), gradients(apart.sum(), student, own), strict=True
    ):
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)


def own_heads(count: int) -> list[OwnHead]:
    """Matrices and biases that learn."""
    biases = torch.randn(
        count, VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(9)
    )
    return [
        OwnHead(matrix(seed).requires_grad_(), bias.requires_grad_())
        for seed, bias in enumerate(biases.unbind())
    ]


def compare_heads(count: int, taught: str) -> None:
    """Loss, each step's part and every gradient of heads with biases, from tokens or probs, against plain torch."""
    heads, frozen = own_heads(count), head(7, None)
    student, states, weights = laid_out()
    tokens = torch.randint(VOCABULARY, (SLOTS,), generator=torch.Generator().manual_seed(3))
    teacher, teacher_head = (tokens, None) if taught == "tokens" else (states, frozen)
    p = (
        F.one_hot(tokens, VOCABULARY).double()
        if taught == "tokens"
        else frozen.logits(states).softmax(-1).detach()
    )
    loss, parts = distillation_loss(
        student, teacher, weights, (heads, teacher_head), Objective(weight=0.7)
    )
    each = [
        F.linear(x, own.weight, own.bias)
        for x, own in zip(student, heads * (STEPS // count), strict=True)
    ]
    apart = -0.7 * weights * (p * torch.stack(each).log_softmax(-1)).sum(-1)
    torch.testing.assert_close(loss, apart.sum(), atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(parts, apart.sum(-1), atol=1e-9, rtol=1e-9)
    learned = [
        student,
        *(own.weight for own in heads),
        *(own.bias for own in heads if own.bias is not None),
    ]
    found = torch.autograd.grad(3 * loss, learned, allow_unused=True)
    for one, other in zip(found, torch.autograd.grad(3 * apart.sum(), learned), strict=True):
        assert one is not None
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("taught", ["tokens", "probs"])
@pytest.mark.parametrize("count", [1, STEPS])
def test_heads_with_biases_learn_from_tokens_and_probs(
    count: int, taught: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One head for all steps, or one for each, over several chunks."""
    in_chunks(monkeypatch)
    compare_heads(count, taught)


def other_token(tokens: Tensor, weight: float) -> Any:
    """The likelihood of the next word of the vocabulary."""
    return likelihood((tokens + 1) % VOCABULARY, weight)


likelihood, add_product = (
    divergences._likelihood,
    objectives._add_product_,
)  # what faults are planted in
FAULTS: list[tuple[Any, str, Any]] = [
    (divergences, "_likelihood", other_token),
    (objectives, "_bias_of", lambda head: None),
    (
        objectives,
        "_add_product_",
        lambda total, left, *rest: add_product(total.zero_(), left, *rest),
    ),
]


@pytest.mark.parametrize(("module", "name", "fault"), FAULTS, ids=[name for _, name, _ in FAULTS])
@pytest.mark.parametrize("count", [1, STEPS])
def test_a_fault_in_their_gradients_is_seen(
    module: Any, name: str, fault: Any, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another token, a bias that does not learn, and a matrix that learns from its last chunk alone."""
    in_chunks(monkeypatch)
    monkeypatch.setattr(module, name, fault)
    with pytest.raises(AssertionError):
        compare_heads(count, "tokens")


def test_heads_exchanged_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step has its own."""
    honest = distillation_loss
    monkeypatch.setitem(
        globals(),
        "distillation_loss",
        lambda s, t, w, heads, o: honest(s, t, w, (heads[0][::-1], heads[1]), o),
    )
    with pytest.raises(AssertionError):
        compare_heads(STEPS, "probs")


def test_products_in_bf16_leave_gradients_of_weights_in_fp32() -> None:
    """They are summed over chunks in fp32, and reach weights in fp32 without passing through bf16."""
    own = OwnHead(matrix(0).float().requires_grad_())
    student, _, weights = laid_out()
    tokens = torch.arange(SLOTS) % VOCABULARY
    loss, _ = distillation_loss(
        student.float(), tokens, weights.float(), (own, None), dtype=torch.bfloat16
    )
    (gradient,) = torch.autograd.grad(loss * 3, own.weight)
    assert gradient.dtype == torch.float32 and (gradient != gradient.bfloat16()).any()
    exact = F.cross_entropy(
        (student.float() @ own.weight.T).flatten(0, 1), tokens.repeat(STEPS), reduction="none"
    )
    (expected,) = torch.autograd.grad(3 * (exact * weights.float().flatten()).sum(), own.weight)
    torch.testing.assert_close(gradient, expected, atol=0.02 * float(expected.abs().max()), rtol=0)


def test_a_second_backward_is_refused() -> None:
    """Gradients are scaled in place: twice would be wrong."""
    own = OwnHead(matrix(0).requires_grad_())
    student, teacher, weights = laid_out()
    loss, _ = distillation_loss(student, teacher, weights, (own, head(1, None)))
    torch.autograd.grad(2 * loss, own.weight, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(2 * loss, own.weight)


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
    student, own = (
        states[None].clone().requires_grad_(),
        OwnHead(torch.cat([rows, impossible, impossible])),
    )
    frozen = OwnHead(torch.cat([rows[:2], impossible, rows[2:] * 1.5, impossible]))
    p, q = frozen.logits(states).softmax(-1), own.logits(states).softmax(-1)
    assert ((p == 0) & (q > 0)).any() and ((p > 0) & (q == 0)).any() and ((p == 0) & (q == 0)).any()
    loss, _ = distillation_loss(
        student, states, torch.ones(1, 3, dtype=dtype), (own, frozen), Objective(kind)
    )
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
    assert kind in ("cross_entropy", "likeliest") or abs(loss) < 1e-12
    assert kind in ("tv", "acceptance", "hybrid", "likeliest") or gradient.abs().max() < 1e-12


@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.5, 1.5)])
def test_logits_in_lent_memory_are_those_of_the_module(scale: float, softcap: float | None) -> None:
    """With a bias, a scale and a softcap; what stood in the memory is gone."""
    output = nn.Linear(WIDTH, VOCABULARY, dtype=torch.float64).requires_grad_(False)
    frozen = TargetHead(nn.Embedding(VOCABULARY, WIDTH), output, logit_scale=scale, softcap=softcap)
    hidden = torch.randn(SLOTS, WIDTH, dtype=torch.float64)
    lent = torch.full((SLOTS, VOCABULARY), torch.nan, dtype=torch.float64)
    torch.testing.assert_close(
        frozen.logits(hidden, out=lent), frozen.logits(hidden), atol=1e-12, rtol=1e-12
    )


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
