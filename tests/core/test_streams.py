"""Several streams at once: each answer is right, or the stream that lost its text says so."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch

from eagle import Budget, Sampling, Target, generate
from eagle.core.decode import stream
from eagle.core.tree import DraftTree, chain_paths
from eagle.core.verify import Choose
from eagle.drafters.draft_model import DraftModel, DraftModelSettings
from eagle.drafters.ngram import NgramDrafter
from eagle.drafters.none import NoDrafter
from eagle.drafters.several import FirstOf
from tests.families import PlantedTrees, build, own_answer, random_tokens

COUNT = 24
PROMPTS = [random_tokens(20, seed=seed) for seed in range(5, 9)]
MODEL = build("llama")
ANSWERS = [own_answer(MODEL, prompt, COUNT) for prompt in PROMPTS]


@pytest.fixture(autouse=True)
def eager_threads() -> Iterator[None]:
    """Threads take turns a thousand times a second more often than Python lets them."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def answer(target: Target, number: int, drafter: Any = None) -> list[int]:
    """What a target says to one of the prompts, with right drafts among wrong ones."""
    drafter = drafter or PlantedTrees(PROMPTS[number] + ANSWERS[number], taps=(number % 4, -1))
    return generate(target, drafter, PROMPTS[number], max_new_tokens=COUNT, stop=[]).tokens


def together(*tasks: Callable[[], Any]) -> list[Any]:
    """What the tasks give, each in a thread of its own, or the exception that ended it; they begin at once."""
    start = Barrier(len(tasks))

    def run(task: Callable[[], Any]) -> Any:
        start.wait()
        try:
            return task()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(tasks)) as pool:
        return list(pool.map(run, tasks))


def in_turn(*streams: Iterator[list[int]]) -> list[Any]:
    """The tokens of streams that are asked for one piece each in turn, or the exception that ended them."""
    results: list[Any] = [[] for _ in streams]
    running = dict(enumerate(streams))
    while running:
        for number, pieces in list(running.items()):
            try:
                results[number] += next(pieces)
            except StopIteration:
                del running[number]
            except Exception as error:
                results[number] = error
                del running[number]
    return results


def assert_right_or_refused(results: list[Any], expected: list[list[int]], sentence: str) -> None:
    """At least one result is the right answer; every other one is right too, or refused by that sentence."""
    refused = [result for result in results if isinstance(result, Exception)]
    assert [str(error) for error in refused if not isinstance(error, ValueError) or sentence not in str(error)] == []
    pairs = [pair for pair in zip(results, expected, strict=True) if not isinstance(pair[0], Exception)]
    assert pairs and all(result == answer for result, answer in pairs)


@pytest.mark.parametrize("drafter", [NoDrafter, NgramDrafter])
def test_the_older_of_two_streams_on_one_target_is_refused(drafter: Any) -> None:
    """A target holds one text: what began last is right, what began before is told."""
    target = Target(copy.deepcopy(MODEL))
    options: dict[str, Any] = {"max_new_tokens": COUNT, "stop": []}
    first, second = in_turn(*(stream(target, drafter(), prompt, **options) for prompt in PROMPTS[:2]))
    assert second == ANSWERS[1]
    assert isinstance(first, ValueError)
    assert "a target reads one text at a time" in str(first) and "Target(target.model, target.tokenizer)" in str(first)


def test_a_reader_by_hand_is_refused_after_a_stream() -> None:
    """`read` and `keep` belong to the text that was begun last, whoever calls them."""
    target = Target(copy.deepcopy(MODEL))
    target.begin(PROMPTS[0], Choose(Sampling()))
    answer(target, 1)
    for call in (lambda tree: target.read(tree), lambda tree: target.keep(tree, [0]), lambda tree: target.extend([1])):
        with pytest.raises(ValueError, match="a target reads one text at a time"):
            call(DraftTree.chain([5, 6]))
    target.begin(PROMPTS[0], Choose(Sampling()))
    assert target.read(DraftTree.chain([5, 6])).text == PROMPTS[0]


