"""Acceptance of decoded cycles, counted along texts, is that of decoding itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from eagle import Budget, Target, generate
from eagle.core.tree import chain_paths
from eagle.doctor.agreement import expect_accepted, measure, visit_slots
from eagle.doctor.texts import answer_prompts
from eagle.doctor.wiring import Wiring
from eagle.drafters import DRAFTERS, settings_of
from tests.families import build, random_tokens

LEVELS, NEW = 3, 24


@pytest.fixture(scope="module")
def target() -> Target:
    """A llama whose answers are no loops."""
    return Target(build("llama"))


def learn(kind: dict[str, Any], target: Target, steps: int = 8) -> Any:
    """A head that is sometimes right on the target's answers."""
    torch.manual_seed(0)
    texts = answer_prompts(target, [random_tokens(6, seed) for seed in range(4)], NEW, (0.0, 1.0))
    settings = settings_of(kind, "here")
    head = (
        DRAFTERS[settings.kind]
        .for_target(settings, target.config, target.head, [texts.tokens])
        .train()
    )
    optimizer = torch.optim.AdamW(head.parameters(), lr=5e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        head(texts, target.head)["total"].backward()
        optimizer.step()
    return head.eval()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        {"kind": "eagle1"},
        {"kind": "medusa", "levels": 3},
        {"kind": "dflash", "slots": 4, "blocks": 1},
    ],
    ids=lambda kind: str(kind["kind"]),
)
def test_cycles_are_those_of_generate(kind: dict[str, Any], target: Target) -> None:
    """Text by text the number of cycles that `generate` needs with a chain of the likeliest tokens."""
    head, prompts = learn(kind, target), [random_tokens(6, seed) for seed in range(3)]
    texts = answer_prompts(target, prompts, NEW, (0.0,))
    figures = measure(Wiring(head, target.head, levels=LEVELS), texts, target.head)
    kept, in_text = figures.hits.double(), figures.in_seq
    visits = visit_slots(kept, in_text, figures.seq_ids)
    drafter = head.bind(target.head)
    for number, text in enumerate(texts.tokens.split(texts.lengths)):
        place = next(place for place, prompt in enumerate(prompts) if prompt == text[:6].tolist())
        trace = generate(
            target,
            drafter,
            prompts[place],
            budget=Budget.fixed(chain_paths(LEVELS)),
            max_new_tokens=NEW,
        )
        assert [*prompts[place], *trace.tokens] == text.tolist()
        assert float(visits[figures.seq_ids == number].sum()) == len(trace.cycles)
    accepted = expect_accepted(kept, kept, in_text)
    assert accepted[visits > 0].sum() > 0  # the head is sometimes right, or the count tells nothing


def follow(kept: Tensor, begin: int) -> float:
    """The expected cycles of one text from a slot on, by recursion over what happens."""
    if begin >= kept.shape[1]:
        return 0.0
    total, chance = 1.0, 1.0
    for level in range(len(kept)):
        passes = float(kept[level, begin]) if begin + level < kept.shape[1] else 0.0
        total += chance * (1 - passes) * follow(kept, begin + level + 1)
        chance *= passes
    return total + chance * follow(kept, begin + len(kept) + 1)


def test_sampled_cycles_are_a_recursion_over_outcomes() -> None:
    """Two texts of unequal length; what begins at a text's end keeps nothing beyond it."""
    lengths = (7, 4)
    kept = torch.rand(
        LEVELS, sum(lengths), generator=torch.Generator().manual_seed(0), dtype=torch.double
    )
    text_ids = torch.repeat_interleave(torch.arange(2), torch.tensor(lengths))
    in_text = torch.cat(
        [torch.arange(LEVELS)[:, None] + torch.arange(length) < length for length in lengths], dim=1
    )
    visits = visit_slots(kept, in_text, text_ids)
    for number, part in enumerate(kept.split(lengths, dim=1)):
        assert float(visits[text_ids == number].sum()) == pytest.approx(follow(part, 1))
    near_end = torch.cat([torch.arange(length) >= length - LEVELS for length in lengths])
    kept[:, near_end] = 0  # else the target's own token of a last cycle would lie beyond the text
    kept[:, text_ids == 1] = 0
    visits = visit_slots(kept, in_text, text_ids)
    tokens = visits * (1 + expect_accepted(kept, kept, in_text))
    assert float(tokens.sum()) == pytest.approx(
        sum(lengths) - len(lengths)
    )  # all but each text's first


def test_the_chance_of_a_drawn_draft_is_its_mean_over_texts(target: Target) -> None:
    """min(1, q / p) of the text's token, in the mean over the target's choices, is the overlap."""
    head = learn({"kind": "eagle3", "draft_vocab": 40}, target, 4)
    texts = answer_prompts(target, [random_tokens(6, 1)], 3, (1.0,))
    slot = int(texts.loss_mask.nonzero()[0]) - 2
    p = target.head.logits(texts.select_taps((-1,))[slot + 1, 0]).softmax(-1)
    mean = 0.0
    for token in range(len(p)):
        texts.tokens[slot + 2] = token
        figures = measure(Wiring(head, target.head, levels=1), texts, target.head)
        mean += float(p[token] * figures.sampled_accepted[0, 0])
    assert mean == pytest.approx(float(figures.overlap[0, 0]), abs=1e-5)
