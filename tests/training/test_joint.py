"""Medusa-2: the loss of a target that learns with its heads, by naive loops over full logits."""

# T tokens, V vocabulary, D width

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eagle import Target
from eagle.core.drafter import TrainableDrafter
from eagle.core.examples import Example
from eagle.core.tree import chain_paths
from eagle.drafters import DRAFTERS, settings_of
from eagle.drafters.parts import objectives
from eagle.recipe import JointSection, TrainSection
from eagle.training import joint
from eagle.training.joint import AdapterDropout, Joint, StepPart, heads_weight
from eagle.training.plan import Plan
from tests.families import build, random_tokens

pytest.importorskip("peft", reason="peft is not installed")
LEVELS = 3
PUBLISHED = {"kind": "medusa", "levels": LEVELS, "weights": "falling", "loss": "tokens"}
MASKS = [[0] * 4 + [1] * 6, [0, 0, 0, 1, 1, 0, 1, 1, 1, 1, 1, 0, 1]]  # the second with a gap


def examples() -> list[Example]:
    """Two texts of different lengths."""
    texts = [torch.tensor(random_tokens(len(mask), seed=seed)) for seed, mask in enumerate(MASKS)]
    return [
        Example(text, torch.tensor(mask).bool()) for text, mask in zip(texts, MASKS, strict=True)
    ]


def new_joint(loss: str, *, moved: bool = True, dropout: float = 0.0, **fields: Any) -> Joint:
    """A small random target in fp64 with a head; `moved`, both are away from where they begin."""
    target = Target(build("llama", torch.float64))
    torch.manual_seed(0)
    settings = settings_of({**PUBLISHED, **fields}, "test")
    head = DRAFTERS["medusa"].for_target(settings, target.config, target.head).double()
    made = Joint(target.model, head, target.head, JointSection(loss=loss, rank=4, dropout=dropout))
    if moved:
        for name, part in made.named_parameters():
            if part.requires_grad:
                part.data += (
                    0.3
                    * torch.randn_like(part)
                    * (1 if "lora_B" in name else part.std() if part.ndim > 1 else 1)
                )
    return made


def naive_losses(made: Joint, *, swap: bool = False) -> tuple[Tensor, Tensor]:
    """The target's loss and the heads', from full logits of one text at a time, token by token."""
    model, head = made.adapted.base_model.model, made.head
    own, kl, heads, count = [], [], [], 0
    for example in examples():
        output = model(input_ids=example.tokens[None], output_hidden_states=True)
        states, now = output.hidden_states[-1][0], output.logits[0].log_softmax(-1)
        with torch.no_grad(), made.adapted.disable_adapter():
            before = model(input_ids=example.tokens[None]).logits[0].log_softmax(-1)
        mask = example.loss_mask.tolist()
        for place in (place for place in range(2, len(mask)) if mask[place]):
            count += 1
            token = int(example.tokens[place])
            own.append(-now[place - 1, token])
            p, q = (now, before) if swap else (before, now)
            kl.append((p[place - 1].exp() * (p[place - 1] - q[place - 1])).sum())
            for level in range(LEVELS):
                if place - level >= 2 and all(mask[place - level : place + 1]):
                    hidden = head.blocks[level](states[place - 2 - level])
                    logits = head.heads[level](hidden).log_softmax(-1)
                    heads.append(-(0.8 ** (level + 1)) * logits[token])
    target = kl if made.settings.loss == "kl" else own
    return torch.stack(target).sum() / count, torch.stack(heads).sum() / count


def gradients(made: Joint, loss: Tensor) -> dict[str, Tensor]:
    """At all that is trained."""
    named = {name: part for name, part in made.named_parameters() if part.requires_grad}
    found = torch.autograd.grad(loss, list(named.values()))
    return dict(zip(named, found, strict=True))


def largest_difference(made: Joint) -> float:
    """Between loss and gradients as they are computed and as they are defined, relative to each tensor."""
    losses, weight = made(examples(), 0.3), 0.3
    target, heads = naive_losses(made)
    pairs = [
        (losses["total"], target + weight * heads),
        (losses["target"], target),
        (losses["heads"], heads),
    ]
    ours, theirs = gradients(made, losses["total"]), gradients(made, target + weight * heads)
    assert all(part.abs().max() > 0 for part in theirs.values()) and any(
        "lora_A" in name for name in theirs
    )
    pairs += [(ours[name], theirs[name]) for name in ours]
    return max(float(((one - other).norm() / other.norm()).item()) for one, other in pairs)


@pytest.mark.parametrize("loss", ["kl", "tokens"])
def test_loss_and_gradients_are_those_of_a_naive_loop(loss: str) -> None:
    """At adapters, residual blocks and LM heads, in fp64."""
    assert largest_difference(new_joint(loss)) < 1e-6  # weights of slots and levels are fp32


PLACES = {"whole": [[0, 1]], "parts": [[0], [1]], "with one twice": [[1], [0], [0]]}


def dealt(made: Joint, parts: list[list[int]]) -> dict[str, Tensor]:
    """Losses and gradients of a step in parts, as the loop weighs them; what is read twice counts once."""
    plan = Plan(
        [int(example.loss_mask[2:].sum()) for example in examples()],
        TrainSection(out="none", validation=0),
    )
    divisors = made.head.divisors([example.loss_mask for example in examples()], [5, 6])
    sums: dict[str, Tensor] = {}
    for texts, share in zip(parts, plan.weights(0, parts), strict=True):
        torch.manual_seed(0)
        losses = made(
            [examples()[text] for text in texts],
            0.3,
            StepPart(tuple(5 + text for text in texts), divisors, share),
        )
        found = {**losses, **gradients(made, losses["total"])}
        sums = {name: sums.get(name, 0) + value.detach() for name, value in found.items()}
    return sums