def test_threads_on_one_target_are_right_or_refused() -> None:
    """No thread gets another's text, and none crashes."""
    target = Target(copy.deepcopy(MODEL))
    for _ in range(3):
        results = together(*(lambda number=number: answer(target, number) for number in range(4)))
        assert_right_or_refused(results, ANSWERS, "a target reads one text at a time")


def test_targets_over_one_model_answer_in_threads() -> None:
    """Weights are shared, and nothing else: not the attention, not the taps."""
    model = copy.deepcopy(MODEL)
    targets = [Target(model) for _ in range(4)]
    for _ in range(3):
        assert together(*(lambda n=n: answer(targets[n], n) for n in range(4))) == ANSWERS


def test_the_users_own_model_generates_beside_a_target() -> None:
    """`model.generate` in another thread is not touched by what the target reads with."""
    model = copy.deepcopy(MODEL)
    target, ids = Target(model), torch.tensor(PROMPTS[:1])

    def own() -> list[int]:
        return model.generate(ids, do_sample=False, max_new_tokens=COUNT)[0, ids.shape[1] :].tolist()

    def states() -> bool:
        return torch.equal(target.features(ids, (0, 2, -1)), expected)

    expected = target.features(ids, (0, 2, -1))
    for _ in range(3):
        results = together(lambda: answer(target, 1), own, own, states, states)
        assert results == [ANSWERS[1], ANSWERS[0], ANSWERS[0], True, True]


def small(target: Target) -> DraftModel:
    """The model itself as a draft model."""
    model = build("llama")
    return DraftModel(DraftModelSettings(), model.config, model).bind(target.head)


@pytest.mark.parametrize("make", [small, lambda _: NgramDrafter(), lambda target: FirstOf([small(target)])])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=3)])
def test_the_older_of_two_streams_on_one_drafter_is_refused(make: Any, sampling: Sampling) -> None:
    """A drafter follows one text too, also where each stream has a target of its own."""
    targets = [Target(copy.deepcopy(MODEL)) for _ in range(2)]
    drafter, expected = make(targets[0]), []
    budget = Budget.fixed(chain_paths(3))
    options: dict[str, Any] = {"sampling": sampling, "budget": budget, "max_new_tokens": COUNT, "stop": []}
    for prompt in PROMPTS[:2]:
        expected.append(generate(targets[0], NoDrafter(), prompt, **options).tokens)
    streams = [stream(target, drafter, prompt, **options) for target, prompt in zip(targets, PROMPTS, strict=False)]
    first, second = in_turn(*streams)
    assert second == expected[1]
    assert isinstance(first, ValueError) and "a drafter follows one text at a time" in str(first)


def test_lists_that_share_a_drafter_are_refused_too() -> None:
    """The drafter in both lists follows the stream that began last."""
    targets = [Target(copy.deepcopy(MODEL)) for _ in range(2)]
    shared = small(targets[0])
    lists = [FirstOf([shared]) for _ in targets]
    options: dict[str, Any] = {"max_new_tokens": COUNT, "stop": []}
    streams = [
        stream(target, drafter, prompt, **options)
        for target, drafter, prompt in zip(targets, lists, PROMPTS, strict=False)
    ]
    first, second = in_turn(*streams)
    assert second == ANSWERS[1]
    assert isinstance(first, ValueError) and "a drafter follows one text at a time" in str(first)


def test_threads_on_one_drafter_are_right_or_refused() -> None:
    """No thread drafts by another's text, and none crashes."""
    targets = [Target(copy.deepcopy(MODEL)) for _ in range(3)]
    drafter = small(targets[0])
    for _ in range(3):
        results = together(*(lambda n=n: answer(targets[n], n, drafter) for n in range(3)))
        assert_right_or_refused(results, ANSWERS[:3], "a drafter follows one text at a time")
