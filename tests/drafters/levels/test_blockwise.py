"""Blockwise heads, against the published formulas written for one slot and one level at a time."""

# K levels, H width, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from eagle import Budget, Target, generate
from eagle.core.examples import collate
from eagle.drafters import settings_of
from eagle.drafters.levels.blockwise import Blockwise
from tests import single_slots
from tests.single_slots import (
    LEVELS,
    best_paths,
    distance_from_loop,
    drafted_paths,
    knowledge,
    small_target,
)
from tests.trained import equal, prepared, rows, run
from tests.unrolled_heads import SHAPE, SPANS, TAPS, Weights, computed, frozen_head, texts_of

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "narrow": {"inner_dim": 7},
    "tokens": {"loss": "tokens"},
}


def new_head(shape: Any = SHAPE, **settings: Any) -> Blockwise:
    """A head in fp64 with all its weights away from where they start."""
    head: Blockwise = single_slots.new_head(shape, kind="blockwise", **settings)
    return head


def levels_of(
    weights: Weights, settings: Any, state: Tensor, tokens: Sequence[int]
) -> Iterator[Tensor]:
    """[V], the logits of one level after the other: H rows of the second matrix each, and the hidden units of all."""
    hidden = (weights["up.weight"] @ state + weights["up.bias"]).clamp(min=0)
    for level in range(settings.levels):
        rows = range(level * len(state), (level + 1) * len(state))
        changed = torch.stack(
            [weights["down.weight"][row] @ hidden + weights["down.bias"][row] for row in rows]
        )
        yield weights["frozen"] @ (state + changed)


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_gradients_are_those_of_single_slots(variant: str) -> None:
    """In fp64, of answers of many tokens, of one, at a text's end, and of none."""
    assert (
        distance_from_loop(levels_of, new_head(**VARIANTS[variant])) < 1e-6
    )  # what each slot counts is told in fp32


