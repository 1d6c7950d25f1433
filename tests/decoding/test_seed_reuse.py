"""One seed and request for many answers, while drafters and policies remember: each keeps the target's distribution."""

# V vocabulary, N tokens looked at

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from eagle import Budget, Sampling, Target, generate
from eagle.core.drafter import Committed, Drafter, Noise
from eagle.core.trace import Cycle
from eagle.core.tree import DraftTree, chain_paths
from eagle.core.verify import Choose, warp
from eagle.decoding.goodput import Goodput
from eagle.drafters.lookup.bigram import BigramDrafter
from eagle.drafters.lookup.counts import Tables
from eagle.drafters.lookup.suffix import SuffixDrafter
from eagle.drafters.several import FirstOf
from tests.families import own_answer, own_logits

VOCAB_SIZE = 3
# the p-value below which a statistic is not believed to be chance
CHANCE = 1e-4
PLAIN = Sampling(temperature=1.0)
PROMPTS = [
    [1, 2, 0, 1],
    [2, 0, 1],
]
SAMPLED_LEVEL = Budget.fixed(chain_paths(1), "sampled")
SAMPLED_CHAIN = Budget.fixed(chain_paths(2), "sampled")


def make_target() -> Target:
    """Return a llama of one layer that knows three tokens and prefers none of them much."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        num_hidden_layers=1,
        hidden_size=8,
        intermediate_size=8,
        num_attention_heads=1,
        num_key_value_heads=1,
        bos_token_id=0,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    torch.nn.init.normal_(model.lm_head.weight, std=0.2)
    return Target(model)


@pytest.fixture(scope="module")
def target() -> Target:
    """Return that target, which counts how often each seed was used."""
    return make_target()


def make_bigram(counts: Tensor) -> BigramDrafter:
    """Return a drafter that samples by these counts [V, V] of a token after another."""
    tables = Tables(
        counts.sum(0),
        torch.arange(0, VOCAB_SIZE**2 + 1, VOCAB_SIZE),
        torch.arange(VOCAB_SIZE).repeat(VOCAB_SIZE),
        counts.flatten().clone(),
    )
    return BigramDrafter(tables)


def make_sampler() -> BigramDrafter:
    """Return a drafter that samples token 0 far more often than the target does."""
    return make_bigram(torch.tensor([95, 5, 5]).expand(VOCAB_SIZE, VOCAB_SIZE))


def compute_law(
    target: Target,
    prompt: list[int],
    count: int,
    sampling: Sampling,
) -> np.ndarray:
    """Return [V] * N, the joint distribution of the first tokens, by forwards over whole sequences."""
    # small enough that every answer can be enumerated
    law = np.ones([VOCAB_SIZE] * count)
    for tokens in np.ndindex(law.shape):
        logits = own_logits(target.model, [*prompt, *tokens])[len(prompt) - 1 : -1]
        probs = warp(logits.double(), sampling).softmax(-1)
        law[tokens] = probs[range(count), list(tokens)].prod().item()
    return law


# -- what is remembered knows nothing of coins ------------------------------------------------------------------------


class Copier(Drafter):
    """Draft token 0 if the second token of the answer before was token 0: what an earlier request's coins decided."""

    taps: tuple[int, ...] = ()

    def __init__(self, is_speaking: bool) -> None:
        self.is_speaking = is_speaking
        self.answer: list[int] = []

    def begin(self, noise: Noise | None = None) -> Any:
        """Remember one token of the last answer."""
        if len(self.answer) > 1:
            self.is_speaking = self.answer[1] == 0
        self.answer = []
        return self

    def propose(self, update: Committed, budget: Budget) -> DraftTree:
        """Return token 0, or nothing."""
        # the first update is the prompt, of which only the root is the answer's
        if self.answer:
            self.answer += update.tokens.tolist()[1:]
        self.answer.append(update.root)
        drafted = [0] if self.is_speaking and budget.depth else []
        return DraftTree.chain([update.root, *drafted])


# a drafter, and a policy or budget
State = Callable[[], tuple[Any, Any]]


def make_costly_policy() -> tuple[Any, Any]:
    """Return the shipped policy where a draft is so expensive that one rejection ends drafting for good."""
    return make_sampler(), Goodput(
        [0, 0.8],
        [1.0, 1.0],
        SAMPLED_LEVEL,
        share=0,
    )


def make_shipped() -> tuple[Any, Any]:
    """Return the shipped policy over the shipped lookup and a drafter that samples."""
    budget = Budget.fixed(chain_paths(3), "sampled")
    draft = [0.3 * level for level in range(4)]
    policy = Goodput(
        draft,
        [1.0] * 4,
        budget,
        share=1,
        memory=3,
    )
    return FirstOf([SuffixDrafter(remember=1000), make_sampler()]), policy


STATES: dict[str, State] = {
    "policy": make_costly_policy,
    "lookup after coins": lambda: (
        FirstOf([Copier(False), make_sampler()]),
        SAMPLED_LEVEL,
    ),
    "lookup after noise": lambda: (
        FirstOf([Copier(True), make_sampler()]),
        SAMPLED_LEVEL,
    ),
    "shipped": make_shipped,
}


