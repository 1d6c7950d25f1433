"""Medusa-2: the loss of a target that learns with its heads, by naive loops over full logits."""

# T tokens, V vocabulary, D width

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eagle import Target
from eagle.conformance.trial import make_head
from eagle.core.drafter import TargetHead
from eagle.core.examples import Batch, Example, collate
from eagle.core.tree import chain_paths
from eagle.drafters.parts import objectives
from eagle.recipe import JointSection, TrainSection
from eagle.training import joint
from eagle.training.joint import AdapterDropout, Joint, heads_weight
from eagle.training.plan import Plan
from tests.families import build, random_tokens

pytest.importorskip("peft", reason="peft is not installed")
LEVELS = 3
PUBLISHED = {"levels": LEVELS, "weights": "falling", "loss": "tokens"}
MASKS = [[0] * 4 + [1] * 6, [0, 0, 0, 1, 1, 0, 1, 1, 1, 1, 1, 0, 1]]  # the second with a gap
# two sequences of different lengths
EXAMPLES = [
    Example(torch.tensor(random_tokens(len(mask), seed=seed)), torch.tensor(mask).bool())
    for seed, mask in enumerate(MASKS)
]


def as_batch(indices: Sequence[int] = (0, 1), **fields: Any) -> Batch:
    """Return a batch of examples, as the loop makes it for a target that trains.

    It has no features, as the target computes them in the loss.

    Args:
        indices: Of the examples, by default both. They decide the seeds, by which dropout is drawn.
        fields: Other fields of the batch, as the divisors of the whole step.
    """
    examples = []
    for index in indices:
        features = torch.empty(len(EXAMPLES[index].tokens), 1, 0)
        examples.append(replace(EXAMPLES[index], features=features))
    seeds = [5 + index for index in indices]
    return replace(collate(examples, (-1,), seeds), **fields)


def new_joint(
    loss: str, *, moved: bool = True, dropout: float = 0.0, heads: float = 0.3, **fields: Any
) -> tuple[Joint, TargetHead]:
    """Return a small random target in fp64 with a head, and its LM head.

    Args:
        loss: The target's: "kl", or "tokens" for the cross-entropy.
        moved: Whether both are away from where they begin, where adapters have no effect.
        dropout: At the adapters' inputs.
        heads: The weight of the heads' loss.
        fields: Other settings of the heads.
    """
    target = Target(build("llama", torch.float64))
    head = make_head("medusa", target, **{**PUBLISHED, **fields}).double()
    section = JointSection(loss=loss, heads=heads, rise=False, rank=4, dropout=dropout)
    # the target's layers get adapters
    pair = Joint(target.model, head, section)
    if moved:
        for name, weight in pair.named_parameters():
            if weight.requires_grad:
                # an adapter's second matrix and biases begin at zero
                is_zero = "lora_B" in name or weight.ndim == 1
                scale = 0.3 * (1 if is_zero else weight.std())
                weight.data += scale * torch.randn_like(weight)
    return pair, target.head


def naive_losses(pair: Joint) -> tuple[Tensor, Tensor]:
    """Return the target's loss and the heads', from full logits of one sequence at a time, token by token."""
    model: Any = pair.adapted.base_model.model
    own = []
    kl = []
    heads = []

    for example in EXAMPLES:
        tokens = example.tokens[None]
        output = model(input_ids=tokens, output_hidden_states=True)
        hidden = output.hidden_states[-1][0]
        now = output.logits[0].log_softmax(-1)
        # the target as it was
        with torch.no_grad(), pair.adapted.disable_adapter():
            before = model(input_ids=tokens).logits[0].log_softmax(-1)
        mask = example.loss_mask.tolist()
        for position in range(2, len(mask)):
            if not mask[position]:
                continue
            token = int(example.tokens[position])
            p = before[position - 1]
            q = now[position - 1]
            # cross entropy with the next token
            own.append(-q[token])
            # KL(p || q), p from the target as it was
            kl.append((p.exp() * (p - q)).sum())
            for level in range(LEVELS):
                first = position - level
                # the level guesses across supervised tokens alone
                if first >= 2 and all(mask[first : position + 1]):
                    state = pair.head.blocks[level](hidden[first - 2])
                    log_probs = pair.head.heads[level](state).log_softmax(-1)
                    heads.append(-(0.8 ** (level + 1)) * log_probs[token])

    losses = kl if pair.section.loss == "kl" else own
    return torch.stack(losses).mean(), torch.stack(heads).sum() / len(own)


