"""The doctor knows no method: any head is examined by what it declares, also one without attention, fc or cache."""

# S slots, H width

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from eagle import Target
from eagle.core.drafter import TargetHead, TrainableDrafter
from eagle.core.examples import Batch
from eagle.doctor import diagnose
from eagle.doctor.examine import open_head
from eagle.doctor.target_answers import select_answers
from eagle.drafters import DRAFTERS, settings_of
from eagle.drafters.parts.decoder_block import head_shape
from eagle.formats.checkpoint import save_head, save_pretrained
from eagle.recipe import Section
from tests.doctor.small_heads import answer_random, fit, train_head
from tests.registry import BY_DEFAULT
from tests.trained import fixture_seed


class ResidualHeadsSettings(Section):
    """What a recipe may say about the head."""

    kind: Literal["residual_heads"] = "residual_heads"
    taps: tuple[int, ...] = (-1,)


class Residual(nn.Module):
    """A residual MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 8 * width)
        self.down = nn.Linear(8 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return [.., H]."""
        return hidden + self.down(nn.functional.silu(self.up(hidden)))


class ResidualHeads(TrainableDrafter):
    """One MLP for each of three levels, all on one state of the target."""

    Settings = ResidualHeadsSettings

    def __init__(self, settings: Any, shape: Any) -> None:
        super().__init__(settings, shape)
        self.taps = settings.taps
        self.blocks = nn.ModuleList([Residual(shape.hidden_size) for _ in range(3)])

    def draft_levels(
        self,
        batch: Batch,
        target_head: TargetHead,
        levels: int,
    ) -> list[Any]:
        """Return each level's states [S, H]; no level reads a token."""
        # slot i predicts token i + 2
        slots = batch.loss_mask.nonzero()[:, 0] - 2
        hidden = batch.select_taps(self.taps)[slots, 0]
        return [(block(hidden), target_head.logits) for block in self.blocks[:levels]]


@pytest.fixture(scope="module")
def texts(target: Target) -> Batch:
    """Return its answers to 30 prompts."""
    return answer_random(30, target, 20, (0.0,))


def train_residual(target: Target, texts: Batch, tap: int) -> ResidualHeads:
    """Return a head that knows these answers by heart."""
    torch.manual_seed(fixture_seed())
    head = ResidualHeads(
        ResidualHeadsSettings(taps=(tap,)),
        head_shape(target.config),
    )
    probs = target.head.logits(texts.select_taps((-1,))[:, 0]).softmax(-1)
    # the position before each supervised token
    positions = texts.loss_mask.nonzero()[:, 0] - 1

    def compute_loss() -> Tensor:
        total = torch.zeros(())
        for level, (states, logits) in enumerate(head.draft_levels(texts, target.head, 3)):
            following = (positions + level).clamp(max=len(probs) - 1)
            total = total + cross_entropy(logits(states), probs[following])
        return total

    return fit(head, compute_loss, 80, 5e-3)


@pytest.fixture(scope="module")
def head(target: Target, texts: Batch) -> ResidualHeads:
    """Return a head that reads what the target's LM head reads."""
    return train_residual(target, texts, -1)


def swap_first_two(head: Any, stacks: Sequence[str]) -> Any:
    """Return a copy of a head whose first and second level are swapped in these lists of modules."""
    broken = copy.deepcopy(head)
    for stack in stacks:
        first, second, *others = getattr(head, stack)
        setattr(broken, stack, nn.ModuleList([second, first, *others]))
    return broken


def test_a_head_of_another_network_is_examined(
    head: ResidualHeads,
    target: Target,
    texts: Batch,
) -> None:
    """What it has is changed, what it has not is named, and levels without own states are no weakness."""
    diagnosis = diagnose(head, target, texts)
    assert diagnosis.verdict.startswith("healthy: level 1 names")
    assert not diagnosis.faults
    tried = [effect.probe.fault for effect in diagnosis.tried]
    assert any("blocks.0 and blocks.1 are swapped" in fault for fault in tried)
    (missing,) = [note for note in diagnosis.notes if note.startswith("does not apply")]
    for name in ("tap order", "fc bias", "halves", "norms", "switches", "rope", "lm head", "d2t"):
        assert name in missing
    assert "layer ids" not in missing
    assert "without any effect on what it guesses: trained with the token" in str(diagnosis)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trained", "tap", "fault"),
    [
        (4, -1, "trained on the state in front of the final norm, reads the one behind it"),
        (3, 2, "layer ids [2] are 1 too low (outputs were counted): inputs of [3] were meant"),
    ],
)
def test_a_state_of_the_wrong_layer_is_named(
    trained: int,
    tap: int,
    fault: str,
    target: Target,
    texts: Batch,
) -> None:
    """A head trained on one layer's state gets another's."""
    head = train_residual(target, texts, trained)
    assert not diagnose(head, target, texts).broken
    # as if the ids had been counted otherwise
    head.taps = (tap,)
    assert diagnose(head, target, texts).verdict == f"broken: {fault}"


def test_levels_in_the_wrong_order_are_named(
    head: ResidualHeads,
    target: Target,
    texts: Batch,
) -> None:
    """A fault that no head of EAGLE can have."""
    broken = swap_first_two(head, ["blocks"])
    assert diagnose(broken, target, texts).verdict == "broken: blocks.0 and blocks.1 are swapped"


def test_a_registered_head_is_opened(
    head: ResidualHeads,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From its folder, in the dtype that it is stored in."""
    monkeypatch.setitem(DRAFTERS, "residual_heads", ResidualHeads)
    save_pretrained(copy.deepcopy(head).bfloat16(), tmp_path)
    opened, refusal = open_head(tmp_path, "any target")
    assert refusal is None
    assert opened.settings == settings_of({"kind": "residual_heads"}, "test")
    assert opened.blocks[0].up.weight.dtype == torch.bfloat16


@pytest.mark.slow
def test_levels_of_medusa_in_the_wrong_order_are_named(target: Target, texts: Batch) -> None:
    """Its blocks, or its blocks and LM heads where whole levels were read in another order."""
    # two answers are learned by heart in a few hundred steps
    few = select_answers(texts, 0, 2)
    head = train_head({"kind": "medusa"}, target, few, 500, lr=1e-2)
    diagnosis = diagnose(head, target, few)
    assert diagnosis.verdict.startswith("healthy: level 1 names")
    assert not diagnosis.faults
    broken = diagnose(swap_first_two(head, ["blocks"]), target, few)
    assert broken.verdict == "broken: blocks.0 and blocks.1 are swapped"
    broken = diagnose(swap_first_two(head, ["blocks", "heads"]), target, few)
    assert broken.verdict == "broken: 0 and 1 are swapped in all of blocks, heads"


# every second one: probes are chosen by what a head has, which relatives share
EXAMINED = [name for name in BY_DEFAULT if not DRAFTERS[name].reads.kv_cache][::2]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMINED)
def test_healthy_heads_are_not_called_broken(
    name: str,
    target: Target,
    texts: Batch,
    tmp_path: Path,
) -> None:
    """From its folder, with what it has and what it has not."""
    few = select_answers(texts, 0, 2)
    save_head(
        tmp_path,
        train_head({"kind": name}, target, few, 150, lr=1e-2),
        "",
        {},
    )
    head, refusal = open_head(tmp_path, "any target")
    assert refusal is None
    diagnosis = diagnose(head, target, few)
    assert diagnosis.figures is not None
    assert not diagnosis.broken
    assert "does not apply to this head" in str(diagnosis)
