"""Many texts side by side: every row is the untouched model's own answer, whatever stands beside it, comes or goes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle import Sampling, Trace, generate, stream
from eagle.core.verify import Choose
from eagle.decoding.loop import Decoding
from eagle.drafters.lookup.ngram import NgramDrafter
from eagle.drafters.none import NoDrafter
from eagle.target.attention import Masks
from eagle.target.cache import TreeCache
from eagle.target.state import TargetState
from tests.batches import MAKE, REMEMBERS, Bench, KnowsAnswers, Request, add
from tests.families import FAMILIES, own_answer, own_logits, random_tokens

QUICK = [
    "llama",
    "qwen2-sliding",
    "mistral-sliding",
    "gemma2",
    "gemma3",
    "gpt_oss",
    "phi3",
    "qwen3_moe",
    "gpt2",
    "opt",
]
QUICK += ["gpt_neox", "deepseek_v3", "cohere"]
bench = cache(Bench)


def assert_equal(
    bench: Bench, kind: str, requests: list[Request], batch_size: int, dice: Any = None
) -> Counter[str]:
    """All rows of a batch answer as they must, and cycle by cycle as alone; how much was compared."""
    traces = bench.run(MAKE[kind](bench.target, requests), requests, batch_size, dice)
    assert [trace.tokens for trace in traces] == [request.answer for request in requests]
    if kind not in REMEMBERS:
        drafter = MAKE[kind](bench.target, requests)
        for trace, request in zip(traces, requests, strict=True):
            beside = drafter
            if isinstance(drafter, KnowsAnswers):  # which goes by the row's number
                beside = KnowsAnswers(
                    [Request(request.prompt, {}, 1, 0, request.answer)],
                    drafter.chains,
                    drafter.taps,
                )
                beside.seeds = {0: request.number}
            assert bench.run_alone(beside, request).cycles == trace.cycles
    rows = [cycle.rows for trace in traces for cycle in trace.cycles]
    assert max(rows, default=1) <= batch_size
    counts = {
        "texts": len(traces),
        "tokens": sum(len(trace.tokens) for trace in traces),
        "cycles": len(rows),
    }
    return Counter(
        counts,
        shared=sum(count > 1 for count in rows),
        accepted=sum(cycle.accepted for trace in traces for cycle in trace.cycles),
    )


@pytest.mark.quick("llama", "gpt2", "opt")
@pytest.mark.parametrize("name", QUICK)
def test_every_row_is_the_untouched_models_own(name: str) -> None:
    """Ragged prompts, samplings and limits in one batch, with drafts of every kind."""
    place, kinds = QUICK.index(name), [kind for kind in MAKE if kind != "none"]
    requests = bench(name).requests(8, seed=place)
    for step in range(2):
        kind, batch_size = kinds[(2 * place + step) % len(kinds)], 2 + (3 * place + 4 * step) % 7
        counts = assert_equal(
            bench(name), kind, requests, batch_size, random.Random(place) if step else None
        )
        assert counts["shared"] > 5


CASES = [(name, torch.float32) for name in FAMILIES] + [(name, torch.float64) for name in QUICK[:3]]
EVERY = [
    pytest.param(*case, marks=[pytest.mark.long] * (place % 2)) for place, case in enumerate(CASES)
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"), EVERY, ids=lambda value: str(value).removeprefix("torch.")
)
def test_every_family_with_every_drafter(name: str, dtype: torch.dtype) -> None:
    """The same for all of them, batches of 1 to 8, texts at once and coming in at random."""
    own, total, dice = Bench(name, dtype), Counter[str](), random.Random(name)
    for seed, (kind, at_once) in enumerate(product(MAKE, (True, False))):
        if at_once:
            requests = own.requests(6, seed=seed)
        total += assert_equal(own, kind, requests, 1 + (5 * seed) % 8, None if at_once else dice)
    print(f"{name} {dtype}: {dict(total)}")


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5), st.sampled_from([None, 96, 150, 250]))
def test_any_schedule_leaves_every_row_right(seed: int, batch_size: int, most: int | None) -> None:
    """Texts that come at any step, in caches of any size, beside a second decoding that is abandoned at some step."""
    own, requests, dice = bench("llama"), schedule_requests(), random.Random(seed)
    drafter = KnowsAnswers(requests, taps=(0, -1))
    decodings = [
        Decoding(own.target, drafter, batch_size=batch_size, max_tokens_in_cache=most),
        Decoding(own.target, drafter, batch_size=3),
    ]
    written = [[Trace([]) for _ in requests] for _ in decodings]
    coming = [dice.sample(requests, len(requests)) for _ in decodings]
    left = dice.randrange(30)  # steps until the second one is abandoned
    while coming[0] or not decodings[0].is_done:
        turn = dice.randrange(2) if left else 0
        while coming[turn] and dice.random() < 0.4:
            add(decodings[turn], coming[turn].pop(), written[turn])
        for number, tokens in decodings[turn].step():
            assert tokens == written[turn][number].tokens[-len(tokens) :]
        if turn:
            left -= 1
            if not left:
                decodings[1].close()
    for trace, request in zip(written[0], requests, strict=True):
        assert trace.tokens == request.answer and trace.finish == "length"
    for trace, request in zip(written[1], requests, strict=True):
        assert trace.tokens == request.answer[: len(trace.tokens)]


@cache
def schedule_requests() -> list[Request]:
    """Six of them, with long and short prompts."""
    return bench("llama").requests(6, seed=3, longest=30, most=10)


def test_generate_and_stream_take_many_prompts() -> None:
    """In a list or padded in a tensor, with limits and samplings of their own; pieces come with their number."""
    own, prompts = bench("llama"), [random_tokens(count, seed=count) for count in (7, 3, 12, 1)]
    limits = [5, 9, 1, 7]
    expected = [
        own_answer(own.model, prompt, limit) for prompt, limit in zip(prompts, limits, strict=True)
    ]
    options: dict[str, Any] = {"max_new_tokens": limits, "stop": []}
    traces = generate(own.target, NgramDrafter(), prompts, **options)
    assert [(trace.prompt, trace.tokens) for trace in traces] == list(
        zip(prompts, expected, strict=True)
    )
    width = max(map(len, prompts))
    padded = {
        "input_ids": torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts]),
        "attention_mask": torch.tensor(
            [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        ),
    }
    for given_prompts in (
        padded,
        list(map(torch.tensor, prompts)),
        [{"input_ids": prompt} for prompt in prompts],
    ):
        pieces: list[list[int]] = [[] for _ in prompts]
        for number, tokens in stream(
            own.target, NgramDrafter(), given_prompts, batch_size=2, **options
        ):
            pieces[number] += tokens
        assert pieces == expected
    sampling = Sampling(temperature=1.0, seed=2, request=7)
    counted = generate(
        own.target, NoDrafter(), prompts, sampling=sampling, max_new_tokens=6, stop=[]
    )
    listed = [Sampling(temperature=1.0, seed=2, request=7 + number) for number in range(4)]
    given_each = generate(
        own.target, NoDrafter(), prompts, sampling=listed, max_new_tokens=6, stop=[], batch_size=3
    )
    for number, (prompt, one) in enumerate(zip(prompts, listed, strict=True)):
        alone = generate(own.target, NoDrafter(), prompt, sampling=one, max_new_tokens=6, stop=[])
        assert counted[number].tokens == given_each[number].tokens == alone.tokens
    assert generate(own.target, NoDrafter(), [], batch_size=2) == []


@pytest.mark.slow
def test_rows_end_at_stops_of_their_own_time() -> None:
    """One row ends, the others go on; what comes later takes its place."""
    own, prompts = bench("llama"), [random_tokens(9, seed=seed) for seed in range(6)]
    answers = [own_answer(own.model, prompt, 24) for prompt in prompts]
    stop = answers[0][4]
    expected = [
        answer[: answer.index(stop) + 1] if stop in answer else answer for answer in answers
    ]
    for batch_size in (1, 2, 4):
        traces = generate(
            own.target,
            NgramDrafter(),
            prompts,
            max_new_tokens=24,
            stop=[stop],
            batch_size=batch_size,
        )
        assert [trace.tokens for trace in traces] == expected
        assert [trace.finish for trace in traces] == [
            "stop" if answer[-1] == stop else "length" for answer in expected
        ]


# -- planted faults ---------------------------------------------------------------------------------------------------


def neighbours_offset(patch: pytest.MonkeyPatch) -> None:
    """A forward writes where another row's text ends."""
    set_write_offset = TreeCache.set_write_offset

    def wrong(self: TreeCache, slots: Any, starts: Any = None, *sizes: Any, **options: Any) -> None:
        set_write_offset(
            self, slots, None if starts is None else [*starts[1:], starts[0]], *sizes, **options
        )

    patch.setattr(TreeCache, "set_write_offset", wrong)


