"""Rows whose positions depend on what stands beside them are read apart; caches hold no more than they may."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle import Sampling, Target, Trace, generate
from eagle.core.tree import DraftTree
from eagle.core.verify import Choose
from eagle.decoding.loop import Decoding
from eagle.drafters.lookup.ngram import NgramDrafter
from eagle.drafters.none import NoDrafter
from eagle.target.slots import LEAST
from tests.batches import Bench, KnowsAnswers, Request, allocated
from tests.families import FAMILIES, VOCAB_SIZE, build, own_answer, random_tokens

GREEDY = Choose(Sampling())
BORDER = 40
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": BORDER,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


@contextmanager
def counting_rows(target: Target) -> Iterator[list[int]]:
    """While open, the number of texts of each forward lands in the list."""
    counts: list[int] = []
    embedding = target.reader.model.get_input_embeddings()
    handle = embedding.register_forward_pre_hook(lambda _, args: counts.append(len(args[0])))
    yield counts
    handle.remove()


def build_rope(
    parameters: dict[str, Any], patch: pytest.MonkeyPatch, **sizes: Any
) -> PreTrainedModel:
    """A llama with these rotary embeddings."""
    patch.setitem(FAMILIES, "rope", ("llama", {"rope_parameters": parameters, **sizes}))
    return build("rope")


def answer_all(model: PreTrainedModel, lengths: list[int], count: int) -> list[Request]:
    """Prompts of these lengths, with the untouched model's own answers."""
    prompts = [random_tokens(length, seed=length) for length in lengths]
    return [
        Request(prompt, {}, count, row, own_answer(model, prompt, count))
        for row, prompt in enumerate(prompts)
    ]


def assert_right(target: Target, requests: list[Request], **options: Any) -> None:
    """A batch of them is right, with drafts and without."""
    prompts, limit = [request.prompt for request in requests], requests[0].limit
    for drafter in (NoDrafter(), NgramDrafter(), KnowsAnswers(requests)):
        traces = generate(target, drafter, prompts, max_new_tokens=limit, stop=[], **options)
        assert [trace.tokens for trace in traces] == [request.answer for request in requests]


