"""How near a tie is at which two answers part: the gap between two tokens, counted in units of the last place."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from eagle import Sampling, Target
from eagle.core.arguments import token_ids
from eagle.core.noise import Noise
from eagle.target.bits.near_ties import first_difference, last_place, measure_tie
from eagle.target.talk import inputs_of
from tests import vision_families
from tests.families import build, own_logits, random_tokens


def test_answers_part_at_their_first_difference() -> None:
    """Or where the shorter one ends."""
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_last_place_is_the_distance_to_the_next_number(dtype: torch.dtype) -> None:
    """The bits of the dtype say which number is next."""
    integers = torch.int32 if dtype == torch.float32 else torch.int16
    for number in (1.0, 3.25, 14.0, 0.125):
        here = torch.tensor(number, dtype=dtype)
        above = (here.view(integers) + 1).view(dtype)
        assert last_place(number, dtype) == float(above.double() - here.double())


def expect_tie(logits: Any, scores: Any) -> Any:
    """Return the gap between tokens 20 and 31 in units of the last place of the larger logit in fp32."""
    largest = float(logits[[20, 31]].abs().max())
    unit = 2.0 ** (math.floor(math.log2(largest)) - 23)
    return pytest.approx(float((scores[20] - scores[31]).abs()) / unit, rel=1e-3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_gap_is_that_of_the_models_own_scores(temperature: float) -> None:
    """Of its logits, with the noise of the position above temperature 0."""
    model = build("llama")
    prompt = random_tokens(9, seed=1)
    sampling = Sampling(temperature, seed=5)
    tie = measure_tie(
        Target(model),
        prompt,
        [7, 8, 20, 4],
        [7, 8, 31],
        sampling=sampling,
    )

    logits = own_logits(model, [*prompt, 7, 8])[-1]
    scores = logits.clone()
    if temperature:
        scores += Noise(5, 0)([len(prompt) + 2], len(logits), logits.device)[0]
    assert tie == expect_tie(logits, scores)


def test_an_answer_that_goes_on_parts_at_no_tie() -> None:
    """There is no other token to compare."""
    assert measure_tie(Target(build("llama")), [3, 4, 5], [7, 8], [7, 8, 9]) is None


def test_images_of_the_prompt_are_read() -> None:
    """The gap is that of the model which sees them."""
    model = vision_families.build("llava")
    prompt = token_ids(vision_families.ask("llava", model, 1, 3))
    tie = measure_tie(Target(model), prompt, [7, 8, 20], [7, 8, 31])

    with torch.no_grad():
        logits = model(**inputs_of(model, prompt, [7, 8]), use_cache=False).logits[0, -1]

    assert tie == expect_tie(logits, logits)
