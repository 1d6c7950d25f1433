"""Acceptance of decoded cycles, computed from figures along an answer, is that of decoding itself."""

# K levels, S slots of all sequences

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from eagle import Budget, Target, generate
from eagle.core.tree import chain_paths
from eagle.doctor.agreement import expect_accepted, measure, visit_slots
from eagle.doctor.target_answers import answer_prompts
from eagle.doctor.wiring import Wiring
from tests.doctor.small_heads import train_head
from tests.families import random_tokens

LEVELS = 3
LIMIT = 24


@pytest.mark.slow
@pytest.mark.parametrize(
    "section",
    [
        {"kind": "eagle1"},
        {"kind": "medusa", "levels": 3},
        {"kind": "dflash", "slots": 4, "blocks": 1},
    ],
    ids=lambda section: str(section["kind"]),
)
def test_cycles_are_those_of_generate(section: dict[str, Any], target: Target) -> None:
    """For each answer the number of cycles that `generate` needs with a chain of the likeliest tokens."""
    # trained on these and sampled answers, so that it is sometimes right
    prompts = [random_tokens(6, seed) for seed in range(4)]
    head = train_head(
        section, target, answer_prompts(target, prompts, LIMIT, (0.0, 1.0)), steps=8, lr=5e-3
    )
    texts = answer_prompts(target, prompts[:3], LIMIT, (0.0,))
    figures = measure(
        Wiring(head, target.head, levels=LEVELS),
        texts,
        target.head,
    )
    hits = figures.hits.double()
    visits = visit_slots(hits, figures.in_seq, figures.seq_ids)
    drafter = head.bind(target.head)
    chain = Budget.fixed(chain_paths(LEVELS))
    for index, text in enumerate(texts.tokens.split(texts.lengths)):
        prompt = text[:6].tolist()
        trace = generate(
            target,
            drafter,
            prompt,
            budget=chain,
            max_new_tokens=LIMIT,
        )
        assert [*prompt, *trace.tokens] == text.tolist()
        assert float(visits[figures.seq_ids == index].sum()) == len(trace.cycles)
    # else the count shows nothing
    accepted = expect_accepted(hits, hits, figures.in_seq)
    assert accepted[visits > 0].sum() > 0


def count_cycles(accepted: Tensor, begin: int) -> float:
    """Return the expected cycles of one sequence [K, S] from a slot on, by recursion over all outcomes."""
    levels, slots = accepted.shape
    if begin >= slots:
        return 0.0
    total = 1.0
    chance = 1.0
    for level in range(levels):
        is_inside = begin + level < slots
        prob = float(accepted[level, begin]) if is_inside else 0.0
        total += chance * (1 - prob) * count_cycles(accepted, begin + level + 1)
        chance *= prob
    return total + chance * count_cycles(accepted, begin + levels + 1)


def test_sampled_cycles_are_a_recursion_over_outcomes() -> None:
    """Two sequences of unequal length; a cycle at a sequence's end accepts nothing beyond it."""
    lengths = torch.tensor([7, 4])
    generator = torch.Generator().manual_seed(0)
    accepted = torch.rand(LEVELS, 11, generator=generator, dtype=torch.double)
    seq_ids = torch.arange(2).repeat_interleave(lengths)
    # how many slots of its sequence come after each slot
    left = torch.tensor([6, 5, 4, 3, 2, 1, 0, 3, 2, 1, 0])
    in_seq = torch.arange(LEVELS)[:, None] <= left
    visits = visit_slots(accepted, in_seq, seq_ids)
    for seq, rates in enumerate(accepted.split(lengths.tolist(), dim=1)):
        expected = count_cycles(rates, 1)
        assert float(visits[seq_ids == seq].sum()) == pytest.approx(expected)
    # a last cycle's own token would be beyond the sequence, if it accepted all
    accepted[:, left < LEVELS] = 0
    visits = visit_slots(accepted, in_seq, seq_ids)
    tokens = visits * (1 + expect_accepted(accepted, accepted, in_seq))
    # all but the first of each sequence
    assert float(tokens.sum()) == pytest.approx(11 - 2)


def test_the_acceptance_of_a_sampled_draft_is_the_overlap(target: Target) -> None:
    """min(1, q / p) of the answer's token, in the mean over the target's choices, is the sum of min(p, q)."""
    prompts = [random_tokens(6, seed) for seed in range(4)]
    section = {"kind": "eagle3", "draft_vocab": 40}
    head = train_head(
        section,
        target,
        answer_prompts(target, prompts, LIMIT, (0.0, 1.0)),
        steps=4,
    )
    texts = answer_prompts(target, prompts[1:2], 3, (1.0,))
    # a slot reads token i + 1 and predicts token i + 2
    slot = int(texts.loss_mask.nonzero()[0]) - 2
    target_hidden = texts.select_taps((-1,))[slot + 1, 0]
    probs = target.head.logits(target_hidden).softmax(-1)
    mean = 0.0
    for token, prob in enumerate(probs.tolist()):
        texts.tokens[slot + 2] = token
        figures = measure(
            Wiring(head, target.head, levels=1),
            texts,
            target.head,
        )
        mean += prob * float(figures.sampled_accepted[0, 0])
    assert mean == pytest.approx(
        float(figures.overlap[0, 0]),
        abs=1e-5,
    )
