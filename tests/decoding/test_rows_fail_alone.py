"""An error that one sequence of a batch causes ends that sequence alone; its neighbours get their own answers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle import Budget, Sampling, Target, Trace, generate, stream
from eagle.core.drafter import Committed, Drafter, Noise, PerSequenceState
from eagle.core.trace import Cycle
from eagle.core.tree import DraftTree, chain_paths
from eagle.data.on_policy import sample_answers
from eagle.decoding.goodput import Goodput
from eagle.decoding.loop import Decoding
from eagle.drafters.lookup.ngram import NgramDrafter
from eagle.drafters.none import NoDrafter
from eagle.drafters.self_speculation.sparse_kv import SparseKv
from eagle.drafters.several import FirstOf
from tests.batches import new_head
from tests.families import FAMILIES, VOCAB_SIZE, build, own_answer, random_tokens

# the prompt that begins with this token is the one that fails
BAD = 77
BAD_LENGTH = 7
COUNT = 4
LIMIT = 10
Fault = Callable[[Committed], Any]


class FaultyText:
    """Draft a copy of the prompt, and from the third token of the bad sequence on return the fault."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.read: list[int] = []

    def propose(self, update: Committed, budget: Budget) -> Any:
        """Return a chain, or the fault; it depends on the sequence, not on how often a state was asked."""
        self.read += update.tokens.tolist()
        if self.read[0] == BAD and len(self.read) > BAD_LENGTH + 1:
            return self.fault(update)
        tokens = [update.root, *self.read[:2]]
        return DraftTree.chain(tokens[: budget.depth + 1])


class Faulty(Drafter):
    """A drafter that fails for one sequence, and is asked for one at a time."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def begin(self, noise: Noise | None = None) -> Any:
        """Return the state of a new sequence."""
        return FaultyText(self.fault)


class FaultyBatch(Faulty):
    """A drafter that drafts for a batch in one call, which fails as a whole."""

    taps = (1,)

    def open(self) -> Any:
        """Return the state of a batch."""
        return BatchState(self)


class BatchState(PerSequenceState):
    """Raise without saying which row it was, with the rows after it not updated."""

    def propose(
        self,
        updates: Mapping[int, Committed],
        budgets: Mapping[int, Budget],
    ) -> dict[int, DraftTree]:
        """Draft for one row after the other."""
        trees = {}
        for row, update in updates.items():
            assert update.features is not None
            # also where a state is made again and reads its whole sequence
            assert len(update.features) == len(update.tokens)
            trees[row] = self.sequences[row].propose(
                update,
                budgets[row],
            )
        return trees


def fail(update: Committed) -> Any:
    """Raise an error of the drafter's own."""
    raise KeyError("lost")


FAULTS: dict[str, tuple[Fault, str]] = {
    "raises": (fail, "lost"),
    "outside": (
        lambda update: DraftTree.chain([update.root, VOCAB_SIZE]),
        r"token ids \[96\], expected 0\.\.95",
    ),
    "root": (
        lambda update: DraftTree.chain([update.root ^ 1, 3]),
        "the draft's root is token",
    ),
    "none": (lambda update: None, "proposed no tree"),
    "deep": (
        lambda update: DraftTree.chain([update.root, *[1] * 300]),
        "has 300 levels",
    ),
    "draft_probs": (
        lambda update: DraftTree.chain(
            [update.root, 3],
            torch.ones(2, 5) / 5,
        ),
        r"probs are \[2, 5\]",
    ),
}


@pytest.fixture(scope="module")
def target() -> Target:
    """Return a llama of random weights."""
    return Target(build("llama"))


@cache
def plain_answer(
    target: Target,
    prompt: tuple[int, ...],
) -> list[int]:
    """Return the untouched model's own answer."""
    return own_answer(target.model, list(prompt), LIMIT)


def make_prompts(bad_index: int) -> list[list[int]]:
    """Return prompts of several lengths, of which one fails."""
    prompts = []
    for seed in range(COUNT):
        tokens = random_tokens(3 + 2 * seed, seed=seed)
        prompts.append([token if token != BAD else 1 for token in tokens])
    prompts[bad_index] = [BAD, *random_tokens(BAD_LENGTH - 1, seed=9)]
    return prompts


def check_answers(
    target: Target,
    bad_index: int,
    traces: list[Trace],
    message: str,
) -> None:
    """Check that one sequence has its error and what it wrote before, and the others their whole answers."""
    for index, trace in enumerate(traces):
        # the untouched model, by itself
        expected = plain_answer(target, tuple(trace.prompt))
        if index == bad_index:
            assert trace.finish == "error"
            assert len(trace.tokens) < LIMIT
            assert trace.tokens == expected[: len(trace.tokens)]
            with pytest.raises(Exception, match=message):
                trace.checked()
        else:
            assert trace.tokens == expected
            assert trace.finish == "length"
            assert trace.checked().error is None


