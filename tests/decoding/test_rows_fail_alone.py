"""An error that one text of a batch causes ends that text alone: its neighbours answer as the untouched model does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle import Budget, Sampling, Target, Trace, generate, stream
from eagle.core.drafter import Committed, Drafter, EachText, Noise
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

BAD = 77  # the prompt that begins with this token is the one whose drafts fail
COUNT, LIMIT = 4, 10
Tree = Callable[[Committed, list[int]], Any]


class FaultyText:
    """Drafts the text's own tokens again, and from the second draft on does what it must not."""

    def __init__(self, fault: Tree) -> None:
        self.fault, self.read, self.calls = fault, list[int](), 0

    def propose(self, update: Committed, budget: Budget) -> Any:
        """A chain, or the fault."""
        self.read += update.tokens.tolist()
        self.calls += 1
        if self.read[0] == BAD and self.calls > 1:
            return self.fault(update, self.read)
        return DraftTree.chain([update.root, *self.read[:2]][: budget.depth + 1])


class Faulty(Drafter):
    """One text's drafts fail."""

    def __init__(self, fault: Tree) -> None:
        self.fault = fault

    def begin(self, noise: Noise | None = None) -> Any:
        """A new text."""
        return FaultyText(self.fault)


class FaultyTogether(Faulty):
    """All texts are drafted for in one call, which fails as a whole."""

    taps = (1,)

    def open(self) -> Any:
        """The rows."""
        return Together(self)


class Together(EachText):
    """Raises without a word on which row it was, and leaves the others half told."""

    def propose(
        self, updates: Mapping[int, Committed], budgets: Mapping[int, Budget]
    ) -> dict[int, DraftTree]:
        """One after the other, and no attempt to tell them apart."""
        for update in updates.values():
            assert update.features is not None and len(update.features) == len(update.tokens)
        return {
            row: self.texts[row].propose(update, budgets[row]) for row, update in updates.items()
        }


def fail(update: Committed, read: list[int]) -> Any:
    """An error of the drafter's own."""
    raise KeyError("lost")


FAULTS: dict[str, tuple[Tree, str]] = {
    "raises": (fail, "lost"),
    "outside": (
        lambda update, read: DraftTree.chain([update.root, VOCAB_SIZE]),
        r"the draft holds token ids \[96\], expected 0\.\.95",
    ),
    "negative": (
        lambda update, read: DraftTree.chain([update.root, -3]),
        r"token ids \[-3\], expected 0\.\.95",
    ),
    "another root": (
        lambda update, read: DraftTree.chain([(update.root + 1) % VOCAB_SIZE, 3]),
        r"the draft's root is token \d+, expected \d+.*update\.root",
    ),
    "no tree": (lambda update, read: None, r"the drafter proposed no tree, expected a DraftTree"),
    "a list": (
        lambda update, read: [update.root],
        r"the drafter proposed a list, expected a DraftTree",
    ),
    "too deep": (
        lambda update, read: DraftTree.chain([update.root, *[1] * 300]),
        r"the draft has 300 levels, expected at most \d+: draft within budget\.depth",
    ),
    "draft_probs": (
        lambda update, read: DraftTree.chain([update.root, 3], torch.ones(2, 5) / 5),
        r"probs are \[2, 5\], expected those of 96 tokens for each of 2 nodes",
    ),
}


@pytest.fixture(scope="module")
def target() -> Target:
    """A llama of random weights."""
    return Target(build("llama"))


@cache
def plain_answer(target: Target, prompt: tuple[int, ...]) -> list[int]:
    """The untouched model's own answer."""
    return own_answer(target.model, list(prompt), LIMIT)


def prompts_with(place: int, length: int = 6) -> list[list[int]]:
    """Prompts of several lengths; that at `place` is the one that fails."""
    prompts = [random_tokens(3 + 2 * number, seed=number) for number in range(COUNT)]
    prompts = [[token if token != BAD else 1 for token in prompt] for prompt in prompts]
    prompts[place] = [BAD, *random_tokens(length, seed=9)]
    return prompts


def check_neighbours(target: Target, place: int, traces: list[Trace], message: str) -> None:
    """The failed text keeps what it had and its error; the others are the untouched model's own."""
    prompts = [trace.prompt for trace in traces]
    for number, (prompt, trace) in enumerate(zip(prompts, traces, strict=True)):
        own = plain_answer(target, tuple(prompt))
        if number == place:
            assert trace.finish == "error" and len(trace.tokens) < LIMIT
            assert trace.tokens == own[: len(trace.tokens)]
            with pytest.raises(Exception, match=message):
                trace.checked()
        else:
            assert (
                trace.tokens == own and trace.finish == "length" and trace.checked().error is None
            )


