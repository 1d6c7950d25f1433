"""Where an answer ends, what is counted, and how it is returned."""

from __future__ import annotations

from math import log
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

import eagle
from eagle import Budget, Target, Trace, generate, stream
from eagle.core.drafter import Committed
from eagle.core.trace import Cycle
from eagle.core.tree import DraftTree
from eagle.decoding.decode import NewTokens
from eagle.drafters.none import NoDrafter
from tests.families import VOCAB_SIZE, PlantedTrees, build, own_answer, random_tokens

PROMPT = random_tokens(20, seed=3)
MODEL = build("llama")
LIMIT = 48
ANSWER = own_answer(MODEL, PROMPT, LIMIT)
# three planted tokens and the target's own, per cycle
COMMITTED = 4


class Deaf(PlantedTrees):
    """Draft as deep as it likes."""

    def propose(self, update: Committed, budget: Budget) -> DraftTree:
        """Return the same three right tokens, whatever the budget."""
        return super().propose(update, Budget())


def answer(
    target: Target,
    max_new_tokens: int = LIMIT,
    **options: Any,
) -> Trace:
    """Answer with three accepted tokens in each cycle."""
    drafter = PlantedTrees(PROMPT + ANSWER)
    return generate(
        target,
        drafter,
        PROMPT,
        max_new_tokens=max_new_tokens,
        **options,
    )


def find_new_token(indices: range, phase: int) -> int:
    """Return the first index, `phase` tokens into a cycle, whose token the answer has not held before."""
    for index in indices:
        is_in_phase = (index - 1) % COMMITTED == phase
        if is_in_phase and ANSWER[index] not in ANSWER[:index]:
            return index
    raise AssertionError("the answer repeats itself")


@pytest.fixture(scope="module")
def target() -> Target:
    """Return a llama with a tokenizer of two letters a token."""
    vocabulary = {}
    for token in range(VOCAB_SIZE):
        spelling = chr(ord("a") + token // 10) + chr(ord("A") + token % 10)
        vocabulary[spelling] = token
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="aA"))
    tokenizer.decoder = decoders.Fuse()
    return Target(MODEL, PreTrainedTokenizerFast(tokenizer_object=tokenizer))


@pytest.mark.parametrize("phase", range(COMMITTED))
def test_a_stop_token_cuts_the_draft_it_stands_in(target: Target, phase: int) -> None:
    """It is the last token; what was accepted after it is neither returned nor counted."""
    # a stop token counts where it first appears
    index = find_new_token(range(8, 40), phase)
    trace = answer(target, stop=[ANSWER[index]])
    assert trace.tokens == ANSWER[: index + 1]
    assert trace.finish == "stop"
    whole_cycles = (index - 1) // COMMITTED
    committed = [cycle.committed for cycle in trace.cycles]
    assert committed == [COMMITTED] * whole_cycles + [phase + 1]
    assert trace.cycles[-1].accepted == COMMITTED - 1
    assert trace.acceptance_length == index / len(trace.cycles)


def test_the_earliest_of_several_stops_counts(target: Target) -> None:
    """In whatever order they are given, tokens and strings."""
    early = find_new_token(range(8, 20), 1)
    late = find_new_token(range(20, 40), 2)
    assert answer(target, stop=[ANSWER[late], ANSWER[early]]).tokens == ANSWER[: early + 1]
    string = target.tokenizer.decode(ANSWER[early])
    assert answer(target, stop=[ANSWER[late], string]).tokens == ANSWER[: early + 1]
    # the first token comes without a cycle
    trace = answer(target, stop=[ANSWER[early], ANSWER[0]])
    assert trace.tokens == ANSWER[:1]
    assert trace.finish == "stop"
    assert trace.cycles == []


def test_without_stop_the_targets_own_tokens_end_the_answer() -> None:
    """The generation config's end tokens are the default; an empty list switches them off."""
    index = find_new_token(range(8, 40), 1)
    target = Target(build("llama"))
    target.model.generation_config.eos_token_id = [95, ANSWER[index]]
    assert answer(target).tokens == ANSWER[: index + 1]
    assert answer(target, stop=[]).tokens == ANSWER


@pytest.mark.parametrize("count", [1, 2, 7, 8])
@pytest.mark.parametrize("kind", [PlantedTrees, Deaf])
def test_max_new_tokens_cuts_inside_a_draft(
    target: Target,
    kind: type[PlantedTrees],
    count: int,
) -> None:
    """Tokens beyond it are not counted, whatever is drafted."""
    drafter = kind(PROMPT + ANSWER)
    trace = generate(target, drafter, PROMPT, max_new_tokens=count, stop=[])
    assert trace.tokens == ANSWER[:count]
    assert trace.finish == "length"
    assert sum(cycle.committed for cycle in trace.cycles) == count - 1
    # six tokens after the first: four, and two of the next four
    if kind is Deaf and count == 7:
        counts = [(cycle.accepted, cycle.committed) for cycle in trace.cycles]
        assert counts == [(3, 4), (3, 2)]
        assert trace.acceptance_length == 3.0


def test_a_stop_at_the_last_token_is_a_stop(target: Target) -> None:
    """Where an answer ends for both reasons, the stop is reported."""
    index = find_new_token(range(8, 40), 3)
    trace = answer(
        target,
        max_new_tokens=index + 1,
        stop=[ANSWER[index]],
    )
    assert trace.tokens == ANSWER[: index + 1]
    assert trace.finish == "stop"


