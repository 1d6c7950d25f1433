"""Half precision in every read mode: where a drafted answer parts from the model's own steps, two logits nearly tie.

A forward of many tokens rounds otherwise than one of a single token. How much a logit may then differ is a matter of
the dtype's precision and of the logits' size alone, so that no machine's rounding is in the rule.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle import Target
from tests.batches import KnowsAnswers, Request
from tests.every_type import VOCAB
from tests.families import RandomTrees, random_tokens
from tests.own_answers import cached_steps
from tests.target.decoded import decode_batch
from tests.target.trees.test_masks import build_small
from tests.target.trees.test_means import CHANGED
from tests.target.trees.test_means_faults import replay_one_short

# one of each read mode, and no layers that choose experts or columns: rounding may make them choose others
TYPES = ["gemma3_text", "bloom", "llama4_text", "moshi", "qwen3_5_text", "mamba"]
TYPES += ["nemotron_h", "gpt_neo", "roformer", "rwkv", "xlstm"]
CHANGED = CHANGED | {"llama4_text": {**CHANGED["llama4_text"], "moe_layers": []}}  # no experts
COUNT = 32
PROMPTS = [random_tokens(3 + 5 * i, seed=i) for i in range(6)]
MAX_ROUNDINGS = 8  # of a logit's precision that all layers together may add up to


class Forgiving(KnowsAnswers):
    """Goes on planting where an answer has parted from the one that it knows."""

    def follows(self, row: int, tokens: list[int], root: int) -> bool:
        """Accept any sequence."""
        return True


def decode_by_steps(model: Any, prompt: list[int]) -> tuple[list[int], list[Tensor]]:
    """Return the untouched model's answer by steps of one token, and its logits [V] at each of them."""
    read = cached_steps(model)
    sequence = list(prompt)
    logits: list[Tensor] = []

    for _ in range(COUNT):
        logits.append(read(sequence))
        sequence.append(int(logits[-1].argmax()))

    return sequence[len(prompt) :], logits


def measure_largest_gap(model: Any, target: Target) -> float:
    """Return the largest gap at which an answer parts from the model's own, in roundings of the largest logit."""
    steps = [decode_by_steps(model, prompt) for prompt in PROMPTS]
    requests = [
        Request(prompt, {}, COUNT, row, steps[row][0]) for row, prompt in enumerate(PROMPTS)
    ]
    worst = 0.0

    for drafter in (Forgiving(requests), RandomTrees([*range(VOCAB)])):
        for batch_size in (1, 3):
            answers = decode_batch(
                target,
                drafter,
                PROMPTS,
                COUNT,
                batch_size=batch_size,
            )
            for answer, (expected, rows) in zip(answers, steps, strict=True):
                parted = [i for i in range(COUNT) if answer[i] != expected[i]]
                if not parted:
                    continue
                # after the first difference the sequences are different ones
                first = parted[0]
                logits = rows[first].float()
                gap = logits[expected[first]] - logits[answer[first]]
                rounding = torch.finfo(model.dtype).eps * logits.abs().max()
                worst = max(worst, float(gap / rounding))

    return worst


@pytest.mark.slow
@pytest.mark.not_long("gemma3_text", "qwen3_5_text", "gpt_neo")
@pytest.mark.parametrize("model_type", TYPES)
def test_answers_part_only_at_near_ties(model_type: str) -> None:
    """Known and random trees, alone and in batches of three."""
    model = build_small(model_type, **CHANGED.get(model_type, {})).bfloat16()
    target = Target(copy.deepcopy(model))
    assert measure_largest_gap(model, target) <= MAX_ROUNDINGS
    # rounding must not hide that this model counts positions by its cache
    assert model_type != "llama4_text" or "offsets" in target.describe()


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "mamba"])
def test_a_wrong_state_is_no_near_tie(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: states that lack a token part at larger gaps than rounding explains."""
    model = build_small(model_type).bfloat16()
    target = Target(copy.deepcopy(model))
    target.describe()
    replay_one_short(monkeypatch)
    assert measure_largest_gap(model, target) > MAX_ROUNDINGS