def slots_not_cut(patch: pytest.MonkeyPatch) -> None:
    """A text begins with what its slot held before."""
    patch.setattr(
        TargetState,
        "_shared",
        lambda self, slot, prompt: min(len(self.texts[slot]), len(prompt) - 1),
    )


def noise_shared(patch: pytest.MonkeyPatch) -> None:
    """All rows sample with the noise of the first request."""
    build = Choose.__init__

    def same(self: Choose, sampling: Sampling, *args: Any, **kwargs: Any) -> None:
        build(self, Sampling(temperature=sampling.temperature, seed=sampling.seed), *args, **kwargs)

    patch.setattr(Choose, "__init__", same)


def other_slot_kept(patch: pytest.MonkeyPatch) -> None:
    """What was accepted in one row moves in its neighbour's."""
    move = TreeCache._move

    def wrong(
        self: TreeCache, slots: torch.Tensor, origin: torch.Tensor, place: torch.Tensor
    ) -> None:
        move(self, (slots + 1) % len(self.lengths), origin, place)

    patch.setattr(TreeCache, "_move", wrong)


def padding_seen(patch: pytest.MonkeyPatch) -> None:
    """Nodes see the columns behind their row's own."""

    additive = Masks._additive

    def wrong(
        self: Masks, starts: Any, positions: torch.Tensor, seen: torch.Tensor, *more: Any
    ) -> torch.Tensor:
        mask = additive(self, starts, positions, seen, *more)
        for row, start in zip(mask, starts, strict=True):
            row[..., start + seen.shape[2] :] = 0
        return mask

    patch.setattr(Masks, "_additive", wrong)


