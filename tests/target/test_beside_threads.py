"""What a target finds out about a model changes nothing that another thread reads of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import Any

import pytest
import torch

from eagle import Target, generate
from eagle.drafters.lookup.ngram import NgramDrafter
from eagle.transformers import generate_with
from tests.families import build, own_answer, random_tokens

PROMPT = random_tokens(20, seed=7)  # longer than the windows of these families
FAMILIES = ["mistral-sliding", "gemma3", "llama-rope-yarn", "gpt_oss"]


@contextmanager
def frequent_switches() -> Iterator[None]:
    """Let threads take turns after a few instructions, so that a state in between is met."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.quick("llama-rope-yarn")
@pytest.mark.parametrize("family", FAMILIES)
def test_stock_answers_beside_a_first_call_are_the_models_own(family: str) -> None:
    """The windows that a probe lowers are those of a copy."""
    model = build(family)
    expected, ended = own_answer(model, PROMPT, 4), Event()

    def probe() -> None:
        try:
            for _ in range(2):
                generate(Target(model), NgramDrafter(), PROMPT, max_new_tokens=2, stop=[])
        finally:
            ended.set()

    with frequent_switches(), ThreadPoolExecutor(1) as threads:
        probing = threads.submit(probe)
        answers = []
        while not ended.is_set():
            answers.append(own_answer(model, PROMPT, 4))
        probing.result()
    assert answers and all(answer == expected for answer in answers)


def test_first_calls_of_several_threads_make_one_target() -> None:
    """All of them answer as the model does."""
    model: Any = build("llama")
    prompt = torch.tensor([PROMPT])
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(prompt, **options).tolist()
    with frequent_switches(), ThreadPoolExecutor(6) as threads:
        drafted = generate_with("ngram")
        calls = [
            threads.submit(model.generate, prompt, custom_generate=drafted, **options)
            for _ in range(6)
        ]
        answers = [call.result().tolist() for call in calls]
    assert answers == [expected] * 6
