"""One seed and request for many answers, while drafters and policies remember: every answer keeps the target's law."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eagle import Budget, Sampling, Target, generate
from eagle.core.drafter import Committed, Drafter, Noise
from eagle.core.trace import Cycle
from eagle.core.tree import DraftTree, chain_paths
from eagle.core.verify import Choose
from eagle.decoding.goodput import Goodput
from eagle.drafters.lookup.bigram import BigramDrafter
from eagle.drafters.lookup.counts import Tables
from eagle.drafters.lookup.suffix import SuffixDrafter
from eagle.drafters.several import FirstOf
from tests.families import own_answer, own_logits

V, CHANCE = 3, 1e-4
State = Callable[[], tuple[Any, Any, int]]  # drafter, policy, tokens of an answer
PROMPTS = ([1, 2, 0, 1], [2, 0, 1])


@pytest.fixture(scope="module")
def target() -> Target:
    """A llama of one layer that knows three tokens and prefers none of them much."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
    }
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=V, num_hidden_layers=1, bos_token_id=0, eos_token_id=None, **sizes)
    )
    torch.nn.init.normal_(model.lm_head.weight, std=0.2)
    return Target(model)


def drawing_drafter() -> BigramDrafter:
    """Draws token 0 far more often than the target chooses it."""
    counts = torch.tensor([95, 5, 5]).expand(V, V)
    tables = Tables(
        counts.sum(0),
        torch.arange(0, V * V + 1, V),
        torch.arange(V).repeat(V),
        counts.flatten().clone(),
    )
    return BigramDrafter(tables)


def joint_probs(target: Target, prompt: list[int], tokens: int) -> np.ndarray:
    """The joint law of an answer's first tokens, from forwards over whole texts."""
    law = np.ones([V] * tokens)
    for text in np.ndindex(law.shape):
        probs = (
            own_logits(target.model, [*prompt, *text])[len(prompt) - 1 : -1].double().softmax(-1)
        )
        law[text] = probs[range(tokens), list(text)].prod().item()
    return law


def answers(
    target: Target, count: int, state: State, prompts: tuple[list[int], ...]
) -> Iterator[tuple]:
    """The last answer of each of so many series, whose requests share a seed and what they remember."""
    for seed in range(count):
        drafter, policy, tokens = state()
        for prompt in prompts:
            options: dict[str, Any] = {"budget": policy, "max_new_tokens": tokens, "stop": []}
            trace = generate(
                target, drafter, prompt, sampling=Sampling(temperature=1.0, seed=seed), **options
            )
        yield tuple(trace.tokens)


def p_value(last_answers: list[tuple], law: np.ndarray) -> float:
    """The p-value of the answers' tokens of the law's last place, each after what came before it."""
    *_, last = law.shape
    expected = sum(
        law[tokens[: law.ndim - 1]] / law[tokens[: law.ndim - 1]].sum() for tokens in last_answers
    )
    counts = np.bincount([tokens[law.ndim - 1] for tokens in last_answers], minlength=last)
    return scipy.stats.chisquare(counts, expected).pvalue


def in_one_level() -> tuple[Any, Any, int]:
    """The shipped policy where a draft is so dear that one rejection ends drafting for good."""
    return (
        drawing_drafter(),
        Goodput([0, 0.8], [1.0, 1.0], Budget.fixed(chain_paths(1), "sampled"), share=0),
        4,
    )


class Copier(Drafter):
    """Speaks where the second token of the answer before was token 0, and in the first answer if it is told to."""

    taps: tuple[int, ...] = ()

    def __init__(self, speaks: bool) -> None:
        self.speaks, self.answer = speaks, list[int]()

    def begin(self, noise: Noise | None = None) -> Any:
        """Remember one token."""
        if len(self.answer) > 1:
            self.speaks = self.answer[1] == 0
        self.answer = []
        return self

    def propose(self, update: Committed, budget: Budget) -> DraftTree:
        """Token 0, or nothing."""
        self.answer += [*update.tokens.tolist()[1:], update.root] if self.answer else [update.root]
        return DraftTree.chain([update.root, *([0] if self.speaks and budget.depth else [])])


def in_turn(speaks: bool) -> tuple[Any, Any, int]:
    """Lookup before a drafter that draws."""
    return FirstOf([Copier(speaks), drawing_drafter()]), Budget.fixed(chain_paths(1), "sampled"), 5


SERIES = [  # of one prompt fewer are fast
    pytest.param(PROMPTS[:1] * 2, marks=pytest.mark.long, id="one prompt"),
    pytest.param(PROMPTS, id="two prompts"),
]
STATES = {
    "a policy that saw the coins": in_one_level,
    "a lookup that saw the coins": lambda: in_turn(False),
    "a lookup that saw the noise": lambda: in_turn(True),
}


@pytest.mark.slow
@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_the_second_answer_of_a_seed_has_the_targets_law(state: State, target: Target) -> None:
    """What was remembered of the first decides how the second is drafted, and must know nothing of its coins."""
    last_answers = list(answers(target, 180, state, PROMPTS[:1] * 2))
    assert p_value(last_answers, joint_probs(target, PROMPTS[0], 2)) > CHANCE


