"""Many sequences in a batch: each answer is the untouched model's own, whatever else comes and goes."""

from __future__ import annotations

import random
from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle import Sampling, Trace, generate, stream
from eagle.decoding.loop import Decoding
from eagle.drafters.lookup.ngram import NgramDrafter
from eagle.drafters.none import NoDrafter
from eagle.target.cache import TreeCache
from tests.batches import MAKE, REMEMBERS, Bench, KnowsAnswers, Request, add
from tests.families import own_answer, random_tokens

# positions by rotary tables or learned; windows, experts, latent attention; logits that are scaled or capped
FAMILIES = [
    "llama",
    "gpt2",
    "opt",
    "mistral-sliding",
    "gemma2",
    "gemma3",
    "gpt_oss",
    "gpt_neox",
    "deepseek_v3",
]
KINDS = [kind for kind in MAKE if kind != "none"]
make_bench = cache(Bench)


def check_batch(
    bench: Bench,
    kind: str,
    requests: list[Request],
    batch_size: int,
    dice: Any = None,
) -> None:
    """Check that all rows answer as they must, and draft cycle by cycle as alone."""
    drafter = MAKE[kind](bench.target, requests)
    # run checks the size of batch and cache after every step
    traces = bench.run(drafter, requests, batch_size, dice)
    assert [trace.tokens for trace in traces] == [request.answer for request in requests]
    rows = [cycle.rows for trace in traces for cycle in trace.cycles]
    # several forwards were for more than one sequence
    assert sum(count > 1 for count in rows) > 5
    assert max(rows) <= batch_size
    if kind in REMEMBERS:
        return
    for trace, request in zip(traces, requests, strict=True):
        # the drafts of a row may not depend on the other rows
        alone = MAKE[kind](bench.target, requests)
        # this drafter goes by the row's number, which is 0 for a request alone
        if isinstance(alone, KnowsAnswers):
            alone.texts[0] = [*request.prompt, *request.answer]
            alone.seeds[0] = request.number
        assert bench.run_alone(alone, request).cycles == trace.cycles


@pytest.mark.quick("llama", "gpt2", "opt")
@pytest.mark.parametrize("name", FAMILIES)
def test_every_row_is_the_untouched_models_own(name: str) -> None:
    """Ragged prompts, samplings and limits in one batch, all at once or coming in at random."""
    bench = make_bench(name)
    index = FAMILIES.index(name)
    requests = bench.requests(8, seed=index)
    # all drafters take turns over the families
    first = KINDS[2 * index % len(KINDS)]
    second = KINDS[(2 * index + 1) % len(KINDS)]
    check_batch(bench, first, requests, batch_size=2 + 3 * index % 7)
    check_batch(
        bench,
        second,
        requests,
        batch_size=4,
        dice=random.Random(index),
    )


@pytest.mark.slow
def test_choices_that_come_at_once_are_those_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the choices of all sequences are fetched together."""
    monkeypatch.setattr("eagle.core.verify._is_lazy", lambda output: False)
    bench = make_bench("llama")
    check_batch(
        bench,
        "trees",
        bench.requests(8, seed=3),
        batch_size=4,
    )


def test_a_planted_fault_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that takes the row of one that ended leaves its keys and values behind."""

    def swap_lengths(cache: TreeCache, one: int, other: int) -> None:
        lengths = cache.lengths
        lengths[one], lengths[other] = lengths[other], lengths[one]

    bench = Bench("llama")
    # more than a batch holds, so that rows come and go
    requests = bench.requests(9, seed=2, longest=30, least=12)
    monkeypatch.setattr(TreeCache, "swap", swap_lengths)
    drafter = MAKE["ngram"](bench.target, requests)
    traces = bench.run(drafter, requests, 4)
    assert [trace.tokens for trace in traces] != [request.answer for request in requests]


