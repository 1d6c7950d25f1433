"""Beam search finds the answers and scores of transformers' own, whatever is drafted."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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
from eagle.decoding.beam import BeamResult
from eagle.decoding.beam_state import BeamState
from eagle.decoding.rows import Stops
from eagle.target.state import TargetState
from tests.batches import MAKE
from tests.families import VOCAB_SIZE, PlantedTrees, build, own_answer

# gemma2 caps its logits, and every other layer of it has a window
FAMILIES = ("llama", "qwen3", "gemma2", "gpt_neox")
# the model itself, as a draft model, is mostly right
DRAFTERS = ("none", "ngram", "eagle1", "draft_model", "draft_model", "ngram,eagle1")
TOLERANCE = 1e-5
# what transformers' generate also returns
SCORES = dict.fromkeys(("output_scores", "output_logits", "return_dict_in_generate"), True)


@cache
def make_target(family: str, dtype: torch.dtype = torch.float32) -> Target:
    """Return a tiny random model."""
    return Target(build(family, dtype))


@dataclass(frozen=True)
class Case:
    """A search, as eagle and transformers are asked for it."""

    target: Target
    drafter: str
    prompt: list[int]
    end_tokens: list[int]
    beams: int
    # named alike by both
    options: dict[str, Any]
    # of log-probabilities, by transformers' names
    changes: dict[str, Any]
    budget: Budget | None

    def make_processors(self) -> list[Any]:
        """Return the processors that change log-probabilities."""
        processors: list[Any] = []
        if "repetition_penalty" in self.changes:
            penalty = self.changes["repetition_penalty"]
            processors.append(RepetitionPenaltyLogitsProcessor(penalty))
        if "no_repeat_ngram_size" in self.changes:
            size = self.changes["no_repeat_ngram_size"]
            processors.append(NoRepeatNGramLogitsProcessor(size))
        if "min_new_tokens" in self.changes:
            count = self.changes["min_new_tokens"]
            length = len(self.prompt)
            processors.append(MinNewTokensLengthLogitsProcessor(length, count, self.end_tokens))
        return processors

    def search(self) -> BeamResult:
        """Search with eagle."""
        return beam_search(
            self.target,
            MAKE[self.drafter](self.target, []),
            self.prompt,
            beams=self.beams,
            stop=self.end_tokens,
            processors=self.make_processors(),
            budget=self.budget,
            **self.options,
        )

    def search_with_transformers(self) -> Any:
        """Search with the untouched model."""
        model: Any = self.target.model
        options = {**SCORES, **self.options, **self.changes}
        # with one beam it would decode greedily
        if self.beams == 1:
            options["custom_generate"] = type(model)._beam_search
        return model.generate(
            torch.tensor([self.prompt]),
            num_beams=self.beams,
            eos_token_id=self.end_tokens or None,
            pad_token_id=VOCAB_SIZE + 1,
            do_sample=False,
            **options,
        )

    def agrees(self, result: BeamResult) -> bool:
        """Return whether transformers finds the same answers, with the same scores."""
        expected = self.search_with_transformers()
        if result.tokens != list_answers(expected, len(self.prompt)):
            return False
        scores = expected.sequences_scores.tolist()
        return result.scores == pytest.approx(scores, rel=0, abs=TOLERANCE)


def list_answers(output: Any, prompt_length: int) -> list[list[int]]:
    """Return transformers' answers without prompt and padding."""
    answers = []
    lengths = (output.beam_indices >= 0).sum(1).tolist()
    for row, length in zip(output.sequences, lengths, strict=True):
        answers.append(row[prompt_length : prompt_length + length].tolist())
    return answers