def run(
    target: Target, drafter: Drafter, place: int, batch_size: int, **options: Any
) -> list[Trace]:
    """A batch in which the text at `place` fails, with the warning that says so."""
    options = {"max_new_tokens": LIMIT, "stop": [], **options}
    with pytest.warns(
        RuntimeWarning,
        match=rf"1 of {COUNT} texts ended with an error, see trace\.error; prompt {place}",
    ):
        return generate(target, drafter, prompts_with(place), batch_size=batch_size, **options)


@pytest.mark.parametrize("place", [0, 1, 3])
@pytest.mark.parametrize("kind", FAULTS)
def test_a_faulty_draft_ends_its_own_text(kind: str, place: int, target: Target) -> None:
    """At any place of a batch of two or four; a drafter that cannot say whose error it was is asked row by row."""
    fault, message = FAULTS[kind]
    for drafter in (Faulty(fault), FirstOf([Faulty(fault), NgramDrafter()])):
        check_neighbours(
            target, place, run(target, drafter, place, 4 if place == 1 else 2), message
        )
    with pytest.raises(Exception, match=message):
        generate(target, Faulty(fault), prompts_with(place)[place], max_new_tokens=LIMIT, stop=[])


class FaultsOfTexts(FaultyText):
    """Fails by what the text holds, not by how often it was asked."""

    def propose(self, update: Committed, budget: Budget) -> Any:
        """The fault once a few tokens are committed."""
        self.calls = len(self.read) + len(update.tokens) - 8
        return super().propose(update, budget)