@cache
def schedule_requests() -> list[Request]:
    """Return six requests with long and short prompts."""
    return make_bench("llama").requests(
        6,
        seed=3,
        longest=30,
        most=10,
    )


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    batch_size=st.integers(1, 5),
    limit=st.sampled_from([None, 96, 150, 250]),
)
def test_any_schedule_leaves_every_row_right(seed: int, batch_size: int, limit: int | None) -> None:
    """Requests come at any step, while a second decoding on the same target is abandoned at some step."""
    target = make_bench("llama").target
    requests = schedule_requests()
    dice = random.Random(seed)
    drafter = KnowsAnswers(requests, taps=(0, -1))
    decodings = [
        Decoding(target, drafter, batch_size=batch_size, max_tokens_in_cache=limit),
        Decoding(target, drafter, batch_size=3),
    ]
    traces = [[Trace([]) for _ in requests] for _ in decodings]
    waiting = [dice.sample(requests, len(requests)) for _ in decodings]
    # steps until the second one is abandoned
    left = dice.randrange(30)
    while waiting[0] or not decodings[0].is_done:
        turn = dice.randrange(2) if left else 0
        while waiting[turn] and dice.random() < 0.4:
            add(
                decodings[turn],
                waiting[turn].pop(),
                traces[turn],
            )
        for row, tokens in decodings[turn].step():
            assert tokens == traces[turn][row].tokens[-len(tokens) :]
        left -= turn
        if turn and not left:
            decodings[1].close()
    for whole, cut, request in zip(*traces, requests, strict=True):
        assert whole.finish == "length"
        assert whole.tokens == request.answer
        assert cut.tokens == request.answer[: len(cut.tokens)]


PROMPTS = [random_tokens(length, seed=length) for length in (7, 3, 12, 1)]
WIDTH = 12
PADDED = {
    "input_ids": torch.tensor([[0] * (WIDTH - len(prompt)) + prompt for prompt in PROMPTS]),
    "attention_mask": torch.tensor(
        [[0] * (WIDTH - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS]
    ),
}


@pytest.mark.parametrize(
    "prompts",
    [
        PROMPTS,
        PADDED,
        [torch.tensor(prompt) for prompt in PROMPTS],
        [{"input_ids": prompt} for prompt in PROMPTS],
    ],
    ids=["lists", "padded", "tensors", "encodings"],
)
def test_generate_and_stream_take_many_prompts(prompts: Any) -> None:
    """With a limit for each; what is streamed comes with the number of its prompt."""
    bench = make_bench("llama")
    limits = [5, 9, 1, 7]
    answers = list(map(partial(own_answer, bench.model), PROMPTS, limits))
    options: dict[str, Any] = {
        "max_new_tokens": limits,
        "stop": [],
        "batch_size": 2,
    }
    traces = generate(bench.target, NgramDrafter(), prompts, **options)
    assert [trace.prompt for trace in traces] == PROMPTS
    assert [trace.tokens for trace in traces] == answers
    streamed: list[list[int]] = [[] for _ in PROMPTS]
    for row, tokens in stream(bench.target, NgramDrafter(), prompts, **options):
        streamed[row] += tokens
    assert streamed == answers
    assert generate(bench.target, NgramDrafter(), [], batch_size=2) == []


def test_requests_are_counted_from_the_samplings_own() -> None:
    """One sampling for all prompts, one for each, and each prompt alone give the same answers."""
    target = make_bench("llama").target
    answer = partial(
        generate,
        target,
        NoDrafter(),
        max_new_tokens=6,
        stop=[],
    )
    first = Sampling(temperature=1.0, seed=2, request=7)
    samplings = [Sampling(temperature=1.0, seed=2, request=7 + row) for row in range(4)]
    # noise is a function of seed, request and position
    counted = answer(PROMPTS, sampling=first)
    listed = answer(PROMPTS, sampling=samplings, batch_size=3)
    for row, sampling in enumerate(samplings):
        alone = answer(PROMPTS[row], sampling=sampling)
        assert counted[row].tokens == alone.tokens
        assert listed[row].tokens == alone.tokens


@pytest.mark.parametrize("batch_size", [1, 4])
def test_rows_end_at_stops_of_their_own_time(batch_size: int) -> None:
    """One row ends, the others go on, and the next prompt takes its row."""
    bench = make_bench("llama")
    prompts = [random_tokens(9, seed=seed) for seed in range(6)]
    answers = [own_answer(bench.model, prompt, 24) for prompt in prompts]
    stop = answers[0][4]
    drafter = NgramDrafter()
    traces = generate(
        bench.target, drafter, prompts, max_new_tokens=24, stop=[stop], batch_size=batch_size
    )
    for trace, answer in zip(traces, answers, strict=True):
        if stop in answer:
            assert trace.tokens == answer[: answer.index(stop) + 1]
            assert trace.finish == "stop"
        else:
            assert trace.tokens == answer
            assert trace.finish == "length"
