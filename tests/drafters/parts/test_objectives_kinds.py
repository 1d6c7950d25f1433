"""Every kind of loss between two distributions equals autograd of the formula that a paper gives."""

# K steps, S slots, H hidden, V vocabulary

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

STEPS = 2
SLOTS = 41
WIDTH = 6
VOCABULARY = 37


def kl(p: Tensor, q: Tensor) -> Tensor:
    """Return the sum of p log p/q."""
    return (p * (p / q).log()).sum(-1)


def overlap(p: Tensor, q: Tensor) -> Tensor:
    """Return what two distributions have in common, the probability that a draft is accepted."""
    return torch.minimum(p, q).sum(-1)


def hybrid(p: Tensor, q: Tensor) -> Tensor:
    """Return KL where the distributions are far apart, else their distance."""
    # the share has no gradient, as in the paper
    share = (-3 * overlap(p, q)).exp().detach()
    return share * kl(p, q) + (1 - share) * (1 - overlap(p, q))


def likeliest(p: Tensor, q: Tensor) -> Tensor:
    """Return the cross-entropy of the target's likeliest token."""
    best = p.argmax(-1, keepdim=True).expand(*q.shape[:-1], 1)
    return -q.gather(-1, best)[..., 0].log()


FORMULAS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": lambda p, q: -(p * q.log()).sum(-1),
    "reverse_kl": lambda p, q: kl(q, p),
    "jsd": lambda p, q: (kl(p, (p + q) / 2) + kl(q, (p + q) / 2)) / 2,
    "tv": lambda p, q: (p - q).abs().sum(-1) / 2,
    "acceptance": lambda p, q: -overlap(p, q).log(),
    "hybrid": hybrid,
    "likeliest": likeliest,
}


def matrix(seed: int) -> Tensor:
    """Return the weight [V, H] of an LM head."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(
        VOCABULARY,
        WIDTH,
        dtype=torch.float64,
        generator=generator,
    )


def plain_head(seed: int, softcap: float | None) -> TargetHead:
    """Return a target's LM head."""
    output = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=torch.float64)
    output.weight.data.copy_(matrix(seed))
    return TargetHead(
        nn.Embedding(VOCABULARY, WIDTH),
        output,
        softcap=softcap,
    )


def laid_out() -> tuple[Tensor, Tensor, Tensor]:
    """Return the student's states [K, S, H], the teacher's [S, H], and the weights of slots [K, S]."""
    generator = torch.Generator().manual_seed(2)
    options: Any = {"dtype": torch.float64, "generator": generator}
    student = torch.randn(STEPS, SLOTS, WIDTH, **options).requires_grad_()
    teacher = torch.randn(SLOTS, WIDTH, **options)
    weights = torch.randn(STEPS, SLOTS, **options).abs()
    return student, teacher, weights


def in_chunks(patch: pytest.MonkeyPatch) -> None:
    """Compute losses in chunks of 16 rows, each in several parts, as a large vocabulary is."""
    patch.setattr(objectives, "ROWS", 4)
    # bytes
    patch.setattr(
        objectives,
        "LOGITS",
        {"cpu": 8 * 16 * STEPS * VOCABULARY},
    )
    patch.setattr(objectives, "AT_ONCE", {"cpu": 5 * VOCABULARY})