def other_states(head: Blockwise, change: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Make something else of the target's states and what the head makes of them."""
    head.read_token = lambda level, state, *rest: (  # type: ignore[method-assign]
        state if level else change(state, Blockwise.read_token(head, level, state, *rest))
    )


FAULTS: dict[str, Callable[[Blockwise], None]] = {
    "the next slot's state": lambda head: other_states(
        head, lambda state, levels: levels.roll(-1, 0)
    ),
    "the next level": lambda head: other_states(
        head, lambda state, levels: levels.roll(-SHAPE.hidden_size, -1)
    ),
    "level beside level": lambda head: other_states(
        head, lambda state, levels: levels.unflatten(-1, (-1, LEVELS)).transpose(-1, -2).flatten(-2)
    ),
    "no state beside": lambda head: other_states(
        head, lambda state, levels: levels - state.repeat(1, LEVELS)
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault: str) -> None:
    """Each is far from the loop."""
    head = new_head()
    FAULTS[fault](head)
    assert distance_from_loop(levels_of, head) > 1e-3


def test_a_level_reads_one_state_and_no_token() -> None:
    """All levels at slot i read state i alone; one that reads a token beside it is seen."""
    head = new_head()
    assert knowledge(head, 5) == [(set(), {5})] * LEVELS
    honest = head.read_token
    head.read_token = lambda level, state, tokens, frozen: (  # type: ignore[method-assign]
        honest(level, state, tokens, frozen) + tokens[..., None]
    )
    assert knowledge(head, 5) == [({6}, {5}), ({6, 7}, {5}), ({6, 7, 8}, {5})]


def drawn_losses(seeds: int) -> dict[int, list[dict[str, Tensor]]]:
    """Loss and gradients of steps with so many seeds, by the level that was drawn."""
    head = new_head(drawn=True)
    batch, frozen = collate(texts_of(SPANS, torch.float64), TAPS), frozen_head(torch.float64)
    losses: dict[int, list[dict[str, Tensor]]] = {}
    for seed in range(seeds):
        torch.manual_seed(seed)
        terms = head(batch, frozen)
        torch.manual_seed(seed)
        step = computed(head, batch, frozen)
        (level,) = (level for level in range(LEVELS) if terms[f"draft_probs/{level}"] > 0)
        assert (
            terms["total"] == step["total"] == terms[f"draft_probs/{level}"]
            and len(terms) == 1 + LEVELS
        )
        losses.setdefault(level, []).append(step)
    return losses


def test_a_drawn_level_is_all_levels_in_expectation() -> None:
    """The mean over the levels of what a step computes; the seed of a step says which it is, each as often."""
    losses = drawn_losses(60)
    assert set(losses) == set(range(LEVELS)) and all(
        10 < len(steps) < 30 for steps in losses.values()
    )
    for steps in losses.values():
        assert all(torch.equal(step[name], steps[0][name]) for step in steps for name in step)
    batch, frozen = collate(texts_of(SPANS, torch.float64), TAPS), frozen_head(torch.float64)
    for name, whole in computed(new_head(), batch, frozen).items():
        mean = torch.stack([steps[0][name] for steps in losses.values()]).mean(0)
        torch.testing.assert_close(mean, whole, rtol=1e-12, atol=1e-12)
        assert all(not torch.allclose(steps[0][name], whole) for steps in losses.values())


def test_a_head_that_is_not_trained_draws_nothing() -> None:
    """Its loss is that of all levels, whatever the seed."""
    batch, frozen = collate(texts_of(SPANS, torch.float64), TAPS), frozen_head(torch.float64)
    drawn, whole = (new_head(drawn=drawn).eval()(batch, frozen) for drawn in (True, False))
    assert drawn.keys() == whole.keys() and all(
        torch.equal(drawn[name], whole[name]) for name in whole
    )


def test_all_levels_say_at_first_what_the_target_says_next() -> None:
    """A new head changes nothing: each level gives the target's own logits of the state."""
    head = Blockwise.for_target(settings_of({"kind": "blockwise"}, "test"), SHAPE).double()
    batch, frozen = collate(texts_of(SPANS, torch.float64), TAPS), frozen_head(torch.float64)
    places, hidden = head.level_states(batch, frozen)
    assert all(torch.equal(state, batch.select_taps((-1,))[places, 0]) for state in hidden)


def test_trees_hold_the_likeliest_products_of_probs() -> None:
    """Against all paths; the levels do not depend on one another, and every node of a level has the same children."""
    shape, frozen, state = small_target()
    head = new_head(shape).eval()
    with torch.no_grad():
        head.down.weight.normal_(std=0.3)
        due = best_paths(levels_of, head, frozen, state, 3, 8)
        assert drafted_paths(head, frozen, state, 3, 8) == due
        assert len({len(path) for path in due}) > 1 and len(due) > len({path[0] for path in due})
        head.down.bias[shape.hidden_size :].normal_()
        assert drafted_paths(head, frozen, state, 3, 8) != due


def test_one_forward_of_the_target_verifies_a_draft_and_yields_the_next() -> None:
    """Beside that of the prompt there is one for each cycle, however many levels are drafted and accepted."""
    torch.manual_seed(0)
    target = Target(
        LlamaForCausalLM(
            LlamaConfig(**{**SHAPE.to_dict(), "vocab_size": 4, "num_hidden_layers": 2})
        )
    )
    settings = settings_of({"kind": "blockwise"}, "test")
    head: Any = Blockwise.for_target(settings, target.config).bind(target.head)
    options: dict[str, Any] = {"budget": Budget(8, 4, 3), "max_new_tokens": 24, "stop": []}
    generate(target, head, [1, 2, 3], **options)  # the first finds out what the model can do
    forwards = list[int]()
    hook = target.model.base_model.register_forward_hook(lambda *read: forwards.append(1))
    trace = generate(target, head, [1, 2, 3, 1], **options)
    hook.remove()
    assert len(forwards) == 1 + len(trace.cycles) < 1 + len(trace.tokens)
    assert any(cycle.accepted for cycle in trace.cycles)


def test_all_levels_are_timed_at_once() -> None:
    """A probe computes all that a draft needs, as no level waits for the tokens of another."""
    head = new_head().bind(frozen_head(torch.float64))
    assert head.forwards(Budget(8, 3, 3)) == ()
    assert [logits.shape for logits in head.probe(100, 5, 4)()] == [
        (1, 1, SHAPE.vocab_size)
    ] * LEVELS


@pytest.mark.slow
def test_two_halves_of_a_run_draw_what_the_whole_draws(
    tiny_target_dir: Path, tmp_path: Path
) -> None:
    """A run that goes on from a checkpoint leaves the same bytes; another seed draws other levels."""
    drafter = "drafter={kind: blockwise, drawn: true, inner_dim: 32}"
    command = [
        *prepared(tiny_target_dir, tmp_path, drafter),
        "train.checkpoint_every=3",
        "train.keep=9",
    ]
    whole, out = run(command, tmp_path / "whole"), run(command, tmp_path / "run")
    for later in (out / "checkpoints").glob("step-*"):
        if int(later.name[5:]) > 3:
            (later / "complete.json").unlink()
    run(command, out)
    assert equal(out, whole) and rows(out) == rows(whole)
    assert not equal(run(command, tmp_path / "other", "train.seed=1"), whole)