@pytest.mark.slow
def test_coins_that_are_tossed_again_are_seen(target: Target) -> None:
    """Planted: a target that does not count its requests."""

    def forgetful() -> tuple[Any, Any, int]:
        target.draws = NoCount()
        return in_turn(False)

    last_answers = list(answers(target, 180, forgetful, PROMPTS[:1] * 2))
    target.draws = Counter()
    assert p_value(last_answers, joint_probs(target, PROMPTS[0], 2)) < CHANCE


class NoCount(Counter[tuple[int, int]]):
    """Always at its first."""

    def __getitem__(self, key: tuple[int, int]) -> int:
        return 1


@pytest.mark.slow
@pytest.mark.parametrize("prompts", SERIES)
@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_other_prompts_have_the_targets_law_too(state: State, prompts: Any, target: Target) -> None:
    """More of the same, and with a second prompt whose places are not the first one's."""
    last_answers = list(answers(target, 300, state, prompts))
    assert (
        min(p_value(last_answers, joint_probs(target, prompts[-1], place)) for place in (2, 3))
        > CHANCE
    )


def lively() -> tuple[Any, Any, int]:
    """The shipped policy over the shipped lookup and a drafter that draws."""
    budget = Budget.fixed(chain_paths(3), "sampled")
    policy = Goodput([0.3 * level for level in range(4)], [1.0] * 4, budget, share=1, memory=3)
    return FirstOf([SuffixDrafter(remember=1000), drawing_drafter()]), policy, 6


@pytest.mark.slow
@pytest.mark.parametrize("prompts", SERIES)
def test_shipped_memories_bend_no_law(prompts: Any, target: Target) -> None:
    """The same of what the package ships, in longer answers."""
    last_answers = list(answers(target, 500, lively, prompts))
    assert (
        min(p_value(last_answers, joint_probs(target, prompts[-1], place)) for place in range(2, 6))
        > CHANCE
    )


def test_a_fresh_target_repeats_what_the_first_one_drew(target: Target) -> None:
    """The same requests in the same order give the same answers; other requests between them do not count."""
    sampling, drafter, budget = (
        Sampling(temperature=1.0),
        drawing_drafter(),
        Budget.fixed(chain_paths(2), "sampled"),
    )
    options: dict[str, Any] = {"budget": budget, "max_new_tokens": 12, "stop": []}
    series = []
    for between in (False, True):
        fresh = Target(target.model)
        series.append([])
        for _ in range(3):
            series[-1].append(
                generate(fresh, drafter, PROMPTS[0], sampling=sampling, **options).tokens
            )
            if between:
                generate(fresh, drafter, PROMPTS[1], **options)
                generate(
                    fresh,
                    drafter,
                    PROMPTS[1],
                    sampling=Sampling(temperature=1.0, request=3),
                    **options,
                )
    assert series[0] == series[1] and len(set(map(tuple, series[0]))) == 3


def test_answers_that_nothing_was_drawn_for_repeat(target: Target) -> None:
    """Choose and walk follows seed and request alone, whatever was asked before."""
    sampling = Sampling(temperature=1.0)
    traces = [
        generate(
            target,
            drawing_drafter(),
            PROMPTS[0],
            sampling=sampling,
            max_new_tokens=12,
            stop=[],
            budget=budget,
        )
        for budget in (
            Budget.fixed(chain_paths(2)),
            Budget.fixed(chain_paths(2), "sampled"),
            Budget(4, 2, 2),
        )
    ]
    assert traces[0].tokens == traces[2].tokens
    noise = Choose(sampling).noise
    assert noise is not None
    expected = own_answer(
        target.model, PROMPTS[0], 12, None, lambda at: noise([at], V, target.device)[0]
    )
    assert traces[0].tokens == expected


class Moody(Drafter):
    """A policy whose budgets draw in one way after the other."""

    nodes = 2

    def __init__(self, *draws: Any) -> None:
        self.draws = iter(draws)

    def within(self, levels: int) -> Budget:
        """The next one."""
        return Budget.fixed(chain_paths(2), next(self.draws)).within(levels)

    def learn(self, cycle: Cycle) -> None:
        """Nothing."""


def test_a_policy_keeps_to_one_way_of_drawing(target: Target) -> None:
    """One that changes it within a request, or draws by lot unannounced, is refused."""
    options: dict[str, Any] = {
        "sampling": Sampling(temperature=1.0),
        "max_new_tokens": 20,
        "stop": [],
    }
    for draws in (("noise", "sampled"), ("noise", "noise", "likeliest")):
        with pytest.raises(
            ValueError, match=rf"asks for draw '{draws[-1]}', expected 'noise' in the whole request"
        ):
            generate(target, drawing_drafter(), PROMPTS[0], budget=Moody(*draws), **options)
    with pytest.raises(
        ValueError, match=r"without saying so beforehand: give it an attribute draw = 'sampled'"
    ):
        generate(target, drawing_drafter(), PROMPTS[0], budget=Moody("sampled"), **options)
    generate(target, drawing_drafter(), PROMPTS[0], budget=Moody(*["likeliest"] * 20), **options)
