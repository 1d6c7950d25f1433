"""Several streams at once, in turn and in threads, on one target and one drafter: each answer is right."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier
from typing import Any

import pytest
import torch

from eagle import Budget, Sampling, Target, Trace, generate
from eagle.core.tree import DraftTree, chain_paths
from eagle.core.verify import Choose
from eagle.decoding.decode import stream
from eagle.drafters.draft_model import DraftModel, DraftModelSettings
from eagle.drafters.lookup.ngram import NgramDrafter
from eagle.drafters.none import NoDrafter
from eagle.drafters.several import FirstOf
from eagle.target.state import TargetState
from tests.families import VOCAB_SIZE, PlantedTrees, build, own_answer, own_logits, random_tokens

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


OPTIONS: dict[str, Any] = {"max_new_tokens": COUNT, "stop": []}


@pytest.mark.parametrize("drafter", [NoDrafter, NgramDrafter])
def test_streams_on_one_target_do_not_disturb_each_other(drafter: Any) -> None:
    """Each has a state of its own, also where one begins while the other is being written."""
    target = Target(copy.deepcopy(MODEL))
    early = stream(target, drafter(), PROMPTS[0], **OPTIONS)
    first = [token for _ in range(5) for token in next(early)]
    rest, other = in_turn(early, stream(target, drafter(), PROMPTS[1], **OPTIONS))
    assert [first + rest, other] == ANSWERS[:2]
    assert in_turn(*(stream(target, drafter(), prompt, **OPTIONS) for prompt in PROMPTS)) == ANSWERS


def test_streams_that_shared_a_state_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a target that has one state for all."""
    target = Target(copy.deepcopy(MODEL))
    state = TargetState(target)
    monkeypatch.setattr(target, "open", lambda *_: state)
    results = in_turn(*(stream(target, NoDrafter(), prompt, **OPTIONS) for prompt in PROMPTS[:2]))
    assert results != ANSWERS[:2]


def test_a_reader_by_hand_is_not_disturbed_by_a_stream() -> None:
    """`read`, `keep` and `extend` go on in their own state, whoever else writes with the target."""
    target = Target(copy.deepcopy(MODEL))
    expected, tree = own_logits(MODEL, [*PROMPTS[0], 5, 6, 1]), DraftTree.chain([5, 6])
    state = target.open()
    state.begin(PROMPTS[0], Choose(Sampling()))
    assert answer(target, 1) == ANSWERS[1]
    output = state.read({0: tree})[0]
    assert answer(target, 2) == ANSWERS[2]
    state.keep({0: [0, 1]})
    assert answer(target, 1) == ANSWERS[1]
    last = state.extend({0: [1]})[0]
    torch.testing.assert_close(
        torch.cat([output.logits, last[None]]), expected[-3:], rtol=1e-4, atol=1e-5
    )
    assert state.text(0) == [*PROMPTS[0], 5, 6, 1]


@pytest.mark.slow
def test_threads_on_one_target_are_right() -> None:
    """No thread gets another's text, and none crashes."""
    target = Target(copy.deepcopy(MODEL))
    for _ in range(3):
        assert (
            together(*(lambda number=number: answer(target, number) for number in range(4)))
            == ANSWERS
        )


@pytest.mark.slow
def test_targets_over_one_model_answer_in_threads() -> None:
    """Weights are shared, and nothing else: not the attention, not the taps."""
    model = copy.deepcopy(MODEL)
    targets = [Target(model) for _ in range(4)]
    for _ in range(3):
        assert together(*(lambda n=n: answer(targets[n], n) for n in range(4))) == ANSWERS


@pytest.mark.slow
def test_the_users_own_model_generates_beside_a_target() -> None:
    """`model.generate` in another thread is not touched by what the target reads with."""
    model = copy.deepcopy(MODEL)
    target, ids = Target(model), torch.tensor(PROMPTS[:1])

    def own() -> list[int]:
        return model.generate(ids, do_sample=False, max_new_tokens=COUNT)[
            0, ids.shape[1] :
        ].tolist()

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


SAMPLINGS = [Sampling(), Sampling(1.0, seed=3)]
MAKES = [small, lambda _: NgramDrafter(), lambda target: FirstOf([NgramDrafter(), small(target)])]


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKES, ids=["draft model", "n-grams", "list"])
@pytest.mark.parametrize(
    "sampling",
    [pytest.param(SAMPLINGS[0], marks=pytest.mark.slow), SAMPLINGS[1]],
    ids=["greedy", "T=1"],
)
def test_streams_on_one_drafter_do_not_disturb_each_other(make: Any, sampling: Sampling) -> None:
    """Each is cycle by cycle what it is alone, on one target and on two."""
    targets = [Target(copy.deepcopy(MODEL)) for _ in range(2)]
    drafter = make(targets[0])
    options: dict[str, Any] = {
        "sampling": sampling,
        "budget": Budget.fixed(chain_paths(3)),
        **OPTIONS,
    }
    alone = [generate(targets[0], make(targets[0]), prompt, **options) for prompt in PROMPTS[:2]]
    noise = Choose(sampling).noise
    place = noise and (lambda at: noise([at], VOCAB_SIZE, torch.device("cpu"))[0])
    expected = [own_answer(MODEL, prompt, COUNT, None, place) for prompt in PROMPTS[:2]]
    for both in (targets, targets[:1] * 2):
        traces = [Trace([]) for _ in both]
        parts = zip(both, PROMPTS, traces, strict=False)
        streams = [
            stream(target, drafter, prompt, trace=trace, **options)
            for target, prompt, trace in parts
        ]
        assert in_turn(*streams) == expected
        assert [trace.cycles for trace in traces] == [trace.cycles for trace in alone]


def test_lists_that_share_a_drafter_do_not_disturb_each_other() -> None:
    """The drafter in both lists follows the texts of both."""
    target = Target(copy.deepcopy(MODEL))
    shared = small(target)
    streams = [stream(target, FirstOf([shared]), prompt, **OPTIONS) for prompt in PROMPTS[:2]]
    assert in_turn(*streams) == ANSWERS[:2]


@pytest.mark.slow
def test_threads_on_one_drafter_are_right() -> None:
    """No thread drafts by another's text, and none crashes, on targets of their own and on one."""
    targets = [Target(copy.deepcopy(MODEL)) for _ in range(3)]
    drafter = small(targets[0])
    for places in ([0, 1, 2], [0, 0, 0]):
        tasks = [
            partial(answer, targets[place], number, drafter) for number, place in enumerate(places)
        ]
        assert together(*tasks) == ANSWERS[:3]