def find_gradients(pair: Joint, loss: Tensor) -> dict[str, Tensor]:
    """Return the gradients at all that is trained."""
    named = {name: weight for name, weight in pair.named_parameters() if weight.requires_grad}
    gradients = torch.autograd.grad(loss, list(named.values()))
    return dict(zip(named, gradients, strict=True))


def largest_difference(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest difference of losses and gradients, relative to each tensor's norm."""
    assert got.keys() == expected.keys()
    # a gradient of zero would compare nothing
    assert all(value.norm() > 0 for value in expected.values())
    differences = [(got[name] - value).norm() / value.norm() for name, value in expected.items()]
    return float(max(differences))


def compare(pair: Joint, target_head: TargetHead) -> float:
    """Return how far loss and gradients as they are computed are from what they are by definition.

    Args:
        pair: The target with its heads.
        target_head: The target's LM head.
    """
    losses = pair(as_batch(), target_head)
    target, heads = naive_losses(pair)
    total = target + 0.3 * heads
    expected = {"total": total, "target": target, "heads": heads, **find_gradients(pair, total)}
    got = {name: losses[name] for name in ("total", "target", "heads")}
    # the target learns, not only its heads
    assert any("lora_A" in name for name in expected)

    return largest_difference({**got, **find_gradients(pair, losses["total"])}, expected)


@pytest.mark.parametrize("loss", ["kl", "tokens"])
def test_loss_and_gradients_are_those_of_a_naive_loop(loss: str) -> None:
    """At adapters, residual blocks and LM heads, in fp64."""
    assert compare(*new_joint(loss)) < 1e-6  # weights of positions and levels are fp32


def sum_parts(pair: Joint, target_head: TargetHead, parts: list[list[int]]) -> dict[str, Tensor]:
    """Return losses and gradients of a step in parts, as the loop weighs them; what is read twice counts once.

    Args:
        pair: The target with its heads.
        target_head: The target's LM head.
        parts: The indices of the examples of each part.

    Returns:
        Losses by name, and gradients by the name of the weight, each summed over the parts.
    """
    positions = [int(example.loss_mask[2:].sum()) for example in EXAMPLES]
    plan = Plan(positions, TrainSection(out="none", validation=0))
    # a part is divided by counts of the whole step
    whole = as_batch()
    divisors = pair.divisors(whole.masks, whole.seeds)
    sums: dict[str, Tensor] = {}

    for indices, weight in zip(parts, plan.weights(0, parts), strict=True):
        torch.manual_seed(0)
        # a mean is weighed; what is divided by counts of the step is a share of its loss already
        share = weight if divisors is None else float(weight > 0)
        losses = pair(as_batch(indices, divisors=divisors), target_head)
        found = {**losses, **find_gradients(pair, losses["total"])}
        for name, value in found.items():
            sums[name] = sums.get(name, 0) + share * value.detach()

    return sums


def compare_parts(loss: str, **fields: Any) -> float:
    """Return how far losses and gradients of a step in parts are from those of the whole.

    Args:
        loss: The target's.
        fields: Other settings of the heads.
    """
    pair, target_head = new_joint(loss, dropout=0.2, **fields)
    pair.train()
    whole = sum_parts(pair, target_head, [[0, 1]])
    # in two parts, and in three of which two read the same
    others = [sum_parts(pair, target_head, parts) for parts in ([[0], [1]], [[1], [0], [0]])]
    return max(largest_difference(other, whole) for other in others)


@pytest.mark.parametrize(("loss", "divisor"), [("kl", "levels"), ("tokens", "slots")])
def test_a_step_is_the_same_in_any_parts(divisor: str, loss: str) -> None:
    """At the target's adapters, with their dropout, and at the heads, in fp64."""
    assert compare_parts(loss, divisor=divisor) < 1e-10


def test_dropout_by_part_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: what is dropped does not follow from the sequences' seeds."""
    monkeypatch.setattr(AdapterDropout, "forward", nn.Dropout.forward)
    assert compare_parts("kl") > 1e-4


def test_a_planted_fault_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison fails where the KL's direction is swapped."""
    pair, target_head = new_joint("kl")
    # KL(q || p)
    swapped = objectives.Objective("reverse_kl")

    def distill(*args: Any) -> Any:
        return objectives.distillation_loss(*args[:4], swapped)

    monkeypatch.setattr(joint, "distillation_loss", distill)

    assert compare(pair, target_head) > 1e-2


def test_the_kl_begins_at_exactly_nothing() -> None:
    """Adapters have no effect at first: the same target, and no gradient of the KL."""
    # the heads' loss has nearly no weight, so that all gradients but theirs are the KL's
    pair, target_head = new_joint("kl", moved=False, heads=1e-300)
    batch = as_batch()
    losses = pair(batch, target_head)
    assert losses["target"].item() == 0
    assert losses["heads"].item() > 0

    for gradient in find_gradients(pair, losses["total"]).values():
        assert gradient.abs().max() < 1e-290

    with torch.no_grad():
        now = pair.states(batch)
        with pair.adapted.disable_adapter():
            assert torch.equal(pair.states(batch), now)


@pytest.mark.parametrize("loss", ["kl", "tokens"])
def test_validation_tells_the_kl_of_the_held_out_text(loss: str) -> None:
    """Whatever the target's loss is."""
    pair, target_head = new_joint(loss)
    found = pair.validate(as_batch(), target_head, {"chain": chain_paths(2)})
    expected, _ = naive_losses(new_joint("kl")[0])
    assert float(found["kl"] / found["slots"]) == pytest.approx(expected.item(), rel=1e-9)


def test_a_checkpoint_holds_only_what_is_trained() -> None:
    """It loads into another such pair, which is the same then."""
    pair, target_head = new_joint("kl")
    other, other_target_head = new_joint("kl", moved=False)
    state = pair.state_dict()
    trained = {name for name, weight in pair.named_parameters() if weight.requires_grad}

    assert state.keys() == trained

    other.load_state_dict(state)

    loss = pair(as_batch(), target_head)["total"].item()

    assert other(as_batch(), other_target_head)["total"].item() == loss

    with pytest.raises(RuntimeError, match="Unexpected"):
        # the base's weights are not in a checkpoint, and nothing else may be
        other.load_state_dict({**state, "adapted.stranger": torch.zeros(1)})


def test_merged_it_says_the_same() -> None:
    """The new target's logits are those of the adapted one."""
    pair, target_head = new_joint("kl")
    batch = as_batch([1])
    expected = target_head.logits(pair.states(batch))
    torch.testing.assert_close(pair.merge()(input_ids=batch.tokens[None]).logits[0], expected)


def test_the_heads_loss_rises_by_a_sine() -> None:
    """From nothing to the whole of what it counts, or is all of it throughout."""
    rising = JointSection(heads=0.01, rise=True)
    weights = [heads_weight(rising, progress) for progress in (0.0, 0.5, 1.0)]
    assert weights == pytest.approx([0, 0.01 * 0.5**0.5, 0.01])
    assert heads_weight(JointSection(heads=0.01, rise=False), 0.0) == 0.01


def test_matrices_of_heads_have_a_rate_of_their_own() -> None:
    """Adapters and biases have the recipe's."""
    pair, _ = new_joint("kl", moved=False)
    pair.section = pair.section.model_copy(update={"head_lr": 4.0})
    (slow_factor, slow), (fast_factor, fast) = pair.weight_groups()

    assert slow_factor == 1.0
    assert fast_factor == 4.0

    names = {id(weight): name for name, weight in pair.named_parameters()}

    for weight in slow:
        name = names[id(weight)]
        assert "lora" in name or name.endswith(".bias")

    # a residual block's matrix and an LM head for each level
    assert len(fast) == 2 * LEVELS


def test_heads_that_read_other_layers_are_refused() -> None:
    """Their features would be those of the target before it was trained."""
    target = Target(build("llama"))
    head: Any = make_head("eagle3", target)
    with pytest.raises(ValueError, match="expected -1 alone"):
        Joint(target.model, head, JointSection())
