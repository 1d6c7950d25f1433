"""The doctor knows no method: a head without attention, fc or cache is examined by what it declares."""

# S slots, H width

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, silu

from eagle import Target
from eagle.core.drafter import TargetHead, TrainableDrafter
from eagle.core.examples import Batch
from eagle.doctor import diagnose
from eagle.doctor.examine import open_head
from eagle.doctor.texts import answer_prompts, select_texts
from eagle.drafters import DRAFTERS, settings_of
from eagle.drafters.parts.decoder_block import head_shape
from eagle.formats.checkpoint import save_head, save_pretrained
from eagle.recipe import Section
from tests.families import build, random_tokens
from tests.registry import BY_DEFAULT
from tests.trained import fixture_seed


class SeveralSettings(Section):
    """What a recipe may say about the head."""

    kind: Literal["several_heads"] = "several_heads"
    taps: tuple[int, ...] = (-1,)


class Residual(nn.Module):
    """x + W_down(silu(W_up x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 8 * width)
        self.down = nn.Linear(8 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[.., H]."""
        return x + self.down(silu(self.up(x)))


class SeveralHeads(TrainableDrafter):
    """One residual block for each of three levels, all over one state of the target."""

    Settings = SeveralSettings

    def __init__(self, settings: Any, shape: Any) -> None:
        super().__init__(settings, shape)
        self.taps = settings.taps
        self.blocks = nn.ModuleList([Residual(shape.hidden_size) for _ in range(3)])

    def draft_levels(self, batch: Batch, frozen: TargetHead, levels: int) -> list[Any]:
        """Each level's states [S, H]; no level reads a token."""
        hidden = batch.select_taps(self.taps)[batch.loss_mask.nonzero()[:, 0] - 2, 0]
        return [(block(hidden), frozen.logits) for block in self.blocks[:levels]]


@pytest.fixture(scope="module")
def target() -> Target:
    """A llama whose answers are no loops."""
    return Target(build("llama"))


@pytest.fixture(scope="module")
def texts(target: Target) -> Batch:
    """Its answers to some prompts."""
    return answer_prompts(target, [random_tokens(6, seed) for seed in range(30)], 20, (0.0,))


def train(target: Target, texts: Batch, *taps: int) -> SeveralHeads:
    """A head that knows these texts by heart."""
    torch.manual_seed(fixture_seed())
    head = SeveralHeads(SeveralSettings(taps=taps), head_shape(target.config))
    optimizer = torch.optim.AdamW(head.parameters(), lr=5e-3)
    places, probs = (
        texts.loss_mask.nonzero()[:, 0],
        target.head.logits(texts.select_taps((-1,))[:, 0]).softmax(-1),
    )
    for _ in range(80):
        optimizer.zero_grad()
        for level, (states, logits) in enumerate(head.draft_levels(texts, target.head, 3)):
            cross_entropy(
                logits(states), probs[(places + level - 1).clamp(max=len(probs) - 1)]
            ).backward()
        optimizer.step()
    return head.eval()


@pytest.fixture(scope="module")
def head(target: Target, texts: Batch) -> SeveralHeads:
    """One that reads what the target's LM head reads."""
    return train(target, texts, -1)


