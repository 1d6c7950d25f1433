"""Beam search against transformers' own: answers and scores, whatever is drafted."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
)

from eagle import Budget, Target, beam_search, load_drafter
from eagle.core.drafter import Committed, Drafter, Noise
from eagle.core.tree import DraftTree
from eagle.decoding import beam_state
from eagle.decoding.beam import BeamResult, _Search
from eagle.decoding.beam_state import BeamState
from eagle.decoding.stops import Stops
from eagle.target.state import TargetState
from tests.batches import MAKE
from tests.families import VOCAB_SIZE, build

FAMILIES = (
    "llama",
    "qwen3",
    "gemma2",
    "gpt_neox",
)  # gemma2 bends its logits, and every other layer has a window
DRAFTERS = ("none", "ngram", "eagle1", "draft_model", "draft_model", "ngram,eagle1")
TOLERANCE = 1e-5


@cache
def target_of(family: str, dtype: torch.dtype) -> Target:
    """A tiny random model."""
    return Target(build(family, dtype))


@cache
def drafter_of(name: str, family: str, dtype: torch.dtype) -> Drafter:
    """A drafter of that model: among others the model itself, whose drafts are mostly right."""
    drafter: Drafter = MAKE[name](target_of(family, dtype), [])
    return drafter


@dataclass(frozen=True)
class Case:
    """A search, as both sides are asked for it."""

    family: str
    dtype: torch.dtype
    drafter: str
    prompt: list[int]
    ends: list[int]
    options: dict[str, Any]  # which both name alike
    changes: dict[str, Any] = field(default_factory=dict)  # of log-probs, by transformers' names
    budget: Budget | None = None

    @property
    def target(self) -> Target:
        """Its model."""
        return target_of(self.family, self.dtype)

    @property
    def processors(self) -> list[Any]:
        """What changes the log-probs."""
        made: dict[str, Callable[[Any], Any]] = {
            "repetition_penalty": RepetitionPenaltyLogitsProcessor,
            "no_repeat_ngram_size": NoRepeatNGramLogitsProcessor,
            "min_new_tokens": lambda count: MinNewTokensLengthLogitsProcessor(
                len(self.prompt), count, self.ends
            ),
        }
        return [made[name](value) for name, value in self.changes.items()]

    def ours(self) -> BeamResult:
        """What this project finds."""
        drafter = drafter_of(self.drafter, self.family, self.dtype)
        options = {
            "stop": self.ends,
            "processors": self.processors,
            "budget": self.budget,
            **self.options,
        }
        return beam_search(self.target, drafter, self.prompt, **options)

    def theirs(self) -> Any:
        """What transformers finds."""
        model: Any = self.target.model
        options = {**self.options, "num_beams": self.options["beams"], **self.changes}
        del options["beams"]
        if options["num_beams"] == 1:  # which it would not take for a search
            options["custom_generate"] = type(model)._beam_search
        asked = {
            "eos_token_id": self.ends or None,
            "pad_token_id": VOCAB_SIZE + 1,
            "do_sample": False,
        }
        told = dict.fromkeys(("output_scores", "output_logits", "return_dict_in_generate"), True)
        return model.generate(torch.tensor([self.prompt]), **asked, **told, **options)

    def is_equal(self, found: BeamResult) -> bool:
        """Whether what this project found is what transformers finds."""
        expected = self.theirs()
        tokens, scores = answers_of(expected, len(self.prompt)), expected.sequences_scores.tolist()
        close = all(
            abs(one - other) < TOLERANCE for one, other in zip(found.scores, scores, strict=True)
        )
        return found.tokens == tokens and close


def answers_of(output: Any, prompt: int) -> list[list[int]]:
    """The answers without prompt and padding."""
    lengths = (output.beam_indices >= 0).sum(1).tolist()
    return [
        row[prompt : prompt + length].tolist()
        for row, length in zip(output.sequences, lengths, strict=True)
    ]


def draw_cases(count: int, seed: int, drafters: tuple[str, ...] = DRAFTERS) -> Iterator[Case]:
    """Searches of all kinds."""
    dice = random.Random(seed)
    for _ in range(count):
        ends = dice.sample(range(VOCAB_SIZE), dice.choice([0, 1, 2, 6]))
        beams = dice.randint(1, 6)
        changes: dict[str, Any] = {
            "repetition_penalty": dice.choice([None, None, 1.3]),
            "no_repeat_ngram_size": dice.choice([None, None, None, 2]),
            "min_new_tokens": dice.choice([None, 4]) if ends else None,
        }
        options = {
            "beams": beams,
            "length_penalty": dice.choice([0.0, 0.5, 1.0, 2.0]),
            "early_stopping": dice.choice([False, True, "never"]),
            "num_return_sequences": dice.randint(1, beams),
            "max_new_tokens": dice.randint(1, 16),
        }
        yield Case(
            dice.choice(FAMILIES),
            dice.choice([torch.float32, torch.float64]),
            dice.choice(drafters),
            [dice.randrange(VOCAB_SIZE) for _ in range(dice.randint(1, 12))],
            ends,
            options,
            {name: value for name, value in changes.items() if value is not None},
            dice.choice([None, Budget(8, 2, 4), Budget(12, 4, 3), Budget(0, 0, 0)]),
        )


def check(cases: Iterator[Case]) -> None:
    """All are equal but for near ties, which are counted; and drafts of the model itself make forwards fewer."""
    near, other, total, steps, forwards = 0, 0, 0, 0, 0
    for case in cases:
        found = case.ours()
        equal = case.is_equal(found)
        assert equal or found.near_ties, (case, found)
        near, other, total = near + (found.near_ties > 0), other + (not equal), total + 1
        if case.drafter == "draft_model" and (case.budget is None or case.budget.nodes):
            steps, forwards = steps + found.steps - 1, forwards + found.forwards
    print(
        f"{total} searches, {near} with near ties, of which {other} differ; {steps} steps in {forwards} forwards"
    )
    assert steps > 1.5 * forwards


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # options that transformers does not use with one beam
def test_answers_and_scores_are_transformers_own() -> None:
    """Four families, six drafters, processors, end tokens and every kind of stopping."""
    check(draw_cases(40, seed=1))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.long
def test_many_searches_are_transformers_own() -> None:
    """As above."""
    check(draw_cases(500, seed=2))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_each_step_is_transformers_own() -> None:
    """The rule alone, fed with the log-probs of each of transformers' steps: the same beams, as many steps, no more."""
    for case in draw_cases(20, seed=3, drafters=("none",)):
        if case.options["beams"] == 1:
            continue
        expected = case.theirs()
        names = ("length_penalty", "early_stopping")
        options = {name: case.options[name] for name in names}
        stops, limit = Stops(case.ends, None, VOCAB_SIZE), case.options["max_new_tokens"]
        state = BeamState(case.options["beams"], stops, limit, **options)
        for rows in expected.scores:
            assert not state.is_done
            state.step(rows, torch.arange(VOCAB_SIZE).expand(len(rows), -1))
        assert state.is_done
        count = case.options["num_return_sequences"]
        assert state.answers[:count] == answers_of(expected, len(case.prompt))
        assert state.answer_scores[:count].equal(expected.sequences_scores)


