"""Several streams on one target and one drafter, in turn and in threads: each answer is right."""

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

from eagle import Sampling, Target, generate
from eagle.core.drafter import Drafter
from eagle.core.tree import DraftTree
from eagle.core.verify import Choose
from eagle.decoding.decode import stream
from eagle.drafters.lookup.ngram import NgramDrafter
from eagle.drafters.none import NoDrafter
from eagle.drafters.several import FirstOf
from eagle.target.state import TargetState
from tests.batches import own_model
from tests.families import PlantedTrees, build, own_answer, own_logits, random_tokens

COUNT = 24
OPTIONS: dict[str, Any] = {"max_new_tokens": COUNT, "stop": []}
PROMPTS = [random_tokens(20, seed=seed) for seed in range(5, 9)]
MODEL = build("llama")
ANSWERS = [own_answer(MODEL, prompt, COUNT) for prompt in PROMPTS]


@pytest.fixture(autouse=True)
def eager_threads() -> Iterator[None]:
    """Let threads take turns much more often than Python does."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.fixture
def target() -> Target:
    """Return a target of its own for each test."""
    return Target(copy.deepcopy(MODEL))


def answer(
    target: Target,
    index: int,
    drafter: Drafter | None = None,
) -> list[int]:
    """Answer one of the prompts, with right drafts among wrong ones."""
    text = PROMPTS[index] + ANSWERS[index]
    drafter = drafter or PlantedTrees(text, taps=(index, -1))
    return generate(target, drafter, PROMPTS[index], **OPTIONS).tokens


def run_in_threads(*tasks: Callable[[], Any]) -> list[Any]:
    """Return the results of tasks that begin at once, each in a thread of its own."""
    # so that they overlap whatever a thread takes to start
    start = Barrier(len(tasks))

    def run(task: Callable[[], Any]) -> Any:
        start.wait()
        return task()

    with ThreadPoolExecutor(len(tasks)) as pool:
        return list(pool.map(run, tasks))


def run_in_turn(*streams: Iterator[list[int]]) -> list[list[int]]:
    """Return the tokens of streams of which each is asked for a few in turn."""
    answers: list[list[int]] = [[] for _ in streams]
    running = dict(enumerate(streams))
    while running:
        for index, chunks in list(running.items()):
            chunk = next(chunks, None)
            if chunk is None:
                del running[index]
            else:
                answers[index] += chunk
    return answers


@pytest.mark.parametrize("make_drafter", [NoDrafter, NgramDrafter])
def test_streams_on_one_target_are_independent(
    make_drafter: Callable[[], Drafter], target: Target
) -> None:
    """Also where one begins while another is being written."""
    streams = [stream(target, make_drafter(), prompt, **OPTIONS) for prompt in PROMPTS]
    # the others begin while this one is being written
    first = [token for _ in range(5) for token in next(streams[0])]
    answers = run_in_turn(*streams)
    assert [first + answers[0], *answers[1:]] == ANSWERS


def test_a_shared_state_is_seen(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: a target that has one state for all."""
    state = TargetState(target)
    monkeypatch.setattr(target, "open", lambda *_: state)
    streams = [stream(target, NoDrafter(), prompt, **OPTIONS) for prompt in PROMPTS[:2]]
    try:
        answers = run_in_turn(*streams)
    except Exception:
        # a state may also refuse what it does not expect
        return
    assert answers != ANSWERS[:2]


def test_a_state_is_not_disturbed_by_a_stream(target: Target) -> None:
    """`read`, `keep` and `extend` go on, whoever else decodes with the target."""
    # a text of its own, beside what streams read
    state = target.open()
    state.begin(PROMPTS[0], Choose(Sampling()))
    assert answer(target, 1) == ANSWERS[1]
    output = state.read({0: DraftTree.chain([5, 6])})[0]
    assert answer(target, 2) == ANSWERS[2]
    state.keep({0: [0, 1]})
    last = state.extend({0: [1]})[0]
    text = [*PROMPTS[0], 5, 6, 1]
    logits = torch.cat([output.logits, last[None]])
    torch.testing.assert_close(
        logits,
        own_logits(MODEL, text)[-3:],
        rtol=1e-4,
        atol=1e-5,
    )
    assert state.sequence(0) == text


@pytest.mark.slow
@pytest.mark.parametrize(
    "is_shared",
    [True, False],
    ids=["one target", "targets over one model"],
)
def test_threads_are_right(is_shared: bool) -> None:
    """No thread gets another's answer, on one target or on several that share only the weights."""
    model = copy.deepcopy(MODEL)
    # taps and attention are a target's own, weights the model's
    shared = Target(model)
    targets = [shared if is_shared else Target(model) for _ in PROMPTS]
    tasks = [partial(answer, targets[index], index) for index in range(len(PROMPTS))]
    # a race does not show every time
    for _ in range(3):
        assert run_in_threads(*tasks) == ANSWERS


@pytest.mark.slow
def test_the_users_own_model_generates_while_a_target_decodes() -> None:
    """`model.generate` in another thread is not touched by what the target reads with."""
    model = copy.deepcopy(MODEL)
    target = Target(model)
    tokens = torch.tensor(PROMPTS[:1])
    taps = (0, 2, -1)
    expected = target.features(tokens, taps)

    def generate_with_transformers() -> list[int]:
        output = model.generate(tokens, do_sample=False, max_new_tokens=COUNT)
        result: list[int] = output[0, tokens.shape[1] :].tolist()
        return result

    def read_features() -> bool:
        return target.features(tokens, taps).equal(expected)

    tasks = [partial(answer, target, 1), generate_with_transformers, read_features]
    for _ in range(3):
        assert run_in_threads(*tasks) == [ANSWERS[1], ANSWERS[0], True]


def test_lists_that_share_a_drafter_are_independent(target: Target) -> None:
    """The drafter in both lists follows the sequences of both."""
    shared = own_model(target)
    streams = [stream(target, FirstOf([shared]), prompt, **OPTIONS) for prompt in PROMPTS[:2]]
    assert run_in_turn(*streams) == ANSWERS[:2]


@pytest.mark.slow
def test_threads_on_one_drafter_are_right() -> None:
    """No thread drafts by another's sequence, on targets of their own and on one."""
    targets = [Target(copy.deepcopy(MODEL)) for _ in range(3)]
    drafter = own_model(targets[0])
    for used in (targets, [targets[0]] * 3):
        tasks = [partial(answer, used[index], index, drafter) for index in range(3)]
        assert run_in_threads(*tasks) == ANSWERS[:3]