def assert_close(ours: Tensor, expected: Tensor) -> None:
    """Assert that two tensors in fp64 are equal to rounding."""
    torch.testing.assert_close(
        ours,
        expected,
        atol=1e-9,
        rtol=1e-9,
    )


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("kind", get_args(Kind))
def test_a_kind_is_its_formula(
    kind: Kind,
    softcap: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Loss and gradients are those of autograd, for an LM head that learns and for one with a softcap."""
    in_chunks(monkeypatch)
    own: LanguageHead
    own = OwnHead(matrix(0).requires_grad_()) if softcap is None else plain_head(0, softcap)
    target_head = plain_head(1, softcap)
    student, teacher, weights = laid_out()
    heads = (own, target_head)
    loss, parts = distillation_loss(
        student,
        teacher,
        weights,
        heads,
        objective=Objective(kind, weight=0.7),
    )
    # autograd of the formula, over all rows at once
    p = target_head.logits(teacher).softmax(-1).detach()
    q = own.logits(student).softmax(-1)
    expected = 0.7 * weights * FORMULAS[kind](p, q)
    assert_close(loss, expected.sum())
    assert_close(parts, expected.sum(-1))
    learned = [student, own.weight]
    gradients = torch.autograd.grad(loss, learned)
    for ours, plain in zip(
        gradients,
        torch.autograd.grad(expected.sum(), learned),
        strict=True,
    ):
        assert_close(ours, plain)


def own_heads(count: int) -> list[OwnHead]:
    """Return LM heads with biases that learn."""
    generator = torch.Generator().manual_seed(9)
    biases = torch.randn(
        count,
        VOCABULARY,
        dtype=torch.float64,
        generator=generator,
    )
    heads = []
    for seed, bias in enumerate(biases.unbind()):
        heads.append(OwnHead(matrix(seed).requires_grad_(), bias.requires_grad_()))
    return heads


def compare_heads(count: int, taught: str) -> None:
    """Compare loss, parts and all gradients of heads with biases, from tokens or probs, with plain torch."""
    heads = own_heads(count)
    student, states, weights = laid_out()
    teacher_head = None
    if taught == "tokens":
        teacher = torch.randint(
            VOCABULARY,
            (SLOTS,),
            generator=torch.Generator().manual_seed(3),
        )
        p = F.one_hot(teacher, VOCABULARY).double()
    else:
        teacher = states
        teacher_head = plain_head(7, None)
        p = teacher_head.logits(states).softmax(-1).detach()
    loss, parts = distillation_loss(
        student,
        teacher,
        weights,
        (heads, teacher_head),
        objective=Objective(weight=0.7),
    )

    logits = []
    # one head serves all steps, or each step has its own
    for hidden, own in zip(student, heads * (STEPS // count), strict=True):
        logits.append(F.linear(hidden, own.weight, own.bias))
    expected = -0.7 * weights * (p * torch.stack(logits).log_softmax(-1)).sum(-1)
    assert_close(loss, expected.sum())
    assert_close(parts, expected.sum(-1))
    learned = [
        student,
        *(own.weight for own in heads),
        *(own.bias for own in heads),
    ]
    # a scaled loss scales all gradients
    gradients = torch.autograd.grad(3 * loss, learned, allow_unused=True)
    plain_gradients = torch.autograd.grad(3 * expected.sum(), learned)
    for ours, plain in zip(gradients, plain_gradients, strict=True):
        assert ours is not None
        assert_close(ours, plain)


@pytest.mark.parametrize("taught", ["tokens", "probs"])
@pytest.mark.parametrize("count", [1, STEPS])
def test_heads_with_biases_learn_from_tokens_and_probs(
    count: int,
    taught: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Loss and gradients are those of plain torch, over several chunks."""
    in_chunks(monkeypatch)
    compare_heads(count, taught)


likelihood = divergences._likelihood
add_product = objectives._add_product_


def teach_other_token(tokens: Tensor, weight: float) -> Any:
    """Return the likelihood of the next token of the vocabulary."""
    return likelihood((tokens + 1) % VOCABULARY, weight)


def forget_chunks(
    total: Tensor,
    left: Tensor,
    *rest: Any,
) -> None:
    """Keep the last chunk's gradient of a matrix alone."""
    add_product(total.zero_(), left, *rest)


# module, name and replacement; `test_biased_head` plants them too
FAULTS: list[tuple[Any, str, Any]] = [
    (divergences, "_likelihood", teach_other_token),
    (objectives, "_bias_of", lambda head: None),
    (objectives, "_add_product_", forget_chunks),
]


@pytest.mark.parametrize(
    ("module", "name", "fault"),
    FAULTS,
    ids=[name for _, name, _ in FAULTS],
)
def test_a_fault_is_seen(
    module: Any,
    name: str,
    fault: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another token, a bias that does not learn, and a matrix that learns from one chunk."""
    in_chunks(monkeypatch)
    monkeypatch.setattr(module, name, fault)
    with pytest.raises(AssertionError):
        compare_heads(STEPS, "tokens")


def test_products_in_bf16_leave_gradients_of_weights_in_fp32() -> None:
    """Chunks are summed in fp32, and the sum does not pass through bf16."""
    own = OwnHead(matrix(0).float().requires_grad_())
    student, _, weights = laid_out()
    student = student.float()
    weights = weights.float()
    tokens = torch.arange(SLOTS) % VOCABULARY
    heads = (own, None)
    loss, _ = distillation_loss(
        student,
        tokens,
        weights,
        heads,
        dtype=torch.bfloat16,
    )
    (gradient,) = torch.autograd.grad(loss * 3, own.weight)
    assert gradient.dtype == torch.float32
    # a number with more bits than bf16 has never passed through it
    assert (gradient != gradient.bfloat16()).any()
    # the exact gradient, in fp32
    logits = (student @ own.weight.T).flatten(0, 1)
    entropy = F.cross_entropy(logits, tokens.repeat(STEPS), reduction="none")
    (expected,) = torch.autograd.grad(3 * (entropy * weights.flatten()).sum(), own.weight)
    rounding = 0.02 * float(expected.abs().max())
    torch.testing.assert_close(
        gradient,
        expected,
        atol=rounding,
        rtol=0,
    )


def test_a_second_backward_is_refused() -> None:
    """The backward pass scales gradients in place, so that a second one would be wrong."""
    own = OwnHead(matrix(0).requires_grad_())
    student, teacher, weights = laid_out()
    loss, _ = distillation_loss(
        student,
        teacher,
        weights,
        (own, plain_head(1, None)),
    )
    # the first pass leaves the graph in place
    torch.autograd.grad(2 * loss, own.weight, retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        torch.autograd.grad(2 * loss, own.weight)


@pytest.mark.parametrize(("vocabulary", "steps"), [(97, 1), (32000, 7), (151936, 20)])
def test_chunks_hold_enough_rows_for_a_product(vocabulary: int, steps: int) -> None:
    """However large the vocabulary is: a product of one row would read the whole matrix for every slot."""
    chunks = objectives._chunks(1000, steps, torch.empty(vocabulary, 1))
    rows = [row for chunk in chunks for row in range(1000)[chunk]]
    assert rows == [*range(1000)]
    assert all(chunk.stop - chunk.start >= 16 for chunk in chunks[:-1])


@pytest.mark.parametrize("kind", get_args(Kind))
def test_probs_of_exactly_zero_have_a_finite_price(kind: Kind) -> None:
    """A token that the teacher, the student or neither can say gives no NaN in the loss or in its gradient."""
    states = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    rows = torch.tensor([[0.0, 0.0], [1.0, -2.0], [-2.0, 1.0]])
    # two tokens of five have no prob in fp32
    never = torch.tensor([[-1e6, -1e6]])
    student = states[None].clone().requires_grad_()
    own = OwnHead(torch.cat([rows, never, never]))
    target_head = OwnHead(torch.cat([rows[:2], never, rows[2:] * 1.5, never]))
    p = target_head.logits(states).softmax(-1)
    q = own.logits(states).softmax(-1)
    # the three cases do occur
    assert ((p == 0) & (q > 0)).any()
    assert ((p > 0) & (q == 0)).any()
    assert ((p == 0) & (q == 0)).any()
    weights = torch.ones(1, 3)
    heads = (own, target_head)
    loss, _ = distillation_loss(
        student,
        states,
        weights,
        heads,
        objective=Objective(kind),
    )
    (gradient,) = torch.autograd.grad(loss, student)
    assert loss.isfinite()
    assert loss > 0
    assert gradient.isfinite().all()


@pytest.mark.parametrize("kind", ["reverse_kl", "jsd"])
def test_equal_distributions_leave_nothing_to_learn(kind: Kind) -> None:
    """The loss is zero where the student says what the teacher does, and flat there."""
    own = OwnHead(matrix(0))
    _, teacher, weights = laid_out()
    student = teacher.expand(STEPS, -1, -1).clone().requires_grad_()
    heads = (own, own)
    loss, _ = distillation_loss(
        student,
        teacher,
        weights,
        heads,
        objective=Objective(kind),
    )
    (gradient,) = torch.autograd.grad(loss, student)
    assert abs(loss) < 1e-12
    assert gradient.abs().max() < 1e-12


@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.5, 1.5)])
def test_logits_in_a_buffer_are_those_of_the_module(scale: float, softcap: float | None) -> None:
    """Bias, scale and softcap are applied, and what stood in the buffer is gone."""
    output = nn.Linear(WIDTH, VOCABULARY, dtype=torch.float64).requires_grad_(False)
    embedding = nn.Embedding(VOCABULARY, WIDTH)
    target_head = TargetHead(
        embedding,
        output,
        logit_scale=scale,
        softcap=softcap,
    )
    hidden = torch.randn(SLOTS, WIDTH, dtype=torch.float64)
    # a product that adds to the buffer would give NaN
    buffer = torch.full((SLOTS, VOCABULARY), torch.nan, dtype=torch.float64)
    assert_close(target_head.logits(hidden, out=buffer), target_head.logits(hidden))


class RecordStorages(TorchDispatchMode):
    """Record every storage of at least so many bytes that an operation makes."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        # tensors are kept, so that no address comes twice
        self.storages: dict[int, Tensor] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.untyped_storage().nbytes() >= self.size:
            self.storages[result.untyped_storage().data_ptr()] = result
        return result


def test_all_chunks_share_the_memory_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of teacher and student in a chunk are two large tensors, however many chunks there are."""
    monkeypatch.setattr(objectives, "ROWS", 32)
    monkeypatch.setattr(objectives, "LOGITS", {"cpu": 1})
    monkeypatch.setattr(objectives, "AT_ONCE", {"cpu": VOCABULARY})
    heads = (plain_head(0, None), plain_head(1, None))
    student = torch.randn(1, 96, WIDTH, dtype=torch.float64)
    teacher = torch.randn(96, WIDTH, dtype=torch.float64)
    with torch.no_grad(), RecordStorages(8 * 32 * VOCABULARY) as large:
        distillation_loss(student, teacher, torch.ones(1, 96), heads)
    assert len(large.storages) == 2