def test_near_ties_are_counted() -> None:
    """Two candidates at the edge that rounding could exchange, and two that it could not."""
    for gap, near in ((1e-6, 1), (1e-3, 0)):
        state = BeamState(2, Stops([], None, VOCAB_SIZE), limit=5)
        state.step(
            torch.tensor([[-1.0, -2.0, -2.0 - gap, -7.0]] * 2), torch.arange(4).expand(2, -1)
        )
        assert state.near_ties == near


def no_end(patch: pytest.MonkeyPatch) -> None:
    """Beams go on from end tokens, which are drafted too."""
    patch.setattr(beam_state, "FAR", -0.0)


def not_normalised(patch: pytest.MonkeyPatch) -> None:
    """Logits of a node stand for its log-probs."""
    rank = _Search._rank
    shift = lambda log_probs: log_probs + 0.2 * torch.arange(len(log_probs))[:, None]  # noqa: E731
    patch.setattr(_Search, "_rank", lambda self, log_probs: rank(self, shift(log_probs)))


def merged_wrongly(patch: pytest.MonkeyPatch) -> None:
    """New answers push old ones out, however good."""
    choose = BeamState._choose_answers

    def forget(self: Any, texts: Any, scores: Tensor, ended: Tensor) -> bool:
        self.answer_scores[:] = beam_state.FAR
        return choose(self, texts, scores, ended)

    patch.setattr(BeamState, "_choose_answers", forget)


def stale_columns(patch: pytest.MonkeyPatch) -> None:
    """What beams need stays where it was read."""
    keep = TargetState.keep_columns

    def stay(self: Any, columns: Any, tokens: Any) -> None:
        keep(
            self,
            {
                row: [*kept[: len(tokens[row])], *range(len(tokens[row]), len(kept))]
                for row, kept in columns.items()
            },
            tokens,
        )

    patch.setattr(TargetState, "keep_columns", stay)


