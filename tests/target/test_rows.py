"""Sequences whose positions depend on the rest of a batch are read apart; caches hold no more than they may."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle import Target, Trace
from eagle.core.tree import DraftTree
from eagle.decoding.loop import Decoding
from eagle.drafters.lookup.ngram import NgramDrafter
from eagle.drafters.none import NoDrafter
from eagle.target.slots import MIN_COLUMNS
from eagle.target.state import TargetState
from tests.batches import Bench, KnowsAnswers, Request, add, allocated
from tests.families import FAMILIES, VOCAB_SIZE, build, own_answer, random_tokens
from tests.target.decoded import decode, decode_batch
from tests.target.test_target import LONGROPE_SIZES

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


@contextmanager
def counting_sequences(target: Target) -> Iterator[list[int]]:
    """Yield the list of how many sequences each forward reads while the context is open."""
    counts: list[int] = []
    embedding = target.reader.model.get_input_embeddings()
    handle = embedding.register_forward_pre_hook(lambda _, args: counts.append(len(args[0])))
    yield counts
    handle.remove()


def ask_all(model: PreTrainedModel, lengths: list[int], limit: int) -> list[Request]:
    """Return prompts of these lengths, with the untouched model's own answers."""
    requests = []

    for row, length in enumerate(lengths):
        prompt = random_tokens(length, seed=length)
        answer = own_answer(model, prompt, limit)
        requests.append(Request(prompt, {}, limit, row, answer))

    return requests


def assert_right(target: Target, requests: list[Request], batch_size: int) -> None:
    """Check that batches are answered right, with drafts and without."""
    prompts = [request.prompt for request in requests]
    limit = requests[0].limit
    for drafter in (NoDrafter(), NgramDrafter(), KnowsAnswers(requests)):
        answers = decode_batch(
            target,
            drafter,
            prompts,
            limit,
            batch_size=batch_size,
        )
        assert answers == [request.answer for request in requests]


def read_together(target: Target) -> bool | None:
    """Admit two sequences of different lengths; tell whether the target then reads them in one forward."""
    state = target.open()
    state.admit(0, [1])
    # one sequence alone does not pay for the trial
    assert target.reader.reads_rows is None
    state.admit(1, [2, 3])
    return target.reader.reads_rows


@pytest.mark.slow
def test_longrope_on_both_sides_of_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short sequences share forwards, long ones do not change them, and drafts of neither reach across."""
    monkeypatch.setitem(FAMILIES, "rope", ("llama", LONGROPE_SIZES))
    model = build("rope")
    target = Target(copy.deepcopy(model))
    # the limit is 40 tokens; two of the prompts reach it while they are answered
    requests = ask_all(model, [5, 60, 26, 41, 12, 44, 27], limit=14)

    # the forwards of the batch, not of the oracle
    with counting_sequences(target) as counts:
        for batch_size in (2, 3, 7):
            assert_right(target, requests, batch_size)

    assert max(counts) == 4  # the short ones

    # planted fault: nothing is read apart
    monkeypatch.setattr(Target, "is_alone", lambda self, length: False)

    with pytest.raises(AssertionError):
        assert_right(target, requests, batch_size=7)


@pytest.mark.slow
def test_dynamic_frequencies_of_a_longer_sequence_do_not_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They change after the model's last position, which `features` may pass and no answer can."""
    sizes = {"rope_parameters": DYNAMIC, "max_position_embeddings": 64}
    monkeypatch.setitem(FAMILIES, "rope", ("llama", sizes))
    model = build("rope")
    target = Target(copy.deepcopy(model))
    requests = ask_all(model, [50, 3, 20, 49], limit=14)

    for batch_size in (1, 2, 4):
        # a sequence beyond the limit, after which the tables are those of 150 tokens
        target.features(torch.tensor([random_tokens(150, seed=1)]), (-1,))
        target.forget()
        assert_right(target, requests, batch_size)

    with pytest.raises(ValueError, match="exceed the model's 64 positions"):
        decode_batch(target, NoDrafter(), [[1], [1] * 51], 14)


class FirstRowsRope(LlamaRotaryEmbedding):
    """Turns all sequences by the positions of the first."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [1, T, D]."""
        return super().forward(x, position_ids[:1])


