"""The MLP speculator, against the published formulas written for one slot and one stage at a time."""

# H the target's width, D that of a stage, V vocabulary

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from eagle.core.examples import collate
from eagle.drafters import settings_of
from eagle.drafters.levels import mlp_speculator
from eagle.drafters.levels.mlp_speculator import MlpSpeculator, ShiftedNorm
from eagle.formats.checkpoint import load_head, save_head
from tests import single_slots
from tests.single_slots import (
    best_paths,
    distance_from_loop,
    drafted_paths,
    knowledge,
    small_target,
)
from tests.unrolled_heads import SHAPE, SPANS, TAPS, Weights, computed, frozen_head, texts_of

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "narrow": {"inner_dim": 20, "scale_input": True},
    "tied": {"tie_weights": True, "inner_dim": 56, "loss": "tokens"},
    "tied and scaled": {"tie_weights": True, "scale_input": True},
    "tokens": {"loss": "tokens", "scale_input": True},
}


def new_head(shape: Any = SHAPE, **settings: Any) -> MlpSpeculator:
    """A head in fp64 with all its weights away from where they start."""
    head: MlpSpeculator = single_slots.new_head(shape, kind="mlp_speculator", **settings)
    return head


def stages(
    weights: Weights, settings: Any, state: Tensor, tokens: Sequence[int]
) -> Iterator[Tensor]:
    """[V], the logits of one stage after the other: ln(w P s + e E x), in which w cancels against the norm."""
    first = weights["proj.0.weight"]
    inner = len(first)
    w = 0.5 ** (0.5 / settings.levels)
    e = math.sqrt((1 - w**2) * inner / 2)
    if settings.scale_input:
        state = state / (state.square().mean() + 1e-6).sqrt() / math.sqrt(2)
    for level, token in enumerate(tokens[: settings.levels]):
        stage, project = (0, min(level, 1)) if settings.tie_weights else (level, level)
        mixed = (
            weights[f"proj.{project}.weight"] @ state
            + e / w * weights[f"emb.{stage}.weight"][token]
        )
        normed = mixed / (mixed.square().mean() + 1e-6).sqrt()
        normed = normed * weights[f"ln.{stage}.weight"] + weights[f"ln.{stage}.bias"]
        state = normed * (1 + torch.erf(normed / math.sqrt(2))) / 2
        yield weights[f"head.{stage}.weight"] @ state


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_gradients_are_those_of_single_slots(variant: str) -> None:
    """In fp64, of answers of many tokens, of one, at a text's end, and of none."""
    assert (
        distance_from_loop(stages, new_head(**VARIANTS[variant])) < 1e-6
    )  # what each slot counts is told in fp32


def wrap_read_token(
    head: MlpSpeculator, change: Callable[[int, Tensor], tuple[int, Tensor]]
) -> None:
    """Read another token, or by another stage."""

    def read_token(level: int, state: Tensor, tokens: Tensor, frozen: Any) -> Tensor:
        level, tokens = change(level, tokens)
        return MlpSpeculator.read_token(head, level, state, tokens, frozen)

    head.read_token = read_token  # type: ignore[method-assign]


class OtherFunctions:
    """Those of torch, but for a GELU that is no longer exact, or an input that keeps its size."""

    def __init__(self, gelu: bool) -> None:
        self.gelu = (lambda x: F.gelu(x, approximate="tanh")) if gelu else F.gelu
        self.rms_norm = F.rms_norm if gelu else lambda x, shape, eps: x


