"""A head can learn eight conversations by heart: everything between the text and the drafts is in line."""

from __future__ import annotations

import pytest
import torch

from eagle import Budget, Target, generate
from eagle.core.examples import Example, collate
from eagle.data.features import LiveFeatures
from eagle.drafters.none import NoDrafter
from eagle.drafters.recurrent.eagle1 import Eagle1
from tests.trained import fixture_seed

ASKED = [
    "What does copy do?",
    "Who are you?",
    "Name three colours of the sky.",
    "How do I sort a list in Python?",
    "Tell me a story about a dog.",
    "Why is the sea salt?",
    "Write a letter to my landlord.",
    "Is 17 a prime number?",
]
STEPS = 600
NEW_TOKENS = 61  # one from the prompt, then twelve steps at best


@pytest.mark.slow
@pytest.mark.long
def test_a_chain_of_four_is_nearly_always_right_on_what_was_learned(tiny_target: Target) -> None:
    """Trained on the target's own greedy answers, it keeps at least 4.75 of 5 tokens per step on their prompts."""
    prompts, examples = [tiny_target.chat(text) for text in ASKED], []
    for prompt in prompts:
        answer = generate(
            tiny_target, NoDrafter(), prompt, max_new_tokens=NEW_TOKENS, stop=[]
        ).tokens
        text = torch.tensor(prompt + answer)
        examples.append(Example(text, torch.arange(len(text)) >= len(prompt)))
    live = LiveFeatures(tiny_target, examples, {"taps": [-1], "dtype": "float32"})
    batch = collate(live.read(range(len(examples))), live.taps)

    torch.manual_seed(fixture_seed())
    head = Eagle1.for_target(Eagle1.Settings(noise=0.0), tiny_target.config).train()
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3, betas=(0.9, 0.95))
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 3e-3 * (1 - step / STEPS)
        optimizer.zero_grad()
        head(batch, tiny_target.head)["total"].backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 0.5)
        optimizer.step()

    head.bind(tiny_target.head)
    options = {"budget": Budget(4, 4, 1), "max_new_tokens": NEW_TOKENS, "stop": []}
    cycles = [
        cycle
        for prompt in prompts
        for cycle in generate(tiny_target, head, prompt, **options).cycles
    ]
    acceptance_length = sum(cycle.committed for cycle in cycles) / len(cycles)
    print(f"chain of 4: {acceptance_length:.3f} tokens per step")
    assert acceptance_length >= 4.75