def random_cases(
    count: int,
    seed: int,
    drafters: tuple[str, ...] = DRAFTERS,
) -> Iterator[Case]:
    """Yield searches of all kinds."""
    dice = random.Random(seed)
    for _ in range(count):
        end_tokens = dice.sample(
            range(VOCAB_SIZE),
            dice.choice([0, 1, 2, 6]),
        )
        beams = dice.randint(1, 6)
        # half of the searches change no log-probabilities
        changes: dict[str, Any] = {}
        if dice.random() < 0.3:
            changes["repetition_penalty"] = 1.3
        if dice.random() < 0.25:
            changes["no_repeat_ngram_size"] = 2
        if end_tokens and dice.random() < 0.5:
            changes["min_new_tokens"] = 4
        options = {
            "length_penalty": dice.choice([0.0, 0.5, 1.0, 2.0]),
            "early_stopping": dice.choice([False, True, "never"]),
            "num_return_sequences": dice.randint(1, beams),
            "max_new_tokens": dice.randint(1, 16),
        }
        yield Case(
            target=make_target(
                dice.choice(FAMILIES),
                dice.choice([torch.float32, torch.float64]),
            ),
            drafter=dice.choice(drafters),
            prompt=dice.choices(
                range(VOCAB_SIZE),
                k=dice.randint(1, 12),
            ),
            end_tokens=end_tokens,
            beams=beams,
            options=options,
            changes=changes,
            budget=dice.choice([None, Budget(8, 2, 4), Budget(12, 4, 3), Budget(0, 0, 0)]),
        )


@pytest.mark.slow
# transformers warns of options that it does not use with one beam
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("count", "seed"),
    [
        (40, 1),
        pytest.param(300, 2, marks=pytest.mark.long),
    ],
)
def test_answers_and_scores_are_transformers_own(count: int, seed: int) -> None:
    """All searches agree but for near ties, which are counted; drafts save forwards."""
    steps = 0
    forwards = 0
    for case in random_cases(count, seed):
        result = case.search()
        # rounding may exchange candidates whose scores are nearly equal
        assert case.agrees(result) or result.near_ties, (case, result)
        if case.drafter == "draft_model" and (case.budget is None or case.budget.nodes):
            steps += result.steps - 1
            forwards += result.forwards
    # of these 40 searches 1.39; short answers and small budgets save none
    assert steps > 1.2 * forwards