def padding_nodes_seen(patch: pytest.MonkeyPatch) -> None:
    """Nodes of a small tree see the padding beside it."""
    call = Masks.__call__

    def wrong(
        self: Masks, starts: Any, positions: torch.Tensor, seen: torch.Tensor | None, *more: Any
    ) -> Any:
        if seen is not None and len(starts) > 1:
            padding = positions == torch.tensor(starts)[:, None]
            padding[:, 0] = False
            seen = seen | padding[:, None]
        return call(self, starts, positions, seen, *more)

    patch.setattr(Masks, "__call__", wrong)


def positions_of_the_longest(patch: pytest.MonkeyPatch) -> None:
    """Every row's tokens stand where the longest row's do."""
    forward = TargetState._forward

    def wrong(
        self: TargetState,
        slots: Any,
        tokens: Any,
        positions: torch.Tensor,
        *rest: Any,
        **options: Any,
    ) -> Any:
        return forward(
            self,
            slots,
            tokens,
            positions - positions[:, :1] + positions[:, 0].max(),
            *rest,
            **options,
        )

    patch.setattr(TargetState, "_forward", wrong)


def swaps_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A row takes the place of one that ended without its keys and values."""

    def wrong(self: TreeCache, one: int, other: int) -> None:
        self.lengths[one], self.lengths[other] = self.lengths[other], self.lengths[one]

    patch.setattr(TreeCache, "swap", wrong)


FAULTS: list[Callable[[pytest.MonkeyPatch], None]] = [
    neighbours_offset,
    slots_not_cut,
    noise_shared,
    other_slot_kept,
]
FAULTS += [padding_seen, padding_nodes_seen, positions_of_the_longest, swaps_forgotten]


@pytest.mark.quick("positions_of_the_longest-llama")
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above fails where batches are broken on purpose."""
    own, requests = bench(name), fault_requests(name)
    assert_equal(own, "trees", requests, 4)
    fault(monkeypatch)
    own.target.forget()
    traces: list[Trace] = []
    try:
        traces = own.run(MAKE["trees"](own.target, requests), requests, 4)
    except AssertionError as error:  # of the drafter, which knows the answers
        assert "has parted from its answer" in str(error)
    own.target.forget()
    assert [trace.tokens for trace in traces] != [request.answer for request in requests]


@cache
def fault_requests(name: str) -> list[Request]:
    """More than a batch holds, so that rows come and go."""
    return bench(name).requests(9, seed=2, longest=30, least=12)


# -- half precision ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "gemma3", "gpt2"])
def test_half_precision_differs_at_near_ties_alone(name: str) -> None:
    """bf16 rounds as a forward's sizes go: where a batch with drafts parts from one without, two logits nearly tie."""
    own, gaps, texts = Bench(name, torch.bfloat16), list[float](), 0
    for seed, batch_size in product(range(3), (2, 4, 8)):
        prompts = [
            random_tokens(3 + 7 * row % 50, seed=100 * seed + row) for row in range(batch_size)
        ]
        options: dict[str, Any] = {"max_new_tokens": 24, "stop": [], "batch_size": batch_size}
        plain = generate(own.target, NoDrafter(), prompts, **options)
        requests = [
            Request(trace.prompt, {}, 24, row, trace.tokens) for row, trace in enumerate(plain)
        ]
        for drafter in (NgramDrafter(), Forgiving(requests)):
            for trace, first in zip(
                generate(own.target, drafter, prompts, **options), plain, strict=True
            ):
                texts += 1
                if trace.tokens != first.tokens:
                    place = next(
                        step for step in range(24) if trace.tokens[step] != first.tokens[step]
                    )
                    logits = own_logits(own.model, [*trace.prompt, *first.tokens[:place]])[
                        -1
                    ].float()
                    chosen = logits[[first.tokens[place], trace.tokens[place]]]
                    gaps.append(float((logits.max() - chosen).max() / logits.std()))
    print(
        f"{name}: {len(gaps)} of {texts} texts part, at gaps of up to {max(gaps, default=0):.3f} standard deviations"
    )
    assert max(gaps, default=0) < 0.1


class Forgiving(KnowsAnswers):
    """Goes on planting where an answer has parted from the one that it knows."""

    def follows(self, row: int, tokens: list[int], root: int) -> bool:
        """Any text will do."""
        return True


@pytest.mark.slow
def test_choices_that_come_at_once_are_those_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator, whose choices for all texts are fetched together."""
    monkeypatch.setattr("eagle.core.verify._is_lazy", lambda output: False)
    assert (
        assert_equal(bench("llama"), "trees", bench("llama").requests(8, seed=3), 4)["shared"] > 5
    )