def answer_batch(
    target: Target,
    drafter: Drafter,
    bad_index: int,
    **options: Any,
) -> list[Trace]:
    """Answer the prompts, and check the warning that one failed."""
    options = {
        "max_new_tokens": LIMIT,
        "stop": [],
        "batch_size": 4,
        **options,
    }
    warning = rf"1 of {COUNT} sequences ended with an error, see trace\.error; prompt {bad_index}"
    with pytest.warns(RuntimeWarning, match=warning):
        return generate(target, drafter, make_prompts(bad_index), **options)


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize(
    "wrap",
    [
        Faulty,
        lambda fault: FirstOf([Faulty(fault), NgramDrafter()]),
        FaultyBatch,
    ],
    ids=["alone", "several", "batch"],
)
def test_a_faulty_draft_ends_its_own_sequence(
    wrap: Callable[[Fault], Drafter],
    kind: str,
    target: Target,
) -> None:
    """A drafter that cannot say whose error it was is asked row by row."""
    fault, message = FAULTS[kind]
    # the bad sequence is neither the first nor the last
    traces = answer_batch(target, wrap(fault), 1)
    check_answers(target, 1, traces, message)


@pytest.mark.parametrize("bad_index", [0, 3])
def test_the_bad_sequence_may_be_the_first_or_the_last(bad_index: int, target: Target) -> None:
    """In a batch of two, where later prompts take the row that it leaves; alone, its error is raised."""
    traces = answer_batch(target, FaultyBatch(fail), bad_index, batch_size=2)
    check_answers(target, bad_index, traces, "lost")
    prompt = make_prompts(bad_index)[bad_index]
    with pytest.raises(KeyError, match="lost"):
        generate(target, Faulty(fail), prompt, max_new_tokens=LIMIT, stop=[])


@pytest.mark.parametrize("call", [generate, stream])
def test_an_error_of_every_row_is_raised(call: Callable[..., Any], target: Target) -> None:
    """So is one that no row causes by itself."""

    class Broken(FaultyBatch):
        """Fail for every sequence at once."""

        def begin(self, noise: Noise | None = None) -> Any:
            """Return a state that fails in its first draft."""
            text = FaultyText(fail)
            # as if the sequence had come far enough to fail
            text.read = [BAD] * (BAD_LENGTH + 1)
            return text

    with pytest.raises(KeyError, match="lost"):
        list(call(target, Broken(fail), make_prompts(0), max_new_tokens=LIMIT, stop=[]))