def compute_p_values(
    target: Target,
    make_state: State,
    count: int,
) -> list[float]:
    """Return p-values of the second and third token of the second answer of each seed."""
    answers = []
    for seed in range(count):
        drafter, budget = make_state()
        for prompt in PROMPTS:
            sampling = Sampling(temperature=1.0, seed=seed)
            options: dict[str, Any] = {
                "budget": budget,
                "max_new_tokens": 5,
                "stop": [],
            }
            trace = generate(target, drafter, prompt, sampling=sampling, **options)
        answers.append(trace.tokens)
    law = compute_law(target, PROMPTS[-1], 3, PLAIN)
    p_values = []
    for position, joint in ((1, law.sum(2)), (2, law)):
        # each answer's distribution at this position, after the tokens before it
        laws = [joint[tuple(tokens[:position])] for tokens in answers]
        expected = sum(probs / probs.sum() for probs in laws)
        counts = np.bincount(
            [tokens[position] for tokens in answers],
            minlength=VOCAB_SIZE,
        )
        p_values.append(scipy.stats.chisquare(counts, expected).pvalue)
    return p_values


@pytest.mark.slow
@pytest.mark.parametrize("state", STATES)
def test_the_second_answer_of_a_seed_has_the_targets_law(state: str, target: Target) -> None:
    """The first answer decides how the second is drafted, and must not tell of the second one's coins."""
    assert min(compute_p_values(target, STATES[state], 300)) > CHANCE


class NoCount(Counter[tuple[int, int]]):
    """A count that is always at its first use."""

    def __getitem__(self, key: tuple[int, int]) -> int:
        return 1


@pytest.mark.slow
def test_coins_that_are_tossed_again_are_seen() -> None:
    """A planted fault: a target that does not count its requests."""
    target = make_target()

    def forget() -> tuple[Any, Any]:
        target.draws = NoCount()
        return STATES["lookup after coins"]()

    assert min(compute_p_values(target, forget, 300)) < CHANCE


# -- what repeats -----------------------------------------------------------------------------------------------------


def test_a_new_target_repeats_the_answers_of_the_first(target: Target) -> None:
    """The same requests in the same order give the same answers; other requests between them do not count."""
    drafter = make_sampler()
    options: dict[str, Any] = {
        "budget": SAMPLED_CHAIN,
        "max_new_tokens": 12,
        "stop": [],
    }

    def answer_three_times(between: list[Sampling]) -> list[list[int]]:
        # a target counts the uses of a seed
        fresh = Target(target.model)
        answers = []
        for _ in range(3):
            trace = generate(fresh, drafter, PROMPTS[0], sampling=PLAIN, **options)
            answers.append(trace.tokens)
            for sampling in between:
                generate(fresh, drafter, PROMPTS[1], sampling=sampling, **options)
        return answers

    first = answer_three_times([])
    assert len(set(map(tuple, first))) == 3
    others = [Sampling(), Sampling(temperature=1.0, request=3)]
    assert answer_three_times(others) == first


@pytest.mark.parametrize(
    "budget",
    [
        Budget.fixed(chain_paths(2)),
        Budget(4, 2, 2),
    ],
)
def test_answers_without_sampled_drafts_follow_the_seed_alone(
    budget: Budget, target: Target
) -> None:
    """They are the untouched model's under the request's noise, whatever was asked before."""
    options: dict[str, Any] = {
        "sampling": PLAIN,
        "max_new_tokens": 12,
        "stop": [],
    }
    # uses the seed once
    generate(target, make_sampler(), PROMPTS[0], budget=SAMPLED_CHAIN, **options)
    trace = generate(
        target,
        make_sampler(),
        PROMPTS[0],
        budget=budget,
        **options,
    )
    noise = Choose(PLAIN).noise
    assert noise is not None

    def noise_at(position: int) -> Tensor:
        return noise([position], VOCAB_SIZE, target.device)[0]

    assert trace.tokens == own_answer(
        target.model,
        PROMPTS[0],
        12,
        warp=None,
        noise=noise_at,
    )


class ChangingPolicy:
    """A policy whose budgets sample in one way after the other."""

    nodes = 2

    def __init__(self, draws: list[Any]) -> None:
        self.draws = iter(draws)

    def within(self, levels: int) -> Budget:
        """Return the next budget."""
        return Budget.fixed(chain_paths(2), next(self.draws)).within(levels)

    def learn(self, cycle: Cycle) -> None:
        """Learn nothing."""


@pytest.mark.parametrize(
    ("draws", "message"),
    [
        (["noise", "sampled"], "asks for draw 'sampled', expected 'noise'"),
        (["noise", "noise", "likeliest"], "asks for draw 'likeliest'"),
        (["sampled"], "give it an attribute draw = 'sampled'"),
    ],
)
def test_a_policy_that_changes_its_way_of_sampling_is_refused(
    draws: list[Any],
    message: str,
    target: Target,
) -> None:
    """Within a request, or from what a policy announces."""
    options: dict[str, Any] = {
        "sampling": PLAIN,
        "max_new_tokens": 20,
        "stop": [],
    }
    with pytest.raises(ValueError, match=message):
        generate(
            target,
            make_sampler(),
            PROMPTS[0],
            budget=ChangingPolicy(draws),
            **options,
        )