@pytest.mark.parametrize("place", [0, 1, 3])
@pytest.mark.parametrize("kind", FAULTS)
def test_a_state_for_all_rows_is_asked_row_by_row(
    kind: str, place: int, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error may be any row's; new states read the texts whole, with the states that they tap."""
    monkeypatch.setattr(Faulty, "begin", lambda self, noise=None: FaultsOfTexts(self.fault))
    fault, message = FAULTS[kind]
    check_neighbours(
        target, place, run(target, FaultyTogether(fault), place, 4 if place == 1 else 2), message
    )


def test_an_error_of_every_row_is_raised(target: Target) -> None:
    """So is one that no row causes by itself."""

    class Broken(FaultyTogether):
        """Fails whoever asks."""

        def begin(self, noise: Noise | None = None) -> Any:
            """A text that fails at once."""
            text = FaultyText(fail)
            text.read, text.calls = [BAD], 1
            return text

    with pytest.raises(KeyError, match="lost"):
        generate(target, Broken(fail), prompts_with(0), max_new_tokens=LIMIT, stop=[])
    with pytest.raises(KeyError, match="lost"):
        list(stream(target, Broken(fail), prompts_with(0), max_new_tokens=LIMIT, stop=[]))


@pytest.mark.parametrize("call", ["admit", "release"])
def test_a_row_that_cannot_begin_or_end(call: str, target: Target) -> None:
    """Of a state for all rows."""

    class Rows(EachText):
        """Fails for one row."""

        def admit(self, row: int, noise: Noise | None = None) -> None:
            """Begin."""
            if (call, row) == ("admit", 2):
                raise RuntimeError("no room")
            super().admit(row, noise)

        def release(self, row: int) -> None:
            """End."""
            super().release(row)
            if (call, row) == ("release", 2):
                raise RuntimeError("no room")

    class Drafts(NgramDrafter):
        """With these rows."""

        def open(self) -> Any:
            """The rows."""
            return Rows(self)

    traces = run(target, Drafts(), 2, batch_size=3)
    if call == "admit":
        check_neighbours(target, 2, traces, "no room")
    else:
        assert [trace.tokens for trace in traces] == [
            plain_answer(target, tuple(t.prompt)) for t in traces
        ]
        assert str(traces[2].error) == "no room"


class Speller:
    """A tokenizer that cannot spell some text."""

    eos_token_id = None

    def __init__(self, unknown: int) -> None:
        self.unknown = unknown

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        """Letters."""
        if self.unknown in tokens:
            raise UnicodeError(f"no spelling of {self.unknown}")
        return "".join(chr(0x4E00 + token) for token in tokens)


@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_text_that_cannot_be_spelt(place: int, target: Target) -> None:
    """Where a stop string is looked for in what was written."""
    prompts = prompts_with(place)
    answers = [own_answer(target.model, prompt, LIMIT) for prompt in prompts]
    others = {token for number, answer in enumerate(answers) for token in answer if number != place}
    unknown = next(token for token in answers[place] if token not in others)
    spelt = Target(copy.deepcopy(target.model), Speller(unknown))
    check_neighbours(
        spelt, place, run(spelt, NgramDrafter(), place, 4, stop=["x"]), f"no spelling of {unknown}"
    )


@pytest.mark.quick("within-0", "within-1", "within-3", "draw-0")
@pytest.mark.parametrize("place", [0, 1, 3])
@pytest.mark.parametrize("call", ["within", "learn", "draw", "no budget"])
def test_a_policy_that_fails_for_one_text(call: str, place: int, target: Target) -> None:
    """A policy that decides for each text; an error in what it decides for all is raised."""
    length = 11  # of the prompt that fails, as none of the others is after the first cycle

    class Policy:
        """Fails where the text is of one length."""

        nodes = 3

        def __init__(self) -> None:
            self.share = self.share_out if call in ("draw", "no budget") else None
            self.count = 0

        def within(self, levels: int) -> Budget:
            """The budget."""
            if call == "within" and levels == LIMIT - 3:  # which only the failing text comes to
                raise ZeroDivisionError("within")
            return Budget(3, 3).within(levels)

        def share_out(self, levels: dict[int, int], contexts: dict[int, int]) -> dict[int, Any]:
            """The budget of each row."""
            budgets: dict[int, Any] = {
                row: Budget(3, 3).within(most) for row, most in levels.items()
            }
            if place in budgets and contexts[place] > length:
                budgets[place] = (
                    None if call == "no budget" else Budget.fixed(chain_paths(2), "sampled")
                )
            return budgets

        def learn(self, cycle: Cycle) -> None:
            """The outcome of a cycle."""
            if call == "learn" and cycle.context == length + 1:
                raise ZeroDivisionError("learn")

    prompts = [random_tokens(30 + 2 * number, seed=number) for number in range(COUNT)]
    prompts[place] = random_tokens(length, seed=50)
    limits = [LIMIT] * COUNT
    if call == "within":
        limits = [LIMIT - 4] * COUNT
        limits[place] = LIMIT
    options: dict[str, Any] = {
        "budget": Policy(),
        "max_new_tokens": limits,
        "stop": [],
        "batch_size": 4,
    }
    with pytest.warns(RuntimeWarning, match=rf"1 of {COUNT} texts ended with an error"):
        traces = generate(target, NoDrafter(), prompts, **options)
    for number, trace in enumerate(traces):
        own = own_answer(target.model, trace.prompt, limits[number])
        assert (trace.error is not None) == (number == place)
        assert trace.tokens == own[: len(trace.tokens)] and (trace.tokens == own or number == place)


SAMPLINGS: dict[str, tuple[Sampling, Budget | None]] = {
    "greedy": (Sampling(), None),
    "noise": (Sampling(1.0, seed=3), None),
    "filtered": (Sampling(1.0, top_k=5, top_p=0.9, seed=3), None),
    "drawn": (Sampling(1.0, seed=3), Budget.fixed(chain_paths(2), "sampled")),
    "block": (Sampling(1.0, seed=3, rule="block"), Budget.fixed(chain_paths(2), "sampled")),
    "typical": (Sampling(1.0, seed=3, typical=(0.09, 0.3)), Budget(3, 3, draw="likeliest")),
    "lenient": (Sampling(lenience=0.5), None),
}


@pytest.mark.quick("typical-3", "lenient-3")
@pytest.mark.parametrize(
    ("kind", "place"),
    [("greedy", 0), *((kind, 3) for kind in SAMPLINGS)]
    + [pytest.param(kind, 0, marks=pytest.mark.slow) for kind in SAMPLINGS if kind != "greedy"],
)
def test_logits_that_are_no_numbers(kind: str, place: int) -> None:
    """Of one text, in its prompt or later; what follows in its slot is untouched by what it left there."""
    model, prompts = build("llama"), prompts_with(place)

    def spoil(module: Any, args: Any, embedded: Tensor) -> Tensor:
        """No number where the prompt of the text that fails begins."""
        (tokens,) = args
        begins = torch.stack(
            [tokens.roll(-step, -1) == prompts[place][step] for step in range(3)]
        ).all(0)
        return embedded.masked_fill(begins[..., None], float("nan"))

    model.get_input_embeddings().register_forward_hook(spoil)
    clean, target = Target(build("llama")), Target(model)
    sampling, budget = SAMPLINGS[kind]
    options: dict[str, Any] = {
        "sampling": sampling,
        "budget": budget,
        "stop": [],
        "max_new_tokens": LIMIT,
    }
    drafters: list[Callable[[Target], Drafter]] = [lambda target: new_head("eagle1", target)]
    if kind == "greedy":
        drafters += [lambda target: NgramDrafter(), lambda target: SparseKv(8, 2)]
    for make in drafters:
        with pytest.warns(
            RuntimeWarning,
            match=rf"1 of 4 .* prompt {place}: ValueError.*logits are nan after 7 tokens",
        ):
            traces = generate(target, make(target), prompts, batch_size=2, **options)
        assert traces[place].tokens == [] and traces[place].finish == "error"
        expected = generate(clean, make(clean), prompts, batch_size=2, **options)
        for number in set(range(COUNT)) - {place}:
            if kind in ("greedy", "noise", "filtered", "lenient", "typical"):
                assert traces[number].tokens == expected[number].tokens
            assert traces[number].finish == "length"


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 40,
}