@pytest.mark.parametrize("call", ["admit", "release"])
def test_a_row_that_cannot_begin_or_end(
    call: str,
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error is in its trace; an answer that was whole before stays whole."""
    original = getattr(PerSequenceState, call)

    def fail_for_one_row(state: PerSequenceState, row: int, *args: Any) -> None:
        original(state, row, *args)
        if row == 2:
            raise RuntimeError("no room")

    monkeypatch.setattr(PerSequenceState, call, fail_for_one_row)
    traces = answer_batch(target, NgramDrafter(), 2, batch_size=3)
    if call == "admit":
        check_answers(target, 2, traces, "no room")
    else:
        for trace in traces:
            assert trace.tokens == plain_answer(target, tuple(trace.prompt))
        assert str(traces[2].error) == "no room"


class Speller:
    """A tokenizer that cannot spell one token."""

    eos_token_id = None

    def __init__(self, unknown: int) -> None:
        self.unknown = unknown

    def decode(
        self,
        tokens: list[int],
        skip_special_tokens: bool = True,
    ) -> str:
        """Return one letter a token."""
        if self.unknown in tokens:
            raise UnicodeError(f"no spelling of {self.unknown}")
        return "".join(chr(0x4E00 + token) for token in tokens)


def test_a_text_that_cannot_be_spelt(target: Target) -> None:
    """Where a stop string is searched in what was written."""
    answers = [plain_answer(target, tuple(prompt)) for prompt in make_prompts(1)]
    known = {
        *answers[0],
        *answers[2],
        *answers[3],
    }
    unknown = next(token for token in answers[1] if token not in known)
    spelling = Target(copy.deepcopy(target.model), Speller(unknown))
    traces = answer_batch(spelling, NgramDrafter(), 1, stop=["x"])
    check_answers(spelling, 1, traces, f"no spelling of {unknown}")


class FailingPolicy:
    """A policy that fails for the sequence in row 0 after its first cycle, in one of its calls."""

    nodes = 3

    def __init__(self, call: str) -> None:
        self.call = call
        if call in ("share", "sampled"):
            self.share = self.share_budget

    def within(self, levels: int) -> Budget:
        """Return a budget; only the failing sequence has so many levels left."""
        if self.call == "within" and levels == LIMIT - 3:
            raise ZeroDivisionError("within")
        return Budget(3, 3).within(levels)

    def share_budget(
        self,
        levels: dict[int, int],
        contexts: dict[int, int],
    ) -> dict[int, Any]:
        """Return the budget of each row: none, or one that greedy decoding does not take."""
        budgets: dict[int, Any] = {}
        for row, level in levels.items():
            budgets[row] = Budget(3, 3).within(level)
        if 0 in budgets and contexts[0] > BAD_LENGTH:
            sampled = Budget.fixed(chain_paths(2), "sampled")
            budgets[0] = sampled if self.call == "sampled" else None
        return budgets

    def learn(self, cycle: Cycle) -> None:
        """Learn from a cycle; no other sequence is so short."""
        if self.call == "learn" and cycle.context == BAD_LENGTH + 1:
            raise ZeroDivisionError("learn")


@pytest.mark.parametrize("call", ["within", "learn", "sampled", "share"])
def test_a_policy_that_fails_for_one_sequence(call: str, target: Target) -> None:
    """What it decides for the others is used."""
    prompts = [random_tokens(30 + 2 * index, seed=index) for index in range(COUNT)]
    prompts[0] = random_tokens(BAD_LENGTH, seed=50)
    # so that no other row has as many levels left
    limits = [LIMIT, *[LIMIT - 4] * (COUNT - 1)]
    options: dict[str, Any] = {
        "max_new_tokens": limits,
        "stop": [],
        "batch_size": COUNT,
    }
    with pytest.warns(RuntimeWarning, match=f"1 of {COUNT} sequences ended with an error"):
        traces = generate(
            target,
            NoDrafter(),
            prompts,
            budget=FailingPolicy(call),
            **options,
        )
    for index, trace in enumerate(traces):
        expected = own_answer(target.model, trace.prompt, limits[index])
        if index == 0:
            assert trace.error is not None
            assert trace.tokens == expected[: len(trace.tokens)]
        else:
            assert trace.error is None
            assert trace.tokens == expected


SAMPLED = Sampling(1.0, seed=3)
SAMPLED_CHAIN = Budget.fixed(chain_paths(2), "sampled")
# each rule of verification meets the logits in another place
RULES: dict[str, tuple[Sampling, Budget | None]] = {
    "greedy": (Sampling(), None),
    "sampled": (SAMPLED, SAMPLED_CHAIN),
    "block": (Sampling(1.0, seed=3, rule="block"), SAMPLED_CHAIN),
    "typical": (
        Sampling(1.0, seed=3, typical=(0.09, 0.3)),
        Budget(3, 3, draw="likeliest"),
    ),
    "lenient": (Sampling(lenience=0.5), None),
}
MAKE_DRAFTER: dict[str, Callable[[Target], Drafter]] = {
    "eagle1": lambda target: new_head("eagle1", target),
    "ngram": lambda target: NgramDrafter(),
    # its drafts read the target's own cache
    "sparse_kv": lambda target: SparseKv(8, 2),
}


@pytest.mark.parametrize(
    ("rule", "drafter"),
    [
        *((rule, "eagle1") for rule in RULES),
        pytest.param("greedy", "ngram", marks=pytest.mark.slow),
        pytest.param("greedy", "sparse_kv", marks=pytest.mark.slow),
    ],
)
def test_logits_that_are_nan(rule: str, drafter: str) -> None:
    """The request that takes the row of the failed one does not read what it left there."""
    bad_index = 0
    prompts = make_prompts(bad_index)

    def spoil(module: Any, args: Any, embedded: Tensor) -> Tensor:
        # nan where the first three tokens of the bad prompt begin
        (tokens,) = args
        matches = [tokens.roll(-step, -1) == prompts[bad_index][step] for step in range(3)]
        begins = torch.stack(matches).all(0)
        return embedded.masked_fill(begins[..., None], float("nan"))

    model = build("llama")
    model.get_input_embeddings().register_forward_hook(spoil)
    sampling, budget = RULES[rule]

    def answer(target: Target) -> list[Trace]:
        options: dict[str, Any] = {
            "sampling": sampling,
            "budget": budget,
            "stop": [],
        }
        head = MAKE_DRAFTER[drafter](target)
        return generate(
            target,
            head,
            prompts,
            batch_size=2,
            max_new_tokens=LIMIT,
            **options,
        )

    warning = f"prompt {bad_index}: ValueError.*logits are nan after 7 tokens"
    with pytest.warns(RuntimeWarning, match=warning):
        # of prompts, two are answered at a time
        traces = answer(Target(model))
    assert traces[bad_index].tokens == []
    assert traces[bad_index].finish == "error"
    expected = answer(Target(build("llama")))
    for index in range(1, COUNT):
        assert traces[index].finish == "length"
        # coins of sampled drafts depend on the batch's history
        if budget is not SAMPLED_CHAIN:
            assert traces[index].tokens == expected[index].tokens


def test_a_sequence_that_reaches_the_limit_of_longrope(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sequences on either side of the limit go on, with drafts and without."""
    longrope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 40,
    }
    overrides = {"rope_parameters": longrope, "original_max_position_embeddings": 40}
    monkeypatch.setitem(FAMILIES, "longrope", ("llama", overrides))
    target = Target(build("longrope"))
    # 36 tokens and 10 new ones cross the limit of 40
    prompts = [random_tokens(length, seed=length) for length in (36, 50, 20, 12)]
    for drafter in (NoDrafter(), new_head("eagle1", target)):
        with pytest.warns(RuntimeWarning, match="cannot grow from 40 tokens to 41"):
            traces = generate(
                target,
                drafter,
                prompts,
                batch_size=3,
                max_new_tokens=LIMIT,
                stop=[],
            )
        check_answers(target, 0, traces, "keep prompt and max_new_tokens")