def parts_apart(**fields: Any) -> float:
    """Of losses and gradients of a step in parts from the whole one's, relative to each."""
    made = new_joint(fields.pop("loss", "kl"), dropout=0.2, **fields).train()
    whole, *others = (dealt(made, parts) for parts in PLACES.values())
    pairs = [(whole[name], other[name]) for other in others for name in whole]
    return max(float((one - other).norm() / one.norm()) for one, other in pairs)


@pytest.mark.parametrize("loss", ["kl", "tokens"])
@pytest.mark.parametrize("divisor", ["slots", "levels"])
def test_a_step_is_the_same_in_any_parts(divisor: str, loss: str) -> None:
    """At the target's adapters, with their dropout, and at the heads, in fp64."""
    assert parts_apart(divisor=divisor, loss=loss) < 1e-10


def test_dropout_by_part_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: what is dropped does not follow from the texts' seeds."""
    monkeypatch.setattr(AdapterDropout, "forward", nn.Dropout.forward)
    assert parts_apart() > 1e-4


def reverse(objective: Any) -> Callable[..., Any]:
    """`distillation_loss` by another divergence."""
    return lambda *args: objectives.distillation_loss(*args[:4], objective)


@pytest.mark.parametrize(
    ("place", "name", "fault"),
    [
        (joint, "distillation_loss", reverse(objectives.Objective("reverse_kl"))),
        (
            DRAFTERS["medusa"],
            "level_weights",
            property(lambda head: [0.8**level for level in range(LEVELS)]),
        ),
    ],
    ids=["the KL's direction swapped", "the first level weighs 1"],
)
def test_a_planted_fault_is_seen(
    place: Any, name: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison can fail."""
    made = new_joint("kl")
    monkeypatch.setattr(place, name, fault)
    assert largest_difference(made) > 1e-2


def test_the_kl_begins_at_exactly_nothing() -> None:
    """Adapters have no effect at first: the same target, and no gradient of the KL."""
    made = new_joint("kl", moved=False)
    losses = made(examples(), 0.3)
    assert losses["target"].item() == 0 and losses["heads"].item() > 0
    found = gradients(made, made(examples(), 0.0)["total"])
    assert all(part.abs().max() == 0 for part in found.values())
    with torch.no_grad():
        now = made.states(examples()[0].tokens[None])
        with made.adapted.disable_adapter():
            assert torch.equal(made.states(examples()[0].tokens[None]), now)


def test_validation_tells_the_kl_of_the_held_out_text() -> None:
    """Whatever the target's loss is."""
    for loss in ("kl", "tokens"):
        made = new_joint(loss)
        found = made.validate(examples(), {"chain": chain_paths(2)})
        expected = naive_losses(new_joint("kl"))[0]
        assert float(found["kl"] / found["slots"]) == pytest.approx(expected.item(), rel=1e-9)


def test_a_checkpoint_holds_what_is_trained_alone() -> None:
    """And loads into another such pair, which is the same then."""
    made, other = new_joint("kl"), new_joint("kl", moved=False)
    state = made.state_dict()
    assert state.keys() == {name for name, part in made.named_parameters() if part.requires_grad}
    other.load_state_dict(state)
    assert other(examples(), 0.3)["total"].item() == made(examples(), 0.3)["total"].item()
    with pytest.raises(RuntimeError, match="Unexpected"):
        other.load_state_dict({**state, "adapted.stranger": torch.zeros(1)})


def test_merged_it_says_the_same() -> None:
    """The new target's logits are those of the adapted one."""
    made, tokens = new_joint("kl"), examples()[1].tokens[None]
    expected = made.frozen.logits(made.states(tokens))
    torch.testing.assert_close(made.merge()(input_ids=tokens).logits, expected)


def test_the_heads_loss_rises_by_a_sine() -> None:
    """From nothing to the whole of what it counts, or is all of it throughout."""
    rising, level = (JointSection(heads=0.01, rise=rise) for rise in (True, False))
    assert heads_weight(rising, 0, 100) == 0
    assert heads_weight(rising, 50, 100) == pytest.approx(0.01 * 0.5**0.5)
    assert heads_weight(rising, 100, 100) == pytest.approx(0.01)
    assert heads_weight(level, 0, 100) == 0.01


def test_matrices_of_heads_have_a_rate_of_their_own() -> None:
    """Adapters and biases have the recipe's."""
    made = new_joint("kl", moved=False)
    made.settings = made.settings.model_copy(update={"head_lr": 4.0})
    slow, fast = made.groups(1e-3)
    assert (slow["lr"], fast["lr"]) == (1e-3, 4e-3)
    names = {id(part): name for name, part in made.named_parameters()}
    assert all(
        "lora" in names[id(part)] or names[id(part)].endswith(".bias") for part in slow["params"]
    )
    assert len(fast["params"]) == 2 * LEVELS


def test_heads_that_read_other_layers_are_refused() -> None:
    """Their features would be those of the target that was."""
    target = Target(build("llama"))
    head = DRAFTERS["eagle3"].for_target(
        settings_of({"kind": "eagle3"}, "test"), target.config, target.head
    )
    assert isinstance(head, TrainableDrafter)
    with pytest.raises(ValueError, match="expected -1 alone"):
        Joint(target.model, head, target.head, JointSection())