def unmasked(patch: pytest.MonkeyPatch) -> None:
    """Beams see one another."""
    ahead = TargetState.ahead
    patch.setattr(
        TargetState,
        "ahead",
        lambda self, rows, tokens, depths, seen: ahead(
            self, rows, tokens, depths, torch.ones_like(seen)
        ),
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("plant", [no_end, not_normalised, merged_wrongly, stale_columns, unmasked])
def test_faults_are_seen(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kind of fault makes some of a few searches differ from transformers' own."""
    plant(monkeypatch)
    cases = [
        case
        for case in draw_cases(14, seed=4, drafters=("draft_model",))
        if case.options["max_new_tokens"] > 3
    ]
    assert not all(case.is_equal(case.ours()) for case in cases)


class Witness(Drafter):
    """Drafts nothing right, and holds what it is told against the model's own plain forward."""

    taps = (1, -1)

    def __init__(self, target: Target) -> None:
        self.target, self.told = target, 0

    def begin(self, noise: Noise | None = None) -> Any:
        """Nothing is known."""
        return WitnessText(self)


class WitnessText:
    """What was told of one beam."""

    def __init__(self, drafter: Witness) -> None:
        self.drafter, self.tokens, self.features = drafter, list[int](), torch.empty(0)

    def propose(self, update: Committed, budget: Budget) -> DraftTree:
        """A random pair of children."""
        drafter = self.drafter
        self.tokens += update.tokens.tolist()
        assert update.features is not None and len(update.features) == len(update.tokens)
        self.features = torch.cat(
            [self.features.reshape(-1, *update.features.shape[1:]), update.features]
        )
        expected = drafter.target.features(torch.tensor([self.tokens]), drafter.taps)[0]
        assert torch.allclose(self.features, expected, atol=1e-4)
        drafter.told += 1
        return DraftTree.from_paths(update.root, [[len(self.tokens) % 7], [update.root]])


def test_a_drafter_is_told_each_beams_own_tokens_and_features() -> None:
    """Through forks and releases, of beams that part early and late."""
    target = target_of("llama", torch.float32)
    witness = Witness(target)
    found = beam_search(target, witness, [3, 1, 4, 1, 5], beams=4, max_new_tokens=12, stop=[])
    assert witness.told > 4 * found.forwards - 4
    assert beam_search(target, witness, [3], beams=3, max_new_tokens=5, stop=[]).steps == 5


def test_the_shared_text_is_stored_once_and_two_searches_do_not_mix() -> None:
    """One row of the cache whatever the beams; a search between two others changes nothing."""
    target = target_of("llama", torch.float32)
    drafter = load_drafter("ngram", target)
    options: dict[str, Any] = {"beams": 5, "max_new_tokens": 10, "stop": []}
    first = beam_search(target, drafter, [1, 2, 3, 1, 2], **options)
    assert target.spare is not None and target.spare.cache.sizes[0] == 1
    beam_search(target, drafter, [1, 2, 7], **options)
    again = beam_search(target, drafter, [1, 2, 3, 1, 2], **options)
    # less of the prompt is read anew, which may round otherwise
    assert replace(again, scores=first.scores) == first and again.scores == pytest.approx(
        first.scores, abs=1e-5
    )


class Letters:
    """A tokenizer of one letter a token."""

    eos_token_id = None

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        """The letters."""
        return "".join(chr(ord("A") + token) for token in tokens)


class EndsWith(StoppingCriteria):
    """Stops behind a string."""

    def __init__(self, string: str) -> None:
        self.string = string

    def __call__(self, input_ids: Tensor, scores: Any, **unused: Any) -> Any:
        return torch.tensor(
            [Letters().decode(row).endswith(self.string) for row in input_ids.tolist()]
        )


@pytest.mark.slow
def test_stop_strings_end_an_answer() -> None:
    """As a criterion of transformers that reads the same letters."""
    model: Any = build("llama")
    target, options = Target(model, Letters()), {"num_return_sequences": 3, "max_new_tokens": 12}
    none, prompt = load_drafter("none", target), [5, 6, 7]
    free = beam_search(target, none, prompt, beams=3, **options)
    for answer in free.tokens:
        string = Letters().decode(answer[4:6])
        found = beam_search(target, none, prompt, beams=3, stop=string, **options)
        told = dict.fromkeys(("output_scores", "output_logits", "return_dict_in_generate"), True)
        criteria = [EndsWith(string)]
        expected = model.generate(
            torch.tensor([prompt]),
            num_beams=3,
            do_sample=False,
            stopping_criteria=criteria,
            **told,
            **options,
        )
        assert found.tokens == answers_of(expected, len(prompt)) != free.tokens


def test_what_cannot_be_searched_is_refused_in_words() -> None:
    """What was given, what was expected, what to do."""
    target = target_of("llama", torch.float32)
    none = load_drafter("none", target)
    search: Callable[..., Any] = beam_search
    for words, options in {
        "beams is 0": {"beams": 0},
        "num_return_sequences is 5, expected at most 4": {"num_return_sequences": 5},
        "early_stopping is 'soon', expected True, False or 'never'": {"early_stopping": "soon"},
        "one prompt at a time": {"prompt": [[1], [2]]},
        "max_new_tokens to 253": {"max_new_tokens": 300},
        "the prompt is empty": {"prompt": []},
        "the drafter is": {"drafter": "none"},
    }.items():
        asked = {"target": target, "drafter": none, "prompt": [1, 2, 3], **options}
        with pytest.raises(ValueError, match=words):
            search(**asked)