def test_a_head_of_another_network_is_examined(
    head: SeveralHeads, target: Target, texts: Batch
) -> None:
    """What it has is changed, what it has not is named, and three levels at once are no weakness of its own states."""
    diagnosis = diagnose(head, target, texts)
    assert diagnosis.verdict.startswith("healthy: level 1 names") and not diagnosis.faults
    assert any(
        "blocks.0 and blocks.1 are swapped" in effect.probe.fault for effect in diagnosis.tried
    )
    (missing,) = (
        note for note in diagnosis.notes if note.startswith("does not apply to this head")
    )
    absent = (
        "tap order",
        "fc bias",
        "halves",
        "alike",
        "tokens",
        "norms",
        "switches",
        "rope",
        "lm head",
        "d2t",
    )
    assert all(name in missing for name in absent) and "layer ids" not in missing
    assert "without any effect on what it guesses: trained with the token one place earlier" in str(
        diagnosis
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trained", "read", "fault"),
    [
        ((4,), (-1,), "trained on the state in front of the final norm, reads the one behind it"),
        (
            (3,),
            (2,),
            "layer ids [2] are 1 too low (outputs were counted): inputs of [3] were meant",
        ),
    ],
)
def test_a_state_of_the_wrong_layer_is_named(
    trained: tuple[int, ...], read: tuple[int, ...], fault: str, target: Target, texts: Batch
) -> None:
    """The head of one layer is given another's output."""
    head = train(target, texts, *trained)
    assert not diagnose(head, target, texts).broken
    head.taps = read
    assert diagnose(head, target, texts).verdict == f"broken: {fault}"


def test_levels_in_the_wrong_order_are_named(
    head: SeveralHeads, target: Target, texts: Batch
) -> None:
    """Which no block of EAGLE's has."""
    broken = copy.deepcopy(head)
    broken.blocks = nn.ModuleList([head.blocks[1], head.blocks[0], head.blocks[2]])
    assert diagnose(broken, target, texts).verdict == "broken: blocks.0 and blocks.1 are swapped"


def test_a_registered_head_is_opened(
    head: SeveralHeads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its folder, in the dtype that it is stored in."""
    monkeypatch.setitem(DRAFTERS, "several_heads", SeveralHeads)
    save_pretrained(copy.deepcopy(head).bfloat16(), tmp_path)
    opened, refusal = open_head(tmp_path, "any target")
    assert refusal is None and opened.settings == settings_of({"kind": "several_heads"}, "test")
    assert opened.blocks[0].up.weight.dtype == torch.bfloat16


def learned(name: str, target: Target, texts: Batch, steps: int) -> Any:
    """A head of the project's own after so many steps on these texts."""
    torch.manual_seed(fixture_seed())
    head = (
        DRAFTERS[name]
        .for_target(settings_of({"kind": name}, "test"), target.config, target.head)
        .train()
    )
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        head(texts, target.head)["total"].backward()
        optimizer.step()
    return head.eval()


@pytest.mark.slow
def test_levels_of_medusa_in_the_wrong_order_are_named(target: Target, texts: Batch) -> None:
    """Its blocks, its LM heads, or both together as where whole levels were read in another order."""
    few = select_texts(texts, 0, 2)
    head = learned("medusa", target, few, 500)
    diagnosis = diagnose(head, target, few)
    assert diagnosis.verdict.startswith("healthy: level 1 names") and not diagnosis.faults
    assert any("blocks is transposed" in effect.probe.fault for effect in diagnosis.tried)
    for stacks, fault in {
        ("blocks",): "blocks.0 and blocks.1 are swapped",
        ("heads",): "heads.0 and heads.1 are swapped",
        ("blocks", "heads"): "0 and 1 are swapped in all of blocks, heads",
    }.items():
        broken = copy.deepcopy(head)
        for stack in stacks:
            first, second, *others = getattr(head, stack)
            setattr(broken, stack, nn.ModuleList([second, first, *others]))
        assert diagnose(broken, target, few).verdict == f"broken: {fault}"


EXAMINED = [name for name in BY_DEFAULT if not DRAFTERS[name].reads.texts]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] * (place % 2))
        for place, name in enumerate(EXAMINED)
    ],
)
def test_further_heads_are_examined(
    name: str, target: Target, texts: Batch, tmp_path: Path
) -> None:
    """From its folder, with what it has and what it has not; nothing is the matter with it."""
    few = select_texts(texts, 0, 2)
    save_head(tmp_path, learned(name, target, few, 150), "", {})
    head, refusal = open_head(tmp_path, "any target")
    assert refusal is None
    diagnosis = diagnose(head, target, few)
    assert diagnosis.figures is not None and not diagnosis.broken
    assert "does not apply to this head" in str(diagnosis)