@pytest.mark.slow
def test_longrope_rows_on_both_sides_of_the_border(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short rows share forwards, long ones do not change them, and drafts of neither reach across."""
    model = build_rope(LONGROPE, monkeypatch, original_max_position_embeddings=BORDER)
    target = Target(copy.deepcopy(model))
    requests = answer_all(model, [5, 60, 26, 41, 12, 44, 27], count=14)
    with counting_rows(target) as counts:
        for batch_size in (2, 3, 7):
            assert_right(target, requests, batch_size=batch_size)
    assert max(counts) == 4  # the short ones
    monkeypatch.setattr(Target, "is_alone", lambda self, length: False)
    with pytest.raises(AssertionError):
        assert_right(target, requests, batch_size=7)


@pytest.mark.slow
def test_dynamic_frequencies_of_a_longer_text_do_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """They change behind the model's last position, which `features` may pass and no answer can: rows are right."""
    model = build_rope(DYNAMIC, monkeypatch, max_position_embeddings=64)
    target = Target(copy.deepcopy(model))
    requests = answer_all(model, [50, 3, 20, 49], count=14)
    for batch_size in (1, 2, 4):
        target.features(torch.tensor([random_tokens(150, seed=1)]), (-1,))
        target.forget()
        assert_right(target, requests, batch_size=batch_size)
    with pytest.raises(ValueError, match="exceed the model's 64 positions"):
        generate(target, NoDrafter(), [[1], [1] * 51], max_new_tokens=14, stop=[])


class FirstRowsRope(LlamaRotaryEmbedding):
    """Turns all rows by the positions of the first."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [1, T, D]."""
        return super().forward(x, position_ids[:1])


def test_a_model_that_misreads_a_batch_reads_its_rows_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found out when a second row is admitted; what one text is never pays for."""
    model = build("llama")
    model.model.rotary_emb.__class__ = FirstRowsRope
    target, requests = Target(copy.deepcopy(model)), answer_all(model, [9, 1, 30, 17], count=10)
    state = target.open()
    state.begin([1, 2, 3], GREEDY)
    assert target.reader.reads_rows is None
    state.admit(1, [4, 5])
    assert target.reader.reads_rows is False
    with counting_rows(target) as counts:
        assert_right(target, requests, batch_size=3)
    assert set(counts) == {1}
    monkeypatch.setattr(Target, "is_alone", lambda self, length: False)
    with pytest.raises(AssertionError):
        assert_right(target, requests, batch_size=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_reads_rows_together(name: str, dtype: torch.dtype) -> None:
    """Rounding is not taken for a fault."""
    target = Target(build(name, dtype))
    state = target.open()
    for row in range(2):
        state.admit(row, [1 + row])
    assert target.reader.reads_rows is True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_see_a_neighbours_length_are_seen(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: masks of the first row for all."""
    target = Target(build("llama", dtype))
    masks = type(target.masks)
    call = masks.__call__
    monkeypatch.setattr(
        masks, "__call__", lambda self, starts, *rest: call(self, [starts[0]] * len(starts), *rest)
    )
    state = target.open()
    for row in range(2):
        state.admit(row, [1, 2 + row])
    assert target.reader.reads_rows is False


# -- how much a cache holds -------------------------------------------------------------------------------------------


@pytest.mark.quick("400")
@pytest.mark.parametrize("most", [80, 130, 200, 400])
def test_a_cache_never_holds_more_than_it_may(most: int) -> None:
    """At every step, whatever comes in whatever order; rows wait rather than exceed it, and all are answered."""
    bench = Bench("llama")
    requests, rows = bench.requests(10, seed=4, longest=40, most=12), []
    for seed in range(3):
        order = random.Random(seed).sample(requests, len(requests))
        traces = [Trace([]) for _ in requests]
        decoding = Decoding(
            bench.target, KnowsAnswers(requests, taps=(0,)), batch_size=6, max_tokens_in_cache=most
        )
        for request in order:
            number = request.number
            decoding.add(
                number, request.prompt, request.sampling, request.limit, traces[number], stop=[]
            )
        while not decoding.is_done:
            decoding.step()
            assert allocated(decoding) <= most
            rows.append(len(decoding.rows))
        assert [trace.tokens for trace in traces] == [request.answer for request in requests]
    assert max(rows) >= min(6, most // 60)


def test_a_cache_gives_back_what_long_rows_held() -> None:
    """When they have left, what stays is at most twice what the rows at hand need."""
    bench = Bench("llama")
    long, short = random_tokens(200, seed=1), [random_tokens(5, seed=seed) for seed in range(3)]
    decoding, traces = (
        Decoding(bench.target, NoDrafter(), batch_size=4),
        [Trace([]) for _ in range(4)],
    )
    decoding.add(0, long, Sampling(), 4, traces[0], stop=[])
    for number, prompt in enumerate(short, start=1):
        decoding.add(number, prompt, Sampling(), 30, traces[number], stop=[])
    sizes = []
    while not decoding.is_done:
        decoding.step()
        sizes.append(allocated(decoding))
    needs = 5 + 30 + 10 + 1
    assert max(sizes) >= 4 * 200 and sizes[-2] <= 2 * max(3 * needs, LEAST)
    for trace, prompt, count in zip(traces, [long, *short], [4, 30, 30, 30], strict=True):
        assert trace.tokens == own_answer(bench.model, prompt, count)


def test_a_prompt_that_never_fits_is_refused_before_the_first_token() -> None:
    """The call raises at once; prompts that were asked before or after it are answered as ever."""
    bench, begun = Bench("llama"), []
    bench.target.reader.model.get_input_embeddings().register_forward_pre_hook(
        lambda *_: begun.append(1)
    )
    prompts = [random_tokens(5, seed=1), random_tokens(90, seed=2), random_tokens(7, seed=3)]
    options: dict[str, Any] = {"max_new_tokens": 8, "stop": [], "max_tokens_in_cache": 100}
    with pytest.raises(
        ValueError, match="take up to 109 tokens, the cache may hold 100: raise max_tokens_in_cache"
    ):
        generate(bench.target, NoDrafter(), prompts, **options)
    assert not begun
    traces = [Trace([]) for _ in prompts]
    decoding = Decoding(bench.target, NoDrafter(), batch_size=3, max_tokens_in_cache=100)
    decoding.add(0, prompts[0], Sampling(), 8, traces[0], stop=[])
    decoding.step()
    with pytest.raises(ValueError, match="the cache may hold 100"):
        decoding.add(1, prompts[1], Sampling(), 8, traces[1], stop=[])
    decoding.add(2, prompts[2], Sampling(), 8, traces[2], stop=[])
    while not decoding.is_done:
        decoding.step()
    assert [trace.tokens for trace in traces] == [
        own_answer(bench.model, prompts[0], 8),
        [],
        own_answer(bench.model, prompts[2], 8),
    ]


def test_a_state_that_a_batch_leaves_is_clean() -> None:
    """After a batch, and after one that was abandoned, single answers are right and find no old rows."""
    bench, prompts = Bench("llama"), [random_tokens(9, seed=seed) for seed in range(4)]
    expected = [own_answer(bench.model, prompt, 12) for prompt in prompts]
    for stop_after in (None, 1, 3):
        decoding, traces = (
            Decoding(bench.target, NgramDrafter(), batch_size=3),
            [Trace([]) for _ in prompts],
        )
        for number, prompt in enumerate(prompts):
            decoding.add(number, prompt, Sampling(), 12, traces[number], stop=[])
        steps = 0
        while not decoding.is_done and (stop_after is None or steps < stop_after):
            decoding.step()
            steps += 1
        decoding.close()
        assert decoding.state.rows == [] and not decoding.rows
        for prompt, answer in zip(prompts, expected, strict=True):
            assert (
                generate(bench.target, NgramDrafter(), prompt, max_new_tokens=12, stop=[]).tokens
                == answer
            )


@pytest.mark.slow
def test_rows_by_hand_are_read_and_kept_each_at_its_own_place() -> None:
    """Any subset of rows, in any order, with trees of any size: logits and taps are those of the plain model."""
    bench, dice = Bench("llama", torch.float64), random.Random(3)
    state, texts = bench.target.open((0, 2, -1)), dict[int, list[int]]()
    for step in range(60):
        if len(texts) < 5 and dice.random() < 0.4:
            row = next(row for row in range(99) if row not in texts)
            texts[row] = random_tokens(dice.randint(1, 30), seed=step)
            state.admit(row, list(texts[row]))
            while state.prompts:
                for number, output in state.read_prompts(dice.choice([3, 50])).items():
                    expected = bench.target.features(torch.tensor([texts[number]]), (0, 2, -1))[0]
                    torch.testing.assert_close(output.features, expected)
        if not texts:
            continue
        asked = dice.sample(list(texts), dice.randint(1, len(texts)))
        trees = {row: random_tree(dice) for row in asked}
        paths = {}
        for row, output in state.read(trees).items():
            node = dice.randrange(len(trees[row]))
            paths[row] = trees[row].path(node)
            path = [*texts[row], *trees[row].tokens[paths[row]].tolist()]
            with torch.no_grad():
                logits = bench.model(input_ids=torch.tensor([path]), use_cache=False).logits[0, -1]
            torch.testing.assert_close(output.logits[node], logits)
            states = bench.target.features(torch.tensor([path]), (0, 2, -1))[0]
            torch.testing.assert_close(output.features_at(paths[row]), states[len(texts[row]) :])
        kept = {row: paths[row] for row in dice.sample(asked, dice.randint(1, len(asked)))}
        state.keep(kept)
        for row, path in kept.items():
            texts[row] += trees[row].tokens[path].tolist()
            assert state.text(row) == texts[row] and state.length(row) == len(texts[row])
        if dice.random() < 0.25:
            row = dice.choice(list(texts))
            state.release(row)
            del texts[row]


def random_tree(dice: random.Random) -> DraftTree:
    """A root with up to eleven nodes anywhere below it."""
    paths: list[list[int]] = [[]]
    for _ in range(dice.randrange(12)):
        paths.append([*dice.choice(paths), dice.randrange(VOCAB_SIZE)])
    return DraftTree.from_paths(dice.randrange(VOCAB_SIZE), paths[1:])