def test_a_draft_beyond_the_caches_limit(target: Target) -> None:
    """More nodes than the policy announced would break the limit of the whole batch."""

    # a policy of three nodes announced three
    def overflow(update: Committed) -> DraftTree:
        return DraftTree.from_paths(
            update.root,
            [[token] for token in range(50)],
        )

    options = {
        "max_tokens_in_cache": 120,
        "budget": Budget(3, 3),
        "batch_size": 3,
    }
    traces = answer_batch(target, Faulty(overflow), 1, **options)
    check_answers(target, 1, traces, "50 nodes, and the cache's limit leaves")


def test_an_error_of_the_forward_is_raised(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no single row's, and the target can be used again."""
    prompts = make_prompts(0)
    with monkeypatch.context() as patch:
        patch.setattr(target.reader, "masks", None)
        with pytest.raises(AttributeError):
            generate(target, NoDrafter(), prompts, max_new_tokens=LIMIT, stop=[])
    trace = generate(
        target,
        NoDrafter(),
        prompts[0],
        max_new_tokens=3,
        stop=[],
    )
    assert trace.tokens == own_answer(target.model, prompts[0], 3)


def test_full_memory_is_raised(target: Target) -> None:
    """It is no single row's, whichever row met it."""

    def exhaust(update: Committed) -> Any:
        raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError):
        generate(
            target,
            Faulty(exhaust),
            make_prompts(0),
            max_new_tokens=LIMIT,
            stop=[],
        )


def test_a_step_reports_sequences_that_failed(target: Target) -> None:
    """With no tokens, so that the caller knows that they have ended."""
    # a server would remove these requests
    decoding = Decoding(target, Faulty(fail), batch_size=4)
    traces = [Trace([]) for _ in range(COUNT)]
    for row, prompt in enumerate(make_prompts(2)):
        decoding.add(
            row,
            prompt,
            Sampling(),
            LIMIT,
            traces[row],
            stop=[],
        )
    ended = []
    while not decoding.is_done:
        for row, _ in decoding.step():
            if traces[row].finish != "running":
                ended.append(row)
    decoding.close()
    assert sorted(ended) == [0, 1, 2, 3]
    assert [trace.finish for trace in traces] == ["length", "length", "error", "length"]


def test_a_request_is_refused_before_it_shares_a_forward(target: Target) -> None:
    """Where it is added, and nothing of it waits."""
    decoding = Decoding(target, Faulty(fail), batch_size=4)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        decoding.add(0, [1, -1], Sampling(), LIMIT, Trace([]), stop=[])
    assert decoding.is_done


def test_a_measurement_of_costs_raises(target: Target) -> None:
    """It is made of whole answers."""
    options: dict[str, Any] = {
        "batch_sizes": (4,),
        "max_new_tokens": 30,
    }
    with pytest.raises(KeyError, match="lost"):
        Goodput.measure(
            target,
            Faulty(fail),
            make_prompts(1),
            Budget(2, 2),
            **options,
        )


def test_answers_to_learn_from_raise() -> None:
    """Training needs every answer."""
    model = build("llama")
    with torch.no_grad():
        # logits of the bad prompt are nan
        model.get_input_embeddings().weight[BAD] = float("nan")
    prompts = [torch.tensor(prompt) for prompt in make_prompts(1)]
    samplings = [Sampling()] * COUNT
    with pytest.warns(RuntimeWarning), pytest.raises(ValueError, match="logits are nan"):
        sample_answers(
            Target(model),
            prompts,
            [2] * COUNT,
            samplings=samplings,
            stops=[],
        )