@pytest.mark.parametrize("phase", range(COMMITTED))
def test_a_stop_string_may_span_tokens(target: Target, phase: int) -> None:
    """The answer ends with the token that completes the string, its text before the string begins."""
    text = target.tokenizer.decode(ANSWER)
    # a token's last letter and the next one's first, which the text has not held before
    starts = range(2 * phase + 17, len(text), 2 * COMMITTED)
    start = next(start for start in starts if text.index(text[start : start + 2]) == start)
    string = text[start : start + 2]
    trace = answer(target, stop=["never said", string])
    assert trace.tokens == ANSWER[: start // 2 + 2]
    assert trace.finish == "stop"
    assert trace.stop_string == string
    assert trace.text == text[:start]
    assert "".join(piece for piece, _ in trace.pieces()) == text[:start]
    # plain decoding ends there as well, and a string by itself is no list of letters
    plain = generate(
        target,
        NoDrafter(),
        PROMPT,
        max_new_tokens=LIMIT,
        stop=string,
    )
    assert plain.tokens == trace.tokens
    assert plain.text == trace.text
    assert answer(target, stop=["never said"]).text == text


def test_text_needs_a_tokenizer() -> None:
    """The error says what to read instead."""
    trace = answer(Target(MODEL), stop=[])
    with pytest.raises(ValueError, match=r"no tokenizer.*read trace\.tokens"):
        _ = trace.text


@pytest.mark.parametrize("start", [16, 17])
def test_streaming_yields_what_generate_returns(target: Target, start: int) -> None:
    """Tokens come as they are committed, with their text; none of it belongs to the stop string."""
    text = target.tokenizer.decode(ANSWER)
    options: dict[str, Any] = {
        "max_new_tokens": LIMIT,
        "stop": [text[start : start + 5]],
    }
    trace = Trace()
    drafter = PlantedTrees(PROMPT + ANSWER)
    # text that may belong to the stop string is held back
    chunks: list[NewTokens] = list(stream(target, drafter, PROMPT, trace=trace, **options))
    tokens = [token for chunk in chunks for token in chunk]
    assert tokens == trace.tokens == answer(target, **options).tokens
    sizes = [len(chunk) for chunk in chunks if chunk]
    assert sizes == [1, *(cycle.committed for cycle in trace.cycles)]
    assert all(isinstance(chunk, list) for chunk in chunks)
    said = "".join(chunk.text for chunk in chunks)
    assert said == trace.text == text[: text.index(text[start : start + 5])]


def test_prints_are_short(target: Target) -> None:
    """In a notebook."""
    shown = repr(answer(target, stop=[ANSWER[4]]))
    assert shown.startswith("Trace(20 prompt tokens, ")
    assert "stop" in shown
    assert len(shown) < 160
    described = "LlamaForCausalLM, 4 layers of width 32, 96 tokens, float32 on cpu"
    assert described in repr(target)
    assert {"generate", "stream", "Target"} <= set(dir(eagle))


def test_timing_gives_the_seconds_of_each_phase(target: Target) -> None:
    """Four for each cycle when asked for, and none otherwise."""
    for cycle in answer(target, max_new_tokens=12, stop=[], timing=True).cycles:
        assert cycle.seconds is not None
        assert list(cycle.seconds) == ["draft", "target", "verify", "other"]
        assert min(cycle.seconds.values()) > 0
    untimed = answer(target, max_new_tokens=12)
    assert {cycle.seconds is None for cycle in untimed.cycles} == {True}


def test_without_drafts_each_forward_commits_one_token(target: Target) -> None:
    """The baseline's acceptance length is one, and the first token comes from the prompt's forward."""
    trace = generate(
        target,
        NoDrafter(),
        PROMPT,
        max_new_tokens=LIMIT,
        stop=[],
    )
    assert trace.tokens == ANSWER
    assert trace.prompt == PROMPT
    assert trace.acceptance_length == 1.0
    assert len(trace.cycles) == LIMIT - 1
    for cycle in trace.cycles:
        assert cycle.nodes == 0
        assert cycle.accepted == 0


def test_a_cycle_knows_ranks_and_confidence() -> None:
    """By hand: a root with three children, the second of them accepted, and the first of its two."""
    half = log(0.5)
    third = log(0.3)
    # of each node's path
    likelihoods = torch.tensor([0.0, half, third, log(0.1), third + half, third + log(0.25)])
    tokens = torch.tensor([9, 1, 2, 3, 4, 5])
    parents = torch.tensor([-1, 0, 0, 0, 2, 2])
    tree = DraftTree(tokens, parents, likelihoods=likelihoods)
    cycle = Cycle(tree, (2, 4), 3, 7)
    assert (cycle.nodes, cycle.depth, cycle.accepted) == (5, 2, 2)
    assert cycle.path == [1, 0]
    confidence, is_accepted = zip(*cycle.confidence, strict=True)
    assert confidence == pytest.approx((0.5, 0.3, 0.1, 0.5, 0.25))
    assert is_accepted == (False, True, False, True, False)
    # a drafter without likelihoods
    assert Cycle(DraftTree.chain([9, 1]), (1,), 2, 7).confidence == []