def test_a_model_that_misreads_a_batch_reads_its_sequences_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This is found out when a second sequence is admitted; one sequence alone never pays for the trial."""
    model = build("llama")
    # a model that misreads every batch
    model.model.rotary_emb.__class__ = FirstRowsRope
    target = Target(copy.deepcopy(model))
    requests = ask_all(model, [9, 1, 30, 17], limit=10)

    assert read_together(target) is False

    with counting_sequences(target) as counts:
        assert_right(target, requests, batch_size=3)

    assert set(counts) == {1}

    monkeypatch.setattr(Target, "is_alone", lambda self, length: False)

    with pytest.raises(AssertionError):
        assert_right(target, requests, batch_size=3)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_reads_sequences_together(name: str) -> None:
    """Rounding in bf16 is not taken for a fault."""
    assert read_together(Target(build(name, torch.bfloat16))) is True


# -- how much a cache holds -------------------------------------------------------------------------------------------


def finish(decoding: Decoding) -> list[int]:
    """Decode until nothing is left; return the columns that the cache had after each step."""
    sizes = []
    while not decoding.is_done:
        decoding.step()
        sizes.append(allocated(decoding))
    return sizes


@pytest.mark.quick("400")
@pytest.mark.parametrize("most", [80, 200, 400])
def test_a_cache_never_holds_more_than_it_may(most: int) -> None:
    """At every step, whatever comes in whatever order; requests wait rather than exceed it, and all are answered."""
    bench = Bench("llama")
    requests = bench.requests(10, seed=4, longest=40, most=12)
    expected = [request.answer for request in requests]
    rows = []

    for seed in range(3):
        drafter = KnowsAnswers(requests, taps=(0,))
        decoding = Decoding(
            bench.target,
            drafter,
            batch_size=6,
            max_tokens_in_cache=most,
        )
        traces = [Trace([]) for _ in requests]
        for request in random.Random(seed).sample(requests, len(requests)):
            add(decoding, request, traces)
        while not decoding.is_done:
            decoding.step()
            assert allocated(decoding) <= most
            rows.append(len(decoding.rows))
        assert [trace.tokens for trace in traces] == expected

    # a request takes at most 60 tokens: so many fit together
    assert max(rows) >= min(6, most // 60)


def test_a_cache_gives_back_what_long_sequences_held() -> None:
    """When they have left, what stays is at most twice what the sequences at hand need."""
    bench = Bench("llama")
    long = ask_all(bench.model, [200], limit=4)
    short = ask_all(bench.model, [5, 6, 7], limit=30)
    requests = list(long)
    for request in short:
        # the long one is number 0
        requests.append(replace(request, number=request.number + 1))
    decoding = Decoding(bench.target, NoDrafter(), batch_size=4)
    traces = [Trace([]) for _ in requests]

    for request in requests:
        add(decoding, request, traces)

    sizes = finish(decoding)
    # a prompt, an answer, room for drafts, and the root
    need = 7 + 30 + 10 + 1
    assert max(sizes) >= 4 * 200
    assert sizes[-2] <= 2 * max(3 * need, MIN_COLUMNS)

    for trace, request in zip(traces, requests, strict=True):
        assert trace.tokens == request.answer


def test_a_prompt_that_never_fits_is_refused_before_the_first_token() -> None:
    """The call raises at once; requests that came before or after it are answered as ever."""
    bench = Bench("llama")
    requests = ask_all(bench.model, [5, 90, 7], limit=8)
    prompts = [request.prompt for request in requests]

    with counting_sequences(bench.target) as counts:
        # nothing may have been read when the error comes
        with pytest.raises(ValueError, match="take up to 109 tokens, the cache may hold 100"):
            decode_batch(
                bench.target,
                NoDrafter(),
                prompts,
                8,
                max_tokens_in_cache=100,
            )
        assert not counts

    traces = [Trace([]) for _ in requests]
    decoding = Decoding(
        bench.target,
        NoDrafter(),
        batch_size=3,
        max_tokens_in_cache=100,
    )
    add(decoding, requests[0], traces)
    decoding.step()

    with pytest.raises(ValueError, match="the cache may hold 100"):
        # a prompt of 90 tokens and its answer can never fit
        add(decoding, requests[1], traces)

    add(decoding, requests[2], traces)
    finish(decoding)
    answers = [trace.tokens for trace in traces]

    assert answers == [requests[0].answer, [], requests[2].answer]


@pytest.mark.parametrize("steps", [1000, 1, 3])
def test_a_state_that_a_batch_leaves_is_clean(steps: int) -> None:
    """After a batch, and after one that was abandoned, single answers are right and find no old sequences."""
    bench = Bench("llama")
    requests = ask_all(bench.model, [9, 8, 7, 6], limit=12)
    decoding = Decoding(bench.target, NgramDrafter(), batch_size=3)
    traces = [Trace([]) for _ in requests]

    for request in requests:
        add(decoding, request, traces)

    while not decoding.is_done and steps > 0:
        decoding.step()
        steps -= 1

    decoding.close()
    assert decoding.state.rows == []
    assert not decoding.rows

    for request in requests:
        assert decode(bench.target, NgramDrafter(), request.prompt, 12) == request.answer


def draw_tree(dice: random.Random) -> DraftTree:
    """Return a root with up to eleven nodes anywhere below it."""
    paths: list[list[int]] = [[]]
    for _ in range(dice.randrange(12)):
        paths.append([*dice.choice(paths), dice.randrange(VOCAB_SIZE)])
    return DraftTree.from_paths(dice.randrange(VOCAB_SIZE), paths[1:])


TAPS = (0, 2, -1)


def check_path(
    bench: Bench,
    sequence: list[int],
    tree: DraftTree,
    path: list[int],
    out: Any,
) -> None:
    """Compare a path of a tree with the sequence that it makes, read by the plain model."""
    tokens = torch.tensor([[*sequence, *tree.tokens[path].tolist()]])

    with torch.no_grad():
        logits = bench.model(input_ids=tokens, use_cache=False).logits[0, -1]

    torch.testing.assert_close(out.logits[path[-1]], logits)
    features = bench.target.features(tokens, TAPS)[0, len(sequence) :]
    torch.testing.assert_close(out.features_at(path), features)


def read_prompts(
    bench: Bench,
    state: TargetState,
    sequences: dict[int, list[int]],
    chunk: int,
) -> None:
    """Read the prompts that were admitted, in chunks, and compare their features with those of plain forwards."""
    while state.prompts:
        for row, output in state.read_prompts(chunk).items():
            expected = bench.target.features(torch.tensor([sequences[row]]), TAPS)[0]
            torch.testing.assert_close(output.features, expected)


@pytest.mark.slow
def test_any_sequences_are_read_and_kept_in_any_order() -> None:
    """Subsets in any order, with trees of any size: logits and taps are those of the plain model in fp64."""
    bench = Bench("llama", torch.float64)
    dice = random.Random(3)
    state = bench.target.open(TAPS)
    sequences: dict[int, list[int]] = {}

    for step in range(60):
        if not sequences or (len(sequences) < 5 and dice.random() < 0.4):
            row = min({*range(99)} - sequences.keys())
            sequences[row] = random_tokens(dice.randint(1, 30), seed=step)
            state.admit(row, list(sequences[row]))
            read_prompts(bench, state, sequences, chunk=dice.choice([3, 50]))

        asked = dice.sample(list(sequences), dice.randint(1, len(sequences)))
        trees = {row: draw_tree(dice) for row in asked}
        paths = {row: tree.path(dice.randrange(len(tree))) for row, tree in trees.items()}
        for row, output in state.read(trees).items():
            check_path(bench, sequences[row], trees[row], paths[row], output)

        # what is not kept is as if it had not been read
        kept = dice.sample(asked, dice.randint(1, len(asked)))
        state.keep({row: paths[row] for row in kept})
        for row in kept:
            sequences[row] += trees[row].tokens[paths[row]].tolist()
            assert state.sequence(row) == sequences[row]
            assert state.length(row) == len(sequences[row])
        if dice.random() < 0.25:
            row = dice.choice(list(sequences))
            state.release(row)
            del sequences[row]