FAULTS: dict[str, Callable[[MlpSpeculator, pytest.MonkeyPatch], None]] = {
    "the next slot's token": lambda head, patch: wrap_read_token(
        head, lambda level, tokens: (level, tokens.roll(-1))
    ),
    "stages out of order": lambda head, patch: wrap_read_token(
        head, lambda level, tokens: ((0, 2, 1)[level], tokens)
    ),
    "tokens that count more": lambda head, patch: setattr(
        head, "token_ratio", 1.05 * head.token_ratio
    ),
    "a mean that is taken off": lambda head, patch: patch.setattr(
        ShiftedNorm,
        "forward",
        lambda norm, x: F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, 1e-6),
    ),
    "no exact GELU": lambda head, patch: patch.setattr(
        mlp_speculator, "F", OtherFunctions(gelu=True)
    ),
    "an input of any size": lambda head, patch: patch.setattr(
        mlp_speculator, "F", OtherFunctions(gelu=False)
    ),
    "another stage's LM head": lambda head, patch: patch.setattr(
        MlpSpeculator,
        "lm_heads",
        lambda head, frozen: [mlp_speculator.OwnHead(part.weight) for part in head.head[::-1]],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is far from the loop."""
    head = new_head(**VARIANTS["narrow"])
    FAULTS[fault](head, monkeypatch)
    assert distance_from_loop(stages, head) > 1e-4


def test_a_level_reads_the_tokens_up_to_its_own_and_one_state() -> None:
    """Level d at slot i: tokens i + 1 to i + 1 + d, and state i."""
    assert knowledge(new_head(), 5) == [({6}, {5}), ({6, 7}, {5}), ({6, 7, 8}, {5})]


def test_a_level_that_reads_more_is_seen() -> None:
    """The token that it should name, or the state behind its own."""
    head, due = new_head(), knowledge(new_head(), 5)
    wrap_read_token(head, lambda level, tokens: (level, tokens.roll(-1)))
    assert knowledge(head, 5)[0][0] == {7} != due[0][0]
    head = new_head()
    head.start_states = lambda batch, places: MlpSpeculator.start_states(head, batch, places + 1)  # type: ignore[method-assign]
    assert knowledge(head, 5)[0][1] == {6} != due[0][1]


def test_stages_that_share_weights_learn_the_sum() -> None:
    """The gradient at a shared tensor is that of all its copies in stages that do not share; each is kept once."""
    tied, apart = new_head(tie_weights=True), new_head()
    shared = {name: tensor.clone() for name, tensor in tied.state_dict().items()}
    norms = ("ln.0.weight", "ln.0.bias")
    assert set(shared) == {
        "emb.0.weight",
        "proj.0.weight",
        "proj.1.weight",
        "head.0.weight",
        *norms,
    }
    origin = {}
    for name in apart.state_dict():
        part, stage, kind = name.split(".")
        origin[name] = f"{part}.{min(int(stage), 1 if part == 'proj' else 0)}.{kind}"
    apart.load_state_dict({name: shared[source] for name, source in origin.items()})
    batch, frozen = collate(texts_of(SPANS, torch.float64), TAPS), frozen_head(torch.float64)
    learned, single = computed(tied, batch, frozen), computed(apart, batch, frozen)
    torch.testing.assert_close(learned["total"], single["total"])
    for name in shared:
        copies = [single[copy] for copy, source in origin.items() if source == name]
        torch.testing.assert_close(learned[name], torch.stack(copies).sum(0), rtol=1e-6, atol=1e-12)


def test_a_tied_head_is_kept_whole(tmp_path: Path) -> None:
    """On disk its tensors are those in memory."""
    head = new_head(tie_weights=True, scale_input=True, inner_dim=20).float()
    save_head(tmp_path / "head", head, "recipe", {})
    loaded = load_head(tmp_path / "head")
    assert loaded.network == head.network != new_head().network
    assert {name: tensor.tolist() for name, tensor in loaded.state_dict().items()} == {
        name: tensor.tolist() for name, tensor in head.state_dict().items()
    }


def test_first_weights_are_as_published() -> None:
    """All matrices of variance 1 / D, norms of one and no shift; as wide as the target where nothing is said."""
    torch.manual_seed(0)
    head = MlpSpeculator.for_target(
        settings_of({"kind": "mlp_speculator", "inner_dim": 64}, "test"), SHAPE
    )
    for part in (*head.emb, *head.proj, *head.head):
        assert (
            part.weight.std().item() == pytest.approx(1 / 8, rel=0.05)
            and abs(part.weight.mean().item()) < 0.01
        )
    assert all(norm.weight.eq(1).all() and norm.bias.eq(0).all() for norm in head.ln)
    assert new_head().proj[0].weight.shape == (SHAPE.hidden_size, SHAPE.hidden_size)


@pytest.mark.parametrize("tied", [False, True])
def test_trees_hold_the_likeliest_paths_of_all(tied: bool) -> None:
    """Against the product of probs along every path that there is, each prob given the tokens before."""
    shape, frozen, state = small_target()
    head = new_head(shape, tie_weights=tied, inner_dim=24, scale_input=tied).eval()
    with torch.no_grad():
        for part in head.head:
            part.weight.mul_(3)
        due = best_paths(stages, head, frozen, state, 3, 8)
        assert drafted_paths(head, frozen, state, 3, 8) == due
        assert len({len(path) for path in due}) > 1  # no chain, and no single level
        head.emb[-1].weight.neg_()
        assert drafted_paths(head, frozen, state, 3, 8) != due


def test_a_level_is_timed_alone() -> None:
    """A probe computes what one level of a tree needs."""
    (logits,) = new_head(inner_dim=20).bind(frozen_head(torch.float64)).probe(100, 5, 3)()
    assert logits.shape == (1, 3, SHAPE.vocab_size)
