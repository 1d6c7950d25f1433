"""Half precision by every means: where a drafted answer parts from the model's own steps, two logits nearly tie.

A forward of many tokens rounds otherwise than one of a single token. How much a logit may then differ is a matter of
the dtype's precision and of the logits' size alone, so that no machine's rounding is in the rule.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle import Target, generate
from tests.batches import KnowsAnswers, Request
from tests.every_type import VOCAB
from tests.families import RandomTrees, random_tokens
from tests.own_answers import cached_steps
from tests.target.test_masks import build_small
from tests.target.test_means import CHANGED
from tests.target.test_means_faults import replay_one_short

# one of each means, and no layers that choose experts or columns: rounding may make them choose others
TYPES = [
    *[
        "gemma3_text",
        "bloom",
        "llama4_text",
        "roberta",
        "moshi",
        "qwen3_5_text",
        "mamba2",
        "lfm3",
        "mamba",
    ],
    *["nemotron_h", "gpt_neo", "roformer", "rwkv", "xlstm"],
]
COUNT, PROMPTS = 32, [random_tokens(3 + 5 * number, seed=number) for number in range(6)]
ROUNDINGS = 8  # of a logit's precision that all layers together may come to


class Forgiving(KnowsAnswers):
    """Goes on planting where an answer has parted from the one that it knows."""

    def follows(self, row: int, tokens: list[int], root: int) -> bool:
        """Any text will do."""
        return True


def step_own(model: Any, prompt: list[int]) -> tuple[list[int], list[Tensor]]:
    """The untouched model's answer by steps of one token, and its logits [V] at each of them."""
    read = cached_steps(model)
    text, rows = list(prompt), list[Tensor]()
    for _ in range(COUNT):
        rows.append(read(text))
        text.append(int(rows[-1].argmax()))
    return text[len(prompt) :], rows


def compare(model: Any, target: Target) -> tuple[Counter[str], float]:
    """How much was compared, and the largest gap at a first difference, in roundings of the largest logit."""
    own = [step_own(model, prompt) for prompt in PROMPTS]
    requests = [Request(prompt, {}, COUNT, row, own[row][0]) for row, prompt in enumerate(PROMPTS)]
    total, worst = Counter[str](), 0.0
    for drafter in (Forgiving(requests), RandomTrees([*range(VOCAB)])):
        for batch_size in (1, 3):
            traces = generate(
                target, drafter, PROMPTS, max_new_tokens=COUNT, stop=[], batch_size=batch_size
            )
            for trace, (answer, rows) in zip(traces, own, strict=True):
                pairs = enumerate(zip(trace.tokens, answer, strict=True))
                place = next(
                    (step for step, (token, expected) in pairs if token != expected), COUNT
                )
                total += Counter(texts=1, parted=place < COUNT, equal=place)
                if place < COUNT:
                    logits = rows[place].float()
                    gap = float(logits[answer[place]] - logits[trace.tokens[place]])
                    worst = max(
                        worst, gap / (torch.finfo(model.dtype).eps * float(logits.abs().max()))
                    )
    return total, worst


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=[pytest.mark.long] * (number % 3 > 0))
        for number, name in enumerate(TYPES)
    ],
)
def test_answers_part_at_near_ties_alone(model_type: str) -> None:
    """Known and random trees, alone and three texts at a time."""
    model = build_small(model_type, **CHANGED.get(model_type, {})).bfloat16()
    target = Target(copy.deepcopy(model))
    total, worst = compare(model, target)
    print(f"{model_type}, {target.describe()}: {dict(total)}, gaps up to {worst:.2f} roundings")
    assert worst <= ROUNDINGS
    assert (
        model_type != "llama4_text" or "offsets" in target.describe()
    )  # rounding must not hide that it counts


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "mamba"])
def test_a_wrong_state_is_no_near_tie(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """States that lack a token part at larger gaps than rounding."""
    model = build_small(model_type).bfloat16()
    target = Target(copy.deepcopy(model))
    target.describe()
    replay_one_short(monkeypatch)
    assert compare(model, target)[1] > ROUNDINGS