@pytest.mark.quick("0")
@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_text_that_reaches_the_border_of_longrope(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a batch, with drafts and without; texts on either side of it go on."""
    overrides = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 40}
    monkeypatch.setitem(FAMILIES, "longrope", ("llama", overrides))
    target = Target(build("longrope"))
    prompts = [random_tokens(length, seed=length) for length in (5, 50, 20, 12)]
    prompts[place] = random_tokens(36, seed=1)
    for drafter in (NoDrafter(), NgramDrafter(), new_head("eagle1", target)):
        with pytest.warns(RuntimeWarning, match="cannot grow from 40 tokens to 41"):
            traces = generate(target, drafter, prompts, batch_size=3, max_new_tokens=LIMIT, stop=[])
        check_neighbours(
            target,
            place,
            traces,
            "cannot grow from 40 tokens to 41: keep prompt and max_new_tokens",
        )


def test_a_draft_beyond_the_caches_limit(target: Target) -> None:
    """More nodes than the policy said it asks for would break the limit of all texts."""

    def overflow(update: Committed, read: list[int]) -> DraftTree:
        """Fifty nodes under the root."""
        return DraftTree.from_paths(update.root, [[token] for token in range(50)])

    traces = run(target, Faulty(overflow), 1, 3, max_tokens_in_cache=120, budget=Budget(3, 3))
    check_neighbours(
        target, 1, traces, r"the draft has 50 nodes, and the cache's limit leaves \d+: draft within"
    )


def test_an_error_of_the_forward_is_everyones(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is raised, and the target is as good as new."""
    monkeypatch.setattr(target.reader, "masks", None)
    with pytest.raises(AttributeError):
        generate(target, NoDrafter(), prompts_with(0), max_new_tokens=LIMIT, stop=[])
    monkeypatch.undo()
    prompt = prompts_with(0)[0]
    assert generate(target, NoDrafter(), prompt, max_new_tokens=3, stop=[]).tokens == own_answer(
        target.model, prompt, 3
    )


def test_memory_that_is_full_is_no_rows_own(target: Target) -> None:
    """Whichever row met it."""

    def exhaust(update: Committed, read: list[int]) -> Any:
        """No memory."""
        raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError):
        generate(target, Faulty(exhaust), prompts_with(0), max_new_tokens=LIMIT, stop=[])


def test_a_step_tells_of_texts_that_failed(target: Target) -> None:
    """With no tokens, so that who asked knows that they have ended."""
    decoding = Decoding(target, Faulty(fail), batch_size=4)
    traces = [Trace([]) for _ in range(COUNT)]
    for number, prompt in enumerate(prompts_with(2)):
        decoding.add(number, prompt, Sampling(), LIMIT, traces[number], stop=[])
    ended = list[int]()
    while not decoding.is_done:
        ended += [number for number, _ in decoding.step() if traces[number].finish != "running"]
    decoding.close()
    assert sorted(ended) == [0, 1, 2, 3]
    assert [trace.finish for trace in traces] == ["length", "length", "error", "length"]


def test_who_needs_every_answer_raises(target: Target) -> None:
    """Costs and samples to learn from are made of whole answers."""
    with pytest.raises(KeyError, match="lost"):
        Goodput.measure(
            target, Faulty(fail), prompts_with(1), Budget(2, 2), batch_sizes=(4,), max_new_tokens=30
        )
    model = build("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[BAD] = float("nan")
    prompts, count = [torch.tensor(prompt) for prompt in prompts_with(1)], COUNT
    with pytest.warns(RuntimeWarning), pytest.raises(ValueError, match="logits are nan"):
        sample_answers(Target(model), prompts, [2] * count, [Sampling()] * count, [])