@pytest.mark.filterwarnings("ignore")
def test_a_planted_fault_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beams that attend to one another make some of a few searches differ."""
    # beams share a prefix in the cache, and are told apart by the mask alone
    read_ahead = TargetState.read_ahead

    def unmask(
        state: TargetState,
        rows: Any,
        tokens: Any,
        depths: Any,
        mask: Tensor,
    ) -> Any:
        return read_ahead(state, rows, tokens, depths, torch.ones_like(mask))

    monkeypatch.setattr(TargetState, "read_ahead", unmask)
    cases = random_cases(14, seed=4, drafters=("draft_model",))
    assert not all(case.agrees(case.search()) for case in cases)


@pytest.mark.parametrize(
    ("gap", "near_ties"),
    [(1e-6, 1), (1e-3, 0)],
)
def test_near_ties_are_counted(gap: float, near_ties: int) -> None:
    """Two candidates for the last beam that rounding could exchange, and two that it could not."""
    state = BeamState(2, Stops([], None, VOCAB_SIZE), limit=5)
    log_probs = torch.tensor([[-1.0, -2.0, -2.0 - gap, -7.0]] * 2)
    state.step(
        log_probs,
        torch.arange(4).expand(2, -1),
    )
    assert state.near_ties == near_ties


def test_a_likely_answer_that_has_ended_is_no_running_beam() -> None:
    """However far it is ahead of those that run on."""
    state = BeamState(2, Stops([3], None, VOCAB_SIZE), limit=5)
    log_probs = torch.tensor([[-0.1, -4.0, -5.0, -7.0]] * 2)
    state.step(log_probs, torch.tensor([3, 0, 1, 2]).expand(2, -1))
    assert state.answers[0] == [3]
    assert state.sequences == [[0], [1]]


def test_drafts_save_forwards() -> None:
    """One beam is the greedy answer, which is drafted."""
    target = make_target("llama")
    prompt = [1, 2, 3, 1, 2]
    drafter = PlantedTrees(prompt + own_answer(target.model, prompt, 10))
    result = beam_search(
        target,
        drafter,
        prompt,
        beams=1,
        max_new_tokens=10,
        stop=[],
    )
    assert result.steps_per_forward > 1


@pytest.mark.parametrize(
    ("early_stopping", "is_done"), [(True, True), (False, True), ("never", False)]
)
def test_a_search_ends_with_its_answers(early_stopping: Any, is_done: bool) -> None:
    """Once there are as many as beams; the one that runs on may still become better by its length."""
    state = BeamState(
        1,
        Stops([3], None, VOCAB_SIZE),
        limit=5,
        early_stopping=early_stopping,
    )
    state.step(torch.tensor([[-2.0, -1.0]]), torch.tensor([[0, 3]]))
    assert state.answers == [[3]]
    assert state.is_done == is_done


def test_the_prompt_is_stored_once_and_two_searches_do_not_mix() -> None:
    """The cache has one row for all beams, and another search in between changes nothing."""
    target = make_target("llama")
    drafter = load_drafter("ngram", target)
    options: dict[str, Any] = {
        "beams": 5,
        "max_new_tokens": 10,
        "stop": [],
    }
    first = beam_search(
        target,
        drafter,
        [1, 2, 3, 1, 2],
        **options,
    )
    assert target.spare is not None
    assert target.spare.cache.sizes[0] == 1
    beam_search(target, drafter, [1, 2, 7], **options)
    again = beam_search(
        target,
        drafter,
        [1, 2, 3, 1, 2],
        **options,
    )
    # less of the prompt is read again, so scores may round otherwise
    assert again.scores == pytest.approx(first.scores, abs=1e-5)
    assert replace(again, scores=first.scores) == first


class Letters:
    """A tokenizer of one letter a token."""

    eos_token_id = None

    def decode(
        self,
        tokens: list[int],
        skip_special_tokens: bool = True,
    ) -> str:
        """Return the letters."""
        return "".join(chr(ord("A") + token) for token in tokens)


class EndsWith(StoppingCriteria):
    """Stop after a string, by transformers' means."""

    def __init__(self, string: str) -> None:
        self.string = string

    def __call__(
        self,
        input_ids: Tensor,
        scores: Any,
        **unused: Any,
    ) -> Any:
        texts = [Letters().decode(row) for row in input_ids.tolist()]
        return torch.tensor([text.endswith(self.string) for text in texts])


@pytest.mark.slow
def test_stop_strings_end_an_answer() -> None:
    """As a stopping criterion of transformers that reads the same letters."""
    model: Any = build("llama")
    target = Target(model, Letters())
    drafter = load_drafter("none", target)
    prompt = [5, 6, 7]
    options = {"num_return_sequences": 3, "max_new_tokens": 12}
    free = beam_search(target, drafter, prompt, beams=3, **options)
    # what the best answer says in its middle
    string = Letters().decode(free.tokens[0][4:6])
    result = beam_search(
        target,
        drafter,
        prompt,
        beams=3,
        stop=string,
        **options,
    )
    expected = model.generate(
        torch.tensor([prompt]),
        num_beams=3,
        do_sample=False,
        stopping_criteria=[EndsWith(string)],
        **SCORES,
        **options,
    )
    assert result.tokens == list_answers(expected, len(prompt))
    assert result.tokens != free.tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_return_sequences": 5}, "num_return_sequences is 5, expected at most 4"),
        ({"prompt": [[1], [2]]}, "one prompt at a time"),
        ({"max_new_tokens": 300}, "max_new_tokens to 253"),
    ],
)
def test_searches_that_cannot_be_done_are_refused(options: dict[str, Any], message: str) -> None:
    """Values that fit their type and not each other or the model."""
    target = make_target("llama")
    arguments: dict[str, Callable[..., Any] | Any] = {
        "prompt": [1, 2, 3],
        **options,
    }
    with pytest.raises(ValueError, match=message):
        beam_search(target, load_drafter("none", target), **arguments)
